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

// What others have announced for a call: nothing else, a different signature, or that it has been
// ended on all ranks.
enum class Announced { kAgreed, kDiffers, kEnded };

// `table`: the announcements in the arena of the member that all ranks agree on for the tag. One
// compare-and-swap, no loop: losing a race against a reuser only loses the hint. Nothing is
// published through the word, so its order does not matter beyond its own atomicity.
// The low bit is always set: without it, and without a signature, the word tells that the call has
// been ended.

inline std::uint64_t announcement(std::uint64_t id, std::uint64_t signature) {
  return (id & ~0xffffffffull) | (signature & 0xffffffffull) | 1;
}

inline void announce_end(std::uint64_t* table, std::uint64_t tag, std::uint64_t n) {
  const std::uint64_t id = hash_combine(tag, n);
  store_release(table[id % kAnnouncements], id & ~std::uint64_t{0xffffffff});
}

inline Announced announce(std::uint64_t* table, std::uint64_t tag, std::uint64_t n,
                          std::uint64_t signature) {
  const std::uint64_t id = hash_combine(tag, n);
  std::uint64_t& place = table[id % kAnnouncements];
  const std::uint64_t mine = announcement(id, signature);
  const std::uint64_t found = load_acquire(place);
  if (found == mine) return Announced::kAgreed;
  if (found >> 32 == mine >> 32 && found != 0) {  // 0: nobody has used the place yet
    return (found & 1) == 0 ? Announced::kEnded : Announced::kDiffers;
  }
  compare_exchange(place, found, mine);
  return Announced::kAgreed;
}

}  // namespace unjam
