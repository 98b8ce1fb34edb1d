// From a plan to what executors run without the engine's slices (program/schedule.h): once a plan,
// without addresses, by the host. What does not fit is the engine's, which runs every plan; and the
// reason is said, for that way is slower.
//
// What is asked is what executors can do, never which algorithm a plan is of. They rely on what the
// plan checker has proved, above all that a part is overwritten, in place, only with what this
// rank's contribution is in (plan/check/lane_run.h).
#pragma once

#include <cstdint>

#include "plan/needs_engine.h"
#include "plan/plan.h"
#include "program/schedule.h"

namespace unjam {

// Of a rank's device.
struct LowerLimits {
  unsigned block_threads = 0;     // a block's
  std::uint32_t lanes = 0;        // blocks of a rank
  bool whole_lines = false;       // lines come whole, so that lines can be sent without the engine
  std::uint32_t patience_us = 0;  // of lanes that go on with their peers, at least
  std::uint32_t slot_bytes = 0;   // of a guaranteed slot
};

struct Lowered {
  NeedsEngine why = NeedsEngine::kNo;  // kNo: the rest says how it goes without
  Schedule schedule;
  unsigned threads = 0;  // of a block
  // All offsets of packets are whole units, and of two hops all parts are alike: so the call is
  // plain if its buffers are aligned (device/cuda/host/bind.h).
  bool is_even = false;
  // Of slots: it goes without slices beside the engine's other calls only where others of some
  // length are there as well (docs/internals/batches.md).
  bool if_contended = false;
};

// The rank's plan, in a group of so many ranks.
Lowered lower(const Plan& plan, int group_size, int group_rank, const LowerLimits& limits);

}  // namespace unjam
