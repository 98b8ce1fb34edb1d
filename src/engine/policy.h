// What decides how long an engine waits and whom it runs next (paper Sec. 4.3): plain numbers, so
// that every policy is a configuration of one mechanism.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

enum class StickinessPolicy : std::uint8_t { kAdaptive, kFixed, kHold };
enum class OrderPolicy : std::uint8_t { kFifo, kPriority };

struct EnginePolicy {
  StickinessPolicy stickiness = StickinessPolicy::kAdaptive;
  OrderPolicy order = OrderPolicy::kFifo;
  std::uint32_t spin_head = 256;      // polls granted to the head of the task queue
  std::uint32_t spin_base = 4;        // polls granted at least; the fixed policy's threshold
  std::uint32_t spin_boost = 20;      // factor on success
  std::uint32_t spin_cap = 1024;      // polls granted at most
  std::uint32_t quantum_slices = 64;  // slices in a row at most while others wait
  std::uint32_t residency_us = 5000;  // longest stay when nobody waits
  std::uint32_t idle_passes = 2;      // passes without progress before quitting
  std::uint32_t most_pipelined = 8;   // in one batch, see Batches::fill_batch()
  std::uint32_t order_after_us = 50;  // nothing was heard for so long: see agreed_order.h

  // Slices behind which what is long looks for others: its turn. A short one, for they take less
  // than a quantum of it. Twice as long each time it has given way, for they may wait for peers in
  // vain, and to change places has its price; half as long again when one of them has ended.
  static constexpr std::uint32_t kShortestTurn = 4;
  UNJAM_HD std::uint32_t shortest_turn() const {
    return kShortestTurn < quantum_slices ? kShortestTurn : quantum_slices;
  }
  UNJAM_HD std::uint32_t longer_turn(std::uint32_t turn) const {
    return 2 * turn < quantum_slices ? 2 * turn : quantum_slices;
  }
  UNJAM_HD std::uint32_t shorter_turn(std::uint32_t turn) const {
    return turn / 2 > shortest_turn() ? turn / 2 : shortest_turn();
  }

  // Polls of what is short while something long waits for it, see Batches::is_worth_a_wait().
  UNJAM_HD std::uint32_t beside_long(std::uint32_t threshold) const {
    constexpr std::uint32_t kPolls = 64;
    if (stickiness == StickinessPolicy::kFixed || threshold >= kPolls) return threshold;
    return kPolls < spin_cap ? kPolls : spin_cap;
  }
  // Threshold at the first primitive of a collective that stands at `position` of the queue.
  UNJAM_HD std::uint32_t initial_threshold(std::uint32_t position) const {
    if (stickiness == StickinessPolicy::kFixed) return spin_base;
    const std::uint32_t t =
        position < 31 ? spin_head >> (2 * position < 31 ? 2 * position : 31) : 0;
    return t > spin_base ? t : spin_base;
  }
  // Threshold after a primitive that moved something from a peer, who is there (see
  // Slices::move_on()). Saturates.
  UNJAM_HD std::uint32_t after_success(std::uint32_t threshold) const {
    if (stickiness == StickinessPolicy::kFixed) return spin_base;
    const std::uint64_t t = static_cast<std::uint64_t>(threshold) * spin_boost;
    return t < spin_cap ? static_cast<std::uint32_t>(t) : spin_cap;
  }
};

}  // namespace unjam
