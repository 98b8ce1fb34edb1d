// Whether the slice that is next can be moved: what it receives is there, and there is room for
// what it sends. Changes nothing that outlives the wait, so giving way needs no undo
// (transport/connector.h).
//
// Gates. What a remote peer sends may come into memory that is slow to look at. Whoever puts it
// there counts, behind it (release), a word up that is fast to look at: the gate of that peer and
// lane. A wait looks at flags and credits once, and again only when a gate has changed since before
// the last look (acquire): what came behind that look has yet to be counted.
#pragma once

#include <cstdint>

#include "engine/program_steps.h"

namespace unjam {

template <class Dev>
class Readiness : protected ProgramSteps<Dev> {
 public:
  using Base = ProgramSteps<Dev>;
  using Base::Base;
  using typename Base::DevHandle;

 protected:
  using Base::active, Base::bring, Base::chunk, Base::count, Base::dev_, Base::has_sets,
      Base::inline_flags, Base::invites, Base::is_wide, Base::job, Base::kCarries, Base::kCopies,
      Base::kFromPlace, Base::kGates, Base::lane_, Base::lane_index_, Base::local_at, Base::member,
      Base::rank_, Base::s_, Base::side;

  // What the slice lacks. Changes nothing that outlives the wait.
  UNJAM_HD Lack look(ActiveContext& a) {
    if (dev_.leads()) s_.elems = static_cast<std::uint32_t>(s_.chunk.length - a.dyn.through);
    if (s_.from.one != kNoPeer) {
      if (!dev_.all(!dev_.leads() || slice_there(a))) return Lack::kData;
    }
    if (has_sets()) {
      const Lack lack = look_at_peers(a);
      if (lack != Lack::kNothing) return lack;
    }
    if (s_.to.one != kNoPeer) {
      if (!dev_.all(!dev_.leads() || room_there(a))) return Lack::kRoom;
    }
    return Lack::kNothing;
  }

  // By the lead: the gates of all whom the slice waits for, see "Gates".
  struct Gates {
    std::uint64_t count = 0;  // of all together: each only grows
    bool all = true;          // everyone has one
  };

  UNJAM_HD Gates look_at_gates(const ActiveContext& a) {
    Gates gates;
    if constexpr (kGates) {
      if (!dev_.leads()) return gates;
      const std::uint64_t sets = s_.from.set | s_.to.set;
      const std::uint32_t n = is_wide(a.inv) ? kAtHand : std::uint32_t{a.inv.num_neighbours};
      for (std::uint32_t k = 0; k < n; ++k) {
        if ((sets >> k & 1) == 0 && k != s_.from.one && k != s_.to.one) continue;
        const std::uint64_t* const gate = dev_.gate(member(a, k));
        if (gate == nullptr) return {0, false};
        gates.count += load_acquire(*gate);
      }
    }
    return gates;
  }

  // ---- connectors ----

  // See LaneTransport::open() and resolve(), of neighbour k. The endpoints are the key's.
  UNJAM_HD bool open(ActiveContext& a, std::uint32_t k) {
    OutEndpoint& out = a.out[a.neighbours[k]];
    if (!s_.transport.open(member(a, k), a.tag, a.group, out, &a.key->in_queue)) {
      // Several threads may count here.
      fetch_add<std::uint64_t>(lane_.stats.no_connector, 1);
      return false;
    }
    a.outs[k] = s_.transport.wire(out);
    return true;
  }

  UNJAM_HD bool resolve(std::uint32_t k) {
    ActiveContext& a = active();
    InEndpoint& in = a.in[a.neighbours[k]];
    const bool found = s_.transport.resolve(member(a, k), a.tag, in);
    const Wire was = a.ins[k];
    if (in.connector != was.connector || in.consumed != was.count || in.steps != was.steps) {
      if (was.connector != kNoConnector && in.connector != was.connector && invites(a.inv)) {
        LaneTransport::withdraw(*was.cell, a.inv.seed, a.inv.output_place);
      }
      a.ins[k] = s_.transport.wire(in);
      if (found && invites(a.inv)) invite(a, k);
    }
    return found;
  }

  // ---- outputs that peers store into (transport/connector.h) ----

  UNJAM_HD void invite(ActiveContext& a, std::uint32_t k) {
    LaneTransport::invite(a.ins[k], a.inv.seed, a.inv.output_place);
  }

