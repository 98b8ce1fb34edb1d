// The scalar of ncclRedOpCreatePreMulSum: inputs are multiplied by it before they are added.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "base/float_types.h"
#include "base/portability.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

struct Scale {
  unjamDataType_t dtype = UNJAM_FLOAT32;
  // Where the scalar is read when the operation runs; NULL: it was read when the operator was made.
  const void* place = nullptr;
  std::array<unsigned char, 8> value{};
};

inline std::size_t bytes_of(unjamDataType_t dtype) {
  switch (dtype) {
    case UNJAM_INT8:
    case UNJAM_UINT8:
    case UNJAM_FLOAT8_E4M3:
    case UNJAM_FLOAT8_E5M2:
      return 1;
    case UNJAM_FLOAT16:
    case UNJAM_BFLOAT16:
      return 2;
    case UNJAM_INT32:
    case UNJAM_UINT32:
    case UNJAM_FLOAT32:
      return 4;
    case UNJAM_INT64:
    case UNJAM_UINT64:
    case UNJAM_FLOAT64:
      return 8;
  }
  return 0;
}

// Narrow floats are multiplied in float32 and rounded once; integers wrap.
template <class T>
UNJAM_HD constexpr T scaled(T x, T by) {
  if constexpr (std::is_integral_v<T>) {
    using U = std::uint64_t;
    return static_cast<T>(static_cast<U>(x) * static_cast<U>(by));
  } else if constexpr (std::is_floating_point_v<T>) {
    return x * by;
  } else {
    return from_float<T>(to_float(x) * to_float(by));
  }
}

// Calls f(T{}) with the C++ type of a data type.
template <class F>
void with_type(unjamDataType_t dtype, F&& f) {
  switch (dtype) {
    case UNJAM_INT8:
      return f(std::int8_t{});
    case UNJAM_UINT8:
      return f(std::uint8_t{});
    case UNJAM_INT32:
      return f(std::int32_t{});
    case UNJAM_UINT32:
      return f(std::uint32_t{});
    case UNJAM_INT64:
      return f(std::int64_t{});
    case UNJAM_UINT64:
      return f(std::uint64_t{});
    case UNJAM_FLOAT16:
      return f(Float16{});
    case UNJAM_BFLOAT16:
      return f(Bfloat16{});
    case UNJAM_FLOAT32:
      return f(float{});
    case UNJAM_FLOAT64:
      return f(double{});
    case UNJAM_FLOAT8_E4M3:
      return f(Float8E4M3{});
    case UNJAM_FLOAT8_E5M2:
      return f(Float8E5M2{});
  }
}

}  // namespace unjam::nccl
