// How a host thread waits for a device.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <cstdint>

#include "base/clock.h"
#include "base/pause.h"

namespace unjam {

// Waits a little longer each time: polls, lets others run, sleeps for two slacks of the timers. (If
// it slept less, the next daemon would be there so soon that who makes the device synchronize waits
// for that one, too.)
class BackOff {
 public:
  void reset() { since_ns_ = monotonic_ns(); }
  std::uint64_t begun_ns() const { return since_ns_; }
  void pause() {
    const std::uint64_t waited = monotonic_ns() - since_ns_;
    if (waited < kPolls) {
      pause_core();
    } else if (waited < kYields) {
      sched_yield();
    } else {
      usleep(waited < kShort ? 10 : 50);
    }
  }

 private:
  static constexpr std::uint64_t kPolls = 30'000, kYields = 100'000, kShort = 1'000'000;
  std::uint64_t since_ns_ = monotonic_ns();
};

}  // namespace unjam
