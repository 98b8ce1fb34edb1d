// What a lane does for a short invocation, by its engine, in one go (engine.h: "Whole calls"): as
// solo_one_shot.cuh, which does it without an engine, of calls of one hop whose lanes make one loop
// each. What differs: the lane's lease is held, the key's former use has ended, the input is there,
// and ends and progress are the engine's.
//
// Redo: as in solo.cuh. The threads that poll store nothing of a reduction before all has come, and
// of other kinds the same bytes that a later turn stores again.
#pragma once

#include "device/cuda/solo_one_shot.cuh"

namespace unjam {

// What the engine has as a kernel's arguments for calls without it, in shared memory, of a block.
struct WholeCall {
  SoloCall call;
  Invocation inv;
  solo::Shared shared;
};
// (Raw: shared variables have no constructors. At one known address: in registers of functions that
// move data there is no room for pointers to it.)
__shared__ alignas(16) unsigned char whole_call_bytes[sizeof(WholeCall)];
__device__ __forceinline__ WholeCall& whole_call() {
  return *reinterpret_cast<WholeCall*>(whole_call_bytes);
}

// The movers' part, as solo::move_stretch(). Functions of their own, each with all registers.
template <int kMembers>
__device__ __noinline__ bool move_whole(CudaRank* rank, std::uint32_t lane, solo::Held* held) {
  using namespace solo;
  WholeCall& x = whole_call();
  const Stretch w = stretch_of(x.call, x.inv, lane - x.call.first_lane);
  if constexpr (kMembers == 0) {
    return move_all(*rank, x.call, x.inv, w, lane, x.shared, *held);
  } else {
    return move_plain_any<kMembers>(*rank, x.call, x.inv, w, lane, x.shared, *held);
  }
}
__device__ __forceinline__ auto which_moves(const SoloCall& call) {
  if (!call.plain) return move_whole<0>;
  if (call.group_size == 2) return move_whole<2>;
  if (call.group_size <= 4) return move_whole<4>;
  return move_whole<static_cast<int>(kSoloRanks)>;
}

// By all threads of the block. Ends with a barrier: all that has been stored is behind it.
inline __device__ __noinline__ WholeEnd run_whole_call(CudaRank* rank, LaneStats* stats,
                                                       std::uint32_t lane, std::uint32_t slot,
                                                       Whole how, std::uint32_t polls) {
  using namespace solo;
  CudaRank& r = *rank;
  WholeCall& x = whole_call();
  const SoloCall& call = x.call;
  Shared& s = x.shared;

  constexpr std::uint32_t kCall = sizeof(SoloCall) / sizeof(uint4);
  constexpr std::uint32_t kAll = kCall + sizeof(Invocation) / sizeof(uint4);
  static_assert(kAll <= kLeastThreads);
  if (threadIdx.x < kAll) {
    const std::uint32_t i = threadIdx.x;
    const auto* from = i < kCall
                           ? reinterpret_cast<const uint4*>(&r.calls[slot]) + i
                           : reinterpret_cast<const uint4*>(&r.rank.invocations[slot]) + i - kCall;
    auto* to = i < kCall ? reinterpret_cast<uint4*>(&x.call) + i
                         : reinterpret_cast<uint4*>(&x.inv) + i - kCall;
    *to = *from;
  }
  sync_block();
  if (threadIdx.x == 0) {
    x.call.most_polls = polls;
    if (how == Whole::kReceiving) {
      x.call.num_sent = 0;
      x.call.copies = false;
    }
    s.hopeless = 0;
  }
  sync_block();

  const Stretch w = stretch_of(call, x.inv, lane - call.first_lane);
  const LaneTransport t = transport_of(call, lane);
  Known known{};
  Held held;
  bool come = true;
  if (!is_mover()) {
    const bool ok = look<1>(r, call, t, w, false, known, s);
    if (threadIdx.x == 0) s.ok = ok ? 1 : 0;
    sync_block_apart();
    if (ok) come = look_again(r, call, t, w, known, s);
  } else {
    come = with_all_registers(which_moves(call))(rank, lane, &held);
  }
  if (s.ok == 0) {
    sync_block();
    return WholeEnd::kUnable;
  }
  __syncwarp();
  const bool done = __syncthreads_and(come) != 0;
  if (!is_mover()) {
    tell_peers<1>(r, call, t, w, done ? 1 : 0, 1, known, s);
  } else if (done && call.reduces) {
    store_held(call, w, held);
  }
  const bool elsewhere = s.hopeless != 0;
  if (threadIdx.x == 0 && w.bytes != 0) {
    const std::uint32_t before = how == Whole::kAll ? 0u : call.before;
    stats->slices += (done ? x.inv.num_primitives : call.before) - before;
    if (done && call.num_received != 0) ++stats->received;
    stats->bytes_sent += std::uint64_t{w.bytes} * call.num_sent;
  }
  sync_block();
  if (done) return WholeEnd::kDone;
  return elsewhere ? WholeEnd::kElsewhere : WholeEnd::kWaits;
}

class WholeDev : public CudaDev {
 public:
  using Handle = WholeDev;
  static constexpr bool kWholeCalls = true;
  using CudaDev::CudaDev;
  __device__ __forceinline__ WholeEnd whole_call(std::uint16_t slot, Whole how,
                                                 std::uint32_t polls) {
    return with_all_registers(run_whole_call)(rank(), &lane().stats, lane_index(), slot, how,
                                              polls);
  }
};

}  // namespace unjam
