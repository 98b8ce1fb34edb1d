// Who is next: steps through the task queue until an invocation may have its turn, or the lane
// leaves.
#pragma once

#include <cstdint>

#include "engine/batches.h"

namespace unjam {

template <class Dev>
class Scheduler : protected Batches<Dev> {
 public:
  using Base = Batches<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::begin_pass, Base::dev_, Base::drained, Base::end_pass, Base::fetch_several,
      Base::finish, Base::hand_on_submissions, Base::holds, Base::how_batched, Base::is_patient,
      Base::is_short, Base::is_worth_a_wait, Base::kBatches, Base::lane_, Base::lane_index_,
      Base::note_done, Base::put_in_order, Base::rank_, Base::s_, Base::tell, Base::too_late,
      Base::wants_newcomers, Base::wants_one_order;

  enum Command : std::uint32_t { kAgain, kFetch, kOrder, kRun, kQuit };

  UNJAM_HD std::uint32_t next_command() {
    for (;;) {
      if (lane_index_ == 0) phase<&Scheduler::hand_on_submissions>(dev_, rank_, lane_index_, s_);
      const std::uint32_t command = tell(phase<&Scheduler::schedule>(dev_, rank_, lane_index_, s_));
      if (command == kFetch) {
        phase<&Scheduler::fetch_several>(dev_, rank_, lane_index_, s_);
      } else if (command == kOrder) {
        phase<&Scheduler::put_in_order>(dev_, rank_, lane_index_, s_);
      } else if (command != kAgain) {
        return command;
      }
    }
  }

  // The lead's, up to accept(): one step through the task queue.
  UNJAM_HD std::uint32_t schedule() {
    if (!dev_.leads()) return kAgain;
    if (dev_.stopped()) return kQuit;
    if (dev_.is_over() && lane_.queue.empty()) return kQuit;
    // Only if something has moved: the next stay begins at the head again, so who stands behind
    // what does not move would never get a turn.
    if (s_.moved && too_late()) return kQuit;
    if (s_.cursor == kNoSlot || !s_.pass_begun) {
      bool for_newcomers = false;
      if (s_.pass_begun) {
        if (wants_newcomers()) return kFetch;
        if (wants_one_order()) return kOrder;
        // What is long gave way for them before it was known what they are.
        for_newcomers = s_.quantum_over && s_.fetched && lane_.shorts != 0 && !holds() &&
                        s_.policy.order == OrderPolicy::kFifo;
        if (!end_pass()) return kQuit;
      }
      begin_pass();
      s_.shorts_only = for_newcomers;
    }
    // Those that cannot begin yet are passed over here: there may be many, each use of a key behind
    // the one before.
    while (s_.cursor != kNoSlot) {
      const std::uint16_t slot = s_.cursor;
      s_.cursor = lane_.queue.next(slot);
      if (dev_.cancelled(slot)) {
        if (!drained(slot)) {
          if (!holds()) continue;
          s_.cursor = kNoSlot;  // nobody else's turn, who might hold it for long
          return kAgain;
        }
        finish(slot, Outcome::kCancelled, false);
        return kAgain;
      }
      const ActiveContext& a = s_.active[slot % kActiveContexts];
      const bool cached = a.slot == slot;
      const Invocation& inv = cached ? a.inv : rank_.invocations[slot];
      if (s_.shorts_only && !is_short(inv)) continue;
      // What is cached was found to be ready before.
      if (!cached) {
        // Acquire: the key's former invocation is complete on all lanes. (Of one without the engine
        // all has come, see KeyState::done.)
        if (load_acquire_local(inv.key->done) != inv.use || !dev_.ready(inv)) continue;
      }
      s_.slot = slot;
      s_.ran = true;
      if (slot == lane_.queue.head()) s_.tried_head = slot;
      if (holds()) s_.cursor = kNoSlot;  // one at a time: the first that may run
      if (s_.position == 0) s_.front = inv.seed;
      s_.threshold = dev_.threshold(s_.policy.initial_threshold(s_.position++));
      if constexpr (kBatches) {
        const BatchWay how = cached || holds() ? BatchWay::kNot : how_batched(inv);
        if (how != BatchWay::kNot) {
          if (how == BatchWay::kAll && is_worth_a_wait(inv)) {
            s_.threshold = dev_.threshold(s_.policy.beside_long(s_.threshold));
          }
          s_.batch[0] = {slot, how, s_.threshold};
          s_.batch[0].patient = is_patient(inv);
          note_done(s_.batch[0]);
          s_.num_in_batch = 1;
        }
      }
      return kRun;
    }
    // Nobody: the pass is over at once.
    return kAgain;
  }
};

}  // namespace unjam
