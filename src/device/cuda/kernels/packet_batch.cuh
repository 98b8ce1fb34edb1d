// What a lane does for short invocations, by its engine, in one go (docs/internals/batches.md): as
// call_by_packets.cuh does it without an engine, of several calls. The block sends of all of them,
// then it receives of all, and of those of two hops once more. Redo: docs/internals/redo.md.
//
// The first warp sees to members, half a warp to a call's, ahead of the movers. Words order them:
//   looked        by the first warp; release: of so many calls it is known where data lie, and
//                 whether all is as it should be (Shared::ok)
//   looked_again  the same: whether incoming connectors are the key's (Shared::hopeless)
//   received      by the first mover; release: of so many calls movers are through with what comes
//                 in. The first warp acquires it, and gives credits behind the movers' loads
#pragma once

#include "device/cuda/exec/packets/plain.cuh"
#include "device/cuda/exec/packets/tell.cuh"
#include "device/cuda/exec/packets/two_hops.cuh"
#include "device/cuda/exec/several_calls.cuh"

namespace unjam {

// By the movers. True: all of them said so.
__device__ __forceinline__ bool movers_agree(bool x) {
  constexpr unsigned kBarrier = 14;  // see sync_block_apart()
  __syncwarp();
  return all_of_group<kBarrier>(x, in_stream::hands());
}

// Of call i, by the movers. Functions of their own, each with all registers. kMembers: 0: any, of
// what is not plain, and copied. Received is what all have voted for.
template <in_stream::Half kHalf, int kMembers>
__device__ __noinline__ bool move_batched(CudaRank* rank, std::uint32_t lane, std::uint32_t i) {
  using namespace in_stream;
  BatchCalls& x = batch_calls();
  const StreamCall& call = x.call[i];
  const Invocation& inv = x.inv[i];
  const Shared& s = x.shared[i];
  const Stretch w = stretch_of(call, inv, lane - call.first_lane);
  const auto looked = [&] {
    while (CudaDev::load_block(x.looked) <= i) {
    }
    return s.ok != 0;
  };
  Held held;
  bool come = true;
  if constexpr (kMembers == 0) {
    come = move_all<kHalf, /*kReduces=*/false>(*rank, call, inv, w, lane, s, held, looked);
  } else {
    come = move_plain_any<kHalf, kMembers>(*rank, call, inv, w, lane, s, held, looked);
  }
  if constexpr (kHalf == Half::kReceives) {
    come = movers_agree(come);
    if constexpr (kMembers != 0) {
      if (come && call.reduces) store_sums_held(call, w, held);
    }
  }
  return come;
}
template <in_stream::Half kHalf>
__device__ __forceinline__ bool move_batched_any(CudaRank* rank, std::uint32_t lane,
                                                 std::uint32_t i) {
  const StreamCall& call = batch_calls().call[i];
  const auto of = [](auto members) { return &move_batched<kHalf, decltype(members)::value>; };
  auto* const move = call.plain ? in_stream::with_members(call, of) : &move_batched<kHalf, 0>;
  return with_all_registers(move)(rank, lane, i);
}

// Of call i, of two hops, one behind what it scatters. Where nothing can come the vote says so.
template <in_stream::LaterHop kHop, int kMembers>
__device__ __noinline__ bool move_batched_later(CudaRank* rank, std::uint32_t lane,
                                                std::uint32_t i) {
  using namespace in_stream;
  BatchCalls& x = batch_calls();
  const StreamCall& call = x.call[i];
  const Shared& s = x.shared[i];
  const Stretch w = stretch_of(call, x.inv[i], lane - call.first_lane);
  while (CudaDev::load_block(x.looked_again) <= i) {
  }
  Held held;
  bool come = s.ok != 0 && !is_hopeless(s);
  come = come && move_later<kHop, kMembers>(*rank, call, x.inv[i], w, lane, s, held);
  come = movers_agree(come);
  if constexpr (kHop == LaterHop::kGathers) {
    if (come) store_sums_held(call, w, held);
  }
  return come;
}
template <in_stream::LaterHop kHop>
__device__ __forceinline__ bool move_batched_later_any(CudaRank* rank, std::uint32_t lane,
                                                       std::uint32_t i) {
  auto* const move = in_stream::with_members(batch_calls().call[i], [](auto members) {
    return &move_batched_later<kHop, decltype(members)::value>;
  });
  return with_all_registers(move)(rank, lane, i);
}

// By the movers: what has come of call i, and of all in front of it.
__device__ __forceinline__ void say_received(std::uint32_t i, bool come) {
  BatchCalls& x = batch_calls();
  if (in_stream::hand() != 0) return;
  x.come[i] = come ? 1 : 0;
  CudaDev::store_block(x.received, i + 1);
}

// By the movers.
__device__ __forceinline__ void move_batch(CudaRank& r, std::uint32_t lane, std::uint32_t n) {
  using in_stream::LaterHop;
  BatchCalls& x = batch_calls();
  bool two_hops = false;
  std::uint32_t gathered = 0;  // calls, as bits: what all have voted for
#pragma unroll 1
  for (std::uint32_t i = 0; i < n; ++i) {
    const StreamCall& call = x.call[i];
    two_hops = two_hops || call.two_hops;
    const bool sends =
        call.two_hops ? x.how[i] == BatchWay::kAll : call.num_sent != 0 || call.copies;
    if (sends) move_batched_any<in_stream::Half::kSends>(&r, lane, i);
  }
  // Of all calls, before any is behind its second hop.
#pragma unroll 1
  for (std::uint32_t i = 0; i < n; ++i) {
    if (x.call[i].two_hops) {
      if (x.how[i] == BatchWay::kCollecting) continue;
      const bool come = move_batched_later_any<LaterHop::kGathers>(&r, lane, i);
      if (come) gathered |= 1u << i;
      if (in_stream::hand() == 0) x.gathered[i] = come ? 1 : 0;
    } else {
      const bool come = move_batched_any<in_stream::Half::kReceives>(&r, lane, i);
      if (!two_hops) {
        say_received(i, come);
      } else if (in_stream::hand() == 0) {
        x.come[i] = come ? 1 : 0;
      }
    }
  }
  if (!two_hops) return;
#pragma unroll 1
  for (std::uint32_t i = 0; i < n; ++i) {
    bool come = false;
    if (!x.call[i].two_hops) {
      come = x.come[i] != 0;
    } else if (x.how[i] == BatchWay::kCollecting || (gathered >> i & 1) != 0) {
      come = move_batched_later_any<LaterHop::kCollects>(&r, lane, i);
    }
    say_received(i, come);
  }
}

// By the first warp: each(i, call, transport, member, ok) for all calls; `ok`: is there one for
// this thread.
template <class Each>
__device__ __forceinline__ void for_members(std::uint32_t lane, std::uint32_t n, Each each) {
  using namespace in_stream;
  constexpr std::uint32_t kAtOnce = 32 / kCallWatchers;
  BatchCalls& x = batch_calls();
#pragma unroll 1
  for (std::uint32_t first = 0; first < n; first += kAtOnce) {
    const std::uint32_t mine = first + threadIdx.x / kCallWatchers;
    const std::uint32_t i = mine < n ? mine : first;
    const StreamCall& call = x.call[i];
    const Stretch w = stretch_of(call, x.inv[i], lane - call.first_lane);
    Member m = member_of(call, w, threadIdx.x % kCallWatchers);
    if (mine >= n) m.to = m.from = false;
    each(i, mine < n, call, transport_of(call, lane), m);
    __syncwarp();
  }
}

// By the first warp.
__device__ __forceinline__ void see_to_members(CudaRank& r, std::uint32_t lane, std::uint32_t n) {
  using namespace in_stream;
  constexpr std::uint32_t kWarp = 0xffffffff;
  BatchCalls& x = batch_calls();
  const std::uint32_t watcher = threadIdx.x % kCallWatchers;
  // One for each call and hop, for poke_early(); and one for all.
  const std::uint32_t poke = load_relaxed_local(r.poke_counts[lane]) + 1;
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const StreamCall& call, const LaneTransport& t,
                  const Member& m) {
                Known known{};
                const bool ok = look_at_member<2>(call, t, m, false, known, x.shared[i],
                                                  x.to_send(i), x.to_take(i));
                const std::uint32_t all = __ballot_sync(kWarp, ok);
                if (mine) x.known[i][watcher] = known;
                if (mine && watcher == 0) {
                  constexpr std::uint32_t kHalfWarp = (1u << kCallWatchers) - 1;
                  x.shared[i].ok =
                      (all >> (threadIdx.x - watcher) & kHalfWarp) == kHalfWarp ? 1 : 0;
                  // (In the order in which they may be used: the words only count up.)
                  x.shared[i].poke = poke + i;
                  x.shared[i].later_poke = poke + n + i;
                }
                __syncwarp();
                if (threadIdx.x == 0) CudaDev::store_block(x.looked, i + 32 / kCallWatchers);
              });
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const StreamCall& call, const LaneTransport& t,
                  const Member& m) {
                if (mine && x.shared[i].ok != 0) {
                  look_at_member_again(call, t, m, x.known[i][watcher], x.shared[i]);
                }
                __syncwarp();
                if (threadIdx.x == 0) {
                  CudaDev::store_block(x.looked_again, i + 32 / kCallWatchers);
                }
              });
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const StreamCall& call, const LaneTransport& t,
                  const Member& m) {
                while (CudaDev::load_block(x.received) <= i) {
                }
                __syncwarp();
                if (!mine || x.shared[i].ok == 0) return;
                if (tell_member(call, t, m, x.taken(i), x.sent(i), x.known[i][watcher])) {
                  atomicOr(&x.to_poke[m.peer / 32], 1u << m.peer % 32);
                }
              });
  // Of all calls together, see exec/packets/tell.cuh about what may come before what.
  for (std::uint32_t w = 0; w < kRankWords; ++w) {
    if ((x.to_poke[w] >> threadIdx.x & 1) == 0) continue;
    store_system(r.pokes[32 * w + threadIdx.x][lane], poke + 2 * n);
  }
  __syncwarp();
  if (threadIdx.x == 0) r.poke_counts[lane] = poke + 2 * n;
}

