// What a kernel asks of the hardware, of its block and of its stream, beside memory (atomics.cuh).
// tests/simt has the same for CPUs.
#pragma once

#include <cstdint>

// A block's memory, of which the launch says how much there is.
#define UNJAM_DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

namespace unjam {

// So many rounds of looking at peers are between those in which a warp looks at anything else, such
// as whether it is to stop.
inline constexpr std::uint32_t kRoundsApart = 16;

// Calls without the engine are launched so that the next one's blocks may already be there before
// the kernel in front of them has ended ("programmatic dependent launch"). wait_for_stream(): until
// all in front has ended, and is visible; at once where nothing is under way. Each kernel that may
// be launched so calls it, every thread, before it touches memory that kernels in front may still
// use: anything but unjam's own words (look_in_time()). let_next_begin(): as far as this
// block is concerned (as its end would say) the next one's may come. They hold SMs then, and wait
// for our end, so nothing that follows may wait for a peer.
__device__ __forceinline__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ std::uint64_t global_ns() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
__device__ __forceinline__ std::uint32_t sm_of_block() {
  std::uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}
// Of the context's launches, the kernel's. CUDA counts them, and %gridid is that number (PTX:
// "temporal grid launch number").
__device__ __forceinline__ std::uint64_t launch_number() {
  std::uint64_t x;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(x));
  return x;
}
__device__ __forceinline__ std::uint32_t blocks_in_cluster() {
#if __CUDA_ARCH__ >= 900
  std::uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}

// The barrier of the block wants whole warps, and where one thread decides the compiler does not
// always bring its warp together again.
__device__ __forceinline__ void sync_block() {
  __syncwarp();
  __syncthreads();
}
// The same where warps come to it at different places of the code, which neither __syncthreads()
// nor an aligned barrier allows (synccheck of compute-sanitizer tells both). arrive_apart(): to be
// counted there, by a warp that does not wait for the others.
inline constexpr unsigned kApartBarrier = 15;  // exec/slots/move.cuh has the first ones
__device__ __forceinline__ void sync_block_apart() {
  __syncwarp();
  asm volatile("barrier.sync %0, %1;" ::"n"(kApartBarrier), "r"(blockDim.x) : "memory");
}
__device__ __forceinline__ void arrive_apart() {
  __syncwarp();
  asm volatile("barrier.arrive %0, %1;" ::"n"(kApartBarrier), "r"(blockDim.x) : "memory");
}
// Of a block's groups of threads, each with a barrier of its own.
__device__ __forceinline__ void sync_group(std::uint32_t barrier, std::uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// The same, on whether all of them say so.
template <unsigned kBarrier>
__device__ __forceinline__ bool all_of_group(bool x, std::uint32_t threads) {
  std::uint32_t all;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.u32 p, %1, 0; barrier.red.and.pred q, %2, %3, p;"
      " selp.u32 %0, 1, 0, q; }"
      : "=r"(all)
      : "r"(x ? 1u : 0u), "n"(kBarrier), "r"(threads)
      : "memory");
  return all != 0;
}

// A function whose caller is not to know which one it calls. Where it knows, ptxas deals the
// registers of a kernel out along its calls, and leaves got 70 of 128, with kilobytes of spills; so
// they have all, and save what their caller needs: 200 bytes a call, little beside a slice.
template <class F>
__device__ __forceinline__ F* with_all_registers(F* function) {
  asm volatile("" : "+l"(function));
  return function;
}

// What follows from these is not computed ahead of where this stands.
template <class T>
__device__ __forceinline__ void forget(T*& pointer, unsigned& first, unsigned& second) {
  asm volatile("" : "+l"(pointer), "+r"(first), "+r"(second));
}

// The same pointer, of which the compiler knows that it points to shared memory, and goes on
// knowing (an assumption is lost where addresses are merged; and a cast there and back is no cast
// to it).
__device__ __forceinline__ void* shared_pointer(const void* p) {
  std::uint32_t address;
  asm("{ .reg .u64 s; cvta.to.shared.u64 s, %1; cvt.u32.u64 %0, s; }" : "=r"(address) : "l"(p));
  return __cvta_shared_to_generic(address);
}
// All memory but that is global (peers' memory and mapped host memory too); knowing that spares the
// generic instructions.
__device__ __forceinline__ void assume_global(const void* p) { __builtin_assume(__isGlobal(p)); }

}  // namespace unjam
