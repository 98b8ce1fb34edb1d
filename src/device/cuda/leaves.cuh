// The CUDA leaves: the inner loops that move and reduce one slice, one per (protocol, dtype),
// executed by several whole warps of a block. They synchronise nothing: the caller orders what
// comes before and behind.
//
// The operator is a uniform branch inside, and everything of a protocol is inlined into one
// function: one per operator too made ptxas take 90 s instead of 4 s, with spills.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/types.h"
#include "device/cuda/leaf_access.cuh"
#include "device/cuda/leaf_formats.cuh"
#include "device/leaf.h"

namespace unjam {
namespace cuda_leaves {

// What the loops need of a job, read once. The job lies in shared memory behind a generic pointer:
// a read of it waits for the global loads that were issued before (the memory pipeline answers in
// order), and after every store the compiler would have to read it again.
struct Slice {
  const void* const* src;
  void* const* dst_slot;
  char* dst_user;
  std::uint32_t bytes;  // of a slice: 32 bits are enough, and spare registers
  int num_src;
  int num_dst;
  int local_src;
  std::uint32_t flag;
  std::uint32_t sent_flag;
  std::uint32_t divisor;
  bool scale_all;
  int scaled_src;
  Op op;
  double scale;
};

__device__ __forceinline__ Slice make_slice(const SliceJob& job) {
  return {job.src,
          job.dst_slot,
          static_cast<char*>(job.dst_user),
          static_cast<std::uint32_t>(job.elems * dtype_bytes(job.dtype)),
          job.num_src,
          job.num_dst,
          job.local_src,
          job.flag,
          job.sent_flag,
          job.divisor,
          job.scale_sources == ScaleSources::kAll,
          job.scale_sources == ScaleSources::kLocal ? job.local_src : -1,
          job.op,
          job.scale};
}

// body(slot) for every connector that the result goes to. Pointers are read some at a time, so that
// their latencies overlap.
template <class Body>
__device__ __forceinline__ void for_slots(const Slice& slice, Body body) {
  constexpr int kBatch = 4;
#pragma unroll 1
  for (int d = 0; d < slice.num_dst; d += kBatch) {
    char* to[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (d + i < slice.num_dst) to[i] = static_cast<char*>(slice.dst_slot[d + i]);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (d + i < slice.num_dst) body(to[i]);
    }
  }
}

// acc = acc op x for a whole piece. The operator is looked at once a piece: the branch is uniform,
// and cheap beside the piece's loads.
template <class F, int kCount>
__device__ __forceinline__ void combine_piece(Op op, typename F::Acc* acc,
                                              const typename F::Acc* x) {
  switch (op) {
    case Op::kProd:
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kProd>(acc[i], x[i]);
      break;
    case Op::kMin:
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kMin>(acc[i], x[i]);
      break;
    case Op::kMax:
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kMax>(acc[i], x[i]);
      break;
    default:  // averages are sums with scaled sources, or divided at the end
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::template combine<Op::kSum>(acc[i], x[i]);
      break;
  }
}

// One source's piece, decoded and scaled as asked.
template <class F, int kWords>
__device__ __forceinline__ void decode_piece(const Slice& slice, int source, const Raw<kWords>& raw,
                                             typename F::Acc* x) {
  F::template decode<kWords>(raw, x);
  if constexpr (F::kIsFloat) {
    if (slice.scale_all || source == slice.scaled_src) {
#pragma unroll
      for (int i = 0; i < F::template kCount<kWords>; ++i) {
        x[i] = multiply(x[i], static_cast<typename F::Acc>(slice.scale));
      }
    }
  }
}

// acc = acc op the source's piece, some words at a time: narrow elements need registers.
template <class F, int kWords>
__device__ __forceinline__ void add_piece(const Slice& slice, int source, const Raw<kWords>& raw,
                                          typename F::Acc* acc) {
  constexpr int kStep = F::template kCount < kWords >> 8 ? kWords / 2 : kWords;
  constexpr int kCount = F::template kCount<kStep>;
#pragma unroll
  for (int w = 0; w < kWords; w += kStep) {
    Raw<kStep> part;
#pragma unroll
    for (int i = 0; i < kStep; ++i) part.w[i] = raw.w[w + i];
    typename F::Acc x[kCount];
    decode_piece<F, kStep>(slice, source, part, x);
    combine_piece<F, kCount>(slice.op, acc + w / kStep * kCount, x);
  }
}

template <class F, int kCount>
__device__ __forceinline__ void finish_piece(const Slice& slice, typename F::Acc* acc) {
  if constexpr (!F::kIsFloat) {
    if (slice.divisor > 1) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) acc[i] = F::divide(acc[i], slice.divisor);
    }
  }
}

