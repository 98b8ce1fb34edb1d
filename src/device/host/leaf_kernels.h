// The host leaves' inner loops, for one instruction set. Included by leaf_base.cc, leaf_avx2.cc and
// leaf_avx512.cc only, after they have switched the instruction set on and defined `Isa`.
//
// Everything here has internal linkage, and nothing here calls an inline function of another header
// at run time: otherwise the linker could keep a copy that was compiled for AVX-512 and use it
// everywhere.
//
// Vectors are GCC's, spelled out rather than left to the auto-vectoriser: a slice's last elements
// pass through the very same code, padded, so a result never depends on where in a slice or at
// which alignment an element lies, nor on the optimisation level.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/float_types.h"
#include "base/types.h"
#include "device/leaf.h"

// Vectors wider than the baseline's are passed between functions here, all of them inlined.
#pragma GCC diagnostic ignored "-Wpsabi"
// Contracting the average's multiply and add would make results depend on the instruction set.
// AVX-512 has fused instructions even without -mfma.
#if defined(__clang__)
#pragma clang fp contract(off)
#else
#pragma GCC optimize("fp-contract=off")
#endif

namespace unjam {
namespace {

template <class T, int kBytes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kBytes)));
};
template <class T>
using Vector = typename VectorOf<T, Isa::kBytes>::Type;
using FloatVector = Vector<float>;
using IntVector = Vector<std::int32_t>;

inline constexpr int kFloatLanes = Isa::kBytes / 4;

template <class V>
[[gnu::always_inline]] inline V load_vector(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class V>
[[gnu::always_inline]] inline void store_vector(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof v);
}

[[gnu::always_inline]] inline IntVector splat(std::int32_t x) { return x - IntVector{}; }

// ---- Encodings of narrow floats: float_types.h, a vector at a time. -----------------------------

template <class Layout>
[[gnu::always_inline]] inline IntVector sign_of(IntVector bits) {
  return (IntVector)((Vector<std::uint32_t>)bits >> 31) << Layout::kSignBit;
}

template <class Layout>
[[gnu::always_inline]] inline FloatVector decode_finite(IntVector bits) {
  const IntVector magnitude = bits & Layout::kMagnitude;
  const IntVector normal = (magnitude + Layout::kRebias) << Layout::kShift;
  const FloatVector subnormal =
      __builtin_convertvector(magnitude, FloatVector) * __builtin_bit_cast(float, Layout::kStep);
  const IntVector value = magnitude > Layout::kMantissa ? normal : (IntVector)subnormal;
  return (FloatVector)(value | (((bits >> Layout::kSignBit) & 1) << 31));
}

template <class Layout>
[[gnu::always_inline]] inline IntVector encode_magnitude(IntVector magnitude) {
  const FloatVector shifted = (FloatVector)magnitude + __builtin_bit_cast(float, Layout::kMagic);
  const IntVector subnormal = (IntVector)shifted - Layout::kMagic;
  const IntVector odd = (magnitude >> Layout::kShift) & 1;
  const IntVector rounded = magnitude + ((1 << (Layout::kShift - 1)) - 1) + odd;
  const IntVector normal = (rounded >> Layout::kShift) - Layout::kRebias;
  return magnitude < Layout::kMinNormal ? subnormal : normal;
}

template <class Layout>
[[gnu::always_inline]] inline IntVector encode_saturating(FloatVector x, std::int32_t largest) {
  const IntVector bits = (IntVector)x;
  const IntVector magnitude = bits & 0x7fffffff;
  const std::int32_t limit = (largest + Layout::kRebias) << Layout::kShift;
  // What lies above the limit is cut first: the magnitude's arithmetic must not overflow.
  const IntVector cut = magnitude < limit ? magnitude : splat(limit);
  const IntVector finite = encode_magnitude<Layout>(cut) | sign_of<Layout>(bits);
  return magnitude > float_types::kFloatInfinity ? splat(0x7f) : finite;
}

