// Waits for the descriptors and the deadlines of many watchers in one thread: one agent in a
// process, or thousands in a test.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/fd.h"

namespace unjam {

class Watcher {
 public:
  virtual ~Watcher() = default;
  // What the token stands for can be read, or written, or has broken.
  virtual void on_ready(std::uint64_t token, bool readable, bool writable) = 0;
  virtual void on_time() = 0;
  // After all that was ready in this round, for who has asked for it.
  virtual void on_round_end() = 0;
};

// Not thread-safe but where it says so.
class Poller {
 public:
  // Throws where the system denies it a descriptor.
  Poller();
  Poller(const Poller&) = delete;
  Poller& operator=(const Poller&) = delete;

  // Returns a token that is never used again; 0: the system has no room for it.
  std::uint64_t watch(Watcher* watcher, int fd, bool read, bool write);
  void change(std::uint64_t token, bool read, bool write);
  // Before its descriptor is closed. Events that were found already are forgotten too.
  void forget(std::uint64_t token);
  // When on_time() is to be called next, by the monotonic clock; 0: never.
  void at(Watcher* watcher, std::uint64_t deadline_ns);
  void at_round_end(Watcher* watcher);
  // The watcher goes; its tokens it has forgotten itself.
  void leave(Watcher* watcher);

  // Handles what is ready, or waits for it, for at most that time (< 0: no limit).
  void run_once(std::int64_t timeout_ms);
  // Any thread: the function runs in the thread that runs the poller, which is woken.
  void post(std::function<void()> what);

 private:
  struct Entry {
    Watcher* watcher;
    int fd;
    std::uint32_t events;
  };
  Fd epoll_, wake_;
  std::uint64_t last_token_ = 0;  // 0 is the wake-up's own
  std::unordered_map<std::uint64_t, Entry> entries_;
  std::set<std::pair<std::uint64_t, Watcher*>> deadlines_;
  std::unordered_map<Watcher*, std::uint64_t> deadline_of_;
  std::vector<Watcher*> round_end_;
  int full_rounds_ = 0;
  std::mutex mutex_;  // posted_
  std::vector<std::function<void()>> posted_;
};

}  // namespace unjam
