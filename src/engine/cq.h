// The completion queue: many producers (lanes), one consumer at a time. It holds one place for
// every invocation slot, so it is never full. bench/cq_bench.cc measures it against others.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "engine/invocation.h"

namespace unjam {

struct Cqe {
  std::uint16_t slot = 0;
  Outcome outcome = Outcome::kDone;
};

// Ring with the position inside the word: fetch_add on the tail, then one 64-bit store of
// {position + 1, entry}. The consumer knows a valid word by its position. No fence, no second
// counter; entries come out in the order of the fetch_adds.
struct RingCq {
  std::uint64_t* words = nullptr;
  std::uint32_t capacity = 0;
  alignas(kFalseSharingBytes) std::uint64_t tail = 0;
  alignas(kFalseSharingBytes) std::uint64_t head = 0;

  UNJAM_HD void push(Cqe e) {
    const std::uint64_t at = fetch_add<std::uint64_t>(tail, 1);
    // Release: the invocation's results come before its completion. The place was read: at most
    // `capacity` invocations are under way, each with one entry.
    store_release(words[at % capacity],
                  (at + 1) << 24 | static_cast<std::uint64_t>(e.outcome) << 16 | e.slot);
  }
  UNJAM_HD bool pop(Cqe& e) {
    const std::uint64_t h = load_relaxed(head);
    const std::uint64_t w = load_acquire(words[h % capacity]);
    if (w >> 24 != ((h + 1) & 0xffffffffffull)) return false;
    e = {static_cast<std::uint16_t>(w), static_cast<Outcome>(w >> 16 & 0xff)};
    store_relaxed(head, h + 1);
    return true;
  }
};

}  // namespace unjam
