// What the movers of a call of packets do (move.cuh, two_hops.cuh), where all of it
// is whole units and aligned, and what is reduced are sums or averages of common formats
// (StreamCall::plain): the same, bit for bit, without a question for each unit, and with as much of
// all peers' packets under way as there are registers for. For at most kMembers members: 2, 4 or 8.
#pragma once

#include <type_traits>

#include "device/cuda/exec/packets/move.cuh"

namespace unjam {
namespace in_stream {

// What make(n) returns: n as a constant, the fewest members with code of their own that it is for.
template <class Make>
__device__ __forceinline__ auto with_members(const StreamCall& call, const Make& make) {
  if (call.places == 2) return make(std::integral_constant<int, 2>{});
  return call.places <= 4 ? make(std::integral_constant<int, 4>{})
                          : make(std::integral_constant<int, static_cast<int>(kStreamCallRanks)>{});
}

// A row: kUnits places of one message for each thread, the h-th of them `h * hands()` behind its
// first. A call's time is that of the instructions between its looks, too, so who has one row asks
// nothing about others (kOneRow), and what rows have in common is worked out once.
// Of lines a warp has whole ones, and goes through them together.
template <int kUnits, bool kLines>
struct PlainRow {
  static constexpr std::uint32_t kPlaceBytes = kLines ? kWordBytes : 2 * kUnitBytes;
  std::uint32_t first;   // this thread's first place
  std::uint32_t places;  // of the message
  std::uint32_t stride;  // hands(): of lines whole ones, so what follows from places goes in steps
  std::uint32_t data;    // where the first place's data are, if it has any
  std::uint32_t data_stride;
  std::uint32_t data_end;  // of those that this thread may have

  __device__ __forceinline__ PlainRow(const Stretch& w)
      : first(hand()), places(w.places), stride(hands()), data_end(w.bytes) {
    if constexpr (kLines) {
      data = cuda_leaves::line_data_at(first);
      data_stride = stride / cuda_leaves::kLineThreads * kLineDataBytes;
      if (bears()) data_end = 0;
    } else {
      data = first * kUnitBytes;
      data_stride = stride * kUnitBytes;
    }
  }
  __device__ __forceinline__ bool has(int h) const { return first + h * stride < places; }
  // Of lines: whether any thread of the warp has.
  __device__ __forceinline__ bool any() const { return (kLines ? first & ~31u : first) < places; }
  __device__ __forceinline__ bool bears() const {
    return kLines && cuda_leaves::bears_flags(first);
  }
  __device__ __forceinline__ std::uint32_t at(int h) const { return data + h * data_stride; }
  __device__ __forceinline__ bool has_data(int h) const { return at(h) < data_end; }
  __device__ __forceinline__ std::uint32_t slot_at(int h) const {
    return (first + h * stride) * kPlaceBytes;
  }
  __device__ __forceinline__ void advance() {
    first += kUnits * stride;
    data += kUnits * data_stride;
  }
  __device__ __forceinline__ PlainRow next() const {
    PlainRow row = *this;
    row.advance();
    return row;
  }
};

template <int kUnits, bool kLines>
__device__ __forceinline__ void load_plain(const char* from, const PlainRow<kUnits, kLines>& row,
                                           Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (kLines) x[h] = {};
    if (row.has_data(h)) x[h] = cuda_leaves::load_aligned<2>(from + row.at(h));
  }
}
template <int kUnits, bool kLines>
__device__ __forceinline__ void store_plain(char* to, const PlainRow<kUnits, kLines>& row,
                                            const Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (row.has_data(h)) cuda_leaves::store_aligned(to + row.at(h), x[h]);
  }
}
template <int kUnits, bool kLines>
__device__ __forceinline__ void send_plain(char* to, const PlainRow<kUnits, kLines>& row,
                                           const Raw<2> (&x)[kUnits], std::uint64_t flag) {
  if constexpr (kLines) __syncwarp();  // lines are stored in one instruction
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if constexpr (kLines) {
      const Raw<2> word = row.bears() ? cuda_leaves::line_flags(flag) : x[h];
      if (row.has(h)) cuda_leaves::store_line_word(to + row.slot_at(h), word);
    } else {
      if (row.has(h)) cuda_leaves::store_packet_unit(to + row.slot_at(h), x[h], flag);
    }
  }
}

