// Latency of synchronous calls: every rank, a thread of its own, submits a small all-reduce and
// waits for it, again and again. With UNJAM_HELP=0 and =1 interleaved in one run, since other work
// on the machine moves both.
//   latency_bench [ranks=2] [bytes=1024] [iterations=20000] [repetitions=5]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
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
  double mean_us = 0;  // of rank 0
  double p50_us = 0;
  double p99_us = 0;
  double starts = 0;  // engine starts, a call and rank
};

Sample run(int ranks, std::size_t bytes, int iterations) {
  std::vector<unjamContext_t> contexts(static_cast<std::size_t>(ranks));
  check(unjamInitAll(contexts.data(), ranks, nullptr));
  std::vector<double> took(static_cast<std::size_t>(iterations));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      unjamGroup_t world;
      check(unjamGroupCreate(contexts[static_cast<std::size_t>(r)], nullptr, 0, "", &world));
      std::vector<float> in(bytes / sizeof(float), static_cast<float>(r + 1)), out(in.size());
      const int warm_up = std::min(1000, iterations);
      for (int i = -warm_up; i < iterations; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        unjamRequest_t request = nullptr;
        check(unjamAllReduce(world, "k", in.data(), out.data(), in.size(), UNJAM_FLOAT32, UNJAM_SUM,
                             nullptr, &request));
        check(unjamWait(request, 60000000));
        check(unjamRequestFree(request));
        const std::chrono::duration<double, std::micro> t =
            std::chrono::steady_clock::now() - begin;
        if (r == 0 && i >= 0) took[static_cast<std::size_t>(i)] = t.count();
      }
      for (const float v : out) {
        if (v != static_cast<float>(ranks * (ranks + 1) / 2)) {
          std::fprintf(stderr, "wrong result\n");
          std::exit(1);
        }
      }
    });
  }
  for (auto& t : threads) t.join();
  Sample s;
  for (const double t : took) s.mean_us += t / iterations;
  std::sort(took.begin(), took.end());
  s.p50_us = took[took.size() / 2];
  s.p99_us = took[took.size() * 99 / 100];
  for (const unjamContext_t c : contexts) {
    unjamStats_t stats{};
    stats.size = sizeof(stats);
    check(unjamGetStats(c, &stats));
    s.starts += static_cast<double>(stats.starts) / ranks / iterations;
    check(unjamDestroy(c));
  }
  return s;
}

}  // namespace

int main(int argc, char** argv) {
  const auto argument = [&](int i, int fallback) {
    return argc > i ? std::atoi(argv[i]) : fallback;
  };
  const int ranks = argument(1, 2), iterations = argument(3, 20000), repetitions = argument(4, 5);
  const auto bytes = static_cast<std::size_t>(argument(2, 1024));
  std::printf("%d ranks on %u cores, all-reduce of %zu bytes, %d calls, each waited for at once\n",
              ranks, std::thread::hardware_concurrency(), bytes, iterations);
  std::printf("%-16s %10s %10s %10s %16s\n", "UNJAM_HELP", "mean us", "p50 us", "p99 us",
              "starts/call");
  std::vector<double> ratios;
  for (int i = 0; i < repetitions; ++i) {
    double mean[2] = {};
    for (const int first : {i % 2, 1 - i % 2}) {
      setenv("UNJAM_HELP", std::to_string(first).c_str(), 1);
      const Sample s = run(ranks, bytes, iterations);
      mean[first] = s.mean_us;
      std::printf("%-16d %10.2f %10.2f %10.2f %16.2f\n", first, s.mean_us, s.p50_us, s.p99_us,
                  s.starts);
    }
    ratios.push_back(mean[0] / mean[1]);
  }
  std::sort(ratios.begin(), ratios.end());
  std::printf("without help / with help: median %.2f [%.2f, %.2f]\n", ratios[ratios.size() / 2],
              ratios.front(), ratios.back());
}
