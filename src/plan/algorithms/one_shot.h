// The one-shot planner: every rank sends straight to every rank that needs its data, in packets.
// One hop instead of the ring's N-1 or 2(N-1), at the price of up to N/2 times its bytes: for small
// sizes, and for groups of at most 64 ranks. In reductions every rank receives the raw
// contributions and adds them in ascending order of rank, so all ranks hold the same bits.
//
// A chunk is one slice, as much as a guaranteed slot holds of it: half of it is flags, or, of long
// messages on GPUs, one word in 8 (Protocol::kPacket, kLine). A rank waits for nothing before it
// has sent, so one slot per connector is enough. On the host one-shot plans use the latency lane
// (lane 0) alone; on a GPU as many as a message has stretches for blocks, or half of all, see
// leave_room(); which ones is the invocation's affair, see spread_lanes().
#pragma once

#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinOneShotSlots = 1;  // guaranteed slots, see above

bool one_shot_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_one_shot(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error = nullptr);

}  // namespace unjam
