// As call_in_stream.cuh, for what is too large for packets: what plan/lower.cc gives to slots,
// moved as exec/slots/calls.cuh has it. Before its stream has come to it all is set up, and its
// beginning rehearsed; a call that is close to the one in front even begins
// (docs/internals/neighbouring-calls.md).
//
// Giving up. Only the first warp waits for peers; all others wait for it, and it ends. It stops
// when nothing has come for StreamCall::patience_ns; for others that want lanes, after kTurnNs; if
// another lane of the call has given up; or if the host says something. Then the engine goes on,
// with what hops have behind them (CudaRank::handed). Before it has accepted the call, connectors
// may be taken over whose slices peers have taken; what is left goes through the next ones.
#pragma once

#include "device/cuda/exec/slots/count.cuh"
#include "device/cuda/exec/slots/move.cuh"
#include "device/cuda/exec/slots/publish.cuh"
#include "device/cuda/exec/slots/steer.cuh"
#include "device/cuda/kernels/call_in_stream.cuh"
#include "device/cuda/kernels/launch_sequence.cuh"

namespace unjam {
namespace in_stream {

// See linger(): how long the next call's blocks take to come; and at most.
inline constexpr std::uint64_t kLingerNs = 4000, kLongestLingerNs = 50000;
// The same of who keeps them: until all others have left, who linger as well.
inline constexpr std::uint64_t kKeepNs = 2 * kLingerNs, kLongestKeepNs = 200000;
// Chunks of a chain from which on it matters where its blocks lie.
inline constexpr std::uint32_t kLeastKeepingChunks = 16;

// Of the first warp, a thread that sees to no member: counts what a call that is done has moved.
inline constexpr std::uint32_t kSlotCounter = 24;
static_assert(kSlotCounter >= kStreamCallRanks * kNobody && kSlotCounter < 32);

struct SlotRunShared {
  SlotShared slots;
  SlotCallState call;
  std::uint32_t said;    // by the host, see approach()
  std::uint32_t looked;  // the first warp has, and begins if all that it needs is there
  // It keeps the next call's blocks from coming before this one's end: ClusterPlacement.
  std::uint32_t keeps;
  std::uint32_t done;  // all will be moved, and the call was not cancelled. Then report_early()'s:
  std::uint64_t reports, at;
};
// The call's, and one to rehearse in.
static_assert(2 * sizeof(SlotRunShared) <= sizeof(BlockShared));

// Whether somebody waits for lanes that calls in streams have: a call that could not begin, one
// that has gone to the engine, or a daemon with what the host has submitted (over PCIe).
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
  if (any_gave_up(load_relaxed_local(*launch.call.reports))) return true;
  if (now - begun > kTurnNs && others_want_lanes(r, now, asks_host)) return true;
  if (asks_host) CudaDev::read_attention(r);
  return load_relaxed_local(r.attention) != attention;
}

// ---- the block ----

// By the first warp: what look() does, for connectors that carry slots. Whether what comes in is
// still the key's is looked at later, see steer(), if there is something to send first.
template <class S>
__device__ __forceinline__ bool look_at_wires(CudaRank& r, const S& c, const Stretch& w) {
  const StreamCall& call = c.call;
  const LaneTransport& t = c.transport;
  SlotShared& s = c.s;
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
template <class S>
__device__ __forceinline__ void set_up(const S& c) {
  SlotShared& s = c.s;
  if (threadIdx.x < 64) {
    const std::uint32_t i = threadIdx.x - 32;
    if (i < c.call.places) c.of.parts[i] = c.stretch_of(i);
    if (i < kStreamCallRanks) {
      s.borrowed[i] = kNotYet;
      c.of.found[i] = kNotLooked;
      c.of.invited[i] = nullptr;
      c.of.straight[i] = kNoSlice;
    }
    if (i < kSlotSteps * kInHand) s.stored[i] = 0;
    if (i < kGroups) s.costs[i] = s.given[i] = 0;
    if (i == 0) {
      s.closed = 0;
      set_up_carried(c, true);
    }
  } else if (threadIdx.x < 64 + kSlotSteps * kInHand) {
    const std::uint32_t i = threadIdx.x - 64;
    describe_hop(c, c.hop_of_description(i), s.jobs[i]);
  }
}

// A description that a rehearsal leaves alone.
inline constexpr std::uint32_t kEmptyJob = 1;
static_assert(kEmptyJob < kInHand && kEmptyJob < kInHandOfOne);
// By a warp, for a rehearsal in `c`: what a first round depends on.
template <class S>
__device__ __forceinline__ void set_up_rehearsal(const S& c) {
  const std::uint32_t i = threadIdx.x % 32;
  if (i < kStreamCallRanks) {
    c.of.parts[i] = {0, c.inv.geometry.chunk};
    c.of.found[i] = kNotLooked;
    c.of.invited[i] = nullptr;
    c.s.borrowed[i] = kNotYet;
  }
  if (i == 0) {
    describe_hop(c, c.hop_of_description(kEmptyJob), c.s.jobs[kEmptyJob]);
    set_up_carried(c, false);
  }
}

// As tell_peers(), of what publish_call() has not told. By the first warp.
template <class S>
__device__ __forceinline__ void tell_ends(CudaRank& r, const S& c, const Stretch& w) {
  const Member m = member_of(c.call, w);
  tell_end(c, m);
  // (Who has published all has poked, too.)
  if (!all_moved(c)) poke_in_the_end(r, c, m);
}

// For the engine: what this lane has behind it.
template <class S>
__device__ __forceinline__ void say_done(CudaRank& r, const CudaLaunch& launch, const S& c) {
  const std::uint32_t at = launch.slot * r.rank.num_lanes + c.transport.lane;
  HandOver& handed = r.handed[at];
  handed.set_primitives_done(0);
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    if (c.has(hop)) handed.done[c.call.steps.primitives[hop]] = c.hops_behind(hop);
  }
  handed.stage = Stage::kLeft;
}

__device__ __forceinline__ bool comes_in_clusters() { return blocks_in_cluster() != 1; }
// By one thread, when all has been moved or will be: whether this block keeps the next call's. (Of
// GPUs whose SMs are numbered as ClusterPlacement has it.)
__device__ __forceinline__ bool keeps_next(CudaRank& r, const CudaLaunch& launch) {
#if __CUDA_ARCH__ < 1000
  return launch.call.steps.tuning.keeps_places &&
         launch.call.chunks_of_all() >= kLeastKeepingChunks && comes_in_clusters() &&
         r.clusters.keep(sm_of_block(), static_cast<std::uint32_t>(launch.serial));
#else
  return false;
#endif
}

// By one thread of a block that is through, and has given all back, of a chain that is close to the
// call in front and so has reported early: keeps its SM until the next call's blocks have come,
// which they may as soon as all lanes have reported. Those are dealt to SMs in clusters of which
// each should have whole TPCs, and a share of each GPC like the others'; so they do where all of
// ours are there, or none, but not where some are. (It matters where lanes end apart; those whose
// members all send to all end together.) Or, if it keeps them, until all other blocks have left,
// which is some time behind the call's end: they come behind our own.
__device__ __forceinline__ void linger(CudaRank& r, const CudaLaunch& launch, bool keeps) {
  if (!comes_in_clusters()) return;
  const auto is_over = [&] {
    if (keeps) return load_relaxed_local(r.completed[launch.slot]) >= launch.serial;
    // (Somebody's next use of the key may be over, too.)
    return load_relaxed_local(launch.sqe.inv.key->done) != launch.sqe.inv.use;
  };
  std::uint64_t end = global_ns() + (keeps ? kLongestKeepNs : kLongestLingerNs);
  for (bool over = false; global_ns() < end; __nanosleep(200)) {
    if (over || !is_over()) continue;
    over = true;
    end = global_ns() + (keeps ? kKeepNs : kLingerNs);
  }
}

// What a block's threads know as they run a call.
template <class S>
struct SlotRun {
  CudaRank& r;
  const CudaLaunch& launch;
  Shared& s;
  SlotRunShared& mine;
  const S& c;
  const S& rehearsed;  // another such, to rehearse in
  const std::uint32_t lane = blockIdx.x, warp = threadIdx.x / 32;
  const bool steers = warp == 0, publishes = warp == 1;
  const bool rehearses = warp == blockDim.x / 32 - 1;  // a warp of movers
  const Stretch w{nullptr, nullptr, 1, 1};             // it has something of every part
  bool leased = false;

