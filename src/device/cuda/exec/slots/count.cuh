// What a call through slots has moved, in a lane's figures.
#pragma once

#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

// What published slices say in the lane's figures: add(figure, by) for each. By one thread.
// `behind`: what hops had moved before. `done`: as in tell_end().
template <class S, class Add>
__device__ __forceinline__ void count_slot_call(LaneStats& stats, const S& c,
                                                const std::uint32_t (&behind)[kSlotSteps],
                                                bool done, Add add) {
  const std::uint32_t me = c.call.place, own = c.call.shape.guaranteed_slots;
  const auto moved = [&](std::uint32_t hop) {
    const std::uint32_t all = c.has(hop) ? c.call.chunks_of_all() : 0;
    return (done ? all : c.hops_behind(hop)) - behind[hop];
  };
  const auto elems_in = [&](std::uint32_t q, std::uint32_t sent) {
    const std::uint32_t firsts =
        has_member(c.call.steps.sends_to, q) ? c.order().firsts_in(sent) : 0;
    return c.elems_of(c.call.steps.scatters ? q : me, firsts) + c.elems_of(me, sent - firsts);
  };
  const std::uint32_t received = moved(kGathers) + moved(kCollects);
  std::uint64_t elems = 0, borrowed = 0, straight = 0;
  for (std::uint32_t q = 0; q < c.call.places; ++q) {
    if (!c.sends_to(q)) continue;
    const std::uint32_t sent = done ? c.order().slices() : c.of.sent[q];
    elems += elems_in(q, sent) - elems_in(q, c.prefix_to(q, behind));
    straight += c.straight_in(q, sent);
    // (Of two hops, contributions behind the first result that went straight may lie in borrowed
    // slots, too. They are not counted.)
    const std::uint32_t in_slots = sent < c.of.straight[q] ? sent : c.of.straight[q];
    if (c.is_carried()) {
      // (What went straight is not counted; of results all that did not, if any slots were theirs.)
      const std::uint32_t firsts = c.two_hops() ? c.order().firsts_in(sent) : sent;
      const std::uint32_t from = CudaDev::load_block(c.s.blocks_from);
      const std::uint32_t found = CudaDev::load_block(c.s.borrowed[q]);
      const std::uint32_t lent = found == kNotYet ? 0 : found;
      if (has_member(c.call.steps.sends_to, q)) borrowed += firsts < from ? firsts : from;
      if (lent != c.slots_carried(lent)) borrowed += sent - firsts - c.straight_in(q, sent);
      continue;
    }
    // (Not yet known: none were wanted.)
    const std::uint32_t found = CudaDev::load_block(c.s.borrowed[q]);
    const std::uint32_t lent = found == kNotYet ? 0 : found;
    const std::uint32_t round = own + lent, rest = in_slots % round;
    borrowed += in_slots / round * lent + (rest > own ? rest - own : 0);
  }
  add(stats.slices, moved(kSends) + received);
  add(stats.received, received);
  add(stats.bytes_sent, elems * dtype_bytes(c.inv.geometry.dtype));
  add(stats.borrowed, borrowed);
  add(stats.into_outputs, straight);
}

}  // namespace in_stream
}  // namespace unjam
