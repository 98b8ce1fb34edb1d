// The leaves for any processor: on x86-64 its baseline (SSE2), elsewhere what the compiler makes of
// 16-byte vectors.
#include "device/host/leaf_tables.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace unjam {
namespace {

// Loads and stores of narrow elements as one 32-bit lane each.
struct Isa {
  static constexpr int kBytes = 16;
  static constexpr bool kHasHalf = false;
  typedef std::int32_t Ints __attribute__((vector_size(16)));

#if defined(__SSE2__)
  [[gnu::always_inline]] static __m128i load_u8(const void* p) {
    std::int32_t four;
    __builtin_memcpy(&four, p, 4);
    const __m128i zero = _mm_setzero_si128();
    return _mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
  }
  [[gnu::always_inline]] static __m128i load_u16(const void* p) {
    return _mm_unpacklo_epi16(_mm_loadl_epi64(static_cast<const __m128i*>(p)), _mm_setzero_si128());
  }
  [[gnu::always_inline]] static void store_u8(void* p, Ints v) {
    const __m128i shorts = _mm_packs_epi32((__m128i)v, (__m128i)v);
    const std::int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(shorts, shorts));
    __builtin_memcpy(p, &four, 4);
  }
  // SSE2 only packs signed values: lanes are sign-extended from 16 bits first.
  [[gnu::always_inline]] static void store_u16(void* p, Ints v) {
    const __m128i shorts = (__m128i)((v << 16) >> 16);
    _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packs_epi32(shorts, shorts));
  }
#else
  template <class T>
  static Ints load_as(const void* p) {
    T x[4];
    __builtin_memcpy(x, p, sizeof x);
    return Ints{x[0], x[1], x[2], x[3]};
  }
  template <class T>
  static void store_as(void* p, Ints v) {
    const T x[4] = {static_cast<T>(v[0]), static_cast<T>(v[1]), static_cast<T>(v[2]),
                    static_cast<T>(v[3])};
    __builtin_memcpy(p, x, sizeof x);
  }
  static Ints load_u8(const void* p) { return load_as<std::uint8_t>(p); }
  static Ints load_u16(const void* p) { return load_as<std::uint16_t>(p); }
  static void store_u8(void* p, Ints v) { store_as<std::uint8_t>(p, v); }
  static void store_u16(void* p, Ints v) { store_as<std::uint16_t>(p, v); }
#endif
};

}  // namespace
}  // namespace unjam

#include "device/host/leaf_kernels.h"

namespace unjam {

constinit const HostLeafTable kBaseLeaves = make_table();

}  // namespace unjam