  // What owes nothing to the stream.
  __device__ __forceinline__ void prepare() {
    if (threadIdx.x == 0) {
      mine.looked = mine.keeps = mine.done = 0, mine.reports = mine.at = 0;
      if (launch.call.steps.tuning.keeps_places) {
        r.clusters.note(sm_of_block(), static_cast<std::uint32_t>(launch.serial));
      }
      s.close = LaunchSequence::is_close(r, launch) ? 1 : 0;
      if (blockIdx.x == 0) LaunchSequence::say(r, launch);
    }
    if (!steers) set_up(c);
    if (rehearses) set_up_rehearsal(rehearsed);
    const std::uint32_t attention = approach(r, launch, w, lane, s);
    if (threadIdx.x == kListener) mine.said = attention;
  }

  // What the call needs, and the stream's turn, are waited for, or the turn alone.
  __device__ __forceinline__ void look() {
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
      // What this barrier is for it learns from `looked`, and from what it is given. It may be
      // late.
      arrive_apart();
    } else {
      if (!publishes) {
        with_all_registers(run_slot_leaf_cuda)(rehearsed.s.jobs[kEmptyJob], 0, 1);
      }
      if (s.close == 0) wait_and_say_so(s);
      sync_block_apart();
    }
  }

  // By one thread, as soon as it is sure that all will be moved, or, of a call that is not close to
  // the one in front, when it was.
  __device__ __forceinline__ void end() const {
    if (mine.said != 0 && is_call_cancelled(r, launch, mine.said)) return;
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
  }

