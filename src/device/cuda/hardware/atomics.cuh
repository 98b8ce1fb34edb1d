// The atomic operations and fences that device code has beside base/atomics.h, whose operations
// hosts and devices share.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace unjam {

// ---- memory that may be anywhere ----

// Relaxed accesses at system scope, and the fence that orders them.
template <class T>
__device__ __forceinline__ void store_system(T& x, T v) {
  cuda::atomic_ref<T, cuda::thread_scope_system>(x).store(v, cuda::memory_order_relaxed);
}
__device__ __forceinline__ void fence_system() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_system);
}
// Of this device.
__device__ __forceinline__ void fence_local() {
  cuda::atomic_thread_fence(cuda::memory_order_acq_rel, cuda::thread_scope_device);
}
__device__ __forceinline__ void fence_total_local() {
  cuda::atomic_thread_fence(cuda::memory_order_seq_cst, cuda::thread_scope_device);
}
__device__ __forceinline__ void clear_local(std::uint32_t& word, std::uint32_t bits) {
  cuda::atomic_ref<std::uint32_t, cuda::thread_scope_device>(word).fetch_and(
      ~bits, cuda::memory_order_release);
}

// ---- words that are known to be in global memory, at the device's scope ----

// Of an address that could be anything the instruction says first whether it was shared memory, and
// the thread waits for that, a microsecond, also where nobody wants the result.

template <class T>
__device__ __forceinline__ std::uint64_t global_address(T& x) {
  return static_cast<std::uint64_t>(__cvta_generic_to_global(&x));
}
__device__ __forceinline__ void add_relaxed(std::uint64_t& x, std::uint64_t by) {
  asm volatile("red.relaxed.gpu.global.add.u64 [%0], %1;" ::"l"(global_address(x)), "l"(by)
               : "memory");
}
__device__ __forceinline__ void add_relaxed(std::uint32_t& x, std::uint32_t by) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(global_address(x)), "r"(by)
               : "memory");
}
__device__ __forceinline__ void max_relaxed(std::uint64_t& x, std::uint64_t with) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(global_address(x)), "l"(with)
               : "memory");
}
__device__ __forceinline__ std::uint64_t fetch_add_relaxed(std::uint64_t& x, std::uint64_t by) {
  std::uint64_t before;
  asm volatile("atom.relaxed.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global_address(x)), "l"(by)
               : "memory");
  return before;
}
__device__ __forceinline__ std::uint64_t fetch_and_acquire(std::uint64_t& x, std::uint64_t with) {
  std::uint64_t before;
  asm volatile("atom.acquire.gpu.global.and.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global_address(x)), "l"(with)
               : "memory");
  return before;
}
__device__ __forceinline__ std::uint64_t fetch_or_acquire(std::uint64_t& x, std::uint64_t with) {
  std::uint64_t before;
  asm volatile("atom.acquire.gpu.global.or.b64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global_address(x)), "l"(with)
               : "memory");
  return before;
}
__device__ __forceinline__ std::uint64_t fetch_add_acq_rel(std::uint64_t& x, std::uint64_t by) {
  std::uint64_t before;
  asm volatile("atom.acq_rel.gpu.global.add.u64 %0, [%1], %2;"
               : "=l"(before)
               : "l"(global_address(x)), "l"(by)
               : "memory");
  return before;
}
__device__ __forceinline__ void max_release(std::uint64_t& x, std::uint64_t with) {
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>(x).fetch_max(
      with, cuda::memory_order_release);
}

// Words of packets, at system scope: relaxed. Two at once are two such accesses to the memory
// model.
__device__ __forceinline__ std::uint64_t load_word_system(const void* p) {
  std::uint64_t word;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];"
               : "=l"(word)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
  return word;
}
__device__ __forceinline__ void store_word_system(void* p, std::uint64_t word) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(p)), "l"(word)
               : "memory");
}
__device__ __forceinline__ void load_words_system(const void* p, std::uint64_t& first,
                                                  std::uint64_t& second) {
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];"
               : "=l"(first), "=l"(second)
               : "l"(__cvta_generic_to_global(p))
               : "memory");
}
__device__ __forceinline__ void store_words_system(void* p, std::uint64_t first,
                                                   std::uint64_t second) {
  asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)),
               "l"(first), "l"(second)
               : "memory");
}
// A hint: changes nothing, reads nothing, but finds the way there.
__device__ __forceinline__ void find_way(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(p)));
}

// ---- words that are known to be in shared memory, at the block's scope ----

template <class T>
__device__ __forceinline__ std::uint32_t shared_address(T& x) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(&x));
}

__device__ __forceinline__ void add_relaxed_shared(std::uint32_t& x, std::uint32_t by) {
  asm volatile("red.relaxed.cta.shared.add.u32 [%0], %1;" ::"r"(shared_address(x)), "r"(by)
               : "memory");
}
__device__ __forceinline__ void increment_release_shared(std::uint32_t& x) {
  asm volatile("red.release.cta.shared.add.u32 [%0], 1;" ::"r"(shared_address(x)) : "memory");
}
__device__ __forceinline__ std::uint32_t load_acquire_shared(const std::uint32_t& x) {
  std::uint32_t v;
  asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared_address(x)) : "memory");
  return v;
}
__device__ __forceinline__ void store_release_shared(std::uint32_t& x, std::uint32_t v) {
  asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(x)), "r"(v) : "memory");
}

}  // namespace unjam
