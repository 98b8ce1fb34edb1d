// A call in a stream, as a kernel: it brings its invocation, tries it without the engine
// (call_in_stream.cuh), and what cannot be done so it serves as an engine until it has ended. Who
// else is one, and when who leaves: engine.cu.
#include "device/cuda/kernels/call_by_packets.cuh"
#include "device/cuda/kernels/call_by_slots.cuh"
#include "device/cuda/kernels/instance.cuh"
#include "device/cuda/kernels/kernels.h"

namespace unjam {

// Blocks as unjam_engine_kernel's. One of them, whichever, goes on to serve where the lanes were
// not done at once.
__global__ void __launch_bounds__(512, 1)
    unjam_call_kernel(CudaRank* rank, const __grid_constant__ CudaLaunch launch) {
  UNJAM_DYNAMIC_SHARED(engine_shared);
  alignas(16) __shared__ unsigned char dev_shared[sizeof(DevShared)];
  CudaRank& r = *rank;
  const bool solo = launch.solo.lanes != 0;
  bool serves = solo;
  if (solo && launch.solo.by_slots) {
    const StreamEnd end = run_solo_stream(r, launch, engine_shared);
    if (end == StreamEnd::kLeaves) return;
    wait_for_stream();  // a close call may not have had its turn, see call_in_front.h
    serves = end == StreamEnd::kServes;
  } else if (solo) {
    if (!(launch.solo.two_hops ? run_by_packets<2>(r, launch) : run_by_packets<1>(r, launch)))
      return;
  } else {
    wait_for_stream();
  }
  const Block block = block_of(engine_shared, dev_shared);
  DevShared& s = block.dev;
  __shared__ bool mine;
  if (threadIdx.x == 0) begin_instance(s, EngineKind::kCall, launch.slot, launch.serial, 0);
  // The first lane's block, which brings it, and those of the call's lanes.
  std::uint32_t lane = blockIdx.x;
  const std::uint32_t first = launch.sqe.inv.geometry.first_lane;
  if (lane != 0 && first != 0) lane += first - 1;
  if (serves || (lane == 0 && !solo)) {
    CudaDev::take_in<kLeastThreads>(r, launch.sqe, launch.solo, threadIdx.x, blockDim.x);
    sync_block();
    if (threadIdx.x == 0) s.own_call = launch.slot + 1;
    sync_block();
    serve<CudaDev>(r, block);
    return;
  }
  if (threadIdx.x == 0) {
    // Another instance may have it, which may leave soon. Not for long: blocks that wait here
    // could keep those of calls that peers wait for from running.
    const std::uint64_t begun = global_ns();
    do {
      mine = take_lease(r, lane);
    } while (!mine && global_ns() - begun < 100000 &&
             load_acquire_local(r.completed[launch.slot]) < launch.serial);
  }
  sync_block();
  if (mine) drive<CudaDev>(r, lane, block);
}

const void* call_kernel() { return reinterpret_cast<const void*>(&unjam_call_kernel); }

}  // namespace unjam
