// SipHash-2-4 (Aumasson, Bernstein 2012): a keyed hash that cannot be forged without the key. Used
// to prove knowledge of a job's secret without sending it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace unjam {

using SipKey = std::array<std::uint64_t, 2>;

inline std::uint64_t siphash(const SipKey& key, std::string_view data) {
  std::uint64_t v0 = key[0] ^ 0x736f6d6570736575ull, v1 = key[1] ^ 0x646f72616e646f6dull;
  std::uint64_t v2 = key[0] ^ 0x6c7967656e657261ull, v3 = key[1] ^ 0x7465646279746573ull;
  const auto rotate = [](std::uint64_t x, int by) { return x << by | x >> (64 - by); };
  const auto rounds = [&](int n) {
    for (int i = 0; i < n; ++i) {
      v0 += v1, v2 += v3;
      v1 = rotate(v1, 13) ^ v0, v3 = rotate(v3, 16) ^ v2;
      v0 = rotate(v0, 32);
      v2 += v1, v0 += v3;
      v1 = rotate(v1, 17) ^ v2, v3 = rotate(v3, 21) ^ v0;
      v2 = rotate(v2, 32);
    }
  };
  const std::size_t whole = data.size() / 8 * 8;
  for (std::size_t i = 0; i < whole; i += 8) {
    std::uint64_t m = 0;
    std::memcpy(&m, data.data() + i, 8);
    v3 ^= m;
    rounds(2);
    v0 ^= m;
  }
  std::uint64_t last = static_cast<std::uint64_t>(data.size()) << 56;
  std::memcpy(&last, data.data() + whole, data.size() - whole);
  v3 ^= last;
  rounds(2);
  v0 ^= last;
  v2 ^= 0xff;
  rounds(4);
  return v0 ^ v1 ^ v2 ^ v3;
}

}  // namespace unjam
