// gate: measures one row of the gate set at a time, for bench/ab.py, which runs several builds of
// the library side by side and gives each its turn.
//
// A line on stdin names a row; the answer is a line on stdout, {"row": …, "us": …, "bits": …}: the
// time of a call at the slowest rank, and a hash of what all ranks have received. The first answer,
// unasked, names the library that is measured. "rows" lists the rows, "counts" tells how many calls
// the GPUs have done in which way, "end" ends the program.
//
// All ranks are of this process, rank r on GPU r. Inputs are random floats, the same in every
// build, so equal bits mean equal order of the sums.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/holds.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr std::size_t kKiB = 1024, kMiB = kKiB * 1024, kGiB = kMiB * 1024;
constexpr std::size_t kWork = 4 * kGiB;  // of each rank
constexpr std::size_t kHeap = 256 * kMiB;

// ---- kernels ----

__device__ std::uint32_t scramble(std::uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Floats of either sign around one, which differ by rank.
__global__ void fill_kernel(float* x, std::size_t count, std::uint32_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const std::uint32_t r = scramble(static_cast<std::uint32_t>(i) * 2654435761u + seed);
    x[i] = __uint_as_float((r & 0x807fffffu) | 0x3f800000u);
  }
}

// A sum over words and their places: in whatever order it is made, the same.
__global__ void hash_kernel(const std::uint32_t* x, std::size_t words, unsigned long long* sum) {
  unsigned long long own = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < words;
       i += std::size_t{gridDim.x} * blockDim.x) {
    own += std::uint64_t{scramble(x[i] + static_cast<std::uint32_t>(i))} * (2 * i + 1);
  }
  atomicAdd(sum, own);
}

// More code than an instruction cache holds: 8,192 instructions, which the compiler sees as 32.
#define MAD_1 "mad.lo.u32 %0, %0, 1664525, 1013904223;\n"
#define MAD_16 \
  MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1 MAD_1
#define MAD_256                                                                              \
  MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 MAD_16 \
      MAD_16 MAD_16 MAD_16
__global__ void evict_kernel(std::uint32_t* out, std::uint32_t x) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile(MAD_256 : "+r"(x));
  if (x == 0) *out = x;  // so that it is not left out
}

// ---- ranks ----

struct Rank {
  const Member* me = nullptr;
  Stream stream, side;
  Event begin, end;
  DeviceMemory work{kWork};
  DeviceMemory sum{sizeof(unsigned long long)};
  void* heap = nullptr;

  float* at(std::size_t bytes) const { return work.as<float>() + bytes / sizeof(float); }
};