  // On connectors that are known as the invocation begins; on others as they are found.
  UNJAM_HD void invite_known() {
    ActiveContext& a = active();
    const bool wide = is_wide(a.inv);
    for (std::uint32_t i = dev_.first(); i < a.inv.num_neighbours; i += dev_.stride()) {
      const std::uint32_t k = wide ? kFromPlace : i;
      if (wide) bring(a, k, a.inv.neighbours[i], *a.key);
      if (a.ins[k].connector == kNoConnector) continue;
      if (resolve(k)) invite(a, k);
    }
  }

  // Whether the slice may go straight to where neighbour k's output has it. Looked for until it is
  // found, from its first slice on that could use it; whatever this rank knows of heaps and
  // windows, for the words are in the line of the credits, which every slice looks at.
  UNJAM_HD bool asks(const ActiveContext& a, std::uint32_t k) const {
    return (s_.primitive.flags & kIntoOutput) != 0 && a.invited[k] == nullptr;
  }

  UNJAM_HD void note_invitation(ActiveContext& a, std::uint32_t k, const Invitation& seen) {
    a.invited[k] = s_.transport.invited_output(member(a, k), a.outs[k], a.inv.seed, seen);
  }

  // Where neighbour k has the slice in its output; nullptr: it goes through a slot.
  UNJAM_HD unsigned char* place_in_output(const ActiveContext& a, std::uint32_t k) const {
    if ((s_.primitive.flags & kIntoOutput) == 0) return nullptr;
    unsigned char* output = a.invited[k];
    if (output == nullptr || output == LaneTransport::unreachable()) return nullptr;
    const Geometry& g = a.inv.geometry;
    const std::uint32_t q = a.neighbours[k];
    const bool scatters = (s_.primitive.flags & kScatter) != 0;
    const std::uint64_t offset =
        scatters ? chunk(a, s_.primitive, q).offset : s_.chunk.offset + a.dyn.through;
    output += (offset - g.output_shift(q)) * dtype_bytes(g.dtype);
    // What is not aligned is not moved in wide accesses, which slots are worth.
    const bool aligned = (reinterpret_cast<std::uintptr_t>(output) & 15) == 0;
    return aligned ? output : nullptr;
  }

  // ---- one peer, by the lead ----

  UNJAM_HD bool arrived(ActiveContext& a, std::uint32_t k, std::uint32_t elems, RecvView& view) {
    LaneTransport& t = s_.transport;
    const std::uint32_t peer = member(a, k);
    const Wire& in = a.ins[k];
    const bool packets = inline_flags(a);
    // Where the slice was last expected, first: a flag is one step's of one invocation, so what
    // carries it is the slice, whoever has the connector now. That spares looking the key up.
    if (!packets && in.connector != kNoConnector && t.poll(peer, in, a.inv.seed, view)) return true;
    if (!phase<&Readiness::resolve>(dev_, rank_, lane_index_, s_, k)) return false;
    if (packets) {
      view = t.packet_view(in, elems * dtype_bytes(a.inv.geometry.dtype));
      return true;
    }
    return t.poll(peer, in, a.inv.seed, view);
  }

  // Capacity 0: there is none.
  UNJAM_HD SendGrant room(ActiveContext& a, std::uint32_t k, std::uint32_t elems) {
    const Wire& out = a.outs[k];
    if (out.connector == kNoConnector && !open(a, k)) return {};
    const bool asking = asks(a, k);
    Invitation seen;
    if (asking) seen = LaneTransport::glimpse(out);
    const std::uint64_t credit = load_acquire(out.cell->consumed);
    if (asking) note_invitation(a, k, seen);
    return room(a, k, elems, credit);
  }

  UNJAM_HD SendGrant room(ActiveContext& a, std::uint32_t k, std::uint32_t elems,
                          std::uint64_t credit) {
    LaneTransport& t = s_.transport;
    const std::uint32_t peer = member(a, k);
    const Wire& out = a.outs[k];
    if (inline_flags(a)) return t.packet_grant(out, credit);
    if (unsigned char* place = place_in_output(a, k)) return t.output_grant(place, out, credit);
    return t.grant(peer, out, elems * dtype_bytes(a.inv.geometry.dtype), credit, slot_class());
  }

