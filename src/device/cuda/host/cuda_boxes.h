// Boxes of tensors on a CUDA device: packed, unpacked and cast by kernels/boxes.cu.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/host/event_pool.h"
#include "device/cuda/host/first_launch.h"
#include "engine/box_mover.h"
#include "engine/cuda_driver.h"

namespace unjam {

class CudaBoxes : public BoxMover {
 public:
  explicit CudaBoxes(int device) : device_(device) {}
  ~CudaBoxes() override;
  CudaBoxes(const CudaBoxes&) = delete;
  CudaBoxes& operator=(const CudaBoxes&) = delete;

  // Before anything of the rank runs: it loads the kernel, and allocates; it launches nothing.
  // Others of the process may be on the device, and wait for this one: so nothing here waits for
  // the device.
  bool start(std::string& error);
  // What is queued has come to its end.
  void stop();

  // Of the device, that was added.
  std::uint64_t bytes() const {
    const std::lock_guard lock(mutex_);
    return added_;
  }

  void* stream() override { return stream_; }
  void enter() override { cudaSetDevice(device_); }
  bool copy(const std::vector<BoxCopy>& boxes, std::string& error) override;
  bool clear(void* memory, std::uint64_t bytes, std::string& error) override;
  bool tell(std::uint64_t* word, std::uint64_t value, std::string& error) override;
  bool wait_in(void* stream, const std::uint64_t* word, std::uint64_t value,
               std::string& error) override;
  std::shared_ptr<void> note(void* stream, std::string& error) override;
  bool is_past(void* noted, bool& past, std::string& error) override;
  unsigned char* pinned() override { return pinned_; }
  unsigned char* add(std::uint64_t bytes, std::string& error) override;
  bool reaches(const void* memory, std::string& error) override;

 private:
  bool operate(cudaStream_t stream, CUstreamBatchMemOpParams operation, const char* what,
               std::string& error);

  const int device_;
  cudaStream_t stream_ = nullptr;
  unsigned char* pinned_ = nullptr;
  decltype(&cuStreamBatchMemOp) batch_mem_op_ = nullptr;
  unsigned blocks_ = 1;  // as many as the device has at a time
  FirstLaunch first_launch_;
  EventPool events_;
  mutable std::mutex mutex_;  // guards what follows
  std::unique_ptr<DeviceArena> memory_;
  std::uint64_t added_ = 0;
};

}  // namespace unjam
