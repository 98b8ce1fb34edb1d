#include "plan/algorithms/double_binary_tree.h"

#include <utility>
#include <vector>

#include "plan/algorithms/trees.h"
#include "plan/common.h"

namespace unjam {
namespace {

class TreeProgram {
 public:
  TreeProgram(const PlanRequest& request, int trees)
      : kind_(request.kind),
        ranks_(request.ranks),
        rank_(request.rank),
        root_(request.root),
        trees_(trees),
        program_(request.ranks, request.rank) {}

  ProgramBuilder build() && {
    if (ranks_ == 1) {
      program_.add(reduces(kind_) ? kLocal | kCopy | kContribute | kFinish : kLocal | kCopy, 0);
    } else {
      for (int t = 0; t < trees_ && reduces(kind_); ++t) up(t);
      if (kind_ != Kind::kReduce) down();
    }
    return std::move(program_);
  }

 private:
  bool is_rooted() const { return whole_at_root(kind_); }
  TreeNode node(int tree) const {
    return is_rooted() ? rooted_tree_node(tree, rank_, root_, ranks_)
                       : double_tree_node(tree, rank_, ranks_);
  }
  static PeerRanks children(const TreeNode& node) {
    std::vector<int> ranks;
    for (const int child : node.children) {
      if (child != kNoNode) ranks.push_back(child);
    }
    return PeerRanks::set(std::move(ranks));
  }

  // Who is on top has the result. (Of an all-reduce it sends it down at once, and the others lag
  // behind it.)
  void up(int tree) {
    const TreeNode here = node(tree);
    const bool top = here.parent == kNoNode;
    unsigned flags = kLocal | kContribute;
    if (here.num_children() != 0) flags |= kReduce | kPartials;
    if (top) flags |= kFinish | kCopy;
    if (top && !is_rooted()) flags |= kIntoOutput;
    const PeerRanks below = children(here);
    const PeerRanks result_to = is_rooted() ? PeerRanks::nobody() : below;
    program_.add(flags, tree, below, top ? result_to : PeerRanks::one(here.parent));
  }

  // What lags most comes last.
  void down() {
    const bool first_is_deeper = trees_ == kTwoTrees && node(0).depth > node(1).depth;
    for (int i = 0; i < trees_; ++i) down(first_is_deeper ? 1 - i : i);
  }
  void down(int tree) {
    const TreeNode here = node(tree);
    const unsigned into = here.num_children() != 0 ? unsigned{kIntoOutput} : 0u;
    if (here.parent != kNoNode) {
      program_.add(kCopy | into, tree, PeerRanks::one(here.parent), children(here),
                   static_cast<std::uint32_t>(here.depth));
    } else if (is_rooted()) {
      program_.add(kLocal | kCopy | into, tree, PeerRanks::nobody(), children(here));
    }
  }

  const Kind kind_;
  const int ranks_, rank_, root_, trees_;
  ProgramBuilder program_;
};

}  // namespace

bool double_binary_tree_serves(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kBarrier || whole_at_root(kind);
}

ProgramBuilder double_binary_tree_program(const PlanRequest& request, int trees) {
  return TreeProgram(request, trees).build();
}

std::optional<Plan> plan_double_binary_tree(const PlanRequest& request, const PlanLimits& limits,
                                            std::string* error) {
  const std::string problem =
      planner_error(request, limits, "double_binary_tree", double_binary_tree_serves(request.kind),
                    kMinDoubleTreeSlots);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, 1);
  plan.geometry.chunk = slot_chunk(limits, plan.geometry);
  assign_bulk_lanes(request, limits, 1, &plan.geometry);
  int trees = 1;
  if (plan.geometry.lanes >= kTwoTrees && request.ranks > 1) {
    trees = kTwoTrees;
    plan.geometry.parts = kTwoTrees;
    plan.geometry.by_lane = true;
  }
  double_binary_tree_program(request, trees).write(&plan);
  return plan;
}

}  // namespace unjam
