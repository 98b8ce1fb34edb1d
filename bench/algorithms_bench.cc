// What the selector's choice costs beside every other algorithm: on the host device, each rank a
// thread, a call at a time and its wait, all algorithms by turns in one run, so that other work on
// the machine moves all of them. Their order changes from round to round, for one that follows its
// like finds its data in caches.
//   algorithms_bench [--ranks 8] [--kind all_reduce] [--sizes 1K,16K,256K] [--rounds 9] [--apart]
//                    [--hosts 1] [--slow 4] [--json FILE]
// A size is a rank's count in bytes, as in the C API. Any kind but send_recv.
//
// With --apart all ranks meet between calls, so that none is ahead: what a call takes until its
// last rank has it (and the meeting). Without, ranks that wait for nobody, as a broadcast's root,
// go ahead. --hosts makes as many processes, each with as many of the ranks, and each counts as a
// host of its own (UNJAM_HOST_ID).
//
// Prints a line a size: the median over the rounds of microseconds a call, by algorithm; "auto" is
// the selector's, behind it over the best of the others. One that takes more than --slow times what
// the selector's takes at first is not measured. --json adds a line a size to the file.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <numeric>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "plan/registry.h"
#include "unjam/unjam.h"

namespace {

void check(unjamResult_t r) {
  if (r == UNJAM_SUCCESS) return;
  std::fprintf(stderr, "%s: %s\n", unjamGetErrorString(r), unjamGetLastError());
  std::exit(1);
}

unjam::Kind kind_named(const std::string& name) {
  for (int k = 0; k < unjam::kNumKinds; ++k) {
    const auto kind = static_cast<unjam::Kind>(k);
    if (kind != unjam::Kind::kSendRecv && name == unjam::to_string(kind)) return kind;
  }
  std::fprintf(stderr, "no kind is named %s\n", name.c_str());
  std::exit(2);
}

std::size_t bytes_of(const std::string& text) {
  char* end = nullptr;
  const std::size_t number = std::strtoull(text.c_str(), &end, 10);
  return *end == 'K' ? number << 10 : *end == 'M' ? number << 20 : number;
}

// One rank's call.
void call(unjamGroup_t group, unjam::Kind kind, const std::string& algorithm,
          const std::vector<float>& in, std::vector<float>& out, std::size_t count) {
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.algorithm = algorithm.c_str();
  const std::string key = algorithm + std::to_string(count);
  unjamRequest_t request = nullptr;
  const float* from = in.data();
  float* to = out.data();
  const char* k = key.c_str();
  using unjam::Kind;
  switch (kind) {
    case Kind::kAllReduce:
      check(
          unjamAllReduce(group, k, from, to, count, UNJAM_FLOAT32, UNJAM_SUM, &options, &request));
      break;
    case Kind::kReduceScatter:
      check(unjamReduceScatter(group, k, from, to, count, UNJAM_FLOAT32, UNJAM_SUM, &options,
                               &request));
      break;
    case Kind::kReduce:
      check(
          unjamReduce(group, k, from, to, count, UNJAM_FLOAT32, UNJAM_SUM, 0, &options, &request));
      break;
    case Kind::kAllGather:
      check(unjamAllGather(group, k, from, to, count, UNJAM_FLOAT32, &options, &request));
      break;
    case Kind::kAllToAll:
      check(unjamAllToAll(group, k, from, to, count, UNJAM_FLOAT32, &options, &request));
      break;
    case Kind::kBroadcast:
      check(unjamBroadcast(group, k, from, to, count, UNJAM_FLOAT32, 0, &options, &request));
      break;
    case Kind::kGather:
      check(unjamGather(group, k, from, to, count, UNJAM_FLOAT32, 0, &options, &request));
      break;
    case Kind::kScatter:
      check(unjamScatter(group, k, from, to, count, UNJAM_FLOAT32, 0, &options, &request));
      break;
    default:
      check(unjamBarrier(group, k, &options, &request));
  }
  check(unjamWait(request, 60000000));
  check(unjamRequestFree(request));
}

constexpr double kRoundUs = 4000;

struct Options {
  int ranks = 8;
  unjam::Kind kind = unjam::Kind::kAllReduce;
  std::vector<std::size_t> sizes = {1 << 10, 16 << 10, 256 << 10};
  int rounds = 9;
  bool apart = false;
  int hosts = 1;
  double slow = 4;
  std::string json;
};

Options options_of(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--apart") {
      options.apart = true;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "%s: see the head of bench/algorithms_bench.cc\n", argv[i]);
      std::exit(2);
    }
    const char* value = argv[++i];
    if (name == "--ranks") {
      options.ranks = std::atoi(value);
    } else if (name == "--kind") {
      options.kind = kind_named(value);
    } else if (name == "--rounds") {
      options.rounds = std::atoi(value);
    } else if (name == "--slow") {
      options.slow = std::atof(value);
    } else if (name == "--hosts") {
      options.hosts = std::atoi(value);
    } else if (name == "--json") {
      options.json = value;
    } else if (name == "--sizes") {
      options.sizes.clear();
      std::stringstream list(value);
      for (std::string size; std::getline(list, size, ',');) {
        options.sizes.push_back(bytes_of(size));
      }
    } else {
      std::fprintf(stderr, "%s: see the head of bench/algorithms_bench.cc\n", name.c_str());
      std::exit(2);
    }
  }
  if (options.hosts < 1 || options.ranks % options.hosts != 0) {
    std::fprintf(stderr, "%d ranks do not divide into %d hosts\n", options.ranks, options.hosts);
    std::exit(2);
  }
  return options;
}

