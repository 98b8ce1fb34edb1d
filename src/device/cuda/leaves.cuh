// The CUDA leaves: the inner loops that move and reduce one slice, one per (protocol, dtype),
// executed by all threads of a block. They synchronise nothing: the caller puts barriers around.
//
// The operator is a uniform branch inside, and everything is inlined into one function: leaves of
// their own, one per operator too, cost an ABI frame of 20-odd saved registers a call and made
// ptxas take 90 s instead of 4 s, with spills. The loop over the sources is not unrolled.
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
  char* dst_user;
  char* dst_slot;
  std::uint64_t bytes;
  int num_src;
  int local_src;
  std::uint32_t flag;
  std::uint32_t divisor;
  bool scale_all;
  int scaled_src;
  Op op;
  double scale;
};

__device__ __forceinline__ Slice make_slice(const SliceJob& job) {
  return {job.src,
          static_cast<char*>(job.dst_user),
          static_cast<char*>(job.dst_slot),
          job.elems * dtype_bytes(job.dtype),
          job.num_src,
          job.local_src,
          job.flag,
          job.divisor,
          job.scale_sources == ScaleSources::kAll,
          job.scale_sources == ScaleSources::kLocal ? job.local_src : -1,
          job.op,
          job.scale};
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

// kPieces pieces of kWords words each. access.load(source, its pointer, piece) and
// access.store(raw, piece). Everything is read before anything is written: a destination may be a
// source.
template <DType dtype, int kWords, int kPieces, class Access>
__device__ __forceinline__ void reduce_pieces(const Slice& slice, const Access& access) {
  using F = Format<dtype>;
  using Acc = typename F::Acc;
  constexpr int kCount = F::template kCount<kWords>;
  Acc acc[kPieces][kCount];
  Raw<kWords> raw[kPieces];
  const char* from = static_cast<const char*>(slice.src[0]);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) raw[p] = access.load(0, from, p);
#pragma unroll
  for (int p = 0; p < kPieces; ++p) decode_piece<F, kWords>(slice, 0, raw[p], acc[p]);
#pragma unroll 1
  for (int s = 1; s < slice.num_src; ++s) {
    from = static_cast<const char*>(slice.src[s]);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) raw[p] = access.load(s, from, p);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      Acc x[kCount];
      decode_piece<F, kWords>(slice, s, raw[p], x);
      combine_piece<F, kCount>(slice.op, acc[p], x);
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if constexpr (!F::kIsFloat) {
      if (slice.divisor > 1) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) acc[p][i] = F::divide(acc[p][i], slice.divisor);
      }
    }
    Raw<kWords> result;
    F::template encode<kWords>(acc[p], result);
    access.store(result, p);
  }
}

// ---- Slots: everything is linear, in pieces of 16 bytes. ----------------------------------------

inline constexpr unsigned kPieceBytes = 16;

// Whole pieces, all pointers aligned; pieces of one thread lie `stride` bytes apart.
struct AlignedAccess {
  const Slice& slice;
  std::uint64_t at;
  std::uint64_t stride;
  __device__ __forceinline__ Raw<4> load(int, const char* src, int piece) const {
    return load_aligned<4>(src + at + piece * stride);
  }
  __device__ __forceinline__ void store(const Raw<4>& raw, int piece) const {
    if (slice.dst_user != nullptr) store_aligned(slice.dst_user + at + piece * stride, raw);
    if (slice.dst_slot != nullptr) store_aligned(slice.dst_slot + at + piece * stride, raw);
  }
};

// One piece, perhaps the last, at any alignment.
template <int kElement>
struct LinearAccess {
  const Slice& slice;
  std::uint64_t at;
  unsigned bytes;
  __device__ __forceinline__ Raw<4> load(int, const char* src, int) const {
    return load_linear<4, kElement>(src + at, bytes);
  }
  __device__ __forceinline__ void store(const Raw<4>& raw, int) const {
    if (slice.dst_user != nullptr) store_linear<4, kElement>(slice.dst_user + at, raw, bytes);
    if (slice.dst_slot != nullptr) store_linear<4, kElement>(slice.dst_slot + at, raw, bytes);
  }
};

__device__ __forceinline__ bool all_aligned(const Slice& slice) {
  std::uintptr_t bits = reinterpret_cast<std::uintptr_t>(slice.dst_user) |
                        reinterpret_cast<std::uintptr_t>(slice.dst_slot);
#pragma unroll 1
  for (int s = 0; s < slice.num_src; ++s) bits |= reinterpret_cast<std::uintptr_t>(slice.src[s]);
  return (bits & (kPieceBytes - 1)) == 0;
}

