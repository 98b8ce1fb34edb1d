// Events that note how far a stream has come, used over and over. They are let go of with the
// context's lock held, and destroying one waits while another thread of the process is in cudaFree:
// then nobody of this rank would get the lock. So what is let go of is kept for the next, and
// destroyed with the pool.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "device/cuda/host/cuda_error.h"

namespace unjam {

// Of one device. Any thread.
class EventPool {
 public:
  // What the stream has so far, on the current device; holds a cudaEvent_t. nullptr: `error` says
  // why. May outlive the pool.
  std::shared_ptr<void> record(cudaStream_t stream, std::string& error) {
    cudaEvent_t event = spares_->take();
    if (event == nullptr && !cuda_ok(cudaEventCreateWithFlags(&event, cudaEventDisableTiming),
                                     "making an event", error)) {
      return nullptr;
    }
    std::shared_ptr<void> noted(
        event, [spares = spares_](void* e) { spares->put(static_cast<cudaEvent_t>(e)); });
    if (!cuda_ok(cudaEventRecord(event, stream), "recording an event", error)) return nullptr;
    return noted;
  }

 private:
  class Spares {
   public:
    Spares() = default;
    ~Spares() {
      for (cudaEvent_t event : events_) cudaEventDestroy(event);
    }
    Spares(const Spares&) = delete;
    Spares& operator=(const Spares&) = delete;

    cudaEvent_t take() {
      const std::lock_guard lock(mutex_);
      if (events_.empty()) return nullptr;
      cudaEvent_t event = events_.back();
      events_.pop_back();
      return event;
    }
    void put(cudaEvent_t event) {
      const std::lock_guard lock(mutex_);
      events_.push_back(event);
    }

   private:
    std::mutex mutex_;  // no call of CUDA's is made with it
    std::vector<cudaEvent_t> events_;
  };
  const std::shared_ptr<Spares> spares_ = std::make_shared<Spares>();
};

}  // namespace unjam