// Threads that meet without sleeping: how long they take to wake up would be measured too.
class Meeting {
 public:
  explicit Meeting(int threads) : threads_(threads) {}
  void arrive_and_wait() {
    const int round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.store(round + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; round_.load(std::memory_order_acquire) == round;) {
      if (++spins > 100) std::this_thread::yield();  // there may be more threads than cores
    }
  }

 private:
  const int threads_;
  std::atomic<int> arrived_{0}, round_{0};
};

// What all ranks share, in memory of all processes. Between meetings it is the first rank's.
struct Shared {
  explicit Shared(int ranks) : together(ranks) {}
  Meeting together;
  int calls = 0;
  std::size_t num = 0;  // algorithms that are measured, in this round's order
  std::size_t order[unjam::kNumAlgorithms + 1] = {};
};

Shared& make_shared(int ranks) {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(1);
  return *new (memory) Shared(ranks);
}

class Bench {
 public:
  explicit Bench(const Options& options) : options_(options), shared_(make_shared(options.ranks)) {
    for (const unjam::AlgorithmRow& row : unjam::kAlgorithms) {
      if (row.serves(options.kind)) algorithms_.emplace_back(row.name);
    }
    took_.assign(options.sizes.size(), std::vector<std::vector<double>>(algorithms_.size()));
  }

  // Whether this is the process of the first rank, which has the times.
  bool run() {
    unjamUniqueId_t id;
    check(unjamGetUniqueId(&id));
    int host = options_.hosts - 1;
    for (; host > 0; --host) {  // the parent is the first one
      const pid_t child = fork();
      if (child == 0) break;
      if (child > 0) continue;
      std::perror("fork");
      kill(0, SIGTERM);  // those that are there would wait for the others
    }
    setenv("UNJAM_HOST_ID", std::to_string(host).c_str(), 1);
    const int here = options_.ranks / options_.hosts;
    std::vector<std::thread> threads;
    for (int r = host * here; r < (host + 1) * here; ++r) {
      threads.emplace_back([&, r] {
        unjamContext_t context = nullptr;
        unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
        config.device = UNJAM_DEVICE_HOST;
        check(unjamInit(&context, options_.ranks, id, r, &config));
        unjamGroup_t world = nullptr;
        check(unjamGroupCreate(context, nullptr, 0, "", &world));
        for (std::size_t s = 0; s < options_.sizes.size(); ++s) measure(r, world, s);
        check(unjamGroupDestroy(world));
        check(unjamDestroy(context));
      });
    }
    for (std::thread& thread : threads) thread.join();
    while (wait(nullptr) > 0) {
    }
    return host == 0;
  }

