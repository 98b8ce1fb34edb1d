// What keeps the lanes of a call together, whose slices go from rank to rank (SlotTuning::paced;
// steer.cuh). No lane begins a slice that is kApart or more in front of what the slowest lane of
// its rank has moved: one that begins late would stay late, call after call. Why nobody waits for
// ever: docs/internals/neighbouring-calls.md; tests/unit/lane_pacing_test.cc plays it.
//
// What a lane has moved is in a word of its own, a hint: nobody reads anything else because of it,
// so it is stored and loaded relaxed. The words are those of the call's slot, which is the call's
// alone until all lanes are through; a word of an earlier call of the slot says that the lane has
// not begun.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

class LanePacing {
 public:
  // (Fewer hold lanes back that would catch up; from here on more changes nothing.)
  static constexpr std::uint32_t kApart = 6;

  UNJAM_HD static constexpr std::uint64_t word(std::uint32_t call, std::uint32_t moved) {
    return std::uint64_t{call} << 32 | moved;
  }
  UNJAM_HD static constexpr std::uint32_t moved(std::uint32_t call, std::uint64_t word) {
    return word >> 32 == call ? static_cast<std::uint32_t>(word) : 0;
  }
  // Whether a lane may begin its n-th slice, counted from 0.
  UNJAM_HD static constexpr bool may_begin(std::uint32_t n, std::uint32_t slowest) {
    return n < slowest || n - slowest < kApart;
  }
};

}  // namespace unjam
