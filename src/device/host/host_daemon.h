// The host device's daemon: one block of threads a lane that runs the engine while there is work
// and sleeps otherwise. What is a resident kernel on a GPU is "a thread inside Engine::run()" here:
// synchronize() returns when none is.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "device/host/futex.h"
#include "engine/state.h"

namespace unjam {

struct HostDaemonOptions {
  unsigned block_threads = 1;
  std::uint64_t delay_seed = 0;  // 0: no injected delays
  std::uint32_t delay_max_us = 50;
};

class HostDaemon {
 public:
  // `completions` is notified after every CQE. `rank` must outlive the daemon.
  HostDaemon(RankState& rank, EventCount& completions, const HostDaemonOptions& options);
  // Stops the lanes wherever they are (contexts saved) and joins the threads.
  ~HostDaemon();
  HostDaemon(const HostDaemon&) = delete;
  HostDaemon& operator=(const HostDaemon&) = delete;

  // Tells lanes of this rank that there is something new (a submission, a cancellation).
  void ring(std::uint32_t lane);
  void ring_all();

  // Waits until every lane was seen outside its engine since the call; false on timeout
  // (timeout_us < 0: none).
  bool synchronize(std::int64_t timeout_us);

 private:
  struct Lane;
  enum class Gate { kClosed, kOpen, kCancelled };
  void lane_main(Lane& lane, unsigned thread);
  void join();

  RankState& rank_;
  EventCount& completions_;
  const HostDaemonOptions options_;
  std::atomic<Gate> gate_{Gate::kClosed};
  std::vector<std::unique_ptr<Lane>> lanes_;
};

}  // namespace unjam
