// What movers get: the description of a slice, what it costs, and to which group it is given.
#pragma once

#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

// Whether a hop's slices are copies, one a member: else a combine, of one source or several.
template <class S>
__device__ __forceinline__ bool copies_only(const S& c, std::uint32_t hop) {
  return hop == kCollects || (hop == kSends && c.call.steps.scatters);
}
// The member's place among those that a combine's result goes to.
__device__ __forceinline__ std::uint32_t place_among(std::uint32_t members, std::uint32_t q) {
  return static_cast<std::uint32_t>(__popc(members & ((1u << q) - 1)));
}

// Where among what is reduced the slice of place q is, as the engine has it: of sums the own
// contribution is the last, else where its rank comes.
template <class S>
__device__ __forceinline__ std::uint32_t source_of(const S& c, std::uint32_t q) {
  const SlotSteps& steps = c.call.steps;
  return place_among(steps.gathers_from, q) + (!steps.sums && q > c.call.place ? 1 : 0);
}

// What a slice's description says of all slices of its hop.
template <class S>
__device__ __forceinline__ void describe_hop(const S& c, std::uint32_t hop, SliceJob& job) {
  const Geometry& g = c.inv.geometry;
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t n = c.call.places;
  const bool copies = copies_only(c, hop);
  const bool reduces = hop == kGathers && steps.reduces;
  const bool contributes = hop == kSends ? steps.contributes : reduces && steps.sums;
  const cuda_leaves::Slice reduction = slice_of(c.call, c.inv);
  job.copies = copies;
  job.dtype = g.dtype;
  job.op = c.inv.op;
  job.protocol = Protocol::kSlot;
  job.num_src = static_cast<std::uint16_t>(copies ? n : reduces ? steps.num_sources : 1);
  job.num_dst = 0;
  if (!copies) {
    job.num_dst =
        static_cast<std::uint16_t>(__popc(hop == kSends ? steps.sends_to : steps.results_to));
  }
  job.local_src = -1;
  if (reduces) job.local_src = steps.own_source;
  if (hop == kSends && !copies) job.local_src = 0;
  job.elems = 0;
  job.dst_user = nullptr;
  job.scale_sources = ScaleSources::kNone;
  if (reduction.scale_all && contributes) {
    job.scale_sources = ScaleSources::kLocal;
  } else if (reduction.scale_all && reduces) {
    job.scale_sources = ScaleSources::kAll;
  }
  job.divisor = reduces && steps.finishes ? reduction.divisor : 1u;
  job.scale = reduction.scale;
  for (std::uint32_t q = 0; q < n; ++q) {
    job.src[q] = nullptr;
    job.dst_slot[q] = nullptr;
    job.dst_copy[q] = nullptr;
    job.copy_elems[q] = 0;
  }
}