// kPieces pieces of kWords words each, kBatch sources' pieces under way at once.
// access.load(first, raw) fills raw[i] with source first + i's pieces, where there is such a
// source; access.store(results). Everything is read before anything is written: a destination may
// be a source.
template <DType dtype, int kWords, int kPieces, int kBatch, class Access>
__device__ __forceinline__ void reduce_pieces(const Slice& slice, Access& access) {
  using F = Format<dtype>;
  using Acc = typename F::Acc;
  constexpr int kCount = F::template kCount<kWords>;
  Acc acc[kPieces][kCount];
  Raw<kWords> raw[kBatch][kPieces];
  // Without batches the first source stands apart, which spares registers.
  constexpr int kApart = kBatch == 1 ? 1 : 0;
  if constexpr (kApart == 1) {
    access.load(0, raw);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) decode_piece<F, kWords>(slice, 0, raw[0][p], acc[p]);
  }
#pragma unroll 1
  for (int first = kApart; first < slice.num_src; first += kBatch) {
    access.load(first, raw);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (first + i >= slice.num_src) break;
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        if (kApart == 0 && first + i == 0) {
          decode_piece<F, kWords>(slice, 0, raw[i][p], acc[p]);
        } else {
          add_piece<F, kWords>(slice, first + i, raw[i][p], acc[p]);
        }
      }
    }
  }
  Raw<kWords> results[kPieces];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    finish_piece<F, kCount>(slice, acc[p]);
    F::template encode<kWords>(acc[p], results[p]);
  }
  access.store(results);
}

// ---- Slots: everything is linear, in pieces of 16 bytes. ----------------------------------------

inline constexpr unsigned kPieceBytes = 16;

// Reads sources first … of a batch; load(source, its pointer) yields one piece each. Pointers come
// first, then all loads.
template <int kBatch, class Load>
__device__ __forceinline__ void load_batch(const Slice& slice, int first, Load load) {
  const char* from[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (first + i < slice.num_src) from[i] = static_cast<const char*>(slice.src[first + i]);
  }
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    if (first + i < slice.num_src) load(i, from[i]);
  }
}

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
  constexpr int kPieces = kElement == 1 || (kElement == 8 && is_integer(dtype)) ? 1 : 2;
  if (slice.num_src <= 2) {
    for_pieces<2 * kPieces>(
        slice, thread, threads,
        [&](std::uint32_t at, std::uint32_t end) {
          reduce_few<dtype, 2 * kPieces, 2>(slice, at, end, threads);
        },
        one);
  } else if (slice.num_src <= 4) {
    for_pieces<kPieces>(
        slice, thread, threads,
        [&](std::uint32_t at, std::uint32_t end) {
          reduce_few<dtype, kPieces, 4>(slice, at, end, threads);
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
  constexpr int kPieces = 8;
  const Slice slice = make_slice(job);
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

// ---- Packets: units of 8 data bytes; user memory is linear, connector memory is packets. --------

// Which units a thread has must be the same wherever they are looked at.
template <class Body>
__device__ __forceinline__ void for_units(std::uint32_t bytes, unsigned thread, unsigned threads,
                                          Body body) {
#pragma unroll 1
  for (std::uint32_t at = thread * kUnitBytes; at < bytes; at += threads * kUnitBytes) {
    if (!body(at, bytes - at)) return;
  }
}

// Data read while their flags were polled: of a combine, this thread's only unit from every source;
// of copies, its first pieces. Indices are constants, so that they are registers.
inline constexpr int kHeldUnits = 8;
struct Held {
  bool valid = false;
  Raw<2> raw[kHeldUnits];
};

inline constexpr int kPacketBatch = 4;
static_assert(kHeldUnits == 2 * kPacketBatch);

template <int kElement>
struct PacketAccess {
  const Slice& slice;
  std::uint32_t at;    // data bytes
  std::uint32_t left;  // data bytes, from `at`
  Held& held;
  __device__ __forceinline__ unsigned bytes() const {
    return left < kUnitBytes ? static_cast<unsigned>(left) : kUnitBytes;
  }
  __device__ __forceinline__ void load(int first, Raw<2> (&raw)[kPacketBatch][1]) {
    if (held.valid) {
#pragma unroll
      for (int i = 0; i < kPacketBatch; ++i) {
        raw[i][0] = held.raw[i];
        held.raw[i] = held.raw[kPacketBatch + i];
      }
      return;
    }
    load_batch<kPacketBatch>(slice, first, [&](int i, const char* src) {
      if (first + i == slice.local_src) {
        raw[i][0] = load_linear<2, kElement>(src + at, bytes());
      } else {
        const PacketUnit unit = load_packet_unit(src + 2 * at, left, 0);
        raw[i][0] = {{unit.word[0].data, unit.word[1].data}};
      }
    });
  }
  __device__ __forceinline__ void store(const Raw<2> (&raw)[1]) const {
    for_slots(slice,
              [&](char* dst) { store_packet_unit(dst + 2 * at, raw[0], left, slice.sent_flag); });
    if (slice.dst_user != nullptr) {
      store_linear<2, kElement>(slice.dst_user + at, raw[0], bytes());
    }
  }
};

template <DType dtype>
__device__ __forceinline__ void reduce_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
    PacketAccess<kElement> access{slice, at, left, held};
    reduce_pieces<dtype, 2, 1, kPacketBatch>(slice, access);
    return true;
  });
}

