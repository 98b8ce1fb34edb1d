// A model of engine instances on a GPU that the schedule explorer can walk through: the host's
// steps are the library's (device/cuda/dev/residency.h), the lanes' are built on its leases and
// doorbells (engine/lease.h, engine/doorbell.h), which the host device ships. What a GPU ships for
// the lanes' part instead, and which test runs that, is a table in docs/internals/instances.md.
//
// Quit between GPUs and on one GPU: the lane's word does with read-modify-writes what `resident`
// and `posted` do between host and device.
//
// An instance that waits polls, also for free lanes; one that does not wait leaves when nothing can
// move, also if others wait: giving its lanes back is the hand-over. (If it stayed for their sake,
// it could keep the SM that a mark needs; the explorer found that.)
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "device/cuda/dev/residency.h"
#include "engine/doorbell.h"
#include "engine/lease.h"

namespace unjam {

// ---- marks: an invocation's inputs are there, which a kernel in its stream says ----

// One an invocation slot. Tickets tell the slot's users apart, and grow; 0 is none. Of a cancelled
// user, which completes without its mark, that may come late: then the larger ticket has to stay
// (unjam_mark_kernel()).
struct MarkCell {
  std::uint64_t ready = 0;
};

// Release: the inputs come before.
UNJAM_HD inline void mark_set(MarkCell& cell, std::uint64_t ticket) {
  store_release(cell.ready, ticket);
}
// Acquire: the inputs are visible to whoever sees the mark.
UNJAM_HD inline bool mark_is_set(MarkCell& cell, std::uint64_t ticket) {
  return load_acquire(cell.ready) == ticket;
}

// ---- the lanes' steps. `first`: of the first lane, which reads what the host posts ----

// What a driver read before it looked.
struct Look {
  std::uint32_t word = 0;
  std::uint32_t posted = 0;
};

struct ModelSteps : ResidencySteps {
  UNJAM_HD static bool take(HostLink& link, std::uint32_t& word, bool first) {
    if (!lease_take(word)) return false;
    // Release is enough: a host that still reads 0 wakes its launcher in vain.
    if (first) store_release(link.resident, std::uint32_t{1});
    return true;
  }

  // Before each look at everything. What is posted is read in the one order too: the first look of
  // an instance must see what made the launcher rely on it.
  UNJAM_HD static Look look(HostLink& link, std::uint32_t& word, bool first) {
    return {doorbell_epoch(word), first ? load_seq_cst(link.posted) : 0};
  }

  // The look found nothing that can move. True: the lane is free; false: look again.
  UNJAM_HD static bool rest(HostLink& link, std::uint32_t& word, bool first, Look look,
                            std::uint32_t interest) {
    if (first) store_seq_cst(link.resident, std::uint32_t{0});
    if ((!first || load_seq_cst(link.posted) == look.posted) &&
        lease_rest(word, look.word, interest)) {
      return true;  // from here on the next driver stores `resident`
    }
    if (first) store_release(link.resident, std::uint32_t{1});
    return false;
  }

  // The instance must go, and there may be work. Rings always: that another instance waits does not
  // mean that it will take the lane, it may be done and leave.
  UNJAM_HD static void hand_over(HostLink& link, std::uint32_t& word, bool first) {
    // Before the lane is free. What the host posts from here on finds 0; before, the next driver
    // finds it.
    if (first) store_seq_cst(link.resident, std::uint32_t{0});
    lease_hand_over(word);
    store_release(link.rung, std::uint32_t{1});
  }

  // Work for the lane of `link`'s rank was written, by a kernel of it or of a peer.
  UNJAM_HD static void ring(HostLink& link, std::uint32_t& word, RingFor what) {
    // Release: the launcher that reads it launches what looks after this.
    if (doorbell_ring(word, what) == Wake::kTaker) store_release(link.rung, std::uint32_t{1});
  }
};

// What an instance needs of its device:
//   lanes(), word(l), link()    the protocol's state
//   pass(l, interest)        one look of the lane's engine at everything it has; true: it moved
//                            something; else `interest`: what else it waits for
//   time_is_up()             the longest stay is over
//   done(x)                  what the instance waits for is complete
//   poll_begin(), poll_again()   around one round of polling; the second may pause
template <class Env, class Steps = ModelSteps>
class Instance {
 public:
  // The daemon kernel. Nobody waits for it; leaves when nothing can move.
  UNJAM_HD static void run_daemon(Env& env) {
    Steps::begin(env.link());
    Instance me(env);
    me.take_free_lanes();
    while (me.mine_ != 0) {
      for (std::uint32_t l = 0; l < env.lanes(); ++l) {
        if (me.drives(l)) me.attempt(l, true);
      }
      if (me.mine_ != 0 && env.time_is_up()) return me.hand_over_all();
    }
  }

  // A wait kernel: begins and ends in the order of its stream.
  template <class X>
  UNJAM_HD static void run_waiter(Env& env, X x) {
    Instance me(env);
    for (;;) {
      env.poll_begin();
      if (env.done(x)) break;
      me.take_free_lanes();
      bool moved = false;
      for (std::uint32_t l = 0; l < env.lanes(); ++l) {
        if (me.drives(l) && me.attempt(l, false)) moved = true;
      }
      if (!moved) env.poll_again();
    }
    // One more look each, since a lane that rests needs nobody.
    for (std::uint32_t l = 0; l < env.lanes(); ++l) {
      if (me.drives(l)) me.attempt(l, true);
    }
    me.hand_over_all();
  }

 private:
  UNJAM_HD explicit Instance(Env& env) : env_(env) {}

  UNJAM_HD bool drives(std::uint32_t l) const { return (mine_ >> l & 1) != 0; }

  UNJAM_HD void take_free_lanes() {
    for (std::uint32_t l = 0; l < env_.lanes(); ++l) {
      if (!drives(l) && Steps::take(env_.link(), env_.word(l), l == 0)) mine_ |= 1u << l;
    }
  }

  // True: there was something to do.
  UNJAM_HD bool attempt(std::uint32_t l, bool may_rest) {
    const Look look = Steps::look(env_.link(), env_.word(l), l == 0);
    std::uint32_t interest = 0;
    if (env_.pass(l, interest)) return true;
    if (!may_rest) return false;
    if (!Steps::rest(env_.link(), env_.word(l), l == 0, look, interest)) return true;
    mine_ &= ~(1u << l);
    return false;
  }

  UNJAM_HD void hand_over_all() {
    for (std::uint32_t l = 0; l < env_.lanes(); ++l) {
      if (drives(l)) Steps::hand_over(env_.link(), env_.word(l), l == 0);
    }
    mine_ = 0;
  }

  Env& env_;
  std::uint32_t mine_ = 0;  // lanes that this instance drives
};

}  // namespace unjam
