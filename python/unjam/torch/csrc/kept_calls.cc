#include "kept_calls.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <mutex>
#include <utility>
#include <vector>

#include "call.h"

namespace unjam_torch {
namespace {

struct Kept {
  std::mutex mutex;
  std::deque<std::shared_ptr<Call>> calls;
  // Of calls, to look at without the mutex. Relaxed: who reads an old number looks the next time.
  std::atomic<std::size_t> count{0};
};
// Lives as long as the process, for the library's threads may keep a call at its end.
Kept& kept_calls() {
  static auto* const kept = new Kept;
  return *kept;
}

}  // namespace

void keep_until_complete(std::shared_ptr<Call> call) {
  Kept& kept = kept_calls();
  const std::lock_guard lock(kept.mutex);
  if (std::exchange(call->kept_, true)) return;  // the list has it: ours is not the last reference
  kept.calls.push_back(std::move(call));
  kept.count.store(kept.calls.size(), std::memory_order_relaxed);
}

void release_complete(bool all) {
  constexpr std::size_t kMost = 64, kMostPending = 4;
  Kept& kept = kept_calls();
  if (kept.count.load(std::memory_order_relaxed) == 0) return;
  std::vector<std::shared_ptr<Call>> gone;
  {
    const std::lock_guard lock(kept.mutex);
    std::size_t looks = all ? kept.calls.size() : std::min(kept.calls.size(), kMost);
    // Most operations end in the order of their calls, so there is little behind a few that pend.
    for (std::size_t pending = 0; looks != 0 && (all || pending < kMostPending); --looks) {
      std::shared_ptr<Call> call = std::move(kept.calls.front());
      kept.calls.pop_front();
      if (call->complete() && call->idle()) {
        call->kept_ = false;
        gone.push_back(std::move(call));
      } else {
        kept.calls.push_back(std::move(call));
        ++pending;
      }
    }
    kept.count.store(kept.calls.size(), std::memory_order_relaxed);
  }
  for (const std::shared_ptr<Call>& call : gone) call->report_unseen_error();
}

void forked_kept_calls() {
  Kept& kept = kept_calls();
  new (&kept.mutex) std::mutex;
  new (&kept.calls) std::deque<std::shared_ptr<Call>>;
  kept.count.store(0);
}

}  // namespace unjam_torch
