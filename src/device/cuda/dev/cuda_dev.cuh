// The GPU's side of the engine's `Dev`, for one lane of one kernel instance.
//
// Which instance drives a lane is said by CudaRank::lanes; see engine.cu for how instances come
// and go. Peers are not rung (an atomic on their memory would cost more than a slice does): a
// driver looks at the connectors themselves, and a rank without one is poked through its host.
#pragma once

#include "device/cuda/dev/leaving.h"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/hardware/atomics.cuh"
#include "device/cuda/hardware/block.cuh"
#include "device/cuda/leaves/leaves.cuh"
#include "engine/engine.h"

namespace unjam {

// Whether the host has said of one of these ranks that it is gone.
__device__ __forceinline__ bool is_any_gone(const CudaLink& link, const std::uint16_t* members,
                                            std::uint32_t count) {
  static_assert(kGoneWords == 2);
  const std::uint64_t low = load_relaxed(link.gone[0]), high = load_relaxed(link.gone[1]);
  if ((low | high) == 0) return false;
  for (std::uint32_t q = 0; q < count; ++q) {
    const std::uint32_t rank = members[q];
    if (((rank < 64 ? low : high) >> rank % 64 & 1) != 0) return true;
  }
  return false;
}

// Whether the host has cancelled the call in the slot, or said that one of its members is gone.
__device__ __forceinline__ bool is_cancelled(const CudaRank& r, std::uint32_t slot,
                                             const std::uint16_t* members, std::uint32_t count) {
  return load_relaxed(r.rank.cancelled[slot]) != 0 || is_any_gone(*r.link, members, count);
}

// CudaRank::lanes. Both return what was there before, and acquire and release.
__device__ __forceinline__ std::uint64_t or_lanes(CudaRank& r, std::uint64_t bits) {
  return LocalAtomicRef<std::uint64_t>(r.lanes).fetch_or(bits, kAcqRel);
}
__device__ __forceinline__ std::uint64_t clear_lanes(CudaRank& r, std::uint64_t bits) {
  return LocalAtomicRef<std::uint64_t>(r.lanes).fetch_and(~bits, kAcqRel);
}

// Behind a fence of this thread.
__device__ __forceinline__ void push_cqe(CudaRank& r, std::uint16_t slot, Outcome outcome) {
  RingCq& cq = r.rank.cq;
  const std::uint64_t at = LocalAtomicRef<std::uint64_t>(cq.tail).fetch_add(1, kRelaxed);
  store_system(cq.words[at % cq.capacity],
               (at + 1) << 24 | static_cast<std::uint64_t>(outcome) << 16 | slot);
}

// Shared by the threads of a block, beside the engine's BlockShared.
struct DevShared {
  EngineKind kind;
  std::uint32_t lane;
  std::uint32_t slot;
  std::uint64_t serial;
  std::uint64_t generation;
  std::uint32_t lanes_to_kick;  // bits: own lanes that were given something
  std::uint32_t serves_stream;  // it is in serve()
  std::uint32_t owed_lanes;     // bits: were given something, and nobody was rung for
  std::uint32_t kicks_pending;  // a key's invocation has ended: others may wait for that
  std::uint32_t moving;         // the lane's bit in CudaRank::moving
  std::uint32_t own_call;       // its call, if nobody has been told of it yet: slot + 1
  std::uint32_t rested;         // the engine left because nothing can move
  std::uint32_t gone_on;        // multiplexing: leave soon, other lanes have nobody
  std::uint32_t attention;      // latest look
  std::uint32_t passes;
  std::uint32_t alone_looked, alone;  // pass of the latest look of lanes_alone(), and its answer
  std::uint32_t looks_now;            // it looks at once
  std::uint32_t posted;               // first lane: latest look
  std::uint64_t sq_written;           // first lane: latest look
  std::uint64_t sq_read;
  std::uint64_t inbox_read;
  std::uint32_t readied_seen;    // CudaRank::readied before the latest pass
  std::uint64_t progress;        // slices and completions at the latest look,
  std::uint64_t progress_begun;  // and when this block took the lane
  std::uint64_t still_since_ns;
  std::uint64_t driven_ns;  // when this block took the lane
  std::uint64_t heard;      // slices received, and completions, at the latest look
  std::uint32_t call_over;  // the lane is through with the call that brought this kernel
  std::uint32_t served;     // first lane: latest call taken from the inbox: slot + 1
  std::uint32_t holding;    // the lane's bit in CudaRank::holding
  std::uint32_t peers_to_poke[kRankWords];  // bits
};

// The same, as what the compiler knows to lie in shared memory. Behind a generic address a load has
// to be told apart from one of global memory, and its answer comes behind those of all global loads
// that were issued before.
template <class T>
__device__ __forceinline__ T& in_shared(T& x) {
  return *static_cast<T*>(shared_pointer(&x));
}

class CudaDev {
 public:
  using Handle = CudaDev;  // three pointers, by value
  static constexpr bool kInlinePacketFlags = true;
  static constexpr bool kLaneInShared = true;
  static constexpr bool kHostWatches = false;
  static constexpr bool kPipelines = true;
  static constexpr unsigned kWarp = 32;
  static constexpr unsigned kApart = 2 * kWarp;  // threads that move no slots
  // What stands behind us in our stream waits, or the next daemon; some more turns of ours may end
  // in a rest, which needs nobody to take over.
  static constexpr std::uint64_t kLateNs = 50000;
  static constexpr std::int64_t kSubmissionsEndNs = 1000000;
  static constexpr std::int64_t kWantedNs = 10000;  // who wants lanes says so all the time

