// Calls through slots: chunk after chunk, at most three steps (program/schedule.h), which run by
// themselves, each as fast as it finds data and room (docs/internals/executors.md):
//   first warp   steers: polls, describes what is ready, hands it to a group of movers
//   second warp  publishes flags of what was moved, and credits
//   the others   movers, in groups: each warp goes from slice to slice by itself
// In shared memory:
//   given   to a group, by the first warp: so many slices. Release: their descriptions, and what
//           was acquired of peers for them
//   stored  of a description, by each warp that has moved its slice. Release: its loads and stores.
//           Who acquires all of a group's, and then fences, publishes behind all of them
// What may be interrupted: docs/internals/redo.md. Straight into outputs:
// docs/internals/connectors.md.
#pragma once

#include "device/cuda/exec/call.cuh"
#include "program/hop_order.h"

namespace unjam {
namespace in_stream {

// What hops wait for.
enum Watch : std::uint32_t { kRoomToSend, kToGather, kRoomForResult, kToCollect };
inline constexpr std::uint32_t kWatches = 4;
static_assert(kWatches * kStreamCallRanks == 32);

inline constexpr unsigned kApartWarps = 2;     // that move nothing
inline constexpr std::uint32_t kGroups = 2;    // of movers
inline constexpr std::uint32_t kInHand = 2;    // slices of a hop that movers have, at most
inline constexpr std::uint32_t kOrdered = 16;  // of a group: it never has more in hand
inline constexpr std::uint32_t kCome = 4;      // slices that have come, of a peer and a hop

inline constexpr std::uint64_t kTurnNs = 500000;  // of a lane, about an engine's quantum
inline constexpr std::uint32_t kNoSlotOfPool = 0xffffffff, kNotYet = 0xffffffff;
inline constexpr std::uint32_t kNoSlice = 0xffffffff;

static_assert(kOrdered >= kSlotSteps * kInHand);
// But of a rank that has one hop, where several calls go together; and how many of them it gives in
// a round, in which it looks at all calls. (Either alone is no faster; of a call that
// is alone two are enough.)
inline constexpr std::uint32_t kInHandOfOne = 4, kInRoundOfOne = 2;
static_assert(kInHandOfOne <= kSlotSteps * kInHand && kInHandOfOne <= kCome);
static_assert(kLeastSlotThreads >= 32 * (kApartWarps + kGroups));

// Of the connector from a member.
enum Found : std::uint32_t { kNotLooked, kIsTheKeys, kIsNot };
// Of one call.
struct SlotCallState {
  Range parts[kStreamCallRanks];  // this lane's, of each member's
  // Of the connectors to and from members: Wire, with the count at which the call began.
  Wire outs[kStreamCallRanks], ins[kStreamCallRanks];
  std::uint64_t credits[kStreamCallRanks];  // of members: seen before, and in the end
  // Where slices of a hop lie; nullptr: in the output.
  const unsigned char* come[kSlotSteps][kCome][kStreamCallRanks];
  std::uint32_t found[kStreamCallRanks];  // see Found
  // Of members that have invited: where their output has the first chunk of what they are sent, and
  // the first slice that went there (in the connector's order), with which all of its hop do.
  unsigned char* invited[kStreamCallRanks];
  std::uint32_t straight[kStreamCallRanks];
  // In the end: chunks that hops have moved, and slices of members' connectors, in order.
  std::uint32_t moved[kSlotSteps];
  std::uint32_t sent[kStreamCallRanks], taken[kStreamCallRanks];
};
struct SlotShared {
  SliceJob jobs[kSlotSteps * kInHand];
  // Slots of each peer's pool that are the call's, if it is one, see room_for().
  std::uint32_t borrowed[kStreamCallRanks];  // how many, or kNotYet
  std::uint16_t pool[kStreamCallRanks][kSlotHeaders];
  std::uint32_t stored[kSlotSteps * kInHand];
  // By group: how many slices it was given, which of the descriptions, and what they cost.
  std::uint32_t given[kGroups], order[kGroups][kOrdered];
  std::uint64_t costs[kGroups];
  std::uint32_t closed;  // nothing more is given
  std::uint32_t poke;
  // Of what is carried (carry.cuh): chunks that copy engines have moved; the first chunk that
  // blocks move, kNoSlice while there is none; chunks that were posted; and for each peer the
  // numbers of the latest posts, by chunk. Of a call that nothing of is carried the second is 0.
  std::uint32_t carried, blocks_from, posted;
  std::uint64_t posts[kStreamCallRanks][kCopyPostsOfLane];
};

__device__ __forceinline__ bool has_member(std::uint32_t members, std::uint32_t q) {
  return (members >> q & 1) != 0;
}

// Where the descriptions of hops' slices are: each hop has some, or a rank's only one all.
struct Descriptions {
  bool of_one_hop;
  __device__ __forceinline__ std::uint32_t of_a_hop() const {
    return of_one_hop ? kInHandOfOne : kInHand;
  }
  // So many may be given in a round, see steer_several().
  __device__ __forceinline__ std::uint32_t in_round() const {
    return of_one_hop ? kInRoundOfOne : 1;
  }
  // Of the hop's n-th slice.
  __device__ __forceinline__ std::uint32_t at(std::uint32_t hop, std::uint32_t n) const {
    return of_one_hop ? n % kInHandOfOne : hop * kInHand + n % kInHand;
  }
  // What is counted for its description when it has been moved. (Its slices follow each other.)
  __device__ __forceinline__ std::uint32_t count(std::uint32_t warps, std::uint32_t n) const {
    return warps * (n / of_a_hop() + 1);
  }
};

// What a block's threads work with, for one call.
// kMayCarry: of a call that may be carried (carry.cuh), which is an instance of its own: all others
// would pay for what it asks at each slice.
template <bool kMayCarry>
struct SlotCallOf {
  const StreamCall& call;
  const Invocation& inv;
  const LaneTransport& transport;
  SlotShared& s;
  SlotCallState& of;

