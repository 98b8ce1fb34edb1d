// The CUDA leaves of slots: everything is linear, in pieces of 16 bytes.
#pragma once

#include <cstdint>

#include "device/cuda/leaves/leaf_copies.cuh"
#include "device/cuda/leaves/leaf_reduce.cuh"

namespace unjam::cuda_leaves {

// Whole pieces, all pointers aligned, those that begin before `end`. A warp has kPieces times 32
// pieces in a row: a thread's lie so far apart that the distance is a constant, which an
// instruction holds; as variables, the addresses would take most registers.
inline constexpr std::uint32_t kWarpBytes = 32 * kPieceBytes;
struct AlignedAccess {
  const Slice& slice;
  std::uint32_t at;
  std::uint32_t end;
  __device__ __forceinline__ bool has(int p) const { return at + p * kWarpBytes < end; }
  template <int kBatch, int kPieces>
  __device__ __forceinline__ void load(int first, Raw<4> (&raw)[kBatch][kPieces]) const {
    load_batch<kBatch>(slice, first, [&](int i, const char* src) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (has(p)) raw[i][p] = load_aligned<4>(src + at + p * kWarpBytes);
      }
    });
  }
  template <int kPieces>
  __device__ __forceinline__ void store(const Raw<4> (&raw)[kPieces]) const {
    const auto put = [&](char* dst) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (has(p)) store_aligned(dst + at + p * kWarpBytes, raw[p]);
      }
    };
    for_slots(slice, put);
    if (slice.dst_user != nullptr) put(slice.dst_user);
  }
};

// One piece, perhaps the last, at any alignment.
template <int kElement>
struct LinearAccess {
  const Slice& slice;
  std::uint32_t at;
  unsigned bytes;
  template <int kBatch>
  __device__ __forceinline__ void load(int first, Raw<4> (&raw)[kBatch][1]) const {
    load_batch<kBatch>(slice, first, [&](int i, const char* src) {
      raw[i][0] = load_linear<4, kElement>(src + at, bytes);
    });
  }
  __device__ __forceinline__ void store(const Raw<4> (&raw)[1]) const {
    const auto put = [&](char* dst) { store_linear<4, kElement>(dst + at, raw[0], bytes); };
    for_slots(slice, put);
    if (slice.dst_user != nullptr) put(slice.dst_user);
  }
};

__device__ __forceinline__ bool all_aligned(const Slice& slice) {
  std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(slice.dst_user);
#pragma unroll 4
  for (int s = 0; s < slice.num_src; ++s) bits |= reinterpret_cast<std::uintptr_t>(slice.src[s]);
#pragma unroll 4
  for (int d = 0; d < slice.num_dst; ++d) {
    bits |= reinterpret_cast<std::uintptr_t>(slice.dst_slot[d]);
  }
  return (bits & (kPieceBytes - 1)) == 0;
}

// Where a thread's first piece lies.
template <int kPieces>
__device__ __forceinline__ std::uint32_t first_of(unsigned thread) {
  return thread / 32 * (kPieces * kWarpBytes) + thread % 32 * kPieceBytes;
}

// Moves what a thread has of a slice: load(at, raw) reads the pieces at `at`, store(at, raw) stores
// what comes of them. The next pieces' loads are under way while these are worked out and stored: a
// read of memory takes most of a microsecond, and a store has to wait for its link. (Worth it where
// much is read for what is stored. Copies gain nothing.)
template <class Pieces, class Load, class Store>
__device__ __forceinline__ void move_ahead(std::uint32_t at, std::uint32_t end, std::uint32_t step,
                                           Load load, Store store) {
  if (at >= end) return;
  Pieces raw;
  load(at, raw);
#pragma unroll 1
  for (;;) {
    const std::uint32_t next = at + step;
    const bool goes_on = next < end;
    Pieces ahead;
    if (goes_on) load(next, ahead);
    store(at, raw);
    if (!goes_on) return;
    raw = ahead;
    at = next;
  }
}

