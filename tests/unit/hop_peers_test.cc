// HopPeers against the programs that the mesh planner writes: both ends of every connector must
// agree on whether it is used, and on whose part its slices are.
#include "program/hop_peers.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstdint>
#include <string>
#include <vector>

#include "plan/algorithms/chain.h"
#include "plan/algorithms/mesh.h"

namespace unjam {
namespace {

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                           Kind::kBroadcast, Kind::kReduce};

struct Group {
  PlanRequest request;
  PlanLimits limits;
  std::vector<Plan> plans;
  std::vector<HopPeers> ranks;

  Group(Kind kind, int size, int root, std::uint32_t slots, bool overlap) {
    request.kind = kind;
    request.count = 100003;
    request.ranks = size;
    request.root = root;
    limits.device = Device::kCuda;
    limits.escape_slots = slots;
    limits.escape_slot_bytes = 4096;
    limits.lanes = 3;
    limits.overlap = overlap;
    for (request.rank = 0; request.rank < size; ++request.rank) {
      plans.push_back(plan_mesh(request, limits).value());
      const auto hops = of(plans.back(), request.rank);
      EXPECT_TRUE(hops.has_value());
      ranks.push_back(hops.value_or(HopPeers{}));
    }
  }
  std::optional<HopPeers> of(const Plan& plan, int rank) const {
    return hop_peers(plan.geometry, plan.primitives.data(),
                     static_cast<std::uint32_t>(plan.primitives.size()),
                     static_cast<std::uint32_t>(request.ranks), static_cast<std::uint32_t>(rank));
  }
};

bool has(unsigned members, int q) { return (members >> q & 1) != 0; }

template <class Body>
void each_group(Body body) {
  for (const Kind kind : kKinds) {
    for (int size = 2; size <= 8; ++size) {
      for (int root = 0; root < (has_root(kind) ? size : 1); ++root) {
        for (const std::uint32_t slots : {2u, 4u, 5u}) {
          for (const bool overlap : {false, true}) {
            SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::to_string(size) +
                         " ranks, root " + std::to_string(root) + ", " + std::to_string(slots) +
                         " slots");
            body(Group(kind, size, root, slots, overlap));
          }
        }
      }
    }
  }
}

TEST(HopPeers, BothEndsOfAConnectorAgree) {
  each_group([](const Group& g) {
    const int n = g.request.ranks;
    const std::uint16_t empty = g.plans[0].geometry.empty_part;
    for (int from = 0; from < n; ++from) {
      const HopPeers& s = g.ranks[static_cast<std::size_t>(from)];
      for (int to = 0; to < n; ++to) {
        const HopPeers& r = g.ranks[static_cast<std::size_t>(to)];
        const bool sends = has(s.sends_to, to), passes_on = has(s.results_to, to);
        const bool gathers = has(r.gathers_from, from), collects = has(r.collects_from, from);
        ASSERT_EQ(sends || passes_on, gathers || collects) << from << " to " << to;
        ASSERT_FALSE(from == to && (sends || passes_on));
        if (!sends && !passes_on) continue;
        // Two hops, or one at both ends.
        ASSERT_EQ(sends && passes_on, gathers && collects);
        ASSERT_EQ(sends && passes_on, g.request.kind == Kind::kAllReduce);
        if (sends && passes_on) continue;
        const int sent_part = sends && s.scatters ? to : from;
        const int received_part = gathers ? to : from;
        ASSERT_EQ(sent_part, received_part);
        ASSERT_NE(sent_part, empty);
      }
    }
  });
}

TEST(HopPeers, EveryRankKnowsWhatBecomesOfItsPart) {
  each_group([](const Group& g) {
    const auto n = static_cast<int>(g.ranks.size());
    for (int r = 0; r < n; ++r) {
      const HopPeers& hops = g.ranks[static_cast<std::size_t>(r)];
      ASSERT_EQ(hops.two_hops(), g.request.kind == Kind::kAllReduce);
      ASSERT_EQ(hops.lag,
                hops.reduces
                    ? g.plans[static_cast<std::size_t>(r)].primitives[hops.scatters ? 1 : 0].lag
                    : 0);
      // A sum is everybody's; what is passed on comes from the root.
      const int sources = std::popcount(hops.gathers_from);
      if (hops.reduces) {
        ASSERT_EQ(sources, n - 1);
      } else if (sources != 0) {
        ASSERT_EQ(hops.gathers_from, 1u << g.request.root);
      }
      const bool is_root = r == g.request.root;
      if (g.request.kind == Kind::kBroadcast) {
        ASSERT_EQ(hops.copies, is_root);
        ASSERT_EQ(hops.stores, !is_root);
      }
      if (g.request.kind == Kind::kReduce) {
        ASSERT_EQ(hops.stores, is_root && n == 2);
      }
    }
  });
}

