// RoPE with the append, and attention by parts. Rules: python/unjam/loop/ops/attention.py.
#pragma once

#include "block.cuh"

namespace unjam_loop {

// Of a row in this step: the host gives it for the launch's first.
LOOP_DEVICE u32 position_of(const Task& t, u32 row) {
  return reinterpret_cast<const u32*>(at_state(t, t.i.in1))[row] + t.step;
}

template <class L, class T, u32 kKvHeads, u32 kGroup, u32 kDim, u32 kContext>
LOOP_DEVICE void rope(const Task& t) {
  using Stored = typename T::Stored;
  constexpr u32 kHalf = kDim / 2, kQueries = kKvHeads * kGroup * kDim;
  constexpr u32 kCols = kQueries + 2 * kKvHeads * kDim;
  const u32 row = t.i.a / kKvHeads, head = t.i.a % kKvHeads;
  const u32 position = position_of(t, row);
  const auto* cosines =
      reinterpret_cast<const float*>(at_weights(t, t.i.aux)) + u64{position} * kDim;
  const float* sines = cosines + kHalf;
  const auto* in = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) + row * kCols;
  const u64 place = (u64{t.i.a} * kContext + position) * kDim;
  auto* queries = reinterpret_cast<Stored*>(at_pages(t, t.i.out)) + row * kQueries;
  auto* keys = reinterpret_cast<Stored*>(at_state(t, t.i.out2)) + place;
  auto* values = reinterpret_cast<Stored*>(at_state(t, t.i.in2)) + place;
  // The group's queries, then the key.
  for (u32 n = thread_here(); n < (kGroup + 1) * kHalf; n += kComputing) {
    const u32 which = n / kHalf, d = n % kHalf;
    const u32 at = which < kGroup ? (head * kGroup + which) * kDim : kQueries + head * kDim;
    const float first = T::load(in[at + d]), second = T::load(in[at + kHalf + d]);
    Stored* const to = which < kGroup ? queries + at : keys;
    to[d] = T::store(first * cosines[d] - second * sines[d]);
    to[kHalf + d] = T::store(second * cosines[d] + first * sines[d]);
  }
  for (u32 d = thread_here(); d < kDim; d += kComputing) {
    values[d] = in[kQueries + (kKvHeads + head) * kDim + d];
  }
}

inline constexpr float kLeast = -3.402823466e38f;

// sum(exp(s - most) · v), most, sum(exp(s - most)) of some positions, for each query of a group.
template <u32 kGroup, u32 kPer>
struct Part {
  float sum[kGroup][kPer], most[kGroup], weight[kGroup];
};

