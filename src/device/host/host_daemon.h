// The host device's daemon: one block of threads a lane that runs the engine while there is work
// and sleeps otherwise. What is a resident kernel on a GPU is "a thread inside Engine::run()" here:
// synchronize() returns when none is.
//
// Whoever waits, helps: a thread that waits for an invocation may run the first lane's engine
// itself while no other thread does (engine/lease.h), which saves the way to the daemon's thread
// and back. Where a lane is free, the daemon's thread is the taker that rings wake.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/futex.h"
#include "engine/daemon.h"
#include "engine/state.h"

namespace unjam {

class CourierDriver;

struct HostDaemonOptions {
  unsigned block_threads = 1;
  std::uint64_t delay_seed = 0;  // 0: no injected delays
  std::uint32_t delay_max_us = 50;
  bool help = true;                  // threads from outside may run engines
  CourierDriver* network = nullptr;  // null: all ranks are on this host
  // To be called, without a lock, when an engine has run: its lane may want more of rooms.
  std::function<void()> look_at_wishes;
};

class HostDev;

class HostDaemon : public Daemon {
 public:
  // `completions` is notified after every CQE. `rank` must outlive the daemon.
  HostDaemon(RankState& rank, EventCount& completions, const HostDaemonOptions& options);
  ~HostDaemon() override;  // stop()
  HostDaemon(const HostDaemon&) = delete;
  HostDaemon& operator=(const HostDaemon&) = delete;

  // Stops the lanes wherever they are (contexts saved), joins the threads, and waits until no
  // other thread runs an engine. Calls after that do nothing.
  void stop() override;

  void submit(const Invocation& inv, const KeyState* fresh) override;
  void completes(std::uint16_t slot, std::uint64_t* word, std::uint64_t value) override;
  void cancel(std::uint16_t slot) override;
  void ring(std::uint32_t lane) override;
  void ring_all() override;

  // Whether other threads may run engines here.
  bool can_help() const override;
  // As ring(0) after a submission; but if the first lane is free, this thread makes the first
  // attempt (never waits; whatever cannot move at once stays with the daemon).
  void ring_and_attempt() override;
  // Runs the first lane's engine in this thread, unless another thread does: then false, at once.
  // Between runs, and whenever the lane was rung, asks `look` (which takes completions out of the
  // CQ) whether to go on; sleeps while nothing can move. Returns when `look` said no, or at the
  // deadline; what is left is then the daemon's. One thread at a time.
  bool help(const std::function<bool()>& look, std::uint64_t deadline_ns) override;

  bool synchronize(std::int64_t timeout_us) override;

  // See completes().
  struct Completes {
    std::uint64_t* word = nullptr;
    std::uint64_t value = 0;
  };

 private:
  struct Lane;
  class Guest;
  enum class Gate { kClosed, kOpen, kCancelled };
  void lane_main(Lane& lane, unsigned thread);
  bool take_when_rung(Lane& lane);
  void stay(Lane& lane, HostDev& dev);
  void hand_over(Lane& lane);
  void join();

  RankState& rank_;
  EventCount& completions_;
  const HostDaemonOptions options_;
  std::atomic<Gate> gate_{Gate::kClosed};
  // Threads from outside that are here, and kStopped.
  static constexpr std::uint32_t kStopped = 1u << 31;
  std::atomic<std::uint32_t> guests_{0};
  // By slot. Written before the submission, read behind it by the lane that completes it.
  std::vector<Completes> completes_;
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace unjam
