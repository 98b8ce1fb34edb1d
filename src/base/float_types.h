// The narrow floating-point types as plain storage, and their conversions to and from float, for
// host and device. Conversions from float round to nearest even. float16 and bfloat16 overflow to
// infinity; fp8 saturates to the largest finite value (infinities too), as NCCL does.
// Every NaN becomes the one NaN of the type below (kNanBits), so that no result depends on which
// operand's payload a compiler or a machine happens to carry on.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

struct Float16 {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};
struct Float8E4M3 {  // "fn": finite only, one NaN pattern a sign
  std::uint8_t bits;
};
struct Float8E5M2 {
  std::uint8_t bits;
};

// The NaN that a conversion or a reduction stores: what NVIDIA GPUs produce natively.
template <class T>
inline constexpr std::uint64_t kNanBits = 0;
template <>
inline constexpr std::uint64_t kNanBits<Float16> = 0x7fff;
template <>
inline constexpr std::uint64_t kNanBits<Bfloat16> = 0x7fff;
template <>
inline constexpr std::uint64_t kNanBits<Float8E4M3> = 0x7f;
template <>
inline constexpr std::uint64_t kNanBits<Float8E5M2> = 0x7f;
template <>
inline constexpr std::uint64_t kNanBits<float> = 0x7fffffff;
template <>
inline constexpr std::uint64_t kNanBits<double> = 0x7fffffffffffffff;

// Where a narrow format's parts lie, and the constants that encoding it needs. The same constants
// serve the vector code in the host leaves.
template <int kMantissaBits, int kExponentBits>
struct NarrowFloat {
  static constexpr int kSignBit = kMantissaBits + kExponentBits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  // Bits of a float mantissa below the narrow one.
  static constexpr int kShift = 23 - kMantissaBits;
  // What turns a shifted float exponent into a narrow one.
  static constexpr std::int32_t kRebias = (127 - kBias) << kMantissaBits;
  // Magnitudes below this (as float bits) are subnormal in the narrow format.
  static constexpr std::int32_t kMinNormal = (127 - kBias + 1) << 23;
  // Float with the narrow format's smallest step as its last place: adding it to a subnormal
  // rounds to that step, and leaves the narrow mantissa in the low bits.
  static constexpr std::int32_t kMagic = (127 - kBias + 1 + kShift) << 23;
  // One smallest step, as float bits.
  static constexpr std::int32_t kStep = (127 - kBias + 1 - kMantissaBits) << 23;
  static constexpr std::int32_t kMagnitude = (1 << kSignBit) - 1;
  static constexpr std::int32_t kMantissa = (1 << kMantissaBits) - 1;
};
using Float16Layout = NarrowFloat<10, 5>;
using Float8E4M3Layout = NarrowFloat<3, 4>;
using Float8E5M2Layout = NarrowFloat<2, 5>;

namespace float_types {

inline constexpr std::int32_t kFloatInfinity = 0x7f800000;

UNJAM_HD constexpr std::int32_t to_bits(float x) { return __builtin_bit_cast(std::int32_t, x); }
UNJAM_HD constexpr float from_bits(std::int32_t x) { return __builtin_bit_cast(float, x); }

// Nearest narrow magnitude for a float magnitude (its bits) with an exponent that is not too large;
// rounding may carry into the exponent, which is right.
template <class Layout>
UNJAM_HD constexpr std::int32_t encode_magnitude(std::int32_t magnitude) {
  constexpr std::int32_t kHalf = (1 << (Layout::kShift - 1)) - 1;
  if (magnitude < Layout::kMinNormal) {
    return to_bits(from_bits(magnitude) + from_bits(Layout::kMagic)) - Layout::kMagic;
  }
  const std::int32_t odd = (magnitude >> Layout::kShift) & 1;
  return ((magnitude + kHalf + odd) >> Layout::kShift) - Layout::kRebias;
}

template <class Layout>
UNJAM_HD constexpr std::int32_t sign_of(std::int32_t bits) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(bits) >> 31) << Layout::kSignBit;
}

