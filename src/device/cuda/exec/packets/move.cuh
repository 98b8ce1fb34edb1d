// What movers do with packets: send, copy the own data, receive, reduce; whatever the counts and
// alignments. (plain.cuh: where all of it is whole units.)
#pragma once

#include "device/cuda/exec/packets/places.cuh"

namespace unjam {
namespace in_stream {

// How often a packet is looked for before a peer is poked.
inline constexpr std::uint32_t kPokePolls = 32;

// What a thread has under way at once.
inline constexpr int kRow = 2;
static_assert(kStreamCallUnits % kRow == 0 && kStreamCallUnitBytes == kUnitBytes);

// What of a call movers do in one go: those of the engine send of several calls, then receive.
enum class Half { kBoth, kSends, kReceives };

// ---- sending ----

__device__ __forceinline__ std::uint32_t items_to_send(const StreamCall& call, const Stretch& w) {
  if (call.num_sent == 0) return 0;
  return call.scatters ? w.places * call.num_sent : w.places;
}

__device__ __forceinline__ void load_items(const StreamCall& call, const Stretch& w,
                                           std::uint32_t begin, Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + hand() + h * hands();
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t block =
        call.scatters ? around(call, call.first_sent + item.message) * call.block_bytes : 0;
    const Unit unit = unit_of(call, w.bytes, item.place);
    x[h] = load_user(w.input + call.sent_from + block + unit.at, unit.bytes);
  }
}

__device__ __forceinline__ void send_items(const StreamCall& call, const Stretch& w,
                                           const Shared& s, std::uint32_t begin,
                                           const Raw<2> (&x)[kRow]) {
  const std::uint32_t items = items_to_send(call, w);
#pragma unroll
  for (int h = 0; h < kRow; ++h) {
    const std::uint32_t index = begin + hand() + h * hands();
    if (index >= items) break;
    const Item item = item_of(w, index, call.scatters);
    const std::uint32_t end = call.scatters ? item.message + 1 : call.num_sent;
#pragma unroll 1
    for (std::uint32_t i = item.message; i < end; ++i) {
      const std::uint32_t q = around(call, call.first_sent + i);
      store_place(call, s.to[q], item.place, x[h], call.flag);
    }
  }
}

// `first`: the first row, loaded before. The next one is under way while one is sent.
__device__ __forceinline__ void send_all(const StreamCall& call, const Stretch& w, const Shared& s,
                                         Raw<2> (&first)[kRow]) {
  const std::uint32_t items = items_to_send(call, w), step = kRow * hands();
#pragma unroll 1
  for (std::uint32_t begin = 0; begin < items; begin += step) {
    Raw<2> next[kRow];
    load_items(call, w, begin + step, next);
    send_items(call, w, s, begin, first);
#pragma unroll
    for (int h = 0; h < kRow; ++h) first[h] = next[h];
  }
}

// ---- the own data ----

template <int kUnits>
__device__ __forceinline__ void load_own(const StreamCall& call, const Stretch& w,
                                         std::uint32_t begin, Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    const Unit unit = unit_of(call, w.bytes, begin + hand() + h * hands());
    x[h] = {};
    if (unit.bytes == 0) continue;
    x[h] = load_user(w.input + call.own_from + unit.at, unit.bytes);
  }
}

template <int kUnits>
__device__ __forceinline__ void store_own(const StreamCall& call, const Stretch& w,
                                          std::uint32_t to, std::uint32_t begin,
                                          const Raw<2> (&x)[kUnits]) {
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    const Unit unit = unit_of(call, w.bytes, begin + hand() + h * hands());
    if (unit.bytes != 0) store_user(w.output + to + unit.at, x[h], unit.bytes);
  }
}

// Of a peer whose packet has not come for a while: it may have been called beside its streams, and
// be asleep until it hears that something has come for it. By the first mover, whose units are
// awaited if any are. It has not seen what the others have sent; as of the last pokes,
// tell_peers(), peers look again. `value`: another one each time.
__device__ __forceinline__ void poke_early(CudaRank& r, const StreamCall& call, std::uint32_t lane,
                                           std::uint32_t value) {
  if (hand() != 0 || call.num_sent == 0) return;
  fence_system();
  for (std::uint32_t i = 0; i < call.num_sent; ++i) {
    const std::uint32_t peer = call.members[around(call, call.first_sent + i)];
    store_system(r.pokes[peer][lane], value);
  }
}

