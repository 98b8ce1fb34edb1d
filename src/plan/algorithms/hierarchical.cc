#include "plan/algorithms/hierarchical.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "plan/algorithms/trees.h"
#include "plan/common.h"
#include "plan/host_table.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

class HierarchicalProgram {
 public:
  HierarchicalProgram(const PlanRequest& request, const Rails& rails, int parts)
      : rails_(rails), parts_(parts), program_(request.ranks, request.rank) {}

  void write(Plan* plan) {
    for (const int rail : rails_.other_rails()) {
      program_.add(kLocal | kContribute, rail, PeerRanks::nobody(),
                   PeerRanks::one(rails_.rank_at(rails_.host(), rail)));
    }
    for (int part = 0; part < parts_; ++part) {
      if (is_own(part)) up(part);
    }
    for (const int part : order_of_results()) take(part);
    program_.write(plan);
  }

 private:
  // Of more than one rail each has a part; one has all, a tree each.
  bool is_own(int part) const { return rails_.rails() == 1 || part == rails_.rail(); }
  // What lags most comes last; but the own part first, for which others wait, if another one lags
  // as much.
  std::vector<int> order_of_results() const {
    std::vector<int> order;
    for (int part = 0; part < parts_; ++part) order.push_back(part);
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      return std::pair(node(a).depth, a) < std::pair(node(b).depth, b);
    });
    const int deepest = node(order.back()).depth;
    const auto own = std::find_if(order.begin(), order.end(), [&](int p) { return is_own(p); });
    const bool others_as_deep = std::any_of(
        order.begin(), order.end(), [&](int p) { return p != *own && node(p).depth == deepest; });
    if (others_as_deep) std::rotate(order.begin(), own, own + 1);
    return order;
  }
  // Hosts.
  TreeNode node(int part) const {
    return double_tree_node(part % kTwoTrees, rails_.host(), rails_.hosts());
  }
  // The same rail's ranks at the children, and all mates.
  PeerRanks below(const TreeNode& here) const {
    std::vector<int> ranks = rails_.mates();
    for (const int child : here.children) {
      if (child != kNoNode) ranks.push_back(rails_.rank_at(child, rails_.rail()));
    }
    return PeerRanks::set(std::move(ranks));
  }
  PeerRanks above(const TreeNode& here) const {
    return PeerRanks::one(rails_.rank_at(here.parent, rails_.rail()));
  }

  void up(int part) {
    const TreeNode here = node(part);
    const bool top = here.parent == kNoNode;
    const PeerRanks from = below(here);
    unsigned flags = kLocal | kContribute;
    if (!from.ranks().empty()) flags |= kReduce | kPartials;
    if (top) flags |= kFinish | kCopy;
    if (top && !from.ranks().empty()) flags |= kIntoOutput;
    program_.add(flags, part, from, top ? from : above(here));
  }

  // The result of a part: of the own one from above, of others from their owners in this host.
  void take(int part) {
    const TreeNode here = node(part);
    const auto lag = static_cast<std::uint32_t>(here.depth);
    if (!is_own(part)) {
      const int owner = rails_.rank_at(rails_.host(), part);
      program_.add(kCopy, part, PeerRanks::one(owner), PeerRanks::nobody(), lag);
    } else if (here.parent != kNoNode) {
      const PeerRanks to = below(here);
      const unsigned into = to.ranks().empty() ? 0u : unsigned{kIntoOutput};
      program_.add(kCopy | into, part, above(here), to, lag);
    }
  }

  const Rails rails_;
  const int parts_;
  ProgramBuilder program_;
};

// On the rail a rank has at most so many neighbours: a parent, two children.
constexpr int kTreeNeighbours = 3;

std::string neighbours_error(const Rails& rails) {
  const int most = kMostNeighbours - std::min(kTreeNeighbours, rails.hosts() - 1);
  if (rails.rails() - 1 <= most) return "";
  return "hierarchical plans serve at most " + std::to_string(most + 1) +
         " ranks on a host, here are " + std::to_string(rails.rails());
}

}  // namespace

bool hierarchical_serves(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kBarrier; }

std::optional<Plan> plan_hierarchical(const PlanRequest& request, const PlanLimits& limits,
                                      std::string* error) {
  std::string problem = planner_error(request, limits, "hierarchical",
                                      hierarchical_serves(request.kind), kMinHierarchicalSlots);
  if (problem.empty()) problem = rails_error(request, "hierarchical");
  std::optional<Rails> rails;
  if (problem.empty()) {
    rails.emplace(request.hosts, request.ranks, request.rank);
    problem = neighbours_error(*rails);
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(rails->rails()));
  plan.geometry.chunk = slot_chunk(limits, plan.geometry);
  assign_bulk_lanes(request, limits, limits.device == Device::kCuda ? 0 : 1, &plan.geometry);
  if (rails->rails() == 1 && plan.geometry.lanes >= kTwoTrees && request.ranks > 1) {
    plan.geometry.parts = kTwoTrees;
    plan.geometry.by_lane = true;
  }
  HierarchicalProgram(request, *rails, static_cast<int>(plan.geometry.parts)).write(&plan);
  return plan;
}

}  // namespace unjam
