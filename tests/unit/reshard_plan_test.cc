// Plans of cross-mesh resharding: layouts, loads against a bound of the tests' own, and what the
// checker finds.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <functional>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "reshard/balance.h"
#include "reshard/check.h"
#include "reshard/plan.h"
#include "reshard/rank_plan.h"
#include "tests/support/reshard_cases.h"

namespace unjam::reshard {
namespace {

using unjam_test::Cases;
using unjam_test::holds_index;
using unjam_test::text_of;

constexpr Placement kReplicate{};
Placement shard(std::int32_t dim) { return {PlacementKind::kShard, dim, 1}; }
Placement strided(std::int32_t dim, std::int64_t split) {
  return {PlacementKind::kStridedShard, dim, split};
}

Mesh mesh_of(std::vector<std::int64_t> dims, std::int32_t first) {
  Mesh mesh;
  mesh.dims = std::move(dims);
  std::int64_t size = 1;
  for (const std::int64_t dim : mesh.dims) size *= dim;
  for (std::int64_t i = 0; i < size; ++i) {
    mesh.ranks.push_back(first + static_cast<std::int32_t>(i));
  }
  return mesh;
}

// Two source ranks and two destination ranks, each a host of its own.
Request two_to_two(std::vector<std::int64_t> shape, Placement src, Placement dst) {
  Request r;
  r.src = mesh_of({2}, 0);
  r.dst = mesh_of({2}, 2);
  r.topology = ranks_alone(4);
  r.tensors.push_back({"w", std::move(shape), DType::kFloat32, DType::kFloat32, {src}, {dst}});
  return r;
}

CheckReport check_plan(const Plan& plan) { return check(plan.request, rank_plans(plan)); }

// ---- layouts ----

std::vector<Tile> tiles_of(const Mesh& mesh, const std::vector<Placement>& placements,
                           std::int64_t n) {
  return make_layout(mesh, placements, {n}).dims[0].tiles;
}

TEST(ReshardLayout, ChunksAreThoseOfTorch) {
  EXPECT_EQ(tiles_of(mesh_of({4}, 0), {shard(0)}, 10),
            (std::vector<Tile>{{{0, 3, 0}}, {{3, 6, 0}}, {{6, 9, 0}}, {{9, 10, 0}}}));
  EXPECT_EQ(tiles_of(mesh_of({4}, 0), {shard(0)}, 5),
            (std::vector<Tile>{{{0, 2, 0}}, {{2, 4, 0}}, {{4, 5, 0}}, {}}));
  EXPECT_EQ(tiles_of(mesh_of({3}, 0), {shard(0)}, 0), (std::vector<Tile>{{}, {}, {}}));
}

TEST(ReshardLayout, AStridedShardTakesAPieceOfEachGroup) {
  // 0..8 in two groups, 0..4 and 5..8, and each of these in four.
  EXPECT_EQ(
      tiles_of(mesh_of({4}, 0), {strided(0, 2)}, 9),
      (std::vector<Tile>{
          {{0, 2, 0}, {5, 6, 2}}, {{2, 4, 0}, {6, 7, 2}}, {{4, 5, 0}, {7, 8, 1}}, {{8, 9, 0}}}));
}

TEST(ReshardLayout, StridedBeforeShardIsTensorParallelismBeforeFsdp) {
  // Rank (i, j) has part i of the half j: one run each.
  EXPECT_EQ(tiles_of(mesh_of({2, 2}, 0), {strided(0, 2), shard(0)}, 8),
            (std::vector<Tile>{{{0, 2, 0}}, {{4, 6, 0}}, {{2, 4, 0}}, {{6, 8, 0}}}));
}

TEST(ReshardLayout, EveryIndexIsHeldAsTheDefinitionSays) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    Cases cases(seed);
    const Request r = cases.request(true, 1);
    ASSERT_EQ(request_error(r), "") << "seed " << seed;
    for (const Tensor& t : r.tensors) {
      for (const bool src : {true, false}) {
        const Mesh& mesh = src ? r.src : r.dst;
        const std::vector<Placement>& placements = src ? t.src : t.dst;
        const Layout layout = make_layout(mesh, placements, t.shape);
        for (std::size_t position = 0; position < mesh.ranks.size(); ++position) {
          for (std::size_t d = 0; d < t.shape.size(); ++d) {
            std::set<std::int64_t> held, wanted;
            const auto tile = static_cast<std::size_t>(layout.tile_of[position][d]);
            std::int64_t local = 0;
            for (const unjam::reshard::Run& run : layout.dims[d].tiles[tile]) {
              EXPECT_EQ(run.local, local);
              local += run.end - run.begin;
              for (std::int64_t i = run.begin; i < run.end; ++i) held.insert(i);
            }
            for (std::int64_t i = 0; i < t.shape[d]; ++i) {
              if (holds_index(mesh, placements, position, static_cast<std::int32_t>(d), t.shape[d],
                              i)) {
                wanted.insert(i);
              }
            }
            ASSERT_EQ(held, wanted) << "seed " << seed << ", position " << position << "\n"
                                    << text_of(r);
            ASSERT_EQ(local, static_cast<std::int64_t>(held.size()));
          }
        }
      }
    }
  }
}

