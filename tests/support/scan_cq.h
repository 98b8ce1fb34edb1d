// The other completion queue of the paper (Sec. 5), which the library does not use:
// bench/cq_bench.cc measures it against the one that it does (engine/cq.h).
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "engine/cq.h"

namespace unjam {

// No ring: one compare-and-swap puts the entry into any writable word of a few; the consumer scans.
// Producers start at different words. Order is lost; an entry needs a free word, so with few words
// the producer must try again: the caller keeps the entry and goes on (`push` returns false).
struct ScanCq {
  std::uint64_t* words = nullptr;
  std::uint32_t capacity = 0;

  UNJAM_HD bool push(Cqe e, std::uint32_t start) {
    const std::uint64_t w = 1ull << 63 | static_cast<std::uint64_t>(e.outcome) << 16 | e.slot;
    for (std::uint32_t k = 0; k < capacity; ++k) {
      // Acquire-release: the results before the entry; the consumer's read before our reuse.
      if (compare_exchange<std::uint64_t>(words[(start + k) % capacity], 0, w)) return true;
    }
    return false;
  }
  // Pops one from the words at or after `cursor`, which it moves on.
  UNJAM_HD bool pop(Cqe& e, std::uint32_t& cursor) {
    for (std::uint32_t k = 0; k < capacity; ++k) {
      std::uint64_t& word = words[cursor];
      cursor = cursor + 1 == capacity ? 0 : cursor + 1;
      const std::uint64_t w = load_acquire(word);
      if (w == 0) continue;
      e = {static_cast<std::uint16_t>(w), static_cast<Outcome>(w >> 16 & 0xff)};
      store_release<std::uint64_t>(word, 0);
      return true;
    }
    return false;
  }
};

}  // namespace unjam
