// The clock: runs a pattern on a machine, event after event, in order of time.
//
// A lane of a rank runs its program in order, slice by slice. A slice begins when all that it
// receives is there and there is room for all that it sends; the lane is busy with it for a time
// (Machine::slice_us, …). Then what it sends goes through the ports on its way, each first come,
// first served, where a message enters the next port as it enters the first one, so that the
// slowest one counts; and arrives a latency later. What it has received is given back, which its
// sender knows a latency later. So a connector has at most Machine::slots slices under way.
//
// Times are whole picoseconds: what is equal by symmetry is equal.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/clock/machine.h"
#include "plan/clock/pattern.h"

namespace unjam {

using Picoseconds = std::int64_t;
inline constexpr double kPicosecondsAUs = 1e6;

// What would take longer, or more slices than some minutes are enough for, is not run to its end.
inline constexpr Picoseconds kLongestRun = 1'000'000'000'000'000'000;  // 10^6 s
inline constexpr std::uint64_t kMostSlices = 400'000'000;

enum class PortClass : std::uint8_t { kLinkOut, kLinkIn, kNicOut, kNicIn, kTrunkUp, kTrunkDown };
inline constexpr int kNumPortClasses = 6;
constexpr const char* to_string(PortClass c) {
  constexpr const char* kNames[kNumPortClasses] = {"link_out", "link_in",  "nic_out",
                                                   "nic_in",   "trunk_up", "trunk_down"};
  return kNames[static_cast<int>(c)];
}

struct LateRank {
  int rank = 0;
  double us = 0;
};

struct RunOptions {
  std::uint64_t skipped_loops = 0;    // full loops that each lane leaves out
  std::uint32_t skipped_repeats = 0;  // of each growing step
  std::vector<LateRank> late;
  bool keep_path = false;
};

// What a slice on the critical path began with.
enum class Cause : std::uint8_t { kStart, kOwn, kData, kRoom };

// A slice on the critical path. It begins when its cause has ended: the slice before it of the same
// lane (kOwn), or what came from `peer`, data or room. What that took follows, and then the slice.
struct PathSlice {
  int rank = 0, lane = 0;
  std::uint32_t step = 0;
  std::uint16_t flags = 0;  // the step's PrimitiveFlags
  std::uint64_t loop = 0;
  Cause cause = Cause::kStart;
  int peer = -1;
  bool between_nodes = false;            // the message's way, or the room's
  PortClass port = PortClass::kLinkOut;  // the slowest one on the message's way, if it has any
  Picoseconds queue = 0, transmit = 0, latency = 0;  // of the message
  Picoseconds core = 0;                              // waiting for a processor
  Picoseconds start = 0, end = 0;                    // of the slice itself
};

struct PortUse {
  Picoseconds busy = 0;    // of the busiest port of its class
  std::uint32_t port = 0;  // which of them
  std::uint32_t ports = 0;
};

struct RunResult {
  std::string error;  // a run that cannot go on
  Picoseconds end = 0;
  std::vector<Picoseconds> loop_ends;  // of the loops that are run, on all ranks
  std::vector<Picoseconds> rank_ends;
  std::uint64_t slices = 0, messages = 0, waits_for_room = 0;
  std::array<PortUse, kNumPortClasses> use;
  std::vector<PathSlice> path;  // if it was asked for, in order of time
};

// Loops of the lane that makes most; and those that are whole in all lanes.
struct LoopCounts {
  std::uint64_t most = 0, full = 0;
};
LoopCounts count_loops(const Pattern& pattern);

RunResult run_clock(const Pattern& pattern, const Machine& machine, const RunOptions& options);

}  // namespace unjam
