// Leases: which engine instance drives a lane. An instance is a resident kernel's block, a wait
// kernel that is itself an engine, the host daemon's thread, or a host thread that waits. A lane is
// driven, held (its driver sleeps on it and will come back), or free. At most one instance drives
// it: only a successful exchange makes a free lane driven, and only the driver makes it free again.
//
// Somebody is responsible for every free lane: the taker that a ring wakes (Wake::kTaker).
//   lease_rest():       nothing can move. Free, and asleep with the interest that it states.
//   lease_hand_over():  there may be work, but the driver must go. Free and rung at once; the
//                       caller wakes the taker. Never lost: the word differs from every value that
//                       a taker may sleep on.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "engine/doorbell.h"

namespace unjam {

UNJAM_HD inline bool lease_free(std::uint32_t word) {
  return (word & (kAsleep | kHeld)) == kAsleep;
}

// True: the caller drives the lane now. Acquire: it sees the lane's state as the last driver left
// it. The count stays: a ring that came while the lane was free was before the first look.
// False only if the lane is not free: a ring may make the exchange fail, and one that the lane is
// not interested in wakes nobody, so a taker that gave up then would leave the lane to nobody.
UNJAM_HD inline bool lease_take(std::uint32_t& word) {
  for (;;) {
    const std::uint32_t w = load_acquire(word);
    if (!lease_free(w)) return false;
    if (compare_exchange(word, w, w & ~static_cast<std::uint32_t>(kSleepMask))) return true;
  }
}

// A driver has looked at everything since `epoch`, and nothing can move: the lane becomes free.
// False: something was rung meanwhile, look again.
UNJAM_HD inline bool lease_rest(std::uint32_t& word, std::uint32_t epoch, std::uint32_t interest) {
  return doorbell_try_sleep(word, epoch, kAsleep | interest);
}

// A driver goes without having looked: the lane becomes free and rung in one step. The caller wakes
// the taker. Release: the lane's state.
UNJAM_HD inline void lease_hand_over(std::uint32_t& word) {
  // The bits are clear and nobody else sets them; rings only count.
  fetch_add<std::uint32_t>(word, kRing | kAsleep | kAsleepForData | kAsleepForRoom);
}

// A holder that slept on the lane goes. `slept`: the value it slept on. True: the lane is free, and
// asleep as it was. False: it was rung, the caller drives again (after doorbell_awake).
UNJAM_HD inline bool lease_stop_holding(std::uint32_t& word, std::uint32_t slept) {
  return compare_exchange(word, slept, slept & ~static_cast<std::uint32_t>(kHeld));
}

}  // namespace unjam