// ---- receiving: what is copied ----

__device__ __forceinline__ bool receive_copies(CudaRank& r, const StreamCall& call,
                                               const Stretch& w, std::uint32_t lane,
                                               const Shared& s) {
  const std::uint32_t items = w.places * (call.collects ? call.num_received : 1);
#pragma unroll 1
  for (std::uint32_t begin = 0; begin + hand() < items; begin += kRow * hands()) {
    const char* from[kRow];
    char* to[kRow];
    std::uint32_t place[kRow], bytes[kRow];
    Raw<2> x[kRow];
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      const std::uint32_t index = begin + hand() + h * hands();
      from[h] = nullptr;
      bytes[h] = 0;
      if (index >= items) break;
      const Item item = item_of(w, index, call.collects);
      const std::uint32_t q = around(call, call.first_received + item.message);
      const Unit unit = unit_of(call, w.bytes, item.place);
      from[h] = s.from[q];
      place[h] = item.place;
      to[h] = w.output + call.received_to + (call.collects ? q * call.block_bytes : 0) + unit.at;
      bytes[h] = unit.bytes;
    }
    bool all = false;
    for (std::uint32_t polls = 0; !all && polls < call.most_polls; ++polls) {
      if (polls == kPokePolls) poke_early(r, call, lane, s.poke);
      if (any_of(call, is_hopeless(s))) break;
      all = look_at_row(call, from, place, call.flag, x);
    }
    if (!all) return false;
#pragma unroll
    for (int h = 0; h < kRow; ++h) {
      if (bytes[h] != 0) store_user(to[h], x[h], bytes[h]);
    }
  }
  return true;
}

// ---- receiving: what is reduced ----

// A row's units of every member, by group rank. All members at once: their packets are looked for
// together.
template <int kUnits>
struct Row {
  Raw<2> raw[kStreamCallRanks][kUnits];
};

template <int kUnits>
__device__ __forceinline__ bool collect_row(CudaRank& r, const StreamCall& call, const Stretch& w,
                                            std::uint32_t lane, const Shared& s,
                                            std::uint32_t begin, const Raw<2> (&own)[kUnits],
                                            Row<kUnits>& row) {
  for (std::uint32_t polls = 0; polls < call.most_polls; ++polls) {
    if (polls == kPokePolls) poke_early(r, call, lane, s.poke);
    if (any_of(call, is_hopeless(s))) break;
    bool all = true;
#pragma unroll
    for (int h = 0; h < kUnits; ++h) {
      const std::uint32_t place = begin + hand() + h * hands();
      const bool there = place < w.places;
      cuda_leaves::PacketUnit found[kStreamCallRanks];
      load_together(call);
#pragma unroll
      for (int q = 0; q < static_cast<int>(kStreamCallRanks); ++q) {
        if (q >= call.places || q == call.place || !there) continue;
        found[q] = load_place(call, s.from[q], place);
      }
#pragma unroll
      for (int q = 0; q < static_cast<int>(kStreamCallRanks); ++q) {
        row.raw[q][h] = own[h];
        if (q >= call.places || q == call.place || !there) continue;
        all &= has_come(call, found[q], place, call.flag, row.raw[q][h]);
      }
    }
    if (all_of(call, all)) return true;
  }
  return false;
}

// For reduce_pieces() of the leaves, which makes the bits: the same as the engine's.
template <int kUnits>
struct RowAccess {
  Row<kUnits>& row;
  Raw<2> (&result)[kUnits];
  static constexpr int kBatch = cuda_leaves::kPacketBatch;
  static_assert(kStreamCallRanks == 2 * kBatch);
  __device__ __forceinline__ void load(int, Raw<2> (&x)[kBatch][kUnits]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int h = 0; h < kUnits; ++h) {
        x[i][h] = row.raw[i][h];
        row.raw[i][h] = row.raw[kBatch + i][h];
      }
    }
  }
  __device__ __forceinline__ void store(const Raw<2> (&x)[kUnits]) {
#pragma unroll
    for (int h = 0; h < kUnits; ++h) result[h] = x[h];
  }
};

