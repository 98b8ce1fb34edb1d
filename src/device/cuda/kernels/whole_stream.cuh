// What a lane does for calls that go through slots, by its engine: as solo_stream.cuh, which
// does it without an engine, of several calls with the same members and hops. Each hop takes the
// first of them that has what its next chunk needs: so while one's results are on their way, others
// go on, and if ranks have them in different orders they do not wait for each other. What differs
// besides: the lane's lease is held, the keys' former uses have ended, the inputs are there, ends
// and progress are the engine's; and a call goes on where it was left.
//
// The first warp's threads each watch one call for one thing at one peer: all calls between two
// ranks, or of a chain, one in turn among eight by a mesh plan (steer_several()). It alone counts
// what movers have moved (solo_stream.cuh: in the order in which it was given), for each call, and
// says so to the second warp:
//   done      of a call's hop, by the first warp; release: with what it has acquired of movers
//   events    counts those, so that the second warp looks at calls only when there is news
// And the second warp to the first, both hints: which calls have `ended`, and whether what was
// moved lasts (`went_on`).
//
// Where a call was left. `behind` of each hop are chunks that nobody moves again, HopOrder says
// which slices of a connector these are, and the connectors' counts are so much further. Slots:
// each connector's own. A call that is alone, and begins, goes as without an engine (steer(),
// publish_stream()), and borrows others, whose round a later run would not know.
#pragma once

#include "device/cuda/kernels/sending_ahead.h"
#include "device/cuda/kernels/solo_stream.cuh"
#include "device/cuda/kernels/whole_call.cuh"

