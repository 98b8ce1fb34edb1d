// src/device/cuda/hardware/atomics.cuh of tests/simt's machine, which runs one thread at a time:
// plain accesses, and a step in front of each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "tests/simt/machine.h"

namespace unjam {

template <class T>
void store_system(T& x, T v) {
  unjam_simt::step();
  x = v;
}
inline void fence_system() { unjam_simt::step(); }
inline void fence_local() { unjam_simt::step(); }
inline void fence_total_local() { unjam_simt::step(); }
inline void clear_local(std::uint32_t& word, std::uint32_t bits) {
  unjam_simt::step();
  word &= ~bits;
}

inline void add_relaxed(std::uint64_t& x, std::uint64_t by) {
  unjam_simt::step();
  x += by;
}
inline void add_relaxed(std::uint32_t& x, std::uint32_t by) {
  unjam_simt::step();
  x += by;
}
inline void max_relaxed(std::uint64_t& x, std::uint64_t with) {
  unjam_simt::step();
  x = std::max(x, with);
}
inline void max_release(std::uint64_t& x, std::uint64_t with) { max_relaxed(x, with); }
inline std::uint64_t fetch_add_relaxed(std::uint64_t& x, std::uint64_t by) {
  unjam_simt::step();
  const std::uint64_t before = x;
  x += by;
  return before;
}
inline std::uint64_t fetch_and_acquire(std::uint64_t& x, std::uint64_t with) {
  unjam_simt::step();
  const std::uint64_t before = x;
  x &= with;
  return before;
}
inline std::uint64_t fetch_or_acquire(std::uint64_t& x, std::uint64_t with) {
  unjam_simt::step();
  const std::uint64_t before = x;
  x |= with;
  return before;
}
inline std::uint64_t fetch_add_acq_rel(std::uint64_t& x, std::uint64_t by) {
  return fetch_add_relaxed(x, by);
}
inline std::uint64_t load_word_system(const void* p) {
  unjam_simt::step();
  std::uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}
inline void store_word_system(void* p, std::uint64_t word) {
  unjam_simt::step();
  std::memcpy(p, &word, sizeof(word));
}
// (Two accesses: others may come between them.)
inline void load_words_system(const void* p, std::uint64_t& first, std::uint64_t& second) {
  first = load_word_system(p);
  second = load_word_system(static_cast<const char*>(p) + 8);
}
inline void store_words_system(void* p, std::uint64_t first, std::uint64_t second) {
  store_word_system(p, first);
  store_word_system(static_cast<char*>(p) + 8, second);
}
inline void find_way(const void*) {}

inline void add_relaxed_shared(std::uint32_t& x, std::uint32_t by) { add_relaxed(x, by); }
inline void increment_release_shared(std::uint32_t& x) { add_relaxed(x, 1); }
inline std::uint32_t load_acquire_shared(const std::uint32_t& x) {
  unjam_simt::step();
  return *const_cast<const volatile std::uint32_t*>(&x);
}
inline void store_release_shared(std::uint32_t& x, std::uint32_t v) {
  unjam_simt::step();
  *const_cast<volatile std::uint32_t*>(&x) = v;
}

}  // namespace unjam