  __device__ CudaDev(CudaRank* rank, DevShared* shared, LaneState* lane)
      : r_(*rank), s_(in_shared(*shared)), lane_(in_shared(*lane)) {}

  // ---- the block ----
  static __device__ BlockShared& here(BlockShared& shared) { return in_shared(shared); }
  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ void sync() { sync_block(); }
  __device__ bool controls() const { return threadIdx.x < kWarp; }
  __device__ bool leads() const { return threadIdx.x == 0; }
  __device__ std::uint32_t first() const { return threadIdx.x % kWarp; }
  __device__ static constexpr std::uint32_t stride() { return kWarp; }
  __device__ bool all(bool x) const { return __all_sync(0xffffffffu, x) != 0; }
  __device__ void sync_control() const { __syncwarp(); }

  // The first warp controls, the second publishes (its fence waits for what all others are
  // storing), the others move slices. (All move packets.)
  __device__ static constexpr bool pipelines() { return true; }
  __device__ bool posts() const { return threadIdx.x / kWarp == 1; }
  __device__ bool posters_first() const { return threadIdx.x == kWarp; }
  __device__ void sync_posters() const { __syncwarp(); }
  __device__ static constexpr std::uint32_t groups() { return 2; }
  __device__ std::uint32_t group() const { return (threadIdx.x - kApart) / group_threads(); }
  __device__ std::uint32_t movers() const { return group_threads() / kWarp; }
  __device__ __forceinline__ void leaf(const SliceJob& job) {
    __syncwarp();  // each thread has polled for it by itself
    with_all_registers(run_slot_leaf_cuda)(job, (threadIdx.x - kApart) % group_threads(),
                                           group_threads());
  }
  // A warp's, by its first thread: the barrier orders the others' stores before.
  __device__ void stored(std::uint32_t& count) const {
    __syncwarp();
    if (threadIdx.x % kWarp == 0) add_release(count);
  }
  // Words of BlockShared.
  static __device__ void add(std::uint32_t& x, std::uint32_t by) { add_relaxed_shared(x, by); }
  static __device__ void add_release(std::uint32_t& x) { increment_release_shared(x); }
  static __device__ std::uint32_t load_block(const std::uint32_t& x) {
    return load_acquire_shared(x);
  }
  static __device__ void store_block(std::uint32_t& x, std::uint32_t v) {
    store_release_shared(x, v);
  }

  // Two phases for packets: every thread polls its own words; the block goes on only if all have
  // seen theirs. Nothing is stored before the vote.
  __device__ __forceinline__ bool packet_leaf(const SliceJob& job, std::uint32_t polls) {
    if (job.protocol == Protocol::kLine) {
      using cuda_leaves::LineFlags;
      return with_all_registers(run_line_leaf_cuda<Vote>)(
          job, threadIdx.x, blockDim.x, polls, Vote(),
          r_.whole_lines != 0 ? LineFlags::kInside : LineFlags::kBehind);
    }
    return with_all_registers(run_packet_leaf_cuda<Vote>)(job, threadIdx.x, blockDim.x, polls,
                                                          Vote());
  }

  __device__ void relax(std::uint32_t) {}
  __device__ void delay() {}
  __device__ std::uint64_t now_ns() const { return global_ns(); }
  __device__ std::uint32_t threshold(std::uint32_t polls) const { return polls; }

