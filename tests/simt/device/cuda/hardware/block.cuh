// src/device/cuda/hardware/block.cuh of tests/simt's machine.
#pragma once

#include <cstdint>

#include "tests/simt/machine.h"

#define UNJAM_DYNAMIC_SHARED(name) unsigned char* const name = unjam_simt::block_memory()

namespace unjam {

// Few: so that a call is stopped anywhere.
inline constexpr std::uint32_t kRoundsApart = 2;

inline void wait_for_stream() { unjam_simt::wait_for_stream(); }
inline void let_next_begin() { unjam_simt::let_next_begin(); }
inline std::uint64_t global_ns() {
  unjam_simt::step();
  return unjam_simt::now_ns();
}
inline std::uint32_t sm_of_block() { return unjam_simt::here().block; }
inline std::uint64_t launch_number() { return unjam_simt::launch_number(); }
inline std::uint32_t blocks_in_cluster() { return 1; }

inline constexpr unsigned kApartBarrier = 15;
inline void sync_block() { unjam_simt::meet(0, unjam_simt::here().threads, true, true); }
inline void sync_block_apart() {
  unjam_simt::meet(kApartBarrier, unjam_simt::here().threads, true, true);
}
inline void arrive_apart() {
  unjam_simt::meet(kApartBarrier, unjam_simt::here().threads, true, false);
}
inline void sync_group(std::uint32_t barrier, std::uint32_t threads) {
  unjam_simt::meet(barrier, threads, true, true);
}
template <unsigned kBarrier>
bool all_of_group(bool x, std::uint32_t threads) {
  return unjam_simt::meet(kBarrier, threads, x, true);
}

template <class F>
F* with_all_registers(F* function) {
  return function;
}
template <class T>
void forget(T*&, unsigned&, unsigned&) {}
inline void* shared_pointer(const void* p) { return const_cast<void*>(p); }
inline void assume_global(const void*) {}

}  // namespace unjam
