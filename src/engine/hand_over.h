// What one lane has behind it of an invocation, as executors and the engine's slices hand it to
// each other: the one state for giving up, for going on, and for taking over.
//
// Executors (device/cuda/exec, called by device/cuda/kernels: one in the call's own stream, one in
// the engine's blocks, docs/internals/batches.md) move primitives' chunks by themselves; slices can
// go on from wherever they stop. So what is handed over is how many chunks of each primitive are
// done, from the first on, and no more: what was moved and is in no connector's prefix
// (program/slice_order.h) is not done, and is moved again. An invocation is, in this lane, in one
// of these stages:
//
//   stage      what it keeps from before              who may move it, and where it goes
//   kUntried   nothing                                any executor: kLeft or kDone; slices: kSlices
//   kLeft      done; the connectors' counts, in the   an executor, which goes on: kLeft, kDone; if
//              key's endpoints                        what it needs is elsewhere, slices: kSlices
//   kSlices    done; loop, primitive, through, taken  slices alone, to the end: kDone
//   kDone      nothing                                nobody
//
// Pool slots are whose slices lie in them (transport/connector.h), and are no stage's: who goes
// on borrows none that it knows of. Invitations stand until the invocation has ended, and are found
// again by whoever sends. Which connectors were found is looked at anew by each who goes on. What
// an executor has in movers' hands when it stops is moved before it says what is done; a carrier
// that moves by itself (Carrier) would hold its slots until it has.
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