class Gate {
 public:
  explicit Gate(const Job& job) : job_(job), barrier_(job.ranks()) {
    ranks_.resize(static_cast<std::size_t>(job.ranks()));
    job.run([&](const Member& me) {
      auto made = std::make_unique<Rank>();
      made->me = &me;
      check(unjamMemAlloc(me.context, kHeap, &made->heap));
      ranks_[static_cast<std::size_t>(me.rank)] = std::move(made);
    });
    make_rows();
  }
  ~Gate() {
    job_.run([&](const Member& me) {
      auto& rank = ranks_[static_cast<std::size_t>(me.rank)];
      check(unjamMemFree(me.context, rank->heap));
      rank.reset();
    });
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  std::vector<std::string> rows() const {
    std::vector<std::string> names;
    for (const auto& [name, row] : rows_) names.push_back(name);
    return names;
  }

  std::string measure(const std::string& name) {
    const auto found = std::find_if(rows_.begin(), rows_.end(),
                                    [&](const auto& row) { return row.first == name; });
    if (found == rows_.end()) return "{\"error\": \"no row " + name + "\"}";
    std::vector<double> us(ranks_.size());
    std::vector<std::uint64_t> bits(ranks_.size());
    job_.run([&](const Member& me) {
      me.doing(name);
      const auto r = static_cast<std::size_t>(me.rank);
      Rank& rank = *ranks_[r];
      const auto words = kWork / sizeof(float);
      // Rows leave sums behind: all begin with the same.
      fill(rank, rank.at(0), words);
      barrier_.meet();
      const Measured m = found->second(rank);
      us[r] = m.us;
      bits[r] = hash(rank, m.output, m.bytes);
      barrier_.meet();
    });
    std::uint64_t all = 0;
    for (const std::uint64_t b : bits) all = mix(all, b);
    char line[256];
    std::snprintf(line, sizeof(line), "{\"row\": \"%s\", \"us\": %.4f, \"bits\": \"%016llx\"}",
                  name.c_str(), *std::max_element(us.begin(), us.end()),
                  static_cast<unsigned long long>(all));
    return line;
  }

  std::string counts() const {
    std::uint64_t submitted = 0, without = 0, early = 0;
    for (const auto& rank : ranks_) {
      submitted += stats_of(rank->me->context).submitted;
      without += without_engine(rank->me->context);
      early += figure(rank->me->context, "calls_begun_early");
    }
    char line[256];
    std::snprintf(line, sizeof(line),
                  "{\"calls\": %llu, \"without_engine\": %llu, \"begun_early\": %llu}",
                  static_cast<unsigned long long>(submitted),
                  static_cast<unsigned long long>(without), static_cast<unsigned long long>(early));
    return line;
  }

 private:
  struct Measured {
    double us = 0;
    const void* output = nullptr;
    std::size_t bytes = 0;
  };
  using Row = std::function<Measured(Rank&)>;

  static void fill(const Rank& rank, void* x, std::size_t floats) {
    fill_kernel<<<512, 512, 0, rank.stream.get()>>>(static_cast<float*>(x), floats,
                                                    static_cast<std::uint32_t>(rank.me->rank) + 1);
    check(cudaGetLastError());
    rank.stream.synchronize();
  }

  static std::uint64_t hash(const Rank& rank, const void* x, std::size_t bytes) {
    const cudaStream_t stream = rank.stream.get();
    check(cudaMemsetAsync(rank.sum.get(), 0, sizeof(unsigned long long), stream));
    hash_kernel<<<512, 512, 0, stream>>>(static_cast<const std::uint32_t*>(x),
                                         bytes / sizeof(std::uint32_t),
                                         rank.sum.as<unsigned long long>());
    unsigned long long sum = 0;
    check(cudaMemcpyAsync(&sum, rank.sum.get(), sizeof(sum), cudaMemcpyDeviceToHost, stream));
    rank.stream.synchronize();
    return sum;
  }

  enum class Kind { kAllReduce, kAllGather, kBroadcast };
  // bytes: of the vector, which of an all-gather is what comes out. request: nullptr: in a stream.
  static void call(const Rank& rank, Kind kind, const std::string& key, float* send, float* recv,
                   std::size_t bytes, unjamRequest_t* request = nullptr) {
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.stream = rank.stream.get();
    options.stream_order = UNJAM_STREAM_SYNC;
    const unjamCallOptions_t* const o = request == nullptr ? &options : nullptr;
    const std::size_t count = bytes / sizeof(float);
    const auto n = static_cast<std::size_t>(rank.me->ranks);
    // In place again and again a sum would grow past all bounds.
    const unjamOp_t op = send == recv ? UNJAM_AVG : UNJAM_SUM;
    switch (kind) {
      case Kind::kAllReduce:
        return check(unjamAllReduce(rank.me->all, key.c_str(), send, recv, count, UNJAM_FLOAT32, op,
                                    o, request));
      case Kind::kAllGather:
        return check(unjamAllGather(rank.me->all, key.c_str(), send, recv, count / n, UNJAM_FLOAT32,
                                    o, request));
      case Kind::kBroadcast:
        return check(unjamBroadcast(rank.me->all, key.c_str(), send, recv, count, UNJAM_FLOAT32, 0,
                                    o, request));
    }
  }

  // `calls` in a row in the stream, behind as many as warm it up.
  double in_stream(Rank& rank, int calls, const std::function<void(int)>& f) {
    const int warm = std::max(2, calls / 10);
    for (int i = 0; i < warm; ++i) f(i);
    rank.stream.synchronize();
    barrier_.meet();
    rank.begin.record(rank.stream);
    for (int i = 0; i < calls; ++i) f(i);
    rank.end.record(rank.stream);
    rank.stream.synchronize();
    return us_between(rank.begin, rank.end) / calls;
  }

  static int calls_of(std::size_t bytes) {
    return bytes <= 64 * kKiB   ? 600
           : bytes <= kMiB      ? 300
           : bytes <= 8 * kMiB  ? 80
           : bytes <= 64 * kMiB ? 24
                                : 4;
  }

  static std::string size_text(std::size_t bytes) {
    return bytes >= kGiB   ? std::to_string(bytes / kGiB) + "G"
           : bytes >= kMiB ? std::to_string(bytes / kMiB) + "M"
                           : std::to_string(bytes / kKiB) + "K";
  }

  void add(std::string name, Row row) { rows_.emplace_back(std::move(name), std::move(row)); }

  void add_in_stream(const std::string& name, Kind kind, std::size_t bytes,
                     std::function<std::pair<float*, float*>(const Rank&)> buffers) {
    add(name, [=, this](Rank& rank) {
      const auto [send, recv] = buffers(rank);
      const double us = in_stream(rank, calls_of(bytes), [&, send = send, recv = recv](int) {
        call(rank, kind, name, send, recv, bytes);
      });
      return Measured{us, recv, bytes};
    });
  }

  // `calls` at a time beside streams, in an order that `order` gives, each in place.
  Measured outstanding(Rank& rank, const std::string& name, int calls, std::size_t bytes,
                       const std::vector<int>& order, int repeats) {
    std::vector<double> us;
    for (int repeat = 0; repeat <= repeats; ++repeat) {
      barrier_.meet();
      const std::uint64_t begin = now_ns();
      std::vector<unjamRequest_t> requests(static_cast<std::size_t>(calls));
      for (const int k : order) {
        float* const x = rank.at(static_cast<std::size_t>(k) * bytes);
        call(rank, Kind::kAllReduce, name + key_of(k), x, x, bytes,
             &requests[static_cast<std::size_t>(k)]);
      }
      for (const unjamRequest_t request : requests) rank.me->wait(request, name);
      if (repeat > 0) us.push_back(us_since(begin) / calls);
    }
    return {spread(us).median, rank.at(0), static_cast<std::size_t>(calls) * bytes};
  }

  static std::vector<int> in_order(int n) {
    std::vector<int> order(static_cast<std::size_t>(n));
    for (int i = 0; i < n; ++i) order[static_cast<std::size_t>(i)] = i;
    return order;
  }

  void make_rows() {
    const std::pair<const char*, Kind> kinds[] = {{"all_reduce", Kind::kAllReduce},
                                                  {"all_gather", Kind::kAllGather},
                                                  {"broadcast", Kind::kBroadcast}};
    const auto apart = [](const Rank& rank) { return std::pair(rank.at(0), rank.at(kGiB)); };
    for (const auto& [kind_name, kind] : kinds) {
      for (const std::size_t bytes : {kKiB, 32 * kKiB, kMiB, 8 * kMiB, 64 * kMiB, kGiB}) {
        add_in_stream(std::string("stream/") + kind_name + "/" + size_text(bytes), kind, bytes,
                      apart);
      }
    }
    for (const std::size_t bytes : {kMiB, 64 * kMiB}) {
      const std::string size = size_text(bytes);
      add_in_stream("in_place/all_reduce/" + size, Kind::kAllReduce, bytes,
                    [](const Rank& rank) { return std::pair(rank.at(0), rank.at(0)); });
      add_in_stream("misaligned/all_reduce/" + size, Kind::kAllReduce, bytes,
                    [](const Rank& r) { return std::pair(r.at(0) + 1, r.at(kGiB) + 3); });
      add_in_stream("heap/all_reduce/" + size, Kind::kAllReduce, bytes, [](const Rank& rank) {
        return std::pair(rank.at(0), static_cast<float*>(rank.heap));
      });
    }
    add("outstanding/64x64K",
        [this](Rank& rank) { return outstanding(rank, "o", 64, 64 * kKiB, in_order(64), 8); });
    add("outstanding/64x64M",
        [this](Rank& rank) { return outstanding(rank, "O", 64, 64 * kMiB, in_order(64), 1); });
    add("disorder/32x64K", [this](Rank& rank) {
      std::vector<int> order = in_order(32);
      std::mt19937_64 random(static_cast<std::uint64_t>(rank.me->rank) + 7);
      std::shuffle(order.begin(), order.end(), random);
      return outstanding(rank, "d", 32, 64 * kKiB, order, 8);
    });
    for (const std::size_t bytes : {kKiB, kMiB}) {
      const std::string name = "cold/all_reduce/" + size_text(bytes);
      add(name, [=, this](Rank& rank) { return cold(rank, name, bytes); });
    }
    add("behind_1G/all_reduce/8K", [this](Rank& rank) { return short_behind_large(rank); });
    add("late_rank/all_reduce/64M", [this](Rank& rank) { return late_rank(rank); });
  }

  // Each call behind a kernel that evicts the instruction cache; the kernel's time is not counted.
  Measured cold(Rank& rank, const std::string& name, std::size_t bytes) {
    std::vector<double> us;
    for (int i = 0; i < 24; ++i) {
      barrier_.meet();
      evict_kernel<<<132, 32, 0, rank.stream.get()>>>(rank.sum.as<std::uint32_t>(), 1);
      check(cudaGetLastError());
      rank.begin.record(rank.stream);
      call(rank, Kind::kAllReduce, name, rank.at(0), rank.at(kGiB), bytes);
      rank.end.record(rank.stream);
      rank.stream.synchronize();
      if (i >= 4) us.push_back(us_between(rank.begin, rank.end));
    }
    return {spread(us).median, rank.at(kGiB), bytes};
  }

  // A short call that is made while a large one is under way.
  Measured short_behind_large(Rank& rank) {
    std::vector<double> us;
    for (int i = 0; i < 8; ++i) {
      unjamRequest_t large = nullptr, small = nullptr;
      barrier_.meet();
      call(rank, Kind::kAllReduce, "large", rank.at(0), rank.at(kGiB), kGiB, &large);
      usleep(300);
      const std::uint64_t begin = now_ns();
      call(rank, Kind::kAllReduce, "small", rank.at(2 * kGiB), rank.at(3 * kGiB), 8 * kKiB, &small);
      rank.me->wait(small, "the short call");
      if (i > 0) us.push_back(us_since(begin));
      rank.me->wait(large, "the large call");
    }
    return {spread(us).median, rank.at(3 * kGiB), 8 * kKiB};
  }

  // From the moment at which the last rank comes, half a millisecond after the others, to its end.
  Measured late_rank(Rank& rank) {
    constexpr unsigned long long kLateNs = 500'000;
    constexpr std::size_t kBytes = 64 * kMiB;
    const bool late = rank.me->rank == rank.me->ranks - 1;
    std::vector<double> us;
    for (int i = 0; i < 12; ++i) {
      barrier_.meet();
      if (late) spin_kernel<><<<1, 1, 0, rank.stream.get()>>>(kLateNs);
      check(cudaGetLastError());
      rank.begin.record(rank.stream);
      call(rank, Kind::kAllReduce, "late", rank.at(0), rank.at(kGiB), kBytes);
      rank.end.record(rank.stream);
      rank.stream.synchronize();
      if (i >= 2) us.push_back(us_between(rank.begin, rank.end));
    }
    return {late ? spread(us).median : 0, rank.at(kGiB), kBytes};
  }

  const Job& job_;
  Barrier barrier_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<std::pair<std::string, Row>> rows_;
};

}  // namespace

int main(int argc, char** argv) {
  load_eagerly();
  Options options(argc, argv);
  const int ranks = options.integer("ranks", device_count(), "of the job, one a GPU");
  options.done(3600, 300);
  if (ranks < 2) fail("at least two GPUs are needed");
  unjamConfig_t config = cuda_config();
  config.heap_bytes = kHeap + kMiB;
  const Job job(ranks, config);
  Gate gate(job);
  Dl_info library{};
  dladdr(reinterpret_cast<void*>(&unjamInitAll), &library);
  std::printf("{\"library\": \"%s\", \"ranks\": %d}\n", library.dli_fname, ranks);
  for (std::string line; std::getline(std::cin, line) && line != "end";) {
    Watchdog::instance().alive();
    if (line == "rows") {
      std::string names;
      for (const std::string& name : gate.rows()) {
        names += (names.empty() ? "\"" : ", \"") + name + "\"";
      }
      std::printf("{\"rows\": [%s]}\n", names.c_str());
    } else if (line == "counts") {
      std::printf("%s\n", gate.counts().c_str());
    } else {
      std::printf("%s\n", gate.measure(line).c_str());
    }
  }
  return 0;
}
