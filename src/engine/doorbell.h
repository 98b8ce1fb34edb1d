// When a lane may sleep, and how it is woken: the protocol, apart from how a device sleeps.
//
// One 32-bit word a lane, in the arena, so that peers reach it. Bits 0..1 say how the lane sleeps,
// the rest counts rings.
//   whoever makes work:  write the work; old = word.fetch_add(kRing); if old says "asleep and
//                        interested", wake the lane.
//   the lane:            e = word (acquire); look at everything; nothing can move;
//                        word.compare_exchange(e -> e | asleep); if that succeeded, sleep until the
//                        word is no longer e | asleep; clear the bits.
// No wake-up is lost: rings are read-modify-writes of the one word, so every ring is either before
// the lane's look (then its release is visible to the acquire at e, and the look sees the work),
// or between the two (then the exchange fails and the lane looks again), or after the exchange
// (then the ringer sees the sleep bits, and the word differs from what the sleeper waits for, also
// if it has not yet fallen asleep).
// Room (a consumed slice) wakes only lanes that said, at the exchange, that they wait for room.
// Tests: doorbell_test (all interleavings of small cases under delays, TSan).
#pragma once

#include <cstdint>

#include "base/atomics.h"

namespace unjam {

enum DoorbellBits : std::uint32_t {
  kAsleep = 1,         // wakes on new data, submissions, aborts
  kAsleepForRoom = 2,  // wakes on consumed slices also
  kSleepMask = 3,
  kRing = 4,
};

// What the ringer has made. Room matters only to lanes that wait for it.
enum class RingFor { kData, kRoom };

// True if the ringer must wake the lane.
UNJAM_HD inline bool doorbell_ring(std::uint32_t& word, RingFor what) {
  const std::uint32_t old = fetch_add<std::uint32_t>(word, kRing);
  return what == RingFor::kData ? (old & kSleepMask) != 0 : (old & kAsleepForRoom) != 0;
}

// Before the last look.
UNJAM_HD inline std::uint32_t doorbell_epoch(std::uint32_t& word) { return load_acquire(word); }

// After a look that found nothing to do: false if something was rung since `epoch`. On true the
// lane sleeps while the word equals `asleep`.
UNJAM_HD inline bool doorbell_try_sleep(std::uint32_t& word, std::uint32_t epoch, bool for_room,
                                        std::uint32_t& asleep) {
  asleep = epoch | kAsleep | (for_room ? kAsleepForRoom : 0u);
  return compare_exchange(word, epoch, asleep);
}

UNJAM_HD inline void doorbell_awake(std::uint32_t& word) {
  fetch_and(word, ~static_cast<std::uint32_t>(kSleepMask));
}

}  // namespace unjam
