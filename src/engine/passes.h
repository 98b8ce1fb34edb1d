// A pass is one look at all that is in the task queue, from its head. Here is when a pass begins,
// what it takes in before and after, when the queue is put into an order that all ranks have, how
// long a turn lasts while others wait, and when the lane may rest. By the lead, but for
// put_in_order().
#pragma once

#include <cstdint>

#include "engine/intake.h"

namespace unjam {

template <class Dev>
class Passes : protected Intake<Dev> {
 public:
  using Base = Intake<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::count, Base::dev_, Base::drains_for_urgent, Base::fetch, Base::holds,
      Base::in_disorder, Base::is_short, Base::lane_, Base::lane_index_, Base::mailbox_,
      Base::rank_, Base::s_;

  enum Status : std::uint32_t { kMove, kBlocked, kFinished, kCancelledNow, kQuantumOver };
  static constexpr std::uint32_t kLatePasses = 6;

  UNJAM_HD void begin_pass() {
    s_.pass_begun = true;
    s_.moved = s_.heard = s_.wants_room = s_.ran = s_.quantum_over = s_.shorts_only = false;
    s_.was_ordered = s_.long_waits = false;
    s_.position = 0;
    s_.tried_head = kNoSlot;
    // Before the look that the pass is, see doorbell.h.
    s_.epoch = dev_.epoch();
    dev_.attend();
    if (s_.policy.order == OrderPolicy::kPriority) {
      while (fetch()) {
      }
    }
    s_.cursor = lane_.queue.head();
    count(lane_.stats.passes);
  }

  // FIFO order aims to empty the queue: it fetches only when nothing has come for what is in it,
  // or when what moves has given way (a small newcomer does not sit behind a gigabyte).
  // Then as many as there is room for contexts at hand, for peers may be at any of them: with one
  // a pass, ranks in random orders would meet late, each pass with its waits. Where ranks are in
  // disorder all are taken in, for an order that all have is one of all of them (agreed_order.h).
  UNJAM_HD bool wants_newcomers() {
    s_.fetching = !s_.fetching && (lane_.queue.empty() || !s_.heard || s_.quantum_over ||
                                   in_disorder() || drains_for_urgent());
    if (s_.fetching) s_.fetched = false;
    return s_.fetching;
  }

  // False: quit.
  UNJAM_HD bool end_pass() {
    const bool fetched = s_.fetched;
    s_.fetched = false;
    if (s_.moved || fetched) {
      s_.idle = 0;
    } else if (s_.idle < 0xffff) {
      ++s_.idle;
    }
    if (holds() && !lane_.queue.empty()) {
      // Other lanes are not yet as far. (Not if something has moved: what was accepted since the
      // pass began is moved, and its ring may have come before the epoch.)
      if (!s_.ran && !fetched && !s_.moved) dev_.hold_sleep(s_.epoch);
      return true;
    }
    if (dev_.called_away()) {
      if (s_.quantum_over) return false;  // what moves could go on for long
      // A few passes more often end in a rest, which needs nobody to take over.
      const bool nothing_left = lane_.queue.empty() && !fetched;
      if (((!s_.moved && !fetched) || nothing_left) && rest()) {
        s_.quit_for = QuitFor::kCalledAway;
        return false;
      }
      return s_.late++ < kLatePasses && !too_late();
    }
    // Only here: a stay that ended within a pass would begin the next one at the head again, and
    // who stands behind what takes all the time would never get a turn. (As to who was called away,
    // see schedule().)
    if (over_residency()) {
      s_.quit_for = QuitFor::kResidency;
      return false;
    }
    return s_.idle < s_.policy.idle_passes || !rest();
  }

  // True: asleep. What peers do concerns a lane only if it has something pending.
  UNJAM_HD bool rest() {
    if (!mailbox_.empty()) return false;
    // What is long has not been looked at.
    if (s_.shorts_only && !lane_.queue.empty()) return false;
    std::uint32_t interest = 0;
    if (!lane_.queue.empty()) interest = kAsleepForData | (s_.wants_room ? kAsleepForRoom : 0u);
    if (!dev_.try_quit(s_.epoch, interest)) return false;
    s_.quit_for = lane_.queue.empty() ? QuitFor::kIdle : QuitFor::kStuck;
    return true;
  }

  // Also between two turns of a pass, which may be long: whether this engine was called away too
  // long ago, and still is. Contexts are kept, so nothing is lost.
  UNJAM_HD bool too_late() {
    if constexpr (requires { Dev::kLateNs; }) {
      if (s_.late_since_ns == 0) {
        if (dev_.called_away()) s_.late_since_ns = dev_.now_ns();
        return false;
      }
      if (dev_.now_ns() - s_.late_since_ns <= Dev::kLateNs) return false;
      if (dev_.called_away()) return true;
      s_.late_since_ns = 0;
    }
    return false;
  }

  UNJAM_HD bool over_residency() const {
    return dev_.residency_matters() &&
           dev_.now_ns() - s_.started_ns > std::uint64_t{s_.policy.residency_us} * 1000;
  }

