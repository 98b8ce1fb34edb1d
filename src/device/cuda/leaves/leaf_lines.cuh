// The CUDA leaves of lines (leaf_access.cuh): user memory is linear, connector memory is lines. A
// warp has four in one instruction.
#pragma once

#include <cstdint>

#include "device/cuda/leaves/leaf_copies.cuh"
#include "device/cuda/leaves/leaf_reduce.cuh"

namespace unjam::cuda_leaves {

enum class LineFlags : bool { kInside, kBehind };  // kBehind: store_line_flags() stores them

// Places of a thread that are under way at once: a place alone costs a round trip to memory.
inline constexpr int kLinePlaces = 4;

// A thread's places of one batch: those with i < kLinePlaces that are below `places`.
struct LineBatch {
  std::uint32_t first, step, places;
  __device__ __forceinline__ std::uint32_t place(int i) const { return first + i * step; }
  __device__ __forceinline__ bool valid(int i) const { return place(i) < places; }
};

// body(batch) for all of this thread's places; by all threads of a warp together.
template <class Body>
__device__ __forceinline__ void for_places(std::uint32_t bytes, unsigned thread, unsigned threads,
                                           Body body) {
  const std::uint32_t places = line_places(bytes);
#pragma unroll 1
  for (std::uint32_t first = thread - thread % 32; first < places; first += kLinePlaces * threads) {
    body(LineBatch{first + thread % 32, threads, places});
  }
}

// Lines are read at system scope, past the first cache: who has seen their flags, in front of a
// barrier, has acquired nothing if they are inside of the lines.
template <int kElement>
struct LineAccess {
  const Slice& slice;
  LineBatch batch;
  LineFlags flags;
  template <int kBatch>
  __device__ __forceinline__ void load(int first, Raw<2> (&raw)[kBatch][kLinePlaces]) const {
    load_batch<kBatch>(slice, first, [&](int i, const char* src) {
      const bool local = first + i == slice.local_src;
#pragma unroll
      for (int p = 0; p < kLinePlaces; ++p) {
        const std::uint32_t place = batch.place(p);
        raw[i][p] = {};
        if (local) {
          const unsigned bytes = batch.valid(p) ? line_data_bytes(place, slice.bytes) : 0;
          raw[i][p] = load_linear<2, kElement>(src + line_data_at(place), bytes);
        } else if (batch.valid(p)) {
          raw[i][p] = load_line_word(src + kWordBytes * place);
        }
      }
    });
  }
  __device__ __forceinline__ void store(const Raw<2> (&raw)[kLinePlaces]) const {
#pragma unroll
    for (int p = 0; p < kLinePlaces; ++p) {
      const std::uint32_t place = batch.place(p);
      const bool bears = bears_flags(place);
      const Raw<2> word = bears ? line_flags(slice.sent_flag) : raw[p];
      const bool stores = batch.valid(p) && !(bears && flags == LineFlags::kBehind);
      __syncwarp();  // lines are stored in one instruction
      for_slots(slice, [&](char* dst) {
        if (stores) store_line_word(dst + kWordBytes * place, word);
      });
      if (slice.dst_user != nullptr && batch.valid(p)) {
        store_linear<2, kElement>(slice.dst_user + line_data_at(place), raw[p],
                                  line_data_bytes(place, slice.bytes));
      }
    }
  }
};

template <DType dtype>
__device__ __forceinline__ void reduce_line(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  constexpr int kSources = 2;  // under way at once
  const Slice slice = make_slice(job);
  for_places(slice.bytes, thread, threads, [&](const LineBatch& batch) {
    LineAccess<dtype_bytes(dtype)> access{slice, batch, flags};
    reduce_pieces<dtype, 2, kLinePlaces, kSources>(slice, access);
  });
}

template <int kElement>
__device__ __forceinline__ void spread_line(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  const Slice slice = make_slice(job);
  for_places(slice.bytes, thread, threads, [&](const LineBatch& batch) {
    LineAccess<kElement> access{slice, batch, flags};
    Raw<2> raw[1][kLinePlaces];
    access.load(0, raw);
    access.store(raw[0]);
  });
}

// Whether all lines of a combine's sources have come of which this thread looks at the flags.
__device__ __forceinline__ bool line_combine_ready(const SliceJob& job, unsigned thread,
                                                   unsigned threads) {
  const Slice slice = make_slice(job);
  bool ready = true;
  if (!bears_flags(thread)) return ready;  // of no place, see for_places()
  for_places(slice.bytes, thread, threads, [&](const LineBatch& batch) {
#pragma unroll 1
    for (int i = 0; ready && i < slice.num_src; ++i) {
      if (i == slice.local_src) continue;
      const char* const src = static_cast<const char*>(slice.src[i]);
      Raw<2> raw[kLinePlaces];
#pragma unroll
      for (int p = 0; p < kLinePlaces; ++p) {
        raw[p] = line_flags(slice.flag);
        if (batch.valid(p)) raw[p] = load_line_word(src + kWordBytes * batch.place(p));
      }
#pragma unroll
      for (int p = 0; p < kLinePlaces; ++p) ready &= is_flags(raw[p], slice.flag);
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
        raw[p] = load_line_word(piece[p].from);
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
  const std::uint64_t flag = job.flag;
  bool ready = true;
  if (!bears_flags(thread)) return ready;  // a warp's pieces are 32 places that follow each other
  LineWalk walk(job, thread, threads);
#pragma unroll 1
  while (ready && !walk.done()) {
    CopyPiece piece[kCopyPieces];
    Raw<2> raw[kCopyPieces];
    walk.fill(piece);
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      raw[p] = line_flags(flag);
      if (piece[p].flags && !piece[p].to_slot) raw[p] = load_line_word(piece[p].from);
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) ready &= is_flags(raw[p], flag);
  }
  return ready;
}

// Whether this thread's part of what comes is there. Where flags are stored behind a fence, and
// only there, what is read behind a barrier of the block is the sender's: the fence here makes the
// looks acquire.
__device__ __forceinline__ bool lines_ready(const SliceJob& job, unsigned thread, unsigned threads,
                                            LineFlags flags) {
  const bool ready = job.copies ? line_copies_ready(job, thread, threads)
                                : line_combine_ready(job, thread, threads);
  if (flags == LineFlags::kBehind && ready) __threadfence_system();
  return ready;
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
  for_places(slice.bytes, thread, threads, [&](const LineBatch& batch) {
    for (int p = 0; p < kLinePlaces; ++p) {
      const std::uint32_t place = batch.place(p);
      if (!batch.valid(p) || !bears_flags(place)) continue;
      for_slots(slice, [&](char* dst) {
        store_line_word(dst + kWordBytes * place, line_flags(slice.sent_flag));
      });
    }
  });
}

}  // namespace unjam::cuda_leaves