// What a thread loads of a row to send it: a unit each for every peer, or the same for all.
template <int kMembers, int kUnits, bool kLines>
__device__ __forceinline__ void load_sent(const StreamCall& call, const Stretch& w,
                                          const PlainRow<kUnits, kLines>& row,
                                          Raw<2> (&x)[kMembers - 1][kUnits]) {
#pragma unroll
  for (int i = 0; i < kMembers - 1; ++i) {
    if (i >= call.num_sent || (i != 0 && !call.scatters)) break;
    const std::uint32_t q = around(call, call.first_sent + i);
    const std::uint32_t block = call.scatters ? q * call.block_bytes : 0;
    load_plain<kUnits, kLines>(w.input + call.sent_from + block, row, x[i]);
  }
}
template <int kMembers, int kUnits, bool kLines>
__device__ __forceinline__ void send_row(const StreamCall& call, const Shared& s,
                                         const PlainRow<kUnits, kLines>& row,
                                         const Raw<2> (&x)[kMembers - 1][kUnits]) {
#pragma unroll
  for (int i = 0; i < kMembers - 1; ++i) {
    if (i >= call.num_sent) break;
    char* const to = s.to[around(call, call.first_sent + i)];
    if (kMembers == 2 || call.scatters) {
      send_plain<kUnits, kLines>(to, row, x[i], call.flag);
    } else {
      send_plain<kUnits, kLines>(to, row, x[0], call.flag);
    }
  }
}

// Where members' packets of a hop lie; of those that send nothing to this rank, nowhere. Their
// flag, and what peers are poked with (poke_early()).
template <int kMembers>
struct Senders {
  const char* from[kMembers];
  std::uint64_t flag;
  std::uint32_t poke;
};
template <int kMembers>
__device__ __forceinline__ Senders<kMembers> senders_of(const StreamCall& call,
                                                        char* const (&from)[kStreamCallRanks],
                                                        std::uint64_t flag, std::uint32_t poke) {
  Senders<kMembers> senders;
#pragma unroll
  for (int q = 0; q < kMembers; ++q) {
    const bool sends = among(call, q, call.first_received, call.num_received);
    senders.from[q] = sends ? from[q] : nullptr;
  }
  senders.flag = flag;
  senders.poke = poke;
  return senders;
}
template <int kMembers>
__device__ __forceinline__ Senders<kMembers> senders_of(const StreamCall& call, const Shared& s) {
  return senders_of<kMembers>(call, s.from, call.flag, s.poke);
}

// Looks for a row of all senders' packets until all have come; of member q in x[q], of who sends
// nothing `own`.
template <int kMembers, int kUnits, bool kLines>
__device__ __forceinline__ bool await_row(CudaRank& r, const StreamCall& call, std::uint32_t lane,
                                          const Shared& s, const Senders<kMembers>& senders,
                                          const PlainRow<kUnits, kLines>& row,
                                          const Raw<2> (&own)[kUnits],
                                          Raw<2> (&x)[kMembers][kUnits]) {
  constexpr std::uint32_t kWarp = 0xffffffff;
  // As many as there are registers for.
  constexpr int kWords = kLines ? 2 : 4, kMost = kMembers == 2 ? 40 : 32;
  constexpr int kFit = kMost / kWords / kMembers, kAtOnce = kFit < kUnits ? kFit : kUnits;
  static_assert(kAtOnce > 0);
  const std::uint64_t flag = senders.flag;
#pragma unroll 1
  for (std::uint32_t polls = 0; polls < call.most_polls; ++polls) {
    // Loads, then looks: who looks at what one brings waits for it, and so does the next.
    bool all = true;
#pragma unroll
    for (int begin = 0; begin < kUnits; begin += kAtOnce) {
      cuda_leaves::PacketUnit found[kMembers][kAtOnce];
      if constexpr (kLines) __syncwarp();  // lines are loaded in one instruction
#pragma unroll
      for (int q = 0; q < kMembers; ++q) {
        if (senders.from[q] == nullptr) continue;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int h = begin + i;
          if (h >= kUnits || !row.has(h)) continue;
          const char* const at = senders.from[q] + row.slot_at(h);
          if constexpr (kLines) {
            found[q][i].word[0] = cuda_leaves::load_packet_word(at);
          } else {
            found[q][i] = cuda_leaves::load_packet_unit(at);
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kMembers; ++q) {
        const bool sends = senders.from[q] != nullptr;
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int h = begin + i;
          if (h >= kUnits) break;
          const cuda_leaves::PacketUnit& p = found[q][i];
          const Raw<2> came =
              kLines ? Raw<2>{{p.word[0].data, p.word[0].flag}} : cuda_leaves::data_of(p);
          const bool there = kLines ? !row.bears() || cuda_leaves::is_flags(came, flag)
                                    : cuda_leaves::has_flag(p, flag);
          all &= there || !sends || !row.has(h);
          x[q][h].w[0] = sends ? came.w[0] : own[h].w[0];
          x[q][h].w[1] = sends ? came.w[1] : own[h].w[1];
        }
      }
    }
    if (kLines ? __all_sync(kWarp, all) != 0 : all) return true;
    if (polls == kPokePolls) poke_early(r, call, lane, senders.poke);
    if (kLines ? __any_sync(kWarp, is_hopeless(s)) != 0 : is_hopeless(s)) break;
  }
  return false;
}