// Runs some(at, end) for this thread's first piece of the whole ones if all pointers are aligned,
// and one(at, bytes) for each piece of what is left.
template <int kPieces, class Some, class One>
__device__ __forceinline__ void for_pieces(const Slice& slice, unsigned thread, unsigned threads,
                                           Some some, One one) {
  std::uint32_t begin = 0;
  if (all_aligned(slice)) {
    begin = slice.bytes & ~(kPieceBytes - 1);
    some(first_of<kPieces>(thread), begin);
  }
#pragma unroll 1
  for (std::uint32_t at = begin + thread * kPieceBytes; at < slice.bytes;
       at += threads * kPieceBytes) {
    const std::uint32_t left = slice.bytes - at;
    one(at, left < kPieceBytes ? static_cast<unsigned>(left) : kPieceBytes);
  }
}

// Where a slice's results go, the first of them kept in registers.
struct Targets {
  static constexpr int kKept = 4;
  char* kept[kKept];
  const Slice& slice;
  __device__ __forceinline__ explicit Targets(const Slice& s) : slice(s) {
#pragma unroll
    for (int d = 0; d < kKept; ++d) {
      if (d < s.num_dst) kept[d] = static_cast<char*>(s.dst_slot[d]);
    }
  }
  template <int kPieces>
  __device__ __forceinline__ void put(const Raw<4> (&raw)[kPieces], std::uint32_t at,
                                      std::uint32_t end) const {
    const auto to = [&](char* dst) {
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (at + p * kWarpBytes < end) store_aligned(dst + at + p * kWarpBytes, raw[p]);
      }
    };
#pragma unroll
    for (int d = 0; d < kKept; ++d) {
      if (d < slice.num_dst) to(kept[d]);
    }
#pragma unroll 1
    for (int d = kKept; d < slice.num_dst; ++d) to(static_cast<char*>(slice.dst_slot[d]));
    if (slice.dst_user != nullptr) to(slice.dst_user);
  }
};

template <int kSources, int kPieces>
struct PiecesOf {
  Raw<4> raw[kSources][kPieces];
};

// A combine of at most kSources sources, in whole pieces: everything is loaded, then it is worked
// out piece by piece, which takes few registers.
template <DType dtype, int kPieces, int kSources>
__device__ __forceinline__ void reduce_few(const Slice& slice, std::uint32_t at, std::uint32_t end,
                                           unsigned threads) {
  using F = Format<dtype>;
  using Pieces = PiecesOf<kSources, kPieces>;
  constexpr int kCount = F::template kCount<4>;
  const char* from[kSources];
#pragma unroll
  for (int i = 0; i < kSources; ++i) {
    if (i < slice.num_src) from[i] = static_cast<const char*>(slice.src[i]);
  }
  const Targets targets(slice);
  const auto load = [&](std::uint32_t first, Pieces& x) {
#pragma unroll
    for (int i = 0; i < kSources; ++i) {
      if (i >= slice.num_src) break;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        const std::uint32_t place = first + p * kWarpBytes;
        if (place < end) x.raw[i][p] = load_aligned<4>(from[i] + place);
      }
    }
  };
  const auto store = [&](std::uint32_t first, Pieces& x) {
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      typename F::Acc acc[kCount];
      decode_piece<F, 4>(slice, 0, x.raw[0][p], acc);
#pragma unroll
      for (int i = 1; i < kSources; ++i) {
        if (i < slice.num_src) add_piece<F, 4>(slice, i, x.raw[i][p], acc);
      }
      finish_piece<F, kCount>(slice, acc);
      F::template encode<4>(acc, x.raw[0][p]);
    }
    targets.put(x.raw[0], first, end);
  };
  move_ahead<Pieces>(at, end, threads * kPieces * kPieceBytes, load, store);
}

