// What the CUDA leaves of all protocols reduce with: a job's words, read once, and pieces of its
// sources, combined in their order. How pieces are read and stored is the protocol's affair
// ("Access").
#pragma once

#include <cstdint>

#include "device/cuda/leaves/leaf_access.cuh"
#include "device/cuda/leaves/leaf_formats.cuh"
#include "device/leaf.h"

namespace unjam::cuda_leaves {

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
  std::uint64_t flag;
  std::uint64_t sent_flag;
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

// Sources of packets, or lines, that are under way at once.
inline constexpr int kPacketBatch = 4;

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

}  // namespace unjam::cuda_leaves
