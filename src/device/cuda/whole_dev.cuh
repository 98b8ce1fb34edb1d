// The engine's device where it does calls whole (engine.h: "Whole calls"): in kernels whose blocks
// have as many threads as the host reckons with.
#pragma once

#include "device/cuda/cuda_dev.cuh"
#include "device/cuda/whole_call.cuh"
#include "device/cuda/whole_stream.cuh"

namespace unjam {

class WholeDev : public CudaDev {
 public:
  using Handle = WholeDev;
  static constexpr bool kWholeCalls = true;
  using CudaDev::CudaDev;
  template <class EndEarly>
  __device__ __forceinline__ void whole_calls(WholeTry* tries, std::uint32_t n,
                                              EndEarly end_early) {
    if (tries[0].how != Whole::kStream) {
      return with_all_registers(run_whole_calls)(rank(), &lane().stats, lane_index(), tries, n);
    }
    with_all_registers(run_whole_streams<Interrupts, EndEarly>)(
        rank(), &lane().stats, lane_index(), tries, n, Interrupts{*this}, end_early);
  }

 private:
  // What ends streams beside peers that do not keep up: that they have had their turn, and
  // something short could go on (see others_wait()), or half of them are done and newcomers wait;
  // or this engine is to leave: a daemon's lanes all at once, for the next daemon can come when the
  // last has gone, and goes on with what was left; or the host has said something, that some call
  // is cancelled, say, which may be any: then the queue is looked through. By one thread, now and
  // then.
  struct Interrupts {
    static constexpr std::uint32_t kLongestTurnNs = solo::kTurnNs;
    CudaDev dev;
    __device__ __forceinline__ bool others() { return dev.others_wait(); }
    // The fewer go together, the more often none can go on (docs/nccl-notes.md). Peers are as far
    // at about the same time, other than with their turns.
    __device__ __forceinline__ bool newcomers_fit_in() {
      const solo::WholeStreams& x = solo::whole_streams();
      const auto ended = static_cast<std::uint32_t>(__popc(CudaDev::load_block(x.ended)));
      return ended != 0 && 2 * ended >= x.num_calls && dev.mail_waits();
    }
    __device__ __forceinline__ bool operator()(std::uint64_t now, std::uint64_t begun,
                                               bool asks_host) {
      const std::uint64_t stay = now - begun;
      const bool has_had_turn = stay > solo::kTurnNs;
      // As Engine::may_go_on().
      std::uint32_t& turn = dev.stream_turn_ns();
      const bool looks = stay > turn, wanted = looks && others();
      if (looks) turn = wanted ? min(2 * turn, kLongestTurnNs) : kShortestTurnNs;
      bool ends = wanted || (has_had_turn && (newcomers_fit_in() || dev.has_had_its_stay(now))) ||
                  (stay > kLateNs && dev.called_away()) || dev.daemon_has_left();
      if (asks_host && dev.lane_index() == 0) read_attention(*dev.rank());
      ends = dev.hears_news() || ends;
      if (ends) solo::whole_streams().interrupted = 1;
      return ends;
    }
  };
};

}  // namespace unjam
