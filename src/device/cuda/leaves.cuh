// The CUDA leaves: the inner loops that move and reduce one slice, one per (protocol, dtype, op),
// executed by all threads of a block. They synchronise nothing: the caller puts barriers around.
//
// A leaf is a function of its own, never inlined, so that the engine around it keeps its registers
// low. The loop over the sources is not unrolled; a few sources are loaded together, so that a
// thread has several loads under way before it needs the first.
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
          job.scale};
}

// kPieces pieces of kWords words each. access.load(source, its pointer, piece) and
// access.store(raw, piece). Everything is read before anything is written: a destination may be a
// source.
template <DType dtype, Op op, int kWords, int kPieces, int kBatch, class Access>
__device__ __forceinline__ void reduce_pieces(const Slice& slice, const Access& access) {
  using F = Format<dtype>;
  using Acc = typename F::Acc;
  constexpr int kCount = F::template kCount<kWords>;
  Acc acc[kPieces][kCount];
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) acc[p][i] = F::template identity<op>();
  }
  [[maybe_unused]] const Acc scale = static_cast<Acc>(slice.scale);
#pragma unroll 1
  for (int s = 0; s < slice.num_src; s += kBatch) {
    const char* from[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      // Past the end: some pointer, not followed.
      from[b] = static_cast<const char*>(slice.src[s + b < slice.num_src ? s + b : s]);
    }
    Raw<kWords> raw[kBatch][kPieces];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b == 0 || s + b < slice.num_src) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) raw[b][p] = access.load(s + b, from[b], p);
      }
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (b == 0 || s + b < slice.num_src) {
#pragma unroll
        for (int p = 0; p < kPieces; ++p) {
          Acc x[kCount];
          F::template decode<kWords>(raw[b][p], x);
          if constexpr (op == Op::kAvg && F::kIsFloat) {
            // Multiplying by one changes nothing.
            const Acc factor = slice.scale_all || s + b == slice.scaled_src ? scale : Acc{1};
#pragma unroll
            for (int i = 0; i < kCount; ++i) x[i] = multiply(x[i], factor);
          }
#pragma unroll
          for (int i = 0; i < kCount; ++i) {
            acc[p][i] = F::template combine<op>(acc[p][i], x[i]);
          }
        }
      }
    }
  }
