// The engine as a CUDA kernel: one block a lane. This version compiles it, for every dtype,
// operator and protocol, so that registers and spills are known and the code stays portable;
// nothing launches it yet (CHANGELOG: the CUDA device comes next).
#include <cuda/atomic>

#include "device/cuda/leaves.cuh"
#include "engine/engine.h"
#include "engine/lease.h"

namespace unjam {
namespace {

// The GPU's side of Engine's `Dev`.
class CudaDev {
 public:
  using Handle = CudaDev;  // one pointer, by value
  static constexpr bool kInlinePacketFlags = true;

  __device__ explicit CudaDev(RankState& rank) : rank_(rank) {}

  __device__ unsigned thread() const { return threadIdx.x; }
  __device__ void sync() { __syncthreads(); }
  __device__ void leaf(const SliceJob& job) { run_leaf_cuda(job, threadIdx.x, blockDim.x); }

  // Two phases for packets: every thread polls its own words; the block goes on only if all have
  // seen theirs. Nothing is stored before the vote.
  __device__ bool packets_ready(const SliceJob& job, std::uint32_t polls) {
    const std::uint64_t bytes = job.elems * dtype_bytes(job.dtype);
    for (std::uint32_t k = 0; k < polls; ++k) {
      bool ready = true;
      for (int i = 0; ready && i < job.num_src; ++i) {
        if (i == job.local_src) continue;
        ready = packet_ready_cuda(job.src[i], bytes, job.flag, threadIdx.x, blockDim.x);
      }
      if (__syncthreads_and(ready)) return true;
    }
    return false;
  }

  __device__ void relax(std::uint32_t) {}
  __device__ void delay() {}
  __device__ std::uint64_t now_ns() const {
    std::uint64_t t;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
    return t;
  }
  __device__ bool residency_matters() const { return true; }

  // A GPU wakes nobody: sleeping lanes are started by their host's launcher, which sees the
  // doorbell.
  __device__ void wake(std::uint32_t, std::uint32_t, Wake) {}
  __device__ void notify_host() {}

  __device__ bool try_quit(std::uint32_t epoch, std::uint32_t interest) {
    const LaneTransport& t = rank_.lanes[blockIdx.x].transport;
    return lease_rest(t.lane_cell(t.rank, blockIdx.x).doorbell, epoch, interest);
  }
  __device__ bool called_away() const { return false; }
  __device__ std::uint32_t threshold(std::uint32_t polls) const { return polls; }
  __device__ void hold_sleep(std::uint32_t) {}

 private:
  RankState& rank_;
};

}  // namespace

__global__ void __launch_bounds__(512) unjam_daemon_kernel(RankState* rank) {
  // Raw storage: shared variables have no constructors. The leader sets what needs a value in
  // Engine::start().
  __shared__ alignas(16) unsigned char shared[sizeof(BlockShared)];
  Engine<CudaDev>::run(CudaDev(*rank), *rank, blockIdx.x, *reinterpret_cast<BlockShared*>(shared));
}

}  // namespace unjam