[[gnu::always_inline]] inline FloatVector decode_half(IntVector bits) {
  const IntVector magnitude = bits & 0x7fff;
  // Infinities and NaNs: the float's exponent is all ones too.
  const IntVector special = (magnitude << Float16Layout::kShift) | float_types::kFloatInfinity |
                            (((bits >> 15) & 1) << 31);
  const IntVector finite = (IntVector)decode_finite<Float16Layout>(bits);
  return (FloatVector)(magnitude >= 0x7c00 ? special : finite);
}

[[gnu::always_inline]] inline IntVector encode_half(FloatVector x) {
  const IntVector bits = (IntVector)x;
  const IntVector magnitude = bits & 0x7fffffff;
  const std::int32_t limit = (127 + 16) << 23;  // 65536, which encodes as infinity
  const IntVector cut = magnitude < limit ? magnitude : splat(limit);
  const IntVector number = encode_magnitude<Float16Layout>(cut) | sign_of<Float16Layout>(bits);
  return magnitude > float_types::kFloatInfinity ? splat(0x7fff) : number;
}

[[gnu::always_inline]] inline IntVector encode_bfloat16(FloatVector x) {
  const IntVector bits = (IntVector)x;
  const Vector<std::uint32_t> raw = (Vector<std::uint32_t>)x;
  const IntVector number = (IntVector)((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
  return (bits & 0x7fffffff) > float_types::kFloatInfinity ? splat(0x7fff) : number;
}

// float16 by the instruction set's own conversions, or by those above.
template <class I, bool kHardware = I::kHasHalf>
struct Half {
  [[gnu::always_inline]] static FloatVector load(const void* p) { return I::load_half(p); }
  [[gnu::always_inline]] static void store(void* p, FloatVector v) { I::store_half(p, v); }
  [[gnu::always_inline]] static FloatVector decode(IntVector bits) { return I::decode_half(bits); }
};
template <class I>
struct Half<I, false> {
  [[gnu::always_inline]] static FloatVector load(const void* p) {
    return unjam::decode_half((IntVector)I::load_u16(p));
  }
  [[gnu::always_inline]] static void store(void* p, FloatVector v) {
    I::store_u16(p, encode_half(v));
  }
  [[gnu::always_inline]] static FloatVector decode(IntVector bits) {
    return unjam::decode_half(bits);
  }
};

// ---- Formats: how a dtype is stored, and what it is accumulated in. -----------------------------

template <class T>
struct NativeFormat {
  using Element = T;  // of the accumulator
  using Acc = Vector<T>;
  static constexpr int kStorageBytes = sizeof(T);
  static constexpr int kLanes = Isa::kBytes / kStorageBytes;
  [[gnu::always_inline]] static Acc load(const void* p) { return load_vector<Acc>(p); }
  [[gnu::always_inline]] static void store(void* p, Acc v) { store_vector(p, v); }
};

template <int kBytes>
struct NarrowFormat {
  using Element = float;
  using Acc = FloatVector;
  static constexpr int kStorageBytes = kBytes;
  static constexpr int kLanes = kFloatLanes;
};

template <DType>
struct Format;
template <>
struct Format<DType::kInt8> : NativeFormat<std::int8_t> {};
template <>
struct Format<DType::kUint8> : NativeFormat<std::uint8_t> {};
template <>
struct Format<DType::kInt32> : NativeFormat<std::int32_t> {};
template <>
struct Format<DType::kUint32> : NativeFormat<std::uint32_t> {};
template <>
struct Format<DType::kInt64> : NativeFormat<std::int64_t> {};
template <>
struct Format<DType::kUint64> : NativeFormat<std::uint64_t> {};
template <>
struct Format<DType::kFloat32> : NativeFormat<float> {};
template <>
struct Format<DType::kFloat64> : NativeFormat<double> {};

template <>
struct Format<DType::kFloat16> : NarrowFormat<2> {
  [[gnu::always_inline]] static Acc load(const void* p) { return Half<Isa>::load(p); }
  [[gnu::always_inline]] static void store(void* p, Acc v) { Half<Isa>::store(p, v); }
};

template <>
struct Format<DType::kBfloat16> : NarrowFormat<2> {
  [[gnu::always_inline]] static Acc load(const void* p) {
    return (Acc)((IntVector)Isa::load_u16(p) << 16);
  }
  [[gnu::always_inline]] static void store(void* p, Acc v) {
    Isa::store_u16(p, encode_bfloat16(v));
  }
};

template <>
struct Format<DType::kFloat8E4M3> : NarrowFormat<1> {
  [[gnu::always_inline]] static Acc load(const void* p) {
    const IntVector bits = (IntVector)Isa::load_u8(p);
    const FloatVector nan = (FloatVector)splat(0x7fffffff);
    return (bits & 0x7f) == 0x7f ? nan : decode_finite<Float8E4M3Layout>(bits);
  }
  [[gnu::always_inline]] static void store(void* p, Acc v) {
    Isa::store_u8(p, encode_saturating<Float8E4M3Layout>(v, kLargestE4M3));
  }
};

template <>
struct Format<DType::kFloat8E5M2> : NarrowFormat<1> {
  [[gnu::always_inline]] static Acc load(const void* p) {
    return Half<Isa>::decode((IntVector)Isa::load_u8(p) << 8);  // a float16's upper half
  }
  [[gnu::always_inline]] static void store(void* p, Acc v) {
    Isa::store_u8(p, encode_saturating<Float8E5M2Layout>(v, kLargestE5M2));
  }
};

// ---- Operators. ---------------------------------------------------------------------------------

template <class T>
inline constexpr bool kIsFloat = static_cast<T>(0.5) != static_cast<T>(0);

// The type whose arithmetic wraps around.
template <int kBytes>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using Type = std::uint8_t;
};
template <>
struct UnsignedOf<4> {
  using Type = std::uint32_t;
};
template <>
struct UnsignedOf<8> {
  using Type = std::uint64_t;
};

template <Op op, class T>
[[gnu::always_inline]] inline Vector<T> combine(Vector<T> a, Vector<T> b) {
  if constexpr (op == Op::kMin || op == Op::kMax) {
    if constexpr (kIsFloat<T>) {
      // A NaN in `a` stays (both comparisons fail), one in `b` is taken; of two equal values (zeros
      // of either sign) the first stays.
      const auto better = op == Op::kMin ? b < a : a < b;
      return (better | (b != b)) ? b : a;
    } else {
      return (op == Op::kMin ? b < a : a < b) ? b : a;
    }
  } else if constexpr (kIsFloat<T>) {
    return op == Op::kProd ? a * b : a + b;
  } else {
    using U = Vector<typename UnsignedOf<sizeof(T)>::Type>;
    return (Vector<T>)(op == Op::kProd ? (U)a * (U)b : (U)a + (U)b);
  }
}

// Integer division towards zero. Exact: a quotient of numbers below 2^32 that is not an integer is
// farther from the next integer than a double's (for 8 bits: a float's) rounding reaches.
template <class T>
[[gnu::always_inline]] inline Vector<T> divide(Vector<T> v, std::uint32_t divisor) {
  constexpr int kLanes = Isa::kBytes / sizeof(T);
  T x[kLanes];
  __builtin_memcpy(x, &v, sizeof v);
  for (int i = 0; i < kLanes; ++i) {
    if constexpr (sizeof(T) == 1) {
      x[i] = static_cast<T>(static_cast<float>(x[i]) / static_cast<float>(divisor));
    } else if constexpr (sizeof(T) == 4) {
      x[i] = static_cast<T>(static_cast<double>(x[i]) / static_cast<double>(divisor));
    } else {
      x[i] = x[i] / static_cast<T>(divisor);
    }
  }
  return load_vector<Vector<T>>(x);
}

// ---- Loops. -------------------------------------------------------------------------------------

// What the loops need of a job, read once: stores could alias the job itself.
template <class T>
struct Slice {
  const void* const* src;
  void* const* dst_slot;
  std::uint8_t* dst_user;
  int num_src;
  int num_dst;
  bool scale_all;
  int scaled_src;
  T scale;
  std::uint32_t divisor;
};

// kVectors vectors beginning `at` bytes into the slice, or, if kTail, the `tail_bytes` that are
// left, fewer than a vector. All sources are read before anything is written: a destination may be
// a source.
template <DType dtype, Op op, int kVectors, bool kTail, class T>
[[gnu::always_inline]] inline void reduce_block(const Slice<T>& slice, std::uint64_t at,
                                                int tail_bytes) {
  using F = Format<dtype>;
  using Acc = typename F::Acc;
  constexpr int kStep = F::kLanes * F::kStorageBytes;
  Acc acc[kVectors];
  for (int s = 0; s < slice.num_src; ++s) {
    const std::uint8_t* from = static_cast<const std::uint8_t*>(slice.src[s]) + at;
    std::uint8_t padded[kTail ? kStep : 1] = {};
    if constexpr (kTail) {
      __builtin_memcpy(padded, from, static_cast<unsigned>(tail_bytes));
      from = padded;
    }
    // Multiplying by one changes nothing, and spares a second copy of the loop.
    const T factor = slice.scale_all || s == slice.scaled_src ? slice.scale : T{1};
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      Acc x = F::load(from + v * kStep);
      if constexpr (op == Op::kAvg && kIsFloat<T>) x = x * factor;
      acc[v] = s == 0 ? x : combine<op, T>(acc[v], x);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kIsFloat<T>) {
      using Bits = std::conditional_t<sizeof(T) == 4, std::int32_t, std::int64_t>;
      const Acc nan = (Acc)(Vector<Bits>{} + static_cast<Bits>(kNanBits<T>));
      acc[v] = acc[v] != acc[v] ? nan : acc[v];
    } else if constexpr (op == Op::kAvg) {
      if (slice.divisor > 1) acc[v] = divide<T>(acc[v], slice.divisor);
    }
  }
  for (int d = slice.dst_user == nullptr ? 0 : -1; d < slice.num_dst; ++d) {
    std::uint8_t* dst = d < 0 ? slice.dst_user : static_cast<std::uint8_t*>(slice.dst_slot[d]);
    if constexpr (kTail) {
      std::uint8_t padded[kStep];
      F::store(padded, acc[0]);
      __builtin_memcpy(dst + at, padded, static_cast<unsigned>(tail_bytes));
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) F::store(dst + at + v * kStep, acc[v]);
    }
  }
}

