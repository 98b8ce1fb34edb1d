// Slices with several peers, straight through the engine: programs of sets, kScatter and kCollect
// that no planner had a part in, on hand-made keys. Many keys at once, each rank in its
// own order, with tiny slots, blocks of several threads and injected delays.
//
// Also with blocks of several control threads, which the host device does not have: there the
// threads stand for a warp's, each scheduled by itself, so that the thread sanitizer judges what
// docs/internals/engine.md says about them.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "base/clock.h"
#include "base/hash.h"
#include "engine/engine.h"
#include "plan/algorithms/double_binary_tree.h"
#include "plan/check/checker.h"
#include "plan/program_builder.h"
#include "tests/support/engine_ranks.h"
#include "tests/support/job.h"
#include "tests/support/written_programs.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::kPatienceUs;
using unjam_test::kSanitized;

class SeveralPeers : public testing::TestWithParam<Case> {};

TEST_P(SeveralPeers, ManyKeysInAnyOrder) {
  const Case c = GetParam();
  const auto n = static_cast<std::uint32_t>(c.ranks);
  // Blocks of several threads meet at barriers all the time, which costs much on few cores.
  const bool slow = c.threads > 1;
  // (With outputs in heaps there are to be enough that can go there.)
  const std::size_t keys = c.control != 0 && !c.heap ? 5 : 20;
  const std::size_t uses_of_each = c.control != 0 ? 2 : 3;
  const int rounds = slow || kSanitized ? 1 : 3;
  std::uint64_t into_outputs = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t seed = mix64(base_seed() + static_cast<std::uint64_t>(round));
    std::mt19937_64 random(seed);
    std::vector<Use> uses(keys * uses_of_each);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      Use& u = uses[i];
      u.key = i % keys;
      u.n = i / keys;
      u.what = static_cast<What>(random() % (n == 1 ? kWhatsOfOneRank : kWhats));
      u.root = static_cast<std::uint32_t>(random() % n);
      // None, some elements (so that parts are empty), and some loops.
      u.count = random() % 3 == 0 ? random() % 17
                                  : random() % (c.control != 0 ? 300
                                                : slow         ? 700
                                                               : 3000);
      fill(u, n, random,
           c.together                ? Laid::kTogether
           : c.guaranteed_slots >= 4 ? Laid::kOverlapping
                                     : Laid::kOneByOne,
           c.lanes);
    }
    Ranks ranks(c, keys, seed);
    for (std::uint32_t r = 0; r < n; ++r) {
      // Each rank in its own order; uses of one key in theirs.
      std::vector<std::size_t> order(uses.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i % keys;
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::size_t> used(keys);
      for (const std::size_t k : order) {
        const std::size_t i = used[k]++ * keys + k;
        ranks.submit(uses[i], r, static_cast<std::uint16_t>(i));
      }
    }
    for (std::uint32_t r = 0; r < n; ++r) {
      ASSERT_TRUE(ranks.wait(r, uses.size())) << "rank " << r << " is stuck, seed " << seed;
    }
    ranks.fetch();
    for (const Use& u : uses) check(u);
    if (HasFatalFailure()) return;
    ranks.stop();
    into_outputs += ranks.into_outputs();
    for (std::uint32_t r = 0; r < n; ++r) {
      for (std::uint32_t l = 0; l < ranks.state(r).num_lanes; ++l) {
        EXPECT_EQ(ranks.state(r).lanes[l].shorts, 0u) << "rank " << r << ", lane " << l;
      }
    }
  }
  // (Where all slices are there before an invitation is, none goes that way: with luck, and few.)
  if (c.heap) {
    EXPECT_NE(into_outputs, 0u);
  } else {
    EXPECT_EQ(into_outputs, 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Engine, SeveralPeers,
    testing::Values(
        Case{1, 1, 0, 1, 2, 0, false}, Case{2, 1, 0, 1, 2, 0, false}, Case{3, 1, 0, 2, 2, 0, true},
        Case{5, 1, 0, 1, 3, 4, false}, Case{8, 1, 0, 1, 2, 0, true}, Case{4, 4, 0, 1, 2, 0, true},
        Case{3, 4, 0, 2, 5, 2, false}, Case{2, 2, 2, 1, 2, 0, false}, Case{3, 4, 3, 1, 2, 2, false},
        Case{4, 2, 2, 1, 3, 0, false}, Case{2, 3, 1, 1, 2, 0, false}, Case{3, 6, 2, 1, 4, 2, false},
        Case{3, 1, 0, 2, 2, 0, true, true}, Case{5, 1, 0, 1, 4, 4, false, true},
        Case{4, 4, 0, 1, 2, 0, true, true}, Case{3, 6, 2, 1, 4, 2, false, true},
        Case{1, 1, 0, 1, 4, 0, false, false, true}, Case{2, 1, 0, 1, 4, 0, true, false, true},
        Case{5, 1, 0, 2, 4, 3, true, false, true}, Case{3, 4, 0, 1, 4, 0, true, true, true},
        Case{2, 2, 2, 1, 4, 0, false, false, true}, Case{3, 6, 2, 1, 4, 2, false, false, true},
        Case{2, 3, 1, 1, 5, 0, false, true, true}, Case{3, 8, 2, 1, 4, 0, false, true, true},
        Case{4, 6, 2, 1, 2, 0, false}, Case{4, 5, 2, 1, 4, 2, false, true}));

// ---- programs with sets that are neither one rank nor all others ----

// A use of a key whose plans come from tests/support/written_programs.h. Its numbers are of either
// type, each in the place of an integer.
struct WrittenUse {
  PlanRequest request;
  const char* name = "";
  Use use;

  bool is_float() const { return request.dtype == DType::kFloat32; }
  std::int32_t bits(double x) const {
    if (is_float()) return std::bit_cast<std::int32_t>(static_cast<float>(x));
    return static_cast<std::int32_t>(x);
  }
  double value(std::int32_t x) const {
    return is_float() ? double{std::bit_cast<float>(x)} : double{static_cast<double>(x)};
  }

  using MakePlans = std::function<std::vector<Plan>(const PlanRequest&)>;
  void fill(std::mt19937_64& random, const MakePlans& make_plans) {
    use.op = request.op;
    use.count = request.count;
    use.plans = make_plans(request);
    for (int r = 0; r < request.ranks; ++r) {
      std::vector<std::int32_t>& input = use.inputs.emplace_back(request.count);
      for (std::int32_t& x : input) x = bits(static_cast<double>(random() % 10000));
      use.outputs.emplace_back(request.count + 1, -1);  // one more, which nobody may touch
    }
  }
  void check() const {
    for (int r = 0; r < request.ranks; ++r) {
      const auto& out = use.outputs[static_cast<std::size_t>(r)];
      ASSERT_EQ(out.back(), -1) << "written past the end";
      for (std::size_t i = 0; i < request.count; ++i) {
        if (request.kind == Kind::kReduce && r != request.root) {
          ASSERT_EQ(out[i], -1) << "nobody may touch it";
          continue;
        }
        double expected = value(use.inputs[static_cast<std::size_t>(request.root)][i]);
        if (request.kind != Kind::kBroadcast) {
          expected = 0;
          for (const auto& input : use.inputs) expected += value(input[i]);
          if (request.op == Op::kAvg) expected /= request.ranks;
          if (!is_float()) expected = std::floor(expected);
        }
        ASSERT_NEAR(value(out[i]), expected, is_float() ? expected * 1e-6 : 0)
            << name << ", rank " << r << ", element " << i << " of " << request.count;
      }
    }
  }
};

class Written : public testing::TestWithParam<Case> {};

TEST_P(Written, GivesTheRightResultsOnManyKeys) {
  const Case c = GetParam();
  PlanLimits limits;
  limits.guaranteed_slots = static_cast<std::uint32_t>(c.guaranteed_slots);
  limits.guaranteed_slot_bytes = Ranks::kSlotBytes;
  limits.lanes = static_cast<std::uint16_t>(c.lanes);
  struct Program {
    const char* name;
    Kind kind;
    WrittenUse::MakePlans make;
  };
  using namespace unjam_test;
  std::vector<Program> programs = {
      {"tree of two", Kind::kBroadcast,
       [&](const PlanRequest& q) { return tree_broadcast(q, limits, 2, 0); }},
      {"tree of three, lagging", Kind::kBroadcast,
       [&](const PlanRequest& q) { return tree_broadcast(q, limits, 3, 1); }},
      {"halves", Kind::kBroadcast,
       [&](const PlanRequest& q) { return broadcast_in_halves(q, limits); }},
      {"tree of two", Kind::kReduce, [&](const PlanRequest& q) { return tree_reduce(q, limits); }},
      {"star", Kind::kReduce,
       [&](const PlanRequest& q) { return tree_reduce(q, limits, q.ranks); }},
  };
  // (A planner's: with three lanes or more, two trees.)
  for (const Kind kind : {Kind::kAllReduce, Kind::kBroadcast, Kind::kReduce}) {
    programs.push_back({"double binary tree", kind, [&](PlanRequest q) {
                          std::vector<Plan> plans;
                          for (q.rank = 0; q.rank < q.ranks; ++q.rank) {
                            plans.push_back(plan_double_binary_tree(q, limits).value());
                          }
                          return plans;
                        }});
  }
  for (int node_ranks = 2; node_ranks <= c.ranks / 2; node_ranks *= 2) {
    if (c.ranks % node_ranks != 0) continue;
    const int nodes = c.ranks / node_ranks;
    for (const std::uint32_t distance : {0u, 1u}) {
      if (c.guaranteed_slots < 2 * nodes * static_cast<int>(distance + 1)) continue;
      programs.push_back({"two levels", Kind::kAllReduce, [=](const PlanRequest& q) {
                            return two_level_all_reduce(q, limits, node_ranks, distance);
                          }});
    }
  }
  std::mt19937_64 random(base_seed());
  std::deque<WrittenUse> uses;
  for (const Program& program : programs) {
    const bool reduces = program.kind != Kind::kBroadcast;
    for (const DType dtype : {DType::kInt32, DType::kFloat32}) {
      for (const Op op : {Op::kSum, Op::kAvg}) {
        if (!reduces && op != Op::kSum) continue;
        // None of some ranks, and some loops.
        for (const std::uint64_t count : {3, c.control != 0 ? 700 : 2501}) {
          WrittenUse& u = uses.emplace_back();
          u.name = program.name;
          u.request.kind = program.kind;
          u.request.dtype = dtype;
          u.request.op = op;
          u.request.count = count;
          u.request.ranks = c.ranks;
          if (has_root(program.kind)) u.request.root = static_cast<int>(random()) & 1;
          u.use.key = uses.size() - 1;
          u.fill(random, program.make);
          CheckOptions options;
          options.slots = c.guaranteed_slots;
          options.slot_bytes = Ranks::kSlotBytes;
          const CheckResult result = check_plans(u.request, u.use.plans, options);
          ASSERT_TRUE(result.ok) << u.name << ": " << result.error;
        }
      }
    }
  }
  Ranks ranks(c, uses.size(), base_seed());
  for (int r = 0; r < c.ranks; ++r) {
    std::vector<std::size_t> order(uses.size());
    for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (const std::size_t i : order) {
      ranks.submit(uses[i].use, static_cast<std::uint32_t>(r), static_cast<std::uint16_t>(i));
    }
  }
  for (int r = 0; r < c.ranks; ++r) {
    ASSERT_TRUE(ranks.wait(static_cast<std::uint32_t>(r), uses.size())) << "rank " << r;
  }
  ranks.fetch();
  for (const WrittenUse& u : uses) u.check();
  ranks.stop();
  if (!c.heap) {
    EXPECT_EQ(ranks.into_outputs(), 0u);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Engine, Written,
    testing::Values(Case{4, 1, 0, 1, 4, 0, false}, Case{4, 1, 0, 2, 8, 2, true},
                    Case{8, 1, 0, 1, 4, 0, false}, Case{8, 1, 0, 1, 8, 0, true},
                    Case{8, 1, 0, 2, 16, 2, false}, Case{5, 1, 0, 1, 2, 0, true},
                    Case{6, 1, 0, 1, 12, 0, false}, Case{4, 4, 0, 1, 8, 0, false},
                    Case{4, 2, 2, 1, 8, 0, false}, Case{4, 6, 2, 1, 8, 0, false},
                    Case{4, 6, 2, 1, 4, 2, false, true}, Case{4, 1, 0, 1, 8, 0, false, true},
                    Case{8, 1, 0, 1, 8, 3, true, true}, Case{5, 3, 1, 1, 2, 0, false, true},
                    Case{3, 1, 0, 3, 2, 0, true}, Case{8, 1, 0, 4, 4, 2, false, true},
                    Case{13, 1, 0, 6, 2, 0, false}, Case{3, 3, 1, 3, 2, 0, false, true}));

// Of sums the own contribution comes behind what others have sent, in the order of their ranks; of
// contributions it has its rank's place.
TEST(Peers, SumsAreAddedInTheirOrder) {
  constexpr int kRanks = 4, kRoot = 1;
  for (const bool sums : {true, false}) {
    PlanLimits limits;
    limits.guaranteed_slot_bytes = Ranks::kSlotBytes;
    WrittenUse u;
    u.request.kind = Kind::kReduce;
    u.request.dtype = DType::kFloat32;
    u.request.count = 300;
    u.request.ranks = kRanks;
    u.request.root = kRoot;
    std::mt19937_64 random(base_seed());
    u.fill(random, [&](const PlanRequest& q) {
      std::vector<Plan> plans = unjam_test::tree_reduce(q, limits, kRanks - 1);
      for (int r = 0; r < kRanks && !sums; ++r) {
        const unsigned without = r == kRoot ? kPartials : kContribute;
        plans[static_cast<std::size_t>(r)].primitives[0].flags &=
            static_cast<std::uint16_t>(~without);
      }
      EXPECT_TRUE(check_plans(q, plans, {}).ok);
      return plans;
    });
    // Numbers of which most sums are rounded.
    for (auto& input : u.use.inputs) {
      for (std::int32_t& x : input) {
        const auto spread = static_cast<float>(1u << random() % 24);
        x = std::bit_cast<std::int32_t>(static_cast<float>(random() % 1000003) / spread);
      }
    }
    Ranks ranks(Case{kRanks, 1, 0, 1, 2, 0, false}, 1, 91);
    for (std::uint32_t r = 0; r < kRanks; ++r) ranks.submit(u.use, r, 0);
    for (std::uint32_t r = 0; r < kRanks; ++r) ASSERT_TRUE(ranks.wait(r, 1));
    std::uint64_t differ = 0;
    for (std::size_t i = 0; i < u.request.count; ++i) {
      const auto x = [&](std::size_t r) { return std::bit_cast<float>(u.use.inputs[r][i]); };
      const float own_last = ((x(0) + x(2)) + x(3)) + x(1);
      const float by_rank = ((x(0) + x(1)) + x(2)) + x(3);
      const auto got = std::bit_cast<float>(u.use.outputs[kRoot][i]);
      ASSERT_EQ(got, sums ? own_last : by_rank) << "element " << i;
      differ += own_last != by_rank ? 1 : 0;
    }
    EXPECT_GT(differ, 20u) << "these numbers show nothing";
  }
}

// Two primitives that go together, of which the second adds its own contribution to sums.
TEST(Peers, SumsOfAPairHaveTheOwnContributionBehindThem) {
  PlanLimits limits;
  limits.guaranteed_slot_bytes = Ranks::kSlotBytes;
  WrittenUse u;
  u.request.kind = Kind::kReduceScatter;
  u.request.dtype = DType::kInt32;
  u.request.count = 5 * Ranks::kSlotBytes / sizeof(std::int32_t) - 3;
  u.request.ranks = 2;
  std::mt19937_64 random(base_seed());
  u.fill(random, [&](const PlanRequest& q) {
    const Plan empty = unjam_test::written::empty_plan(q, limits, 2);
    auto plans = unjam_test::written::plans_of_all(2, empty, [](int r, ProgramBuilder& program) {
      program.add(kLocal | kContribute | kWithNext, 1 - r, PeerRanks::nobody(),
                  program.all_others());
      program.add(kLocal | kContribute | kReduce | kPartials | kFinish | kCopy, r,
                  program.all_others(), PeerRanks::nobody(), 1);
    });
    const CheckResult result = check_plans(q, plans, {});
    EXPECT_TRUE(result.ok) << result.error;
    return plans;
  });
  for (auto& input : u.use.inputs) {  // a block a rank
    input.resize(2 * u.request.count);
    for (std::int32_t& x : input) x = static_cast<std::int32_t>(random() % 10007);
  }
  Ranks ranks(Case{2, 1, 0, 1, 4, 0, false}, 1, 97);
  for (std::uint32_t r = 0; r < 2; ++r) ranks.submit(u.use, r, 0);
  for (std::uint32_t r = 0; r < 2; ++r) ASSERT_TRUE(ranks.wait(r, 1));
  for (std::size_t r = 0; r < 2; ++r) {
    for (std::size_t i = 0; i < u.request.count; ++i) {
      const std::size_t at = r * u.request.count + i;
      const auto sum = static_cast<std::uint32_t>(u.use.inputs[0][at]) +
                       static_cast<std::uint32_t>(u.use.inputs[1][at]);
      ASSERT_EQ(u.use.outputs[r][i], static_cast<std::int32_t>(sum)) << r << ", element " << i;
    }
  }
}

// A lane that waits for one of several peers says for which.
TEST(Peers, TheMissingPeerIsNamed) {
  for (const What what : {What::kTwoStepAllReduce, What::kOneStepAllReduce, What::kAllGather,
                          What::kMeshBroadcast, What::kMeshReduce}) {
    Use u;
    u.what = what;
    u.root = 2;
    u.count = 100;
    std::mt19937_64 random(base_seed());
    fill(u, 4, random);
    Ranks ranks(Case{4, 1, 0, 1, 2, 0, false}, 1, 77);
    for (const std::uint32_t r : {0u, 1u, 3u}) ranks.submit(u, r, 0);
    const std::uint64_t deadline = monotonic_ns() + std::uint64_t{kPatienceUs} * 1000;
    for (const std::uint32_t r : {0u, 1u, 3u}) {
      while (ranks.lack(r, 0) != lack_word(Lack::kData, 2, 0) && monotonic_ns() < deadline) {
      }
      EXPECT_EQ(ranks.lack(r, 0), lack_word(Lack::kData, 2, 0));
    }
    ranks.submit(u, 2, 0);
    for (std::uint32_t r = 0; r < 4; ++r) ASSERT_TRUE(ranks.wait(r, 1));
    check(u);
  }
}

// A slice that lacks room towards one peer sends to nobody, and says who it is.
TEST(Peers, AllAreSentToOrNone) {
  std::vector<Use> uses(3);
  std::mt19937_64 random(base_seed());
  for (std::size_t i = 0; i < uses.size(); ++i) {
    uses[i].what = What::kBroadcast;
    uses[i].n = i;
    uses[i].count = Ranks::kSlotBytes / sizeof(std::int32_t);
    fill(uses[i], 3, random);
  }
  Ranks ranks(Case{3, 1, 0, 1, 2, 0, false}, 1, 78);
  // The root has room for two slices; rank 1 takes what it gets, rank 2 nothing.
  for (const std::uint32_t r : {0u, 1u}) {
    for (Use& u : uses) ranks.submit(u, r, static_cast<std::uint16_t>(u.n));
  }
  ASSERT_TRUE(ranks.wait(0, 2));
  ASSERT_TRUE(ranks.wait(1, 2));
  const std::uint64_t deadline = monotonic_ns() + std::uint64_t{kPatienceUs} * 1000;
  while (ranks.lack(0, 0) != lack_word(Lack::kRoom, 2, 2) && monotonic_ns() < deadline) {
  }
  EXPECT_EQ(ranks.lack(0, 0), lack_word(Lack::kRoom, 2, 2));
  EXPECT_EQ(load_relaxed(ranks.stats(0).slices), 2u);
  EXPECT_EQ(load_relaxed(ranks.stats(1).slices), 2u);
  for (Use& u : uses) ranks.submit(u, 2, static_cast<std::uint16_t>(u.n));
  ASSERT_TRUE(ranks.wait(0, 1));
  ASSERT_TRUE(ranks.wait(1, 1));
  ASSERT_TRUE(ranks.wait(2, 3));
  for (const Use& u : uses) check(u);
}

// ---- how long an engine stays ----

// A rank by itself whose copy takes 1000 slices: there is always something to move, so nothing but
// the bound can end a stay.
class Stay : public testing::TestWithParam<OrderPolicy> {
 protected:
  static constexpr std::uint64_t kSlices = 1000, kStayUs = 1000;

  Stay() {
    ranks_.state(0).policy.order = GetParam();
    ranks_.state(0).policy.residency_us = kStayUs;
    ranks_.state(0).policy.quantum_slices = 2;
    std::mt19937_64 random(base_seed());
    use_.what = What::kBroadcast;
    use_.count = kSlices * Ranks::kSlotBytes / sizeof(std::int32_t);
    fill(use_, 1, random);
    ranks_.submit(use_, 0, 0);
  }

  Ranks ranks_{Case{1, 0, 0, 1, 2, 0, false}, 1, 79};
  Use use_;
};

TEST_P(Stay, EndsWhenItsTimeIsOverAlthoughThereIsMoreToMove) {
  ByHand engine(ranks_.state(0), /*residency_matters=*/true);
  LaneStats& stats = ranks_.stats(0);
  // It looks at the clock when a turn's quantum is over.
  const std::uint64_t most = kStayUs / ByHand::kSliceUs + ranks_.state(0).policy.quantum_slices;
  std::uint64_t moved = 0, stays = 0;
  while (stats.completed == 0) {
    const std::uint64_t slices = engine.stay();
    moved += slices;
    ++stays;
    ASSERT_GT(slices, 0u) << "a stay without progress, after " << moved;
    ASSERT_LE(slices, most) << "it stays longer";
    if (stats.completed == 0) {
      ASSERT_EQ(stats.residency_quits, stays) << "it left for another reason";
      ASSERT_GT(slices * ByHand::kSliceUs, kStayUs) << "it left early";
    }
  }
  EXPECT_EQ(moved, kSlices);
  EXPECT_GE(stays, kSlices / most);
  check(use_);
}

TEST_P(Stay, IsNotBoundedWhereItDoesNotMatter) {
  ByHand engine(ranks_.state(0), /*residency_matters=*/false);
  EXPECT_EQ(engine.stay(), kSlices);
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
  EXPECT_EQ(ranks_.stats(0).residency_quits, 0u);
  check(use_);
}

INSTANTIATE_TEST_SUITE_P(Engine, Stay, testing::Values(OrderPolicy::kFifo, OrderPolicy::kPriority));

// ---- who gives way when its turn is over ----

// A rank by itself: all that it has can be moved at any time, so nothing else ends a turn.
class Turns : public testing::Test {
 protected:
  static constexpr std::uint32_t kQuantum = 10;

  Turns() { ranks_.state(0).policy.quantum_slices = kQuantum; }

  void submit(std::uint64_t slices) { submit(slices, uses_.size(), 0); }
  void submit(std::uint64_t slices, std::size_t key, std::uint64_t n) {
    Use& u = uses_.emplace_back();
    u.what = What::kBroadcast;
    u.key = key;
    u.n = n;
    u.count = slices * Ranks::kSlotBytes / sizeof(std::int32_t);
    fill(u, 1, random_);
    ranks_.submit(u, 0, static_cast<std::uint16_t>(uses_.size() - 1));
  }
  // After how many slices each invocation had ended.
  std::vector<std::uint64_t> run(const std::function<void(std::uint64_t)>& after_slice) {
    ByHand engine(ranks_.state(0), /*residency_matters=*/false);
    std::vector<std::uint64_t> ends;
    std::uint64_t moved = 0;
    const auto note = [&] { ends.resize(ranks_.stats(0).completed, moved); };
    engine.after_slice = [&] {
      note();  // those that had ended in front of this slice
      after_slice(++moved);
    };
    engine.stay();
    note();
    for (const Use& u : uses_) check(u);
    EXPECT_EQ(ranks_.state(0).lanes[0].shorts, 0u);
    return ends;
  }
  std::uint64_t switches() { return ranks_.stats(0).quantum_switches; }

  Ranks ranks_{Case{1, 0, 0, 1, 2, 0, false}, 12, 80};
  std::mt19937_64 random_{base_seed()};
  std::deque<Use> uses_;
};

TEST_F(Turns, LongOnesDoNotChangePlaces) {
  for (int i = 0; i < 3; ++i) submit(100);
  EXPECT_EQ(run([](std::uint64_t) {}), (std::vector<std::uint64_t>{100, 200, 300}));
  EXPECT_EQ(switches(), 0u);
}

TEST_F(Turns, NorIfTheyComeLater) {
  submit(100);
  const auto ends = run([this](std::uint64_t moved) {
    if (moved == 25 || moved == 47) submit(100);
  });
  EXPECT_EQ(ends, (std::vector<std::uint64_t>{100, 200, 300}));
  EXPECT_LE(switches(), 2u);  // to see what they are
}

TEST_F(Turns, WhatIsShortComesInBetween) {
  submit(100);
  submit(100);
  const auto ends = run([this](std::uint64_t moved) {
    if (moved == 25) submit(3);
  });
  // Seen at the next look, and known at the one behind that at most.
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_LE(ends[0], 25 + 2 * EnginePolicy::kShortestTurn + 3);
  EXPECT_EQ(ends[1], 103u);  // with nothing of the other one
  EXPECT_EQ(ends[2], 203u);
}

TEST_F(Turns, LongBeforeALongQuantumIsOver) {
  ranks_.state(0).policy.quantum_slices = 64;
  submit(300);
  const auto ends = run([this](std::uint64_t moved) {
    if (moved == 100 || moved == 200) submit(3);
  });
  constexpr std::uint64_t kSoon = 2 * EnginePolicy::kShortestTurn + 3;
  ASSERT_EQ(ends.size(), 3u);
  EXPECT_LE(ends[0], 100 + kSoon);
  EXPECT_LE(ends[1], 200 + kSoon);  // the one before has ended: looks are as often as they were
}

// The later use of a key cannot begin before the one in front of it has ended.
TEST_F(Turns, AreLongerAsLongAsSomebodyWaitsInVain) {
  ranks_.state(0).policy.quantum_slices = 64;
  submit(500);
  submit(3, 0, 1);
  const auto ends = run([](std::uint64_t) {});
  EXPECT_EQ(ends, (std::vector<std::uint64_t>{500, 503}));
  // Behind 4, 8, 16 and 32 slices, and six times 64 ones: 4 to 60, 124 to 444.
  EXPECT_EQ(switches(), 10u);
}

// Each is called when the one in front of it has ended.
TEST_F(Turns, AreShortAgainWhenWhoWaitedHasEnded) {
  constexpr std::uint64_t kShorts = 8, kSlices = 3;
  ranks_.state(0).policy.quantum_slices = 64;
  submit(600);
  std::vector<std::uint64_t> called;
  const auto ends = run([&](std::uint64_t moved) {
    const bool next = called.empty() ? moved == 20 : ranks_.stats(0).completed == called.size();
    if (!next || called.size() == kShorts) return;
    submit(kSlices);
    called.push_back(moved);
  });
  ASSERT_EQ(ends.size(), kShorts + 1);
  for (std::size_t i = 0; i < kShorts; ++i) {
    EXPECT_LE(ends[i] - called[i], 2 * EnginePolicy::kShortestTurn + kSlices) << i;
  }
}

// It is called away as what is short has a pass of its own, and cannot begin.
TEST_F(Turns, NobodyRestsBehindAPassOfWhatIsShort) {
  submit(100);
  ByHand engine(ranks_.state(0), /*residency_matters=*/false);
  std::uint64_t moved = 0;
  engine.after_slice = [&] {
    if (++moved == 25) submit(3, 0, 1);
  };
  engine.before_pass = [&] { engine.is_called_away = ranks_.state(0).lanes[0].shorts != 0; };
  engine.stay();
  EXPECT_LT(moved, 100u);
  EXPECT_FALSE(engine.asleep()) << "the long one can go on, and nobody knows";
  engine.before_pass = nullptr;
  engine.is_called_away = false;
  engine.stay();
  EXPECT_EQ(moved, 103u);
  for (const Use& u : uses_) check(u);
}

// What is short is not interrupted for itself, though others of its kind wait.
TEST_F(Turns, OfShortOnesAreNotCutShort) {
  ranks_.state(0).policy.quantum_slices = 64;
  for (int i = 0; i < 3; ++i) submit(30);
  EXPECT_EQ(run([](std::uint64_t) {}), (std::vector<std::uint64_t>{30, 60, 90}));
  EXPECT_EQ(switches(), 0u);
}

TEST_F(Turns, ButNotUnderTheHoldPolicy) {
  ranks_.state(0).policy.stickiness = StickinessPolicy::kHold;
  submit(100);
  submit(3);
  EXPECT_EQ(run([](std::uint64_t) {}), (std::vector<std::uint64_t>{100, 103}));
}

TEST_F(Turns, WhoIsCalledAwayLeavesInTheMiddleOfAPass) {
  constexpr std::uint64_t kCalls = 12, kCalledAt = 2;
  for (std::uint64_t i = 0; i < kCalls; ++i) submit(1);
  ByHand engine(ranks_.state(0), /*residency_matters=*/false);
  std::uint64_t moved = 0;
  engine.after_slice = [&] {
    engine.is_called_away = ++moved == kCalledAt || engine.is_called_away;
  };
  // It looks between two turns, and stays some more.
  const std::uint64_t first = engine.stay();
  EXPECT_GE(first, kCalledAt);
  EXPECT_LE(first, kCalledAt + ByHand::kLateSlices + 2);
  EXPECT_EQ(ranks_.stats(0).completed, first);
  engine.is_called_away = false;
  engine.after_slice = nullptr;
  EXPECT_EQ(engine.stay(), kCalls - first);
  for (const Use& u : uses_) check(u);
}

// Who leaves in front of what moves, because nothing else does, would do so for ever.
TEST(TurnsAmongPeers, WhoIsCalledAwayGoesOnToWhatMoves) {
  constexpr std::size_t kCalls = 12;
  Ranks ranks(Case{2, 0, 0, 1, 2, 0, false}, kCalls, 82);
  std::mt19937_64 random(base_seed());
  std::vector<Use> uses(kCalls);
  for (std::size_t i = 0; i < kCalls; ++i) {
    uses[i].what = What::kAllGather;
    uses[i].key = i;
    uses[i].count = 10;
    fill(uses[i], 2, random);
    ranks.submit(uses[i], 0, static_cast<std::uint16_t>(i));
  }
  ByHand engine(ranks.state(0), /*residency_matters=*/false);
  ByHand peer(ranks.state(1), /*residency_matters=*/false);
  // The peer calls the last one only, which all others stand in front of.
  ranks.submit(uses.back(), 1, 0);
  peer.stay();
  engine.is_called_away = true;
  engine.turn_ns = ByHand::kLateNs / 2 + 1;
  std::size_t stays = 0;
  for (; ranks.stats(0).completed == 0 && stays < 2 * kCalls; ++stays) engine.stay();
  EXPECT_EQ(ranks.stats(0).completed, 1u) << "after " << stays << " stays";
  peer.stay();
  EXPECT_EQ(ranks.stats(1).completed, 1u);
  check(uses.back());
}

TEST_F(Turns, ByPriorityTheMostUrgentGoesOn) {
  ranks_.state(0).policy.order = OrderPolicy::kPriority;
  for (int i = 0; i < 3; ++i) submit(100);
  EXPECT_EQ(run([](std::uint64_t) {}), (std::vector<std::uint64_t>{100, 200, 300}));
}

// Two ranks, and long calls that the other one makes as well, but is elsewhere.
class LongCalls : public testing::Test {
 protected:
  static constexpr std::size_t kCalls = 4;
  static constexpr std::uint64_t kLong = 100;  // slices

  LongCalls() { ranks_.state(0).policy.quantum_slices = ranks_.state(1).policy.quantum_slices = 4; }

  void submit(std::uint32_t rank, std::size_t key, std::uint64_t slices = kLong) {
    if (uses_[key].inputs.empty()) {
      uses_[key].what = What::kAllGather;
      uses_[key].key = key;
      uses_[key].count = slices * Ranks::kSlotBytes / sizeof(std::int32_t);
      fill(uses_[key], 2, random_);
    }
    ranks_.submit(uses_[key], rank, static_cast<std::uint16_t>(key));
  }
  // The peer begins one of the calls, and leaves; then rank 0 makes all.
  void make_calls() {
    submit(1, begun_by_peer_);
    peer_.stay();
    for (std::size_t key = 0; key + 1 < kCalls; ++key) submit(0, key);
    submit(0, kCalls - 1, last_slices_);
    engine_.stay();
  }
  // Whose turns come first then.
  using Slots = std::vector<std::uint16_t>;
  Slots first_turns(std::size_t n) {
    make_calls();
    EXPECT_GE(engine_.turns.size(), n);
    engine_.turns.resize(n);
    return engine_.turns;
  }
  // In which pass the last call has its first turn.
  std::uint64_t pass_of_the_last() {
    std::uint64_t pass = 0;
    engine_.after_poll = [&](std::uint16_t slot, std::uint32_t) {
      if (slot == kCalls - 1 && pass == 0) pass = ranks_.stats(0).passes;
    };
    make_calls();
    engine_.after_poll = nullptr;
    return pass;
  }

  std::size_t begun_by_peer_ = 1;
  std::uint64_t last_slices_ = kLong;  // of the last call
  std::mt19937_64 random_{base_seed()};
  Ranks ranks_{Case{2, 0, 0, 1, 4, 0, false}, kCalls, 87};
  std::vector<Use> uses_ = std::vector<Use>(kCalls);
  ByHand engine_{ranks_.state(0), /*residency_matters=*/false};
  ByHand peer_{ranks_.state(1), /*residency_matters=*/false};
};

// Who has received what was sent ahead, and nothing more, goes back to the head of its queue, where
// the peers are, too, sooner or later; not under the fixed policy, and not where that would keep
// what is short from its turn.
TEST_F(LongCalls, TheHeadIsNextBehindWhatOthersHaveLeft) {
  EXPECT_EQ(first_turns(5), (Slots{0, 1, 0, 1, 2}));
  for (const std::size_t key : {0u, 2u, 3u}) submit(1, key);
  for (int round = 0; round < 1000 && ranks_.stats(0).completed < kCalls; ++round) {
    engine_.stay(), peer_.stay();
  }
  EXPECT_EQ(ranks_.stats(0).completed, kCalls);
  for (const Use& u : uses_) check(u);
}
TEST_F(LongCalls, WhatIsShortDoesNotWaitForTheHead) {
  last_slices_ = 1;
  EXPECT_EQ(first_turns(3), (Slots{0, 1, kCalls - 1}));
}
// A pass goes on behind a head that has ended; who is the head then counts.
TEST_F(LongCalls, TheHeadIsNextAlsoIfAnotherWasTheHeadBefore) {
  submit(1, 0, 1);
  begun_by_peer_ = 2;
  EXPECT_EQ(first_turns(5), (Slots{0, 1, 2, 1, 2}));
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
}
TEST_F(LongCalls, TheNextIsNextIfTheHeadIsOfOtherRanks) {
  ranks_.set_group(0, 0, 12345);
  EXPECT_EQ(first_turns(3), (Slots{0, 1, 2}));
}
TEST_F(LongCalls, TheNextIsNextUnderTheFixedPolicy) {
  ranks_.state(0).policy.stickiness = StickinessPolicy::kFixed;
  EXPECT_EQ(first_turns(3), (Slots{0, 1, 2}));
}
// (The first pass is over when there is nobody yet.)
TEST_F(LongCalls, TheNextIsNextIfTheHeadCannotBegin) {
  ranks_.set_done(0, 0, 7);  // as if others had uses of its key to come
  EXPECT_EQ(pass_of_the_last(), 2u);
}
// A head that gets on now and then keeps nobody.
TEST_F(LongCalls, TheNextIsNextBehindTheHead) {
  begun_by_peer_ = 0;
  EXPECT_EQ(pass_of_the_last(), 2u);
}

// How long one that has received something waits for more.
struct Sticks {
  bool disorder = false;
  bool late = false;     // something comes while it waits
  bool smaller = false;  // its seed than the head's
  bool sticks = true;
};
void PrintTo(const Sticks& s, std::ostream* out) {
  *out << (s.disorder ? "in disorder" : "in order") << (s.late ? ", something comes late" : "")
       << (s.smaller ? ", the smaller seed" : ", the larger seed");
}
class Sticking : public LongCalls, public testing::WithParamInterface<Sticks> {};

TEST_P(Sticking, ToWhatPeersAreAt) {
  const Sticks c = GetParam();
  std::size_t head = 0, other = 1;
  const auto seed = [&](std::size_t key) { return hash_combine(ranks_.tag(0, key), 0); };
  if ((seed(other) < seed(head)) != c.smaller) std::swap(head, other);
  const auto slot = static_cast<std::uint16_t>(other);
  submit(1, other);
  peer_.stay();
  submit(0, head), submit(0, other);
  if (c.disorder) {
    ranks_.state(0).policy.order_after_us = 1 << 30;
    for (int i = 0; i < 10; ++i) ranks_.state(0).lanes[0].disorder.note_end(true);
    ASSERT_TRUE(ranks_.state(0).lanes[0].disorder.expected());
  }
  bool came = false;
  engine_.after_poll = [&](std::uint16_t s, std::uint32_t polls) {
    if (!c.late || came || s != slot || polls != 10) return;
    came = true;
    peer_.stay();
  };
  engine_.stay();
  EXPECT_EQ(came, c.late);
  const EnginePolicy& policy = ranks_.state(0).policy;
  // (The last look is not followed by a wait.)
  const std::uint32_t at_first = policy.initial_threshold(1);
  if (c.sticks) {
    EXPECT_GE(engine_.most_polls[slot] + 1, policy.after_success(at_first));
  } else {
    EXPECT_LE(engine_.most_polls[slot], at_first);
  }
}
INSTANTIATE_TEST_SUITE_P(All, Sticking,
                         testing::Values(Sticks{}, Sticks{.smaller = true},
                                         Sticks{.disorder = true, .sticks = false},
                                         Sticks{.disorder = true, .smaller = true},
                                         Sticks{.disorder = true, .late = true}));

// ---- calls that are tried whole ----

// Tries nothing, but says that it has, as the script wants.
class BatchesHere : public ByHand {
 public:
  using Handle = BatchesHere&;
  static constexpr bool kBatches = true;
  using ByHand::ByHand;

  struct Tried {
    std::uint16_t slot;
    BatchWay how;
    bool operator==(const Tried&) const = default;
  };
  std::vector<std::vector<Tried>> tried;                      // together
  std::map<std::uint16_t, std::vector<std::uint32_t>> polls;  // that each was granted, by its tries
  std::vector<std::uint32_t> turns_granted;
  std::set<std::uint16_t> patient;
  std::function<BatchEnd(std::uint16_t slot, BatchWay how)> script;
  // Of a stream: chunks of its first hop that are moved by a try that does not end it.
  std::uint32_t chunks_a_try = 0;
  std::set<std::uint16_t> still;                // but for these
  std::set<std::uint16_t> early;                // are ended while others are tried
  std::uint32_t most = kMostInBatch;            // the others are left out
  bool hears_what_waits = true;                 // a try that does not end it has received something
  std::map<std::uint16_t, std::uint16_t> hops;  // of two-shot calls: hops that were sent
  std::uint64_t try_ns = 0;                     // how long tries take together

  void stay() {
    doorbell_awake(doorbell());
    Engine<BatchesHere>::run(*this, rank_, 0, shared_);
  }
  // The latest n that were tried, each by itself.
  std::vector<std::uint16_t> latest(std::size_t n) const {
    std::vector<std::uint16_t> slots;
    EXPECT_GE(tried.size(), n);
    for (std::size_t i = tried.size() - std::min(n, tried.size()); i < tried.size(); ++i) {
      EXPECT_EQ(tried[i].size(), 1u);
      slots.push_back(tried[i].front().slot);
    }
    return slots;
  }
  template <class EndEarly>
  void run_batch(BatchEntry* tries, std::uint32_t n, std::uint32_t turn, EndEarly end_early) {
    tried.emplace_back();
    turns_granted.push_back(turn);
    pass_time(try_ns);
    for (std::uint32_t i = 0; i < n; ++i) {
      tried.back().push_back({tries[i].slot, tries[i].how});
      polls[tries[i].slot].push_back(tries[i].polls);
      tries[i].left_out = i >= most;
      tries[i].end = tries[i].left_out ? BatchEnd::kWaits : script(tries[i].slot, tries[i].how);
      const bool done = tries[i].end == BatchEnd::kDone;
      tries[i].receives = !tries[i].left_out && (done || hears_what_waits);
      if (const auto its = hops.find(tries[i].slot); its != hops.end()) {
        tries[i].moved = its->second > (tries[i].how == BatchWay::kCollecting ? 2 : 1);
        tries[i].sends = its->second;
      }
      if (tries[i].patient) patient.insert(tries[i].slot);
      const bool stays = done || tries[i].left_out || still.contains(tries[i].slot);
      if (tries[i].how == BatchWay::kPipelined && !stays) tries[i].done[0] += chunks_a_try;
      if (done && early.contains(tries[i].slot)) end_early(i);
    }
  }
};

class BatchCalls : public testing::Test {
 protected:
  static constexpr std::size_t kCalls = 6;

  // The uses of a key follow each other in their order. whole: 0, 1, or kPipelined,
  // kPipelinedIfContended or kBatchTwoHops.
  void submit(What what, std::size_t key, std::uint64_t n, std::uint8_t whole,
              bool peer_calls = false, std::uint64_t count = 10) {
    Use& u = uses_.emplace_back();
    u.what = what;
    u.key = key;
    u.n = n;
    u.root = 1;
    u.count = count;
    fill(u, 2, random_);
    const auto slot = static_cast<std::uint16_t>(uses_.size() - 1);
    // (What receives comes last.)
    if (whole == 1) whole = static_cast<std::uint8_t>(u.plans[0].primitives.size());
    ranks_.submit(u, 0, slot, whole);
    if (peer_calls) ranks_.submit(u, 1, slot);
  }
  using Batch = std::vector<BatchesHere::Tried>;

  std::mt19937_64 random_{base_seed()};
  Ranks ranks_{Case{2, 0, 0, 1, 4, 0, false}, kCalls, 84};
  std::deque<Use> uses_;  // stay where they are
  BatchesHere engine_{ranks_.state(0), /*residency_matters=*/false};
  ByHand peer_{ranks_.state(1), /*residency_matters=*/false};
};

TEST_F(BatchCalls, StandingTogetherAreTriedTogetherAndWhatHasNotComeLater) {
  for (std::size_t key = 0; key < 4; ++key) submit(What::kAllGather, key, 0, true);
  submit(What::kAllGather, 0, 1, true);  // not before the first has ended
  std::set<std::uint16_t> late{1, 3};
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    return late.erase(slot) != 0 ? BatchEnd::kWaits : BatchEnd::kDone;
  };
  engine_.stay();
  constexpr BatchWay kAll = BatchWay::kAll, kReceiving = BatchWay::kReceiving;
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{0, kAll}, {1, kAll}, {2, kAll}, {3, kAll}},
                                               {{1, kReceiving}, {3, kReceiving}, {4, kAll}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 5u);
  EXPECT_EQ(ranks_.stats(0).preemptions, 2u);
  EXPECT_TRUE(ranks_.wait(0, 5));
  for (std::size_t key = 0; key < 4; ++key) EXPECT_EQ(ranks_.in_queue(0, key), 0u);
}

