// The two-shot planner: an all-reduce of middling size on GPUs, straight between all pairs in
// packets, in two hops. Rank p owns part p: everybody sends it their contribution to that part
// (scatter), it adds them in ascending order of rank, so that all ranks hold the same bits, and
// sends the result to everybody (collect). Of b bytes among n ranks a rank sends 2 (n-1)/n b, where
// a one-shot plan sends (n-1) b. Packets are worth it while a call is short, which needs no engine
// then (kernels/call_by_packets.cuh).
//
// A chunk is one slice of each part, as much as a guaranteed slot holds of packets or lines, and
// two slots are enough, by the rsag plan's argument (docs/internals/plan-checker.md). The result
// makes a second hop, with other flags (kSecondHop). Lanes are as many as give a thread one unit of
// each part, or half of all.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinTwoShotSlots = 2;  // guaranteed slots, see above

bool two_shot_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_two_shot(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error = nullptr);

}  // namespace unjam
