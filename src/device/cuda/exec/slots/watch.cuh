// What the first warp's threads watch for: data that have come, or room, at one peer; the connector
// on which they come; and a member's invitation, to store into its output.
#pragma once

#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

inline constexpr std::uint32_t kAskApart = 4;  // of looking for an invitation

struct Watched {
  bool of_peer;  // whether this thread has something to watch
  bool comes;    // data, or room
  std::uint32_t q, watch, hop;
};
// The members at whom it is looked for.
template <class S>
__device__ __forceinline__ std::uint32_t members_watched(const S& c, std::uint32_t watch) {
  const SlotSteps& steps = c.call.steps;
  return watch == kRoomToSend      ? steps.sends_to
         : watch == kToGather      ? steps.gathers_from
         : watch == kRoomForResult ? steps.results_to
                                   : steps.collects_from;
}
// The n-th of some members. There are more than n.
__device__ __forceinline__ std::uint32_t member_number(std::uint32_t members, std::uint32_t n) {
  for (; n != 0; --n) members &= members - 1;
  return static_cast<std::uint32_t>(__ffs(static_cast<int>(members))) - 1;
}
// Of member q, one of the things.
template <class S>
__device__ __forceinline__ Watched watched(const S& c, std::uint32_t q, std::uint32_t watch) {
  Watched x;
  x.q = q;
  x.watch = watch;
  x.comes = x.watch == kToGather || x.watch == kToCollect;
  x.hop = x.watch == kRoomToSend ? kSends : x.watch == kToCollect ? kCollects : kGathers;
  x.of_peer = has_member(members_watched(c, watch), x.q);
  return x;
}
// The number in its connector of the slice of chunk k that is watched for.
template <class S>
__device__ __forceinline__ std::uint32_t slice_watched(const S& c, std::uint32_t watch,
                                                       std::uint32_t k) {
  const bool second = watch == kRoomForResult || watch == kToCollect;
  return second ? c.order().second(k) : c.order().first(k);
}

// By the thread that watches for room for the hop at member q, which has seen that the word there
// has changed: whether it invites this call, to where its slices can go from now on.
template <class S>
__device__ __forceinline__ bool accept_invitation(const S& c, std::uint32_t q, std::uint32_t hop) {
  const Wire& out = c.of.outs[q];
  // Acquire: the place is this invitation's, or a later one's.
  const std::uint64_t word = load_acquire(out.cell->output_word);
  const Invitation seen{load_relaxed(out.cell->output), word};
  unsigned char* output = c.transport.invited_output(c.call.members[q], out, c.inv.seed, seen);
  if (output == nullptr || output == LaneTransport::unreachable()) return false;
  const Geometry& g = c.inv.geometry;
  const std::uint64_t shift = g.output_shift(c.call.ranks[q]);
  output += (c.of.parts[c.part_for(hop, q)].offset - shift) * dtype_bytes(g.dtype);
  // What is not aligned is not moved in wide accesses, which slots are worth.
  if (((reinterpret_cast<std::uintptr_t>(output) | c.chunk_bytes()) & 15) != 0) return false;
  c.of.invited[q] = output;
  return true;
}

// What a thread that watches for room knows of its member's invitation.
struct Asking {
  bool asks;                // what goes there may go straight, and does not yet
  bool straight = false;    // it does
  std::uint64_t known = 0;  // the word, as it was looked at
  // The word as it is, in rounds of their own: under way together with what else is looked at.
  __device__ __forceinline__ std::uint64_t look(const Wire& out, std::uint32_t round) const {
    return asks && round % kAskApart == 1 ? load_relaxed(out.cell->output_word) : known;
  }
  template <class S>
  __device__ __forceinline__ void hear(const S& c, std::uint32_t q, std::uint32_t hop,
                                       std::uint64_t word) {
    if (word == known) return;
    known = word;
    straight = accept_invitation(c, q, hop);
    asks = !straight;
  }
};

