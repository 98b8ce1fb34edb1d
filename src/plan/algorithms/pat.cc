#include "plan/algorithms/pat.h"

#include <algorithm>
#include <bit>
#include <utility>
#include <vector>

#include "plan/common.h"
#include "plan/host_table.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// x from 0 to hosts - 1, in windows, and in these far distances first.
std::vector<int> gather_order(int hosts, std::uint32_t slots) {
  const int window = static_cast<int>(2 * std::bit_floor(std::min<std::uint32_t>(slots, 1 << 20)));
  std::vector<int> order;
  for (int base = 0; base < hosts; base += window) {
    const std::size_t first = order.size();
    order.push_back(base);
    for (int distance = window / 2; distance >= 1; distance /= 2) {
      const std::size_t end = order.size();
      for (std::size_t i = first; i < end; ++i) {
        if (order[i] + distance < hosts) order.push_back(order[i] + distance);
      }
    }
  }
  return order;
}

class PatProgram {
 public:
  PatProgram(const PlanRequest& request, const PlanLimits& limits, const Rails& rails)
      : rails_(rails),
        order_(gather_order(rails.hosts(), limits.guaranteed_slots)),
        ahead_(limits.guaranteed_slots - 1),
        program_(request.ranks, request.rank) {}

  void write(Plan* plan) {
    const Kind kind = plan->geometry.kind;
    const bool scatters = reduces(kind), gathers = kind != Kind::kReduceScatter;
    if (scatters) reduce_scatter(gathers);
    if (gathers) all_gather(scatters);
    program_.write(plan);
  }

 private:
  // The block of the host that is x in front, of a rail: its owner is its part.
  int block(int x, int rail) const {
    return rails_.rank_at((rails_.host() - x + rails_.hosts()) % rails_.hosts(), rail);
  }
  int mate(int rail) const { return rails_.rank_at(rails_.host(), rail); }
  // From whom the block comes, or to whom its sum goes.
  PeerRanks above(int x) const { return PeerRanks::one(block(x & -x, rails_.rail())); }
  // Who has it from here, and all mates.
  PeerRanks below(int x) const {
    std::vector<int> ranks = rails_.mates();
    const int least = x == 0 ? rails_.hosts() : x & -x;
    for (int distance = 1; distance < least && x + distance < rails_.hosts(); distance *= 2) {
      ranks.push_back(rails_.rank_at((rails_.host() + distance) % rails_.hosts(), rails_.rail()));
    }
    return PeerRanks::set(std::move(ranks));
  }

  void all_gather(bool has_result) {
    for (std::size_t i = 0; i < order_.size() + ahead_; ++i) {
      if (i < order_.size() && !(i == 0 && has_result)) {
        const int x = order_[i];
        const PeerRanks to = below(x);
        const unsigned into = to.ranks().empty() ? 0u : unsigned{kIntoOutput};
        const unsigned from_input = x == 0 ? unsigned{kLocal} : 0u;
        program_.add(kCopy | into | from_input, block(x, rails_.rail()),
                     x == 0 ? PeerRanks::nobody() : above(x), to);
      }
      if (i < ahead_ || i - ahead_ >= order_.size()) continue;
      for (const int rail : rails_.other_rails()) {
        program_.add(kCopy, block(order_[i - ahead_], rail), PeerRanks::one(mate(rail)));
      }
    }
  }

  // sends_result: to all who have it from here.
  void reduce_scatter(bool sends_result) {
    const std::vector<int> order(order_.rbegin(), order_.rend());
    for (std::size_t i = 0; i < order.size() + ahead_; ++i) {
      for (const int rail : rails_.other_rails()) {
        if (i >= order.size()) break;
        program_.add(kLocal | kContribute, block(order[i], rail), PeerRanks::nobody(),
                     PeerRanks::one(mate(rail)));
      }
      if (i >= ahead_ && i - ahead_ < order.size()) add_up(order[i - ahead_], sends_result);
    }
  }
  void add_up(int x, bool sends_result) {
    const PeerRanks from = below(x);
    unsigned flags = kLocal | kContribute;
    if (!from.ranks().empty()) flags |= kReduce | kPartials;
    if (x != 0) return program_.add(flags, block(x, rails_.rail()), from, above(x));
    flags |= kFinish | kCopy;
    const bool sends = sends_result && !from.ranks().empty();
    program_.add(flags | (sends ? unsigned{kIntoOutput} : 0u), block(x, rails_.rail()), from,
                 sends ? from : PeerRanks::nobody());
  }

  const Rails rails_;
  const std::vector<int> order_;
  const std::size_t ahead_;  // blocks sent to a mate in front of the one that it takes
  ProgramBuilder program_;
};

// Sets are of mates with so many hosts at distances 1, 2, 4, …; and a rank has two neighbours at
// each distance.
std::string sets_error(const Rails& rails) {
  const int distances = std::bit_width(static_cast<unsigned>(rails.hosts() - 1));
  const int sets = distances + (rails.rails() > 1 ? 1 : 0);
  if (sets > kMostSets) {
    const int most = 1 << (kMostSets - (rails.rails() > 1 ? 1 : 0));
    return "pat plans serve at most " + std::to_string(most) +
           (rails.rails() > 1 ? " hosts of several ranks" : " ranks on as many hosts, or on one") +
           ", here are " + std::to_string(rails.hosts());
  }
  const int most = kMostNeighbours - std::min(2 * distances, rails.hosts() - 1);
  if (rails.rails() - 1 <= most) return "";
  return "pat plans serve at most " + std::to_string(most + 1) + " ranks on each of " +
         std::to_string(rails.hosts()) + " hosts, here are " + std::to_string(rails.rails());
}

}  // namespace

bool pat_serves(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kAllGather || kind == Kind::kReduceScatter ||
         kind == Kind::kBarrier;
}

std::optional<Plan> plan_pat(const PlanRequest& request, const PlanLimits& limits,
                             std::string* error) {
  const bool two_ways = request.kind == Kind::kAllReduce || request.kind == Kind::kBarrier;
  std::string problem = planner_error(request, limits, "pat", pat_serves(request.kind),
                                      two_ways ? kMinPatSlots : 1, kMaxLinearRanks);
  if (problem.empty()) problem = rails_error(request, "pat");
  std::optional<Rails> rails;
  if (problem.empty()) {
    const bool one_host = request.hosts == nullptr || request.hosts->hosts() == 1;
    rails = one_host ? Rails::single(request.ranks, request.rank)
                     : Rails(request.hosts, request.ranks, request.rank);
    problem = sets_error(*rails);
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  plan.geometry.chunk = slot_chunk(limits, plan.geometry);
  assign_bulk_lanes(request, limits, limits.device == Device::kCuda ? 0 : 1, &plan.geometry);
  PatProgram(request, limits, *rails).write(&plan);
  return plan;
}

}  // namespace unjam
