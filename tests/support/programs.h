// The two programs of the DFCCL paper (Sec. 6.1): eight ranks, eight all-reduces of 256 B to 1 MiB,
// each rank in an order of its own; the second program synchronises with the device between them.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"

namespace unjam_test::programs {

inline constexpr int kRanks = 8;
inline constexpr std::size_t kCollectives = 8;
inline constexpr std::array<std::size_t, kCollectives> kFloats = {64,    256,   1024,   4096,
                                                                  16384, 65536, 131072, 262144};

inline std::string key_name(std::size_t k) { return std::string(1, static_cast<char>('A' + k)); }

// What the ranks send: random floats whose sums are not exact, so that equal bits mean an equal
// order of addition. One long vector a rank; iteration and key choose where in it to begin.
struct Inputs {
  static constexpr std::size_t kLength = 262144 + 4096;
  std::vector<std::vector<float>> ranks;
  std::vector<double> sum, bound;

  explicit Inputs(std::uint64_t seed)
      : ranks(kRanks, std::vector<float>(kLength)), sum(kLength), bound(kLength) {
    for (std::size_t r = 0; r < kRanks; ++r) {
      add(seed + r, ranks[r].data(), sum.data(), bound.data());
    }
  }
  UNJAM_UNWATCHED static void add(std::uint64_t seed, float* rank, double* sum, double* bound) {
    for (std::size_t i = 0; i < kLength; ++i) {
      const auto h = static_cast<std::int64_t>(mix(seed, i));
      rank[i] = static_cast<float>(static_cast<double>(h) * 0x1p-60);
      sum[i] += static_cast<double>(rank[i]);
      bound[i] += __builtin_fabs(static_cast<double>(rank[i])) * kRanks * 0x1p-24;
    }
  }
  // The first of n sums that is not the one that begins at `shift`; n if there is none.
  std::size_t first_wrong(const float* sums, std::size_t n, std::size_t shift) const {
    read_here(sums, n * sizeof(float));
    return first_wrong_of(sums, n, sum.data() + shift, bound.data() + shift);
  }
  UNJAM_UNWATCHED static std::size_t first_wrong_of(const float* sums, std::size_t n,
                                                    const double* sum, const double* bound) {
    for (std::size_t i = 0; i < n; ++i) {
      const double error = static_cast<double>(sums[i]) - sum[i];
      if (!(__builtin_fabs(error) <= bound[i])) return i;
    }
    return n;
  }
  static std::size_t shift(int iteration, std::size_t key) {
    return (static_cast<std::size_t>(iteration) * 61 + key * 17) % 4096;
  }
};

struct Outcome {
  bool ok = false;
  std::vector<std::uint64_t> digests;  // of every iteration, the same on all ranks
  // Of an iteration, without making inputs and checking: mean over this process's ranks.
  std::vector<double> ms_each;
  double ms = 0;  // their mean
};

struct Program {
  int iterations = 20;
  bool synchronize = false;  // program 2
  bool ordered = false;      // all ranks in the same order
};

// order_seed: of the ranks' orders.
inline Outcome run_program(Job& job, const Inputs& inputs, const Program& program,
                           std::uint64_t order_seed) {
  Outcome outcome;
  std::vector<std::vector<std::uint64_t>> digests(kRanks);
  std::vector<std::vector<double>> seconds(kRanks);
  outcome.ok = job.run([&](Rank& me) {
    const auto r = static_cast<std::size_t>(me.rank);
    std::mt19937_64 random(mix(order_seed, r));
    std::vector<std::vector<float>> buffers;
    for (const std::size_t n : kFloats) buffers.emplace_back(n);
    std::vector<unjamCollective_t> collectives(kCollectives);
    for (std::size_t k = 0; k < kCollectives; ++k) {
      UNJAM_CHECK(unjamRegisterAllReduce(me.all, key_name(k).c_str(), UNJAM_FLOAT32, UNJAM_SUM, 0,
                                         &collectives[k]));
    }
    for (int it = 0; it < program.iterations; ++it) {
      std::array<std::size_t, kCollectives> order;
      std::iota(order.begin(), order.end(), std::size_t{0});
      if (!program.ordered) std::shuffle(order.begin(), order.end(), random);
      for (std::size_t k = 0; k < kCollectives; ++k) {
        const float* from = inputs.ranks[r].data() + Inputs::shift(it, k);
        std::copy(from, from + kFloats[k], buffers[k].begin());
      }
      const auto begin = std::chrono::steady_clock::now();
      std::array<unjamRequest_t, kCollectives> requests{};
      for (const std::size_t k : order) {
        UNJAM_CHECK(unjamRun(collectives[k], buffers[k].data(), buffers[k].data(), kFloats[k],
                             nullptr, nullptr, &requests[k]));
        if (!program.synchronize) continue;
        const unjamResult_t code = unjamDeviceSynchronize(me.context, kPatienceUs);
        if (code != UNJAM_SUCCESS) {
          fail("iteration " + std::to_string(it) + ", after " + key_name(k) + ": " +
               unjamGetLastError() + "\n" + explain(me.context));
        }
      }
      for (const std::size_t k : order) {
        me.wait(requests[k], "iteration " + std::to_string(it) + ", " + key_name(k));
      }
      seconds[r].push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
      std::uint64_t digest = 1;
      for (std::size_t k = 0; k < kCollectives; ++k) {
        const std::size_t shift = Inputs::shift(it, k);
        const std::size_t i = inputs.first_wrong(buffers[k].data(), kFloats[k], shift);
        if (i != kFloats[k]) {
          fail("iteration " + std::to_string(it) + ", " + key_name(k) + "[" + std::to_string(i) +
               "]: off by " +
               std::to_string(static_cast<double>(buffers[k][i]) - inputs.sum[shift + i]));
        }
        digest = hash_memory(reinterpret_cast<const unsigned char*>(buffers[k].data()),
                             kFloats[k] * sizeof(float), digest);
      }
      digests[r].push_back(digest);
    }
    for (const unjamCollective_t c : collectives) UNJAM_CHECK(unjamDeregister(c));
  });
  if (!outcome.ok) return outcome;
  const int first = job.local().front();
  outcome.digests = digests[static_cast<std::size_t>(first)];
  outcome.ms_each.assign(static_cast<std::size_t>(program.iterations), 0);
  for (const int rank : job.local()) {
    const auto r = static_cast<std::size_t>(rank);
    EXPECT_EQ(digests[r], outcome.digests)
        << "rank " << r << " has other bits than rank " << first << job.where();
    for (std::size_t i = 0; i < seconds[r].size(); ++i) {
      outcome.ms_each[i] += seconds[r][i] * 1e3 / static_cast<double>(job.local().size());
    }
  }
  outcome.ms =
      std::accumulate(outcome.ms_each.begin(), outcome.ms_each.end(), 0.0) / program.iterations;
  return outcome;
}

// Of this process's ranks.
inline unjamStats_t sum_of_stats(const Job& job) {
  unjamStats_t sum{};
  for (const int r : job.local()) {
    const unjamStats_t s = stats_of(job.context(r));
    sum.preemptions += s.preemptions;
    sum.quits += s.quits;
    sum.context_loads += s.context_loads;
    sum.context_saves += s.context_saves;
    sum.lanes += s.lanes;
  }
  return sum;
}

inline void print_counters(const char* name, std::uint64_t seed, const unjamStats_t& sum,
                           int iterations, double ms) {
  const double blocks = static_cast<double>(sum.lanes), n = iterations;
  std::printf(
      "  %s seed %llu: %.2f ms an iteration; a block and iteration: %.1f preemptions, "
      "%.2f quits, %.1f context loads, %.1f saves\n",
      name, static_cast<unsigned long long>(seed), ms,
      static_cast<double>(sum.preemptions) / blocks / n,
      static_cast<double>(sum.quits) / blocks / n,
      static_cast<double>(sum.context_loads) / blocks / n,
      static_cast<double>(sum.context_saves) / blocks / n);
}

}  // namespace unjam_test::programs
