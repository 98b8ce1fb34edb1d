// A thousand registered collectives over twelve overlapping groups, up to 200 pending on every
// rank, in an order of its own, messages from 4 bytes to several MiB, random delays at every wait.
// (As processes: processes_test.cc.)
#include "tests/support/stress.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <utility>
#include <vector>

#include "tests/support/job.h"

namespace unjam_test {
namespace {

using namespace stress;

void run(const Shape& shape, const unjamConfig_t& config, std::uint64_t seed) {
  Job job(kRanks, config, seed);
  const Outcome o = run_stress(job, shape, seed);
  if (!o.ok) return;
  const unjamStats_t s = stats_of(job.context(0));
  std::printf(
      "  seed %llu: %zu calls, %.1f MiB of buffers, at most %zu pending on a rank, all checked; "
      "rank 0: %llu preemptions, %llu quits, %llu context loads, %llu slices (%llu borrowed)\n",
      static_cast<unsigned long long>(seed), o.calls, static_cast<double>(o.bytes) / 1048576,
      o.peak, static_cast<unsigned long long>(s.preemptions),
      static_cast<unsigned long long>(s.quits), static_cast<unsigned long long>(s.context_loads),
      static_cast<unsigned long long>(s.slices), static_cast<unsigned long long>(s.borrowed));
}

TEST(Stress, ThousandKeysRandomOrderRandomDelays) {
  run(default_shape(), delays(base_seed()), base_seed());
}

TEST(Stress, NoDelays) { run(default_shape(), default_config(), mix(base_seed(), 1)); }

TEST(Stress, SeveralThreadsSubmitOnEachRank) {
  Shape s = default_shape();
  s.threads = 4;
  s.rounds = 2;
  run(s, delays(mix(base_seed(), 2)), mix(base_seed(), 2));
}

TEST(Stress, UnregisteredKeysAndThreeLanes) {
  Shape s = default_shape();
  s.registered = false;
  s.rounds = 1;
  unjamConfig_t c = delays(mix(base_seed(), 3));
  c.lanes = 3;
  run(s, c, mix(base_seed(), 3));
}

// Few and small slots, short quanta and stays: every mechanism at its limit.
TEST(Stress, ScarceSlots) {
  Shape s = default_shape();
  s.rounds = 1;
  s.most_bytes = std::size_t{1} << 20;
  unjamConfig_t c = delays(mix(base_seed(), 4));
  c.guaranteed_slots = 2;
  c.guaranteed_slot_bytes = 1024;
  c.pool_slots = 2;
  c.quantum_slices = 2;
  c.residency_us = 200;
  run(s, c, mix(base_seed(), 4));
}

TEST(Stress, PriorityOrderFixedPolicy) {
  Shape s = default_shape();
  s.rounds = 1;
  unjamConfig_t c = delays(mix(base_seed(), 5));
  c.order = UNJAM_ORDER_PRIORITY;
  c.policy = UNJAM_POLICY_FIXED;
  run(s, c, mix(base_seed(), 5));
}

// One key, used from several threads at once: order among them is whatever it is, the same on all
// ranks only if the calls are equal. All sums must come out.
TEST(Stress, OneKeyFromManyThreads) {
  const int threads = 4, each = kSanitized ? 50 : 500;
  Job job(4);
  std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
  for (int rank = 0; rank < job.ranks(); ++rank) {
    for (int t = 0; t < threads; ++t) {
      bodies.emplace_back(rank, [&](Rank& me) {
        std::vector<std::int32_t> in(100), out(static_cast<std::size_t>(each) * 100);
        for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<int>(i) * (me.rank + 1);
        std::vector<unjamRequest_t> requests(static_cast<std::size_t>(each));
        for (std::size_t i = 0; i < requests.size(); ++i) {
          UNJAM_CHECK(unjamAllReduce(me.all, "one", in.data(), &out[100 * i], 100, UNJAM_INT32,
                                     UNJAM_SUM, nullptr, &requests[i]));
        }
        for (const unjamRequest_t r : requests) me.wait(r, "one");
        for (std::size_t i = 0; i < out.size(); ++i) {
          if (out[i] != static_cast<int>(i % 100) * 10) fail("a wrong sum");
        }
      });
    }
  }
  job.run_threads(bodies);
}

TEST(StressSoak, ManySeeds) {
  for (std::uint64_t i = 0; i < 20; ++i) {
    const std::uint64_t seed = mix(base_seed(), 100 + i);
    Shape s;
    s.rounds = 5;
    s.most_bytes = std::size_t{8} << 20;
    s.threads = i % 3 == 2 ? 3 : 1;
    unjamConfig_t c = delays(seed);
    c.delay_max_us = 10u << (i % 5);
    c.lanes = 1 + i % 3;
    if (i % 4 == 3) c.residency_us = 100;
    run(s, c, seed);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace unjam_test
