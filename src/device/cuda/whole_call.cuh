// What a lane does for short invocations, by its engine, in one go (engine.h: "Whole calls"): as
// solo_one_shot.cuh, which does it without an engine, of calls of one hop whose lanes make one loop
// each. What differs: the lane's lease is held, the keys' former uses have ended, the inputs are
// there, ends and progress are the engine's, and there are several calls. The block sends of all of
// them, then it receives of all.
//
// The first warp sees to members, half a warp to a call's, ahead of the movers. Words that order
// them:
//   looked    by the first warp; release: of so many calls it is known where what is sent and what
//             comes in lies, and whether all is as it should be (Shared::ok).
//   received  by the first mover; release: of so many calls movers are through with what comes in,
//             all of it or nothing (`come`, their vote). The first warp, which acquires it, gives
//             credits behind the movers' loads.
// No call waits for another one's peers: each has its polls (SoloCall::most_polls).
//
// Redo: as in solo.cuh. Nothing of a reduction is stored before the vote, and of other kinds the
// same bytes that a later turn stores again.
//
// Blocks have as many threads as the host reckons with (SoloCall: kSoloUnits): those of calls in
// streams may have fewer, so a call that serves as an engine does without this.
#pragma once

#include "device/cuda/solo_one_shot.cuh"

namespace unjam {

inline constexpr std::uint32_t kCallWatchers = 16;  // threads of the first warp, see solo::Member
static_assert(kCallWatchers == 2 * kSoloRanks);

// What the engine has as a kernel's arguments for calls without it, in shared memory, of a block.
struct WholeCalls {
  SoloCall call[kMostWholes];
  Invocation inv[kMostWholes];
  solo::Shared shared[kMostWholes];
  solo::Known known[kMostWholes][kCallWatchers];
  std::uint32_t come[kMostWholes];
  std::uint32_t looked;
  std::uint32_t received;
  std::uint32_t to_poke;  // ranks, as bits
};
// (Raw: shared variables have no constructors. At one known address: in registers of functions that
// move data there is no room for pointers to it.)
__shared__ alignas(16) unsigned char whole_calls_bytes[sizeof(WholeCalls)];
__device__ __forceinline__ WholeCalls& whole_calls() {
  return *reinterpret_cast<WholeCalls*>(whole_calls_bytes);
}

// By the movers. True: all of them said so.
__device__ __forceinline__ bool movers_agree(bool x) {
  constexpr unsigned kBarrier = 14;  // see sync_block_apart()
  std::uint32_t all;
  __syncwarp();
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.red.and.pred q, %2, %3, p;"
      " selp.u32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(x ? 1u : 0u), "n"(kBarrier), "r"(solo::hands())
      : "memory");
  return all != 0;
}

// Of call i, by the movers. Functions of their own, each with all registers. kMembers: 0: any, of
// what is not plain, and copied. Received is what all have voted for.
template <solo::Half kHalf, int kMembers>
__device__ __noinline__ bool move_whole(CudaRank* rank, std::uint32_t lane, std::uint32_t i) {
  using namespace solo;
  WholeCalls& x = whole_calls();
  const SoloCall& call = x.call[i];
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
template <solo::Half kHalf>
__device__ __forceinline__ bool move_whole_any(CudaRank* rank, std::uint32_t lane,
                                               std::uint32_t i) {
  const SoloCall& call = whole_calls().call[i];
  auto* move = move_whole<kHalf, static_cast<int>(kSoloRanks)>;
  if (!call.plain) {
    move = move_whole<kHalf, 0>;
  } else if (call.group_size <= 4) {
    move = call.group_size == 2 ? move_whole<kHalf, 2> : move_whole<kHalf, 4>;
  }
  return with_all_registers(move)(rank, lane, i);
}

// By the movers.
__device__ __forceinline__ void move_wholes(CudaRank& r, std::uint32_t lane, std::uint32_t n) {
  WholeCalls& x = whole_calls();
#pragma unroll 1
  for (std::uint32_t i = 0; i < n; ++i) {
    if (x.call[i].num_sent != 0 || x.call[i].copies)
      move_whole_any<solo::Half::kSends>(&r, lane, i);
  }
#pragma unroll 1
  for (std::uint32_t i = 0; i < n; ++i) {
    const bool come = move_whole_any<solo::Half::kReceives>(&r, lane, i);
    if (solo::hand() == 0) {
      x.come[i] = come ? 1 : 0;
      CudaDev::store_block(x.received, i + 1);
    }
  }
}

// By the first warp: each(i, call, transport, member, ok) for all calls; `ok`: is there one for
// this thread.
template <class Each>
__device__ __forceinline__ void for_members(std::uint32_t lane, std::uint32_t n, Each each) {
  using namespace solo;
  constexpr std::uint32_t kAtOnce = 32 / kCallWatchers;
  WholeCalls& x = whole_calls();
#pragma unroll 1
  for (std::uint32_t first = 0; first < n; first += kAtOnce) {
    const std::uint32_t mine = first + threadIdx.x / kCallWatchers;
    const std::uint32_t i = mine < n ? mine : first;
    const SoloCall& call = x.call[i];
    const Stretch w = stretch_of(call, x.inv[i], lane - call.first_lane);
    Member m = member_of(call, w, threadIdx.x % kCallWatchers);
    if (mine >= n) m.to = m.from = false;
    each(i, mine < n, call, transport_of(call, lane), m);
    __syncwarp();
  }
}

// By the first warp.
__device__ __forceinline__ void see_to_members(CudaRank& r, std::uint32_t lane, std::uint32_t n) {
  using namespace solo;
  constexpr std::uint32_t kWarp = 0xffffffff;
  WholeCalls& x = whole_calls();
  const std::uint32_t watcher = threadIdx.x % kCallWatchers;
  // One for each call, for poke_early(); and one for all.
  const std::uint32_t poke = load_relaxed_local(r.poke_counts[lane]) + 1;
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const SoloCall& call, const LaneTransport& t,
                  const Member& m) {
                Known known{};
                const bool ok = look_at_member<1>(call, t, m, false, known, x.shared[i]);
                const std::uint32_t all = __ballot_sync(kWarp, ok);
                if (mine) x.known[i][watcher] = known;
                if (mine && watcher == 0) {
                  constexpr std::uint32_t kHalfWarp = (1u << kCallWatchers) - 1;
                  x.shared[i].ok =
                      (all >> (threadIdx.x - watcher) & kHalfWarp) == kHalfWarp ? 1 : 0;
                  x.shared[i].poke = poke + i;
                }
                __syncwarp();
                if (threadIdx.x == 0) CudaDev::store_block(x.looked, i + 32 / kCallWatchers);
              });
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const SoloCall& call, const LaneTransport& t,
                  const Member& m) {
                if (mine && x.shared[i].ok != 0) {
                  look_at_member_again(call, t, m, x.known[i][watcher], x.shared[i]);
                }
              });
  for_members(lane, n,
              [&](std::uint32_t i, bool mine, const SoloCall& call, const LaneTransport& t,
                  const Member& m) {
                while (CudaDev::load_block(x.received) <= i) {
                }
                __syncwarp();
                if (!mine || x.shared[i].ok == 0) return;
                if (tell_member(call, t, m, x.come[i], 1, x.known[i][watcher])) {
                  atomicOr(&x.to_poke, 1u << m.peer);
                }
              });
  // Of all calls together, see solo.cuh about what may come before what.
  if ((x.to_poke >> threadIdx.x & 1) != 0) store_system(r.pokes[threadIdx.x][lane], poke + n);
  __syncwarp();
  if (threadIdx.x == 0) r.poke_counts[lane] = poke + n;
}

