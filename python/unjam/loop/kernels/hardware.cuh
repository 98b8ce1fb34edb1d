// What the loop kernel asks of a GPU. tests/simt/loop has the same for CPUs.
//
// NVRTC compiles this without any other header.
#pragma once

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define LOOP_DEVICE __device__ __forceinline__
#define LOOP_KERNEL extern "C" __global__
#define LOOP_BOUNDS(threads) __launch_bounds__(threads, 1)
#define LOOP_PARAMETERS(p) const __grid_constant__ unjam_loop::Parameters p
#define LOOP_UNROLL _Pragma("unroll")

namespace unjam_loop {

inline constexpr u32 kWarp = 32;
inline constexpr u32 kWholeWarp = 0xffffffff;
inline constexpr u32 kRoundsApart = 64;  // of polling, between looks at the clock

LOOP_DEVICE u32 thread_here() { return threadIdx.x; }
LOOP_DEVICE u32 block_here() { return blockIdx.x; }
LOOP_DEVICE u8* block_memory() {
  extern __shared__ __align__(128) u8 memory[];
  return memory;
}

LOOP_DEVICE void sync_block() { __syncthreads(); }
LOOP_DEVICE void sync_warp() { __syncwarp(); }
// Of the first `threads` threads: those that compute.
LOOP_DEVICE void sync_first(u32 threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

LOOP_DEVICE float from_lane_xor(float x, u32 mask) { return __shfl_xor_sync(kWholeWarp, x, mask); }
LOOP_DEVICE bool all_of_warp(bool x) { return __all_sync(kWholeWarp, x) != 0; }

LOOP_DEVICE float exponential(float x) { return __expf(x); }
LOOP_DEVICE float root(float x) { return sqrtf(x); }
LOOP_DEVICE float of_bits(u32 x) { return __uint_as_float(x); }
LOOP_DEVICE u32 bits_of(float x) { return __float_as_uint(x); }

LOOP_DEVICE u64 now_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// ---- words of this GPU ----

LOOP_DEVICE u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
LOOP_DEVICE void add_release(u32* p, u32 by) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(by) : "memory");
}
LOOP_DEVICE void store_release(u32* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Whether the word was 0; it is 1 then.
LOOP_DEVICE bool claim(u32* p) { return atomicCAS(p, 0u, 1u) == 0u; }

// ---- words that peers write, or read ----

LOOP_DEVICE u64 load_word_system(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
LOOP_DEVICE void store_word_system(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}

// ---- pages: a gate opens when so many have arrived, again and again ----

LOOP_DEVICE u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}
LOOP_DEVICE void gate_init(u64* gate, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(gate)), "r"(arrivals)
               : "memory");
}
// Behind all gate_init(), by one thread, in front of the barrier of the block.
LOOP_DEVICE void gates_are_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}
LOOP_DEVICE void gate_arrive(u64* gate) {
  asm volatile(
      "{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(shared_address(gate))
      : "memory");
}
// Whether the phase of this parity has ended.
LOOP_DEVICE bool gate_is_past(u64* gate, u32 parity) {
  u32 done;
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;"
      " selp.u32 %0, 1, 0, p; }"
      : "=r"(done)
      : "r"(shared_address(gate)), "r"(parity)
      : "memory");
  return done != 0;
}
#if __CUDA_ARCH__ >= 900
inline constexpr u32 kArrivalsOfPage = 1;
#else
inline constexpr u32 kArrivalsOfPage = kWarp;
#endif
// By a whole warp: the page's gate opens when its bytes, a multiple of 16, are there.
LOOP_DEVICE void load_page(u8* to, const u8* from, u32 bytes, u64* gate, u32 lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(gate)),
        "r"(bytes)
        : "memory");
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared_address(to)),
        "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(gate))
        : "memory");
  }
  sync_warp();
#else
  for (u32 at = lane * 16; at < bytes; at += kWarp * 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to + at)),
                 "l"(__cvta_generic_to_global(from + at))
                 : "memory");
  }
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(gate))
               : "memory");
#endif
}

}  // namespace unjam_loop