namespace unjam {

// How long a lane of the engine waits for peers: about as long as it takes it to do something else;
// and as long as they may do so where they are at it, for something came later than this lane, or
// where they have begun a call that is worth it (Engine::is_patient()).
inline constexpr std::uint64_t kWholePatienceNs = 20000, kLongPatienceNs = 100000;
inline constexpr std::uint32_t kAlonePatienceNs = 50000;  // where a call is alone, and begins

namespace solo {

struct WholeStreamed : StreamedCall {
  std::uint32_t behind[kSlotSteps];  // as it was left
  std::uint32_t next[kSlotSteps];    // chunks that were given
  std::uint32_t done[kSlotSteps];    // and moved
  // What the first warp's threads know that have left the call for others: see steer_several().
  std::uint32_t watched[kWatches][kSoloRanks];
  std::uint64_t heard[kSlotSteps][kSoloRanks];
  __device__ __forceinline__ bool begins() const {
    return (behind[kSends] | behind[kGathers] | behind[kCollects]) == 0;
  }
};
struct WholeStreams {
  StreamShared stream;
  WholeStreamed calls[kMostWholes];  // by their places in WholeCalls
  std::uint32_t num_calls;
  std::uint32_t places[kMostWholes];              // of those that go together
  std::uint32_t given_of[kSlotSteps * kInHand];   // whose slice a description is
  std::uint32_t to[kMostWholes][2 * kSoloRanks];  // of who publishes
  std::uint32_t events;
  std::uint32_t total[kSlotSteps];  // chunks of all that go together, see steer_several()
  bool borrows;                     // it is one call, from the beginning: as without an engine
  Descriptions descriptions;        // as all of them have them
  std::uint32_t patient;            // calls, as bits: worth a longer wait
  std::uint32_t ended;              // calls, as bits, of which all is told; the second warp's
  // Calls, as bits: those whose connectors are there, and of these such as can do something at
  // once.
  std::uint32_t there, ready;
  std::uint32_t went_on;  // something was moved that is not forgotten; the second warp's
  // See WholeDev::Interrupts: how the calls end that are not done, or WholeEnd::kDone.
  WholeEnd interrupted;
  std::uint64_t turn_ns, looked_ns;
};
alignas(16) __shared__ unsigned char whole_streams_bytes[sizeof(WholeStreams)];
__device__ __forceinline__ WholeStreams& whole_streams() {
  return *reinterpret_cast<WholeStreams*>(whole_streams_bytes);
}
// In WholeCalls' order.
__device__ __forceinline__ Stream stream_of(const LaneTransport& t, std::uint32_t place) {
  WholeStreams& x = whole_streams();
  return {whole_calls().call[place], whole_calls().inv[place], t, x.stream, x.calls[place]};
}

// Threads of the first warp that watch for one thing of a call: one a peer that it is watched for
// at.
__device__ __forceinline__ std::uint32_t peers_watched(const SlotSteps& steps) {
  const int peers = max(max(__popc(steps.sends_to), __popc(steps.gathers_from)),
                        max(__popc(steps.results_to), __popc(steps.collects_from)));
  return peers <= 1 ? 1 : peers <= 2 ? 2 : peers <= 4 ? 4 : 8;
}

// Whether hops have the same peers, and are as far apart.
__device__ __forceinline__ bool go_together(const SoloCall& a, const SoloCall& b) {
  const SlotSteps &x = a.steps, &y = b.steps;
  bool same = a.places == b.places && a.place == b.place;
  for (std::uint32_t q = 0; q < kSoloRanks; ++q) same = same && a.members[q] == b.members[q];
  return same && x.sends_to == y.sends_to && x.gathers_from == y.gathers_from &&
         x.results_to == y.results_to && x.collects_from == y.collects_from &&
         x.scatters == y.scatters && x.reduces == y.reduces && x.sums == y.sums &&
         x.stores_sent == y.stores_sent && x.stores_result == y.stores_result && x.lag == y.lag &&
         x.tuning == y.tuning;
}

// ---- before ----

// By a warp: where a call's slices lie, and whether there is something to do about them.
__device__ __forceinline__ void look_at_stream(const Stream& c, WholeStreamed& of,
                                               const WholeTry& t, std::uint32_t place) {
  constexpr std::uint32_t kWarp = 0xffffffff;
  WholeStreams& x = whole_streams();
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t thread = threadIdx.x % 32, chunks = c.call.chunks_of_all();
  if (thread < kSlotSteps) {
    const std::uint32_t done = c.has(thread) ? t.done[steps.primitives[thread]] : 0;
    of.behind[thread] = of.next[thread] = of.done[thread] = done;
  }
  __syncwarp();
  const Member m = member_of(c.call, {nullptr, nullptr, 1, 1}, thread);
  const HopOrder order = c.order();
  bool ok = true;
  // Hints: what is found is looked at again, with acquire.
  bool lacks[kSlotSteps] = {};
  if (m.part == kOutgoing && c.sends_to(m.q)) {
    const OutEndpoint& out = *out_endpoint(c.call, m, c.transport.lane);
    ok = out.connector != kNoConnector;
    Wire wire = c.transport.wire(out);
    const std::uint32_t sent = c.prefix_to(m.q, of.behind), own = c.call.shape.escape_slots;
    wire.count -= sent;
    of.outs[m.q] = wire;
    of.sent[m.q] = sent;
    const bool sends = has_member(steps.sends_to, m.q) && of.behind[kSends] != chunks;
    const bool results = has_member(steps.results_to, m.q) && of.behind[kGathers] != chunks;
    const std::uint64_t first = wire.count + order.first(of.behind[kSends]),
                        second = wire.count + order.second(of.behind[kGathers]);
    std::uint64_t credit = out.credit;
    if (ok && ((sends && first - credit >= own) || (results && second - credit >= own))) {
      credit = load_relaxed(wire.cell->consumed);
    }
    of.credits[m.q] = out.credit;
    // (What is sent out of the connector's turn is not published, and forgotten. Of what comes out
    // of turn the same is true.)
    const bool in_turn = order.first(of.behind[kSends]) == sent;
    lacks[kSends] = sends && (!in_turn || first - credit >= own);
    lacks[kGathers] = results && second - credit >= own;
  } else if (m.part == kIncoming && c.receives_from(m.q)) {
    const InEndpoint& in = *endpoint_of(c.call, m, c.transport.lane);
    ok = in.connector != kNoConnector;
    Wire wire = c.transport.wire(in);
    const std::uint32_t taken = c.prefix_from(m.q, of.behind);
    wire.count -= taken;
    of.ins[m.q] = wire;
    of.taken[m.q] = taken;
    const auto has_come = [&](std::uint32_t slice) {
      const std::uint64_t step = wire.count + slice;
      const std::uint64_t flag = load_relaxed(LaneTransport::header_of(wire.steps, step).flag);
      return (flag & ~kFlagPlaces) == step_flag(c.inv.seed, step);
    };
    // Where the connector is not the key's any more, or began anew, slices may come elsewhere: that
    // is to be found out, which steering does.
    const bool known = ok &&
                       load_relaxed(c.transport.tag_word(m.peer, in.connector)) == c.call.tag &&
                       load_relaxed(c.transport.base_word(m.peer, in.connector)) <= in.consumed;
    if (known) {
      lacks[kGathers] = has_member(steps.gathers_from, m.q) && of.behind[kGathers] != chunks &&
                        !has_come(order.first(of.behind[kGathers]));
      const std::uint32_t collected = order.second(of.behind[kCollects]);
      lacks[kCollects] = has_member(steps.collects_from, m.q) && of.behind[kCollects] != chunks &&
                         (collected != taken || !has_come(collected));
    }
  }
  ok = __all_sync(kWarp, ok) != 0;
  bool can = false;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    const bool missing = __any_sync(kWarp, lacks[hop]) != 0;
    can = can || (c.has(hop) && of.behind[hop] != chunks && !missing);
  }
  if (thread != 0 || !ok) return;
  atomicOr(&x.there, 1u << place);
  if (can) atomicOr(&x.ready, 1u << place);
}

// By one thread: those that are there go together. None, if nothing can be done at once.
__device__ __forceinline__ void line_up(const WholeTry* tries) {
  WholeStreams& x = whole_streams();
  std::uint32_t n = 0;
  x.patient = 0;
  for (std::uint32_t left = x.ready != 0 ? x.there : 0; left != 0; left &= left - 1) {
    const auto place = static_cast<std::uint32_t>(__ffs(static_cast<int>(left)) - 1);
    if (tries[place].patient) x.patient |= 1u << place;
    x.places[n++] = place;
  }
  x.num_calls = n;
}

// By all threads; a barrier is in front and behind.
__device__ __forceinline__ void set_up_together(const Stream& first) {
  WholeStreams& x = whole_streams();
  const bool borrows = x.num_calls == 1 && x.calls[x.places[0]].begins();
  const std::uint32_t i = threadIdx.x % 32;
  if (threadIdx.x / 32 == 1) {
    if (i < kSoloRanks) x.stream.borrowed[i] = borrows ? kNotYet : 0;
    if (i < kSlotSteps * kInHand) {
      x.stream.stored[i] = 0;
      x.given_of[i] = x.places[0];
    }
    if (i < kGroups) x.stream.costs[i] = x.stream.given[i] = 0;
    if (i == 0) {
      x.stream.closed = x.events = x.ended = x.went_on = 0;
      x.interrupted = WholeEnd::kDone;
      x.borrows = borrows;
      x.descriptions = first.descriptions();
    }
  } else if (threadIdx.x / 32 == 2 && i < kSlotSteps * kInHand) {
    describe_hop(first, first.hop_of_description(i), x.stream.jobs[i]);
  }
}

// ---- the first warp ----

// Whether one that waits for peers, and has begun, is worth a longer wait.
__device__ __forceinline__ bool is_worth_it(const LaneTransport& t) {
  const WholeStreams& x = whole_streams();
  bool worth_it = false;
  if (threadIdx.x < x.num_calls) {
    const std::uint32_t place = x.places[threadIdx.x];
    const WholeStreamed& of = x.calls[place];
    const Stream c = stream_of(t, place);
    const bool has_begun = c.receives() ? (of.done[kGathers] | of.done[kCollects]) != 0
                                        : of.done[kSends] > c.call.shape.escape_slots;
    bool waits = false;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      waits = waits || (c.has(hop) && of.next[hop] != c.call.chunks_of_all());
    }
    worth_it = waits && has_begun && (x.patient >> place & 1) != 0;
  }
  return __any_sync(0xffffffff, worth_it) != 0;
}

