// Plans for groups that span hosts: host tables, and the planners that go along rails, proved by
// the checker.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/algorithms/hierarchical.h"
#include "plan/algorithms/pat.h"
#include "plan/check/checker.h"
#include "plan/host_table.h"
#include "plan/registry.h"
#include "plan/selector.h"
#include "tests/support/all_plans.h"

namespace unjam {
namespace {

using unjam_test::make_plans;

// ---- host tables ----

TEST(HostTable, NumbersHostsByTheirFirstRanks) {
  const HostTable table({7, 3, 7, 9, 3, 9});
  EXPECT_EQ(table.ranks(), 6);
  EXPECT_EQ(table.hosts(), 3);
  EXPECT_TRUE(table.is_regular());
  EXPECT_EQ(table.members(0), (std::vector<int>{0, 2}));
  EXPECT_EQ(table.members(1), (std::vector<int>{1, 4}));
  EXPECT_EQ(table.members(2), (std::vector<int>{3, 5}));
  EXPECT_EQ(table.host_of(4), 1);
  EXPECT_EQ(table.place_of(4), 1);
  EXPECT_EQ(table.place_of(3), 0);
}

TEST(HostTable, NamesHostsThatDiffer) {
  const HostTable table({0, 0, 1, 0});
  EXPECT_FALSE(table.is_regular());
  EXPECT_EQ(table.irregularity(), "rank 0's host has 3 of them, rank 2's has 1");
}

TEST(HostTable, ConsecutiveRanks) {
  const HostTable even = HostTable::consecutive(6, 3);
  EXPECT_EQ(even.members(1), (std::vector<int>{2, 3}));
  const HostTable odd = HostTable::consecutive(7, 3);
  EXPECT_FALSE(odd.is_regular());
  EXPECT_EQ(odd.members(0), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(odd.members(2), (std::vector<int>{5, 6}));
}

TEST(HostTable, RailsCrossHosts) {
  const HostTable table({7, 3, 7, 9, 3, 9});
  const Rails rails(&table, 6, 4);
  EXPECT_EQ(rails.hosts(), 3);
  EXPECT_EQ(rails.rails(), 2);
  EXPECT_EQ(rails.host(), 1);
  EXPECT_EQ(rails.rail(), 1);
  EXPECT_EQ(rails.rank_at(0, 1), 2);
  EXPECT_EQ(rails.rank_at(2, 0), 3);
  EXPECT_EQ(rails.mates(), std::vector<int>{1});
  const Rails one(nullptr, 4, 2);
  EXPECT_EQ(one.hosts(), 1);
  EXPECT_EQ(one.rails(), 4);
  EXPECT_EQ(one.mates(), (std::vector<int>{3, 0, 1}));
  const Rails flat = Rails::single(4, 2);
  EXPECT_EQ(flat.hosts(), 4);
  EXPECT_EQ(flat.rank_at(3, 0), 3);
  EXPECT_TRUE(flat.mates().empty());
}

// ---- plans ----

constexpr Algorithm kOnRails[] = {Algorithm::kHierarchical, Algorithm::kPat};
constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                           Kind::kBarrier};

// Ranks dealt out to hosts in turn, so that no host has consecutive ones; or one after another.
HostTable make_table(int hosts, int per_host, bool dealt_out) {
  std::vector<int> names;
  for (int r = 0; r < hosts * per_host; ++r) {
    names.push_back(dealt_out ? (r * 7 + r / hosts) % hosts : r / per_host);
  }
  if (dealt_out && hosts % 7 == 0) {  // (7 would not reach all)
    for (int r = 0; r < hosts * per_host; ++r) names[static_cast<std::size_t>(r)] = r % hosts;
  }
  return HostTable(names);
}

PlanRequest make_request(Kind kind, const HostTable& hosts, std::uint64_t count,
                         DType dtype = DType::kFloat32) {
  PlanRequest request;
  request.kind = kind;
  request.dtype = dtype;
  request.count = count;
  request.ranks = hosts.ranks();
  request.hosts = &hosts;
  return request;
}

PlanLimits make_limits(std::uint32_t slots, std::uint16_t lanes = 1) {
  PlanLimits limits;
  limits.guaranteed_slots = slots;
  limits.guaranteed_slot_bytes = 64;  // 16 floats
  limits.lanes = lanes;
  return limits;
}

CheckResult check(const PlanRequest& request, const PlanLimits& limits, Algorithm algorithm,
                  bool find_slots = true) {
  CheckOptions options;
  options.slots = static_cast<int>(limits.guaranteed_slots);
  options.slot_bytes = limits.guaranteed_slot_bytes;
  options.find_slots_needed = find_slots;
  return check_plans(request, make_plans(request, limits, algorithm), options);
}

std::string label(const PlanRequest& r, const PlanLimits& l, Algorithm a) {
  return std::string(to_string(a)) + " " + to_string(r.kind) + " hosts " +
         std::to_string(r.hosts->hosts()) + " ranks " + std::to_string(r.ranks) + " count " +
         std::to_string(r.count) + " lanes " + std::to_string(l.lanes) + " slots " +
         std::to_string(l.guaranteed_slots);
}

bool two_ways(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kBarrier; }

TEST(PlanLevels, HostsRanksKindsLanesSlots) {
  int checked = 0;
  for (const Algorithm algorithm : kOnRails) {
    for (const Kind kind : kKinds) {
      if (!row_of(algorithm).serves(kind)) continue;
      for (int hosts = 1; hosts <= 16; ++hosts) {
        for (int per_host = 1; per_host <= 8; ++per_host) {
          const HostTable table = make_table(hosts, per_host, (hosts + per_host) % 2 == 0);
          ASSERT_TRUE(table.is_regular());
          ASSERT_EQ(table.hosts(), hosts);
          for (const std::uint16_t lanes : {1, 2, 5}) {
            for (const std::uint32_t slots : {1u, 2u, 5u}) {
              if (slots == 1 && two_ways(kind)) continue;
              // Among many ranks each number of slots with some lanes.
              const auto turn = static_cast<std::uint32_t>(hosts + per_host) + lanes;
              if (hosts * per_host > 10 && turn % 3 != slots % 3) continue;
              const auto parts = static_cast<std::uint64_t>(blocked(kind) ? 1 : hosts * per_host);
              for (const std::uint64_t count : {std::uint64_t{1}, 16 * parts * lanes * 3 + 5}) {
                if (kind == Kind::kBarrier && count != 1) continue;
                const PlanRequest request = make_request(kind, table, count);
                const PlanLimits limits = make_limits(slots, lanes);
                const CheckResult result = check(request, limits, algorithm);
                ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
                ASSERT_LE(result.slots_needed, static_cast<int>(slots));
                if (algorithm == Algorithm::kHierarchical) {
                  ASSERT_LE(result.slots_needed, 2);
                }
                ++checked;
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 3000);
}

TEST(PlanLevels, AllTypes) {
  const HostTable table = make_table(5, 3, true);
  for (const Algorithm algorithm : kOnRails) {
    for (const Kind kind : kKinds) {
      if (!row_of(algorithm).serves(kind)) continue;
      for (int t = 0; t < kNumDTypes; ++t) {
        const PlanRequest request = make_request(kind, table, 12345, static_cast<DType>(t));
        const CheckResult result = check(request, make_limits(2, 3), algorithm);
        ASSERT_TRUE(result.ok) << to_string(algorithm) << ": " << result.error;
      }
    }
  }
}

TEST(PlanLevels, OnCuda) {
  for (const auto& [hosts, per_host] : {std::pair{2, 4}, {4, 8}, {8, 8}, {8, 1}}) {
    const HostTable table = make_table(hosts, per_host, false);
    for (const Algorithm algorithm : kOnRails) {
      for (const Kind kind : kKinds) {
        if (!row_of(algorithm).serves(kind)) continue;
        for (const std::uint64_t count : {1, 100'000, 10'000'000}) {
          if (kind == Kind::kBarrier && count != 1) continue;
          const PlanRequest request = make_request(kind, table, count);
          PlanLimits limits;
          limits.device = Device::kCuda;
          limits.guaranteed_slots = 4;
          limits.guaranteed_slot_bytes = 74'944;
          limits.lanes = 32;
          limits.overlap = limits.lines = true;
          const CheckResult result = check(request, limits, algorithm);
          ASSERT_TRUE(result.ok) << label(request, limits, algorithm) << ": " << result.error;
        }
      }
    }
  }
}

TEST(PlanLevels, ManyHosts) {
  for (const auto& [hosts, per_host] : {std::pair{128, 8}, {100, 3}, {127, 1}}) {
    const HostTable table = make_table(hosts, per_host, false);
    for (const Algorithm algorithm : kOnRails) {
      for (const Kind kind : kKinds) {
        if (!row_of(algorithm).serves(kind)) continue;
        const PlanRequest request = make_request(kind, table, 100);
        const CheckResult result = check(request, make_limits(4), algorithm, false);
        ASSERT_TRUE(result.ok) << label(request, {}, algorithm) << ": " << result.error;
      }
    }
  }
  // Trees of hosts have no such bound.
  const HostTable table = make_table(1024, 8, false);
  const CheckResult result = check(make_request(Kind::kAllReduce, table, 100), make_limits(2),
                                   Algorithm::kHierarchical, false);
  ASSERT_TRUE(result.ok) << result.error;
}

int log2_above(int n) { return std::bit_width(static_cast<unsigned>(n - 1)); }
int log2_below(int n) { return std::bit_width(static_cast<unsigned>(n)) - 1; }

// Up and down the trees, whose height is floor(log2 hosts); and the parts of mates that a rank
// sends in front, and takes behind, in a row. (Where the own part lags more than a mate's of the
// other tree, that one is taken before it: a step more.)
TEST(PlanLevels, StepsOfTreesBetweenHosts) {
  for (int hosts = 2; hosts <= 33; ++hosts) {
    for (const int per_host : {1, 2, 4, 8}) {
      const HostTable table = make_table(hosts, per_host, false);
      const auto count =
          std::uint64_t{16} * static_cast<unsigned>(per_host);  // a slice of each part
      const CheckResult result = check(make_request(Kind::kAllReduce, table, count), make_limits(5),
                                       Algorithm::kHierarchical);
      ASSERT_TRUE(result.ok) << result.error;
      const int others = per_host - 1;
      const int in_front = per_host == 1 ? 0 : 1;
      EXPECT_LE(static_cast<int>(result.steps),
                others + 2 * log2_below(hosts) + 1 + others + in_front)
          << hosts << " hosts of " << per_host;
    }
  }
}

// Hops in a row until all ranks have all, of one chunk a part: what a rank does takes no time, and
// there is room for everything. Each receive of a connector is matched with its send, in order.
int hops(const std::vector<Plan>& plans) {
  std::vector<std::vector<int>> done(plans.size());  // of each rank, when its primitives are done
  for (bool grows = true; grows;) {
    grows = false;
    // When each connector's slices come.
    std::map<std::pair<int, int>, std::vector<int>> come;
    for (std::size_t r = 0; r < plans.size(); ++r) {
      for (std::size_t i = 0; i < done[r].size(); ++i) {
        for (const int q : ranks_sent_to(plans[r], i)) {
          come[{static_cast<int>(r), q}].push_back(done[r][i] + 1);
        }
      }
    }
    for (std::size_t r = 0; r < plans.size(); ++r) {
      std::map<int, std::size_t> taken;
      int time = 0;
      for (std::size_t i = 0; i < plans[r].primitives.size(); ++i) {
        bool is_there = true;
        for (const int q : ranks_received_from(plans[r], i)) {
          const std::vector<int>& slices = come[{q, static_cast<int>(r)}];
          is_there = is_there && taken[q] < slices.size();
          if (is_there) time = std::max(time, slices[taken[q]++]);
        }
        if (!is_there) break;
        if (i < done[r].size()) continue;
        done[r].push_back(time);
        grows = true;
      }
    }
  }
  int most = 0;
  for (std::size_t r = 0; r < plans.size(); ++r) {
    EXPECT_EQ(done[r].size(), plans[r].primitives.size()) << "rank " << r;
    if (!done[r].empty()) most = std::max(most, done[r].back());
  }
  return most;
}

TEST(PlanLevels, BlocksMakeLogHops) {
  for (int hosts = 2; hosts <= 16; ++hosts) {
    for (const int per_host : {1, 3}) {
      const HostTable table = make_table(hosts, per_host, false);
      for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter, Kind::kAllReduce}) {
        const PlanRequest request = make_request(kind, table, 16);
        const PlanLimits limits = make_limits(8);  // windows of 16 hosts
        const std::vector<Plan> plans = make_plans(request, limits, Algorithm::kPat);
        const int ways = kind == Kind::kAllReduce ? 2 : 1;
        for (const Plan& plan : plans) {
          // A primitive for each block, a set for each distance, two neighbours at each.
          EXPECT_LE(plan.primitives.size(), static_cast<std::size_t>(ways * table.ranks()));
          EXPECT_LE(plan.neighbours.size(),
                    static_cast<std::size_t>(2 * log2_above(hosts) + per_host - 1));
          EXPECT_LE(plan.sets.size(), static_cast<std::size_t>(log2_above(hosts) + 1));
        }
        EXPECT_EQ(hops(plans), ways * (log2_below(hosts) + (per_host > 1 ? 1 : 0)))
            << to_string(kind) << " of " << hosts << " x " << per_host;
        EXPECT_TRUE(check(request, limits, Algorithm::kPat).ok);
      }
    }
  }
  // A ring has one for each other rank; with fewer slots windows follow each other.
  const HostTable table = make_table(16, 1, false);
  const auto of = [&](Algorithm algorithm, std::uint32_t slots) {
    return hops(
        make_plans(make_request(Kind::kAllGather, table, 16), make_limits(slots), algorithm));
  };
  EXPECT_EQ(of(Algorithm::kRing, 5), 15);
  EXPECT_EQ(of(Algorithm::kPat, 8), 4);
  EXPECT_EQ(of(Algorithm::kPat, 4), 6);
  EXPECT_EQ(of(Algorithm::kPat, 2), 8);
}

// Nobody sends more than in a ring, and between hosts a rank sends what its rail has to.
TEST(PlanLevels, BytesSent) {
  for (const int hosts : {2, 3, 4, 7, 8}) {
    for (const int per_host : {1, 2, 8}) {
      const HostTable table = make_table(hosts, per_host, true);
      const auto n = static_cast<std::uint64_t>(table.ranks());
      const std::uint64_t count = 64 * n;
      const PlanLimits limits = make_limits(4);
      for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter}) {
        const CheckResult r = check(make_request(kind, table, 64), limits, Algorithm::kPat);
        EXPECT_EQ(r.bytes_sent_max, (n - 1) * 64 * 4) << hosts << " x " << per_host;
      }
      const PlanRequest request = make_request(Kind::kAllReduce, table, count);
      const CheckResult pat = check(request, limits, Algorithm::kPat);
      EXPECT_EQ(pat.bytes_sent_max, 2 * (n - 1) * 64 * 4);
      const CheckResult trees = check(request, limits, Algorithm::kHierarchical);
      EXPECT_EQ(trees.bytes_sent_total, 2 * (n - 1) * count * 4);
      // Its part up and twice down, and what mates get.
      const auto k = static_cast<std::uint64_t>(per_host);
      EXPECT_LE(trees.bytes_sent_max, (3 + 2 * (k - 1)) * (count * 4 / k));
    }
  }
}

TEST(PlanLevels, OnlyNeighboursOnTheRailAndInTheHost) {
  for (int hosts = 1; hosts <= 9; ++hosts) {
    const HostTable table = make_table(hosts, 4, true);
    for (const Algorithm algorithm : kOnRails) {
      const std::vector<Plan> plans =
          make_plans(make_request(Kind::kAllReduce, table, 1000), make_limits(4), algorithm);
      for (int r = 0; r < table.ranks() && hosts > 1; ++r) {
        for (const int q : plans[static_cast<std::size_t>(r)].neighbours) {
          EXPECT_TRUE(table.host_of(q) == table.host_of(r) ||
                      table.place_of(q) == table.place_of(r));
        }
      }
    }
  }
}

// Hosts that are inside in one tree are leaves in the other, and rails take turns.
TEST(PlanLevels, RailsTakeTurnsWithTheTrees) {
  const HostTable table = make_table(8, 2, false);
  const std::vector<Plan> plans = make_plans(make_request(Kind::kAllReduce, table, 1000),
                                             make_limits(4), Algorithm::kHierarchical);
  for (int h = 0; h < 8; ++h) {
    int children = 0;
    for (const int r : table.members(h)) {
      const Plan& plan = plans[static_cast<std::size_t>(r)];
      // Mates are one, a parent is one.
      children += static_cast<int>(plan.neighbours.size()) - 1;
    }
    EXPECT_LE(children, 5) << "host " << h;  // two parents or one, two children or three
  }
}

// ---- planted mistakes: the checker finds each ----

struct Planted {
  HostTable hosts;
  PlanRequest request;
  PlanLimits limits;
  std::vector<Plan> plans;

  Planted(Kind kind, Algorithm algorithm, int num_hosts, int per_host, std::uint64_t count)
      : hosts(make_table(num_hosts, per_host, false)),
        request(make_request(kind, hosts, count)),
        limits(make_limits(4)),
        plans(make_plans(request, limits, algorithm)) {}
  Planted(const Planted&) = delete;
  Planted& operator=(const Planted&) = delete;

  Plan& plan(int rank) { return plans[static_cast<std::size_t>(rank)]; }
  // The rank's first primitive of which this is true.
  template <class Is>
  Primitive& find(int rank, const Is& is) {
    std::vector<Primitive>& program = plan(rank).primitives;
    const auto at = std::find_if(program.begin(), program.end(), is);
    EXPECT_NE(at, program.end());
    return *at;
  }
  std::string error(int slots = 4) const {
    CheckOptions options;
    options.slots = slots;
    options.slot_bytes = limits.guaranteed_slot_bytes;
    const CheckResult result = check_plans(request, plans, options);
    EXPECT_EQ(result.ok, result.error.empty());
    return result.error;
  }
};

void expect_error(const std::string& error, const std::string& part) {
  EXPECT_NE(error.find(part), error.npos) << error;
}

bool is_send(const Primitive& p) { return (p.flags & (kRecv | kSend)) == kSend; }
bool is_gather(const Primitive& p) { return (p.flags & kReduce) != 0; }
bool is_passed_on(const Primitive& p) {
  return (p.flags & (kRecv | kSend | kReduce)) == (kRecv | kSend);
}

TEST(LevelMistakes, NothingIsPlanted) {
  EXPECT_EQ(Planted(Kind::kAllReduce, Algorithm::kHierarchical, 4, 3, 1000).error(), "");
  EXPECT_EQ(Planted(Kind::kAllReduce, Algorithm::kPat, 4, 3, 1000).error(), "");
}

TEST(LevelMistakes, AMateSendsAContributionThatIsNone) {
  Planted p(Kind::kAllReduce, Algorithm::kHierarchical, 4, 3, 1000);
  p.find(1, is_send).flags &= static_cast<std::uint16_t>(~kContribute);
  expect_error(p.error(), "gathers the raw input of rank 1 from rank 1, not a sum");
}

TEST(LevelMistakes, SumsAreTakenForContributions) {
  for (const Algorithm algorithm : kOnRails) {
    Planted p(Kind::kAllReduce, algorithm, 4, 3, 1000);
    p.find(0, is_gather).flags &= static_cast<std::uint16_t>(~kPartials);
    expect_error(p.error(), "not a raw contribution: contributed twice");
  }
}

TEST(LevelMistakes, AMatesPartIsSentToAnother) {
  for (const Algorithm algorithm : kOnRails) {
    Planted p(Kind::kAllReduce, algorithm, 4, 3, 1000);
    Primitive& send = p.find(2, is_send);
    send.part = (send.part + 1) % p.plan(2).geometry.parts;
    expect_error(p.error(), "expects ");
  }
}

TEST(LevelMistakes, AResultIsNotPassedOn) {
  for (const Algorithm algorithm : kOnRails) {
    Planted p(Kind::kAllReduce, algorithm, 5, 2, 1000);
    for (int r = 0; r < 10; ++r) {
      std::vector<Primitive>& program = p.plan(r).primitives;
      const auto at = std::find_if(program.begin(), program.end(), is_passed_on);
      if (at == program.end()) continue;
      at->flags &= static_cast<std::uint16_t>(~(kSend | kIntoOutput));
      at->to = kNobody;
      expect_error(p.error(), " expects ");
      break;
    }
  }
}

// Who lags less than its depth wants what has not been sent; in a chain of passes that is another
// chunk.
TEST(LevelMistakes, AHostLagsByOneLess) {
  Planted p(Kind::kAllReduce, Algorithm::kHierarchical, 8, 2, 1000);
  int changed = 0;
  for (int r = 0; r < 16; ++r) {
    for (Primitive& q : p.plan(r).primitives) {
      if (!is_passed_on(q) || q.lag < 2 || changed != 0) continue;
      --q.lag;
      ++changed;
    }
  }
  ASSERT_EQ(changed, 1);
  EXPECT_NE(p.error(1), "");
}

TEST(LevelMistakes, OneSlotIsTooFewForTwoWays) {
  for (const Algorithm algorithm : kOnRails) {
    const Planted p(Kind::kAllReduce, algorithm, 2, 2, 1000);
    expect_error(p.error(1), "with 1 slots ");
    expect_error(p.error(1), "a cycle of ");
  }
}

// Ranks that have other tables make plans that do not fit: no table goes unnoticed.
TEST(LevelMistakes, RanksHaveOtherTables) {
  const HostTable other({0, 1, 0, 1, 0, 1, 0, 1});
  const HostTable three({0, 0, 1, 1, 2, 2, 3, 3});
  for (const Algorithm algorithm : kOnRails) {
    for (const Kind kind : kKinds) {
      if (!row_of(algorithm).serves(kind)) continue;
      // Of one element only one part is not empty, and that one's ways may be the same.
      if (kind == Kind::kBarrier) continue;
      for (const HostTable* table : {&other, &three}) {
        for (int odd = 0; odd < 8; ++odd) {
          // Two hosts of four.
          Planted p(kind, algorithm, 2, 4, 1000);
          PlanRequest request = p.request;
          request.hosts = table;
          request.rank = odd;
          p.plan(odd) = *make_plan(request, p.limits, algorithm);
          EXPECT_NE(p.error(), "") << to_string(algorithm) << " " << to_string(kind) << " " << odd;
        }
      }
    }
  }
}

// ---- the selector ----

// On one machine hops between hosts cost what others cost: the choice is that of one host.
TEST(PlanLevels, AreChosenByNameAlone) {
  const HostTable table = make_table(4, 4, false);
  for (const Device device : {Device::kHost, Device::kCuda}) {
    for (const Kind kind : kKinds) {
      for (const std::uint64_t count : {1, 1000, 100'000, 10'000'000}) {
        PlanRequest request = make_request(kind, table, kind == Kind::kBarrier ? 1 : count);
        PlanLimits limits;
        limits.device = device;
        const Algorithm there = select_algorithm(request, limits);
        EXPECT_FALSE(row_of(there).on_rails);
        request.hosts = nullptr;
        EXPECT_EQ(select_algorithm(request, limits), there);
      }
    }
  }
}

TEST(PlanLevels, SuitRegularHosts) {
  const HostTable even = make_table(2, 2, false), odd({0, 0, 1});
  for (int a = 0; a < kNumAlgorithms; ++a) {
    const auto algorithm = static_cast<Algorithm>(a);
    EXPECT_TRUE(suits_hosts(algorithm, make_request(Kind::kAllReduce, even, 1)));
    EXPECT_EQ(suits_hosts(algorithm, make_request(Kind::kAllReduce, odd, 1)),
              !row_of(algorithm).on_rails);
    PlanRequest request = make_request(Kind::kAllReduce, odd, 1);
    request.hosts = nullptr;
    EXPECT_TRUE(suits_hosts(algorithm, request));
  }
}

// ---- errors ----

std::string error_of(const PlanRequest& request, const PlanLimits& limits, Algorithm algorithm) {
  std::string error;
  const std::optional<Plan> plan = make_plan(request, limits, algorithm, &error);
  EXPECT_EQ(plan.has_value(), error.empty());
  return error;
}

TEST(PlanLevels, ErrorsNameTheCause) {
  const HostTable odd({0, 0, 0, 1, 1});
  EXPECT_EQ(
      error_of(make_request(Kind::kAllReduce, odd, 10), make_limits(4), Algorithm::kHierarchical),
      "hierarchical plans need as many ranks on each host: rank 0's host has 3 of them, rank "
      "3's has 2: use ring");
  EXPECT_EQ(error_of(make_request(Kind::kAllGather, odd, 10), make_limits(4), Algorithm::kPat),
            "pat plans need as many ranks on each host: rank 0's host has 3 of them, rank 3's has "
            "2: use ring");
  const HostTable even = make_table(2, 2, false);
  EXPECT_EQ(
      error_of(make_request(Kind::kAllReduce, even, 10), make_limits(1), Algorithm::kHierarchical),
      "hierarchical plans need at least 2 guaranteed slots, not 1");
  EXPECT_EQ(error_of(make_request(Kind::kAllReduce, even, 10), make_limits(1), Algorithm::kPat),
            "pat plans need at least 2 guaranteed slots, not 1");
  PlanRequest other = make_request(Kind::kAllReduce, even, 10);
  other.ranks = 5;
  EXPECT_EQ(error_of(other, make_limits(4), Algorithm::kRing),
            "the host table has 4 ranks, the group has 5");
  EXPECT_EQ(error_of(make_request(Kind::kAllGather, make_table(129, 2, false), 10), make_limits(4),
                     Algorithm::kPat),
            "pat plans serve at most 128 hosts of several ranks, here are 129");
  EXPECT_EQ(error_of(make_request(Kind::kAllGather, make_table(2, 65, false), 10), make_limits(4),
                     Algorithm::kPat),
            "pat plans serve at most 63 ranks on each of 2 hosts, here are 65");
  EXPECT_EQ(error_of(make_request(Kind::kAllReduce, make_table(4, 62, false), 10), make_limits(4),
                     Algorithm::kHierarchical),
            "hierarchical plans serve at most 61 ranks on a host, here are 62");
  std::string error;
  PlanRequest gather = make_request(Kind::kAllGather, even, 10);
  EXPECT_FALSE(plan_hierarchical(gather, make_limits(4), &error).has_value());
  EXPECT_EQ(error, "hierarchical plans do not serve all_gather: use ring");
}

}  // namespace
}  // namespace unjam