  // Whether it is a mark that counts: what is several peers', or more than a copy, is the blocks'.
  UNJAM_HD bool is_marked() const {
    if (!kCarries || carrier_of(s_.primitive) == Carrier::kBlocks) return false;
    const bool only_sends = (s_.primitive.flags & (kRecv | kCopy | kCopies)) == 0;
    return only_sends && !s_.pair && s_.to.one != kNoPeer;
  }

  UNJAM_HD SlotClass slot_class() const {
    return is_marked() ? SlotClass::kBorrowedFirst : SlotClass::kGuaranteedFirst;
  }

  // One peer, by the lead.
  UNJAM_HD bool slice_there(ActiveContext& a) {
    if (!arrived(a, s_.from.one, s_.elems, s_.view)) return false;
    if (inline_flags(a)) return true;
    const std::uint32_t come = (s_.view.bytes - a.dyn.taken) / dtype_bytes(a.inv.geometry.dtype);
    if (come < s_.elems) s_.elems = come;
    return true;
  }

  UNJAM_HD bool room_there(ActiveContext& a) {
    const SendGrant g = room(a, s_.to.one, s_.elems);
    if (g.capacity == 0) return false;
    const std::uint32_t elems = g.capacity / dtype_bytes(a.inv.geometry.dtype);
    if (elems < s_.elems && !inline_flags(a)) {
      if (s_.from.set != 0) return false;  // what it receives is one slice
      s_.elems = elems;
    }
    job(false).dst_slot[0] = g.data;
    s_.location[0] = g.location;
    return true;
  }

  // ---- several peers, this thread's share ----

  // Several peers, this thread's share. What a slice with several peers has found once stays so:
  // slices do not go, and room only grows, until this lane itself takes or fills them.
  //
  // There are two parts a neighbour: of n neighbours, number i is what comes from the i-th, number
  // n + i is room at it. All parts are looked at together, each by one thread, so that a slice
  // takes one round trip to memory, not two. (Copies have one of the two: who sees to that
  // describes the copy.)
  struct Part {
    std::uint32_t k;
    bool in;
  };

  UNJAM_HD static Part part_of(const ActiveContext& a, std::uint32_t i) {
    const std::uint32_t n = a.inv.num_neighbours;
    return i < n ? Part{i, true} : Part{i - n, false};
  }

  UNJAM_HD bool& has(Part part) { return part.in ? s_.has_come[part.k] : s_.has_room[part.k]; }
  UNJAM_HD std::uint64_t set(bool in) const { return in ? s_.from.set : s_.to.set; }
  UNJAM_HD bool copies(bool in) const { return (side(in).flags & kCopies) != 0; }

  UNJAM_HD bool takes_part(Part part) const {
    if ((set(part.in) >> part.k & 1) == 0) return false;
    return !copies(part.in) || job(part.in).copy_elems[part.k] != 0;
  }

  // Elements of the slice from or to a neighbour.
  UNJAM_HD std::uint32_t elems_of(Part part) const {
    if (copies(part.in)) return job(part.in).copy_elems[part.k];
    return static_cast<std::uint32_t>(chunk(part.in).length);
  }

  UNJAM_HD static std::uint32_t place_in(std::uint64_t set, std::uint32_t k) {
    return count_bits(set & ((std::uint64_t{1} << k) - 1));
  }

  // Neighbour k's place in dst_slot, of what is sent. A combine's result goes to num_dst places,
  // without a gap; copies are at their neighbours' places.
  UNJAM_HD std::uint32_t place_of(std::uint32_t k) const {
    return copies(false) ? k : place_in(s_.to.set, k);
  }

  // And in src, of what is received. What is combined has this rank's own among them: of
  // contributions where its rank comes, of sums behind them.
  UNJAM_HD std::uint32_t source_of(const ActiveContext& a, std::uint32_t k) const {
    const Primitive p = side(true);
    if ((p.flags & kCopies) != 0) return k;
    const bool behind_own = (p.flags & kPartials) == 0 && k >= a.inv.neighbours_below;
    return place_in(s_.from.set, k) + (behind_own ? 1 : 0);
  }

  UNJAM_HD std::uint32_t own_source(const ActiveContext& a) const {
    const bool last = (side(true).flags & kPartials) != 0;
    return last ? count_bits(s_.from.set) : place_in(s_.from.set, a.inv.neighbours_below);
  }

