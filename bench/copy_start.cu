// copy_start: what it costs to start a copy to another GPU, by who starts it. One process, two
// GPUs. A line of JSON for each size and way on stdout:
//
//   cpu     the GPU says that data are ready; a thread of the host waits for that, then copies
//   gpu     a GPU thread posts the copy to the thread that serves it (engine/copy_ring.h)
//   blocks  blocks of the GPU copy
//   bare    copies queued by the host ahead of time: their rate alone
//
// "us": from the data's being ready to the other GPU's having seen a flag behind the copy: half a
// round trip of flags, measured in the same run, is taken off. "gbs": copies back to back, of which
// `gpu` has four under way. What arrived is compared.
//
// Source: M. Hwang et al., "ARK: GPU-driven Code Execution for Distributed Deep Learning" (NSDI
// 2023), section 6.1, the microbenchmark.
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/atomics.h"
#include "device/cuda/hardware/atomics.cuh"
#include "device/cuda/hardware/block.cuh"
#include "device/cuda/host/copy_thread.h"
#include "tests/gpu/cuda_objects.h"

using namespace unjam_gpu;

namespace {

constexpr int kRounds = 40, kBlocks = 16, kUnderWay = 4;
constexpr std::size_t kLeast = 4 << 10, kLargest = 64 << 20;

// Words of one GPU that the other stores into.
struct Words {
  std::uint64_t flag, ack, ready, arrived;
};

// On the other GPU: answers so many flags.
__global__ void answer(Words* own, Words* others, std::uint64_t from, int rounds) {
  for (int i = 1; i <= rounds; ++i) {
    while (unjam::load_acquire(own->flag) < from + i) {
    }
    unjam::store_system(others->ack, from + i);
  }
}
__device__ void await_ack(Words* own, std::uint64_t n) {
  while (unjam::load_acquire(own->ack) < n) {
  }
}
// Flags alone.
__global__ void ping(Words* own, Words* others, std::uint64_t from, int rounds, float* us) {
  for (int i = 1; i <= rounds; ++i) {
    const std::uint64_t begin = unjam::global_ns();
    unjam::store_system(others->flag, from + i);
    await_ack(own, from + i);
    us[i - 1] = static_cast<float>(unjam::global_ns() - begin) * 1e-3f;
  }
}

// One thread posts; with four under way if nobody is told of them one by one.
__global__ void post_and_tell(unjam::CopyRing* ring, std::uint64_t* done, std::uint64_t first,
                              unjam::CopyPost post, Words* own, Words* others, std::uint64_t from,
                              int rounds, float* us) {
  for (int i = 1; i <= rounds; ++i) {
    const std::uint64_t number = first + i - 1, begin = unjam::global_ns();
    unjam::post_copy(*ring, number, post);
    while (unjam::load_acquire(*done) <= number) {
    }
    unjam::store_system(others->flag, from + i);
    await_ack(own, from + i);
    us[i - 1] = static_cast<float>(unjam::global_ns() - begin) * 1e-3f;
  }
}
__global__ void post_all(unjam::CopyRing* ring, std::uint64_t* done, std::uint64_t first,
                         unjam::CopyPost post, int rounds, float* us) {
  const std::uint64_t begin = unjam::global_ns();
  for (int i = 0; i < rounds; ++i) {
    while (unjam::load_acquire(*done) + kUnderWay <= first + i) {
    }
    unjam::post_copy(*ring, first + i, post);
  }
  while (unjam::load_acquire(*done) < first + rounds) {
  }
  *us = static_cast<float>(unjam::global_ns() - begin) * 1e-3f / static_cast<float>(rounds);
}

__device__ void copy_words(const uint4* from, uint4* to, std::size_t words) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    to[i] = from[i];
  }
}
// All blocks have come; their stores before are behind the last one's fence.
__device__ void meet(unsigned* count, unsigned round) {
  unjam::fence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    atomicAdd(count, 1u);
    while (*const_cast<volatile unsigned*>(count) < gridDim.x * round) {
    }
  }
  __syncthreads();
}
__global__ void copy_by_blocks(const uint4* source, uint4* target, std::size_t words, Words* own,
                               Words* others, std::uint64_t from, int rounds, unsigned* count,
                               bool tells, float* us) {
  const std::uint64_t first = unjam::global_ns();
  const bool leads = blockIdx.x == 0 && threadIdx.x == 0;
  for (int i = 1; i <= rounds; ++i) {
    const std::uint64_t begin = unjam::global_ns();
    copy_words(source, target, words);
    meet(count, static_cast<unsigned>(2 * i - 1));
    if (leads && tells) {
      unjam::fence_system();
      unjam::store_system(others->flag, from + i);
      await_ack(own, from + i);
      us[i - 1] = static_cast<float>(unjam::global_ns() - begin) * 1e-3f;
    }
    meet(count, static_cast<unsigned>(2 * i));
  }
  if (leads && !tells) {
    *us = static_cast<float>(unjam::global_ns() - first) * 1e-3f / static_cast<float>(rounds);
  }
}

