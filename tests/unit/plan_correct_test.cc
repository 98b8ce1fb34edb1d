// The planners' plans hold: proved by the checker for all kinds, group sizes, roots, lanes and
// counts, and, independently of the checker, by executing them on numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "plan/check/checker.h"
#include "plan/common.h"
#include "plan/describe.h"
#include "plan/program_builder.h"
#include "plan/registry.h"
#include "plan/selector.h"
#include "tests/support/all_plans.h"
#include "tests/support/written_programs.h"
#include "transport/arena.h"

namespace unjam {
namespace {

using unjam_test::make_plans;

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kReduce,
                           Kind::kBroadcast, Kind::kAllToAll,  Kind::kGather,        Kind::kScatter,
                           Kind::kBarrier,   Kind::kSendRecv};
static_assert(std::size(kKinds) == kNumKinds);
// All that there are.
std::vector<Algorithm> algorithms() {
  std::vector<Algorithm> all;
  for (int a = 0; a < kNumAlgorithms; ++a) all.push_back(static_cast<Algorithm>(a));
  return all;
}

// Whether code may ask for it by name, so that tests know what it does. Others are rows only.
bool has_name(Algorithm algorithm) { return algorithm <= Algorithm::kPat; }

// Said again for those that code asks for by name, so that a row cannot lose a kind unnoticed.
bool serves(Algorithm algorithm, Kind kind) {
  const bool as_its_row_says = row_of(algorithm).serves(kind);
  const bool block_to_block = kind == Kind::kAllToAll || kind == Kind::kGather ||
                              kind == Kind::kScatter || kind == Kind::kSendRecv;
  switch (algorithm) {
    case Algorithm::kOneShot:
      return true;
    case Algorithm::kPairwise:
      return block_to_block;
    case Algorithm::kRing:
      return !block_to_block && !whole_at_root(kind);
    case Algorithm::kChain:
      return whole_at_root(kind);
    case Algorithm::kTwoShot:
      return kind == Kind::kAllReduce;
    case Algorithm::kRsag:
      return kind != Kind::kSendRecv;
    case Algorithm::kDoubleBinaryTree:
      return kind == Kind::kAllReduce || kind == Kind::kBarrier || whole_at_root(kind);
    case Algorithm::kHierarchical:
      return kind == Kind::kAllReduce || kind == Kind::kBarrier;
    case Algorithm::kPat:
      return !block_to_block && !whole_at_root(kind);
  }
  return as_its_row_says;
}

bool exists(Kind kind, int ranks) { return kind != Kind::kSendRecv || ranks == 2; }

// The algorithm for bulk data of groups of any size.
Algorithm for_bulk(Kind kind) {
  for (const Algorithm a : {Algorithm::kRing, Algorithm::kChain}) {
    if (serves(a, kind)) return a;
  }
  return Algorithm::kPairwise;
}

PlanRequest make_request(Kind kind, int ranks, std::uint64_t count, int root = 0,
                         DType dtype = DType::kFloat32) {
  PlanRequest request;
  request.kind = kind;
  request.dtype = dtype;
  request.count = count;
  request.ranks = ranks;
  request.root = root;
  return request;
}

PlanLimits make_limits(std::uint32_t slots, std::uint32_t slot_bytes, std::uint16_t lanes = 1,
                       Device device = Device::kHost) {
  PlanLimits limits;
  limits.device = device;
  limits.pool_slot_bytes = 4 * slot_bytes;
  limits.guaranteed_slots = slots;
  limits.guaranteed_slot_bytes = slot_bytes;
  limits.lanes = lanes;
  return limits;
}

CheckResult check(const PlanRequest& request, const PlanLimits& limits,
                  std::optional<Algorithm> algorithm) {
  CheckOptions options;
  options.slots = static_cast<int>(limits.guaranteed_slots);
  options.slot_bytes = limits.guaranteed_slot_bytes;
  return check_plans(request, make_plans(request, limits, algorithm), options);
}

std::string label(const PlanRequest& r, const PlanLimits& l, Algorithm a) {
  return std::string(to_string(a)) + " " + to_string(r.kind) + " ranks " + std::to_string(r.ranks) +
         " count " + std::to_string(r.count) + " root " + std::to_string(r.root) + " lanes " +
         std::to_string(l.lanes) + " slots " + std::to_string(l.guaranteed_slots) +
         (l.device == Device::kCuda ? " cuda" : " host");
}

std::vector<int> roots_to_try(Kind kind, int ranks) {
  if (!has_root(kind)) return {0};
  std::vector<int> roots = {0, 1, ranks / 2, ranks - 1};
  if (ranks <= 8) {
    roots.clear();
    for (int r = 0; r < ranks; ++r) roots.push_back(r);
  }
  std::sort(roots.begin(), roots.end());
  roots.erase(std::unique(roots.begin(), roots.end()), roots.end());
  if (ranks == 1) roots = {0};
  return roots;
}

// Guaranteed slots that a plan may need: one where ranks send before they receive, or in a chain.
int slots_allowed(Algorithm algorithm, Kind kind) {
  if (algorithm == Algorithm::kOneShot || has_root(kind)) return 1;
  if (algorithm == Algorithm::kDoubleBinaryTree) return 1;
  if (algorithm == Algorithm::kRsag || algorithm == Algorithm::kTwoShot) {
    return kind == Kind::kAllReduce || kind == Kind::kBarrier ? 2 : 1;
  }
  return 5;
}

TEST(PlanChecked, AllKindsRanksCountsRootsLanes) {
  int checked = 0;
  for (const Algorithm algorithm : algorithms()) {
    for (const Kind kind : kKinds) {
      if (!serves(algorithm, kind)) continue;
      for (int ranks = 1; ranks <= 33; ++ranks) {
        if (!exists(kind, ranks)) continue;
        const auto n = static_cast<std::uint64_t>(ranks);
        // Slots of 16 floats. Ring chunks are 4 slots, pairwise ones 5, rsag ones a slot, one-shot
        // and two-shot ones half a slot.
        const std::uint64_t parts = blocked(kind) || has_root(kind) ? 1 : n;
        for (const std::uint64_t count : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{7},
                                          16 * parts, 100 * parts + 3, 530 * parts + 13}) {
          for (const int root : roots_to_try(kind, ranks)) {
            for (const auto& [lanes, device] :
                 {std::pair{1, Device::kHost}, {3, Device::kHost}, {32, Device::kCuda}}) {
              const PlanRequest request = make_request(kind, ranks, count, root);
              const PlanLimits limits =
                  make_limits(5, 64, static_cast<std::uint16_t>(lanes), device);
              const CheckResult result = check(request, limits, algorithm);
              ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
              ASSERT_LE(result.slots_needed, slots_allowed(algorithm, kind));
              ++checked;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 5000);
}

TEST(PlanChecked, FewestSlotsAndManyLanesAndAllTypes) {
  for (const Algorithm algorithm : algorithms()) {
    for (const Kind kind : kKinds) {
      if (!serves(algorithm, kind)) continue;
      for (const int ranks : {1, 2, 3, 8}) {
        if (!exists(kind, ranks)) continue;
        for (int t = 0; t < kNumDTypes; ++t) {
          for (const std::uint16_t lanes : {1, 2, 8, 32}) {
            for (const Device device : {Device::kHost, Device::kCuda}) {
              const PlanRequest request =
                  make_request(kind, ranks, 12345, ranks - 1, static_cast<DType>(t));
              const PlanLimits limits = make_limits(2, 128, lanes, device);
              const CheckResult result = check(request, limits, algorithm);
              ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
            }
          }
        }
      }
    }
  }
}

TEST(PlanChecked, DirectAndMeshUpTo64Ranks) {
  for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kRsag, Algorithm::kTwoShot}) {
    for (const Kind kind : kKinds) {
      if (!serves(algorithm, kind)) continue;
      for (const int ranks : {47, 64}) {
        if (!exists(kind, ranks)) continue;
        const PlanRequest request = make_request(kind, ranks, 40, ranks / 3);
        const PlanLimits limits = make_limits(5, 64);
        const CheckResult result = check(request, limits, algorithm);
        ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
        EXPECT_EQ(result.slots_needed, slots_allowed(algorithm, kind)) << to_string(kind);
      }
    }
  }
}

TEST(PlanChecked, MeshNeedsTwoSlots) {
  // Many loops, cut unevenly, so that ranks are apart by as much as the slots allow.
  for (const int ranks : {2, 3, 8}) {
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                            Kind::kBroadcast, Kind::kReduce}) {
      const CheckResult result =
          check(make_request(kind, ranks, 5003), make_limits(2, 64), Algorithm::kRsag);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, kind == Kind::kAllReduce ? 2 : 1) << to_string(kind);
    }
  }
}

TEST(PlanChecked, TwoShotNeedsTwoSlots) {
  for (const int ranks : {2, 3, 8}) {
    for (const std::uint32_t slots : {2u, 3u, 4u}) {
      const CheckResult result = check(make_request(Kind::kAllReduce, ranks, 5003),
                                       make_limits(slots, 64, 3),  // many loops
                                       Algorithm::kTwoShot);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, 2);
    }
  }
}

