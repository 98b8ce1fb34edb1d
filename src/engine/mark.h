// Marks: an invocation's readiness, apart from its submission. A stream-ordered call submits at
// once, and puts on the user's stream what says "the inputs are there" when the stream gets so far:
// a store to a cell that belongs to this invocation alone. A mark waits for nothing.
//
// Whoever marks then tells the engine that there is work, in the order write, then tell:
//   a kernel on the stream:  mark_set(), then ResidencySteps::ring() on the first lane
//   the host (idle stream):  mark_set(), then ResidencySteps::post()
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

// One an invocation slot. Tickets tell the slot's users apart, and grow; 0 is none. Of a cancelled
// user, which completes without its mark, that may come late: then the larger ticket has to stay
// (unjam_mark_kernel()).
struct MarkCell {
  std::uint64_t ready = 0;
};

// Release: the inputs come before.
UNJAM_HD inline void mark_set(MarkCell& cell, std::uint64_t ticket) {
  store_release(cell.ready, ticket);
}
// Acquire: the inputs are visible to whoever sees the mark.
UNJAM_HD inline bool mark_is_set(MarkCell& cell, std::uint64_t ticket) {
  return load_acquire(cell.ready) == ticket;
}

}  // namespace unjam
