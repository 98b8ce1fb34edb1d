// The ring planner: bandwidth-optimal plans of all-reduce, all-gather and reduce-scatter for groups
// of up to 1,024 ranks (and of the barrier, which is an all-reduce of one element). Reduce and
// broadcast go down a ring that is cut open at the root: chain.h. Kinds in which data go from one
// rank to one other gain nothing by a ring: pairwise.h.
//
// Ranks form a ring in group order; rank r sends to r+1 only and receives from r-1 only. There is
// one part per rank, and all N parts travel at the same time: part p starts at rank p+1, is reduced
// on the way round, is complete at rank p, and (for all-reduce) is copied on from there. So each
// part is reduced once, along one fixed path, and all ranks hold the same bits.
//
// Chunks, and why a plan cannot deadlock itself. A chunk holds at most (slots-1) slots. Every rank
// of a ring may inject a whole chunk before it receives anything; afterwards it sends a slice only
// when it consumes one, until its last primitive retires the chunk. So at most N·(slots-1) slices
// are in flight in N connectors with `slots` slots each, and somewhere on the ring one slot is
// free: the rank before it can go on (the bubble argument). This stays true when a pool slot
// carries several slices at once, as long as every slice is cut at multiples of
// guaranteed_slot_bytes from the chunk's start: then a chunk never is in more than slots-1 pieces.
// Chunks are the largest that the rule allows: a chunk is sent slice by slice, so a larger one
// costs no pipelining, and it makes fewer passes over the program.
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
