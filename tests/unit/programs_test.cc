// The two programs of the DFCCL paper (Sec. 6.1): eight ranks, eight all-reduces of 256 B to 1 MiB,
// each rank in an order of its own; the second program synchronises with the device between them.
// (As processes: processes_test.cc.) Under the hold policy they deadlock, and the cycle that unjam
// names must be a true one.
#include "tests/support/programs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"
#include "tests/support/json.h"

namespace unjam_test {
namespace {

using namespace programs;

// Twice with the same data: the second time in other orders and with random delays.
void complete_with_equal_bits(const Program& program, std::uint64_t seed) {
  const Inputs inputs(seed);
  const char* name = program.synchronize ? "program 2" : "program 1";
  std::vector<std::uint64_t> first;
  {
    Job job(kRanks, default_config(), seed);
    const Outcome o = run_program(job, inputs, program, seed);
    ASSERT_TRUE(o.ok);
    first = o.digests;
    print_counters(name, seed, sum_of_stats(job), program.iterations, o.ms);
  }
  unjamConfig_t config = default_config();
  config.delay_seed = seed | 1;
  config.delay_max_us = 20;
  Job job(kRanks, config, seed);
  const Outcome o = run_program(job, inputs, program, mix(seed, 1));
  ASSERT_TRUE(o.ok);
  EXPECT_EQ(o.digests, first) << "a second run has other bits" << job.where();
}

Program short_program(bool synchronize) {
  Program p;
  p.iterations = kSanitized ? 2 : 20;
  p.synchronize = synchronize;
  return p;
}

TEST(Programs, Program1) {
  for (int i = 0; i < 2; ++i) {
    complete_with_equal_bits(short_program(false), mix(base_seed(), static_cast<unsigned>(i)));
    if (HasFatalFailure()) return;
  }
}

TEST(Programs, Program2DeviceSynchronizeBetween) {
  for (int i = 0; i < 2; ++i) {
    complete_with_equal_bits(short_program(true), mix(base_seed(), static_cast<unsigned>(i)));
    if (HasFatalFailure()) return;
  }
}

void soak(bool synchronize) {
  for (int i = 0; i < 20; ++i) {
    Program p;
    p.iterations = 1000;
    p.synchronize = synchronize;
    complete_with_equal_bits(p, mix(base_seed(), static_cast<unsigned>(1000 + i)));
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ProgramsSoak, Program1ThousandIterationsTwentySeeds) { soak(false); }
TEST(ProgramsSoak, Program2ThousandIterationsTwentySeeds) { soak(true); }

// Random order over one order for all ranks, in the same job, by turns.
TEST(Programs, CostOfDisorder) {
  const Inputs inputs(base_seed());
  Job job(kRanks);
  Program program;
  program.iterations = kSanitized ? 2 : 20;
  std::vector<double> random_ms, ordered_ms;
  for (int turn = 0; turn < (kSanitized ? 1 : 5); ++turn) {
    program.ordered = true;
    Outcome o = run_program(job, inputs, program, 0);
    ASSERT_TRUE(o.ok);
    ordered_ms.push_back(o.ms);
    program.ordered = false;
    o = run_program(job, inputs, program, mix(base_seed(), static_cast<unsigned>(turn)));
    ASSERT_TRUE(o.ok);
    random_ms.push_back(o.ms);
  }
  std::sort(random_ms.begin(), random_ms.end());
  std::sort(ordered_ms.begin(), ordered_ms.end());
  const double random = random_ms[random_ms.size() / 2];
  const double ordered = ordered_ms[ordered_ms.size() / 2];
  std::printf("  cost of disorder: %.2f ms in random order, %.2f ms in one order: %.2f\n", random,
              ordered, random / ordered);
  EXPECT_GT(random / ordered, 0);
}

// ---- hold and wait ----

using Orders = std::vector<std::array<std::size_t, kCollectives>>;  // one a rank

Orders random_orders(std::uint64_t seed) {
  Orders orders(kRanks);
  for (std::size_t r = 0; r < kRanks; ++r) {
    std::iota(orders[r].begin(), orders[r].end(), std::size_t{0});
    std::mt19937_64 random(mix(seed, r));
    std::shuffle(orders[r].begin(), orders[r].end(), random);
  }
  return orders;
}

// "" if the cycle is one: it closes, and each edge "i runs A and waits for j, which runs B" says
// that A stands before B in i's order where both are in it, and B before A in j's.
std::string cycle_error(const Json& cycle, const Orders& orders) {
  const Json& edges = cycle["edges"];
  if (edges.size() < 2) return "a cycle of fewer than two edges";
  const auto place = [&](int rank, const std::string& key) {
    const auto& order = orders.at(static_cast<std::size_t>(rank));
    return std::find(order.begin(), order.end(), static_cast<std::size_t>(key.at(0) - 'A')) -
           order.begin();
  };
  std::map<int, int> seen;
  for (std::size_t e = 0; e < edges.size(); ++e) {
    const Json& edge = edges[e];
    const Json& next = edges[(e + 1) % edges.size()];
    const int i = edge["rank"].integer(), j = edge["waits_for"].integer();
    const std::string a = edge["runs"]["key"].string, b = next["runs"]["key"].string;
    if (edge["runs"]["n"].integer() != 0) return "another use than the first";
    if (next["rank"].integer() != j) return "the edges do not follow each other";
    if (++seen[i] > 1) return "a rank stands twice";
    if (a.size() != 1 || place(i, a) >= 8) return "an unknown key: " + a;
    if (a == b) return "ranks that run the same do not wait for each other";
    if (place(j, b) > place(j, a)) {
      return "rank " + std::to_string(j) + " is to run " + b + ", but has called " + a + " before";
    }
  }
  // Each rank of the cycle has completed all that it called before what it runs, so all ranks have
  // run those before what they run now.
  for (const Json& x : edges.array) {
    const int i = x["rank"].integer();
    const auto& order = orders[static_cast<std::size_t>(i)];
    for (std::ptrdiff_t p = 0; p < place(i, x["runs"]["key"].string); ++p) {
      const std::string done = key_name(order[static_cast<std::size_t>(p)]);
      for (const Json& y : edges.array) {
        const int j = y["rank"].integer();
        if (place(j, done) >= place(j, y["runs"]["key"].string)) {
          return "rank " + std::to_string(i) + " is past " + done + ", rank " + std::to_string(j) +
                 " is not";
        }
      }
    }
  }
  const std::string said = cycle["text"].string;
  for (const auto& [rank, unused] : seen) {
    if (said.find("rank " + std::to_string(rank)) == said.npos) return "the text omits a rank";
  }
  return "";
}

struct HoldOutcome {
  bool deadlocked = false;
  std::string cycle;
};

// One try: submits, then watches until all is complete or unjamExplain names a cycle.
HoldOutcome hold_try(const Orders& orders, bool synchronize, std::uint64_t seed) {
  HoldOutcome outcome;
  unjamConfig_t config = default_config();
  config.policy = UNJAM_POLICY_HOLD;
  Job job(kRanks, config, seed);
  std::vector<std::vector<std::vector<float>>> buffers(kRanks);
  for (auto& b : buffers) {
    for (const std::size_t n : kFloats) b.emplace_back(n, 1.0f);
  }
  std::vector<std::vector<unjamRequest_t>> requests(kRanks);
  job.run([&](Rank& me) {
    const auto r = static_cast<std::size_t>(me.rank);
    for (const std::size_t k : orders[r]) {
      requests[r].emplace_back();
      UNJAM_CHECK(unjamAllReduce(me.all, key_name(k).c_str(), buffers[r][k].data(),
                                 buffers[r][k].data(), kFloats[k], UNJAM_FLOAT32, UNJAM_SUM,
                                 nullptr, &requests[r].back()));
      // As in the paper: the synchronisation waits for what is running, which holds the device.
      if (!synchronize) continue;
      const unjamResult_t code = unjamDeviceSynchronize(me.context, 10000);
      if (code != UNJAM_SUCCESS && code != UNJAM_ERROR_TIMEOUT) {
        fail(std::string("unjamDeviceSynchronize: ") + unjamGetLastError());
      }
    }
  });
  const auto all_done = [&] {
    for (const auto& rank : requests) {
      for (const unjamRequest_t q : rank) {
        int done = 0;
        if (unjamTest(q, &done) != UNJAM_SUCCESS || !done) return false;
      }
    }
    return true;
  };
  std::string text;
  const bool decided = eventually([&] {
    if (all_done()) return true;
    text = explain(job.context(static_cast<int>(seed % kRanks)));
    try {
      const Json e = JsonReader::parse(text);
      if (e["cycles"].size() == 0) return false;
      outcome.deadlocked = true;
      outcome.cycle = e["cycles"][0]["text"].string;
      for (const Json& cycle : e["cycles"].array) {
        EXPECT_EQ(cycle_error(cycle, orders), "") << outcome.cycle << job.where();
      }
      EXPECT_EQ(e["ranks"].size(), static_cast<std::size_t>(kRanks));
      return true;
    } catch (const std::exception& x) {
      ADD_FAILURE() << x.what() << "\n" << text << job.where();
      return true;
    }
  });
  EXPECT_TRUE(decided) << "neither complete nor a cycle: " << text << job.where();
  if (outcome.deadlocked) {
    // It was certain, so it stays.
    sleep_ms(20);
    EXPECT_FALSE(all_done()) << outcome.cycle << job.where();
    EXPECT_FALSE(JsonReader::parse(explain(job.context(0)))["cycles"].array.empty());
    EXPECT_EQ(unjamDestroy(job.context(0)), UNJAM_ERROR_INVALID_USAGE);
  }
  // Aborting one rank ends everything on all.
  if (!all_done()) {
    EXPECT_EQ(unjamAbort(job.context(3)), UNJAM_SUCCESS);
  }
  for (int r = 0; r < kRanks; ++r) {
    for (const unjamRequest_t q : requests[static_cast<std::size_t>(r)]) {
      const unjamResult_t code = unjamWait(q, kPatienceUs);
      if (outcome.deadlocked) {
        EXPECT_TRUE(code == UNJAM_SUCCESS ||
                    code == (r == 3 ? UNJAM_ERROR_ABORTED : UNJAM_ERROR_PEER))
            << "rank " << r << ": " << code_text(code);
      } else {
        EXPECT_EQ(code, UNJAM_SUCCESS);
      }
      EXPECT_EQ(unjamRequestFree(q), UNJAM_SUCCESS);
    }
  }
  return outcome;  // ~Job destroys all contexts, and fails if one cannot be
}

bool first_differ(const Orders& orders) {
  return std::any_of(orders.begin(), orders.end(),
                     [&](const auto& o) { return o[0] != orders[0][0]; });
}

void hold_deadlocks(bool synchronize) {
  const int tries = kSanitized ? 3 : 10;
  int deadlocks = 0;
  for (int t = 0; t < tries; ++t) {
    const std::uint64_t seed = mix(base_seed(), static_cast<unsigned>(t));
    const Orders orders = random_orders(seed);
    const HoldOutcome o = hold_try(orders, synchronize, seed);
    deadlocks += o.deadlocked;
    if (first_differ(orders)) {
      EXPECT_TRUE(o.deadlocked) << "seed " << seed;
    }
    if (t == 0) std::printf("  %s\n", o.cycle.c_str());
    if (testing::Test::HasFailure()) return;
  }
  std::printf("  hold: %d of %d tries deadlock\n", deadlocks, tries);
}

TEST(Hold, Program1DeadlocksInATrueCycle) { hold_deadlocks(false); }
TEST(Hold, Program2DeadlocksInATrueCycle) { hold_deadlocks(true); }

// Two ranks differ in the last two collectives only: the others complete first.
TEST(Hold, LateDisagreement) {
  Orders orders(kRanks);
  for (auto& o : orders) std::iota(o.begin(), o.end(), std::size_t{0});
  std::swap(orders[5][6], orders[5][7]);
  const HoldOutcome o = hold_try(orders, false, base_seed());
  EXPECT_TRUE(o.deadlocked);
  EXPECT_NE(o.cycle.find("rank 5"), std::string::npos) << o.cycle;
}

TEST(Hold, OneOrderCompletes) {
  Orders orders(kRanks, random_orders(base_seed())[0]);
  EXPECT_FALSE(hold_try(orders, false, base_seed()).deadlocked);
}

// Every edge must be checked by somebody who can be wrong: a cycle that is none is refused.
TEST(Hold, TheCheckRefusesFalseCycles) {
  Orders orders(kRanks);
  for (auto& o : orders) std::iota(o.begin(), o.end(), std::size_t{0});
  std::swap(orders[1][0], orders[1][1]);
  const auto cycle = [](const char* a, const char* b) {
    return JsonReader::parse(
        std::string("{\"text\": \"rank 0 runs … rank 1\", \"edges\": [{\"rank\": 0, \"runs\": "
                    "{\"group\": \"\", \"key\": \"") +
        a +
        "\", \"n\": 0}, \"waits_for\": 1}, {\"rank\": 1, \"runs\": {\"group\": \"\", \"key\": \"" +
        b + "\", \"n\": 0}, \"waits_for\": 0}]}");
  };
  EXPECT_EQ(cycle_error(cycle("A", "B"), orders), "");
  EXPECT_NE(cycle_error(cycle("B", "A"), orders), "");
  EXPECT_NE(cycle_error(cycle("C", "D"), orders), "");
  EXPECT_NE(cycle_error(cycle("A", "A"), orders), "");
}

}  // namespace
}  // namespace unjam_test
