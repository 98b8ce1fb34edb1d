#include "device/cuda/host/first_launch.h"

#include "device/cuda/host/cuda_error.h"

namespace unjam {
namespace {

// So many are remembered; then it starts anew, which costs some looks at streams.
constexpr std::size_t kMostKnown = 4096;

// CUDA's queues are the process's, so this is, too.
std::mutex& of_process() {
  static std::mutex mutex;
  return mutex;
}

}  // namespace

std::unique_lock<std::mutex> FirstLaunch::guard(cudaStream_t stream) {
  std::unique_lock first(of_process(), std::defer_lock);
  // Not the handle: another stream gets it when this one is destroyed.
  unsigned long long id = 0;
  if (cudaStreamGetId(stream, &id) != cudaSuccess) {
    cudaGetLastError();  // the launch will say it
    return first;
  }
  {
    const std::lock_guard lock(mutex_);
    // (First: who asks for one that it has just made known may hold the lock.)
    if (known_.count(id) != 0) return first;
    if (known_.size() >= kMostKnown) known_.clear();
    known_.insert(id);
  }
  // A stream with work has a queue; and may be full, so that a launch waits for room: not with the
  // lock that others' first launches need. (Another thread of this rank that launches into the
  // same stream meanwhile does so without the lock. A stream that two threads use at once for the
  // first time is the application's race.)
  if (query_stream(stream) == cudaSuccess) first.lock();
  return first;
}

}  // namespace unjam
