// As solo.cuh, for what is too large for packets: what plan/lower.cc gives to slots, at most three
// steps (program/schedule.h), chunk after chunk. What costs an engine 10 us a slice (it decides
// what is next) and 50 a call (it is handed the call, and hands it back) is all known here
// beforehand: where each slice of each hop lies, and in which order a connector carries them
// (program/hop_order.h). So the hops run by themselves, each as fast as it finds data and room:
//   first warp      steers: a thread for each peer, and for each of the four things that hops wait
//                   for there (Watch), polls for the next slice that has come, or that has room;
//                   what is ready it describes, and hands to a group of movers
//   second warp     publishes, as the engine's: flags of what was moved, and credits
//   the others      movers, in groups: each warp goes from slice to slice by itself
// In shared memory:
//   given    to a group, by the first warp: so many slices. Release: their descriptions, and what
//            was acquired of peers for them.
//   stored   of a description, by each warp of movers that has moved its slice. Release: its loads
//            and stores. Who reads that all of a group have (acquire), and then fences, publishes
//            behind all of them.
//
// Ahead of the stream's turn (look_in_time()) all is set up, and its beginning rehearsed: the last
// warp goes through steer()'s first round, in shared memory of its own, and movers have a slice
// without data. For instructions have to be fetched: the first slice's description takes 2.9 us,
// later ones 0.9. (Four H100s; probe.) A call that is close to the one in front, see CallInFront,
// even begins then. And since one more is likely to be close to it, who waits for nobody any more
// there, for all that is left has come, or has room, reports while its last slices are moved, so
// that the next call's blocks come, and do all this, meanwhile. (Blocks that come early and then
// wait for their turn cost the call in front of them 1 to 3 %: four H200s, 64 MiB.)
//
// What may be interrupted. Slices are published, and taken, in the connectors' order only; what was
// moved and is not part of a prefix is forgotten, and the engine moves it again. Contributions and
// copies may be moved twice: what they read is not overwritten before peers have it (see
// engine.h). A reduction may not, in place; nor may what is received be given back while what
// becomes of it is forgotten. So where what is gathered shares connectors with other steps
// (SlotSteps::gather_waits_for_sent, by plan/order_rule.h) a chunk is gathered only when all that
// its pass has in front of it was moved, see HopOrder: then its result, and what it took, are in a
// prefix. (Any other connector carries one hop's slices: all that were moved are a prefix in the
// end, for no lane stops before movers are through with what they have in hand.)
//
// Giving up. Only the first warp waits for peers; all others wait for it, and it ends. A lane waits
// but a while for peers (SoloCall::patience_ns since anything came). It stops for others that want
// lanes, when it has had its turn (kTurnNs); if another lane of the call has given up; or if the
// host says something. Then the engine goes on, with what hops have behind them (CudaRank::handed),
// and the block drives its lane again, as those of calls for the engine do. Before the engine has
// accepted the call its connectors may be taken over (see solo.cuh): those whose slices peers have
// taken. What is left goes through the next ones.
//
// Straight into outputs (connector.h). Results go there (but a chain's sums, to which others add),
// and what is spread, from the first slice on that is described when the member's invitation has
// been seen; then the others of the hop do, too. They take a step of the connector, and a header,
// but no slot. Of what the receiver would only have copied it has nothing to move: its first warp
// counts what movers would have. Who receives such slices invites as the call begins, on the
// connectors that its key has had before, or where it finds them.
#pragma once

#include "device/cuda/kernels/lane_pace.h"
#include "device/cuda/kernels/solo.cuh"
#include "device/cuda/kernels/succession.cuh"
#include "program/hop_order.h"

namespace unjam {
namespace solo {

// What hops wait for.
enum Watch : std::uint32_t { kRoomToSend, kToGather, kRoomForResult, kToCollect };
inline constexpr std::uint32_t kWatches = 4;
static_assert(kWatches * kSoloRanks == 32);

inline constexpr unsigned kApartWarps = 2;         // that move nothing
inline constexpr std::uint32_t kGroups = 2;        // of movers
inline constexpr std::uint32_t kInHand = 2;        // slices of a hop that movers have, at most
inline constexpr std::uint32_t kTurns = 16;        // of a group: it never has more in hand
inline constexpr std::uint32_t kCome = 4;          // slices that have come, of a peer and a hop
inline constexpr std::uint32_t kRoundsApart = 16;  // of looking at anything but peers
inline constexpr std::uint32_t kAskApart = 4;      // of looking for an invitation
inline constexpr std::uint64_t kTurnNs = 500000;   // about an engine's quantum
// Of a lane in which nothing moves. From kStillNs on it looks at what the host says: the first lane
// each time that has passed, others much less often. (Over PCIe one GPU reads about a word a
// microsecond. Where more is asked for everything on it waits: with 16 blocks that asked every 2 us
// a matrix product beside them took 4.0 ms instead of 1.6. Two H200s, a probe that is not in the
// tree.)
inline constexpr std::uint64_t kStillNs = 50000, kSeldomNs = 2000000;
// See linger(): how long the next call's blocks take to come; and at most.
inline constexpr std::uint64_t kLingerNs = 4000, kLongestLingerNs = 50000;
// The same of who keeps them: until all others have left, who linger as well.
inline constexpr std::uint64_t kKeepNs = 2 * kLingerNs, kLongestKeepNs = 200000;
// Chunks of a chain from which on it matters where its blocks lie.
inline constexpr std::uint32_t kLeastKeepingChunks = 16;
inline constexpr std::uint32_t kIdleRounds = 64;  // of who publishes, before peers are poked
inline constexpr std::uint32_t kNoSlotOfPool = 0xffffffff, kNotYet = 0xffffffff;
inline constexpr std::uint32_t kNoSlice = 0xffffffff;
// Slices of a hop that are given before the stream is waited for ahead of the end: by then the call
// in front, with which this one may overlap, has ended as a rule.
inline constexpr std::uint32_t kGivenBeforeWait = 4;
static_assert(kTurns >= kSlotSteps * kInHand);
// But of a rank that has one hop, where several calls go together; and how many of them it gives in
// a round, in which it looks at all calls. (Four H200s, 64 broadcasts of 64 MiB outstanding, by
// chains: two in hand 298 us each, and 305 with two in a round; four in hand 315, and 249. Of a
// call that is alone two are enough: 64 MiB 225 us, with four 230.)
inline constexpr std::uint32_t kInHandOfOne = 4, kInRoundOfOne = 2;
static_assert(kInHandOfOne <= kSlotSteps * kInHand && kInHandOfOne <= kCome);
static_assert(kLeastStreamThreads >= 32 * (kApartWarps + kGroups));
// Of the first warp, a thread that sees to no member: counts what a call that is done has moved.
inline constexpr std::uint32_t kStreamCounter = 24;
static_assert(kStreamCounter >= kSoloRanks * kNobody && kStreamCounter < 32);

// Of the connector from a member.
enum Found : std::uint32_t { kNotLooked, kIsTheKeys, kIsNot };
// Of one call.
struct StreamedCall {
  Range parts[kSoloRanks];  // this lane's, of each member's
  // Of the connectors to and from members: Wire, with the count at which the call began.
  Wire outs[kSoloRanks], ins[kSoloRanks];
  std::uint64_t credits[kSoloRanks];  // of members: seen before, and in the end
  // Where slices of a hop lie; nullptr: in the output.
  const unsigned char* come[kSlotSteps][kCome][kSoloRanks];
  std::uint32_t found[kSoloRanks];  // see Found
  // Of members that have invited: where their output has the first chunk of what they are sent, and
  // the first slice that went there (in the connector's order), with which all of its hop do.
  unsigned char* invited[kSoloRanks];
  std::uint32_t straight[kSoloRanks];
  // In the end: chunks that hops have moved, and slices of members' connectors, in order.
  std::uint32_t moved[kSlotSteps];
  std::uint32_t sent[kSoloRanks], taken[kSoloRanks];
};
struct StreamShared {
  SliceJob jobs[kSlotSteps * kInHand];
  // Slots of each peer's pool that are the call's, if it is one, see room_for().
  std::uint32_t borrowed[kSoloRanks];  // how many, or kNotYet
  std::uint16_t pool[kSoloRanks][kSlotHeaders];
  std::uint32_t stored[kSlotSteps * kInHand];
  // By group: how many slices it was given, which of the descriptions, and what they cost.
  std::uint32_t given[kGroups], turns[kGroups][kTurns];
  std::uint64_t costs[kGroups];
  std::uint32_t closed;  // nothing more is given
  std::uint32_t poke;
};
struct OneStreamShared {
  StreamShared stream;
  StreamedCall call;
  std::uint32_t said;    // by the host, see approach()
  std::uint32_t looked;  // the first warp has, and begins if all that it needs is there
  std::uint32_t keeps;   // the next call's blocks from coming before this one's end: CallPlaces
  std::uint32_t done;  // all will be moved, and the call was not cancelled. Then report_early()'s:
  std::uint64_t reports, at;
};
// The call's, and one to rehearse in.
static_assert(2 * sizeof(OneStreamShared) <= sizeof(BlockShared));

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
struct Stream {
  const SoloCall& call;
  const Invocation& inv;
  const LaneTransport& transport;
  StreamShared& s;
  StreamedCall& of;

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
  // See SlotTuning.
  __device__ __forceinline__ bool in_step() const { return call.steps.tuning.in_step; }
  __device__ __forceinline__ std::uint32_t in_hand(std::uint32_t hop) const {
    const SlotTuning& tuning = call.steps.tuning;
    return hop == kSends ? tuning.sent_in_hand : tuning.others_in_hand;
  }
  __device__ __forceinline__ std::uint32_t slots_wanted() const {
    const std::uint32_t own = call.shape.escape_slots, most = kSlotHeaders / own * own;
    const std::uint32_t wanted = call.steps.tuning.slots * own;
    return wanted < most ? wanted : most;
  }
  __device__ __forceinline__ std::uint32_t chunk_bytes() const {
    return inv.geometry.chunk * dtype_bytes(inv.geometry.dtype);
  }