template <DType dtype, Op op>
void reduce(const SliceJob& job, std::uint64_t begin, std::uint64_t end) {
  using F = Format<dtype>;
  using T = typename F::Element;
  constexpr std::uint64_t kVector = F::kLanes * F::kStorageBytes;
  constexpr int kUnroll = 4;
  if (job.num_src == 0) return;
  const Slice<T> slice{job.src,
                       job.dst_slot,
                       static_cast<std::uint8_t*>(job.dst_user),
                       job.num_src,
                       job.num_dst,
                       job.scale_sources == ScaleSources::kAll,
                       job.scale_sources == ScaleSources::kLocal ? job.local_src : -1,
                       static_cast<T>(job.scale),
                       job.divisor};
  std::uint64_t at = begin * F::kStorageBytes;
  const std::uint64_t stop = end * F::kStorageBytes;
  for (; stop - at >= kUnroll * kVector; at += kUnroll * kVector) {
    reduce_block<dtype, op, kUnroll, false>(slice, at, 0);
  }
  for (; stop - at >= kVector; at += kVector) {
    reduce_block<dtype, op, 1, false>(slice, at, 0);
  }
  if (at < stop) reduce_block<dtype, op, 1, true>(slice, at, static_cast<int>(stop - at));
}

template <int kDType, int... kOps>
constexpr std::array<HostLeaf, kNumOps> make_row(std::integer_sequence<int, kOps...>) {
  return {&reduce<static_cast<DType>(kDType), static_cast<Op>(kOps)>...};
}
template <int... kDTypes>
constexpr HostLeafTable make_table(std::integer_sequence<int, kDTypes...>) {
  return {make_row<kDTypes>(std::make_integer_sequence<int, kNumOps>())...};
}
constexpr HostLeafTable make_table() {
  return make_table(std::make_integer_sequence<int, kNumDTypes>());
}

}  // namespace
}  // namespace unjam
