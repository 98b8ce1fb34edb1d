// What the movers of a call of one hop do (solo_one_shot.cuh), where all of it is whole units and
// aligned, and what is reduced are sums or averages of common formats (SoloCall::plain): the same,
// bit for bit, without a question for each unit, and with as much of all peers' packets under way
// as there are registers for. For at most kMembers members: 2, 4 or 8.
#pragma once

#include "device/cuda/solo.cuh"

namespace unjam {
namespace solo {

// Units of one message that a thread has under way at once.
template <int kMembers>
inline constexpr int kPlainUnits = kMembers <= 4 ? 4 : 2;

// A thread's units: from its first on, hands() apart. Rows of kUnits of them.
template <int kUnits>
struct PlainRow {
  std::uint32_t first;  // this thread's first unit of the row
  std::uint32_t units;  // of the message
  __device__ __forceinline__ bool has(int h) const { return first + h * hands() < units; }
  __device__ __forceinline__ std::uint32_t at(int h) const {  // its data
    return (first + h * hands()) * kUnitBytes;
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

// One look at a row of a peer's packets. True: all have come.
template <int kUnits>
__device__ __forceinline__ bool take_plain(const char* from, const PlainRow<kUnits>& row,
                                           std::uint32_t flag, Raw<2> (&x)[kUnits]) {
  bool all = true;
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (!row.has(h)) continue;
    const cuda_leaves::PacketUnit p = cuda_leaves::load_packet_aligned(from + 2 * row.at(h));
    all &= p.word[0].flag == flag;
    all &= p.word[1].flag == flag;
    x[h] = {{p.word[0].data, p.word[1].data}};
  }
  return all;
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
    if (call.scatters) {
      send_plain<kUnits>(to, row, x[i], call.flag);
    } else {
      send_plain<kUnits>(to, row, x[0], call.flag);
    }
  }
}

// Looks for a row of all senders' packets until all have come; of member q in x[q].
template <int kMembers, int kUnits>
__device__ __forceinline__ bool await_row(CudaRank& r, const SoloCall& call, const Stretch& w,
                                          std::uint32_t lane, const Shared& s,
                                          const PlainRow<kUnits>& row,
                                          Raw<2> (&x)[kMembers][kUnits]) {
#pragma unroll 1
  for (std::uint32_t polls = 0; polls < kPolls; ++polls) {
    bool all = true;
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (!among(call, q, call.first_received, call.num_received)) continue;
      all &= take_plain<kUnits>(s.from[q], row, call.flag, x[q]);
    }
    if (all) return true;
    if (polls == kPokePolls) poke_early(r, call, w, lane, s.poke);
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
      if (q >= call.group_size) break;
      typename F::Acc next[kCount];
      cuda_leaves::decode_piece<F, 2>(slice, q, x[q][h], next);
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kSum>(acc[i], next[i]);
    }
    F::template encode<2>(acc, sum[h]);
  }
}

template <int kMembers, int kUnits>
__device__ __forceinline__ bool receive_sums(CudaRank& r, const SoloCall& call,
                                             const Invocation& inv, const Stretch& w,
                                             std::uint32_t lane, const Shared& s,
                                             Raw<2> (&own)[kUnits], Held& held) {
  static_assert(kSoloUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const std::uint32_t step = kUnits * hands();
#pragma unroll 1
  for (std::uint32_t first = hand(), k = 0; first < w.units; first += step, k += kUnits) {
    const PlainRow<kUnits> row{first, w.units};
    // Under way while packets are looked for.
    Raw<2> next[kUnits];
    load_plain<kUnits>(w.input + call.own_from, {first + step, w.units}, next);
    Raw<2> x[kMembers][kUnits];
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (q != call.group_rank) continue;
#pragma unroll
      for (int h = 0; h < kUnits; ++h) x[q][h] = own[h];
    }
    if (!await_row<kMembers, kUnits>(r, call, w, lane, s, row, x)) return false;
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
    for (int h = 0; h < kUnits; ++h) held.unit[k + h] = sum[h], own[h] = next[h];
  }
  return true;
}

template <int kMembers, int kUnits>
__device__ __forceinline__ bool receive_messages(CudaRank& r, const SoloCall& call,
                                                 const Stretch& w, std::uint32_t lane,
                                                 const Shared& s) {
  const std::uint32_t step = kUnits * hands();
#pragma unroll 1
  for (std::uint32_t first = hand(); first < w.units; first += step) {
    const PlainRow<kUnits> row{first, w.units};
    Raw<2> x[kMembers][kUnits];
    if (!await_row<kMembers, kUnits>(r, call, w, lane, s, row, x)) return false;
#pragma unroll
    for (int q = 0; q < kMembers; ++q) {
      if (!among(call, q, call.first_received, call.num_received)) continue;
      char* const to = w.output + call.received_to + (call.collects ? q * call.block_bytes : 0);
      store_plain<kUnits>(to, row, x[q]);
    }
  }
  return true;
}

// As move_all() of solo_one_shot.cuh.
template <int kMembers>
__device__ __forceinline__ bool move_plain(CudaRank& r, const SoloCall& call, const Invocation& inv,
                                           const Stretch& w, std::uint32_t lane, const Shared& s,
                                           Held& held) {
  constexpr int kUnits = kPlainUnits<kMembers>;
  const std::uint32_t step = kUnits * hands();
  PlainRow<kUnits> row{hand(), w.units};
  Raw<2> sent[kMembers - 1][kUnits], own[kUnits];
  load_sent<kMembers, kUnits>(call, w, row, sent);
  if (call.reduces) load_plain<kUnits>(w.input + call.own_from, row, own);
  sync_block();
  if (s.ok == 0) return false;

  if (call.num_sent != 0) {
#pragma unroll 1
    for (;;) {
      // The next row is under way while one is sent.
      Raw<2> next[kMembers - 1][kUnits];
      const PlainRow<kUnits> ahead{row.first + step, w.units};
      load_sent<kMembers, kUnits>(call, w, ahead, next);
      send_row<kMembers, kUnits>(call, s, row, sent);
      if (ahead.first >= w.units) break;
      row = ahead;
#pragma unroll
      for (int i = 0; i < kMembers - 1; ++i) {
#pragma unroll
        for (int h = 0; h < kUnits; ++h) sent[i][h] = next[i][h];
      }
    }
  }
  if (call.copies && w.input + call.own_from != w.output + call.own_to) {
#pragma unroll 1
    for (std::uint32_t first = hand(); first < w.units; first += step) {
      const PlainRow<kUnits> copied{first, w.units};
      Raw<2> x[kUnits];
      load_plain<kUnits>(w.input + call.own_from, copied, x);
      store_plain<kUnits>(w.output + call.own_to, copied, x);
    }
  }
  if (call.reduces) {
    return receive_sums<kMembers, kUnits>(r, call, inv, w, lane, s, own, held);
  }
  return call.num_received == 0 || receive_messages<kMembers, kUnits>(r, call, w, lane, s);
}

}  // namespace solo
}  // namespace unjam