TEST_F(BatchCalls, ThatCannotBeTriedGoOnSliceBySlice) {
  for (std::size_t key = 0; key < kCalls; ++key) submit(What::kAllGather, key, 0, true, true);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kUnable; };
  for (int round = 0; round < 10; ++round) engine_.stay(), peer_.stay();
  EXPECT_EQ(ranks_.stats(0).completed, kCalls);
  EXPECT_EQ(ranks_.stats(1).completed, kCalls);
  std::size_t tries = 0;
  for (const Batch& batch : engine_.tried) tries += batch.size();
  EXPECT_EQ(tries, kCalls) << "each once";
  for (const Use& u : uses_) check(u);
}

// Of two hops a later turn begins with the one that has not come.
TEST_F(BatchCalls, OfTwoHopsWhatHasNotComeIsTriedLater) {
  for (std::size_t key = 0; key < 3; ++key) {
    submit(What::kTwoStepAllReduce, key, 0, kBatchTwoHops, key == 1);
  }
  int tries = 0;
  engine_.script = [&](std::uint16_t slot, BatchWay how) {
    // The first one takes its hops one by one, the second cannot begin, the third is done at once.
    if (slot == 0) {
      engine_.hops[0] = ++tries == 1 ? 1 : 2;
      return how == BatchWay::kCollecting ? BatchEnd::kDone : BatchEnd::kWaits;
    }
    return slot == 1 ? BatchEnd::kUnable : BatchEnd::kDone;
  };
  for (int round = 0; round < 10; ++round) engine_.stay(), peer_.stay();
  constexpr BatchWay kAll = BatchWay::kAll;
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{0, kAll}, {1, kAll}, {2, kAll}},
                                               {{0, BatchWay::kReceiving}},
                                               {{0, BatchWay::kCollecting}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
  EXPECT_EQ(ranks_.stats(0).batched, 2u);
  check(uses_[1]);  // slice by slice
}

