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
    const std::uint32_t entry = x.entries[threadIdx.x];
    const BatchSlotCall& of = x.calls[entry];
    const SlotCall c = slot_call_of(t, entry);
    const bool has_begun = c.receives() ? (of.done[kGathers] | of.done[kCollects]) != 0
                                        : of.done[kSends] > c.call.shape.guaranteed_slots;
    bool waits = false;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      waits = waits || (c.has(hop) && of.next[hop] != c.call.chunks_of_all());
    }
    worth_it = waits && has_begun && (x.patient >> entry & 1) != 0;
  }
  return __any_sync(0xffffffff, worth_it) != 0;
}

// What a thread of the first warp watches, of each call: one thing at one peer. All calls are like
// the first one, `like`, in all that follows from who is who.
struct BatchWatch {
  std::uint32_t per_call;  // threads
  std::uint32_t at_once;   // calls, by a warp: a set
  std::uint32_t sets;
  std::uint32_t watch, q, hop;
  bool of_peer, comes, has_credits;  // has_credits: this thread sees what the peer has consumed
  Watched what;

  __device__ __forceinline__ BatchWatch(const SlotCall& like, std::uint32_t calls,
                                        std::uint32_t thread) {
    const std::uint32_t peers = peers_watched(like.call.steps);
    per_call = kWatches * peers, at_once = 32 / per_call, sets = (calls + at_once - 1) / at_once;
    watch = thread % per_call / peers;
    const std::uint32_t members = members_watched(like, watch), p = thread % peers;
    of_peer = p < static_cast<std::uint32_t>(__popc(members));
    q = of_peer ? member_number(members, p) : 0;
    what = watched(like, q, watch);
    comes = what.comes;
    hop = what.hop;
    has_credits = of_peer &&
                  watch == (has_member(like.call.steps.sends_to, q) ? kRoomToSend : kRoomForResult);
  }
};

// What the first warp knows as it steers several calls. It watches some calls at once, a set, and
// leaves it for the next one when it finds nothing to do there; what it then has to know of a call
// is in shared memory. It comes back to the first as soon as it has found something: so where ranks
// have calls in the same order, they are at the same ones.
struct BatchSteering {
  static constexpr std::uint32_t kAll = 0xffffffff;
  // All sets are seen, and looked at again, before anything is given up.
  static constexpr std::uint32_t kApart =
      kRoundsApart < 2 * kMostInBatch ? 2 * kMostInBatch : kRoundsApart;

  const LaneTransport& t;
  PipelinedBatch& x;
  SlotShared& s;
  const std::uint32_t calls, thread;
  const SlotCall like;
  const BatchWatch my;

  // Of all calls.
  const std::uint32_t receives;
  std::uint32_t given[kSlotSteps] = {}, done[kSlotSteps] = {}, ahead = 0;
  const SendWindow sending;
  std::uint64_t begun, last, looked;
  bool stops = false, moved = false, still = false, gave_some = false;
  bool came = false, lively = false;  // lively: what came was not there when we were

  // Of the set.
  std::uint32_t set = 0, i = 0, entry = 0, group = 0, gatherers = 0;
  bool enters = true, watches = false, leads = false;
  Watching at;
  Asking asking{};
  // Sets, as bits: seen before; what comes there has been found; all of it is in movers' hands.
  std::uint32_t seen = 0, resolved = 0, finished = 0;

  // Of a round: the call that this thread watches.
  struct Round {
    std::uint32_t bit;  // of the set
    SlotCall c;
    BatchSlotCall& of;
    const Wire& wire;
    HopOrder order;
    std::uint32_t chunks;
  };

  __device__ __forceinline__ explicit BatchSteering(const LaneTransport& transport)
      : t(transport),
        x(pipelined_batch()),
        s(x.slots),
        calls(x.num_calls),
        thread(threadIdx.x),
        like(slot_call_of(t, x.entries[0])),
        my(like, calls, thread),
        receives(like.has(kGathers) ? kGathers : kCollects),
        sending(calls, like.receives(), like.call.steps.lag, like.call.steps.tuning.hops_back) {
    if (thread < kSlotSteps) x.total[thread] = 0;
    for (std::uint32_t n = 0; n < calls; ++n) {
      const BatchSlotCall& of = x.calls[x.entries[n]];
      if (thread < kSlotSteps && like.has(thread)) {
        x.total[thread] += batch_calls().call[x.entries[n]].chunks_of_all() - of.behind[thread];
      }
      ahead += like.has(kSends) ? of.behind[kSends] : 0;
      ahead -= like.receives() ? of.behind[receives] : 0;
    }
    __syncwarp();
    last = looked = begun = global_ns();
  }

  __device__ __forceinline__ Round begin_round() {
    if (enters) {
      i = set * my.at_once + thread / my.per_call;
      entry = x.entries[i < calls ? i : 0];
    }
    const SlotCall c = slot_call_of(t, entry);
    BatchSlotCall& of = x.calls[entry];
    return {1u << set, c,
            of,        my.comes ? of.ins[my.q] : of.outs[my.q],
            c.order(), c.call.chunks_of_all()};
  }