  // ---- publishing ----
  // (Lanes of a rank are blocks of one device.)
  __device__ void fence_lanes() { fence_local(); }
  // With the barrier, or the posters' acquire, before it: all that the block has stored comes
  // before what this thread publishes (a fence and a relaxed store are a release together).
  __device__ void fence() { fence_system(); }
  template <class T>
  static __device__ void publish(T& x, T v) {
    store_system(x, v);
  }

  // ---- submissions ----
  __device__ bool submissions_wait() const {
    return s_.own_call != 0 || s_.sq_written != s_.sq_read ||
           load_relaxed_local(r_.inbox[s_.inbox_read % r_.rank.num_slots]) >> 16 ==
               s_.inbox_read + 1;
  }

  // By the control threads together, for the first lane's driver.
  __device__ SlotBatch next_submissions() {
    constexpr std::uint32_t kAtOnce = SlotBatch::kMost;
    SlotBatch slots;
    std::uint16_t slot = 0;
    while (!slots.full() && next_of_streams(slot)) slots.push_back(slot);
    // Looked at by the lead alone, which looks anew as soon as it is through here (epoch(),
    // look_at_submissions()): the others could be behind that.
    std::uint32_t more = 0;
    if (leads()) {
      const std::uint64_t there = s_.sq_written - s_.sq_read;
      const std::uint32_t room = kAtOnce - slots.size();
      more = there < room ? static_cast<std::uint32_t>(there) : room;
    }
    more = __shfl_sync(0xffffffffu, more, 0);
    if (more == 0) return slots;
    // All under way together: a look at the host's memory takes as long for one as for all.
    constexpr unsigned kEach = kWarp / kAtOnce;
    const std::uint32_t mine = threadIdx.x / kEach;
    std::uint32_t taken = 0;
    if (mine < more) {
      const CudaSubmission& place = r_.sq[(s_.sq_read + mine) % r_.rank.num_slots];
      taken = take_in<kEach>(r_, place.sqe, place.call, threadIdx.x % kEach);
    }
    __syncwarp();
    for (std::uint32_t i = 0; i < more; ++i) {
      slots.push_back(static_cast<std::uint16_t>(__shfl_sync(0xffffffffu, taken, i * kEach)));
    }
    if (leads()) {
      s_.sq_read += more;
      r_.sq_read = s_.sq_read;
      store_relaxed_local(r_.submitted_ns, global_ns());
    }
    __syncwarp();
    return slots;
  }
  // What kernels in streams have brought.
  __device__ bool next_of_streams(std::uint16_t& slot) {
    if (s_.own_call != 0) {
      slot = static_cast<std::uint16_t>(s_.own_call - 1);
      __syncwarp();
      if (leads()) s_.own_call = 0;
      __syncwarp();
      return true;
    }
    // Acquire: the invocation that the kernel in the stream has written.
    std::uint64_t entry = 0;
    if (leads()) entry = load_acquire_local(r_.inbox[s_.inbox_read % r_.rank.num_slots]);
    entry = __shfl_sync(0xffffffffu, entry, 0);
    if (entry >> 16 != s_.inbox_read + 1) return false;
    __syncwarp();
    if (leads()) {
      r_.inbox_read = ++s_.inbox_read;
      s_.served = (static_cast<std::uint32_t>(entry) & 0xffff) + 1;
    }
    __syncwarp();
    slot = static_cast<std::uint16_t>(entry);
    return true;
  }

  // By all of take_in()'s threads, of the first submission of a key. Its place was another key's,
  // perhaps of another group, whose members are others: what that knew of their connectors is not
  // this key's, nor are addresses there. (Seen by the lanes with the invocation, which is published
  // behind a barrier, and a fence or a release of the thread that publishes it.)
  static __device__ __forceinline__ void begin_key(CudaRank& r, const CudaSqe& sqe, unsigned thread,
                                                   unsigned threads) {
    const std::uint32_t ranks = r.rank.lanes[0].transport.shape.ranks;
    for (std::uint32_t i = thread; i < r.rank.num_lanes * ranks; i += threads) {
      const LaneKey& lane = sqe.inv.key->lanes[i / ranks];
      lane.out[i % ranks] = OutEndpoint{};
      lane.in[i % ranks] = InEndpoint{};
    }
    if (thread != 0) return;
    KeyState& key = *sqe.inv.key;
    key.tag = sqe.key_tag;
    key.group = sqe.key_group;
    for (std::uint32_t l = 0; l < r.rank.num_lanes; ++l) {
      LaneKey& lane = key.lanes[l];
      lane.preemptions = lane.spins = lane.slices = lane.time_ns = lane.lack = 0;
    }
    // Release: whoever may run the key's first invocation sees its state.
    store_release_local(key.done, sqe.key_done);
  }

