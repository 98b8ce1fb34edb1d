// The engine as CUDA kernels: who drives which lane, and when kernels come and go.
//
// An instance is one kernel: a daemon (launched by the host while there is work and nobody is
// there), a call (in a stream, brings its invocation and ends with it) or a wait (in a stream, ends
// with an invocation that was submitted before). Block b of a daemon drives lane b if nobody does
// (CudaRank::lanes has a bit for each lane that somebody does: its lease); a call's blocks drive
// the first lane and the call's own. Only the driver of the first lane takes submissions and hands
// them to the others' mailboxes.
//
// A daemon's blocks wait for lanes that others drive, so while it is resident every lane has
// somebody, or soon has.
//
// Leaving. A daemon's first block decides for the whole grid: nothing moves in any lane and nothing
// is submitted (see CudaDev::try_quit for the look after `resident` is cleared), it is in the way
// of calls that need no daemon (CudaDev::in_the_way), or its stay is over. It then says so in
// `closed`; the other blocks finish their pass and leave. A call's blocks
// leave when their lanes are through with it, the first one, like a wait's, when it has ended. A
// lane that is left while something in it can move, or has something in its mailbox, is announced
// in `rung`, and the launcher launches a daemon. What peers write later is announced by their
// pokes.
//
// While a stream waits, its first block serves every lane that nobody drives, one after the other:
// all pending collectives of the rank go on, even if nothing can be launched (a thread in
// cudaFree).
#include "device/cuda/cuda_dev.cuh"
#include "device/cuda/kernels.h"
#include "device/cuda/leaving.h"
#include "device/cuda/solo_one_shot.cuh"
#include "device/cuda/solo_stream.cuh"
#include "device/cuda/solo_two_shot.cuh"

