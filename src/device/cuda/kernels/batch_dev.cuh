// The engine's device where it has batches (docs/internals/batches.md): in kernels whose blocks
// have as many threads as the host reckons with.
#pragma once

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/kernels/packet_batch.cuh"
#include "device/cuda/kernels/pipelined_batch.cuh"

namespace unjam {

class BatchDev : public CudaDev {
 public:
  using Handle = BatchDev;
  static constexpr bool kBatches = true;
  using CudaDev::CudaDev;
  template <class EndEarly>
  __device__ __forceinline__ void run_batch(BatchEntry* tries, std::uint32_t n, std::uint32_t turn,
                                            EndEarly end_early) {
    if (tries[0].how != BatchWay::kPipelined) {
      return with_all_registers(run_packet_batch)(rank(), &lane().stats, lane_index(), tries, n);
    }
    // By who uses them.
    if (threadIdx.x == 0) {
      in_stream::PipelinedBatch& x = in_stream::pipelined_batch();
      x.turn_ns = min(std::uint64_t{turn} * kSliceNs, in_stream::kTurnNs);
      x.looked_ns = 0;
    }
    with_all_registers(run_pipelined_batch<Interrupts, EndEarly>)(
        rank(), &lane().stats, lane_index(), tries, n, Interrupts{*this}, end_early);
  }

 private:
  static constexpr std::uint64_t kSliceNs = 12500;  // about

  // What ends streams beside peers that do not keep up: that they have had their turn, and
  // something short could go on (see others_wait()), or half of them are done and newcomers wait;
  // or this engine is to leave: a daemon's lanes all at once, for the next daemon can come when the
  // last has gone, and goes on with what was left; or the host has said something, that some call
  // is cancelled, say, which may be any: then the queue is looked through. By one thread, now and
  // then.
  struct Interrupts {
    CudaDev dev;
    __device__ __forceinline__ bool others() { return dev.others_wait(); }
    // The fewer go together, the more often none can go on. Peers are as far
    // at about the same time, other than with their turns.
    __device__ __forceinline__ bool newcomers_fit_in() {
      const in_stream::PipelinedBatch& x = in_stream::pipelined_batch();
      const auto ended = static_cast<std::uint32_t>(__popc(CudaDev::load_block(x.ended)));
      return ended != 0 && 2 * ended >= x.num_calls && dev.mail_waits();
    }
    // may_leave: for others (see steer_several()); else only what cuts it short ends it.
    __device__ __forceinline__ bool operator()(std::uint64_t now, std::uint64_t begun,
                                               bool asks_host, bool may_leave = true) {
      if (asks_host && dev.lane_index() == 0) read_attention(*dev.rank());
      const bool news = dev.hears_news(), cut_short = news || dev.daemon_has_left();
      const bool ends = cut_short || (may_leave && gives_way(now, begun));
      if (ends) {
        in_stream::pipelined_batch().interrupted =
            cut_short ? BatchEnd::kCutShort : BatchEnd::kInterrupted;
      }
      return ends;
    }
    __device__ __forceinline__ bool gives_way(std::uint64_t now, std::uint64_t begun) {
      in_stream::PipelinedBatch& x = in_stream::pipelined_batch();
      const std::uint64_t stay = now - begun;
      const bool looks = now - max(begun, x.looked_ns) > x.turn_ns;
      if (looks) x.looked_ns = now;
      return (looks && others()) ||
             (stay > in_stream::kTurnNs && (newcomers_fit_in() || dev.has_had_its_stay(now))) ||
             (stay > kLateNs && dev.called_away());
    }
  };
};

// Hooks that the engine looks for by name: without one it would go on, and be slower or wrong.
static_assert(kDoesBatches<BatchDev>);
static_assert(requires(BatchDev& dev, BlockShared& shared, std::uint32_t& figure) {
  dev.look_at_submissions();
  dev.next_submissions();
  dev.fence_lanes();
  BatchDev::kLateNs;
  BatchDev::here(shared);
  BatchDev::add(figure, 1u);
});

}  // namespace unjam
