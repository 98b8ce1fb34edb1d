// A batch: invocations that a device carries out in one go, all that the lane does for each,
// instead of slice by slice. Which are tried, and what is noted of each behind the try. What a
// device promises that does so: docs/internals/batches.md.
#pragma once

#include <cstdint>

#include "engine/passes.h"

namespace unjam {

template <class Dev>
class Batches : protected Passes<Dev> {
 public:
  using Base = Passes<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::count, Base::dev_, Base::end_part, Base::give_way_to_shorts, Base::is_patient,
      Base::is_short, Base::is_pipelined, Base::lane_, Base::lane_index_, Base::leave_queue,
      Base::look_at_submissions, Base::note_short_end, Base::rank_, Base::record, Base::s_;

  // ---- what is tried ----

  // The first try of what is short while something long waits for it. Peers, if they have made the
  // call, leave their long ones for it at about the same time. But once, for they may not have: not
  // if there is nothing to send, by which later tries are told.
  UNJAM_HD bool is_worth_a_wait(const Invocation& inv) const {
    return lane_.queue.size() != lane_.shorts && inv.batch != 1;
  }

  // How an invocation is tried that may begin and is not among the contexts at hand.
  UNJAM_HD BatchWay how_batched(const Invocation& inv) const {
    if (inv.batch == 0) return BatchWay::kNot;
    const DynamicContext& dyn = lane_.contexts[inv.slot];
    // Done before the engine saw it, or begun in another way.
    if (dyn.handed.stage >= Stage::kSlices) return BatchWay::kNot;
    if (is_pipelined(inv)) return BatchWay::kPipelined;
    const std::uint32_t done = dyn.handed.primitives_done();
    if (done == 0) return BatchWay::kAll;
    if (inv.batch == kBatchTwoHops) return done == 1 ? BatchWay::kReceiving : BatchWay::kCollecting;
    return done + 1 == inv.batch ? BatchWay::kReceiving : BatchWay::kNot;
  }

  // By the control threads: what stands behind the first one in the queue, up to what is not tried
  // with it. A thread looks at each. None are left (num_in_batch) if the first is for crowds and is
  // in none: it goes by slices.
  UNJAM_HD void fill_batch() {
    const Invocation& first = rank_.invocations[s_.batch[0].slot];
    const bool pipelined = s_.batch[0].how == BatchWay::kPipelined;
    if (dev_.leads()) {
      std::uint32_t n = 1;
      for (std::uint16_t slot = s_.cursor; slot != kNoSlot && n < kMostInBatch; ++n) {
        s_.batch[n].slot = slot;
        slot = lane_.queue.next(slot);
      }
      s_.num_in_batch = n;
    }
    dev_.sync_control();
    const std::uint32_t n = s_.num_in_batch;
    for (std::uint32_t i = 1 + dev_.first(); i < n; i += dev_.stride()) {
      BatchEntry& t = s_.batch[i];
      const Invocation& inv = rank_.invocations[t.slot];
      t.patient = is_patient(inv);
      t.is_rival = false;
      if (s_.active[t.slot % kActiveContexts].slot == t.slot || dev_.cancelled(t.slot)) {
        t.is_rival = !is_short(inv);
        t.how = BatchWay::kNot;
      } else if (load_acquire_local(inv.key->done) != inv.use || !dev_.ready(inv)) {
        t.how = BatchWay::kLater;
      } else {
        t.is_rival = !is_short(inv);
        t.how = how_batched(inv);
        const bool alike = (t.how == BatchWay::kPipelined) == pipelined &&
                           (!pipelined || pipelined_together(first, inv));
        if (!alike) t.how = BatchWay::kNot;
      }
    }
    dev_.sync_control();  // with what the threads have acquired
    if (dev_.leads() && first.batch == kPipelinedIfContended && pipelined && !has_rivals(n)) {
      // For good: what slices have begun is theirs.
      lane_.contexts[s_.slot].handed.stage = Stage::kSlices;
      s_.num_in_batch = 0;
    } else if (dev_.leads()) {
      record(TraceType::kStart, &first);
      std::uint32_t taken = 1;
      for (std::uint32_t i = 1; i < n; ++i) {
        const BatchEntry t = s_.batch[i];
        if (t.how == BatchWay::kNot) break;
        if (pipelined && taken == s_.policy.most_pipelined) break;
        s_.cursor = i + 1 < n ? s_.batch[i + 1].slot : lane_.queue.next(t.slot);
        if (t.how == BatchWay::kLater) continue;
        record(TraceType::kStart, &rank_.invocations[t.slot]);
        const std::uint32_t polls = dev_.threshold(s_.policy.initial_threshold(s_.position++));
        s_.batch[taken] = {t.slot, t.how, polls};
        s_.batch[taken].patient = t.patient;
        if (pipelined) note_done(s_.batch[taken]);
        ++taken;
      }
      s_.num_in_batch = taken;
    }
    dev_.sync_control();
  }

