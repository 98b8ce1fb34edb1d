// The pairwise planner: kinds in which each piece of data goes from one rank to one other, straight
// and through slots, a pair of ranks at a time: all-to-all, gather, scatter and send/recv, for
// groups of up to 1,024 ranks. Every byte travels once. A slice may be as large as a slot that is
// free.
//
// All-to-all: in step k = 1 … N-1 rank r sends to r+k and receives from r-k, so no receiver is
// crowded. A chunk is at most what the guaranteed slots of a connector hold; why these are enough:
// docs/internals/slots-enough.md. Gather, scatter and send/recv have no cycle, so one slot is
// enough whatever the chunk. The root of a gather takes its peers' chunks in turn; they fill their
// connectors meanwhile.
#pragma once

#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinPairwiseSlots = 1;  // guaranteed slots, see above

bool pairwise_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_pairwise(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error = nullptr);

}  // namespace unjam