template <int kElement>
__device__ __forceinline__ void spread_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  const Slice slice = make_slice(job);
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
    PacketAccess<kElement> access{slice, at, left, held};
    Raw<2> raw[kPacketBatch][1];
    access.load(0, raw);
    access.store(raw[0]);
    return true;
  });
}

// Whether the words that this thread will read of a combine's packet sources all have the flag.
// kHold: the thread has at most one unit, and as many sources as Held has room for: keeps what it
// reads.
template <bool kHold>
__device__ __forceinline__ bool combine_ready(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held* held) {
  constexpr int kBatch = kHold ? kHeldUnits : kPacketBatch;
  const Slice slice = make_slice(job);
  bool ready = true;
  for_units(slice.bytes, thread, threads, [&](std::uint32_t at, std::uint32_t left) {
#pragma unroll 1
    for (int first = 0; ready && first < slice.num_src; first += kBatch) {
      load_batch<kBatch>(slice, first, [&](int i, const char* src) {
        if (first + i == slice.local_src) {
          // One byte at a time where it is not aligned: this code is not one per element size.
          if constexpr (kHold) {
            held->raw[i] = load_linear<2, 1>(
                src + at, left < kUnitBytes ? static_cast<unsigned>(left) : kUnitBytes);
          }
          return;
        }
        const PacketUnit unit = load_packet_unit(src + 2 * at, left, slice.flag);
        ready &= unit.word[0].flag == slice.flag;
        ready &= unit.word[1].flag == slice.flag;
        if constexpr (kHold) held->raw[i] = {{unit.word[0].data, unit.word[1].data}};
      });
    }
    return ready;
  });
  return ready;
}

// ---- Copies: the pieces of all of them are one sequence, cut among the warps. -------------------

// A warp has 32 neighbouring pieces of one copy at a time, the next warp those of the next copy: so
// loads from, and stores to, all peers are under way together. kCopyPieces of a thread's at once.
inline constexpr int kCopyPieces = 4;

// One side is a connector; the pointers are this piece's own.
struct CopyPiece {
  const char* from = nullptr;
  char* to = nullptr;
  char* also_to = nullptr;  // of what goes to a slot
  unsigned bytes = 0;       // at most a piece's; 0: nothing to do
  bool to_slot = false;
};

