// Rooms: how much memory stands behind the connectors between a rank and each of its peers.
//
// Two ranks meet when a plan of either one names the other as a neighbour. Then memory comes behind
// the block that each one's arena has for the other (arena.h): its head, the pool slots and the
// first few connectors. Who has use for more connectors says so here, and they come in portions
// that double.
//
// A table lies at each rank, of the peers, in memory that its lanes and the runtime reach. The
// runtime writes what may be used: only when the memory is there, clear, and offered to the other
// end. It does that beside the engines: nobody waits for memory. A lane that finds no room has
// changed nothing, as with everything else that it lacks, and its doorbell is rung when there is
// more.
#pragma once

#include <cstdint>

namespace unjam {

struct Room {
  // Connectors of each lane that this rank may use towards the peer; 0: the two have not met, and
  // nothing of either one's block for the other may be touched. It only grows. Written by the
  // runtime (release: all that it stands for is there), read by lanes (acquire).
  std::uint32_t usable = 0;
  // Connectors that some lane of this rank has use for. It only grows. Written by lanes, read by
  // the runtime, both relaxed: it is a number and no more.
  std::uint32_t wanted = 0;
};

}  // namespace unjam
