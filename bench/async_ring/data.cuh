// Random inputs, and whether a result is their sum, which is computed here once more.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "tests/gpu/cuda_objects.h"

namespace async_ring {

// Of either sign, from one to two: what comes twice, or not, changes the sum by much.
__device__ inline float random_float(std::uint64_t i, std::uint32_t rank, std::uint32_t seed) {
  std::uint32_t x = static_cast<std::uint32_t>(i) * 2654435761u +
                    static_cast<std::uint32_t>(i >> 32) * 40503u + rank * 0x9e3779b9u + seed;
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return __uint_as_float((x & 0x807fffffu) | 0x3f800000u);
}

template <int = 0>
__global__ void fill_kernel(float* x, std::size_t count, std::uint32_t rank, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    x[i] = random_float(i, rank, seed);
  }
}

// *wrong: how many elements are further from the sum, in double, than roundings take them in
// whatever order. What is no number is wrong.
template <int = 0>
__global__ void compare_kernel(const float* x, std::size_t count, std::uint32_t ranks,
                               std::uint32_t seed, unsigned long long* wrong) {
  constexpr double kRounding = 1.0 / (1 << 24);
  unsigned long long own = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    double sum = 0, size = 0;
    for (std::uint32_t r = 0; r < ranks; ++r) {
      const double value = random_float(i, r, seed);
      sum += value;
      size += fabs(value);
    }
    if (!(fabs(x[i] - sum) <= ranks * kRounding * size)) ++own;
  }
  if (own != 0) atomicAdd(wrong, own);
}

inline constexpr int kDataBlocks = 1024, kDataThreads = 512;

// Fills the input, and the output with what is no number.
inline void prepare(float* input, float* output, std::size_t count, int rank, std::uint32_t seed,
                    const unjam_gpu::Stream& stream) {
  fill_kernel<><<<kDataBlocks, kDataThreads, 0, stream.get()>>>(
      input, count, static_cast<std::uint32_t>(rank), seed);
  unjam_gpu::check(cudaGetLastError());
  unjam_gpu::check(cudaMemsetAsync(output, 0xff, count * sizeof(float), stream.get()));
  stream.synchronize();
}

// Elements that are wrong. verdict: a word of device memory.
inline std::uint64_t wrong_elements(const float* output, std::size_t count, int ranks,
                                    std::uint32_t seed, unsigned long long* verdict,
                                    const unjam_gpu::Stream& stream) {
  unsigned long long wrong = 0;
  unjam_gpu::check(cudaMemsetAsync(verdict, 0, sizeof(wrong), stream.get()));
  compare_kernel<><<<kDataBlocks, kDataThreads, 0, stream.get()>>>(
      output, count, static_cast<std::uint32_t>(ranks), seed, verdict);
  unjam_gpu::check(cudaGetLastError());
  unjam_gpu::check(
      cudaMemcpyAsync(&wrong, verdict, sizeof(wrong), cudaMemcpyDeviceToHost, stream.get()));
  stream.synchronize();
  return wrong;
}

}  // namespace async_ring
