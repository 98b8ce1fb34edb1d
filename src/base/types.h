// Data types, reduction operators and protocols, as every layer names them. (Kinds: base/kinds.h.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portability.h"

namespace unjam {

enum class DType : std::uint8_t {
  kInt8,
  kUint8,
  kInt32,
  kUint32,
  kInt64,
  kUint64,
  kFloat16,
  kBfloat16,
  kFloat32,
  kFloat64,
  kFloat8E4M3,  // finite-only e4m3 ("fn"): no infinities, one NaN pattern a sign
  kFloat8E5M2,
};
inline constexpr int kNumDTypes = 12;

enum class Op : std::uint8_t { kSum, kProd, kMin, kMax, kAvg };
inline constexpr int kNumOps = 5;

// How one slice travels. kPacket: payload and flag together, lowest latency. kSlot: bulk copy
// through a connector slot, then a header flag. kLine: as kPacket, but with one flag for each line
// of memory, so that little more than the payload goes through the link.
// On the host packets and lines are slots whose chunks are as short as on GPUs.
enum class Protocol : std::uint8_t { kPacket, kSlot, kLine };
inline constexpr int kNumProtocols = 3;

// Flags come with the data, and both ends know the length.
UNJAM_HD constexpr bool has_inline_flags(Protocol p) { return p != Protocol::kSlot; }

// A line: 7 words of data, then one of flags. (Half of what the memory of a GPU calls a line: of
// those the halves were seen to come one behind the other, see leaf_access.cuh.)
inline constexpr std::uint32_t kLineBytes = 64, kLineDataBytes = 56, kWordBytes = 8;

// Of slots' sizes: whole lines, and so that every cut is 16-byte aligned, a half too.
inline constexpr std::uint32_t kSlotGranularity = 64;
static_assert(kSlotGranularity % kLineBytes == 0);

// Of a slot as many bytes as a GPU's blocks of usual size move in whole turns, whatever they do
// with them (copies between two ranks: twice as many), see whole_turns() in leaf_slots.cuh.
inline constexpr std::uint32_t kSlotTurnBytes = 71680;

// Words of a message of so many bytes, whole lines.
template <class Bytes>
UNJAM_HD constexpr Bytes line_places(Bytes bytes) {
  return (bytes + kLineDataBytes - 1) / kLineDataBytes * (kLineBytes / kWordBytes);
}

// The most data that a slot of so many bytes holds.
UNJAM_HD constexpr std::uint32_t payload_bytes(Protocol p, std::uint32_t slot_bytes) {
  if (p == Protocol::kPacket) return slot_bytes / 2;
  return p == Protocol::kLine ? slot_bytes / kLineBytes * kLineDataBytes : slot_bytes;
}

// A row of plan/registry.h: what has a name here is what code asks for by name.
enum class Algorithm : std::uint8_t {
  kRing,
  kOneShot,
  kRsag,
  kPairwise,
  kTwoShot,
  kChain,
  kDoubleBinaryTree,
  kHierarchical,
  kPat
};

// What runs the engine.
enum class Device : std::uint8_t { kHost, kCuda };

UNJAM_HD constexpr std::uint32_t dtype_bytes(DType t) {
  switch (t) {
    case DType::kInt8:
    case DType::kUint8:
    case DType::kFloat8E4M3:
    case DType::kFloat8E5M2:
      return 1;
    case DType::kFloat16:
    case DType::kBfloat16:
      return 2;
    case DType::kInt32:
    case DType::kUint32:
    case DType::kFloat32:
      return 4;
    default:
      return 8;
  }
}

UNJAM_HD constexpr bool is_integer(DType t) {
  return static_cast<std::uint8_t>(t) <= static_cast<std::uint8_t>(DType::kUint64);
}

// What GPUs have fast code to add up for (device/cuda/exec/packets/plain.cuh), and plans count on.
UNJAM_HD constexpr bool is_common_sum(DType t, Op op) {
  const bool common = t == DType::kFloat32 || t == DType::kBfloat16 || t == DType::kFloat16;
  return common && (op == Op::kSum || op == Op::kAvg);
}

constexpr const char* to_string(DType t) {
  constexpr const char* kNames[kNumDTypes] = {"int8",    "uint8",   "int32",       "uint32",
                                              "int64",   "uint64",  "float16",     "bfloat16",
                                              "float32", "float64", "float8_e4m3", "float8_e5m2"};
  return kNames[static_cast<int>(t)];
}
constexpr const char* to_string(Op o) {
  constexpr const char* kNames[kNumOps] = {"sum", "prod", "min", "max", "avg"};
  return kNames[static_cast<int>(o)];
}
constexpr const char* to_string(Protocol p) {
  constexpr const char* kNames[kNumProtocols] = {"packet", "slot", "line"};
  return kNames[static_cast<int>(p)];
}

}  // namespace unjam
