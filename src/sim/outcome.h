// What a round comes to.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/job.h"

namespace unjam::sim {

// GPU `gpu` waits for GPU `on`, which has not come to `what`.
struct Wait {
  std::uint32_t gpu = 0;
  Collective what;
  std::uint32_t on = 0;
  friend bool operator==(const Wait&, const Wait&) = default;
};

struct Verdict {
  bool deadlock = false;
  // When it was found: the step, and the GPU whose turn it was. 0 for the exact single queue, which
  // is decided by who stands in the end, not by time.
  std::uint64_t step = 0;
  std::uint32_t gpu = 0;
  // Exact: a cycle, each one waiting for the next and the last for the first. Released: what made
  // the released code count a deadlock.
  std::vector<Wait> waits;
  friend bool operator==(const Verdict&, const Verdict&) = default;
};

struct Outcome {
  Verdict exact;     // the paper's definition
  Verdict released;  // what the authors' published code decides
};

// Which verdicts are wanted.
struct Wanted {
  bool exact = true;
  bool released = true;
  bool waits = false;  // and why; without it, only Verdict::deadlock is meaningful
};

}  // namespace unjam::sim