  __device__ __forceinline__ HopOrder order() const {
    return {call.chunks_of_all(), call.steps.lag, two_hops()};
  }
  __device__ __forceinline__ bool two_hops() const { return call.steps.two_hops(); }
  __device__ __forceinline__ bool has(std::uint32_t hop) const {
    if (hop == kSends) return call.steps.sends_to != 0;
    return hop == kGathers ? call.steps.gathers_from != 0 : call.steps.collects_from != 0;
  }
  __device__ __forceinline__ bool has_one_hop() const {
    return (has(kSends) ? 1 : 0) + (has(kGathers) ? 1 : 0) + (has(kCollects) ? 1 : 0) == 1;
  }
  __device__ __forceinline__ Descriptions descriptions() const { return {has_one_hop()}; }
  // Which hop's a description is.
  __device__ __forceinline__ std::uint32_t hop_of_description(std::uint32_t i) const {
    if (!has_one_hop()) return i / kInHand;
    return has(kSends) ? kSends : has(kGathers) ? kGathers : kCollects;
  }
  __device__ __forceinline__ bool receives() const { return has(kGathers) || has(kCollects); }
  // Members of whom there are slices, or to whom.
  __device__ __forceinline__ bool sends_to(std::uint32_t q) const {
    return has_member(call.steps.sends_to | call.steps.results_to, q);
  }
  __device__ __forceinline__ bool receives_from(std::uint32_t q) const {
    return has_member(call.steps.gathers_from | call.steps.collects_from, q);
  }
  // Of a connector that carries both hops, where hops are so far; of one that carries one, that.
  __device__ __forceinline__ std::uint32_t prefix_to(
      std::uint32_t q, const std::uint32_t (&moved)[kSlotSteps]) const {
    if (two_hops()) return order().prefix(moved[kSends], moved[kGathers]);
    return moved[has_member(call.steps.sends_to, q) ? kSends : kGathers];
  }
  __device__ __forceinline__ std::uint32_t prefix_from(
      std::uint32_t q, const std::uint32_t (&moved)[kSlotSteps]) const {
    if (two_hops()) return order().prefix(moved[kGathers], moved[kCollects]);
    return moved[has_member(call.steps.gathers_from, q) ? kGathers : kCollects];
  }
  __device__ __forceinline__ bool is_carried() const { return kMayCarry && call.steps.carried; }
  // See SlotTuning. (Where copy engines send, all that movers have is what comes.)
  __device__ __forceinline__ bool in_step() const {
    return call.steps.tuning.in_step && !is_carried();
  }
  __device__ __forceinline__ std::uint32_t in_hand(std::uint32_t hop) const {
    const SlotTuning& tuning = call.steps.tuning;
    return hop == kSends ? tuning.sent_in_hand : tuning.others_in_hand;
  }
  __device__ __forceinline__ std::uint32_t slots_wanted() const {
    const std::uint32_t own = call.shape.guaranteed_slots, most = kSlotHeaders / own * own;
    const std::uint32_t wanted = call.steps.tuning.slots * own;
    return wanted < most ? wanted : most;
  }
  __device__ __forceinline__ std::uint32_t chunk_bytes() const {
    return inv.geometry.chunk * dtype_bytes(inv.geometry.dtype);
  }

