// copy_engines: large collectives whose sends copy engines carry (UNJAM_DMA), beside the same by
// blocks alone, NCCL, and bare copies both ways at once, in one run. All ranks are of this process,
// rank r on GPU r. A line of JSON for each row on stdout.
//
//   copy_engines --largest BYTES --seconds S
//
// Each all-reduce is compared with that of the plan by blocks, bit by bit: sums are made in the
// same order.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "bench/async_ring/nccl_api.h"
#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

__global__ void fill_kernel(std::uint32_t* x, std::size_t words, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    std::uint32_t r = static_cast<std::uint32_t>(i) * 2654435761u + seed * 0x85ebca6bu;
    r ^= r >> 16;
    r *= 0x7feb352du;
    r ^= r >> 15;
    x[i] = (r & 0x807fffffu) | 0x3f800000u;
  }
}
__global__ void differ_kernel(const std::uint32_t* x, const std::uint32_t* y, std::size_t words,
                              unsigned long long* differ) {
  unsigned long long own = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    own += x[i] != y[i] ? 1 : 0;
  }
  if (own != 0) atomicAdd(differ, own);
}

enum class Kind { kAllReduce, kReduceScatter };
const char* name_of(Kind kind) {
  return kind == Kind::kAllReduce ? "all_reduce" : "reduce_scatter";
}

// Of a rank: input, output, and what the plan by blocks has made of it.
struct Buffers {
  explicit Buffers(std::size_t bytes) : input(bytes), output(bytes), expected(bytes) {}
  DeviceMemory input, output, expected, differ{sizeof(unsigned long long)};
  Stream stream;
  Event begin, end;
};

// How a job is set up.
struct Way {
  const char* name;
  std::vector<std::pair<const char*, const char*>> environment;
};

class Bench {
 public:
  Bench(int ranks, std::size_t largest, double seconds)
      : ranks_(ranks), seconds_(seconds), barrier_(ranks) {
    buffers_.resize(static_cast<std::size_t>(ranks));
    each([&](int r) {
      buffers_[at(r)] = std::make_unique<Buffers>(largest);
      fill_kernel<<<512, 512, 0, of(r).stream.get()>>>(of(r).input.as<std::uint32_t>(), largest / 4,
                                                       static_cast<std::uint32_t>(r) + 1);
      check(cudaGetLastError());
      of(r).stream.synchronize();
    });
  }

  void run(const Way& way, const std::vector<Kind>& kinds, const std::vector<std::size_t>& sizes,
           bool is_expected) {
    for (const auto& [name, value] : way.environment) setenv(name, value, 1);
    {
      unjamConfig_t config = cuda_config();
      const Job job(ranks_, config);
      for (const Kind kind : kinds) {
        for (const std::size_t bytes : sizes) measure(job, way, kind, bytes, is_expected);
      }
    }
    for (const auto& [name, value] : way.environment) unsetenv(name);
  }

  void run_nccl(const async_ring::Nccl& nccl, const std::vector<std::size_t>& sizes) {
    const auto communicators = nccl.communicators(ranks_);
    for (const std::size_t bytes : sizes) {
      std::vector<std::vector<double>> us(at(ranks_));
      each([&](int r) {
        us[at(r)] = time(r, [&] {
          nccl.all_reduce(communicators[at(r)], of(r).input.as<float>(), of(r).output.as<float>(),
                          bytes / 4, of(r).stream.get());
        });
      });
      report("nccl", Kind::kAllReduce, bytes, slowest(us), "");
    }
    for (int r = 0; r < ranks_; ++r) nccl.destroy(communicators[at(r)]);
  }

  // Half of the bytes to the peer, and half again, as an all-reduce of two ranks moves them.
  void run_bare(const std::vector<std::size_t>& sizes) {
    if (ranks_ != 2) return;
    each([&](int r) {
      const cudaError_t code = cudaDeviceEnablePeerAccess(1 - r, 0);
      if (code != cudaErrorPeerAccessAlreadyEnabled) check(code);
      cudaGetLastError();
    });
    for (const std::size_t bytes : sizes) {
      std::vector<std::vector<double>> us(2);
      each([&](int r) {
        us[at(r)] = time(r, [&] {
          for (int half = 0; half < 2; ++half) {
            check(cudaMemcpyAsync(of(1 - r).output.as<char>() + half * (bytes / 2),
                                  of(r).input.as<char>() + half * (bytes / 2), bytes / 2,
                                  cudaMemcpyDeviceToDevice, of(r).stream.get()));
          }
        });
      });
      report("bare copies", Kind::kAllReduce, bytes, slowest(us), "");
    }
  }