// The bits are those of cuda_leaves::reduce_pieces().
template <DType dtype, int kMembers, int kUnits>
__device__ __forceinline__ void sum_row(const StreamCall& call, const cuda_leaves::Slice& slice,
                                        const Raw<2> (&x)[kMembers][kUnits],
                                        Raw<2> (&sum)[kUnits]) {
  using F = cuda_leaves::Format<dtype>;
  constexpr int kCount = F::template kCount<2>;
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    typename F::Acc acc[kCount];
    cuda_leaves::decode_piece<F, 2>(slice, 0, x[0][h], acc);
#pragma unroll
    for (int q = 1; q < kMembers; ++q) {
      if (kMembers != 2 && q >= call.places) break;
      typename F::Acc next[kCount];
      cuda_leaves::decode_piece<F, 2>(slice, q, x[q][h], next);
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kSum>(acc[i], next[i]);
    }
    F::template encode<2>(acc, sum[h]);
  }
}

template <int kMembers, int kUnits>
__device__ __forceinline__ void sum_row_any(const StreamCall& call, DType dtype,
                                            const cuda_leaves::Slice& slice,
                                            const Raw<2> (&x)[kMembers][kUnits],
                                            Raw<2> (&sum)[kUnits]) {
  switch (dtype) {
    case DType::kFloat32:
      return sum_row<DType::kFloat32, kMembers, kUnits>(call, slice, x, sum);
    case DType::kBfloat16:
      return sum_row<DType::kBfloat16, kMembers, kUnits>(call, slice, x, sum);
    default:
      return sum_row<DType::kFloat16, kMembers, kUnits>(call, slice, x, sum);
  }
}

