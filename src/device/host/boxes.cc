#include "device/host/boxes.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/float_types.h"
#include "device/cast.h"

namespace unjam {
namespace {

// In the order of DType.
template <class... Ts>
struct List {};
using Elements = List<std::int8_t, std::uint8_t, std::int32_t, std::uint32_t, std::int64_t,
                      std::uint64_t, Float16, Bfloat16, float, double, Float8E4M3, Float8E5M2>;

using Row = void (*)(const std::uint8_t* from, std::int64_t from_stride, std::uint8_t* to,
                     std::int64_t to_stride, std::int64_t n);

// Through memcpy: views of a user's may have elements at any address.
template <class From, class To>
void cast_row(const std::uint8_t* from, std::int64_t from_stride, std::uint8_t* to,
              std::int64_t to_stride, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    From x;
    std::memcpy(&x, from + i * from_stride, sizeof(x));
    const To y = convert<To>(x);
    std::memcpy(to + i * to_stride, &y, sizeof(y));
  }
}

template <std::size_t kBytes>
void copy_row(const std::uint8_t* from, std::int64_t from_stride, std::uint8_t* to,
              std::int64_t to_stride, std::int64_t n) {
  if (from_stride == kBytes && to_stride == kBytes) {
    std::memcpy(to, from, static_cast<std::size_t>(n) * kBytes);
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
  }
}

using Rows = std::array<Row, kNumDTypes>;

template <class From, class... Ts>
constexpr Rows rows_from(List<Ts...>) {
  return {&cast_row<From, Ts>...};
}
template <class... Ts>
constexpr std::array<Rows, kNumDTypes> all_rows(List<Ts...> list) {
  return {rows_from<Ts>(list)...};
}
constexpr std::array<Rows, kNumDTypes> kCasts = all_rows(Elements{});

Row row_of(DType from, DType to) {
  if (from != to) return kCasts[static_cast<std::size_t>(from)][static_cast<std::size_t>(to)];
  switch (dtype_bytes(from)) {
    case 1:
      return copy_row<1>;
    case 2:
      return copy_row<2>;
    case 4:
      return copy_row<4>;
    default:
      return copy_row<8>;
  }
}

}  // namespace

void copy_box(const BoxPlace& from, const BoxPlace& to, const std::vector<std::int64_t>& size) {
  for (const std::int64_t n : size) {
    if (n == 0) return;
  }
  std::vector<BoxDim> dims = merged_dims(from, to, size);
  const Row row = row_of(from.dtype, to.dtype);
  BoxDim inner{1, dtype_bytes(from.dtype), dtype_bytes(to.dtype)};
  if (!dims.empty()) {
    inner = dims.back();
    dims.pop_back();
  }
  std::vector<std::int64_t> at(dims.size(), 0);
  const std::uint8_t* in = from.data;
  std::uint8_t* out = to.data;
  for (;;) {
    row(in, inner.from, out, inner.to, inner.size);
    std::size_t d = dims.size();
    for (; d > 0; --d) {
      const BoxDim& dim = dims[d - 1];
      in += dim.from;
      out += dim.to;
      if (++at[d - 1] < dim.size) break;
      at[d - 1] = 0;
      in -= dim.from * dim.size;
      out -= dim.to * dim.size;
    }
    if (d == 0) return;
  }
}

}  // namespace unjam