  // Copies a submission to its slot, by threads that synchronise afterwards. The slot was free, so
  // no lane looks at it. Of the host's memory all is read at once, for each look there takes long;
  // but of primitives and members as many as there are threads, more (of large groups) behind that.
  // kLeast: of `threads`, if there may be more.
  template <unsigned kLeast>
  static __device__ std::uint16_t take_in(CudaRank& r, const CudaSqe& sqe, const StreamCall& call,
                                          unsigned thread, unsigned threads = kLeast) {
    constexpr std::uint32_t kInvocation = sizeof(Invocation) / sizeof(uint4);
    constexpr std::uint32_t kAll = kInvocation + sizeof(StreamCall) / sizeof(uint4);
    constexpr std::uint32_t kEach = (kAll + kLeast - 1) / kLeast;
    const std::uint16_t slot = sqe.inv.slot;
    const bool command = sqe.inv.key == nullptr;
    const std::uint32_t primitives = sqe.inv.num_primitives, members_number = sqe.inv.group_size;
    const bool fresh = sqe.fresh != 0;
    uint4 words[kEach];
#pragma unroll
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::uint32_t i = thread + k * threads;
      if (i >= kAll) break;
      words[k] = i < kInvocation ? reinterpret_cast<const uint4*>(&sqe.inv)[i]
                                 : reinterpret_cast<const uint4*>(&call)[i - kInvocation];
    }
    Primitive* program = r.programs + slot * kMaxProgram;
    CudaTables& tables = r.tables[slot];
    const std::uint32_t neighbours_number = sqe.inv.num_neighbours, sets = sqe.inv.num_sets;
    const Primitive first_primitive = sqe.program[thread < kMaxProgram ? thread : 0];
    const std::uint16_t first_member = sqe.members[thread < kMaxCudaRanks ? thread : 0];
    const std::uint16_t first_neighbour = sqe.neighbours[thread < kMostNeighbours ? thread : 0];
    const PeerSet first_set = sqe.sets[thread < kMostSets ? thread : 0];
    if (thread < primitives) program[thread] = first_primitive;
    if (thread < members_number) tables.members[thread] = first_member;
    if (thread < neighbours_number) tables.neighbours[thread] = first_neighbour;
    if (thread < sets) tables.sets[thread] = first_set;
    for (std::uint32_t i = thread + threads; i < primitives; i += threads) {
      program[i] = sqe.program[i];
    }
    for (std::uint32_t i = thread + threads; i < members_number; i += threads) {
      tables.members[i] = sqe.members[i];
    }
    for (std::uint32_t i = thread + threads; i < neighbours_number; i += threads) {
      tables.neighbours[i] = sqe.neighbours[i];
    }
#pragma unroll
    for (std::uint32_t k = 0; k < kEach; ++k) {
      const std::uint32_t i = thread + k * threads;
      if (i >= kAll) break;
      constexpr std::uint32_t kPointers = offsetof(Invocation, program) / sizeof(uint4);
      static_assert(offsetof(Invocation, program) % sizeof(uint4) == 0 &&
                    offsetof(Invocation, members) == offsetof(Invocation, program) + 8 &&
                    offsetof(Invocation, neighbours) == offsetof(Invocation, program) + 16 &&
                    offsetof(Invocation, sets) == offsetof(Invocation, program) + 24);
      const auto both = [](const void* first, const void* second) {
        const auto a = reinterpret_cast<std::uint64_t>(first);
        const auto b = reinterpret_cast<std::uint64_t>(second);
        return make_uint4(static_cast<unsigned>(a), static_cast<unsigned>(a >> 32),
                          static_cast<unsigned>(b), static_cast<unsigned>(b >> 32));
      };
      if (i == kPointers && !command) words[k] = both(program, tables.members);
      if (i == kPointers + 1 && !command) words[k] = both(tables.neighbours, tables.sets);
      (i < kInvocation ? reinterpret_cast<uint4*>(&r.rank.invocations[slot])[i]
                       : reinterpret_cast<uint4*>(&r.calls[slot])[i - kInvocation]) = words[k];
    }
    if (fresh) begin_key(r, sqe, thread, threads);
    return slot;
  }

