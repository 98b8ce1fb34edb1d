// What calls in streams without the engine have in common, by packets (call_by_packets.cuh) or by
// slots (call_by_slots.cuh): leases, reports, giving up (docs/internals/calls-in-streams.md). Block
// b does what the call's lane b, from StreamCall::first_lane on, has to do: it takes the lane's
// lease, looks whether all that it needs is there, moves data, tells peers, reports, and gives the
// lease back. "lane" is one of the rank's below; reports are by the call's.
//
// What a block cannot do soon it leaves to the engine, with the primitives that the lane has behind
// it (CudaRank::handed); one block serves until the call has ended. Connectors, flags and credits
// are the engine's, so one side may be here and the other in its engine. Why what is done twice
// does no harm: docs/internals/redo.md.
#pragma once

#include "device/cuda/exec/call.cuh"
#include "device/cuda/kernels/stream_call_reports.h"

namespace unjam {
namespace in_stream {

// How long a block waits for its lane's lease where its holder has nothing to do: longer than a
// daemon that is in the way takes to leave. A call that does not wait for that goes to the engine,
// which asks for the daemon that the next call finds, and so do all that follow.
inline constexpr std::uint64_t kLeaseNs = 60000;
// CudaRank::holding is a hint, and late: a driver clears its bit a pass or two behind the last
// invocation's end, which is when the next call comes. For so long it is not believed.
inline constexpr std::uint64_t kHintNs = 6000;

// Ahead of the stream's turn, see look_in_time(): how long what the call needs is waited for, and
// how long it is held, in the first place the lease. The former is about what a call that has the
// lease takes for its last slices; the latter less than others wait for the lease.
inline constexpr std::uint64_t kAheadNs = 80000, kHeldAheadNs = 40000;
static_assert(kHeldAheadNs < kLeaseNs);

// By movers: it is the stream's turn from here on.
__device__ __forceinline__ void wait_and_say_so(Shared& s) {
  wait_for_stream();
  if (hand() == 0) *static_cast<volatile std::uint32_t*>(&s.waited) = 1;
}
// By the first warp.
__device__ __forceinline__ bool has_waited(const Shared& s) {
  return __any_sync(0xffffffffu, *static_cast<const volatile std::uint32_t*>(&s.waited) != 0) != 0;
}

// ---- leases and reports, by one thread ----

__device__ __forceinline__ void ring_launcher(CudaRank& r) {
  store_system(r.link->residency.rung, 1u);
}

// After the lane's lease was given back, by a read-modify-write that acquires (`lanes`: what
// CudaRank::lanes was then): who waits in the lane, or was given to it meanwhile, was not
// announced, for the lane had a driver.
__device__ __forceinline__ void see_to_lane(CudaRank& r, const StreamCall& call, std::uint32_t lane,
                                            std::uint64_t lanes) {
  bool needy = (lanes >> (lane + 32) & 1) != 0;
  if (lane != 0) {
    // Whoever fills the mailbox then looks who drives the lane, see CudaDev::settle(): before we
    // gave it back, so this sees the mail, or behind that. (Nobody but its driver fills the first
    // lane's.)
    needy = needy || !call.mailboxes[lane].looks_empty();
  }
  if (needy) ring_launcher(r);
}

// The key may be used again, once all lanes have what they waited for. This says nothing of the
// results, which may not be stored yet: what the lanes have stored for later drivers is released
// with their leases, the call's buffers belong to its stream, and who asks for its end looks at
// `completed` or the CQ.
__device__ __forceinline__ void free_key(const CudaLaunch& launch) {
  store_relaxed_local(launch.sqe.inv.key->done, launch.sqe.inv.use + 1);
}

// Behind a fence of this thread, which is behind all that the call has stored in any lane: each of
// these is a release with it, for this device. (That is enough: what comes of the entry on the host
// is work for this device, or a look at memory of the host that the kernel has stored to, for which
// a host waits for the stream. A fence at system scope takes longer.) The entry may be seen before
// the rest; so `completed`, which belongs to the slot, and with the entry to whoever gets it next,
// only grows. `at`: place in the CQ, which is ours.
__device__ __forceinline__ void end_call(CudaRank& r, const CudaLaunch& launch, std::uint64_t at) {
  max_relaxed(r.completed[launch.slot], launch.serial);
  add_relaxed(r.calls_without_engine, 1);
  RingCq& cq = r.rank.cq;
  // As in LaneTransport::slot_of().
  const std::uint64_t i =
      at >> 32 == 0 ? static_cast<std::uint32_t>(at) % cq.capacity : at % cq.capacity;
  store_system(cq.words[i],
               (at + 1) << 24 | static_cast<std::uint64_t>(Outcome::kDone) << 16 | launch.slot);
}

// Says for the engine which lanes have how much behind them.
__device__ __forceinline__ void hand_over(CudaRank& r, const CudaLaunch& launch,
                                          std::uint64_t word) {
  const StreamCall& call = launch.call;
  HandOver* handed = r.handed + launch.slot * r.rank.num_lanes + call.first_lane;
  for (std::uint32_t l = 0; l < call.lanes; ++l) {
    const auto report = static_cast<Report>(word >> (kReportBits * l) & 3);
    // (None, or, of calls of several stages, what each lane has said itself.)
    if (report == kBegun && call.before != 0) {
      handed[l].set_primitives_done(call.before);
      handed[l].stage = Stage::kLeft;
    }
    if (report == kDone) handed[l].stage = Stage::kDone;
  }
}

// A block's call, for ReportSteps.
struct ReportingCall {
  CudaRank& r;
  const CudaLaunch& launch;
  const bool keeps = false;  // the next call's blocks from coming before this block's end
  const std::uint32_t lanes = launch.call.lanes, lane = blockIdx.x;

