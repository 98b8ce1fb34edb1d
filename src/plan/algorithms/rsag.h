// The rsag planner: reduce-scatter and all-gather straight between all pairs, through slots. Two
// hops whatever the group's size (the ring's bytes, without its 2(N-1) hops), for ranks whose links
// are fully connected, and for groups of at most 64 ranks. Send/recv is not served: use pairwise.
//
// Rank p owns part p: everybody sends it their contribution to that part (scatter), it adds them in
// ascending order of rank, so that all ranks hold the same bits, and sends the result to everybody
// (collect). An all-gather is the second half, a reduce-scatter the first. An
// all-to-all is both without the sum: a scatter of the input, a collect into the output. A scatter
// and a gather are one of these at the root.
//
// With a root that has it all, or is to have it all, the others own the data: the root's part is
// empty (Geometry::empty_part), so that no link carries more than the vector in each direction, as
// in a chain. Broadcast: the root scatters; each owner passes its part on to the other owners, who
// collect. Reduce: all scatter their contributions; each owner adds up its part and sends it to the
// root, who collects. Of two ranks the root of a reduce owns all: one hop. Each connector carries
// one hop's slices, so that one slot is enough.
//
// A chunk is one guaranteed slot of each part, and two slots are enough. In a loop an all-reduce
// sends each peer two slices over one connector, the contribution and then the result; the latter
// leaves in the very step in which the peers' contributions are consumed. With one slot two ranks
// would wait for each other there: each has the other's contribution in the slot that it wants for
// its result. With two, suppose that nothing can move, and take a rank that is least far, in loops
// and then in primitives. If it waits for a slice, the sender stands at or before the primitive
// that sends it, which in a loop comes before the one that receives it: the sender would be less
// far. If it waits for room, the peer has not consumed the slice but one before the one to be sent:
// a result of the loop before (wanted for a result), or a contribution of the loop before (for a
// contribution). The peer would be less far again. The checker finds the same by execution:
// slots_needed is 2, and 1 for the other kinds.
//
// Overlap. So made, each hop waits for what its peers have sent in the step right before, and a
// link is idle for as long as that takes to come. With more slots the hops of a chunk lie d passes
// apart (Primitive's lag): pass l scatters chunk l, adds chunk l-d, collects chunk l-2d. Of an
// all-reduce a connector then carries the contributions C and results R in the order (d = 1) C0 C1
// R0 C2 R1 …, C(l) as number 2l-d (from l = d on) and R(l) as 2l+d+1, which is the order in which
// the peer takes them. 2d+2 slots are enough and one less is not, by the same argument: room for
// C(l) means that the peer has consumed C(l-d-1), which it does in pass l-1; room for R(l-d), sent
// in pass l, means R(l-2d-1), in pass l-1. (With one slot less it would be what the peer consumes
// where it wants room itself.) For the kinds of one hop d+1 are enough. The checker finds the same.
// They are put two passes apart where the slots are enough: a slice on its way is followed by two
// more before somebody waits for it.
//
// Together (PlanLimits::together). A scatter and a collect in one slice (Primitive's kWithNext) are
// looked for, described and published at once: two slices a chunk instead of three (which is meant
// to spare a GPU's control warp a third of its work). So that data come in
// the order in which they are looked for, a pass is: add chunk l-d-1, then scatter chunk l and
// collect chunk l-2d-1. The contributions and results of a connector then alternate in the order C0
// … C(d) R0 C(d+1) R1 …, and as many slots as before are enough. Of the kinds of one hop all of a
// pass is one slice, and d is up to three: what is sent in a slice is looked for three slices
// later. Plans with a root are never so: their two hops go over different connectors.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinRsagSlots = 2;  // guaranteed slots, see above

// How many passes a chunk's hops lie apart with so many guaranteed slots, see above; 0: none.
constexpr std::uint32_t overlap_distance(std::uint32_t hops, std::uint32_t slots) {
  const std::uint32_t most = hops == 2 ? slots / 2 - 1 : slots - 1;
  return most < 2 ? most : 2;
}

bool rsag_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_rsag(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error = nullptr);

}  // namespace unjam
