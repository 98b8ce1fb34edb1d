// The deadlock simulator: the event-driven engine against the step-by-step one, round by round.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>

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

}  // namespace
