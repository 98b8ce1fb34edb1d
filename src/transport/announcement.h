// A note of what was called, by which a rank learns at once that another one has called something
// else under the same key and use. Each (key, use) has one place in the arena of one member;
// whoever calls first writes its signature's hash there, later ones compare.
//
// A hint, not a proof: places are reused without waiting, so a note may be gone (then the stall
// watcher finds the disagreement), and two different calls may share a place and 32 bits of hash
// (then the full signatures, which the finder compares next, turn out equal or absent).
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/hash.h"
#include "transport/arena.h"

namespace unjam {

// False if another rank has announced a different signature for this call. `table`: the
// announcements in the arena of the member that all ranks agree on for the tag. One
// compare-and-swap, no loop: losing a race against a reuser only loses the hint. Nothing is
// published through the word, so its order does not matter beyond its own atomicity.
// The low bit is always set: without it the word tells that a disagreement was found.

inline std::uint64_t announcement(std::uint64_t id, std::uint64_t signature) {
  return (id & ~0xffffffffull) | (signature & 0xffffffffull) | 1;
}

inline void announce_disagreement(std::uint64_t* table, std::uint64_t tag, std::uint64_t n) {
  const std::uint64_t id = hash_combine(tag, n);
  store_release(table[id % kAnnouncements], id & ~std::uint64_t{0xffffffff});
}

inline bool announce(std::uint64_t* table, std::uint64_t tag, std::uint64_t n,
                     std::uint64_t signature) {
  const std::uint64_t id = hash_combine(tag, n);
  std::uint64_t& place = table[id % kAnnouncements];
  const std::uint64_t mine = announcement(id, signature);
  const std::uint64_t found = load_acquire(place);
  if (found >> 32 == mine >> 32) return found == mine;
  compare_exchange(place, found, mine);
  return true;
}

}  // namespace unjam