 private:
  static std::size_t at(int i) { return static_cast<std::size_t>(i); }
  Buffers& of(int r) { return *buffers_[at(r)]; }
  void each(const std::function<void(int)>& f) const {
    unjam_gpu::each(ranks_, [&](int r) {
      check(cudaSetDevice(r));
      f(r);
    });
  }

  // Times of calls in a row, each batch by events, in microseconds a call.
  std::vector<double> time(int r, const std::function<void()>& f) {
    constexpr int kBatches = 7;
    int calls = 2;
    std::vector<double> us;
    for (int batch = -1; batch < kBatches; ++batch) {
      of(r).stream.synchronize();
      barrier_.meet();
      of(r).begin.record(of(r).stream);
      for (int i = 0; i < calls; ++i) f();
      of(r).end.record(of(r).stream);
      of(r).stream.synchronize();
      const double one = us_between(of(r).begin, of(r).end) / calls;
      if (batch >= 0) us.push_back(one);
      if (batch >= 0) continue;
      // As many on all ranks.
      if (r == 0)
        calls_ = std::max(2, std::min(40, static_cast<int>(seconds_ * 1e6 / kBatches / one)));
      barrier_.meet();
      calls = calls_;
    }
    return us;
  }
  static std::vector<double> slowest(const std::vector<std::vector<double>>& us) {
    std::vector<double> most = us.front();
    for (const auto& rank : us) {
      for (std::size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], rank[i]);
    }
    return most;
  }

  void measure(const Job& job, const Way& way, Kind kind, std::size_t bytes, bool is_expected) {
    std::vector<std::vector<double>> us(at(ranks_));
    std::vector<unsigned long long> wrong(at(ranks_));
    job.run([&](const Member& me) {
      const int r = me.rank;
      me.doing(std::string(way.name) + " " + name_of(kind) + " " + std::to_string(bytes));
      Buffers& b = of(r);
      unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
      options.stream = b.stream.get();
      options.stream_order = UNJAM_STREAM_SYNC;
      const std::string key = std::string(name_of(kind)) + std::to_string(bytes);
      const std::size_t out = kind == Kind::kAllReduce ? bytes : bytes / at(ranks_);
      const auto call = [&] {
        if (kind == Kind::kAllReduce) {
          check(unjamAllReduce(me.all, key.c_str(), b.input.get(), b.output.get(), bytes / 4,
                               UNJAM_FLOAT32, UNJAM_SUM, &options, nullptr));
        } else {
          check(unjamReduceScatter(me.all, key.c_str(), b.input.get(), b.output.get(), out / 4,
                                   UNJAM_FLOAT32, UNJAM_SUM, &options, nullptr));
        }
      };
      us[at(r)] = time(r, call);
      // Two more, into an output that has nothing right in it.
      const cudaStream_t s = b.stream.get();
      check(cudaMemsetAsync(b.output.get(), 0xff, bytes, s));
      b.stream.synchronize();
      barrier_.meet();
      for (int i = 0; i < 2; ++i) call();
      if (is_expected && kind == Kind::kAllReduce) {
        check(cudaMemcpyAsync(b.expected.get(), b.output.get(), out, cudaMemcpyDeviceToDevice, s));
      } else if (kind == Kind::kAllReduce) {
        check(cudaMemsetAsync(b.differ.get(), 0, sizeof(unsigned long long), s));
        differ_kernel<<<512, 512, 0, s>>>(b.output.as<std::uint32_t>(),
                                          b.expected.as<std::uint32_t>(), out / 4,
                                          b.differ.as<unsigned long long>());
        check(cudaMemcpyAsync(&wrong[at(r)], b.differ.get(), sizeof(unsigned long long),
                              cudaMemcpyDeviceToHost, s));
      }
      b.stream.synchronize();
      barrier_.meet();
    });
    unsigned long long all = 0;
    for (const unsigned long long x : wrong) all += x;
    std::string more = ", \"wrong\": " + std::to_string(all);
    if (is_expected || kind != Kind::kAllReduce) more = "";
    std::uint64_t without = 0, calls = 0;
    for (const Member& m : job.members()) {
      without += without_engine(m.context);
      calls += stats_of(m.context).submitted;
    }
    const std::string all_info = info(job.member(0).context), name = "\"copy_engines\":";
    const std::size_t from = all_info.find(name);
    more += ", \"calls\": " + std::to_string(calls) +
            ", \"without_engine\": " + std::to_string(without);
    if (from != std::string::npos) {
      more += ", " + all_info.substr(from, all_info.find('}', from) + 1 - from);
    }
    report(way.name, kind, bytes, slowest(us), more);
  }

  void report(const char* way, Kind kind, std::size_t bytes, std::vector<double> us,
              const std::string& more) {
    const Spread s = spread(us);
    // A call of two ranks moves the vector once in each direction, a reduce-scatter half of it.
    const double n = ranks_;
    const double factor = (kind == Kind::kAllReduce ? 2 : 1) * (n - 1) / n;
    std::printf(
        "{\"way\": \"%s\", \"kind\": \"%s\", \"bytes\": %zu, \"us\": %.1f, \"busbw\": %.1f%s}\n",
        way, name_of(kind), bytes, s.median, static_cast<double>(bytes) * factor / s.median / 1e3,
        more.c_str());
    Watchdog::instance().alive();
  }

  const int ranks_;
  const double seconds_;
  Barrier barrier_;
  int calls_ = 2;
  std::vector<std::unique_ptr<Buffers>> buffers_;
};

}  // namespace