// Pieces of a thread that are copied at once. 64 KiB by a group of seven warps are two turns with
// ten, three with eight, of which the third has work for two warps; and each turn takes a read of
// memory. Between two ranks, whose slices are longer, copies are faster with eight.
inline constexpr int kPiecesOfPair = 8, kPiecesOfMany = 10;
// And of each source that are reduced at once, if there are up to four; if there are two twice as
// many, of float32 one more, for which other types lack registers. (With more, nothing could be
// loaded ahead, which costs more than it gains.)
inline constexpr int kFloatsOfTwoSources = 5, kPiecesOfFourSources = 2;
// What a group of seven warps moves so in whole turns. (Of pairs, whose slots are larger, two.)
constexpr bool whole_turns(std::uint32_t bytes, int pieces) {
  return bytes % (7 * kWarpBytes * static_cast<unsigned>(pieces)) == 0;
}
static_assert(whole_turns(kSlotTurnBytes, kPiecesOfMany) &&
              whole_turns(kSlotTurnBytes, kFloatsOfTwoSources) &&
              whole_turns(kSlotTurnBytes, 2 * kPiecesOfFourSources) &&
              whole_turns(kSlotTurnBytes, kPiecesOfFourSources) &&
              whole_turns(2 * kSlotTurnBytes, kPiecesOfPair));

template <DType dtype>
__device__ __forceinline__ void reduce_slot(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  const auto one = [&](std::uint32_t at, unsigned bytes) {
    LinearAccess<kElement> access{slice, at, bytes};
    reduce_pieces<dtype, 4, 1, 1>(slice, access);
  };
  // As much as the registers hold: narrow types need many to compute with, and integers of 8 bytes
  // nobody sends in bulk.
  constexpr bool kFew = kElement == 1 || (kElement == 8 && is_integer(dtype));
  constexpr int kOfFour = kFew ? 1 : kPiecesOfFourSources;
  constexpr int kOfTwo = dtype == DType::kFloat32 ? kFloatsOfTwoSources : 2 * kOfFour;
  if (slice.num_src <= 2) {
    for_pieces<kOfTwo>(
        slice, thread, threads,
        [&](std::uint32_t at, std::uint32_t end) {
          reduce_few<dtype, kOfTwo, 2>(slice, at, end, threads);
        },
        one);
  } else if (slice.num_src <= 4) {
    for_pieces<kOfFour>(
        slice, thread, threads,
        [&](std::uint32_t at, std::uint32_t end) {
          reduce_few<dtype, kOfFour, 4>(slice, at, end, threads);
        },
        one);
  } else {
    for_pieces<1>(
        slice, thread, threads,
        [&](std::uint32_t at, std::uint32_t end) {
#pragma unroll 1
          for (; at < end; at += threads * kPieceBytes) {
            AlignedAccess access{slice, at, end};
            reduce_pieces<dtype, 4, 1, 1>(slice, access);
          }
        },
        one);
  }
}

template <int kElement>
__device__ __forceinline__ void spread_slot(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  constexpr int kPieces = kPiecesOfMany;
  Slice slice = make_slice(job);
  // In place it is there already: to write what was read would double the memory's work.
  if (slice.dst_user == slice.src[0]) slice.dst_user = nullptr;
  for_pieces<kPieces>(
      slice, thread, threads,
      [&](std::uint32_t at, std::uint32_t end) {
        const auto* from = static_cast<const char*>(slice.src[0]);
        const Targets targets(slice);
#pragma unroll 1
        for (; at < end; at += threads * kPieces * kPieceBytes) {
          Raw<4> raw[kPieces];
#pragma unroll
          for (int p = 0; p < kPieces; ++p) {
            if (at + p * kWarpBytes < end) raw[p] = load_aligned<4>(from + at + p * kWarpBytes);
          }
          targets.put(raw, at, end);
        }
      },
      [&](std::uint32_t at, unsigned bytes) {
        const LinearAccess<kElement> access{slice, at, bytes};
        Raw<4> raw[1][1];
        access.load(0, raw);
        access.store(raw[0]);
      });
}