// By all threads of the block. Ends with a barrier: all that has been stored is behind it.
inline __device__ __noinline__ void run_packet_batch(CudaRank* rank, LaneStats* stats,
                                                     std::uint32_t lane, BatchEntry* shared_tries,
                                                     std::uint32_t n) {
  using namespace in_stream;
  CudaRank& r = *rank;
  BatchCalls& x = batch_calls();
  BatchEntry* const tries = &in_shared(*shared_tries);

  fetch_calls(r, tries, n);
  if (threadIdx.x == 0) x.looked = x.looked_again = x.received = 0;
  if (threadIdx.x < kRankWords) x.to_poke[threadIdx.x] = 0;
  sync_block();
  if (threadIdx.x < n) {
    StreamCall& call = x.call[threadIdx.x];
    call.most_polls = tries[threadIdx.x].polls;
    x.how[threadIdx.x] = tries[threadIdx.x].how;
    x.gathered[threadIdx.x] = 0;
    if (tries[threadIdx.x].how == BatchWay::kReceiving && !call.two_hops) {
      call.num_sent = 0;
      call.copies = false;
    }
    x.shared[threadIdx.x].hopeless = 0;
  }
  sync_block();

  if (is_mover()) {
    move_batch(r, lane, n);
  } else {
    see_to_members(r, lane, n);
  }
  sync_block();

  if (threadIdx.x < n) {
    const std::uint32_t i = threadIdx.x;
    BatchEntry& t = tries[i];
    t.receives = x.call[i].num_received != 0 &&
                 stretch_of(x.call[i], x.inv[i], lane - x.call[i].first_lane).bytes != 0;
    t.end = x.shared[i].ok == 0         ? BatchEnd::kUnable
            : x.come[i] != 0            ? BatchEnd::kDone
            : x.shared[i].hopeless != 0 ? BatchEnd::kElsewhere
                                        : BatchEnd::kWaits;
    if (x.call[i].two_hops) {
      t.moved = x.gathered[i] != 0;
      t.sends = t.moved || t.how == BatchWay::kCollecting ? 2 : 1;
    }
  }
  __syncwarp();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < n; ++i) {
      const StreamCall& call = x.call[i];
      const std::uint32_t bytes = stretch_of(call, x.inv[i], lane - call.first_lane).bytes;
      if (x.shared[i].ok == 0 || bytes == 0) continue;
      const bool done = x.come[i] != 0, two_hops = call.two_hops;
      // Primitives behind it when it waits, and before it was tried.
      const std::uint32_t waits = two_hops ? tries[i].sends : call.before;
      const std::uint32_t before = tries[i].how == BatchWay::kAll         ? 0u
                                   : !two_hops                            ? call.before
                                   : tries[i].how == BatchWay::kReceiving ? 1u
                                                                          : 2u;
      stats->slices += (done ? x.inv[i].num_primitives : waits) - before;
      if (call.num_received != 0) stats->received += x.taken(i);
      stats->bytes_sent += std::uint64_t{bytes} * call.num_sent * x.sent(i);
    }
  }
  __syncwarp();
}

}  // namespace unjam
