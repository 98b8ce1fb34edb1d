// What the CUDA leaves of all protocols copy with: the pieces of all copies of a job are one
// sequence, cut among the warps.
#pragma once

#include <cstdint>

#include "device/cuda/leaves/leaf_access.cuh"
#include "device/leaf.h"

namespace unjam::cuda_leaves {

// A warp has 32 neighbouring pieces of one copy at a time, the next warp those of the next copy: so
// loads from, and stores to, all peers are under way together. kCopyPieces of a thread's at once.
inline constexpr int kCopyPieces = 4;

// One side is a connector; the pointers are this piece's own.
struct CopyPiece {
  const char* from = nullptr;
  char* to = nullptr;
  char* also_to = nullptr;  // of what goes to a slot
  unsigned bytes = 0;       // at most a piece's; 0: nothing to do, but perhaps for a line's flags
  bool to_slot = false;
  bool flags = false;
};

// What a protocol makes of the bytes of a copy: where a piece's data lie, in user memory and in a
// connector's, and how much that are. `at`: of the walk, which has `extent` for a copy.
template <unsigned kScale>  // bytes of connector memory for one of data
struct EvenLayout {
  __device__ static std::uint32_t extent(std::uint32_t bytes) { return bytes; }
  __device__ static std::uint32_t data_at(std::uint32_t at) { return at; }
  __device__ static std::uint32_t slot_at(std::uint32_t at) { return kScale * at; }
  __device__ static std::uint32_t left(std::uint32_t at, std::uint32_t bytes) { return bytes - at; }
  static constexpr bool kHasFlags = false;
};

// kBytes: of a piece.
template <unsigned kBytes, class Layout>
class CopyWalk {
 public:
  __device__ __forceinline__ CopyWalk(const SliceJob& job, unsigned thread, unsigned threads)
      : job_(job), copies_(job.num_src), warps_(threads / 32), at_(thread % 32 * kBytes) {
    std::uint32_t longest = 0;
#pragma unroll 4
    for (int i = 0; i < job.num_src; ++i) {
      longest = job.copy_elems[i] > longest ? job.copy_elems[i] : longest;
    }
    element_ = dtype_bytes(job.dtype);
    end_ = Layout::extent(longest * element_);
    copy_ = thread / 32;
    wrap();
  }
  __device__ __forceinline__ bool done() const { return at_ - at_ % (32 * kBytes) >= end_; }

  // This thread's next piece.
  __device__ __forceinline__ CopyPiece next() {
    CopyPiece piece;
    if (!done()) {
      const std::uint32_t bytes = job_.copy_elems[copy_] * element_;
      if (at_ < Layout::extent(bytes) && job_.src[copy_] != nullptr) {
        const std::uint32_t left = Layout::left(at_, bytes);
        const std::uint32_t data_at = Layout::data_at(at_), slot_at = Layout::slot_at(at_);
        piece.bytes = left < kBytes ? left : kBytes;
        piece.flags = Layout::kHasFlags && bears_flags(at_ / kBytes);
        piece.to_slot = job_.dst_slot[copy_] != nullptr;
        piece.from =
            static_cast<const char*>(job_.src[copy_]) + (piece.to_slot ? data_at : slot_at);
        piece.to = piece.to_slot ? static_cast<char*>(job_.dst_slot[copy_]) + slot_at
                                 : static_cast<char*>(job_.dst_copy[copy_]) + data_at;
        // (Of packets there is none.)
        if (kBytes == kPieceBytes && piece.to_slot && job_.dst_copy[copy_] != nullptr) {
          piece.also_to = static_cast<char*>(job_.dst_copy[copy_]) + data_at;
        }
      }
    }
    copy_ += warps_;
    wrap();
    return piece;
  }
  __device__ __forceinline__ void fill(CopyPiece (&piece)[kCopyPieces]) {
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) piece[p] = next();
  }

 private:
  __device__ __forceinline__ void wrap() {
    while (copy_ >= copies_) {
      copy_ -= copies_;
      at_ += 32 * kBytes;
    }
  }

  // A copy is a slice: 32 bits are enough.
  const SliceJob& job_;
  std::uint32_t copies_, warps_, element_;
  std::uint32_t copy_;  // of the next piece
  std::uint32_t at_;    // its data bytes begin there
  std::uint32_t end_;   // of the longest copy
};

// Copies take any element size in one function, by what the addresses allow: several would cost
// more registers and instructions than they save.
__device__ __forceinline__ bool all_words(const void* p, unsigned bytes) {
  return ((static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(p)) | bytes) & 3) == 0;
}

template <class T>
__device__ __forceinline__ void copy_elements(const char* from, char* to, unsigned bytes) {
#pragma unroll 1
  for (unsigned at = 0; at < bytes; at += sizeof(T)) {
    *reinterpret_cast<T*>(to + at) = *reinterpret_cast<const T*>(from + at);
  }
}

// A piece that is not whole, or not aligned to that.
__device__ __forceinline__ void copy_odd(const char* from, char* to, unsigned bytes) {
  if (all_words(from, bytes) && all_words(to, 0)) {
    copy_elements<std::uint32_t>(from, to, bytes);
  } else {
    copy_elements<std::uint8_t>(from, to, bytes);
  }
}

__device__ __forceinline__ Raw<2> load_unit(const char* from, unsigned bytes) {
  return all_words(from, bytes) ? load_linear<2, 4>(from, bytes) : load_linear<2, 1>(from, bytes);
}
__device__ __forceinline__ void store_unit(char* to, const Raw<2>& raw, unsigned bytes) {
  all_words(to, bytes) ? store_linear<2, 4>(to, raw, bytes) : store_linear<2, 1>(to, raw, bytes);
}

}  // namespace unjam::cuda_leaves
