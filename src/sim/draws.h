// What chance decides in a round. Both engines consume the same draws, so they can be compared
// round by round. A draw depends on (seed, round, its number) alone: no thread, no order of rounds
// matters.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/job.h"

namespace unjam::sim {

// At its invocation number `at`, the GPU skips so many entries of its remaining list (at least 1;
// fewer than remain).
struct Disorder {
  std::uint32_t gpu = 0;
  std::uint32_t at = 0;
  std::uint32_t skips = 0;
};

// Before its invocation number `at`, the GPU takes so many turns in a row for synchronisations.
struct Sync {
  std::uint32_t gpu = 0;
  std::uint32_t at = 0;
  std::uint32_t count = 0;
};

// All of a round, in the job's drawing order of GPUs, `at` ascending.
struct Draws {
  std::vector<Disorder> disorders;
  std::vector<Sync> syncs;
};

// Draws only where something happens: the gaps between events are geometric, which is what a coin
// for each invocation would give.
class Drawer {
 public:
  explicit Drawer(const Job& job);
  void draw(std::uint64_t round, Draws* draws) const;
  // The same distribution from one coin a decision, as the definition says; for tests.
  void draw_by_coins(std::uint64_t round, Draws* draws) const;

 private:
  struct Place {
    std::uint32_t gpu;
    std::uint32_t at;
  };
  Place place(std::uint64_t invocation, std::uint32_t* hint) const;

  const Job& job_;
  std::vector<std::uint64_t> begin_;   // first invocation of each GPU, in drawing order
  std::vector<std::uint32_t> bucket_;  // where in begin_ to look first
  std::uint64_t bucket_width_ = 1;
  double gap_disorder_ = 0, gap_sync_ = 0;    // 1 / log(1 - p)
  double more_disorder_ = 0, more_sync_ = 0;  // 1 / log(p)
};

}  // namespace unjam::sim
