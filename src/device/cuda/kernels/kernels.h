// The kernels, as what cudaLaunchKernel takes, and their arguments.
#pragma once

#include "device/cuda/dev/rank_state.h"

namespace unjam {

// (CudaRank*, EngineLaunch): daemons, a block a lane or more, and waits, one block; (CudaRank*,
// CudaLaunch): calls, a block a lane, and such as copy engines may have a part in. All with so much
// dynamic shared memory.
const void* engine_kernel();
const void* call_kernel();
const void* carried_call_kernel();
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
// What is there of a lane's key before anybody uses it; of its first lane, the key's as well. Of
// all i in count * lanes.
UNJAM_HD inline void set_up_key(const CudaKeys& keys, std::uint64_t i) {
  LaneKey& lane = keys.lane_keys[i];
  lane = LaneKey{};
  lane.out = keys.out + i * keys.ranks;
  lane.in = keys.in + i * keys.ranks;
  for (std::uint32_t q = 0; q < keys.ranks; ++q) {
    lane.out[q] = OutEndpoint{};
    lane.in[q] = InEndpoint{};
  }
  if (i % keys.lanes != 0) return;
  KeyState& key = keys.states[i / keys.lanes];
  key = KeyState{};
  key.done = ~std::uint64_t{0};  // nothing of it runs before it is set up
  key.lanes = &lane;
}

}  // namespace unjam
