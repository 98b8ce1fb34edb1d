// The first warp, of one call: watches and hands out, until all is moved or no more is waited for.
#pragma once

#include "device/cuda/exec/slots/carry.cuh"
#include "device/cuda/exec/slots/describe.cuh"
#include "device/cuda/exec/slots/lane_pacing.h"
#include "device/cuda/exec/slots/watch.cuh"

namespace unjam {
namespace in_stream {

// Of a lane in which nothing moves. From kStillNs on it looks at what the host says: the first lane
// each time that has passed, others much less often. (Where a GPU's blocks ask for more words of
// the host than PCIe brings, everything on it waits, other kernels too.)
inline constexpr std::uint64_t kStillNs = 50000, kSeldomNs = 2000000;

// Slices of a hop that are given before the stream is waited for ahead of the end: by then the call
// in front, with which this one may overlap, has ended as a rule.
inline constexpr std::uint32_t kGivenBeforeWait = 4;

// A call's lanes, for LanePacing.
struct Pace {
  std::uint64_t* words = nullptr;  // of the call's lanes; nullptr: they do not wait for each other
  std::uint32_t call = 0;          // the low half of its serial
  std::uint32_t lanes = 0, lane = 0;

  // By a warp, a thread for each lane. What was found is waited for in slowest().
  __device__ __forceinline__ std::uint64_t look(std::uint32_t thread) const {
    if (words == nullptr || thread >= lanes) return LanePacing::word(call, ~std::uint32_t{0});
    return load_relaxed_local(words[thread]);
  }
  __device__ __forceinline__ std::uint32_t slowest(std::uint64_t word) const {
    return __reduce_min_sync(0xffffffff, LanePacing::moved(call, word));
  }
  // By one thread.
  __device__ __forceinline__ void say(std::uint32_t moved) const {
    if (words != nullptr) store_relaxed_local(words[lane], LanePacing::word(call, moved));
  }
};

// What the first warp knows as it steers one call. Members of its threads are alike unless they say
// otherwise. A round is a few of its steps, each of which all threads go through.
template <class S>
struct Steering {
  static constexpr std::uint32_t kAll = 0xffffffff;
  CudaRank& r;
  const S& c;
  const Pace pace;
  const bool rehearses;
  const std::uint32_t thread, chunks;
  const HopOrder order;
  // What this thread watches. What peers have consumed is known to some extent: the first slices
  // wait for nothing, not even for a look at what comes in, unless that was found before.
  const Watched x;
  const bool knows;
  Wire wire;
  Watching at;
  std::uint32_t needs[kSlotSteps];  // threads that watch for a hop
  std::uint32_t next[kSlotSteps] = {}, done[kSlotSteps] = {};
  std::uint64_t begun, last, asked;
  std::uint32_t slowest = 0;  // chunks that the call's slowest lane has moved
  bool stops = false, moved = false, sure = false;
  bool sends, may_ask;  // this thread's: watches for room for what is sent; goes to outputs
  Carrying carrying;
  Asking asking;

  __device__ __forceinline__ Steering(CudaRank& rank, const S& call, const Pace& lanes, bool tries)
      : r(rank),
        c(call),
        pace(lanes),
        rehearses(tries),
        thread(threadIdx.x % 32),
        chunks(c.call.chunks_of_all()),
        order(c.order()),
        x(watched(c, thread % kStreamCallRanks, thread / kStreamCallRanks)),
        knows(__all_sync(kAll, !x.of_peer || !x.comes || c.of.found[x.q] == kIsTheKeys) != 0) {
    wire = x.of_peer && !x.comes ? c.of.outs[x.q] : Wire{};
    at.found = x.of_peer ? c.of.credits[x.q] : 0;
    if (x.of_peer && !x.comes) at.begin(c, x, wire, 0);
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      needs[hop] = __ballot_sync(kAll, x.of_peer && x.hop == hop);
    }
    last = asked = begun = global_ns();
    sends = x.of_peer && x.watch == kRoomToSend;
    if (c.is_carried()) carrying.begin(r, c, x.q, sends, rehearses);
    may_ask = x.of_peer && !x.comes && c.into_output(x.hop);
    asking = Asking{may_ask && !(carrying.on && sends)};
  }

  // Looks at what this thread watches. Whether it has found what is none of ours.
  __device__ __forceinline__ bool look(std::uint32_t round) {
    bool news = false, strange = false;
    const std::uint64_t pace_word = pace.look(thread);
    const std::uint64_t invitation = asking.look(wire, round);
    if (round == (knows ? 0 : 1)) {
      strange = !find_incoming(c, x, wire);
      if (x.of_peer && x.comes && !strange) at.begin(c, x, wire, 0);
    }
    if (x.of_peer && at.k < chunks && !stops && !strange && (knows || round != 0 || !x.comes)) {
      // Acquire: the payload is read, or the slot overwritten, behind it. (What was consumed is
      // known in the first round.)
      if (round != 0 || x.comes) at.found = load_acquire(*at.word);
      const std::uint32_t taken = x.hop == kGathers ? done[kGathers] : done[kCollects];
      const Seen seen = look_at_watch(c, x, wire, taken, asking.straight, at);
      news = seen == Seen::kNews;
      strange = seen == Seen::kStrange;
    }
    asking.hear(c, x.q, x.hop, invitation);
    moved = __any_sync(kAll, news) != 0 || moved;
    __syncwarp();  // what any thread has acquired, for all
    const std::uint32_t slowest_before = slowest;
    slowest = pace.slowest(pace_word);
    moved = moved || slowest != slowest_before;
    return strange;
  }