// ---- balance ----

// The dual: the most that some set of ports must do alone, a port of it.
std::int64_t bound_by_sets(int ports, const std::vector<SharedWork>& work) {
  std::int64_t most = 0;
  for (unsigned set = 1; set < 1u << ports; ++set) {
    std::int64_t bytes = 0;
    for (const SharedWork& w : work) {
      const bool alone = std::all_of(w.ports.begin(), w.ports.end(),
                                     [&](int port) { return (set >> port & 1u) != 0; });
      if (alone) bytes += w.bytes;
    }
    const std::int64_t size = std::popcount(set);
    most = std::max(most, (bytes + size - 1) / size);
  }
  return most;
}

TEST(ReshardBalance, NoSharingDoesBetter) {
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Cases cases(seed);
    const int ports = static_cast<int>(cases.between(1, 8));
    std::vector<SharedWork> work;
    for (std::int64_t i = cases.between(1, 12); i > 0; --i) {
      SharedWork w;
      for (int p = 0; p < ports; ++p) {
        if (cases.chance(30)) w.ports.push_back(p);
      }
      if (w.ports.empty()) w.ports.push_back(static_cast<int>(cases.between(0, ports - 1)));
      w.bytes = cases.between(0, 1000);
      work.push_back(w);
    }
    const Balance result = balance(ports, work);
    EXPECT_EQ(result.most, bound_by_sets(ports, work)) << "seed " << seed;
    std::vector<std::int64_t> load(static_cast<std::size_t>(ports), 0);
    for (std::size_t i = 0; i < work.size(); ++i) {
      std::int64_t sum = 0;
      for (std::size_t k = 0; k < work[i].ports.size(); ++k) {
        EXPECT_GE(result.bytes[i][k], 0);
        sum += result.bytes[i][k];
        load[static_cast<std::size_t>(work[i].ports[k])] += result.bytes[i][k];
      }
      EXPECT_EQ(sum, work[i].bytes) << "seed " << seed;
    }
    EXPECT_LE(*std::max_element(load.begin(), load.end()), result.most) << "seed " << seed;
  }
}

// ---- plans ----

TEST(ReshardPlan, RowsToColumns) {
  const Plan plan = make_plan(two_to_two({4, 4}, shard(0), shard(1)));
  EXPECT_EQ(plan.bundles.size(), 4u);
  EXPECT_EQ(plan.bound, 32);
  EXPECT_EQ(plan.busiest(), 32);
  const CheckReport report = check_plan(plan);
  EXPECT_TRUE(report.ok) << report.error;
  EXPECT_EQ(report.elements, 16);
}

