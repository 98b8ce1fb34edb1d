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
#include "device/cuda/leaves/leaf_lines.cuh"
#include "device/cuda/leaves/leaf_packets.cuh"
#include "device/cuda/leaves/leaf_slots.cuh"
#include "device/leaf.h"

namespace unjam {
namespace cuda_leaves {

// One source that nothing is done to: any dtype, any bits.
__device__ __forceinline__ bool is_copy(const SliceJob& job) {
  if (job.num_src != 1) return false;
  if (job.op != Op::kAvg) return true;
  if (is_integer(job.dtype)) return job.divisor <= 1;
  return job.scale_sources == ScaleSources::kNone ||
         (job.scale_sources == ScaleSources::kLocal && job.local_src != 0);
}

// `how`: of packets Held&, of lines LineFlags.
template <Protocol protocol, DType dtype, class How>
__device__ __forceinline__ void reduce(const SliceJob& job, unsigned thread, unsigned threads,
                                       How& how) {
  if constexpr (protocol == Protocol::kSlot) {
    reduce_slot<dtype>(job, thread, threads);
  } else if constexpr (protocol == Protocol::kPacket) {
    reduce_packet<dtype>(job, thread, threads, how);
  } else {
    reduce_line<dtype>(job, thread, threads, how);
  }
}

template <Protocol protocol, int kElement, class How>
__device__ __forceinline__ void copy(const SliceJob& job, unsigned thread, unsigned threads,
                                     How& how) {
  if constexpr (protocol == Protocol::kSlot) {
    spread_slot<kElement>(job, thread, threads);
  } else if constexpr (protocol == Protocol::kPacket) {
    spread_packet<kElement>(job, thread, threads, how);
  } else {
    spread_line<kElement>(job, thread, threads, how);
  }
}

template <Protocol protocol, class How>
__device__ __forceinline__ void dispatch(const SliceJob& job, unsigned thread, unsigned threads,
                                         How& how) {
  if (job.copies) {
    if constexpr (protocol == Protocol::kSlot) {
      return copies_slot(job, thread, threads);
    } else if constexpr (protocol == Protocol::kPacket) {
      return copies_packet(job, thread, threads, how);
    } else {
      return copies_line(job, thread, threads, how);
    }
  }
  if (is_copy(job)) {
    switch (dtype_bytes(job.dtype)) {
      case 1:
        return copy<protocol, 1>(job, thread, threads, how);
      case 2:
        return copy<protocol, 2>(job, thread, threads, how);
      case 4:
        return copy<protocol, 4>(job, thread, threads, how);
      default:
        return copy<protocol, 8>(job, thread, threads, how);
    }
  }
  with_dtype(job.dtype, [&](auto type) __attribute__((always_inline)) {
    reduce<protocol, decltype(type)::value>(job, thread, threads, how);
  });
}

// The engine runs leaves in a loop in which these never change: what follows from them must not be
// computed ahead of the loop, for every leaf there is, and kept in memory.
__device__ __forceinline__ const SliceJob& forget(const SliceJob& job, unsigned& thread,
                                                  unsigned& threads) {
  const SliceJob* same = &job;
  unjam::forget(same, thread, threads);
  return *same;
}
// The same of a job in shared memory, of which the compiler then knows that.
__device__ __forceinline__ const SliceJob& forget_shared(const SliceJob& job, unsigned& thread,
                                                         unsigned& threads) {
  const SliceJob& same = forget(job, thread, threads);
  return *static_cast<const SliceJob*>(shared_pointer(&same));
}

}  // namespace cuda_leaves

// Executes this thread's part of a slice of the slot protocol whose sources are there: the caller
// has acquired their flags at system scope, and has synchronised with this thread since.
inline __device__ __noinline__ void run_slot_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                                       unsigned threads) {
  const SliceJob& job = cuda_leaves::forget_shared(the_job, thread, threads);
  if (job.num_src == 0) return;
  cuda_leaves::Held nothing;
  cuda_leaves::dispatch<Protocol::kSlot>(job, thread, threads, nothing);
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

// The same for lines. `flags`: how who stores lines makes sure that their flags do not come first.
template <class Vote>
__device__ __noinline__ bool run_line_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                                unsigned threads, std::uint32_t polls, Vote vote,
                                                cuda_leaves::LineFlags flags) {
  using cuda_leaves::LineFlags;
  const SliceJob& job = cuda_leaves::forget_shared(the_job, thread, threads);
  if (job.num_src == 0) return true;
  for (std::uint32_t k = 0; k < polls; ++k) {
    if (!vote(cuda_leaves::lines_ready(job, thread, threads, flags))) continue;
    cuda_leaves::dispatch<Protocol::kLine>(job, thread, threads, flags);
    // (Copies go one way, all of them.)
    const bool sent = job.copies ? cuda_leaves::goes_to_slots(job) : job.num_dst != 0;
    if (flags == LineFlags::kBehind && sent) {
      vote(true);  // all have stored
      __threadfence_system();
      cuda_leaves::store_line_flags(job, thread, threads);
    }
    return true;
  }
  return false;
}

}  // namespace unjam
