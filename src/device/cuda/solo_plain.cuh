// What the movers of a call of one hop do (solo_one_shot.cuh), where all of it is whole units and
// aligned, and what is reduced are sums or averages of common formats (SoloCall::plain): the same,
// bit for bit, without a question for each unit, and with as much of all peers' packets under way
// as there are registers for. For at most kMembers members: 2, 4 or 8.
#pragma once

#include "device/cuda/solo.cuh"

namespace unjam {
namespace solo {

// A row: kUnits units of one message for each thread, the h-th of them `h * hands()` behind its
// first. A call's time is that of the instructions between its looks, too, so who has one row asks
// nothing about others (kOneRow), and what rows have in common is worked out once.
template <int kUnits>
struct PlainRow {
  std::uint32_t first;   // this thread's first unit
  std::uint32_t units;   // of the message
  std::uint32_t stride;  // hands()
  __device__ __forceinline__ bool has(int h) const { return first + h * stride < units; }
  __device__ __forceinline__ std::uint32_t at(int h) const {  // its data
    return (first + h * stride) * kUnitBytes;
  }
  __device__ __forceinline__ PlainRow next() const {
    return {first + kUnits * stride, units, stride};
  }
};

template <int kUnits>
__device__ __forceinline__ void load_plain(const char* from, const PlainRow<kUnits>& row,
                                           Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (row.has(h)) x[h] = cuda_leaves::load_aligned<2>(from + row.at(h));
  }
}
template <int kUnits>
__device__ __forceinline__ void store_plain(char* to, const PlainRow<kUnits>& row,
                                            const Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (row.has(h)) cuda_leaves::store_aligned(to + row.at(h), x[h]);
  }
}
template <int kUnits>
__device__ __forceinline__ void send_plain(char* to, const PlainRow<kUnits>& row,
                                           const Raw<2> (&x)[kUnits], std::uint32_t flag) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (row.has(h)) cuda_leaves::store_packet_aligned(to + 2 * row.at(h), x[h], flag);
  }
}

// What a thread loads of a row to send it: a unit each for every peer, or the same for all.
template <int kMembers, int kUnits>
__device__ __forceinline__ void load_sent(const SoloCall& call, const Stretch& w,
                                          const PlainRow<kUnits>& row,
                                          Raw<2> (&x)[kMembers - 1][kUnits]) {
#pragma unroll
  for (int i = 0; i < kMembers - 1; ++i) {
    if (i >= call.num_sent || (i != 0 && !call.scatters)) break;
    const std::uint32_t q = around(call, call.first_sent + i);
    const std::uint32_t block = call.scatters ? q * call.block_bytes : 0;
    load_plain<kUnits>(w.input + call.sent_from + block, row, x[i]);
  }
}
template <int kMembers, int kUnits>
__device__ __forceinline__ void send_row(const SoloCall& call, const Shared& s,
                                         const PlainRow<kUnits>& row,
                                         const Raw<2> (&x)[kMembers - 1][kUnits]) {
#pragma unroll
  for (int i = 0; i < kMembers - 1; ++i) {
    if (i >= call.num_sent) break;
    char* const to = s.to[around(call, call.first_sent + i)];
    if (kMembers == 2 || call.scatters) {
      send_plain<kUnits>(to, row, x[i], call.flag);
    } else {
      send_plain<kUnits>(to, row, x[0], call.flag);
    }
  }
}

// Where members' packets lie; of those that send nothing to this rank, nowhere.
template <int kMembers>
struct Senders {
  const char* from[kMembers];
};
template <int kMembers>
__device__ __forceinline__ Senders<kMembers> senders_of(const SoloCall& call, const Shared& s) {
  Senders<kMembers> senders;
#pragma unroll
  for (int q = 0; q < kMembers; ++q) {
    const bool sends = among(call, q, call.first_received, call.num_received);
    senders.from[q] = sends ? s.from[q] : nullptr;
  }
  return senders;
}

// Looks for a row of all senders' packets until all have come; of member q in x[q].
template <int kMembers, int kUnits>
__device__ __forceinline__ bool await_row(CudaRank& r, const SoloCall& call, std::uint32_t lane,
                                          const Shared& s, const Senders<kMembers>& senders,
                                          const PlainRow<kUnits>& row,
                                          Raw<2> (&x)[kMembers][kUnits]) {
  const std::uint32_t flag = call.flag;
#pragma unroll 1
  for (std::uint32_t polls = 0; polls < kPolls; ++polls) {
    bool all = true;
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (senders.from[q] == nullptr) continue;
#pragma unroll
      for (int h = 0; h < kUnits; ++h) {
        if (!row.has(h)) continue;
        const cuda_leaves::PacketUnit p =
            cuda_leaves::load_packet_aligned(senders.from[q] + 2 * row.at(h));
        all &= p.word[0].flag == flag;
        all &= p.word[1].flag == flag;
        x[q][h] = {{p.word[0].data, p.word[1].data}};
      }
    }
    if (all) return true;
    if (polls == kPokePolls) poke_early(r, call, lane, s.poke);
    if (is_hopeless(s)) break;
  }
  return false;
}

// The bits are those of cuda_leaves::reduce_pieces().
template <DType dtype, int kMembers, int kUnits>
__device__ __forceinline__ void sum_row(const SoloCall& call, const cuda_leaves::Slice& slice,
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
      if (kMembers != 2 && q >= call.group_size) break;
      typename F::Acc next[kCount];
      cuda_leaves::decode_piece<F, 2>(slice, q, x[q][h], next);
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kSum>(acc[i], next[i]);
    }
    F::template encode<2>(acc, sum[h]);
  }
}

