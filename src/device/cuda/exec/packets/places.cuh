// Where a call's packets lie, in messages and in slots, and how a thread loads and stores one.
#pragma once

#include "device/cuda/exec/call.cuh"

namespace unjam {
namespace in_stream {

// A place of a message is what a thread has of it at once: of packets a unit, of lines a word (see
// leaf_access.cuh), which is a unit, or the line's flags.
__device__ __forceinline__ std::uint32_t places_of(const StreamCall& call, std::uint32_t bytes) {
  return call.lines ? line_places(bytes) : (bytes + kUnitBytes - 1) / kUnitBytes;
}

// A place's data, in a stretch of so many bytes.
struct Unit {
  std::uint32_t at;
  std::uint32_t bytes;  // 0: flags, or behind the end
};
__device__ __forceinline__ Unit unit_of(const StreamCall& call, std::uint32_t bytes,
                                        std::uint32_t place) {
  if (call.lines) {
    return {cuda_leaves::line_data_at(place), cuda_leaves::line_data_bytes(place, bytes)};
  }
  const std::uint32_t at = place * kUnitBytes;
  return {at, at >= bytes ? 0 : bytes - at < kUnitBytes ? bytes - at : kUnitBytes};
}

// User memory. What is short of a unit, or not aligned to it, is rare: out of the way, for a call's
// time is also that of fetching its instructions.
inline __device__ __noinline__ std::uint64_t load_some(const char* from, unsigned bytes) {
  const Raw<2> raw = cuda_leaves::load_unit(from, bytes);
  return raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32;
}
inline __device__ __noinline__ void store_some(char* to, std::uint64_t x, unsigned bytes) {
  const Raw<2> raw{{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
  cuda_leaves::store_unit(to, raw, bytes);
}
__device__ __forceinline__ Raw<2> load_user(const char* from, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(from, kUnitBytes)) {
    return cuda_leaves::load_aligned<2>(from);
  }
  if (bytes == 0) return {};
  const std::uint64_t x = load_some(from, bytes);
  return {{static_cast<std::uint32_t>(x), static_cast<std::uint32_t>(x >> 32)}};
}
__device__ __forceinline__ void store_user(char* to, const Raw<2>& raw, unsigned bytes) {
  if (bytes == kUnitBytes && cuda_leaves::is_aligned(to, kUnitBytes)) {
    cuda_leaves::store_aligned(to, raw);
  } else if (bytes != 0) {
    store_some(to, raw.w[0] | static_cast<std::uint64_t>(raw.w[1]) << 32, bytes);
  }
}

// Place `index` of those of several messages.
struct Item {
  std::uint32_t message;
  std::uint32_t place;
};
__device__ __forceinline__ Item item_of(const Stretch& w, std::uint32_t index, bool several) {
  const std::uint32_t message = several ? index / w.places : 0;
  return {message, index - message * w.places};
}

// ---- packets and lines, at their slot ----

// The threads that have a line, of which this is one. Wherever they decide something they do so
// together: places are whole lines, and movers whole warps.
__device__ __forceinline__ std::uint32_t line_mask() {
  constexpr std::uint32_t kThreads = cuda_leaves::kLineThreads;
  return ((1u << kThreads) - 1) << (threadIdx.x & 31 & ~(kThreads - 1));
}
__device__ __forceinline__ bool all_of(const StreamCall& call, bool x) {
  return call.lines ? __all_sync(line_mask(), x) != 0 : x;
}
__device__ __forceinline__ bool any_of(const StreamCall& call, bool x) {
  return call.lines ? __any_sync(line_mask(), x) != 0 : x;
}

__device__ __forceinline__ void store_place(const StreamCall& call, char* slot, std::uint32_t place,
                                            const Raw<2>& x, std::uint64_t flag) {
  if (!call.lines) {
    return cuda_leaves::store_packet_unit(slot + 2 * kUnitBytes * place, x, flag);
  }
  const Raw<2> word = cuda_leaves::bears_flags(place) ? cuda_leaves::line_flags(flag) : x;
  __syncwarp(line_mask());  // lines are stored in one instruction
  cuda_leaves::store_line_word(slot + kWordBytes * place, word);
}
// In front of load_place()s: lines are loaded in one instruction, as they are stored.
__device__ __forceinline__ void load_together(const StreamCall& call) {
  if (call.lines) __syncwarp(line_mask());
}
// What is there, to be looked at by has_come(): behind the loads of all other places, for who looks
// at what one brings waits for it, and so does the next.
__device__ __forceinline__ cuda_leaves::PacketUnit load_place(const StreamCall& call,
                                                              const char* slot,
                                                              std::uint32_t place) {
  if (!call.lines) return cuda_leaves::load_packet_unit(slot + 2 * kUnitBytes * place);
  return {{cuda_leaves::load_packet_word(slot + kWordBytes * place), {}}};
}
// Whether it has come, as far as this thread can tell, and what.
__device__ __forceinline__ bool has_come(const StreamCall& call,
                                         const cuda_leaves::PacketUnit& found, std::uint32_t place,
                                         std::uint64_t flag, Raw<2>& x) {
  if (!call.lines) {
    x = cuda_leaves::data_of(found);
    return cuda_leaves::has_flag(found, flag);
  }
  x = {{found.word[0].data, found.word[0].flag}};
  return !cuda_leaves::bears_flags(place) || cuda_leaves::is_flags(x, flag);
}

// One look at a thread's places of a row: whether all of them have come, and what. `from`: their
// slots; nullptr where there is nothing to look for.
template <int kUnits>
__device__ __forceinline__ bool look_at_row(const StreamCall& call, const char* (&from)[kUnits],
                                            const std::uint32_t (&place)[kUnits],
                                            std::uint64_t flag, Raw<2> (&x)[kUnits]) {
  cuda_leaves::PacketUnit found[kUnits];
  load_together(call);
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (from[h] != nullptr) found[h] = load_place(call, from[h], place[h]);
  }
  bool all = true;
#pragma unroll
  for (int h = 0; h < kUnits; ++h) {
    if (from[h] != nullptr) all &= has_come(call, found[h], place[h], flag, x[h]);
  }
  return all_of(call, all);
}

// ---- a lane's part ----

// A lane's stretch of a part that begins at piece `part`, and of which so many lanes are a piece
// longer: as Geometry::lane_part(), in bytes from the beginning of the vector.
struct PartStretch {
  std::uint32_t offset;
  std::uint32_t bytes;
};
__device__ __forceinline__ PartStretch lane_stretch(const StreamCall& call, std::uint32_t part,
                                                    std::uint32_t longer, std::uint32_t lane) {
  const std::uint32_t first = part + lane * call.lane_pieces + (lane < longer ? lane : longer);
  const std::uint32_t last = first + call.lane_pieces + (lane < longer ? 1 : 0);
  const std::uint32_t begin = first * 16 < call.block_bytes ? first * 16 : call.block_bytes;
  const std::uint32_t end = last * 16 < call.block_bytes ? last * 16 : call.block_bytes;
  return {begin, end - begin};
}

// A lane of the call's.
__device__ __forceinline__ Stretch stretch_of(const StreamCall& call, const Invocation& inv,
                                              std::uint32_t lane) {
  const PartStretch own = lane_stretch(call, 0, call.longer_lanes, lane);
  return {static_cast<const char*>(inv.input) + own.offset,
          static_cast<char*>(inv.output) + own.offset, own.bytes, places_of(call, own.bytes)};
}

}  // namespace in_stream
}  // namespace unjam
