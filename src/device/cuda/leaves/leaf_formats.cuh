// What the CUDA leaves know of each dtype: how 4-byte words decode into accumulators and back, and
// how two accumulators combine. The bits are those of the host leaves: nothing is contracted into
// fused operations, and every NaN is stored as the type's one NaN.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "base/float_types.h"
#include "base/types.h"

namespace unjam::cuda_leaves {

// Data as it lies in memory.
template <int kWords>
struct Raw {
  std::uint32_t w[kWords];
};

// Integer division towards zero.
template <class T>
__device__ __forceinline__ T divided(T x, std::uint32_t divisor) {
  if constexpr (sizeof(T) == 8) {
    return x / static_cast<T>(divisor);
  } else if constexpr (sizeof(T) == 4) {
    if constexpr (static_cast<T>(-1) > 0) return x / divisor;
    // Signed values need more room than 32 bits for the divisor; magnitudes do not.
    const bool negative = static_cast<std::int32_t>(x) < 0;
    const std::uint32_t bits = static_cast<std::uint32_t>(x);
    const std::uint32_t quotient = (negative ? 0u - bits : bits) / divisor;
    return static_cast<T>(negative ? 0u - quotient : quotient);
  } else {
    const std::int32_t wide = x;
    const std::int32_t by = divisor > 255 ? 256 : static_cast<std::int32_t>(divisor);
    return static_cast<T>(wide / by);
  }
}

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float multiply(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double multiply(double a, double b) { return __dmul_rn(a, b); }

// As on the host: of two equal values (zeros of either sign) the first stays, NaNs propagate.
template <Op op, class T>
__device__ __forceinline__ T combine_floats(T a, T b) {
  if constexpr (op == Op::kMin) return (b < a || b != b) ? b : a;
  if constexpr (op == Op::kMax) return (a < b || b != b) ? b : a;
  if constexpr (op == Op::kProd) return multiply(a, b);
  return add(a, b);
}

__device__ __forceinline__ float canonical(float x) {
  return x != x ? __uint_as_float(static_cast<unsigned>(kNanBits<float>)) : x;
}
__device__ __forceinline__ double canonical(double x) {
  return x != x ? __longlong_as_double(static_cast<long long>(kNanBits<double>)) : x;
}

// Every format has: Acc, kIsFloat, count<kWords>: accumulators for so many words, decode, encode
// (which rounds and makes NaNs canonical), combine, divide.

// 32- and 64-bit integers. U is the unsigned type whose arithmetic wraps around.
template <class T, class U>
struct IntFormat {
  using Acc = T;
  static constexpr bool kIsFloat = false;
  static constexpr int kBytes = sizeof(T);
  template <int kWords>
  static constexpr int kCount = kWords * 4 / kBytes;

  template <int kWords>
  static __device__ __forceinline__ void decode(const Raw<kWords>& raw, Acc* x) {
#pragma unroll
    for (int i = 0; i < kCount<kWords>; ++i) {
      if constexpr (kBytes == 4) {
        x[i] = static_cast<T>(raw.w[i]);
      } else {
        x[i] = static_cast<T>(raw.w[2 * i] | static_cast<std::uint64_t>(raw.w[2 * i + 1]) << 32);
      }
    }
  }
  template <int kWords>
  static __device__ __forceinline__ void encode(const Acc* x, Raw<kWords>& raw) {
#pragma unroll
    for (int i = 0; i < kCount<kWords>; ++i) {
      if constexpr (kBytes == 4) {
        raw.w[i] = static_cast<std::uint32_t>(x[i]);
      } else {
        raw.w[2 * i] = static_cast<std::uint32_t>(x[i]);
        raw.w[2 * i + 1] = static_cast<std::uint32_t>(static_cast<std::uint64_t>(x[i]) >> 32);
      }
    }
  }
  template <Op op>
  static __device__ __forceinline__ Acc combine(Acc a, Acc b) {
    if constexpr (op == Op::kMin) return b < a ? b : a;
    if constexpr (op == Op::kMax) return a < b ? b : a;
    if constexpr (op == Op::kProd) return static_cast<T>(static_cast<U>(a) * static_cast<U>(b));
    return static_cast<T>(static_cast<U>(a) + static_cast<U>(b));
  }
  static __device__ __forceinline__ Acc divide(Acc x, std::uint32_t divisor) {
    return divided(x, divisor);
  }
};

// 8-bit integers stay packed, four to a word.
template <class T>
struct ByteFormat {
  using Acc = std::uint32_t;
  static constexpr bool kIsFloat = false;
  static constexpr bool kSigned = static_cast<T>(-1) < 0;
  static constexpr int kBytes = 1;
  template <int kWords>
  static constexpr int kCount = kWords;

  template <int kWords>
  static __device__ __forceinline__ void decode(const Raw<kWords>& raw, Acc* x) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[i] = raw.w[i];
  }
  template <int kWords>
  static __device__ __forceinline__ void encode(const Acc* x, Raw<kWords>& raw) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.w[i] = x[i];
  }
  template <Op op>
  static __device__ __forceinline__ Acc combine(Acc a, Acc b) {
    if constexpr (op == Op::kMin) return kSigned ? __vmins4(a, b) : __vminu4(a, b);
    if constexpr (op == Op::kMax) return kSigned ? __vmaxs4(a, b) : __vmaxu4(a, b);
    if constexpr (op == Op::kProd) {
      Acc product = 0;
#pragma unroll
      for (int shift = 0; shift < 32; shift += 8) {
        product |= ((a >> shift) * (b >> shift) & 0xff) << shift;
      }
      return product;
    }
    return __vadd4(a, b);
  }
  static __device__ __forceinline__ Acc divide(Acc x, std::uint32_t divisor) {
    Acc quotient = 0;
#pragma unroll
    for (int shift = 0; shift < 32; shift += 8) {
      const T q = divided(static_cast<T>(x >> shift), divisor);
      quotient |= static_cast<Acc>(static_cast<std::uint8_t>(q)) << shift;
    }
    return quotient;
  }
};

