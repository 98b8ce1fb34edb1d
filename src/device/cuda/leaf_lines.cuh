// The CUDA leaves of lines (leaf_access.cuh): user memory is linear, connector memory is lines. A
// warp has four at a time.
#pragma once

#include <cstdint>

#include "device/cuda/leaf_copies.cuh"
#include "device/cuda/leaf_reduce.cuh"

namespace unjam::cuda_leaves {

enum class LineFlags : bool { kInside, kBehind };  // kBehind: store_line_flags() stores them

// body(place, valid) for each of this thread's places; by all threads of a warp together.
template <class Body>
__device__ __forceinline__ void for_places(std::uint32_t bytes, unsigned thread, unsigned threads,
                                           Body body) {
  const std::uint32_t places = line_places(bytes);
#pragma unroll 1
  for (std::uint32_t first = thread - thread % 32; first < places; first += threads) {
    const std::uint32_t place = first + thread % 32;
    body(place, place < places);
  }
}

template <int kElement>
struct LineAccess {
  const Slice& slice;
  std::uint32_t place;
  bool valid;
  LineFlags flags;
  __device__ __forceinline__ std::uint32_t at() const { return line_data_at(place); }
  __device__ __forceinline__ unsigned bytes() const { return line_data_bytes(place, slice.bytes); }
  __device__ __forceinline__ void load(int first, Raw<2> (&raw)[kPacketBatch][1]) const {
    load_batch<kPacketBatch>(slice, first, [&](int i, const char* src) {
      raw[i][0] = {};
      if (first + i == slice.local_src) {
        raw[i][0] = load_linear<2, kElement>(src + at(), bytes());
      } else if (valid) {
        raw[i][0] = load_aligned<2>(src + kWordBytes * place);
      }
    });
  }
  __device__ __forceinline__ void store(const Raw<2> (&raw)[1]) const {
    const bool bears = bears_flags(place);
    const Raw<2> word = bears ? line_flags(slice.sent_flag) : raw[0];
    const bool stores = valid && !(bears && flags == LineFlags::kBehind);
    __syncwarp();  // lines are stored in one instruction
    for_slots(slice, [&](char* dst) {
      if (stores) store_line_word(dst + kWordBytes * place, word);
    });
    if (slice.dst_user != nullptr) {
      store_linear<2, kElement>(slice.dst_user + at(), raw[0], bytes());
    }
  }
};

template <DType dtype>
__device__ __forceinline__ void reduce_line(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  const Slice slice = make_slice(job);
  for_places(slice.bytes, thread, threads, [&](std::uint32_t place, bool valid) {
    LineAccess<dtype_bytes(dtype)> access{slice, place, valid, flags};
    reduce_pieces<dtype, 2, 1, kPacketBatch>(slice, access);
  });
}

template <int kElement>
__device__ __forceinline__ void spread_line(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  const Slice slice = make_slice(job);
  for_places(slice.bytes, thread, threads, [&](std::uint32_t place, bool valid) {
    LineAccess<kElement> access{slice, place, valid, flags};
    Raw<2> raw[kPacketBatch][1];
    access.load(0, raw);
    access.store(raw[0]);
  });
}

// Whether all lines of a combine's sources have come of which this thread looks at the flags.
// Acquire: behind a barrier the others read the data.
__device__ __forceinline__ bool line_combine_ready(const SliceJob& job, unsigned thread,
                                                   unsigned threads) {
  const Slice slice = make_slice(job);
  bool ready = true;
  for_places(slice.bytes, thread, threads, [&](std::uint32_t place, bool valid) {
    if (!valid || !bears_flags(place)) return;
#pragma unroll 1
    for (int first = 0; ready && first < slice.num_src; first += kPacketBatch) {
      load_batch<kPacketBatch>(slice, first, [&](int i, const char* src) {
        if (first + i == slice.local_src) return;
        ready &= is_flags(acquire_line_word(src + kWordBytes * place), slice.flag);
      });
    }
  });
  return ready;
}

// ---- Copies ----

struct LineLayout {
  __device__ static std::uint32_t extent(std::uint32_t bytes) {
    return line_places(bytes) * kWordBytes;
  }
  __device__ static std::uint32_t data_at(std::uint32_t at) {
    return line_data_at(at / kWordBytes);
  }
  __device__ static std::uint32_t slot_at(std::uint32_t at) { return at; }
  __device__ static std::uint32_t left(std::uint32_t at, std::uint32_t bytes) {
    return line_data_bytes(at / kWordBytes, bytes);
  }
  static constexpr bool kHasFlags = true;
};

using LineWalk = CopyWalk<kWordBytes, LineLayout>;

__device__ __forceinline__ void copies_line(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  const std::uint64_t sent_flag = job.sent_flag;
  LineWalk walk(job, thread, threads);
#pragma unroll 1
  while (!walk.done()) {
    CopyPiece piece[kCopyPieces];
    Raw<2> raw[kCopyPieces];
    walk.fill(piece);
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      raw[p] = {};
      if (piece[p].flags) {
        raw[p] = line_flags(sent_flag);
      } else if (piece[p].bytes != 0 && piece[p].to_slot) {
        raw[p] = load_unit(piece[p].from, piece[p].bytes);
      } else if (piece[p].bytes != 0) {
        raw[p] = load_aligned<2>(piece[p].from);
      }
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      // (What is behind the data of the last line is stored, too: whole lines are.)
      const bool stores = piece[p].to_slot && !(piece[p].flags && flags == LineFlags::kBehind);
      __syncwarp();  // lines are stored in one instruction
      if (stores) store_line_word(piece[p].to, raw[p]);
      if (!piece[p].to_slot && piece[p].bytes != 0) {
        store_unit(piece[p].to, raw[p], piece[p].bytes);
      }
    }
  }
}

// As line_combine_ready().
__device__ __forceinline__ bool line_copies_ready(const SliceJob& job, unsigned thread,
                                                  unsigned threads) {
  bool ready = true;
  LineWalk walk(job, thread, threads);
#pragma unroll 1
  while (ready && !walk.done()) {
    CopyPiece piece[kCopyPieces];
    walk.fill(piece);
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (!piece[p].flags || piece[p].to_slot) continue;
      ready &= is_flags(acquire_line_word(piece[p].from), job.flag);
    }
  }
  return ready;
}

__device__ __forceinline__ bool lines_ready(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  return job.copies ? line_copies_ready(job, thread, threads)
                    : line_combine_ready(job, thread, threads);
}

__device__ __forceinline__ bool goes_to_slots(const SliceJob& job) {
  for (int i = 0; i < job.num_src; ++i) {
    if (job.dst_slot[i] != nullptr) return true;
  }
  return false;
}

// Of lines that have been stored without, behind a fence of this thread.
__device__ __forceinline__ void store_line_flags(const SliceJob& job, unsigned thread,
                                                 unsigned threads) {
  if (job.copies) {
    LineWalk walk(job, thread, threads);
    while (!walk.done()) {
      const CopyPiece piece = walk.next();
      if (piece.flags && piece.to_slot) store_line_word(piece.to, line_flags(job.sent_flag));
    }
    return;
  }
  const Slice slice = make_slice(job);
  for_places(slice.bytes, thread, threads, [&](std::uint32_t place, bool valid) {
    if (!valid || !bears_flags(place)) return;
    for_slots(slice, [&](char* dst) {
      store_line_word(dst + kWordBytes * place, line_flags(slice.sent_flag));
    });
  });
}

}  // namespace unjam::cuda_leaves
