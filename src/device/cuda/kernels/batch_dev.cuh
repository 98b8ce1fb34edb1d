// The engine's device where it does calls whole (docs/internals/whole-calls.md): in kernels whose
// blocks have as many threads as the host reckons with.
#pragma once

#include "device/cuda/dev/cuda_dev.cuh"
#include "device/cuda/kernels/whole_call.cuh"
#include "device/cuda/kernels/whole_stream.cuh"

namespace unjam {

class WholeDev : public CudaDev {
 public:
  using Handle = WholeDev;
  static constexpr bool kWholeCalls = true;
  using CudaDev::CudaDev;
  template <class EndEarly>
  __device__ __forceinline__ void whole_calls(WholeTry* tries, std::uint32_t n, std::uint32_t turn,
                                              EndEarly end_early) {
    if (tries[0].how != Whole::kStream) {
      return with_all_registers(run_whole_calls)(rank(), &lane().stats, lane_index(), tries, n);
    }
    // By who uses them.
    if (threadIdx.x == 0) {
      solo::WholeStreams& x = solo::whole_streams();
      x.turn_ns = min(std::uint64_t{turn} * kSliceNs, solo::kTurnNs);
      x.looked_ns = 0;
    }
    with_all_registers(run_whole_streams<Interrupts, EndEarly>)(
        rank(), &lane().stats, lane_index(), tries, n, Interrupts{*this}, end_early);
  }

 private:
  static constexpr std::uint64_t kSliceNs = 12500;  // about, and 500 us a quantum's

  // What ends streams beside peers that do not keep up: that they have had their turn, and
  // something short could go on (see others_wait()), or half of them are done and newcomers wait;
  // or this engine is to leave: a daemon's lanes all at once, for the next daemon can come when the
  // last has gone, and goes on with what was left; or the host has said something, that some call
  // is cancelled, say, which may be any: then the queue is looked through. By one thread, now and
  // then.
  struct Interrupts {
    CudaDev dev;
    __device__ __forceinline__ bool others() { return dev.others_wait(); }
    // The fewer go together, the more often none can go on (lab/nccl-notes.md). Peers are as far
    // at about the same time, other than with their turns.
    __device__ __forceinline__ bool newcomers_fit_in() {
      const solo::WholeStreams& x = solo::whole_streams();
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
        solo::whole_streams().interrupted =
            cut_short ? WholeEnd::kCutShort : WholeEnd::kInterrupted;
      }
      return ends;
    }
    __device__ __forceinline__ bool gives_way(std::uint64_t now, std::uint64_t begun) {
      solo::WholeStreams& x = solo::whole_streams();
      const std::uint64_t stay = now - begun;
      const bool looks = now - max(begun, x.looked_ns) > x.turn_ns;
      if (looks) x.looked_ns = now;
      return (looks && others()) ||
             (stay > solo::kTurnNs && (newcomers_fit_in() || dev.has_had_its_stay(now))) ||
             (stay > kLateNs && dev.called_away());
    }
  };
};

}  // namespace unjam
