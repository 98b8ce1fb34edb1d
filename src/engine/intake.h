// From the submission queue to a lane's task queue. The first lane takes submissions and hands them
// on to the mailboxes of the lanes that take part; each lane fetches from its own. Commands, which
// have no key, are carried out here.
#pragma once

#include <cstdint>

#include "engine/endings.h"
#include "engine/slot_batch.h"

namespace unjam {

template <class Dev>
class Intake : protected Endings<Dev> {
 public:
  using Base = Endings<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::begin_step, Base::dev_, Base::end_step, Base::is_short, Base::is_urgent, Base::lane_,
      Base::lane_index_, Base::mailbox_, Base::rank_, Base::s_, Base::tell;

  // ---- submissions, by the first lane ----

  // The first lane takes submissions and hands them on through device memory, some at a time: each
  // of the threads fills mailboxes of its own, and fences once.
  UNJAM_HD void hand_on_submissions() {
    SlotBatch taken;
    do {
      const std::uint64_t begun_ns = begin_step();
      taken = next_submissions();
      if (dev_.leads() && taken.size() != 0) end_step(Step::kReadSqe, begun_ns, taken.size());
      for (std::uint32_t i = dev_.first(); i < taken.size(); i += dev_.stride()) {
        store_relaxed<std::uint32_t>(rank_.remaining[taken[i]],
                                     rank_.invocations[taken[i]].geometry.lanes);
      }
      dev_.sync_control();
      if (taken.size() == 1 && is_own(taken[0])) {
        dev_.sync_control();  // all have looked at the queue before the lead changes it
        // Nobody is in front of it, and nobody else takes part: no mail to oneself.
        if (dev_.leads()) {
          const std::uint64_t accepted_ns = begin_step();
          accept(taken[0]);
          end_step(Step::kPrepare, accepted_ns);
        }
        dev_.sync_control();
      } else if (taken.size() != 0) {
        mail(taken);
      }
    } while (taken.full());
  }

  UNJAM_HD SlotBatch next_submissions() {
    if constexpr (requires { dev_.next_submissions(); }) {
      return dev_.next_submissions();
    } else {
      SlotBatch taken;
      std::uint16_t slot = kNoSlot;
      while (!taken.full() && dev_.next_submission(slot)) taken.push_back(slot);
      return taken;
    }
  }

  UNJAM_HD bool is_own(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    return inv.key != nullptr && inv.geometry.first_lane == lane_index_ &&
           inv.geometry.lanes == 1 && lane_.queue.empty() && mailbox_.empty();
  }

  UNJAM_HD void mail(const SlotBatch& slots) {
    for (std::uint32_t begin = 0; begin < rank_.num_lanes; begin += dev_.stride()) {
      const std::uint32_t l = begin + dev_.first();
      std::uint32_t entries = 0, urgent = 0;
      for (std::uint32_t i = 0; l < rank_.num_lanes && i < slots.size(); ++i) {
        const Invocation& inv = rank_.invocations[slots[i]];
        if (l - inv.geometry.first_lane >= inv.geometry.lanes) continue;
        rank_.mailboxes[l].put(slots[i], entries++);
        if (is_urgent(inv)) ++urgent;
      }
      // Lanes that are told may soon end it, and a stream's call have its slot: all have read which
      // lanes are its. (Where that may be there are as many threads as lanes.)
      dev_.sync_control();
      if (entries == 0) continue;
      if (urgent != 0) bump<std::uint64_t>(rank_.mailboxes[l].urgent, urgent);
      if constexpr (requires { dev_.fence_lanes(); }) {
        dev_.fence_lanes();
      } else {
        dev_.fence();
      }
      // Publishes the invocations, their countdowns, and the places.
      rank_.mailboxes[l].template show<Dev>(entries);
      if (l != lane_index_) dev_.ring(s_.transport.rank, l, RingFor::kWork);
    }
    dev_.sync_control();
  }

  // ---- newcomers ----

  // See agreed_order.h. The fixed policy is a queue in the order of calls, and nothing else.
  UNJAM_HD bool in_disorder() const {
    return s_.policy.stickiness == StickinessPolicy::kAdaptive &&
           s_.policy.order == OrderPolicy::kFifo && lane_.disorder.expected();
  }

  // Something urgent is in the mailbox, maybe behind many entries, and all that is in the queue is
  // long: entries are taken in until it is found.
  UNJAM_HD bool drains_for_urgent() const {
    return lane_.shorts == 0 && load_relaxed_local(mailbox_.urgent) != lane_.urgent_taken;
  }

  // By the control threads: each looks at newcomers of its own, the lead lines them up.
  UNJAM_HD void fetch_several() {
    bool more = true;
    while (more) {
      std::uint32_t n = 0;
      if (dev_.leads()) {
        const std::uint32_t size = lane_.queue.size();
        const std::uint32_t room = size < kActiveContexts ? kActiveContexts - size : 1;
        n = mailbox_.count(in_disorder() || drains_for_urgent() ? kActiveContexts : room);
      }
      n = tell(n);
      const std::uint64_t begun_ns = begin_step();
      for (std::uint32_t i = dev_.first(); i < n; i += dev_.stride()) {
        s_.newcomers[i] = receive(mailbox_.at(i));
      }
      dev_.sync_control();
      for (std::uint32_t i = 0; i < n; ++i) {
        if (s_.newcomers[i].clears) clear_room(s_.newcomers[i].slot, dev_.first(), dev_.stride());
      }
      dev_.sync_control();
      if (dev_.leads() && n != 0) {
        for (std::uint32_t i = 0; i < n; ++i) take_entry(s_.newcomers[i]);
        mailbox_.take(n);
        s_.fetched = true;
        end_step(Step::kPrepare, begun_ns, n);
      }
      dev_.sync_control();
      more = tell(dev_.leads() && n == kActiveContexts && drains_for_urgent() ? 1 : 0) != 0;
    }
  }

