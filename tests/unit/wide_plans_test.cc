// Plans with more neighbours, or parts, than an engine has at hand (kAtHand): by hand, every rank
// in turn, so that what a rank finds and what it waits for is the same each time.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/engine.h"
#include "plan/selector.h"
#include "tests/support/engine_ranks.h"

namespace unjam {
namespace {

struct Wide {
  Kind kind;
  Algorithm algorithm;
  int root = 0;
};

std::string name_of(const Wide& w) {
  return std::string(to_string(w.kind)) + " of root " + std::to_string(w.root);
}

// What rank `from` has for rank `to`, or, of what is not in blocks, for `to` = 0.
std::int32_t value(int from, int to, std::uint64_t i) {
  return 100'000 * from + 1000 * to + static_cast<std::int32_t>(i);
}

std::vector<std::int32_t> blocks(int from, int first, int last, std::uint64_t count) {
  std::vector<std::int32_t> all;
  for (int to = first; to < last; ++to) {
    for (std::uint64_t i = 0; i < count; ++i) all.push_back(value(from, to, i));
  }
  return all;
}

std::vector<std::int32_t> column(int ranks, int to, std::uint64_t count) {
  std::vector<std::int32_t> all;
  for (int from = 0; from < ranks; ++from) {
    for (std::uint64_t i = 0; i < count; ++i) all.push_back(value(from, to, i));
  }
  return all;
}

std::vector<std::int32_t> expected(const Wide& w, int ranks, int rank, std::uint64_t count) {
  switch (w.kind) {
    case Kind::kAllToAll:
      return column(ranks, rank, count);
    case Kind::kScatter:
      return blocks(w.root, rank, rank + 1, count);
    case Kind::kGather:
      return rank == w.root ? column(ranks, 0, count) : std::vector<std::int32_t>();
    default: {  // an all-reduce
      std::vector<std::int32_t> sum(count);
      for (std::uint64_t i = 0; i < count; ++i) {
        for (int from = 0; from < ranks; ++from) sum[i] += value(from, 0, i);
      }
      return sum;
    }
  }
}

Use make_use(const Wide& w, int ranks, std::size_t key, std::uint64_t count) {
  Use u;
  u.key = key;
  u.count = count;
  u.root = static_cast<std::uint32_t>(w.root);
  PlanRequest request;
  request.kind = w.kind;
  request.dtype = DType::kInt32;
  request.count = count;
  request.ranks = ranks;
  request.root = w.root;
  PlanLimits limits;
  limits.guaranteed_slot_bytes = Ranks::kSlotBytes;
  for (int r = 0; r < ranks; ++r) {
    request.rank = r;
    std::string error;
    const auto plan = make_plan(request, limits, w.algorithm, &error);
    EXPECT_TRUE(plan.has_value()) << error;
    u.plans.push_back(plan.value_or(Plan{}));
    const bool many = w.kind == Kind::kAllToAll || (w.kind == Kind::kScatter && r == w.root);
    u.inputs.push_back(blocks(r, 0, many ? ranks : 1, count));
    u.outputs.emplace_back(expected(w, ranks, r, count).size(), -1);
  }
  return u;
}

void run(int ranks, bool heap) {
  const std::vector<Wide> all = {
      {Kind::kAllToAll, Algorithm::kPairwise},
      {Kind::kGather, Algorithm::kPairwise, ranks - 1},
      {Kind::kScatter, Algorithm::kPairwise, 7},
      {Kind::kAllReduce, Algorithm::kRing},
  };
  Case c;
  c.ranks = ranks;
  c.threads = 0;
  c.guaranteed_slots = 5;
  c.heap = heap;
  // More than there are active contexts: each is saved and loaded again.
  constexpr std::size_t kCalls = 3 * kActiveContexts / 2;
  Ranks job(c, kCalls, 5);
  std::vector<std::unique_ptr<ByHand>> engines;
  for (int r = 0; r < ranks; ++r) {
    const auto rank = static_cast<std::uint32_t>(r);
    engines.push_back(std::make_unique<ByHand>(job.state(rank), /*residency_matters=*/false));
  }
  std::vector<Use> uses;
  for (std::size_t i = 0; i < kCalls; ++i) {
    // Some of more bytes than a slot has.
    uses.push_back(make_use(all[i % all.size()], ranks, i, i < all.size() ? 3 : 70 + i));
  }
  for (int r = 0; r < ranks; ++r) {
    const auto rank = static_cast<std::uint32_t>(r);
    for (std::size_t i = 0; i < kCalls; ++i) {
      // Each rank in another order.
      const std::size_t which = (i + rank) % kCalls;
      job.submit(uses[which], rank, static_cast<std::uint16_t>(which));
    }
  }
  const auto completed = [&] {
    std::size_t sum = 0;
    for (int r = 0; r < ranks; ++r) sum += job.stats(static_cast<std::uint32_t>(r)).completed;
    return sum;
  };
  const std::size_t want = kCalls * static_cast<std::size_t>(ranks);
  for (int round = 0; round < 2000 && completed() != want; ++round) {
    for (auto& engine : engines) engine->stay();
  }
  ASSERT_EQ(completed(), want);
  job.fetch();
  for (std::size_t i = 0; i < kCalls; ++i) {
    const Wide& w = all[i % all.size()];
    for (int r = 0; r < ranks; ++r) {
      EXPECT_EQ(uses[i].outputs[static_cast<std::size_t>(r)], expected(w, ranks, r, uses[i].count))
          << name_of(w) << ", rank " << r << " of " << ranks;
    }
  }
  EXPECT_EQ(job.into_outputs() != 0, heap);
}

// 64 neighbours are one too many for codes of their own.
TEST(WidePlans, OfOneNeighbourTooMany) { run(65, false); }
TEST(WidePlans, OfTwiceAsMany) {
  if (unjam_test::kSanitized) GTEST_SKIP() << "it has one thread, and takes a minute";
  run(130, false);
}
TEST(WidePlans, IntoOutputs) { run(67, true); }

// A rank that waits says for whom, whatever its number.
TEST(WidePlans, WhoIsWaitedForIsNamed) {
  const auto word = lack_word(Lack::kRoom, 40'000, 70'000);
  EXPECT_EQ(word >> 2 & kSomePeer, 40'000u);
  EXPECT_EQ(word >> 18, 70'000u & kLackUses);
  EXPECT_EQ(static_cast<Lack>(word & 3), Lack::kRoom);
}

}  // namespace
}  // namespace unjam
