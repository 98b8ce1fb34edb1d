// On whose account a rank has given up calls, see Context::give_up().
#pragma once

#include <atomic>
#include <cstddef>
#include <mutex>
#include <vector>

namespace unjam {

// Any thread, with or without the context's lock.
class GivenUpRanks {
 public:
  explicit GivenUpRanks(std::size_t ranks) : is_in_(ranks) {}

  // False: it was there before.
  bool add(int rank) {
    const std::lock_guard lock(mutex_);
    if (is_in_[static_cast<std::size_t>(rank)]) return false;
    is_in_[static_cast<std::size_t>(rank)] = true;
    ranks_.push_back(rank);
    // Release: who reads that many without the lock takes it to read them.
    count_.store(ranks_.size(), std::memory_order_release);
    return true;
  }
  // Behind the first `known` of them, in the order in which they came.
  std::vector<int> since(std::size_t known) const {
    if (count_.load(std::memory_order_acquire) <= known) return {};
    const std::lock_guard lock(mutex_);
    return {ranks_.begin() + static_cast<std::ptrdiff_t>(known), ranks_.end()};
  }

 private:
  mutable std::mutex mutex_;  // held for a moment only, with no other taken behind it
  std::vector<int> ranks_;
  std::vector<bool> is_in_;  // by rank
  std::atomic<std::size_t> count_{0};
};

}  // namespace unjam