  // Comes to a set.
  __device__ __forceinline__ void enter(const Round& now) {
    BatchSlotCall& of = now.of;
    enters = false;
    watches = i < calls && my.of_peer;
    // The threads that watch for the same hop of the call, and for contributions.
    const std::uint32_t of_call = my.per_call == 32 ? kAll
                                                    : ((1u << my.per_call) - 1)
                                                          << (thread / my.per_call * my.per_call);
#pragma unroll
    for (std::uint32_t h = 0; h < kSlotSteps; ++h) {
      const std::uint32_t some = __ballot_sync(kAll, watches && my.hop == h);
      if (my.hop == h) group = some & of_call;
    }
    gatherers = __ballot_sync(kAll, watches && my.watch == kToGather) & of_call;
    leads = watches && (group & ((1u << thread) - 1)) == 0;
    const bool anew = (seen & now.bit) == 0;
    at.k = anew ? of.behind[my.hop] : of.watched[my.watch][my.q];
    at.found = watches ? of.credits[my.q] : 0;
    asking = Asking{watches && !my.comes && now.c.into_output(my.hop)};
    if (asking.asks && !anew) {
      asking.known = of.heard[my.hop][my.q];
      asking.straight = of.invited[my.q] != nullptr;
      asking.asks = !asking.straight;
    }
    if (watches && my.comes) watches = of.found[my.q] != kIsNot;
    if (watches && (!my.comes || of.found[my.q] == kIsTheKeys)) {
      at.begin(now.c, my.what, now.wire, at.k);
    }
  }

  // In the second round of a set: the connectors on which its slices come.
  __device__ __forceinline__ void resolve(const Round& now) {
    BatchSlotCall& of = now.of;
    resolved |= now.bit;
    // (Twice looked for by who watches both.)
    const bool looks = watches && my.comes && at.k != now.chunks;
#pragma unroll
    for (const std::uint32_t w : {kToGather, kToCollect}) {
      if (looks && my.watch == w && of.found[my.q] == kNotLooked) {
        find_connector(now.c, my.q);
        if (of.found[my.q] == kIsTheKeys) of.ins[my.q].count -= of.taken[my.q];
      }
      __syncwarp();
    }
    if (looks) {
      watches = of.found[my.q] == kIsTheKeys;
      at.begin(now.c, my.what, now.wire, at.k);
    }
  }

  // Looks at what this thread watches.
  __device__ __forceinline__ void look(const Round& now, std::uint32_t round) {
    bool news = false;
    const std::uint64_t invitation = asking.look(now.wire, round / my.sets);
    const bool anew = (seen & now.bit) == 0;
    if (watches && at.k < now.chunks && !stops && !(anew && my.comes)) {
      // Acquire: the payload is read, or the slot overwritten, behind it.
      if (!anew) at.found = load_acquire(*at.word);
      const Seen saw =
          look_at_watch(now.c, my.what, now.wire, now.of.done[my.hop], asking.straight, at);
      news = saw == Seen::kNews;
      if (saw == Seen::kStrange) watches = false;
    }
    seen |= now.bit;
    asking.hear(now.c, my.q, my.hop, invitation);
    moved = __any_sync(kAll, news) != 0 || moved;
    came = __any_sync(kAll, news && (my.comes || !like.receives())) != 0 || came;
    __syncwarp();  // what any thread has acquired, for all
  }

  // What was moved. Whether all is.
  __device__ __forceinline__ bool count() {
    bool over = true;
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
    return over;
  }

  // Gives movers slice n of the hop, of entry `its`.
  __device__ __forceinline__ void hand_out_of(std::uint32_t its, std::uint32_t h, std::uint32_t n) {
    const SlotCall goes = slot_call_of(t, its);
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
  }