TEST(ReshardPlan, ReplicasShareTheSending) {
  const Plan plan = make_plan(two_to_two({4, 4}, kReplicate, kReplicate));
  // One cell, halved: each half goes to one destination, which hands it on.
  EXPECT_EQ(plan.bound, 64);
  EXPECT_EQ(plan.busiest(), 64);
  EXPECT_EQ(plan.loads.out[0], 32);
  EXPECT_EQ(plan.loads.out[1], 32);
  EXPECT_TRUE(check_plan(plan).ok);
}

TEST(ReshardPlan, InsideAHostNothingUsesItsNic) {
  Request r = two_to_two({8}, kReplicate, kReplicate);
  r.topology = equal_hosts(4, 4, 1);
  const Plan plan = make_plan(r);
  EXPECT_EQ(plan.bound, 0);
  EXPECT_EQ(plan.busiest(), 0);
  EXPECT_TRUE(check_plan(plan).ok);
}

TEST(ReshardPlan, WhatARankHoldsItCopies) {
  Request r = two_to_two({8}, shard(0), shard(0));
  r.dst = r.src;
  const Plan plan = make_plan(r);
  EXPECT_TRUE(plan.bundles.empty());
  EXPECT_EQ(plan.copies.size(), 2u);
  EXPECT_TRUE(check_plan(plan).ok);
}

TEST(ReshardPlan, NothingToMoveIsAPlan) {
  for (const std::vector<std::int64_t>& shape :
       {std::vector<std::int64_t>{0}, std::vector<std::int64_t>{3, 0}}) {
    const Plan plan = make_plan(two_to_two(shape, shard(0), kReplicate));
    EXPECT_TRUE(plan.bundles.empty());
    EXPECT_TRUE(check_plan(plan).ok);
  }
  Request r = two_to_two({1}, kReplicate, kReplicate);
  r.tensors[0].shape.clear();  // a scalar
  EXPECT_TRUE(check_plan(make_plan(r)).ok);
  r.tensors.clear();
  EXPECT_TRUE(make_plan(r).bundles.empty());
}

TEST(ReshardPlan, TheWireHasTheSmallerType) {
  Request r = two_to_two({4, 4}, shard(0), shard(0));
  r.tensors[0].dst_dtype = DType::kBfloat16;
  EXPECT_EQ(make_plan(r).busiest(), 16);
  r.tensors[0].src_dtype = DType::kInt8;
  EXPECT_EQ(make_plan(r).busiest(), 8);
}

TEST(ReshardPlan, BundlesFitTheirPartOfTheMemory) {
  Request r = two_to_two({5000, 3}, shard(0), kReplicate);
  r.options.max_bytes = 8 * 4096;
  r.options.window = 8;
  const Plan plan = make_plan(r);
  EXPECT_GE(plan.bundles.size(), 15u);
  for (const Bundle& bundle : plan.bundles) EXPECT_LE(bundle.bytes, 4096);
  EXPECT_TRUE(check_plan(plan).ok) << check_plan(plan).error;
}

TEST(ReshardPlan, AllTensorsOfARouteTravelTogether) {
  Request r = two_to_two({4, 4}, shard(0), shard(0));
  for (int i = 0; i < 20; ++i) {
    r.tensors.push_back(r.tensors[0]);
    r.tensors.back().name = "v" + std::to_string(i);
    r.tensors.back().src_dtype = r.tensors.back().dst_dtype = i % 2 ? DType::kInt8 : DType::kInt64;
  }
  const Plan plan = make_plan(r);
  EXPECT_EQ(plan.bundles.size(), 2u);
  EXPECT_TRUE(check_plan(plan).ok) << check_plan(plan).error;
}

TEST(ReshardPlan, RoundsMeetAtNoPort) {
  Cases cases(1);
  for (int i = 0; i < 20; ++i) {
    const Plan plan = make_plan(cases.request(false, 64));
    std::map<std::uint32_t, std::multiset<int>> used;
    for (const Bundle& bundle : plan.bundles) {
      for (const Hop& hop : bundle.hops) {
        if (hop.parent < 0) continue;
        const auto rank = static_cast<std::size_t>(hop.rank);
        const auto parent = static_cast<std::size_t>(hop.parent);
        if (plan.ports.host_of[rank] == plan.ports.host_of[parent]) continue;
        used[bundle.round].insert(2 * plan.ports.port_of[parent]);
        used[bundle.round].insert(2 * plan.ports.port_of[rank] + 1);
      }
    }
    for (const auto& [round, ports] : used) {
      for (const int port : ports) EXPECT_EQ(ports.count(port), 1u) << "round " << round;
    }
    EXPECT_TRUE(std::is_sorted(plan.bundles.begin(), plan.bundles.end(),
                               [](const Bundle& a, const Bundle& b) { return a.round < b.round; }));
  }
}