struct Float32Format {
  using Acc = float;
  static constexpr bool kIsFloat = true;
  static constexpr int kBytes = 4;
  template <int kWords>
  static constexpr int kCount = kWords;

  template <int kWords>
  static __device__ __forceinline__ void decode(const Raw<kWords>& raw, Acc* x) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) x[i] = __uint_as_float(raw.w[i]);
  }
  template <int kWords>
  static __device__ __forceinline__ void encode(const Acc* x, Raw<kWords>& raw) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) raw.w[i] = __float_as_uint(canonical(x[i]));
  }
  template <Op op>
  static __device__ __forceinline__ Acc combine(Acc a, Acc b) {
    return combine_floats<op>(a, b);
  }
};

struct Float64Format {
  using Acc = double;
  static constexpr bool kIsFloat = true;
  static constexpr int kBytes = 8;
  template <int kWords>
  static constexpr int kCount = kWords / 2;

  template <int kWords>
  static __device__ __forceinline__ void decode(const Raw<kWords>& raw, Acc* x) {
#pragma unroll
    for (int i = 0; i < kCount<kWords>; ++i) {
      x[i] = __hiloint2double(static_cast<int>(raw.w[2 * i + 1]), static_cast<int>(raw.w[2 * i]));
    }
  }
  template <int kWords>
  static __device__ __forceinline__ void encode(const Acc* x, Raw<kWords>& raw) {
#pragma unroll
    for (int i = 0; i < kCount<kWords>; ++i) {
      const double y = canonical(x[i]);
      raw.w[2 * i] = static_cast<std::uint32_t>(__double2loint(y));
      raw.w[2 * i + 1] = static_cast<std::uint32_t>(__double2hiint(y));
    }
  }
  template <Op op>
  static __device__ __forceinline__ Acc combine(Acc a, Acc b) {
    return combine_floats<op>(a, b);
  }
};

// Two narrow floats at a time, as the conversion instructions take them: the first in the low half.

__device__ __forceinline__ float2 decode_pair(Float16, std::uint32_t bits) {
  return make_float2(__half2float(__ushort_as_half(static_cast<unsigned short>(bits))),
                     __half2float(__ushort_as_half(static_cast<unsigned short>(bits >> 16))));
}
__device__ __forceinline__ std::uint32_t encode_pair(Float16, float low, float high) {
  return __half_as_ushort(__float2half_rn(low)) |
         static_cast<std::uint32_t>(__half_as_ushort(__float2half_rn(high))) << 16;
}

__device__ __forceinline__ float2 decode_pair(Bfloat16, std::uint32_t bits) {
  return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000));
}
__device__ __forceinline__ std::uint32_t encode_pair(Bfloat16, float low, float high) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(low)) |
         static_cast<std::uint32_t>(__bfloat16_as_ushort(__float2bfloat16_rn(high))) << 16;
}

__device__ __forceinline__ constexpr __nv_fp8_interpretation_t interpretation(Float8E4M3) {
  return __NV_E4M3;
}
__device__ __forceinline__ constexpr __nv_fp8_interpretation_t interpretation(Float8E5M2) {
  return __NV_E5M2;
}

// fp8. The conversions are instructions from compute capability 8.9 on; before, the library's own
// integer arithmetic is shorter than CUDA's emulation (which goes through double). The bits agree.
template <class T>
__device__ __forceinline__ float2 decode_pair(T, std::uint32_t bits) {
#if __CUDA_ARCH__ >= 890
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(bits), interpretation(T{}));
  return make_float2(__half2float(__ushort_as_half(pair.x)),
                     __half2float(__ushort_as_half(pair.y)));
