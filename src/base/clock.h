// The host's clock for ages, traces and residency: CLOCK_MONOTONIC, as unjamGetTrace documents.
#pragma once

#include <time.h>

#include <cstdint>

namespace unjam {

inline std::uint64_t monotonic_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u + static_cast<std::uint64_t>(t.tv_nsec);
}

}  // namespace unjam
