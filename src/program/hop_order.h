// In which order the slices of a mesh plan (plan/algorithms/mesh.cc, not "together") go through a
// connector, in closed form: for who moves the hops of such a plan independently of each other, and
// must say at any time how much of it anybody else could take for a program that was interrupted.
//
// Chunk l is sent in pass l (the first hop: a contribution, or all there is), its result in pass
// l + lag (the second hop), behind the pass's contribution. Both ends of a connector number its
// slices alike, from 0 on. All parts of all lanes (but an empty one) have the same number of
// chunks. Only an all-reduce's connectors carry both hops; where others' carry results, these are
// all. (So it is with a chain, plan/algorithms/chain.cc.)
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "program/primitive.h"

namespace unjam {

// What a program of a mesh plan does, by hops: sends (scatters, or sends all the own part), gathers
// (receives the own part, from one or from all, and may send it on), collects.
inline constexpr std::uint32_t kHops = 3;
enum Hop : std::uint32_t { kSends, kGathers, kCollects };
UNJAM_HD inline Hop hop_of(const Primitive& p) {
  if ((p.flags & kRecv) == 0) return kSends;
  return (p.flags & kCollect) != 0 ? kCollects : kGathers;
}

struct HopOrder {
  std::uint32_t chunks = 0;
  std::uint32_t lag = 0;  // passes from a hop to the next
  bool two_hops = false;  // a connector carries both: of an all-reduce

  // The number of chunk l's slice of the first hop, and of the second.
  UNJAM_HD constexpr std::uint32_t first(std::uint32_t l) const {
    return two_hops && l > lag ? l + (l - lag) : l;
  }
  UNJAM_HD constexpr std::uint32_t second(std::uint32_t l) const {
    if (!two_hops) return l;
    const std::uint32_t before = l + lag + 1;
    return l + (before < chunks ? before : chunks);
  }
  UNJAM_HD constexpr std::uint32_t slices() const { return two_hops ? 2 * chunks : chunks; }

  // Of the slices of chunks [0, firsts) of the first hop and [0, seconds) of the second, how many
  // come in front of all that are missing.
  UNJAM_HD constexpr std::uint32_t prefix(std::uint32_t firsts, std::uint32_t seconds) const {
    const std::uint32_t missing = firsts < chunks ? first(firsts) : slices();
    if (!two_hops || seconds == chunks) return missing;
    return missing < second(seconds) ? missing : second(seconds);
  }
  // How many of the first `prefix` slices are the first hop's. The others are the second's.
  UNJAM_HD constexpr std::uint32_t firsts_in(std::uint32_t prefix) const {
    const std::uint32_t firsts = !two_hops || prefix <= lag + 1 ? prefix : (prefix + lag + 1) / 2;
    return firsts < chunks ? firsts : chunks;
  }

  // What a pass of the program has in front of gathering chunk l: so many chunks sent, and
  // collected. Who gathers in this order has, when it stops, sent results in a prefix.
  UNJAM_HD constexpr std::uint32_t sent_before_gather(std::uint32_t l) const {
    const std::uint32_t sent = l + lag + 1;
    return sent < chunks ? sent : chunks;
  }
  UNJAM_HD constexpr std::uint32_t collected_before_gather(std::uint32_t l) const {
    return l > lag ? l - lag : 0;
  }
  // Whether chunk l is one of those behind which the next chunk, number `gathered`, is gathered, or
  // the one after them. For who sends little ahead, so that what peers store is read while it is in
  // the cache.
  UNJAM_HD constexpr bool is_wanted_soon(std::uint32_t l, std::uint32_t gathered) const {
    return !two_hops || l <= sent_before_gather(gathered);
  }
};

}  // namespace unjam