// kBytes: data bytes of a piece. kScale: bytes of connector memory for one of data.
template <unsigned kBytes, unsigned kScale>
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
    end_ = longest * element_;
    copy_ = thread / 32;
    wrap();
  }
  __device__ __forceinline__ bool done() const { return at_ - at_ % (32 * kBytes) >= end_; }

  // This thread's next piece.
  __device__ __forceinline__ CopyPiece next() {
    CopyPiece piece;
    if (!done()) {
      const std::uint32_t bytes = job_.copy_elems[copy_] * element_;
      if (at_ < bytes && job_.src[copy_] != nullptr) {
        piece.bytes = bytes - at_ < kBytes ? bytes - at_ : kBytes;
        piece.to_slot = job_.dst_slot[copy_] != nullptr;
        piece.from = static_cast<const char*>(job_.src[copy_]) + (piece.to_slot ? 1 : kScale) * at_;
        piece.to = piece.to_slot ? static_cast<char*>(job_.dst_slot[copy_]) + kScale * at_
                                 : static_cast<char*>(job_.dst_copy[copy_]) + at_;
        // (Of packets there is none.)
        if (kScale == 1 && piece.to_slot && job_.dst_copy[copy_] != nullptr) {
          piece.also_to = static_cast<char*>(job_.dst_copy[copy_]) + at_;
        }
      }
    }
    copy_ += warps_;
    wrap();
    return piece;
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
using SlotWalk = CopyWalk<kPieceBytes, 1>;
using PacketWalk = CopyWalk<kUnitBytes, 2>;

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
__device__ __forceinline__ void straight_copies(const SliceJob& job, unsigned thread,
                                                unsigned threads) {
  constexpr int kPieces = 8;
  const std::uint32_t element = dtype_bytes(job.dtype);
  unsigned copy = (blockIdx.x + thread / 32) % job.num_src;
#pragma unroll 1
  for (int k = 0; k < job.num_src; ++k) {
    const std::uint32_t bytes = job.copy_elems[copy] * element;
    const char* from = static_cast<const char*>(job.src[copy]);
    char* const to_slot = static_cast<char*>(job.dst_slot[copy]);
    char* const to_user = static_cast<char*>(job.dst_copy[copy]);
    char* const to = to_slot != nullptr ? to_slot : to_user;
    const bool both = to_slot != nullptr && to_user != nullptr;
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
  if (whole_copies(job)) return straight_copies(job, thread, threads);
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

__device__ __forceinline__ Raw<2> load_unit(const char* from, unsigned bytes) {
  return all_words(from, bytes) ? load_linear<2, 4>(from, bytes) : load_linear<2, 1>(from, bytes);
}
__device__ __forceinline__ void store_unit(char* to, const Raw<2>& raw, unsigned bytes) {
  all_words(to, bytes) ? store_linear<2, 4>(to, raw, bytes) : store_linear<2, 1>(to, raw, bytes);
}

__device__ __forceinline__ void copies_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads, Held& held) {
  const std::uint32_t flag = job.flag, sent_flag = job.sent_flag;
  PacketWalk walk(job, thread, threads);
#pragma unroll 1
  while (!walk.done()) {
    CopyPiece piece[kCopyPieces];
    Raw<2> raw[kCopyPieces];
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) piece[p] = walk.next();
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0) continue;
      if (piece[p].to_slot) {
        raw[p] = load_unit(piece[p].from, piece[p].bytes);
      } else if (held.valid) {
        raw[p] = held.raw[p];
      } else {
        const PacketUnit unit = load_packet_unit(piece[p].from, piece[p].bytes, flag);
        raw[p] = {{unit.word[0].data, unit.word[1].data}};
      }
    }
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0) continue;
      if (piece[p].to_slot) {
        store_packet_unit(piece[p].to, raw[p], piece[p].bytes, sent_flag);
      } else {
        store_unit(piece[p].to, raw[p], piece[p].bytes);
      }
    }
    held.valid = false;  // only the first pieces were held
  }
}