  // ---- completions ----
  __device__ void complete(std::uint16_t slot, Outcome outcome) {
    // The slot may be another invocation's as soon as the CQE is there.
    const std::uint64_t serial = r_.rank.invocations[slot].serial;
    // It only grows, as in end_call(): the entry may be seen, and the slot used again, before this.
    max_relaxed(r_.completed[slot], serial);
    push_cqe(r_, slot, outcome);
  }

  // ---- what the host says ----
  __device__ bool cancelled(std::uint16_t slot) {
    return s_.attention != 0 && looks_cancelled(slot);
  }
  // By the lane that ends it: another one may have found it cancelled, and left its part, of which
  // this one has not heard yet. It had seen `attention`, so this does, behind the countdown.
  __device__ bool cancelled_by_any(std::uint16_t slot) {
    return load_relaxed_local(r_.attention) != 0 && looks_cancelled(slot);
  }
  __device__ bool looks_cancelled(std::uint16_t slot) const {
    const Invocation& inv = r_.rank.invocations[slot];
    // (A command of the host's has no members.)
    return is_cancelled(r_, slot, inv.members, inv.key != nullptr ? inv.group_size : 0);
  }
  __device__ bool stopped() const { return (s_.attention & kAttentionStop) != 0; }
  // Of a call that this lane has begun, or done, by itself (device/cuda/exec). Read once.
  __device__ HandOver handed_over(std::uint16_t slot) {
    HandOver& place = r_.handed[slot * r_.rank.num_lanes + s_.lane];
    if (place.stage == Stage::kUntried) return {};
    const HandOver handed = place;
    place.stage = Stage::kUntried;
    return handed;
  }
  __device__ bool ready(const Invocation& inv) {
    return inv.ticket == 0 || load_acquire_local(r_.marks[inv.slot]) == inv.ticket;
  }

  // ---- between passes ----
  __device__ void attend() {
    settle();
    ++s_.passes;
    const bool moved = progressed();
    if (moved) {
      set_moving(true);
      s_.still_since_ns = 0;
    }
    set_bit(r_.holding, s_.holding, !lane_.queue.empty());
    if (s_.kind == EngineKind::kDaemon || !lane_.queue.empty()) {
      s_.readied_seen = load_acquire_local(r_.readied);
    }
    if (s_.lane != 0) {
      s_.attention = load_relaxed_local(r_.attention);
      return;
    }
    // Over PCIe, and ten times as long where all lanes ask: not while data move, nor on the way
    // of a short call.
    // A rest is behind a second pass in which nothing has moved, so it has been asked behind
    // `posted`, which try_quit() looks at once more.
    static_assert(EnginePolicy{}.idle_passes >= 2);
    if ((moved || s_.kind != EngineKind::kDaemon) && s_.passes % 16 != 0) return;
    s_.attention = read_attention(r_);
  }
  // What the host says, for all lanes: by whoever drives the first one, or waits for it.
  static __device__ std::uint32_t read_attention(CudaRank& r) {
    const std::uint32_t attention = load_relaxed(r.link->attention);
    LeavingSteps::tell_lanes(r, attention);
    return attention;
  }
  __device__ std::uint32_t epoch() {
    if (s_.lane != 0) return 0;
    // A kernel in a stream has its own call first; what the host submits wakes the launcher, unless
    // a daemon is resident.
    if (s_.kind != EngineKind::kDaemon && s_.passes % 16 != 15) return s_.posted;
    const std::uint32_t posted = load_seq_cst(r_.link->residency.posted);
    if (posted != s_.posted) {
      s_.posted = posted;
      s_.sq_written = load_acquire(r_.link->sq_written);
    }
    return posted;
  }
  // Beside what moves, for which epoch()'s fence would wait. Acquire: the submissions.
  __device__ void look_at_submissions() {
    const std::uint64_t& written = r_.link->sq_written;
    if (load_relaxed(written) != s_.sq_written) s_.sq_written = load_acquire(written);
  }