template <int kMembers, int kUnits, bool kLines, bool kOneRow>
__device__ __forceinline__ bool receive_sums(CudaRank& r, const StreamCall& call,
                                             const Invocation& inv, const Stretch& w,
                                             std::uint32_t lane, const Shared& s,
                                             PlainRow<kUnits, kLines> row, Raw<2> (&own)[kUnits],
                                             Held& held) {
  static_assert(kOneRow || kStreamCallUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const Senders<kMembers> senders = senders_of<kMembers>(call, s);
#pragma unroll 1
  for (std::uint32_t k = 0; row.any(); k += kUnits, row = row.next()) {
    // Under way while packets are looked for.
    Raw<2> next[kUnits];
    if constexpr (!kOneRow) load_plain<kUnits, kLines>(w.input + call.own_from, row.next(), next);
    Raw<2> x[kMembers][kUnits];
    if (!await_row<kMembers, kUnits, kLines>(r, call, lane, s, senders, row, own, x)) return false;
    Raw<2> sum[kUnits];
    sum_row_any<kMembers, kUnits>(call, inv.geometry.dtype, slice, x, sum);
#pragma unroll
    for (int h = 0; h < kUnits; ++h) held.unit[k + h] = sum[h];
    if constexpr (kOneRow) {
      return true;
    } else {
#pragma unroll
      for (int h = 0; h < kUnits; ++h) own[h] = next[h];
    }
  }
  return true;
}

// As store_reduction().
template <bool kLines>
__device__ __forceinline__ void store_sums(const StreamCall& call, const Stretch& w,
                                           const Held& held) {
  constexpr int kUnits = 4;
  static_assert(kStreamCallUnits % kUnits == 0);
  PlainRow<kUnits, kLines> row(w);
#pragma unroll 1
  for (std::uint32_t k = 0; row.has(0); k += kUnits, row = row.next()) {
    Raw<2> x[kUnits];
#pragma unroll
    for (int h = 0; h < kUnits; ++h) x[h] = held.unit[k + h];
    store_plain<kUnits, kLines>(w.output + call.received_to, row, x);
  }
}

// `output`: where the first member's is copied to.
template <int kMembers, int kUnits, bool kLines, bool kOneRow>
__device__ __forceinline__ bool receive_messages(CudaRank& r, const StreamCall& call,
                                                 std::uint32_t lane, const Shared& s,
                                                 const Senders<kMembers>& senders, char* output,
                                                 PlainRow<kUnits, kLines> row) {
#pragma unroll 1
  for (; row.any(); row = row.next()) {
    const Raw<2> none[kUnits] = {};
    Raw<2> x[kMembers][kUnits];
    if (!await_row<kMembers, kUnits, kLines>(r, call, lane, s, senders, row, none, x)) return false;
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (senders.from[q] == nullptr) continue;
      char* const to = output + (call.collects ? q * call.block_bytes : 0);
      store_plain<kUnits, kLines>(to, row, x[q]);
    }
    if constexpr (kOneRow) return true;
  }
  return true;
}

template <int kUnits, bool kLines>
__device__ __forceinline__ void copy_rows(const StreamCall& call, const Stretch& w,
                                          PlainRow<kUnits, kLines> row) {
#pragma unroll 1
  for (; row.any(); row = row.next()) {
    Raw<2> x[kUnits];
    load_plain<kUnits, kLines>(w.input + call.own_from, row, x);
    store_plain<kUnits, kLines>(w.output + call.own_to, row, x);
  }
}

// looked(): waits until the first warp has looked, and says whether all is as it should be.
template <Half kHalf, int kMembers, int kUnits, bool kLines, bool kOneRow, class Looked>
__device__ __forceinline__ bool move_rows(CudaRank& r, const StreamCall& call,
                                          const Invocation& inv, const Stretch& w,
                                          std::uint32_t lane, const Shared& s, Held& held,
                                          Looked looked) {
  constexpr bool kSends = kHalf != Half::kReceives, kReceives = kHalf != Half::kSends;
  const PlainRow<kUnits, kLines> begin(w);
  Raw<2> sent[kMembers - 1][kUnits], own[kUnits];
  if constexpr (kSends) load_sent<kMembers, kUnits, kLines>(call, w, begin, sent);
  if constexpr (kReceives) {
    if (call.reduces) load_plain<kUnits, kLines>(w.input + call.own_from, begin, own);
  }
  if (!looked()) return false;

  if constexpr (!kSends) {
  } else if constexpr (kOneRow) {
    send_row<kMembers, kUnits, kLines>(call, s, begin, sent);
  } else if (call.num_sent != 0) {
#pragma unroll 1
    for (auto row = begin; row.any(); row = row.next()) {
      // The next row is under way while one is sent.
      Raw<2> next[kMembers - 1][kUnits];
      load_sent<kMembers, kUnits, kLines>(call, w, row.next(), next);
      send_row<kMembers, kUnits, kLines>(call, s, row, sent);
#pragma unroll
      for (int i = 0; i < kMembers - 1; ++i) {
#pragma unroll
        for (int h = 0; h < kUnits; ++h) sent[i][h] = next[i][h];
      }
    }
  }
  if (kSends && call.copies && w.input + call.own_from != w.output + call.own_to) {
    copy_rows(call, w, begin);
  }
  if constexpr (!kReceives) return true;
  if (call.reduces) {
    return receive_sums<kMembers, kUnits, kLines, kOneRow>(r, call, inv, w, lane, s, begin, own,
                                                           held);
  }
  if (call.num_received == 0) return true;
  return receive_messages<kMembers, kUnits, kLines, kOneRow>(
      r, call, lane, s, senders_of<kMembers>(call, s), w.output + call.received_to, begin);
}

