// The synchronisation model as a discrete-event simulation. Between synchronisations every GPU
// invokes one collective a step, so its progress at any time is known without looking; only
// synchronisations and the ends of suspensions are events.
#pragma once

#include <cstdint>
#include <vector>

#include "sim/draws.h"
#include "sim/job.h"
#include "sim/outcome.h"
#include "sim/sparse_orders.h"

namespace unjam::sim {

class SynchronizationEvents {
 public:
  explicit SynchronizationEvents(const Job& job);
  void run(const Draws& draws, const SparseOrders& orders, const Wanted& wanted, Outcome* outcome);

 private:
  // A turn: which GPU, in which step; turns are totally ordered.
  struct Turn {
    std::uint64_t step = 0;
    std::uint32_t gpu = 0;
    friend auto operator<=>(const Turn&, const Turn&) = default;
  };
  struct Event {
    Turn when;
    bool check = false;     // look whether `gpu` may go on; else: `gpu` synchronises
    std::uint32_t gpu = 0;  // of a check; `when` is the turn after which it looks
    // Synchronisations of a turn before the checks after it.
    friend auto operator<=>(const Event&, const Event&) = default;
  };
  struct Gpu {
    // While it runs: invocation i happens in step `offset + i`, but none before `invoked`.
    std::int64_t offset = 0;
    std::uint32_t invoked = 0;  // at the last event; while suspended: exactly
    bool suspended = false;
    std::uint32_t turns_lost = 0;        // further synchronisations after the one that suspends it
    Turn check;                          // of the pending check
    std::size_t sync = 0, sync_end = 0;  // its next and last draws
  };
  // Some suspended GPU waits until `gpu` has made the invocation at `position`.
  struct Target {
    std::uint32_t gpu;
    std::uint32_t position;
  };

  // Runs the component of GPUs whose draws are syncs[begin, end).
  void run_component(std::size_t begin, std::size_t end, Outcome* outcome);
  void synchronize(Turn now, Outcome* outcome);
  void check(const Event& event);
  void find_targets(Turn now);
  void decide(Turn now, Outcome* outcome);
  // Invocations that a GPU has made before the turn `now`, or including it.
  std::uint32_t progress(std::uint32_t gpu, Turn now, bool including) const;
  // When all of the first `count` collectives of a slot are invoked: the last one's position.
  std::uint32_t last_of(std::uint32_t gpu, std::uint32_t slot, std::uint32_t count) const;
  // Not later than the turn after which all targets are invoked.
  Turn earliest_end(std::uint32_t gpu) const;
  void schedule_sync(std::uint32_t gpu);
  void push(const Event& event);
  bool awaits(std::uint32_t a, std::uint32_t b) const;
  bool reaches_itself(std::uint32_t gpu);
  Collective awaited(std::uint32_t a, std::uint32_t b) const;
  bool has_invoked(std::uint32_t gpu, std::uint32_t slot, std::uint32_t k) const;

  const Job& job_;
  const Draws* draws_ = nullptr;
  const SparseOrders* orders_ = nullptr;
  Wanted wanted_;
  bool over_ = false;  // the component
  std::vector<Gpu> gpus_;
  std::vector<std::vector<Target>> targets_;  // [GPU]
  std::vector<std::uint32_t> suspended_;
  std::vector<Event> heap_;
  std::vector<std::uint32_t> stack_, seen_;
};

}  // namespace unjam::sim