  __device__ bool called_away() {
    if (stopped()) return true;
    if (s_.kind != EngineKind::kDaemon) {
      if (load_acquire_local(r_.completed[s_.slot]) >= s_.serial) return true;
      return s_.lane == 0 ? lanes_alone() : s_.gone_on != 0;
    }
    return daemon_has_left();
  }
  // Of another of its lanes: the next daemon waits for this block to end.
  __device__ bool daemon_has_left() {
    return s_.kind == EngineKind::kDaemon && s_.lane != 0 &&
           load_acquire_local(r_.closed[s_.generation % kGenerations]) == s_.generation;
  }
  // A call's block has no more to do in its lane: the last lane to end completes the call.
  __device__ void ended(std::uint16_t slot) {
    if (s_.kind == EngineKind::kCall && slot == s_.slot) s_.call_over = 1;
  }
  __device__ bool is_over() const { return s_.call_over != 0 || in_the_way(); }
  __device__ bool residency_matters() const {
    return s_.kind == EngineKind::kDaemon && s_.lane == 0 && load_relaxed_local(r_.waiters) == 0;
  }

  __device__ bool try_quit(std::uint32_t, std::uint32_t) {
    if (stopped()) return s_.rested = 1;
    if (s_.kind != EngineKind::kDaemon) {
      set_moving(false);
      if (!called_away() || news()) return false;
      return s_.rested = 1;
    }
    if (s_.lane != 0) {
      set_moving(false);
      // What the first lane saw before it said that we leave, we see behind that.
      if (called_away()) return news() ? false : s_.rested = 1;
      __nanosleep(100);
      return false;
    }
    const bool moves = (load_relaxed_local(r_.moving) & ~1u) != 0;
    // The next daemon was launched as this one was about to leave, and changed its mind: what is
    // queued behind a kernel keeps a hardware queue, and with it other streams, from running.
    if (load_relaxed(r_.link->residency.queued) != 0) return true;
    if (moves) {
      s_.still_since_ns = 0;
      return false;
    }
    const std::uint64_t now = global_ns();
    if (s_.still_since_ns == 0) s_.still_since_ns = now;
    // Something has come from peers: they are at it, and may be gone just for a new start. (They
    // poke us when they are back and have sent something, so to leave too soon costs one start.)
    // While a stream waits, the device is not idle whatever we do; but what it waits for may want
    // our SMs.
    std::uint64_t stay_ns = load_relaxed_local(r_.heard) != 0 ? r_.idle_among_peers_ns : r_.idle_ns;
    if (load_relaxed_local(r_.waiters) != 0) stay_ns = longest_stay_ns(r_);
    if (now - s_.still_since_ns < stay_ns) return false;
    // The host stores `posted`, then looks at `resident`: one of us sees the other.
    HostLink& h = r_.link->residency;
    store_seq_cst(h.resident, 0u);
    if (load_seq_cst(h.posted) == s_.posted && !submissions_wait()) return s_.rested = 1;
    store_release(h.resident, 1u);
    return false;
  }
  __device__ void hold_sleep(std::uint32_t) {}

  // Something was made for a lane. Told to whom it concerns between passes, see settle().
  __device__ void ring(std::uint32_t rank, std::uint32_t lane, RingFor what) {
    if (rank != lane_.transport.rank) {
      atomicOr(&s_.peers_to_poke[rank / 32], 1u << rank % 32);
    } else if (what == RingFor::kWork) {
      atomicOr(&s_.lanes_to_kick, 1u << lane);
    } else {
      s_.kicks_pending = 1;
    }
  }

  __device__ void ring_own_lanes() { s_.kicks_pending = 1; }

  // Pokes the peers that were sent something, and sees that own lanes that were given something
  // have a driver.
  __device__ void settle() {
    if (s_.lanes_to_kick != 0 || s_.kicks_pending != 0) {
      // Their drivers free the lane, then look into the mailbox, and say what they leave; we have
      // filled it, or ended a key's invocation, then look who is there. Both are read-modify-writes
      // of `lanes`: who comes second there sees what the other has done before (release, acquire).
      // The fence is for who sees `readied` alone: with it, what was ended.
      fence_total_local();
      if (s_.kicks_pending != 0) {
        atomicAdd(&r_.readied, 1u);
        ++s_.readied_seen;  // no news here: this lane's own next look comes after the end
      }
      const std::uint64_t lanes = or_lanes(r_, 0);
      std::uint32_t needy = s_.lanes_to_kick;
      if (s_.kicks_pending != 0) needy |= static_cast<std::uint32_t>(lanes >> 32);
      const std::uint32_t alone = needy & ~static_cast<std::uint32_t>(lanes);
      if (sees_to(alone)) {
        s_.owed_lanes |= alone;
        s_.looks_now = 1;
      } else if (alone != 0) {
        store_system(r_.link->residency.rung, 1u);
      }
      s_.lanes_to_kick = 0;
      s_.kicks_pending = 0;
    }
    std::uint32_t any = 0;
    for (std::uint32_t w = 0; w < kRankWords; ++w) any |= s_.peers_to_poke[w];
    if (any == 0) return;
    fence_system();  // what was written for them comes before
    const std::uint32_t count = ++r_.poke_counts[s_.lane];
    for (std::uint32_t w = 0; w < kRankWords; ++w) {
      for (std::uint32_t peers = s_.peers_to_poke[w]; peers != 0; peers &= peers - 1) {
        const std::uint32_t peer = 32 * w + __ffs(static_cast<int>(peers)) - 1;
        store_system(r_.pokes[peer][s_.lane], count);
      }
      s_.peers_to_poke[w] = 0;
    }
  }