// What has moved a hop is gone on with at once.
TEST_F(BatchCalls, OfTwoHopsOneThatHasComeIsMovement) {
  ranks_.state(0).policy.idle_passes = 1;
  submit(What::kTwoStepAllReduce, 0, 0, kBatchTwoHops);
  int tries = 0;
  engine_.script = [&](std::uint16_t, BatchWay how) {
    engine_.hops[0] = ++tries == 1 ? 1 : 2;
    return how == BatchWay::kCollecting ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  engine_.stay();
  EXPECT_EQ(tries, 3);
}

// And slices go on with it.
TEST_F(BatchCalls, OfTwoHopsWhatCannotBeTriedAnyMoreGoesOnWhereItWas) {
  for (const std::size_t key : {0u, 1u, 2u}) {
    submit(What::kTwoStepAllReduce, key, 0, kBatchTwoHops);
  }
  const BatchEnd ends[] = {BatchEnd::kElsewhere, BatchEnd::kUnable, BatchEnd::kElsewhere};
  const std::uint16_t hops[] = {1, 2, 2};
  std::map<std::uint16_t, int> tries;
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    engine_.hops[slot] = hops[slot];
    return ++tries[slot] == 1 ? BatchEnd::kWaits : ends[slot];
  };
  for (int round = 0; round < 3; ++round) engine_.stay();
  for (const std::uint16_t slot : {0, 1, 2}) {
    const DynamicContext& dyn = ranks_.state(0).lanes[0].contexts[slot];
    EXPECT_EQ(tries[slot], 2) << slot;
    EXPECT_EQ(dyn.handed.primitives_done(), hops[slot]) << slot;
    EXPECT_EQ(dyn.handed.stage, Stage::kSlices) << slot;
  }
}

