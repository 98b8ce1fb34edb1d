// Several slices of a turn under way at once, where a block has threads enough: control threads
// look for slices and hand them on, movers move them, posters publish them in order. Which words
// order the three is said at PipelineState (engine/state.h), and why in docs/internals/engine.md.
#pragma once

#include <cstdint>

#include "engine/slices.h"

namespace unjam {

template <class Dev>
class SlicePipeline : protected Slices<Dev> {
 public:
  using Base = Slices<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::active, Base::begin_peers, Base::build_jobs, Base::chunk, Base::copies,
      Base::count_slice, Base::dev_, Base::has_sets, Base::here, Base::holds, Base::job,
      Base::kMove, Base::look, Base::may_go_on, Base::move_on, Base::post_slice, Base::s_,
      Base::side, Base::slice_flags, Base::tell;

  // By the control threads. The first slice's job was made before the barrier.
  UNJAM_HD void run_pipeline() {
    ActiveContext& a = active();
    PipelineState& state = s_.pipeline;
    for (std::uint32_t n = 0;; ++n) {
      // Slice n is on its way.
      count_slice(a);
      dev_.sync_control();
      bool goes_on = false;
      if (dev_.leads()) {
        dev_.store_block(state.counted, n + 1);
        move_on(a);
        goes_on = !s_.ended && !holds() && may_go_on() == kMove;
        s_.which = (n + 1) % kPipelineDepth;
      }
      if (tell(goes_on ? 1 : 0) == 0 || !prepare_next(a, n)) {
        if (dev_.leads()) dev_.store_block(state.total, n + 1);
        return;
      }
    }
  }

  // Hands slice n + 1 on. False: it is not ready although all before are published.
  UNJAM_HD bool prepare_next(ActiveContext& a, std::uint32_t n) {
    std::uint32_t& posted = s_.pipeline.posted;
    // Whose place it takes; or what it may read.
    std::uint32_t before = n + 2 > kPipelineDepth ? n + 2 - kPipelineDepth : 0;
    if (slice_flags() & kFromOutput) before = n + 1;
    // (Here the block waits for itself alone.)
    while (!dev_.all(!dev_.leads() || dev_.load_block(posted) >= before)) dev_.relax(1);
    dev_.sync_control();  // what the lead has acquired, for all
    if (has_sets()) begin_peers(a);
    if (dev_.leads()) s_.waited = false;
    while (look(a) != Lack::kNothing) {
      if (dev_.leads()) s_.waited = true;
      if (dev_.all(!dev_.leads() || dev_.load_block(posted) == n + 1)) return false;
      dev_.relax(1);
    }
    if (dev_.leads()) build_jobs(a);
    dev_.sync_control();
    if (dev_.leads()) give_to_movers(n + 1);
    return true;
  }

  // By the lead: each job of slice n is for the group of movers that has had less.
  UNJAM_HD void give_to_movers(std::uint32_t n) {
    if constexpr (Dev::kPipelines) {
      PipelineState& state = s_.pipeline;
      const std::uint32_t place = n % kPipelineDepth;
      for (std::uint32_t in = 0; in < (s_.pair ? 2u : 1u); ++in) {
        std::uint32_t group = 0;
        for (std::uint32_t g = 1; g < dev_.groups(); ++g) {
          if (state.cost[g] < state.cost[group]) group = g;
        }
        state.cost[group] += cost_of(in != 0);
        const std::uint32_t k = state.given[group];
        state.turns[group][k % (2 * kPipelineDepth)] = 2 * place + in;
        state.expected[place] += dev_.movers();
        dev_.store_block(state.given[group], k + 1);
      }
    }
  }

  // How long a slice takes the movers, see cost_of_element().
  UNJAM_HD std::uint64_t cost_of(bool in) const {
    const SliceJob& job = this->job(in);
    if (job.copies) {
      const std::uint16_t flags = side(in).flags;
      const std::uint32_t stores = (flags & kCopy) != 0 ? 1 : 0;
      const Invocation& inv = s_.active[s_.slot % kActiveContexts].inv;
      const std::uint16_t empty = inv.geometry.empty_part;
      const std::uint32_t copies = count_bits(in ? s_.from.set : s_.to.set) -
                                   (empty == kNoPart || empty == inv.group_rank ? 0u : 1u);
      return chunk(in).length * copies *
             cost_of_element(1, (flags & kScatter) != 0 ? 1 : 0, stores);
    }
    return job.elems * cost_of_element(job.num_src, job.num_dst, job.dst_user != nullptr ? 1 : 0);
  }

  UNJAM_HD static void move_in_pipeline(DevHandle dev, BlockShared& block) {
    BlockShared& shared = here(block);
    PipelineState& state = shared.pipeline;
    const std::uint32_t g = dev.group();
    for (std::uint32_t k = 0;; ++k) {
      while (dev.load_block(state.given[g]) <= k) {
        // (The latest is given before the stream ends.)
        if (dev.load_block(state.total) != 0 && dev.load_block(state.given[g]) <= k) return;
        dev.relax(1);
      }
      // Overwritten when the group is given number k + 2 * kPipelineDepth, which is of a slice that
      // takes this one's place, or a later one's.
      const std::uint32_t j = state.turns[g][k % (2 * kPipelineDepth)];
      dev.leaf(shared.jobs[j]);
      dev.stored(state.stored[j / 2]);
    }
  }

  UNJAM_HD static void post_in_pipeline(DevHandle dev, BlockShared& block) {
    BlockShared& shared = here(block);
    PipelineState& state = shared.pipeline;
    for (std::uint32_t n = 0;; ++n) {
      while (dev.load_block(state.counted) <= n) {
        const std::uint32_t total = dev.load_block(state.total);
        if (total != 0 && total <= n) return;
        dev.relax(1);
      }
      const std::uint32_t place = n % kPipelineDepth;
      // (Written before the slice was counted, and next when this one is posted.)
      const std::uint32_t all = state.expected[place];
      while (dev.load_block(state.stored[place]) != all) dev.relax(1);
      post_slice(dev, shared, place);
      dev.sync_posters();
      if (dev.posters_first()) dev.store_block(state.posted, n + 1);
    }
  }
};

}  // namespace unjam
