// A mixture of experts. Rules: python/unjam/loop/ops/experts.py.
#pragma once

#include "dense.cuh"

namespace unjam_loop {

template <class L, class T, u32 kCols, u32 kExperts, u32 kBest, bool kNormed>
LOOP_DEVICE void route(const Task& t, float eps) {
  using Stored = typename T::Stored;
  static_assert(kExperts * 4 <= kScratchBytes);
  const auto* in = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) + t.i.a * kCols;
  const Stored* x =
      stage<T, 1, kCols, kNormed>(t, reinterpret_cast<const u8*>(in), at_weights(t, t.i.aux2), eps);
  const auto* router = reinterpret_cast<const Stored*>(at_weights(t, t.i.aux));
  auto* scores = reinterpret_cast<float*>(t.scratch);
  for (u32 e = warp_here(); e < kExperts; e += kComputingWarps) {
    float score = 0;
    for (u32 c = lane_here(); c < kCols; c += kWarp) {
      score += T::load(x[c]) * T::load(router[u64{e} * kCols + c]);
    }
    score = warp_sum(score);
    if (lane_here() == 0) scores[e] = score;
  }
  sync_computing();
  if (thread_here() != 0) return;
  auto* out = reinterpret_cast<float*>(at_pages(t, t.i.out)) + t.i.a * 2 * kBest;
  float first = 0, total = 0;
  for (u32 n = 0; n < kBest; ++n) {
    u32 best = kExperts;
    for (u32 e = 0; e < kExperts; ++e) {
      bool taken = false;
      for (u32 k = 0; k < n; ++k) taken = taken || static_cast<u32>(out[2 * k]) == e;
      if (!taken && (best == kExperts || scores[e] > scores[best])) best = e;
    }
    if (n == 0) first = scores[best];
    out[2 * n] = static_cast<float>(best);
    out[2 * n + 1] = exponential(scores[best] - first);
    total += out[2 * n + 1];
  }
  for (u32 n = 0; n < kBest; ++n) out[2 * n + 1] /= total;
}

template <class L, class T, u32 kCols, u32 kRows, u32 kChunk, bool kNormed, u32 kBest, u32 kOutCols,
          u32 kTiles>
LOOP_DEVICE void expert_up(const Task& t, float eps) {
  using Stored = typename T::Stored;
  const auto* in = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) + t.i.b / kBest * kCols;
  const Stored* x =
      stage<T, 1, kCols, kNormed>(t, reinterpret_cast<const u8*>(in), at_weights(t, t.i.aux), eps);
  Sums<2, kOwnRows<kRows>, 1> sums;
  clear(sums);
  add_pages<L, T, 2, 1, kCols, kRows, kChunk>(t, x, sums);
  sum_lanes(sums);
  auto* out = reinterpret_cast<Stored*>(at_pages(t, t.i.out)) + t.i.b * kOutCols;
  for_results<kRows, 1>([&](u32 own, u32 row, u32) {
    out[t.i.a * kRows + row] = T::store(silu(sums.of[0][own][0]) * sums.of[1][own][0]);
  });
}

template <class L, class T, u32 kCols, u32 kRows, u32 kChunk, u32 kBest, u32 kOutCols, u32 kTiles,
          bool kResidual>
LOOP_DEVICE void expert_down(const Task& t) {
  using Stored = typename T::Stored;
  const auto* in = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) + t.i.b * kBest * kCols;
  const Stored* x = stage<T, kBest, kCols, false>(t, reinterpret_cast<const u8*>(in), nullptr, 0);
  const auto* pairs = reinterpret_cast<const float*>(at_pages(t, t.i.in1)) + t.i.b * 2 * kBest;
  Sums<1, kOwnRows<kRows>, 1> total;
  clear(total);
  for (u32 n = 0; n < kBest; ++n) {
    Sums<1, kOwnRows<kRows>, 1> sums;
    clear(sums);
    add_pages<L, T, 1, 1, kCols, kRows, kChunk>(t, x + n * kCols, sums);
    sum_lanes(sums);
    LOOP_UNROLL
    for (u32 own = 0; own < kOwnRows<kRows>; ++own) {
      total.of[0][own][0] += pairs[2 * n + 1] * sums.of[0][own][0];
    }
  }
  const auto* residual = reinterpret_cast<const Stored*>(at_pages(t, t.i.in2)) + t.i.b * kOutCols;
  auto* out = reinterpret_cast<Stored*>(at_pages(t, t.i.out)) + t.i.b * kOutCols;
  for_results<kRows, 1>([&](u32 own, u32 row, u32) {
    const u32 at = t.i.a * kRows + row;
    float value = total.of[0][own][0];
    if constexpr (kResidual) value += T::load(residual[at]);
    out[at] = T::store(value);
  });
}

}  // namespace unjam_loop