  // Warps of a group of movers.
  __device__ __forceinline__ static unsigned warps() {
    return (blockDim.x / 32 - kApartWarps) / kGroups;
  }
  // By one thread: how many slices of a hop were moved, from the first on; `n` were (acquire).
  __device__ __forceinline__ std::uint32_t count_moved(std::uint32_t hop, std::uint32_t n) const {
    const Descriptions d = descriptions();
    while (n != call.chunks_of_all()) {
      if (CudaDev::load_block(s.stored[d.at(hop, n)]) < d.count(warps(), n)) break;
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
  // Straight into outputs, see above. Whether members store what the hop sends them as it comes:
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
  __device__ __forceinline__ std::uint32_t borrowed_for(std::uint32_t q,
                                                        std::uint32_t slice) const {
    const std::uint32_t own = call.shape.escape_slots;
    if (slice < own) return kNoSlotOfPool;
    const std::uint32_t at = slice % (own + s.borrowed[q]);
    return at < own ? kNoSlotOfPool : s.pool[q][at - own];
  }
  __device__ __forceinline__ void* slot_to(std::uint32_t q, std::uint32_t slice) const {
    const Wire& out = of.outs[q];
    const std::uint32_t borrowed = borrowed_for(q, slice);
    if (borrowed == kNoSlotOfPool) return transport.escape_slot_of(out.steps, out.count + slice);
    return transport.borrow_slot_to(call.members[q], borrowed);
  }
  // `behind`: how many steps lie between what the peer has consumed and this slice's. `straight`:
  // it needs no slot. (One that does, behind it, finds its slot as it would if this one had used
  // it.)
  __device__ __forceinline__ bool room_for(std::uint32_t slice, std::uint64_t behind,
                                           std::uint32_t borrowed, bool straight) const {
    if (straight) return behind < kSlotHeaders;
    const std::uint32_t own = call.shape.escape_slots;
    if (slice < own) return behind < own;  // what was there before the call has gone
    if (borrowed == kNotYet) return false;
    // (Nobody has used a borrowed slot since it was found to be free.)
    return behind < (slice < own + borrowed ? kSlotHeaders : own + borrowed);
  }
};

// ---- the first warp ----

struct Watched {
  bool of_peer;  // whether this thread has something to watch
  bool comes;    // data, or room
  std::uint32_t q, watch, hop;
};
// The members at whom it is looked for.
__device__ __forceinline__ std::uint32_t members_watched(const Stream& c, std::uint32_t watch) {
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
__device__ __forceinline__ Watched watched(const Stream& c, std::uint32_t q, std::uint32_t watch) {
  Watched x;
  x.q = q;
  x.watch = watch;
  x.comes = x.watch == kToGather || x.watch == kToCollect;
  x.hop = x.watch == kRoomToSend ? kSends : x.watch == kToCollect ? kCollects : kGathers;
  x.of_peer = has_member(members_watched(c, watch), x.q);
  return x;
}
// The number in its connector of the slice of chunk k that is watched for.
__device__ __forceinline__ std::uint32_t slice_watched(const Stream& c, std::uint32_t watch,
                                                       std::uint32_t k) {
  const bool second = watch == kRoomForResult || watch == kToCollect;
  return second ? c.order().second(k) : c.order().first(k);
}

// Whether somebody waits for lanes that streams have: a call that could not begin, one that has
// gone to the engine, or a daemon with what the host has submitted (over PCIe).
__device__ __forceinline__ bool others_want_lanes(CudaRank& r, std::uint64_t now, bool asks_host) {
  return CudaDev::lanes_wanted(r, now) ||
         load_relaxed_local(r.inbox_written) != load_relaxed_local(r.inbox_read) ||
         (asks_host && load_relaxed_local(r.daemon) != 0 &&
          load_relaxed(r.link->sq_written) != load_relaxed_local(r.sq_read));
}

// Anything but peers that ends the stream. Looked at now and then.
__device__ __forceinline__ bool is_interrupted(CudaRank& r, const CudaLaunch& launch,
                                               std::uint64_t now, std::uint64_t begun,
                                               std::uint32_t attention, bool asks_host) {
  if (any_gave_up(load_relaxed_local(*launch.solo.reports))) return true;
  if (now - begun > kTurnNs && others_want_lanes(r, now, asks_host)) return true;
  if (asks_host) CudaDev::read_attention(r);
  return load_relaxed_local(r.attention) != attention;
}

// ---- the second warp ----

// Finds slots of the peers' pools that nobody uses: as many as go with the connectors' own, so that
// there are no more than a connector has headers. Four threads a peer. (The lane is ours, and with
// it what it keeps about them.) Slots that have the last slices of the same connector, of the call
// in front, are waited for: the peer takes those before any of this call's. False: for some; then
// it is called again. (A call that begins as the one in front ends would find few, and have few to
// its end.)
__device__ __forceinline__ bool borrow(CudaRank& r, const Stream& c) {
  constexpr std::uint32_t kEveryone = 0xffffffff;
  StreamShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread / 4;
  const std::uint32_t own = c.call.shape.escape_slots, all = c.call.shape.borrow_slots;
  const std::uint32_t wanted = c.slots_wanted() - own;
  const bool seeks = c.sends_to(q) && CudaDev::load_block(s.borrowed[q]) == kNotYet;
  const bool fits = c.chunk_bytes() <= c.call.shape.borrow_slot_bytes;
  const PeerSendState* peers = r.rank.lanes[c.transport.lane].transport.peers;
  std::uint32_t found = 0, soon = 0;
  // (A few looks: it is a convenience.)
  for (std::uint32_t begin = 0; fits && begin < all && begin < 64; begin += 4) {
    if (__all_sync(kEveryone, !seeks || found >= wanted) != 0) break;
    const std::uint32_t i = begin + thread % 4;
    bool is_free = false, frees = false;
    if (seeks && i < all && found < wanted) {
      const std::uint32_t peer = c.call.members[q];
      const BorrowUse use = peers[peer].borrows[i];
      is_free = use.step_end == 0 ||
                load_acquire(c.transport.credit_word(peer, use.connector)) >= use.step_end;
      frees = !is_free && use.connector == c.of.outs[q].connector;
    }
    const std::uint32_t others = __ballot_sync(kEveryone, is_free) >> (q * 4) & 15;
    const std::uint32_t at = found + __popc(others & ((1u << thread % 4) - 1));
    if (is_free && at < wanted) s.pool[q][at] = static_cast<std::uint16_t>(i);
    found += __popc(others);
    soon += __popc(__ballot_sync(kEveryone, frees) >> (q * 4) & 15);
  }
  const bool enough = found >= wanted || soon == 0;
  found = (found < wanted ? found : wanted) / own * own;
  __syncwarp();
  if (thread % 4 == 0 && seeks && enough) CudaDev::store_block(s.borrowed[q], found);
  return __all_sync(kEveryone, !seeks || enough) != 0;
}
// Says which slices were the last in them.
__device__ __forceinline__ void note_borrowed(CudaRank& r, const Stream& c) {
  const StreamShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread / 4, sent = c.of.sent[q];
  if (!c.sends_to(q)) return;
  // (Where it is not known how many were lent, all beyond the own slots went straight.)
  const std::uint32_t own = c.call.shape.escape_slots;
  const std::uint32_t borrowed = s.borrowed[q] == kNotYet ? 0 : s.borrowed[q];
  BorrowUse* uses = r.rank.lanes[c.transport.lane].transport.peers[c.call.members[q]].borrows;
  for (std::uint32_t i = thread % 4; i < borrowed; i += 4) {
    const std::uint32_t round = own + borrowed, first = own + i;
    if (first >= sent) break;
    const std::uint32_t last = first + (sent - 1 - first) / round * round;
    uses[s.pool[q][i]] = {c.of.outs[q].count + last + 1, c.of.outs[q].connector, 0};
  }
}

// By a thread for the connector to member q, of slices [from, to): what is published, but for
// flags; and, behind a fence, these.
__device__ __forceinline__ void store_headers(const Stream& c, std::uint32_t q, std::uint32_t from,
                                              std::uint32_t to) {
  const HopOrder order = c.order();
  const Wire& wire = c.of.outs[q];
  const std::uint32_t element = dtype_bytes(c.inv.geometry.dtype);
  // Which chunk of which hop a slice is, from the one before on.
  const bool scatters = c.call.steps.scatters && has_member(c.call.steps.sends_to, q);
  const std::uint32_t straight = c.straight_from(q);
  std::uint32_t first = order.firsts_in(from), second = from - first;
  for (std::uint32_t i = from; i < to; ++i) {
    const bool is_first = first < order.chunks && (!order.two_hops || order.first(first) == i);
    const std::uint32_t part = is_first && scatters ? q : c.call.place;
    const Range chunk = c.chunk(part, is_first ? first++ : second++);
    SlotHeader& h = LaneTransport::header_of(wire.steps, wire.count + i);
    store_relaxed(h.bytes, static_cast<std::uint32_t>(chunk.length * element));
    // (0, if it is in none of those: the step's own.)
    const std::uint32_t borrowed = c.borrowed_for(q, i);
    store_relaxed(h.location, c.went_straight(i, straight) ? kInOutput : borrowed + 1);
  }
}
__device__ __forceinline__ void store_flags(const Stream& c, std::uint32_t q, std::uint32_t from,
                                            std::uint32_t to) {
  const Wire& wire = c.of.outs[q];
  const std::uint32_t straight = c.straight_from(q);
  for (std::uint32_t i = from; i < to; ++i) {
    const std::uint64_t step = wire.count + i;
    std::uint64_t place = c.borrowed_for(q, i) != kNoSlotOfPool ? kFlagBorrowed : 0;
    if (c.went_straight(i, straight)) place = kFlagInOutput;
    store_system(LaneTransport::header_of(wire.steps, step).flag,
                 step_flag(c.inv.seed, step) | place);
  }
}

// By a warp, as the call begins: lets members store into the output. (On a connector that is not
// the key's any more nobody finds that.)
__device__ __forceinline__ void invite_members(const Stream& c) {
  if (c.inv.output_place == 0) return;
  const Member m = member_of(c.call, {nullptr, nullptr, 1, 1}, threadIdx.x % 32);
  if (m.part != kIncoming || !c.invites(m.q)) return;
  const InEndpoint& in = *endpoint_of(c.call, m, c.transport.lane);
  if (in.connector == kNoConnector) return;
  LaneTransport::invite(c.transport.wire(in), c.inv.seed, c.inv.output_place);
}
// By the thread that watches for room for the hop at member q, which has seen that the word there
// has changed: whether it invites this call, to where its slices can go from now on.
__device__ __forceinline__ bool accept_invitation(const Stream& c, std::uint32_t q,
                                                  std::uint32_t hop) {
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
  __device__ __forceinline__ void hear(const Stream& c, std::uint32_t q, std::uint32_t hop,
                                       std::uint64_t word) {
    if (word == known) return;
    known = word;
    straight = accept_invitation(c, q, hop);
    asks = !straight;
  }
};

// Publishes what the movers have moved, in the connectors' order, until nothing more is given. Of
// what is not moved to the end the last credits are left to tell_ends().
__device__ __forceinline__ void publish_stream(CudaRank& r, const Stream& c) {
  constexpr std::uint32_t kAll = 0xffffffff;
  StreamShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread % kSoloRanks;
  const bool out = thread < kSoloRanks;
  const bool of_peer = thread < 2 * kSoloRanks && (out ? c.sends_to(q) : c.receives_from(q));
  const std::uint32_t own_slots = c.call.shape.escape_slots;
  const std::uint32_t slices = c.order().slices();
  std::uint32_t* poke_at = nullptr;
  if (out && (of_peer || c.receives_from(q))) {
    poke_at = &r.pokes[c.call.members[q]][c.transport.lane];
  }
  std::uint32_t poke = s.poke;
  std::uint32_t done = 0, idle = 0, moved[kSlotSteps] = {};
  invite_members(c);
  bool borrows = !borrow(r, c);
  bool told = true;
  for (;;) {
    // (Before what was moved.)
    const bool last = __shfl_sync(kAll, CudaDev::load_block(s.closed), 0) != 0;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      if (!c.has(hop)) continue;
      std::uint32_t n = moved[hop];
      if (thread == 0) n = c.count_moved(hop, n);
      moved[hop] = __shfl_sync(kAll, n, 0);
    }
    __syncwarp();  // what the first thread has acquired, for all
    const std::uint32_t to = out ? c.prefix_to(q, moved) : c.prefix_from(q, moved);
    // A credit is worth a fence where the peer has slices left that want room, and in the end,
    // where those of its next call do.
    const bool worth_a_fence =
        of_peer && to != done && (out || to == slices || (!last && slices - done > own_slots));
    if (__any_sync(kAll, worth_a_fence) != 0) {
      // Where there is a fence all the same, credits go along, and who sends begins its next call
      // in slots that have been taken since. (Four H200s, chains of 64 MiB: reductions 217 us
      // instead of 221.5, broadcasts 214.5 instead of 218.8.)
      const bool news = of_peer && to != done && (out || to == slices || !last);
      if (news && out) store_headers(c, q, done, to);
      // One fence a thread is behind all that it has seen the movers do, and what it has stored
      // itself: with it each store below is a release.
      fence_system();
      if (news && out) {
        store_flags(c, q, done, to);
      } else if (news) {
        store_system(c.of.ins[q].cell->consumed, c.of.ins[q].count + to);
      }
      if (news) done = to;
      told = false;
      idle = 0;
      continue;
    }
    if (last) {
      done = to;
      break;
    }
    if (borrows) borrows = !borrow(r, c);
    if (told || ++idle < kIdleRounds) continue;
    // Peers may be asleep until they hear that something has come for them.
    fence_system();
    ++poke;
    if (poke_at != nullptr) store_system(*poke_at, poke);
    told = true;
  }
  if (thread < 2 * kSoloRanks) (out ? c.of.sent : c.of.taken)[q] = done;
  if (thread == 0) {
    s.poke = poke;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) c.of.moved[hop] = moved[hop];
  }
  __syncwarp();
  note_borrowed(r, c);
}

// ---- what movers get ----

// Whether a hop's slices are copies, one a member: else a combine, of one source or several.
__device__ __forceinline__ bool copies_only(const Stream& c, std::uint32_t hop) {
  return hop == kCollects || (hop == kSends && c.call.steps.scatters);
}
// The member's place among those that a combine's result goes to.
__device__ __forceinline__ std::uint32_t place_among(std::uint32_t members, std::uint32_t q) {
  return static_cast<std::uint32_t>(__popc(members & ((1u << q) - 1)));
}

// Where among what is reduced the slice of place q is, as the engine has it: of sums the own
// contribution is the last, else where its rank comes.
__device__ __forceinline__ std::uint32_t source_of(const Stream& c, std::uint32_t q) {
  const SlotSteps& steps = c.call.steps;
  return place_among(steps.gathers_from, q) + (!steps.sums && q > c.call.place ? 1 : 0);
}

// What a slice's description says of all slices of its hop.
__device__ __forceinline__ void describe_hop(const Stream& c, std::uint32_t hop, SliceJob& job) {
  const Geometry& g = c.inv.geometry;
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t n = c.call.places;
  const bool copies = copies_only(c, hop);
  const bool reduces = hop == kGathers && steps.reduces;
  const bool contributes = hop == kSends ? steps.contributes : reduces && steps.sums;
  const cuda_leaves::Slice reduction = slice_of(c.call, c.inv);
  job.copies = copies;
  job.dtype = g.dtype;
  job.op = c.inv.op;
  job.protocol = Protocol::kSlot;
  job.num_src = static_cast<std::uint16_t>(copies ? n : reduces ? steps.num_sources : 1);
  job.num_dst = 0;
  if (!copies) {
    job.num_dst =
        static_cast<std::uint16_t>(__popc(hop == kSends ? steps.sends_to : steps.results_to));
  }
  job.local_src = -1;
  if (reduces) job.local_src = steps.own_source;
  if (hop == kSends && !copies) job.local_src = 0;
  job.elems = 0;
  job.dst_user = nullptr;
  job.scale_sources = ScaleSources::kNone;
  if (reduction.scale_all && contributes) {
    job.scale_sources = ScaleSources::kLocal;
  } else if (reduction.scale_all && reduces) {
    job.scale_sources = ScaleSources::kAll;
  }
  job.divisor = reduces && steps.finishes ? reduction.divisor : 1u;
  job.scale = reduction.scale;
  for (std::uint32_t q = 0; q < n; ++q) {
    job.src[q] = nullptr;
    job.dst_slot[q] = nullptr;
    job.dst_copy[q] = nullptr;
    job.copy_elems[q] = 0;
  }
}

// Of chunk k; each member's part of it by a thread. Whether there is anything to move in that part.
__device__ __forceinline__ bool describe_slice(const Stream& c, std::uint32_t hop, std::uint32_t k,
                                               std::uint32_t q, SliceJob& job) {
  const StreamedCall& of = c.of;
  const std::uint32_t me = c.call.place;
  if (q >= c.call.places) return false;
  if (copies_only(c, hop)) {
    // (Of an empty part nothing, nor of what is in the output already.)
    const SlotSteps& steps = c.call.steps;
    if (!has_member(hop == kCollects ? steps.collects_from : steps.sends_to, q)) return false;
    const Range chunk = c.chunk(q, k);
    const void* const from = hop == kCollects
                                 ? static_cast<const void*>(of.come[kCollects][k % kCome][q])
                                 : c.inv.input_at(chunk.offset);
    const bool moves = chunk.length != 0 && from != nullptr;
    job.copy_elems[q] = moves ? static_cast<std::uint32_t>(chunk.length) : 0u;
    if (!moves) return false;
    job.src[q] = from;
    if (hop == kSends) job.dst_slot[q] = c.place_at(q, hop, k);
    if (hop == kCollects || c.call.steps.copies) job.dst_copy[q] = c.inv.output_at(chunk.offset);
    return true;
  }
  const bool reduces = hop == kGathers && c.call.steps.reduces;
  if (q == me) {
    const Range chunk = c.chunk(me, k);
    job.elems = chunk.length;
    if (reduces || hop == kSends)
      job.src[reduces ? c.call.steps.own_source : 0] = c.inv.input_at(chunk.offset);
    if (hop == kSends ? c.call.steps.stores_sent : c.call.steps.stores_result) {
      job.dst_user = c.inv.output_at(chunk.offset);
    }
    if (reduces || hop == kSends) return true;
    // (It is received from one.)
    const auto from =
        static_cast<std::uint32_t>(__ffs(static_cast<int>(c.call.steps.gathers_from)) - 1);
    if (of.come[kGathers][k % kCome][from] != nullptr) return true;
    // From the output it goes on, if it does.
    job.src[0] = job.dst_user;
    job.dst_user = nullptr;
    return c.call.steps.results_to != 0;
  }
  if (hop == kGathers && has_member(c.call.steps.gathers_from, q)) {
    const unsigned char* const from = of.come[kGathers][k % kCome][q];
    if (from != nullptr) job.src[reduces ? source_of(c, q) : 0] = from;
  }
  const std::uint32_t to = hop == kSends ? c.call.steps.sends_to : c.call.steps.results_to;
  if (has_member(to, q)) job.dst_slot[place_among(to, q)] = c.place_at(q, hop, k);
  return false;  // (the own part's thread says it)
}

// As Engine::cost_of().
__device__ __forceinline__ std::uint32_t cost_of(const Stream& c, std::uint32_t hop) {
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t sends = __popc(steps.sends_to), results = __popc(steps.results_to);
  if (hop == kCollects) return 2 * __popc(steps.collects_from);
  if (hop == kGathers) {
    const std::uint32_t sources = steps.reduces ? steps.num_sources : 1;
    return kLinkCost * results + sources + (steps.stores_result ? 1 : 0);
  }
  if (!steps.scatters) return kLinkCost * sends + 1 + (steps.stores_sent ? 1 : 0);
  return (kLinkCost + 1 + (steps.copies ? 1 : 0)) * sends;
}

// By one thread.
__device__ __forceinline__ void give(const Stream& c, std::uint32_t hop, std::uint32_t at) {
  StreamShared& s = c.s;
  static_assert(kGroups == 2);
  std::uint32_t group = s.costs[1] < s.costs[0] ? 1 : 0;
  if (c.in_step()) group = hop == kSends ? 0 : 1;
  s.costs[group] += cost_of(c, hop);
  const std::uint32_t turn = s.given[group];
  s.turns[group][turn % kTurns] = at;
  CudaDev::store_block(s.given[group], turn + 1);
}

// Of what is in the output already: as if movers had moved it. By one thread; `n` slices of the hop
// were before it. (Each of the description's has been counted.)
__device__ __forceinline__ void skip(const Stream& c, std::uint32_t at, std::uint32_t n) {
  CudaDev::store_block(c.s.stored[at], c.descriptions().count(c.warps(), n));
}

// Finds the connector on which member q's slices come. `ahead`: of the stream's turn. Then only
// where it was: on another one members are invited, which is for the turn, so it is left to
// steer().
__device__ __forceinline__ void find_connector(const Stream& c, std::uint32_t q,
                                               bool ahead = false) {
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
__device__ __forceinline__ bool find_incoming(const Stream& c, const Watched& x, Wire& wire) {
  StreamedCall& of = c.of;
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

// The lanes of a chain, for LanePace.
struct Pace {
  std::uint64_t* words = nullptr;  // of the call's lanes; nullptr: they do not wait for each other
  std::uint32_t call = 0;          // the low half of its serial
  std::uint32_t lanes = 0, lane = 0;

  // By a warp, a thread for each lane. What was found is waited for in slowest().
  __device__ __forceinline__ std::uint64_t look(std::uint32_t thread) const {
    if (words == nullptr || thread >= lanes) return LanePace::word(call, ~std::uint32_t{0});
    return load_relaxed_local(words[thread]);
  }
  __device__ __forceinline__ std::uint32_t slowest(std::uint64_t word) const {
    return __reduce_min_sync(0xffffffff, LanePace::moved(call, word));
  }
  // By one thread.
  __device__ __forceinline__ void say(std::uint32_t moved) const {
    if (words != nullptr) store_relaxed_local(words[lane], LanePace::word(call, moved));
  }
};

// Watches and hands out, until all is moved or no more is waited for.
// interrupted(now, begun, asks_host): by one thread, now and then, see is_interrupted().
// all_there(): by one thread, once, of a call that `may_be_sure`: all slices that are left have
// come, or have room, so this lane waits for nobody any more, and all will be moved. (From then on
// it is not interrupted, and waits for no other lane of its rank: one that gives up would never
// come. Others are and do to their end.) Returns whether all is moved.
// `rehearses`: goes through one round, as if a slice of each hop could be moved, and changes
// nothing but what is c's in shared memory.
template <class Interrupted, class AllThere>
__device__ __forceinline__ bool steer(CudaRank& r, const Stream& c, Interrupted interrupted,
                                      AllThere all_there, Pace pace = {}, bool rehearses = false,
                                      bool may_be_sure = false) {
  constexpr std::uint32_t kAll = 0xffffffff;
  StreamShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32;
  const std::uint32_t chunks = c.call.chunks_of_all();
  const HopOrder order = c.order();
  const Watched x = watched(c, thread % kSoloRanks, thread / kSoloRanks);
  // What peers have consumed is known to some extent: the first slices wait for nothing, not even
  // for a look at what comes in, unless that was found before.
  const bool knows = __all_sync(kAll, !x.of_peer || !x.comes || c.of.found[x.q] == kIsTheKeys) != 0;
  Wire wire = x.of_peer && !x.comes ? c.of.outs[x.q] : Wire{};
  std::uint32_t k = 0;  // so many are there
  std::uint64_t found = x.of_peer ? c.of.credits[x.q] : 0;
  std::uint64_t step = wire.count + slice_watched(c, x.watch, 0);
  std::uint64_t* word = nullptr;
  if (x.of_peer && !x.comes) word = &wire.cell->consumed;
  std::uint32_t needs[kSlotSteps];  // threads that watch for a hop
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    needs[hop] = __ballot_sync(kAll, x.of_peer && x.hop == hop);
  }
  std::uint32_t next[kSlotSteps] = {}, done[kSlotSteps] = {};
  const std::uint64_t begun = global_ns();
  std::uint64_t last = begun, asked = begun;
  std::uint32_t slowest_before = 0;
  bool stops = false, moved = false, over = false, sure = false;
  Asking asking{x.of_peer && !x.comes && c.into_output(x.hop)};
  for (std::uint32_t round = 0;; ++round) {
    bool news = false, strange = false;
    const std::uint64_t pace_word = pace.look(thread);
    const std::uint64_t invitation = asking.look(wire, round);
    if (round == (knows ? 0 : 1)) {
      strange = !find_incoming(c, x, wire);
      if (x.of_peer && x.comes && !strange) {
        step = wire.count + slice_watched(c, x.watch, 0);
        word = &LaneTransport::header_of(wire.steps, step).flag;
      }
    }
    if (x.of_peer && k < chunks && !stops && !strange && (knows || round != 0 || !x.comes)) {
      // Acquire: the payload is read, or the slot overwritten, behind it. (What was consumed is
      // known in the first round.)
      if (round != 0 || x.comes) found = load_acquire(*word);
      if (!x.comes) {
        const std::uint32_t borrowed = CudaDev::load_block(s.borrowed[x.q]);
        while (k < chunks && c.room_for(static_cast<std::uint32_t>(step - wire.count), step - found,
                                        borrowed, asking.straight)) {
          news = true;
          step = wire.count + slice_watched(c, x.watch, ++k);
        }
      } else if ((found & ~kFlagPlaces) == step_flag(c.inv.seed, step)) {
        const std::uint32_t taken = x.hop == kGathers ? done[kGathers] : done[kCollects];
        strange = (found & kFlagInOutput) != 0 && !c.invites(x.q);
        if (strange) c.of.found[x.q] = kIsNot;
        if (!strange && k < taken + kCome) {
          Wire in = wire;
          in.count = step;
          // (slice_at(): nullptr, if it is in the output.)
          c.of.come[x.hop][k % kCome][x.q] =
              (found & kFlagPlaces) == 0 ? c.transport.escape_slot_of(in.steps, step)
                                         : c.transport.slice_at(c.call.members[x.q], in, found);
          news = true;
          step = wire.count + slice_watched(c, x.watch, ++k);
          word = &LaneTransport::header_of(wire.steps, step).flag;
        }
      }
    }
    asking.hear(c, x.q, x.hop, invitation);
    moved = __any_sync(kAll, news) != 0 || moved;
    __syncwarp();  // what any thread has acquired, for all
    const std::uint32_t slowest = pace.slowest(pace_word);
    moved = moved || slowest != slowest_before;
    slowest_before = slowest;

    if (may_be_sure && !sure && !stops && __all_sync(kAll, !x.of_peer || k == chunks) != 0) {
      // all_there() waits for the stream: not while that would keep slices from movers.
      bool may_wait = true;
#pragma unroll
      for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
        may_wait =
            may_wait && (!c.has(hop) || next[hop] == chunks || next[hop] >= kGivenBeforeWait);
      }
      if (may_wait) {
        sure = true;
        if (thread == 0) all_there();
        __syncwarp();
      }
    }

    over = true;
    bool holds = false;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      if (!c.has(hop)) continue;
      std::uint32_t d = done[hop];
      if (d != next[hop]) {
        if (thread == 0) d = c.count_moved(hop, d);
        d = __shfl_sync(kAll, d, 0);
        if (thread == 0 && d != done[hop]) pace.say(d);
        done[hop] = d;
        __syncwarp();  // as above
      }
      const std::uint32_t n = next[hop];
      const std::uint32_t there = __ballot_sync(kAll, k > n);
      over = over && d == chunks;
      holds = holds || d != n;
      if (!rehearses) {
        if (n == chunks || n == d + c.in_hand(hop) || (needs[hop] & ~there) != 0 || stops) continue;
        if (!sure && !LanePace::may_begin(n, slowest)) continue;
        // (Two H200s, all-reduces of 64 and 256 MiB without this and with it: by 32 lanes 247 and
        // 836 us, 240 and 812; by 16 305 and 1,048, 276 and 959; by 8 463 and 1,734, 436 and
        // 1,638.)
        if (hop == kSends && !order.is_wanted_soon(n, done[kGathers])) continue;
        if (hop == kGathers &&
            ((c.call.steps.gather_waits_for_sent && done[kSends] < order.sent_before_gather(n)) ||
             (c.call.steps.gather_waits_for_collected &&
              done[kCollects] < order.collected_before_gather(n)))) {
          continue;
        }
      }
      const std::uint32_t at = c.descriptions().at(hop, n);
      const bool moves = __any_sync(kAll, describe_slice(c, hop, n, thread, s.jobs[at])) != 0;
      __syncwarp();
      if (thread == 0) {
        if (moves) {
          give(c, hop, at);
        } else {
          skip(c, at, n);
        }
      }
      next[hop] = n + 1;
      holds = true;
    }
    if (rehearses) return false;
    if (over || (stops && !holds)) break;
    stops = stops || __any_sync(kAll, strange) != 0;
    if (stops || sure || round % kRoundsApart != kRoundsApart - 1) continue;
    // (What movers have in hand does not wait for anybody.)
    const std::uint64_t now = global_ns();
    if (moved || holds) last = now;
    moved = false;
    bool gives_up = now - last >= c.call.patience_ns;
    const bool first = c.transport.lane == 0;
    const bool asks_host =
        (now - last > kStillNs && now - asked > (first ? kStillNs : kSeldomNs)) ||
        (first && round % (8 * kRoundsApart) == kRoundsApart - 1);
    if (asks_host) asked = now;
    if (thread == 0 && !gives_up) {
      gives_up = interrupted(now, begun, asks_host);
    }
    stops = __any_sync(kAll, gives_up) != 0;
  }
  const bool only_results = !has_member(c.call.steps.sends_to, x.q);
  if (x.of_peer && x.watch == (only_results ? kRoomForResult : kRoomToSend)) {
    c.of.credits[x.q] = found;
  }
  if (thread == 0) CudaDev::store_block(s.closed, 1u);
  return over;
}

// ---- movers ----

__device__ __forceinline__ void move(const Stream& c) {
  StreamShared& s = c.s;
  const unsigned warp = threadIdx.x / 32 - kApartWarps, thread = threadIdx.x % 32;
  const std::uint32_t group = warp / c.warps();
  if (group >= kGroups) return;
  const unsigned first = group * c.warps(), threads = 32 * c.warps();
  for (std::uint32_t k = 0;; ++k) {
    while (CudaDev::load_block(s.given[group]) <= k) {
      // (The latest is given before that is said.)
      if (CudaDev::load_block(s.closed) != 0 && CudaDev::load_block(s.given[group]) <= k) return;
    }
    const std::uint32_t at = s.turns[group][k % kTurns];
    __syncwarp();
    if (c.in_step()) {
      sync_group(1 + group, threads);
    }
    with_all_registers(run_slot_leaf_cuda)(s.jobs[at], 32 * (warp - first) + thread, threads);
    __syncwarp();
    // A warp's, by its first thread: the barrier orders the others' stores before.
    if (thread == 0) CudaDev::add_release(s.stored[at]);
  }
}

// ---- the block ----

// By the first warp: what look() does, for connectors that carry slots. Whether what comes in is
// still the key's is looked at later, see steer(), if there is something to send first.
__device__ __forceinline__ bool look_at_wires(CudaRank& r, const Stream& c, const Stretch& w) {
  const SoloCall& call = c.call;
  const LaneTransport& t = c.transport;
  StreamShared& s = c.s;
  const Member m = member_of(call, w);
  bool ok = true;
  if (m.part == kOutgoing && c.sends_to(m.q)) {
    const OutEndpoint& out = *out_endpoint(call, m, t.lane);
    ok = out.connector != kNoConnector;
    c.of.outs[m.q] = t.wire(out);
    // Acquire: slots are overwritten behind it. (What was sent last was consumed since, as a rule.)
    if (ok) c.of.credits[m.q] = load_acquire(out.cell->consumed);
  } else if (m.part == kIncoming && c.receives_from(m.q)) {
    const InEndpoint& in = *endpoint_of(call, m, t.lane);
    ok = in.connector != kNoConnector;
    c.of.ins[m.q] = t.wire(in);
    if (ok && !c.has(kSends)) find_connector(c, m.q, true);
  }
  if (threadIdx.x == 0) s.poke = load_relaxed_local(r.poke_counts[t.lane]);
  return __all_sync(0xffffffffu, ok) != 0;
}

// Before that, by all others: what all is begun with. Behind a barrier it may begin.
__device__ __forceinline__ void set_up(const Stream& c) {
  StreamShared& s = c.s;
  if (threadIdx.x < 64) {
    const std::uint32_t i = threadIdx.x - 32;
    if (i < c.call.places) c.of.parts[i] = c.stretch_of(i);
    if (i < kSoloRanks) {
      s.borrowed[i] = kNotYet;
      c.of.found[i] = kNotLooked;
      c.of.invited[i] = nullptr;
      c.of.straight[i] = kNoSlice;
    }
    if (i < kSlotSteps * kInHand) s.stored[i] = 0;
    if (i < kGroups) s.costs[i] = s.given[i] = 0;
    if (i == 0) s.closed = 0;
  } else if (threadIdx.x < 64 + kSlotSteps * kInHand) {
    const std::uint32_t i = threadIdx.x - 64;
    describe_hop(c, c.hop_of_description(i), s.jobs[i]);
  }
}

// A description that a rehearsal leaves alone.
inline constexpr std::uint32_t kEmptyJob = 1;
static_assert(kEmptyJob < kInHand && kEmptyJob < kInHandOfOne);
// By a warp, for a rehearsal in `c`: what a first round depends on.
__device__ __forceinline__ void set_up_rehearsal(const Stream& c) {
  const std::uint32_t i = threadIdx.x % 32;
  if (i < kSoloRanks) {
    c.of.parts[i] = {0, c.inv.geometry.chunk};
    c.of.found[i] = kNotLooked;
    c.of.invited[i] = nullptr;
    c.s.borrowed[i] = kNotYet;
  }
  if (i == 0) describe_hop(c, c.hop_of_description(kEmptyJob), c.s.jobs[kEmptyJob]);
}

// Behind the barrier behind all: whether all was moved.
__device__ __forceinline__ bool all_moved(const Stream& c) {
  bool done = true;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    done = done && (!c.has(hop) || c.of.moved[hop] == c.call.chunks_of_all());
  }
  return done;
}

// As tell_member(), of what was not published. `done`: the call is, or will be, published to its
// end, so that all that is left is what later calls are to know.
__device__ __forceinline__ void tell_end(const Stream& c, const Member& m, bool done = false) {
  const SoloCall& call = c.call;
  const std::uint32_t slices = c.order().slices();
  const std::uint32_t sent = done ? slices : c.of.sent[m.q],
                      taken = done ? slices : c.of.taken[m.q];
  const LaneTransport& t = c.transport;
  const bool takes = m.part == kIncoming && c.receives_from(m.q);
  const bool posts = m.part == kOutgoing && c.sends_to(m.q);
  bool news = false;
  if (takes) {
    InEndpoint& in = *endpoint_of(call, m, t.lane);
    const Wire& wire = c.of.ins[m.q];
    // (Of a call that goes on, some were taken before: by now the connector may be another key's,
    // whose credits these would set back. Last credits that were published are told once more: with
    // the lease held nobody has told later ones.)
    news = !done && taken != 0 &&
           (in.consumed != wire.count + taken || in.connector != wire.connector);
    in.steps = wire.steps;
    in.cell = wire.cell;
    in.connector = wire.connector;
    in.consumed = wire.count + taken;
  }
  if (posts) {
    OutEndpoint& out = *out_endpoint(call, m, t.lane);
    out.posted = c.of.outs[m.q].count + sent;
    // (What was acquired: with the fence and the lease, as look() wants it.)
    out.credit = c.of.credits[m.q];
  }
  // Without a fence, for the reasons that tell_peers() has. (Pokes are about the last slices, too,
  // which may come behind them: peers look again.)
  if (news) {
    store_system(c.of.ins[m.q].cell->consumed, c.of.ins[m.q].count + taken);
  }
}
// By a warp, behind all that is published, or told.
__device__ __forceinline__ void poke_in_the_end(CudaRank& r, const Stream& c, const Member& m) {
  const std::uint32_t lane = c.transport.lane, poke = c.s.poke + 1;
  if (threadIdx.x % 32 == 0) r.poke_counts[lane] = poke;
  if (m.part == kOutgoing && (c.sends_to(m.q) || c.receives_from(m.q))) {
    store_system(r.pokes[m.peer][lane], poke);
  }
}
// As tell_peers(), of what publish_stream() has not told. By the first warp.
__device__ __forceinline__ void tell_ends(CudaRank& r, const Stream& c, const Stretch& w) {
  const Member m = member_of(c.call, w);
  tell_end(c, m);
  // (Who has published all has poked, too.)
  if (!all_moved(c)) poke_in_the_end(r, c, m);
}

// For the engine: what this lane has behind it.
__device__ __forceinline__ void say_done(CudaRank& r, const CudaLaunch& launch, const Stream& c) {
  const std::uint32_t at = launch.slot * r.rank.num_lanes + c.transport.lane;
  HandOver& handed = r.handed[at];
  handed.set_primitives_done(0);
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    if (c.has(hop)) handed.done[c.call.steps.primitives[hop]] = c.hops_behind(hop);
  }
  handed.stage = Stage::kLeft;
}