// It has waited at the wrong place.
TEST_F(BatchCalls, WhatComesElsewhereIsReceivedSliceBySlice) {
  submit(What::kBroadcast, 0, 0, true, true);
  int tries = 0;
  engine_.script = [&](std::uint16_t, BatchWay how) {
    EXPECT_EQ(how, BatchWay::kAll) << "there is nothing to send";
    return ++tries == 1 ? BatchEnd::kWaits : BatchEnd::kElsewhere;
  };
  for (int round = 0; round < 10; ++round) engine_.stay(), peer_.stay();
  EXPECT_EQ(tries, 2);
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
  check(uses_[0]);
}

// What goes through slots is tried with its like: the same hops.
TEST_F(BatchCalls, StreamsAreTriedTogetherWithTheirLike) {
  submit(What::kAllGather, 0, 0, true);
  for (const std::size_t key : {1u, 2u}) submit(What::kAllGather, key, 0, kPipelined, true);
  submit(What::kAllGather, 1, 1, kPipelined);  // not before the first has ended
  submit(What::kBroadcast, 3, 0, kPipelined);
  submit(What::kAllGather, 4, 0, true);
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot == 2 ? BatchEnd::kElsewhere : BatchEnd::kDone;
  };
  for (int round = 0; round < 10; ++round) engine_.stay(), peer_.stay();
  constexpr BatchWay kAll = BatchWay::kAll, kStream = BatchWay::kPipelined;
  EXPECT_EQ(
      engine_.tried,
      (std::vector<Batch>{
          {{0, kAll}}, {{1, kStream}, {2, kStream}}, {{4, kStream}}, {{5, kAll}}, {{3, kStream}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 6u);
  EXPECT_EQ(ranks_.stats(0).batched, 5u);
  check(uses_[2]);  // slice by slice
}

// Its peers leave long ones for it at about the same time. What sends nothing is tried like that
// for the first time again and again.
TEST_F(BatchCalls, ThatSomethingLongWaitsForPollLongerAtFirst) {
  const auto polls_of = [&](What what, bool beside_long, EnginePolicy policy) {
    Ranks ranks{Case{2, 0, 0, 1, 4, 0, false}, kCalls, 84};
    ranks.state(0).policy = policy;
    BatchesHere engine(ranks.state(0), /*residency_matters=*/false);
    std::deque<Use> uses;
    const auto submit = [&](What kind, std::uint8_t whole) {
      Use& u = uses.emplace_back();
      u.what = kind;
      u.key = uses.size() - 1;
      u.root = 1;
      u.count = 10;
      fill(u, 2, random_);
      if (whole == 1) whole = static_cast<std::uint8_t>(u.plans[0].primitives.size());
      ranks.submit(u, 0, static_cast<std::uint16_t>(u.key), whole);
    };
    submit(what, 1);
    if (beside_long) submit(What::kAllGather, kPipelined);
    int tries = 0;
    engine.script = [&](std::uint16_t slot, BatchWay) {
      return slot == 0 && ++tries < 3 ? BatchEnd::kWaits : BatchEnd::kDone;
    };
    engine.stay();
    return engine.polls[0];
  };
  EnginePolicy policy;
  policy.spin_head = 4;
  policy.spin_base = 1;
  using Polls = std::vector<std::uint32_t>;
  EXPECT_EQ(polls_of(What::kAllGather, false, policy), (Polls{4, 4, 4}));
  EXPECT_EQ(polls_of(What::kAllGather, true, policy), (Polls{64, 4, 4}));
  EXPECT_EQ(polls_of(What::kBroadcast, true, policy), (Polls{4, 4, 4}));
  policy.spin_cap = 16;
  EXPECT_EQ(polls_of(What::kAllGather, true, policy), (Polls{16, 4, 4}));
  policy.stickiness = StickinessPolicy::kFixed;
  EXPECT_EQ(polls_of(What::kAllGather, true, policy), (Polls{1, 1, 1}));
}

TEST_F(BatchCalls, StreamsHaveLongerTurnsEachTimeTheyAreInterrupted) {
  for (const std::uint64_t use : {0u, 1u}) submit(What::kAllGather, 0, use, kPipelined);
  const BatchEnd ends[] = {BatchEnd::kInterrupted, BatchEnd::kInterrupted, BatchEnd::kInterrupted,
                           BatchEnd::kDone, BatchEnd::kDone};
  engine_.chunks_a_try = 1;
  engine_.script = [&](std::uint16_t, BatchWay) { return ends[engine_.tried.size() - 1]; };
  engine_.stay();
  EXPECT_EQ(engine_.turns_granted, (std::vector<std::uint32_t>{4, 8, 16, 32, 4}));
}

TEST_F(BatchCalls, NoMoreStreamsAreTriedTogetherThanThePolicySays) {
  ranks_.state(0).policy.most_pipelined = 2;
  for (const std::size_t key : {0u, 1u, 2u}) submit(What::kAllGather, key, 0, kPipelined);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine_.stay();
  constexpr BatchWay kStream = BatchWay::kPipelined;
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{0, kStream}, {1, kStream}}, {{2, kStream}}}));
}

