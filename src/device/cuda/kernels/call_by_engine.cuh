// What a call's kernel does with what could not be done without the engine.
#pragma once

#include "device/cuda/kernels/instance.cuh"
#include "device/cuda/kernels/kernels.h"

namespace unjam {

// By all threads of the block. `without_engine`: it was tried; `serves`: this block, whichever it
// is, goes on until the call has ended.
__device__ __forceinline__ void call_by_engine(CudaRank& r, const CudaLaunch& launch,
                                               bool without_engine, bool serves,
                                               unsigned char* engine_shared,
                                               unsigned char* dev_shared) {
  const Block block = block_of(engine_shared, dev_shared);
  DevShared& s = block.dev;
  __shared__ bool mine;
  if (threadIdx.x == 0) begin_instance(s, EngineKind::kCall, launch.slot, launch.serial, 0);
  // The first lane's block, which brings it, and those of the call's lanes.
  std::uint32_t lane = blockIdx.x;
  const std::uint32_t first = launch.sqe.inv.geometry.first_lane;
  if (lane != 0 && first != 0) lane += first - 1;
  if (serves || (lane == 0 && !without_engine)) {
    CudaDev::take_in<kLeastThreads>(r, launch.sqe, launch.call, threadIdx.x, blockDim.x);
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

}  // namespace unjam