TEST(ReshardPlan, TheOrderOfTheTensorsIsNoMatter) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    Cases cases(seed);
    Request r = cases.request(true, 1);
    const std::uint64_t digest = make_plan(r).digest;
    std::mt19937_64 random(seed);
    std::shuffle(r.tensors.begin(), r.tensors.end(), random);
    EXPECT_EQ(make_plan(r).digest, digest) << "seed " << seed;
  }
}

TEST(ReshardPlan, OtherRequestsHaveOtherDigests) {
  const Request r = two_to_two({4, 4}, shard(0), shard(1));
  const std::vector<std::function<void(Request*)>> changes = {
      [](Request* c) { c->tensors[0].name = "x"; },
      [](Request* c) { c->tensors[0].shape = {4, 5}; },
      [](Request* c) { c->tensors[0].src_dtype = DType::kInt32; },
      [](Request* c) { c->tensors[0].dst[0] = strided(1, 2); },
      [](Request* c) { std::swap(c->src.ranks[0], c->src.ranks[1]); },
      [](Request* c) { c->topology.nic[3] = 1; },
      [](Request* c) { c->options.window = 31; },
      [](Request* c) { c->options.max_bytes -= 32; },
      [](Request* c) { c->options.stripes = 4; },
  };
  std::set<std::uint64_t> digests{make_plan(r).digest};
  for (const auto& change : changes) {
    Request other = r;
    change(&other);
    digests.insert(make_plan(other).digest);
  }
  EXPECT_EQ(digests.size(), changes.size() + 1);
}

TEST(ReshardPlan, EachRankHasThePlanOfItsOwn) {
  Cases cases(7);
  for (int i = 0; i < 10; ++i) {
    const Plan plan = make_plan(cases.request(true, 1));
    const std::vector<RankPlan> all = rank_plans(plan);
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      const RankPlan one = rank_plan(plan, static_cast<std::int32_t>(rank));
      ASSERT_EQ(one.steps.size(), all[rank].steps.size());
      ASSERT_EQ(one.copies.size(), all[rank].copies.size());
      for (std::size_t s = 0; s < one.steps.size(); ++s) {
        EXPECT_EQ(one.steps[s].bundle, all[rank].steps[s].bundle);
        EXPECT_EQ(one.steps[s].parent, all[rank].steps[s].parent);
        EXPECT_EQ(one.steps[s].children, all[rank].steps[s].children);
      }
    }
  }
}

TEST(ReshardPlan, RandomRequestsAreRight) {
  std::int64_t elements = 0;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Cases cases(seed);
    Request r = cases.request(seed % 2 == 1, 1);
    if (cases.chance(30)) r.options.window = 4096, r.options.max_bytes = 4096 * 4096;
    const Plan plan = make_plan(r);
    const CheckReport report = check_plan(plan);
    ASSERT_TRUE(report.ok) << "seed " << seed << ": " << report.error << "\n" << text_of(r);
    elements += report.elements;
  }
  EXPECT_GT(elements, 100'000);
}