// Of the way by the host: the data are ready; and the other GPU has answered.
__global__ void say_ready(std::uint64_t* begin) { *begin = unjam::global_ns(); }
__global__ void take_ack(Words* own, std::uint64_t n, const std::uint64_t* begin, float* us) {
  await_ack(own, n);
  *us = static_cast<float>(unjam::global_ns() - *begin) * 1e-3f;
}

__global__ void fill(std::uint32_t* x, std::size_t words, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    x[i] = static_cast<std::uint32_t>(i) * 2654435761u + seed;
  }
}
__global__ void differ(const std::uint32_t* x, std::size_t words, std::uint32_t seed,
                       unsigned long long* wrong) {
  unsigned long long own = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    own += x[i] != static_cast<std::uint32_t>(i) * 2654435761u + seed ? 1 : 0;
  }
  if (own != 0) atomicAdd(wrong, own);
}

class Bench {
 public:
  Bench() {
    for (int d = 0; d < 2; ++d) {
      check(cudaSetDevice(d));
      check(cudaDeviceEnablePeerAccess(1 - d, 0));
      sides_[d] = std::make_unique<Side>();
      check(cudaMemset(sides_[d]->words.get(), 0, sizeof(Words)));
    }
    check(cudaSetDevice(0));
    check(cudaMemset(done_.get(), 0, 2 * sizeof(std::uint64_t)));
    check(cudaDeviceSynchronize());
    std::string error;
    unjam::CopyThread::Options options;
    options.ranks = 2;
    options.most_bytes = 16 << 20;
    thread_ = std::make_unique<unjam::CopyThread>(options);
    rings_ = thread_->allocate(error);
    if (rings_ == nullptr || !thread_->start(done_.as<std::uint64_t>(), error)) fail(error);
  }
  ~Bench() { thread_->stop(); }

  void run() {
    const Spread trip = flags();
    flag_us_ = trip.median / 2;
    std::printf("{\"way\": \"flag\", \"us\": %.2f, \"rounds\": %d}\n", flag_us_, kRounds);
    for (std::size_t bytes = kLeast; bytes <= kLargest; bytes *= 4) {
      refill();
      report("cpu", bytes, by_cpu(bytes), back_to_back_by_cpu(bytes));
      refill();
      report("gpu", bytes, by_gpu(bytes), back_to_back_by_gpu(bytes));
      refill();
      report("blocks", bytes, by_blocks(bytes), back_to_back_by_blocks(bytes));
      refill();
      report("bare", bytes, {}, bare(bytes));
      Watchdog::instance().alive();
    }
  }

 private:
  struct Side {
    DeviceMemory data{kLargest}, words{sizeof(Words)};
    Stream stream;
  };

  Words* words(int d) { return sides_[d]->words.as<Words>(); }
  cudaStream_t stream(int d) { return sides_[d]->stream.get(); }
  float* times() { return times_.as<float>(); }

  // Source data that no copy before has brought.
  void refill() {
    check(cudaSetDevice(0));
    fill<<<256, 512, 0, stream(0)>>>(sides_[0]->data.as<std::uint32_t>(), kLargest / 4, ++seed_);
    sides_[0]->stream.synchronize();
  }
  std::uint64_t begin_answers(int rounds) {
    const std::uint64_t from = told_;
    told_ += static_cast<std::uint64_t>(rounds);
    check(cudaSetDevice(1));
    answer<<<1, 1, 0, stream(1)>>>(words(1), words(0), from, rounds);
    check(cudaGetLastError());
    check(cudaSetDevice(0));
    return from;
  }
  Spread end_rounds() {
    for (auto& side : sides_) side->stream.synchronize();
    // (The first ones find nothing in caches.)
    return spread({times() + kRounds / 4, times() + kRounds});
  }

  Spread flags() {
    const std::uint64_t from = begin_answers(kRounds);
    ping<<<1, 1, 0, stream(0)>>>(words(0), words(1), from, kRounds, times());
    return end_rounds();
  }

  unjam::CopyPost post(std::size_t bytes) {
    return {reinterpret_cast<std::uintptr_t>(sides_[0]->data.get()),
            reinterpret_cast<std::uintptr_t>(sides_[1]->data.get()), bytes};
  }
  Spread by_gpu(std::size_t bytes) {
    const std::uint64_t from = begin_answers(kRounds);
    thread_->expect();
    post_and_tell<<<1, 1, 0, stream(0)>>>(rings_ + 1, done_.as<std::uint64_t>() + 1, posted_,
                                          post(bytes), words(0), words(1), from, kRounds, times());
    posted_ += kRounds;
    return end_rounds();
  }
  double back_to_back_by_gpu(std::size_t bytes) {
    thread_->expect();
    post_all<<<1, 1, 0, stream(0)>>>(rings_ + 1, done_.as<std::uint64_t>() + 1, posted_,
                                     post(bytes), kRounds, times());
    posted_ += kRounds;
    sides_[0]->stream.synchronize();
    return times()[0];
  }