// What published slices say in the lane's figures: add(figure, by) for each. By one thread.
// `behind`: what hops had moved before. `done`: as in tell_end().
template <class Add>
__device__ __forceinline__ void count_stream(LaneStats& stats, const Stream& c,
                                             const std::uint32_t (&behind)[kSlotSteps], bool done,
                                             Add add) {
  const std::uint32_t me = c.call.place, own = c.call.shape.escape_slots;
  const auto moved = [&](std::uint32_t hop) {
    const std::uint32_t all = c.has(hop) ? c.call.chunks_of_all() : 0;
    return (done ? all : c.hops_behind(hop)) - behind[hop];
  };
  const auto elems_in = [&](std::uint32_t q, std::uint32_t sent) {
    const std::uint32_t firsts =
        has_member(c.call.steps.sends_to, q) ? c.order().firsts_in(sent) : 0;
    return c.elems_of(c.call.steps.scatters ? q : me, firsts) + c.elems_of(me, sent - firsts);
  };
  const std::uint32_t received = moved(kGathers) + moved(kCollects);
  std::uint64_t elems = 0, borrowed = 0, straight = 0;
  for (std::uint32_t q = 0; q < c.call.places; ++q) {
    if (!c.sends_to(q)) continue;
    const std::uint32_t sent = done ? c.order().slices() : c.of.sent[q];
    elems += elems_in(q, sent) - elems_in(q, c.prefix_to(q, behind));
    straight += c.straight_in(q, sent);
    // (Of two hops, contributions behind the first result that went straight may lie in borrowed
    // slots, too. They are not counted.)
    const std::uint32_t in_slots = sent < c.of.straight[q] ? sent : c.of.straight[q];
    // (Not yet known: none were wanted.)
    const std::uint32_t found = CudaDev::load_block(c.s.borrowed[q]);
    const std::uint32_t lent = found == kNotYet ? 0 : found;
    const std::uint32_t round = own + lent, rest = in_slots % round;
    borrowed += in_slots / round * lent + (rest > own ? rest - own : 0);
  }
  add(stats.slices, moved(kSends) + received);
  add(stats.received, received);
  add(stats.bytes_sent, elems * dtype_bytes(c.inv.geometry.dtype));
  add(stats.borrowed, borrowed);
  add(stats.into_outputs, straight);
}

