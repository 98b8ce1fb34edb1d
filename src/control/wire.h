// How control messages are laid out in bytes: little-endian numbers, texts and lists with their
// length in front. A reader never looks beyond its bytes and never believes a length: after any
// fault it gives zeros, and ok() is false.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

namespace unjam {

class WireWriter {
 public:
  template <class T>
  void number(T v) {
    static_assert(std::is_integral_v<T>);
    char bytes[sizeof(T)];
    std::memcpy(bytes, &v, sizeof(T));  // x86-64 and arm64 are little-endian, and one host only
    bytes_.append(bytes, sizeof(T));
  }
  void text(std::string_view t) {
    number(static_cast<std::uint32_t>(t.size()));
    bytes_.append(t);
  }
  // Puts the number of items that follow.
  void list(std::size_t items) { number(static_cast<std::uint32_t>(items)); }
  std::string take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class WireReader {
 public:
  explicit WireReader(std::string_view bytes) : rest_(bytes) {}

  template <class T>
  T number() {
    static_assert(std::is_integral_v<T>);
    T v{};
    if (rest_.size() < sizeof(T)) {
      fail();
      return v;
    }
    rest_.copy(reinterpret_cast<char*>(&v), sizeof(T));
    rest_.remove_prefix(sizeof(T));
    return v;
  }
  std::string text(std::size_t longest) {
    const auto n = number<std::uint32_t>();
    if (n > longest || n > rest_.size()) {
      fail();
      return {};
    }
    std::string t(rest_.substr(0, n));
    rest_.remove_prefix(n);
    return t;
  }
  // How many items follow, each of at least `item_bytes` (> 0): so a short message cannot ask for
  // much memory.
  std::size_t list(std::size_t most, std::size_t item_bytes) {
    const auto n = number<std::uint32_t>();
    if (n > most || n > rest_.size() / item_bytes) {
      fail();
      return 0;
    }
    return n;
  }
  // A number from 0 to `last`.
  template <class T>
  T up_to(T last) {
    const T v = number<T>();
    if (v > last) {
      fail();
      return T{};
    }
    return v;
  }
  bool ok() const { return ok_; }
  // All was read, and nothing failed.
  bool complete() const { return ok_ && rest_.empty(); }

 private:
  void fail() {
    ok_ = false;
    rest_ = {};
  }
  std::string_view rest_;
  bool ok_ = true;
};

}  // namespace unjam
