// Mirrors: how a rank on another host looks to the lanes of this process.
//
// In this process's table of arenas the place of a remote rank leads to a mirror: memory of this
// process alone, of an arena's shape. Of it only what ranks here write exists: their own blocks,
// that is their credits, void marks, directories and slots, and the announcements. LaneTransport
// writes there as into any arena. A courier (courier.h) takes what was posted to the arena itself,
// and stores into the arenas here what the remote rank has posted. Nobody reads a mirror but the
// courier, and each lane its own credits.
//
// Beside the mirror a lane leaves word of what it has posted, on a PostBoard for each remote peer.
// That is state, not a queue that could fill: a count for each connector, and of late posts the
// connectors' numbers, in a small ring. A courier that has fallen behind the ring looks at all
// connectors. Every word has one writer at a time and is only stored, so that a GPU's lanes need no
// atomics on the host's memory.
//
// Outputs: a rank that invites (connector.h) writes so into its credit cell in the mirror, and
// there it stays. The courier does not carry it, for no remote rank can store into an output. So
// its senders never find an invitation, and use slots.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "transport/arena.h"
#include "transport/connector.h"

namespace unjam {

// Connectors that were posted to of late: hints, each of which may be false. One writer at a time,
// one reader.
struct HintRing {
  static constexpr std::uint32_t kPlaces = 64;

  alignas(64) std::uint64_t count = 0;  // that were ever given
  std::uint32_t places[kPlaces] = {};

  // What it is about was published before.
  void give(std::uint32_t connector) {
    const std::uint64_t n = load_relaxed(count);
    // Release: who reads this hint where an earlier one stood finds a count of n at least.
    store_release(places[n % kPlaces], connector);
    // Release: who reads the count reads the hint, and what it is about.
    store_release(count, n + 1);
  }
  // Calls take(connector) for each hint behind `seen`, perhaps for false ones, too. False: some
  // were lost, look at all connectors. What was given before the call is then visible.
  template <class Take>
  bool read(std::uint64_t& seen, Take take) {
    // Acquire: pairs with the release in give().
    const std::uint64_t now = load_acquire(count);
    if (now == seen) return true;
    bool all = now - seen < kPlaces;
    if (all) {
      // Acquire: if a hint is a later one, the count below is later, too.
      for (std::uint64_t n = seen; n != now; ++n) take(load_acquire(places[n % kPlaces]));
      all = load_relaxed(count) - seen < kPlaces;
    }
    seen = now;
    return all;
  }
};

// What a lane of a rank here leaves for the courier, for one remote peer. Tables are as long as the
// shape has connectors.
struct PostBoard {
  std::uint64_t* posted = nullptr;  // steps of each connector to the peer that were published
  std::uint64_t* groups = nullptr;  // tags of the owners' groups, see LaneTransport::groups
  HintRing data;                    // of connectors to the peer
  HintRing credits;                 // of connectors from the peer
  std::uint64_t marks = 0;          // how often the lane has said that it has left void marks
};

// Which word of a lane's was published.
struct Posted {
  bool credit = false;  // otherwise a slot's flag
  std::uint32_t connector = 0;
};

// `place`: in the mirror `base` of rank `peer`, in the block that is for `rank`.
inline Posted posted_at(const ArenaShape& shape, const unsigned char* base, std::uint32_t peer,
                        std::uint32_t rank, std::uint32_t lane, const std::uint64_t* place) {
  const auto offset =
      static_cast<std::uint64_t>(reinterpret_cast<const unsigned char*>(place) - base) -
      shape.block(peer, rank);
  if (offset < shape.stages_offset()) {
    return {true, static_cast<std::uint32_t>((offset - shape.head(lane)) / sizeof(CreditCell))};
  }
  const std::uint64_t behind = offset - shape.stages_offset();
  const std::uint64_t stage = shape.room_bytes(1) - shape.stages_offset();
  const std::uint64_t in_stage = behind % stage / shape.connector_bytes();
  return {false, static_cast<std::uint32_t>((behind / stage << shape.first_connectors_log2) |
                                            (in_stage & (shape.first_connectors() - 1)))};
}

// For a device's posted(): the word was published. Of one peer and direction by one thread at a
// time, a connector's steps in their order.
inline void leave_word(PostBoard& board, const Posted& what) {
  if (what.credit) return board.credits.give(what.connector);
  std::uint64_t& posted = board.posted[what.connector];
  // Release: who sees the count sees the slice, its header and the connector's owner.
  store_release(posted, load_relaxed(posted) + 1);
  board.data.give(what.connector);
}

// Behind LaneTransport::mark_void(): by the same thread as that.
inline void leave_marks(PostBoard& board) {
  // Release: who sees the count sees the marks.
  store_release(board.marks, load_relaxed(board.marks) + 1);
}

}  // namespace unjam
