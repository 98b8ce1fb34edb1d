// What the selector's choice costs beside every other algorithm: on the host device, each rank a
// thread, a call at a time and its wait, all algorithms by turns in one run, so that other work on
// the machine moves all of them.
//   algorithms_bench [ranks=8] [kind=all_reduce] [sizes=1K,16K,256K] [rounds=9] [hosts=1]
// kind: all_reduce, all_gather, reduce_scatter, broadcast, reduce or barrier; of all_gather and
// reduce_scatter a size is that of a rank's block. hosts: as many processes, each with as many of
// the ranks, and each counts as a host of its own (UNJAM_HOST_ID). Prints a line a size: the median
// over the rounds of microseconds a call, by algorithm; "auto" is the selector's, behind it over
// the best of the others.
#include <pthread.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
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
    if (name == unjam::to_string(static_cast<unjam::Kind>(k))) return static_cast<unjam::Kind>(k);
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
  if (kind == unjam::Kind::kBroadcast) {
    check(unjamBroadcast(group, key.c_str(), in.data(), out.data(), count, UNJAM_FLOAT32, 0,
                         &options, &request));
  } else if (kind == unjam::Kind::kAllGather) {
    check(unjamAllGather(group, key.c_str(), in.data(), out.data(), count, UNJAM_FLOAT32, &options,
                         &request));
  } else if (kind == unjam::Kind::kReduceScatter) {
    check(unjamReduceScatter(group, key.c_str(), in.data(), out.data(), count, UNJAM_FLOAT32,
                             UNJAM_SUM, &options, &request));
  } else if (kind == unjam::Kind::kBarrier) {
    check(unjamBarrier(group, key.c_str(), &options, &request));
  } else if (kind == unjam::Kind::kReduce) {
    check(unjamReduce(group, key.c_str(), in.data(), out.data(), count, UNJAM_FLOAT32, UNJAM_SUM, 0,
                      &options, &request));
  } else {
    check(unjamAllReduce(group, key.c_str(), in.data(), out.data(), count, UNJAM_FLOAT32, UNJAM_SUM,
                         &options, &request));
  }
  check(unjamWait(request, 60000000));
  check(unjamRequestFree(request));
}

// A barrier of threads of several processes.
pthread_barrier_t* make_barrier(int threads) {
  void* memory = mmap(nullptr, sizeof(pthread_barrier_t), PROT_READ | PROT_WRITE,
                      MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::exit(1);
  auto* barrier = static_cast<pthread_barrier_t*>(memory);
  pthread_barrierattr_t shared;
  pthread_barrierattr_init(&shared);
  pthread_barrierattr_setpshared(&shared, PTHREAD_PROCESS_SHARED);
  pthread_barrier_init(barrier, &shared, static_cast<unsigned>(threads));
  return barrier;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 8;
  const unjam::Kind kind = kind_named(argc > 2 ? argv[2] : "all_reduce");
  std::vector<std::size_t> sizes;
  std::stringstream list(argc > 3 ? argv[3] : "1K,16K,256K");
  for (std::string size; std::getline(list, size, ',');) sizes.push_back(bytes_of(size));
  const int rounds = argc > 4 ? std::atoi(argv[4]) : 9;
  std::vector<std::string> algorithms = {"auto"};
  for (const unjam::AlgorithmRow& row : unjam::kAlgorithms) {
    if (row.serves(kind)) algorithms.push_back(row.name);
  }
  const int hosts = argc > 5 ? std::atoi(argv[5]) : 1;
  if (hosts < 1 || ranks % hosts != 0) {
    std::fprintf(stderr, "%d ranks do not divide into %d hosts\n", ranks, hosts);
    return 2;
  }
  unjamUniqueId_t id;
  check(unjamGetUniqueId(&id));
  pthread_barrier_t* const together = make_barrier(ranks);
  int host = 0;
  for (; host < hosts - 1; ++host) {
    if (fork() == 0) break;  // the parent is the last one
  }
  setenv("UNJAM_HOST_ID", std::to_string(host).c_str(), 1);
  const bool prints = host == hosts - 1;
  const int first = host * (ranks / hosts), last = first + ranks / hosts;
  std::vector<unjamContext_t> contexts(static_cast<std::size_t>(ranks));
  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  config.device = UNJAM_DEVICE_HOST;
  // [size][algorithm][round]
  std::vector<std::vector<std::vector<double>>> took(
      sizes.size(), std::vector<std::vector<double>>(algorithms.size()));
  std::vector<std::thread> threads;
  for (int r = first; r < last; ++r) {
    threads.emplace_back([&, r] {
      unjamGroup_t world = nullptr;
      check(unjamInit(&contexts[static_cast<std::size_t>(r)], ranks, id, r, &config));
      check(unjamGroupCreate(contexts[static_cast<std::size_t>(r)], nullptr, 0, "", &world));
      for (std::size_t s = 0; s < sizes.size(); ++s) {
        const std::size_t count = std::max<std::size_t>(sizes[s] / sizeof(float), 1);
        const auto blocks = static_cast<std::size_t>(ranks);
        const bool scatters = kind == unjam::Kind::kReduceScatter;
        const std::vector<float> in(scatters ? blocks * count : count, 1.0f);
        std::vector<float> out(kind == unjam::Kind::kAllGather ? blocks * count : count);
        const int calls = sizes[s] <= 64 << 10 ? 20 : 5;
        for (int round = -1; round < rounds; ++round) {
          for (std::size_t a = 0; a < algorithms.size(); ++a) {
            pthread_barrier_wait(together);
            const auto begin = std::chrono::steady_clock::now();
            for (int i = 0; i < calls; ++i) call(world, kind, algorithms[a], in, out, count);
            pthread_barrier_wait(together);
            const std::chrono::duration<double, std::micro> t =
                std::chrono::steady_clock::now() - begin;
            if (r == first && round >= 0) took[s][a].push_back(t.count() / calls);
          }
        }
      }
      check(unjamGroupDestroy(world));
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (unjamContext_t context : contexts) {
    if (context != nullptr) check(unjamDestroy(context));
  }
  if (!prints) return 0;
  while (wait(nullptr) > 0) {
  }
  std::printf("%-10s", "bytes");
  for (const std::string& name : algorithms) std::printf(" %19.19s", name.c_str());
  std::printf(" %10s\n", "auto/best");
  for (std::size_t s = 0; s < sizes.size(); ++s) {
    std::printf("%-10zu", sizes[s]);
    double automatic = 0, best = 1e30;
    for (std::size_t a = 0; a < algorithms.size(); ++a) {
      std::vector<double>& times = took[s][a];
      std::sort(times.begin(), times.end());
      const double median = times[times.size() / 2];
      std::printf(" %12.1f", median);
      std::printf(" [%4.0f]", times.front());
      if (a == 0) automatic = median;
      if (a != 0) best = std::min(best, median);
    }
    std::printf(" %10.2f\n", automatic / best);
  }
  return 0;
}
