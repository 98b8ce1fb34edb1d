// Copies boxes of n-dimensional arrays between memory of any strides, and casts their elements.
#pragma once

#include <cstdint>
#include <vector>

#include "base/types.h"

namespace unjam {

// Where a box begins, and the bytes from one element to the next in each dimension, which may be
// negative or 0.
struct BoxPlace {
  std::uint8_t* data = nullptr;
  DType dtype = DType::kUint8;
  std::vector<std::int64_t> strides;
};

// Strides of an array whose last dimension counts fastest, without gaps.
std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& size, DType dtype);

// Whether elements of the box lie one behind the other, row-major.
bool is_contiguous(const BoxPlace& place, const std::vector<std::int64_t>& size);

// The places must not overlap. Casts are C++'s and those of base/float_types.h; what an integer
// type cannot hold becomes its nearest value, and NaN becomes 0.
void copy_box(const BoxPlace& from, const BoxPlace& to, const std::vector<std::int64_t>& size);

}  // namespace unjam
