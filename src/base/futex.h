// Sleeping and waking on a 32-bit word, also between processes that share the word's memory.
#pragma once

#include <atomic>
#include <cstdint>

namespace unjam {

// Longer ones (3 years) are no limit: their arithmetic in nanoseconds would overflow.
inline constexpr std::int64_t kLongestTimeoutUs = 100'000'000'000'000;

// Several kinds of sleepers may share a word: a wake-up reaches those whose set meets its own.
inline constexpr std::uint32_t kAllSleepers = ~std::uint32_t{0};

// Sleeps while word == expected; at most timeout_us (< 0: no limit). Returns at spurious wake-ups
// too.
void futex_wait(std::uint32_t& word, std::uint32_t expected, std::int64_t timeout_us,
                std::uint32_t set = kAllSleepers);
void futex_wake_all(std::uint32_t& word, std::uint32_t set = kAllSleepers);

// An event count: waiters take the epoch, look at the state that they wait for, and sleep unless
// notify() came in between.
//
// No wake-up is lost: notify() increments the epoch, then reads the number of waiters; a waiter
// increments that number, then the kernel compares the epoch. All four are sequentially consistent,
// so at least one of the two sees the other.
class EventCount {
 public:
  std::uint32_t epoch() const { return epoch_.load(std::memory_order_seq_cst); }
  void notify();
  void wait(std::uint32_t epoch, std::int64_t timeout_us);

 private:
  std::atomic<std::uint32_t> epoch_{0};
  std::atomic<std::uint32_t> waiters_{0};
};

}  // namespace unjam
