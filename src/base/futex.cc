#include "base/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>

namespace unjam {

void futex_wait(std::uint32_t& word, std::uint32_t expected, std::int64_t timeout_us,
                std::uint32_t set) {
  timespec t{};
  if (timeout_us >= 0) {  // the call takes a point of time
    clock_gettime(CLOCK_MONOTONIC, &t);
    t.tv_sec += timeout_us / 1000000;
    t.tv_nsec += (timeout_us % 1000000) * 1000;
    if (t.tv_nsec >= 1000000000) {
      t.tv_nsec -= 1000000000;
      ++t.tv_sec;
    }
  }
  // Not FUTEX_PRIVATE: the word may be shared with other processes.
  syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, expected, timeout_us < 0 ? nullptr : &t, nullptr,
          set);
}

void futex_wake_all(std::uint32_t& word, std::uint32_t set) {
  syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT_MAX, nullptr, nullptr, set);
}

void EventCount::notify() {
  epoch_.fetch_add(1, std::memory_order_seq_cst);
  if (waiters_.load(std::memory_order_seq_cst) != 0) {
    futex_wake_all(reinterpret_cast<std::uint32_t&>(epoch_));
  }
}

void EventCount::wait(std::uint32_t epoch, std::int64_t timeout_us) {
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  if (epoch_.load(std::memory_order_seq_cst) == epoch) {
    futex_wait(reinterpret_cast<std::uint32_t&>(epoch_), epoch, timeout_us);
  }
  waiters_.fetch_sub(1, std::memory_order_seq_cst);
}

}  // namespace unjam
