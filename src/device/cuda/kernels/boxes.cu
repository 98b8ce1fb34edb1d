// Copies boxes of tensors within what the device reaches, and casts their elements: a warp a piece
// of a row, or of several short ones. It waits for nothing.
#include "base/float_types.h"
#include "device/cast.h"
#include "device/cuda/kernels/boxes.h"

namespace unjam {
namespace {

constexpr std::uint32_t kWarp = 32, kTurns = kPieceUnits / kWarp;

struct Ends {
  const unsigned char* from;
  unsigned char* to;
};

// Divisions of 64 bits take several times as long.
__device__ __forceinline__ std::uint64_t divide(std::uint64_t a, std::uint64_t b,
                                                std::uint64_t& rest) {
  if ((a | b) >> 32 == 0) {
    const auto x = static_cast<std::uint32_t>(a), y = static_cast<std::uint32_t>(b);
    rest = x % y;
    return x / y;
  }
  rest = a % b;
  return a / b;
}

__device__ __forceinline__ Ends row_at(const BoxCopy& box, std::uint64_t row) {
  Ends at{box.from, box.to};
  for (std::uint32_t d = box.dims; d > 0; --d) {
    std::uint64_t index = row;
    if (d > 1) row = divide(row, box.size[d - 1], index);
    at.from += static_cast<std::int64_t>(index) * box.from_stride[d - 1];
    at.to += static_cast<std::int64_t>(index) * box.to_stride[d - 1];
  }
  return at;
}

// Where this lane's units of a piece are, one a turn; `move` gets those that are there. All loads
// of a piece are under way together: move(places, how many).
template <class Move>
__device__ __forceinline__ void each_piece(const BoxCopy& box, std::uint64_t piece,
                                           std::uint32_t lane, Move move) {
  Ends places[kTurns];
  std::uint32_t n = 0;
  if (box.row >= kShortRow) {
    std::uint64_t begin = 0;
    const std::uint64_t a_row = (box.row + kPieceUnits - 1) / kPieceUnits;
    const Ends row = row_at(box, divide(piece, a_row, begin));
    begin = begin * kPieceUnits + lane;
#pragma unroll
    for (std::uint32_t t = 0; t < kTurns; ++t) {
      const std::uint64_t i = begin + t * kWarp;
      if (i >= box.row) break;
      const auto step = static_cast<std::int64_t>(i);
      places[t] = {row.from + step * box.from_step, row.to + step * box.to_step};
      n = t + 1;
    }
  } else {
#pragma unroll
    for (std::uint32_t t = 0; t < kTurns; ++t) {
      const std::uint64_t i = piece * kPieceUnits + t * kWarp + lane;
      if (i >= box.rows * box.row) break;
      std::uint64_t unit = 0;
      const Ends row = row_at(box, divide(i, box.row, unit));
      const auto step = static_cast<std::int64_t>(unit);
      places[t] = {row.from + step * box.from_step, row.to + step * box.to_step};
      n = t + 1;
    }
  }
  move(places, n);
}

template <class Unit>
__device__ __forceinline__ void move_units(const Ends (&places)[kTurns], std::uint32_t n) {
  Unit units[kTurns];
#pragma unroll
  for (std::uint32_t t = 0; t < kTurns; ++t) {
    if (t < n) units[t] = *reinterpret_cast<const Unit*>(places[t].from);
  }
#pragma unroll
  for (std::uint32_t t = 0; t < kTurns; ++t) {
    if (t < n) *reinterpret_cast<Unit*>(places[t].to) = units[t];
  }
}

// A user's views may have elements at any address.
template <class T>
__device__ __forceinline__ T load(const unsigned char* at) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) == 0) {
    return *reinterpret_cast<const T*>(at);
  }
  T x;
  for (std::uint32_t i = 0; i < sizeof(T); ++i) reinterpret_cast<unsigned char*>(&x)[i] = at[i];
  return x;
}
template <class T>
__device__ __forceinline__ void store(unsigned char* at, T x) {
  if (reinterpret_cast<std::uintptr_t>(at) % sizeof(T) == 0) {
    *reinterpret_cast<T*>(at) = x;
    return;
  }
  for (std::uint32_t i = 0; i < sizeof(T); ++i) at[i] = reinterpret_cast<unsigned char*>(&x)[i];
}

template <class To, class From>
__device__ __forceinline__ void cast_units(const Ends (&places)[kTurns], std::uint32_t n) {
  From values[kTurns];
#pragma unroll
  for (std::uint32_t t = 0; t < kTurns; ++t) {
    if (t < n) values[t] = load<From>(places[t].from);
  }
#pragma unroll
  for (std::uint32_t t = 0; t < kTurns; ++t) {
    if (t < n) store<To>(places[t].to, convert<To>(values[t]));
  }
}