template <int kMembers, int kUnits, bool kOneRow>
__device__ __forceinline__ bool receive_sums(CudaRank& r, const SoloCall& call,
                                             const Invocation& inv, const Stretch& w,
                                             std::uint32_t lane, const Shared& s,
                                             PlainRow<kUnits> row, Raw<2> (&own)[kUnits],
                                             Held& held) {
  static_assert(kSoloUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const Senders<kMembers> senders = senders_of<kMembers>(call, s);
#pragma unroll 1
  for (std::uint32_t k = 0; row.has(0); k += kUnits, row = row.next()) {
    // Under way while packets are looked for.
    Raw<2> next[kUnits];
    if constexpr (!kOneRow) load_plain<kUnits>(w.input + call.own_from, row.next(), next);
    Raw<2> x[kMembers][kUnits];
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (q != call.group_rank) continue;
#pragma unroll
      for (int h = 0; h < kUnits; ++h) x[q][h] = own[h];
    }
    if (!await_row<kMembers, kUnits>(r, call, lane, s, senders, row, x)) return false;
    Raw<2> sum[kUnits];
    switch (inv.geometry.dtype) {
      case DType::kFloat32:
        sum_row<DType::kFloat32, kMembers, kUnits>(call, slice, x, sum);
        break;
      case DType::kBfloat16:
        sum_row<DType::kBfloat16, kMembers, kUnits>(call, slice, x, sum);
        break;
      default:
        sum_row<DType::kFloat16, kMembers, kUnits>(call, slice, x, sum);
        break;
    }
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

template <int kMembers, int kUnits, bool kOneRow>
__device__ __forceinline__ bool receive_messages(CudaRank& r, const SoloCall& call,
                                                 const Stretch& w, std::uint32_t lane,
                                                 const Shared& s, PlainRow<kUnits> row) {
  const Senders<kMembers> senders = senders_of<kMembers>(call, s);
#pragma unroll 1
  for (; row.has(0); row = row.next()) {
    Raw<2> x[kMembers][kUnits];
    if (!await_row<kMembers, kUnits>(r, call, lane, s, senders, row, x)) return false;
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (senders.from[q] == nullptr) continue;
      char* const to = w.output + call.received_to + (call.collects ? q * call.block_bytes : 0);
      store_plain<kUnits>(to, row, x[q]);
    }
    if constexpr (kOneRow) return true;
  }
  return true;
}

template <int kMembers, int kUnits, bool kOneRow>
__device__ __forceinline__ bool move_rows(CudaRank& r, const SoloCall& call, const Invocation& inv,
                                          const Stretch& w, std::uint32_t lane, const Shared& s,
                                          Held& held) {
  const PlainRow<kUnits> begin{hand(), w.units, hands()};
  Raw<2> sent[kMembers - 1][kUnits], own[kUnits];
  load_sent<kMembers, kUnits>(call, w, begin, sent);
  if (call.reduces) load_plain<kUnits>(w.input + call.own_from, begin, own);
  sync_block();
  if (s.ok == 0) return false;

  if constexpr (kOneRow) {
    send_row<kMembers, kUnits>(call, s, begin, sent);
  } else if (call.num_sent != 0) {
#pragma unroll 1
    for (PlainRow<kUnits> row = begin; row.has(0); row = row.next()) {
      // The next row is under way while one is sent.
      Raw<2> next[kMembers - 1][kUnits];
      load_sent<kMembers, kUnits>(call, w, row.next(), next);
      send_row<kMembers, kUnits>(call, s, row, sent);
#pragma unroll
      for (int i = 0; i < kMembers - 1; ++i) {
#pragma unroll
        for (int h = 0; h < kUnits; ++h) sent[i][h] = next[i][h];
      }
    }
  }
  if (call.copies && w.input + call.own_from != w.output + call.own_to) {
#pragma unroll 1
    for (PlainRow<kUnits> row = begin; row.has(0); row = row.next()) {
      Raw<2> x[kUnits];
      load_plain<kUnits>(w.input + call.own_from, row, x);
      store_plain<kUnits>(w.output + call.own_to, row, x);
    }
  }
  if (call.reduces) {
    return receive_sums<kMembers, kUnits, kOneRow>(r, call, inv, w, lane, s, begin, own, held);
  }
  if (call.num_received == 0) return true;
  return receive_messages<kMembers, kUnits, kOneRow>(r, call, w, lane, s, begin);
}

// As move_all() of solo_one_shot.cuh.
template <int kMembers>
__device__ __forceinline__ bool move_plain(CudaRank& r, const SoloCall& call, const Invocation& inv,
                                           const Stretch& w, std::uint32_t lane, const Shared& s,
                                           Held& held) {
  if (w.units <= hands()) return move_rows<kMembers, 1, true>(r, call, inv, w, lane, s, held);
  if constexpr (kMembers <= 4) {
    if (w.units > 2 * hands()) {
      return move_rows<kMembers, 4, false>(r, call, inv, w, lane, s, held);
    }
    return move_rows<kMembers, 2, true>(r, call, inv, w, lane, s, held);
  }
  return move_rows<kMembers, 2, false>(r, call, inv, w, lane, s, held);
}

}  // namespace solo
}  // namespace unjam
