// As call_in_stream.cuh, for calls of packets, whose lanes make one loop each: of one hop
// (plan/algorithms/one_shot.cc), in which every block sends what it has for its peers, copies the
// own data, and receives; and of two (plan/algorithms/two_shot.cc), a block of its own function, so
// that calls of one hop pay nothing for it.
#pragma once

#include "device/cuda/exec/packets/plain.cuh"
#include "device/cuda/exec/packets/tell.cuh"
#include "device/cuda/exec/packets/two_hops.cuh"
#include "device/cuda/kernels/call_in_stream.cuh"

namespace unjam {

namespace in_stream {

// By movers: the first hop; of calls of one hop, all. False: some packets have not come.
// looked(): waits until the first warp has looked, and says what it found.
template <std::uint32_t kSteps, class Looked>
__device__ __forceinline__ bool move_first_hop(CudaRank& r, const CudaLaunch& launch,
                                               const Stretch& w, std::uint32_t lane, Shared& s,
                                               const PartWalk& all, Raw<2> (&own)[kGatherUnits],
                                               Held& held, Looked looked) {
  constexpr bool kTwoHops = kSteps == 2;
  constexpr Half kHalf = kTwoHops ? Half::kSends : Half::kBoth;
  const StreamCall& call = launch.call;
  const Invocation& inv = launch.sqe.inv;
  if (call.plain) {
    return with_members(call, [&](auto n) __attribute__((always_inline)) {
      return move_plain_any<kHalf, decltype(n)::value>(r, call, inv, w, lane, s, held, looked);
    });
  }
  if constexpr (kTwoHops) {
    scatter_parts(call, inv, w, s, all, own, looked);
    return true;
  } else {
    return move_all<kHalf>(r, call, inv, w, lane, s, held, looked);
  }
}

// By movers of calls of two hops: the rest. has_gathered: what the first hop brings has come.
// False: some packets have not come.
__device__ __forceinline__ bool move_later_hops(CudaRank& r, const CudaLaunch& launch,
                                                const Stretch& w, std::uint32_t lane, Shared& s,
                                                const PartWalk& all, Raw<2> (&own)[kGatherUnits],
                                                Held& held, bool& has_gathered) {
  const StreamCall& call = launch.call;
  const Invocation& inv = launch.sqe.inv;
  if (!call.plain) {
    has_gathered = gather_part(r, call, inv, w, lane, s, own, held);
  } else {
    // (Of a warp alike: others may say meanwhile that they go on no more.)
    has_gathered = __any_sync(0xffffffff, is_hopeless(s)) == 0 &&
                   move_later_any<LaterHop::kGathers>(r, call, inv, w, lane, s, held);
  }
  if (!has_gathered) *static_cast<volatile std::uint32_t*>(&s.hopeless) = 1;
  if (!call.plain) return has_gathered && collect_parts(r, call, inv, lane, all, s);
  return has_gathered && move_later_any<LaterHop::kCollects>(r, call, inv, w, lane, s, held);
}

// The lane's figures, by one thread. primitives: that it has behind it; taken: packets of each
// peer.
template <std::uint32_t kSteps>
__device__ __forceinline__ void count_packets(LaneStats& stats, const StreamCall& call,
                                              const Stretch& w, bool done, bool gathered,
                                              std::uint32_t primitives, std::uint32_t taken) {
  constexpr bool kTwoHops = kSteps == 2;
  std::uint64_t sent = kTwoHops && !gathered ? 0 : std::uint64_t{w.bytes} * call.num_sent;
  for (std::uint32_t i = 0; kTwoHops && i < call.num_sent; ++i) {
    sent += call.plain ? w.bytes : part_stretch(call, around(call, call.first_sent + i)).bytes;
  }
  if (kTwoHops || w.bytes != 0) {
    add_relaxed(stats.slices, primitives);
    if (kTwoHops || (done && call.num_received != 0)) add_relaxed(stats.received, taken);
  }
  add_relaxed(stats.bytes_sent, sent);
  if (done) add_relaxed(stats.completed, 1);
}

}  // namespace in_stream

// By all threads of a call's block. kSteps: packets that it sends each peer, a block of its own
// function for each. True: the call is for the engine, and this block brings it. False: nothing is
// left to do for this block.
template <std::uint32_t kSteps>
__device__ __forceinline__ bool run_by_packets(CudaRank& r, const CudaLaunch& launch) {
  using namespace in_stream;
  constexpr bool kTwoHops = kSteps == 2;
  const StreamCall& call = launch.call;
  const Invocation& inv = launch.sqe.inv;
  __shared__ Shared s;
  const std::uint32_t lane = call.first_lane + blockIdx.x;
  const Stretch w =
      kTwoHops && !call.plain ? own_stretch(call, inv) : stretch_of(call, inv, blockIdx.x);
  const LaneTransport t = transport_of(call, lane);

  const std::uint32_t attention = approach(r, launch, w, lane, s);

  const PartWalk all = all_parts(call);
  Raw<2> own[kGatherUnits] = {};
  Known known{};
  Held held;
  bool leased = false, come = true, has_gathered = true;
  if (is_mover()) {
    wait_and_say_so(s);
    // The barrier behind which the first warp has looked: all movers take one way.
    const auto looked = [&] {
      sync_block_apart();
      return s.ok != 0;
    };
    come = move_first_hop<kSteps>(r, launch, w, lane, s, all, own, held, looked);
  } else {
    const auto looks = [&](bool patient) { return look<kSteps>(r, call, t, w, patient, known, s); };
    const bool ok =
        look_in_time(r, launch, lane, leased, s, /*close=*/false, looks) != Looked::kInVain;
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
    sync_block_apart();
    // (Of two hops `hopeless` says it: the vote is on what movers have.)
    if (ok) come = look_again(r, call, t, w, known, s) || kTwoHops;
  }
  if (s.ok == 0) return leave_untried(r, launch, lane, leased, s);
  if constexpr (kTwoHops) {
    // All have scattered, and know whether to go on, see two_hops.cuh. (Peers' packets take as long
    // to come.)
    sync_block();
    if (is_mover()) come = move_later_hops(r, launch, w, lane, s, all, own, held, has_gathered);
  }
  if (threadIdx.x == kListener && attention != 0 && is_call_cancelled(r, launch, attention)) {
    come = false;
  }
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;
  const bool gathered = kTwoHops && (done || __syncthreads_and(has_gathered) != 0);

  Ending ending = begin_end(r, launch, done);
  // Primitives that the lane has behind it, and packets of each peer that it has taken.
  const std::uint32_t waits = kTwoHops ? (gathered ? 2 : 1) : call.before;
  const std::uint32_t primitives = done ? (kTwoHops ? 3 : inv.num_primitives) : waits;
  const std::uint32_t taken = kTwoHops ? primitives - 1 : done ? 1 : 0;
  // The report behind it releases it, for whoever hands the call to the engine.
  if (kTwoHops && threadIdx.x == kCaller && !done) {
    HandOver& handed = r.handed[launch.slot * r.rank.num_lanes + lane];
    handed.set_primitives_done(primitives);
    handed.stage = Stage::kLeft;
  }
  if (!is_mover()) {
    tell_peers<kSteps>(r, call, t, w, taken, gathered ? 2 : 1, known, s);
  } else if (kTwoHops ? gathered : done && call.reduces) {
    store_held(call, w, held);
  }
  return finish(r, launch, lane, done, ending, s, [&](LaneStats& stats) {
    count_packets<kSteps>(stats, call, w, done, gathered, primitives, taken);
  });
}

}  // namespace unjam
