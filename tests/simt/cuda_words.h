// CUDA's words, for a translation unit of the CPU that includes kernels: before any other include
// but the standard library's. Who may go on meanwhile is tests/simt/machine.h's choice.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <vector_types.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/simt/machine.h"

#undef __shared__
#define __shared__ static thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__
// (g++'s library has its own use for this word, inside __attribute__.)
#undef __noinline__
#define __noinline__

namespace unjam_simt {

struct Index {
  std::uint32_t x, y = 0, z = 0;
};
inline constexpr std::uint32_t kBatchWarp = 0xffffffff;

template <class T>
T shuffle(std::uint32_t mask, T value, std::uint32_t from) {
  static_assert(sizeof(T) <= 8);
  std::uint64_t bits = 0, all[32];
  std::memcpy(&bits, &value, sizeof(T));
  vote(mask, bits, all);
  T result;
  std::memcpy(&result, &all[from % 32], sizeof(T));
  return result;
}
inline std::uint32_t ballot(std::uint32_t mask, bool says) {
  std::uint64_t all[32];
  vote(mask, says ? 1 : 0, all);
  std::uint32_t bits = 0;
  for (std::uint32_t l = 0; l < 32; ++l) {
    if ((mask >> l & 1) != 0 && all[l] != 0) bits |= 1u << l;
  }
  return bits;
}
inline std::uint32_t least(std::uint32_t mask, std::uint32_t value) {
  std::uint64_t all[32];
  vote(mask, value, all);
  std::uint32_t found = ~0u;
  for (std::uint32_t l = 0; l < 32; ++l) {
    if ((mask >> l & 1) != 0 && all[l] < found) found = static_cast<std::uint32_t>(all[l]);
  }
  return found;
}

}  // namespace unjam_simt

#define threadIdx (::unjam_simt::Index{::unjam_simt::here().thread})
#define blockDim (::unjam_simt::Index{::unjam_simt::here().threads})
#define blockIdx (::unjam_simt::Index{::unjam_simt::here().block})
#define gridDim (::unjam_simt::Index{::unjam_simt::here().blocks})

inline void __syncwarp(std::uint32_t mask = ::unjam_simt::kBatchWarp) {
  ::unjam_simt::ballot(mask, true);
}
template <class T>
T __shfl_sync(std::uint32_t mask, T value, int from) {
  return ::unjam_simt::shuffle(mask, value, static_cast<std::uint32_t>(from));
}
inline std::uint32_t __ballot_sync(std::uint32_t mask, bool says) {
  return ::unjam_simt::ballot(mask, says);
}
inline int __any_sync(std::uint32_t mask, bool says) {
  return ::unjam_simt::ballot(mask, says) != 0 ? 1 : 0;
}
inline int __all_sync(std::uint32_t mask, bool says) {
  return ::unjam_simt::ballot(mask, says) == mask ? 1 : 0;
}
inline std::uint32_t __reduce_min_sync(std::uint32_t mask, std::uint32_t value) {
  return ::unjam_simt::least(mask, value);
}
inline void __syncthreads() { ::unjam_simt::meet(0, blockDim.x, true, true); }
inline int __syncthreads_and(bool says) {
  return ::unjam_simt::meet(0, blockDim.x, says, true) ? 1 : 0;
}
inline void __nanosleep(unsigned) { ::unjam_simt::step(); }
inline void __threadfence_system() { ::unjam_simt::step(); }

inline int __popc(std::uint32_t x) { return std::popcount(x); }
inline int __popcll(std::uint64_t x) { return std::popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

template <class T>
T min(T a, T b) {
  return b < a ? b : a;
}
template <class T>
T max(T a, T b) {
  return a < b ? b : a;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline float __uint_as_float(std::uint32_t x) { return std::bit_cast<float>(x); }
inline std::uint32_t __float_as_uint(float x) { return std::bit_cast<std::uint32_t>(x); }
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }
inline double __hiloint2double(int high, int low) {
  return std::bit_cast<double>(std::uint64_t{static_cast<std::uint32_t>(high)} << 32 |
                               static_cast<std::uint32_t>(low));
}
inline int __double2loint(double x) { return static_cast<int>(std::bit_cast<std::uint64_t>(x)); }
inline int __double2hiint(double x) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(x) >> 32);
}

// Four bytes at once.
template <class T, class F>
std::uint32_t by_bytes(std::uint32_t a, std::uint32_t b, F f) {
  std::uint32_t result = 0;
  for (int i = 0; i < 32; i += 8) {
    const auto x = static_cast<T>(a >> i), y = static_cast<T>(b >> i);
    result |= std::uint32_t{static_cast<std::uint8_t>(f(x, y))} << i;
  }
  return result;
}
inline std::uint32_t __vadd4(std::uint32_t a, std::uint32_t b) {
  return by_bytes<std::uint8_t>(a, b, [](int x, int y) { return x + y; });
}
inline std::uint32_t __vmins4(std::uint32_t a, std::uint32_t b) {
  return by_bytes<std::int8_t>(a, b, [](int x, int y) { return x < y ? x : y; });
}
inline std::uint32_t __vminu4(std::uint32_t a, std::uint32_t b) {
  return by_bytes<std::uint8_t>(a, b, [](int x, int y) { return x < y ? x : y; });
}
inline std::uint32_t __vmaxs4(std::uint32_t a, std::uint32_t b) {
  return by_bytes<std::int8_t>(a, b, [](int x, int y) { return x > y ? x : y; });
}
inline std::uint32_t __vmaxu4(std::uint32_t a, std::uint32_t b) {
  return by_bytes<std::uint8_t>(a, b, [](int x, int y) { return x > y ? x : y; });
}

// (The machine runs one thread at a time.)
template <class T, class F>
T change(T* x, F changed) {
  ::unjam_simt::step();
  const T before = *x;
  *x = static_cast<T>(changed(before));
  return before;
}
template <class T>
T atomicOr(T* x, T v) {
  return change(x, [v](T before) { return before | v; });
}
template <class T>
T atomicAnd(T* x, T v) {
  return change(x, [v](T before) { return before & v; });
}
template <class T>
T atomicAdd(T* x, T v) {
  return change(x, [v](T before) { return before + v; });
}
template <class T>
T atomicSub(T* x, T v) {
  return change(x, [v](T before) { return before - v; });
}