// Finds the connector on which member q's slices come. `ahead`: of the stream's turn. Then only
// where it was: on another one members are invited, which is for the turn, so it is left to
// steer().
template <class S>
__device__ __forceinline__ void find_connector(const S& c, std::uint32_t q, bool ahead = false) {
  InEndpoint in = c.call.in[c.transport.lane * c.call.shape.ranks + c.call.ranks[q]];
  const InEndpoint was = in;
  const bool found = c.transport.resolve(c.call.members[q], c.call.tag, in);
  const bool stays = in.connector == was.connector;
  const bool leaves_it = ahead && !(found && stays);
  c.of.found[q] = leaves_it ? kNotLooked : found ? kIsTheKeys : kIsNot;
  if (leaves_it || !found) return;
  c.of.ins[q] = c.transport.wire(in);
  if (stays || !c.invites(q)) return;
  // (Where it was before, invite_members() may yet do so: nobody finds that.)
  if (was.connector != kNoConnector) {
    LaneTransport::withdraw(*was.cell, c.inv.seed, c.inv.output_place);
  }
  LaneTransport::invite(c.of.ins[q], c.inv.seed, c.inv.output_place);
}
// By the first warp: the connectors on which members' slices come, each looked for by one thread if
// it was not found ahead. False, of a thread that watches one: it is none, or not the key's
// any more.
template <class S>
__device__ __forceinline__ bool find_incoming(const S& c, const Watched& x, Wire& wire) {
  SlotCallState& of = c.of;
  const bool watches = x.of_peer && x.comes;
  if (watches && of.found[x.q] == kNotLooked &&
      (x.watch == kToGather || !has_member(c.call.steps.gathers_from, x.q))) {
    find_connector(c, x.q);
  }
  __syncwarp();
  if (!watches) return true;
  wire = of.ins[x.q];
  return of.found[x.q] == kIsTheKeys;
}

// What a thread knows of what it watches for.
struct Watching {
  std::uint32_t k = 0;            // so many slices are there
  std::uint64_t found = 0;        // the word, as it was looked at
  std::uint64_t step = 0;         // of the connector: of the next slice
  std::uint64_t* word = nullptr;  // that says of it

  // From chunk `first` on. The connector is known.
  template <class S>
  __device__ __forceinline__ void begin(const S& c, const Watched& x, const Wire& wire,
                                        std::uint32_t first) {
    step = wire.count + slice_watched(c, x.watch, first);
    word = x.comes ? &LaneTransport::header_of(wire.steps, step).flag : &wire.cell->consumed;
  }
};

// Whether the next slice that is watched for is there, now that `at.found` was acquired: data that
// have come, or room. Of what comes so many are looked for beyond those that were `taken`: where
// they lie is kept until then. `straight`: what is sent needs no slot.
// Strange: what was found is none of ours, and nothing more is looked for there.
enum class Seen { kNothing, kNews, kStrange };
template <class S>
__device__ __forceinline__ Seen look_at_watch(const S& c, const Watched& x, const Wire& wire,
                                              std::uint32_t taken, bool straight, Watching& at) {
  if (!x.comes) {
    bool news = false;
    const std::uint32_t chunks = c.call.chunks_of_all();
    const std::uint32_t borrowed = CudaDev::load_block(c.s.borrowed[x.q]);
    while (at.k < chunks && c.room_for(x.q, static_cast<std::uint32_t>(at.step - wire.count),
                                       at.step - at.found, borrowed, straight)) {
      news = true;
      at.step = wire.count + slice_watched(c, x.watch, ++at.k);
    }
    return news ? Seen::kNews : Seen::kNothing;
  }
  Wire in = wire;
  in.count = at.step;
  if (!LaneTransport::is_next(at.found, in, c.inv.seed)) return Seen::kNothing;
  if ((at.found & kFlagInOutput) != 0 && !c.invites(x.q)) {
    c.of.found[x.q] = kIsNot;
    return Seen::kStrange;
  }
  if (at.k >= taken + kCome) return Seen::kNothing;
  // (slice_at(): nullptr, if it is in the output. Of an own slot it goes by Wire::slot, which is
  // the connector's next step's, not this one's.)
  c.of.come[x.hop][at.k % kCome][x.q] =
      (at.found & kFlagPlaces) == 0 ? c.transport.guaranteed_slot_of(in.steps, at.step)
                                    : c.transport.slice_at(c.call.members[x.q], in, at.found);
  at.begin(c, x, wire, ++at.k);
  return Seen::kNews;
}

}  // namespace in_stream
}  // namespace unjam