// Kernels carry a program, and lists of neighbours and members, in arrays.
TEST(PlanChecked, PlansForGpusFitTheirTables) {
  constexpr std::size_t kLongest = std::size_t{2} * kMaxCudaRanks;  // kMaxProgram
  for (const Algorithm algorithm : algorithms()) {
    for (const Kind kind : kKinds) {
      for (const int ranks : {2, 8, 33, 64, 65, static_cast<int>(kMaxCudaRanks)}) {
        if (!serves(algorithm, kind) || !exists(kind, ranks)) continue;
        for (const std::uint64_t count : {1, 200'003}) {
          const PlanRequest request = make_request(kind, ranks, count, ranks - 1);
          const PlanLimits limits = make_limits(4, 65536, 2, Device::kCuda);
          if (!make_plan(request, limits, algorithm)) continue;
          for (const Plan& plan : make_plans(request, limits, algorithm)) {
            ASSERT_LE(plan.primitives.size(), kLongest) << label(request, limits, algorithm);
            ASSERT_LE(plan.neighbours.size(), static_cast<std::size_t>(kMostNeighbours));
            ASSERT_TRUE(plan.wide_peers.empty());
          }
          if (ranks < 64) continue;
          const CheckResult result = check(request, limits, algorithm);
          ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
        }
      }
    }
  }
}

TEST(PlanChecked, OverlappingMesh) {
  for (const Device device : {Device::kHost, Device::kCuda}) {
    for (const int ranks : {2, 3, 5, 8}) {
      for (const Kind kind :
           {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll,
            Kind::kGather, Kind::kScatter, Kind::kBroadcast, Kind::kReduce}) {
        for (const std::uint64_t count : {1, 17, 1000, 5003, 60001, 200003}) {
          for (const auto& [slots, together] : {std::pair{2u, false},
                                                {3u, false},
                                                {4u, false},
                                                {6u, false},
                                                {2u, true},
                                                {3u, true},
                                                {4u, true},
                                                {6u, true}}) {
            const PlanRequest request = make_request(kind, ranks, count, ranks / 2);
            PlanLimits limits = make_limits(slots, 64, 3, device);
            limits.overlap = true;
            limits.together = together;
            // A slot that the smallest chunk worth its while fits into more than once.
            if (count > 10000) limits.guaranteed_slot_bytes = 128 * 1024;
            const CheckResult result = check(request, limits, Algorithm::kRsag);
            ASSERT_TRUE(result.ok)
                << label(request, limits, Algorithm::kRsag) << ": " << result.error;
            if (count != 5003) continue;
            const bool two_hops = kind == Kind::kAllReduce;
            const std::uint32_t distance = overlap_distance(two_hops ? 2 : 1, slots);
            const std::uint32_t lag = two_hops || !together ? distance : std::min(slots - 1, 3u);
            const int needed = static_cast<int>(two_hops ? 2 * lag + 2 : lag + 1);
            if (has_root(kind)) {
              EXPECT_LE(result.slots_needed, needed);
            } else {
              EXPECT_EQ(result.slots_needed, needed) << to_string(kind) << ", " << slots;
            }
          }
        }
      }
    }
  }
}

// Among few ranks as rsag plans: every lane, a slot a chunk, and two chunks a lane.
TEST(PlanChecked, ShortChainsOnCuda) {
  for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
    for (int ranks = 2; ranks <= 4; ++ranks) {
      for (int root = 0; root < ranks; ++root) {
        const PlanRequest request = make_request(kind, ranks, 16 << 20, root);
        const PlanLimits limits = make_limits(4, 74944, 32, Device::kCuda);
        const Geometry g = plan_chain(request, limits)->geometry;
        EXPECT_EQ(g.first_lane, 0);
        EXPECT_EQ(g.lanes, 32);
        EXPECT_EQ(g.parts, 1u);
        // Of 2 MiB a lane, see EvenChunksOnCuda.
        EXPECT_EQ(g.chunk * sizeof(float), kind == Kind::kReduce ? 70016u : 65536u);
        const CheckResult result = check(request, limits, Algorithm::kChain);
        ASSERT_TRUE(result.ok) << label(request, limits, Algorithm::kChain) << ": " << result.error;
        EXPECT_EQ(result.slots_needed, 1);
        const PlanRequest little = make_request(kind, ranks, 786432, root);  // 3 MiB
        const Geometry h = plan_chain(little, limits)->geometry;
        EXPECT_EQ(h.chunk * sizeof(float), 49152u);
        EXPECT_EQ(h.loops(0), 2u);
        // And with small slots, few lanes, and lanes whose stretches differ.
        for (const PlanRequest& odd : {little, make_request(kind, ranks, 100003, root)}) {
          for (const PlanLimits& small : {limits, make_limits(2, 64, 3, Device::kCuda),
                                          make_limits(4, 64, 1, Device::kCuda)}) {
            const CheckResult checked = check(odd, small, Algorithm::kChain);
            ASSERT_TRUE(checked.ok)
                << label(odd, small, Algorithm::kChain) << ": " << checked.error;
            EXPECT_EQ(checked.slots_needed, 1);
          }
        }
      }
    }
  }
}

// As many as 71,680 bytes of a slot make, which blocks move in whole turns, and all alike.
TEST(PlanChecked, EvenChunksOnCuda) {
  const auto geometry = [](std::uint64_t bytes, std::uint32_t slot, int ranks = 4,
                           Kind kind = Kind::kAllReduce) {
    const PlanRequest request = make_request(kind, ranks, bytes / 4, 0);
    PlanLimits limits = make_limits(4, slot, 32, Device::kCuda);
    limits.overlap = true;
    return plan_rsag(request, limits)->geometry;
  };
  const auto chunk = [&](std::uint64_t bytes, std::uint32_t slot, int ranks = 4) {
    return geometry(bytes, slot, ranks).chunk * sizeof(float);
  };
  EXPECT_EQ(chunk(1 << 30, 74944), 71168u);  // 8 MiB a lane
  EXPECT_EQ(geometry(1 << 30, 74944).loops(0), 118u);
  EXPECT_EQ(chunk(256 << 20, 74944), 70016u);
  EXPECT_EQ(chunk(64 << 20, 74944), 65536u);
  EXPECT_EQ(chunk(16 << 20, 74944), 65536u);
  EXPECT_EQ(geometry(16 << 20, 74944).loops(0), 2u);
  EXPECT_EQ(chunk(8 << 20, 74944), 32768u);
  EXPECT_EQ(chunk(1 << 30, 149824, 2), 142208u);
  EXPECT_EQ(chunk(1 << 30, 71680), 71168u);
  // A power of two where that is more, and of broadcasts.
  EXPECT_EQ(chunk(1 << 30, 131072), 131072u);
  EXPECT_EQ(chunk(1 << 30, 262144), 262144u);
  EXPECT_EQ(chunk(1 << 30, 149760, 2), 142208u);
  EXPECT_EQ(geometry(1 << 30, 74944, 4, Kind::kBroadcast).chunk, 16384u);
  EXPECT_EQ(geometry(1 << 30, 74944, 4, Kind::kReduceScatter).chunk, 17888u);  // 32 MiB a lane
  EXPECT_EQ(chunk(1 << 30, 71616), 65536u);
  EXPECT_EQ(chunk(1 << 30, 65536), 65536u);
  EXPECT_EQ(chunk(3 << 20, 4096), 4096u);
}

TEST(PlanChecked, ChainsOfLargeChunksOnCuda) {
  for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
    for (int ranks = 5; ranks <= 33; ++ranks) {
      const PlanRequest request = make_request(kind, ranks, 100003, ranks / 3);
      const PlanLimits limits = make_limits(2, 64, 3, Device::kCuda);
      const Geometry g = plan_chain(request, limits)->geometry;
      EXPECT_EQ(g.chunk * 4, 8 * limits.pool_slot_bytes);
      const CheckResult result = check(request, limits, Algorithm::kChain);
      ASSERT_TRUE(result.ok) << label(request, limits, Algorithm::kChain) << ": " << result.error;
      EXPECT_EQ(result.slots_needed, 1);
      // Little data: chunks enough for the pipeline, of a slot at least.
      const std::uint64_t little = 16 * 16 * 3;
      const Geometry h = plan_chain(make_request(kind, ranks, little), limits)->geometry;
      EXPECT_EQ(h.chunk, 16u);
    }
  }
}

int log2_below(int n) {
  int log = 0;
  while ((2 << log) <= n) ++log;
  return log;
}

constexpr Kind kTreeKinds[] = {Kind::kAllReduce, Kind::kBarrier, Kind::kBroadcast, Kind::kReduce};

// Hops from the top, or the root, to who is farthest.
int tree_depth_of(Kind kind, int ranks) {
  return has_root(kind) ? 1 + log2_below(ranks - 1) : log2_below(ranks);
}

// Of how many trees a rank passes something on to, or from, ranks below it.
int interior_in(const Plan& plan) {
  std::vector<int> parts;
  for (const Primitive& p : plan.primitives) {
    if (!from_set(p) && !to_set(p)) continue;
    const int part = static_cast<int>(p.part);
    if (std::find(parts.begin(), parts.end(), part) == parts.end()) parts.push_back(part);
  }
  return static_cast<int>(parts.size());
}

// Proves these trees, in one slot, and that no rank sends more than it should.
void expect_trees(const PlanRequest& request, const PlanLimits& limits) {
  SCOPED_TRACE(label(request, limits, Algorithm::kDoubleBinaryTree));
  const std::vector<Plan> plans = make_plans(request, limits, Algorithm::kDoubleBinaryTree);
  ASSERT_EQ(plans.size(), static_cast<std::size_t>(request.ranks));
  CheckOptions options;
  options.slots = static_cast<int>(limits.guaranteed_slots);
  options.slot_bytes = limits.guaranteed_slot_bytes;
  const CheckResult result = check_plans(request, plans, options);
  ASSERT_TRUE(result.ok) << result.error;
  const bool alone = request.ranks == 1 || request.count == 0;
  ASSERT_EQ(result.slots_needed, alone ? 0 : 1);
  const Geometry& g = plans[0].geometry;
  ASSERT_EQ(g.by_lane, g.lanes > 1 && request.ranks > 1);
  // In vectors. Of one tree, who has two children sends twice more than of two.
  const bool up = request.kind != Kind::kBroadcast, down = request.kind != Kind::kReduce;
  const std::uint64_t most = g.by_lane ? up + down : up + 2 * down;
  // (The first half may be longer by less than two units.)
  const std::uint64_t bytes = request.count * dtype_bytes(request.dtype);
  ASSERT_LT(result.bytes_sent_max, most * bytes + 2 * 16);
  const auto senders = static_cast<std::uint64_t>(request.ranks - 1);
  ASSERT_EQ(result.bytes_sent_total, senders * (has_root(request.kind) ? 1 : 2) * bytes);
  for (int r = 0; r < request.ranks; ++r) {
    const Plan& plan = plans[static_cast<std::size_t>(r)];
    // (A root stands above both.)
    if (has_root(request.kind) && r == request.root) continue;
    ASSERT_LE(interior_in(plan), 1) << "rank " << r << " is interior twice";
    ASSERT_LE(plan.neighbours.size(), g.by_lane ? 4u : 3u);
  }
}

TEST(PlanChecked, DoubleBinaryTrees) {
  for (const Kind kind : kTreeKinds) {
    for (int ranks = 1; ranks <= 130 && !HasFailure(); ++ranks) {
      std::vector<int> roots = roots_to_try(kind, ranks);
      if (has_root(kind) && ranks > 8 && ranks <= 20) {
        roots.clear();
        for (int r = 0; r < ranks; ++r) roots.push_back(r);
      }
      for (const int root : roots) {
        // (One lane of several is for what is short.)
        for (std::uint16_t lanes = 1; lanes <= 6; ++lanes) {
          for (std::uint32_t slots = 1; slots <= 5; ++slots) {
            // All of them together among few ranks; else each number of slots with some lanes.
            const auto turn = static_cast<std::uint32_t>(ranks + root) + lanes;
            if (ranks > 20 && turn % 5 + 1 != slots) continue;
            const std::uint64_t bulk = std::uint64_t{16} * lanes * 3 + 5;  // three loops a lane
            for (const std::uint64_t count : {std::uint64_t{1}, bulk}) {
              if (kind == Kind::kBarrier && count != 1) continue;
              expect_trees(make_request(kind, ranks, count, root), make_limits(slots, 64, lanes));
              if (HasFailure()) return;
            }
          }
        }
      }
    }
  }
}

TEST(PlanChecked, DoubleBinaryTreesOfManyRanks) {
  for (const Kind kind : kTreeKinds) {
    for (const int ranks : {255, 256, 257, 1000, 1023, 1024}) {
      for (const std::uint16_t lanes : {1, 3}) {
        const std::uint64_t count = kind == Kind::kBarrier ? 1 : 107;
        expect_trees(make_request(kind, ranks, count, ranks / 3), make_limits(2, 64, lanes));
      }
    }
  }
}

TEST(PlanChecked, DoubleBinaryTreesOfTensOfThousands) {
  for (const int ranks : {24'576, 65'000}) {
    const CheckResult result = check(make_request(Kind::kAllReduce, ranks, 16), make_limits(1, 64),
                                     Algorithm::kDoubleBinaryTree);
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.slots_needed, 1);
    EXPECT_EQ(result.steps, 2u * static_cast<unsigned>(log2_below(ranks)) + 1);
  }
}

