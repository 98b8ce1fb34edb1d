#include "plan/clock/timing.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "plan/common.h"

namespace unjam {
namespace {

double us(double picoseconds) { return picoseconds / kPicosecondsAUs; }

std::uint32_t longest_lag(const Pattern& pattern) {
  std::uint32_t lag = 0;
  for (const ClockStep& s : pattern.steps) lag = std::max(lag, s.lag);
  return lag;
}

std::string request_fault(const ClockRequest& request) {
  PlanRequest r = request.request;
  if (r.ranks < 1 || r.ranks > kMostClockRanks) {
    return "the clock runs 1 to " + std::to_string(kMostClockRanks) + " ranks, not " +
           std::to_string(r.ranks);
  }
  // The rest is as of any plan, with as many ranks as that can have.
  r.rank = 0;
  if (r.ranks > kMaxGroupRanks) {
    if (has_root(r.kind) && (r.root < 0 || r.root >= r.ranks)) {
      return "root " + std::to_string(r.root) + " is not in a group of " + std::to_string(r.ranks) +
             " ranks";
    }
    r.ranks = kMaxGroupRanks;
    r.root = 0;
  }
  return request_error(r, PlanLimits{});
}

// Of each NIC and core of all nodes something is kept.
std::string parts_fault(const ClockRequest& request, const Machine& machine) {
  constexpr std::int64_t kMost = 1 << 23;
  const std::int64_t nodes =
      (request.request.ranks + std::int64_t{machine.gpus_per_node} - 1) / machine.gpus_per_node;
  for (const auto& [name, each] :
       {std::pair{"NICs", machine.nics_per_node}, std::pair{"cores", machine.cores}}) {
    if (nodes * each > kMost) {
      return std::to_string(nodes) + " nodes with " + std::to_string(each) + " " + name +
             " each are more than the clock keeps, " + std::to_string(kMost) + ": give fewer";
    }
  }
  return "";
}

std::string late_fault(const ClockRequest& request, const std::vector<LateRank>& late) {
  constexpr double kLatest = 1e9;
  for (const LateRank& l : late) {
    const std::string who = "late rank " + std::to_string(l.rank);
    if (l.rank < 0 || l.rank >= request.request.ranks) {
      return who + " is not one of " + std::to_string(request.request.ranks) + " ranks";
    }
    if (!(l.us >= 0 && l.us <= kLatest)) return who + " is late by no time: give 0 to 1e9 us";
  }
  return "";
}

// One run, with what its left-out loops take.
struct Run {
  RunResult result;
  double end = 0;  // picoseconds
  double period = 0, spread = 0;
  std::uint64_t loops_run = 0;
};

class Timer {
 public:
  Timer(const Pattern& pattern, const Machine& machine, const TimeOptions& options)
      : pattern_(pattern), machine_(machine), options_(options), loops_(count_loops(pattern)) {}

  bool time(Timing* timing, std::string* error) {
    if (!time_repeats(timing, error)) return false;
    timing->loops = loops_.most;
    timing->repeats = pattern_.repeats;
    return true;
  }

 private:
  // The middle of many loops: as many are run as show what one takes, in two halves.
  bool run(std::uint32_t skipped_repeats, bool keep_path, Run* run, std::string* error) {
    constexpr std::uint64_t kFewest = 8, kMost = 64;
    constexpr double kAlike = 0.02;
    const std::uint64_t fill = 2 + longest_lag(pattern_);
    for (std::uint64_t half = kFewest;; half *= 4) {
      RunOptions options;
      options.late = options_.late;
      options.keep_path = keep_path;
      options.skipped_repeats = skipped_repeats;
      const std::uint64_t wanted = 2 * fill + 2 * half;
      const bool all = options_.run_all || pattern_.phased || loops_.full <= wanted;
      options.skipped_loops = all ? 0 : loops_.full - wanted;
      run->result = run_clock(pattern_, machine_, options);
      if (!run->result.error.empty()) {
        *error = run->result.error;
        return false;
      }
      run->end = static_cast<double>(run->result.end);
      run->loops_run = run->result.loop_ends.size();
      run->period = run->spread = 0;
      if (all) return true;
      const auto ended = [&](std::uint64_t loop) {
        return static_cast<double>(run->result.loop_ends[loop]);
      };
      const double first = ended(fill + half) - ended(fill);
      const double second = ended(fill + 2 * half) - ended(fill + half);
      run->period = (first + second) / static_cast<double>(2 * half);
      run->spread = first + second > 0 ? std::abs(first - second) / (first + second) : 0;
      run->end += run->period * static_cast<double>(options.skipped_loops);
      run->end = std::max(run->end, busiest(run->result, options.skipped_loops));
      if (run->spread <= kAlike || half >= kMost) return true;
    }
  }

