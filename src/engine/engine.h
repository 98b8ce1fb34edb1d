// The engine: picks an invocation, runs its primitives in two phases (spin up to a threshold, then
// give way), saves its context, runs another, and comes back (paper Sec. 4, Algorithm 1).
//
// One engine drives one lane and is executed by all threads of a block. A few of them, the control
// threads (on a GPU the first warp, on the host one thread), decide what the block does next; all,
// or others, move the data. Its parts, from the ground up: lane_view, contexts, endings, intake,
// passes, batches, scheduler, program_steps, readiness, slices, slice_pipeline, turns. The
// device under it is an EngineDevice (device_contract.h). docs/internals/engine.md has the rules
// that hold across the parts.
#pragma once

#include <cstdint>

#include "engine/turns.h"

namespace unjam {

template <EngineDevice Dev>
class Engine : protected Turns<Dev> {
 public:
  using Base = Turns<Dev>;
  using Base::Base;
  using DevHandle = typename Dev::Handle;

  // Runs until the lane can do nothing (or was told to stop, or has stayed its time). By all
  // threads of the block. Nothing but the arguments lives across the leaf, so that it has the
  // registers to itself: what the control threads need is in `shared`. (Inlined: of a function that
  // is called, a part of the registers would be its caller's.)
  UNJAM_HD_INLINE static void run(DevHandle dev, RankState& rank, std::uint32_t lane,
                                  BlockShared& shared) {
    const bool control = dev.controls();
    if (control) phase<&Engine::start>(dev, rank, lane, shared);
    for (;;) {
      if (control) phase<&Engine::decide>(dev, rank, lane, shared);
      dev.sync();
      if (shared.quits) break;
      if constexpr (kBatches) {
        const std::uint32_t tries = shared.num_in_batch;
        if (tries != 0) {
          dev.run_batch(shared.batch, tries, shared.turn, [&](std::uint32_t i) {
            phase<&Engine::end_early>(dev, rank, lane, shared, i);
          });
          if (control) phase<&Engine::end_batch>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (Dev::kInlinePacketFlags) {
        if (shared.packets) {
          if (!dev.packet_leaf(shared.jobs[0], shared.threshold)) {
            if (control) phase<&Engine::packets_missing>(dev, rank, lane, shared);
            continue;
          }
          dev.sync();  // as below
          if (control) phase<&Engine::publish>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (kCarries) {
        if (shared.carried) {
          dev.sync();  // all have seen it, before the next slice is looked for
          if (control) phase<&Engine::carry>(dev, rank, lane, shared);
          continue;
        }
      }
      if constexpr (Dev::kPipelines) {
        if (dev.pipelines()) {
          if (control) {
            phase<&Engine::run_pipeline>(dev, rank, lane, shared);
          } else if (dev.posts()) {
            post_in_pipeline(dev, shared);
          } else {
            move_in_pipeline(dev, shared);
          }
          dev.sync();
          if (control) phase<&Engine::end_pipeline>(dev, rank, lane, shared);
          continue;
        }
      }
      dev.leaf(shared.jobs[0]);
      if (shared.pair) dev.leaf(shared.jobs[1]);
      dev.sync();  // the whole slice is stored before it is published
      if (control) phase<&Engine::publish>(dev, rank, lane, shared);
    }
    if (control) phase<&Engine::leave>(dev, rank, lane, shared);
    dev.sync();
  }

 protected:
  using Base::fill_batch, Base::begin_turn, Base::carry, Base::copy_vectors, Base::count,
      Base::count_part, Base::dev_, Base::end_early, Base::end_pipeline, Base::end_turn,
      Base::end_batch, Base::kCancelledNow, Base::kCarries, Base::kMove, Base::kQuit,
      Base::kBatches, Base::kWide, Base::lane_, Base::lane_index_, Base::move_in_pipeline,
      Base::next_command, Base::packets_missing, Base::post_in_pipeline, Base::prepare,
      Base::publish, Base::rank_, Base::record, Base::s_, Base::save, Base::run_pipeline;

  UNJAM_HD void start() {
    if constexpr (Dev::kLaneInShared) {
      copy_vectors(&s_.lane, &rank_.lanes[lane_index_], sizeof(LaneState));
      dev_.sync_control();
    }
    const std::uint32_t ranks = lane_.transport.shape.ranks;
    const bool copied = !kWide || ranks <= kAtHand;
    for (std::uint32_t r = dev_.first(); copied && r < ranks; r += dev_.stride()) {
      s_.bases[r] = lane_.transport.bases[r];
    }
    if (dev_.leads()) {
      s_.transport = lane_.transport;
      if (copied) s_.transport.bases = s_.bases;
      s_.policy = rank_.policy;
      s_.traces = lane_.trace.places != 0;
      for (ActiveContext& a : s_.active) a.slot = kNoSlot;
      s_.slot = s_.cursor = kNoSlot;
      s_.idle = s_.late = 0;
      s_.turn = s_.policy.shortest_turn();
      s_.sent_bytes = s_.sent_borrowed = s_.sent_into_outputs = 0;
      s_.moved = s_.heard = s_.wants_room = s_.pass_begun = s_.in_turn = s_.quits = false;
      s_.ran = s_.quantum_over = s_.shorts_only = s_.ended = s_.fetching = s_.fetched = false;
      s_.quit_for = QuitFor::kCalledAway;
      s_.num_in_batch = 0;
      s_.which = 0;
      s_.loaded = false;
      s_.late_since_ns = s_.unheard_since_ns = 0;
      s_.unordered = true;
      s_.started_ns = dev_.now_ns();
      count(lane_.stats.starts);
      record(TraceType::kRestart, nullptr);
    }
    dev_.sync_control();
  }

  // Saves every active context: nothing of the progress may be lost with the block.
  UNJAM_HD void leave() {
    for (const ActiveContext& a : s_.active) save(a);
    if (dev_.leads()) {
      count(lane_.stats.quits);
      if (s_.quit_for == QuitFor::kIdle) count_part(lane_.stats.idle_quits);
      if (s_.quit_for == QuitFor::kStuck) count_part(lane_.stats.stuck_quits);
      if (s_.quit_for == QuitFor::kResidency) count_part(lane_.stats.residency_quits);
      record(TraceType::kQuit, nullptr);
    }
    if constexpr (Dev::kLaneInShared) {
      dev_.sync_control();
      copy_vectors(&rank_.lanes[lane_index_], &s_.lane, sizeof(LaneState));
    }
  }

  // Finds the next slice that can be moved, across invocations; or that there is none, and quits.
  UNJAM_HD void decide() {
    bool in_turn = s_.in_turn;
    for (;;) {
      if (!in_turn) {
        if (next_command() == kQuit) {
          if (dev_.leads()) s_.quits = true;
          return;
        }
        if constexpr (kBatches) {
          if (s_.num_in_batch != 0) {
            phase<&Engine::fill_batch>(dev_, rank_, lane_index_, s_);
            if (s_.num_in_batch != 0) return;
          }
        }
        phase<&Engine::begin_turn>(dev_, rank_, lane_index_, s_);
        in_turn = true;
      }
      const std::uint32_t status = phase<&Engine::prepare>(dev_, rank_, lane_index_, s_);
      if (status == kMove) return;
      if (status == kCancelledNow) dev_.sync_control();  // the lead sees to all endpoints
      phase<&Engine::end_turn>(dev_, rank_, lane_index_, s_, status, false);
      dev_.sync_control();
      in_turn = false;
    }
  }
};

}  // namespace unjam
