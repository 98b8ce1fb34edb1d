// Many rounds on many threads.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "sim/draws.h"
#include "sim/job.h"
#include "sim/outcome.h"
#include "sim/plain.h"
#include "sim/single_queue.h"
#include "sim/sparse_orders.h"
#include "sim/synchronization.h"

namespace unjam::sim {

// The event-driven engine: a thread's working memory and the three ways to decide a round.
class EventEngine {
 public:
  explicit EventEngine(const Job& job);
  Outcome run(const Draws& draws, const Wanted& wanted);

 private:
  SparseOrders orders_;
  std::unique_ptr<ExactSingleQueue> exact_;
  std::unique_ptr<ReleasedSingleQueue> released_;
  std::unique_ptr<SynchronizationEvents> synchronization_;
};

inline constexpr std::uint64_t kNoRound = UINT64_MAX;

struct Counts {
  std::uint64_t rounds = 0;
  std::uint64_t exact = 0;     // rounds that deadlock
  std::uint64_t released = 0;  // rounds that the released code would count
  std::uint64_t released_only = 0;
  std::uint64_t exact_only = 0;
  std::uint64_t first_exact = kNoRound;  // the lowest such round
  std::uint64_t first_released = kNoRound;
  std::uint64_t disorders = 0;
  std::uint64_t syncs = 0;
};

class Simulator {
 public:
  explicit Simulator(JobSpec spec);
  Simulator(const Simulator&) = delete;  // its parts refer to each other
  Simulator& operator=(const Simulator&) = delete;

  const Job& job() const { return job_; }
  // Rounds first .. first + rounds - 1. The result is the same for any number of threads. One call
  // at a time.
  Counts run(std::uint64_t first, std::uint64_t rounds, unsigned threads, Wanted wanted,
             bool plain);
  // One round with its reasons, as JSON.
  std::string describe(std::uint64_t round, bool plain) const;

 private:
  Job job_;
  Drawer drawer_;
  std::vector<std::unique_ptr<EventEngine>> engines_;  // one a thread, kept between runs
};

}  // namespace unjam::sim
