// Which launch a call's kernel was, and whether it is the next one behind the kernel of another
// call: what OverlapRule leaves to the kernels.
#pragma once

#include <cstdint>

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/dev/rank_state.h"

namespace unjam {
namespace in_stream {

// What kernels of calls know of each other, for OverlapRule: of any two launches that follow each
// other, in whatever streams, the second has the next number. (But those in a graph have numbers
// from when it was made.)
struct LaunchSequence {
  __device__ __forceinline__ static std::uint32_t number() {
    return static_cast<std::uint32_t>(launch_number());
  }
  __device__ __forceinline__ static std::uint64_t word(std::uint32_t serial, std::uint32_t number) {
    return std::uint64_t{serial} << 32 | number;
  }
  // By one thread of a call, as it begins. Relaxed, as the look at it: who finds the word knows
  // which launch the serial's was, and nothing else by it; who does not waits for its turn.
  __device__ __forceinline__ static void say(CudaRank& r, const CudaLaunch& launch) {
    const auto serial = static_cast<std::uint32_t>(launch.serial);
    store_relaxed_local(r.launches[serial % kRecentLaunches], word(serial, number()));
  }
  // Whether the call that this one may overlap with was the launch in front of this one.
  __device__ __forceinline__ static bool is_close(const CudaRank& r, const CudaLaunch& launch) {
    const std::uint32_t serial = launch.call.follows;
    return serial != 0 &&
           load_relaxed_local(r.launches[serial % kRecentLaunches]) == word(serial, number() - 1);
  }
};

}  // namespace in_stream
}  // namespace unjam
