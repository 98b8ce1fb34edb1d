// The lock under which streams are launched into for the first time.
//
// CUDA gives a stream one of the process's hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) at its
// first launch, for good. Where two threads launch into fresh streams at the same moment, both
// streams may get the same queue, however many are free: from then on the second kernel of one
// stands in front of the first of the other: tests/gpu/cuda_queues shows it (`--circle`), and that
// it never happens where first launches exclude each other (`--lock first`).
// A call that waits for its peers must not stand there. So unjam's first launches exclude each
// other, in the whole process, as its ranks may share a GPU. (The application's own first launches
// are not seen: docs/guide/streams.md.)
#pragma once

#include <cuda_runtime_api.h>

#include <mutex>
#include <unordered_set>

namespace unjam {

// What one rank knows of streams. Any thread.
class FirstLaunch {
 public:
  // To be held while the caller launches into the stream; owns nothing if it has a queue already.
  std::unique_lock<std::mutex> guard(cudaStream_t stream);

 private:
  std::mutex mutex_;  // guards known_; no call of CUDA's is made with it
  std::unordered_set<unsigned long long> known_;
};

}  // namespace unjam
