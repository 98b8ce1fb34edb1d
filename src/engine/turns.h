// A turn of an invocation, in two phases (paper Sec. 4, Algorithm 1): poll up to a threshold for
// the slice that is next and move it, or give way. No wait for a peer is without a threshold, but
// under the hold policy: every such loop of slices is in wait_ready(), and packet_leaf() counts
// polls.
#pragma once

#include <cstdint>

#include "engine/slice_pipeline.h"

namespace unjam {

template <class Dev>
class Turns : protected SlicePipeline<Dev> {
 public:
  using Base = SlicePipeline<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::active, Base::begin_peers, Base::build_jobs, Base::count, Base::count_slice,
      Base::count_spins, Base::dev_, Base::drained, Base::finish, Base::give_to_movers,
      Base::give_way_to_shorts, Base::has_sets, Base::holds, Base::inline_flags, Base::invite_known,
      Base::invites, Base::is_carried, Base::is_late_for_head, Base::is_short, Base::job,
      Base::kBlocked, Base::kCancelledNow, Base::kCarries, Base::kFinished, Base::kGates,
      Base::kMove, Base::kQuantumOver, Base::lane_, Base::lane_index_, Base::load, Base::look,
      Base::look_at_gates, Base::may_go_on, Base::move_on, Base::part_at, Base::post_slice,
      Base::rank_, Base::record, Base::s_, Base::seek, Base::set_running, Base::tell,
      typename Base::Gates;

  UNJAM_HD void begin_turn() {
    ActiveContext& a = load();
    dev_.sync_control();  // the lead reads primitives that others have fetched
    if (s_.loaded && a.dyn.attempts == 1 && invites(a.inv)) {
      phase<&Turns::invite_known>(dev_, rank_, lane_index_, s_);
      if (dev_.leads()) a.dirty = 1;  // not at each entry of one that does not get on
    }
    if (!dev_.leads()) return;
    if (s_.loaded) {
      const std::uint32_t last = a.inv.num_primitives - 1;
      a.passes = a.inv.geometry.loops_of(part_at(a, a.inv.geometry.longest_part_of(lane_index_)));
      a.passes += (last < kCachedPrimitives ? a.program[last] : a.inv.program[last]).lag;
    }
    set_running(s_.slot);
    record(TraceType::kStart, &a.inv);
    s_.quantum = s_.policy.quantum_slices;
    s_.next_look = is_short(a.inv) ? 0 : s_.quantum - s_.turn;
    s_.in_turn = true;
    s_.received = false;
    s_.ended = !seek(a);
  }

  // Waits for the slice that is next; fills job().
  UNJAM_HD std::uint32_t prepare() {
    if (dev_.leads()) {
      s_.which = 0;
      s_.pipeline = {};
    }
    const std::uint32_t goes_on = tell(dev_.leads() ? may_go_on() : std::uint32_t{kMove});
    if (goes_on != kMove) return goes_on;
    ActiveContext& a = active();
    const std::uint32_t status = wait_ready(a);
    if (status == kMove && dev_.leads()) {
      build_jobs(a);
      give_to_movers(0);
      s_.packets = inline_flags(a);
      if constexpr (kCarries) s_.carried = is_carried();
    }
    return status;
  }

  // The two phases: poll up to the threshold, then give way.
  UNJAM_HD std::uint32_t wait_ready(ActiveContext& a) {
    dev_.delay();
    if (has_sets()) begin_peers(a);
    std::uint32_t polls = 0;
    [[maybe_unused]] Gates gates;
    [[maybe_unused]] Lack last = Lack::kNothing;
    for (;;) {
      const std::uint32_t epoch = holds() && dev_.leads() ? dev_.epoch() : 0;
      Lack lack;
      if constexpr (kGates) {
        // (Before the look. Where somebody has no gate it is looked again.)
        const Gates now = look_at_gates(a);
        const bool again = polls == 0 || !now.all || now.count != gates.count;
        gates = now;
        // (With the lead's acquire, behind which all look.)
        lack = tell(again ? 1 : 0) != 0 ? look(a) : last;
        last = lack;
      } else {
        lack = look(a);
      }
      if (lack == Lack::kNothing) break;
      ++polls;
      if (holds()) {
        dev_.sync_control();  // what others found, for note_lack()
        const std::uint32_t told =
            tell(dev_.leads() ? hold(a, lack, polls, epoch) : std::uint32_t{kMove});
        if (told != kMove) return told;
        continue;
      }
      if (polls >= s_.threshold) {
        dev_.sync_control();  // as above
        if (dev_.leads()) {
          if (lack == Lack::kRoom) s_.wants_room = true;
          note_lack(a, lack);
          give_way(a, polls);
        }
        return kBlocked;
      }
      if (polls % 32 == 0 && !dev_.all(!dev_.leads() || !dev_.cancelled(a.slot))) {
        return kCancelledNow;
      }
      dev_.relax(polls);
    }
    if (dev_.leads()) {
      s_.waited = polls != 0;
      if (polls != 0) count_spins(a, polls);
    }
    return kMove;
  }