// What is not to wait until long calls have ended is counted where it is mailed, and where it is
// taken out.
TEST(Letters, ThatAreUrgentAreCountedAtBothEnds) {
  Ranks ranks(Case{1, 0, 0, 2, 2, 0, false}, 4, 88);
  std::mt19937_64 random(base_seed());
  std::vector<Use> uses(3);
  for (std::size_t key = 0; key < uses.size(); ++key) {
    uses[key].what = What::kBroadcast;
    uses[key].key = key;
    uses[key].count = 10;
    fill(uses[key], 1, random, Laid::kOneByOne, /*lanes=*/2);
    // The first is long.
    ranks.submit(uses[key], 0, static_cast<std::uint16_t>(key), key == 0 ? kPipelined : 0);
  }
  ranks.release(0, 3, 3);  // for the first lane alone
  BatchesHere engine(ranks.state(0), /*residency_matters=*/false);
  engine.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine.stay();
  const RankState& state = ranks.state(0);
  EXPECT_EQ(state.mailboxes[0].urgent, 3u);
  EXPECT_EQ(state.lanes[0].urgent_taken, 3u);
  EXPECT_EQ(state.mailboxes[1].urgent, 2u);
  EXPECT_EQ(state.lanes[1].urgent_taken, 0u);
  // An engine that does nothing whole has the other lane: it counts the same.
  ByHand other(ranks.state(0), /*residency_matters=*/false);
  other.lane = 1;
  other.stay();
  EXPECT_EQ(state.lanes[1].urgent_taken, 2u);
  EXPECT_EQ(state.lanes[1].shorts, 0u);
  EXPECT_EQ(state.lanes[0].shorts, 0u);
  EXPECT_TRUE(ranks.wait(0, 3));
}

// Nor what is short behind letters of long ones: all up to it are taken in.
TEST(Letters, AreTakenInUpToWhatIsUrgent) {
  constexpr std::size_t kLong = 20;
  Ranks ranks(Case{2, 0, 0, 1, 2, 0, false}, kLong + 1, 89);
  std::mt19937_64 random(base_seed());
  std::vector<Use> uses(kLong + 1);
  for (std::size_t key = 0; key <= kLong; ++key) {
    uses[key].what = What::kAllGather;
    uses[key].key = key;
    uses[key].count = 10;
    fill(uses[key], 2, random);
    ranks.submit(uses[key], 0, static_cast<std::uint16_t>(key), key < kLong ? kPipelined : 1);
  }
  BatchesHere engine(ranks.state(0), /*residency_matters=*/false);
  // Long ones have their turns, and go on.
  engine.chunks_a_try = 1;
  std::size_t turns = 0;
  engine.script = [&](std::uint16_t slot, BatchWay) {
    if (slot == kLong) return BatchEnd::kDone;
    if (++turns < 500) return BatchEnd::kInterrupted;
    engine.chunks_a_try = 0;  // they have nothing left to move
    return BatchEnd::kWaits;
  };
  engine.stay();
  const auto is_the_short_one = [](const auto& lot) { return lot.front().slot == kLong; };
  const auto found = std::find_if(engine.tried.begin(), engine.tried.end(), is_the_short_one);
  ASSERT_NE(found, engine.tried.end());
  const auto before = found - engine.tried.begin();
  EXPECT_LE(before, 2) << "lots in front of it";
}

