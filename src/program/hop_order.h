// program/slice_order.h of a connector that carries one step's slices, or two steps' with as many
// chunks: what executors of slots use (program/schedule.h).
//
// Chunk l of the first step (hop) goes in pass l, of the second in pass l + lag, behind the pass's
// first. Both ends of a connector number its slices alike, from 0 on. All parts of all lanes (but
// an empty one) have the same number of chunks.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "program/primitive.h"

namespace unjam {

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
