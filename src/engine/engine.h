// The engine: picks an invocation, runs its primitives in two phases (spin up to a threshold, then
// give way), saves its context, runs another, and comes back (paper Sec. 4, Algorithm 1).
//
// One engine drives one lane and is executed by all threads of a block; thread 0 (the leader)
// decides, all threads move data. `Dev` is what differs between devices (see device/host/):
//   thread(), sync()                     the block
//   leaf(job)                            the data leaf of a slice, by all threads
//   packets_ready(job, polls)            only if kInlinePacketFlags: all threads vote
//   relax(polls), delay()                between failed polls; fault injection before waits
//   now_ns()                             for residency and traces
//   wake(rank, lane, who)                a ring went to a sleeping lane
//   notify_host()                        a CQE was written
//   try_quit(epoch, interest)            true: this engine is no longer resident, leave
//   called_away()                        leave soon: whoever runs this engine has something to do
//   threshold(polls)                     polls to grant where the policy grants so many
//   hold_sleep(epoch)                    hold policy: sleep without leaving
//   residency_matters()                  whether to leave after EnginePolicy::residency_us
//
// No wait is without a threshold: every poll loop is in wait_ready(), which counts polls. A wait
// that fails has changed nothing (connector.h), so preemption needs no undo. "Progress" is data
// moved or an invocation ended, never a wait that succeeded in part.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "engine/doorbell.h"
#include "engine/state.h"

namespace unjam {

template <class Dev>
class Engine {
 public:
  // A reference or a value, as the device likes.
  using DevHandle = typename Dev::Handle;

  // Runs until the lane can do nothing (or was told to stop, or has stayed its time). By all
  // threads of the block. Nothing but the arguments lives across the leaf, so that it has the
  // registers to itself: what the leader needs is in `shared`.
  UNJAM_HD static void run(DevHandle dev, RankState& rank, std::uint32_t lane,
                           BlockShared& shared) {
    const bool leader = dev.thread() == 0;
    if (leader) start(dev, rank, lane, shared);
    for (;;) {
      if (leader) decide(dev, rank, lane, shared);
      dev.sync();
      if (shared.quits) break;
      if constexpr (Dev::kInlinePacketFlags) {
        // The vote is a barrier: nobody reads the job any more when the leader goes on.
        if (shared.job.protocol == Protocol::kPacket &&
            !dev.packets_ready(shared.job, shared.threshold)) {
          if (leader) packets_missing(dev, rank, lane, shared);
          continue;
        }
      }
      dev.leaf(shared.job);
      dev.sync();  // the whole slice is stored before the leader publishes it
      if (leader) publish(dev, rank, lane, shared);
    }
    if (leader) leave(dev, rank, lane, shared);
    dev.sync();
  }

 private:
  UNJAM_HD Engine(DevHandle dev, RankState& rank, std::uint32_t lane, BlockShared& shared)
      : dev_(dev), rank_(rank), lane_(rank.lanes[lane]), lane_index_(lane), s_(shared) {}

  // The leader's phases.
  UNJAM_HD_NOINLINE static void start(DevHandle dev, RankState& rank, std::uint32_t lane,
                                      BlockShared& shared) {
    Engine(dev, rank, lane, shared).start();
  }
  UNJAM_HD_NOINLINE static void decide(DevHandle dev, RankState& rank, std::uint32_t lane,
                                       BlockShared& shared) {
    Engine(dev, rank, lane, shared).decide();
  }
  UNJAM_HD_NOINLINE static void publish(DevHandle dev, RankState& rank, std::uint32_t lane,
                                        BlockShared& shared) {
    Engine(dev, rank, lane, shared).publish();
  }
  UNJAM_HD_NOINLINE static void packets_missing(DevHandle dev, RankState& rank, std::uint32_t lane,
                                                BlockShared& shared) {
    Engine(dev, rank, lane, shared).packets_missing();
  }
  UNJAM_HD_NOINLINE static void leave(DevHandle dev, RankState& rank, std::uint32_t lane,
                                      BlockShared& shared) {
    Engine(dev, rank, lane, shared).leave();
  }