__device__ __forceinline__ bool comes_in_clusters() { return blocks_in_cluster() != 1; }
// By one thread, when all has been moved or will be: whether this block keeps the next call's. (Of
// GPUs whose SMs are numbered as CallPlaces has it.)
__device__ __forceinline__ bool keeps_next(CudaRank& r, const CudaLaunch& launch) {
#if __CUDA_ARCH__ < 1000
  return launch.solo.steps.tuning.keeps_places &&
         launch.solo.chunks_of_all() >= kLeastKeepingChunks && comes_in_clusters() &&
         r.places.keep(sm_of_block(), static_cast<std::uint32_t>(launch.serial));
#else
  return false;
#endif
}

// By one thread of a block that is through, and has given all back, of a chain that is close to the
// call in front and so has reported early: keeps its SM until the next call's blocks have come,
// which they may as soon as all lanes have reported. Those are dealt to SMs in clusters of which
// each should have whole TPCs, and a share of each GPC like the others'; so they do where all of
// ours are there, or none (a probe), but not where some are. (Four H200s, `calls`: of 256 MiB,
// whose lanes end 20 us apart, reductions 775 us instead of 805, broadcasts 783 instead of 798.
// Lanes of mesh plans end together.) Or, if it keeps them, until all other blocks have left, which
// is some time behind the call's end: they come behind our own.
__device__ __forceinline__ void linger(CudaRank& r, const CudaLaunch& launch, bool keeps) {
  if (!comes_in_clusters()) return;
  const auto is_over = [&] {
    if (keeps) return load_relaxed_local(r.completed[launch.slot]) >= launch.serial;
    // (Somebody's next use of the key may be over, too.)
    return load_relaxed_local(launch.sqe.inv.key->done) != launch.sqe.inv.turn;
  };
  std::uint64_t end = global_ns() + (keeps ? kLongestKeepNs : kLongestLingerNs);
  for (bool over = false; global_ns() < end; __nanosleep(200)) {
    if (over || !is_over()) continue;
    over = true;
    end = global_ns() + (keeps ? kKeepNs : kLingerNs);
  }
}

}  // namespace solo

