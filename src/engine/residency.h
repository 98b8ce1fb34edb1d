// How engine instances on a GPU come and go: the daemon kernel, wait kernels ("whoever waits,
// helps"), the host's launcher, and those who make work. Built on the lanes' leases (lease.h) and
// marks (mark.h). Not used by the host device, whose threads can wake each other.
//
// The lanes' words live in device memory, which the host cannot change atomically, and the GPU
// cannot wake a host thread. So host and device talk through words in pinned host memory that one
// side stores and the other loads:
//   resident  stored by the first lane's driver: it looks at what the host posts
//   posted    stored by the host: counts what it has made (submissions, marks, cancellations)
//   rung      stored by the device: an instance is needed; cleared by the launcher
//   queued    stored by the launcher before it launches, cleared by the instance that begins
// Quit:  the driver clears `resident`, then looks at `posted` once more.
// Work:  the host stores `posted`, then looks at `resident`: 0, it wakes its launcher.
// Both are sequentially consistent, so at least one sees the other. Between GPUs and on one GPU the
// lane's word does the same with read-modify-writes (doorbell.h).
//
// An instance that waits polls, also for free lanes; one that does not wait leaves when nothing can
// move, also if others wait: giving its lanes back is the hand-over. (If it stayed for their sake,
// it could keep the SM that a mark needs; the explorer found that.) So while a stream waits, some
// instance drives every lane even if nothing can be launched (a thread in cudaFree holds the
// driver); and while no stream waits, the device becomes idle. tests/unit/protocol_test.cc runs
// this under a schedule explorer on a fake device.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "engine/doorbell.h"
#include "engine/lease.h"

namespace unjam {

// In pinned host memory, one a rank.
struct HostLink {
  alignas(kFalseSharingBytes) std::uint32_t resident = 0;
  alignas(kFalseSharingBytes) std::uint32_t posted = 0;
  alignas(kFalseSharingBytes) std::uint32_t rung = 0;
  alignas(kFalseSharingBytes) std::uint32_t queued = 0;
};

// What a driver read before it looked.
struct Look {
  std::uint32_t word = 0;
  std::uint32_t posted = 0;
};

// The steps of the protocol. `first`: of the first lane, which reads what the host posts.
struct ResidencySteps {
  // ---- host ----

  // After work was written; one thread at a time. True: the launcher must be woken.
  static bool post(HostLink& link) {
    // The order of the two is the protocol, see above. The store is a release, too: of the work.
    store_seq_cst(link.posted, load_relaxed(link.posted) + 1);
    return load_seq_cst(link.resident) == 0;
  }

  // The launcher, woken or having seen `rung`. True: it launches an instance.
  static bool should_launch(HostLink& link) {
    // First clear, then launch: a ring that is erased here came before the instance's look.
    store_seq_cst(link.rung, std::uint32_t{0});
    // One that is queued will look later than now. Sequentially consistent, as is begin(): if this
    // reads 1, the instance's clearing, and so its looks, come later in the one order.
    if (load_seq_cst(link.queued) != 0) return false;
    store_seq_cst(link.queued, std::uint32_t{1});
    return true;
  }

  // ---- instances ----

  // A launched instance begins.
  UNJAM_HD static void begin(HostLink& link) { store_seq_cst(link.queued, std::uint32_t{0}); }

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
template <class Env, class Steps = ResidencySteps>
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