  // While copy engines move slices: how many they have moved; and takes the rest back if need be.
  __device__ __forceinline__ void see_to_copies() {
    const std::uint32_t d = carrying.look(r, c, x.q);
    if (thread == 0) CudaDev::store_block(c.s.carried, d);
    __syncwarp();
    // Without pool slots nothing can be posted. (Who is late is alike in all threads, but for
    // the clock: one says it.)
    const std::uint32_t borrowed = CudaDev::load_block(c.s.borrowed[x.q]);
    const bool none = sends && borrowed != kNotYet && c.slots_carried(borrowed) == 0;
    const bool late = thread == 0 && carrying.is_late(r, d, next[kSends]);
    if (__any_sync(kAll, none || late) == 0) return;
    carrying.take_back(r, c, x.q, d, next[kSends]);
    done[kSends] = next[kSends] = d;
    if (sends) {
      // (Through other slots, so there may be no room yet.)
      at.k = d;
      at.step = wire.count + slice_watched(c, x.watch, d);
      asking.asks = may_ask;
    }
  }

  // Calls all_there() as soon as this lane waits for nobody any more.
  template <class AllThere>
  __device__ __forceinline__ void make_sure(AllThere& all_there) {
    if (sure || stops || carrying.on || __all_sync(kAll, !x.of_peer || at.k == chunks) == 0) return;
    // all_there() waits for the stream: not while that would keep slices from movers.
    bool may_wait = true;
#pragma unroll
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      may_wait = may_wait && (!c.has(hop) || next[hop] == chunks || next[hop] >= kGivenBeforeWait);
    }
    if (!may_wait) return;
    sure = true;
    if (thread == 0) all_there();
    __syncwarp();
  }

  // Whether the hop's slice n may be given to movers, or be posted; d of the hop are moved.
  __device__ __forceinline__ bool may_give(std::uint32_t hop, std::uint32_t n, std::uint32_t d,
                                           std::uint32_t there, bool is_carried) const {
    const std::uint32_t in_hand = is_carried ? kCopyPostsOfLane : c.in_hand(hop);
    if (n == chunks || n == d + in_hand || (needs[hop] & ~there) != 0 || stops) return false;
    if (!sure && !LanePacing::may_begin(n, slowest)) return false;
    // (What copy engines move may be far ahead: they are not what reads it.)
    if (hop == kSends && !is_carried && !order.is_wanted_soon(n, done[kGathers])) return false;
    return hop != kGathers || c.may_gather(n, done[kSends], done[kCollects]);
  }

  // Of each hop: counts what was moved, and gives out the next slice if that may be.
  // over: all is moved. Returns whether somebody has a slice in hand.
  __device__ __forceinline__ bool give(bool& over) {
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
        __syncwarp();  // as in look()
      }
      const std::uint32_t n = next[hop];
      const std::uint32_t there = __ballot_sync(kAll, at.k > n);
      over = over && d == chunks;
      holds = holds || d != n;
      if (!rehearses) {
        const bool is_carried = hop == kSends && carrying.on;
        if (!may_give(hop, n, d, there, is_carried)) continue;
        if (is_carried) {
          carrying.post(r, c, x.q, n);
          next[hop] = n + 1;
          holds = true;
          continue;
        }
      }
      const std::uint32_t by_movers = n - c.moved_from(hop);
      hand_out(c, hop, n, c.descriptions().at(hop, by_movers), by_movers, thread);
      next[hop] = n + 1;
      holds = true;
    }
    return holds;
  }

  // Now and then: whether this thread finds that no more is to be waited for.
  template <class Interrupted>
  __device__ __forceinline__ bool gives_up(Interrupted& interrupted, std::uint32_t round,
                                           bool holds) {
    // (What movers have in hand does not wait for anybody.)
    const std::uint64_t now = global_ns();
    if (moved || holds) last = now;
    moved = false;
    const bool impatient = now - last >= c.call.patience_ns;
    const bool first = c.transport.lane == 0;
    const bool asks_host =
        (now - last > kStillNs && now - asked > (first ? kStillNs : kSeldomNs)) ||
        (first && round % (8 * kRoundsApart) == kRoundsApart - 1);
    if (asks_host) asked = now;
    if (thread != 0 || impatient) return impatient;
    return interrupted(now, begun, asks_host);
  }

  // For the next call, and for movers.
  __device__ __forceinline__ void close() {
    const bool only_results = !has_member(c.call.steps.sends_to, x.q);
    if (x.of_peer && x.watch == (only_results ? kRoomForResult : kRoomToSend)) {
      c.of.credits[x.q] = at.found;
    }
    if (thread == 0) CudaDev::store_block(c.s.closed, 1u);
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
template <class S, class Interrupted, class AllThere>
__device__ __forceinline__ bool steer(CudaRank& r, const S& c, Interrupted interrupted,
                                      AllThere all_there, Pace pace = {}, bool rehearses = false,
                                      bool may_be_sure = false) {
  constexpr std::uint32_t kAll = 0xffffffff;
  Steering<S> of(r, c, pace, rehearses);
  bool over = false;
  for (std::uint32_t round = 0;; ++round) {
    const bool strange = of.look(round);
    if (of.carrying.on) of.see_to_copies();
    if (may_be_sure) of.make_sure(all_there);
    over = true;
    const bool holds = of.give(over);
    if (rehearses) return false;
    if (over || (of.stops && !holds)) break;
    of.stops = of.stops || __any_sync(kAll, strange) != 0;
    if (of.stops || of.sure || round % kRoundsApart != kRoundsApart - 1) continue;
    of.stops = __any_sync(kAll, of.gives_up(interrupted, round, holds)) != 0;
  }
  of.close();
  return over;
}

}  // namespace in_stream
}  // namespace unjam