enum class StreamEnd : std::uint32_t {
  kLeaves,  // nothing is left to do for this block
  kServes,  // it brings the call to the engine
  kDrives,  // the call is for the engine, and this block drives its lane
};

// As run_solo_one_shot(). `shared`: the engine's, which comes later.
__device__ __forceinline__ StreamEnd run_solo_stream(CudaRank& r, const CudaLaunch& launch,
                                                     unsigned char* shared) {
  using namespace solo;
  const SoloCall& call = launch.solo;
  const Invocation& inv = launch.sqe.inv;
  __shared__ Shared s;
  OneStreamShared* const streams = reinterpret_cast<OneStreamShared*>(shared);
  OneStreamShared& mine = in_shared(streams[0]);
  const std::uint32_t lane = blockIdx.x, warp = threadIdx.x / 32;
  const bool steers = warp == 0, publishes = warp == 1;
  const bool rehearses = warp == blockDim.x / 32 - 1;  // a warp of movers
  const Stretch w{nullptr, nullptr, 1, 1};             // it has something of every part
  const LaneTransport t = transport_of(call, lane);
  const auto stream_in = [&](OneStreamShared& x) {
    return Stream{call, inv, t, in_shared(x.stream), in_shared(x.call)};
  };
  const Stream c = stream_in(streams[0]);

  if (threadIdx.x == 0) {
    mine.looked = mine.keeps = mine.done = 0, mine.reports = mine.at = 0;
    if (call.steps.tuning.keeps_places) {
      r.places.note(sm_of_block(), static_cast<std::uint32_t>(launch.serial));
    }
    s.close = Succession::is_close(r, launch) ? 1 : 0;
    if (blockIdx.x == 0) Succession::say(r, launch);
  }
  if (!steers) set_up(c);
  if (rehearses) set_up_rehearsal(stream_in(streams[1]));
  const std::uint32_t attention = approach(r, launch, w, lane, s);
  if (threadIdx.x == kListener) mine.said = attention;

  bool leased = false;
  if (steers) {
    // (Room is waited for in steer(), not here, patient or not.)
    const Looked looked = look_in_time(r, launch, lane, leased, s, s.close != 0,
                                       [&](bool) { return look_at_wires(r, c, w); });
    if (threadIdx.x == 0) {
      s.ok = looked != Looked::kInVain ? 1 : 0;
      if (looked == Looked::kAhead && lane == 0) add_relaxed(r.early_calls, 1);
      CudaDev::store_block(mine.looked, 1u);
    }
    sync_block_apart();
  } else if (rehearses) {
    // What this barrier is for it learns from `looked`, and from what it is given. It may be late.
    arrive_apart();
  } else {
    if (!publishes) with_all_registers(run_slot_leaf_cuda)(streams[1].stream.jobs[kEmptyJob], 0, 1);
    if (s.close == 0) wait_and_say_so(s);
    sync_block_apart();
  }
  bool over = false;
  // By one thread, as soon as it is sure that all will be moved, or, of a call that is not close to
  // the one in front, when it was.
  const auto end = [&] {
    if (mine.said != 0 && is_cancelled(r, launch, mine.said)) return;
    mine.done = 1;
    // (The next call's blocks come behind this: then all has ended that is in front of this call.)
    wait_for_stream();
    const Ending early = report_early(r, launch, s, [&] {
      const bool keeps = keeps_next(r, launch);
      mine.keeps = keeps ? 1 : 0;
      return keeps;
    });
    mine.reports = early.reports;
    mine.at = early.at;
  };
  if (rehearses || (steers && s.ok != 0)) {
    // (Both in one place: what is rehearsed is this code.)
    const std::uint32_t heard = load_relaxed_local(r.attention);
    const auto interrupted = [&](std::uint64_t now, std::uint64_t begun, bool asks_host) {
      return is_interrupted(r, launch, now, begun, heard, asks_host);
    };
    Pace pace;
    if (call.steps.tuning.paced && steers) {
      pace = {r.paces + std::size_t{launch.slot} * r.rank.num_lanes,
              static_cast<std::uint32_t>(launch.serial), call.lanes, lane};
    }
    over = steer(r, stream_in(streams[rehearses ? 1 : 0]), interrupted, end, pace, rehearses,
                 steers && s.close != 0);
  }
  if (rehearses) {
    if (s.close == 0) wait_for_stream();
    while (CudaDev::load_block(mine.looked) == 0) {
    }
  }
  __syncwarp();
  if (s.ok == 0) {
    return leave_untried(r, launch, lane, leased, s) ? StreamEnd::kServes : StreamEnd::kDrives;
  }
  // While it lasts, which may be long, a daemon that wants the lanes had better wait.
  if (threadIdx.x == kLast && lane == 0) atomicAdd(&r.waiters, 1u);

  const auto add = [](std::uint64_t& figure, std::uint64_t by) { add_relaxed(figure, by); };
  const Member m = member_of(call, w, threadIdx.x % 32);
  if (steers) {
    if (threadIdx.x == 0 && over && mine.done == 0) end();
    __syncwarp();
    if (mine.done != 0) {
      // The publisher tells it, or has.
      tell_end(c, m, true);
      if (threadIdx.x == kStreamCounter) {
        LaneStats& stats = r.rank.lanes[lane].stats;
        count_stream(stats, c, {}, true, add);
        add_relaxed(stats.completed, 1);
      }
    }
  } else if (publishes) {
    publish_stream(r, c);
    if (all_moved(c)) poke_in_the_end(r, c, m);
  } else {
    move(c);
  }
  sync_block();

  const bool done = mine.done != 0;
  if (threadIdx.x == kLast && lane == 0) atomicSub(&r.waiters, 1u);
  Ending ending{mine.reports, mine.at};
  if (done) {
    const bool serves = leave(r, launch, lane, true, ending, s);
    const bool stays = call.steps.tuning.keeps_places && (s.close != 0 || mine.keeps != 0);
    if (!serves && stays && threadIdx.x == 0) linger(r, launch, mine.keeps != 0);
    return serves ? StreamEnd::kServes : StreamEnd::kLeaves;
  }
  wait_for_stream();  // it may not have been its turn, and what follows lets the next call come
  if (steers) {
    tell_ends(r, c, w);
  } else if (threadIdx.x == kCaller) {
    // As in solo_two_shot.cuh.
    say_done(r, launch, c);
  }
  const auto count = [&](LaneStats& stats) { count_stream(stats, c, {}, false, add); };
  const bool serves = finish(r, launch, lane, false, ending, s, count);
  return serves ? StreamEnd::kServes : StreamEnd::kDrives;
}

}  // namespace unjam