// The work of all ports, element by element: what leaves the source's hosts and what comes into
// each host of the destination.
struct Work {
  std::map<std::set<int>, std::int64_t> out, in;
};
Work work_of(const Request& r, const Ports& ports) {
  Work work;
  const auto who = [&](bool src, const Tensor& t, const std::vector<std::int64_t>& at) {
    const Mesh& mesh = src ? r.src : r.dst;
    std::vector<std::size_t> ranks;
    for (std::size_t p = 0; p < mesh.ranks.size(); ++p) {
      bool has = true;
      for (std::size_t d = 0; has && d < at.size(); ++d) {
        has = holds_index(mesh, src ? t.src : t.dst, p, static_cast<std::int32_t>(d), t.shape[d],
                          at[d]);
      }
      if (has) ranks.push_back(static_cast<std::size_t>(mesh.ranks[p]));
    }
    return ranks;
  };
  for (const Tensor& t : r.tensors) {
    if (std::count(t.shape.begin(), t.shape.end(), 0) > 0) continue;
    // The last dimension is cut by nobody: one element of it stands for all.
    const std::int64_t bytes = t.shape.back() * wire_bytes(t);
    std::vector<std::int64_t> at(t.shape.size(), 0);
    while (true) {
      std::set<int> out;
      std::map<int, std::set<int>> in;
      for (const std::size_t rank : who(true, t, at)) out.insert(ports.port_of[rank]);
      for (const std::size_t rank : who(false, t, at)) {
        in[ports.host_of[rank]].insert(ports.port_of[rank]);
      }
      work.out[out] += bytes;
      for (const auto& [host, set] : in) work.in[set] += bytes;
      std::size_t d = at.size() - 1;
      while (d > 0 && ++at[d - 1] == t.shape[d - 1]) at[--d] = 0;
      if (d == 0) break;
    }
  }
  return work;
}

// The same, by all sets of ports that the dual allows.
std::int64_t bound_of(const Request& r, const Ports& ports) {
  std::int64_t bound = 0;
  const Work work = work_of(r, ports);
  for (const auto* side : {&work.out, &work.in}) {
    // By their place among the ports of this side: few enough for all sets of them.
    std::set<int> all;
    for (const auto& [set, bytes] : *side) all.insert(set.begin(), set.end());
    const std::vector<int> list(all.begin(), all.end());
    EXPECT_LE(list.size(), 12u);
    std::vector<SharedWork> shared;
    for (const auto& [set, bytes] : *side) {
      SharedWork w;
      w.bytes = bytes;
      for (const int port : set) {
        w.ports.push_back(
            static_cast<int>(std::lower_bound(list.begin(), list.end(), port) - list.begin()));
      }
      shared.push_back(w);
    }
    bound = std::max(bound, bound_by_sets(static_cast<int>(list.size()), shared));
  }
  return bound;
}

// Ratios of the busiest port to the bound.
struct Ratios {
  int cases = 0, close = 0;
  double sum = 0, most = 0;

  void add(const Plan& plan) {
    if (plan.bound == 0) return;
    const double ratio = static_cast<double>(plan.busiest()) / static_cast<double>(plan.bound);
    EXPECT_GE(ratio, 1);
    sum += ratio;
    most = std::max(most, ratio);
    close += ratio <= 1.05 ? 1 : 0;
    ++cases;
  }
};

TEST(ReshardPlan, LoadsAreAtTheBound) {
  Ratios ratios;
  for (std::uint64_t seed = 0; seed < 1000; ++seed) {
    Cases cases(seed);
    const Request r = cases.request(false, 840);
    const Plan plan = make_plan(r);
    ASSERT_EQ(plan.bound, bound_of(r, plan.ports)) << "seed " << seed << "\n" << text_of(r);
    ratios.add(plan);
    ASSERT_LE(ratios.most, 1.1) << "seed " << seed << "\n" << text_of(r);
  }
  EXPECT_GT(ratios.cases, 900);
  EXPECT_LE(ratios.sum, 1.001 * ratios.cases);
  EXPECT_GE(ratios.close, 0.99 * ratios.cases);
}

TEST(ReshardPlan, LoadsOfEightNicsAHostAreAtTheBound) {
  Ratios ratios;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Cases cases(seed);
    ratios.add(make_plan(cases.request_of_hosts(8, 8, 840)));
    ASSERT_LE(ratios.most, 1.25) << "seed " << seed;
  }
  EXPECT_GT(ratios.cases, 180);
  EXPECT_LE(ratios.sum, 1.01 * ratios.cases) << ratios.sum / ratios.cases;
  EXPECT_GE(ratios.close, 0.95 * ratios.cases) << ratios.close;
}

