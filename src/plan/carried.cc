#include "plan/carried.h"

#include <algorithm>

#include "plan/common.h"
#include "program/schedule.h"

namespace unjam {
namespace {

// With more lanes blocks that store straight into outputs fill links, and copying from slots costs
// more than it spares (`unjam bench --dma on,off --in-place`, rows of 1 GiB).
constexpr std::uint32_t kMostCopyingLanes = 8;

// Of these some rank sends its input unchanged, and blocks see to what comes: they add it up, or
// copy it from slots, for copy engines may not write into peers' outputs (engine/copy_ring.h).
// Other kinds have plans that are not lowered (plan/lower.h), or whose ranks hand on what they
// receive.
bool is_served(Kind kind, std::uint32_t lanes) {
  const bool copies = kind == Kind::kAllGather || kind == Kind::kBroadcast;
  if (copies) return lanes <= kMostCopyingLanes;
  return kind == Kind::kAllReduce || kind == Kind::kReduceScatter || kind == Kind::kReduce;
}

// What copies and nothing else; or what is stored in the own output as well, which in place it
// lies in already.
bool only_sends(const Primitive& p) {
  constexpr unsigned kSent = kLocal | kScatter | kContribute | kSend | kCopy | kIntoOutput;
  return (p.flags & kSend) != 0 && (p.flags & ~kSent) == 0;
}

}  // namespace

bool may_be_carried(const PlanRequest& request, const PlanLimits& limits, Algorithm algorithm) {
  // (All ranks have fewer lanes, those that mark nothing too. An average of floats is scaled before
  // it is sent. Plans of larger groups are the engine's, whose blocks move everything: they had
  // better be many.)
  constexpr int kMost = kMostPlaces;
  return limits.carried_lanes != 0 && limits.device == Device::kCuda && request.ranks > 1 &&
         request.ranks <= kMost && algorithm == Algorithm::kRsag &&
         is_served(request.kind, carried_limits(limits).lanes) && request.op != Op::kAvg &&
         request.count * dtype_bytes(request.dtype) >= limits.carried_from;
}

PlanLimits carried_limits(const PlanLimits& limits) {
  PlanLimits fewer = limits;
  fewer.lanes = std::min(limits.lanes, limits.carried_lanes);
  return fewer;
}

void mark_carried(const PlanLimits& limits, Plan* plan) {
  plan->geometry.chunk = chunk_elements(limits.guaranteed_slot_bytes, plan->geometry);
  for (Primitive& p : plan->primitives) {
    if (!only_sends(p)) continue;
    p.flags = static_cast<std::uint16_t>(p.flags | static_cast<unsigned>(Carrier::kCopyEngine));
  }
}

}  // namespace unjam
