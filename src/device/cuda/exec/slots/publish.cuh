// The second warp: what was moved is published, in the connectors' order; and what later calls are
// to know of the connectors is told in the end.
#pragma once

#include "device/cuda/exec/slots/carry.cuh"

namespace unjam {
namespace in_stream {

inline constexpr std::uint32_t kIdleRounds = 64;  // of who publishes, before peers are poked

// Finds slots of the peers' pools that nobody uses: as many as go with the connectors' own, so that
// there are no more than a connector has headers. Four threads a peer. (The lane is ours, and with
// it what it keeps about them.) Slots that have the last slices of the same connector, of the call
// in front, are waited for: the peer takes those before any of this call's. False: for some; then
// it is called again. (A call that begins as the one in front ends would find few, and have few to
// its end.)
template <class S>
__device__ __forceinline__ bool borrow(CudaRank& r, const S& c) {
  constexpr std::uint32_t kEveryone = 0xffffffff;
  SlotShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread / 4;
  const std::uint32_t own = c.call.shape.guaranteed_slots, all = c.call.shape.pool_slots;
  const bool carried = c.is_carried();
  const std::uint32_t wanted = carried ? kSlotHeaders : c.slots_wanted() - own;
  const bool seeks = c.sends_to(q) && CudaDev::load_block(s.borrowed[q]) == kNotYet;
  const bool fits = c.chunk_bytes() <= c.call.shape.pool_slot_bytes;
  const PeerSendState* peers = r.rank.lanes[c.transport.lane].transport.peers;
  std::uint32_t found = 0, soon = 0;
  // (A few looks: it is a convenience.)
  for (std::uint32_t begin = 0; fits && begin < all && begin < 64; begin += 4) {
    if (__all_sync(kEveryone, !seeks || found >= wanted) != 0) break;
    const std::uint32_t i = begin + thread % 4;
    bool is_free = false, frees = false;
    if (seeks && i < all && found < wanted) {
      const std::uint32_t peer = c.call.members[q];
      const PoolUse use = peers[peer].borrows[i];
      std::uint64_t& until = use.connector == PoolUse::kCopied
                                 ? copies_done(r, c, q)
                                 : c.transport.credit_word(peer, use.connector);
      is_free = use.step_end == 0 || load_acquire(until) >= use.step_end;
      frees = !is_free && use.connector == c.of.outs[q].connector;
    }
    const std::uint32_t others = __ballot_sync(kEveryone, is_free) >> (q * 4) & 15;
    const std::uint32_t at = found + __popc(others & ((1u << thread % 4) - 1));
    if (is_free && at < wanted) s.pool[q][at] = static_cast<std::uint16_t>(i);
    found += __popc(others);
    soon += __popc(__ballot_sync(kEveryone, frees) >> (q * 4) & 15);
  }
  const bool enough = found >= wanted || soon == 0;
  found = found < wanted ? found : wanted;
  if (!carried) found = found / own * own;
  __syncwarp();
  if (thread % 4 == 0 && seeks && enough) CudaDev::store_block(s.borrowed[q], found);
  return __all_sync(kEveryone, !seeks || enough) != 0;
}
// Says which slices were the last in them.
template <class S>
__device__ __forceinline__ void note_borrowed(CudaRank& r, const S& c) {
  const SlotShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread / 4, sent = c.of.sent[q];
  if (!c.sends_to(q)) return;
  // (Where it is not known how many were lent, all beyond the own slots went straight.)
  const std::uint32_t own = c.call.shape.guaranteed_slots;
  const std::uint32_t borrowed = s.borrowed[q] == kNotYet ? 0 : s.borrowed[q];
  PoolUse* uses = r.rank.lanes[c.transport.lane].transport.peers[c.call.members[q]].borrows;
  if (c.is_carried()) return note_carried(c, uses, q, thread % 4, borrowed);
  for (std::uint32_t i = thread % 4; i < borrowed; i += 4) {
    const std::uint32_t round = own + borrowed, first = own + i;
    if (first >= sent) break;
    const std::uint32_t last = first + (sent - 1 - first) / round * round;
    uses[s.pool[q][i]] = {c.of.outs[q].count + last + 1, c.of.outs[q].connector, 0};
  }
}

// By a thread for the connector to member q, of slices [from, to): what is published, but for
// flags; and, behind a fence, these.
template <class S>
__device__ __forceinline__ void store_headers(const S& c, std::uint32_t q, std::uint32_t from,
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
template <class S>
__device__ __forceinline__ void store_flags(const S& c, std::uint32_t q, std::uint32_t from,
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

// By a thread for one connector, behind a fence behind all that it publishes: flags of slices
// [from, to), whose headers are stored; or of those that were taken the credit.
template <class S>
__device__ __forceinline__ void publish_news(const S& c, bool out, std::uint32_t q,
                                             std::uint32_t from, std::uint32_t to) {
  if (out) {
    store_flags(c, q, from, to);
  } else {
    store_system(c.of.ins[q].cell->consumed, c.of.ins[q].count + to);
  }
}
// Where a peer is told that something has come for it, without which it may stay asleep. Of a
// thread that has something for member q, or nullptr.
template <class S>
__device__ __forceinline__ std::uint32_t* where_to_poke(CudaRank& r, const S& c, std::uint32_t q,
                                                        bool any) {
  return any ? &r.pokes[c.call.members[q]][c.transport.lane] : nullptr;
}
__device__ __forceinline__ void poke_peer(std::uint32_t* at, std::uint32_t value) {
  fence_system();
  if (at != nullptr) store_system(*at, value);
}

// By a warp, as the call begins: lets members store into the output. (On a connector that is not
// the key's any more nobody finds that.)
template <class S>
__device__ __forceinline__ void invite_members(const S& c) {
  if (c.inv.output_place == 0) return;
  const Member m = member_of(c.call, {nullptr, nullptr, 1, 1}, threadIdx.x % 32);
  if (m.part != kIncoming || !c.invites(m.q)) return;
  const InEndpoint& in = *endpoint_of(c.call, m, c.transport.lane);
  if (in.connector == kNoConnector) return;
  LaneTransport::invite(c.transport.wire(in), c.inv.seed, c.inv.output_place);
}

// Publishes what the movers have moved, in the connectors' order, until nothing more is given. Of
// what is not moved to the end the last credits are left to tell_ends().
template <class S>
__device__ __forceinline__ void publish_call(CudaRank& r, const S& c) {
  constexpr std::uint32_t kAll = 0xffffffff;
  SlotShared& s = c.s;
  const std::uint32_t thread = threadIdx.x % 32, q = thread % kStreamCallRanks;
  const bool out = thread < kStreamCallRanks;
  const bool of_peer = thread < 2 * kStreamCallRanks && (out ? c.sends_to(q) : c.receives_from(q));
  const std::uint32_t own_slots = c.call.shape.guaranteed_slots;
  const std::uint32_t slices = c.order().slices();
  std::uint32_t* const poke_at = where_to_poke(r, c, q, out && (of_peer || c.receives_from(q)));
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
      // in slots that have been taken since.
      const bool news = of_peer && to != done && (out || to == slices || !last);
      if (news && out) store_headers(c, q, done, to);
      // One fence a thread is behind all that it has seen the movers do, and what it has stored
      // itself: with it each store below is a release.
      fence_system();
      if (news) {
        publish_news(c, out, q, done, to);
        done = to;
      }
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
    poke_peer(poke_at, ++poke);
    told = true;
  }
  if (thread < 2 * kStreamCallRanks) (out ? c.of.sent : c.of.taken)[q] = done;
  if (thread == 0) {
    s.poke = poke;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) c.of.moved[hop] = moved[hop];
  }
  __syncwarp();
  note_borrowed(r, c);
}

// ---- behind all ----

// Behind the barrier behind all: whether all was moved.
template <class S>
__device__ __forceinline__ bool all_moved(const S& c) {
  bool done = true;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    done = done && (!c.has(hop) || c.of.moved[hop] == c.call.chunks_of_all());
  }
  return done;
}

// As tell_member(), of what was not published. `done`: the call is, or will be, published to its
// end, so that all that is left is what later calls are to know.
template <class S>
__device__ __forceinline__ void tell_end(const S& c, const Member& m, bool done = false) {
  const StreamCall& call = c.call;
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
template <class S>
__device__ __forceinline__ void poke_in_the_end(CudaRank& r, const S& c, const Member& m) {
  const std::uint32_t lane = c.transport.lane, poke = c.s.poke + 1;
  if (threadIdx.x % 32 == 0) r.poke_counts[lane] = poke;
  if (m.part == kOutgoing && (c.sends_to(m.q) || c.receives_from(m.q))) {
    store_system(r.pokes[m.peer][lane], poke);
  }
}

}  // namespace in_stream
}  // namespace unjam