// Where meshes share hosts, who hands on sends as well: the bound does not count that, the sum of
// what comes in does.
TEST(ReshardPlan, HandingOnIsSharedOutToo) {
  int close = 0, all = 0;
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    Cases cases(seed);
    const Request r = cases.request(true, 840);
    const Plan plan = make_plan(r);
    if (plan.bound == 0) continue;
    std::set<int> ports;
    for (const Mesh* mesh : {&r.src, &r.dst}) {
      for (const std::int32_t rank : mesh->ranks) {
        ports.insert(plan.ports.port_of[static_cast<std::size_t>(rank)]);
      }
    }
    const double bound =
        std::max(static_cast<double>(plan.bound),
                 static_cast<double>(plan.received()) / static_cast<double>(ports.size()));
    const double ratio = static_cast<double>(plan.busiest()) / bound;
    EXPECT_LE(ratio, 1.5) << "seed " << seed << "\n" << text_of(r);
    close += ratio <= 1.05 ? 1 : 0;
    ++all;
  }
  EXPECT_GT(all, 300);
  EXPECT_GE(close, 0.97 * all);
}

// ---- mistakes ----

// A plan with stripes, a chain over two hosts, and chains inside these.
Request rich_request() {
  Request r;
  r.src = mesh_of({2, 2}, 0);
  r.dst = mesh_of({2, 2}, 4);
  r.topology = equal_hosts(8, 2, 1);
  r.tensors.push_back({"a",
                       {7, 6},
                       DType::kFloat32,
                       DType::kFloat32,
                       {kReplicate, shard(0)},
                       {kReplicate, kReplicate}});
  r.tensors.push_back(
      {"b", {5}, DType::kInt8, DType::kInt8, {strided(0, 2), shard(0)}, {shard(0), kReplicate}});
  return r;
}

class ReshardMistakes : public ::testing::Test {
 protected:
  ReshardMistakes() : plan_(make_plan(rich_request())), ranks_(rank_plans(plan_)) {}

  std::string fault() { return check(plan_.request, ranks_).error; }
  void expect(const std::string& text) {
    EXPECT_NE(fault().find(text), std::string::npos) << fault();
  }
  // Some step that `fits`.
  Step& step(const std::function<bool(const Step&)>& fits) {
    for (RankPlan& plan : ranks_) {
      for (Step& s : plan.steps) {
        if (fits(s)) return s;
      }
    }
    throw std::runtime_error("there is no such step");
  }

  Plan plan_;
  std::vector<RankPlan> ranks_;
};

TEST_F(ReshardMistakes, NoneIsFoundWhereThereIsNone) { EXPECT_EQ(fault(), ""); }

TEST_F(ReshardMistakes, ADroppedStripe) {
  step([](const Step& s) { return !s.unpack.empty(); }).unpack.pop_back();
  expect("never gets");
}

TEST_F(ReshardMistakes, AStripeThatComesTwice) {
  Step& s = step([](const Step& s) { return !s.unpack.empty(); });
  s.unpack.push_back(s.unpack[0]);
  expect("twice");
}

TEST_F(ReshardMistakes, AChainLinkThatLacksTheData) {
  step([](const Step& s) { return s.parent >= 0 && !s.children.empty(); }).children.clear();
  expect("which does not get it or does not send it");
}

TEST_F(ReshardMistakes, ASenderThatAnotherRankAwaits) {
  Step& s = step([](const Step& s) { return s.parent >= 0; });
  s.parent = (s.parent + 1) % 8;
  expect("which does not await it from there");
}

TEST_F(ReshardMistakes, AWrongPlaceInTheSource) {
  Step& s = step([](const Step& s) { return !s.pack.empty() && s.pack[0].start[0] == 0; });
  s.pack[0].start[0] += 1;
  EXPECT_NE(fault(), "");
}

