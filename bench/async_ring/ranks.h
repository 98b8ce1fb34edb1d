// The ranks of the program: a thread and a GPU each, with streams, events and memory that last.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/async_ring/nccl_api.h"
#include "bench/async_ring/ring_steps.h"
#include "tests/gpu/cuda_objects.h"

namespace async_ring {

// An event that orders and measures nothing.
class Mark {
 public:
  Mark() { unjam_gpu::check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
  Mark(const Mark&) = delete;
  Mark& operator=(const Mark&) = delete;
  ~Mark() { unjam_gpu::check(cudaEventDestroy(event_)); }
  cudaEvent_t get() const { return event_; }
  void record(const unjam_gpu::Stream& stream) const {
    unjam_gpu::check(cudaEventRecord(event_, stream.get()));
  }

 private:
  cudaEvent_t event_ = nullptr;
};

inline void wait_for(const unjam_gpu::Stream& stream, const Mark& mark) {
  unjam_gpu::check(cudaStreamWaitEvent(stream.get(), mark.get(), 0));
}

struct Rank {
  // With the rank's device current. bytes: of the largest vector; kept: of both temporaries.
  Rank(int number, std::size_t bytes, std::size_t kept_bytes, int steps)
      : rank(number), input(bytes), output(bytes), kept(kept_bytes), verdict(sizeof(long long)) {
    for (int i = 0; i < steps; ++i) done.push_back(std::make_unique<Mark>());
  }

  float* in() const { return input.as<float>(); }
  float* out() const { return output.as<float>(); }

  int rank = 0;
  unjam_gpu::Stream streams[kStreams];
  unjam_gpu::Event begin, end;
  Mark copied;                              // its input, to its output
  std::vector<std::unique_ptr<Mark>> done;  // of a step
  unjam_gpu::DeviceMemory input, output, kept, verdict;
  Nccl::Communicator communicator = nullptr;
};

class Ranks {
 public:
  explicit Ranks(int n) : barrier_(n), all_(static_cast<std::size_t>(n)) {}

  int count() const { return static_cast<int>(all_.size()); }
  Rank& at(int rank) { return *all_[static_cast<std::size_t>(rank)]; }
  void meet() { barrier_.meet(); }

  // f(rank's number) for each in a thread of its own with its device current.
  template <class F>
  void each(const F& f) {
    unjam_gpu::each(count(), [&](int r) {
      unjam_gpu::check(cudaSetDevice(r));
      f(r);
    });
  }

  // Peers read each other's memory.
  void make(std::size_t bytes, std::size_t kept_bytes, int steps) {
    each([&](int r) {
      for (int peer = 0; peer < count(); ++peer) {
        if (peer == r) continue;
        int able = 0;
        unjam_gpu::check(cudaDeviceCanAccessPeer(&able, r, peer));
        if (able == 0) {
          unjam_gpu::fail("GPU " + std::to_string(r) + " cannot read GPU " + std::to_string(peer) +
                          "'s memory: the rings need peer access");
        }
        const cudaError_t code = cudaDeviceEnablePeerAccess(peer, 0);
        if (code == cudaErrorPeerAccessAlreadyEnabled) {
          static_cast<void>(cudaGetLastError());
        } else {
          unjam_gpu::check(code);
        }
      }
      all_[static_cast<std::size_t>(r)] = std::make_unique<Rank>(r, bytes, kept_bytes, steps);
    });
  }
  void free() {
    each([&](int r) { all_[static_cast<std::size_t>(r)].reset(); });
  }

 private:
  unjam_gpu::Barrier barrier_;
  std::vector<std::unique_ptr<Rank>> all_;
};

}  // namespace async_ring