 private:
  __device__ static unsigned group_threads() { return (blockDim.x - kApart) / groups(); }
  // The host has said something since the latest look: a cancellation concerns calls that the pass
  // has passed.
  __device__ bool news() const { return load_relaxed_local(r_.attention) != s_.attention; }
  __device__ bool progressed() {
    const std::uint64_t now = lane_.stats.slices + lane_.stats.completed;
    if (now == s_.progress) return false;
    s_.progress = now;
    // What is sent to peers that are not there yet says nothing about them.
    const std::uint64_t heard = lane_.stats.received + lane_.stats.completed;
    if (heard != s_.heard) {
      s_.heard = heard;
      store_relaxed_local(r_.heard, 1u);
    }
    return true;
  }
  // Of own lanes that were given something, and have no driver: who serves a stream goes there next
  // itself, see lanes_alone(). For one lane nobody else is needed: a daemon that comes takes SMs of
  // whatever runs beside the stream. (What is there when this one leaves it rings for, see
  // serve().)
  __device__ bool sees_to(std::uint32_t lanes) const {
    return __popc(lanes) == 1 && s_.serves_stream != 0 && s_.lane == 0 && s_.kicks_pending == 0;
  }
  // The lane's bit in a word of the rank; `now` says what it is.
  __device__ void set_bit(std::uint32_t& word, std::uint32_t& now, bool bit) {
    if ((now != 0) == bit) return;
    now = bit ? 1 : 0;
    // Hints: they order nothing, and nobody waits for what they return.
    if (bit) {
      atomicOr(&word, 1u << s_.lane);
    } else {
      atomicAnd(&word, ~(1u << s_.lane));
    }
  }
  // Of a daemon, by its first lane: calls that bring their own engine want its lanes, or have just
  // been served by it, and nothing else is there or was lately. They are faster without it, see
  // call_in_stream.cuh. It must not wait for a rest: where calls come one behind the other it would
  // hardly ever find one, and each call would find the lanes taken because the one before did. All
  // looks are hints: what comes meanwhile is found, and rung for, when the lanes have been left
  // (drive() in instance.cuh).
  __device__ bool in_the_way() const {
    if (s_.kind != EngineKind::kDaemon || s_.lane != 0 || s_.passes == 0) return false;
    if (!lane_.queue.empty()) return false;
    const std::uint64_t now = global_ns();
    if (s_.served == 0 && !lanes_wanted(r_, now)) return false;
    if (s_.served != 0) {
      // Handed to other lanes, which may not have taken it out of their mailboxes yet.
      const std::uint32_t slot = s_.served - 1;
      if (load_relaxed_local(r_.completed[slot]) < r_.rank.invocations[slot].serial) return false;
    }
    return queues_empty(r_) && !submissions_wait() && r_.rank.mailboxes[0].empty() &&
           !submissions_go_on(r_, now);
  }
  // Nobody drives some lane that has work: the driver of the first lane must see to it. Looked at
  // now and then, when nothing moves: at all lanes' mailboxes, and more often by who serves a
  // stream and has nothing in this lane, whether something was left in any.
  __device__ bool lanes_alone() {
    if (s_.alone_looked != s_.passes) {  // once a pass
      s_.alone_looked = s_.passes;
      const bool at_mail = s_.looks_now != 0 || s_.passes % 32 == 31;
      const bool at_left = s_.serves_stream != 0 && s_.holding == 0 && s_.passes % 8 == 7;
      s_.alone = (at_mail && lanes_without_driver(r_) != 0) ||
                 (at_left && left_in(load_relaxed_local(r_.lanes)) != 0);
      s_.looks_now = 0;
    }
    return s_.alone != 0;
  }