  // The busiest port's time, with all loops: nothing takes less.
  double busiest(const RunResult& result, std::uint64_t skipped) const {
    std::uint64_t longest = 0;
    for (const std::uint64_t bytes : pattern_.lane_bytes) longest = std::max(longest, bytes);
    const double loops = static_cast<double>(longest) / static_cast<double>(pattern_.chunk_bytes);
    double busy = 0;
    for (const PortUse& use : result.use) busy = std::max(busy, static_cast<double>(use.busy));
    return busy * loops / (loops - static_cast<double>(skipped));
  }

  bool time_repeats(Timing* timing, std::string* error) {
    const std::uint32_t all = pattern_.repeats, period = pattern_.period_repeats;
    Run last;
    std::uint32_t ran = all;
    double end = 0;
    bool found = false;
    for (std::uint32_t periods = 3; period > 0 && !options_.run_all && !found; periods *= 2) {
      const std::uint64_t first = all % period + std::uint64_t{periods} * period;
      if (first + 2 * std::uint64_t{period} >= all) break;
      Run runs[3];
      for (std::uint32_t i = 0; i < 3; ++i) {
        ran = static_cast<std::uint32_t>(first) + i * period;
        if (!run(all - ran, i == 2 && options_.keep_path, &runs[i], error)) return false;
      }
      const double one = runs[1].end - runs[0].end, two = runs[2].end - runs[1].end;
      constexpr double kAlike = 1e-6;
      found = std::abs(two - one) <= kAlike * two;
      const std::uint32_t left_out = (all - ran) / period;  // a whole number of periods
      end = runs[2].end + two * left_out;
      last = std::move(runs[2]);
    }
    if (!found) {
      ran = all;
      if (!run(0, options_.keep_path, &last, error)) return false;
      end = last.end;
    }
    timing->us = us(end) + machine_.base_us;
    timing->period_us = us(last.period);
    timing->period_spread = last.spread;
    timing->loops_run = last.loops_run;
    timing->repeats_run = ran;
    timing->run = std::move(last.result);
    return true;
  }

  const Pattern& pattern_;
  const Machine& machine_;
  const TimeOptions& options_;
  const LoopCounts loops_;
};

}  // namespace

std::optional<Timing> time_plan(const ClockRequest& request, const Machine& machine,
                                const TimeOptions& options, std::string* error) {
  std::string problem = machine_error(machine);
  if (problem.empty()) problem = request_fault(request);
  if (problem.empty()) problem = parts_fault(request, machine);
  if (problem.empty()) problem = late_fault(request, options.late);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  ClockRequest asked = request;
  // Who is late, or shares a processor, does not do what others do at the same time.
  asked.unfolded = options.unfolded || !options.late.empty() || machine.cores > 0;
  const std::optional<Pattern> pattern = make_pattern(asked, machine, &problem);
  // (Of each lane, and of its four channels, something is kept: 2 GiB at most.)
  constexpr std::int64_t kMostLanes = 1 << 22;
  if (pattern && std::int64_t{pattern->ranks} * pattern->lanes > kMostLanes) {
    if (error != nullptr) {
      *error = std::to_string(pattern->ranks) + " ranks with " + std::to_string(pattern->lanes) +
               " lanes for so much data are more than " + std::to_string(kMostLanes) +
               " lanes: give fewer ranks or lanes";
    }
    return std::nullopt;
  }
  Timing timing;
  if (!pattern || !Timer(*pattern, machine, options).time(&timing, &problem)) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  timing.algorithm = pattern->algorithm;
  timing.ranks = pattern->all_ranks;
  timing.ranks_run = pattern->ranks;
  timing.exact = pattern->exact;
  timing.lanes = pattern->lanes;
  timing.chunk_bytes = pattern->chunk_bytes;
  return timing;
}

}  // namespace unjam