TEST(PlanChecked, RingAndPairwiseUpTo1024Ranks) {
  for (const Kind kind : kKinds) {
    if (kind == Kind::kSendRecv) continue;
    for (const int ranks : {100, 257, 1024}) {
      // A chunk of two slices, and a short second one.
      const auto n = static_cast<std::uint64_t>(ranks);
      const std::uint64_t count = kind == Kind::kAllReduce ? 35 * n : has_root(kind) ? 1000 : 35;
      const PlanRequest request = make_request(kind, ranks, count, ranks / 3);
      const PlanLimits limits = make_limits(3, 64);
      // An all-to-all among that many takes a minute; it has no more in it than one among fewer.
      if (kind == Kind::kAllToAll && ranks > 300) continue;
      const CheckResult result = check(request, limits, for_bulk(kind));
      ASSERT_TRUE(result.ok) << label(request, limits, for_bulk(kind)) << ": " << result.error;
    }
  }
}

TEST(PlanChecked, SlotsNeededIsTheBubble) {
  // A chunk of S slots on a ring needs S+1; a chain needs 1.
  for (const std::uint32_t slots : {2u, 3u, 5u, 9u}) {
    const PlanLimits limits = make_limits(slots, 64);
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
      const CheckResult result = check(make_request(kind, 6, 6000), limits, Algorithm::kRing);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, static_cast<int>(slots)) << to_string(kind);
    }
    for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
      const CheckResult result = check(make_request(kind, 6, 6000), limits, Algorithm::kChain);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, 1) << to_string(kind);
    }
  }
  EXPECT_EQ(check(make_request(Kind::kAllReduce, 1, 100), {}, Algorithm::kRing).slots_needed, 0);
}

TEST(PlanChecked, PairwiseNeedsItsChunk) {
  for (const std::uint32_t slots : {1u, 2u, 5u, 9u}) {
    const PlanLimits limits = make_limits(slots, 64);
    for (const int ranks : {2, 3, 8}) {
      const CheckResult result =
          check(make_request(Kind::kAllToAll, ranks, 6001), limits, Algorithm::kPairwise);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, static_cast<int>(slots));
    }
    for (const Kind kind : {Kind::kGather, Kind::kScatter}) {
      const CheckResult result =
          check(make_request(kind, 6, 6001, 4), limits, Algorithm::kPairwise);
      ASSERT_TRUE(result.ok) << result.error;
      EXPECT_EQ(result.slots_needed, 1) << to_string(kind);
    }
    const CheckResult result =
        check(make_request(Kind::kSendRecv, 2, 6001, 1), limits, Algorithm::kPairwise);
    ASSERT_TRUE(result.ok) << result.error;
    EXPECT_EQ(result.slots_needed, 1);
  }
}

TEST(PlanCost, BytesSent) {
  const PlanLimits limits = make_limits(5, 64, 3);
  for (const int ranks : {2, 3, 8, 17}) {
    const auto n = static_cast<std::uint64_t>(ranks);
    const auto run = [&](Kind kind, std::uint64_t count, Algorithm algorithm) {
      return check(make_request(kind, ranks, count, 1), limits, algorithm);
    };
    // Many more loops than are run, cut evenly: exact.
    const std::uint64_t count = 64 * 100 * n;
    const CheckResult ring = run(Kind::kAllReduce, count, Algorithm::kRing);
    EXPECT_EQ(ring.bytes_sent_max, 2 * (n - 1) * count / n * 4);
    EXPECT_EQ(ring.bytes_sent_total, 2 * (n - 1) * count * 4);
    EXPECT_GE(ring.loops, 50u);
    // Cut unevenly: the total is exact, a rank's share is off by two alignment units per hop.
    const CheckResult odd = run(Kind::kAllReduce, count + 5, Algorithm::kRing);
    EXPECT_EQ(odd.bytes_sent_total, 2 * (n - 1) * (count + 5) * 4);
    EXPECT_LE(odd.bytes_sent_max, 2 * (n - 1) * (count + 5) / n * 4 + 2 * 16 * n);

    for (const Algorithm algorithm : algorithms()) {
      for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll}) {
        if (!serves(algorithm, kind)) continue;
        const CheckResult result = run(kind, 1001, algorithm);
        EXPECT_EQ(result.bytes_sent_max, (n - 1) * 1001 * 4);
        EXPECT_EQ(result.bytes_sent_total, n * (n - 1) * 1001 * 4);
      }
      for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
        if (!serves(algorithm, kind)) continue;
        const CheckResult result = run(kind, 1001, algorithm);
        // Of a reduce by rsag the root's contribution travels, too: the others own the parts.
        const bool rsag = algorithm == Algorithm::kRsag;
        const std::uint64_t senders = rsag && kind == Kind::kReduce && n > 2 ? n : n - 1;
        EXPECT_EQ(result.bytes_sent_total, senders * 1001 * 4);
        // With two children a rank of a tree sends its half twice. (DoubleBinaryTrees has bounds.)
        if (!has_name(algorithm) || algorithm == Algorithm::kDoubleBinaryTree) continue;
        const bool fan_out = algorithm == Algorithm::kOneShot && kind == Kind::kBroadcast;
        const std::uint64_t most = (fan_out ? n - 1 : 1) * 1001 * 4;
        EXPECT_GE(result.bytes_sent_max, most);
        EXPECT_LE(result.bytes_sent_max, most + (rsag ? 16 * n : 0));  // parts are not all as long
      }
      // What is moved is moved once.
      for (const Kind kind : {Kind::kGather, Kind::kScatter}) {
        if (!serves(algorithm, kind)) continue;
        const CheckResult result = run(kind, 1001, algorithm);
        EXPECT_EQ(result.bytes_sent_total, (n - 1) * 1001 * 4);
        EXPECT_EQ(result.bytes_sent_max, (kind == Kind::kScatter ? n - 1 : 1) * 1001 * 4);
      }
    }
    const CheckResult rsag = run(Kind::kAllReduce, count, Algorithm::kRsag);
    EXPECT_EQ(rsag.bytes_sent_max, ring.bytes_sent_max);
    EXPECT_EQ(rsag.bytes_sent_total, ring.bytes_sent_total);
    const CheckResult two_shot = run(Kind::kAllReduce, count, Algorithm::kTwoShot);
    EXPECT_EQ(two_shot.bytes_sent_max, ring.bytes_sent_max);
    EXPECT_EQ(two_shot.bytes_sent_total, ring.bytes_sent_total);
    const CheckResult one_shot = run(Kind::kAllReduce, 1001, Algorithm::kOneShot);
    EXPECT_EQ(one_shot.bytes_sent_max, (n - 1) * 1001 * 4);
  }
}

TEST(PlanCost, StepsOfOneSlice) {
  const PlanLimits limits = make_limits(5, 64);
  const auto steps = [&](Kind kind, std::uint64_t count, Algorithm algorithm) {
    return check(make_request(kind, 8, count, 3), limits, algorithm).steps;
  };
  // One slice per primitive: a chain of sends ends in a receive, one step after its last hop.
  EXPECT_EQ(steps(Kind::kAllReduce, 16 * 8, Algorithm::kRing), 2u * 7 + 1);
  EXPECT_EQ(steps(Kind::kAllGather, 16, Algorithm::kRing), 8u);
  EXPECT_EQ(steps(Kind::kReduceScatter, 16, Algorithm::kRing), 8u);
  EXPECT_EQ(steps(Kind::kReduce, 16, Algorithm::kChain), 8u);
  EXPECT_EQ(steps(Kind::kBroadcast, 16, Algorithm::kChain), 8u);
  EXPECT_EQ(steps(Kind::kAllReduce, 8, Algorithm::kOneShot), 2u);  // sent, gathered
  EXPECT_EQ(steps(Kind::kAllReduce, 16 * 8, Algorithm::kRsag), 3u);
  EXPECT_EQ(steps(Kind::kAllReduce, 8 * 8, Algorithm::kTwoShot), 3u);
  EXPECT_EQ(steps(Kind::kAllGather, 16, Algorithm::kRsag), 2u);
  EXPECT_EQ(steps(Kind::kReduceScatter, 16, Algorithm::kRsag), 2u);
  EXPECT_EQ(steps(Kind::kReduce, 8, Algorithm::kOneShot), 2u);
  EXPECT_EQ(steps(Kind::kBarrier, 1, Algorithm::kOneShot), 2u);
  EXPECT_EQ(steps(Kind::kAllToAll, 8, Algorithm::kOneShot), 3u);  // sent, own part, collected
  EXPECT_EQ(steps(Kind::kAllToAll, 16, Algorithm::kPairwise), 1u + 2 * 7);
  // A chain is a pipeline: 8 hops of the first slice, then a slice a step.
  EXPECT_EQ(steps(Kind::kBroadcast, 16 * 400, Algorithm::kChain), 8u + 399);
}

// Up and down, or one of them, and one step more for the last one who receives. With two slots a
// chunk more takes two steps, or where it is received and sent on at once, one; however deep.
TEST(PlanCost, StepsOfDoubleBinaryTrees) {
  for (const Kind kind : kTreeKinds) {
    for (int ranks = 2; ranks <= 130; ++ranks) {
      const auto steps = [&, kind = kind](std::uint64_t count, std::uint16_t lanes,
                                          std::uint32_t slots) {
        const CheckResult result =
            check(make_request(kind, ranks, count, ranks / 2), make_limits(slots, 64, lanes),
                  Algorithm::kDoubleBinaryTree);
        EXPECT_TRUE(result.ok) << result.error;
        return result.steps;
      };
      const auto depth = static_cast<std::uint64_t>(tree_depth_of(kind, ranks));
      const std::uint64_t ways = has_root(kind) ? 1 : 2;
      const std::uint64_t first = ways * depth + 1;
      EXPECT_EQ(steps(kind == Kind::kBarrier ? 1 : 16, 1, 1), first) << ranks;
      if (kind == Kind::kBarrier) continue;
      for (const std::uint16_t lanes : {1, 5}) {
        // Of each tree and lane so many chunks.
        const auto of_chunks = [&](std::uint64_t chunks) {
          return steps(16 * chunks * (lanes == 1 ? 1 : lanes - 1u), lanes, 2);
        };
        EXPECT_LE(of_chunks(1), first) << ranks;
        EXPECT_EQ(of_chunks(200) - of_chunks(100), 100 * ways)
            << to_string(kind) << " " << ranks << " ranks, " << lanes << " lanes";
      }
    }
  }
}

TEST(PlanLanes, LatencyLaneAndBulkLanes) {
  const auto geometry = [](Kind kind, std::uint64_t count, std::uint16_t lanes,
                           std::optional<Algorithm> algorithm) {
    return make_plan(make_request(kind, 8, count), make_limits(5, 8192, lanes), algorithm)
        ->geometry;
  };
  for (const Kind kind : kKinds) {
    if (kind == Kind::kSendRecv) continue;
    const Geometry alone = geometry(kind, 1 << 24, 1, for_bulk(kind));
    EXPECT_EQ(alone.first_lane, 0);
    EXPECT_EQ(alone.lanes, 1);
    const Geometry bulk = geometry(kind, 1 << 24, 8, for_bulk(kind));
    EXPECT_EQ(bulk.first_lane, 1);
    EXPECT_EQ(bulk.lanes, 7);
    const Geometry little = geometry(kind, 100, 8, for_bulk(kind));
    EXPECT_EQ(little.first_lane, 0);
    EXPECT_EQ(little.lanes, 1);
    const Geometry one_shot = geometry(kind, 1 << 24, 8, Algorithm::kOneShot);
    EXPECT_EQ(one_shot.first_lane, 0);
    EXPECT_EQ(one_shot.lanes, 1);
  }
}

