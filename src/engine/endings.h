// How an invocation ends at a lane: out of the task queue, counted down, and completed by the last
// of its lanes.
#pragma once

#include <cstdint>

#include "engine/contexts.h"

namespace unjam {

template <class Dev>
class Endings : protected Contexts<Dev> {
 public:
  using Base = Contexts<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::begin_step, Base::count, Base::dev_, Base::end_step, Base::invites, Base::is_short,
      Base::lane_, Base::lane_index_, Base::rank_, Base::record, Base::s_;

  // By the lead: the invocation has ended at this lane. `fenced`: a fence of this thread is behind
  // all that the lane has stored for it.
  UNJAM_HD void finish(std::uint16_t slot, Outcome outcome, bool fenced) {
    ActiveContext& a = s_.active[slot % kActiveContexts];
    const bool cached = a.slot == slot;
    const Invocation& inv = cached ? a.inv : rank_.invocations[slot];
    LaneKey& key = cached ? *a.key : inv.key->lanes[lane_index_];
    if (cached) a.slot = kNoSlot;
    record(outcome == Outcome::kDone ? TraceType::kFinish : TraceType::kPreempt, &inv);
    // (One that has not begun has invited nobody, and the endpoints may not be the key's yet.)
    if (outcome != Outcome::kDone && invites(inv) && load_acquire_local(inv.key->done) == inv.use) {
      phase<&Endings::withdraw>(dev_, rank_, lane_index_, s_, slot);
    }
    leave_queue(slot, lane_.queue.follows_its_like(slot));
    --key.in_queue;
    if (is_short(inv)) note_short_end();
    if constexpr (Dev::kHostWatches) {
      bump<std::uint64_t>(key.time_ns, dev_.now_ns() - lane_.contexts[slot].started_ns);
    }
    s_.moved = true;
    end_part(inv, slot, fenced);
  }

  // Of an invocation that has failed here.
  UNJAM_HD void withdraw(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    const LaneKey& key = inv.key->lanes[lane_index_];
    for (std::uint32_t k = 0; k < inv.num_neighbours; ++k) {
      const InEndpoint& in = key.in[inv.neighbours[k]];
      if (in.connector == kNoConnector) continue;
      LaneTransport::withdraw(*in.cell, inv.seed, inv.output_place);
    }
  }

  UNJAM_HD void note_short_end() {
    --lane_.shorts;
    s_.turn = s_.policy.shorter_turn(s_.turn);
  }

  // By the lead: of an invocation that ends. overtook: see agreed_order.h.
  UNJAM_HD void leave_queue(std::uint16_t slot, bool overtook) {
    lane_.disorder.note_end(overtook);
    if (s_.cursor == slot) s_.cursor = lane_.queue.next(slot);
    lane_.queue.remove(slot);
    // Somebody may come to be among the first, who are put in order together.
    if (lane_.queue.size() >= kMostInOrder) s_.unordered = true;
    if (lane_.counted != 0) {
      --lane_.counted;
    } else {
      count(lane_.stats.completed);
    }
    dev_.ended(slot);
  }

  // By one control thread: this lane's part is done; if all are, the invocation has ended.
  // `fenced`: see finish().
  UNJAM_HD void end_part(const Invocation& inv, std::uint16_t slot, bool fenced) {
    if (inv.geometry.lanes > 1) {
      // Acquire-release: the last lane sees, and passes on, what all lanes have stored.
      if (fetch_add_local<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) != 1) return;
      fenced = false;
    }
    if (!fenced) dev_.fence();
    const bool cancelled = dev_.cancelled_by_any(slot);
    // A key with a cancelled invocation is finished for good: the runtime refuses further ones.
    if (!cancelled) Dev::publish(inv.key->done, inv.use + 1);
    const std::uint64_t begun_ns = begin_step();
    dev_.complete(slot, cancelled ? Outcome::kCancelled : Outcome::kDone);
    // (Of a batch each thread ends some.)
    if (dev_.leads()) end_step(Step::kWriteCqe, begun_ns);
    // Other lanes may sleep on the key's next invocation. (After the completion: whoever holds the
    // lane and sleeps may wait for that.)
    if (rank_.num_lanes > 1) dev_.ring_own_lanes();
  }
};

}  // namespace unjam
