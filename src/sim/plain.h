// The step-by-step engine: a round as docs/simulator.md defines it, with nothing clever in it. It
// exists to be read, and to check the event-driven engine against.
#pragma once

#include <cstdint>

#include "sim/draws.h"
#include "sim/job.h"
#include "sim/outcome.h"

namespace unjam::sim {

struct PlainOutcome : Outcome {
  std::uint64_t lost = 0;  // released single queue: invocations that its code drops
};

// Simulates one round with the given draws.
PlainOutcome run_plain(const Job& job, const Draws& draws);

}  // namespace unjam::sim