// Of those who have several rows. (The engine's have their function's memory beside that of the
// engine, and kernels have 1 KiB a thread, see tools/ptxas_report.py.)
template <Half kHalf, int kMembers>
__device__ constexpr int many_units() {
  return kHalf == Half::kReceives && kMembers > 2 ? 2 : 4;
}

// As move_all().
template <Half kHalf, int kMembers, class Looked>
__device__ __forceinline__ bool move_plain(CudaRank& r, const StreamCall& call,
                                           const Invocation& inv, const Stretch& w,
                                           std::uint32_t lane, const Shared& s, Held& held,
                                           Looked looked) {
  if (w.places <= hands()) {
    return move_rows<kHalf, kMembers, 1, false, true>(r, call, inv, w, lane, s, held, looked);
  }
  if constexpr (kMembers <= 4) {
    if (w.places > 2 * hands()) {
      return move_rows<kHalf, kMembers, many_units<kHalf, kMembers>(), false, false>(
          r, call, inv, w, lane, s, held, looked);
    }
    return move_rows<kHalf, kMembers, 2, false, true>(r, call, inv, w, lane, s, held, looked);
  }
  return move_rows<kHalf, kMembers, 2, false, false>(r, call, inv, w, lane, s, held, looked);
}

// The same of lines, of which a call has more: with many under way at once, for a look at
// packets takes long.
template <Half kHalf, int kMembers, class Looked>
__device__ __forceinline__ bool move_plain_lines(CudaRank& r, const StreamCall& call,
                                                 const Invocation& inv, const Stretch& w,
                                                 std::uint32_t lane, const Shared& s, Held& held,
                                                 Looked looked) {
  if constexpr (kMembers == 2) {
    if (w.places > 5 * hands()) {
      return move_rows<kHalf, kMembers, 5, true, false>(r, call, inv, w, lane, s, held, looked);
    }
    return w.places <= 3 * hands()
               ? move_rows<kHalf, kMembers, 3, true, true>(r, call, inv, w, lane, s, held, looked)
               : move_rows<kHalf, kMembers, 5, true, true>(r, call, inv, w, lane, s, held, looked);
  } else if constexpr (kMembers <= 4) {
    if (w.places > 2 * hands()) {
      return move_rows<kHalf, kMembers, many_units<kHalf, kMembers>(), true, false>(
          r, call, inv, w, lane, s, held, looked);
    }
    return move_rows<kHalf, kMembers, 2, true, true>(r, call, inv, w, lane, s, held, looked);
  } else {
    return move_rows<kHalf, kMembers, 1, true, false>(r, call, inv, w, lane, s, held, looked);
  }
}

template <Half kHalf, int kMembers, class Looked>
__device__ __forceinline__ bool move_plain_any(CudaRank& r, const StreamCall& call,
                                               const Invocation& inv, const Stretch& w,
                                               std::uint32_t lane, const Shared& s, Held& held,
                                               Looked looked) {
  return call.lines ? move_plain_lines<kHalf, kMembers>(r, call, inv, w, lane, s, held, looked)
                    : move_plain<kHalf, kMembers>(r, call, inv, w, lane, s, held, looked);
}

// What is reduced, of plain calls, by the movers, when all has come.
__device__ __forceinline__ void store_sums_held(const StreamCall& call, const Stretch& w,
                                                const Held& held) {
  if (call.lines) {
    store_sums<true>(call, w, held);
  } else {
    store_sums<false>(call, w, held);
  }
}
// And of others.
__device__ __forceinline__ void store_held(const StreamCall& call, const Stretch& w,
                                           const Held& held) {
  if (!call.plain) {
    store_reduction(call, w, held);
  } else {
    store_sums_held(call, w, held);
  }
}

}  // namespace in_stream
}  // namespace unjam
