// python/unjam/loop/kernels/hardware.cuh of tests/simt's machine, which runs one thread at a time:
// plain accesses, and a step in front of each.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "tests/simt/machine.h"

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

#define LOOP_DEVICE inline
#define LOOP_KERNEL
#define LOOP_BOUNDS(threads)
#define LOOP_PARAMETERS(p) const unjam_loop::Parameters& p
#define LOOP_UNROLL

namespace unjam_loop {

inline constexpr u32 kWarp = 32;
inline constexpr u32 kRoundsApart = 4;
inline constexpr u32 kArrivalsOfPage = 1;

inline u32 thread_here() { return unjam_simt::here().thread; }
inline u32 block_here() { return unjam_simt::here().block; }
inline u8* block_memory() { return unjam_simt::block_memory(); }

inline void sync_block() { unjam_simt::meet(0, unjam_simt::here().threads, true, true); }
inline void sync_warp() {
  std::uint64_t all[32];
  unjam_simt::vote(~0u, 0, all);
}
inline void sync_first(u32 threads) { unjam_simt::meet(1, threads, true, true); }

inline float from_lane_xor(float x, u32 mask) {
  std::uint64_t all[32];
  unjam_simt::vote(~0u, std::bit_cast<std::uint32_t>(x), all);
  return std::bit_cast<float>(static_cast<std::uint32_t>(all[thread_here() % kWarp ^ mask]));
}
inline bool all_of_warp(bool x) {
  std::uint64_t all[32];
  unjam_simt::vote(~0u, x ? 1 : 0, all);
  for (const std::uint64_t said : all) {
    if (said == 0) return false;
  }
  return true;
}

inline float exponential(float x) { return std::exp(x); }
inline float root(float x) { return std::sqrt(x); }
inline float of_bits(u32 x) { return std::bit_cast<float>(x); }
inline u32 bits_of(float x) { return std::bit_cast<u32>(x); }

inline u64 now_ns() {
  unjam_simt::step();
  return unjam_simt::now_ns();
}

inline u32 load_acquire(const u32* p) {
  unjam_simt::step();
  return *static_cast<const volatile u32*>(p);
}
inline void add_release(u32* p, u32 by) {
  unjam_simt::step();
  *p += by;
}
inline void store_release(u32* p, u32 v) {
  unjam_simt::step();
  *static_cast<volatile u32*>(p) = v;
}
inline bool claim(u32* p) {
  unjam_simt::step();
  if (*p != 0) return false;
  *p = 1;
  return true;
}
inline u64 load_word_system(const u64* p) {
  unjam_simt::step();
  return *static_cast<const volatile u64*>(p);
}
inline void store_word_system(u64* p, u64 v) {
  unjam_simt::step();
  *static_cast<volatile u64*>(p) = v;
}

// A gate: how many are to arrive, how many are missing, which phase it is.
struct Gate {
  u16 arrivals, missing;
  u32 phase;
};
static_assert(sizeof(Gate) == sizeof(u64));

inline void gate_init(u64* gate, u32 arrivals) {
  const Gate g{static_cast<u16>(arrivals), static_cast<u16>(arrivals), 0};
  std::memcpy(gate, &g, sizeof(g));
}
inline void gates_are_ready() {}
inline void gate_arrive(u64* gate) {
  unjam_simt::step();
  Gate g;
  std::memcpy(&g, gate, sizeof(g));
  if (--g.missing == 0) {
    g.missing = g.arrivals;
    ++g.phase;
  }
  std::memcpy(gate, &g, sizeof(g));
}
inline bool gate_is_past(u64* gate, u32 parity) {
  unjam_simt::step();
  Gate g;
  std::memcpy(&g, gate, sizeof(g));
  return (g.phase & 1) != parity;
}
// In two parts, so that somebody who does not wait for the gate sees half of it.
inline void load_page(u8* to, const u8* from, u32 bytes, u64* gate, u32 lane) {
  if (lane == 0) {
    std::memset(to, 0xff, bytes);
    unjam_simt::step();
    std::memcpy(to, from, bytes / 2);
    unjam_simt::step();
    std::memcpy(to + bytes / 2, from + bytes / 2, bytes - bytes / 2);
    gate_arrive(gate);
  }
  sync_warp();
}

}  // namespace unjam_loop
