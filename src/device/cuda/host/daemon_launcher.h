// The thread that launches a rank's daemon kernel when there is work and nobody is there
// (device/cuda/dev/residency.h, engine.cu); what wakes it, and what it counts.
#pragma once

#include <cuda_runtime_api.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>

#include "device/cuda/dev/rank_state.h"
#include "device/cuda/host/kernel_launcher.h"
#include "engine/cq.h"
#include "engine/cuda_driver.h"

namespace unjam {

class DaemonLauncher {
 public:
  // All of these outlive it.
  DaemonLauncher(const CudaRankOptions& options, KernelLauncher& kernels, RingCq& cq)
      : o_(options), kernels_(kernels), cq_(cq) {}
  ~DaemonLauncher() { stop(); }

  // `stream`: the daemon's.
  void start(CudaLink* link, CudaRank* rank, cudaStream_t stream);
  bool runs() const { return thread_.joinable(); }
  void stop();

  // Something was posted that an engine must look at.
  void post();
  // It looks whether something lacks a driver.
  void wake_if_asleep();
  // The same, and launches in the calling thread if nobody else does, and nobody is there.
  void post_and_attempt();

  // A submission, or a call in a stream; and of submissions beside streams, for which a daemon may
  // be needed, that their completions were not taken out yet. (Calls in streams bring their
  // engine.)
  void count_submission() { ++pending_; }
  void count_beside() { ++beside_; }
  void end_beside() { --beside_; }
  bool completion_waits() const;

  std::uint64_t launches() const { return launches_.load(); }
  std::uint64_t launches_for_pokes() const { return launches_for_pokes_.load(); }
  std::uint64_t launches_for_recalls() const { return launches_for_recalls_.load(); }

 private:
  bool engine_has_work() const;
  std::uint64_t pokes() const;
  void run();
  bool launch_if_absent();
  bool launch_daemon();

  const CudaRankOptions& o_;
  KernelLauncher& kernels_;
  RingCq& cq_;
  CudaLink* link_ = nullptr;
  CudaRank* rank_ = nullptr;
  cudaStream_t stream_ = nullptr;
  EngineLaunch daemon_;
  std::atomic<std::uint64_t> pending_{0};  // submissions and calls, ever
  std::atomic<std::uint64_t> beside_{0};
  std::atomic<std::uint64_t> launches_{0}, launches_for_pokes_{0}, launches_for_recalls_{0};
  std::atomic<std::uint64_t> leaves_ns_{0};  // when the daemon does, unless somebody waits

  std::mutex post_mutex_;
  std::mutex launch_mutex_;     // guards daemon_ and launch_failed_, and one launch at a time
  bool launch_failed_ = false;  // the last one; the launcher tries again
  static constexpr useconds_t kRetryUs = 10'000;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> asleep_{false};
  std::atomic<bool> work_{false};
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace unjam
