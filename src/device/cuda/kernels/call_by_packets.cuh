// As call_in_stream.cuh, for calls of packets, whose lanes make one loop each: of one hop
// (plan/algorithms/direct.cc), in which every block sends what it has for its peers, copies the own
// data, and receives; and of two (plan/algorithms/two_shot.cc), a block of its own function, so
// that calls of one hop pay nothing for it.
#pragma once

#include "device/cuda/exec/packets/plain.cuh"
#include "device/cuda/exec/packets/tell.cuh"
#include "device/cuda/exec/packets/two_hops.cuh"
#include "device/cuda/kernels/call_in_stream.cuh"

namespace unjam {

// By all threads of a call's block. True: the call is for the engine, and this block brings it.
// False: nothing is left to do for this block.
__device__ __forceinline__ bool run_solo_one_shot(CudaRank& r, const CudaLaunch& launch) {
  using namespace solo;
  const SoloCall& call = launch.solo;
  const Invocation& inv = launch.sqe.inv;
  __shared__ Shared s;
  const std::uint32_t lane = call.first_lane + blockIdx.x;
  const Stretch w = stretch_of(call, inv, blockIdx.x);
  const LaneTransport t = transport_of(call, lane);

  const std::uint32_t attention = approach(r, launch, w, lane, s);

  Known known{};
  Held held;
  bool leased = false, come = true;
  if (!is_mover()) {
    const auto looks = [&](bool patient) { return look<1>(r, call, t, w, patient, known, s); };
    const bool ok =
        look_in_time(r, launch, lane, leased, s, /*close=*/false, looks) != Looked::kInVain;
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
    sync_block_apart();
    if (ok) come = look_again(r, call, t, w, known, s);
  } else {
    wait_and_say_so(s);
    // The barrier behind which the first warp has looked: all movers take one way.
    const auto looked = [&] {
      sync_block_apart();
      return s.ok != 0;
    };
    if (!call.plain) {
      come = move_all<Half::kBoth>(r, call, inv, w, lane, s, held, looked);
    } else if (call.places == 2) {
      come = move_plain_any<Half::kBoth, 2>(r, call, inv, w, lane, s, held, looked);
    } else if (call.places <= 4) {
      come = move_plain_any<Half::kBoth, 4>(r, call, inv, w, lane, s, held, looked);
    } else {
      come = move_plain_any<Half::kBoth, kSoloRanks>(r, call, inv, w, lane, s, held, looked);
    }
  }
  if (s.ok == 0) return leave_untried(r, launch, lane, leased, s);
  if (threadIdx.x == kListener && attention != 0 && is_call_cancelled(r, launch, attention)) {
    come = false;
  }
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;

  Ending ending = begin_end(r, launch, done);
  if (!is_mover()) {
    tell_peers<1>(r, call, t, w, done ? 1 : 0, 1, known, s);
  } else if (done && call.reduces) {
    store_held(call, w, held);
  }
  return finish(r, launch, lane, done, ending, s, [&](LaneStats& stats) {
    if (w.bytes != 0) {
      add_relaxed(stats.slices, done ? inv.num_primitives : call.before);
      if (done && call.num_received != 0) add_relaxed(stats.received, 1);
    }
    add_relaxed(stats.bytes_sent, std::uint64_t{w.bytes} * call.num_sent);
    if (done) add_relaxed(stats.completed, 1);
  });
}

// As run_solo_one_shot().
__device__ __forceinline__ bool run_solo_two_shot(CudaRank& r, const CudaLaunch& launch) {
  using namespace solo;
  const SoloCall& call = launch.solo;
  const Invocation& inv = launch.sqe.inv;
  __shared__ Shared s;
  const std::uint32_t lane = call.first_lane + blockIdx.x;

  const Stretch w = call.plain ? stretch_of(call, inv, blockIdx.x) : own_stretch(call, inv);
  const LaneTransport t = transport_of(call, lane);

  const std::uint32_t attention = approach(r, launch, w, lane, s);

  const PartWalk all = all_parts(call);
  Raw<2> own[kGatherUnits] = {};
  Known known{};
  Held held;
  bool leased = false;
  if (is_mover()) {
    wait_and_say_so(s);
    // The barrier behind which the first warp has looked: all movers take one way.
    const auto looked = [&] {
      sync_block_apart();
      return s.ok != 0;
    };
    if (!call.plain) {
      scatter_parts(call, inv, w, s, all, own, looked);
    } else if (call.places == 2) {
      move_plain_any<Half::kSends, 2>(r, call, inv, w, lane, s, held, looked);
    } else if (call.places <= 4) {
      move_plain_any<Half::kSends, 4>(r, call, inv, w, lane, s, held, looked);
    } else {
      move_plain_any<Half::kSends, kSoloRanks>(r, call, inv, w, lane, s, held, looked);
    }
  } else {
    const auto looks = [&](bool patient) { return look<2>(r, call, t, w, patient, known, s); };
    const bool ok =
        look_in_time(r, launch, lane, leased, s, /*close=*/false, looks) != Looked::kInVain;
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
    sync_block_apart();
    if (ok) look_again(r, call, t, w, known, s);  // says it in `hopeless`
  }
  if (s.ok == 0) return leave_untried(r, launch, lane, leased, s);
  // All have scattered, and know whether to go on, see above. (Peers' packets take as long to
  // come.)
  sync_block();
  bool has_gathered = true, come = true;
  if (is_mover()) {
    if (!call.plain) {
      has_gathered = gather_part(r, call, inv, w, lane, s, own, held);
    } else {
      // (Of a warp alike: others may say meanwhile that they go on no more.)
      has_gathered = __any_sync(0xffffffff, is_hopeless(s)) == 0 &&
                     move_later_any<LaterHop::kGathers>(r, call, inv, w, lane, s, held);
    }
    if (!has_gathered) *static_cast<volatile std::uint32_t*>(&s.hopeless) = 1;
    if (!call.plain) {
      come = has_gathered && collect_parts(r, call, inv, lane, all, s);
    } else {
      come = has_gathered && move_later_any<LaterHop::kCollects>(r, call, inv, w, lane, s, held);
    }
    if (threadIdx.x == kListener && attention != 0 && is_call_cancelled(r, launch, attention)) {
      come = false;
    }
  }
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;
  const bool gathered = done || __syncthreads_and(has_gathered) != 0;

  Ending ending = begin_end(r, launch, done);
  const std::uint32_t primitives = done ? 3 : gathered ? 2 : 1;
  // The report behind it releases it, for whoever hands the call to the engine.
  if (threadIdx.x == kCaller && !done) {
    HandOver& handed = r.handed[launch.slot * r.rank.num_lanes + lane];
    handed.set_primitives_done(primitives);
    handed.stage = Stage::kLeft;
  }
  if (!is_mover()) {
    tell_peers<2>(r, call, t, w, primitives - 1, gathered ? 2 : 1, known, s);
  } else if (gathered) {
    store_held(call, w, held);
  }
  return finish(r, launch, lane, done, ending, s, [&](LaneStats& stats) {
    std::uint64_t sent = gathered ? std::uint64_t{w.bytes} * call.num_sent : 0;
    for (std::uint32_t i = 0; i < call.num_sent; ++i) {
      sent += call.plain ? w.bytes : part_stretch(call, around(call, call.first_sent + i)).bytes;
    }
    add_relaxed(stats.slices, primitives);
    add_relaxed(stats.received, primitives - 1);
    add_relaxed(stats.bytes_sent, sent);
    if (done) add_relaxed(stats.completed, 1);
  });
}

}  // namespace unjam
