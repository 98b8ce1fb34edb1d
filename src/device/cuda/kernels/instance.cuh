// What kernels that are engines have in common: how a block drives a lane, and how one serves while
// its stream waits. Who does what, and when: engine.cu.
#pragma once

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/dev/leaving.h"

namespace unjam {

struct Block {
  BlockShared& engine;
  DevShared& dev;
};

// Of raw storage, for shared variables have no constructors: `engine` is more than a kernel may
// declare, its size comes with the launch (kEngineSharedBytes).
__device__ __forceinline__ Block block_of(unsigned char* engine, unsigned char* dev) {
  return {*reinterpret_cast<BlockShared*>(engine), *reinterpret_cast<DevShared*>(dev)};
}

// By one thread, first. `generation`: of a daemon.
__device__ __forceinline__ void begin_instance(DevShared& s, EngineKind kind, std::uint32_t slot,
                                               std::uint64_t serial, std::uint64_t generation) {
  s.kind = kind;
  s.slot = slot;
  s.serial = serial;
  s.generation = generation;
  s.gone_on = 0;
  s.own_call = 0;
  s.serves_stream = s.owed_lanes = 0;
}

__device__ __forceinline__ bool take_lease(CudaRank& r, std::uint32_t lane) {
  // Acquire: the lane's state as its last driver left it.
  return (or_lanes(r, std::uint64_t{1} << lane) >> lane & 1) == 0;
}

// The daemon leaves: nobody is resident, and its other blocks are told. In this order: a mark that
// still finds it comes before their last look.
__device__ __forceinline__ void close_daemon(CudaRank& r, DevShared& s) {
  store_seq_cst(r.link->residency.resident, 0u);
  store_relaxed_local(r.daemon, 0u);
  fence_total_local();
  store_release_local(r.closed[s.generation % kGenerations], s.generation);
}

// Runs the engine of a lane whose lease this block has, and gives the lease back. `Dev`: CudaDev,
// or what adds to it. Behind it DevShared::progress says whether anything has moved meanwhile.
template <class Dev>
__device__ __noinline__ void drive(CudaRank& r, std::uint32_t lane, Block block) {
  DevShared& s = block.dev;
  if (threadIdx.x == 0) {
    s.lane = lane;
    s.rested = 0;
    for (std::uint32_t w = 0; w < kRankWords; ++w) s.peers_to_poke[w] = 0;
    s.lanes_to_kick = 0;
    s.kicks_pending = 0;
    s.passes = 0;
    s.alone_looked = s.alone = s.looks_now = 0;
    s.attention = load_relaxed_local(r.attention);
    s.still_since_ns = 0;
    s.driven_ns = global_ns();
    const LaneStats& stats = r.rank.lanes[lane].stats;
    s.progress = s.progress_begun = stats.slices + stats.completed;
    s.heard = stats.received + stats.completed;
    s.moving = s.holding = 0;
    s.served = s.call_over = 0;
    s.readied_seen = load_acquire_local(r.readied);
    // In this order, see CudaDev::queues_empty().
    if (!r.rank.lanes[lane].queue.empty()) CudaDev::hold(r, s, lane);
    clear_lanes(r, std::uint64_t{1} << (lane + 32));
    if (lane == 0) {
      s.sq_read = r.sq_read;
      s.inbox_read = r.inbox_read;
      s.posted = 0;
      // A call has its own invocation first. What a wait is for may still be there; and who comes
      // back from other lanes will be off to them again before it has looked (epoch(), attend()).
      // Nobody else may ever hear of what the host says: where nothing can be launched.
      const bool serves_all = s.serves_stream != 0 && s.own_call == 0;
      const bool looks = s.kind == EngineKind::kDaemon || serves_all;
      s.sq_written = looks ? load_acquire(r.link->sq_written) : s.sq_read;
      if (serves_all) s.attention = CudaDev::read_attention(r);
    }
  }
  sync_block();
  LaneState& state = block.engine.lane;
  Engine<Dev>::run(Dev(&r, &s, &state), r.rank, lane, block.engine);
  if (threadIdx.x == 0) {
    if (s.moving != 0) clear_local(r.moving, 1u << lane);
    if (s.holding != 0) clear_local(r.holding, 1u << lane);
    CudaDev(&r, &s, &state).settle();
    s.progress = state.stats.slices + state.stats.completed;
    const bool residents = lane == 0 && s.kind == EngineKind::kDaemon;
    if (residents) close_daemon(r, s);
    const bool left = !state.queue.empty();
    // In one step: nobody drives it, and something is left.
    if (!left) {
      clear_lanes(r, std::uint64_t{1} << lane);
    } else {
      LocalAtomicRef<std::uint64_t>(r.lanes).fetch_xor(
          std::uint64_t{1} << lane | std::uint64_t{1} << (lane + 32), kAcqRel);
    }
    // Whoever fills a mailbox, marks, or ends a key's earlier use, then looks who is there, see
    // CudaDev::settle() and unjam_mark_kernel(): one of us sees the other.
    fence_total_local();
    // A lane that is left empty needs nobody, however its engine came to leave. (A mark relies on a
    // daemon, also for lanes that it has not got; see take_over().)
    bool needs = left && LeavingSteps::lane_may_move(r, s);
    needs = needs || !r.rank.mailboxes[lane].empty();
    if (residents && s.rested == 0) needs = needs || LeavingSteps::host_has_said_more(r, s);
    if (needs) store_system(r.link->residency.rung, 1u);
  }
  sync_block();
}

// Tells whoever drives the first lane of a call that this kernel has brought.
__device__ __forceinline__ void put_into_inbox(CudaRank& r, std::uint32_t slot) {
  const std::uint64_t at = LocalAtomicRef<std::uint64_t>(r.inbox_written).fetch_add(1, kRelaxed);
  // Release: the invocation. The place is free: there are as many as slots.
  store_release_local(r.inbox[at % r.rank.num_slots], (at + 1) << 16 | slot);
}

// A call or a wait in a stream: serves until its invocation has ended. By one block of it, any.
template <class Dev>
__device__ __forceinline__ void serve(CudaRank& r, Block block) {
  DevShared& s = block.dev;
  __shared__ std::uint32_t next;  // lane to drive; kNothing, kOver
  constexpr std::uint32_t kNothing = 0x1000, kOver = 0x1001;
  if (threadIdx.x == 0) {
    atomicAdd(&r.waiters, 1u);
    s.serves_stream = 1;
  }
  std::uint32_t look = 0;   // of the leader
  std::uint32_t visit = 0;  // of the leader: lanes that have work and nobody, to be driven in turn
  for (;;) {
    if (threadIdx.x == 0) {
      next = kNothing;
      const bool stopped = (look & 63) == 63 && (CudaDev::read_attention(r) & kAttentionStop) != 0;
      if (stopped || (s.own_call == 0 && load_acquire_local(r.completed[s.slot]) >= s.serial)) {
        next = kOver;
      } else if (visit == 0 && take_lease(r, 0)) {
        next = 0;
        s.gone_on = 0;
      } else {
        if (s.own_call != 0) put_into_inbox(r, s.slot);
        s.own_call = 0;
        if (visit == 0 && look % 8 == 7) visit = CudaDev::lanes_without_driver(r);
        if (visit != 0) {
          const std::uint32_t lane = __ffs(static_cast<int>(visit)) - 1;
          visit &= visit - 1;
          if (take_lease(r, lane)) {
            next = lane;
            s.gone_on = 1;  // only for a while
          }
        } else {
          __nanosleep(100);
        }
      }
      ++look;
    }
    sync_block();
    const std::uint32_t lane = next;
    sync_block();
    if (lane == kOver) break;
    if (lane == kNothing) continue;
    drive<Dev>(r, lane, block);
    if (threadIdx.x != 0) continue;
    if (lane == 0) {
      // The call's other blocks are about to end, too: to look after their lanes takes longer.
      const std::uint64_t begun = global_ns();
      while (s.call_over != 0 && load_acquire_local(r.completed[s.slot]) < s.serial &&
             global_ns() - begun < 20000) {
      }
      if (load_acquire_local(r.completed[s.slot]) >= s.serial) continue;
      // The first lane calls away for others, all of which are next.
      visit = CudaDev::lanes_without_driver(r);
    }
    // Something moves, and lanes have nobody: a daemon of full width does better than one block for
    // all of them. (Not while nothing does: it would find nothing, leave, and be asked for again as
    // long as the stream waits, and has SMs meanwhile that others want.)
    if (s.progress != s.progress_begun && load_relaxed_local(r.daemon) == 0 &&
        (lane == 0 ? visit : CudaDev::lanes_without_driver(r)) != 0) {
      store_system(r.link->residency.rung, 1u);
    }
  }
  if (threadIdx.x != 0) return;
  atomicSub(&r.waiters, 1u);
  if (s.owed_lanes == 0) return;
  // As CudaDev::settle(), which has left it to us: we have filled a mailbox, then look who is
  // there, by a read-modify-write of `lanes`. Their drivers clear their bit there, then look for
  // mail.
  fence_total_local();
  const std::uint32_t alone = s.owed_lanes & ~static_cast<std::uint32_t>(or_lanes(r, 0));
  if (CudaDev::lanes_with_mail(r, alone) != 0) store_system(r.link->residency.rung, 1u);
}

}  // namespace unjam