// Runs many(at, stride) for kPieces whole pieces of this thread at a time while all pointers are
// aligned, and one(at, bytes) for each piece of what is left.
template <int kPieces, class Many, class One>
__device__ __forceinline__ void for_pieces(const Slice& slice, unsigned thread, unsigned threads,
                                           Many many, One one) {
  const std::uint64_t stride = std::uint64_t{threads} * kPieceBytes;
  std::uint64_t at = std::uint64_t{thread} * kPieceBytes;
  if (all_aligned(slice)) {
#pragma unroll 1
    for (; at + (kPieces - 1) * stride + kPieceBytes <= slice.bytes; at += kPieces * stride) {
      many(at, stride);
    }
  }
#pragma unroll 1
  for (; at < slice.bytes; at += stride) {
    const std::uint64_t left = slice.bytes - at;
    one(at, left < kPieceBytes ? static_cast<unsigned>(left) : kPieceBytes);
  }
}

// Pieces that a thread has under way at once, from each source. Narrow types need many accumulators
// a piece.
UNJAM_HD constexpr int pieces_per_thread(DType dtype) { return dtype_bytes(dtype) == 1 ? 1 : 2; }

template <DType dtype>
__device__ __forceinline__ void reduce_slot(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  constexpr int kPieces = pieces_per_thread(dtype);
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  for_pieces<kPieces>(
      slice, thread, threads,
      [&](std::uint64_t at, std::uint64_t stride) {
        reduce_pieces<dtype, 4, kPieces>(slice, AlignedAccess{slice, at, stride});
      },
      [&](std::uint64_t at, unsigned bytes) {
        reduce_pieces<dtype, 4, 1>(slice, LinearAccess<kElement>{slice, at, bytes});
      });
}

template <int kElement>
__device__ __forceinline__ void copy_slot(const SliceJob& job, unsigned thread, unsigned threads) {
  constexpr int kPieces = 4;
  const Slice slice = make_slice(job);
  const char* src = static_cast<const char*>(slice.src[0]);
  for_pieces<kPieces>(
      slice, thread, threads,
      [&](std::uint64_t at, std::uint64_t stride) {
        const AlignedAccess access{slice, at, stride};
        Raw<4> raw[kPieces];
#pragma unroll
        for (int p = 0; p < kPieces; ++p) raw[p] = access.load(0, src, p);
#pragma unroll
        for (int p = 0; p < kPieces; ++p) access.store(raw[p], p);
      },
      [&](std::uint64_t at, unsigned bytes) {
        const LinearAccess<kElement> access{slice, at, bytes};
        access.store(access.load(0, src, 0), 0);
      });
}

// ---- Packets: units of 8 data bytes; user memory is linear, connector memory is packets. --------

template <int kElement>
struct PacketAccess {
  const Slice& slice;
  std::uint64_t at;    // data bytes
  std::uint64_t left;  // data bytes, from `at`
  __device__ __forceinline__ unsigned bytes() const {
    return left < kUnitBytes ? static_cast<unsigned>(left) : kUnitBytes;
  }
  __device__ __forceinline__ Raw<2> load(int source, const char* src, int) const {
    if (source == slice.local_src) return load_linear<2, kElement>(src + at, bytes());
    const PacketUnit unit = load_packet_unit(src + 2 * at, left, 0);
    return {{unit.word[0].data, unit.word[1].data}};
  }
  __device__ __forceinline__ void store(const Raw<2>& raw, int) const {
    if (slice.dst_user != nullptr) {
      store_linear<2, kElement>(slice.dst_user + at, raw, bytes());
    }
    if (slice.dst_slot != nullptr) {
      store_packet_unit(slice.dst_slot + 2 * at, raw, left, slice.flag);
    }
  }
};

// Which units a thread has must be the same here and in packet_ready_cuda().
template <class Body>
__device__ __forceinline__ void for_units(std::uint64_t bytes, unsigned thread, unsigned threads,
                                          Body body) {
#pragma unroll 1
  for (std::uint64_t at = std::uint64_t{thread} * kUnitBytes; at < bytes;
       at += std::uint64_t{threads} * kUnitBytes) {
    if (!body(at, bytes - at)) return;
  }
}