TEST(HopPeers, AChainGoesFromEachToTheNext) {
  for (const Kind kind : {Kind::kBroadcast, Kind::kReduce}) {
    for (int n = 2; n <= 8; ++n) {
      for (int root = 0; root < n; ++root) {
        SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::to_string(n) + " ranks, root " +
                     std::to_string(root));
        const bool reduces = kind == Kind::kReduce;
        // Who is last, or first, in the group's order from the root on.
        const int first = reduces ? (root + 1) % n : root, last = (first + n - 1) % n;
        for (int r = 0; r < n; ++r) {
          PlanRequest request;
          request.kind = kind;
          request.count = 100003;
          request.ranks = n;
          request.rank = r;
          request.root = root;
          PlanLimits limits;
          limits.device = Device::kCuda;
          const Plan plan = plan_chain(request, limits).value();
          const auto hops = hop_peers(plan.geometry, plan.primitives.data(), 1,
                                      static_cast<std::uint32_t>(n), static_cast<std::uint32_t>(r));
          ASSERT_TRUE(hops.has_value());
          ASSERT_TRUE(hops->chain);
          const auto bit = [](int q) { return static_cast<std::uint8_t>(1u << q); };
          const std::uint8_t next = r == last ? std::uint8_t{0} : bit((r + 1) % n);
          ASSERT_EQ(hops->sends_to, r == first ? next : 0);
          ASSERT_EQ(hops->results_to, r == first ? 0 : next);
          ASSERT_EQ(hops->gathers_from, r == first ? 0 : bit((r + n - 1) % n));
          ASSERT_EQ(hops->collects_from, 0);
          ASSERT_EQ(hops->reduces, reduces && r != first);
          ASSERT_EQ(hops->stores, !reduces || r == last);
          ASSERT_FALSE(hops->two_hops());
          // With anything else in it the program is another.
          std::vector<Primitive> more = plan.primitives;
          more.push_back(more.front());
          ASSERT_FALSE(hop_peers(plan.geometry, more.data(), 2, static_cast<std::uint32_t>(n),
                                 static_cast<std::uint32_t>(r)));
          for (const auto& change :
               {+[](Primitive& p) { p.part = 1; }, +[](Primitive& p) { p.lag = 1; },
                +[](Primitive& p) { p.flags ^= kCopy; },
                +[](Primitive& p) { p.flags ^= kLocal; }}) {
            Primitive other = plan.primitives.front();
            change(other);
            const auto found = hop_peers(plan.geometry, &other, 1, static_cast<std::uint32_t>(n),
                                         static_cast<std::uint32_t>(r));
            ASSERT_FALSE(found.has_value()) << other.flags;
          }
        }
      }
    }
  }
}

TEST(HopPeers, OtherProgramsAreNotKnown) {
  Group g(Kind::kAllReduce, 3, 0, 4, true);
  Plan plan = g.plans[1];
  EXPECT_TRUE(g.of(plan, 1).has_value());
  // A lag in which the connectors' order is not the known one, and slices that go together.
  ++plan.primitives[2].lag;
  EXPECT_FALSE(g.of(plan, 1).has_value());
  plan = g.plans[1];
  plan.primitives[0].flags |= kWithNext;
  EXPECT_FALSE(g.of(plan, 1).has_value());
  // Another rank's.
  EXPECT_FALSE(g.of(g.plans[1], 2).has_value());
  // Data that change their place.
  g.request.kind = Kind::kAllToAll;
  g.request.rank = 1;
  EXPECT_FALSE(g.of(plan_mesh(g.request, g.limits).value(), 1).has_value());
  // More ranks than a mask has bits.
  g.request.kind = Kind::kAllReduce;
  g.request.ranks = 9;
  EXPECT_FALSE(g.of(plan_mesh(g.request, g.limits).value(), 1).has_value());
}

}  // namespace
}  // namespace unjam