namespace unjam {
namespace {

struct Block {
  BlockShared& engine;
  DevShared& dev;
};

__device__ bool take_lease(CudaRank& r, std::uint32_t lane) {
  // Acquire: the lane's state as its last driver left it.
  return (or_lanes(r, std::uint64_t{1} << lane) >> lane & 1) == 0;
}

// The daemon leaves: nobody is resident, and its other blocks are told. In this order: a mark that
// still finds it comes before their last look.
__device__ void close_daemon(CudaRank& r, DevShared& s) {
  store_seq_cst(r.link->residency.resident, 0u);
  store_relaxed_local(r.daemon, 0u);
  fence_total_local();
  store_release_local(r.closed[s.generation % kGenerations], s.generation);
}

// Runs the engine of a lane whose lease this block has, and gives the lease back.
__device__ __noinline__ void drive(CudaRank& r, std::uint32_t lane, Block block) {
  DevShared& s = block.dev;
  if (threadIdx.x == 0) {
    s.lane = lane;
    s.rested = 0;
    s.peers_to_poke = 0;
    s.lanes_to_kick = 0;
    s.kicks_pending = 0;
    s.passes = 0;
    s.alone_looked = s.alone = 0;
    s.attention = load_relaxed_local(r.attention);
    s.still_since_ns = 0;
    const LaneStats& stats = r.rank.lanes[lane].stats;
    s.progress = stats.slices + stats.completed;
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
      // A call has its own invocation first; what a wait is for may still be there.
      s.sq_written = s.kind != EngineKind::kCall ? load_acquire(r.link->sq_written) : s.sq_read;
    }
  }
  sync_block();
  LaneState& state = block.engine.lane;
  Engine<CudaDev>::run(CudaDev(&r, &s, &state), r.rank, lane, block.engine);
  if (threadIdx.x == 0) {
    if (s.moving != 0) clear_local(r.moving, 1u << lane);
    if (s.holding != 0) clear_local(r.holding, 1u << lane);
    CudaDev(&r, &s, &state).settle();
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

// A block of the daemon waits until it has its lane, which another instance drives. False: the
// daemon leaves. The first block decides that, for all.
__device__ bool take_over(CudaRank& r, DevShared& s, std::uint32_t lane) {
  const std::uint64_t begun = global_ns();
  std::uint64_t still_since = begun;
  while (!take_lease(r, lane)) {
    __nanosleep(500);
    if (lane != 0) {
      if (load_acquire_local(r.closed[s.generation % kGenerations]) != s.generation) continue;
      // Once more. A mark may have found the daemon and relied on it although this lane's driver
      // left it meanwhile. If it has not, it does so behind this try, which found its lease: it
      // acquires what we have seen of that mark (acquire of `closed`), and minds it.
      return take_lease(r, lane);
    }
    const std::uint64_t now = global_ns();
    const bool waited_for = load_relaxed_local(r.waiters) != 0;
    if (load_relaxed_local(r.moving) != 0) still_since = now;
    const std::uint64_t longest = CudaDev::longest_stay_ns(r);
    const bool over = !waited_for && now - begun > longest;
    const std::uint32_t attention = CudaDev::read_attention(r);
    // What the host has submitted is what this daemon is for: then it stays while streams wait.
    const auto nothing_to_do = [&] {
      return CudaDev::queues_empty(r) &&
             load_relaxed(r.link->sq_written) == load_relaxed_local(r.sq_read);  // over PCIe
    };
    const bool stays = waited_for && !nothing_to_do();
    const bool idle = now - still_since > (stays ? longest : r.idle_ns);
    // As CudaDev::in_the_way().
    const bool wanted = CudaDev::lanes_wanted(r, now) && nothing_to_do();
    if (!idle && !over && !wanted && (attention & kAttentionStop) == 0 &&
        load_relaxed(r.link->residency.queued) == 0) {  // see CudaDev::try_quit()
      continue;
    }
    close_daemon(r, s);
    // The first lane's driver looks at what the host says now and then only.
    bool needs = load_acquire(r.link->sq_written) != load_relaxed(r.sq_read) ||
                 CudaDev::read_attention(r) != attention;
    // As above. If its driver has left: if it has left something in there, that may have been
    // marked.
    if (take_lease(r, lane)) {
      const std::uint64_t lanes = clear_lanes(r, std::uint64_t{1} << lane);
      needs = needs || (lanes >> (lane + 32) & 1) != 0;
    }
    if (needs) store_system(r.link->residency.rung, 1u);
    return false;
  }
  return true;
}

// Tells whoever drives the first lane of a call that this kernel has brought.
__device__ void put_into_inbox(CudaRank& r, std::uint32_t slot) {
  const std::uint64_t at = LocalAtomicRef<std::uint64_t>(r.inbox_written).fetch_add(1, kRelaxed);
  // Release: the invocation. The place is free: there are as many as slots.
  store_release_local(r.inbox[at % r.rank.num_slots], (at + 1) << 16 | slot);
}

// A call or a wait in a stream: serves until its invocation has ended. By one block of it, any.
__device__ void serve(CudaRank& r, Block block) {
  DevShared& s = block.dev;
  __shared__ std::uint32_t next;  // lane to drive; kNothing, kOver
  constexpr std::uint32_t kNothing = 0x1000, kOver = 0x1001;
  if (threadIdx.x == 0) atomicAdd(&r.waiters, 1u);
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
    drive(r, lane, block);
    // The first lane calls away for others, all of which are next; a daemon of full width would do
    // better.
    if (threadIdx.x == 0 && lane == 0) {
      // The call's other blocks are about to end, too: to look after their lanes takes longer.
      const std::uint64_t begun = global_ns();
      while (s.call_over != 0 && load_acquire_local(r.completed[s.slot]) < s.serial &&
             global_ns() - begun < 20000) {
      }
      if (load_acquire_local(r.completed[s.slot]) >= s.serial) continue;
      visit = CudaDev::lanes_without_driver(r);
      if (visit != 0) store_system(r.link->residency.rung, 1u);
    }
  }
  if (threadIdx.x == 0) atomicSub(&r.waiters, 1u);
}

}  // namespace

// A block has an SM to itself: 512 threads of up to 128 registers, so that no leaf spills. One warp
// of them controls; one more than these 16 would leave each thread 96 registers.
__global__ void __launch_bounds__(512, 1)
    unjam_engine_kernel(CudaRank* rank, const __grid_constant__ CudaLaunch launch) {
  // Raw storage: shared variables have no constructors. The first one is more than a kernel may
  // declare: its size comes with the launch (kEngineSharedBytes).
  extern __shared__ __align__(16) unsigned char engine_shared[];
  __shared__ alignas(16) unsigned char dev_shared[sizeof(DevShared)];
  CudaRank& r = *rank;
  // One block of a call, whichever, goes on to serve where the lanes were not done at once.
  const bool solo = launch.kind == EngineKind::kCall && launch.solo.lanes != 0;
  bool serves = solo;
  if (solo && launch.solo.streams) {
    const StreamEnd end = run_solo_stream(r, launch, engine_shared);
    if (end == StreamEnd::kLeaves) return;
    serves = end == StreamEnd::kServes;
  } else if (solo) {
    if (!(launch.solo.two_shot ? run_solo_two_shot(r, launch) : run_solo_one_shot(r, launch)))
      return;
  } else {
    wait_for_stream();
  }
  const Block block{*reinterpret_cast<BlockShared*>(engine_shared),
                    *reinterpret_cast<DevShared*>(dev_shared)};
  DevShared& s = block.dev;
  __shared__ bool mine;
  if (threadIdx.x == 0) {
    s.kind = launch.kind;
    s.slot = launch.slot;
    s.serial = launch.serial;
    s.generation = launch.kind == EngineKind::kDaemon ? launch.serial : 0;
    s.gone_on = 0;
    s.own_call = 0;
  }
  // Of a call, the first lane's block, which brings it, and those of the call's lanes.
  std::uint32_t lane = blockIdx.x;
  const std::uint32_t first = launch.sqe.inv.geometry.first_lane;
  if (launch.kind == EngineKind::kCall && lane != 0 && first != 0) lane += first - 1;
  if (launch.kind != EngineKind::kDaemon && (serves || (lane == 0 && !solo))) {
    if (launch.kind == EngineKind::kCall) {
      CudaDev::take_in(r, launch.sqe, threadIdx.x, blockDim.x);
      sync_block();
      if (threadIdx.x == 0) s.own_call = launch.slot + 1;
    } else if (threadIdx.x == 0 && load_relaxed_local(r.daemon) == 0) {
      // Nobody is there: a daemon of full width helps, if it can be launched.
      store_system(r.link->residency.rung, 1u);
    }
    sync_block();
    serve(r, block);
    return;
  }
  if (threadIdx.x == 0) {
    if (launch.kind == EngineKind::kCall) {
      // Another instance may have it, which may leave soon. Not for long: blocks that wait here
      // could keep those of calls that peers wait for from running.
      const std::uint64_t begun = global_ns();
      do {
        mine = take_lease(r, lane);
      } while (!mine && global_ns() - begun < 100000 &&
               load_acquire_local(r.completed[launch.slot]) < launch.serial);
    } else {
      if (lane == 0) {
        store_relaxed_local(r.daemon, 1u);
        store_relaxed_local(r.heard, 0u);
        store_seq_cst(r.link->residency.resident, 1u);
        ResidencySteps::begin(r.link->residency);
      }
      mine = take_over(r, s, lane);
    }
  }
  sync_block();
  if (mine) drive(r, lane, block);
}

// "The inputs of the invocation with this ticket are there."
__global__ void unjam_mark_kernel(CudaRank* rank, std::uint32_t slot, std::uint64_t ticket) {
  CudaRank& r = *rank;
  // The larger one stays: a cancelled call has completed without its mark, which comes late, when
  // the slot is another's.
  LocalAtomicRef<std::uint64_t>(r.marks[slot]).fetch_max(ticket, kRelease);
  fetch_add_local(r.readied, 1u);
  // A daemon says that it leaves, then looks once more, see close_daemon(): one of us sees the
  // other.
  fence_total_local();
  if (load_relaxed_local(r.daemon) == 0) store_system(r.link->residency.rung, 1u);
}

// The call of a group of one that stands here in its stream has ended.
__global__ void unjam_end_kernel(CudaRank* rank, std::uint32_t slot, std::uint64_t serial) {
  CudaRank& r = *rank;
  // The host has ended it meanwhile (an abort): then it has failed, though the copy was made.
  const bool cancelled = load_relaxed(r.rank.cancelled[slot]) != 0;
  // Release: the copy in front, for a kernel that waits in another stream, and for a host that
  // waits for no stream.
  fence_system();
  // As CudaDev::complete().
  solo::max_relaxed(r.completed[slot], serial);
  solo::add_relaxed(r.solo_calls, 1);
  push_cqe(r, static_cast<std::uint16_t>(slot), cancelled ? Outcome::kCancelled : Outcome::kDone);
}

// The state of keys that nobody uses yet.
__global__ void unjam_keys_kernel(CudaKeys keys) {
  const std::uint32_t lanes = keys.lanes, ranks = keys.ranks;
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
       i < std::uint64_t{keys.count} * lanes; i += std::uint64_t{gridDim.x} * blockDim.x) {
    LaneKey& lane = keys.lane_keys[i];
    lane = LaneKey{};
    lane.out = keys.out + i * ranks;
    lane.in = keys.in + i * ranks;
    for (std::uint32_t q = 0; q < ranks; ++q) {
      lane.out[q] = OutEndpoint{};
      lane.in[q] = InEndpoint{};
    }
    if (i % lanes != 0) continue;
    KeyState& key = keys.states[i / lanes];
    key = KeyState{};
    key.done = ~std::uint64_t{0};  // nothing of it runs before it is set up
    key.lanes = &lane;
  }
}

const unsigned kEngineSharedBytes = sizeof(BlockShared);
const void* engine_kernel() { return reinterpret_cast<const void*>(&unjam_engine_kernel); }
const void* end_kernel() { return reinterpret_cast<const void*>(&unjam_end_kernel); }
const void* mark_kernel() { return reinterpret_cast<const void*>(&unjam_mark_kernel); }
const void* keys_kernel() { return reinterpret_cast<const void*>(&unjam_keys_kernel); }

}  // namespace unjam