  // Ranks that are at different pipelined calls find what the others have sent ahead there, and
  // change places with them, again and again, a few chunks each time. So who has something begun
  // waits long for peers only at the first of the pass, or at one with a smaller seed, which is the
  // same on all ranks: of two that are at each other's first one stays, and the other comes back.
  UNJAM_HD bool is_patient(const Invocation& inv) const { return inv.seed <= s_.front; }

  // ---- one order for all ranks ----

  UNJAM_HD bool wants_one_order() {
    const bool may = in_disorder() && !s_.heard;
    if (!may) s_.unheard_since_ns = 0;
    if (!may || !s_.unordered || s_.was_ordered) return false;
    const std::uint64_t now = dev_.now_ns();
    if (s_.unheard_since_ns == 0) s_.unheard_since_ns = now;
    if (now - s_.unheard_since_ns < std::uint64_t{s_.policy.order_after_us} * 1000) return false;
    if (now - lane_.open_since_ns > kOpenNs) {
      lane_.queue.close();
      lane_.open_since_ns = now;
    }
    s_.unordered = false;
    return s_.was_ordered = s_.agreed_order.take(lane_.queue);
  }

  UNJAM_HD void put_in_order() {
    AgreedOrder& o = s_.agreed_order;
    const auto each = [&](auto step) {
      for (std::uint32_t i = dev_.first(); i < o.n; i += dev_.stride()) step(i);
      dev_.sync_control();
    };
    each([&](std::uint32_t i) {
      const Invocation& inv = rank_.invocations[o.slots[i]];
      o.uses[i] = inv.n;
      o.seeds[i] = inv.seed;
    });
    each([&](std::uint32_t i) { o.sort(i); });
    each([&](std::uint32_t i) { lane_.queue.place(o.sorted, o.n, i, o.after); });
    if (dev_.leads()) {
      lane_.queue.settle(o.sorted, o.n, o.after);
      count(lane_.stats.orderings);
    }
    dev_.sync_control();
  }

  // ---- turns that last ----

  // Others are looked for behind each turn, all else behind a quantum. (It may be asked again when
  // it has said that somebody waits.)
  UNJAM_HD std::uint32_t may_go_on() {
    if (s_.ended) return kFinished;
    if (s_.quantum > s_.next_look) return kMove;
    // A device may see what was submitted since the pass began only behind such a look; passes
    // are long where gigabytes move.
    if (lane_index_ == 0) look_at_submissions();
    if (others_wait()) return kQuantumOver;
    s_.turn = s_.policy.shortest_turn();
    if (s_.quantum == 0) {
      if (over_residency() || dev_.called_away()) return kQuantumOver;
      s_.quantum = s_.policy.quantum_slices;
    }
    s_.next_look = s_.quantum > s_.turn ? s_.quantum - s_.turn : 0;
    return kMove;
  }

  UNJAM_HD void look_at_submissions() {
    if constexpr (requires { dev_.look_at_submissions(); }) {
      dev_.look_at_submissions();
    } else {
      dev_.epoch();
    }
  }

  // Whether who has had its turn gives way, in FIFO order only to what is short; newcomers are
  // taken in to see what they are, some at a time, behind a quantum in any case. Others that are as
  // long would only change places with it. The peers, which change places at moments of their own,
  // would then rarely be at the same ones, and none would come to its flow.
  UNJAM_HD bool others_wait() {
    if (lane_index_ == 0 && dev_.submissions_wait()) return true;
    if (s_.policy.order == OrderPolicy::kPriority) {
      return lane_.queue.size() > 1 || !mailbox_.empty();
    }
    if (lane_.shorts != 0) return true;
    const bool takes_in =
        s_.quantum == 0 || load_relaxed_local(mailbox_.urgent) != lane_.urgent_taken;
    return takes_in && phase<&Passes::shorts_wait>(dev_, rank_, lane_index_, s_);
  }

  UNJAM_HD bool shorts_wait() {
    constexpr int kTakenIn = 4;
    for (int i = 0; i < kTakenIn && fetch(); ++i) {
    }
    return lane_.shorts != 0;
  }

  // By the lead: whether what is long waits for the next pass, behind one that has waited for peers
  // in vain. If something had come for it, they have been here, and are elsewhere. Where calls are
  // long each rank then found what others had sent ahead, one call after the other, and all went
  // around the queue behind each other. The head of the queue is
  // what they have in common, mostly; so there they wait for each other. (If it is among others, it
  // is not, and may be slow. And if it has not had its turn it cannot go on; whose key it has may
  // not be said yet, either.)
  UNJAM_HD bool is_late_for_head(const ActiveContext& a) const {
    const bool adapts = s_.policy.stickiness == StickinessPolicy::kAdaptive;
    if (!s_.received || !adapts || is_short(a.inv)) return false;
    const std::uint16_t head = lane_.queue.head();
    if (head == kNoSlot || head == a.slot || head != s_.tried_head) return false;
    return rank_.invocations[head].key->group == a.group;
  }

  // By the lead: of a turn that has ended, but could have gone on.
  UNJAM_HD void give_way_to_shorts() {
    s_.quantum_over = true;
    if (s_.policy.order == OrderPolicy::kPriority || holds()) {
      s_.cursor = kNoSlot;  // a new pass begins: it fetches, and starts at the head
    } else {
      s_.shorts_only = true;
      s_.cursor = lane_.queue.head();
    }
  }
};

}  // namespace unjam
