// When a lane may sleep, how it is woken, and who drives it: the protocol, apart from how a device
// sleeps. One 32-bit word a lane: its low bits say how the lane sleeps, the rest counts rings.
//   whoever makes work:  write the work; old = word.fetch_add(kRing); if old says "asleep and
//                        interested", wake the holder, else whoever takes free lanes
//   the driver:          e = word (acquire); look at everything; nothing can move;
//                        word.compare_exchange(e -> e | asleep): it has given the lane back, or,
//                        with kHeld, sleeps until the word is another
//   whoever would drive: word = asleep and not held -> clear the bits by compare_exchange
// Why no wake-up is lost, and why the lease is the same word: docs/internals/deadlock-freedom.md.
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
