// Where the parts, lanes and chunks of a collective's data lie. Pure arithmetic on values that all
// ranks of the group agree on, so that both ends of every connector compute the same lengths.
#pragma once

#include <cstdint>

#include "base/kinds.h"
#include "base/portability.h"
#include "base/types.h"

namespace unjam {

inline constexpr std::uint16_t kNoPart = 0xffff;

struct Range {
  std::uint64_t offset = 0;  // elements
  std::uint64_t length = 0;  // elements
};

// The i-th of `pieces` consecutive ranges that cover [0, count). Every boundary is a multiple of
// `align` elements (the last one excepted); ranges differ by at most `align`, the longer ones
// first.
UNJAM_HD constexpr Range split(std::uint64_t count, std::uint32_t pieces, std::uint32_t i,
                               std::uint32_t align) {
  const std::uint64_t units = count / align + (count % align != 0);
  const std::uint64_t base = units / pieces, extra = units % pieces;
  const std::uint64_t first = i * base + (i < extra ? i : extra);
  const std::uint64_t last = first + base + (i < extra ? 1 : 0);
  const std::uint64_t lo = first * align < count ? first * align : count;
  const std::uint64_t hi = last * align < count ? last * align : count;
  return {lo, hi - lo};
}

// Geometry of one invocation. `count` is the API's count: elements of the whole vector for
// all-reduce, reduce, broadcast and send/recv; elements of a rank's block for the block-structured
// kinds: what one rank contributes (all-gather, gather), receives (reduce-scatter, scatter), or
// sends to each other one (all-to-all).
struct Geometry {
  std::uint64_t count = 0;
  std::uint32_t parts = 1;  // parts of the data: the group's size where plans treat ranks' shares
                            // apart, as of block-structured kinds; else fewer, mostly 1
  std::uint32_t chunk = 1;  // elements a chunk; at most what the guaranteed slots carry
  std::uint16_t first_lane = 0;  // lanes [first_lane, first_lane + lanes) take part
  std::uint16_t lanes = 1;
  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kInt8;
  // A part without data, so that the others share them all: a rank's that has none to see to.
  // kNoPart: there is none. (Not of block-structured kinds.)
  std::uint16_t empty_part = kNoPart;
  // Part p lies on every parts-th lane alone, from the p-th on, and is empty in the others: lanes
  // do then the primitives of their part alone. There are as many lanes as parts, or more.
  bool by_lane = false;

  bool operator==(const Geometry&) const = default;

  UNJAM_HD constexpr std::uint32_t align() const { return 16 / dtype_bytes(dtype); }
  UNJAM_HD constexpr bool blocked() const { return unjam::blocked(kind); }
  // Part p of the whole vector. For block-structured kinds part p is rank p's block; of an
  // all-to-all, the input's part p goes to rank p, and the output's comes from there.
  UNJAM_HD constexpr Range part(std::uint32_t p) const {
    if (blocked()) return {p * count, count};
    if (empty_part == kNoPart) return split(count, parts, p, align());
    if (p == empty_part) return {0, 0};
    return split(count, parts - 1, p < empty_part ? p : p - 1, align());
  }
  // A part that is as long as any: of all, or of all but one. (split puts the longer ones first.)
  // If the others are empty it is an empty one.
  UNJAM_HD constexpr std::uint32_t longest_part(std::uint32_t but = kNoPart) const {
    std::uint32_t p = 0;
    while (p == but || p == empty_part) ++p;
    if (p < parts) return p;
    return empty_part == kNoPart ? 0 : empty_part;
  }
  // What lane `lane` carries of part p, relative to the whole vector.
  UNJAM_HD constexpr Range lane_part(std::uint32_t p, std::uint32_t lane) const {
    const Range whole = part(p);
    std::uint32_t pieces = lanes, piece = lane - first_lane;
    if (by_lane) {
      if (piece % parts != p) return {whole.offset, 0};
      pieces = (lanes - p + parts - 1) / parts;
      piece /= parts;
    }
    const Range mine = split(whole.length, pieces, piece, align());
    return {whole.offset + mine.offset, mine.length};
  }
  // Chunk `loop` of that; length 0 past the end.
  UNJAM_HD constexpr Range chunk_range(std::uint32_t p, std::uint32_t lane,
                                       std::uint64_t loop) const {
    return chunk_of(lane_part(p, lane), loop);
  }
  // The same of a lane's part that is known: without a division, which takes a GPU a microsecond.
  UNJAM_HD constexpr Range chunk_of(Range r, std::uint64_t loop) const {
    const std::uint64_t lo = loop * chunk;
    if (lo >= r.length) return {r.offset, 0};
    return {r.offset + lo, r.length - lo < chunk ? r.length - lo : chunk};
  }
  // A part of which this lane carries as much as of any.
  UNJAM_HD constexpr std::uint32_t longest_part_of(std::uint32_t lane) const {
    return by_lane ? (lane - first_lane) % parts : longest_part();
  }
  // How many loops this lane makes.
  UNJAM_HD constexpr std::uint64_t loops(std::uint32_t lane) const {
    return loops_of(lane_part(longest_part_of(lane), lane));
  }
  UNJAM_HD constexpr std::uint64_t loops_of(Range longest) const {
    return longest.length / chunk + (longest.length % chunk != 0);
  }
  // Where the user's input or output is one block only, as of an all-gather or a scatter, an offset
  // into the whole vector falls back by this much there (rank = group rank).
  UNJAM_HD constexpr std::uint64_t input_shift(std::uint32_t rank) const {
    return input_is_block(kind) ? rank * count : 0;
  }
  UNJAM_HD constexpr std::uint64_t output_shift(std::uint32_t rank) const {
    return output_is_block(kind) ? rank * count : 0;
  }
};

}  // namespace unjam