// When the host has said something the device ends what it tries: who is cancelled ends next,
// wherever it is in the queue.
TEST_F(BatchCalls, WhoIsCancelledEndsBeforeThoseThatWereInterruptedGoOn) {
  submit(What::kMeshBroadcast, 0, 0, kPipelined);
  for (const std::size_t key : {1u, 2u}) submit(What::kAllGather, key, 0, kPipelined);
  submit(What::kMeshBroadcast, 3, 0, kPipelined);
  std::vector<std::uint64_t> ended;  // before each try of slot 1
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    if (slot == 0 || slot == 3) return BatchEnd::kWaits;
    if (slot == 2) return ended.size() < 2 ? BatchEnd::kCutShort : BatchEnd::kDone;
    ended.push_back(ranks_.stats(0).completed);
    if (ended.size() != 1) return BatchEnd::kDone;
    engine_.cancelled_slots = {0, 3};
    return BatchEnd::kCutShort;
  };
  engine_.hears_what_waits = false;
  engine_.chunks_a_try = 1;
  engine_.still = {0, 3};
  engine_.stay();
  ASSERT_GE(ended.size(), 2u);
  EXPECT_EQ(ended[0], 0u);
  EXPECT_EQ(ended[1], 2u);
}

// Such as are worth it in a crowd alone.
TEST_F(BatchCalls, WhatIsForCrowdsGoesBySlicesWhereNothingElseIsLong) {
  submit(What::kAllGather, 0, 0, kPipelinedIfContended, true);
  submit(What::kAllGather, 1, 0, true);  // is short
  peer_.stay();
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  for (int round = 0; round < 10; ++round) engine_.stay(), peer_.stay();
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{1, BatchWay::kAll}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 2u);
  check(uses_[0]);
}
// Later uses of its key are no crowd: they do not go beside it.
TEST_F(BatchCalls, WhatIsForCrowdsGoesBySlicesBeforeLaterUses) {
  for (const std::uint64_t n : {0u, 1u, 2u})
    submit(What::kAllGather, 0, n, kPipelinedIfContended, true);
  for (int round = 0; round < 20; ++round) engine_.stay(), peer_.stay();
  EXPECT_TRUE(engine_.tried.empty());
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
  for (const Use& u : uses_) check(u);
}
// The last one of a queue is in a crowd as well.
TEST_F(BatchCalls, WhatIsForCrowdsIsTriedBehindALongOne) {
  submit(What::kAllGather, 0, 0, kPipelined);
  submit(What::kMeshBroadcast, 1, 0, kPipelinedIfContended);
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot == 0 ? BatchEnd::kWaits : BatchEnd::kDone;
  };
  engine_.stay();
  ASSERT_GE(engine_.tried.size(), 2u);
  EXPECT_EQ(engine_.tried[1], (Batch{{1, BatchWay::kPipelined}}));
}
TEST_F(BatchCalls, WhatIsForCrowdsIsTriedBehindALongOneThatIsNotTheHead) {
  submit(What::kAllGather, 0, 0, true);
  submit(What::kAllGather, 1, 0, kPipelined);
  submit(What::kMeshBroadcast, 2, 0, kPipelinedIfContended);
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot == 2 ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  engine_.hears_what_waits = false;
  engine_.stay();
  ASSERT_GE(engine_.tried.size(), 3u);
  EXPECT_EQ(engine_.tried[2], (Batch{{2, BatchWay::kPipelined}}));
}
TEST_F(BatchCalls, WhatIsForCrowdsIsTriedInACrowd) {
  for (const std::size_t key : {0u, 1u}) submit(What::kAllGather, key, 0, kPipelinedIfContended);
  submit(What::kMeshBroadcast, 2, 0, kPipelined);
  submit(What::kMeshBroadcast, 3, 0, kPipelinedIfContended);
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot == 1 ? BatchEnd::kWaits : BatchEnd::kDone;
  };
  engine_.stay();
  constexpr BatchWay kStream = BatchWay::kPipelined;
  // (The last one is left to slices.)
  EXPECT_EQ(engine_.tried,
            (std::vector<Batch>{{{0, kStream}, {1, kStream}}, {{2, kStream}, {3, kStream}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
}

// One that is done ends at once: its slot may be used again while others are tried. But its place
// in the queue, and what is counted, is seen to in the end.
TEST_F(BatchCalls, StreamsEndBeforeThoseThatAreTriedWithThem) {
  for (const std::size_t key : {0u, 1u, 2u}) submit(What::kAllGather, key, 0, kPipelined);
  engine_.early = {0, 2};
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    if (slot == 1) {
      EXPECT_TRUE(ranks_.wait(0, 1));
      EXPECT_EQ(ranks_.in_queue(0, 0), 0u);
      EXPECT_EQ(ranks_.in_queue(0, 1), 1u);
    }
    return BatchEnd::kDone;
  };
  engine_.stay();
  EXPECT_EQ(engine_.tried.size(), 1u);
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
  EXPECT_EQ(ranks_.stats(0).batched, 3u);
  EXPECT_TRUE(ranks_.wait(0, 2));
  for (std::size_t key = 0; key < 3; ++key) EXPECT_EQ(ranks_.in_queue(0, key), 0u);
}

// A stream that was not done is tried again, from where it was left.
struct Again {
  BatchEnd end;            // of the first one's first try
  std::uint32_t chunks;    // that it has moved
  std::vector<int> tried;  // slots, in their order
};
class StreamsAgain : public BatchCalls,
                     public testing::WithParamInterface<std::tuple<std::uint32_t, int>> {};

TEST_P(StreamsAgain, InTheirPlace) {
  const auto [quantum, which] = GetParam();
  const Again cases[] = {
      // What is short comes in between; not the other stream, also if its slices are few.
      {BatchEnd::kInterrupted, 1, {0, 2, 0, 1}},
      // If it has moved, or the host has said something.
      {BatchEnd::kInterrupted, 0, {0, 1, 2, 0}},
      {BatchEnd::kCutShort, 0, {0, 2, 0, 1}},
      // While it moves it goes on, so that ranks come to be at the same one.
      {BatchEnd::kWaits, 1, {0, 0, 1, 2}},
      // Who waits for its peers lets all others go on.
      {BatchEnd::kWaits, 0, {0, 1, 2, 0}},
  };
  const Again& expected = cases[which];
  ranks_.state(0).policy.quantum_slices = quantum;
  submit(What::kBroadcast, 0, 0, kPipelined, false, 1000);
  submit(What::kAllGather, 1, 0, kPipelined, false, 1000);
  submit(What::kAllGather, 2, 0, true);
  engine_.chunks_a_try = expected.chunks;
  int tries = 0;
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    return slot == 0 && ++tries == 1 ? expected.end : BatchEnd::kDone;
  };
  for (int round = 0; round < 4; ++round) engine_.stay();
  std::vector<int> tried;
  for (const Batch& batch : engine_.tried) {
    ASSERT_EQ(batch.size(), 1u);
    tried.push_back(batch[0].slot);
  }
  EXPECT_EQ(tried, expected.tried);
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
  EXPECT_EQ(ranks_.stats(0).slices, 0u);
  EXPECT_EQ(ranks_.state(0).lanes[0].shorts, 0u);
}
INSTANTIATE_TEST_SUITE_P(All, StreamsAgain,
                         testing::Combine(testing::Values(1u, 64u), testing::Range(0, 5)));

// Who could have gone on, but not beside the others, is next, whatever becomes of these.
TEST_F(BatchCalls, StreamsThatWereLeftOutAreNext) {
  for (std::size_t key = 0; key < 5; ++key) submit(What::kAllGather, key, 0, kPipelined);
  engine_.most = 2;
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot < 2 ? BatchEnd::kWaits : BatchEnd::kDone;
  };
  engine_.stay();
  constexpr BatchWay kStream = BatchWay::kPipelined;
  const auto batch = [&](std::vector<int> slots) {
    Batch b;
    for (const int s : slots) b.push_back({static_cast<std::uint16_t>(s), kStream});
    return b;
  };
  ASSERT_GE(engine_.tried.size(), 3u);
  EXPECT_EQ(engine_.tried[0], batch({0, 1, 2, 3, 4}));
  EXPECT_EQ(engine_.tried[1], batch({2, 3, 4}));
  EXPECT_EQ(engine_.tried[2], batch({4}));
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
}

// But for what is short, if the others were interrupted for that.
TEST_F(BatchCalls, StreamsThatWereLeftOutComeBehindShortCallsWhenOthersWereInterrupted) {
  submit(What::kAllGather, 0, 0, true);
  for (const std::size_t key : {1u, 2u}) {
    submit(What::kAllGather, key, 0, kPipelined, false, 1000);
  }
  engine_.most = 1;
  engine_.chunks_a_try = 1;
  int tries = 0;
  std::uint64_t interrupted_in = 0, again_in = 0;  // which pass
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    if (slot == 1 && tries == 1) interrupted_in = ranks_.stats(0).passes;
    if (slot == 0 && tries == 1) again_in = ranks_.stats(0).passes;
    if (slot == 0) return ++tries < 3 ? BatchEnd::kWaits : BatchEnd::kDone;
    return slot == 1 && tries < 3 ? BatchEnd::kInterrupted : BatchEnd::kDone;
  };
  engine_.stay();
  constexpr BatchWay kAll = BatchWay::kAll, kStream = BatchWay::kPipelined,
                     kReceiving = BatchWay::kReceiving;
  ASSERT_GE(engine_.tried.size(), 3u);
  EXPECT_EQ(engine_.tried[0], (Batch{{0, kAll}}));
  EXPECT_EQ(engine_.tried[1], (Batch{{1, kStream}, {2, kStream}}));
  EXPECT_EQ(engine_.tried[2], (Batch{{0, kReceiving}}));
  EXPECT_EQ(again_in, interrupted_in);
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
}

// Worth a wait: the first in the queue, and those with a smaller seed.
TEST_F(BatchCalls, ThePatientAreTheFirstAndThoseThatAreSoEverywhere) {
  for (std::size_t key = 0; key < kCalls; ++key) submit(What::kAllGather, key, 0, kPipelined);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine_.stay();
  std::set<std::uint16_t> expected;
  const auto seed = [&](std::uint16_t slot) { return ranks_.state(0).invocations[slot].seed; };
  for (std::uint16_t slot = 0; slot < kCalls; ++slot) {
    if (seed(slot) <= seed(0)) expected.insert(slot);
  }
  EXPECT_EQ(engine_.patient, expected);
}

// Of one whose peers are not there the engine does not keep on trying: it leaves.
TEST_F(BatchCalls, AStreamWithoutPeersKeepsNobody) {
  submit(What::kAllGather, 0, 0, kPipelined);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kWaits; };
  engine_.stay();
  EXPECT_GE(engine_.tried.size(), 1u);
  EXPECT_LE(engine_.tried.size(), 2u + ranks_.state(0).policy.idle_passes);
  EXPECT_EQ(ranks_.stats(0).completed, 0u);
  EXPECT_EQ(ranks_.in_queue(0, 0), 1u);
}

