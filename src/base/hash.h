// 64-bit hashing for names and for the seeds of slot flags.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/portability.h"

namespace unjam {

// A bijection of 64 bits in which every input bit flips each output bit with probability near 1/2
// (the finaliser of SplitMix64).
UNJAM_HD constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

UNJAM_HD constexpr std::uint64_t hash_combine(std::uint64_t seed, std::uint64_t value) {
  return mix64(seed ^ mix64(value));
}

constexpr std::uint64_t hash_bytes(std::string_view s, std::uint64_t seed = 0) {
  std::uint64_t h = mix64(seed + s.size());
  for (const char c : s) h = mix64(h ^ static_cast<unsigned char>(c));
  return h;
}

}  // namespace unjam
