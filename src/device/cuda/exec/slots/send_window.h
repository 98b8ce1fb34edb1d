// How far calls that go through a lane together (several.cuh) are sent ahead of what comes in, and
// when that may be left. Of all calls together so many chunks a hop are sent ahead, beside those
// that one hop is behind the other in any case. But ranks may be at different calls. Hence:
//   - What a contribution that has come waits for is sent at once (HopOrder::sent_before_gather()).
//   - Nobody leaves before it has sent all that has room, at all calls; nor for others that want to
//     go on, if it has moved nothing since it came.
// Without the first, two ranks wait for each other for ever; without the second, more than two do:
// docs/internals/coming-together.md. tests/unit/send_window_test.cc plays it.
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