template <DType dtype>
__device__ __forceinline__ void reduce_packet(const SliceJob& job, unsigned thread,
                                              unsigned threads) {
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  for_units(slice.bytes, thread, threads, [&](std::uint64_t at, std::uint64_t left) {
    reduce_pieces<dtype, 2, 1>(slice, PacketAccess<kElement>{slice, at, left});
    return true;
  });
}

template <int kElement>
__device__ __forceinline__ void copy_packet(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  const Slice slice = make_slice(job);
  const char* src = static_cast<const char*>(slice.src[0]);
  for_units(slice.bytes, thread, threads, [&](std::uint64_t at, std::uint64_t left) {
    const PacketAccess<kElement> access{slice, at, left};
    access.store(access.load(0, src, 0), 0);
    return true;
  });
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
__device__ __forceinline__ void reduce(const SliceJob& job, unsigned thread, unsigned threads) {
  if constexpr (protocol == Protocol::kSlot) {
    reduce_slot<dtype>(job, thread, threads);
  } else {
    reduce_packet<dtype>(job, thread, threads);
  }
}

template <Protocol protocol, int kElement>
__device__ __forceinline__ void copy(const SliceJob& job, unsigned thread, unsigned threads) {
  if constexpr (protocol == Protocol::kSlot) {
    copy_slot<kElement>(job, thread, threads);
  } else {
    copy_packet<kElement>(job, thread, threads);
  }
}

template <Protocol protocol>
__device__ __forceinline__ void dispatch(const SliceJob& job, unsigned thread, unsigned threads) {
  if (is_copy(job)) {
    switch (dtype_bytes(job.dtype)) {
      case 1:
        return copy<protocol, 1>(job, thread, threads);
      case 2:
        return copy<protocol, 2>(job, thread, threads);
      case 4:
        return copy<protocol, 4>(job, thread, threads);
      default:
        return copy<protocol, 8>(job, thread, threads);
    }
  }
  switch (job.dtype) {
    case DType::kInt8:
      return reduce<protocol, DType::kInt8>(job, thread, threads);
    case DType::kUint8:
      return reduce<protocol, DType::kUint8>(job, thread, threads);
    case DType::kInt32:
      return reduce<protocol, DType::kInt32>(job, thread, threads);
    case DType::kUint32:
      return reduce<protocol, DType::kUint32>(job, thread, threads);
    case DType::kInt64:
      return reduce<protocol, DType::kInt64>(job, thread, threads);
    case DType::kUint64:
      return reduce<protocol, DType::kUint64>(job, thread, threads);
    case DType::kFloat16:
      return reduce<protocol, DType::kFloat16>(job, thread, threads);
    case DType::kBfloat16:
      return reduce<protocol, DType::kBfloat16>(job, thread, threads);
    case DType::kFloat32:
      return reduce<protocol, DType::kFloat32>(job, thread, threads);
    case DType::kFloat64:
      return reduce<protocol, DType::kFloat64>(job, thread, threads);
    case DType::kFloat8E4M3:
      return reduce<protocol, DType::kFloat8E4M3>(job, thread, threads);
    case DType::kFloat8E5M2:
      return reduce<protocol, DType::kFloat8E5M2>(job, thread, threads);
  }
}

}  // namespace cuda_leaves

// Executes this thread's part of the slice. Slots: the caller has acquired the sources' flags at
// system scope, and a block barrier followed. Packets: packet_ready_cuda() was true in every thread
// for every source but the local one.
__device__ __forceinline__ void run_leaf_cuda(const SliceJob& job, unsigned thread,
                                              unsigned threads) {
  if (job.num_src == 0) return;
  if (job.protocol == Protocol::kSlot) {
    cuda_leaves::dispatch<Protocol::kSlot>(job, thread, threads);
  } else {
    cuda_leaves::dispatch<Protocol::kPacket>(job, thread, threads);
  }
}

// Whether the words that run_leaf_cuda() will read in this thread from a packet connector that
// carries `bytes` of data all have the flag. Reads once; the caller polls.
__device__ inline bool packet_ready_cuda(const void* slot, std::uint64_t bytes, std::uint32_t flag,
                                         unsigned thread, unsigned threads) {
  bool ready = true;
  cuda_leaves::for_units(bytes, thread, threads, [&](std::uint64_t at, std::uint64_t left) {
    const cuda_leaves::PacketUnit unit =
        cuda_leaves::load_packet_unit(static_cast<const char*>(slot) + 2 * at, left, flag);
    ready = unit.word[0].flag == flag && unit.word[1].flag == flag;
    return ready;
  });
  return ready;
}

}  // namespace unjam
