// The ring planner: bandwidth-optimal plans of all-reduce, all-gather and reduce-scatter for groups
// of up to 1,024 ranks (and of the barrier, which is an all-reduce of one element). Reduce and
// broadcast go down a ring that is cut open at the root: chain.h.
//
// Ranks form a ring in group order. All N parts travel at the same time: part p starts at rank p+1,
// is reduced on the way round, is complete at rank p, and (for all-reduce) is copied on from there.
// So each part is reduced once, along one fixed path, and all ranks hold the same bits.
//
// A chunk holds at most (slots-1) slots: docs/internals/slots-enough.md. Chunks are the largest
// that this allows: a larger one costs no pipelining, and makes fewer passes over the program.
#pragma once

#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinRingSlots = 2;  // guaranteed slots, see above

bool ring_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_ring(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error = nullptr);

}  // namespace unjam
