// Bits of a word.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

UNJAM_HD inline std::uint32_t count_bits(std::uint64_t word) {
#if defined(__CUDA_ARCH__)
  return static_cast<std::uint32_t>(__popcll(word));
#else
  return static_cast<std::uint32_t>(__builtin_popcountll(word));
#endif
}

}  // namespace unjam
