// Boxes of n-dimensional arrays in memory of any strides, and how a GPU is told to copy one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

// Where a box begins, and the bytes from one element to the next in each dimension, which may be
// negative or 0.
struct BoxPlace {
  std::uint8_t* data = nullptr;
  DType dtype = DType::kUint8;
  std::vector<std::int64_t> strides;
};

// Strides of an array whose last dimension counts fastest, without gaps.
inline std::vector<std::int64_t> row_major(const std::vector<std::int64_t>& size, DType dtype) {
  std::vector<std::int64_t> strides(size.size());
  std::int64_t bytes = dtype_bytes(dtype);
  for (std::size_t d = size.size(); d-- > 0;) {
    strides[d] = bytes;
    bytes *= size[d];
  }
  return strides;
}

// Whether elements of the box lie one behind the other, row-major.
inline bool is_contiguous(const BoxPlace& place, const std::vector<std::int64_t>& size) {
  const std::vector<std::int64_t> dense = row_major(size, place.dtype);
  for (std::size_t d = 0; d < size.size(); ++d) {
    if (size[d] != 1 && place.strides[d] != dense[d]) return false;
  }
  return true;
}

// A dimension of a box at both places: elements, and bytes from one to the next.
struct BoxDim {
  std::int64_t size = 1, from = 0, to = 0;
};

// Without dimensions of one element; those that lie one behind the other at both places are one.
inline std::vector<BoxDim> merged_dims(const BoxPlace& from, const BoxPlace& to,
                                       const std::vector<std::int64_t>& size) {
  std::vector<BoxDim> dims;
  for (std::size_t d = 0; d < size.size(); ++d) {
    if (size[d] == 1) continue;
    const BoxDim inner{size[d], from.strides[d], to.strides[d]};
    if (!dims.empty() && dims.back().from == inner.from * inner.size &&
        dims.back().to == inner.to * inner.size) {
      dims.back() = {dims.back().size * inner.size, inner.from, inner.to};
    } else {
      dims.push_back(inner);
    }
  }
  return dims;
}

// ---- for GPUs ----

inline constexpr std::uint32_t kRowDims = 4;

// A box as rows of units, as a kernel gets it. A unit is 1 to 16 bytes that are moved as they are,
// aligned at both places; or, where the type changes (unit 0), an element, of any alignment.
struct BoxCopy {
  const std::uint8_t* from = nullptr;
  std::uint8_t* to = nullptr;
  std::uint64_t rows = 1, row = 1;          // units of a row
  std::int64_t from_step = 0, to_step = 0;  // bytes from one unit of a row to the next
  // Of rows: the last dimension counts fastest.
  std::uint64_t size[kRowDims] = {};
  std::int64_t from_stride[kRowDims] = {}, to_stride[kRowDims] = {};
  std::uint8_t dims = 0, unit = 0;
  DType from_dtype = DType::kUint8, to_dtype = DType::kUint8;
};

// Appends the copies that make a box: one, but for boxes of more dimensions than a copy has.
inline void append_copies(const BoxPlace& from, const BoxPlace& to,
                          const std::vector<std::int64_t>& size, std::vector<BoxCopy>* copies) {
  for (const std::int64_t n : size) {
    if (n == 0) return;
  }
  std::vector<BoxDim> dims = merged_dims(from, to, size);
  BoxCopy copy;
  copy.from = from.data;
  copy.to = to.data;
  copy.from_dtype = from.dtype;
  copy.to_dtype = to.dtype;
  const std::int64_t bytes = dtype_bytes(from.dtype);
  BoxDim inner{1, bytes, dtype_bytes(to.dtype)};
  if (from.dtype == to.dtype) {
    // In bytes: what lies one behind the other, else one element.
    if (!dims.empty() && dims.back().from == bytes && dims.back().to == bytes) {
      inner.size = dims.back().size;
      dims.pop_back();
    }
    const std::int64_t row_bytes = inner.size * bytes;
    auto all = reinterpret_cast<std::uintptr_t>(from.data) |
               reinterpret_cast<std::uintptr_t>(to.data) | static_cast<std::uintptr_t>(row_bytes);
    for (const BoxDim& dim : dims) {
      all |= static_cast<std::uintptr_t>(dim.from) | static_cast<std::uintptr_t>(dim.to);
    }
    std::int64_t unit = 16;
    while ((all & static_cast<std::uintptr_t>(unit - 1)) != 0) unit /= 2;
    copy.unit = static_cast<std::uint8_t>(unit);
    inner = {row_bytes / unit, unit, unit};
    // Rows of one unit: their dimension is the row.
    if (inner.size == 1 && !dims.empty()) {
      inner = dims.back();
      dims.pop_back();
    }
  } else if (!dims.empty()) {
    inner = dims.back();
    dims.pop_back();
  }
  copy.row = static_cast<std::uint64_t>(inner.size);
  copy.from_step = inner.from;
  copy.to_step = inner.to;
  const std::size_t apart = dims.size() > kRowDims ? dims.size() - kRowDims : 0;
  copy.dims = static_cast<std::uint8_t>(dims.size() - apart);
  for (std::size_t d = apart; d < dims.size(); ++d) {
    copy.size[d - apart] = static_cast<std::uint64_t>(dims[d].size);
    copy.from_stride[d - apart] = dims[d].from;
    copy.to_stride[d - apart] = dims[d].to;
    copy.rows *= static_cast<std::uint64_t>(dims[d].size);
  }
  std::vector<std::int64_t> at(apart, 0);
  for (;;) {
    copies->push_back(copy);
    std::size_t d = apart;
    for (; d > 0; --d) {
      const BoxDim& dim = dims[d - 1];
      copy.from += dim.from;
      copy.to += dim.to;
      if (++at[d - 1] < dim.size) break;
      at[d - 1] = 0;
      copy.from -= dim.from * dim.size;
      copy.to -= dim.to * dim.size;
    }
    if (d == 0) return;
  }
}

}  // namespace unjam
