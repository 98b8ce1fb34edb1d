// How the CUDA leaves read and write memory: linear (user memory, slots) in pieces of 16 or 8 bytes
// at any alignment, and packets.
//
// Linear data are read with ordinary loads. That is right for connector slots too: whoever saw the
// slot's flag did so with an acquire at system scope, and has synchronised with the block since.
//
// A packet connector (Protocol::kPacket) holds 8-byte words {4 bytes of data, 4 bytes of flag}, so
// a word's flag tells that its data are there. Words are read and written in pairs, units, with one
// half of the flag each (packet_flag()); such a vector access is two relaxed accesses of 8 bytes to
// the memory model.
#pragma once

#include <cstdint>

#include "device/cuda/hardware/atomics.cuh"
#include "device/cuda/hardware/block.cuh"
#include "device/cuda/leaves/leaf_formats.cuh"

namespace unjam::cuda_leaves {

__device__ __forceinline__ bool is_aligned(const void* p, unsigned bytes) {
  return (reinterpret_cast<std::uintptr_t>(p) & (bytes - 1)) == 0;
}

__device__ __forceinline__ Raw<4> load_aligned(const void* p, Raw<4>*) {
  assume_global(p);
  const uint4 x = *static_cast<const uint4*>(p);
  return {{x.x, x.y, x.z, x.w}};
}
__device__ __forceinline__ Raw<2> load_aligned(const void* p, Raw<2>*) {
  assume_global(p);
  const uint2 x = *static_cast<const uint2*>(p);
  return {{x.x, x.y}};
}
template <int kWords>
__device__ __forceinline__ Raw<kWords> load_aligned(const void* p) {
  return load_aligned(p, static_cast<Raw<kWords>*>(nullptr));
}
__device__ __forceinline__ void store_aligned(void* p, const Raw<4>& raw) {
  assume_global(p);
  *static_cast<uint4*>(p) = make_uint4(raw.w[0], raw.w[1], raw.w[2], raw.w[3]);
}
__device__ __forceinline__ void store_aligned(void* p, const Raw<2>& raw) {
  assume_global(p);
  *static_cast<uint2*>(p) = make_uint2(raw.w[0], raw.w[1]);
}

// A piece: what a thread has of linear data at once.
inline constexpr unsigned kPieceBytes = 16;

template <int kBytes>
struct Element;
template <>
struct Element<1> {
  using Type = std::uint8_t;
};
template <>
struct Element<2> {
  using Type = std::uint16_t;
};
template <>
struct Element<4> {
  using Type = std::uint32_t;
};
template <>
struct Element<8> {
  using Type = std::uint64_t;
};

// The first `bytes` (a multiple of kElement, at most the whole) of kWords words; the rest is zero.
// One element at a time where p or bytes ask for it; indices are constants, so that nothing goes
// through local memory.
template <int kWords, int kElement>
__device__ __forceinline__ Raw<kWords> load_linear(const void* p, unsigned bytes) {
  if (bytes == 4 * kWords && is_aligned(p, 4 * kWords)) return load_aligned<kWords>(p);
  using T = typename Element<kElement>::Type;
  Raw<kWords> raw{};
#pragma unroll
  for (int i = 0; i < 4 * kWords / kElement; ++i) {
    if (static_cast<unsigned>(i * kElement) >= bytes) break;
    const T x = static_cast<const T*>(p)[i];
    if constexpr (kElement == 8) {
      raw.w[2 * i] = static_cast<std::uint32_t>(x);
      raw.w[2 * i + 1] = static_cast<std::uint32_t>(x >> 32);
    } else {
      raw.w[i * kElement / 4] |= static_cast<std::uint32_t>(x) << (8 * (i * kElement % 4));
    }
  }
  return raw;
}

template <int kWords, int kElement>
__device__ __forceinline__ void store_linear(void* p, const Raw<kWords>& raw, unsigned bytes) {
  if (bytes == 4 * kWords && is_aligned(p, 4 * kWords)) {
    store_aligned(p, raw);
    return;
  }
  using T = typename Element<kElement>::Type;
#pragma unroll
  for (int i = 0; i < 4 * kWords / kElement; ++i) {
    if (static_cast<unsigned>(i * kElement) >= bytes) break;
    if constexpr (kElement == 8) {
      static_cast<T*>(p)[i] = raw.w[2 * i] | static_cast<std::uint64_t>(raw.w[2 * i + 1]) << 32;
    } else {
      static_cast<T*>(p)[i] = static_cast<T>(raw.w[i * kElement / 4] >> (8 * (i * kElement % 4)));
    }
  }
}

// ---- Packets. A unit is 8 bytes of data: two packet words, 16 bytes of connector memory, which
// are always all there: whatever a message's last unit lacks is filled up. ----

inline constexpr unsigned kUnitBytes = 8;

struct PacketWord {
  std::uint32_t data;
  std::uint32_t flag;
};
struct PacketUnit {
  PacketWord word[2];
};

__device__ __forceinline__ PacketWord unpack(std::uint64_t word) {
  return {static_cast<std::uint32_t>(word), static_cast<std::uint32_t>(word >> 32)};
}
__device__ __forceinline__ std::uint64_t pack(std::uint32_t data, std::uint32_t flag) {
  return data | static_cast<std::uint64_t>(flag) << 32;
}

__device__ __forceinline__ PacketWord load_packet_word(const void* p) {
  return unpack(load_word_system(p));
}
__device__ __forceinline__ void store_packet_word(void* p, std::uint32_t data, std::uint32_t flag) {
  store_word_system(p, pack(data, flag));
}

// Slots begin, and end, on boundaries of units.
__device__ __forceinline__ PacketUnit load_packet_unit(const void* p) {
  std::uint64_t first, second;
  load_words_system(p, first, second);
  return {{unpack(first), unpack(second)}};
}
__device__ __forceinline__ void store_packet_unit(void* p, const Raw<2>& raw, std::uint64_t flag) {
  store_words_system(p, pack(raw.w[0], static_cast<std::uint32_t>(flag)),
                     pack(raw.w[1], static_cast<std::uint32_t>(flag >> 32)));
}
__device__ __forceinline__ bool has_flag(const PacketUnit& unit, std::uint64_t flag) {
  return unit.word[0].flag == static_cast<std::uint32_t>(flag) &&
         unit.word[1].flag == static_cast<std::uint32_t>(flag >> 32);
}
__device__ __forceinline__ Raw<2> data_of(const PacketUnit& unit) {
  return {{unit.word[0].data, unit.word[1].data}};
}

// ---- Lines (Protocol::kLine). 8 threads of a warp have one: 7 of them a unit of data each, the
// last one the flags. They store it in one instruction, and load it in one, and so it comes: 64
// bytes are one write to the link and to memory, and one read of it, so who sees their flags in a
// load of all of them has their data, too. That is how Hopper GPUs with NVLink work, not what the
// memory model of PTX promises; so it is relied on only where it was tested (nvlink.h), by
// tests/gpu/long_packets.cu, which finds lines of 128 bytes with one flag torn some 16 times a
// second: always just 64 bytes of them were old (docs/internals/packets.md).
//
// Where links are others the flags are stored behind a fence (LineFlags::kBehind). The engine looks
// at the flags first, of all lines, and at the data behind a barrier.

inline constexpr unsigned kLineThreads = kLineBytes / kWordBytes;
static_assert(kLineDataBytes == (kLineThreads - 1) * kUnitBytes);

// What a thread has of a slot's lines: 8 bytes at 8 * place. Place p is word p % 8 of line p / 8.
__device__ __forceinline__ bool bears_flags(std::uint32_t place) {
  return place % kLineThreads == kLineThreads - 1;
}
// Where its data begin in the message; of flags somewhere.
__device__ __forceinline__ std::uint32_t line_data_at(std::uint32_t place) {
  return place / kLineThreads * kLineDataBytes + place % kLineThreads * kUnitBytes;
}
// How much data that are.
__device__ __forceinline__ unsigned line_data_bytes(std::uint32_t place, std::uint32_t bytes) {
  const std::uint32_t at = line_data_at(place);
  if (bears_flags(place) || at >= bytes) return 0;
  return bytes - at < kUnitBytes ? bytes - at : kUnitBytes;
}
__device__ __forceinline__ Raw<2> line_flags(std::uint64_t flag) {
  return {{static_cast<std::uint32_t>(flag), static_cast<std::uint32_t>(flag >> 32)}};
}
__device__ __forceinline__ bool is_flags(const Raw<2>& raw, std::uint64_t flag) {
  return raw.w[0] == static_cast<std::uint32_t>(flag) &&
         raw.w[1] == static_cast<std::uint32_t>(flag >> 32);
}

__device__ __forceinline__ Raw<2> load_line_word(const void* p) {
  const PacketWord word = load_packet_word(p);
  return {{word.data, word.flag}};
}
__device__ __forceinline__ void store_line_word(void* p, const Raw<2>& raw) {
  store_packet_word(p, raw.w[0], raw.w[1]);
}

}  // namespace unjam::cuda_leaves
