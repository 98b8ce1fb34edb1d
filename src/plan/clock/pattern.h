// What the clock runs: all ranks' programs without anything that takes no time. Ranks are plain
// numbers, so that there may be more of them than a plan can name.
//
// A pattern may be *folded*. Where a turn by some ranks maps the programs onto themselves, as of a
// ring, only so many ranks are run, and peers beyond these stand for them: rank -1 for the last one
// of the leaf before. Folded times are those of all ranks, as every leaf does the same at the same
// time.
//
// A step may repeat, for programs that would grow with the ranks.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "plan/clock/machine.h"
#include "plan/plan.h"

namespace unjam {

struct ClockStep {
  std::uint16_t flags = 0;  // PrimitiveFlags
  std::uint16_t num_from = 0, num_to = 0;
  std::uint32_t part = 0;
  std::uint32_t lag = 0;
  std::uint32_t repeats = 1;
  bool grows = false;            // it repeats as often as there are ranks, but for a constant
  std::uint32_t first_peer = 0;  // in Pattern::peers: from whom, then to whom
  // Slices that it reads and writes, in the rank's own memory as well.
  std::uint16_t reads = 0, writes = 0;
};

struct Pattern {
  std::string algorithm;
  std::int64_t all_ranks = 1;
  int ranks = 1;        // that are run
  bool folded = false;  // peers may be no ranks that are run
  // Whether the ranks left out do what those do that are run, with as much data: not so if a leaf
  // is not full, or parts differ.
  bool exact = true;

  std::vector<std::uint32_t> first_step;  // of each rank, and the end
  std::vector<ClockStep> steps;
  std::vector<int> peers;

  // After so many repeats of its growing steps a program does the same again; 0: none grows.
  std::uint32_t period_repeats = 0;
  std::uint32_t repeats = 0;  // of each growing step

  // Loops cannot be left out: lags are as long as phases.
  bool phased = false;

  // The data. Part p on lane l: lane_bytes[p * lanes + l].
  Protocol protocol = Protocol::kSlot;
  std::uint32_t parts = 1, lanes = 1;
  std::vector<std::uint64_t> lane_bytes;
  std::uint64_t chunk_bytes = 1, slice_bytes = 1;

  std::span<const ClockStep> program(int rank) const {
    const auto r = static_cast<std::size_t>(rank);
    return std::span(steps).subspan(first_step[r], first_step[r + 1] - first_step[r]);
  }
  std::span<const int> from(const ClockStep& s) const {
    return std::span(peers).subspan(s.first_peer, s.num_from);
  }
  std::span<const int> to(const ClockStep& s) const {
    return std::span(peers).subspan(s.first_peer + s.num_from, s.num_to);
  }
  // Bytes on the way of a slice of so much data.
  std::uint64_t wire_bytes(std::uint64_t payload) const;

  // For who makes one: appends a step of the rank that is being written, or ends that rank.
  void add_step(ClockStep step, std::span<const int> from, std::span<const int> to);
  void end_rank() { first_step.push_back(static_cast<std::uint32_t>(steps.size())); }
};

// What is timed: the request's `rank` is not looked at, and `ranks` may be more than a group has.
struct ClockRequest {
  PlanRequest request;
  // "auto", a row of plan/registry.h, or one that the clock alone has.
  std::string algorithm = "auto";
  bool unfolded = false;  // every rank is run
};

// "a|b": what may be asked for, of the kind.
std::string clock_algorithms(Kind kind);

// The algorithm that is meant: that of the selector for "auto". Nothing, and an error that names
// the cure, if there is none or it does not serve the kind.
std::optional<std::string> clock_algorithm(const ClockRequest& request, const Machine& machine,
                                           std::string* error);

// The pattern. Nothing, and an error, where the algorithm has none for so many ranks.
std::optional<Pattern> make_pattern(const ClockRequest& request, const Machine& machine,
                                    std::string* error);

// Rings whose programs do not grow with the ranks, of any number of these: every part is taken to
// be as long as the longest one.
Pattern ring_pattern(const PlanRequest& request, const Machine& machine, bool unfolded);
// A ring in each node, and one across all nodes for each GPU's share: reduced in the node, across,
// and gathered in the node. All-reduces of whole nodes.
Pattern ring_2d_pattern(const PlanRequest& request, const Machine& machine, bool unfolded);

// Two trees between nodes, and a chain in each node. All-reduces of whole nodes. Nothing, and an
// error, where the machine has too few slots for plans of trees.
std::optional<Pattern> node_trees_pattern(const PlanRequest& request, const Machine& machine,
                                          std::string* error);

// The data of a plan with this geometry.
void add_geometry(const Geometry& geometry, std::uint32_t slot_bytes, Protocol protocol,
                  Pattern* pattern);

// What plans are made for.
PlanLimits limits_of(const Machine& machine);

}  // namespace unjam