  __device__ __forceinline__ std::uint64_t add_report(std::uint64_t by) const {
    return fetch_add_relaxed(*launch.call.reports, by);
  }
  __device__ __forceinline__ std::uint64_t add_last_report(std::uint64_t by) const {
    return fetch_add_acq_rel(*launch.call.reports, by);
  }
  __device__ __forceinline__ std::uint64_t add_stored(std::uint64_t by) const {
    return fetch_add_relaxed(*launch.call.stored, by);
  }
  __device__ __forceinline__ void say_place(std::uint64_t by) const {
    add_relaxed(*launch.call.stored, by);
  }
  __device__ __forceinline__ void await_stored(std::uint64_t n) const {
    while (load_acquire_local(*launch.call.stored) != n) {
    }
  }
  __device__ __forceinline__ void clear() const {
    store_relaxed_local(*launch.call.reports, std::uint64_t{0});
    store_relaxed_local(*launch.call.stored, std::uint64_t{0});
  }
  __device__ __forceinline__ void fence() const { fence_local(); }
  __device__ __forceinline__ std::uint64_t take_place() const {
    return fetch_add_relaxed(r.rank.cq.tail, 1);
  }
  __device__ __forceinline__ void free_key() const { in_stream::free_key(launch); }
  __device__ __forceinline__ void let_next_begin() const {
    if (!keeps) unjam::let_next_begin();
  }
  // Others may wait for this end in their queues: whoever drives a lane looks at `readied`, and
  // with it sees that the key is free (decide(), and the fences; its acquire). Who leaves one with
  // something in it says so in CudaRank::lanes, then looks once more. So it sees this, or we see
  // that, whoever comes second in that word (both acquire and release), see CudaDev::settle().
  __device__ __forceinline__ void end(std::uint64_t at) const {
    add_relaxed(r.readied, 1);
    end_call(r, launch, at);
    const std::uint64_t word = or_lanes(r, 0);
    if ((word >> 32 & ~word) != 0) ring_launcher(r);
  }
  __device__ __forceinline__ void end_lane(std::uint64_t at) const {
    end_call(r, launch, at);  // give_back() says the rest
  }
  __device__ __forceinline__ void hand_over(std::uint64_t word) const {
    in_stream::hand_over(r, launch, word);
  }
};

// The lane's lease, which another instance has. If that has nothing to do (it is a daemon, or a
// block as this one that is just through), it soon lets go: a daemon's first lane sees that lanes
// are wanted, and all leave (CudaDev::in_the_way()). To wait for that is worth it, because a call
// that goes to the engine instead takes longer than the wait, and may leave a daemon behind that
// the next call finds. Not for long, so that whatever the holder is, nobody waits for us in vain.
inline __device__ __noinline__ bool await_lease(CudaRank& r, std::uint32_t lane) {
  const std::uint64_t begun = global_ns();
  const std::uint64_t bit = std::uint64_t{1} << lane;
  for (std::uint64_t now = begun; now - begun < kLeaseNs; now = global_ns()) {
    const bool held = load_relaxed_local(r.holding) != 0 && now - begun > kHintNs;
    if (held || CudaDev::submissions_go_on(r, now)) return false;
    store_relaxed_local(r.wanted_ns, now);
    __nanosleep(200);
    // Acquire: as below.
    if ((load_relaxed_local(r.lanes) & bit) == 0 && (or_lanes(r, bit) & bit) == 0) return true;
  }
  return false;
}

// By the first warp: the lane's lease (`leased`, of the thread that sees to it: it was taken), and
// whether the key's former invocation is complete. `patient`: waits for the lease.
__device__ __forceinline__ bool take_lane(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                          bool patient, bool& leased) {
  bool ok = true;
  if (threadIdx.x == kLeaser || threadIdx.x == kFormer) {
    // Acquire: the lane's state, and with it the key's endpoints, as the last driver left them; and
    // (a read-modify-write that changes nothing) that the key's former invocation is complete on
    // all lanes (KeyState::done).
    const bool leaser = threadIdx.x == kLeaser;
    const std::uint64_t bit = leaser ? std::uint64_t{1} << lane : 0;
    std::uint64_t& word = leaser ? r.lanes : launch.sqe.inv.key->done;
    const std::uint64_t found = fetch_or_acquire(word, bit);
    ok = leaser ? (found & bit) == 0 : found == launch.sqe.inv.use;
    if (leaser && !ok && patient) ok = await_lease(r, lane);
    leased = leaser && ok;
  }
  const bool all = __all_sync(0xffffffffu, ok) != 0;
  __syncwarp();  // all are behind what was acquired
  return all;
}

// The host has said something since the rank began: whether it was about this call. If so the
// engine must know, too: of a call that has nothing left to do it looks once only.
inline __device__ __noinline__ bool is_call_cancelled(CudaRank& r, const CudaLaunch& launch,
                                                      std::uint32_t attention) {
  LeavingSteps::tell_lanes(r, attention);
  return is_cancelled(r, launch.slot, launch.sqe.members, launch.sqe.inv.group_size);
}

// What a lane of a call does last. When all its threads have what they waited for:
//   first warp   tell_peers(): endpoints, credits, pokes
//   the others   store what they have kept; kCounter counts; kCaller reports, and decides
// and behind the next barrier, each behind a fence of its own:
//   kCaller      say_how_far(): what follows from the reports
//   kLast        give_back(): the lease
// (A stream's lane that is done: its first warp reports, decides, tells and counts, and who
// publishes pokes, in front of one barrier, see run_by_slots().) A driver that has the lease
// behind us is behind our credits, too: it stores later ones to the same words later.
inline constexpr std::uint32_t kCaller = 32, kLast = 64, kCounter = 96, kListener = 96;
static_assert(kLeastThreads > kCounter);

// By one thread, behind a barrier behind all that the block has done in the lane. `done`: so is the
// lane.
__device__ __forceinline__ void give_back(CudaRank& r, const StreamCall& call, std::uint32_t lane,
                                          bool done) {
  const std::uint64_t bit = std::uint64_t{1} << lane;
  const bool single = call.lanes == 1;
  // Release, with what follows: the lane's state, also what peers are told; and, of a call of one
  // lane, that its key may be used again. Acquire: see_to_lane().
  fence_local();
  std::uint64_t lanes = fetch_and_acquire(r.lanes, ~bit);
  if (!single || !done) return see_to_lane(r, call, lane, lanes);
  // Others may wait for the call's end in their queues. Who leaves a lane with something in it says
  // so in CudaRank::lanes, then looks at `readied`; who takes one acquires that word. So if nobody
  // drives another lane and nothing was left in one as this one is given back, nobody needs to hear
  // of it: who comes later sees the end.
  if ((lanes & ~bit) != 0) {
    // As ReportingCall::end().
    add_relaxed(r.readied, 1);
    lanes = or_lanes(r, 0);
  }
  // Left with something, with nobody there; or so while we drove it.
  const std::uint32_t driven = static_cast<std::uint32_t>(lanes) & ~static_cast<std::uint32_t>(bit);
  if ((static_cast<std::uint32_t>(lanes >> 32) & ~driven) != 0) return ring_launcher(r);
  see_to_lane(r, call, lane, lanes);
}

// By all threads, as run_by_packets() returns: something that the block needs is not there.
__device__ __forceinline__ bool leave_untried(CudaRank& r, const CudaLaunch& launch,
                                              std::uint32_t lane, bool leased, Shared& s) {
  const StreamCall& call = launch.call;
  if (threadIdx.x == kLeaser) {
    if (leased) see_to_lane(r, call, lane, clear_lanes(r, std::uint64_t{1} << lane));
    const ReportingCall reporting{r, launch};
    const std::uint64_t word = ReportSteps::give_up(reporting, kUntried);
    if (word != 0) ReportSteps::bring_to_engine(reporting, word, false);
    s.serves = word != 0 ? 1 : 0;
  }
  sync_block();
  return s.serves != 0;
}

// By all threads, as soon as it is known whether the lane is done. For finish(), which it is told.
__device__ __forceinline__ Ending begin_end(CudaRank& r, const CudaLaunch& launch, bool done) {
  if (threadIdx.x != kCaller || !done) return {};
  return ReportSteps::begin_end(ReportingCall{r, launch});
}

// The same, and what finish() decides, by one thread of a lane that waits for no peer any more,
// while the block is still busy with its end. So the next call's blocks come meanwhile, unless it
// keeps them. keeps(): is looked at while the report is under way; of a call of one lane it is not.
template <class Keeps>
__device__ __forceinline__ Ending report_early(CudaRank& r, const CudaLaunch& launch, Shared& s,
                                               Keeps keeps) {
  Ending ending = ReportSteps::begin_end(ReportingCall{r, launch});
  const ReportingCall reporting{r, launch, keeps()};
  s.serves = ReportSteps::decide(reporting, ending) ? 1 : 0;
  return ending;
}

// By one thread, behind a barrier behind all that the block has done. `serves`: decide()'s. True:
// this block serves.
__device__ __forceinline__ bool say_how_far(const ReportingCall& call, bool done, Ending ending,
                                            bool serves) {
  if (!done) {
    ending.reports = ReportSteps::give_up(call, kBegun);
    serves = ending.reports != 0;
  }
  if (serves) {
    ReportSteps::bring_to_engine(call, ending.reports, done);
  } else if (done) {
    ReportSteps::finish_lane(call, ending);
  }
  return serves;
}

// The last of it, by all threads, behind a barrier behind all that the block has done. True: it
// goes on to serve.
__device__ __forceinline__ bool leave(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                      bool done, Ending& ending, Shared& s) {
  // Of a lane that is done it is known here. A block that does not serve leaves, each of its
  // threads when it is through.
  const bool serves = done && s.serves != 0;
  if (threadIdx.x == kCaller) {
    const bool says = say_how_far(ReportingCall{r, launch}, done, ending, serves);
    if (!done) s.serves = says ? 1 : 0;
  }
  if (threadIdx.x == kLast) give_back(r, launch.call, lane, done);
  if (done && !serves) return false;
  sync_block();
  return s.serves != 0;
}

// The end of a block's part of a call, by all threads, behind all that each has done.
// count(stats): adds to the lane's figures, which are its driver's. True: it goes on to serve.
template <class Count>
__device__ __forceinline__ bool finish(CudaRank& r, const CudaLaunch& launch, std::uint32_t lane,
                                       bool done, Ending& ending, Shared& s, Count count) {
  if (threadIdx.x == kCounter) count(r.rank.lanes[lane].stats);
  if (threadIdx.x == kCaller && done) {
    s.serves = ReportSteps::decide(ReportingCall{r, launch}, ending) ? 1 : 0;
  }
  sync_block();
  return leave(r, launch, lane, done, ending, s);
}

// By the first warp: take_lane() and look(), and the wait for the stream's turn, in which most of
// that passes: what the call needs is usually held by the call in front of it, which lets go of it
// as it ends. Touched are unjam's own words alone, each with the acquire that it wants anyhow.
// What is in front may also be anybody's kernel, which has let us begin early and then runs on, or
// even waits for something that wants this lane. So ahead of its turn this call waits for nothing
// for long, and holds the lease only with all else that it needs, and not for long either. (A
// `close` one, see OverlapRule, begins as soon as it has both.)
// looks(patient): look(), or what another kind of call looks at.
enum class Looked : std::uint32_t { kInVain, kAhead, kStreamReached };
template <class Looks>
__device__ __forceinline__ Looked look_in_time(CudaRank& r, const CudaLaunch& launch,
                                               std::uint32_t lane, bool& leased, const Shared& s,
                                               bool close, Looks looks) {
  constexpr std::uint32_t kAll = 0xffffffff;
  const std::uint64_t begun = global_ns();
  const auto let_go = [&] {
    if (leased) see_to_lane(r, launch.call, lane, clear_lanes(r, std::uint64_t{1} << lane));
    leased = false;
    __syncwarp();
  };
  for (bool ahead = true;;) {
    const bool taken = take_lane(r, launch, lane, !ahead, leased);
    const bool ok = taken && looks(!ahead);
    if (!ahead) return ok ? Looked::kStreamReached : Looked::kInVain;
    if (ok && close) return Looked::kAhead;
    if (!ok) let_go();
    const std::uint64_t since = ok ? global_ns() : begun, longest = ok ? kHeldAheadNs : kAheadNs;
    bool reached = has_waited(s), again = false;
    // (Of a close call nobody says that its turn has come.)
    const bool waits_there = close && taken;
    while (!reached && !again && !waits_there) {
      if (__any_sync(kAll, global_ns() - since > longest) != 0) break;
      if (!taken) {
        // Whether another try is worth it.
        __nanosleep(50);
        bool there = true;
        if (threadIdx.x == kLeaser) {
          there = (load_relaxed_local(r.lanes) >> lane & 1) == 0;
        } else if (threadIdx.x == kFormer) {
          there = load_relaxed_local(launch.sqe.inv.key->done) == launch.sqe.inv.use;
        }
        again = __all_sync(kAll, there) != 0;
      }
      reached = has_waited(s);
    }
    if (again) continue;
    if (ok && !reached) let_go();
    wait_for_stream();
    if (ok && reached) return Looked::kStreamReached;
    ahead = false;
  }
}

// By all threads, first: what owes nothing to the stream. Ends with a barrier; the wait for the
// stream's turn comes behind it. Returns, to kListener, what the host has said
// (CudaLink::attention), for one lane: that is enough to send a call to the engine, which knows
// what to do about cancellations. (It takes a while, over PCIe.)
__device__ __forceinline__ std::uint32_t approach(CudaRank& r, const CudaLaunch& launch,
                                                  const Stretch& w, std::uint32_t lane, Shared& s) {
  const StreamCall& call = launch.call;
  std::uint32_t attention = 0;
  if (threadIdx.x == 0) s.hopeless = s.serves = s.waited = 0;
  if (threadIdx.x < 2 * kStreamCallRanks) {
    const Member m = member_of(call, w);
    if (m.q < call.places) find_way(endpoint_of(call, m, lane));
  }
  if (threadIdx.x == kListener && blockIdx.x == 0) attention = load_relaxed(*call.attention);
  if (threadIdx.x == kLeaser) find_way(&r.lanes);
  if (threadIdx.x == kFormer) find_way(&launch.sqe.inv.key->done);
  sync_block();
  return attention;
}

}  // namespace in_stream
}  // namespace unjam
