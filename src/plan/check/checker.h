// The plan checker: executes all ranks' plans of one collective symbolically and proves that they
// do what they should, for any group size, without a device or a thread.
//
// The model. Every connector (from, to, lane) is a FIFO of E slots, the guaranteed ones: no larger
// slot can be borrowed, the worst case. A chunk is cut into slices of one slot (a packet chunk is
// one slice). A rank runs its primitives strictly in order, slice by slice; a slice of a primitive
// happens at once, when all the slices it receives are there and there is room for what it sends.
//
// Why one schedule is enough. Every FIFO has one writer and one reader, every rank is sequential,
// and what a rank does next never depends on what it finds in a FIFO or on time. Unrolled, such a
// network is a marked graph (each place, data or room, has one producer and one consumer): an event
// that can happen stays possible until it happens, so every schedule runs the same events, and
// every schedule that cannot go on has run the same set of them. Therefore: if one greedy schedule
// completes, all do (no deadlock is possible); if it gets stuck, all do; the values are the
// same in all (Kahn); and more slots never cause a deadlock.
//
// Why few loops are enough. A loop in which no chunk is cut short is a repetition of loop 0 on
// other data, disjoint from all other loops'. Consider the schedule in which all ranks finish a
// loop before any begins the next. If each loop alone, begun with empty FIFOs, completes and leaves
// them empty, this schedule completes, and so, as above, does every other, with the same values. So
// loop 0 and the loops that are cut short decide for all. Some more full loops are run
// all the same, without a barrier between them: those that fill the pipeline, a period, and those
// that drain it; the rest are counted only, by the steps of that period. (With lags,
// ranks are never all between two loops with empty FIFOs. There what lies two lags behind the
// beginning repeats: a circle of ranks that wait for one another has a copy a pass earlier, down to
// the first pass in which all primitives have a chunk. So as many more loops are run; rsag.h argues
// for any number.) Lanes share nothing; of lanes with equal lengths one is run.
//
// Memory. Out of place, input and output are different memory; in place, a slice of the input is
// lost once the output slice at its position has been written. A plan whose reads of the input all
// come before such a write (or find the same value rewritten) does the same in both models, so
// checking for that proves both with one execution. (On a GPU slices of a turn overlap in time, and
// that a read comes first in the program is not enough, see "Slices in a pipeline" in
// docs/internals/engine.md: what overwrites it must come from a peer that has had what was read.)
// An all-to-all is never in place.
//
// Values stay at their place in the vector, so a value is whose it is, and nothing more; but for
// the all-to-all, where a slice of rank q's part r becomes rank r's part q. It goes there in one
// hop (validate.cc), and both ends' parts are compared with the two ranks.
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
