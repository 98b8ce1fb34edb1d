// CUDA's objects with owners. All belong to the device that is current when they are made.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdlib>
#include <source_location>
#include <string>
#include <utility>

#include "tests/gpu/support.h"

namespace unjam_gpu {

inline void check(cudaError_t code,
                  const std::source_location at = std::source_location::current()) {
  if (code == cudaSuccess) return;
  fail(std::string(at.file_name()) + ":" + std::to_string(at.line()) +
       ": CUDA: " + cudaGetErrorString(code));
}

// Devices of this machine. Makes no CUDA context, so that unjam can still choose settings.
inline int device_count() {
  int n = 0;
  check(cudaGetDeviceCount(&n));
  return n;
}

// To be called first: kernels of the program are loaded at once, not beside a pending collective.
inline void load_eagerly() { setenv("CUDA_MODULE_LOADING", "EAGER", 1); }

// To be called first where ranks of this process may share a GPU, and with it CUDA's queues: what
// unjam does where CUDA has not started yet. (The other programs have the user's setting.)
constexpr int kManyQueues = 32;
inline void take_many_queues() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", std::to_string(kManyQueues).c_str(), 0);
}
// How many there are then, for the user may have asked for others.
inline int queues_taken() {
  const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int queues = text == nullptr ? 0 : std::atoi(text);
  return queues >= 1 && queues <= kManyQueues ? queues : kManyQueues;
}

class DeviceMemory {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(std::size_t bytes) { check(cudaMalloc(&data_, bytes)); }
  DeviceMemory(DeviceMemory&& o) noexcept : data_(std::exchange(o.data_, nullptr)) {}
  DeviceMemory& operator=(DeviceMemory&& o) noexcept {
    std::swap(data_, o.data_);
    return *this;
  }
  ~DeviceMemory() {
    if (data_ != nullptr) check(cudaFree(data_));
  }
  void* get() const { return data_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

// Pinned, and visible to the device under the same address.
class PinnedMemory {
 public:
  explicit PinnedMemory(std::size_t bytes) {
    check(cudaHostAlloc(&data_, bytes, cudaHostAllocPortable));
  }
  PinnedMemory(const PinnedMemory&) = delete;
  PinnedMemory& operator=(const PinnedMemory&) = delete;
  ~PinnedMemory() { check(cudaFreeHost(data_)); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

class Stream {
 public:
  explicit Stream(unsigned flags = cudaStreamNonBlocking) {
    check(cudaStreamCreateWithFlags(&stream_, flags));
  }
  Stream(Stream&& o) noexcept : stream_(std::exchange(o.stream_, nullptr)) {}
  Stream& operator=(Stream&&) = delete;
  ~Stream() {
    if (stream_ != nullptr) check(cudaStreamDestroy(stream_));
  }
  cudaStream_t get() const { return stream_; }
  void synchronize(const std::source_location at = std::source_location::current()) const {
    check(cudaStreamSynchronize(stream_), at);
  }

 private:
  cudaStream_t stream_ = nullptr;
};

class Event {
 public:
  Event() { check(cudaEventCreate(&event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  ~Event() { check(cudaEventDestroy(event_)); }
  cudaEvent_t get() const { return event_; }
  void record(const Stream& stream) const { check(cudaEventRecord(event_, stream.get())); }

 private:
  cudaEvent_t event_ = nullptr;
};

inline double us_between(const Event& begin, const Event& end) {
  float ms = 0;
  check(cudaEventElapsedTime(&ms, begin.get(), end.get()));
  return static_cast<double>(ms) * 1e3;
}

}  // namespace unjam_gpu
