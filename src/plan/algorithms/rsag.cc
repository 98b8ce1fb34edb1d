#include "plan/algorithms/rsag.h"

#include <algorithm>

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// In plans of one hop, all of whose slices are pairs: what is sent in a slice is looked for so many
// slices later, at most.
constexpr std::uint32_t kPassesApart = 3;

// Each primitive that receives works on what was sent passes ago. Together: and what only sends,
// which is first, goes with what only receives, which is last. (Not with a root: its two hops go
// over different connectors, and what is last may send.)
void overlap(Kind kind, const PlanLimits& limits, std::vector<Primitive>* program) {
  std::vector<Primitive>& p = *program;
  const auto hops = static_cast<std::uint32_t>(std::count_if(p.begin(), p.end(), from_set));
  if (!limits.overlap || hops == 0 || p.size() == 1) return;
  const std::uint32_t distance = overlap_distance(hops, limits.guaranteed_slots);
  const bool together = limits.together && !has_root(kind);
  if (!together || distance == 0 || !to_set(p.front())) {
    std::uint32_t lag = 0;
    for (Primitive& q : p) {
      if (from_set(q)) lag += distance;
      q.lag = lag & kMostLag;
    }
    return;
  }
  std::rotate(p.begin(), p.begin() + 1, p.end() - 1);
  if (hops == 2) p.front().lag = (distance + 1) & kMostLag;
  p.back().lag =
      (hops == 2 ? 2 * distance + 1 : std::min(limits.guaranteed_slots - 1, kPassesApart)) &
      kMostLag;
  p[p.size() - 2].flags |= kWithNext;
}

// Whose part is empty, see rsag.h.
std::uint16_t empty_part(const PlanRequest& request) {
  if (request.ranks == 1 || !whole_at_root(request.kind)) return kNoPart;
  const bool reduces = request.kind == Kind::kReduce;
  return static_cast<std::uint16_t>(reduces && request.ranks == 2 ? 1 - request.root
                                                                  : request.root);
}

class RsagProgram {
 public:
  explicit RsagProgram(const PlanRequest& request)
      : kind_(request.kind),
        ranks_(request.ranks),
        rank_(request.rank),
        root_(request.root),
        program_(request.ranks, request.rank) {}

  void write(Plan* plan) {
    make();
    program_.write(plan);
  }

 private:
  static constexpr unsigned kResult = kLocal | kCopy | kContribute | kFinish;

  void make() {
    if (ranks_ == 1) return program_.add(reduces(kind_) ? kResult : kLocal | kCopy, 0);
    const bool is_root = rank_ == root_, pair = ranks_ == 2;
    switch (kind_) {
      case Kind::kAllReduce:
      case Kind::kBarrier:
        scatter();
        gather(kResult | kIntoOutput, others());
        return collect();
      case Kind::kReduceScatter:
        scatter();
        return gather(kResult);
      case Kind::kAllToAll:
        scatter();
        own();
        return collect();
      case Kind::kGather:
        if (!is_root) return program_.add(kLocal | kIntoOutput, rank_, nobody(), root());
        own();
        return collect();
      case Kind::kScatter:
        if (!is_root) return program_.add(kCopy, rank_, root());
        scatter();
        return own();
      case Kind::kBroadcast:
        if (is_root) return scatter(kCopy | kIntoOutput);
        if (pair) return program_.add(kCopy, rank_, root());
        program_.add(kCopy | kIntoOutput, rank_, root(), program_.all_others(root_));
        return collect();
      case Kind::kReduce:
        if (pair) return is_root ? gather(kResult) : scatter();
        scatter();
        if (is_root) return collect();
        return gather((kResult & ~kCopy) | kIntoOutput, root());
      default:
        program_.add(kLocal | kCopy | kIntoOutput, rank_, nobody(), others());
        return collect();
    }
  }

  static PeerRanks nobody() { return PeerRanks::nobody(); }
  PeerRanks root() const { return PeerRanks::one(root_); }
  PeerRanks others() const { return program_.all_others(); }
  void own() { program_.add(kLocal | kCopy, rank_); }
  void scatter(unsigned more = 0) { program_.add(kLocal | kScatter | more, 0, nobody(), others()); }
  void collect() { program_.add(kCollect | kCopy, 0, others()); }
  void gather(unsigned flags, PeerRanks to = PeerRanks::nobody()) {
    program_.add(flags | kReduce, rank_, others(), std::move(to));
  }

  const Kind kind_;
  const int ranks_, rank_, root_;
  ProgramBuilder program_;
};

}  // namespace

bool rsag_serves(Kind kind) { return reduces(kind) || blocked(kind) || whole_at_root(kind); }

std::optional<Plan> plan_rsag(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error) {
  const std::string problem =
      several_peers_error(request, limits, "rsag", rsag_serves(request.kind), kMinRsagSlots);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  plan.geometry.empty_part = empty_part(request);
  plan.geometry.chunk = slot_chunk(limits, plan.geometry);
  // On a GPU a bulk plan takes every block: links and memory are what it shares with small calls.
  assign_bulk_lanes(request, limits, limits.device == Device::kCuda ? 0 : 1, &plan.geometry);
  RsagProgram(request).write(&plan);
  overlap(request.kind, limits, &plan.primitives);
  if (limits.overlap && request.ranks > 1) even_chunks(&plan.geometry);
  return plan;
}

}  // namespace unjam