// Each warp takes every eighth position, each lane some columns.
template <class L, class T, u32 kKvHeads, u32 kGroup, u32 kDim, u32 kContext, u32 kSplits>
LOOP_DEVICE void attention(const Task& t) {
  using Stored = typename T::Stored;
  constexpr u32 kPer = (kDim + kWarp - 1) / kWarp, kWide = kDim + 2;
  const u32 split = t.i.a % kSplits, place = t.i.a / kSplits;
  const u32 row = place / kKvHeads, head = place % kKvHeads;
  const u32 lane = lane_here(), warp = warp_here();
  const u32 length = position_of(t, row) + 1;
  const u32 chunk = (length + kSplits - 1) / kSplits;
  const u32 begin = split * chunk < length ? split * chunk : length;
  const u32 end = begin + chunk < length ? begin + chunk : length;
  const auto* in = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) +
                   (row * kKvHeads + head) * kGroup * kDim;
  const auto* keys =
      reinterpret_cast<const Stored*>(at_state(t, t.i.out2)) + u64{place} * kContext * kDim;
  const auto* values =
      reinterpret_cast<const Stored*>(at_state(t, t.i.in2)) + u64{place} * kContext * kDim;
  const float scale = 1 / root(static_cast<float>(kDim));
  float queries[kGroup][kPer];
  Part<kGroup, kPer> part;
  LOOP_UNROLL
  for (u32 g = 0; g < kGroup; ++g) {
    part.most[g] = kLeast;
    part.weight[g] = 0;
    LOOP_UNROLL
    for (u32 n = 0; n < kPer; ++n) {
      const u32 d = lane + n * kWarp;
      queries[g][n] = d < kDim ? T::load(in[g * kDim + d]) * scale : 0;
      part.sum[g][n] = 0;
    }
  }
  for (u32 at = begin + warp; at < end; at += kComputingWarps) {
    float key[kPer], value[kPer];
    LOOP_UNROLL
    for (u32 n = 0; n < kPer; ++n) {
      const u32 d = lane + n * kWarp;
      key[n] = d < kDim ? T::load(keys[u64{at} * kDim + d]) : 0;
      value[n] = d < kDim ? T::load(values[u64{at} * kDim + d]) : 0;
    }
    LOOP_UNROLL
    for (u32 g = 0; g < kGroup; ++g) {
      float score = 0;
      LOOP_UNROLL
      for (u32 n = 0; n < kPer; ++n) score += queries[g][n] * key[n];
      score = warp_sum(score);
      const float most = score > part.most[g] ? score : part.most[g];
      const float old = exponential(part.most[g] - most), now = exponential(score - most);
      part.most[g] = most;
      part.weight[g] = part.weight[g] * old + now;
      LOOP_UNROLL
      for (u32 n = 0; n < kPer; ++n) part.sum[g][n] = part.sum[g][n] * old + now * value[n];
    }
  }
  auto* parts = reinterpret_cast<float*>(t.staging);  // [warps, group, dim + 2]
  LOOP_UNROLL
  for (u32 g = 0; g < kGroup; ++g) {
    float* const mine = parts + (warp * kGroup + g) * kWide;
    LOOP_UNROLL
    for (u32 n = 0; n < kPer; ++n) {
      const u32 d = lane + n * kWarp;
      if (d < kDim) mine[d] = part.sum[g][n];
    }
    if (lane == 0) {
      mine[kDim] = part.most[g];
      mine[kDim + 1] = part.weight[g];
    }
  }
  sync_computing();
  auto* out = reinterpret_cast<float*>(at_pages(t, t.i.out)) + u64{t.i.a} * kGroup * kWide;
  for (u32 n = thread_here(); n < kGroup * kWide; n += kComputing) {
    const u32 g = n / kWide, d = n % kWide;
    float most = kLeast, total = 0;
    LOOP_UNROLL
    for (u32 w = 0; w < kComputingWarps; ++w) {
      const float m = parts[(w * kGroup + g) * kWide + kDim];
      most = m > most ? m : most;
    }
    LOOP_UNROLL
    for (u32 w = 0; w < kComputingWarps; ++w) {
      const float* const its = parts + (w * kGroup + g) * kWide;
      total += its[d] * exponential(its[kDim] - most);
    }
    out[n] = d == kDim ? most : total;
  }
}

// The parts together. The first has positions, so the sum of weights is not 0.
template <class L, class T, u32 kKvHeads, u32 kGroup, u32 kDim, u32 kSplits>
LOOP_DEVICE void merge(const Task& t) {
  constexpr u32 kWide = kGroup * (kDim + 2);
  const auto* parts =
      reinterpret_cast<const float*>(at_pages(t, t.i.in0)) + u64{t.i.a} * kSplits * kWide;
  auto* out = reinterpret_cast<typename T::Stored*>(at_pages(t, t.i.out)) + t.i.a * kGroup * kDim;
  for (u32 n = thread_here(); n < kGroup * kDim; n += kComputing) {
    const float* const first = parts + n / kDim * (kDim + 2);
    const u32 d = n % kDim;
    float most = kLeast, total = 0, weight = 0;
    for (u32 s = 0; s < kSplits; ++s) {
      const float m = first[s * kWide + kDim];
      most = m > most ? m : most;
    }
    for (u32 s = 0; s < kSplits; ++s) {
      const float* const its = first + s * kWide;
      const float scale = exponential(its[kDim] - most);
      total += its[d] * scale;
      weight += its[kDim + 1] * scale;
    }
    out[n] = T::store(total / weight);
  }
}

}  // namespace unjam_loop
