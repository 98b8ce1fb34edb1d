#include "runtime/allowed_cpus.h"

#include <sched.h>

#include <cstddef>
#include <cstdint>

namespace unjam {

CpuSet allowed_cpus() {
  constexpr std::size_t kBits = 64;
  CpuSet words(kMostCpuWords);
  cpu_set_t* const set = CPU_ALLOC(kMostCpuWords * kBits);
  if (set == nullptr) return {};
  const std::size_t bytes = CPU_ALLOC_SIZE(kMostCpuWords * kBits);
  CPU_ZERO_S(bytes, set);
  if (sched_getaffinity(0, bytes, set) != 0) {
    CPU_FREE(set);
    return {};
  }
  for (std::size_t cpu = 0; cpu < kMostCpuWords * kBits; ++cpu) {
    if (CPU_ISSET_S(cpu, bytes, set)) words[cpu / kBits] |= std::uint64_t{1} << cpu % kBits;
  }
  CPU_FREE(set);
  while (!words.empty() && words.back() == 0) words.pop_back();
  return words;
}

}  // namespace unjam
