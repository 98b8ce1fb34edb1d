// Operators of a dense model outside of attention. Rules: python/unjam/loop/ops/dense.py.
#pragma once

#include "pages.cuh"

namespace unjam_loop {

template <class L, class T, u32 kCols>
LOOP_DEVICE void embedding(const Task& t) {
  using Stored = typename T::Stored;
  const u32 token = reinterpret_cast<const u32*>(at_state(t, t.i.in0))[t.i.a];
  const auto* from = reinterpret_cast<const Stored*>(at_weights(t, t.i.aux)) + u64{token} * kCols;
  auto* to = reinterpret_cast<Stored*>(at_pages(t, t.i.out)) + t.i.a * kCols;
  for (u32 c = thread_here(); c < kCols; c += kComputing) to[c] = from[c];
}

template <class L, class T, u32 kCols>
LOOP_DEVICE void norm(const Task& t, float eps) {
  using Stored = typename T::Stored;
  const auto* x = reinterpret_cast<const Stored*>(at_pages(t, t.i.in0)) + t.i.a * kCols;
  const Stored* found =
      stage<T, 1, kCols, true>(t, reinterpret_cast<const u8*>(x), at_weights(t, t.i.aux), eps);
  auto* to = reinterpret_cast<Stored*>(at_pages(t, t.i.out)) + t.i.a * kCols;
  for (u32 c = thread_here(); c < kCols; c += kComputing) to[c] = found[c];
}

// Sums of this warp's rows of a tile: kOwn rows (row, row + kComputingWarps, …) of kMatrices
// matrices, with kBatch rows of x. All lanes have them.
template <u32 kMatrices, u32 kOwn, u32 kBatch>
struct Sums {
  float of[kMatrices][kOwn][kBatch];
};

template <u32 kRows>
inline constexpr u32 kOwnRows = (kRows + kComputingWarps - 1) / kComputingWarps;

// Adds what the tile's pages give; x is staged.
template <class L, class T, u32 kMatrices, u32 kBatch, u32 kCols, u32 kRows, u32 kChunk>
LOOP_DEVICE void add_pages(const Task& t, const typename T::Stored* x,
                           Sums<kMatrices, kOwnRows<kRows>, kBatch>& sums) {
  constexpr u32 kOwn = kOwnRows<kRows>;
  constexpr u32 kPiece = kOfPiece<T>;
  // Rows of x that are in registers at once: more of them spill.
  constexpr u32 kTogether = kBatch % 4 == 0 ? 4 : kBatch % 2 == 0 ? 2 : 1;
  static_assert(kChunk % kPiece == 0 && kCols % kChunk == 0);
  const u32 lane = lane_here(), warp = warp_here();
  for (u32 first = 0; first < kCols; first += kChunk) {
    const auto* page = reinterpret_cast<const Piece*>(take_page<L>(t));
    for (u32 at = lane; at < kChunk / kPiece; at += kWarp) {
      LOOP_UNROLL
      for (u32 b0 = 0; b0 < kBatch; b0 += kTogether) {
        float values[kTogether][kPiece];
        LOOP_UNROLL
        for (u32 b = 0; b < kTogether; ++b) {
          const u32 from = (b0 + b) * kCols + first + at * kPiece;
          const Piece piece = *reinterpret_cast<const Piece*>(x + from);
          LOOP_UNROLL
          for (u32 n = 0; n < kPiece; ++n) values[b][n] = of_piece<T>(piece, n);
        }
        LOOP_UNROLL
        for (u32 m = 0; m < kMatrices; ++m) {
          LOOP_UNROLL
          for (u32 own = 0; own < kOwn; ++own) {
            const u32 row = warp + own * kComputingWarps;
            if (kRows % kComputingWarps != 0 && row >= kRows) continue;
            const Piece piece = page[(m * kRows + row) * (kChunk / kPiece) + at];
            LOOP_UNROLL
            for (u32 n = 0; n < kPiece; ++n) {
              const float weight = of_piece<T>(piece, n);
              LOOP_UNROLL
              for (u32 b = 0; b < kTogether; ++b) {
                sums.of[m][own][b0 + b] += weight * values[b][n];
              }
            }
          }
        }
      }
    }
    give_page_back<L>(t);
  }
}

template <u32 kMatrices, u32 kOwn, u32 kBatch>
LOOP_DEVICE void clear(Sums<kMatrices, kOwn, kBatch>& sums) {
  LOOP_UNROLL
  for (u32 m = 0; m < kMatrices; ++m) {
    LOOP_UNROLL
    for (u32 own = 0; own < kOwn; ++own) {
      LOOP_UNROLL
      for (u32 b = 0; b < kBatch; ++b) sums.of[m][own][b] = 0;
    }
  }
}
template <u32 kMatrices, u32 kOwn, u32 kBatch>
LOOP_DEVICE void sum_lanes(Sums<kMatrices, kOwn, kBatch>& sums) {
  LOOP_UNROLL
  for (u32 m = 0; m < kMatrices; ++m) {
    LOOP_UNROLL
    for (u32 own = 0; own < kOwn; ++own) {
      LOOP_UNROLL
      for (u32 b = 0; b < kBatch; ++b) sums.of[m][own][b] = warp_sum(sums.of[m][own][b]);
    }
  }
}

// Stages x and computes a tile: what every product begins with.
template <class L, class T, u32 kMatrices, u32 kBatch, u32 kCols, u32 kRows, u32 kChunk,
          bool kNormed>
LOOP_DEVICE void product(const Task& t, float eps, Sums<kMatrices, kOwnRows<kRows>, kBatch>& sums) {
  const auto* x =
      stage<T, kBatch, kCols, kNormed>(t, at_pages(t, t.i.in0), at_weights(t, t.i.aux), eps);
  clear(sums);
  add_pages<L, T, kMatrices, kBatch, kCols, kRows, kChunk>(t, x, sums);
  sum_lanes(sums);
}

// Lane 0 of each warp: what to do with each of the tile's results.
template <u32 kRows, u32 kBatch, class Body>
LOOP_DEVICE void for_results(Body body) {
  if (lane_here() != 0) return;
  LOOP_UNROLL
  for (u32 own = 0; own < kOwnRows<kRows>; ++own) {
    const u32 row = warp_here() + own * kComputingWarps;
    if (row >= kRows) continue;
    LOOP_UNROLL
    for (u32 b = 0; b < kBatch; ++b) body(own, row, b);
  }
}

template <class L, class T, u32 kBatch, u32 kCols, u32 kRows, u32 kChunk, bool kNormed,
          u32 kOutCols, bool kResidual>
LOOP_DEVICE void linear(const Task& t, float eps) {
  using Stored = typename T::Stored;
  Sums<1, kOwnRows<kRows>, kBatch> sums;
  product<L, T, 1, kBatch, kCols, kRows, kChunk, kNormed>(t, eps, sums);
  const auto* residual = reinterpret_cast<const Stored*>(at_pages(t, t.i.in1));
  auto* out = reinterpret_cast<Stored*>(at_pages(t, t.i.out));
  for_results<kRows, kBatch>([&](u32 own, u32 row, u32 b) {
    const u32 at = b * kOutCols + t.i.a * kRows + row;
    float value = sums.of[0][own][b];
    if constexpr (kResidual) value += T::load(residual[at]);
    out[at] = T::store(value);
  });
}

template <class L, class T, u32 kBatch, u32 kCols, u32 kRows, u32 kChunk, bool kNormed,
          u32 kOutCols>
LOOP_DEVICE void gated(const Task& t, float eps) {
  Sums<2, kOwnRows<kRows>, kBatch> sums;
  product<L, T, 2, kBatch, kCols, kRows, kChunk, kNormed>(t, eps, sums);
  auto* out = reinterpret_cast<typename T::Stored*>(at_pages(t, t.i.out));
  for_results<kRows, kBatch>([&](u32 own, u32 row, u32 b) {
    out[b * kOutCols + t.i.a * kRows + row] =
        T::store(silu(sums.of[0][own][b]) * sums.of[1][own][b]);
  });
}

// Of a tile of logits the largest, the first of equals, with its token.
template <class L, class T, u32 kBatch, u32 kCols, u32 kRows, u32 kChunk, bool kNormed,
          u32 kOutCols, u32 kVocabulary>
LOOP_DEVICE void head(const Task& t, float eps) {
  Sums<1, kOwnRows<kRows>, kBatch> sums;
  product<L, T, 1, kBatch, kCols, kRows, kChunk, kNormed>(t, eps, sums);
  sync_computing();  // x is not needed any more
  auto* logits = reinterpret_cast<float*>(t.staging);
  for_results<kRows, kBatch>(
      [&](u32 own, u32 row, u32 b) { logits[b * kRows + row] = sums.of[0][own][b]; });
  sync_computing();
  for (u32 b = thread_here(); b < kBatch; b += kComputing) {
    u32 best = 0;
    for (u32 row = 1; row < kRows; ++row) {
      if (logits[b * kRows + row] > logits[b * kRows + best]) best = row;
    }
    auto* out = reinterpret_cast<float*>(at_pages(t, t.i.out)) + b * kOutCols + 2 * t.i.a;
    out[0] = logits[b * kRows + best];
    out[1] = static_cast<float>(t.p.rank * kVocabulary + t.i.a * kRows + best);
  }
}

// Of a row's pairs the largest, the smallest token of equals; kToken: the token alone.
template <class L, class T, u32 kPairs, bool kToken>
LOOP_DEVICE void best(const Task& t) {
  if (warp_here() != 0) return;
  const auto* pairs = reinterpret_cast<const float*>(at_pages(t, t.i.in0)) + t.i.a * 2 * kPairs;
  float value = pairs[0], token = pairs[1];
  for (u32 n = lane_here(); n < kPairs; n += kWarp) {
    const float v = pairs[2 * n], k = pairs[2 * n + 1];
    if (v > value || (v == value && k < token)) {
      value = v;
      token = k;
    }
  }
  for (u32 mask = kWarp / 2; mask != 0; mask /= 2) {
    const float v = from_lane_xor(value, mask), k = from_lane_xor(token, mask);
    if (v > value || (v == value && k < token)) {
      value = v;
      token = k;
    }
  }
  if (lane_here() != 0) return;
  if constexpr (kToken) {
    reinterpret_cast<u32*>(at_state(t, t.i.out))[t.i.a] = static_cast<u32>(token);
  } else {
    auto* out = reinterpret_cast<float*>(at_pages(t, t.i.out)) + 2 * t.i.a;
    out[0] = value;
    out[1] = token;
  }
}

// The last task of a step: its tokens are kept for the host.
template <class L, u32 kBatch>
LOOP_DEVICE void finish(const Task& t) {
  const auto* tokens = reinterpret_cast<const u32*>(at_state(t, t.i.in0));
  for (u32 b = thread_here(); b < kBatch; b += kComputing) {
    t.p.history[t.step * kBatch + b] = tokens[b];
  }
}

}  // namespace unjam_loop
