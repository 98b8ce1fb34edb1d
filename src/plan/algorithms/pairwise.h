// The pairwise planner: kinds in which each piece of data goes from one rank to one other, straight
// and through slots, a pair of ranks at a time: all-to-all, gather, scatter and send/recv, for
// groups of up to 1,024 ranks. Every byte travels once. A slice may be as large as a slot that is
// free, so chunks are larger than an rsag plan's, which moves one guaranteed slot to all peers at
// once.
//
// All-to-all: in step k = 1 … N-1 rank r sends to r+k and receives from r-k, so in each step every
// rank has one partner to send to and one to receive from, and no receiver is crowded. A chunk is
// at most what the guaranteed slots of a connector hold. Suppose that nothing can move, and take a
// rank that is least far, in loops and then in primitives. If it waits for a slice, the sender has
// not passed the send of the same step, which comes before the receive: it would be less far. If it
// waits for room, the connector is full; what it holds beyond the present chunk is of the loop
// before, so the receiver has not finished that loop: it would be less far again. With a chunk of S
// slots the checker's slots_needed is S.
//
// Gather, scatter and send/recv have no cycle: who only receives can always go on, so one slot is
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
