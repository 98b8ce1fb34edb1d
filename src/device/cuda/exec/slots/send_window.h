// How far calls that go through a lane together (several.cuh) are sent
// ahead of what comes in, and when that may be left.
//
// What peers have stored is read while it is in the cache, so little is sent ahead: of all calls
// together so many chunks a hop, beside those that one hop is behind the other in any case. But
// ranks may be at different calls. Each is then as far ahead as it may be, at calls that the
// others are not at, and short of what they have not sent it. Hence two rules:
//   - What a contribution that has come waits for is sent at once: a chunk is gathered behind some
//     that are sent (HopOrder::sent_before_gather()). So of two ranks, whichever comes to the
//     other's calls goes on there.
//   - Nobody leaves before it has sent all that has room, at all calls: where it watches some of
//     them at a time, not before it has been to each since it last sent anything; nor for others
//     that want to go on, if it has moved nothing since it came. A contribution that has come from
//     one of several peers only unlocks nothing, but what has room is not held back by others'
//     calls; so whatever is stuck is so by the protocol alone, which cannot be (connector.h).
// Without the first, two ranks with many calls in orders of their own wait for each other for ever;
// without the second, more than two do where something short, whose peers are not there, sends each
// away behind its turn. tests/unit/send_window_test.cc plays this, with each rule and without.
#pragma once

#include <cstdint>

#include "base/portability.h"
#include "program/hop_order.h"

namespace unjam {

class SendWindow {
 public:
  static constexpr std::uint32_t kMost = 4;

  // `calls`: that go together, all of the same hops. hops: from what is sent to what comes in for
  // it, which is all that the root of a reduction knows: as many times as much is under way.
  UNJAM_HD constexpr SendWindow(std::uint32_t calls, bool receives, std::uint32_t lag,
                                std::uint32_t hops = 1)
      : most_(calls == 1 || !receives ? kNoLimit : lag + hops * kMost) {}

  // Whether one more chunk may be sent. ahead: chunks of all calls that were sent, less those that
  // were received (which may be more). still: nothing has moved for a while. unlocks: see there.
  UNJAM_HD constexpr bool may_send(std::uint32_t ahead, bool still, bool unlocks) const {
    return most_ == kNoLimit || still || unlocks || static_cast<std::int32_t>(ahead - most_) < 0;
  }
  // Whether chunk `sent` of a call is what its chunk `gathered` waits for, which has come from all.
  UNJAM_HD static constexpr bool unlocks(const HopOrder& order, std::uint32_t sent,
                                         std::uint32_t gathered, bool has_come) {
    return order.two_hops && has_come && sent < order.sent_before_gather(gathered);
  }
  // Whether all that has room was sent, if nothing has moved. still: as it was before.
  UNJAM_HD constexpr bool may_leave(bool still) const { return most_ == kNoLimit || still; }

 private:
  static constexpr std::uint32_t kNoLimit = ~std::uint32_t{0};
  std::uint32_t most_;
};

}  // namespace unjam
