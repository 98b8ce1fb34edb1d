// The leaves for AVX-512 as servers have had it since Skylake.
#include "device/host/leaf_tables.h"

#if UNJAM_X86_LEAVES

// Everything from outside comes before the pragma: what is defined after it may use AVX-512, and
// must not be shared with other files.
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/float_types.h"
#include "base/types.h"
#include "device/leaf.h"

#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")

namespace unjam {
namespace {

struct Isa {
  static constexpr int kBytes = 64;
  static constexpr bool kHasHalf = true;
  // GCC 12 warns of its own unmasked intrinsics' undefined operand; these have none.
  static constexpr __mmask16 kAll = 0xffff;
  typedef std::int32_t Ints __attribute__((vector_size(64)));
  typedef float Floats __attribute__((vector_size(64)));

  [[gnu::always_inline]] static __m512i load_u8(const void* p) {
    return _mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static __m512i load_u16(const void* p) {
    return _mm512_maskz_cvtepu16_epi32(kAll, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  [[gnu::always_inline]] static void store_u8(void* p, Ints v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)v));
  }
  [[gnu::always_inline]] static void store_u16(void* p, Ints v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(kAll, (__m512i)v));
  }
  [[gnu::always_inline]] static Floats decode_half(Ints bits) {
    return (Floats)_mm512_maskz_cvtph_ps(kAll, _mm512_maskz_cvtepi32_epi16(kAll, (__m512i)bits));
  }
  [[gnu::always_inline]] static Floats load_half(const void* p) {
    return (Floats)_mm512_maskz_cvtph_ps(kAll, _mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }
  [[gnu::always_inline]] static void store_half(void* p, Floats v) {
    _mm256_storeu_si256(static_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(kAll, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace unjam

#include "device/host/leaf_kernels.h"

namespace unjam {

constinit const HostLeafTable kAvx512Leaves = make_table();

}  // namespace unjam

#endif  // UNJAM_X86_LEAVES
