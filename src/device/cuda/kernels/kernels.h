// The kernels, as what cudaLaunchKernel takes, and their arguments.
#pragma once

#include "device/cuda/dev/rank_state.h"

namespace unjam {

// (CudaRank*, EngineLaunch): daemons, a block a lane or more, and waits, one block; (CudaRank*,
// CudaLaunch): calls, a block a lane. Both with so much dynamic shared memory.
const void* engine_kernel();
const void* call_kernel();
extern const unsigned kEngineSharedBytes;
// (CudaRank*, std::uint32_t slot, std::uint64_t ticket): one thread.
const void* mark_kernel();
// (CudaRank*, std::uint32_t slot, std::uint64_t serial): one thread.
const void* end_kernel();
// (CudaKeys): any shape.
const void* keys_kernel();

struct CudaKeys {
  KeyState* states = nullptr;    // [count]
  LaneKey* lane_keys = nullptr;  // [count][lanes]
  OutEndpoint* out = nullptr;    // [count][lanes][ranks]
  InEndpoint* in = nullptr;
  std::uint32_t count = 0;
  std::uint32_t lanes = 0;
  std::uint32_t ranks = 0;
};

}  // namespace unjam
