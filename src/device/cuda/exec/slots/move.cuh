// Movers, in groups: each warp goes from slice to slice by itself.
#pragma once

#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

template <class S>
__device__ __forceinline__ void move(const S& c) {
  SlotShared& s = c.s;
  const unsigned warp = threadIdx.x / 32 - kApartWarps, thread = threadIdx.x % 32;
  const std::uint32_t group = warp / c.warps();
  if (group >= kGroups) return;
  const unsigned first = group * c.warps(), threads = 32 * c.warps();
  for (std::uint32_t k = 0;; ++k) {
    while (CudaDev::load_block(s.given[group]) <= k) {
      // (The latest is given before that is said.)
      if (CudaDev::load_block(s.closed) != 0 && CudaDev::load_block(s.given[group]) <= k) return;
    }
    const std::uint32_t at = s.order[group][k % kOrdered];
    __syncwarp();
    if (c.in_step()) {
      sync_group(1 + group, threads);
    }
    with_all_registers(run_slot_leaf_cuda)(s.jobs[at], 32 * (warp - first) + thread, threads);
    __syncwarp();
    // A warp's, by its first thread: the barrier orders the others' stores before.
    if (thread == 0) CudaDev::add_release(s.stored[at]);
  }
}

}  // namespace in_stream
}  // namespace unjam
