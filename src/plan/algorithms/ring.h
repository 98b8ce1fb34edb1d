// The ring planner: bandwidth-optimal plans of all-reduce, all-gather, reduce-scatter,
// reduce and broadcast for groups of up to 1,024 ranks (and of the barrier, which is an all-reduce
// of one element). Kinds in which data go from one rank to one other gain nothing by a ring:
// pairwise.h.
//
// Ranks form a ring in group order; rank r sends to r+1 only and receives from r-1 only.
// All-reduce, all-gather and reduce-scatter have one part per rank, and all N parts travel at the
// same time: part p starts at rank p+1, is reduced on the way round, is complete at rank p, and
// (for all-reduce) is copied on from there. So each part is reduced once, along one fixed path, and
// all ranks hold the same bits. Reduce and broadcast are chains with one part, ordered by the
// position on the ring after the root: their parallelism is the pipeline of slices.
//
// Chunks, and why a plan cannot deadlock itself. A chunk holds at most (slots-1) slots. Every rank
// of a ring may inject a whole chunk before it receives anything; afterwards it sends a slice only
// when it consumes one, until its last primitive retires the chunk. So at most N·(slots-1) slices
// are in flight in N connectors with `slots` slots each, and somewhere on the ring one slot is
// free: the rank before it can go on (the bubble argument). This stays true when a borrowed slot
// carries several slices at once, as long as every slice is cut at multiples of escape_slot_bytes
// from the chunk's start: then a chunk never is in more than slots-1 pieces. Chunks are the largest
// that the rule allows: a chunk is sent slice by slice, so a larger one costs no pipelining, and it
// makes fewer passes over the program.
//
// Chains have no cycle: the rank at the end only receives, so something can always move, and one
// slot is enough whatever the chunk (the checker's slots_needed). On GPUs their chunks are up to
// eight borrowed slots, so that slices can be large; at least 16 chunks a lane keep the pipeline
// full. The engine cuts slices at the slots that it gets. Those of few ranks have a slot, so that
// their calls need no engine (solo_stream.cuh).
#pragma once

#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinRingSlots = 2;  // guaranteed slots, see above

bool ring_serves(Kind kind);

// Among so many ranks at most, on GPUs, a chain's last rank waits no longer than a mesh plan's:
// each GPU sends to one other, and receives from one, which links are faster at.
inline constexpr int kShortChainRanks = 4;

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_ring(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error = nullptr);

}  // namespace unjam