  void print() {
    std::ofstream json;
    if (!options_.json.empty()) json.open(options_.json, std::ios::app);
    std::printf("%-10s", "bytes");
    for (const std::string& name : algorithms_) std::printf(" %19.19s", name.c_str());
    std::printf(" %10s\n", "auto/best");
    for (std::size_t s = 0; s < options_.sizes.size(); ++s) {
      std::printf("%-10zu", options_.sizes[s]);
      json << "{\"kind\": \"" << unjam::to_string(options_.kind)
           << "\", \"ranks\": " << options_.ranks << ", \"apart\": " << options_.apart
           << ", \"hosts\": " << options_.hosts << ", \"bytes\": " << options_.sizes[s];
      double automatic = 0, best = 1e30;
      for (std::size_t a = 0; a < algorithms_.size(); ++a) {
        std::vector<double>& times = took_[s][a];
        if (times.empty()) {
          std::printf(" %19s", "-");
          continue;
        }
        std::sort(times.begin(), times.end());
        const double median = times[times.size() / 2];
        std::printf(" %12.1f [%4.0f]", median, times.front());
        json << ", \"" << algorithms_[a] << "_us\": " << median;
        if (a == 0) automatic = median;
        if (a != 0) best = std::min(best, median);
      }
      std::printf(" %10.2f\n", automatic / best);
      json << "}\n";
    }
  }

 private:
  // One rank's part.
  void measure(int rank, unjamGroup_t world, std::size_t s) {
    const std::size_t count = std::max<std::size_t>(options_.sizes[s] / sizeof(float), 1);
    const std::size_t all = count * static_cast<std::size_t>(options_.ranks);
    const std::vector<float> in(all, 1.0f);
    std::vector<float> out(all);
    Meeting& together = shared_.together;
    std::vector<std::size_t> measured(algorithms_.size());
    std::iota(measured.begin(), measured.end(), 0);
    int calls = 2;
    // The first round makes the keys, the second says who is too slow.
    for (int round = -2; round < options_.rounds; ++round) {
      if (rank == 0) {
        std::shuffle(measured.begin(), measured.end(), random_);
        shared_.calls = calls;
        shared_.num = measured.size();
        std::copy(measured.begin(), measured.end(), shared_.order);
      }
      std::vector<double> us(algorithms_.size());
      together.arrive_and_wait();
      for (std::size_t i = 0; i < shared_.num; ++i) {
        const std::size_t a = shared_.order[i];
        together.arrive_and_wait();
        const auto begin = std::chrono::steady_clock::now();
        for (int k = 0; k < shared_.calls; ++k) {
          call(world, options_.kind, algorithms_[a], in, out, count);
          if (options_.apart) together.arrive_and_wait();
        }
        if (!options_.apart) together.arrive_and_wait();
        const std::chrono::duration<double, std::micro> t =
            std::chrono::steady_clock::now() - begin;
        us[a] = t.count() / shared_.calls;
        if (rank == 0 && round >= 0) took_[s][a].push_back(us[a]);
      }
      together.arrive_and_wait();
      if (round != -1) continue;
      std::erase_if(measured, [&](std::size_t a) { return us[a] > options_.slow * us[0]; });
      calls = static_cast<int>(std::clamp(kRoundUs / us[0], 3.0, 300.0));
    }
    together.arrive_and_wait();
  }

  const Options options_;
  Shared& shared_;
  std::vector<std::string> algorithms_ = {"auto"};
  std::mt19937 random_{1};                              // the first rank's
  std::vector<std::vector<std::vector<double>>> took_;  // [size][algorithm][round]
};

}  // namespace

int main(int argc, char** argv) {
  Bench bench(options_of(argc, argv));
  if (bench.run()) bench.print();
  return 0;
}
