// Numbers as memory has them; sums are in float.
#pragma once

#include <hardware.cuh>  // not as a neighbour: tests put another one in front

namespace unjam_loop {

struct F32 {
  using Stored = float;
  LOOP_DEVICE static float load(Stored x) { return x; }
  LOOP_DEVICE static Stored store(float x) { return x; }
  // A number of a word of 4 bytes.
  LOOP_DEVICE static float of_word(u32 word, u32) { return of_bits(word); }
};

struct Bf16 {
  using Stored = u16;
  LOOP_DEVICE static float load(Stored x) { return of_bits(u32{x} << 16); }
  LOOP_DEVICE static Stored store(float x) {
    const u32 bits = bits_of(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
    return static_cast<u16>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  LOOP_DEVICE static float of_word(u32 word, u32 place) {
    return of_bits(place == 0 ? word << 16 : word & 0xffff0000u);
  }
};

// 16 bytes at once.
struct alignas(16) Piece {
  u32 words[4];
};
template <class T>
inline constexpr u32 kOfPiece = 16 / sizeof(typename T::Stored);
template <class T>
inline constexpr u32 kOfWord = 4 / sizeof(typename T::Stored);

template <class T>
LOOP_DEVICE float of_piece(const Piece& piece, u32 n) {
  return T::of_word(piece.words[n / kOfWord<T>], n % kOfWord<T>);
}

}  // namespace unjam_loop