#else
  return make_float2(to_float(T{static_cast<std::uint8_t>(bits)}),
                     to_float(T{static_cast<std::uint8_t>(bits >> 8)}));
#endif
}
template <class T>
__device__ __forceinline__ std::uint32_t encode_pair(T, float low, float high) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2(make_float2(low, high), __NV_SATFINITE, interpretation(T{}));
#else
  return from_float<T>(low).bits | static_cast<std::uint32_t>(from_float<T>(high).bits) << 8;
#endif
}

template <class T>
struct NarrowFormat {
  using Acc = float;
  static constexpr bool kIsFloat = true;
  static constexpr int kBytes = sizeof(T);
  template <int kWords>
  static constexpr int kCount = kWords * 4 / kBytes;

  template <int kWords>
  static __device__ __forceinline__ void decode(const Raw<kWords>& raw, Acc* x) {
#pragma unroll
    for (int i = 0; i < kCount<kWords>; i += 2) {
      const float2 pair = decode_pair(T{}, raw.w[i * kBytes / 4] >> (8 * kBytes * i % 32));
      x[i] = pair.x;
      x[i + 1] = pair.y;
    }
  }
  // The conversions make NaNs canonical.
  template <int kWords>
  static __device__ __forceinline__ void encode(const Acc* x, Raw<kWords>& raw) {
#pragma unroll
    for (int w = 0; w < kWords; ++w) raw.w[w] = 0;
#pragma unroll
    for (int i = 0; i < kCount<kWords>; i += 2) {
      raw.w[i * kBytes / 4] |= encode_pair(T{}, x[i], x[i + 1]) << (8 * kBytes * i % 32);
    }
  }
  template <Op op>
  static __device__ __forceinline__ Acc combine(Acc a, Acc b) {
    return combine_floats<op>(a, b);
  }
};

template <DType>
struct Format;
template <>
struct Format<DType::kInt8> : ByteFormat<std::int8_t> {};
template <>
struct Format<DType::kUint8> : ByteFormat<std::uint8_t> {};
template <>
struct Format<DType::kInt32> : IntFormat<std::int32_t, std::uint32_t> {};
template <>
struct Format<DType::kUint32> : IntFormat<std::uint32_t, std::uint32_t> {};
template <>
struct Format<DType::kInt64> : IntFormat<std::int64_t, std::uint64_t> {};
template <>
struct Format<DType::kUint64> : IntFormat<std::uint64_t, std::uint64_t> {};
template <>
struct Format<DType::kFloat16> : NarrowFormat<Float16> {};
template <>
struct Format<DType::kBfloat16> : NarrowFormat<Bfloat16> {};
template <>
struct Format<DType::kFloat32> : Float32Format {};
template <>
struct Format<DType::kFloat64> : Float64Format {};
template <>
struct Format<DType::kFloat8E4M3> : NarrowFormat<Float8E4M3> {};
template <>
struct Format<DType::kFloat8E5M2> : NarrowFormat<Float8E5M2> {};

// A dtype as a type, so that code can be made for it.
template <DType dtype>
struct DTypeConstant {
  static constexpr DType value = dtype;
};

// visit(DTypeConstant<dtype>{}): the one place that turns a dtype into code of its own. The branch
// is uniform: all threads of a block have the same.
template <class Visit>
__device__ __forceinline__ void with_dtype(DType dtype, const Visit& visit) {
  switch (dtype) {
    case DType::kInt8:
      return visit(DTypeConstant<DType::kInt8>{});
    case DType::kUint8:
      return visit(DTypeConstant<DType::kUint8>{});
    case DType::kInt32:
      return visit(DTypeConstant<DType::kInt32>{});
    case DType::kUint32:
      return visit(DTypeConstant<DType::kUint32>{});
    case DType::kInt64:
      return visit(DTypeConstant<DType::kInt64>{});
    case DType::kUint64:
      return visit(DTypeConstant<DType::kUint64>{});
    case DType::kFloat16:
      return visit(DTypeConstant<DType::kFloat16>{});
    case DType::kBfloat16:
      return visit(DTypeConstant<DType::kBfloat16>{});
    case DType::kFloat32:
      return visit(DTypeConstant<DType::kFloat32>{});
    case DType::kFloat64:
      return visit(DTypeConstant<DType::kFloat64>{});
    case DType::kFloat8E4M3:
      return visit(DTypeConstant<DType::kFloat8E4M3>{});
    case DType::kFloat8E5M2:
      return visit(DTypeConstant<DType::kFloat8E5M2>{});
  }
}

}  // namespace unjam::cuda_leaves
