// The contexts that a block has at hand, a direct-mapped cache (paper Sec. 5): brings an
// invocation's in, and saves what has progressed. All control threads.
#pragma once

#include <cstdint>

#include "engine/lane_view.h"

namespace unjam {

template <class Dev>
class Contexts : protected LaneView<Dev> {
 public:
  using Base = LaneView<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::begin_step, Base::copy_vectors, Base::count, Base::dev_, Base::end_step, Base::here,
      Base::is_wide, Base::kWide, Base::lane_, Base::lane_index_, Base::rank_, Base::s_;

  // The context of s_.slot. Complete for all control threads, the lead too, behind the next barrier
  // of theirs.
  UNJAM_HD ActiveContext& load() {
    const std::uint16_t slot = s_.slot;
    ActiveContext& a = s_.active[slot % kActiveContexts];
    const bool cached = a.slot == slot;
    if (dev_.leads()) s_.loaded = !cached;
    if (!cached) {
      save(a);
      const std::uint64_t begun_ns = begin_step();
      copy_vectors(&a.inv, &rank_.invocations[slot], sizeof(a.inv));
      copy_vectors(&a.dyn, &lane_.contexts[slot], sizeof(a.dyn));
      dev_.sync_control();
      for (std::uint32_t i = dev_.first(); i < kCachedPrimitives; i += dev_.stride()) {
        if (i < a.inv.num_primitives) a.program[i] = a.inv.program[i];
      }
      const LaneKey& key_of_lane = a.inv.key->lanes[lane_index_];
      if (is_wide(a.inv)) {
        if (dev_.leads()) a.neighbours[kFromPlace] = a.neighbours[kToPlace] = kNoPeer;
      } else {
        for (std::uint32_t k = dev_.first(); k < a.inv.num_neighbours; k += dev_.stride()) {
          bring(a, k, a.inv.neighbours[k], key_of_lane);
        }
      }
      for (std::uint32_t i = dev_.first(); i < a.inv.num_sets; i += dev_.stride()) {
        a.sets[i] = a.inv.sets[i];
      }
      // (There are no more parts than members.)
      const std::uint32_t parts = a.inv.geometry.parts;
      const std::uint32_t here = kWide && parts > kAtHand ? kAtHand : parts;
      for (std::uint32_t p = dev_.first(); p < here; p += dev_.stride()) {
        a.parts[p] = a.inv.geometry.lane_part(p, lane_index_);
      }
      if (dev_.leads()) {
        const KeyState& key = *a.inv.key;
        a.key = &key.lanes[lane_index_];
        a.out = a.key->out;
        a.in = a.key->in;
        a.tag = key.tag;
        a.group = key.group;
        a.slot = slot;
        a.dirty = 0;
        count(lane_.stats.context_loads);
        end_step(Step::kLoadContext, begun_ns);
      }
    }
    if (dev_.leads() && a.dyn.attempts != 0xffffffffu) ++a.dyn.attempts;
    return a;
  }

  // ---- wide plans: more neighbours than are at hand (plan/plan.h) ----

  // Whom a primitive receives from, and whom it sends to, are at one place each.
  static constexpr std::uint16_t kFromPlace = 0, kToPlace = 1;

  // Group rank q to place k among the neighbours. Its endpoints are the key's, with all that has
  // changed while it was there before.
  UNJAM_HD void bring(ActiveContext& a, std::uint32_t k, std::uint16_t q,
                      const LaneKey& key) const {
    a.neighbours[k] = q;
    a.members[k] = a.inv.members[q];
    a.outs[k] = s_.transport.wire(key.out[q]);
    a.ins[k] = s_.transport.wire(key.in[q]);
    a.invited[k] = nullptr;
  }

  // By the lead: the plan's neighbour `which`, kNoPeer: nobody.
  UNJAM_HD std::uint16_t bring_wide(ActiveContext& a, std::uint16_t place,
                                    std::uint16_t which) const {
    if (which == kNoPeer) return kNoPeer;
    const std::uint16_t q = a.inv.neighbours[which];
    if (a.neighbours[place] != q) bring(a, place, q, a.inv.key->lanes[lane_index_]);
    return place;
  }

  // Lazy: only what has progressed. Each thread copies the vectors that it also loads.
  UNJAM_HD void save(const ActiveContext& a) {
    if (a.slot == kNoSlot || a.dirty == 0) return;
    const std::uint64_t begun_ns = begin_step();
    copy_vectors(&lane_.contexts[a.slot], &a.dyn, sizeof(a.dyn));
    if (!dev_.leads()) return;
    count(lane_.stats.context_saves);
    end_step(Step::kSaveContext, begun_ns);
  }
};

}  // namespace unjam
