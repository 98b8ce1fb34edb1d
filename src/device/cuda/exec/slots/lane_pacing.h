// What keeps the lanes of a call together, whose slices go from rank to rank
// (SlotTuning::paced; steer.cuh). A lane's slices go from rank to rank, and wait for no other
// lane's. So a lane that begins late, because its last slices were the last ones of the call
// before, stays late: links serve all lanes alike, and once the others are through it goes on
// alone, call after call. Hence: no lane begins a slice that is kApart or more in front of what the
// slowest lane of its rank has moved.
//
// Nobody waits for ever. Of all lanes of all ranks take those that have moved least, and of these
// the one whose rank comes first on their way. No lane of its rank is slower, so it does not wait
// for one; who sends to it has moved more, so its next slice is there; and who it sends to has
// moved no less, so all its slots are free. A lane that gives up takes the call's others along
// (stream_call_reports.h); for one whose block has not begun they wait as for a peer, with
// patience.
//
// What a lane has moved is in a word of its own, a hint: nobody reads anything else because of it,
// so it is stored and loaded relaxed. The words are those of the call's slot, which is the call's
// alone until all lanes are through; a word of an earlier call of the slot says that the lane has
// not begun.
//
// tests/unit/lane_pacing_test.cc plays this.
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