// By all threads: what the calls' descriptions are. A barrier follows.
__device__ __forceinline__ void fetch_calls(CudaRank& r, const WholeTry* tries, std::uint32_t n) {
  WholeCalls& x = whole_calls();
  constexpr std::uint32_t kCall = sizeof(SoloCall) / sizeof(uint4);
  constexpr std::uint32_t kAll = kCall + sizeof(Invocation) / sizeof(uint4);
  for (std::uint32_t k = threadIdx.x; k < n * kAll; k += blockDim.x) {
    const std::uint32_t i = k / kAll, v = k % kAll, slot = tries[i].slot;
    const bool of_call = v < kCall;
    const auto* from = of_call
                           ? reinterpret_cast<const uint4*>(&r.calls[slot]) + v
                           : reinterpret_cast<const uint4*>(&r.rank.invocations[slot]) + v - kCall;
    auto* to = of_call ? reinterpret_cast<uint4*>(&x.call[i]) + v
                       : reinterpret_cast<uint4*>(&x.inv[i]) + v - kCall;
    *to = *from;
  }
}

// By all threads of the block. Ends with a barrier: all that has been stored is behind it.
inline __device__ __noinline__ void run_whole_calls(CudaRank* rank, LaneStats* stats,
                                                    std::uint32_t lane, WholeTry* shared_tries,
                                                    std::uint32_t n) {
  using namespace solo;
  CudaRank& r = *rank;
  WholeCalls& x = whole_calls();
  WholeTry* const tries = &in_shared(*shared_tries);

  fetch_calls(r, tries, n);
  if (threadIdx.x == 0) x.looked = x.received = x.to_poke = 0;
  sync_block();
  if (threadIdx.x < n) {
    SoloCall& call = x.call[threadIdx.x];
    call.most_polls = tries[threadIdx.x].polls;
    if (tries[threadIdx.x].how == Whole::kReceiving) {
      call.num_sent = 0;
      call.copies = false;
    }
    x.shared[threadIdx.x].hopeless = 0;
  }
  sync_block();

  if (is_mover()) {
    move_wholes(r, lane, n);
  } else {
    see_to_members(r, lane, n);
  }
  sync_block();

  if (threadIdx.x < n) {
    const std::uint32_t i = threadIdx.x;
    WholeTry& t = tries[i];
    t.receives = x.call[i].num_received != 0 &&
                 stretch_of(x.call[i], x.inv[i], lane - x.call[i].first_lane).bytes != 0;
    t.end = x.shared[i].ok == 0         ? WholeEnd::kUnable
            : x.come[i] != 0            ? WholeEnd::kDone
            : x.shared[i].hopeless != 0 ? WholeEnd::kElsewhere
                                        : WholeEnd::kWaits;
  }
  __syncwarp();
  if (threadIdx.x == 0) {
#pragma unroll 1
    for (std::uint32_t i = 0; i < n; ++i) {
      const SoloCall& call = x.call[i];
      const std::uint32_t bytes = stretch_of(call, x.inv[i], lane - call.first_lane).bytes;
      if (x.shared[i].ok == 0 || bytes == 0) continue;
      const std::uint32_t before = tries[i].how == Whole::kAll ? 0u : call.before;
      const bool done = x.come[i] != 0;
      stats->slices += (done ? x.inv[i].num_primitives : call.before) - before;
      if (done && call.num_received != 0) ++stats->received;
      stats->bytes_sent += std::uint64_t{bytes} * call.num_sent;
    }
  }
  __syncwarp();
}

}  // namespace unjam
