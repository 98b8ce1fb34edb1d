// The two rings on GPUs. Each is one call by each rank's thread; it returns when the rank's output
// is there and no peer reads it any more.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "bench/async_ring/ranks.h"
#include "bench/async_ring/ring_steps.h"
#include "bench/async_ring/step_times.h"
#include "tests/gpu/cuda_objects.h"

namespace async_ring {

inline constexpr int kAddThreads = 256;

// As plain as the measured programs' sums: an element a thread.
template <int = 0>
__global__ void add_kernel(float* sum, const float* x, std::size_t count) {
  const std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x;
  if (i < count) sum[i] += x[i];
}
inline void add_in(const unjam_gpu::Stream& stream, float* sum, const float* x, std::size_t count) {
  if (count == 0) return;
  const auto blocks = static_cast<unsigned>((count + kAddThreads - 1) / kAddThreads);
  add_kernel<><<<blocks, kAddThreads, 0, stream.get()>>>(sum, x, count);
  unjam_gpu::check(cudaGetLastError());
}

inline void copy_in(const unjam_gpu::Stream& stream, float* to, const float* from,
                    std::size_t count) {
  if (count == 0) return;
  unjam_gpu::check(
      cudaMemcpyAsync(to, from, count * sizeof(float), cudaMemcpyDeviceToDevice, stream.get()));
}

// Where temporaries come from: allocated in each call, as the measured programs do it, or kept.
enum class Memory { kEachCall, kKept };

// How many floats are kept for temporaries, at most: for vectors of `count`.
inline std::size_t kept_floats(std::size_t count, int ranks) {
  return largest_part(count, ranks) + kStreams;
}

// One for each of `n` streams. Freed at the end, which waits for the GPU.
class Temporaries {
 public:
  Temporaries(const Rank& me, Memory memory, int n, std::size_t count) {
    for (int i = 0; i < n; ++i) {
      if (memory == Memory::kEachCall) {
        own_[i] = unjam_gpu::DeviceMemory(count * sizeof(float));
        at_[i] = own_[i].as<float>();
      } else {
        at_[i] = me.kept.as<float>() + static_cast<std::size_t>(i) * count;
      }
    }
  }
  float* operator[](int i) const { return at_[i]; }

 private:
  unjam_gpu::DeviceMemory own_[kStreams];
  float* at_[kStreams] = {};
};

class AsyncActs {
 public:
  // times: of each step, if it is not nullptr.
  AsyncActs(Ranks& ranks, Rank& me, const RingSteps& ring, std::size_t count,
            const Temporaries& temporaries, StepTimes* times)
      : ranks_(ranks),
        me_(me),
        from_(ranks.at(ring.previous(me.rank))),
        ring_(ring),
        count_(count),
        temporaries_(temporaries),
        times_(times) {}

  void copy_input() {
    copy_in(me_.streams[0], me_.out(), me_.in(), count_);
    me_.copied.record(me_.streams[0]);
    wait_for(me_.streams[1], me_.copied);
  }
  void wait(int stream, int rank, int step) {
    Rank& other = ranks_.at(rank);
    wait_for(me_.streams[stream],
             step < 0 ? other.copied : *other.done[static_cast<std::size_t>(step)]);
  }
  void pull(int stream, int chunk, bool temporary) {
    const Part part = part_of(count_, ring_.chunks(), chunk);
    float* const to = temporary ? temporaries_[stream] : me_.out() + part.first;
    if (times_ != nullptr) times_->begin(StepTimes::kCopy, chunk, me_.streams[stream]);
    copy_in(me_.streams[stream], to, from_.out() + part.first, part.count);
    if (times_ != nullptr) times_->end(me_.streams[stream]);
  }
  void add(int stream, int chunk) {
    const Part part = part_of(count_, ring_.chunks(), chunk);
    if (times_ != nullptr) times_->begin(StepTimes::kSum, chunk, me_.streams[stream]);
    add_in(me_.streams[stream], me_.out() + part.first, temporaries_[stream], part.count);
    if (times_ != nullptr) times_->end(me_.streams[stream]);
  }
  void done(int stream, int step) {
    me_.done[static_cast<std::size_t>(step)]->record(me_.streams[stream]);
  }
  void meet() { ranks_.meet(); }

 private:
  Ranks& ranks_;
  Rank& me_;
  Rank& from_;
  const RingSteps& ring_;
  const std::size_t count_;
  const Temporaries& temporaries_;
  StepTimes* const times_;
};

inline void async_all_reduce(Ranks& ranks, Rank& me, std::size_t count, int batches, Memory memory,
                             StepTimes* times = nullptr) {
  const RingSteps ring{ranks.count(), batches};
  const Temporaries temporaries(me, memory, kStreams, largest_part(count, ring.chunks()));
  AsyncActs acts(ranks, me, ring, count, temporaries, times);
  issue_async_ring(ring, me.rank, acts);
  for (const unjam_gpu::Stream& stream : me.streams) stream.synchronize();
  ranks.meet();  // the next rank has read this one's output
}

class ClassicActs {
 public:
  ClassicActs(const Nccl& nccl, Rank& me, const RingSteps& ring, std::size_t count,
              const Temporaries& temporaries)
      : nccl_(nccl), me_(me), ring_(ring), count_(count), temporary_(temporaries[0]) {}

  void copy_input() { copy_in(me_.streams[0], me_.out(), me_.in(), count_); }
  void exchange(int given, int taken, bool temporary) {
    const Part give = part_of(count_, ring_.chunks(), given);
    const Part take = part_of(count_, ring_.chunks(), taken);
    nccl_.exchange(me_.communicator, me_.out() + give.first, give.count, ring_.next(me_.rank),
                   temporary ? temporary_ : me_.out() + take.first, take.count,
                   ring_.previous(me_.rank), me_.streams[0].get());
  }
  void add(int chunk) {
    const Part part = part_of(count_, ring_.chunks(), chunk);
    add_in(me_.streams[0], me_.out() + part.first, temporary_, part.count);
  }

 private:
  const Nccl& nccl_;
  Rank& me_;
  const RingSteps& ring_;
  const std::size_t count_;
  float* const temporary_;
};

inline void classic_all_reduce(const Nccl& nccl, Ranks& ranks, Rank& me, std::size_t count,
                               Memory memory) {
  const RingSteps ring{ranks.count(), 1};
  const Temporaries temporaries(me, memory, 1, largest_part(count, ring.chunks()));
  ClassicActs acts(nccl, me, ring, count, temporaries);
  issue_classic_ring(ring, me.rank, acts);
  me.streams[0].synchronize();
}

}  // namespace async_ring
