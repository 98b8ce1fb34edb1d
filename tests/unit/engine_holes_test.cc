// The holes of the first implementation (docs: lessons from DFCCL), each with the test that would
// have shown it. Numbered as there; those that need a GPU are with the CUDA device.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "plan/registry.h"
#include "tests/support/batch.h"
#include "tests/support/exchange.h"
#include "tests/support/job.h"
#include "tests/support/json.h"

namespace unjam_test {
namespace {

void submit(unjamGroup_t group, const std::string& key, std::vector<float>& x,
            unjamRequest_t* request) {
  UNJAM_CHECK(unjamAllReduce(group, key.c_str(), x.data(), x.data(), x.size(), UNJAM_FLOAT32,
                             UNJAM_SUM, nullptr, request));
}

void synchronize(unjamContext_t context, const std::string& when) {
  const unjamResult_t code = unjamDeviceSynchronize(context, kPatienceUs);
  if (code != UNJAM_SUCCESS) fail(when + ": " + unjamGetLastError() + "\n" + explain(context));
}

// Seconds of CPU time that the process uses in `seconds` during which this thread sleeps; the least
// of a few looks, since test machines do other things.
double cpu_while_asleep(double seconds, int looks = 3) {
  double least = 1e9;
  for (int i = 0; i < looks; ++i) {
    const double before = cpu_seconds();
    sleep_ms(static_cast<int>(seconds * 1000));
    least = std::min(least, cpu_seconds() - before);
  }
  return least;
}

// The lanes in whose trace a collective has ended.
std::set<int> lanes_that_finished(unjamContext_t context) {
  std::vector<unjamTraceEvent_t> events(1 << 21);
  std::size_t count = 0;
  UNJAM_CHECK(unjamGetTrace(context, events.data(), events.size(), &count));
  std::set<int> lanes;
  for (std::size_t i = 0; i < count; ++i) {
    if (events[i].type == UNJAM_TRACE_FINISH) lanes.insert(events[i].lane);
  }
  return lanes;
}

// How often an engine of the lane has started, or quit, in a trace of at most 1 << 17 events.
std::uint64_t events_of(unjamContext_t context, int lane, unjamTraceType_t type) {
  std::vector<unjamTraceEvent_t> events(1 << 17);
  std::size_t count = 0;
  UNJAM_CHECK(unjamGetTrace(context, events.data(), events.size(), &count));
  std::uint64_t n = 0;
  for (std::size_t i = 0; i < count; ++i) {
    n += events[i].type == type && events[i].lane == lane ? 1 : 0;
  }
  return n;
}
std::uint64_t restarts(unjamContext_t context, int lane) {
  return events_of(context, lane, UNJAM_TRACE_RESTART);
}

// ---- 1: an engine whose collectives progressed once must still quit ----

class Hole1 : public testing::TestWithParam<int> {};

TEST_P(Hole1, SynchronizeReturnsWithPendingCollectivesThatProgressed) {
  const int pending = GetParam();
  Job job(2);
  // Rank 1 answers only when rank 0 has synchronised.
  std::atomic<bool> synchronized{false};
  job.run([&](Rank& me) {
    // Two engines that have worked together before.
    std::vector<float> first(1000, 1.0f);
    unjamRequest_t q = nullptr;
    submit(me.all, "first", first, &q);
    me.wait(q, "first");
    std::vector<std::vector<float>> x(static_cast<std::size_t>(pending));
    std::vector<unjamRequest_t> requests(x.size());
    for (std::size_t k = 0; k < x.size(); ++k) x[k].assign(40000, 1.0f);
    if (me.rank == 1) {
      if (!eventually([&] { return synchronized.load(); })) fail("rank 0 never came back");
    }
    for (std::size_t k = 0; k < x.size(); ++k) {
      submit(me.all, "k" + std::to_string(k), x[k], &requests[k]);
      // Rank 0's first slices go out: progress, and then none.
      if (me.rank == 0) synchronize(me.context, "after " + std::to_string(k));
    }
    if (me.rank == 0) {
      // Again, with nothing new.
      for (int i = 0; i < 20; ++i) synchronize(me.context, "again");
      if (stats_of(me.context).pending != x.size()) fail("completed without the peer?");
      synchronized = true;
    }
    for (const unjamRequest_t request : requests) me.wait(request, "after synchronising");
    for (const auto& b : x) {
      if (std::count(b.begin(), b.end(), 2.0f) != 40000) fail("a wrong sum");
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Holes, Hole1, testing::Values(1, 2, 20));

// A against A, synchronise, B against B: the order in which theirs hung.
TEST(Holes, Hole1SynchronizeBetweenDifferentOrders) {
  Job job(2);
  job.run([](Rank& me) {
    for (int i = 0; i < 50; ++i) {
      std::vector<float> a(3000, 1.0f), b(3000, 1.0f);
      unjamRequest_t qa = nullptr, qb = nullptr;
      submit(me.all, me.rank == 0 ? "A" : "B", me.rank == 0 ? a : b, me.rank == 0 ? &qa : &qb);
      synchronize(me.context, "between");
      submit(me.all, me.rank == 0 ? "B" : "A", me.rank == 0 ? b : a, me.rank == 0 ? &qb : &qa);
      synchronize(me.context, "after");
      me.wait(qa, "A");
      me.wait(qb, "B");
      if (a[2999] != 2 || b[0] != 2) fail("a wrong sum");
    }
  });
}

// ---- 2: a wait that succeeds in part is no progress ----

class Hole2 : public testing::TestWithParam<unjamKind_t> {};

// Buffers that no connector's slots hold together, of which one rank never takes a byte: the others
// fill every slot, then quit, and stay asleep.
TEST_P(Hole2, FullSlotsAndAnAbsentPeer) {
  constexpr std::size_t kFloats = 2000000;
  const unjamKind_t kind = GetParam();
  for (const std::uint32_t borrow : {UINT32_MAX, 4u, 0u}) {
    if (kSanitized && borrow == UINT32_MAX) continue;
    unjamConfig_t config = default_config();
    config.pool_slots = borrow;
    config.stall_ms = 100000;
    Job job(3, config);
    Spec s;
    s.kind = kind;
    s.count = kFloats / 3;
    Exchange e(s, 3);
    std::vector<unjamRequest_t> requests(3);
    for (int r = 0; r < 2; ++r) {
      ASSERT_EQ(e.submit(r, job.all(r), "absent", nullptr, &requests[static_cast<std::size_t>(r)]),
                UNJAM_SUCCESS);
    }
    for (int r = 0; r < 2; ++r) {
      for (int i = 0; i < 5; ++i) {
        ASSERT_EQ(unjamDeviceSynchronize(job.context(r), kPatienceUs), UNJAM_SUCCESS)
            << explain(job.context(r)) << info(job.context(r));
      }
    }
    // Asleep: contract, far below a core; bound, generous for a busy machine.
    EXPECT_LT(cpu_while_asleep(0.3), 0.1) << "engines do not sleep while all slots are full";
    // (It may have been kept from falling asleep until now.)
    EXPECT_TRUE(eventually([&] {
      const unjamStats_t before = stats_of(job.context(0));
      sleep_ms(50);
      return stats_of(job.context(0)).starts == before.starts;
    })) << "it wakes without cause";
    ASSERT_EQ(e.submit(2, job.all(2), "absent", nullptr, &requests[2]), UNJAM_SUCCESS);
    for (int r = 0; r < 3; ++r) {
      wait_ok(job.context(r), requests[static_cast<std::size_t>(r)], "after the peer came");
    }
    EXPECT_EQ(e.check(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Holes, Hole2,
                         testing::Values(UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER,
                                         UNJAM_REDUCE, UNJAM_BROADCAST));

// ---- 3: nothing is lost or sent twice by quitting, wherever it happens ----

class Hole3 : public testing::TestWithParam<int> {};

TEST_P(Hole3, QuitsAndPreemptionsEverywhere) {
  std::uint64_t quits = 0, saves = 0;
  for (int i = 0; i < (kSanitized ? 2 : 6); ++i) {
    const std::uint64_t seed = mix(base_seed(), static_cast<unsigned>(100 * GetParam() + i));
    unjamConfig_t config = default_config();
    config.residency_us = 1;
    config.quantum_slices = 1;
    config.delay_seed = seed | 1;
    config.delay_max_us = 1u << (i % 6);
    config.guaranteed_slot_bytes = 512;
    config.guaranteed_slots = 2 + static_cast<std::uint32_t>(i % 2);
    config.pool_slots = i % 2 == 0 ? UINT32_MAX : 3;
    config.spin_head = config.spin_base = config.spin_cap = 1;
    config.lanes = 1 + static_cast<std::uint32_t>(i % 3 == 2);
    config.block_threads = i % 3 == 1 ? 2 : 1;
    Job job(GetParam(), config, seed);
    Batches batches(job, seed);
    for (std::uint64_t k = 0; k < 20; ++k) {
      Spec s;
      s.kind = static_cast<unjamKind_t>(k % kNumKinds);
      s.dtype = static_cast<unjamDataType_t>(mix(seed, k) % kNumDTypes);
      s.op = static_cast<unjamOp_t>(mix(seed, k + 100) % kNumOps);
      s.count = 1 + mix(seed, k + 200) % 2500;
      s.root = static_cast<int>(mix(seed, k + 300) % static_cast<unsigned>(GetParam()));
      s.in_place = k % 2 == 0;
      s.seed = mix(seed, k + 400);
      if (!batches.add(s)) return;
    }
    if (!batches.flush()) return;
    for (int r = 0; r < GetParam(); ++r) {
      quits += stats_of(job.context(r)).quits;
      saves += stats_of(job.context(r)).context_saves;
    }
  }
  std::printf("  %llu quits, %llu context saves, all results right\n",
              static_cast<unsigned long long>(quits), static_cast<unsigned long long>(saves));
  EXPECT_GT(quits, 100u) << "the test did not make engines quit";
  EXPECT_GT(saves, 100u);
}

INSTANTIATE_TEST_SUITE_P(Holes, Hole3, testing::Values(2, 3, 4));

// ---- 4: no wait without a threshold, the one at a collective's first entry included ----

// Two ranks that first enter different collectives, with keys that nobody has used before: none of
// their connectors exists yet, so each waits for the other to announce one. Small calls and large
// ones, every kind, every way to take part.
class Hole4 : public testing::TestWithParam<unjamKind_t> {};

TEST_P(Hole4, FirstEntriesOfDifferentCollectives) {
  for (const std::uint32_t lanes : {1u, 2u}) {
    for (const int algorithm : {0, 1}) {
      unjamConfig_t config = default_config();
      config.lanes = lanes;
      config.algorithm = algorithm;
      config.stall_ms = 1 << 29;  // nobody helps
      // Long waits: both ranks are inside of theirs at the same time.
      config.spin_head = config.spin_base = config.spin_cap = 2000;
      Job job(2, config);
      constexpr int kRounds = kSanitized ? 8 : 40;
      std::vector<std::unique_ptr<Exchange>> exchanges;
      for (int i = 0; i < 2 * kRounds; ++i) {
        Spec s;
        s.kind = GetParam();
        s.count = i % 4 < 2 ? 10 : 20000;
        s.root = i % 2;
        s.seed = mix(job.seed(), static_cast<unsigned>(i));
        exchanges.push_back(std::make_unique<Exchange>(s, 2));
      }
      const bool ok = job.run([&](Rank& me) {
        for (int i = 0; i < kRounds; ++i) {
          std::vector<unjamRequest_t> requests(2);
          for (int k = 0; k < 2; ++k) {
            const int which = 2 * i + (k + me.rank) % 2;
            UNJAM_CHECK(exchanges[static_cast<std::size_t>(which)]->submit(
                me.rank, me.all, ("first " + std::to_string(which)).c_str(), nullptr,
                &requests[static_cast<std::size_t>(k)]));
            // Inside the first one, and out of it again, before the second is called.
            if (k == 0 && i % 2 == 0) synchronize(me.context, "at the first entry");
          }
          for (const unjamRequest_t q : requests) me.wait(q, "round " + std::to_string(i));
        }
      });
      if (!ok) return;
      for (const auto& e : exchanges) EXPECT_EQ(e->check(), "");
    }
  }
}

// A peer that never comes: what others do goes on past the first entry, for as long as it takes.
TEST_P(Hole4, FirstEntryWithoutThePeerHoldsNothing) {
  for (const int algorithm : {0, 1}) {
    unjamConfig_t config = default_config();
    config.algorithm = algorithm;
    config.stall_ms = 1 << 29;
    Job job(3, config);
    std::vector<std::unique_ptr<Exchange>> late;
    constexpr std::size_t kLate = 10;
    for (std::size_t k = 0; k < kLate; ++k) {
      Spec s;
      s.kind = GetParam();
      s.count = k % 2 == 0 ? 10 : 20000;
      s.root = static_cast<int>(k % 3);
      s.seed = mix(job.seed(), k);
      late.push_back(std::make_unique<Exchange>(s, 3));
    }
    std::atomic<int> went_on{0};
    const bool ok = job.run([&](Rank& me) {
      std::vector<unjamRequest_t> requests(kLate);
      const auto submit_late = [&] {
        for (std::size_t k = 0; k < kLate; ++k) {
          UNJAM_CHECK(late[k]->submit(me.rank, me.all, ("late " + std::to_string(k)).c_str(),
                                      nullptr, &requests[k]));
        }
      };
      if (me.rank == 2) {
        if (!eventually([&] { return went_on == 2; })) fail("the others never came through");
        submit_late();
      } else {
        const int ranks[] = {0, 1};
        unjamGroup_t both = nullptr;
        UNJAM_CHECK(unjamGroupCreate(me.context, ranks, 2, "both", &both));
        submit_late();
        for (int i = 0; i < 50; ++i) {
          std::vector<float> x(i % 2 == 0 ? 10 : 20000, 1.0f);
          unjamRequest_t q = nullptr;
          submit(both, "new " + std::to_string(i), x, &q);  // a first entry as well
          me.wait(q, "past the first entry of others");
          if (x.front() != 2 || x.back() != 2) fail("a wrong sum");
        }
        synchronize(me.context, "with first entries pending");
        ++went_on;
      }
      for (const unjamRequest_t q : requests) me.wait(q, "after the peer came");
    });
    if (!ok) return;
    for (const auto& e : late) EXPECT_EQ(e->check(), "");
  }
}

INSTANTIATE_TEST_SUITE_P(Holes, Hole4,
                         testing::Values(UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER,
                                         UNJAM_REDUCE, UNJAM_BROADCAST));

// ---- 5: counters of failed attempts do not overflow ----

// Two collectives fail again and again while another keeps the engine at work: each of them far
// more often than a small counter holds.
void failed_attempts(std::uint64_t goal) {
  unjamConfig_t config = default_config();
  config.spin_head = config.spin_base = config.spin_cap = 1;
  config.quantum_slices = 1;
  config.guaranteed_slot_bytes = 256;
  config.pool_slots = UINT32_MAX;
  config.algorithm = 0;
  config.stall_ms = 1 << 29;
  Job job(2, config);
  std::atomic<bool> enough{false};
  std::uint64_t attempts = 0;
  constexpr std::size_t kStuck = 2;
  job.run([&](Rank& me) {
    std::vector<std::vector<float>> x(kStuck, std::vector<float>(500, 1.0f));
    std::vector<unjamRequest_t> stuck(kStuck);
    const auto submit_stuck = [&] {
      for (std::size_t k = 0; k < kStuck; ++k) {
        submit(me.all, "stuck " + std::to_string(k), x[k], &stuck[k]);
      }
    };
    if (me.rank == 0) submit_stuck();
    std::vector<float> traffic(50000);
    for (int i = 0;; ++i) {
      std::fill(traffic.begin(), traffic.end(), 1.0f);
      unjamRequest_t q = nullptr;
      submit(me.all, "traffic", traffic, &q);
      me.wait(q, "traffic");
      // Both ranks must leave after the same use: rank 0 says so, with the next.
      std::int32_t stop = 0;
      if (me.rank == 0) {
        attempts = stats_of(me.context).preemptions;
        stop = attempts >= kStuck * goal ? 1 : 0;
      }
      UNJAM_CHECK(unjamBroadcast(me.all, "stop", &stop, &stop, 1, UNJAM_INT32, 0, nullptr, &q));
      me.wait(q, "stop");
      if (traffic[0] != 2 || traffic[49999] != 2) fail("a wrong sum in use " + std::to_string(i));
      if (stop != 0) break;
    }
    if (me.rank == 1) submit_stuck();
    for (const unjamRequest_t q : stuck) me.wait(q, "the one that failed so often");
    for (const auto& b : x) {
      if (std::count(b.begin(), b.end(), 2.0f) != 500) fail("a wrong sum");
    }
  });
  std::printf("  %llu failed attempts of %zu invocations, then all complete\n",
              static_cast<unsigned long long>(attempts), kStuck);
}

TEST(Holes, Hole5ManyFailedAttempts) { failed_attempts(kSanitized ? 20000 : 1000000); }

TEST(HolesSoak, Hole5TwentyMillionFailedAttempts) { failed_attempts(20000000); }

// ---- 6: a completion finds its callback, however early it comes ----

TEST(Holes, Hole6CallbackBeforeTheCallReturns) {
  unjamConfig_t config = default_config();
  config.delay_seed = base_seed() | 1;
  config.delay_max_us = 20;
  Job job(2, config);
  constexpr int kCalls = kSanitized ? 300 : 3000;
  job.run([](Rank& me) {
    std::atomic<int> good{0};
    std::vector<std::int32_t> x(kCalls, 1);
    struct User {
      std::atomic<int>* good;
      std::int32_t* value;
    };
    std::vector<User> users;
    users.reserve(kCalls);
    unjamRequest_t q = nullptr;
    for (std::size_t i = 0; i < kCalls; ++i) {
      users.push_back({&good, &x[i]});
      unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
      o.user = &users.back();
      o.callback = [](unjamResult_t result, void* user) {
        auto* u = static_cast<User*>(user);
        if (result == UNJAM_SUCCESS && *u->value == 2) ++*u->good;
      };
      UNJAM_CHECK(unjamAllReduce(me.all, ("c" + std::to_string(i % 50)).c_str(), &x[i], &x[i], 1,
                                 UNJAM_INT32, UNJAM_SUM, &o, &q));
      // Now and then, let completions race with nothing else under way.
      if (i % 7 == 0) unjamWait(q, kPatienceUs);
      UNJAM_CHECK(unjamRequestFree(q));
    }
    if (!eventually([&] { return good == kCalls; })) {
      fail("only " + std::to_string(good) + " callbacks came with a right result");
    }
  });
}

// ---- 7: what no plan serves is refused at the call; what is accepted runs ----

TEST(Holes, Hole7UnknownPlansAreRefused) {
  unjamConfig_t config = default_config();
  for (const int algorithm : {-2, unjam::kNumAlgorithms, 1000}) {
    config.algorithm = algorithm;
    unjamContext_t contexts[2] = {};
    EXPECT_EQ(unjamInitAll(contexts, 2, &config), UNJAM_ERROR_INVALID_ARGUMENT) << algorithm;
  }
  config.algorithm = -1;
  Job job(2, config);
  unjamGroup_t group = job.all(0);
  std::vector<float> x(8, 1.0f);
  const auto refused = [&](const Spec& s) {
    unjamRequest_t q = nullptr;
    EXPECT_EQ(unjamAllReduce(group, "k", x.data(), x.data(), s.count, s.dtype, s.op, nullptr, &q),
              UNJAM_ERROR_INVALID_ARGUMENT)
        << s.text();
    EXPECT_EQ(q, nullptr);
  };
  Spec s;
  for (const std::size_t count : {std::size_t{1} << 59, std::size_t{1} << 60, SIZE_MAX}) {
    s.count = count;  // beyond what plans address, and beyond what there can be
    refused(s);
  }
  s.count = 8;
  for (const int value : {-1, 12, 255, 256, 1 << 30}) {
    s.dtype = static_cast<unjamDataType_t>(value);
    refused(s);
    unjamCollective_t c = nullptr;
    EXPECT_EQ(unjamRegister(group, "r", UNJAM_ALL_REDUCE, s.dtype, UNJAM_SUM, 0, 0, &c),
              UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(unjamRegister(group, "r", static_cast<unjamKind_t>(value), UNJAM_FLOAT32, UNJAM_SUM,
                            0, 0, &c),
              UNJAM_ERROR_INVALID_ARGUMENT);
    s.dtype = UNJAM_FLOAT32;
    s.op = static_cast<unjamOp_t>(value);
    refused(s);
    EXPECT_EQ(unjamRegister(group, "r", UNJAM_ALL_REDUCE, UNJAM_FLOAT32, s.op, 0, 0, &c),
              UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(c, nullptr);
    s.op = UNJAM_SUM;
  }
  EXPECT_EQ(stats_of(job.context(0)).submitted, 0u) << "a refused call was submitted";
}

// Theirs ran an empty function. Every combination that is accepted moves its data and completes.
TEST(Holes, Hole7EveryCombinationRuns) {
  for (const int ranks : {1, 2, 3}) {
    if (kSanitized && ranks != 3) continue;
    for (const int algorithm : {-1, 0, 1}) {
      unjamConfig_t config = default_config();
      config.algorithm = algorithm;
      Job job(ranks, config);
      Batches batches(job, job.seed(), /*twice=*/false);
      for (int kind = 0; kind < kNumKinds; ++kind) {
        for (int t = 0; t < kNumDTypes; ++t) {
          for (int op = 0; op < (reduces(static_cast<unjamKind_t>(kind)) ? kNumOps : 1); ++op) {
            for (const std::size_t count : {3u, 5000u}) {  // packets, slots
              Spec s;
              s.kind = static_cast<unjamKind_t>(kind);
              s.dtype = static_cast<unjamDataType_t>(t);
              s.op = static_cast<unjamOp_t>(op);
              s.count = count;
              s.root = ranks - 1;
              s.seed = mix(job.seed(), batches.total());
              if (!batches.add(s)) return;
            }
          }
        }
      }
      if (!batches.flush()) return;
    }
  }
}

// ---- 8: every lane carries its own part of a broadcast ----

TEST(Holes, Hole8MultiLaneBroadcastWithPoisonedOutput) {
  for (const std::uint32_t lanes : {2u, 3u, 8u, 16u}) {
    unjamConfig_t config = default_config();
    config.lanes = lanes;
    config.trace_events = 1 << 16;
    Job job(3, config);
    Batches batches(job, job.seed());
    for (int root = 0; root < 3; ++root) {
      for (const std::size_t count : {1u, 15u, 16u, 17u, 1000u, 50021u}) {
        for (const unjamDataType_t t : {UNJAM_UINT8, UNJAM_FLOAT32, UNJAM_INT64}) {
          Spec s;
          s.kind = UNJAM_BROADCAST;
          s.dtype = t;
          s.count = count;
          s.root = root;
          s.seed = mix(job.seed(), batches.total());
          if (!batches.add(s)) return;
        }
      }
    }
    if (!batches.flush()) return;
    // Lanes have shared the work: every one has finished its part of something.
    for (int r = 0; r < 3; ++r) {
      EXPECT_EQ(lanes_that_finished(job.context(r)).size(), lanes) << "rank " << r;
    }
  }
}

// ---- 9: a lane starts again whatever the other lanes do ----

// One lane of each rank is inside a collective that it does not leave (the hold policy: the slowest
// block there can be). Small collectives, which wake a lane that has quit, go on.
TEST(Holes, Hole9RestartDoesNotWaitForASlowLane) {
  unjamConfig_t config = default_config();
  config.policy = UNJAM_POLICY_HOLD;
  config.lanes = 2;
  config.trace_events = 1 << 16;
  config.stall_ms = 1 << 29;
  Job job(3, config);
  constexpr int kSmall = 100;
  std::atomic<int> passed{0};
  const bool ok = job.run([&](Rank& me) {
    // Ranks 0 and 1 hold their bulk lane, for rank 2 does not call.
    std::vector<float> bulk(100000, 1.0f);
    unjamRequest_t held = nullptr;
    if (me.rank != 2) {
      submit(me.all, "bulk", bulk, &held);
      const int ranks[] = {0, 1};
      unjamGroup_t both = nullptr;
      UNJAM_CHECK(unjamGroupCreate(me.context, ranks, 2, "both", &both));
      // "bulk" has got as far as it can without rank 2.
      const auto stuck = [&] {
        const Json all = JsonReader::parse(explain(me.context));
        const Json& pending = all["ranks"][static_cast<std::size_t>(me.rank)]["pending"];
        if (pending.size() != 1) return false;  // could not look
        const Json& engines = pending[0]["engines"];
        return engines.size() == 1 && engines[0]["waits_for"].string == "data";
      };
      if (!eventually(stuck)) fail("the bulk one waits for no data: " + explain(me.context));
      const std::uint64_t before = restarts(me.context, 0);
      const std::uint64_t slow = restarts(me.context, 1);
      for (int i = 0; i < kSmall; ++i) {
        std::vector<float> x(4, 1.0f);
        unjamRequest_t q = nullptr;
        submit(both, "small " + std::to_string(i % 7), x, &q);
        me.wait(q, "a small one while the other lane holds");
        if (x[3] != 2) fail("a wrong sum");
        if (i % 10 != 0) continue;
        // Lets the lane fall asleep: an engine quits as often as it starts. (Quits are counted
        // first: so none has started since.)
        if (!eventually([&] {
              const std::uint64_t quits = events_of(me.context, 0, UNJAM_TRACE_QUIT);
              return quits == restarts(me.context, 0);
            })) {
          fail("the small lane does not quit");
        }
      }
      const auto times = [&](int lane, std::uint64_t from) {
        return ", restarts: " + std::to_string(restarts(me.context, lane) - from);
      };
      if (restarts(me.context, 0) < before + kSmall / 10) {
        fail("the small lane did not restart" + times(0, before));
      }
      if (restarts(me.context, 1) > slow + 1) fail("the bulk lane did not hold" + times(1, slow));
      ++passed;
    } else {
      if (!eventually([&] { return passed == 2; })) fail("the small ones hang");
      submit(me.all, "bulk", bulk, &held);
    }
    me.wait(held, "bulk");
    if (bulk[0] != 3 || bulk[99999] != 3) fail("a wrong sum");
  });
  ASSERT_TRUE(ok);
}

// ---- 10: averages are averages ----

TEST(Holes, Hole10Averages) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    // The sanitizers look at memory and threads, the release build at numbers and equal bits.
    if (kSanitized && ranks != 3 && ranks != 4) continue;
    for (const int algorithm : {0, 1}) {
      unjamConfig_t config = default_config();
      config.algorithm = algorithm;
      Job job(ranks, config);
      Batches batches(job, job.seed(), !kSanitized);
      for (const unjamKind_t kind : {UNJAM_ALL_REDUCE, UNJAM_REDUCE_SCATTER, UNJAM_REDUCE}) {
        for (int t = 0; t < kNumDTypes; ++t) {
          for (const std::size_t count : {1u, 100u, 3000u}) {
            for (const Data data : {Data::kExact, Data::kRandom}) {
              Spec s;
              s.kind = kind;
              s.dtype = static_cast<unjamDataType_t>(t);
              s.op = UNJAM_AVG;
              s.count = count;
              s.root = ranks - 1;
              s.data = data;
              s.in_place = count == 100;
              s.seed = mix(job.seed(), batches.total());
              if (!batches.add(s)) return;
            }
          }
        }
      }
      if (!batches.flush()) return;
    }
  }
}

// ---- 11: who has nothing to do sleeps ----

TEST(Holes, Hole11IdleRanksUseNoCpu) {
  unjamConfig_t config = default_config();
  config.lanes = 2;
  Job job(8, config);
  job.run([](Rank& me) {
    for (int i = 0; i < 20; ++i) {
      std::vector<float> x(1000, 1.0f);
      unjamRequest_t q = nullptr;
      submit(me.all, "warm", x, &q);
      me.wait(q, "warm");
    }
  });
  // Contract: below 5 % of a core. The bound is a multiple, against noise of sanitizers.
  const double used = cpu_while_asleep(kSanitized ? 0.5 : 2.0, 1) / (kSanitized ? 0.5 : 2.0);
  std::printf("  idle, 8 ranks of 2 lanes: %.2f %% of a core\n", used * 100);
  EXPECT_LT(used, 0.2);
}

// ... and who waits for an absent peer, with a host thread in unjamWait, too.
TEST(Holes, Hole11WaitingUsesNoCpu) {
  Job job(4);
  std::vector<float> x(100000, 1.0f);
  std::vector<std::vector<unjamRequest_t>> requests(4);
  std::vector<std::vector<float>> buffers(200, std::vector<float>(1000, 1.0f));
  for (int r = 0; r < 3; ++r) {
    for (int k = 0; k < 50; ++k) {
      requests[static_cast<std::size_t>(r)].emplace_back();
      submit(job.all(r), "k" + std::to_string(k), buffers[static_cast<std::size_t>(50 * r + k)],
             &requests[static_cast<std::size_t>(r)].back());
    }
  }
  std::vector<std::thread> waiters;
  for (int r = 0; r < 3; ++r) {
    waiters.emplace_back([&, r] {
      for (const unjamRequest_t q : requests[static_cast<std::size_t>(r)]) {
        EXPECT_EQ(unjamWait(q, kPatienceUs), UNJAM_SUCCESS) << explain(job.context(r));
        unjamRequestFree(q);
      }
    });
  }
  sleep_ms(100);
  const double used = cpu_while_asleep(0.5) / 0.5;
  std::printf("  150 pending, 3 threads waiting: %.2f %% of a core\n", used * 100);
  EXPECT_LT(used, 0.2);
  for (int k = 49; k >= 0; --k) {
    requests[3].emplace_back();
    submit(job.all(3), "k" + std::to_string(k), buffers[static_cast<std::size_t>(150 + k)],
           &requests[3].back());
  }
  for (const unjamRequest_t q : requests[3]) wait_ok(job.context(3), q, "the late rank");
  for (std::thread& t : waiters) t.join();
  for (const auto& b : buffers) EXPECT_EQ(std::count(b.begin(), b.end(), 4.0f), 1000);
}

// ---- 12: nothing is dropped in silence ----

TEST(Holes, Hole12DestroyWithPendingIsAnError) {
  Job job(2);
  std::vector<float> x(10, 1.0f), y(10, 1.0f);
  unjamRequest_t q = nullptr, p = nullptr;
  submit(job.all(0), "pending", x, &q);
  EXPECT_EQ(unjamDestroy(job.context(0)), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_NE(std::string(unjamGetLastError()).find("pending"), std::string::npos);
  submit(job.all(1), "pending", y, &p);
  wait_ok(job.context(0), q, "after the refused destruction");
  wait_ok(job.context(1), p, "the peer");
  EXPECT_EQ(x[9], 2);
}

}  // namespace
}  // namespace unjam_test