  UNJAM_HD void begin_peers(const ActiveContext& a) {
    for (std::uint32_t i = dev_.first(); i < 2 * std::uint32_t{a.inv.num_neighbours};
         i += dev_.stride()) {
      const Part part = part_of(a, i);
      // (A set of the other direction is the other primitive's, of two that go together.)
      if (set(part.in) != 0 && copies(part.in)) place_copy(a, part);
      has(part) = !takes_part(part);
    }
  }

  // The user's side of the copy for a neighbour.
  UNJAM_HD void place_copy(const ActiveContext& a, Part part) {
    const std::uint32_t k = part.k;
    const Primitive p = side(part.in);
    SliceJob& job = this->job(part.in);
    const bool is_in_set = (set(part.in) >> k & 1) != 0;
    const Range c = chunk(a, p, a.neighbours[k]);
    job.copy_elems[k] = is_in_set ? static_cast<std::uint32_t>(c.length) : std::uint32_t{0};
    if (p.flags & kScatter) {
      job.src[k] = local_at(a.inv, p, c.offset);
      const bool copies = (p.flags & kCopy) != 0 && a.inv.input != a.inv.output;
      job.dst_copy[k] = copies ? a.inv.output_at(c.offset) : nullptr;
    } else {
      job.dst_slot[k] = nullptr;
      job.dst_copy[k] = a.inv.output_at(c.offset);
    }
  }

  UNJAM_HD Lack look_at_peers(ActiveContext& a) {
    bool come = true, room = true;
    for (std::uint32_t i = dev_.first(); i < 2 * std::uint32_t{a.inv.num_neighbours};
         i += dev_.stride()) {
      const Part part = part_of(a, i);
      if (has(part) || look_at_peer(a, part)) continue;
      (part.in ? come : room) = false;
    }
    if (!dev_.all(come)) return Lack::kData;
    return dev_.all(room) ? Lack::kNothing : Lack::kRoom;
  }

  UNJAM_HD bool look_at_peer(ActiveContext& a, Part part) {
    const std::uint32_t k = part.k, peer = member(a, k);
    LaneTransport& t = s_.transport;
    if (inline_flags(a) && part.in) {
      RecvView view;
      if (!arrived(a, k, elems_of(part), view)) return false;
      return note_slice(k, view.data);
    }
    const Wire& wire = part.in ? a.ins[k] : a.outs[k];
    if (wire.connector == kNoConnector &&
        !(part.in ? phase<&Readiness::resolve>(dev_, rank_, lane_index_, s_, k) : open(a, k))) {
      return false;
    }
    // Before the acquire, so that all are under way together.
    const bool asking = !part.in && asks(a, k);
    Invitation seen;
    if (asking) seen = LaneTransport::glimpse(wire);
    // One look for both kinds of parts: branches would wait for memory one after the other.
    std::uint64_t& word = part.in ? LaneTransport::flag_word(wire) : wire.cell->consumed;
    const std::uint64_t found = load_acquire(word);
    if (asking) note_invitation(a, k, seen);
    if (part.in) {
      if (LaneTransport::is_next(found, wire, a.inv.seed)) {
        return note_slice(k, t.slice_at(peer, wire, found));
      }
      return phase<&Readiness::comes_elsewhere>(dev_, rank_, lane_index_, s_, k);
    }
    const SendGrant g = room(a, k, elems_of(part), found);
    if (g.capacity == 0) return false;
    if (!inline_flags(a) && g.capacity < elems_of(part) * dtype_bytes(a.inv.geometry.dtype)) {
      return false;
    }
    const std::uint32_t at = place_of(k);
    job(false).dst_slot[at] = g.data;
    s_.location[at] = g.location;
    return s_.has_room[k] = true;
  }

  // The sender may have opened another connector, and all of a look must be in one look: who sleeps
  // behind it has not been rung for what came before its epoch (doorbell.h).
  UNJAM_HD bool comes_elsewhere(std::uint32_t k) {
    ActiveContext& a = active();
    const Wire was = a.ins[k];
    if (!resolve(k)) return false;
    const Wire& in = a.ins[k];
    if (in.steps == was.steps && in.count == was.count) return false;
    RecvView view;
    return s_.transport.poll(member(a, k), in, a.inv.seed, view) && note_slice(k, view.data);
  }

  UNJAM_HD bool note_slice(std::uint32_t k, const unsigned char* data) {
    job(true).src[source_of(active(), k)] = data;
    return s_.has_come[k] = true;
  }
};

}  // namespace unjam
