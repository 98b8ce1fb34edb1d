// As solo.cuh, for calls of one hop (plan/algorithms/direct.cc) whose lanes make one loop each:
// every block sends what it has for its peers, copies the own data, and receives.
#pragma once

#include "device/cuda/kernels/solo.cuh"
#include "device/cuda/kernels/solo_plain.cuh"

namespace unjam {
namespace solo {

// A lane of the call's, as Geometry::lane_part(), in bytes.
__device__ __forceinline__ Stretch stretch_of(const SoloCall& call, const Invocation& inv,
                                              std::uint32_t lane) {
  const std::uint32_t longer = call.longer_lanes;
  const std::uint32_t first = lane * call.lane_pieces + (lane < longer ? lane : longer);
  const std::uint32_t last = first + call.lane_pieces + (lane < longer ? 1 : 0);
  const std::uint32_t begin = first * 16 < call.block_bytes ? first * 16 : call.block_bytes;
  const std::uint32_t end = last * 16 < call.block_bytes ? last * 16 : call.block_bytes;
  return {static_cast<const char*>(inv.input) + begin, static_cast<char*>(inv.output) + begin,
          end - begin, places_of(call, end - begin)};
}

// The movers' part, to the point where all of a thread's has come (true). What is reduced is left
// in `held`. looked(): as in solo_plain.cuh. kReduces: whether it may be a reduction.
template <Half kHalf, bool kReduces = true, class Looked>
__device__ __forceinline__ bool move_all(CudaRank& r, const SoloCall& call, const Invocation& inv,
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

// What is reduced, of plain calls, by the movers, when all has come.
__device__ __forceinline__ void store_sums_held(const SoloCall& call, const Stretch& w,
                                                const Held& held) {
  if (call.lines) {
    store_sums<true>(call, w, held);
  } else {
    store_sums<false>(call, w, held);
  }
}
// And of others.
__device__ __forceinline__ void store_held(const SoloCall& call, const Stretch& w,
                                           const Held& held) {
  if (!call.plain) {
    store_reduction(call, w, held);
  } else {
    store_sums_held(call, w, held);
  }
}

}  // namespace solo

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
  if (threadIdx.x == kListener && attention != 0 && is_cancelled(r, launch, attention)) {
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

}  // namespace unjam