// Also if it is interrupted each time, for something short whose peers are not there either.
TEST_F(BatchCalls, AStreamThatIsInterruptedInVainKeepsNobody) {
  submit(What::kAllGather, 0, 0, kPipelined);
  submit(What::kAllGather, 1, 0, true);
  constexpr std::size_t kMany = 100;
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    return slot == 0 && engine_.tried.size() < kMany ? BatchEnd::kInterrupted : BatchEnd::kWaits;
  };
  engine_.stay();
  EXPECT_LE(engine_.tried.size(), 2 * (2u + ranks_.state(0).policy.idle_passes));
  EXPECT_EQ(ranks_.stats(0).completed, 0u);
}

// Nor does it keep a lane from what stands behind it, where each stay begins at the head again, and
// ends soon. Of those that are tried together it is enough that one has moved.
TEST_F(BatchCalls, BehindStreamsThatAreInterruptedInVainOthersHaveTheirTurn) {
  for (const std::size_t key : {0u, 1u}) submit(What::kAllGather, key, 0, kPipelined);
  submit(What::kBroadcast, 2, 0, kPipelined);
  submit(What::kAllGather, 3, 0, true);
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    if (slot == 3) return BatchEnd::kWaits;
    return slot == 2 ? BatchEnd::kDone : BatchEnd::kInterrupted;
  };
  engine_.is_called_away = true;
  engine_.try_ns = ByHand::kLateNs / 2 + 1;
  engine_.chunks_a_try = 1;
  engine_.still = {1};
  engine_.stay();
  EXPECT_EQ(ranks_.stats(0).completed, 0u) << "who has moved goes on before slot 2";
  EXPECT_EQ(engine_.polls.count(3), 1u) << "and before that what is short";
  engine_.still = {0, 1};
  for (int stay = 0; stay < 4; ++stay) engine_.stay();
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
}

// Who leaves in the middle of a try does not know whether it could go on: so it is not at rest.
TEST_F(BatchCalls, WhoIsCutShortDoesNotRest) {
  submit(What::kAllGather, 0, 0, kPipelined);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kCutShort; };
  engine_.is_called_away = true;
  engine_.stay();
  EXPECT_EQ(engine_.tried.size(), 1u);
  EXPECT_FALSE(engine_.asleep());
}

TEST_F(BatchCalls, KeepTheirPlaceAmongOthers) {
  submit(What::kAllGather, 0, 0, true);
  submit(What::kBroadcast, 1, 0, false, true);
  submit(What::kAllGather, 2, 0, true);
  std::vector<std::uint64_t> moved;  // slices, by the time of each try
  peer_.stay();
  engine_.script = [&](std::uint16_t, BatchWay) {
    moved.push_back(ranks_.stats(0).slices);
    return BatchEnd::kDone;
  };
  engine_.stay();
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{0, BatchWay::kAll}}, {{2, BatchWay::kAll}}}));
  EXPECT_EQ(moved, (std::vector<std::uint64_t>{0, 1}));
  EXPECT_EQ(ranks_.stats(0).completed, 3u);
  check(uses_[1]);
}

// Of what a lane has sent by itself before the engine saw it, only what comes in is tried.
TEST_F(BatchCalls, BehindAHeadStartOnlyWhatIsLeft) {
  engine_.done_before.set_primitives_done(1);
  engine_.done_before.stage = Stage::kLeft;
  submit(What::kAllGather, 0, 0, true);
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine_.stay();
  EXPECT_EQ(engine_.tried, (std::vector<Batch>{{{0, BatchWay::kReceiving}}}));
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
}

TEST_F(BatchCalls, AreNotTriedUnderTheHoldPolicy) {
  ranks_.state(0).policy.stickiness = StickinessPolicy::kHold;
  submit(What::kBroadcast, 0, 0, true, true);
  peer_.stay();
  engine_.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine_.stay();
  EXPECT_TRUE(engine_.tried.empty());
  EXPECT_EQ(ranks_.stats(0).completed, 1u);
  check(uses_[0]);
}

// ---- one order (agreed_order.h) ----

struct OrderCase {
  StickinessPolicy stickiness = StickinessPolicy::kAdaptive;
  OrderPolicy order = OrderPolicy::kFifo;
  std::set<std::uint16_t> done{1, 2};  // the others wait, and hear nothing
  std::uint32_t after_us = 0;
  std::uint32_t try_us = 0;
  bool hears = false;  // what waits has received something, too
  bool puts_in_order = false;
  What what = What::kAllGather;
};
void PrintTo(const OrderCase& c, std::ostream* out) {
  *out << (c.stickiness == StickinessPolicy::kAdaptive ? "adaptive" : "fixed") << ", "
       << (c.order == OrderPolicy::kFifo ? "FIFO" : "by priority") << ", " << c.done.size()
       << " done, after " << c.after_us << " us, tries of " << c.try_us << " us"
       << (c.hears ? ", something is heard" : "") << ", kind " << static_cast<int>(c.what);
}
class AgreedOrderOfBatches : public BatchCalls, public testing::WithParamInterface<OrderCase> {};

TEST_P(AgreedOrderOfBatches, WhereThereWasDisorderAndNothingIsHeard) {
  const OrderCase c = GetParam();
  EnginePolicy& policy = ranks_.state(0).policy;
  policy.stickiness = c.stickiness;
  policy.order = c.order;
  policy.order_after_us = c.after_us;
  policy.most_pipelined = 1;
  for (std::size_t key = 0; key < kCalls; ++key) submit(c.what, key, 0, kPipelined);
  engine_.hears_what_waits = c.hears;
  engine_.try_ns = std::uint64_t{c.try_us} * 1000;
  engine_.script = [&](std::uint16_t slot, BatchWay) {
    return c.done.contains(slot) ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  engine_.stay();
  engine_.stay();  // it may have put them in order just before it left
  std::vector<std::uint16_t> by_call;
  for (std::uint16_t slot = 0; slot < kCalls; ++slot) {
    if (!c.done.contains(slot)) by_call.push_back(slot);
  }
  std::vector<std::uint16_t> by_seed = by_call;
  std::sort(by_seed.begin(), by_seed.end(), [&](std::uint16_t a, std::uint16_t b) {
    return ranks_.state(0).invocations[a].seed < ranks_.state(0).invocations[b].seed;
  });
  if (c.puts_in_order) {
    ASSERT_NE(by_call, by_seed) << "the seeds say nothing";
  }
  EXPECT_EQ(engine_.latest(by_call.size()), c.puts_in_order ? by_seed : by_call);
  EXPECT_EQ(ranks_.stats(0).orderings != 0, c.puts_in_order);
}
INSTANTIATE_TEST_SUITE_P(
    All, AgreedOrderOfBatches,
    testing::Values(OrderCase{.puts_in_order = true}, OrderCase{.done = {}}, OrderCase{.done = {0}},
                    OrderCase{.done = {1}}, OrderCase{.after_us = 1},
                    OrderCase{.after_us = 100, .try_us = 40, .puts_in_order = true},
                    OrderCase{.after_us = 1000, .try_us = 40}, OrderCase{.hears = true},
                    OrderCase{.stickiness = StickinessPolicy::kFixed},
                    OrderCase{.order = OrderPolicy::kPriority},
                    OrderCase{.what = What::kMeshBroadcast}, OrderCase{.what = What::kMeshReduce}));

// Who is stuck is not overtaken by what comes later for ever.
class ClosedOrder : public BatchCalls, public testing::WithParamInterface<std::uint64_t> {};

TEST_P(ClosedOrder, IsOvertakenByNobodyAfterAWhile) {
  const std::uint64_t late_ns = GetParam();
  ranks_.state(0).policy.order_after_us = 0;
  ranks_.state(0).policy.most_pipelined = 1;
  engine_.pass_time(2 * kOpenNs);
  engine_.hears_what_waits = false;
  engine_.script = [](std::uint16_t slot, BatchWay) {
    return slot == 1 || slot == 2 ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  const auto seed = [&](std::uint16_t slot) { return ranks_.state(0).invocations[slot].seed; };
  // Slots are numbered as calls are made.
  for (const std::size_t key : {0u, 1u, 2u, 4u, 5u}) {
    submit(What::kAllGather, key, 0, kPipelined);
  }
  engine_.stay();
  EXPECT_EQ(ranks_.stats(0).orderings, 1u);
  engine_.pass_time(late_ns);
  constexpr std::uint16_t kLast = 5;
  submit(What::kAllGather, 3, 0, kPipelined);
  engine_.stay();
  const std::vector<std::uint16_t> last = engine_.latest(4);
  ASSERT_EQ(last.size(), 4u);
  ASSERT_LT(seed(kLast), seed(0)) << "it is to be such as would overtake";
  EXPECT_EQ(last.front() == kLast, late_ns < kOpenNs) << "after " << late_ns << " ns";
  EXPECT_EQ(last.back() == kLast, late_ns > kOpenNs) << "after " << late_ns << " ns";
}
INSTANTIATE_TEST_SUITE_P(All, ClosedOrder, testing::Values(kOpenNs / 2, kOpenNs + 1));

// More than can be put in order together.
class OneOrderOfMany : public testing::Test {
 protected:
  static constexpr std::size_t kKeys = 2 * kMostInOrder;

  OneOrderOfMany() {
    ranks.state(0).policy.order_after_us = 0;
    ranks.state(0).policy.most_pipelined = 1;
    std::mt19937_64 random(base_seed());
    for (std::size_t key = 0; key < kKeys; ++key) {
      uses[key].what = What::kAllGather;
      uses[key].key = key;
      uses[key].count = 10;
      fill(uses[key], 2, random);
      ranks.submit(uses[key], 0, static_cast<std::uint16_t>(key), kPipelined);
    }
    engine.hears_what_waits = false;
  }

  Ranks ranks{Case{2, 0, 0, 1, 4, 0, false}, kKeys, 85};
  std::deque<Use> uses = std::deque<Use>(kKeys);
  BatchesHere engine{ranks.state(0), /*residency_matters=*/false};
};

// One that is not in disorder takes in one newcomer a pass, if nothing comes for those it has.
TEST_F(OneOrderOfMany, AllNewcomersAreTakenIn) {
  engine.script = [](std::uint16_t slot, BatchWay) {
    return slot == 1 || slot == 2 ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  engine.stay();
  EXPECT_EQ(ranks.stats(0).completed, 2u);
  EXPECT_EQ(ranks.stats(0).queue_peak, kKeys - 2);
  EXPECT_LE(ranks.stats(0).passes, kKeys / kActiveContexts + 10);
}

// The first ones are put in order, once a pass; and the engine leaves.
TEST_F(OneOrderOfMany, TheFirstArePutInOrderAndTheEngineLeaves) {
  // What overtakes others, then nobody.
  engine.script = [](std::uint16_t slot, BatchWay) {
    return slot > kKeys - 5 ? BatchEnd::kDone : BatchEnd::kWaits;
  };
  engine.stay();
  EXPECT_EQ(ranks.stats(0).completed, 4u);
  const std::uint64_t passes = ranks.stats(0).passes, orderings = ranks.stats(0).orderings;
  EXPECT_GE(orderings, 1u);
  EXPECT_LE(orderings, passes);
  EXPECT_LE(passes, kKeys + 10) << "one takes in a newcomer at least";
  std::set<std::uint16_t> had_turns;
  for (auto t = engine.tried.rbegin(); t != engine.tried.rend() && had_turns.size() < kKeys - 4;
       ++t) {
    had_turns.insert(t->front().slot);
  }
  EXPECT_EQ(had_turns.size(), kKeys - 4) << "all have had their turn";
  engine.script = [](std::uint16_t, BatchWay) { return BatchEnd::kDone; };
  engine.stay();
  EXPECT_EQ(ranks.stats(0).completed, kKeys);
}

// ---- what executors have done ----

// On CUDA a lane may have moved some chunks of each primitive before its engine sees the call
// (exec/slots). Here: after each slice all that was done is said that way, and the program
// begins anew.
TEST(HandedOver, WhatIsDoneIsNotMovedAgain) {
  constexpr std::uint32_t kRanks = 3, kChunks = 6;
  for (const What what :
       {What::kTwoStepAllReduce, What::kAllGather, What::kReduceScatter, What::kMeshBroadcast,
        What::kMeshReduce, What::kChainBroadcast, What::kChainReduce}) {
    for (const std::uint32_t lag : {0u, 1u, 2u}) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(what)) + ", lag " +
                   std::to_string(lag));
      std::mt19937_64 random(base_seed());
      Use u;
      u.what = what;
      u.root = 1;
      u.count = kChunks * Ranks::kSlotBytes / sizeof(std::int32_t) - 5;
      if (what == What::kTwoStepAllReduce) u.count *= kRanks;
      if (has_empty_part(what)) u.count *= kRanks - 1;
      fill(u, kRanks, random);
      for (Plan& plan : u.plans) overlap(plan.primitives, lag);
      Ranks ranks(Case{kRanks, 0, 0, 1, static_cast<int>(2 * lag + 2), 0, false}, 1, 83);
      std::vector<std::unique_ptr<ByHand>> engines;
      for (std::uint32_t r = 0; r < kRanks; ++r) {
        ranks.state(r).policy.residency_us = 1;
        ranks.state(r).policy.quantum_slices = 1;
        ranks.submit(u, r, 0);
        engines.push_back(std::make_unique<ByHand>(ranks.state(r), /*residency_matters=*/true));
      }
      std::vector<std::uint64_t> moved(kRanks, 0);
      const auto completed = [&](std::uint32_t r) { return ranks.stats(r).completed == 1; };
      for (int stay = 0; stay < 1000; ++stay) {
        const auto r = static_cast<std::uint32_t>(random() % kRanks);
        if (completed(r)) continue;
        moved[r] += engines[r]->stay();
        if (completed(r)) continue;
        DynamicContext& dyn = ranks.state(r).lanes[0].contexts[0];
        const std::vector<Primitive>& program = u.plans[r].primitives;
        std::uint32_t done[kMostSteps] = {};
        for (std::uint32_t i = 0; i < program.size(); ++i) {
          const std::uint64_t passes = dyn.loop + (i < dyn.primitive ? 1 : 0);
          const std::uint64_t chunks = passes < program[i].lag ? 0 : passes - program[i].lag;
          done[i] = std::max(dyn.handed.done[i],
                             static_cast<std::uint32_t>(std::min<std::uint64_t>(chunks, kChunks)));
        }
        dyn.loop = 0;
        dyn.primitive = 0;
        std::copy_n(done, kMostSteps, dyn.handed.done);
      }
      for (std::uint32_t r = 0; r < kRanks; ++r) {
        ASSERT_TRUE(completed(r)) << "rank " << r;
        EXPECT_EQ(moved[r], kChunks * u.plans[r].primitives.size()) << "rank " << r;
      }
      check(u);
    }
  }
}

