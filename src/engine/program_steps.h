// Where an invocation is in its program: the primitive that is next, its chunk in this pass of the
// program, and whom it receives from and sends to. A slice is of one primitive, or of two that go
// together (kWithNext): a pair.
#pragma once

#include <cstdint>

#include "engine/scheduler.h"

namespace unjam {

template <class Dev>
class ProgramSteps : protected Scheduler<Dev> {
 public:
  using Base = Scheduler<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::bring_wide, Base::is_wide, Base::kFromPlace, Base::kToPlace, Base::kWide,
      Base::lane_index_, Base::s_;

  static constexpr std::uint16_t kCopies = kScatter | kCollect;

  // By the lead: goes on to the next primitive that has something to do. False: there is none.
  UNJAM_HD bool seek(ActiveContext& a) {
    for (; a.dyn.loop < a.passes; advance(a)) {
      const Primitive p = primitive_at(a, a.dyn.primitive);
      s_.primitive = p;
      s_.chunk = chunk_of(a, p, a.dyn.primitive);
      s_.from = peers_of(a, p.from, a.dyn.primitive, true);
      s_.to = peers_of(a, p.to, a.dyn.primitive, false);
      s_.pair = false;
      s_.primitives = 1;
      if ((p.flags & kWithNext) != 0) {
        s_.primitives = 2;
        s_.second = primitive_at(a, a.dyn.primitive + 1);
        s_.second_chunk = chunk_of(a, s_.second, a.dyn.primitive + 1);
        // (What the first one does not, the second does: see Primitive.)
        s_.from = peers_of(a, s_.second.from, a.dyn.primitive + 1, true);
        if (s_.chunk.length == 0) {
          s_.to = {};
          s_.primitive = s_.second;
          s_.chunk = s_.second_chunk;
        } else {
          s_.pair = s_.second_chunk.length != 0;
          if (!s_.pair) s_.from = {};
        }
      }
      if (s_.chunk.length != 0) return true;
    }
    return false;
  }

  UNJAM_HD static Primitive primitive_at(const ActiveContext& a, std::uint32_t i) {
    return i < kCachedPrimitives ? a.program[i] : a.inv.program[i];
  }

  // Whom the i-th primitive receives from, or sends to.
  UNJAM_HD SlicePeers peers_of(ActiveContext& a, Peers peers, std::uint32_t i,
                               bool receives) const {
    if (peers == kNobody) return {};
    if (is_set(peers)) return {a.sets[set_of(peers)].neighbours, kNoPeer};
    if (!is_wide(a.inv)) return {0, peers};
    const WidePeers wide = a.inv.wide_peers[i];
    return {0, receives ? bring_wide(a, kFromPlace, wide.from) : bring_wide(a, kToPlace, wide.to)};
  }

  // The i-th primitive's chunk in this pass, empty if it was done by others: of copies a longest.
  UNJAM_HD Range chunk_of(const ActiveContext& a, Primitive p, std::uint32_t i) const {
    if (a.dyn.loop < p.lag || a.dyn.loop - p.lag < a.dyn.handed.done_of(i)) return {};
    if ((p.flags & kCopies) == 0) return chunk(a, p, p.part);
    const Peers peers = (p.flags & kScatter) != 0 ? p.to : p.from;
    return chunk(a, p, a.sets[set_of(peers)].longest_part);
  }

  // The same of a part.
  UNJAM_HD Range chunk(const ActiveContext& a, Primitive p, std::uint32_t part) const {
    const Geometry& g = a.inv.geometry;
    const Range all = part_at(a, part);
    if (a.dyn.loop < p.lag) return {all.offset, 0};
    return g.chunk_of(all, a.dyn.loop - p.lag);
  }

  // What this lane carries of a part.
  UNJAM_HD Range part_at(const ActiveContext& a, std::uint32_t part) const {
    if (!kWide || part < kAtHand) return a.parts[part];
    return a.inv.geometry.lane_part(part, lane_index_);
  }

  UNJAM_HD void advance(ActiveContext& a) {
    if ((a.dyn.primitive += s_.primitives) == a.inv.num_primitives) {
      a.dyn.primitive = 0;
      ++a.dyn.loop;
    }
    a.dirty = 1;
  }

  // ---- the slice under way ----

  // The slice under way, by direction: a pair's first primitive sends and its second receives,
  // any other's only one does both.
  UNJAM_HD Primitive side(bool in) const { return in && s_.pair ? s_.second : s_.primitive; }

  UNJAM_HD Range chunk(bool in) const { return in && s_.pair ? s_.second_chunk : s_.chunk; }
  UNJAM_HD SliceJob& job(bool in) const { return s_.jobs[2 * s_.which + (in && s_.pair ? 1 : 0)]; }

  UNJAM_HD std::uint16_t slice_flags() const {
    return static_cast<std::uint16_t>(s_.primitive.flags | (s_.pair ? s_.second.flags : 0));
  }

  UNJAM_HD bool has_sets() const { return (s_.from.set | s_.to.set) != 0; }

  UNJAM_HD static const void* local_at(const Invocation& inv, Primitive p, std::uint64_t offset) {
    return (p.flags & kFromOutput) != 0 ? inv.output_at(offset) : inv.input_at(offset);
  }
};

}  // namespace unjam