  Spread by_blocks(std::size_t bytes) {
    const std::uint64_t from = begin_answers(kRounds);
    launch_blocks(bytes, from, true);
    return end_rounds();
  }
  double back_to_back_by_blocks(std::size_t bytes) {
    launch_blocks(bytes, 0, false);
    sides_[0]->stream.synchronize();
    return times()[0];
  }
  void launch_blocks(std::size_t bytes, std::uint64_t from, bool tells) {
    check(cudaMemsetAsync(count_.get(), 0, sizeof(unsigned), stream(0)));
    copy_by_blocks<<<kBlocks, 512, 0, stream(0)>>>(
        sides_[0]->data.as<uint4>(), sides_[1]->data.as<uint4>(), bytes / 16, words(0), words(1),
        from, kRounds, count_.as<unsigned>(), tells, times());
    check(cudaGetLastError());
  }

  void copy(std::size_t bytes) {
    check(cudaMemcpyAsync(sides_[1]->data.get(), sides_[0]->data.get(), bytes,
                          cudaMemcpyDeviceToDevice, stream(0)));
  }
  // A flag is a copy, too, behind the data in the same stream.
  Spread by_cpu(std::size_t bytes) {
    const std::uint64_t from = begin_answers(kRounds);
    for (int i = 1; i <= kRounds; ++i) {
      say_ready<<<1, 1, 0, stream(0)>>>(begin_.as<std::uint64_t>());
      sides_[0]->stream.synchronize();
      copy(bytes);
      flag_.as<std::uint64_t>()[0] = from + static_cast<std::uint64_t>(i);
      check(cudaMemcpyAsync(&words(1)->flag, flag_.as<std::uint64_t>(), sizeof(std::uint64_t),
                            cudaMemcpyHostToDevice, stream(0)));
      take_ack<<<1, 1, 0, stream(0)>>>(words(0), from + static_cast<std::uint64_t>(i),
                                       begin_.as<std::uint64_t>(), times() + i - 1);
      sides_[0]->stream.synchronize();
    }
    return end_rounds();
  }
  double back_to_back_by_cpu(std::size_t bytes) {
    const std::uint64_t begin = now_ns();
    for (int i = 0; i < kRounds; ++i) {
      copy(bytes);
      sides_[0]->stream.synchronize();
    }
    return us_since(begin) / kRounds;
  }
  double bare(std::size_t bytes) {
    Event begin, end;
    copy(bytes);
    begin.record(sides_[0]->stream);
    for (int i = 0; i < kRounds; ++i) copy(bytes);
    end.record(sides_[0]->stream);
    sides_[0]->stream.synchronize();
    return us_between(begin, end) / kRounds;
  }

  void report(const char* way, std::size_t bytes, const Spread& s, double each_us) {
    check(cudaSetDevice(1));
    check(cudaMemset(wrong_.get(), 0, sizeof(unsigned long long)));
    differ<<<256, 512>>>(sides_[1]->data.as<std::uint32_t>(), bytes / 4, seed_,
                         wrong_.as<unsigned long long>());
    unsigned long long wrong = 0;
    check(cudaMemcpy(&wrong, wrong_.get(), sizeof(wrong), cudaMemcpyDeviceToHost));
    check(cudaSetDevice(0));
    std::string latency;
    if (s.median > 0) {
      char text[96];
      std::snprintf(text, sizeof(text), ", \"us\": %.2f, \"p10\": %.2f, \"p90\": %.2f",
                    s.median - flag_us_, s.p10 - flag_us_, s.p90 - flag_us_);
      latency = text;
    }
    std::printf("{\"way\": \"%s\", \"bytes\": %zu%s, \"each_us\": %.2f, \"gbs\": %.1f}\n", way,
                bytes, latency.c_str(), each_us, static_cast<double>(bytes) / each_us / 1e3);
    if (wrong != 0) fail(std::string(way) + ": " + std::to_string(wrong) + " words are wrong");
  }

  std::unique_ptr<Side> sides_[2];
  // Of the first GPU, which is current between all methods.
  struct First {
    First() { check(cudaSetDevice(0)); }
  } first_;
  DeviceMemory done_{2 * sizeof(std::uint64_t)}, count_{sizeof(unsigned)},
      begin_{sizeof(std::uint64_t)};
  PinnedMemory times_{kRounds * sizeof(float)}, flag_{sizeof(std::uint64_t)};
  struct Second {
    Second() { check(cudaSetDevice(1)); }
  } second_;
  DeviceMemory wrong_{sizeof(unsigned long long)};
  std::unique_ptr<unjam::CopyThread> thread_;
  unjam::CopyRing* rings_ = nullptr;
  std::uint64_t told_ = 0, posted_ = 0;
  std::uint32_t seed_ = 0;
  double flag_us_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  load_eagerly();
  Options options(argc, argv);
  options.done(600, 60);
  if (device_count() < 2) fail("two GPUs are needed");
  Bench bench;
  bench.run();
  std::printf("done\n");
  return 0;
}