  // Whether chunk n may be gathered when so many were sent, and collected: docs/internals/redo.md.
  __device__ __forceinline__ bool may_gather(std::uint32_t n, std::uint32_t sent,
                                             std::uint32_t collected) const {
    const SlotSteps& steps = call.steps;
    return (!steps.gather_waits_for_sent || sent >= order().sent_before_gather(n)) &&
           (!steps.gather_waits_for_collected || collected >= order().collected_before_gather(n));
  }

  // Which chunk of what is only sent to member q the slice is; kNoSlice: it is another step's.
  __device__ __forceinline__ std::uint32_t chunk_only_sent(std::uint32_t q,
                                                           std::uint32_t slice) const {
    if (!two_hops()) return has_member(call.steps.sends_to, q) ? slice : kNoSlice;
    const std::uint32_t n = order().firsts_in(slice);
    return n != order().firsts_in(slice + 1) ? n : kNoSlice;
  }
  // Where chunks of a hop that blocks move begin, as movers count them.
  __device__ __forceinline__ std::uint32_t moved_from(std::uint32_t hop) const {
    return hop == kSends && is_carried() ? CudaDev::load_block(s.blocks_from) : 0;
  }

  // Warps of a group of movers.
  __device__ __forceinline__ static unsigned warps() {
    return (blockDim.x / 32 - kApartWarps) / kGroups;
  }
  // By one thread: how many slices of a hop were moved, from the first on; `n` were (acquire).
  __device__ __forceinline__ std::uint32_t count_moved(std::uint32_t hop, std::uint32_t n) const {
    const Descriptions d = descriptions();
    const std::uint32_t from = moved_from(hop);
    if (from != 0) {
      // (Behind `from`, if it is not kNoSlice: then this is its last value.)
      const std::uint32_t carried = CudaDev::load_block(s.carried);
      n = carried < n ? n : carried;
      if (n < from) return n;
    }
    while (n != call.chunks_of_all()) {
      if (CudaDev::load_block(s.stored[d.at(hop, n - from)]) < d.count(warps(), n - from)) break;
      ++n;
    }
    return n;
  }

