// The deadlock simulator: the event-driven engine against the step-by-step one, round by round.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "sim/simulator.h"

namespace {

using namespace unjam::sim;  // NOLINT: a test of one namespace

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr int kJobs = 400;
#else
constexpr int kJobs = 4000;
#endif

std::string text(const Verdict& v) {
  if (!v.deadlock) return "goes on";
  std::string s = "step " + std::to_string(v.step) + " GPU " + std::to_string(v.gpu);
  for (const Wait& w : v.waits) {
    s += "; " + std::to_string(w.gpu) + " waits in " + std::to_string(w.what.group) + "[" +
         std::to_string(w.what.k) + "] for " + std::to_string(w.on);
  }
  return s;
}

void add_group(JobSpec* spec, const std::vector<std::uint32_t>& members, std::uint32_t count) {
  spec->members.insert(spec->members.end(), members.begin(), members.end());
  spec->group_begin.push_back(spec->members.size());
  spec->counts.push_back(count);
}

double pick(std::mt19937_64& random, std::initializer_list<double> values) {
  return values.begin()[random() % values.size()];
}

// A small job of any form.
JobSpec random_job(std::mt19937_64& random, Model model) {
  JobSpec spec;
  spec.model = model;
  spec.gpus = 1 + static_cast<std::uint32_t>(random() % 9);
  const std::uint32_t groups = 1 + static_cast<std::uint32_t>(random() % 6);
  const bool equal_counts = random() % 2 == 0;
  const auto count = [&] { return 1 + static_cast<std::uint32_t>(random() % 8); };
  const std::uint32_t same = count();
  for (std::uint32_t g = 0; g < groups; ++g) {
    std::vector<std::uint32_t> members(spec.gpus);
    for (std::uint32_t i = 0; i < spec.gpus; ++i) members[i] = i;
    std::ranges::shuffle(members, random);
    members.resize(1 + random() % std::min<std::uint32_t>(spec.gpus, 4));
    add_group(&spec, members, equal_counts ? same : count());
  }
  spec.order = static_cast<Order>(random() % 3);
  if (spec.order == Order::kExplicit) {
    for (std::uint32_t g = 0; g < groups; ++g) {
      spec.sequence.insert(spec.sequence.end(), spec.counts[g], g);
    }
    std::ranges::shuffle(spec.sequence, random);
  }
  spec.disorder = pick(random, {0, 0.01, 0.05, 0.2, 0.6, 1});
  spec.sync = model == Model::kSynchronization ? pick(random, {0, 0.02, 0.1, 0.3, 0.7}) : 0;
  spec.seed = random();
  return spec;
}

struct Tally {
  int rounds = 0, exact = 0, released = 0, released_only = 0, exact_only = 0, long_cycles = 0;
};

void compare_engines(Model model, int jobs, Tally* tally) {
  std::mt19937_64 random(7 + static_cast<unsigned>(model));
  for (int j = 0; j < jobs; ++j) {
    const Job job(random_job(random, model));
    const Drawer drawer(job);
    EventEngine engine(job), quick(job);
    for (std::uint64_t round = 0; round < 20; ++round) {
      Draws draws;
      drawer.draw(round, &draws);
      const PlainOutcome plain = run_plain(job, draws);
      const Outcome event = engine.run(draws, {true, true, true});
      ASSERT_EQ(text(plain.exact), text(event.exact)) << "exact, job " << j << " round " << round;
      ASSERT_EQ(text(plain.released), text(event.released))
          << "released, job " << j << " round " << round;
      for (const bool exact : {true, false}) {
        const Outcome only = quick.run(draws, {exact, !exact, false});
        ASSERT_EQ((exact ? plain.exact : plain.released).deadlock,
                  (exact ? only.exact : only.released).deadlock)
            << "job " << j << " round " << round;
      }
      const Outcome both = quick.run(draws, {true, true, false});
      ASSERT_EQ(plain.exact.deadlock, both.exact.deadlock) << "job " << j << " round " << round;
      ASSERT_EQ(plain.released.deadlock, both.released.deadlock)
          << "job " << j << " round " << round;
      ++tally->rounds;
      tally->exact += plain.exact.deadlock;
      tally->released += plain.released.deadlock;
      tally->released_only += plain.released.deadlock && !plain.exact.deadlock;
      tally->exact_only += plain.exact.deadlock && !plain.released.deadlock;
      tally->long_cycles += plain.exact.waits.size() > 2;
    }
  }
}

TEST(SimEngines, AgreeOnTheSingleQueue) {
  Tally tally;
  compare_engines(Model::kSingleQueue, kJobs, &tally);
  // The comparison has seen all there is.
  EXPECT_GT(tally.exact, tally.rounds / 20);
  EXPECT_GT(tally.exact, 0);
  EXPECT_LT(tally.exact, tally.rounds);
  EXPECT_GT(tally.released_only, 0);
  EXPECT_GT(tally.exact_only, 0);
  EXPECT_GT(tally.long_cycles, 0);
}

TEST(SimEngines, AgreeOnTheSynchronizationModel) {
  Tally tally;
  compare_engines(Model::kSynchronization, kJobs, &tally);
  EXPECT_GT(tally.exact, tally.rounds / 50);
  EXPECT_LT(tally.exact, tally.rounds);
  EXPECT_GT(tally.released_only, 0);
  EXPECT_EQ(tally.exact_only, 0);  // exact is part of released
  EXPECT_GT(tally.long_cycles, 0);
}

// One stage of tp x dp GPUs.
JobSpec stage(std::uint32_t tp, std::uint32_t dp, std::uint32_t tp_count, std::uint32_t dp_count) {
  JobSpec spec;
  spec.gpus = tp * dp;
  for (std::uint32_t i = 0; i < dp; ++i) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t j = 0; j < tp; ++j) members.push_back(i * tp + j);
    add_group(&spec, members, tp_count);
  }
  for (std::uint32_t j = 0; j < tp; ++j) {
    std::vector<std::uint32_t> members;
    for (std::uint32_t i = 0; i < dp; ++i) members.push_back(i * tp + j);
    add_group(&spec, members, dp_count);
  }
  return spec;
}