int main(int argc, char** argv) {
  load_eagerly();
  setvbuf(stdout, nullptr, _IONBF, 0);
  Options options(argc, argv);
  const int ranks = options.integer("ranks", device_count(), "of the job, one a GPU");
  const int largest = options.integer("largest", 1024, "MiB of the largest vector");
  const int milliseconds = options.integer("ms", 150, "about so long for each row");
  options.done(3600, 300);
  if (ranks < 2) fail("at least two GPUs are needed");
  const std::size_t most = static_cast<std::size_t>(largest) * kMiB;
  std::vector<std::size_t> sizes;
  for (std::size_t bytes = 16 * kMiB; bytes <= most; bytes *= 4) sizes.push_back(bytes);
  Bench bench(ranks, most, milliseconds / 1e3);
  bench.run_bare(sizes);
  const async_ring::Nccl nccl("");
  if (nccl.there()) bench.run_nccl(nccl, sizes);
  for (const std::size_t bytes : sizes) {
    const std::vector<std::size_t> one{bytes};
    const std::vector<Kind> kinds{Kind::kAllReduce, Kind::kReduceScatter};
    bench.run({"blocks 32", {}}, kinds, one, true);
    bench.run({"blocks 16", {{"UNJAM_LANES", "16"}}}, kinds, one, false);
    bench.run({"blocks 8", {{"UNJAM_LANES", "8"}}}, kinds, one, false);
    bench.run(
        {"dma 32", {{"UNJAM_DMA", "on"}, {"UNJAM_DMA_FROM", "1M"}, {"UNJAM_DMA_LANES", "32"}}},
        kinds, one, false);
    bench.run(
        {"dma 16", {{"UNJAM_DMA", "on"}, {"UNJAM_DMA_FROM", "1M"}, {"UNJAM_DMA_LANES", "16"}}},
        kinds, one, false);
    bench.run(
        {"dma 16 of 16", {{"UNJAM_DMA", "on"}, {"UNJAM_DMA_FROM", "1M"}, {"UNJAM_LANES", "16"}}},
        kinds, one, false);
    bench.run({"dma 8 of 8", {{"UNJAM_DMA", "on"}, {"UNJAM_DMA_FROM", "1M"}, {"UNJAM_LANES", "8"}}},
              kinds, one, false);
  }
  std::printf("done\n");
  return 0;
}