template <DType dtype, int kUnits>
__device__ __forceinline__ void reduce_row(const cuda_leaves::Slice& slice, Row<kUnits>& row,
                                           Raw<2> (&result)[kUnits]) {
  RowAccess<kUnits> access{row, result};
  cuda_leaves::reduce_pieces<dtype, 2, kUnits, RowAccess<kUnits>::kBatch>(slice, access);
}

template <int kUnits>
__device__ __forceinline__ void reduce_row_any(DType dtype, const cuda_leaves::Slice& slice,
                                               Row<kUnits>& row, Raw<2> (&result)[kUnits]) {
  cuda_leaves::with_dtype(dtype, [&](auto type) __attribute__((always_inline)) {
    reduce_row<decltype(type)::value>(slice, row, result);
  });
}

// A thread's results: of its j-th place. In memory of the thread: they are looked at once, and a
// loop over registers would be eight times the code.
struct Held {
  Raw<2> unit[kStreamCallUnits];
};

// Stores nothing. `own`: the own data of the first row. each(begin, results) is told of every
// row's.
template <int kUnits, class Each>
__device__ __forceinline__ bool receive_reduction(CudaRank& r, const StreamCall& call,
                                                  const Invocation& inv, const Stretch& w,
                                                  std::uint32_t lane, const Shared& s,
                                                  Raw<2> (&own)[kUnits], Held& held, Each each) {
  static_assert(kStreamCallUnits % kUnits == 0);
  const cuda_leaves::Slice slice = slice_of(call, inv);
  const std::uint32_t step = kUnits * hands();
#pragma unroll 1
  for (std::uint32_t begin = 0, k = 0; begin < w.places; begin += step, ++k) {
    // Under way while packets are looked for.
    Raw<2> next[kUnits];
    load_own(call, w, begin + step, next);
    Row<kUnits> row;
    if (!collect_row(r, call, w, lane, s, begin, own, row)) return false;
    Raw<2> result[kUnits];
    reduce_row_any(inv.geometry.dtype, slice, row, result);
    each(begin, result);
#pragma unroll
    for (int h = 0; h < kUnits; ++h) held.unit[k * kUnits + h] = result[h], own[h] = next[h];
  }
  return true;
}

__device__ __forceinline__ void store_reduction(const StreamCall& call, const Stretch& w,
                                                const Held& held) {
#pragma unroll 1
  for (std::uint32_t place = hand(), j = 0; place < w.places; place += hands(), ++j) {
    const Unit unit = unit_of(call, w.bytes, place);
    if (unit.bytes != 0) {
      store_user(w.output + call.received_to + unit.at, held.unit[j], unit.bytes);
    }
  }
}

// The movers' part, to the point where all of a thread's has come (true). What is reduced is left
// in `held`. looked(): as in plain.cuh. kReduces: whether it may be a reduction.
template <Half kHalf, bool kReduces = true, class Looked>
__device__ __forceinline__ bool move_all(CudaRank& r, const StreamCall& call, const Invocation& inv,
                                         const Stretch& w, std::uint32_t lane, const Shared& s,
                                         Held& held, Looked looked) {
  constexpr bool kSends = kHalf != Half::kReceives, kReceives = kHalf != Half::kSends;
  // Data that nothing else is needed for come first, and meanwhile the first warp looks.
  Raw<2> ahead[kRow] = {}, own[kRow] = {};
  if constexpr (kSends) load_items(call, w, 0, ahead);
  if constexpr (kReceives && kReduces) {
    if (call.reduces) load_own(call, w, 0, own);
  }
  if (!looked()) return false;

  if constexpr (kSends) send_all(call, w, s, ahead);
  if (kSends && call.copies && w.input + call.own_from != w.output + call.own_to) {
    const std::uint32_t step = kRow * hands();
#pragma unroll 1
    for (std::uint32_t k = 0; k < w.places; k += step) {
      Raw<2> x[kRow];
      load_own(call, w, k, x);
      store_own(call, w, call.own_to, k, x);
    }
  }
  if constexpr (!kReceives) return true;
  if constexpr (kReduces) {
    if (call.reduces) {
      return receive_reduction(r, call, inv, w, lane, s, own, held,
                               [](std::uint32_t, const Raw<2>(&)[kRow]) {});
    }
  }
  return call.num_received == 0 || receive_copies(r, call, w, lane, s);
}

}  // namespace in_stream
}  // namespace unjam
