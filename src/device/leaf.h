// The inner loops that move and reduce data ("leaves"), specific to the device: how they are
// divided by protocol, type and operator is said in host/leaves.h and cuda/leaves/leaves.cuh.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr int kMaxLeafSources = 64;

// Which sources a floating-point average scales by `scale` as they are read.
enum class ScaleSources : std::uint8_t { kNone, kLocal, kAll };

// One slice of work, built by the block's control threads, executed by threads of the block.
// Combine: result = src[0] op src[1] op … (left to right, in this order), then scaled or divided as
// asked, stored to dst_user (if not null) and to every dst_slot[0 … num_dst).
// Copies (`copies`): src[i] goes, unchanged, to those of dst_slot[i] and dst_copy[i] that are not
// null (of packets to one); copy_elems[i] elements each; 0 of them, or src[i] null: nothing. One
// side of each copy is user memory, the other connector memory, or what a peer has invited to store
// into: its output, so nothing is stored but the elements. What goes to both comes from user
// memory. Sources may be equal to a destination (in place) but never overlap it otherwise. All
// pointers are aligned to the element size at least; leaves use wide accesses where the actual
// pointers allow.
struct SliceJob {
  const void* src[kMaxLeafSources] = {};
  // Connector memory, laid out as `protocol` says; or, of slots, a peer's output.
  void* dst_slot[kMaxLeafSources] = {};
  void* dst_copy[kMaxLeafSources] = {};  // copies into the user's memory: linear
  std::uint32_t copy_elems[kMaxLeafSources] = {};
  void* dst_user = nullptr;  // user's memory: linear
  std::uint64_t elems = 0;   // of a combine
  std::uint16_t num_src = 0;
  std::uint16_t num_dst = 0;
  // Index of the source that lies in user memory (linear); the others are connector memory, laid
  // out as `protocol` says. -1: none. (Copies: by their destinations.)
  std::int16_t local_src = -1;
  bool copies = false;
  DType dtype = DType::kInt8;
  Op op = Op::kSum;
  Protocol protocol = Protocol::kSlot;
  ScaleSources scale_sources = ScaleSources::kNone;  // only for kAvg on floating point
  // kAvg on integers: divide the result by this (as NCCL: sum with wrap-around, then integer
  // division towards zero). 1: leave alone. kAvg otherwise combines like kSum.
  std::uint32_t divisor = 1;
  double scale = 1.0;  // 1/ranks, for scale_sources; applied in the accumulation type
  // Packets and lines on GPUs: the flag in each unit, or line, of what is received, and the one to
  // put there into what is sent. See packet_flag().
  std::uint64_t flag = 0;
  std::uint64_t sent_flag = 0;
};

// Accumulation: int8 … uint64 in their own type with wrap-around; float16, bfloat16, fp8 in
// float32, rounded to nearest even once on store (fp8 saturates to the largest finite value as NCCL
// does); float32 and float64 in themselves. min and max propagate NaN.

}  // namespace unjam
