// What a kernel that leaves a lane must ring for, so that the launcher sends a daemon: the looks
// behind which nothing may be missed, apart from the rest of instance.cuh.
// tests/unit/leaving_test.cc runs them under the schedule explorer, with a daemon, calls and a
// launcher that do nothing else.
//
// Who says something: the host submits (sq_written), or cancels (cancelled, then attention), then
// stores `posted`, then looks at `resident`. A resident daemon's first lane hears it and tells the
// other lanes, by CudaRank::attention and their mailboxes; so does a daemon that waits for that
// lane. Who leaves has cleared `resident`, or given its lease back, before it looks here, with a
// fence between. So one of the two sees the other.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

// Rank: CudaRank. Seen: DevShared, what the driver of a lane has seen.
struct LeavingSteps {
  // What somebody has heard from the host, for all lanes. It grows with all that the host says; who
  // asked long ago must not undo what others have heard since.
  template <class Rank>
  UNJAM_HD static void tell_lanes(Rank& r, std::uint32_t attention) {
    while (attention != 0) {
      const std::uint32_t known = load_relaxed_local(r.attention);
      if (known >= attention || compare_exchange(r.attention, known, attention)) return;
    }
  }

  // Of a lane that was left with something in its queue: whether that may move. Not if it was left
  // at rest, and nothing has been readied and the host has said nothing since. (What a daemon that
  // waited for the lane has heard meanwhile it leaves to the lane's driver, see take_over().)
  template <class Rank, class Seen>
  UNJAM_HD static bool lane_may_move(Rank& r, const Seen& s) {
    return s.rested == 0 || load_acquire_local(r.readied) != s.readied_seen ||
           load_relaxed_local(r.attention) != s.attention;
  }

  // A daemon's first lane has looked at what the host posts before its last pass (within it, at
  // what it has submitted alone: then it may ring in vain). (At rest, CudaDev::try_quit() has done
  // that. Calls in the inbox serve themselves.) What the host wants, cancellations, comes before
  // `posted`, but is not looked at with it: other lanes are at rest with what was cancelled, and
  // have not heard of it.
  template <class Rank, class Seen>
  UNJAM_HD static bool host_has_said_more(Rank& r, const Seen& s) {
    return s.sq_written != s.sq_read || load_seq_cst(r.link->residency.posted) != s.posted ||
           load_relaxed(r.link->attention) != s.attention;
  }
};

}  // namespace unjam