// What weights are mostly cast between has loops of its own; all other types meet in one that
// looks at each element.
template <class F>
__device__ __forceinline__ auto with_value(DType dtype, const unsigned char* at, F f) {
  switch (dtype) {
    case DType::kInt8:
      return f(std::int64_t{load<std::int8_t>(at)});
    case DType::kUint8:
      return f(std::int64_t{load<std::uint8_t>(at)});
    case DType::kInt32:
      return f(std::int64_t{load<std::int32_t>(at)});
    case DType::kUint32:
      return f(std::int64_t{load<std::uint32_t>(at)});
    case DType::kInt64:
      return f(load<std::int64_t>(at));
    case DType::kUint64:
      return f(load<std::uint64_t>(at));
    case DType::kFloat16:
      return f(to_float(load<Float16>(at)));
    case DType::kBfloat16:
      return f(to_float(load<Bfloat16>(at)));
    case DType::kFloat32:
      return f(load<float>(at));
    case DType::kFloat64:
      return f(load<double>(at));
    case DType::kFloat8E4M3:
      return f(to_float(load<Float8E4M3>(at)));
    case DType::kFloat8E5M2:
      return f(to_float(load<Float8E5M2>(at)));
  }
}
template <class From>
__device__ __forceinline__ void store_as(DType dtype, unsigned char* at, From x) {
  switch (dtype) {
    case DType::kInt8:
      return store(at, convert<std::int8_t>(x));
    case DType::kUint8:
      return store(at, convert<std::uint8_t>(x));
    case DType::kInt32:
      return store(at, convert<std::int32_t>(x));
    case DType::kUint32:
      return store(at, convert<std::uint32_t>(x));
    case DType::kInt64:
      return store(at, convert<std::int64_t>(x));
    case DType::kUint64:
      return store(at, convert<std::uint64_t>(x));
    case DType::kFloat16:
      return store(at, convert<Float16>(x));
    case DType::kBfloat16:
      return store(at, convert<Bfloat16>(x));
    case DType::kFloat32:
      return store(at, convert<float>(x));
    case DType::kFloat64:
      return store(at, convert<double>(x));
    case DType::kFloat8E4M3:
      return store(at, convert<Float8E4M3>(x));
    case DType::kFloat8E5M2:
      return store(at, convert<Float8E5M2>(x));
  }
}

__device__ __forceinline__ void cast_any(const BoxCopy& box, const Ends (&places)[kTurns],
                                         std::uint32_t n) {
#pragma unroll 1
  for (std::uint32_t t = 0; t < n; ++t) {
    with_value(box.from_dtype, places[t].from,
               [&](auto x) { store_as(box.to_dtype, places[t].to, x); });
  }
}

__device__ __forceinline__ void move_piece(const BoxCopy& box, std::uint64_t piece,
                                           std::uint32_t lane) {
  each_piece(box, piece, lane, [&](const Ends(&places)[kTurns], std::uint32_t n) {
    const DType from = box.from_dtype, to = box.to_dtype;
    if (box.unit == 16) {
      move_units<uint4>(places, n);
    } else if (box.unit == 8) {
      move_units<std::uint64_t>(places, n);
    } else if (box.unit == 4) {
      move_units<std::uint32_t>(places, n);
    } else if (box.unit == 2) {
      move_units<std::uint16_t>(places, n);
    } else if (box.unit == 1) {
      move_units<std::uint8_t>(places, n);
    } else if (from == DType::kFloat32 && to == DType::kBfloat16) {
      cast_units<Bfloat16, float>(places, n);
    } else if (from == DType::kBfloat16 && to == DType::kFloat32) {
      cast_units<float, Bfloat16>(places, n);
    } else {
      cast_any(box, places, n);
    }
  });
}

}  // namespace

__global__ void __launch_bounds__(256) unjam_boxes_kernel(const __grid_constant__ BoxBatch batch) {
  const std::uint64_t warps = std::uint64_t{gridDim.x} * (blockDim.x / kWarp);
  const std::uint32_t lane = threadIdx.x % kWarp;
  std::uint64_t piece = blockIdx.x * std::uint64_t{blockDim.x / kWarp} + threadIdx.x / kWarp;
  std::uint64_t begin = 0;
  for (std::uint32_t b = 0; b < batch.count; ++b) {
    const std::uint64_t end = batch.end[b];
    for (; piece < end; piece += warps) move_piece(batch.boxes[b], piece - begin, lane);
    begin = end;
  }
}

const void* boxes_kernel() { return reinterpret_cast<const void*>(&unjam_boxes_kernel); }

}  // namespace unjam
