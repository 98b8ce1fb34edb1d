// How a lane of the host device is rung (engine/doorbell.h), and who sleeps on its word.
#pragma once

#include <cstdint>

#include "base/futex.h"
#include "engine/doorbell.h"

namespace unjam {

// Who sleeps on a lane's doorbell, see futex.h.
inline constexpr std::uint32_t kTakerSleeps = 1, kHolderSleeps = 2;

inline void wake_sleeper(std::uint32_t& doorbell, Wake who) {
  if (who != Wake::kNobody) {
    futex_wake_all(doorbell, who == Wake::kHolder ? kHolderSleeps : kTakerSleeps);
  }
}

inline void ring_lane(std::uint32_t& doorbell, RingFor what) {
  wake_sleeper(doorbell, doorbell_ring(doorbell, what));
}

}  // namespace unjam
