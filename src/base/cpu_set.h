// CPUs, a bit each: CPU 0 is the lowest bit of the first word.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/bits.h"

namespace unjam {

using CpuSet = std::vector<std::uint64_t>;
inline constexpr std::size_t kMostCpuWords = 64;

inline void add_cpus(const CpuSet& more, CpuSet* all) {
  all->resize(std::max(all->size(), more.size()));
  for (std::size_t i = 0; i < more.size(); ++i) (*all)[i] |= more[i];
}

inline int count_cpus(const CpuSet& cpus) {
  std::uint32_t count = 0;
  for (const std::uint64_t word : cpus) count += count_bits(word);
  return static_cast<int>(count);
}

}  // namespace unjam
