// Copies boxes of n-dimensional arrays in host memory, and casts their elements.
#pragma once

#include <cstdint>
#include <vector>

#include "device/box.h"

namespace unjam {

// The places must not overlap. Casts are those of device/cast.h.
void copy_box(const BoxPlace& from, const BoxPlace& to, const std::vector<std::int64_t>& size);

}  // namespace unjam
