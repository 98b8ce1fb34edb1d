// Writes a plan's program: a planner says with which group ranks a primitive has to do, and the
// plan gets its neighbours, sets and codes (program/primitive.h).
#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace unjam {

// With whom a primitive has to do, by group rank.
class PeerRanks {
 public:
  static PeerRanks nobody() { return {}; }
  static PeerRanks one(int rank) { return PeerRanks(false, {rank}); }
  // In any order; at most kMostNeighbours.
  static PeerRanks set(std::vector<int> ranks) { return PeerRanks(true, std::move(ranks)); }

  bool is_set() const { return is_set_; }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  PeerRanks() = default;
  PeerRanks(bool is_set, std::vector<int> ranks) : is_set_(is_set), ranks_(std::move(ranks)) {}
  bool is_set_ = false;
  std::vector<int> ranks_;
};

class ProgramBuilder {
 public:
  ProgramBuilder(int ranks, int rank) : ranks_(ranks), rank_(rank) {}

  // All members but this rank, and, if they are given, but others.
  PeerRanks all_others(int but = -1) const;

  // Appends a primitive. flags: PrimitiveFlags, of which kRecv and kSend are set where there is
  // somebody to receive from, or to send to.
  void add(unsigned flags, int part, PeerRanks from = PeerRanks::nobody(),
           PeerRanks to = PeerRanks::nobody(), std::uint32_t lag = 0);

  // The program, with its neighbours and sets, into the plan, whose geometry must be set.
  void write(Plan* plan) const;

  // The primitives as they were added, with their peers by rank: also of more ranks than a plan's
  // codes can name (plan/clock).
  struct Step {
    Primitive primitive;
    PeerRanks from, to;
  };
  const std::vector<Step>& steps() const { return steps_; }

 private:
  int ranks_, rank_;
  std::vector<Step> steps_;
};

}  // namespace unjam