  enum Command : std::uint32_t { kRun, kQuit };
  static constexpr std::uint32_t kLatePasses = 6;
  enum Status : std::uint32_t { kMove, kBlocked, kFinished, kCancelledNow, kQuantumOver };

  // ---- scheduling (leader only) ----

  UNJAM_HD void start() {
    s_.slot = s_.cursor = kNoSlot;
    s_.idle = s_.late = 0;
    s_.moved = s_.wants_room = s_.pass_begun = s_.in_turn = s_.quits = false;
    s_.ran = s_.quantum_over = false;
    s_.started_ns = dev_.now_ns();
    bump(lane_.stats.starts);
    record(TraceType::kRestart, nullptr);
  }

  // Saves every active context: nothing of the progress may be lost with the block.
  UNJAM_HD void leave() {
    for (ActiveContext& a : lane_.active) save(a);
    bump(lane_.stats.quits);
    record(TraceType::kQuit, nullptr);
  }

  UNJAM_HD std::uint32_t next_command() {
    for (;;) {
      if (load_acquire(rank_.stop) != 0) return kQuit;
      if (lane_index_ == 0) hand_on_submissions();
      if (s_.cursor == kNoSlot || !s_.pass_begun) {
        if (s_.pass_begun && !end_pass()) return kQuit;
        begin_pass();
        if (s_.cursor == kNoSlot) {
          // Nothing queued: the (empty) pass is over at once.
          continue;
        }
      }
      const std::uint16_t slot = s_.cursor;
      s_.cursor = lane_.queue.next(slot);
      if (load_acquire(rank_.cancelled[slot]) != 0) {
        finish(slot, Outcome::kCancelled);
        continue;
      }
      const Invocation& inv = rank_.invocations[slot];
      // Acquire: the key's former invocation is complete on all lanes, its buffers are ours.
      if (load_acquire(inv.key->done) != inv.n) continue;
      s_.slot = slot;
      s_.ran = true;
      if (holds()) s_.cursor = kNoSlot;  // one at a time: the first that may run
      s_.threshold = dev_.threshold(rank_.policy.initial_threshold(s_.position++));
      return kRun;
    }
  }

  UNJAM_HD void begin_pass() {
    s_.pass_begun = true;
    s_.moved = s_.wants_room = s_.ran = s_.quantum_over = false;
    s_.position = 0;
    // Before the look that the pass is, see doorbell.h.
    s_.epoch = doorbell_epoch(my_cell().doorbell);
    if (rank_.policy.order == OrderPolicy::kPriority) {
      while (fetch()) {
      }
    }
    s_.cursor = lane_.queue.head();
    bump(lane_.stats.passes);
  }

  // False: quit.
  UNJAM_HD bool end_pass() {
    // FIFO order aims to empty the queue: it fetches only when nothing in it moves, or when what
    // moves has had its quantum (a small newcomer does not sit behind a gigabyte).
    const bool fetched = (lane_.queue.empty() || !s_.moved || s_.quantum_over) && fetch();
    if (s_.moved || fetched) {
      s_.idle = 0;
    } else if (s_.idle < 0xffff) {
      ++s_.idle;
    }
    if (holds() && !lane_.queue.empty()) {
      if (!s_.ran && !fetched) dev_.hold_sleep(s_.epoch);  // other lanes are not yet as far
      return true;
    }
    if (dev_.called_away()) {
      // A few passes more often end in a rest, which needs nobody to take over.
      if (!s_.moved && !fetched && rest()) return false;
      return s_.late++ < kLatePasses;
    }
    // Only here: a stay that ended within a pass would begin the next one at the head again, and
    // who stands behind what takes all the time would never get a turn.
    if (over_residency()) {
      bump(lane_.stats.residency_quits);
      return false;
    }
    return s_.idle < rank_.policy.idle_passes || !rest();
  }

  // True: asleep. What peers do concerns a lane only if it has something pending.
  UNJAM_HD bool rest() {
    if (!lane_.mailbox.empty()) return false;
    std::uint32_t interest = 0;
    if (!lane_.queue.empty()) interest = kAsleepForData | (s_.wants_room ? kAsleepForRoom : 0u);
    return dev_.try_quit(s_.epoch, interest);
  }

