// How long a collective takes on a machine, by the clock: which pattern is run, how much of it, and
// what that says of the whole.
//
// Two things repeat, and are not run as often as they happen. *Loops*: those that fill the pipeline
// are run, some in its middle, and those that drain it; the others take as long as those in the
// middle. *Steps that grow with the ranks*, of rings: three runs with different numbers of them say
// what one period takes; it is the same twice, or more are run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "plan/clock/clock.h"

namespace unjam {

struct TimeOptions {
  std::vector<LateRank> late;
  bool keep_path = false;
  bool unfolded = false;
  bool run_all = false;  // nothing is left out: for tests of what is
};

struct Timing {
  std::string algorithm;
  double us = 0;
  std::int64_t ranks = 0;
  int ranks_run = 0;
  bool exact = true;  // the ranks run stand for all, see Pattern::exact
  std::uint32_t lanes = 0;
  std::uint64_t chunk_bytes = 0;
  std::uint64_t loops = 0, loops_run = 0;
  // What a loop takes in the middle of many, and by how much of it two halves of the middle differ.
  double period_us = 0, period_spread = 0;
  std::uint64_t repeats = 0, repeats_run = 0;
  RunResult run;  // the longest one
};

// Nothing, and an error that names the cause, if the machine or the request makes no sense, or the
// algorithm cannot be timed there.
std::optional<Timing> time_plan(const ClockRequest& request, const Machine& machine,
                                const TimeOptions& options, std::string* error);

// One JSON object: what was timed, the time, the busiest port of each class, and, if it was asked
// for, the critical path.
std::string timing_json(const ClockRequest& request, const Machine& machine, const Timing& timing,
                        bool path);

}  // namespace unjam
