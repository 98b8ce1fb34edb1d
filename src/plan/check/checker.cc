#include "plan/check/checker.h"

#include <algorithm>
#include <map>

#include "plan/check/lane_run.h"
#include "plan/check/symbolic.h"
#include "plan/check/validate.h"
#include "plan/common.h"

namespace unjam {
namespace {

// What full loops do between the pipeline's filling and its draining repeats, in all plans that
// there are every second loop or more often: the test Steps.AreThoseOfAllLoops runs all loops
// beside it. (Only the count of steps depends on it, no proof.)
constexpr std::uint64_t kPeriodLoops = 2;

// Lanes whose parts have the same lengths, and what they have in common.
struct LaneClass {
  std::uint32_t lane = 0;
  std::uint64_t lanes = 0;
  std::uint64_t loops = 0;
  std::uint64_t full_loops = 0;  // first loops, in which no part's chunk is cut short
};

std::vector<LaneClass> lane_classes(const Geometry& g) {
  std::map<std::vector<std::uint64_t>, LaneClass> classes;
  for (std::uint32_t lane = g.first_lane; lane < std::uint32_t{g.first_lane} + g.lanes; ++lane) {
    std::vector<std::uint64_t> lengths;
    for (std::uint32_t p = 0; p < g.parts; ++p) lengths.push_back(g.lane_part(p, lane).length);
    LaneClass& c = classes[lengths];
    if (c.lanes++ > 0) continue;
    c.lane = lane;
    c.loops = g.loops(lane);
    // (Of parts by lanes the others are empty here.)
    c.full_loops = g.by_lane ? lengths[g.longest_part_of(lane)] / g.chunk
                             : *std::min_element(lengths.begin(), lengths.end()) / g.chunk;
  }
  std::vector<LaneClass> result;
  for (const auto& [lengths, c] : classes) result.push_back(c);
  return result;
}

// At most `full` of the full loops, and all the others.
std::vector<LaneRun::Loop> loops_to_run(const LaneClass& c, std::uint64_t full) {
  std::vector<LaneRun::Loop> loops;
  for (std::uint64_t l = 0; l < std::min(full, c.full_loops); ++l) loops.push_back({l, 1});
  if (c.full_loops > full) loops.back().weight += c.full_loops - full;
  for (std::uint64_t l = c.full_loops; l < c.loops; ++l) loops.push_back({l, 1});
  return loops;
}

std::uint32_t longest_lag(const std::vector<Plan>& plans) {
  std::uint32_t lag = 0;
  for (const Plan& plan : plans) {
    for (const Primitive& p : plan.primitives) lag = std::max<std::uint32_t>(lag, p.lag);
  }
  return lag;
}

// How many of a lane's full loops are run: all, or those that fill the pipeline, a period, those
// that drain it, and what is left beside whole periods.
struct FullLoops {
  std::uint64_t filling = 0;  // in front of the period
  std::uint64_t run = 0;
  std::uint64_t more_periods = 0;  // that are counted only
};
FullLoops full_loops(const LaneClass& c, std::uint64_t lag, const CheckOptions& options) {
  FullLoops loops;
  loops.filling = 1 + lag;  // a loop ends `lag` passes after it began
  const std::uint64_t least = loops.filling + kPeriodLoops + 1 + lag;
  if (options.run_all_loops || c.full_loops <= least) return {0, c.full_loops, 0};
  loops.run = least + (c.full_loops - least) % kPeriodLoops;
  loops.more_periods = (c.full_loops - loops.run) / kPeriodLoops;
  return loops;
}

std::uint64_t count_steps(const LaneRun& run, const FullLoops& full, std::size_t loops_run) {
  std::uint64_t steps = 0;
  for (std::size_t i = 0; i < loops_run; ++i) steps = std::max(steps, run.loop_end(i));
  if (full.more_periods == 0) return steps;
  const std::uint64_t period =
      run.loop_end(full.filling + kPeriodLoops) - run.loop_end(full.filling);
  return steps + full.more_periods * period;
}

int search_slots(const PlanRequest& request, const std::vector<Plan>& plans, const LaneClass& c,
                 const CheckOptions& options) {
  for (int slots = 1; slots < options.slots; ++slots) {
    LaneRun run(request, plans, c.lane, slots, options.slot_bytes,
                loops_to_run(c, 1 + 2 * longest_lag(plans)), nullptr);
    if (run.run()) return slots;
  }
  return options.slots;
}

}  // namespace

CheckResult check_plans(const PlanRequest& request, const std::vector<Plan>& plans,
                        const CheckOptions& options) {
  CheckResult result;
  result.slots = options.slots;
  result.slot_bytes = options.slot_bytes;
  PlanLimits limits;
  limits.guaranteed_slots = static_cast<std::uint32_t>(std::max(options.slots, 0));
  limits.guaranteed_slot_bytes = options.slot_bytes;
  PlanRequest any_rank = request;
  any_rank.rank = 0;
  result.error = request_error(any_rank, limits);
  if (result.error.empty() && options.slots > kMaxCheckedSlots) {
    result.error = "at most " + std::to_string(kMaxCheckedSlots) + " slots can be checked";
  }
  if (result.error.empty()) result.error = validate_plans(request, plans, options.slot_bytes);
  if (!result.error.empty()) return result;

  ValuePool values(request.ranks);
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(request.ranks), 0);
  for (const LaneClass& c : lane_classes(plans[0].geometry)) {
    const FullLoops full = full_loops(c, longest_lag(plans), options);
    const std::vector<LaneRun::Loop> loops = loops_to_run(c, full.run);
    LaneRun run(request, plans, c.lane, options.slots, options.slot_bytes, loops, &values);
    if (!run.run()) {
      result.error = run.error();
      if (plans[0].geometry.lanes > 1)
        result.error = "lane " + std::to_string(c.lane) + ": " + result.error;
      return result;
    }
    for (int r = 0; r < request.ranks; ++r) {
      bytes[static_cast<std::size_t>(r)] += c.lanes * run.bytes_sent(r);
    }
    result.loops = std::max(result.loops, c.loops);
    result.steps = std::max(result.steps, count_steps(run, full, loops.size()));
    if (options.find_slots_needed && run.sends_anything()) {
      result.slots_needed = std::max(result.slots_needed, search_slots(request, plans, c, options));
    }
  }
  for (const std::uint64_t b : bytes) {
    result.bytes_sent_max = std::max(result.bytes_sent_max, b);
    result.bytes_sent_total += b;
  }
  result.ok = true;
  return result;
}

}  // namespace unjam