TEST(PlanLanes, OnCuda) {
  const auto geometry = [](Kind kind, std::uint64_t count, Algorithm algorithm) {
    return make_plan(make_request(kind, 8, count), make_limits(5, 8192, 8, Device::kCuda),
                     algorithm)
        ->geometry;
  };
  const auto lanes = [](const Geometry& g) { return std::pair<int, int>{g.first_lane, g.lanes}; };
  for (const Kind kind : kKinds) {
    if (kind == Kind::kSendRecv) continue;
    // A lane for every 7,680 B of a message, from the latency lane on; for up to 15,360 B one. Of
    // short ones of all to all a lane for every 3,840 B.
    const bool short_ones = !has_root(kind);
    EXPECT_EQ(lanes(geometry(kind, 960, Algorithm::kOneShot)), std::pair(0, 1));
    EXPECT_EQ(lanes(geometry(kind, 961, Algorithm::kOneShot)), std::pair(0, short_ones ? 2 : 1));
    EXPECT_EQ(lanes(geometry(kind, 3840, Algorithm::kOneShot)), std::pair(0, short_ones ? 4 : 1));
    EXPECT_EQ(lanes(geometry(kind, 3841, Algorithm::kOneShot)), std::pair(0, short_ones ? 5 : 3));
    EXPECT_EQ(lanes(geometry(kind, 4097, Algorithm::kOneShot)), std::pair(0, 3));
    EXPECT_EQ(lanes(geometry(kind, 1 << 20, Algorithm::kOneShot)), std::pair(0, 8));
    EXPECT_EQ(lanes(geometry(kind, 0, Algorithm::kOneShot)), std::pair(0, 1));
    EXPECT_EQ(lanes(geometry(kind, 1 << 24, for_bulk(kind))),
              for_bulk(kind) == Algorithm::kPairwise ? std::pair(0, 8) : std::pair(1, 7));
    if (serves(Algorithm::kTwoShot, kind)) {
      // A lane for every 3,840 B of a part.
      EXPECT_EQ(lanes(geometry(kind, 8 * 960, Algorithm::kTwoShot)), std::pair(0, 1));
      EXPECT_EQ(lanes(geometry(kind, 8 * 960 + 1, Algorithm::kTwoShot)), std::pair(0, 2));
      EXPECT_EQ(lanes(geometry(kind, 1 << 24, Algorithm::kTwoShot)), std::pair(0, 8));
      EXPECT_EQ(lanes(geometry(kind, 0, Algorithm::kTwoShot)), std::pair(0, 1));
    }
    if (!serves(Algorithm::kRsag, kind)) continue;
    EXPECT_EQ(lanes(geometry(kind, 1 << 24, Algorithm::kRsag)), std::pair(0, 8));
    EXPECT_EQ(lanes(geometry(kind, 100, Algorithm::kRsag)), std::pair(0, 1));
  }
}

// If asked for, long messages of GPUs go as lines: fewer bytes a lane, for one thread in 8 has
// flags; more a slot.
TEST(PlanLanes, OfLines) {
  const auto plan = [](std::uint64_t count, Algorithm algorithm, std::uint32_t slot_bytes,
                       Device device) {
    // (Of more lanes half would do for some, see below.)
    PlanLimits limits = make_limits(4, slot_bytes, 23, device);
    limits.lines = true;
    return *make_plan(make_request(Kind::kAllReduce, 4, count), limits, algorithm);
  };
  for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
    const std::uint64_t least_bytes = algorithm == Algorithm::kOneShot ? 32768 : 65536;
    const std::uint64_t least = least_bytes / sizeof(float);
    // Of a two-shot plan a message is a part: of a vector of four.
    const std::uint64_t messages = algorithm == Algorithm::kOneShot ? 1 : 4;
    const std::uint64_t units = algorithm == Algorithm::kOneShot ? 2 : 1;
    const auto count = [&](std::uint64_t of_message) { return messages * of_message; };
    EXPECT_EQ(plan(count(least), algorithm, 65536, Device::kHost).protocol, Protocol::kPacket);
    const Plan packets = plan(count(least - 4), algorithm, 65536, Device::kCuda);
    EXPECT_EQ(packets.protocol, Protocol::kPacket);
    EXPECT_EQ(packets.geometry.chunk, 32768u / sizeof(float));
    EXPECT_EQ(packets.geometry.lanes, (least_bytes - 16 + units * 3840 - 1) / (units * 3840));
    const Plan lines = plan(count(least), algorithm, 65536, Device::kCuda);
    EXPECT_EQ(lines.protocol, Protocol::kLine);
    EXPECT_EQ(lines.geometry.chunk, 1024u * 56 / sizeof(float));
    EXPECT_EQ(lines.geometry.lanes, (least_bytes + units * 3360 - 1) / (units * 3360));
  }
  // With a root, only from twice as much on.
  for (const std::uint64_t bytes : {65536 - 16, 65536}) {
    PlanLimits limits = make_limits(4, 65536, 23, Device::kCuda);
    limits.lines = true;
    const PlanRequest request = make_request(Kind::kBroadcast, 4, bytes / sizeof(float));
    EXPECT_EQ(make_plan(request, limits, Algorithm::kOneShot)->protocol,
              bytes == 65536 ? Protocol::kLine : Protocol::kPacket);
  }
  EXPECT_EQ(payload_bytes(Protocol::kLine, 128), 112u);
  EXPECT_EQ(payload_bytes(Protocol::kLine, 127), 56u);
  EXPECT_EQ(payload_bytes(Protocol::kPacket, 256), 128u);
  EXPECT_EQ(payload_bytes(Protocol::kSlot, 256), 256u);
}

// Half of the lanes, so that calls under two keys can be beside each other.
TEST(PlanLanes, HalfLeaveRoomForAnotherCall) {
  bool lines = false;
  const auto lanes = [&](std::uint64_t bytes, int of, std::uint32_t slot_bytes, int ranks = 2,
                         Algorithm algorithm = Algorithm::kOneShot) {
    PlanLimits limits = make_limits(4, slot_bytes, static_cast<std::uint16_t>(of), Device::kCuda);
    limits.lines = lines;
    const PlanRequest request = make_request(Kind::kAllReduce, ranks, bytes / sizeof(float));
    return int{make_plan(request, limits, algorithm)->geometry.lanes};
  };
  constexpr std::uint64_t kUnit = 3840;  // one a thread
  EXPECT_EQ(lanes(30 * kUnit, 32, 65536), 15);
  EXPECT_EQ(lanes(32 * kUnit, 32, 65536), 16);
  EXPECT_EQ(lanes(34 * kUnit, 32, 65536), 16);
  EXPECT_EQ(lanes(16 * 5 * kUnit, 32, 65536), 16);
  EXPECT_EQ(lanes(16 * 5 * kUnit + 16, 32, 65536), 32);
  EXPECT_EQ(lanes(26 * kUnit, 24, 65536), 12);
  // Not where lanes are few, nor in large groups, where a thread has as many units of each peer.
  EXPECT_EQ(lanes(18 * kUnit, 16, 65536), 9);
  for (const int ranks : {3, 4}) {
    EXPECT_EQ(lanes(16 * 5 * kUnit, 32, 65536 * 8, ranks), 16);
    EXPECT_EQ(lanes(16 * 5 * kUnit + 16, 32, 65536 * 8, ranks), 32);
  }
  EXPECT_EQ(lanes(16 * 3 * kUnit, 32, 65536 * 8, 5), 24);
  EXPECT_EQ(lanes(34 * kUnit, 32, 65536, 8), 17);
  // Short messages of all to all, among more than two: a unit of each for a thread.
  EXPECT_EQ(lanes(kUnit, 32, 65536, 3), 1);
  EXPECT_EQ(lanes(kUnit + 16, 32, 65536, 3), 2);
  EXPECT_EQ(lanes(16384, 32, 65536, 3), 5);
  EXPECT_EQ(lanes(16384 + 16, 32, 65536, 3), 3);
  EXPECT_EQ(lanes(4 * kUnit, 32, 65536), 1);
  EXPECT_EQ(lanes(4 * kUnit + 16, 32, 65536), 3);
  // Not if a loop would not carry it: packets take twice their payload.
  EXPECT_EQ(lanes(34 * kUnit, 32, 6 * kUnit), 16);
  EXPECT_EQ(lanes(34 * kUnit, 32, 4 * kUnit), 17);
  // Of two shots a message is a part.
  EXPECT_EQ(lanes(4 * 16 * 3 * kUnit, 32, 65536, 4, Algorithm::kTwoShot), 16);
  EXPECT_EQ(lanes(4 * 16 * 3 * kUnit + 64, 32, 65536, 4, Algorithm::kTwoShot), 32);
  EXPECT_EQ(lanes(8 * 18 * kUnit, 32, 65536, 8, Algorithm::kTwoShot), 18);
  lines = true;  // of which one thread in eight has the flags
  EXPECT_EQ(lanes(128 << 10, 32, 149824), 16);
  EXPECT_EQ(lanes(256 << 10, 32, 149824), 16);
  EXPECT_EQ(lanes(256 << 10, 32, 74944, 4), 16);
  EXPECT_EQ(lanes(128 << 10, 28, 74944, 4), 14);
  EXPECT_EQ(lanes(256 << 10, 28, 74944, 4), 28) << "that would be six units";
  EXPECT_EQ(lanes(256 << 10, 32, 16384, 4), 32) << "slots hold 14 KiB, so half carry 224";
  EXPECT_EQ(lanes(16 * 5 * kUnit, 32, 149824), 32);
}

TEST(PlanLanes, SpreadByTheKey) {
  std::vector<int> begins(32), nines(32);
  for (std::uint64_t tag = 1; tag <= 3200; ++tag) {
    EXPECT_EQ(spread_lanes(tag, 32, 32), 0);
    EXPECT_EQ(spread_lanes(tag, 33, 32), 0);
    for (const int lanes : {2, 5, 9, 15, 16, 17, 31}) {
      // The last lanes, or those in front of them, and so on.
      const int first = spread_lanes(tag, static_cast<std::uint32_t>(lanes), 32);
      EXPECT_GE(first, 0);
      EXPECT_LT(first, 32);
      EXPECT_EQ((32 - first) % lanes, 0) << lanes;
    }
    ++begins.at(spread_lanes(tag, 1, 32));
    ++nines.at(spread_lanes(tag, 9, 32));
  }
  for (const int keys : begins) EXPECT_NEAR(keys, 100, 60);
  for (const int first : {5, 14, 23}) EXPECT_NEAR(nines.at(first), 3200.0 / 3, 150) << first;
}

