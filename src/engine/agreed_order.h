// How ranks that are called in different orders come to be at the same invocations: a lane that has
// seen disorder, and then hears nothing from its peers for EnginePolicy::order_after_us, puts what
// is in its queue into an order that all ranks would choose, by how often the key was used, then by
// the seed. Nobody is asked. Why it is a guess, and when it is worth it:
// docs/internals/coming-together.md.
//
// Disorder: an invocation ends although one that is alike stands in front of it (and of those that
// it was tried with): of the same kind, as short or long, among as many ranks, of which this one is
// the same. Nobody waits for ever: what comes more than kOpenNs behind the first time that
// something was put in order stays behind all that was, which is closed then.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "engine/task_queue.h"

namespace unjam {

inline constexpr std::uint64_t kOpenNs = 10'000'000;
inline constexpr std::uint32_t kMostInOrder = 64;  // at a time

// By one thread, or each word by another one, with barriers between the steps
// (Passes::put_in_order()).
struct AgreedOrder {
  std::uint32_t n = 0;
  std::uint16_t after = kNoSlot;  // what stands behind them
  std::uint16_t slots[kMostInOrder] = {}, sorted[kMostInOrder] = {};
  std::uint64_t uses[kMostInOrder] = {}, seeds[kMostInOrder] = {};

  // The first ones that may be put in order. False: there are not even two.
  UNJAM_HD bool take(const TaskQueue& queue) {
    n = 0;
    after = queue.first_open();
    for (; after != kNoSlot && n < kMostInOrder; after = queue.next(after)) slots[n++] = after;
    return n > 1;
  }
  UNJAM_HD void sort(std::uint32_t i) {
    std::uint32_t place = 0;
    for (std::uint32_t j = 0; j < n; ++j) place += j != i && precedes(j, i) ? 1 : 0;
    sorted[place] = slots[i];
  }

 private:
  UNJAM_HD bool precedes(std::uint32_t j, std::uint32_t i) const {
    if (uses[j] != uses[i]) return uses[j] < uses[i];
    if (seeds[j] != seeds[i]) return seeds[j] < seeds[i];
    return j < i;
  }
};

// Whether a lane has seen disorder lately: two ends are enough, and of many it takes some dozens of
// ends in order to forget, as many as an application may have between two of its iterations.
class Disorder {
 public:
  UNJAM_HD void note_end(bool overtook) {
    if (overtook) {
      seen_ = seen_ + kWeight > kMost ? kMost : seen_ + kWeight;
    } else if (seen_ != 0) {
      --seen_;
    }
  }
  UNJAM_HD bool expected() const { return seen_ >= kEnough; }

 private:
  static constexpr std::uint32_t kWeight = 4, kEnough = 8, kMost = 64;
  std::uint32_t seen_ = 0;
};

}  // namespace unjam