  // The first lane reads the SQ and hands each entry on through device memory.
  UNJAM_HD void hand_on_submissions() {
    Sqe sqe;
    while (rank_.sq.pop(sqe)) {
      const std::uint16_t slot = sqe.inv.slot;
      rank_.invocations[slot] = sqe.inv;
      const Geometry& g = sqe.inv.geometry;
      store_relaxed<std::uint32_t>(rank_.remaining[slot], g.lanes);
      for (std::uint32_t l = g.first_lane; l < std::uint32_t{g.first_lane} + g.lanes; ++l) {
        rank_.lanes[l].mailbox.push(slot);  // release: publishes the context and the countdown
        if (l != lane_index_) ring(lane_.transport.rank, l, RingFor::kWork);
      }
    }
  }

  UNJAM_HD bool fetch() {
    std::uint16_t slot = kNoSlot;
    if (!lane_.mailbox.pop(slot)) return false;
    const Invocation& inv = rank_.invocations[slot];
    if (inv.key == nullptr) {
      release_keys(slot);
      return true;
    }
    lane_.contexts[slot] = DynamicContext{};
    lane_.contexts[slot].started_ns = dev_.now_ns();
    ActiveContext& a = lane_.active[slot % kActiveContexts];
    if (a.slot == slot) a.slot = kNoSlot;  // of the slot's former user
    ++inv.key->lanes[lane_index_].in_queue;
    if (rank_.policy.order == OrderPolicy::kPriority) {
      lane_.queue.push_by_priority(slot, inv.priority);
    } else {
      lane_.queue.push_back(slot, inv.priority);
    }
    if (lane_.queue.size() > lane_.stats.queue_peak) {
      store_relaxed<std::uint64_t>(lane_.stats.queue_peak, lane_.queue.size());
    }
    return true;
  }

  // Lets go of keys that the runtime forgets: of their endpoints (ConnectorOwner is the one place
  // where pointers into a key outlast its invocations) and of what peers have sent under them.
  UNJAM_HD_NOINLINE void release_keys(std::uint16_t slot) {
    const Invocation& inv = rank_.invocations[slot];
    LaneTransport& t = lane_.transport;
    for (std::uint64_t i = 0; i < inv.n; ++i) {
      const KeyRelease& r = static_cast<const KeyRelease*>(inv.input)[i];
      for (std::uint32_t q = 0; q < r.group_size; ++q) {
        const std::uint32_t peer = r.members[q];
        if (peer == t.rank) continue;
        if (r.void_tag != 0) t.mark_void(peer, r.void_tag);
        if (r.lanes != nullptr) {
          t.release(peer, r.lanes[lane_index_].out[q], (r.settled >> q & 1) != 0);
        }
      }
    }
    if (fetch_add<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) != 1) return;
    rank_.cq.push({slot, Outcome::kDone});
    dev_.notify_host();
  }

  // ---- contexts (leader only) ----

  UNJAM_HD ActiveContext& load(std::uint16_t slot) {
    ActiveContext& a = lane_.active[slot % kActiveContexts];
    if (a.slot != slot) {
      save(a);
      a.inv = rank_.invocations[slot];
      a.dyn = lane_.contexts[slot];
      a.loops = a.inv.geometry.loops(lane_index_);
      a.slot = slot;
      a.dirty = 0;
      bump(lane_.stats.context_loads);
    }
    if (a.dyn.attempts != 0xffffffffu) ++a.dyn.attempts;
    return a;
  }

  // Lazy: only what has progressed.
  UNJAM_HD void save(ActiveContext& a) {
    if (a.slot == kNoSlot || a.dirty == 0) return;
    lane_.contexts[a.slot] = a.dyn;
    a.dirty = 0;
    bump(lane_.stats.context_saves);
  }

  // ---- turns ----

  // Finds the next slice that can be moved, across invocations; or that there is none, and quits.
  UNJAM_HD void decide() {
    for (;;) {
      if (!s_.in_turn) {
        if (next_command() == kQuit) {
          s_.quits = true;
          return;
        }
        begin_turn();
      }
      s_.status = prepare(active());
      if (s_.status == kMove) return;
      end_turn(active());
    }
  }