  // Whose part the hop's slice for a member is.
  __device__ __forceinline__ std::uint32_t part_for(std::uint32_t hop, std::uint32_t q) const {
    return hop == kSends && call.steps.scatters ? q : call.place;
  }
  // This lane's stretch of the place's part.
  __device__ __forceinline__ Range stretch_of(std::uint32_t q) const {
    return inv.geometry.lane_part(call.steps.parts[q], transport.lane);
  }
  __device__ __forceinline__ Range chunk(std::uint32_t part, std::uint32_t k) const {
    return inv.geometry.chunk_of(of.parts[part], k);
  }
  // Of the first chunks of a part.
  __device__ __forceinline__ std::uint64_t elems_of(std::uint32_t part,
                                                    std::uint32_t chunks) const {
    const std::uint64_t most = std::uint64_t{chunks} * inv.geometry.chunk;
    return most < of.parts[part].length ? most : of.parts[part].length;
  }
  // In the end: chunks of a hop that nobody moves again.
  __device__ __forceinline__ std::uint32_t hops_behind(std::uint32_t hop) const {
    if (!two_hops() || hop == kGathers) return of.moved[hop];
    const std::uint32_t peer = static_cast<std::uint32_t>(__ffs(call.steps.sends_to)) - 1;
    if (hop == kSends) return order().firsts_in(of.sent[peer]);
    return of.taken[peer] - order().firsts_in(of.taken[peer]);
  }
  // Straight into outputs, see the head. Whether members store what the hop sends them as it comes:
  __device__ __forceinline__ bool into_output(std::uint32_t hop) const {
    return hop == kSends ? call.steps.sent_into_outputs : call.steps.results_into_outputs;
  }
  // and whether this rank lets the member do so.
  __device__ __forceinline__ bool invites(std::uint32_t q) const {
    const std::uint32_t from =
        call.steps.collects_from | (call.steps.reduces ? 0u : call.steps.gathers_from);
    return inv.output_place != 0 && has_member(from, q);
  }
  // By one thread, for all slices that it describes.
  __device__ __forceinline__ void* place_at(std::uint32_t q, std::uint32_t hop,
                                            std::uint32_t k) const {
    const std::uint32_t slice = hop == kSends ? order().first(k) : order().second(k);
    unsigned char* const output = into_output(hop) ? of.invited[q] : nullptr;
    if (output == nullptr) return slot_to(q, slice);
    if (CudaDev::load_block(of.straight[q]) == kNoSlice)
      CudaDev::store_block(of.straight[q], slice);
    return output + std::uint64_t{k} * chunk_bytes();
  }
  // Of slices that were moved: the first that went there. (Later ones alone can still become it.)
  __device__ __forceinline__ std::uint32_t straight_from(std::uint32_t q) const {
    return CudaDev::load_block(of.straight[q]);
  }
  __device__ __forceinline__ bool went_straight(std::uint32_t slice, std::uint32_t from) const {
    if (slice < from) return false;
    return !two_hops() || order().firsts_in(slice + 1) == order().firsts_in(slice);
  }
  // How many have, of the first so many.
  __device__ __forceinline__ std::uint32_t straight_in(std::uint32_t q, std::uint32_t sent) const {
    const std::uint32_t first = of.straight[q];
    if (sent <= first) return 0;
    const auto seconds = [&](std::uint32_t n) { return two_hops() ? n - order().firsts_in(n) : n; };
    return seconds(sent) - seconds(first);
  }
  // Room. Slices go round all slots that the call has: the guaranteed ones of the connector first,
  // then those that were borrowed, of which there are so many that the sum is a multiple of the
  // former. So a guaranteed slot is its step's, as the protocol has it.
  // Of a call that is carried slices that copy engines move go round the first of those that were
  // borrowed, all if the connector has no others; results round the rest. What is only sent, and
  // blocks move, goes through steps' own slots; so does all where none were borrowed.
  __device__ __forceinline__ std::uint32_t slots_carried(std::uint32_t borrowed) const {
    return two_hops() ? borrowed / 2 : borrowed;
  }
  __device__ __forceinline__ std::uint32_t borrowed_for(std::uint32_t q,
                                                        std::uint32_t slice) const {
    if (is_carried()) {
      const std::uint32_t borrowed = s.borrowed[q], first = slots_carried(borrowed);
      // (Of a rehearsal, which moves nothing.)
      if (borrowed == kNotYet) return kNoSlotOfPool;
      const std::uint32_t n = chunk_only_sent(q, slice);
      if (n != kNoSlice) {
        return n < CudaDev::load_block(s.blocks_from) ? s.pool[q][n % first] : kNoSlotOfPool;
      }
      if (borrowed == first) return kNoSlotOfPool;
      return s.pool[q][first + (slice - order().firsts_in(slice)) % (borrowed - first)];
    }
    const std::uint32_t own = call.shape.guaranteed_slots;
    if (slice < own) return kNoSlotOfPool;
    const std::uint32_t at = slice % (own + s.borrowed[q]);
    return at < own ? kNoSlotOfPool : s.pool[q][at - own];
  }
  __device__ __forceinline__ void* slot_to(std::uint32_t q, std::uint32_t slice) const {
    const Wire& out = of.outs[q];
    const std::uint32_t borrowed = borrowed_for(q, slice);
    if (borrowed == kNoSlotOfPool)
      return transport.guaranteed_slot_of(out.steps, out.count + slice);
    return transport.pool_slot_to(call.members[q], borrowed);
  }
  // `behind`: how many steps lie between what the peer has consumed and this slice's. `straight`:
  // it needs no slot. (One that does, behind it, finds its slot as it would if this one had used
  // it.)
  __device__ __forceinline__ bool room_for(std::uint32_t q, std::uint32_t slice,
                                           std::uint64_t behind, std::uint32_t borrowed,
                                           bool straight) const {
    if (straight) return behind < kSlotHeaders;
    const std::uint32_t own = call.shape.guaranteed_slots;
    if (is_carried()) {
      if (borrowed == kNotYet || behind >= kSlotHeaders) return false;
      const std::uint32_t first = slots_carried(borrowed), n = chunk_only_sent(q, slice);
      const bool by_blocks = n != kNoSlice && n >= CudaDev::load_block(s.blocks_from);
      const std::uint32_t slots = n != kNoSlice ? first : borrowed - first;
      if (by_blocks || slots == 0) return transport.own_slot_is_free(behind);
      // (The slot's slice before this one was consumed.)
      const std::uint32_t at = n != kNoSlice ? n : slice - order().firsts_in(slice);
      if (at < slots) return true;
      const std::uint32_t former = at - slots;
      return behind < slice - (n != kNoSlice ? order().first(former) : order().second(former));
    }
    // (What was there before the call has gone.)
    if (slice < own) return transport.own_slot_is_free(behind);
    if (borrowed == kNotYet) return false;
    // (Nobody has used a pool slot since it was found to be free.)
    return behind < (slice < own + borrowed ? kSlotHeaders : own + borrowed);
  }
};
using SlotCall = SlotCallOf<false>;
using CarriedSlotCall = SlotCallOf<true>;

}  // namespace in_stream
}  // namespace unjam
