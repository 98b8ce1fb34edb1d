// What a rank on a CUDA device tells of itself: lanes' figures and traces as its engine keeps them
// in device memory, and the text of "kernel" in unjamInfo.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>

#include "base/json_writer.h"
#include "device/cuda/dev/rank_state.h"
#include "device/cuda/host/copy_thread.h"
#include "device/cuda/host/daemon_launcher.h"
#include "device/cuda/host/kernel_launcher.h"
#include "device/cuda/host/rank_memory.h"
#include "engine/cuda_driver.h"
#include "plan/needs_engine.h"

namespace unjam {

class RankReport {
 public:
  // All of these outlive it, and are there once the rank has started.
  struct Of {
    const CudaRankOptions& options;
    const RankMemory& memory;
    const KernelLauncher& kernels;
    const DaemonLauncher& launcher;
  };
  explicit RankReport(Of of) : of_(of) {}

  // `stream`: for copies from the device alone.
  void start(CudaLink* link, CudaRank* rank, cudaStream_t stream) {
    link_ = link;
    rank_ = rank;
    stream_ = stream;
  }

  // As StreamDaemon's.
  void refresh(RankState& copy);
  struct Figures {
    std::size_t engine_bytes = 0, pinned_bytes = 0;
    const CopyThread* copies = nullptr;  // nullptr: no copy engines
    std::string copies_failure;
    // Calls that the engine has got, by why (NeedsEngine).
    const std::array<std::atomic<std::uint64_t>, kNumNeedsEngine>* needs_engine = nullptr;
  };
  std::string footprint(const Figures& figures) const;

 private:
  std::size_t key_bytes() const;
  std::unique_ptr<const CudaRank> state() const;
  void describe(const CudaRank& now, JsonWriter& w) const;

  const Of of_;
  CudaLink* link_ = nullptr;
  CudaRank* rank_ = nullptr;
  cudaStream_t stream_ = nullptr;
  mutable std::mutex mutex_;  // one copy from the device at a time
};

}  // namespace unjam