  UNJAM_HD void begin_turn() {
    ActiveContext& a = load(s_.slot);
    set_running(s_.slot);
    record(TraceType::kStart, &a.inv);
    s_.quantum = rank_.policy.quantum_slices;
    s_.in_turn = true;
  }

  UNJAM_HD void packets_missing() {
    s_.missing = kSomePeer;  // the vote does not tell
    note_lack(active(), false);
    s_.status = give_way(active(), s_.threshold);
    end_turn(active());
  }

  UNJAM_HD ActiveContext& active() { return lane_.active[s_.slot % kActiveContexts]; }

  UNJAM_HD void end_turn(ActiveContext& a) {
    s_.in_turn = false;
    set_running(kNoSlot);
    switch (s_.status) {
      case kFinished:
        finish(a.slot, Outcome::kDone);
        break;
      case kCancelledNow:
        finish(a.slot, Outcome::kCancelled);
        break;
      case kQuantumOver:
        bump(lane_.stats.quantum_switches);
        record(TraceType::kYield, &a.inv);
        s_.quantum_over = true;
        // By priority, a new pass begins: it fetches, and starts at the head.
        if (rank_.policy.order == OrderPolicy::kPriority) s_.cursor = kNoSlot;
        break;
      default:
        record(TraceType::kPreempt, &a.inv);
        break;
    }
  }

  // Finds the next slice and waits for it; fills s_.job.
  UNJAM_HD std::uint32_t prepare(ActiveContext& a) {
    DynamicContext& d = a.dyn;
    const Geometry& g = a.inv.geometry;
    Range chunk;
    for (;;) {
      if (d.loop >= a.loops) return kFinished;
      s_.primitive = a.inv.program[d.primitive];
      chunk = g.chunk_range(s_.primitive.part, lane_index_, d.loop);
      if (chunk.length != 0) break;
      advance(a);
    }
    if (s_.quantum == 0) {
      if (others_wait() || over_residency()) return kQuantumOver;
      s_.quantum = rank_.policy.quantum_slices;
    }
    s_.chunk_elems = chunk.length;
    const std::uint32_t status = wait_ready(a, static_cast<std::uint32_t>(chunk.length - d.done));
    if (status == kMove) build_job(a, chunk.offset + d.done);
    return status;
  }

  UNJAM_HD bool others_wait() {
    return lane_.queue.size() > 1 || !lane_.mailbox.empty() ||
           (lane_index_ == 0 && !rank_.sq.empty());
  }
  UNJAM_HD bool over_residency() const {
    return dev_.residency_matters() &&
           dev_.now_ns() - s_.started_ns > std::uint64_t{rank_.policy.residency_us} * 1000;
  }

  // The two phases: poll up to the threshold, then give way.
  UNJAM_HD std::uint32_t wait_ready(ActiveContext& a, std::uint32_t remaining) {
    dev_.delay();
    std::uint32_t polls = 0;
    for (;;) {
      const std::uint32_t epoch = holds() ? doorbell_epoch(my_cell().doorbell) : 0;
      const bool received = receive_ready(a, remaining);
      if (received && send_ready(a)) break;
      ++polls;
      if (holds()) {
        if (load_acquire(rank_.cancelled[a.slot]) != 0) return kCancelledNow;
        if (load_acquire(rank_.stop) != 0) return give_way(a, polls);
        if (polls >= rank_.policy.spin_head) {
          note_lack(a, received);
          dev_.hold_sleep(epoch);
        }
        continue;
      }
      if (polls >= s_.threshold) {
        if (received) s_.wants_room = true;
        note_lack(a, received);
        return give_way(a, polls);
      }
      if (polls % 32 == 0 && load_acquire(rank_.cancelled[a.slot]) != 0) return kCancelledNow;
      dev_.relax(polls);
    }
    if (polls != 0) count_spins(a, polls);
    return kMove;
  }

  UNJAM_HD std::uint32_t give_way(ActiveContext& a, std::uint32_t polls) {
    count_spins(a, polls);
    bump(lane_.stats.preemptions);
    bump(a.inv.key->lanes[lane_index_].preemptions);
    return kBlocked;
  }