  // By the lead: whether something long could go on beside the one that is tried first: it has had
  // its turn in this pass, and waits, or was looked at behind that one. (Later uses of its key
  // cannot.)
  UNJAM_HD bool has_rivals(std::uint32_t n) const {
    if (s_.long_waits) return true;
    for (std::uint32_t i = 1; i < n; ++i) {
      if (s_.batch[i].is_rival) return true;
    }
    return false;
  }

  // Pipelined calls: the same steps, among the same ranks. (Those whose neighbours differ, as with
  // other roots they may, are left out when they are looked at, pipelined_batch.cuh.)
  UNJAM_HD static bool pipelined_together(const Invocation& a, const Invocation& b) {
    return a.geometry.kind == b.geometry.kind && a.geometry.empty_part == b.geometry.empty_part &&
           a.key->group == b.key->group;
  }

  UNJAM_HD void note_done(BatchEntry& t) const {
    const HandOver& handed = lane_.contexts[t.slot].handed;
    for (std::uint32_t i = 0; i < kMostSteps; ++i) t.done[i] = handed.done[i];
  }

  // ---- behind the try ----

  // By the control threads, behind run_batch()' barrier. What concerns an invocation, a thread
  // does; in another lane it may end, and its slot be another's, as soon as it was counted down.
  UNJAM_HD void end_batch() {
    const std::uint32_t n = s_.num_in_batch;
    if (s_.traces && dev_.leads()) {
      for (std::uint32_t i = 0; i < n; ++i) {
        const bool done = s_.batch[i].end == BatchEnd::kDone;
        if (s_.batch[i].ended) continue;
        record(done ? TraceType::kFinish : TraceType::kPreempt,
               &rank_.invocations[s_.batch[i].slot]);
      }
    }
    dev_.sync_control();
    for (std::uint32_t i = dev_.first(); i < n; i += dev_.stride()) end_entry(s_.batch[i]);
    dev_.sync_control();
    if (dev_.leads()) {
      // Among those that were tried together nobody overtakes.
      const bool overtook = lane_.queue.follows_its_like(s_.batch[0].slot);
      const bool interrupted = resolve_interruption(s_.batch, n);
      for (std::uint32_t i = 0; i < n; ++i) note_entry(s_.batch[i], overtook);
      // As may_go_on().
      if (interrupted) {
        s_.turn = s_.policy.longer_turn(s_.turn);
        if (lane_index_ == 0) look_at_submissions();
      } else if (s_.batch[0].how == BatchWay::kPipelined) {
        s_.turn = s_.policy.shortest_turn();
      }
      // Those that move are gone on with before others are begun, so that ranks come to be at the
      // same ones. Where none has moved, those that were left out are next: else who is in front,
      // and has nothing to do after all, would keep them from it in each pass. (Not before what is
      // short, for which the others were interrupted.)
      if (pipelined_moved(s_.batch, n)) {
        s_.cursor = kNoSlot;
      } else if (!s_.shorts_only && !s_.quantum_over) {
        go_back_for(s_.batch, n);
      }
      s_.num_in_batch = 0;
    }
    dev_.sync_control();
  }

