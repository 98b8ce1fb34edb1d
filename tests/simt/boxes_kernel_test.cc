// The kernel that copies boxes, the very source, on the CPU: every element of random boxes, of any
// strides, alignment and types, and none beside them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#define unjam unjam_on_cpu
#include "tests/simt/cuda_words.h"
//
#include "device/cuda/kernels/boxes.cu"
#include "tests/simt/machine.h"

namespace unjam {
namespace {

std::uint64_t base_seed() {
  const char* const text = std::getenv("UNJAM_TEST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

void run_kernel(const std::vector<BoxCopy>& copies, std::uint64_t seed, std::uint32_t blocks) {
  unjam_simt::Machine machine(seed);
  const unjam_simt::Launch* before = nullptr;
  std::vector<BoxBatch> batches;
  for (const BoxCopy& copy : copies) {
    if (batches.empty() || batches.back().count == kBoxesABatch) batches.emplace_back();
    add_box(copy, batches.back());
  }
  for (const BoxBatch& batch : batches) {
    before = machine.launch(blocks, 64, [&batch] { unjam_boxes_kernel(batch); }, before);
  }
  ASSERT_EQ(machine.run(), "");
}

// A place of a box in memory of its own, with room around it.
struct Memory {
  std::vector<std::uint8_t> bytes;
  BoxPlace place;
  std::uint64_t end = 0;

  std::uint8_t* at(const std::vector<std::int64_t>& index) {
    std::uint8_t* p = place.data;
    for (std::size_t d = 0; d < index.size(); ++d) p += index[d] * place.strides[d];
    return p;
  }
};

class Boxes {
 public:
  explicit Boxes(std::uint64_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  std::vector<std::int64_t> size() {
    std::vector<std::int64_t> list(static_cast<std::size_t>(between(0, 7)));
    const std::int64_t most = list.size() > 4 ? 3 : list.size() > 2 ? 7 : 90;
    for (std::int64_t& n : list) n = between(1, most);
    return list;
  }
  // Dimensions in any order in memory, gaps, either sign; or as they are, or a row-major part.
  Memory memory(const std::vector<std::int64_t>& size, DType dtype) {
    const std::int64_t element = dtype_bytes(dtype);
    std::vector<std::size_t> order(size.size());
    for (std::size_t d = 0; d < order.size(); ++d) order[d] = d;
    const std::int64_t kind = between(0, 3);
    if (kind == 3) std::shuffle(order.begin(), order.end(), random_);
    Memory m;
    m.place.dtype = dtype;
    m.place.strides.resize(size.size());
    std::int64_t bytes = element, back = 0;
    for (std::size_t i = order.size(); i-- > 0;) {
      const std::size_t d = order[i];
      if (kind > 0 && between(0, 2) == 0) bytes += element * between(0, 3);
      if (kind == 3 && between(0, 5) == 0) bytes += between(0, 3);  // of any alignment
      const bool backwards = kind == 3 && between(0, 4) == 0;
      m.place.strides[d] = backwards ? -bytes : bytes;
      if (backwards) back += (size[d] - 1) * bytes;
      bytes *= size[d];
    }
    const std::int64_t shift = between(0, 1) == 0 ? 16 : element * between(1, 16);
    m.bytes.resize(static_cast<std::size_t>(bytes + shift + 64));
    auto base = reinterpret_cast<std::uintptr_t>(m.bytes.data());
    m.place.data = m.bytes.data() + (16 - base % 16) % 16 + shift + back;
    return m;
  }

 private:
  std::mt19937_64 random_;
};

template <class F>
void each_index(const std::vector<std::int64_t>& size, F f) {
  std::vector<std::int64_t> index(size.size(), 0);
  for (;;) {
    f(index);
    std::size_t d = size.size();
    for (; d > 0; --d) {
      if (++index[d - 1] < size[d - 1]) break;
      index[d - 1] = 0;
    }
    if (d == 0) return;
  }
}

template <class F>
void with_type(DType dtype, F f) {
  switch (dtype) {
    case DType::kInt8:
      return f(std::int8_t{});
    case DType::kUint8:
      return f(std::uint8_t{});
    case DType::kInt32:
      return f(std::int32_t{});
    case DType::kUint32:
      return f(std::uint32_t{});
    case DType::kInt64:
      return f(std::int64_t{});
    case DType::kUint64:
      return f(std::uint64_t{});
    case DType::kFloat16:
      return f(Float16{});
    case DType::kBfloat16:
      return f(Bfloat16{});
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat8E4M3:
      return f(Float8E4M3{});
    case DType::kFloat8E5M2:
      return f(Float8E5M2{});
  }
}

// What the element becomes, by the types themselves.
void cast(const std::uint8_t* from, DType from_type, std::uint8_t* to, DType to_type) {
  with_type(from_type, [&](auto a) {
    std::memcpy(&a, from, sizeof(a));
    with_type(to_type, [&](auto b) {
      b = convert<decltype(b)>(a);
      std::memcpy(to, &b, sizeof(b));
    });
  });
}

TEST(BoxesKernel, RandomBoxesAreCopiedAndNothingElse) {
  const std::uint64_t seed = base_seed();
  std::uint64_t units[17] = {}, split = 0;
  for (std::uint64_t i = 0; i < 1000; ++i) {
    Boxes random(seed * 1000 + i);
    const std::vector<std::int64_t> size = random.size();
    const auto from_type = static_cast<DType>(random.between(0, kNumDTypes - 1));
    const auto to_type = random.between(0, 1) == 0
                             ? from_type
                             : static_cast<DType>(random.between(0, kNumDTypes - 1));
    Memory from = random.memory(size, from_type), to = random.memory(size, to_type);
    for (std::uint8_t& byte : from.bytes) byte = static_cast<std::uint8_t>(random.between(0, 255));
    std::fill(to.bytes.begin(), to.bytes.end(), 0xa5);
    Memory expected = to;
    expected.place.data = expected.bytes.data() + (to.place.data - to.bytes.data());
    each_index(size, [&](const std::vector<std::int64_t>& index) {
      if (from_type == to_type) {
        std::memcpy(expected.at(index), from.at(index), dtype_bytes(to_type));
      } else {
        cast(from.at(index), from_type, expected.at(index), to_type);
      }
    });
    std::vector<BoxCopy> copies;
    append_copies(from.place, to.place, size, &copies);
    split += copies.size() > 1 ? 1 : 0;
    ++units[copies.front().unit];
    run_kernel(copies, seed + i, static_cast<std::uint32_t>(random.between(1, 3)));
    ASSERT_EQ(to.bytes, expected.bytes) << "case " << i << ", seed " << seed << ", from "
                                        << to_string(from_type) << " to " << to_string(to_type);
  }
  // All kinds of copies were among them.
  for (const int unit : {0, 1, 2, 4, 8, 16}) EXPECT_GT(units[unit], 0u) << unit;
  EXPECT_GT(split, 0u);
}

// Rows of a whole piece, one more and one less; and many boxes, of which one launch takes some.
TEST(BoxesKernel, EdgesOfPiecesAndOfBatches) {
  std::vector<std::vector<std::uint8_t>> from, to;
  std::vector<BoxCopy> copies;
  for (const std::int64_t units : {1, 31, 32, 33, 255, 256, 257, 513}) {
    for (const std::int64_t rows : {1, 2, 9}) {
      from.emplace_back(static_cast<std::size_t>(units * rows * 5));
      to.emplace_back(static_cast<std::size_t>(units * rows * 7), 0);
      for (std::size_t i = 0; i < from.back().size(); ++i) {
        from.back()[i] = static_cast<std::uint8_t>(1 + i % 251);
      }
      append_copies({from.back().data(), DType::kUint8, {units * 5, 1}},
                    {to.back().data(), DType::kUint8, {units * 7, 1}}, {rows, units}, &copies);
      ASSERT_GE(copies.size(), 1u);
    }
  }
  append_copies({nullptr, DType::kUint8, {1, 1}}, {nullptr, DType::kUint8, {1, 1}}, {3, 0},
                &copies);
  const std::size_t boxes = copies.size();
  ASSERT_EQ(boxes, 24u);
  copies.insert(copies.end(), copies.begin(), copies.begin() + 3);  // again, in another launch
  run_kernel(copies, base_seed(), 2);
  std::size_t at = 0;
  for (const std::int64_t units : {1, 31, 32, 33, 255, 256, 257, 513}) {
    for (const std::int64_t rows : {1, 2, 9}) {
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < units * 7 && r * units * 7 + i < units * rows * 7; ++i) {
          const std::uint8_t expected =
              i < units ? from[at][static_cast<std::size_t>(r * units * 5 + i)] : 0;
          ASSERT_EQ(to[at][static_cast<std::size_t>(r * units * 7 + i)], expected)
              << units << " units, " << rows << " rows";
        }
      }
      ++at;
    }
  }
}

}  // namespace
}  // namespace unjam