 public:
  // A call waits, or did so just now, for lanes that others drive but have nothing to do in.
  static __device__ bool lanes_wanted(CudaRank& r, std::uint64_t now) {
    // (Signed: the clocks of two SMs may differ a little.)
    return static_cast<std::int64_t>(now - load_relaxed_local(r.wanted_ns)) < kWantedNs;
  }
  // Calls come beside their streams, for which a daemon stays.
  static __device__ bool submissions_go_on(CudaRank& r, std::uint64_t now) {
    return static_cast<std::int64_t>(now - load_relaxed_local(r.submitted_ns)) < kSubmissionsEndNs;
  }
  // Of all lanes. Acquire: who takes a lane over that was left with something says that it holds
  // something (drive()) before it takes that back.
  static __device__ bool queues_empty(CudaRank& r) {
    return load_acquire_local(r.lanes) >> 32 == 0 && load_relaxed_local(r.holding) == 0;
  }
  static __device__ void hold(CudaRank& r, DevShared& s, std::uint32_t lane) {
    s.holding = 1;
    atomicOr(&r.holding, 1u << lane);
  }
  // Without news, or where nobody waits for it.
  static __device__ std::uint64_t longest_stay_ns(const CudaRank& r) {
    return std::uint64_t{r.rank.policy.residency_us} * 1000;
  }

  // For what adds to this.
  __device__ CudaRank* rank() { return &r_; }
  __device__ LaneState& lane() { return lane_; }
  __device__ std::uint32_t lane_index() const { return s_.lane; }
  // Only of a daemon's interest.
  __device__ void set_moving(bool moving) { set_bit(r_.moving, s_.moving, moving); }
  // As news(); and this lane knows it then.
  __device__ bool hears_news() {
    if (!news()) return false;
    s_.attention = load_relaxed_local(r_.attention);
    return true;
  }
  // Whether calls that have had their turn keep somebody from going on: what is short, and
  // newcomers that may be, or come before them. (Newcomers that are as long wait: they would only
  // change places with those, on each rank at a moment of its own. But what the
  // first lane has yet to hand on may be anything.)
  __device__ bool others_wait() const {
    if (lane_.shorts != 0) return true;
    const bool may_overtake = r_.rank.policy.order == OrderPolicy::kPriority && mail_waits();
    std::uint64_t& mailed = r_.rank.mailboxes[s_.lane].urgent;
    if (may_overtake || load_relaxed_local(mailed) != lane_.urgent_taken) return true;
    if (s_.lane != 0) return false;
    return load_relaxed_local(r_.inbox_written) != s_.inbox_read ||
           load_relaxed(r_.link->sq_written) != s_.sq_read;  // over PCIe
  }
  __device__ bool mail_waits() const { return !r_.rank.mailboxes[s_.lane].looks_empty(); }
  __device__ bool has_had_its_stay(std::uint64_t now) const {
    return residency_matters() && now - s_.driven_ns > longest_stay_ns(r_);
  }

  // Lanes that were left with something, and nobody drives; but for the first one, which who serves
  // a stream takes by itself. `lanes`: CudaRank::lanes.
  static __device__ std::uint32_t left_in(std::uint64_t lanes) {
    return static_cast<std::uint32_t>(lanes >> 32) & ~static_cast<std::uint32_t>(lanes) & ~1u;
  }
  // Of some lanes, those that have something in their mailboxes.
  static __device__ std::uint32_t lanes_with_mail(CudaRank& r, std::uint32_t lanes) {
    std::uint32_t found = 0;
    for (; lanes != 0; lanes &= lanes - 1) {
      const std::uint32_t l = __ffs(static_cast<int>(lanes)) - 1;
      if (!r.rank.mailboxes[l].empty()) found |= 1u << l;
    }
    return found;
  }
  // Lanes but the first that were left with something, or have mail, and no driver.
  static __device__ std::uint32_t lanes_without_driver(CudaRank& r) {
    const std::uint64_t lanes = load_relaxed_local(r.lanes);
    const std::uint32_t others = ~0u >> (32 - r.rank.num_lanes) & ~1u;
    return left_in(lanes) | lanes_with_mail(r, others & ~static_cast<std::uint32_t>(lanes));
  }

 private:
  // Of the block, on whether all threads are ready.
  struct Vote {
    __device__ bool operator()(bool ready) const {
      __syncwarp();
      return __syncthreads_and(ready) != 0;
    }
  };

  CudaRank& r_;
  DevShared& s_;
  LaneState& lane_;
};

}  // namespace unjam