// interrupted: see steer(), and WholeDev::Interrupts, which is also told whether this may leave for
// others; interrupted.others(): whether anybody else could go on. The warp watches some calls at
// once, a set, and leaves it for the next one when it finds nothing to do there; what it then has
// to know of a call is in shared memory. It comes back to the first as soon as it has found
// something: so where ranks have calls in the same order, they are at the same ones.
template <class Interrupted>
__device__ __forceinline__ void steer_several(CudaRank& r, const LaneTransport& t,
                                              Interrupted interrupted) {
  constexpr std::uint32_t kAll = 0xffffffff;
  WholeStreams& x = whole_streams();
  StreamShared& s = x.stream;
  const std::uint32_t calls = x.num_calls, thread = threadIdx.x;
  const Stream like = stream_of(t, x.places[0]);  // in all that follows from who is who
  const std::uint32_t peers = peers_watched(like.call.steps), per_call = kWatches * peers,
                      at_once = 32 / per_call, sets = (calls + at_once - 1) / at_once;

  // What this thread watches, of each call.
  const std::uint32_t watch = thread % per_call / peers;
  const std::uint32_t members = members_watched(like, watch), p = thread % peers;
  const bool of_peer = p < static_cast<std::uint32_t>(__popc(members));
  const std::uint32_t q = of_peer ? member_number(members, p) : 0;
  const Watched what = watched(like, q, watch);
  const bool comes = what.comes;
  const std::uint32_t hop = what.hop;
  const bool has_credits =
      of_peer && watch == (has_member(like.call.steps.sends_to, q) ? kRoomToSend : kRoomForResult);

  // Of all calls.
  const std::uint32_t receives = like.has(kGathers) ? kGathers : kCollects;
  std::uint32_t given[kSlotSteps] = {}, done[kSlotSteps] = {}, ahead = 0;
  if (thread < kSlotSteps) x.total[thread] = 0;
  for (std::uint32_t n = 0; n < calls; ++n) {
    const WholeStreamed& of = x.calls[x.places[n]];
    if (thread < kSlotSteps && like.has(thread)) {
      x.total[thread] += whole_calls().call[x.places[n]].chunks_of_all() - of.behind[thread];
    }
    ahead += like.has(kSends) ? of.behind[kSends] : 0;
    ahead -= like.receives() ? of.behind[receives] : 0;
  }
  __syncwarp();
  const SendingAhead sending(calls, like.receives(), like.call.steps.lag,
                             like.call.steps.tuning.hops_back);
  const std::uint64_t begun = global_ns();
  std::uint64_t last = begun, looked = begun;
  bool stops = false, moved = false, still = false, gave_some = false;
  bool came = false, lively = false;  // lively: what came was not there when we were

  // Of the set.
  std::uint32_t set = 0, i = 0, place = 0, group = 0, gatherers = 0, k = 0;  // k: so many are there
  bool enters = true, watches = false, leads = false;
  std::uint64_t found = 0, step = 0;
  std::uint64_t* word = nullptr;
  Asking asking{};
  // Sets, as bits: seen before; what comes there has been found; all of it is in movers' hands.
  std::uint32_t seen = 0, resolved = 0, finished = 0;
  static_assert(kRoundsApart >= 2 * kMostWholes);  // all sets are seen, and looked at again
  for (std::uint32_t round = 0;; ++round) {
    const std::uint32_t bit = 1u << set;
    if (enters) {
      i = set * at_once + thread / per_call;
      place = x.places[i < calls ? i : 0];
    }
    const Stream c = stream_of(t, place);
    WholeStreamed& of = x.calls[place];
    const Wire& wire = comes ? of.ins[q] : of.outs[q];
    const HopOrder order = c.order();
    const std::uint32_t chunks = c.call.chunks_of_all();
    const auto slice = [&](std::uint32_t n) {
      return watch == kRoomForResult || watch == kToCollect ? order.second(n) : order.first(n);
    };
    if (enters) {
      enters = false;
      watches = i < calls && of_peer;
      // The threads that watch for the same hop of the call, and for contributions.
      const std::uint32_t of_call =
          per_call == 32 ? kAll : ((1u << per_call) - 1) << (thread / per_call * per_call);
#pragma unroll
      for (std::uint32_t h = 0; h < kSlotSteps; ++h) {
        const std::uint32_t some = __ballot_sync(kAll, watches && hop == h);
        if (hop == h) group = some & of_call;
      }
      gatherers = __ballot_sync(kAll, watches && watch == kToGather) & of_call;
      leads = watches && (group & ((1u << thread) - 1)) == 0;
      const bool anew = (seen & bit) == 0;
      k = anew ? of.behind[hop] : of.watched[watch][q];
      found = watches ? of.credits[q] : 0;
      asking = Asking{watches && !comes && c.into_output(hop)};
      if (asking.asks && !anew) {
        asking.known = of.heard[hop][q];
        asking.straight = of.invited[q] != nullptr;
        asking.asks = !asking.straight;
      }
      word = nullptr;
      if (watches && comes) watches = of.found[q] != kIsNot;
      if (watches && (!comes || of.found[q] == kIsTheKeys)) {
        step = wire.count + slice(k);
        word = comes ? &LaneTransport::header_of(wire.steps, step).flag : &wire.cell->consumed;
      }
    }
    if ((seen & ~resolved & bit) != 0) {
      resolved |= bit;
      // (Twice looked for by who watches both.)
      const bool looks = watches && comes && k != chunks;
#pragma unroll
      for (const std::uint32_t w : {kToGather, kToCollect}) {
        if (looks && watch == w && of.found[q] == kNotLooked) {
          find_connector(c, q);
          if (of.found[q] == kIsTheKeys) of.ins[q].count -= of.taken[q];
        }
        __syncwarp();
      }
      if (looks) {
        watches = of.found[q] == kIsTheKeys;
        step = wire.count + slice(k);
        word = &LaneTransport::header_of(wire.steps, step).flag;
      }
    }
    bool news = false;
    const std::uint64_t invitation = asking.look(wire, round / sets);
    const bool anew = (seen & bit) == 0;
    if (watches && k < chunks && !stops && !(anew && comes)) {
      // Acquire: the payload is read, or the slot overwritten, behind it.
      if (!anew) found = load_acquire(*word);
      if (!comes) {
        const std::uint32_t borrowed = CudaDev::load_block(s.borrowed[q]);
        while (k < chunks && c.room_for(static_cast<std::uint32_t>(step - wire.count), step - found,
                                        borrowed, asking.straight)) {
          news = true;
          step = wire.count + slice(++k);
        }
      } else if ((found & ~kFlagPlaces) == step_flag(c.inv.seed, step)) {
        if ((found & kFlagInOutput) != 0 && !c.invites(q)) {
          of.found[q] = kIsNot;
          watches = false;
        } else if (k < of.done[hop] + kCome) {
          Wire in = wire;
          in.count = step;
          of.come[hop][k % kCome][q] = (found & kFlagPlaces) == 0
                                           ? t.escape_slot_of(in.steps, step)
                                           : t.slice_at(c.call.members[q], in, found);
          news = true;
          step = wire.count + slice(++k);
          word = &LaneTransport::header_of(wire.steps, step).flag;
        }
      }
    }
    seen |= bit;
    asking.hear(c, q, hop, invitation);
    moved = __any_sync(kAll, news) != 0 || moved;
    came = __any_sync(kAll, news && (comes || !like.receives())) != 0 || came;
    __syncwarp();  // what any thread has acquired, for all

    // What was moved.
    bool over = true, holds = false;
#pragma unroll
    for (std::uint32_t h = 0; h < kSlotSteps; ++h) {
      if (!like.has(h)) continue;
      if (done[h] != given[h]) {
        std::uint32_t n = done[h];
        if (thread == 0) {
          for (; n != given[h]; ++n) {
            const std::uint32_t at = x.descriptions.at(h, n);
            if (CudaDev::load_block(s.stored[at]) < x.descriptions.count(like.warps(), n)) break;
            std::uint32_t& count = x.calls[x.given_of[at]].done[h];
            CudaDev::store_block(count, count + 1);
          }
          if (n != done[h]) CudaDev::store_block(x.events, x.events + 1);
        }
        done[h] = __shfl_sync(kAll, n, 0);
      }
      over = over && done[h] == x.total[h];
    }
    __syncwarp();

    // What can be moved.
    const std::uint32_t come =
        __ballot_sync(kAll, watches && watch == kToGather && k > of.next[kGathers]);
    bool gave = false, lacks = false;
#pragma unroll 1
    for (std::uint32_t g = 0; g != x.descriptions.in_round(); ++g) {
#pragma unroll
      for (std::uint32_t h = 0; h < kSlotSteps; ++h) {
        if (!like.has(h)) continue;
        holds = holds || done[h] != given[h];
        if (stops || given[h] == x.total[h] || given[h] == done[h] + x.descriptions.of_a_hop()) {
          continue;
        }
        const std::uint32_t next = of.next[hop];
        const std::uint32_t there = __ballot_sync(kAll, watches && hop == h && k > next);
        bool can = leads && hop == h && (there & group) == group && next != chunks;
        if (h == kGathers && like.call.steps.gather_waits_for_sent) {
          can = can && of.done[kSends] >= order.sent_before_gather(next);
        }
        if (h == kGathers && like.call.steps.gather_waits_for_collected) {
          can = can && of.done[kCollects] >= order.collected_before_gather(next);
        }
        if (h == kSends) {
          const bool has_come = (come & gatherers) == gatherers;
          const bool unlocks = SendingAhead::unlocks(order, next, of.next[kGathers], has_come);
          can = can && sending.may_send(ahead, still, unlocks);
        }
        const std::uint32_t some = __ballot_sync(kAll, can);
        lacks = lacks || (some == 0 && g == 0);
        if (some == 0) continue;
        const auto lead = static_cast<std::uint32_t>(__ffs(static_cast<int>(some)) - 1);
        const std::uint32_t its = __shfl_sync(kAll, place, lead), n = __shfl_sync(kAll, next, lead);
        const Stream goes = stream_of(t, its);
        const std::uint32_t at = x.descriptions.at(h, given[h]);
        if (x.given_of[at] != its) {
          __syncwarp();
          if (thread == 0) {
            describe_hop(goes, h, s.jobs[at]);
            x.given_of[at] = its;
          }
          __syncwarp();
        }
        const bool moves = __any_sync(kAll, describe_slice(goes, h, n, thread, s.jobs[at])) != 0;
        __syncwarp();
        if (thread == 0) {
          x.calls[its].next[h] = n + 1;
          if (moves) {
            give(goes, h, at);
          } else {
            skip(goes, at, given[h]);
          }
        }
        __syncwarp();
        ++given[h];
        if (h == kSends) ++ahead;
        if (h == receives) --ahead;
        holds = gave = true;
      }
    }
    gave_some = gave_some || gave;
    if (over || (stops && !holds)) break;
    if (sets > 1 && !stops) {
      const bool left = __any_sync(kAll, leads && of.next[hop] != chunks) != 0;
      if (!left) finished |= bit;
      std::uint32_t next = set;
      if (gave) {
        next = 0;
      } else if (lacks || !left) {
        ++next;
      }
      // (If none is left, but for what movers have in hand, any will do.)
      for (std::uint32_t n = 0; n < sets && (next >= sets || (finished >> next & 1) != 0); ++n) {
        next = next + 1 < sets ? next + 1 : 0;
      }
      if (next != set) {
        if (i < calls && of_peer) {
          of.watched[watch][q] = k;
          if (has_credits) of.credits[q] = found;
          if (!comes) of.heard[hop][q] = asking.known;
        }
        set = next;
        enters = true;
      }
    }
    if (stops || round % kRoundsApart != kRoundsApart - 1) continue;
    // (What movers have in hand does not wait for anybody.)
    const std::uint64_t now = global_ns();
    // (Not before it has been to all sets, and had nothing to give.)
    const bool may_leave = sending.may_leave(still) && !gave_some;
    still = !moved && !holds;
    if (!still) last = looked = now;
    if (came) lively = lively || __any_sync(kAll, now - begun > kWholePatienceNs) != 0;
    moved = came = gave_some = false;
    bool gives_up = false;
    if (may_leave && __any_sync(kAll, now - looked >= kWholePatienceNs) != 0) {
      // Peers that are at it may have left it for a moment. To wait for them is better than to come
      // back.
      looked = now;
      gives_up = !(is_worth_it(t) || lively) || now - last >= kLongPatienceNs ||
                 (thread == 0 && interrupted.others());
    }
    const bool asks_host =
        now - last > kStillNs || (t.lane == 0 && round % (8 * kRoundsApart) == kRoundsApart - 1);
    if (thread == 0 && !gives_up) {
      // Whoever has gone on may leave at any time, and come back. But if each try could end so
      // before it has sent all that has room, none might ever get there.
      const bool may_be_sent_away = may_leave || CudaDev::load_block(x.went_on) != 0;
      gives_up = interrupted(now, begun, asks_host, may_be_sent_away);
    }
    stops = __any_sync(kAll, gives_up) != 0;
  }
  if (i < calls && has_credits) x.calls[x.places[i]].credits[q] = found;
  if (thread == 0) CudaDev::store_block(s.closed, 1u);
}