  // Only if it is news, so that its time is that of the first wait since something moved.
  UNJAM_HD void note_lack(ActiveContext& a, bool received) {
    const Primitive p = s_.primitive;
    const std::uint32_t peer = received              ? p.send_peer
                               : (p.flags & kGather) ? s_.missing
                                                     : p.recv_peer;
    const std::uint32_t word = lack_word(received ? Lack::kRoom : Lack::kData, peer, a.inv.n);
    std::uint64_t& place = a.inv.key->lanes[lane_index_].lack;
    if (static_cast<std::uint32_t>(load_relaxed(place)) == word) return;
    store_relaxed(place, dev_.now_ns() >> 20 << 32 | word);
  }

  UNJAM_HD bool receive_ready(ActiveContext& a, std::uint32_t remaining) {
    const Primitive p = s_.primitive;
    s_.elems = remaining;
    if (p.flags & kGather) return gather_ready(a);
    if (!(p.flags & kRecv)) return true;
    InEndpoint& in = a.inv.key->lanes[lane_index_].in[p.recv_peer];
    const std::uint32_t peer = a.inv.members[p.recv_peer];
    LaneTransport& t = lane_.transport;
    if (!t.resolve(peer, a.inv.key->tag, in)) return false;
    const std::uint32_t size = dtype_bytes(a.inv.geometry.dtype);
    if constexpr (Dev::kInlinePacketFlags) {
      if (a.inv.protocol == Protocol::kPacket) {
        s_.view = t.packet_view(peer, in, remaining * size);
        return true;  // the block votes on the flags
      }
    }
    if (!t.poll(peer, in, a.inv.seed, s_.view)) return false;
    const std::uint32_t arrived = (s_.view.bytes - a.dyn.taken) / size;
    s_.elems = arrived < remaining ? arrived : remaining;
    return true;
  }

  // A gathered chunk is one slice from every other rank (planners keep it within one slot).
  UNJAM_HD bool gather_ready(ActiveContext& a) {
    LaneTransport& t = lane_.transport;
    LaneKey& key = a.inv.key->lanes[lane_index_];
    for (std::uint32_t q = 0; q < a.inv.group_size; ++q) {
      if (q == a.inv.group_rank) continue;
      const std::uint32_t peer = a.inv.members[q];
      RecvView view;
      s_.missing = q;
      if (!t.resolve(peer, a.inv.key->tag, key.in[q])) return false;
      if constexpr (Dev::kInlinePacketFlags) {
        if (a.inv.protocol == Protocol::kPacket) {
          view = t.packet_view(peer, key.in[q], s_.elems * dtype_bytes(a.inv.geometry.dtype));
          s_.job.src[q] = view.data;
          continue;
        }
      }
      if (!t.poll(peer, key.in[q], a.inv.seed, view)) return false;
      s_.job.src[q] = view.data;
    }
    return true;
  }

  UNJAM_HD bool send_ready(ActiveContext& a) {
    const Primitive p = s_.primitive;
    if (!(p.flags & kSend)) return true;
    LaneTransport& t = lane_.transport;
    LaneKey& key = a.inv.key->lanes[lane_index_];
    OutEndpoint& out = key.out[p.send_peer];
    const std::uint32_t peer = a.inv.members[p.send_peer];
    if (out.connector == kNoConnector &&
        !t.open(peer, a.inv.key->tag, a.inv.key->group, out, &key.in_queue)) {
      bump(lane_.stats.no_connector);
      return false;
    }
    const std::uint32_t size = dtype_bytes(a.inv.geometry.dtype);
    if constexpr (Dev::kInlinePacketFlags) {
      if (a.inv.protocol == Protocol::kPacket) {
        s_.grant = t.packet_grant(peer, out);
        return s_.grant.capacity != 0;
      }
    }
    s_.grant = t.grant(peer, out, s_.elems * size);
    if (s_.grant.capacity == 0) return false;
    const std::uint32_t room = s_.grant.capacity / size;
    if (room < s_.elems) s_.elems = room;
    return true;
  }