TEST_F(ReshardMistakes, AWrongPlaceInTheDestination) {
  Step& s = step([](const Step& s) { return !s.unpack.empty(); });
  s.unpack[0].start[0] += 100;
  expect("reaches beyond its part");
}

TEST_F(ReshardMistakes, AWrongPlaceInTheBundle) {
  Step& s = step([](const Step& s) { return !s.unpack.empty(); });
  s.unpack[0].at += 1 << 20;
  expect("does not have it");
}

TEST_F(ReshardMistakes, ABundleThatIsTooLarge) {
  plan_.request.options.max_bytes = 32 * 16;
  expect("its part of max_bytes");
}

TEST_F(ReshardMistakes, TwoRootsOfABundle) {
  step([](const Step& s) { return s.parent >= 0; }).parent = -1;
  expect("begins at two ranks");
}

// Where source and destination have ranks in common.
class ReshardCopyMistakes : public ReshardMistakes {
 protected:
  ReshardCopyMistakes() {
    Request r = two_to_two({6, 2}, shard(0), shard(1));
    r.dst = r.src;
    plan_ = make_plan(r);
    ranks_ = rank_plans(plan_);
  }
};

TEST_F(ReshardCopyMistakes, NoneIsFoundWhereThereIsNone) { EXPECT_EQ(fault(), ""); }

TEST_F(ReshardCopyMistakes, AForgottenCopy) {
  ranks_[1].copies.clear();
  expect("rank 1 never gets");
}

TEST_F(ReshardCopyMistakes, ACopyOfSomethingElse) {
  ranks_[0].copies[0].box.src_start[1] = 1;
  expect("in place of");
}

TEST_F(ReshardCopyMistakes, ACopyToSomewhereElse) {
  ranks_[0].copies[0].box.dst_start[0] = 4;
  expect("reaches beyond its part");
}

// Plans made with a wrong idea of who holds what.
std::string fault_of_plan_for(const Request& thought, const Request& truth) {
  return check(make_plan(truth).request, rank_plans(make_plan(thought))).error;
}

TEST(ReshardWrongLayouts, AStridedShardTakenForAShard) {
  const Request truth = rich_request();
  Request thought = truth;
  thought.tensors[1].src[0] = shard(0);
  EXPECT_NE(fault_of_plan_for(thought, truth), "");
}

TEST(ReshardWrongLayouts, AnUnevenLastShardTakenForAnEvenOne) {
  const Request truth = two_to_two({5}, shard(0), kReplicate);
  Request thought = truth;
  thought.tensors[0].shape = {6};
  EXPECT_NE(fault_of_plan_for(thought, truth), "");
  thought.tensors[0].shape = {4};
  EXPECT_NE(fault_of_plan_for(thought, truth), "");
}

TEST(ReshardWrongLayouts, RanksInAnotherOrder) {
  const Request truth = two_to_two({6}, shard(0), shard(0));
  Request thought = truth;
  std::swap(thought.dst.ranks[0], thought.dst.ranks[1]);
  EXPECT_NE(fault_of_plan_for(thought, truth), "");
}

// ---- errors ----