TEST(SimDraws, GapsAreDistributedAsCoins) {
  JobSpec spec = stage(2, 2, 7, 5);
  spec.model = Model::kSynchronization;
  spec.disorder = 0.15;
  spec.sync = 0.25;
  const Job job(spec);
  const Drawer drawer(job);
  // How often each (kind, place, length) occurs, by either way.
  constexpr int kRounds = 40000;
  std::vector<std::array<double, 2>> seen(2 * 4 * 12 * 4);
  const auto cell = [&](int kind, std::uint32_t gpu, std::uint32_t at, std::uint32_t n) -> auto& {
    return seen[((kind * 4 + gpu) * 12 + at) * 4 + std::min(n, 4u) - 1];
  };
  for (int way = 0; way < 2; ++way) {
    for (int round = 0; round < kRounds; ++round) {
      Draws draws;
      way == 0 ? drawer.draw(round, &draws) : drawer.draw_by_coins(round, &draws);
      for (const Disorder& d : draws.disorders) ++cell(0, d.gpu, d.at, d.skips)[way];
      for (const Sync& s : draws.syncs) ++cell(1, s.gpu, s.at, s.count)[way];
    }
  }
  double chi2 = 0;
  int cells = 0;
  for (const auto& [gaps, coins] : seen) {
    if (gaps + coins < 20) continue;
    chi2 += (gaps - coins) * (gaps - coins) / (gaps + coins);
    ++cells;
  }
  EXPECT_GT(cells, 250);
  // The mean of chi2 is the number of cells; 5 standard deviations.
  EXPECT_LT(chi2, cells + 5 * std::sqrt(2.0 * cells));
  EXPECT_GT(chi2, cells - 5 * std::sqrt(2.0 * cells));
}

TEST(SimDraws, CertainDisorderReversesTheOrder) {
  JobSpec spec = stage(2, 1, 6, 1);
  spec.disorder = 1;
  const Job job(spec);
  Draws draws;
  Drawer(job).draw(0, &draws);
  SparseOrders orders(job);
  orders.build(draws.disorders);
  for (std::uint32_t p = 0; p < 7; ++p) EXPECT_EQ(orders.base(1, p), 6 - p);
}

