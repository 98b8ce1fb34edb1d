// A warp's stages: shared memory through which it moves slices with the copy unit of its SM (bulk
// asynchronous copies, sm_90). One thread asks for kilobytes at a time, and what is under way needs
// no registers; above all, stores that a link is not ready for wait in the copy unit, and not in
// front of the memory accesses of the other warps.
//
// Who does what. The first thread of the warp issues all copies, so it alone waits for them. Copies
// are accesses of the async proxy, others of the generic one. Of a slice:
//   - What is read was stored by others, in whichever proxy, and acquired by this thread: begin()'s
//     proxy fence is behind that, and in front of the copies.
//   - A load is there when its mbarrier says so. Its data are then only copied on (same proxy).
//   - A result that the warp's threads have stored into a stage (generic) is copied on behind a
//     proxy fence of each of them and a barrier of the warp.
//   - A stage is used again when the copies from it have been read, see before_store(),
//   before_load.
//   - end() waits until all copies are complete, which includes that they are visible to this
//     thread: what it releases then (CudaDev::stored) releases them.
#pragma once

#include <cstdint>

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define UNJAM_BULK_COPIES 1
#include <cuda/ptx>
#else
#define UNJAM_BULK_COPIES 0
#endif

namespace unjam::cuda_leaves {

inline constexpr std::uint32_t kStages = 4;
inline constexpr std::uint32_t kStageBytes = 2048;

struct alignas(16) WarpStages {
  unsigned char data[kStages][kStageBytes];
  std::uint64_t arrived[kStages];  // mbarriers: a stage's load is there
  std::uint32_t loads;             // so far: which stage is next, and in which phase
  std::uint32_t pad[3];
};

#if UNJAM_BULK_COPIES

__device__ __forceinline__ bool leads_warp() { return threadIdx.x % 32 == 0; }

// By one thread a warp, once a kernel, in front of a barrier of the warp.
__device__ __forceinline__ void set_up(WarpStages& w) {
  for (std::uint64_t& bar : w.arrived) cuda::ptx::mbarrier_init(&bar, 1);
  w.loads = 0;
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

// ---- by the first thread of a warp ----

__device__ __forceinline__ void begin_copies() { cuda::ptx::fence_proxy_async(); }

// Load number `n` of this warp, at most kStageBytes, whole pieces of 16 bytes.
__device__ __forceinline__ void begin_load(WarpStages& w, std::uint32_t n, const void* from,
                                           std::uint32_t bytes) {
  namespace ptx = cuda::ptx;
  std::uint64_t* bar = &w.arrived[n % kStages];
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, bar, bytes);
  ptx::cp_async_bulk(ptx::space_cluster, ptx::space_global, w.data[n % kStages], from, bytes, bar);
}
__device__ __forceinline__ void wait_for_load(WarpStages& w, std::uint32_t n) {
  while (!cuda::ptx::mbarrier_try_wait_parity(&w.arrived[n % kStages], n / kStages % 2)) {
  }
}

// From a stage. A group is what was asked for up to end_group().
__device__ __forceinline__ void begin_store(void* to, const WarpStages& w, std::uint32_t stage,
                                            std::uint32_t bytes) {
  namespace ptx = cuda::ptx;
  ptx::cp_async_bulk(ptx::space_global, ptx::space_shared, to, w.data[stage], bytes);
}
__device__ __forceinline__ void end_group() { cuda::ptx::cp_async_bulk_commit_group(); }
// Of the groups so far all but the latest kLatest have been read from their stages.
template <int kLatest>
__device__ __forceinline__ void wait_until_read() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kLatest>());
}
__device__ __forceinline__ void end_copies() {
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<0>());
}

// ---- by all threads of a warp ----

// What this thread has stored into a stage is for copies that another one asks for behind a barrier
// of the warp.
__device__ __forceinline__ void hand_to_copies() {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

#endif  // UNJAM_BULK_COPIES

}  // namespace unjam::cuda_leaves