// As combine_ready. kHold keeps the thread's first pieces.
template <bool kHold>
__device__ __forceinline__ bool copies_ready(const SliceJob& job, unsigned thread, unsigned threads,
                                             Held* held) {
  const std::uint32_t flag = job.flag;
  bool ready = true;
  PacketWalk walk(job, thread, threads);
#pragma unroll 1
  for (bool first = true; ready && !walk.done(); first = false) {
    CopyPiece piece[kCopyPieces];
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) piece[p] = walk.next();
#pragma unroll
    for (int p = 0; p < kCopyPieces; ++p) {
      if (piece[p].bytes == 0 || piece[p].to_slot) continue;
      const PacketUnit unit = load_packet_unit(piece[p].from, piece[p].bytes, flag);
      ready &= unit.word[0].flag == flag;
      ready &= unit.word[1].flag == flag;
      if constexpr (kHold) {
        if (first) held->raw[p] = {{unit.word[0].data, unit.word[1].data}};
      }
    }
  }
  return ready;
}

// ---- Dispatch. ----------------------------------------------------------------------------------

// One source that nothing is done to: any dtype, any bits.
__device__ __forceinline__ bool is_copy(const SliceJob& job) {
  if (job.num_src != 1) return false;
  if (job.op != Op::kAvg) return true;
  if (is_integer(job.dtype)) return job.divisor <= 1;
  return job.scale_sources == ScaleSources::kNone ||
         (job.scale_sources == ScaleSources::kLocal && job.local_src != 0);
}

template <Protocol protocol, DType dtype>
__device__ __forceinline__ void reduce(const SliceJob& job, unsigned thread, unsigned threads,
                                       Held& held) {
  if constexpr (protocol == Protocol::kSlot) {
    reduce_slot<dtype>(job, thread, threads);
  } else {
    reduce_packet<dtype>(job, thread, threads, held);
  }
}

template <Protocol protocol, int kElement>
__device__ __forceinline__ void copy(const SliceJob& job, unsigned thread, unsigned threads,
                                     Held& held) {
  if constexpr (protocol == Protocol::kSlot) {
    spread_slot<kElement>(job, thread, threads);
  } else {
    spread_packet<kElement>(job, thread, threads, held);
  }
}

template <Protocol protocol>
__device__ __forceinline__ void dispatch(const SliceJob& job, unsigned thread, unsigned threads,
                                         Held& held) {
  if (job.copies) {
    if constexpr (protocol == Protocol::kSlot) {
      return copies_slot(job, thread, threads);
    } else {
      return copies_packet(job, thread, threads, held);
    }
  }
  if (is_copy(job)) {
    switch (dtype_bytes(job.dtype)) {
      case 1:
        return copy<protocol, 1>(job, thread, threads, held);
      case 2:
        return copy<protocol, 2>(job, thread, threads, held);
      case 4:
        return copy<protocol, 4>(job, thread, threads, held);
      default:
        return copy<protocol, 8>(job, thread, threads, held);
    }
  }
  switch (job.dtype) {
    case DType::kInt8:
      return reduce<protocol, DType::kInt8>(job, thread, threads, held);
    case DType::kUint8:
      return reduce<protocol, DType::kUint8>(job, thread, threads, held);
    case DType::kInt32:
      return reduce<protocol, DType::kInt32>(job, thread, threads, held);
    case DType::kUint32:
      return reduce<protocol, DType::kUint32>(job, thread, threads, held);
    case DType::kInt64:
      return reduce<protocol, DType::kInt64>(job, thread, threads, held);
    case DType::kUint64:
      return reduce<protocol, DType::kUint64>(job, thread, threads, held);
    case DType::kFloat16:
      return reduce<protocol, DType::kFloat16>(job, thread, threads, held);
    case DType::kBfloat16:
      return reduce<protocol, DType::kBfloat16>(job, thread, threads, held);
    case DType::kFloat32:
      return reduce<protocol, DType::kFloat32>(job, thread, threads, held);
    case DType::kFloat64:
      return reduce<protocol, DType::kFloat64>(job, thread, threads, held);
    case DType::kFloat8E4M3:
      return reduce<protocol, DType::kFloat8E4M3>(job, thread, threads, held);
    case DType::kFloat8E5M2:
      return reduce<protocol, DType::kFloat8E5M2>(job, thread, threads, held);
  }
}