  struct Given {
    bool gave = false;   // something
    bool lacks = false;  // a hop has nothing that it could have been given
    bool holds = false;  // movers have something in hand
  };
  // Gives movers what can be moved.
  __device__ __forceinline__ Given give(const Round& now) {
    const std::uint32_t come =
        __ballot_sync(kAll, watches && my.watch == kToGather && at.k > now.of.next[kGathers]);
    Given to;
#pragma unroll 1
    for (std::uint32_t g = 0; g != x.descriptions.in_round(); ++g) {
#pragma unroll
      for (std::uint32_t h = 0; h < kSlotSteps; ++h) {
        if (!like.has(h)) continue;
        to.holds = to.holds || done[h] != given[h];
        if (stops || given[h] == x.total[h] || given[h] == done[h] + x.descriptions.of_a_hop()) {
          continue;
        }
        const std::uint32_t next = now.of.next[my.hop];
        const std::uint32_t there = __ballot_sync(kAll, watches && my.hop == h && at.k > next);
        bool can = leads && my.hop == h && (there & group) == group && next != now.chunks;
        if (h == kGathers) {
          can = can && now.c.may_gather(next, now.of.done[kSends], now.of.done[kCollects]);
        }
        if (h == kSends) {
          const bool has_come = (come & gatherers) == gatherers;
          const bool unlocks =
              SendWindow::unlocks(now.order, next, now.of.next[kGathers], has_come);
          can = can && sending.may_send(ahead, still, unlocks);
        }
        const std::uint32_t some = __ballot_sync(kAll, can);
        to.lacks = to.lacks || (some == 0 && g == 0);
        if (some == 0) continue;
        const auto lead = static_cast<std::uint32_t>(__ffs(static_cast<int>(some)) - 1);
        const std::uint32_t its = __shfl_sync(kAll, entry, lead), n = __shfl_sync(kAll, next, lead);
        hand_out_of(its, h, n);
        to.holds = to.gave = true;
      }
    }
    return to;
  }

  // Which set is next. What this thread knows of its call it leaves in shared memory.
  __device__ __forceinline__ void choose_set(const Round& now, const Given& to) {
    const bool left = __any_sync(kAll, leads && now.of.next[my.hop] != now.chunks) != 0;
    if (!left) finished |= now.bit;
    std::uint32_t next = set;
    if (to.gave) {
      next = 0;
    } else if (to.lacks || !left) {
      ++next;
    }
    // (If none is left, but for what movers have in hand, any will do.)
    for (std::uint32_t n = 0; n < my.sets && (next >= my.sets || (finished >> next & 1) != 0);
         ++n) {
      next = next + 1 < my.sets ? next + 1 : 0;
    }
    if (next == set) return;
    if (i < calls && my.of_peer) {
      now.of.watched[my.watch][my.q] = at.k;
      if (my.has_credits) now.of.credits[my.q] = at.found;
      if (!my.comes) now.of.heard[my.hop][my.q] = asking.known;
    }
    set = next;
    enters = true;
  }

  // Now and then: whether this thread finds that no more is to be waited for.
  template <class Interrupted>
  __device__ __forceinline__ bool gives_up(Interrupted& interrupted, std::uint32_t round,
                                           bool holds) {
    // (What movers have in hand does not wait for anybody.)
    const std::uint64_t now = global_ns();
    // (Not before it has been to all sets, and had nothing to give.)
    const bool may_leave = sending.may_leave(still) && !gave_some;
    still = !moved && !holds;
    if (!still) last = looked = now;
    if (came) lively = lively || __any_sync(kAll, now - begun > kBatchPatienceNs) != 0;
    moved = came = gave_some = false;
    bool leaves = false;
    if (may_leave && __any_sync(kAll, now - looked >= kBatchPatienceNs) != 0) {
      // Peers that are at it may have left it for a moment. To wait for them is better than to come
      // back.
      looked = now;
      leaves = !(is_worth_it(t) || lively) || now - last >= kLongPatienceNs ||
               (thread == 0 && interrupted.others());
    }
    const bool asks_host =
        now - last > kStillNs || (t.lane == 0 && round % (8 * kApart) == kApart - 1);
    if (thread != 0 || leaves) return leaves;
    // Whoever has gone on may leave at any time, and come back. But if each try could end so before
    // it has sent all that has room, none might ever get there.
    const bool may_be_sent_away = may_leave || CudaDev::load_block(x.went_on) != 0;
    return interrupted(now, begun, asks_host, may_be_sent_away);
  }

  // For the next call, and for movers.
  __device__ __forceinline__ void close() {
    if (i < calls && my.has_credits) x.calls[x.entries[i]].credits[my.q] = at.found;
    if (thread == 0) CudaDev::store_block(s.closed, 1u);
  }
};

// interrupted: see steer(), and BatchDev::Interrupts, which is also told whether this may leave for
// others; interrupted.others(): whether anybody else could go on.
template <class Interrupted>
__device__ __forceinline__ void steer_several(const LaneTransport& t, Interrupted interrupted) {
  using Steers = BatchSteering;
  Steers all(t);
  for (std::uint32_t round = 0;; ++round) {
    const Steers::Round now = all.begin_round();
    if (all.enters) all.enter(now);
    if ((all.seen & ~all.resolved & now.bit) != 0) all.resolve(now);
    all.look(now, round);
    const bool over = all.count();
    const Steers::Given to = all.give(now);
    all.gave_some = all.gave_some || to.gave;
    if (over || (all.stops && !to.holds)) break;
    if (all.my.sets > 1 && !all.stops) all.choose_set(now, to);
    if (all.stops || round % Steers::kApart != Steers::kApart - 1) continue;
    all.stops = __any_sync(Steers::kAll, all.gives_up(interrupted, round, to.holds)) != 0;
  }
  all.close();
}

}  // namespace in_stream
}  // namespace unjam
