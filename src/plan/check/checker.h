// The plan checker: executes all ranks' plans of one collective symbolically and proves that they
// do what they should, for any group size, without a device or a thread.
//
// The model. Every connector is a FIFO of as many slots as are guaranteed. A rank runs its
// primitives strictly in order, slice by slice; a slice happens at once, when all that it receives
// is there and there is room for what it sends. Why one schedule and few loops are enough, and what
// it says of memory: docs/internals/plan-checker.md.
//
// Values stay at their place in the vector, so a value is whose it is, and nothing more; but for
// the all-to-all, where a slice of rank q's part r becomes rank r's part q.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace unjam {

// FIFOs with more slots than this are not modelled.
inline constexpr int kMaxCheckedSlots = 1024;

struct CheckOptions {
  int slots = 5;  // E
  std::uint32_t slot_bytes = 8192;
  bool find_slots_needed = true;
  bool run_all_loops = false;  // those too that would only be counted: for tests of the counting
};

struct CheckResult {
  bool ok = false;
  std::string error;  // which rank, primitive, part and loop, and what is wrong
  // Payload that the busiest rank, and all ranks together, send.
  std::uint64_t bytes_sent_max = 0;
  std::uint64_t bytes_sent_total = 0;
  // The longest chain of slices, each waiting for the one before it: program order, data, or room.
  // Loops that are counted only add what a loop takes between filling and draining.
  std::uint64_t steps = 0;
  // Fewest slots with which the plans do not deadlock (0: they send nothing); 0 if not searched.
  int slots_needed = 0;
  int slots = 0;
  std::uint32_t slot_bytes = 0;
  std::uint64_t loops = 0;  // of the lane that makes most
};

// plans[r] is rank r's; request.rank is ignored. Proves, or names what is wrong in `error`:
// - all ranks agree on the geometry, it covers the data, every primitive makes sense by itself;
// - sends and receives match in part, loop and length, and no FIFO keeps anything;
// - every output element is written, by the right block or by a result that holds every rank's
//   contribution exactly once, entered by one kContribute, finished by one kFinish, and reduced in
//   the same order for all ranks;
// - the plans do not deadlock themselves with that many slots.
CheckResult check_plans(const PlanRequest& request, const std::vector<Plan>& plans,
                        const CheckOptions& options);

}  // namespace unjam