// ---- Copies ----

using SlotWalk = CopyWalk<kPieceBytes, EvenLayout<1>>;

// Whether every copy consists of whole pieces at addresses of theirs.
__device__ __forceinline__ bool whole_copies(const SliceJob& job) {
  const std::uint32_t element = dtype_bytes(job.dtype);
  std::uintptr_t bits = 0;
#pragma unroll 1
  for (int i = 0; i < job.num_src; ++i) {
    if (job.copy_elems[i] == 0) continue;
    bits |= reinterpret_cast<std::uintptr_t>(job.src[i]) |
            reinterpret_cast<std::uintptr_t>(job.dst_slot[i]) |
            reinterpret_cast<std::uintptr_t>(job.dst_copy[i]) | job.copy_elems[i] * element;
  }
  return (bits & (kPieceBytes - 1)) == 0;
}

// One copy after the other: nothing but loads and stores. Warps, and blocks, begin with different
// ones, so that they do not all send to one peer at a time.
template <int kPieces>
__device__ __forceinline__ void straight_copies(const SliceJob& job, unsigned thread,
                                                unsigned threads) {
  const std::uint32_t element = dtype_bytes(job.dtype);
  unsigned copy = (blockIdx.x + thread / 32) % job.num_src;
#pragma unroll 1
  for (int k = 0; k < job.num_src; ++k) {
    const std::uint32_t bytes = job.copy_elems[copy] * element;
    const char* from = static_cast<const char*>(job.src[copy]);
    char* const to_slot = static_cast<char*>(job.dst_slot[copy]);
    char* const to_user = static_cast<char*>(job.dst_copy[copy]);
    char* const to = to_slot != nullptr ? to_slot : to_user;
    const bool both = to_slot != nullptr && to_user != nullptr && to_user != from;
#pragma unroll 1
    for (std::uint32_t at = from == nullptr ? bytes : first_of<kPieces>(thread); at < bytes;
         at += threads * kPieces * kPieceBytes) {
      Raw<4> raw[kPieces];
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (at + p * kWarpBytes < bytes) raw[p] = load_aligned<4>(from + at + p * kWarpBytes);
      }
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (at + p * kWarpBytes < bytes) store_aligned(to + at + p * kWarpBytes, raw[p]);
      }
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (both && at + p * kWarpBytes < bytes) {
          store_aligned(to_user + at + p * kWarpBytes, raw[p]);
        }
      }
    }
    copy = copy + 1 == job.num_src ? 0 : copy + 1;
  }
}

__device__ __forceinline__ void copies_slot(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  if (whole_copies(job)) {
    return job.num_src > 2 ? straight_copies<kPiecesOfMany>(job, thread, threads)
                           : straight_copies<kPiecesOfPair>(job, thread, threads);
  }
  SlotWalk walk(job, thread, threads);
#pragma unroll 1
  while (!walk.done()) {
    CopyPiece piece[kCopyPieces];
    Raw<4> raw[kCopyPieces];
    bool whole[kCopyPieces];
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      piece[p] = walk.next();
      whole[p] = piece[p].bytes == kPieceBytes && is_aligned(piece[p].from, kPieceBytes) &&
                 is_aligned(piece[p].to, kPieceBytes) && is_aligned(piece[p].also_to, kPieceBytes);
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (whole[p]) raw[p] = load_aligned<4>(piece[p].from);
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (!whole[p]) continue;
      store_aligned(piece[p].to, raw[p]);
      if (piece[p].also_to != nullptr) store_aligned(piece[p].also_to, raw[p]);
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (whole[p] || piece[p].bytes == 0) continue;
#pragma unroll 1
      for (char* to = piece[p].to; to != nullptr;) {
        copy_odd(piece[p].from, to, piece[p].bytes);
        to = to == piece[p].also_to ? nullptr : piece[p].also_to;
      }
    }
  }
}

}  // namespace unjam::cuda_leaves
