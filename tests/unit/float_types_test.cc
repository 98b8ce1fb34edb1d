// Narrow floats against references that share nothing with them: values built with ldexp, and
// encoding by searching the sorted values for the nearest one.
#include "base/float_types.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

namespace unjam {
namespace {

template <class To, class From>
To cast_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// What the formats' definitions say, for one type.
template <class T>
struct Spec;
template <>
struct Spec<Float16> {
  static constexpr int kExponent = 5, kMantissa = 10;
  static constexpr bool kHasInfinity = true, kSaturates = false;
};
template <>
struct Spec<Bfloat16> {
  static constexpr int kExponent = 8, kMantissa = 7;
  static constexpr bool kHasInfinity = true, kSaturates = false;
};
template <>
struct Spec<Float8E4M3> {
  static constexpr int kExponent = 4, kMantissa = 3;
  static constexpr bool kHasInfinity = false, kSaturates = true;
};
template <>
struct Spec<Float8E5M2> {
  static constexpr int kExponent = 5, kMantissa = 2;
  static constexpr bool kHasInfinity = true, kSaturates = true;
};

template <class T>
constexpr unsigned kSign = 1u << (Spec<T>::kExponent + Spec<T>::kMantissa);

double reference_decode(unsigned bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const unsigned mantissa = bits & ((1u << mantissa_bits) - 1);
  const unsigned exponent = (bits >> mantissa_bits) & ((1u << exponent_bits) - 1);
  const bool negative = (bits >> (mantissa_bits + exponent_bits)) & 1;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const bool top = exponent == (1u << exponent_bits) - 1;
  double value;
  if (top && has_infinity) {
    value = mantissa == 0 ? std::numeric_limits<double>::infinity()
                          : std::numeric_limits<double>::quiet_NaN();
  } else if (top && mantissa == (1u << mantissa_bits) - 1) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (exponent == 0) {
    value = std::ldexp(mantissa, 1 - bias - mantissa_bits);
  } else {
    value =
        std::ldexp(1.0 + std::ldexp(mantissa, -mantissa_bits), static_cast<int>(exponent) - bias);
  }
  return negative ? -value : value;
}

template <class T>
double reference_decode(unsigned bits) {
  return reference_decode(bits, Spec<T>::kExponent, Spec<T>::kMantissa, Spec<T>::kHasInfinity);
}

// All finite magnitudes, in order; index = bits.
template <class T>
const std::vector<double>& magnitudes() {
  static const std::vector<double> values = [] {
    std::vector<double> v;
    for (unsigned bits = 0; bits < kSign<T> && std::isfinite(reference_decode<T>(bits)); ++bits) {
      v.push_back(reference_decode<T>(bits));
    }
    return v;
  }();
  return values;
}

template <class T>
unsigned reference_encode(float x) {
  if (std::isnan(x)) return kSign<T> - 1;
  const std::vector<double>& values = magnitudes<T>();
  const unsigned sign = std::signbit(x) ? kSign<T> : 0;
  const unsigned last = static_cast<unsigned>(values.size()) - 1;
  const long double magnitude = std::fabs(static_cast<long double>(x));
  if (magnitude >= values[last]) {
    // Beyond: as if the next value existed, the midpoint goes up (the largest value is odd).
    const long double step = static_cast<long double>(values[last]) - values[last - 1];
    const bool over = magnitude - values[last] >= step / 2;
    return sign | (over && !Spec<T>::kSaturates ? last + 1 : last);
  }
  const unsigned above = static_cast<unsigned>(
      std::upper_bound(values.begin(), values.end(), static_cast<double>(magnitude)) -
      values.begin());
  const long double up = values[above] - magnitude;
  const long double down = magnitude - values[above - 1];
  if (up == down) return sign | (above % 2 == 0 ? above : above - 1);
  return sign | (up < down ? above : above - 1);
}

template <class T>
class FloatTypesTest : public testing::Test {};
using Types = testing::Types<Float16, Bfloat16, Float8E4M3, Float8E5M2>;
TYPED_TEST_SUITE(FloatTypesTest, Types);

TYPED_TEST(FloatTypesTest, EveryPatternDecodes) {
  for (unsigned bits = 0; bits < 2 * kSign<TypeParam>; ++bits) {
    TypeParam x{};
    x.bits = static_cast<decltype(x.bits)>(bits);
    const float value = to_float(x);
    const double expected = reference_decode<TypeParam>(bits);
    if (std::isnan(expected)) {
      ASSERT_EQ(cast_bits<std::uint32_t>(value), 0x7fffffffu) << bits;
      ASSERT_EQ(from_float<TypeParam>(value).bits, kNanBits<TypeParam>);
      continue;
    }
    ASSERT_EQ(static_cast<double>(value), expected) << bits;
    ASSERT_EQ(std::signbit(value), std::signbit(expected)) << bits;
    if (std::isinf(expected) && Spec<TypeParam>::kSaturates) {
      ASSERT_EQ(from_float<TypeParam>(value).bits, bits - 1);  // the largest finite one
    } else {
      ASSERT_EQ(from_float<TypeParam>(value).bits, bits);
    }
  }
}

// A conversion is a step function: it is right everywhere if it is right at every step, that is at
// the midpoints of neighbours and one float to either side.
TYPED_TEST(FloatTypesTest, EveryRoundingBoundary) {
  std::vector<double> values = magnitudes<TypeParam>();
  values.push_back(2 * values.back() - values[values.size() - 2]);
  const float infinity = std::numeric_limits<float>::infinity();
  for (std::size_t i = 0; i + 1 < values.size(); ++i) {
    for (double point : {values[i], (values[i] + values[i + 1]) / 2}) {
      const float x = static_cast<float>(point);
      for (float y : {x, std::nextafter(x, infinity), std::nextafter(x, -infinity)}) {
        for (float z : {y, -y}) {
          ASSERT_EQ(from_float<TypeParam>(z).bits, reference_encode<TypeParam>(z))
              << std::hexfloat << z;
        }
      }
    }
  }
}

TYPED_TEST(FloatTypesTest, RandomAndSpecialFloats) {
  std::mt19937 random(7);
  for (int i = 0; i < 2000000; ++i) {
    const float x = cast_bits<float>(static_cast<std::uint32_t>(random()));
    ASSERT_EQ(from_float<TypeParam>(x).bits, reference_encode<TypeParam>(x)) << std::hexfloat << x;
  }
  using Limits = std::numeric_limits<float>;
  for (float x : {0.0f, Limits::infinity(), Limits::max(), Limits::min(), Limits::denorm_min(),
                  Limits::quiet_NaN(), Limits::signaling_NaN()}) {
    for (float y : {x, -x}) {
      ASSERT_EQ(from_float<TypeParam>(y).bits, reference_encode<TypeParam>(y));
    }
  }
}

#if defined(__FLT16_MANT_DIG__)
TEST(Float16Test, AgreesWithTheCompilersOwn) {
  std::mt19937 random(11);
  for (int i = 0; i < 2000000; ++i) {
    const float x = cast_bits<float>(static_cast<std::uint32_t>(random()));
    if (std::isnan(x)) continue;
    const auto expected = cast_bits<std::uint16_t>(static_cast<_Float16>(x));
    ASSERT_EQ(from_float<Float16>(x).bits, expected) << std::hexfloat << x;
  }
}
#endif

TEST(Bfloat16Test, RoundsTheUpperHalf) {
  std::mt19937 random(13);
  for (int i = 0; i < 2000000; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(random());
    if ((bits & 0x7f800000) == 0x7f800000) continue;
    const std::uint32_t low = bits & 0xffff;
    const std::uint32_t high = bits >> 16;
    const bool up = low > 0x8000 || (low == 0x8000 && high % 2 == 1);
    ASSERT_EQ(from_float<Bfloat16>(cast_bits<float>(bits)).bits, high + up) << bits;
  }
}

static_assert(to_float(from_float<Float16>(1.5f)) == 1.5f);  // usable in constant expressions
static_assert(from_float<Float8E4M3>(1e9f).bits == kLargestE4M3);

}  // namespace
}  // namespace unjam
