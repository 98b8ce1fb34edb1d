#include "plan/carried.h"

#include <algorithm>

#include "plan/common.h"
#include "program/schedule.h"

namespace unjam {
namespace {

// Of these each rank sends its contributions, and what blocks do besides is to add up what comes.
// (In other kinds what is sent is copied into the own output as well, or goes straight into the
// peer's, which copy engines may not write: engine/copy_ring.h.)
bool is_served(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kReduceScatter; }

// What copies and nothing else.
bool only_sends(const Primitive& p) {
  constexpr unsigned kSent = kLocal | kScatter | kContribute | kSend;
  return (p.flags & kSend) != 0 && (p.flags & ~kSent) == 0;
}

}  // namespace

bool may_be_carried(const PlanRequest& request, const PlanLimits& limits, Algorithm algorithm) {
  // (Of rsag plans all ranks have such a primitive, so that all ask for fewer lanes. An average of
  // floats is scaled before it is sent. Plans of larger groups are the engine's, whose blocks move
  // everything: they had better be many.)
  constexpr int kMost = kMostPlaces;
  return limits.carried_lanes != 0 && limits.device == Device::kCuda && request.ranks > 1 &&
         request.ranks <= kMost && algorithm == Algorithm::kRsag && is_served(request.kind) &&
         request.op != Op::kAvg &&
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