// ---- the second warp ----

// Behind all that is published of call i: whether it is done. If so, all of it is told.
__device__ __forceinline__ bool tell_if_done(const Stream& c, WholeStreamed& of) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const std::uint32_t thread = threadIdx.x % 32, q = thread % kSoloRanks;
  bool done = true;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    // Acquire, by each thread: what it tells, and what ends behind it, comes after what was moved.
    done = done && (!c.has(hop) || CudaDev::load_block(of.done[hop]) == c.call.chunks_of_all());
  }
  if (thread < kSoloRanks && c.sends_to(q)) done = done && of.sent[q] == c.order().slices();
  if (__all_sync(kAll, done) == 0) return false;
  if (thread < kSoloRanks && c.receives_from(q)) of.taken[q] = c.order().slices();
  __syncwarp();
  tell_end(c, member_of(c.call, {nullptr, nullptr, 1, 1}, thread));
  __syncwarp();
  return true;
}

// As publish_stream(). A call that is done, of several, is ended at once.
template <class EndEarly>
__device__ __forceinline__ void publish_several(CudaRank& r, const LaneTransport& t,
                                                EndEarly end_early) {
  constexpr std::uint32_t kAll = 0xffffffff;
  WholeStreams& x = whole_streams();
  StreamShared& s = x.stream;
  const Stream like = stream_of(t, x.places[0]);
  const std::uint32_t thread = threadIdx.x % 32, q = thread % kSoloRanks, calls = x.num_calls;
  const bool out = thread < kSoloRanks;
  const bool of_peer = thread < 2 * kSoloRanks && (out ? like.sends_to(q) : like.receives_from(q));
  const std::uint32_t own_slots = like.call.shape.escape_slots;
  std::uint32_t* poke_at = nullptr;
  if (out && (of_peer || like.receives_from(q))) {
    poke_at = &r.pokes[like.call.members[q]][t.lane];
  }
  std::uint32_t poke = s.poke, idle = 0, seen = 0;
  bool told = true, went_on = false;
  std::uint32_t ended = 0;  // calls, as bits
  for (std::uint32_t i = 0; i < calls; ++i) {
    if (x.calls[x.places[i]].begins()) invite_members(stream_of(t, x.places[i]));
  }
  for (;;) {
    // (Before what was moved.)
    const bool last = __shfl_sync(kAll, CudaDev::load_block(s.closed), 0) != 0;
    const std::uint32_t events = __shfl_sync(kAll, CudaDev::load_block(x.events), 0);
    bool news = false;
    for (std::uint32_t i = 0; i < calls && of_peer && (last || events != seen); ++i) {
      const std::uint32_t place = x.places[i];
      const Stream c = stream_of(t, place);
      std::uint32_t moved[kSlotSteps];
#pragma unroll
      for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
        moved[hop] = CudaDev::load_block(x.calls[place].done[hop]);
      }
      std::uint32_t& done = (out ? c.of.sent : c.of.taken)[q];
      std::uint32_t to = out ? c.prefix_to(q, moved) : c.prefix_from(q, moved);
      went_on = went_on || to != done;
      // A credit is worth a fence where the peer has slices left that want room. (Others do not go
      // along, as they do in publish_stream().)
      if (!out && !last && c.order().slices() - done <= own_slots) to = done;
      x.to[i][thread] = to;
      if (to == done) continue;
      if (out) store_headers(c, q, done, to);
      // (The last credits are told in the end.)
      if (!out && last) {
        done = to;
      } else {
        news = true;
      }
    }
    const bool looks = events != seen;
    seen = events;
    if (looks && __any_sync(kAll, went_on) != 0 && thread == 0) CudaDev::store_block(x.went_on, 1u);
    const bool news_told = __any_sync(kAll, news) != 0;
    if (news_told) {
      // As in publish_stream(): each thread's fence is behind what it has seen of all calls.
      fence_system();
      for (std::uint32_t i = 0; news && i < calls; ++i) {
        const Stream c = stream_of(t, x.places[i]);
        std::uint32_t& done = (out ? c.of.sent : c.of.taken)[q];
        const std::uint32_t to = x.to[i][thread];
        if (to == done) continue;
        if (out) {
          store_flags(c, q, done, to);
        } else {
          store_system(c.of.ins[q].cell->consumed, c.of.ins[q].count + to);
        }
        done = to;
      }
      told = false;
      idle = 0;
    }
    for (std::uint32_t i = 0; i < calls && looks && calls > 1; ++i) {
      const std::uint32_t place = x.places[i];
      if ((ended >> place & 1) != 0 || !tell_if_done(stream_of(t, place), x.calls[place])) continue;
      ended |= 1u << place;
      if (thread == 0) CudaDev::store_block(x.ended, ended);
      told = false;
      // What the thread has acquired, and the others' stores behind that: all of the call.
      if (thread == 0) end_early(place);
      __syncwarp();
    }
    if (news_told) continue;
    if (last) break;
    if (told || ++idle < kIdleRounds) continue;
    // Peers may be asleep until they hear that something has come for them.
    fence_system();
    ++poke;
    if (poke_at != nullptr) store_system(*poke_at, poke);
    told = true;
  }
  if (thread == 0) s.poke = poke;
  if (thread < calls) {
    WholeStreamed& of = x.calls[x.places[thread]];
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) of.moved[hop] = of.done[hop];
  }
}