// What a lane has done by itself before the engine saw it (on CUDA, a call that not all lanes could
// do without the engine) is counted once, and the count does not fall meanwhile.
TEST(Statistics, WhatWasCountedBeforeIsCountedOnceAndCountsNeverFall) {
  std::vector<Use> uses(4);
  std::mt19937_64 random(base_seed());
  Ranks ranks(Case{2, 0, 0, 1, 2, 0, false}, uses.size(), 81);
  ByHand engine(ranks.state(0), /*residency_matters=*/false);
  ByHand peer(ranks.state(1), /*residency_matters=*/false);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    uses[i].what = What::kAllGather;
    uses[i].key = i;
    uses[i].count = 10;
    fill(uses[i], 2, random);
    ranks.submit(uses[i], 0, static_cast<std::uint16_t>(i));
  }
  LaneStats& stats = ranks.stats(0);
  engine.done_before.stage = Stage::kDone;
  bump(stats.completed);
  // The peer is not there: the first one ends, the others wait.
  engine.stay();
  EXPECT_EQ(stats.completed, 1u);
  for (std::size_t i = 1; i < uses.size(); ++i) {
    ranks.submit(uses[i], 1, static_cast<std::uint16_t>(i));
  }
  for (int round = 0; round < 10; ++round) {
    peer.stay();
    engine.stay();
  }
  EXPECT_EQ(stats.completed, uses.size());
  EXPECT_EQ(ranks.stats(1).completed, uses.size() - 1);
}

// ---- keys that come elsewhere ----

// A receiver expects a key's slice in the connector that the key had. Meanwhile the sender's key
// has lost it, has opened another one, or the same one anew, and sends. All that is there when the
// receiver reads its doorbell must be found in the look behind that: nobody rings for it again, and
// a receiver that makes one look in front of each sleep would sleep for ever.
enum class Loses { kReleased, kTakenOver, kAndIsBack };

class ComesElsewhere : public testing::TestWithParam<std::tuple<What, StickinessPolicy, Loses>> {
 protected:
  static constexpr std::size_t kKey = 0, kOther = 1;

  ComesElsewhere() {
    for (const std::uint32_t r : {0u, 1u}) {
      EnginePolicy& policy = ranks_.state(r).policy;
      policy.spin_head = policy.spin_base = policy.spin_cap = 1;
    }
    // With one connector to share, a key that opens takes an idle one's.
    if (std::get<2>(GetParam()) != Loses::kReleased) {
      ranks_.state(0).lanes[0].transport.peers[1].pool = 1;
    }
  }

  // A use that sends from rank 0 to rank 1, in one chunk.
  Use make(What what, std::size_t key, std::uint64_t n) {
    Use u;
    u.what = what;
    u.key = key;
    u.n = n;
    u.root = what == What::kMeshReduce ? 1 : 0;
    u.count = 10;
    fill(u, 2, random_);
    return u;
  }
  void submit(Use& u, std::uint32_t r) { ranks_.submit(u, r, slots_[r]++); }
  // Runs the two in turn until each has completed so many invocations.
  void run(std::uint64_t sender, std::uint64_t receiver) {
    for (int round = 0; round < 10; ++round) {
      sender_.stay();
      receiver_.stay();
    }
    ASSERT_EQ(ranks_.stats(0).completed, sender);
    ASSERT_EQ(ranks_.stats(1).completed, receiver);
  }

  std::mt19937_64 random_{base_seed()};
  Ranks ranks_{Case{2, 0, 0, 1, 4, 0, false}, 2, 80};
  ByHand sender_{ranks_.state(0), /*residency_matters=*/false};
  ByHand receiver_{ranks_.state(1), /*residency_matters=*/false};
  std::uint16_t slots_[2] = {};
};

TEST_P(ComesElsewhere, IsFoundByTheLookThatFindsItGone) {
  const auto [what, stickiness, loses] = GetParam();
  Use first = make(what, kKey, 0), second = make(what, kKey, 1);
  Use other = make(What::kBroadcast, kOther, 0);
  for (const std::uint32_t r : {0u, 1u}) submit(first, r);
  run(1, 1);
  check(first);
  const std::uint32_t had = ranks_.connector(0, kKey, 1);
  ASSERT_NE(had, kNoConnector);

  const auto lose_it = [&] {
    if (loses == Loses::kReleased) ranks_.release(0, kKey, slots_[0]++);
    submit(other, 0);
    sender_.stay();
    ASSERT_EQ(ranks_.connector(0, kOther, 1), had);
    ASSERT_EQ(ranks_.connector(0, kKey, 1), kNoConnector);
  };
  const auto send = [&] {
    submit(second, 0);
    sender_.stay();
  };
  ranks_.state(1).policy.stickiness = stickiness;
  std::uint64_t before = 1;
  if (loses == Loses::kAndIsBack) {
    lose_it();
    submit(other, 1);
    run(2, ++before);  // the connector has gone on
    send();
    EXPECT_EQ(ranks_.connector(0, kKey, 1), had);
  } else {
    receiver_.before_it_sleeps = [&] {
      EXPECT_EQ(ranks_.stats(1).completed, before) << "it had all before its sender sent";
      lose_it();
      send();
      EXPECT_NE(ranks_.connector(0, kKey, 1), had);
    };
  }
  submit(second, 1);
  receiver_.stay();
  ASSERT_TRUE(ranks_.stats(1).completed == before + 1 && !receiver_.stuck())
      << "the receiver sleeps, and its slice lies there";
  run(3, before + 1);
  check(second);
}

std::string name_of(const testing::TestParamInfo<ComesElsewhere::ParamType>& info) {
  static constexpr const char* kWhat[] = {"TwoStepAllReduce", "OneStepAllReduce", "AllGather",
                                          "ReduceScatter",    "Broadcast",        "MeshBroadcast",
                                          "MeshReduce"};
  static constexpr const char* kLoses[] = {"Released", "TakenOver", "AndIsBack"};
  return std::string(kWhat[static_cast<int>(std::get<0>(info.param))]) +
         (std::get<1>(info.param) == StickinessPolicy::kHold ? "Hold" : "OneLook") +
         kLoses[static_cast<int>(std::get<2>(info.param))];
}

INSTANTIATE_TEST_SUITE_P(
    Engine, ComesElsewhere,
    testing::Combine(testing::Values(What::kTwoStepAllReduce, What::kOneStepAllReduce,
                                     What::kAllGather, What::kReduceScatter, What::kBroadcast,
                                     What::kMeshBroadcast, What::kMeshReduce),
                     testing::Values(StickinessPolicy::kAdaptive, StickinessPolicy::kHold),
                     testing::Values(Loses::kReleased, Loses::kTakenOver)),
    name_of);
// All is there before the receiver begins, so these are kinds whose root, or all, send first. (Who
// does not hold looks once more before it leaves, since it has just begun.)
INSTANTIATE_TEST_SUITE_P(EngineBack, ComesElsewhere,
                         testing::Combine(testing::Values(What::kOneStepAllReduce, What::kAllGather,
                                                          What::kReduceScatter, What::kBroadcast,
                                                          What::kMeshBroadcast, What::kMeshReduce),
                                          testing::Values(StickinessPolicy::kHold),
                                          testing::Values(Loses::kAndIsBack)),
                         name_of);

}  // namespace
}  // namespace unjam
