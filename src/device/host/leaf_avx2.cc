// The leaves for AVX2 with F16C.
#include "device/host/leaf_tables.h"

#if UNJAM_X86_LEAVES

// Everything from outside comes before the pragma: what is defined after it may use AVX2, and must
// not be shared with other files.
#include <immintrin.h>

#include <array>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "base/float_types.h"
#include "base/types.h"
#include "device/leaf.h"

#pragma GCC target("avx2,f16c")

namespace unjam {
namespace {

struct Isa {
  static constexpr int kBytes = 32;
  static constexpr bool kHasHalf = true;
  typedef std::int32_t Ints __attribute__((vector_size(32)));
  typedef float Floats __attribute__((vector_size(32)));

  [[gnu::always_inline]] static __m256i load_u8(const void* p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static __m256i load_u16(const void* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static __m128i shorts(Ints v) {
    const __m256i x = (__m256i)v;
    return _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  }
  [[gnu::always_inline]] static void store_u8(void* p, Ints v) {
    const __m128i x = shorts(v);
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(x, x));
  }
  [[gnu::always_inline]] static void store_u16(void* p, Ints v) {
    _mm_storeu_si128(static_cast<__m128i*>(p), shorts(v));
  }
  [[gnu::always_inline]] static Floats decode_half(Ints bits) {
    return (Floats)_mm256_cvtph_ps(shorts(bits));
  }
  [[gnu::always_inline]] static Floats load_half(const void* p) {
    return (Floats)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  [[gnu::always_inline]] static void store_half(void* p, Floats v) {
    _mm_storeu_si128(static_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
};

}  // namespace
}  // namespace unjam

#include "device/host/leaf_kernels.h"

namespace unjam {

constinit const HostLeafTable kAvx2Leaves = make_table();

}  // namespace unjam

#endif  // UNJAM_X86_LEAVES
