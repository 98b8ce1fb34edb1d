// Completion queues: many producers (lanes), one consumer at a time. The paper's two optimised
// variants (Sec. 5), measured against each other by bench/cq_bench.cc. Both hold one place for
// every invocation slot, so they are never full.
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