  // By the lead: a failed poll under the hold policy. kMove: go on.
  UNJAM_HD std::uint32_t hold(ActiveContext& a, Lack lack, std::uint32_t polls,
                              std::uint32_t epoch) {
    if (dev_.cancelled(a.slot)) return kCancelledNow;
    if (dev_.stopped()) return give_way(a, polls);
    if (polls >= s_.policy.spin_head) {
      note_lack(a, lack);
      dev_.hold_sleep(epoch);
    }
    return kMove;
  }

  UNJAM_HD std::uint32_t give_way(ActiveContext& a, std::uint32_t polls) {
    count_spins(a, polls);
    count(lane_.stats.preemptions);
    if constexpr (Dev::kHostWatches) bump(a.key->preemptions);
    return kBlocked;
  }

  // By the lead. Only if it is news, so that its time is that of the first wait since something
  // moved.
  UNJAM_HD void note_lack(ActiveContext& a, Lack lack) {
    const bool room = lack == Lack::kRoom;
    const SlicePeers& peers = room ? s_.to : s_.from;
    std::uint32_t k = peers.one;
    if (peers.set != 0) {
      const bool* has = room ? s_.has_room : s_.has_come;
      for (k = 0; k < a.inv.num_neighbours && has[k]; ++k) {
      }
    }
    // (The block's vote does not tell.)
    const std::uint32_t peer = k < a.inv.num_neighbours ? a.neighbours[k] : kSomePeer;
    const std::uint32_t word = lack_word(lack, peer, a.inv.n);
    if constexpr (!Dev::kHostWatches) return;
    std::uint64_t& place = a.key->lack;
    if (static_cast<std::uint32_t>(load_relaxed(place)) == word) return;
    store_relaxed(place, dev_.now_ns() >> 20 << 32 | word);
  }

  // `fenced`: see finish().
  UNJAM_HD void end_turn(std::uint32_t status, bool fenced) {
    if (!dev_.leads()) return;
    ActiveContext& a = active();
    s_.in_turn = false;
    set_running(kNoSlot);
    const bool ends = status == kFinished || status == kCancelledNow;
    if (ends && !drained(a.slot)) {
      status = give_way(a, 1);
      if (holds()) dev_.hold_sleep(s_.epoch);  // from before drained() was asked
    }
    switch (status) {
      case kFinished:
        finish(a.slot, Outcome::kDone, fenced);
        break;
      case kCancelledNow:
        finish(a.slot, Outcome::kCancelled, false);
        break;
      case kQuantumOver:
        count(lane_.stats.quantum_switches);
        s_.turn = s_.policy.longer_turn(s_.turn);
        record(TraceType::kYield, &a.inv);
        give_way_to_shorts();
        break;
      default:
        record(TraceType::kPreempt, &a.inv);
        s_.long_waits = s_.long_waits || !is_short(a.inv);
        if (is_late_for_head(a)) s_.shorts_only = true;
        break;
    }
  }

  // ---- behind the leaf ----

  // Publishes the slice that the block has stored, and, by the lead, the end of the invocation with
  // it: the lead's fence, if it had one, covers also what the others have written, which is behind
  // the barrier.
  UNJAM_HD void publish() {
    ActiveContext& a = active();
    dev_.delay();
    count_slice(a);
    dev_.sync_control();
    const bool fenced = post_slice(dev_, s_, 0);
    dev_.sync_control();  // nobody reads the slice's description any more
    if (dev_.leads()) {
      move_on(a);
      if (s_.ended)
        phase<&Turns::end_turn>(dev_, rank_, lane_index_, s_, std::uint32_t{kFinished}, fenced);
    }
    dev_.sync_control();
  }

  // Behind the barrier: all slices are published.
  UNJAM_HD void end_pipeline() {
    if (dev_.leads() && s_.ended)
      phase<&Turns::end_turn>(dev_, rank_, lane_index_, s_, std::uint32_t{kFinished}, false);
    dev_.sync_control();
  }

  UNJAM_HD void packets_missing() {
    if (dev_.leads()) {
      ActiveContext& a = active();
      note_lack(a, Lack::kData);
      end_turn(give_way(a, s_.threshold), false);
    }
    dev_.sync_control();
  }

  // Instead of the leaf and publish().
  UNJAM_HD void carry() {
    if constexpr (kCarries) {
      ActiveContext& a = active();
      dev_.delay();
      count_slice(a);
      dev_.sync_control();
      if (dev_.leads()) {
        const Posting& out = s_.postings[s_.which][s_.num_postings[s_.which] - 2];
        dev_.fence();  // what the slice's header says, before whoever publishes the word
        dev_.carry(a.slot, job(false), out.word, out.peer);
        move_on(a);
        if (s_.ended)
          phase<&Turns::end_turn>(dev_, rank_, lane_index_, s_, std::uint32_t{kFinished}, false);
      }
      dev_.sync_control();
    }
  }
};

}  // namespace unjam
