// What movers do with packets of a sum in two hops, whose lanes make one loop each:
//   scatter  every peer's part of the own input, to its slot of the connector's next step n
//   gather   the own part: each thread awaits its units from all peers, reduces them, sends the
//            result to the peers' slots of step n + 1 and keeps it
//   collect  the other parts' results, step n + 1 of the peers' connectors, into the output
// A block of its own function, so that calls of one hop pay nothing for it. No lane has an empty
// stretch of any part (plan/lower.cc sees to that), so each peer gets two packets, and sends two.
//
// How far a lane has come, and why it may stop there: docs/internals/redo.md. Nobody gathers before
// it is known that the incoming connectors are the key's: a lane that has gathered says what it has
// consumed, so it must know where they began.
#pragma once

#include "device/cuda/exec/packets/plain.cuh"

namespace unjam {
namespace in_stream {

// Units of one thread that are under way at once: of what is only copied, and of what is reduced
// (with two no registers are left for the code of some types).
inline constexpr int kManyUnits = 4, kGatherUnits = 1;

// As kStreamCallPolls, for what has made two hops and is not plain. (To see lanes give up when they
// have gathered, test with a few.)
inline constexpr std::uint32_t kLaterPolls = kStreamCallPolls;

// This block's stretch of member q's part.
__device__ __forceinline__ PartStretch part_stretch(const StreamCall& call, std::uint32_t q) {
  const bool longer = q < call.longer_parts;
  const std::uint32_t part = q * call.part_pieces + (longer ? q : call.longer_parts);
  return lane_stretch(call, part, call.longer_lanes + (longer ? 1 : 0), blockIdx.x);
}

// All peers' parts, a row at a time: a unit for each mover. (Rows are the same for
// all threads, so what is computed of them costs little.)
struct PartWalk {
  std::uint32_t rows;  // of a part: of the longest one
  std::uint32_t message = 0, row = 0;
  __device__ __forceinline__ bool done(const StreamCall& call) const {
    return message >= call.num_sent;
  }
  __device__ __forceinline__ void advance() {
    if (++row == rows) row = 0, ++message;
  }
};

// This thread's place of a row.
struct PartItem {
  std::uint32_t q;      // member
  std::uint32_t place;  // in the part's stretch
  std::uint32_t from;   // its data begin there in the vector
  std::uint32_t bytes;  // so many
  bool there;
};
__device__ __forceinline__ PartItem next_item(const StreamCall& call, PartWalk& walk) {
  PartItem item{};
  if (walk.done(call)) return item;
  item.q = around(call, call.first_sent + walk.message);
  item.place = walk.row * hands() + hand();
  const PartStretch part = part_stretch(call, item.q);
  const Unit unit = unit_of(call, part.bytes, item.place);
  item.from = part.offset + unit.at;
  item.bytes = unit.bytes;
  item.there = item.place < places_of(call, part.bytes);
  walk.advance();
  return item;
}

// By value: both go over the same rows.
__device__ __forceinline__ void load_parts(const StreamCall& call, const Invocation& inv,
                                           PartWalk walk, Raw<2> (&x)[kManyUnits]) {
#pragma unroll
  for (int h = 0; h < kManyUnits; ++h) {
    const PartItem item = next_item(call, walk);
    if (item.bytes == 0) continue;
    x[h] = load_user(static_cast<const char*>(inv.input) + item.from, item.bytes);
  }
}
__device__ __forceinline__ PartWalk send_parts(const StreamCall& call, const Shared& s,
                                               PartWalk walk, const Raw<2> (&x)[kManyUnits]) {
#pragma unroll
  for (int h = 0; h < kManyUnits; ++h) {
    const PartItem item = next_item(call, walk);
    if (item.there) store_place(call, s.to[item.q], item.place, x[h], call.flag);
  }
  return walk;
}

// The own part.
__device__ __forceinline__ Stretch own_stretch(const StreamCall& call, const Invocation& inv) {
  const PartStretch own = part_stretch(call, call.place);
  return {static_cast<const char*>(inv.input) + own.offset,
          static_cast<char*>(inv.output) + own.offset, own.bytes, places_of(call, own.bytes)};
}
// From the first one on; part 0 is a longest one.
__device__ __forceinline__ PartWalk all_parts(const StreamCall& call) {
  const std::uint32_t places = places_of(call, part_stretch(call, 0).bytes);
  return {(places + hands() - 1) / hands()};
}
// looked(): as in plain.cuh. Loads the first units of the own part, too.
template <class Looked>
__device__ __forceinline__ void scatter_parts(const StreamCall& call, const Invocation& inv,
                                              const Stretch& w, const Shared& s, PartWalk walk,
                                              Raw<2> (&own)[kGatherUnits], Looked looked) {
  Raw<2> ahead[kManyUnits] = {};
  load_parts(call, inv, walk, ahead);
  load_own(call, w, 0, own);
  if (!looked()) return;
  for (;;) {
    walk = send_parts(call, s, walk, ahead);
    if (walk.done(call)) break;
    load_parts(call, inv, walk, ahead);
  }
}

// Results of a row of the own part, to all peers.
__device__ __forceinline__ void send_results(const StreamCall& call, const Stretch& w,
                                             const Shared& s, std::uint32_t begin,
                                             const Raw<2> (&x)[kGatherUnits]) {
#pragma unroll
  for (int h = 0; h < kGatherUnits; ++h) {
    const std::uint32_t place = begin + hand() + h * hands();
    if (place >= w.places) break;
#pragma unroll 1
    for (std::uint32_t i = 0; i < call.num_sent; ++i) {
      const std::uint32_t q = around(call, call.first_sent + i);
      store_place(call, s.later_to[q], place, x[h], call.later_flag);
    }
  }
}

// As receive_reduction(), but that each result is sent, too. False: this thread lacks units, whose
// results it has sent nobody; and nobody need go on.
__device__ __forceinline__ bool gather_part(CudaRank& r, const StreamCall& call,
                                            const Invocation& inv, const Stretch& w,
                                            std::uint32_t lane, const Shared& s,
                                            Raw<2> (&own)[kGatherUnits], Held& held) {
  return receive_reduction(r, call, inv, w, lane, s, own, held,
                           [&](std::uint32_t begin, const Raw<2>(&result)[kGatherUnits]) {
                             send_results(call, w, s, begin, result);
                           });
}

// Of whom a result does not come for a while: it may be asleep since before it could see all that
// we have scattered, whatever came of it meanwhile. So peers are told once more.
__device__ __forceinline__ bool collect_parts(CudaRank& r, const StreamCall& call,
                                              const Invocation& inv, std::uint32_t lane,
                                              PartWalk walk, const Shared& s) {
  std::uint32_t most = kPokePolls;
#pragma unroll 1
  while (!walk.done(call)) {
    PartWalk ahead = walk;
    const char* from[kManyUnits];
    char* to[kManyUnits];
    std::uint32_t place[kManyUnits], bytes[kManyUnits];
    Raw<2> x[kManyUnits];
#pragma unroll
    for (int h = 0; h < kManyUnits; ++h) {
      const PartItem item = next_item(call, ahead);
      from[h] = item.there ? s.later_from[item.q] : nullptr;
      place[h] = item.place;
      bytes[h] = item.bytes;
      to[h] = static_cast<char*>(inv.output) + item.from;
    }
    bool all = false;
    for (std::uint32_t polls = 0; !all && polls < most; ++polls) {
      if (any_of(call, is_hopeless(s))) return false;
      all = look_at_row(call, from, place, call.later_flag, x);
    }
    if (!all) {
      if (most == kLaterPolls) return false;
      poke_early(r, call, lane, s.later_poke);
      most = kLaterPolls;
      continue;  // from the beginning: nothing need be kept across that
    }
#pragma unroll
    for (int h = 0; h < kManyUnits; ++h) {
      if (bytes[h] != 0) store_user(to[h], x[h], bytes[h]);
    }
    walk = ahead;
  }
  return true;
}

// ---- calls whose parts are alike: plain ----

// What is scattered is a plain call's of one hop (move_plain_any()). Then by the movers, as
// gather_part(); all peers' contributions to a row at once. (The own data of a row are under way
// with its packets: to have the next one's as well takes registers, of which more units do more.)
template <int kMembers, int kUnits, bool kLines, bool kOneRow>
__device__ __forceinline__ bool gather_rows(CudaRank& r, const StreamCall& call,
                                            const Invocation& inv, const Stretch& w,
                                            std::uint32_t lane, const Shared& s, Held& held) {
  static_assert(kOneRow || kStreamCallUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const Senders<kMembers> senders = senders_of<kMembers>(call, s);
  PlainRow<kUnits, kLines> row(w);
#pragma unroll 1
  for (std::uint32_t k = 0; row.any(); k += kUnits, row.advance()) {
    Raw<2> own[kUnits], sums[kUnits];
    load_plain<kUnits, kLines>(w.input + call.own_from, row, own);
    Raw<2> x[kMembers][kUnits];
    if (!await_row<kMembers, kUnits, kLines>(r, call, lane, s, senders, row, own, x)) return false;
    sum_row_any<kMembers, kUnits>(call, inv.geometry.dtype, slice, x, sums);
#pragma unroll
    for (int h = 0; h < kUnits; ++h) held.unit[k + h] = sums[h];
#pragma unroll
    for (int i = 0; i < kMembers - 1; ++i) {
      if (i >= call.places - 1) break;
      char* const to = s.later_to[around(call, call.first_sent + i)];
      send_plain<kUnits, kLines>(to, row, sums, call.later_flag);
    }
    if constexpr (kOneRow) break;
  }
  return true;
}
// And as collect_parts().
template <int kMembers, int kUnits, bool kLines, bool kOneRow>
__device__ __forceinline__ bool collect_rows(CudaRank& r, const StreamCall& call, const Stretch& w,
                                             std::uint32_t lane, const Shared& s) {
  const auto senders = senders_of<kMembers>(call, s.later_from, call.later_flag, s.later_poke);
  return receive_messages<kMembers, kUnits, kLines, kOneRow>(r, call, lane, s, senders, w.output,
                                                             PlainRow<kUnits, kLines>(w));
}

enum class LaterHop { kGathers, kCollects };
template <LaterHop kHop, int kMembers, int kUnits, bool kLines, bool kOneRow>
__device__ __forceinline__ bool move_later_rows(CudaRank& r, const StreamCall& call,
                                                const Invocation& inv, const Stretch& w,
                                                std::uint32_t lane, const Shared& s, Held& held) {
  if constexpr (kHop == LaterHop::kGathers) {
    return gather_rows<kMembers, kUnits, kLines, kOneRow>(r, call, inv, w, lane, s, held);
  } else {
    return collect_rows<kMembers, kUnits, kLines, kOneRow>(r, call, w, lane, s);
  }
}
// For at most kMembers members: 2, 4 or 8. With many units under way at once, as in
// move_plain_lines().
template <LaterHop kHop, int kMembers>
__device__ __forceinline__ bool move_later(CudaRank& r, const StreamCall& call,
                                           const Invocation& inv, const Stretch& w,
                                           std::uint32_t lane, const Shared& s, Held& held) {
  if (!call.lines) {
    return move_later_rows<kHop, kMembers, 1, false, false>(r, call, inv, w, lane, s, held);
  }
  if constexpr (kMembers > 4) {
    return move_later_rows<kHop, kMembers, 1, true, false>(r, call, inv, w, lane, s, held);
  } else {
    if (w.places <= 2 * hands()) {
      return move_later_rows<kHop, kMembers, 2, true, true>(r, call, inv, w, lane, s, held);
    }
    constexpr int kMany = kMembers == 2 ? 8 : 4;
    return w.places <= 3 * hands()
               ? move_later_rows<kHop, kMembers, 3, true, true>(r, call, inv, w, lane, s, held)
               : move_later_rows<kHop, kMembers, kMany, true, false>(r, call, inv, w, lane, s,
                                                                     held);
  }
}
template <LaterHop kHop>
__device__ __forceinline__ bool move_later_any(CudaRank& r, const StreamCall& call,
                                               const Invocation& inv, const Stretch& w,
                                               std::uint32_t lane, const Shared& s, Held& held) {
  return with_members(call, [&](auto members) __attribute__((always_inline)) {
    return move_later<kHop, decltype(members)::value>(r, call, inv, w, lane, s, held);
  });
}

}  // namespace in_stream
}  // namespace unjam
