// The kernels of a rank's device: loaded before any of them runs, and launched.
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <string>

#include "device/cuda/host/first_launch.h"
#include "engine/cuda_driver.h"

namespace unjam {

// What a kernel with the engine's shared memory takes.
struct KernelResources {
  cudaFuncAttributes attributes{};
  int blocks_per_sm = 0;
};

class KernelLauncher {
 public:
  // `options` outlives this.
  explicit KernelLauncher(const CudaRankOptions& options) : o_(options) {}

  // All kernels at once: loading one while another spins would wait for that to end. On the
  // rank's device. False: `error`.
  bool load(std::string& error);

  // Any thread. `what`: for the error. `early`: programmatic dependent launch, see
  // wait_for_stream() in cuda_dev.cuh. `cluster`: blocks that begin together, near each other.
  bool launch(const void* kernel, unsigned blocks, unsigned threads, void** arguments,
              cudaStream_t stream, const char* what, std::string& error, bool early = false,
              unsigned cluster = 1);
  // To be held while the caller queues other work into a stream, which may be its first.
  std::unique_lock<std::mutex> guard(cudaStream_t stream) { return first_launch_.guard(stream); }

  const KernelResources& engine() const { return engine_; }
  const KernelResources& call() const { return call_; }
  const std::string& device_name() const { return name_; }
  bool early() const { return early_; }  // calls without the engine may be launched early
  // Blocks of a call that begin together, of so many blocks.
  unsigned cluster_of(unsigned blocks) const { return blocks % cluster_ == 0 ? cluster_ : 1; }
  unsigned cluster() const { return cluster_; }
  // As many as there are lanes, or more that choose theirs, see lane_placement.h.
  unsigned daemon_blocks() const { return daemon_blocks_; }

 private:
  bool count_blocks(const void* kernel, KernelResources& of, std::string& error) const;
  bool load_carried(std::string& error) const;
  bool clusters_fit() const;

  const CudaRankOptions& o_;
  KernelResources engine_, call_;
  std::string name_;
  bool early_ = false;
  unsigned cluster_ = 1;
  unsigned daemon_blocks_ = 0;
  FirstLaunch first_launch_;
};

}  // namespace unjam