  // By one thread, while others are still tried: one that is done, with all that peers are told.
  // Its slot may be another invocation's from here on. (What concerns the queue comes in the end,
  // and other lanes' waking.)
  UNJAM_HD void end_early(std::uint32_t i) {
    BatchEntry& t = s_.batch[i];
    const Invocation& inv = rank_.invocations[t.slot];
    record(TraceType::kFinish, &inv);
    t.ended = true;
    --inv.key->lanes[lane_index_].in_queue;
    end_part(inv, t.slot, false);
  }

  // Pipelined ones of which none has moved are not interrupted by others: they wait, and whoever
  // stands behind them is next. Else, where each turn ends for something short whose peers are not
  // there, those behind would never get one, and the lane would never rest: a hang.
  // Returns whether there is an interruption.
  UNJAM_HD static bool resolve_interruption(BatchEntry* tries, std::uint32_t n) {
    bool interrupted = false, moved = false;
    for (std::uint32_t i = 0; i < n; ++i) {
      interrupted = interrupted || tries[i].end == BatchEnd::kInterrupted;
      moved = moved || tries[i].moved || tries[i].end == BatchEnd::kDone;
    }
    for (std::uint32_t i = 0; interrupted && !moved && i < n; ++i) {
      if (tries[i].end == BatchEnd::kInterrupted) tries[i].end = BatchEnd::kWaits;
    }
    return interrupted && moved;
  }

  UNJAM_HD static bool pipelined_moved(const BatchEntry* tries, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      const BatchEntry& t = tries[i];
      if (t.how == BatchWay::kPipelined && t.end == BatchEnd::kWaits && t.moved) return true;
    }
    return false;
  }

  UNJAM_HD void go_back_for(const BatchEntry* tries, std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) {
      if (!tries[i].left_out || tries[i].end != BatchEnd::kWaits) continue;
      s_.cursor = tries[i].slot;
      return;
    }
  }

  UNJAM_HD void end_entry(BatchEntry& t) {
    if (t.ended) return;
    const Invocation& inv = rank_.invocations[t.slot];
    const bool pipelined = t.how == BatchWay::kPipelined;
    if (inv.batch != kBatchTwoHops) {
      t.sends = pipelined ? std::uint16_t{0} : static_cast<std::uint16_t>(inv.batch - 1u);
    }
    t.is_short = is_short(inv);
    if (t.end == BatchEnd::kDone) {
      --inv.key->lanes[lane_index_].in_queue;
      end_part(inv, t.slot, false);
      return;
    }
    DynamicContext& dyn = lane_.contexts[t.slot];
    if (pipelined) {
      for (std::uint32_t i = 0; i < kMostSteps; ++i) {
        t.moved = t.moved || dyn.handed.done[i] != t.done[i];
        dyn.handed.done[i] = t.done[i];
      }
      const bool slices = t.end == BatchEnd::kUnable || t.end == BatchEnd::kElsewhere;
      dyn.handed.stage = slices ? Stage::kSlices : Stage::kLeft;
      return;
    }
    if (t.end != BatchEnd::kUnable) dyn.handed.set_primitives_done(t.sends);
    dyn.handed.stage = t.end == BatchEnd::kWaits ? Stage::kLeft : Stage::kSlices;
  }

  // By the lead, which reads nothing of the invocation.
  UNJAM_HD void note_entry(const BatchEntry& t, bool overtook) {
    const bool done = t.end == BatchEnd::kDone;
    const bool pipelined = t.how == BatchWay::kPipelined;
    // (What is left to slices is to be looked at before the lane may rest.)
    if (done || t.end != BatchEnd::kWaits || t.moved || (t.how == BatchWay::kAll && t.sends != 0)) {
      s_.moved = true;
    }
    if (t.receives && (done || pipelined || t.moved)) s_.heard = true;
    if (done) {
      count(lane_.stats.batched);
      leave_queue(t.slot, overtook);
      if (t.is_short) note_short_end();
    } else if (t.end != BatchEnd::kUnable) {
      s_.long_waits = s_.long_waits || !t.is_short;
      count(lane_.stats.spins, t.polls);
      count(lane_.stats.preemptions);
      if (t.end == BatchEnd::kInterrupted || t.end == BatchEnd::kCutShort) give_way_to_shorts();
    }
  }
};

}  // namespace unjam