#pragma unroll
  for (int p = 0; p < kPieces; ++p) {
    if constexpr (op == Op::kAvg && !F::kIsFloat) {
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
    for (char* dst : {slice.dst_user, slice.dst_slot}) {
      if (dst != nullptr) store_aligned(dst + at + piece * stride, raw);
    }
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
    for (char* dst : {slice.dst_user, slice.dst_slot}) {
      if (dst != nullptr) store_linear<4, kElement>(dst + at, raw, bytes);
    }
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

// Pieces that a thread has under way at once, of so many sources each. The leaves must fit 64
// registers without spilling, so that a daemon of 512 threads leaves half of its SM's registers to
// others: narrow floats need an accumulator each, averages hold more in hand, and the products of
// bytes need many temporaries.
UNJAM_HD constexpr int pieces_per_thread(DType dtype, Op op) {
  const bool byte = dtype_bytes(dtype) == 1;
  return op == Op::kAvg || (byte && (op == Op::kProd || !is_integer(dtype))) ? 1 : 2;
}
UNJAM_HD constexpr int sources_per_batch(DType dtype, Op op) {
  return op == Op::kAvg && dtype_bytes(dtype) == 1 && !is_integer(dtype) ? 1 : 2;
}

template <DType dtype, Op op>
__device__ __noinline__ void reduce_slot(const SliceJob& job, unsigned thread, unsigned threads) {
  constexpr int kPieces = pieces_per_thread(dtype, op);
  constexpr int kBatch = sources_per_batch(dtype, op);
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  for_pieces<kPieces>(
      slice, thread, threads,
      [&](std::uint64_t at, std::uint64_t stride) {
        reduce_pieces<dtype, op, 4, kPieces, kBatch>(slice, AlignedAccess{slice, at, stride});
      },
      [&](std::uint64_t at, unsigned bytes) {
        reduce_pieces<dtype, op, 4, 1, kBatch>(slice, LinearAccess<kElement>{slice, at, bytes});
      });
}

template <int kElement>
__device__ __noinline__ void copy_slot(const SliceJob& job, unsigned thread, unsigned threads) {
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

template <DType dtype, Op op>
__device__ __noinline__ void reduce_packet(const SliceJob& job, unsigned thread, unsigned threads) {
  constexpr int kElement = dtype_bytes(dtype);
  const Slice slice = make_slice(job);
  // Latency is what packets are for: the loads of four sources are under way at once.
  for_units(slice.bytes, thread, threads, [&](std::uint64_t at, std::uint64_t left) {
    reduce_pieces<dtype, op, 2, 1, 4>(slice, PacketAccess<kElement>{slice, at, left});
    return true;
  });
}

template <int kElement>
__device__ __noinline__ void copy_packet(const SliceJob& job, unsigned thread, unsigned threads) {
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

template <Protocol protocol, DType dtype, Op op>
__device__ __forceinline__ void reduce(const SliceJob& job, unsigned thread, unsigned threads) {
  if constexpr (protocol == Protocol::kSlot) {
    reduce_slot<dtype, op>(job, thread, threads);
  } else {
    reduce_packet<dtype, op>(job, thread, threads);
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

template <Protocol protocol, DType dtype>
__device__ __forceinline__ void dispatch_op(const SliceJob& job, unsigned thread,
                                            unsigned threads) {
  switch (job.op) {
    case Op::kSum:
      return reduce<protocol, dtype, Op::kSum>(job, thread, threads);
    case Op::kProd:
      return reduce<protocol, dtype, Op::kProd>(job, thread, threads);
    case Op::kMin:
      return reduce<protocol, dtype, Op::kMin>(job, thread, threads);
    case Op::kMax:
      return reduce<protocol, dtype, Op::kMax>(job, thread, threads);
    case Op::kAvg:
      return reduce<protocol, dtype, Op::kAvg>(job, thread, threads);
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
      return dispatch_op<protocol, DType::kInt8>(job, thread, threads);
    case DType::kUint8:
      return dispatch_op<protocol, DType::kUint8>(job, thread, threads);
    case DType::kInt32:
      return dispatch_op<protocol, DType::kInt32>(job, thread, threads);
    case DType::kUint32:
      return dispatch_op<protocol, DType::kUint32>(job, thread, threads);
    case DType::kInt64:
      return dispatch_op<protocol, DType::kInt64>(job, thread, threads);
    case DType::kUint64:
      return dispatch_op<protocol, DType::kUint64>(job, thread, threads);
    case DType::kFloat16:
      return dispatch_op<protocol, DType::kFloat16>(job, thread, threads);
    case DType::kBfloat16:
      return dispatch_op<protocol, DType::kBfloat16>(job, thread, threads);
    case DType::kFloat32:
      return dispatch_op<protocol, DType::kFloat32>(job, thread, threads);
    case DType::kFloat64:
      return dispatch_op<protocol, DType::kFloat64>(job, thread, threads);
    case DType::kFloat8E4M3:
      return dispatch_op<protocol, DType::kFloat8E4M3>(job, thread, threads);
    case DType::kFloat8E5M2:
      return dispatch_op<protocol, DType::kFloat8E5M2>(job, thread, threads);
  }
}

}  // namespace cuda_leaves

// Executes this thread's part of the slice. Slots: the caller has acquired the sources' flags at
// system scope, and a block barrier followed. Packets: packet_ready_cuda() was true in every thread
// for every source but the local one.
__device__ __noinline__ inline void run_leaf_cuda(const SliceJob& job, unsigned thread,
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