TEST(PlanChunks, FitTheSlotsAndTheAlignment) {
  for (int t = 0; t < kNumDTypes; ++t) {
    const auto dtype = static_cast<DType>(t);
    for (const Kind kind : kKinds) {
      const PlanRequest request =
          make_request(kind, kind == Kind::kSendRecv ? 2 : 8, 1 << 20, 0, dtype);
      const PlanLimits limits = make_limits(5, 8192);
      const bool all_but_one = for_bulk(kind) != Algorithm::kPairwise;
      const Geometry large = make_plan(request, limits, for_bulk(kind))->geometry;
      EXPECT_EQ(large.chunk * dtype_bytes(dtype), (all_but_one ? 4u : 5u) * 8192);
      EXPECT_EQ(large.chunk % large.align(), 0u);
      const Geometry one_shot = plan_one_shot(request, limits)->geometry;
      EXPECT_EQ(one_shot.chunk * dtype_bytes(dtype), 4096u);
      EXPECT_EQ(one_shot.chunk % one_shot.align(), 0u);
    }
  }
  // 4 GiB of slots: the chunk is still a 32-bit number.
  const Geometry huge =
      plan_ring(make_request(Kind::kAllReduce, 2, 1, 0, DType::kInt8), make_limits(1025, 1u << 30))
          ->geometry;
  EXPECT_EQ(huge.chunk % huge.align(), 0u);
  EXPECT_GT(huge.chunk, 1u << 31);
}