  // By the first warp, and by the one that rehearses: both in one place, for what is rehearsed is
  // this code. `of`: `c`, or `rehearsed`. Whether all is moved.
  __device__ __forceinline__ bool steer_or_rehearse(const S& of) const {
    const std::uint32_t heard = load_relaxed_local(r.attention);
    const auto interrupted = [&](std::uint64_t now, std::uint64_t begun, bool asks_host) {
      return is_interrupted(r, launch, now, begun, heard, asks_host);
    };
    Pace pace;
    if (launch.call.steps.tuning.paced && steers) {
      pace = {r.paces + std::size_t{launch.slot} * r.rank.num_lanes,
              static_cast<std::uint32_t>(launch.serial), launch.call.lanes, lane};
    }
    const auto ends = [&] { end(); };
    return steer(r, of, interrupted, ends, pace, rehearses, steers && s.close != 0);
  }

  __device__ __forceinline__ static void add(std::uint64_t& figure, std::uint64_t by) {
    add_relaxed(figure, by);
  }

  // What each warp does until the call is done, or given up. `over`: the first warp has moved all.
  __device__ __forceinline__ void move_all(bool over) {
    const Member m = member_of(launch.call, w, threadIdx.x % 32);
    if (steers) {
      if (threadIdx.x == 0 && over && mine.done == 0) end();
      __syncwarp();
      if (mine.done == 0) return;
      // The publisher tells it, or has.
      tell_end(c, m, true);
      if (threadIdx.x == kSlotCounter) {
        LaneStats& stats = r.rank.lanes[lane].stats;
        count_slot_call(stats, c, {}, true, add);
        add_relaxed(stats.completed, 1);
      }
    } else if (publishes) {
      publish_call(r, c);
      if (all_moved(c)) poke_in_the_end(r, c, m);
    } else {
      move(c);
    }
  }

  // Behind a barrier behind all that. Whether this block goes on to serve.
  __device__ __forceinline__ bool leave_done() const {
    Ending ending{mine.reports, mine.at};
    const bool serves = leave(r, launch, lane, true, ending, s);
    const bool stays = launch.call.steps.tuning.keeps_places && (s.close != 0 || mine.keeps != 0);
    if (!serves && stays && threadIdx.x == 0) linger(r, launch, mine.keeps != 0);
    return serves;
  }
  __device__ __forceinline__ bool leave_to_engine() const {
    wait_for_stream();  // it may not have been its turn, and what follows lets the next call come
    if (steers) {
      tell_ends(r, c, w);
    } else if (threadIdx.x == kCaller) {
      // As in run_by_packets().
      say_done(r, launch, c);
    }
    Ending ending{mine.reports, mine.at};
    const auto count = [&](LaneStats& stats) { count_slot_call(stats, c, {}, false, add); };
    return finish(r, launch, lane, false, ending, s, count);
  }
};

}  // namespace in_stream

enum class SlotRunEnd : std::uint32_t {
  kLeaves,  // nothing is left to do for this block
  kServes,  // it brings the call to the engine
  kDrives,  // the call is for the engine, and this block drives its lane
};

// As run_by_packets(). `shared`: the engine's, which comes later. S: in_stream::SlotCall, or, of a
// call that may be carried, CarriedSlotCall.
template <class S>
__device__ __forceinline__ SlotRunEnd run_by_slots(CudaRank& r, const CudaLaunch& launch,
                                                   unsigned char* shared) {
  using namespace in_stream;
  __shared__ Shared s;
  SlotRunShared* const runs = reinterpret_cast<SlotRunShared*>(shared);
  SlotRunShared& mine = in_shared(runs[0]);
  const LaneTransport t = transport_of(launch.call, blockIdx.x);
  const auto slot_call_in = [&](SlotRunShared& x) {
    return S{launch.call, launch.sqe.inv, t, in_shared(x.slots), in_shared(x.call)};
  };
  const S c = slot_call_in(runs[0]), rehearsed = slot_call_in(runs[1]);
  SlotRun<S> run{r, launch, s, mine, c, rehearsed};

  run.prepare();
  run.look();
  bool over = false;
  if (run.rehearses || (run.steers && s.ok != 0)) {
    over = run.steer_or_rehearse(slot_call_in(runs[run.rehearses ? 1 : 0]));
  }
  if (run.rehearses) {
    if (s.close == 0) wait_for_stream();
    while (CudaDev::load_block(mine.looked) == 0) {
    }
  }
  __syncwarp();
  if (s.ok == 0) {
    return leave_untried(r, launch, run.lane, run.leased, s) ? SlotRunEnd::kServes
                                                             : SlotRunEnd::kDrives;
  }
  // While it lasts, which may be long, a daemon that wants the lanes had better wait.
  const bool counts = threadIdx.x == kLast && run.lane == 0;
  if (counts) atomicAdd(&r.waiters, 1u);
  run.move_all(over);
  sync_block();
  const bool done = mine.done != 0;
  if (counts) atomicSub(&r.waiters, 1u);
  if (done) return run.leave_done() ? SlotRunEnd::kServes : SlotRunEnd::kLeaves;
  return run.leave_to_engine() ? SlotRunEnd::kServes : SlotRunEnd::kDrives;
}

}  // namespace unjam