// The engine runs leaves in a loop in which these never change: what follows from them must not be
// computed ahead of the loop, for every leaf there is, and kept in memory.
__device__ __forceinline__ const SliceJob& forget(const SliceJob& job, unsigned& thread,
                                                  unsigned& threads) {
  const SliceJob* same = &job;
  asm volatile("" : "+l"(same), "+r"(thread), "+r"(threads));
  return *same;
}
// The same of a job in shared memory, of which the compiler then knows that.
__device__ __forceinline__ const SliceJob& forget_shared(const SliceJob& job, unsigned& thread,
                                                         unsigned& threads) {
  const SliceJob& same = forget(job, thread, threads);
  return *static_cast<const SliceJob*>(shared_pointer(&same));
}

// Whether a thread's share is so small that its packets are kept when they are polled for. (Copies
// with more pieces are polled for and read again from the first on.)
__device__ __forceinline__ bool holds_packets(const SliceJob& job, unsigned threads) {
  if (job.copies) return true;
  return job.num_src <= kHeldUnits &&
         job.elems * dtype_bytes(job.dtype) <= std::uint64_t{threads} * kUnitBytes;
}

}  // namespace cuda_leaves

// Executes this thread's part of a slice of the slot protocol whose sources are there: the caller
// has acquired their flags at system scope, and has synchronised with this thread since.
__device__ __noinline__ void run_slot_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                                unsigned threads) {
  const SliceJob& job = cuda_leaves::forget_shared(the_job, thread, threads);
  if (job.num_src == 0) return;
  cuda_leaves::Held nothing;
  cuda_leaves::dispatch<Protocol::kSlot>(job, thread, threads, nothing);
}

// The same of either protocol. Packets: packets_ready_cuda() was true in every thread.
__device__ __forceinline__ void run_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                              unsigned threads) {
  const SliceJob& job = cuda_leaves::forget(the_job, thread, threads);
  if (job.num_src == 0) return;
  cuda_leaves::Held nothing;
  if (job.protocol == Protocol::kSlot) {
    cuda_leaves::dispatch<Protocol::kSlot>(job, thread, threads, nothing);
  } else {
    cuda_leaves::dispatch<Protocol::kPacket>(job, thread, threads, nothing);
  }
}

// Whether the words that run_leaf_cuda() will read in this thread from packet connectors all have
// the flag. Reads once, from all sources together; the caller polls.
__device__ __forceinline__ bool packets_ready_cuda(const SliceJob& the_job, unsigned thread,
                                                   unsigned threads) {
  const SliceJob& job = cuda_leaves::forget(the_job, thread, threads);
  if (job.num_src == 0) return true;
  if (job.copies) return cuda_leaves::copies_ready<false>(job, thread, threads, nullptr);
  return cuda_leaves::combine_ready<false>(job, thread, threads, nullptr);
}

// Both in one, for the packet protocol: polls up to `polls` times, then executes the slice; little
// data is not read again. False: some packet is missing, and nothing has been stored. vote(ready)
// is a barrier of the block that tells whether all threads are ready; after it says no for the last
// time, nobody reads the job any more.
template <class Vote>
__device__ __noinline__ bool run_packet_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                                  unsigned threads, std::uint32_t polls,
                                                  Vote vote) {
  const SliceJob& job = cuda_leaves::forget_shared(the_job, thread, threads);
  if (job.num_src == 0) return true;
  cuda_leaves::Held held;
  const bool holds = cuda_leaves::holds_packets(job, threads);
  for (std::uint32_t k = 0; k < polls; ++k) {
    bool ready;
    if (job.copies) {
      ready = cuda_leaves::copies_ready<true>(job, thread, threads, &held);
    } else if (holds) {
      ready = cuda_leaves::combine_ready<true>(job, thread, threads, &held);
    } else {
      ready = cuda_leaves::combine_ready<false>(job, thread, threads, nullptr);
    }
    if (!vote(ready)) continue;
    held.valid = holds;
    cuda_leaves::dispatch<Protocol::kPacket>(job, thread, threads, held);
    return true;
  }
  return false;
}

}  // namespace unjam