// ---- behind all ----

// By one thread: how the calls have ended, of which `alike` were looked at.
__device__ __forceinline__ void say_ends(const LaneTransport& t, LaneStats& stats, WholeTry* tries,
                                         std::uint32_t n, std::uint32_t alike) {
  const WholeStreams& x = whole_streams();
  for (std::uint32_t place = 0; place < n; ++place) {
    const bool unable = place < alike && (x.there >> place & 1) == 0;
    tries[place].end = unable ? WholeEnd::kUnable : WholeEnd::kWaits;
    tries[place].left_out = place >= alike;  // it was not looked at
  }
  for (std::uint32_t i = 0; i < x.num_calls; ++i) {
    const std::uint32_t place = x.places[i];
    const Stream c = stream_of(t, place);
    WholeTry& its = tries[place];
    count_stream(stats, c, x.calls[place].behind, false,
                 [](std::uint64_t& figure, std::uint64_t by) { figure += by; });
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      if (!c.has(hop)) continue;
      const std::uint32_t behind = c.hops_behind(hop);
      std::uint32_t& done = its.done[c.call.steps.primitives[hop]];
      if (hop != kSends && behind != done) its.receives = true;
      done = behind;
    }
    bool elsewhere = false;
    for (std::uint32_t q = 0; q < c.call.places; ++q) {
      elsewhere = elsewhere || (c.receives_from(q) && c.of.found[q] == kIsNot);
    }
    if (all_moved(c)) {
      its.end = WholeEnd::kDone;
    } else if (elsewhere) {
      its.end = WholeEnd::kElsewhere;
    } else if (x.interrupted != WholeEnd::kDone) {
      its.end = x.interrupted;
    }
  }
}

}  // namespace solo

