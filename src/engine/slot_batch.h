// Some slots in two words: an array with an index that is not known would lie in memory, of which
// kernels have little.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

class SlotBatch {
 public:
  static constexpr std::uint32_t kMost = 8;

  UNJAM_HD std::uint32_t size() const { return size_; }
  UNJAM_HD bool full() const { return size_ == kMost; }
  // Not if it is full.
  UNJAM_HD void push_back(std::uint16_t slot) {
    const std::uint64_t word = std::uint64_t{slot} << shift(size_);
    if (size_ < kEach) {
      first_ |= word;
    } else {
      second_ |= word;
    }
    ++size_;
  }
  UNJAM_HD std::uint16_t operator[](std::uint32_t i) const {
    return static_cast<std::uint16_t>((i < kEach ? first_ : second_) >> shift(i));
  }

 private:
  static constexpr std::uint32_t kEach = 4;
  UNJAM_HD static constexpr std::uint32_t shift(std::uint32_t i) { return i % kEach * 16; }

  std::uint64_t first_ = 0, second_ = 0;
  std::uint32_t size_ = 0;
};

}  // namespace unjam
