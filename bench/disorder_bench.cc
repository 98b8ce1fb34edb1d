// Cost of disorder: the paper's program 1 (eight all-reduces of 256 B to 1 MiB) with every rank in
// its own random order, over the same work in one order, interleaved in one run.
//   disorder_bench [ranks=8] [iterations=100] [repetitions=5] [seed=1]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "unjam/unjam.h"

namespace {

void check(unjamResult_t r) {
  if (r == UNJAM_SUCCESS) return;
  std::fprintf(stderr, "%s: %s\n", unjamGetErrorString(r), unjamGetLastError());
  std::exit(1);
}

struct Sample {
  double ms;  // an iteration
  double preemptions;
  double quits;
};

Sample run(int ranks, int iterations, bool random, unsigned seed) {
  const std::vector<std::size_t> counts = {64, 256, 1024, 4096, 16384, 65536, 131072, 262144};
  std::vector<unjamContext_t> contexts(static_cast<std::size_t>(ranks));
  check(unjamInitAll(contexts.data(), ranks, nullptr));
  std::vector<std::thread> threads;
  const auto begin = std::chrono::steady_clock::now();
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      unjamGroup_t world;
      check(unjamGroupCreate(contexts[static_cast<std::size_t>(r)], nullptr, 0, "", &world));
      std::mt19937 rng(random ? seed * 1000 + static_cast<unsigned>(r) : seed);
      std::vector<std::vector<float>> in, out;
      for (const std::size_t n : counts) {
        in.emplace_back(n, static_cast<float>(r + 1));
        out.emplace_back(n);
      }
      std::vector<std::size_t> order(counts.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
      for (int it = 0; it < iterations; ++it) {
        std::shuffle(order.begin(), order.end(), rng);
        std::vector<unjamRequest_t> requests(counts.size());
        for (const std::size_t i : order) {
          check(unjamAllReduce(world, std::to_string(i).c_str(), in[i].data(), out[i].data(),
                               counts[i], UNJAM_FLOAT32, UNJAM_SUM, nullptr, &requests[i]));
        }
        for (const std::size_t i : order) {
          check(unjamWait(requests[i], 60000000));
          check(unjamRequestFree(requests[i]));
        }
      }
      for (std::size_t i = 0; i < counts.size(); ++i) {
        for (const float v : out[i]) {
          if (v != static_cast<float>(ranks * (ranks + 1) / 2)) {
            std::fprintf(stderr, "wrong result\n");
            std::exit(1);
          }
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  Sample s{took.count() / iterations, 0, 0};
  for (const unjamContext_t c : contexts) {
    unjamStats_t stats{};
    stats.size = sizeof(stats);
    check(unjamGetStats(c, &stats));
    s.preemptions += static_cast<double>(stats.preemptions) / ranks / iterations;
    s.quits += static_cast<double>(stats.quits) / ranks / iterations;
    check(unjamDestroy(c));
  }
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int fallback) {
    return argc > i ? std::atoi(argv[i]) : fallback;
  };
  const int ranks = argument(1, 8), iterations = argument(2, 100), repetitions = argument(3, 5);
  const auto seed = static_cast<unsigned>(argument(4, 1));
  std::printf("%d ranks on %u cores, %d iterations of eight all-reduces, seed %u\n", ranks,
              std::thread::hardware_concurrency(), iterations, seed);
  std::printf("%-14s %14s %26s %18s\n", "order", "ms/iteration", "preemptions/block/iteration",
              "quits/iteration");
  std::vector<double> ratios;
  for (int i = 0; i < repetitions; ++i) {
    Sample same{}, random{};
    for (const bool is_random : {i % 2 == 0, i % 2 != 0}) {
      const Sample s = run(ranks, iterations, is_random, seed + static_cast<unsigned>(i));
      (is_random ? random : same) = s;
      std::printf("%-14s %14.3f %26.1f %18.1f\n", is_random ? "random" : "one", s.ms, s.preemptions,
                  s.quits);
    }
    ratios.push_back(random.ms / same.ms);
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf("cost of disorder: median %.2f [%.2f, %.2f]\n", ratios[ratios.size() / 2],
              ratios.front(), ratios.back());
}
