// The first warp, of several calls: each hop takes the first of them that has what its next chunk
// needs.
#pragma once

#include "device/cuda/exec/slots/describe.cuh"
#include "device/cuda/exec/slots/send_window.h"
#include "device/cuda/exec/slots/several.cuh"
#include "device/cuda/exec/slots/steer.cuh"

namespace unjam {
namespace in_stream {

// How long a lane of the engine waits for peers: about as long as it takes it to do something else;
// and as long as they may do so where they are at it, for something came later than this lane, or
// where they have begun a call that is worth it (Passes::is_patient()).
inline constexpr std::uint64_t kBatchPatienceNs = 20000, kLongPatienceNs = 100000;

// Threads of the first warp that watch for one thing of a call: one a peer that it is watched for
// at.
__device__ __forceinline__ std::uint32_t peers_watched(const SlotSteps& steps) {
  const int peers = max(max(__popc(steps.sends_to), __popc(steps.gathers_from)),
                        max(__popc(steps.results_to), __popc(steps.collects_from)));
  return peers <= 1 ? 1 : peers <= 2 ? 2 : peers <= 4 ? 4 : 8;
}

// Whether one that waits for peers, and has begun, is worth a longer wait.
__device__ __forceinline__ bool is_worth_it(const LaneTransport& t) {
  const PipelinedBatch& x = pipelined_batch();
  bool worth_it = false;
  if (threadIdx.x < x.num_calls) {
    const std::uint32_t place = x.places[threadIdx.x];
    const BatchStreamed& of = x.calls[place];
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

// interrupted: see steer(), and BatchDev::Interrupts, which is also told whether this may leave for
// others; interrupted.others(): whether anybody else could go on. The warp watches some calls at
// once, a set, and leaves it for the next one when it finds nothing to do there; what it then has
// to know of a call is in shared memory. It comes back to the first as soon as it has found
// something: so where ranks have calls in the same order, they are at the same ones.
template <class Interrupted>
__device__ __forceinline__ void steer_several(CudaRank& r, const LaneTransport& t,
                                              Interrupted interrupted) {
  constexpr std::uint32_t kAll = 0xffffffff;
  PipelinedBatch& x = pipelined_batch();
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
    const BatchStreamed& of = x.calls[x.places[n]];
    if (thread < kSlotSteps && like.has(thread)) {
      x.total[thread] += batch_calls().call[x.places[n]].chunks_of_all() - of.behind[thread];
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
  std::uint32_t set = 0, i = 0, place = 0, group = 0, gatherers = 0;
  bool enters = true, watches = false, leads = false;
  Watching at;
  Asking asking{};
  // Sets, as bits: seen before; what comes there has been found; all of it is in movers' hands.
  std::uint32_t seen = 0, resolved = 0, finished = 0;
  // All sets are seen, and looked at again, before anything is given up.
  constexpr std::uint32_t kApart =
      kRoundsApart < 2 * kMostInBatch ? 2 * kMostInBatch : kRoundsApart;
  for (std::uint32_t round = 0;; ++round) {
    const std::uint32_t bit = 1u << set;
    if (enters) {
      i = set * at_once + thread / per_call;
      place = x.places[i < calls ? i : 0];
    }
    const Stream c = stream_of(t, place);
    BatchStreamed& of = x.calls[place];
    const Wire& wire = comes ? of.ins[q] : of.outs[q];
    const HopOrder order = c.order();
    const std::uint32_t chunks = c.call.chunks_of_all();
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
      at.k = anew ? of.behind[hop] : of.watched[watch][q];
      at.found = watches ? of.credits[q] : 0;
      asking = Asking{watches && !comes && c.into_output(hop)};
      if (asking.asks && !anew) {
        asking.known = of.heard[hop][q];
        asking.straight = of.invited[q] != nullptr;
        asking.asks = !asking.straight;
      }
      if (watches && comes) watches = of.found[q] != kIsNot;
      if (watches && (!comes || of.found[q] == kIsTheKeys)) at.begin(c, what, wire, at.k);
    }
    if ((seen & ~resolved & bit) != 0) {
      resolved |= bit;
      // (Twice looked for by who watches both.)
      const bool looks = watches && comes && at.k != chunks;
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
        at.begin(c, what, wire, at.k);
      }
    }
    bool news = false;
    const std::uint64_t invitation = asking.look(wire, round / sets);
    const bool anew = (seen & bit) == 0;
    if (watches && at.k < chunks && !stops && !(anew && comes)) {
      // Acquire: the payload is read, or the slot overwritten, behind it.
      if (!anew) at.found = load_acquire(*at.word);
      const Seen saw = look_at_watch(c, what, wire, of.done[hop], asking.straight, at);
      news = saw == Seen::kNews;
      if (saw == Seen::kStrange) watches = false;
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
        __ballot_sync(kAll, watches && watch == kToGather && at.k > of.next[kGathers]);
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
        const std::uint32_t there = __ballot_sync(kAll, watches && hop == h && at.k > next);
        bool can = leads && hop == h && (there & group) == group && next != chunks;
        if (h == kGathers) can = can && c.may_gather(next, of.done[kSends], of.done[kCollects]);
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
        hand_out(goes, h, n, at, given[h], thread);
        if (thread == 0) x.calls[its].next[h] = n + 1;
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
          of.watched[watch][q] = at.k;
          if (has_credits) of.credits[q] = at.found;
          if (!comes) of.heard[hop][q] = asking.known;
        }
        set = next;
        enters = true;
      }
    }
    if (stops || round % kApart != kApart - 1) continue;
    // (What movers have in hand does not wait for anybody.)
    const std::uint64_t now = global_ns();
    // (Not before it has been to all sets, and had nothing to give.)
    const bool may_leave = sending.may_leave(still) && !gave_some;
    still = !moved && !holds;
    if (!still) last = looked = now;
    if (came) lively = lively || __any_sync(kAll, now - begun > kBatchPatienceNs) != 0;
    moved = came = gave_some = false;
    bool gives_up = false;
    if (may_leave && __any_sync(kAll, now - looked >= kBatchPatienceNs) != 0) {
      // Peers that are at it may have left it for a moment. To wait for them is better than to come
      // back.
      looked = now;
      gives_up = !(is_worth_it(t) || lively) || now - last >= kLongPatienceNs ||
                 (thread == 0 && interrupted.others());
    }
    const bool asks_host =
        now - last > kStillNs || (t.lane == 0 && round % (8 * kApart) == kApart - 1);
    if (thread == 0 && !gives_up) {
      // Whoever has gone on may leave at any time, and come back. But if each try could end so
      // before it has sent all that has room, none might ever get there.
      const bool may_be_sent_away = may_leave || CudaDev::load_block(x.went_on) != 0;
      gives_up = interrupted(now, begun, asks_host, may_be_sent_away);
    }
    stops = __any_sync(kAll, gives_up) != 0;
  }
  if (i < calls && has_credits) x.calls[x.places[i]].credits[q] = at.found;
  if (thread == 0) CudaDev::store_block(s.closed, 1u);
}

}  // namespace in_stream
}  // namespace unjam