  // offset: elements from the beginning of the whole vector.
  UNJAM_HD void build_job(const ActiveContext& a, std::uint64_t offset) {
    const Invocation& inv = a.inv;
    const Geometry& g = inv.geometry;
    const std::uint16_t flags = s_.primitive.flags;
    const std::uint32_t size = dtype_bytes(g.dtype);
    SliceJob& job = s_.job;
    unsigned char* output =
        static_cast<unsigned char*>(inv.output) + (offset - g.output_shift(inv.group_rank)) * size;
    const unsigned char* input = static_cast<const unsigned char*>(inv.input) +
                                 (offset - g.input_shift(inv.group_rank)) * size;
    const void* local = flags & kFromOutput ? output : input;
    job.elems = s_.elems;
    job.dtype = g.dtype;
    job.op = inv.op;
    job.protocol = inv.protocol;
    job.dst_user = flags & kCopy ? output : nullptr;
    job.dst_slot = flags & kSend ? s_.grant.data : nullptr;
    const bool average = inv.op == Op::kAvg && inv.group_size > 1;
    const bool scales = average && !is_integer(g.dtype) && (flags & kContribute);
    if (flags & kGather) {
      job.src[inv.group_rank] = local;
      job.num_src = inv.group_size;
      job.local_src = static_cast<std::int16_t>(inv.group_rank);
      job.scale_sources = scales ? ScaleSources::kAll : ScaleSources::kNone;
    } else {
      std::uint16_t n = 0;
      if (flags & kRecv) job.src[n++] = s_.view.data + a.dyn.taken;
      job.local_src = flags & kLocal ? static_cast<std::int16_t>(n) : std::int16_t{-1};
      if (flags & kLocal) job.src[n++] = local;
      job.num_src = n;
      job.scale_sources = scales ? ScaleSources::kLocal : ScaleSources::kNone;
    }
    job.divisor =
        average && is_integer(g.dtype) && (flags & kFinish) ? inv.group_size : std::uint32_t{1};
    job.scale = 1.0 / inv.group_size;
    if constexpr (Dev::kInlinePacketFlags) {
      if (inv.protocol == Protocol::kPacket) job.flag = packet_flag(inv.seed, a.dyn.loop);
    }
  }

  // Makes the slice visible to the peers and moves on.
  UNJAM_HD void publish() {
    ActiveContext& a = active();
    const Primitive p = s_.primitive;
    const std::uint32_t bytes = s_.elems * dtype_bytes(a.inv.geometry.dtype);
    LaneTransport& t = lane_.transport;
    LaneKey& key = a.inv.key->lanes[lane_index_];
    dev_.delay();
    if (p.flags & kSend) {
      const std::uint32_t peer = a.inv.members[p.send_peer];
      OutEndpoint& out = key.out[p.send_peer];
      bool inline_flags = false;
      if constexpr (Dev::kInlinePacketFlags) inline_flags = a.inv.protocol == Protocol::kPacket;
      if (inline_flags) {
        ++out.posted;  // the data carried their flags
      } else {
        t.post(peer, out, s_.grant, bytes, a.inv.seed);
      }
      bump<std::uint64_t>(lane_.stats.bytes_sent, bytes);
      if (s_.grant.location != 0) bump(lane_.stats.borrowed);
      ring(peer, lane_index_, RingFor::kData);
    }
    if (p.flags & kGather) {
      for (std::uint32_t q = 0; q < a.inv.group_size; ++q) {
        if (q == a.inv.group_rank) continue;
        t.consume(a.inv.members[q], key.in[q]);
        ring(a.inv.members[q], lane_index_, RingFor::kRoom);
      }
    } else if (p.flags & kRecv) {
      a.dyn.taken += bytes;
      if (a.dyn.taken == s_.view.bytes) {
        a.dyn.taken = 0;
        const std::uint32_t peer = a.inv.members[p.recv_peer];
        t.consume(peer, key.in[p.recv_peer]);
        ring(peer, lane_index_, RingFor::kRoom);
      }
    }
    a.dyn.done += s_.elems;
    if (a.dyn.done == s_.chunk_elems) {
      a.dyn.done = 0;
      advance(a);
    }
    a.dirty = 1;
    s_.moved = true;
    --s_.quantum;
    s_.threshold = dev_.threshold(rank_.policy.after_success(s_.threshold));
    bump(lane_.stats.slices);
    bump(key.slices);
    store_relaxed<std::uint64_t>(key.lack, lack_word(Lack::kNothing, 0, a.inv.n));
  }

