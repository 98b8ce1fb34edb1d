// What differs between the host compiler and nvcc, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define UNJAM_HD __host__ __device__
#define UNJAM_HD_INLINE __host__ __device__ __forceinline__
#define UNJAM_HD_NOINLINE __host__ __device__ __noinline__
#else
#define UNJAM_HD
#define UNJAM_HD_INLINE inline __attribute__((always_inline))
#define UNJAM_HD_NOINLINE
#endif

namespace unjam {

// Two cache lines: the adjacent-line prefetcher pairs lines, and GPUs' L2 sector groups are as
// long.
inline constexpr std::size_t kFalseSharingBytes = 128;
inline constexpr std::size_t kVectorBytes = 16;  // width of the widest device load and store

}  // namespace unjam