TEST(PlanSelector, TableAndErrors) {
  // Hosts: bounds in KiB, by kind and ranks, where each rank has a core, and where some share one.
  struct HostCase {
    Kind kind;
    int ranks, ranks_a_core;
    std::uint64_t kib;  // at which `to` is chosen, and above which `beyond` is
    Algorithm to, beyond;
  };
  constexpr Algorithm kTree = Algorithm::kDoubleBinaryTree, kOneHop = Algorithm::kOneShot;
  for (const HostCase& c : {
           HostCase{Kind::kAllReduce, 2, 1, 8, kOneHop, Algorithm::kRing},
           HostCase{Kind::kAllReduce, 4, 1, 4, kOneHop, Algorithm::kRsag},
           HostCase{Kind::kAllReduce, 4, 2, 32, Algorithm::kRsag, Algorithm::kRing},
           HostCase{Kind::kAllReduce, 8, 1, 64, Algorithm::kRsag, Algorithm::kRing},
           HostCase{Kind::kAllReduce, 8, 2, 48, kTree, Algorithm::kRing},
           HostCase{Kind::kAllReduce, 16, 1, 24, kTree, Algorithm::kRsag},
           HostCase{Kind::kAllReduce, 64, 32, 384, kTree, Algorithm::kRing},
           HostCase{Kind::kAllGather, 2, 1, 4, kOneHop, Algorithm::kRing},
           HostCase{Kind::kReduceScatter, 16, 3, 8, Algorithm::kRsag, Algorithm::kRing},
           HostCase{Kind::kAllToAll, 8, 1, 16, Algorithm::kRsag, Algorithm::kPairwise},
           HostCase{Kind::kAllToAll, 32, 1, 32, Algorithm::kRsag, Algorithm::kPairwise},
           HostCase{Kind::kBroadcast, 4, 1, 8, kOneHop, Algorithm::kChain},
           HostCase{Kind::kBroadcast, 8, 1, 4, kOneHop, kTree},
           HostCase{Kind::kBroadcast, 64, 4, 256, kTree, Algorithm::kChain},
           HostCase{Kind::kReduce, 3, 1, 8, kOneHop, Algorithm::kChain},
           HostCase{Kind::kReduce, 16, 1, 4, kOneHop, kTree},
           HostCase{Kind::kReduce, 8, 1, 64, kTree, Algorithm::kChain},
       }) {
    PlanLimits limits;
    limits.ranks_a_core = static_cast<std::uint16_t>(c.ranks_a_core);
    const std::uint64_t floats = c.kib * 1024 / sizeof(float);
    const auto chosen = [&](std::uint64_t count) {
      return select_algorithm(make_request(c.kind, c.ranks, count), limits);
    };
    EXPECT_EQ(chosen(floats), c.to) << to_string(c.kind) << " " << c.ranks;
    EXPECT_EQ(chosen(floats + 1), c.beyond) << to_string(c.kind) << " " << c.ranks;
  }
  // Rings of many ranks a core whatever the size; few slots.
  PlanLimits crowded;
  crowded.ranks_a_core = 4;
  EXPECT_EQ(select_algorithm(make_request(Kind::kAllGather, 8, 1), crowded), Algorithm::kRing);
  crowded.ranks_a_core = 8;
  EXPECT_EQ(select_algorithm(make_request(Kind::kReduce, 16, 1), crowded), kTree);
  EXPECT_EQ(select_algorithm(make_request(Kind::kAllToAll, 4, 2048), make_limits(1, 8192)),
            Algorithm::kPairwise);
  EXPECT_EQ(select_algorithm(make_request(Kind::kAllReduce, 65, 1 << 20), {}), Algorithm::kRing);
  EXPECT_EQ(select_algorithm(make_request(Kind::kAllReduce, 1, 1), {}), Algorithm::kRing);
  for (const Kind kind : kKinds) {
    // All ranks choose alike, and a plan that the table chose exists.
    for (int ranks = 1; ranks <= 70; ++ranks) {
      if (!exists(kind, ranks)) continue;
      for (std::uint64_t count = 0; count < (1 << 22); count = count * 4 + 1) {
        PlanRequest request = make_request(kind, ranks, count);
        for (const Device device : {Device::kHost, Device::kCuda}) {
          const PlanLimits limits = make_limits(5, 8192, 4, device);
          request.rank = 0;
          const Algorithm first = select_algorithm(request, limits);
          request.rank = ranks - 1;
          ASSERT_EQ(select_algorithm(request, limits), first);
          const auto plan = make_plan(request, limits, std::nullopt);
          if (device == Device::kCuda && first == Algorithm::kPairwise &&
              ranks > kMostNeighbours + 1) {
            ASSERT_FALSE(plan.has_value());
            continue;
          }
          ASSERT_TRUE(plan.has_value());
          ASSERT_EQ(plan->algorithm, first);
        }
      }
    }
  }
  const auto on_cuda = [](Kind kind, int ranks, std::uint64_t floats) {
    return select_algorithm(make_request(kind, ranks, floats),
                            make_limits(4, 64 * 1024, 32, Device::kCuda));
  };
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 2, 256 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 2, 256 * 1024 + 1), Algorithm::kRsag);
  // One loop of packets, in larger slots up to 2 MiB.
  const auto of_packets = [](std::uint64_t floats, std::uint32_t slot_bytes, std::uint16_t lanes) {
    return select_algorithm(make_request(Kind::kAllReduce, 2, floats),
                            make_limits(4, slot_bytes, lanes, Device::kCuda));
  };
  EXPECT_EQ(of_packets(512 * 1024, 128 * 1024, 32), Algorithm::kOneShot);
  EXPECT_EQ(of_packets(512 * 1024 + 1, 128 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(of_packets(512 * 1024 + 1, 256 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(of_packets(64 * 1024, 64 * 1024, 8), Algorithm::kOneShot);
  EXPECT_EQ(of_packets(64 * 1024 + 1, 64 * 1024, 8), Algorithm::kRsag);
  // Of lines: in larger slots up to 4 MiB, where parts are not alike (see below).
  const auto with_slots = [](std::uint64_t floats, std::uint32_t slot_bytes, std::uint16_t lanes) {
    PlanLimits limits = make_limits(4, slot_bytes, lanes, Device::kCuda);
    limits.lines = true;
    return select_algorithm(make_request(Kind::kAllReduce, 2, floats), limits);
  };
  EXPECT_EQ(with_slots(448 * 1024, 64 * 1024, 32), Algorithm::kOneShot);
  EXPECT_EQ(with_slots(448 * 1024 + 1, 64 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(with_slots(896 * 1024 - 1, 128 * 1024, 32), Algorithm::kOneShot);
  EXPECT_EQ(with_slots(896 * 1024 + 1, 128 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(with_slots(1024 * 1024 - 1, 147 * 1024, 32), Algorithm::kOneShot);
  EXPECT_EQ(with_slots(1024 * 1024 + 1, 147 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(with_slots(1024 * 1024 + 1, 256 * 1024, 32), Algorithm::kRsag);
  EXPECT_EQ(with_slots(112 * 1024, 64 * 1024, 8), Algorithm::kOneShot);
  EXPECT_EQ(with_slots(112 * 1024 + 1, 64 * 1024, 8), Algorithm::kRsag);
  // Larger slots may be for slices alone.
  for (const bool all : {true, false}) {
    PlanLimits limits = make_limits(4, 256 * 1024, 8, Device::kCuda);
    limits.lines = true;
    limits.packet_slot_bytes = all ? 0 : 64 * 1024;
    const auto chosen = [&](std::uint64_t floats) {
      return select_algorithm(make_request(Kind::kAllReduce, 2, floats), limits);
    };
    EXPECT_EQ(chosen(112 * 1024), Algorithm::kOneShot) << all;
    EXPECT_EQ(chosen(112 * 1024 + 1), all ? Algorithm::kOneShot : Algorithm::kRsag) << all;
    EXPECT_EQ(chosen(448 * 1024 + 1), Algorithm::kRsag) << all;
  }
  // Shorter messages are no lines, and half of a slot is theirs.
  EXPECT_EQ(with_slots(16 * 1024 - 1, 64 * 1024, 1), Algorithm::kRsag);
  EXPECT_EQ(with_slots(8 * 1024, 64 * 1024, 1), Algorithm::kOneShot);
  // Of lines so many bytes that a rank sends: of four ranks one loop of the slots that these have.
  const auto of_kind = [](Kind kind, int ranks, std::uint64_t bytes) {
    PlanLimits limits = make_limits(4, 74944, 32, Device::kCuda);
    limits.lines = true;
    return select_algorithm(make_request(kind, ranks, bytes / sizeof(float)), limits);
  };
  for (const Kind kind :
       {Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce, Kind::kAllToAll}) {
    EXPECT_EQ(of_kind(kind, 4, 2048 * 1024), Algorithm::kOneShot) << to_string(kind);
    // (With a root down a chain, among few ranks.)
    const bool chain = kind == Kind::kBroadcast || kind == Kind::kReduce;
    const Algorithm bulk = chain ? Algorithm::kChain : Algorithm::kRsag;
    EXPECT_EQ(of_kind(kind, 4, 2048 * 1024 + 1024), bulk) << to_string(kind);
    EXPECT_EQ(of_kind(kind, 3, 16 << 20), bulk) << to_string(kind);
    EXPECT_EQ(of_kind(kind, 2, 16 << 20), Algorithm::kRsag) << to_string(kind);
    EXPECT_EQ(of_kind(kind, 5, 16 << 20), Algorithm::kRsag) << to_string(kind);
    EXPECT_EQ(of_kind(kind, 7, 1024 * 1024), Algorithm::kOneShot) << to_string(kind);
    EXPECT_EQ(of_kind(kind, 7, 1024 * 1024 + 16), Algorithm::kRsag) << to_string(kind);
  }
  EXPECT_EQ(of_kind(Kind::kAllReduce, 4, 8192 * 1024), Algorithm::kTwoShot);
  // Of what kernels have no fast code for, as much as of packets.
  for (const DType dtype : {DType::kFloat64, DType::kInt32}) {
    PlanLimits limits = make_limits(4, 74944, 32, Device::kCuda);
    limits.lines = true;
    const auto reduced = [&](std::uint64_t bytes) {
      return select_algorithm(make_request(Kind::kReduce, 4, bytes / dtype_bytes(dtype), 0, dtype),
                              limits);
    };
    EXPECT_EQ(reduced(1365 * 1024), Algorithm::kOneShot);
    EXPECT_EQ(reduced(1366 * 1024), Algorithm::kChain);
  }
  // Two hops of packets from where they save more than a hop is worth to 2 MiB, among three ranks
  // or more.
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 3, 192 * 1024 - 1), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 3, 192 * 1024), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 3, 512 * 1024), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 3, 512 * 1024 + 1), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 4, 64 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 4, 87381), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 4, 87382), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 4, 512 * 1024), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 4, 512 * 1024 + 1), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 8, 24966), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 8, 24967), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 8, 512 * 1024), Algorithm::kTwoShot);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 8, 512 * 1024 + 1), Algorithm::kRsag);
  // Of lines, where parts are alike and of a common format, from fewer bytes on, and to 8 MiB.
  const auto of_lines = [](int ranks, std::uint64_t count, DType dtype = DType::kFloat32) {
    PlanLimits limits = make_limits(4, 147 * 1024, 32, Device::kCuda);
    limits.lines = true;
    return select_algorithm(make_request(Kind::kAllReduce, ranks, count, 0, dtype), limits);
  };
  for (const DType dtype : {DType::kFloat32, DType::kBfloat16, DType::kFloat16}) {
    const std::uint64_t a_kib = 1024 / dtype_bytes(dtype), piece = 16 / dtype_bytes(dtype);
    EXPECT_EQ(of_lines(3, 576 * a_kib - 3 * piece, dtype), Algorithm::kOneShot);
    EXPECT_EQ(of_lines(3, 576 * a_kib, dtype), Algorithm::kTwoShot);
    EXPECT_EQ(of_lines(3, 576 * a_kib + 2 * piece, dtype), Algorithm::kOneShot);
    EXPECT_EQ(of_lines(4, 256 * a_kib - 4 * piece, dtype), Algorithm::kOneShot);
    EXPECT_EQ(of_lines(4, 256 * a_kib, dtype), Algorithm::kTwoShot);
    EXPECT_EQ(of_lines(4, 256 * a_kib + 1, dtype), Algorithm::kOneShot);
    for (const int ranks : {2, 4, 8}) {
      const auto pieces = static_cast<std::uint64_t>(ranks) * piece;
      EXPECT_EQ(of_lines(ranks, 2048 * a_kib + pieces, dtype), Algorithm::kTwoShot) << ranks;
      EXPECT_NE(of_lines(ranks, 2048 * a_kib + 1, dtype), Algorithm::kTwoShot) << ranks;
      EXPECT_EQ(of_lines(ranks, 8192 * a_kib, dtype), Algorithm::kTwoShot) << ranks;
      EXPECT_EQ(of_lines(ranks, 8192 * a_kib + pieces, dtype), Algorithm::kRsag) << ranks;
    }
    EXPECT_EQ(of_lines(2, 2048 * a_kib, dtype), Algorithm::kOneShot);
  }
  for (const Op op : {Op::kSum, Op::kAvg, Op::kMax, Op::kProd}) {
    PlanLimits limits = make_limits(4, 147 * 1024, 32, Device::kCuda);
    limits.lines = true;
    PlanRequest request = make_request(Kind::kAllReduce, 4, 1024 * 1024);
    request.op = op;
    EXPECT_EQ(select_algorithm(request, limits),
              op == Op::kSum || op == Op::kAvg ? Algorithm::kTwoShot : Algorithm::kRsag);
  }
  EXPECT_EQ(of_lines(4, 64 * 1024 + 16, DType::kInt32), Algorithm::kOneShot);
  EXPECT_EQ(of_lines(2, 1024 * 1024, DType::kInt32), Algorithm::kOneShot);
  EXPECT_EQ(of_lines(2, 2048 * 1024, DType::kInt32), Algorithm::kRsag);
  for (const int ranks : {3, 4, 5, 8}) {
    // With few lanes, or small slots, no more than one loop.
    const PlanRequest request = make_request(Kind::kAllReduce, ranks, 200 * 1024);
    for (const std::uint16_t lanes : {1, 8, 32}) {
      const PlanLimits limits = make_limits(4, 64 * 1024, lanes, Device::kCuda);
      if (select_algorithm(request, limits) != Algorithm::kTwoShot) continue;
      const Geometry g = make_plan(request, limits, std::nullopt)->geometry;
      EXPECT_EQ(g.loops(0), 1u);
    }
    EXPECT_NE(select_algorithm(request, make_limits(4, 64 * 1024, 1, Device::kCuda)),
              Algorithm::kTwoShot);
    EXPECT_NE(select_algorithm(request, make_limits(1, 64 * 1024, 32, Device::kCuda)),
              Algorithm::kTwoShot);
  }
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 9, 1), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 65, 1), Algorithm::kDoubleBinaryTree);
  EXPECT_EQ(on_cuda(Kind::kAllReduce, 72, 16 << 20), Algorithm::kRing);
  EXPECT_EQ(on_cuda(Kind::kAllGather, 2, 8 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kReduceScatter, 2, 256 * 1024 + 1), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kBroadcast, 8, 4 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kReduce, 8, 150 * 1024), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kBroadcast, 2, 256 * 1024 + 1), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kReduce, 65, 1), Algorithm::kDoubleBinaryTree);
  EXPECT_EQ(on_cuda(Kind::kAllToAll, 8, 8 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kAllToAll, 8, 149 * 1024), Algorithm::kRsag);
  EXPECT_EQ(on_cuda(Kind::kGather, 65, 1), Algorithm::kPairwise);
  EXPECT_EQ(on_cuda(Kind::kSendRecv, 2, 4 * 1024), Algorithm::kOneShot);
  EXPECT_EQ(on_cuda(Kind::kSendRecv, 2, 256 * 1024 + 1), Algorithm::kPairwise);
  EXPECT_EQ(select_algorithm(make_request(Kind::kBarrier, 7, 1), {}), Algorithm::kOneShot);
  EXPECT_EQ(select_algorithm(make_request(Kind::kBarrier, 64, 1), {}),
            Algorithm::kDoubleBinaryTree);
  // What is asked for serves where it can, whatever the kind.
  for (const Kind kind : kKinds) {
    for (const Algorithm algorithm : algorithms()) {
      const auto plan = make_plan(make_request(kind, 2, 100), {}, algorithm);
      EXPECT_EQ(plan->algorithm, serves(algorithm, kind) ? algorithm : for_bulk(kind));
      std::string refusal;
      const PlanRequest request = make_request(kind, 2, 100);
      EXPECT_EQ(row_of(algorithm).serves(kind), serves(algorithm, kind)) << to_string(algorithm);
      const bool made = row_of(algorithm).plan(request, {}, &refusal).has_value();
      EXPECT_EQ(made, serves(algorithm, kind));
      const std::string use = std::string(": use ") + to_string(for_bulk(kind));
      EXPECT_EQ(refusal.find(use) != std::string::npos, !made) << refusal;
    }
  }
  // A chain needs one slot, whatever a ring does.
  for (const Device device : {Device::kHost, Device::kCuda}) {
    const CheckResult result = check(make_request(Kind::kBroadcast, 5, 100),
                                     make_limits(1, 64, 1, device), Algorithm::kChain);
    EXPECT_TRUE(result.ok) << result.error;
  }
  // A rsag where there is none.
  EXPECT_EQ(make_plan(make_request(Kind::kSendRecv, 2, 100), {}, Algorithm::kRsag)->algorithm,
            Algorithm::kPairwise);
  const auto error = [](PlanRequest request, PlanLimits limits, std::optional<Algorithm> a) {
    std::string text;
    EXPECT_FALSE(make_plan(request, limits, a, &text).has_value());
    return text;
  };
  EXPECT_NE(error(make_request(Kind::kSendRecv, 3, 1), {}, {}).find("between 2 ranks, not 3"),
            std::string::npos);
  EXPECT_NE(
      error(make_request(Kind::kAllToAll, 65, 1), {}, Algorithm::kOneShot).find("use pairwise"),
      std::string::npos);
  const PlanRequest fine = make_request(Kind::kReduce, 65, 1);
  EXPECT_NE(error(fine, {}, Algorithm::kOneShot).find("64 ranks, this group has 65"),
            std::string::npos);
  const PlanRequest many = make_request(Kind::kAllGather, 65, 1);
  EXPECT_NE(error(many, {}, Algorithm::kRsag).find("64 ranks, this group has 65"),
            std::string::npos);
  EXPECT_NE(error(make_request(Kind::kAllGather, 4, 1), make_limits(1, 64), Algorithm::kRsag)
                .find("rsag plans need at least 2"),
            std::string::npos);
  EXPECT_NE(error(make_request(Kind::kAllReduce, 65, 1), {}, Algorithm::kTwoShot)
                .find("64 ranks, this group has 65: use ring"),
            std::string::npos);
  EXPECT_NE(error(make_request(Kind::kAllReduce, 4, 1), make_limits(1, 64), Algorithm::kTwoShot)
                .find("two-shot plans need at least 2"),
            std::string::npos);
  // No GPU runs a plan that names more than 63.
  for (const Kind kind : {Kind::kAllToAll, Kind::kGather, Kind::kScatter}) {
    for (const int rank : {0, 1, 71}) {
      PlanRequest all = make_request(kind, 72, 1);
      all.rank = rank;
      EXPECT_NE(error(all, make_limits(4, 65536, 32, Device::kCuda), {}).find("up to 64 ranks"),
                std::string::npos);
    }
  }
  std::string refusal;
  EXPECT_FALSE(plan_rsag(fine, {}, &refusal).has_value());
  EXPECT_FALSE(plan_rsag(make_request(Kind::kSendRecv, 2, 1), {}, &refusal).has_value());
  EXPECT_NE(refusal.find("do not serve send_recv"), std::string::npos);
  EXPECT_NE(
      error(make_request(Kind::kReduce, 65'001, 1), {}, {}).find("1 to 65000 ranks, not 65001"),
      std::string::npos);
  // Most programs grow with the group; of trees they do not.
  EXPECT_NE(error(make_request(Kind::kAllGather, 1025, 1), {}, {})
                .find("ring plans serve at most 1024 ranks, this group has 1025"),
            std::string::npos);
  EXPECT_NE(error(make_request(Kind::kReduce, 1025, 1), {}, Algorithm::kChain)
                .find("chain plans serve at most 1024 ranks"),
            std::string::npos);
  for (const Kind kind : kTreeKinds) {
    EXPECT_EQ(select_algorithm(make_request(kind, 1025, 1), {}), Algorithm::kDoubleBinaryTree);
    EXPECT_EQ(select_algorithm(make_request(kind, 1024, 1), {}), Algorithm::kDoubleBinaryTree);
  }
  EXPECT_NE(error(make_request(Kind::kReduce, 0, 1), {}, {}).find("ranks"), std::string::npos);
  EXPECT_NE(error(make_request(Kind::kReduce, 4, 1, 4), {}, {}).find("root 4"), std::string::npos);
  EXPECT_NE(error(make_request(Kind::kReduce, 4, ~0ull), {}, {}).find("count"), std::string::npos);
  EXPECT_NE(error(make_request(Kind::kAllReduce, 65, 1 << 20), make_limits(1, 8192), {})
                .find("ring plans need at least 2"),
            std::string::npos);
  EXPECT_NE(error(fine, make_limits(5, 100), {}).find("multiple of 64"), std::string::npos);
  EXPECT_NE(error(fine, make_limits(5, 64, 0), {}).find("lane"), std::string::npos);
}

// More neighbours than there are codes, from 65 ranks on.
TEST(PlanChecked, PairwiseInTheWideForm) {
  for (const Kind kind : {Kind::kAllToAll, Kind::kGather, Kind::kScatter}) {
    for (int ranks = 63; ranks <= 80; ++ranks) {
      // Of one slice, and of two chunks.
      for (const std::uint64_t count : {7, 90}) {
        const PlanRequest request = make_request(kind, ranks, count, ranks / 3);
        const PlanLimits limits = make_limits(5, 64);
        const std::vector<Plan> plans = make_plans(request, limits, Algorithm::kPairwise);
        for (const Plan& plan : plans) {
          const bool wide = plan.neighbours.size() > kMostNeighbours;
          EXPECT_EQ(wide, plan.neighbours.size() > 1 && ranks > 64);
          EXPECT_EQ(plan.wide_peers.size(), wide ? plan.primitives.size() : 0);
          EXPECT_TRUE(plan.sets.empty());
        }
        CheckOptions options;
        options.slot_bytes = 64;
        options.find_slots_needed = false;
        const CheckResult result = check_plans(request, plans, options);
        ASSERT_TRUE(result.ok) << label(request, limits, Algorithm::kPairwise) << ": "
                               << result.error;
      }
    }
  }
}

// ---- Programs that no planner makes ----

using unjam_test::broadcast_in_halves;
using unjam_test::tree_broadcast;
using unjam_test::tree_reduce;
using unjam_test::two_level_all_reduce;

CheckResult check_written(const PlanRequest& request, const std::vector<Plan>& plans,
                          const PlanLimits& limits) {
  CheckOptions options;
  options.slots = static_cast<int>(limits.guaranteed_slots);
  options.slot_bytes = limits.guaranteed_slot_bytes;
  return check_plans(request, plans, options);
}

// None, less than there are ranks, cut unevenly, and of many loops.
constexpr std::uint64_t kWrittenCounts[] = {0, 1, 7, 61, 997, 5003};

TEST(PlanWritten, Trees) {
  for (const int below : {1, 2, 3, 5}) {
    for (int ranks = 1; ranks <= 17; ++ranks) {
      for (int root = 0; root < ranks; root += 1 + ranks / 4) {
        for (const std::uint64_t count : kWrittenCounts) {
          const PlanLimits limits = make_limits(3, 64, 2);
          for (const std::uint32_t lag : {0u, 1u, 2u}) {
            const PlanRequest request = make_request(Kind::kBroadcast, ranks, count, root);
            const CheckResult result =
                check_written(request, tree_broadcast(request, limits, below, lag), limits);
            ASSERT_TRUE(result.ok) << ranks << " ranks, " << below << " below: " << result.error;
            EXPECT_LE(result.slots_needed, 1);
          }
          const PlanRequest request = make_request(Kind::kReduce, ranks, count, root);
          const CheckResult result =
              check_written(request, tree_reduce(request, limits, below), limits);
          ASSERT_TRUE(result.ok) << ranks << " ranks, " << below << " below: " << result.error;
          EXPECT_LE(result.slots_needed, 1);
        }
      }
    }
  }
}

TEST(PlanWritten, TwoLevelAllReduce) {
  for (const auto& [ranks, node_ranks] :
       {std::pair{4, 2}, {8, 2}, {8, 4}, {6, 3}, {6, 2}, {12, 4}, {64, 8}}) {
    const auto nodes = static_cast<std::uint32_t>(ranks / node_ranks);
    for (const std::uint32_t distance : {0u, 1u, 2u}) {
      for (const std::uint64_t count : kWrittenCounts) {
        if (ranks > 12 && count > 997) continue;
        const PlanRequest request = make_request(Kind::kAllReduce, ranks, count);
        // Between two ranks of a node a pass moves twice as many slices as there are nodes.
        const PlanLimits limits = make_limits(2 * nodes * (distance + 1), 64, 2);
        const std::vector<Plan> plans = two_level_all_reduce(request, limits, node_ranks, distance);
        const auto peers = static_cast<std::size_t>(node_ranks) - 1 + nodes - 1;
        for (const Plan& plan : plans) EXPECT_EQ(plan.neighbours.size(), peers);
        const CheckResult result = check_written(request, plans, limits);
        ASSERT_TRUE(result.ok) << ranks << " ranks in nodes of " << node_ranks << ", count "
                               << count << ", distance " << distance << ": " << result.error;
      }
    }
  }
}

TEST(PlanWritten, BroadcastInHalves) {
  for (int ranks = 3; ranks <= 13; ++ranks) {
    for (int root = 0; root < ranks; ++root) {
      for (const std::uint64_t count : kWrittenCounts) {
        const PlanRequest request = make_request(Kind::kBroadcast, ranks, count, root);
        const PlanLimits limits = make_limits(2, 64, 2);
        const CheckResult result =
            check_written(request, broadcast_in_halves(request, limits), limits);
        ASSERT_TRUE(result.ok) << ranks << " ranks, root " << root << ", count " << count << ": "
                               << result.error;
        EXPECT_LE(result.slots_needed, 1);
      }
    }
  }
}

// What a rank of a node takes for a sum, or for a contribution, is found out.
TEST(PlanWritten, SumsAreNotMixedUpWithContributions) {
  const PlanRequest request = make_request(Kind::kAllReduce, 8, 997);
  const PlanLimits limits = make_limits(8, 64);
  const std::vector<Plan> right = two_level_all_reduce(request, limits, 4, 1);
  ASSERT_TRUE(check_written(request, right, limits).ok);
  int gathers = 0;
  for (std::size_t i = 0; i < right[5].primitives.size(); ++i) {
    const Primitive& p = right[5].primitives[i];
    if (!from_set(p) || (p.flags & kReduce) == 0) continue;
    ++gathers;
    std::vector<Plan> plans = right;
    plans[5].primitives[i].flags ^= kPartials;
    const std::string error = check_written(request, plans, limits).error;
    const bool sums = (p.flags & kPartials) != 0;
    EXPECT_NE(error.find("rank 5 primitive " + std::to_string(i)), std::string::npos) << error;
    EXPECT_NE(error.find(sums ? "contributed twice" : "not a sum that others go into"),
              std::string::npos)
        << error;
  }
  EXPECT_EQ(gathers, 2);
}

// ---- Execution on numbers, knowing nothing of the checker ----

// A contribution is 3x, a finished result has 7 added: both marks show in the numbers if they are
// missing or repeated.
class Machine {
 public:
  Machine(const PlanRequest& request, const std::vector<Plan>& plans, bool in_place)
      : request_(request), plans_(plans), in_place_(in_place) {
    const std::uint64_t n = vector_elements(request);
    for (int r = 0; r < request.ranks; ++r) {
      // The in-place buffers hold the input at its place in the whole vector.
      input_.emplace_back(n);
      for (std::uint64_t i = 0; i < n; ++i) input_.back()[i] = initial(r, i);
      output_.emplace_back(n, -1);
    }
  }

  static std::int64_t initial(int rank, std::uint64_t i) {
    return 1000003 * (rank + 1) + static_cast<std::int64_t>(i * i % 9973);
  }

  // Runs all lanes, ranks taking turns primitive by primitive, `unfair` ones at a time.
  bool run(int unfair) {
    const Geometry& g = plans_[0].geometry;
    for (std::uint32_t lane = g.first_lane; lane < std::uint32_t{g.first_lane} + g.lanes; ++lane) {
      std::vector<std::pair<std::uint64_t, std::size_t>> at(plans_.size());  // pass, primitive
      const auto passes = [&](std::size_t r) {
        return g.loops(lane) + plans_[r].primitives.back().lag;
      };
      for (bool moved = true; moved;) {
        moved = false;
        for (std::size_t r = 0; r < plans_.size(); ++r) {
          for (int k = 0; k < unfair; ++k) {
            auto& [pass, i] = at[r];
            if (pass == passes(r)) break;
            const std::uint32_t lag = plans_[r].primitives[i].lag;
            const auto ranges = [&g, lane = lane, pass = pass, lag](int part) {
              const auto p = static_cast<std::uint32_t>(part);
              return pass < lag ? Range{} : g.chunk_range(p, lane, pass - lag);
            };
            if (!execute(static_cast<int>(r), i, ranges)) break;
            moved = true;
            if (++i == plans_[r].primitives.size()) i = 0, ++pass;
          }
        }
      }
      for (std::size_t r = 0; r < plans_.size(); ++r) {
        if (at[r].first != passes(r)) return false;
      }
    }
    for (const auto& [edge, fifo] : fifos_) {
      if (!fifo.empty()) return false;
    }
    return true;
  }

  std::int64_t expected(int rank, std::uint64_t i) const {
    switch (request_.kind) {
      case Kind::kBroadcast:
      case Kind::kScatter:
      case Kind::kSendRecv:
        return initial(request_.root, i);
      case Kind::kAllGather:
      case Kind::kGather:
        return initial(static_cast<int>(i / request_.count), i);
      case Kind::kAllToAll:
        return initial(static_cast<int>(i / request_.count),
                       static_cast<std::uint64_t>(rank) * request_.count + i % request_.count);
      default:
        break;
    }
    std::int64_t sum = 7;
    for (int r = 0; r < request_.ranks; ++r) sum += 3 * initial(r, i);
    return sum;
  }

  bool correct() const {
    for (int r = 0; r < request_.ranks; ++r) {
      std::uint64_t begin = 0, end = vector_elements(request_);
      const bool is_root = r == request_.root;
      if ((request_.kind == Kind::kReduce || request_.kind == Kind::kGather) && !is_root) continue;
      if (request_.kind == Kind::kSendRecv && is_root) continue;
      if (request_.kind == Kind::kReduceScatter || request_.kind == Kind::kScatter) {
        begin = static_cast<std::uint64_t>(r) * request_.count;
        end = begin + request_.count;
      }
      for (std::uint64_t i = begin; i < end; ++i) {
        const auto& out = in_place_ ? input_ : output_;
        if (out[static_cast<std::size_t>(r)][i] != expected(r, i)) return false;
      }
    }
    return true;
  }

 private:
  using Slice = std::vector<std::int64_t>;

  // ranges(part): the chunk of a part in this pass.
  template <typename Ranges>
  bool execute(int rank, std::size_t i, const Ranges& ranges) {
    const Plan& plan = plans_[static_cast<std::size_t>(rank)];
    const Primitive& p = plan.primitives[i];
    const std::vector<int> sources = ranks_received_from(plan, i), targets = ranks_sent_to(plan, i);
    const auto pop = [&](int from) {
      auto& fifo = fifos_[{from, rank}];
      const Slice s = fifo.front();
      fifo.pop_front();
      return s;
    };
    std::vector<std::int64_t>& in = input_[static_cast<std::size_t>(rank)];
    std::vector<std::int64_t>& out = in_place_ ? in : output_[static_cast<std::size_t>(rank)];
    if (p.flags & kScatter) {
      for (const int q : targets) {
        const Range range = ranges(q);
        if (range.length == 0) continue;
        const auto offset = static_cast<std::ptrdiff_t>(range.offset);
        const auto begin = in.begin() + offset;
        const auto end = begin + static_cast<std::ptrdiff_t>(range.length);
        fifos_[{rank, q}].emplace_back(begin, end);
        if ((p.flags & kCopy) && !in_place_) std::copy(begin, end, out.begin() + offset);
      }
      return true;
    }
    if (p.flags & kCollect) {
      for (const int q : sources) {
        if (ranges(q).length != 0 && fifos_[{q, rank}].empty()) return false;
      }
      for (const int q : sources) {
        const Range range = ranges(q);
        if (range.length == 0) continue;
        const Slice s = pop(q);
        if (s.size() != range.length) return false;
        std::copy(s.begin(), s.end(), out.begin() + static_cast<std::ptrdiff_t>(range.offset));
      }
      return true;
    }
    const Range range = ranges(static_cast<int>(p.part));
    if (range.length == 0) return true;
    for (const int from : sources) {
      if (fifos_[{from, rank}].empty()) return false;
    }
    // (Of a set sources are contributions, too, unless they are sums.)
    const bool contributes = (p.flags & kContribute) != 0;
    const bool are_contributions = contributes && from_set(p) && (p.flags & kPartials) == 0;
    Slice value(range.length);
    if (p.flags & kLocal) {
      const auto& from = (p.flags & kFromOutput) ? out : in;
      for (std::uint64_t k = 0; k < range.length; ++k) {
        value[k] = from[range.offset + k] * (contributes ? 3 : 1);
      }
    }
    for (const int from : sources) {
      const Slice s = pop(from);
      if (s.size() != range.length) return false;
      for (std::uint64_t k = 0; k < range.length; ++k) {
        value[k] += s[k] * (are_contributions ? 3 : 1);
      }
    }
    for (std::uint64_t k = 0; k < range.length; ++k) {
      if (p.flags & kFinish) value[k] += 7;
      if (p.flags & kCopy) out[range.offset + k] = value[k];
    }
    for (const int to : targets) fifos_[{rank, to}].push_back(value);
    return true;
  }

  const PlanRequest& request_;
  const std::vector<Plan>& plans_;
  const bool in_place_;
  std::vector<std::vector<std::int64_t>> input_, output_;
  std::map<std::pair<int, int>, std::deque<Slice>> fifos_;
};

TEST(PlanExecuted, GivesTheRightNumbers) {
  for (const Algorithm algorithm : algorithms()) {
    for (const Kind kind : kKinds) {
      if (!serves(algorithm, kind)) continue;
      for (const int ranks : {1, 2, 3, 5, 8, 13}) {
        if (!exists(kind, ranks)) continue;
        for (const std::uint64_t count : {1, 7, 64, 999, 3001}) {
          for (const auto& [lanes, device] :
               {std::pair{1, Device::kHost}, {3, Device::kHost}, {32, Device::kCuda}}) {
            for (const bool in_place : {false, true}) {
              if (in_place && kind == Kind::kAllToAll) continue;
              const PlanRequest request = make_request(kind, ranks, count, ranks / 2);
              const PlanLimits limits =
                  make_limits(5, 64, static_cast<std::uint16_t>(lanes), device);
              const std::vector<Plan> plans = make_plans(request, limits, algorithm);
              for (const int unfair : {1, 1000}) {
                Machine machine(request, plans, in_place);
                ASSERT_TRUE(machine.run(unfair)) << label(request, limits, algorithm);
                ASSERT_TRUE(machine.correct())
                    << label(request, limits, algorithm) << " in place " << in_place;
              }
            }
          }
        }
      }
    }
  }
}

TEST(PlanExecuted, WrittenProgramsGiveTheRightNumbers) {
  const PlanLimits limits = make_limits(16, 64, 2);
  for (const std::uint64_t count : kWrittenCounts) {
    std::vector<std::pair<PlanRequest, std::vector<Plan>>> all;
    for (const int ranks : {4, 5, 8}) {
      const PlanRequest broadcast = make_request(Kind::kBroadcast, ranks, count, 2);
      const PlanRequest reduce = make_request(Kind::kReduce, ranks, count, 1);
      all.emplace_back(broadcast, tree_broadcast(broadcast, limits, 2, 1));
      all.emplace_back(broadcast, broadcast_in_halves(broadcast, limits));
      all.emplace_back(reduce, tree_reduce(reduce, limits, 3));
      if (ranks % 2 != 0) continue;
      const PlanRequest request = make_request(Kind::kAllReduce, ranks, count);
      for (const std::uint32_t distance : {0u, 2u}) {
        all.emplace_back(request, two_level_all_reduce(request, limits, ranks / 2, distance));
      }
    }
    for (const auto& [request, plans] : all) {
      for (const bool in_place : {false, true}) {
        for (const int unfair : {1, 1000}) {
          Machine machine(request, plans, in_place);
          ASSERT_TRUE(machine.run(unfair)) << to_string(request.kind) << " count " << count;
          ASSERT_TRUE(machine.correct()) << to_string(request.kind) << " count " << count;
        }
      }
    }
  }
}

// Loops that are not run are counted as many steps as they would take.
TEST(Steps, AreThoseOfAllLoops) {
  std::uint64_t cases = 0;
  for (int number = 0; number < kNumAlgorithms; ++number) {
    const auto algorithm = static_cast<Algorithm>(number);
    for (const Kind kind : kKinds) {
      if (!serves(algorithm, kind)) continue;
      for (const Device device : {Device::kHost, Device::kCuda}) {
        for (const int ranks : {2, 3, 4, 7, 8}) {
          if (kind == Kind::kSendRecv && ranks != 2) continue;
          for (const int slots : {2, 3, 4, 5, 7, 16}) {
            for (const std::uint64_t loops : {9, 20, 31, 64}) {
              PlanLimits limits;
              limits.device = device;
              limits.lanes = 1;
              limits.overlap = true;
              limits.guaranteed_slots = static_cast<std::uint32_t>(slots);
              limits.guaranteed_slot_bytes = 64;
              // Bytes: of a slot's chunks that many, and something more.
              const std::uint64_t slices = 64 * loops + 8;
              const std::uint64_t parts = blocked(kind) || !has_root(kind) ? 1 : ranks;
              const PlanRequest request = make_request(kind, ranks, slices * parts / 4, ranks / 2);
              const std::vector<Plan> plans = make_plans(request, limits, algorithm);
              if (plans.empty()) continue;
              CheckOptions options;
              options.slots = slots;
              options.slot_bytes = 64;
              options.find_slots_needed = false;
              const CheckResult counted = check_plans(request, plans, options);
              options.run_all_loops = true;
              const CheckResult all = check_plans(request, plans, options);
              ASSERT_TRUE(counted.ok && all.ok) << counted.error << all.error;
              ++cases;
              EXPECT_EQ(counted.steps, all.steps)
                  << kAlgorithms[number].name << " " << to_string(kind) << " " << ranks
                  << " ranks, " << slots << " slots, " << all.loops << " loops, device "
                  << static_cast<int>(device);
            }
          }
        }
      }
    }
  }
  EXPECT_GT(cases, 1000u);
}

TEST(PlanText, DescribesAndSerialises) {
  // Of rank 2, among five.
  const auto text = [](unsigned flags, const PeerRanks& from, const PeerRanks& to) {
    Plan plan;
    plan.geometry.parts = 5;
    ProgramBuilder program(5, 2);
    program.add(flags, 3, from, to);
    program.write(&plan);
    return describe(plan, 0, 5);
  };
  const PeerRanks nobody = PeerRanks::nobody(), all = PeerRanks::set({0, 1, 3, 4});
  const auto one = [](int rank) { return PeerRanks::one(rank); };
  constexpr unsigned kAdd = kLocal | kReduce | kContribute;
  EXPECT_EQ(text(kAdd, one(1), one(3)), "recv_reduce_send part 3 from 1 to 3");
  EXPECT_EQ(text(kAdd | kCopy | kFinish, all, nobody), "gather_reduce_copy part 3 from all");
  EXPECT_EQ(text(kLocal | kCopy, nobody, one(3)), "copy_send part 3 to 3");
  EXPECT_EQ(text(kLocal | kCopy, nobody, all), "copy_send_all part 3 to all");
  EXPECT_EQ(text(kCopy, one(1), PeerRanks::set({0, 3, 4})),
            "recv_copy_send_all part 3 from 1 to all others");
  EXPECT_EQ(text(kLocal | kScatter, nobody, all), "scatter every part to its rank");
  EXPECT_EQ(text(kLocal | kScatter | kCopy, nobody, all), "copy_scatter every part to its rank");
  EXPECT_EQ(text(kCollect | kCopy, all, nobody), "collect_copy every part from its rank");
  // Sets that are not all.
  const PeerRanks some = PeerRanks::set({4, 0});
  EXPECT_EQ(text(kAdd, some, one(3)), "gather_reduce_send part 3 from 0, 4 to 3");
  EXPECT_EQ(text(kCopy, one(1), some), "recv_copy_send_several part 3 from 1 to 0, 4");
  EXPECT_EQ(text(kAdd, some, some), "gather_reduce_send_several part 3 from 0, 4 to 0, 4");
  EXPECT_EQ(text(kLocal, nobody, PeerRanks::set({3})), "send_several part 3 to 3");
  EXPECT_EQ(text(kLocal | kScatter, nobody, some), "scatter every part to its rank, of 0, 4");
  EXPECT_EQ(text(kCollect | kCopy, some, nobody), "collect_copy every part from its rank, of 0, 4");

  bool ok = false;
  const PlanRequest request = make_request(Kind::kAllReduce, 4, 1000);
  const std::string json =
      plan_check_json(request, make_limits(5, 8192), Algorithm::kRing, 0, true, &ok);
  EXPECT_TRUE(ok) << json;
  for (const char* part :
       {"{\"ok\": true", "\"error\": \"\"", "\"algorithm\": \"ring\"", "\"protocol\": \"slot\"",
        "\"bytes_sent_max\": 6016", "\"bytes_sent_total\": 24000", "\"steps\": 7",
        "\"slots_needed\": 2", "\"programs\": [{\"rank\": 0", "recv_reduce_copy_send part 0",
        "\"recv_peers\": [], \"send_peers\": [1]", "\"recv_peers\": [3], \"send_peers\": []",
        "\"partials\": false"}) {
    EXPECT_NE(json.find(part), std::string::npos) << part << " in " << json;
  }
  EXPECT_EQ(plan_check_json(request, {}, {}, 0, false, nullptr).find("programs"),
            std::string::npos);

  // Planned for 5 slots, but only 4 are there: the ring locks up, and the text says how.
  const PlanRequest large = make_request(Kind::kAllReduce, 4, 1 << 20);
  const std::string stuck =
      plan_check_json(large, make_limits(5, 8192), Algorithm::kRing, 4, false, &ok);
  EXPECT_FALSE(ok);
  EXPECT_NE(stuck.find("\"ok\": false"), std::string::npos);
  EXPECT_NE(stuck.find("cycle of 4 ranks"), std::string::npos) << stuck;

  const std::string refused = plan_check_json(make_request(Kind::kAllReduce, 65, 1), {},
                                              Algorithm::kOneShot, 0, false, &ok);
  EXPECT_FALSE(ok);
  EXPECT_NE(refused.find("use ring"), std::string::npos) << refused;
  EXPECT_NE(plan_check_json(make_request(static_cast<Kind>(99), 0, 1), {}, {}, 0, true, &ok)
                .find("unknown kind"),
            std::string::npos);
}

}  // namespace
}  // namespace unjam