  UNJAM_HD void advance(ActiveContext& a) {
    if (++a.dyn.primitive == a.inv.num_primitives) {
      a.dyn.primitive = 0;
      ++a.dyn.loop;
    }
    a.dirty = 1;
  }

  UNJAM_HD void finish(std::uint16_t slot, Outcome outcome) {
    const Invocation& inv = rank_.invocations[slot];
    if (outcome == Outcome::kDone) record(TraceType::kFinish, &inv);
    if (s_.cursor == slot) s_.cursor = lane_.queue.next(slot);
    lane_.queue.remove(slot);
    LaneKey& key = inv.key->lanes[lane_index_];
    --key.in_queue;
    bump<std::uint64_t>(key.time_ns, dev_.now_ns() - lane_.contexts[slot].started_ns);
    ActiveContext& a = lane_.active[slot % kActiveContexts];
    if (a.slot == slot) a.slot = kNoSlot;
    s_.moved = true;
    bump(lane_.stats.completed);
    // Acquire-release: the last lane sees, and passes on, what all lanes have stored.
    if (fetch_add<std::uint32_t>(rank_.remaining[slot], 0xffffffffu) != 1) return;
    const bool cancelled = load_acquire(rank_.cancelled[slot]) != 0;
    // A key with a cancelled invocation is finished for good: the runtime refuses further ones.
    if (!cancelled) store_release(inv.key->done, inv.n + 1);
    rank_.cq.push({slot, cancelled ? Outcome::kCancelled : Outcome::kDone});
    // Other lanes may sleep on the key's next invocation.
    for (std::uint32_t l = 0; rank_.num_lanes > 1 && l < rank_.num_lanes; ++l) {
      if (l != lane_index_) ring(lane_.transport.rank, l, RingFor::kData);
    }
    dev_.notify_host();
  }

  // ---- small things ----

  UNJAM_HD bool holds() const { return rank_.policy.stickiness == StickinessPolicy::kHold; }

  UNJAM_HD LaneCell& my_cell() {
    return lane_.transport.lane_cell(lane_.transport.rank, lane_index_);
  }

  UNJAM_HD void ring(std::uint32_t rank, std::uint32_t lane, RingFor what) {
    const Wake who = doorbell_ring(lane_.transport.lane_cell(rank, lane).doorbell, what);
    if (who != Wake::kNobody) dev_.wake(rank, lane, who);
  }

  UNJAM_HD void count_spins(ActiveContext& a, std::uint32_t polls) {
    bump<std::uint64_t>(lane_.stats.spins, polls);
    bump<std::uint64_t>(a.inv.key->lanes[lane_index_].spins, polls);
  }

  UNJAM_HD void set_running(std::uint16_t slot) {
    const std::uint64_t changes = (load_relaxed(lane_.running) >> 16) + 1;
    store_release(lane_.running, changes << 16 | static_cast<std::uint16_t>(slot + 1));
  }

  UNJAM_HD void record(TraceType type, const Invocation* inv) {
    if (lane_.trace_capacity == 0) return;
    const std::uint64_t w = lane_.trace_written;
    TraceEvent& e = lane_.trace[w % lane_.trace_capacity];
    store_relaxed(e.time_ns, dev_.now_ns());
    store_relaxed(e.tag, inv == nullptr ? std::uint64_t{0} : inv->key->tag);
    store_relaxed(e.what, (inv == nullptr ? std::uint64_t{0} : inv->n << 32) |
                              std::uint64_t{lane_index_} << 16 | static_cast<std::uint64_t>(type));
    store_release(lane_.trace_written, w + 1);
  }

  DevHandle dev_;
  RankState& rank_;
  LaneState& lane_;
  const std::uint32_t lane_index_;
  BlockShared& s_;
};

}  // namespace unjam
