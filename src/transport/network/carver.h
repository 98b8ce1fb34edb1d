// Memory for tables that never grow: counted first, then cut from one piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace unjam {

class Carver {
 public:
  // `begin`: aligned to kAlignment, or nullptr, to count only.
  static constexpr std::size_t kAlignment = 64;
  explicit Carver(unsigned char* begin) : begin_(begin) {}

  // So many, each as T{} makes it. nullptr when it only counts.
  template <class T>
  T* take(std::size_t count) {
    static_assert(alignof(T) <= kAlignment);
    unsigned char* const at = begin_ == nullptr ? nullptr : begin_ + used_;
    used_ = (used_ + count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    if (at == nullptr) return nullptr;
    T* const first = reinterpret_cast<T*>(at);
    std::uninitialized_value_construct_n(first, count);
    return first;
  }
  std::size_t bytes() const { return used_; }

 private:
  unsigned char* const begin_;
  std::size_t used_ = 0;
};

}  // namespace unjam
