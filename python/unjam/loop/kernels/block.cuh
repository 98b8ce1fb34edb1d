// What the computing threads of a block do together.
#pragma once

#include "formats.cuh"
#include "waits.cuh"

namespace unjam_loop {

LOOP_DEVICE void sync_computing() { sync_first(kComputing); }

LOOP_DEVICE float warp_sum(float x) {
  LOOP_UNROLL
  for (u32 mask = kWarp / 2; mask != 0; mask /= 2) x += from_lane_xor(x, mask);
  return x;
}

// The same result in all threads. Nobody may use the scratch meanwhile.
LOOP_DEVICE float block_sum(const Task& t, float x) {
  auto* sums = reinterpret_cast<float*>(t.scratch);
  x = warp_sum(x);
  if (lane_here() == 0) sums[warp_here()] = x;
  sync_computing();
  float total = 0;
  LOOP_UNROLL
  for (u32 w = 0; w < kComputingWarps; ++w) total += sums[w];
  sync_computing();
  return total;
}

// Rows of x into the staging memory, after rms_norm if there is one.
template <class T, u32 kRows, u32 kCols, bool kNormed>
LOOP_DEVICE typename T::Stored* stage(const Task& t, const u8* from, const u8* norm, float eps) {
  using Stored = typename T::Stored;
  auto* to = reinterpret_cast<Stored*>(t.staging);
  const auto* x = reinterpret_cast<const Stored*>(from);
  const auto* weight = reinterpret_cast<const Stored*>(norm);
  for (u32 row = 0; row < kRows; ++row) {
    float scale = 1;
    if constexpr (kNormed) {
      float sum = 0;
      for (u32 c = thread_here(); c < kCols; c += kComputing) {
        const float value = T::load(x[row * kCols + c]);
        sum += value * value;
      }
      scale = 1 / root(block_sum(t, sum) / kCols + eps);
    }
    for (u32 c = thread_here(); c < kCols; c += kComputing) {
      const Stored value = x[row * kCols + c];
      if constexpr (kNormed) {
        to[row * kCols + c] = T::store(T::load(value) * scale * T::load(weight[c]));
      } else {
        to[row * kCols + c] = value;
      }
    }
  }
  sync_computing();
  return to;
}

LOOP_DEVICE float silu(float x) { return x / (1 + exponential(-x)); }

}  // namespace unjam_loop
