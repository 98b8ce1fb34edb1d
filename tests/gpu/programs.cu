// The two programs of the DFCCL paper (Sec. 6.1) on GPUs: eight all-reduces of 256 B to 1 MiB, each
// rank in an order of its own; the second program calls cudaDeviceSynchronize after each. Every
// result is checked: integers bit by bit, random floats against float64, and all ranks must have
// the same bits. Prints what disorder costs.
#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kCollectives = 8;
constexpr std::array<std::size_t, kCollectives> kFloats = {64,    256,   1024,   4096,
                                                           16384, 65536, 131072, 262144};
std::size_t offset_of(std::size_t k) {  // in one buffer of all
  return std::accumulate(kFloats.begin(), kFloats.begin() + static_cast<std::ptrdiff_t>(k),
                         std::size_t{0});
}
constexpr std::size_t kAllFloats = 64 + 256 + 1024 + 4096 + 16384 + 65536 + 131072 + 262144;

// ---- data ----

__device__ float input(std::uint64_t seed, int rank, std::size_t i, bool exact) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(rank) * 0x9e3779b97f4a7c15u +
                    static_cast<std::uint64_t>(i) * 0xd1342543de82ef95u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  z ^= z >> 32;
  const auto h = static_cast<std::int64_t>(z);
  return exact ? static_cast<float>(h % 4096)
               : static_cast<float>(static_cast<double>(h) * 0x1p-60);
}

__global__ void make_inputs(float* data, std::size_t n, std::uint64_t seed, int rank, bool exact) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    data[i] = input(seed, rank, i, exact);
  }
}

struct Verdict {
  unsigned long long wrong, digest;
};

__global__ void judge(const float* data, std::size_t n, std::uint64_t seed, int ranks, bool exact,
                      Verdict* verdict) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  unsigned long long wrong = 0, digest = 0;
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) {
    double sum = 0, bound = 0;
    for (int r = 0; r < ranks; ++r) {
      const auto x = static_cast<double>(input(seed, r, i, exact));
      sum += x;
      bound += fabs(x);
    }
    const float got = data[i];
    const bool ok = exact ? static_cast<double>(got) == sum
                          : fabs(static_cast<double>(got) - sum) <= bound * ranks * 0x1p-24;
    wrong += ok ? 0 : 1;
    digest +=
        static_cast<unsigned long long>(__float_as_uint(got)) * (2 * i + 1) * 0x9e3779b97f4a7c15u;
  }
  atomicAdd(&verdict->digest, digest);
  if (wrong != 0) atomicAdd(&verdict->wrong, wrong);
}

// ---- the programs ----

struct Settings {
  int iterations = 0, seeds = 0;
  std::uint64_t seed = 0;
  bool async = false;
};

struct Outcome {
  std::uint64_t digest = 0;
  std::vector<double> us;  // of an iteration
};

class Worker {
 public:
  Worker(const Member& me, const Settings& s)
      : me_(me),
        settings_(s),
        data_(kAllFloats * sizeof(float)),
        verdict_(sizeof(Verdict)),
        cell_(2 * sizeof(std::uint64_t)),
        host_verdict_(sizeof(Verdict)) {
    for (std::size_t k = 0; k < kCollectives; ++k) {
      check(unjamRegisterAllReduce(me.all, std::string(1, static_cast<char>('A' + k)).c_str(),
                                   UNJAM_FLOAT32, UNJAM_SUM, 0, &collectives_[k]));
    }
  }
  ~Worker() {
    for (const unjamCollective_t c : collectives_) check(unjamDeregister(c));
  }

  Outcome run(bool synchronize, bool ordered_calls, std::uint64_t seed) {
    Outcome o;
    std::mt19937_64 random(mix(seed, static_cast<std::uint64_t>(me_.rank)));
    check(cudaMemsetAsync(verdict_.get(), 0, sizeof(Verdict), stream_.get()));
    for (int it = 0; it < settings_.iterations; ++it) {
      const std::uint64_t data_seed = mix(seed, static_cast<std::uint64_t>(it));
      const bool exact = it % 2 == 0;
      std::array<std::size_t, kCollectives> order;
      std::iota(order.begin(), order.end(), std::size_t{0});
      if (!ordered_calls) std::shuffle(order.begin(), order.end(), random);
      make_inputs<<<264, 256, 0, stream_.get()>>>(data_.as<float>(), kAllFloats, data_seed,
                                                  me_.rank, exact);
      check(cudaGetLastError());
      stream_.synchronize();
      largest(0);  // all ranks begin together
      if (it % 16 == 0 || settings_.iterations < 20) {
        me_.doing(std::string(synchronize ? "program 2" : "program 1") + ", seed " +
                  std::to_string(seed) + (ordered_calls ? ", one order" : ", random order") +
                  ", iteration " + std::to_string(it));
      }
      const std::uint64_t begin = now_ns();
      iterate(order, synchronize);
      o.us.push_back(us_since(begin));
      judge<<<264, 256, 0, stream_.get()>>>(data_.as<float>(), kAllFloats, data_seed, me_.ranks,
                                            exact, verdict_.as<Verdict>());
      check(cudaGetLastError());
    }
    auto* verdict = host_verdict_.as<Verdict>();
    check(cudaMemcpyAsync(verdict, verdict_.get(), sizeof(Verdict), cudaMemcpyDeviceToHost,
                          stream_.get()));
    stream_.synchronize();
    if (verdict->wrong != 0) {
      fail("A WRONG NUMBER: rank " + std::to_string(me_.rank) + ", seed " + std::to_string(seed) +
           ": " + std::to_string(verdict->wrong) + " elements");
    }
    o.digest = verdict->digest;
    if (largest(o.digest) != o.digest || ~largest(~o.digest) != o.digest) {
      fail("rank " + std::to_string(me_.rank) + " has other bits than another, seed " +
           std::to_string(seed));
    }
    return o;
  }

