// What an element becomes as another type, on hosts and on GPUs: C++'s casts and those of
// base/float_types.h, but that what an integer type cannot hold becomes its nearest value, and NaN
// becomes 0.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "base/float_types.h"
#include "base/portability.h"

namespace unjam {

// What an element is reckoned with: itself, but for the narrow floats.
template <class T>
UNJAM_HD auto wide(T x) {
  if constexpr (std::is_arithmetic_v<T>) {
    return x;
  } else {
    return to_float(x);
  }
}

// Not a plain cast: of a value that the type cannot hold that is undefined.
template <class I, class F>
UNJAM_HD I to_integer(F x) {
  if (x != x) return 0;
  if (x <= static_cast<F>(std::numeric_limits<I>::min())) return std::numeric_limits<I>::min();
  if (x >= static_cast<F>(std::numeric_limits<I>::max())) return std::numeric_limits<I>::max();
  return static_cast<I>(x);
}

template <class To, class From>
UNJAM_HD To convert(From from) {
  const auto x = wide(from);
  if constexpr (!std::is_arithmetic_v<To>) {
    return from_float<To>(static_cast<float>(x));
  } else if constexpr (std::is_integral_v<To> && std::is_floating_point_v<decltype(x)>) {
    return to_integer<To>(x);
  } else {
    return static_cast<To>(x);
  }
}

}  // namespace unjam