TEST(ReshardErrors, WhatCannotBePlannedIsNamed) {
  const std::vector<std::pair<std::function<void(Request*)>, std::string>> faults = {
      {[](Request* r) { r->src.dims = {3}; }, "the mesh has 3 places and 2 ranks"},
      {[](Request* r) { r->src.dims = {0}; }, "a mesh dimension of 0"},
      {[](Request* r) { r->dst.ranks[1] = 2; }, "destination: rank 2 stands in the mesh twice"},
      {[](Request* r) { r->src.ranks[0] = -1; }, "source: rank -1"},
      {[](Request* r) { r->dst.ranks[0] = 9; }, "the topology knows 4 ranks, not rank 9"},
      {[](Request* r) { r->topology.nic.pop_back(); }, "4 hosts and 3 NICs"},
      {[](Request* r) { r->topology.host[1] = -2; }, "rank 1 has host -2"},
      {[](Request* r) { r->tensors[0].src.clear(); }, "tensor w: source: 0 placements"},
      {[](Request* r) { r->tensors[0].dst[0].dim = 2; }, "there is no dimension 2"},
      {[](Request* r) { r->tensors[0].src[0] = strided(0, 0); }, "split factor must be"},
      {[](Request* r) { r->tensors[0].src[0] = strided(0, 1 << 30); }, "more parts than a plan"},
      {[](Request* r) { r->tensors[0].shape[0] = -1; }, "a dimension of -1"},
      {[](Request* r) { r->tensors[0].shape = {1 << 23, 1 << 22}; }, "more than 2^46 bytes"},
      {[](Request* r) {
         r->tensors[0].shape = {1 << 22, 1 << 22};
         r->options.max_bytes = 32 * 4096;
       },
       "give a larger max_bytes"},
      {[](Request* r) { r->src.dims = {1 << 16, 2}; },
       "a mesh dimension of 2: give 1 or more, 65536"},
      {[](Request* r) { r->tensors.push_back(r->tensors[0]); }, "the name is there twice"},
      {[](Request* r) { r->options.window = 0; }, "window 0"},
      {[](Request* r) { r->options.stripes = 0; }, "stripes 0"},
      {[](Request* r) { r->options.max_bytes = 4096; }, "max_bytes 4096 for a window of 32"},
  };
  for (const auto& [change, text] : faults) {
    Request r = two_to_two({4, 4}, shard(0), shard(1));
    change(&r);
    try {
      make_plan(r);
      ADD_FAILURE() << "planned: " << text;
    } catch (const BadRequest& e) {
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  }
}

// One number of a good request is another one: it is refused, or there is a right plan.
TEST(ReshardErrors, WrongNumbersDoNoHarm) {
  constexpr std::int64_t kValues[] = {-1, 0, 1, 2, 3, 5, INT32_MAX, INT64_MAX, INT64_MIN};
  int refused = 0, planned = 0;
  for (std::uint64_t seed = 0; seed < 3000; ++seed) {
    Cases cases(seed);
    Request r = cases.request(true, 1);
    const std::int64_t value = kValues[cases.between(0, std::size(kValues) - 1)];
    const auto small = static_cast<std::int32_t>(value);
    const auto some = [&](auto& list) -> auto& {
      return list[static_cast<std::size_t>(
          cases.between(0, static_cast<std::int64_t>(list.size()) - 1))];
    };
    Tensor& tensor = some(r.tensors);
    Mesh& mesh = cases.chance(50) ? r.src : r.dst;
    Placement& placement = some(&mesh == &r.src ? tensor.src : tensor.dst);
    switch (cases.between(0, 10)) {
      case 0:
        some(mesh.dims) = value;
        break;
      case 1:
        some(mesh.ranks) = small;
        break;
      case 2:
        some(r.topology.host) = small;
        break;
      case 3:
        some(r.topology.nic) = small;
        break;
      case 4:
        placement.dim = small;
        break;
      case 5:
        placement = strided(0, value);
        break;
      case 6:
        r.options.max_bytes = value;
        break;
      case 7:
        r.options.window = small;
        break;
      case 8:
        r.options.stripes = small;
        break;
      case 9:
        mesh.ranks.pop_back();
        break;
      default:
        if (!tensor.shape.empty()) some(tensor.shape) = value;
    }
    try {
      const Plan plan = make_plan(r);
      const CheckReport report = check(plan);
      EXPECT_TRUE(report.ok) << "seed " << seed << ": " << report.error << "\n" << text_of(r);
      ++planned;
    } catch (const BadRequest&) {
      ++refused;
    }
  }
  EXPECT_GT(planned, 500);
  EXPECT_GT(refused, 500);
}

TEST(ReshardErrors, WhatIsTooLargeToCheckIsRefused) {
  const Plan plan = make_plan(two_to_two({1 << 14, 1 << 14}, shard(0), shard(1)));
  EXPECT_THROW(check_plan(plan), BadRequest);
}

}  // namespace
}  // namespace unjam::reshard
