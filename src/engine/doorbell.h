// When a lane may sleep, how it is woken, and who drives it: the protocol, apart from how a device
// sleeps. lease.h builds the engine instances' side on it.
//
// One 32-bit word a lane, in the arena, so that peers reach it. The low bits say how the lane
// sleeps, the rest counts rings. Bits clear: an engine instance drives the lane ("resident").
//   whoever makes work:  write the work; old = word.fetch_add(kRing); if old says "asleep and
//                        interested", wake whom it names: the holder, else whoever takes free
//                        lanes.
//   the driver:          e = word (acquire); look at everything; nothing can move;
//                        word.compare_exchange(e -> e | asleep); if that succeeded, it has given
//                        the lane back (or, with kHeld, sleeps itself until the word is no longer
//                        that).
//   whoever would drive: word = asleep and not held -> clear the bits by compare_exchange: its
//   lane.
// No wake-up is lost: rings are read-modify-writes of the one word, so every ring is either before
// the driver's look (then its release is visible to the acquire at e, and the look sees the work),
// or between the two (then the exchange fails and the driver looks again), or after the exchange
// (then the ringer sees the sleep bits, and the word differs from what the sleeper waits for, also
// if it has not yet fallen asleep).
// The lease is the same word, so that giving a lane back and falling asleep are one step: with two
// words there would be a moment in which a ringer wakes somebody who finds the lease taken by one
// who has looked for the last time.
// Interest: data wake only lanes with something pending, room (a consumed slice) only those that
// said, at the exchange, that they wait for it. Neither can make work for a lane that has nothing.
// Tests: doorbell_test (all interleavings of small cases), protocol_test (all of it together).
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

enum DoorbellBits : std::uint32_t {
  kAsleep = 1,         // nobody looks: wakes on submissions, cancellations, hand-overs
  kAsleepForData = 2,  // wakes on new data also
  kAsleepForRoom = 4,  // wakes on consumed slices also
  kHeld = 8,           // asleep, but not free: the driver itself sleeps on the word
  kSleepMask = 15,
  kRing = 16,
};

// What the ringer has made.
enum class RingFor { kWork, kData, kRoom };
// Whom the ringer must wake.
enum class Wake { kNobody, kHolder, kTaker };

UNJAM_HD inline Wake doorbell_ring(std::uint32_t& word, RingFor what) {
  // Acquire-release: the work comes before the ring. That it acquires too orders ringers' own
  // reads after the driver's last exchange; nothing here needs it.
  const std::uint32_t old = fetch_add<std::uint32_t>(word, kRing);
  const std::uint32_t interested = what == RingFor::kWork   ? kAsleep
                                   : what == RingFor::kData ? kAsleepForData
                                                            : kAsleepForRoom;
  if ((old & interested) == 0) return Wake::kNobody;
  return (old & kHeld) != 0 ? Wake::kHolder : Wake::kTaker;
}

// Before the last look. Acquire: what was rung for until now is visible to the look.
UNJAM_HD inline std::uint32_t doorbell_epoch(std::uint32_t& word) { return load_acquire(word); }

// After a look that found nothing to do: false if something was rung since `epoch`. On true the
// lane sleeps as long as the word equals epoch | bits. `bits`: kAsleep and what it waits for.
// Release: the lane's state, for whoever drives it next.
UNJAM_HD inline bool doorbell_try_sleep(std::uint32_t& word, std::uint32_t epoch,
                                        std::uint32_t bits) {
  return compare_exchange(word, epoch, epoch | bits);
}

// Only by the holder (kHeld): it drives again.
UNJAM_HD inline void doorbell_awake(std::uint32_t& word) {
  fetch_and(word, ~static_cast<std::uint32_t>(kSleepMask));
}

}  // namespace unjam