// By all threads of the block; ends with a barrier. interrupted: see solo::steer_several().
template <class Interrupted, class EndEarly>
inline __device__ __noinline__ void run_whole_streams(CudaRank* rank, LaneStats* stats,
                                                      std::uint32_t lane, WholeTry* shared_tries,
                                                      std::uint32_t n, Interrupted interrupted,
                                                      EndEarly end_early) {
  using namespace solo;
  CudaRank& r = *rank;
  WholeCalls& calls = whole_calls();
  WholeStreams& x = whole_streams();
  WholeTry* const tries = &in_shared(*shared_tries);
  const std::uint32_t warp = threadIdx.x / 32;

  fetch_calls(r, tries, n);
  sync_block();
  if (threadIdx.x < n && calls.call[threadIdx.x].patience_ns > kAlonePatienceNs) {
    calls.call[threadIdx.x].patience_ns = kAlonePatienceNs;
  }
  if (threadIdx.x == 0) {
    x.there = x.ready = 0;
    x.stream.poke = load_relaxed_local(r.poke_counts[lane]);
  }
  sync_block();
  std::uint32_t alike = 1;
  while (alike < n && go_together(calls.call[0], calls.call[alike])) ++alike;
  const LaneTransport t = transport_of(calls.call[0], lane);
  // (From the last thread on: the first warps look first.)
  for (std::uint32_t at = blockDim.x - 1 - threadIdx.x; at < alike * kSoloRanks; at += blockDim.x) {
    const std::uint32_t place = at / kSoloRanks, q = at % kSoloRanks;
    x.calls[place].found[q] = kNotLooked;
    x.calls[place].invited[q] = nullptr;
    x.calls[place].straight[q] = kNoSlice;
    if (q >= calls.call[place].places) continue;
    x.calls[place].parts[q] = stream_of(t, place).stretch_of(q);
  }
  __syncwarp();
  for (std::uint32_t place = warp; place < alike; place += blockDim.x / 32) {
    look_at_stream(stream_of(t, place), x.calls[place], tries[place], place);
  }
  sync_block();
  if (threadIdx.x == 0) line_up(tries);
  sync_block();
  if (x.num_calls != 0) {
    const Stream first = stream_of(t, x.places[0]);
    set_up_together(first);
    if (threadIdx.x == 0) interrupted.dev.set_moving(true);
    sync_block();
    // (What is alone, and begins, is steered with fewer questions: lab/nccl-notes.md.)
    if (warp == 0 && x.borrows) {
      steer(r, first, interrupted, [] {}, {}, /*rehearses=*/false, /*may_be_sure=*/true);
    } else if (warp == 0) {
      steer_several(r, t, interrupted);
    } else if (warp == 1) {
      x.borrows ? publish_stream(r, first) : publish_several(r, t, end_early);
    } else {
      move(first);
    }
    sync_block();
    if (warp == 0) {
      const Member m = member_of(first.call, {nullptr, nullptr, 1, 1});
      for (std::uint32_t i = 0; i < x.num_calls; ++i) {
        const std::uint32_t place = x.places[i];
        if ((x.ended >> place & 1) == 0) tell_end(stream_of(t, place), m);
      }
      poke_in_the_end(r, first, m);
    }
  }
  if (threadIdx.x == 0) say_ends(t, *stats, tries, n, alike);
  sync_block();
}

}  // namespace unjam