// Of chunk k; each member's part of it by a thread. Whether there is anything to move in that part.
template <class S>
__device__ __forceinline__ bool describe_slice(const S& c, std::uint32_t hop, std::uint32_t k,
                                               std::uint32_t q, SliceJob& job) {
  const SlotCallState& of = c.of;
  const std::uint32_t me = c.call.place;
  if (q >= c.call.places) return false;
  if (copies_only(c, hop)) {
    // (Of an empty part nothing, nor of what is in the output already.)
    const SlotSteps& steps = c.call.steps;
    if (!has_member(hop == kCollects ? steps.collects_from : steps.sends_to, q)) return false;
    const Range chunk = c.chunk(q, k);
    const void* const from = hop == kCollects
                                 ? static_cast<const void*>(of.come[kCollects][k % kCome][q])
                                 : c.inv.input_at(chunk.offset);
    const bool moves = chunk.length != 0 && from != nullptr;
    job.copy_elems[q] = moves ? static_cast<std::uint32_t>(chunk.length) : 0u;
    if (!moves) return false;
    job.src[q] = from;
    if (hop == kSends) job.dst_slot[q] = c.place_at(q, hop, k);
    if (hop == kCollects || c.call.steps.copies) job.dst_copy[q] = c.inv.output_at(chunk.offset);
    return true;
  }
  const bool reduces = hop == kGathers && c.call.steps.reduces;
  if (q == me) {
    const Range chunk = c.chunk(me, k);
    job.elems = chunk.length;
    if (reduces || hop == kSends)
      job.src[reduces ? c.call.steps.own_source : 0] = c.inv.input_at(chunk.offset);
    if (hop == kSends ? c.call.steps.stores_sent : c.call.steps.stores_result) {
      job.dst_user = c.inv.output_at(chunk.offset);
    }
    if (reduces || hop == kSends) return true;
    // (It is received from one.)
    const auto from =
        static_cast<std::uint32_t>(__ffs(static_cast<int>(c.call.steps.gathers_from)) - 1);
    if (of.come[kGathers][k % kCome][from] != nullptr) return true;
    // From the output it goes on, if it does.
    job.src[0] = job.dst_user;
    job.dst_user = nullptr;
    return c.call.steps.results_to != 0;
  }
  if (hop == kGathers && has_member(c.call.steps.gathers_from, q)) {
    const unsigned char* const from = of.come[kGathers][k % kCome][q];
    if (from != nullptr) job.src[reduces ? source_of(c, q) : 0] = from;
  }
  const std::uint32_t to = hop == kSends ? c.call.steps.sends_to : c.call.steps.results_to;
  if (has_member(to, q)) job.dst_slot[place_among(to, q)] = c.place_at(q, hop, k);
  return false;  // (the own part's thread says it)
}

// How long a slice of the hop takes the movers: all are as long.
template <class S>
__device__ __forceinline__ std::uint32_t cost_of(const S& c, std::uint32_t hop) {
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t sends = __popc(steps.sends_to), results = __popc(steps.results_to);
  if (hop == kCollects) return cost_of_element(1, 0, 1) * __popc(steps.collects_from);
  if (hop == kGathers) {
    const std::uint32_t sources = steps.reduces ? steps.num_sources : 1;
    return cost_of_element(sources, results, steps.stores_result ? 1 : 0);
  }
  if (!steps.scatters) return cost_of_element(1, sends, steps.stores_sent ? 1 : 0);
  return cost_of_element(1, 1, steps.copies ? 1 : 0) * sends;
}

// By one thread.
template <class S>
__device__ __forceinline__ void give(const S& c, std::uint32_t hop, std::uint32_t at) {
  SlotShared& s = c.s;
  static_assert(kGroups == 2);
  std::uint32_t group = s.costs[1] < s.costs[0] ? 1 : 0;
  if (c.in_step()) group = hop == kSends ? 0 : 1;
  s.costs[group] += cost_of(c, hop);
  const std::uint32_t n = s.given[group];
  s.order[group][n % kOrdered] = at;
  CudaDev::store_block(s.given[group], n + 1);
}

// Of what is in the output already: as if movers had moved it. By one thread; `n` slices of the hop
// were before it. (Each of the description's has been counted.)
template <class S>
__device__ __forceinline__ void skip(const S& c, std::uint32_t at, std::uint32_t n) {
  CudaDev::store_block(c.s.stored[at], c.descriptions().count(c.warps(), n));
}

// By a warp: describes the slice of chunk k, by description `at`, and gives it to movers; or, if
// there is nothing to move, counts it. `n`: as in skip().
template <class S>
__device__ __forceinline__ void hand_out(const S& c, std::uint32_t hop, std::uint32_t k,
                                         std::uint32_t at, std::uint32_t n, std::uint32_t thread) {
  const bool moves = __any_sync(0xffffffff, describe_slice(c, hop, k, thread, c.s.jobs[at])) != 0;
  __syncwarp();
  if (thread != 0) return;
  if (moves) {
    give(c, hop, at);
  } else {
    skip(c, at, n);
  }
}

}  // namespace in_stream
}  // namespace unjam