// Finite narrow values (and for the formats with infinities, `bits` below the largest exponent).
template <class Layout>
UNJAM_HD constexpr float decode_finite(std::int32_t bits) {
  const std::int32_t magnitude = bits & Layout::kMagnitude;
  const float value = magnitude > Layout::kMantissa
                          ? from_bits((magnitude + Layout::kRebias) << Layout::kShift)
                          : static_cast<float>(magnitude) * from_bits(Layout::kStep);
  return (bits >> Layout::kSignBit) & 1 ? -value : value;
}

template <class Layout>
UNJAM_HD constexpr std::int32_t encode_saturating(float x, std::int32_t largest) {
  const std::int32_t bits = to_bits(x);
  const std::int32_t magnitude = bits & 0x7fffffff;
  if (magnitude > kFloatInfinity) return 0x7f;
  // From here on everything would be `largest` or above it.
  const std::int32_t limit = (largest + Layout::kRebias) << Layout::kShift;
  const std::int32_t result = magnitude >= limit ? largest : encode_magnitude<Layout>(magnitude);
  return result | sign_of<Layout>(bits);
}

}  // namespace float_types

inline constexpr std::int32_t kLargestE4M3 = 0x7e;  // 448
inline constexpr std::int32_t kLargestE5M2 = 0x7b;  // 57344

UNJAM_HD constexpr float to_float(Float16 x) {
  const std::int32_t magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) {
    if (magnitude > 0x7c00) return float_types::from_bits(0x7fffffff);
    const float infinity = float_types::from_bits(float_types::kFloatInfinity);
    return x.bits & 0x8000 ? -infinity : infinity;
  }
  return float_types::decode_finite<Float16Layout>(x.bits);
}

UNJAM_HD constexpr float to_float(Bfloat16 x) {
  if ((x.bits & 0x7fff) > 0x7f80) return float_types::from_bits(0x7fffffff);
  return __builtin_bit_cast(float, static_cast<std::uint32_t>(x.bits) << 16);
}

UNJAM_HD constexpr float to_float(Float8E4M3 x) {
  if ((x.bits & 0x7f) == 0x7f) return float_types::from_bits(0x7fffffff);
  return float_types::decode_finite<Float8E4M3Layout>(x.bits);
}

// e5m2 is the upper half of a float16.
UNJAM_HD constexpr float to_float(Float8E5M2 x) {
  return to_float(Float16{static_cast<std::uint16_t>(x.bits << 8)});
}

// Only for the four types here.
template <class T>
UNJAM_HD constexpr T from_float(float x);

template <>
UNJAM_HD constexpr Float16 from_float<Float16>(float x) {
  const std::int32_t bits = float_types::to_bits(x);
  const std::int32_t magnitude = bits & 0x7fffffff;
  if (magnitude > float_types::kFloatInfinity) return {0x7fff};
  constexpr std::int32_t kTooLarge = (127 + 16) << 23;  // 65536; 65520 and up round to infinity
  const std::int32_t result =
      magnitude >= kTooLarge ? 0x7c00 : float_types::encode_magnitude<Float16Layout>(magnitude);
  return {static_cast<std::uint16_t>(result | float_types::sign_of<Float16Layout>(bits))};
}

template <>
UNJAM_HD constexpr Bfloat16 from_float<Bfloat16>(float x) {
  const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
  if ((bits & 0x7fffffff) > 0x7f800000) return {0x7fff};
  return {static_cast<std::uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

template <>
UNJAM_HD constexpr Float8E4M3 from_float<Float8E4M3>(float x) {
  return {
      static_cast<std::uint8_t>(float_types::encode_saturating<Float8E4M3Layout>(x, kLargestE4M3))};
}

template <>
UNJAM_HD constexpr Float8E5M2 from_float<Float8E5M2>(float x) {
  return {
      static_cast<std::uint8_t>(float_types::encode_saturating<Float8E5M2Layout>(x, kLargestE5M2))};
}

}  // namespace unjam