TEST(SimSimulator, ThreadsDoNotMatter) {
  JobSpec spec = stage(4, 2, 20, 30);
  spec.model = Model::kSynchronization;
  spec.disorder = 0.1;
  spec.sync = 0.1;
  Simulator simulator(spec);
  const Counts one = simulator.run(100, 3000, 1, {}, false);
  const Counts four = simulator.run(100, 3000, 4, {}, false);
  const Counts parts = simulator.run(100, 1000, 3, {}, false);
  const Counts rest = simulator.run(1100, 2000, 2, {}, false);
  EXPECT_GT(one.exact, 0u);
  EXPECT_EQ(one.exact, four.exact);
  EXPECT_EQ(one.released, four.released);
  EXPECT_EQ(one.first_exact, four.first_exact);
  EXPECT_EQ(one.syncs, four.syncs);
  EXPECT_EQ(one.exact, parts.exact + rest.exact);
}

TEST(SimSimulator, EnginesAgreeOnAStage) {
  // Larger than the random jobs: both engines count the same.
  for (const Model model : {Model::kSingleQueue, Model::kSynchronization}) {
    JobSpec spec = stage(4, 3, 40, 60);
    spec.model = model;
    spec.disorder = model == Model::kSingleQueue ? 5e-4 : 0.03;
    spec.sync = model == Model::kSingleQueue ? 0 : 0.03;
    Simulator simulator(spec);
    const Counts event = simulator.run(0, 600, 2, {}, false);
    const Counts plain = simulator.run(0, 600, 2, {}, true);
    EXPECT_GT(event.exact, 0u);
    EXPECT_EQ(event.exact, plain.exact);
    EXPECT_EQ(event.released, plain.released);
    EXPECT_EQ(event.first_exact, plain.first_exact);
  }
}

// The three basic situations of the paper's Fig. 1, by hand.
TEST(SimEngines, TwoGpusInOppositeOrders) {
  JobSpec spec;
  spec.gpus = 2;
  add_group(&spec, {0, 1}, 2);
  const Draws swapped{{{1, 0, 1}}, {}};
  const Job single(spec);
  const Outcome stuck = EventEngine(single).run(swapped, {true, true, true});
  EXPECT_EQ(text(stuck.exact), "step 0 GPU 0; 0 waits in 0[0] for 1; 1 waits in 0[1] for 0");
  EXPECT_TRUE(stuck.released.deadlock);

  spec.model = Model::kSynchronization;
  const Job streams(spec);
  EXPECT_FALSE(EventEngine(streams).run(swapped, {}).exact.deadlock);
  const Draws both_synchronise{{{1, 0, 1}}, {{0, 1, 1}, {1, 1, 1}}};
  const Outcome cycle = EventEngine(streams).run(both_synchronise, {true, true, true});
  EXPECT_EQ(text(cycle.exact), "step 1 GPU 1; 1 waits in 0[1] for 0; 0 waits in 0[0] for 1");
}

bool starts(const std::string& text, const std::string& with) { return text.rfind(with, 0) == 0; }

TEST(SimJob, SaysWhatCannotBe) {
  const auto complaint = [](auto&& change) -> std::string {
    JobSpec spec = stage(2, 2, 3, 3);
    change(spec);
    try {
      const Job job(spec);
    } catch (const std::exception& e) {
      return e.what();
    }
    return "";
  };
  EXPECT_EQ(complaint([](JobSpec&) {}), "");
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.gpus = 0; }), "gpus"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.gpus = 3; }), "groups[1].gpus: GPU 3"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.members[1] = 0; }), "groups[0].gpus: GPU 0"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.group_begin[1] = 0; }), "groups[0].gpus"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.counts[2] = 0; }), "groups[2].collectives"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.disorder = -1; }), "disorder"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.disorder = std::nan(""); }), "disorder"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.sync = 0.1; }), "sync"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.order = Order::kExplicit; }), "sequence"));
  EXPECT_TRUE(starts(complaint([](JobSpec& s) { s.memory_limit = 100; }), "this job takes"));
}

}  // namespace