 private:
  void iterate(const std::array<std::size_t, kCollectives>& order, bool synchronize) {
    std::array<unjamRequest_t, kCollectives> requests{};
    const unjamCallOptions_t options = [&] {
      unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
      if (settings_.async) {
        o.stream = stream_.get();
        o.stream_order = UNJAM_STREAM_ASYNC;
      }
      return o;
    }();
    for (const std::size_t k : order) {
      float* data = data_.as<float>() + offset_of(k);
      check(unjamRunWithOptions(collectives_[k], data, data, kFloats[k], &options, &requests[k]));
      if (synchronize) check(cudaDeviceSynchronize());
    }
    for (const std::size_t k : order) {
      me_.wait(requests[k], std::string("collective ") + static_cast<char>('A' + k));
    }
  }

  std::uint64_t largest(std::uint64_t value) {
    auto* cell = cell_.as<std::uint64_t>();
    check(cudaMemcpyAsync(cell, &value, sizeof(value), cudaMemcpyHostToDevice, stream_.get()));
    stream_.synchronize();
    unjamRequest_t request = nullptr;
    check(unjamAllReduce(me_.all, "largest", cell, cell + 1, 1, UNJAM_UINT64, UNJAM_MAX, nullptr,
                         &request));
    me_.wait(request, "largest");
    check(cudaMemcpyAsync(&value, cell + 1, sizeof(value), cudaMemcpyDeviceToHost, stream_.get()));
    stream_.synchronize();
    return value;
  }

  const Member& me_;
  const Settings& settings_;
  const Stream stream_;
  const DeviceMemory data_, verdict_, cell_;
  const PinnedMemory host_verdict_;
  std::array<unjamCollective_t, kCollectives> collectives_{};
};

// One rank's; rank 0 prints.
void run_rank(const Member& me, const Settings& s) {
  Worker worker(me, s);
  if (me.rank == 0) {
    std::printf("%-9s %20s %6s %12s %12s %10s %10s %8s %9s\n", "program", "seed", "iters",
                "random us", "ordered us", "p10", "p90", "ratio", "preempt");
  }
  for (const bool synchronize : {false, true}) {
    std::vector<double> ratios;
    for (int i = 0; i < s.seeds; ++i) {
      const std::uint64_t seed = mix(s.seed, static_cast<std::uint64_t>(i));
      const unjamStats_t before = stats_of(me.context);
      const Outcome random = worker.run(synchronize, false, seed);
      const unjamStats_t after = stats_of(me.context);
      const Outcome ordered = worker.run(synchronize, true, seed);
      if (random.digest != ordered.digest) {
        fail("rank " + std::to_string(me.rank) + ", seed " + std::to_string(seed) +
             ": random order gives other bits than one order");
      }
      const Spread a = spread(random.us), b = spread(ordered.us);
      ratios.push_back(a.median / b.median);
      if (me.rank != 0) continue;
      std::printf("%-9s %20llu %6d %12.1f %12.1f %10.1f %10.1f %8.3f %9.2f\n",
                  synchronize ? "program 2" : "program 1", static_cast<unsigned long long>(seed),
                  s.iterations, a.median, b.median, a.p10, a.p90, ratios.back(),
                  static_cast<double>(after.preemptions - before.preemptions) /
                      static_cast<double>(after.lanes) / s.iterations);
    }
    if (me.rank == 0) {
      const Spread r = spread(ratios);
      std::printf(
          "%s: random order costs %.3f of one order (median of %d seeds, %.3f to %.3f; the "
          "goal is 1.3)\n",
          synchronize ? "program 2" : "program 1", r.median, s.seeds, r.p10, r.p90);
    }
  }
  me.doing("done");
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  Settings s;
  s.iterations = options.integer("iterations", 1000, "of each seed and order");
  s.seeds = options.integer("seeds", 10, "how many");
  s.seed = options.seed();
  s.async = options.flag("async", "order the calls behind a stream's work (UNJAM_STREAM_ASYNC)");
  const int ranks = options.integer("ranks", 0, "GPUs to use; 0: all, 4 at most");
  const int per_process = ranks_per_process(options);
  options.done(560, 60);
  load_eagerly();
  const bool child = std::getenv("UNJAM_RANK") != nullptr;
  if (child && per_process > 0) die_with_parent();
  const int n = ranks > 0 ? ranks : std::min(4, device_count());
  if (!child) {
    std::printf("programs: %d ranks, %s, seed %llu\n", n, text_of_processes(per_process).c_str(),
                static_cast<unsigned long long>(s.seed));
  }
  if (per_process > 0 && !child) {
    Children children(n, std::vector<std::string>(argv + 1, argv + argc), per_process);
    const bool ok = children.all_well(550);
    std::printf("programs: %s, %d processes\n", ok ? "PASS" : "FAIL", children.count());
    return ok ? 0 : 1;
  }
  std::unique_ptr<Job> job = child ? join_job(per_process) : start_job(n);
  job->run([&](const Member& me) { run_rank(me, s); });
  if (!child || job->member(0).rank == 0) print_stats(*job);
  job.reset();
  if (!child) std::printf("programs: PASS\n");
  return 0;
}