  // By the lead.
  UNJAM_HD bool fetch() {
    std::uint16_t slot = kNoSlot;
    const std::uint64_t begun_ns = begin_step();
    if (mailbox_.count(1) == 0) return false;
    slot = mailbox_.at(0);
    // It takes one thread too long: left to fetch_several().
    if (clears_room(rank_.invocations[slot])) return false;
    mailbox_.take(1);
    take_entry(receive(slot));
    end_step(Step::kPrepare, begun_ns);
    return true;
  }

  // By the lead.
  UNJAM_HD void take_entry(const Newcomer& found) {
    if (found.command || found.is_short) ++lane_.urgent_taken;  // as is_urgent() says
    line_up(found);
  }

  UNJAM_HD void accept(std::uint16_t slot) { line_up(receive(slot)); }

  // By any control thread.
  UNJAM_HD Newcomer receive(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    Newcomer found{slot};
    found.command = inv.key == nullptr;
    found.clears = clears_room(inv);
    if (found.command) return found;
    DynamicContext dyn;
    dyn.handed = dev_.handed_over(slot);
    const bool is_done = dyn.handed.stage == Stage::kDone;
    if (is_done) dyn.loop = ~std::uint64_t{0};
    dyn.started_ns = dev_.now_ns();
    lane_.contexts[slot] = dyn;
    ActiveContext& a = s_.active[slot % kActiveContexts];
    if (a.slot == slot) a.slot = kNoSlot;  // of the slot's former user
    // Others of these may be of the same key. (Relaxed: barriers order it.)
    LocalAtomicRef<std::uint32_t>(inv.key->lanes[lane_index_].in_queue).fetch_add(1, kRelaxed);
    found.counted = is_done;
    found.is_short = is_short(inv);
    found.alike = likeness(inv, found.is_short);
    found.priority = inv.priority;
    return found;
  }

  // What invocations whose order may say something have in common, see agreed_order.h; else 0. (Not
  // the group: the key's state may be another's yet. Among more than 4,095 ranks others may look
  // alike, which costs a moment of order.)
  UNJAM_HD static std::uint32_t likeness(const Invocation& inv, bool is_short) {
    const Kind kind = inv.geometry.kind;
    if (has_root(kind)) return 0;
    return (std::uint32_t{inv.group_size} << 20 ^ std::uint32_t{inv.group_rank} << 8) |
           static_cast<std::uint32_t>(kind) << 1 | static_cast<std::uint32_t>(is_short);
  }

  // By the lead: into the task queue.
  UNJAM_HD void line_up(const Newcomer& found) {
    const std::uint16_t slot = found.slot;
    if (found.command) {
      if (!found.clears) release_keys(dev_, s_.transport, rank_.invocations[slot]);
      if (fetch_add<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) == 1) {
        dev_.fence();
        dev_.complete(slot, Outcome::kDone);
      }
      return;
    }
    s_.moved = true;  // it is to be looked at before the lane may rest
    if (found.counted) ++lane_.counted;
    if (found.is_short) ++lane_.shorts;
    if (s_.policy.order == OrderPolicy::kPriority) {
      lane_.queue.push_by_priority(slot, found.priority);
    } else {
      lane_.queue.push_back(slot, found.alike);
      s_.unordered = true;
    }
    if (lane_.queue.size() > lane_.stats.queue_peak) {
      store_relaxed<std::uint64_t>(lane_.stats.queue_peak, lane_.queue.size());
    }
  }

  // ---- commands ----

  // Lets go of keys that the runtime forgets: of their endpoints (ConnectorOwner is the one place
  // where pointers into a key outlast its invocations) and of what peers have sent under them.
  UNJAM_HD static void release_keys(DevHandle dev, LaneTransport& t, const Invocation& inv) {
    for (std::uint64_t i = 0; i < inv.n; ++i) {
      const KeyRelease& r = static_cast<const KeyRelease*>(inv.input)[i];
      for (std::uint32_t q = 0; q < r.group_size; ++q) {
        const std::uint32_t peer = r.members[q];
        if (peer == t.rank) continue;
        if (r.void_tag != 0) {
          t.mark_void(peer, r.void_tag);
          if constexpr (requires { dev.marked(peer, t.lane); }) dev.marked(peer, t.lane);
        }
        if (r.lanes != nullptr) {
          const bool settled = r.settled != nullptr && (r.settled[q / 64] >> q % 64 & 1) != 0;
          t.release(peer, r.lanes[t.lane].out[q], settled);
        }
      }
    }
  }

  // What a command to clear a room says, by each of so many threads.
  UNJAM_HD void clear_room(std::uint16_t slot, std::uint32_t first, std::uint32_t stride) {
    const ClearRoom room = room_of(rank_.invocations[slot]);
    s_.transport.clear_room(room.peer, room.from, room.to, first, stride);
  }
};

}  // namespace unjam
