// What one lane has behind it of an invocation, as executors (device/cuda/exec) and the engine's
// slices hand it to each other: the one state for giving up, for going on, and for taking over
// (docs/internals/lowering.md). It says how many chunks of each primitive are done, from the first
// on, and no more: what was moved and is in no connector's prefix is moved again.
//
//   stage     what it keeps from before              who may move it, and where it goes
//   kUntried  nothing                                any executor: kLeft or kDone; slices: kSlices
//   kLeft     done; the connectors' counts, in the   an executor, which goes on: kLeft, kDone; if
//             key's endpoints                        what it needs is elsewhere, slices: kSlices
//   kSlices   done; loop, primitive, through, taken  slices alone, to the end: kDone
//   kDone     nothing                                nobody
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

// Primitives that executors move: a program of more is the slices' alone.
inline constexpr std::uint32_t kMostSteps = 8;

enum class Stage : std::uint32_t { kUntried, kLeft, kSlices, kDone };

struct HandOver {
  std::uint32_t done[kMostSteps] = {};  // of each primitive, its first so many chunks
  Stage stage = Stage::kUntried;

  // Of the i-th primitive of a program of any length.
  UNJAM_HD constexpr std::uint32_t done_of(std::uint32_t i) const {
    return i < kMostSteps ? done[i] : 0;
  }
  // How many of the first primitives have their only chunk done: of programs of one loop.
  UNJAM_HD constexpr std::uint32_t primitives_done() const {
    std::uint32_t n = 0;
    while (n < kMostSteps && done[n] != 0) ++n;
    return n;
  }
  UNJAM_HD constexpr void set_primitives_done(std::uint32_t n) {
    for (std::uint32_t i = 0; i < kMostSteps; ++i) done[i] = i < n ? 1 : 0;
  }
};

}  // namespace unjam
