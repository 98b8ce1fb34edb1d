// The engine as CUDA kernels: who drives which lane, and when kernels come and go
// (docs/internals/instances.md).
//
// A daemon's block drives its lane (lane_placement.h) if nobody does: CudaRank::lanes has a bit for
// each lane that is driven, its lease. A call's blocks drive the first lane and the call's own.
// Only the driver of the first lane takes submissions, and hands them to the others' mailboxes. A
// daemon's blocks wait for lanes that others drive, so while it is there every lane has somebody.
//
// A lane that is left while something in it can move is announced in `rung`, and the launcher
// launches a daemon. While a stream waits, its first block serves every lane that nobody drives: so
// all pending collectives of the rank go on, even if nothing can be launched.
#include "device/cuda/kernels/batch_dev.cuh"
#include "device/cuda/kernels/instance.cuh"
#include "device/cuda/kernels/kernels.h"
#include "device/cuda/placement/lane_placement.h"

namespace unjam {
namespace {

// A block of the daemon waits until it has its lane, which another instance drives. False: the
// daemon leaves. The first lane's block decides that, for all.
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

}  // namespace

// A daemon, or a wait. A block has an SM to itself: 512 threads of up to 128 registers, so that no
// leaf spills. One warp of them controls; one more than these 16 would leave each thread 96
// registers.
__global__ void __launch_bounds__(512, 1)
    unjam_engine_kernel(CudaRank* rank, const __grid_constant__ EngineLaunch launch) {
  UNJAM_DYNAMIC_SHARED(engine_shared);
  alignas(16) __shared__ unsigned char dev_shared[sizeof(DevShared)];
  __shared__ bool mine;
  __shared__ std::uint32_t own_lane;  // of a daemon's block
  CudaRank& r = *rank;
  wait_for_stream();
  const Block block = block_of(engine_shared, dev_shared);
  DevShared& s = block.dev;
  const bool waits = launch.kind == EngineKind::kWait;
  if (threadIdx.x == 0) {
    begin_instance(s, launch.kind, launch.slot, launch.serial, waits ? 0 : launch.serial);
    if (waits && load_relaxed_local(r.daemon) == 0) {
      // Nobody is there: a daemon of full width helps, if it can be launched.
      store_system(r.link->residency.rung, 1u);
    }
  }
  if (waits) {
    sync_block();
    serve<BatchDev>(r, block);
    return;
  }
  if (threadIdx.x == 0) {
    const std::uint32_t lanes = r.rank.num_lanes;
    const auto pause = [] { __nanosleep(3000); };
    const std::uint32_t lane = gridDim.x == lanes
                                   ? blockIdx.x
                                   : r.lane_placement.choose(launch.choice, sm_of_block(), lanes,
                                                             gridDim.x, global_ns(), pause);
    own_lane = lane;
    if (lane == 0) {
      store_relaxed_local(r.daemon, 1u);
      store_relaxed_local(r.heard, 0u);
      store_seq_cst(r.link->residency.resident, 1u);
      ResidencySteps::begin(r.link->residency);
    }
    mine = lane != kNoLane && take_over(r, s, lane);
  }
  sync_block();
  if (mine) drive<BatchDev>(r, own_lane, block);
}

// "The inputs of the invocation with this ticket are there."
__global__ void unjam_mark_kernel(CudaRank* rank, std::uint32_t slot, std::uint64_t ticket) {
  CudaRank& r = *rank;
  // The larger one stays: a cancelled call has completed without its mark, which comes late, when
  // the slot is another's.
  max_release(r.marks[slot], ticket);
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
  max_relaxed(r.completed[slot], serial);
  add_relaxed(r.calls_without_engine, 1);
  push_cqe(r, static_cast<std::uint16_t>(slot), cancelled ? Outcome::kCancelled : Outcome::kDone);
}

// The state of keys that nobody uses yet.
__global__ void unjam_keys_kernel(CudaKeys keys) {
  for (std::uint64_t i = blockIdx.x * std::uint64_t{blockDim.x} + threadIdx.x;
       i < std::uint64_t{keys.count} * keys.lanes; i += std::uint64_t{gridDim.x} * blockDim.x) {
    set_up_key(keys, i);
  }
}

const unsigned kEngineSharedBytes = sizeof(BlockShared);
const void* engine_kernel() { return reinterpret_cast<const void*>(&unjam_engine_kernel); }
const void* end_kernel() { return reinterpret_cast<const void*>(&unjam_end_kernel); }
const void* mark_kernel() { return reinterpret_cast<const void*>(&unjam_mark_kernel); }
const void* keys_kernel() { return reinterpret_cast<const void*>(&unjam_keys_kernel); }

}  // namespace unjam
