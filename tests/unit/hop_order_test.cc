// HopOrder against the programs that the rsag planner writes: the closed forms say what an engine
// that runs them pass by pass does.
#include "program/hop_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "program/schedule.h"
#include "tests/support/rsag_plan.h"

namespace unjam {
namespace {

struct Slice {
  std::uint32_t hop;  // 0, 1: of its chunk
  std::uint32_t chunk;
  std::uint32_t sent_before, gathered_before, collected_before;  // chunks, by the same rank
};

// Which of the steps of an executor it is (of an rsag plan).
SlotStep step_of(const Primitive& p) {
  if ((p.flags & kRecv) == 0) return kSends;
  return (p.flags & kCollect) != 0 ? kCollects : kGathers;
}

// Calls body(p, chunk) for all that a program does, in order.
template <class Body>
void run(const Plan& plan, std::uint32_t chunks, Body body) {
  const std::uint32_t passes = chunks + plan.primitives.back().lag;
  for (std::uint32_t pass = 0; pass < passes; ++pass) {
    for (const Primitive& p : plan.primitives) {
      if (pass >= p.lag && pass - p.lag < chunks) body(p, pass - p.lag);
    }
  }
}

// What rank 1 sends rank 0, in order, by its program.
std::vector<Slice> walk(const Plan& plan, std::uint32_t chunks) {
  std::vector<Slice> slices;
  std::uint32_t sent = 0, gathered = 0, collected = 0;
  run(plan, chunks, [&](const Primitive& p, std::uint32_t chunk) {
    const SlotStep hop = step_of(p);
    if (sends_to(plan, p, 1, 0)) {
      slices.push_back({hop == kGathers ? 1u : 0u, chunk, sent, gathered, collected});
    }
    ++(hop == kSends ? sent : hop == kGathers ? gathered : collected);
  });
  return slices;
}

TEST(HopOrder, IsThatOfTheProgram) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
    for (const std::uint32_t slots : {2u, 3u, 4u, 6u, 8u}) {
      const Plan plan = mesh_plan(kind, slots, 4, 1);
      for (std::uint32_t chunks = 1; chunks < 12; ++chunks) {
        const HopOrder order{chunks, plan.primitives[1].lag, kind == Kind::kAllReduce};
        const std::vector<Slice> slices = walk(plan, chunks);
        SCOPED_TRACE("slots " + std::to_string(slots) + ", chunks " + std::to_string(chunks));
        ASSERT_EQ(slices.size(), order.slices());
        for (std::uint32_t i = 0; i < slices.size(); ++i) {
          const Slice& s = slices[i];
          EXPECT_EQ(s.hop == 0 ? order.first(s.chunk) : order.second(s.chunk), i);
          if (s.hop == 0) {
            EXPECT_TRUE(order.is_wanted_soon(s.chunk, s.gathered_before)) << "as the program";
            if (!order.two_hops || s.gathered_before < 2) continue;
            EXPECT_TRUE(order.is_wanted_soon(s.chunk, s.gathered_before - 1)) << "one more";
            EXPECT_FALSE(order.is_wanted_soon(s.chunk, s.gathered_before - 2)) << "and no more";
            continue;
          }
          EXPECT_EQ(order.sent_before_gather(s.chunk), s.sent_before);
          EXPECT_EQ(order.collected_before_gather(s.chunk), s.collected_before);
        }
      }
    }
  }
}

// The slices of a connector by the program of one of its ends: what rank `me` sends to q, or what
// it receives from there.
struct End {
  std::vector<std::uint32_t> chunks;
  std::vector<bool> hops = std::vector<bool>(kSlotSteps);  // which of its hops they are of
};
End end_of(const Plan& plan, std::uint32_t chunks, int me, int q, bool sends) {
  End end;
  run(plan, chunks, [&](const Primitive& p, std::uint32_t chunk) {
    if (!(sends ? sends_to(plan, p, me, q) : receives_from(plan, p, me, q))) return;
    end.chunks.push_back(chunk);
    end.hops[step_of(p)] = true;
  });
  return end;
}

TEST(HopOrder, WithARootAConnectorCarriesOneHop) {
  for (const Kind kind : {Kind::kBroadcast, Kind::kReduce}) {
    for (const int ranks : {2, 3, 4}) {
      for (int root = 0; root < ranks; ++root) {
        for (const std::uint32_t slots : {2u, 3u, 4u, 6u, 8u}) {
          std::vector<Plan> plans;
          for (int r = 0; r < ranks; ++r) plans.push_back(mesh_plan(kind, slots, ranks, r, root));
          for (std::uint32_t chunks = 1; chunks < 12; ++chunks) {
            for (int pair = 0; pair < ranks * ranks; ++pair) {
              const int from = pair / ranks, to = pair % ranks;
              if (from == to) continue;
              const auto at = [&](int r) -> const Plan& {
                return plans[static_cast<std::size_t>(r)];
              };
              SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::to_string(ranks) +
                           " ranks, root " + std::to_string(root) + ", slots " +
                           std::to_string(slots) + ", chunks " + std::to_string(chunks) +
                           ", from " + std::to_string(from) + " to " + std::to_string(to));
              const HopOrder order{chunks, at(from).primitives.back().lag, false};
              const End out = end_of(at(from), chunks, from, to, true);
              const End in = end_of(at(to), chunks, to, from, false);
              // A broadcast has no results for its root; of 2 ranks the root of a reduce owns all.
              const bool nothing =
                  kind == Kind::kBroadcast ? to == root : ranks == 2 && from == root;
              ASSERT_EQ(out.chunks.size(), nothing ? 0 : order.slices());
              ASSERT_EQ(in.chunks, out.chunks);
              for (std::uint32_t i = 0; i < out.chunks.size(); ++i) {
                EXPECT_EQ(order.first(out.chunks[i]), i);
                EXPECT_EQ(order.second(out.chunks[i]), i);
              }
              if (nothing) continue;
              EXPECT_EQ(std::count(out.hops.begin(), out.hops.end(), true), 1);
              EXPECT_EQ(std::count(in.hops.begin(), in.hops.end(), true), 1);
            }
          }
        }
      }
    }
  }
}

TEST(HopOrder, PrefixesAreWhatComesInFrontOfAllThatIsMissing) {
  for (const bool two_hops : {false, true}) {
    for (std::uint32_t lag = 0; lag < 4; ++lag) {
      for (std::uint32_t chunks = 1; chunks < 8; ++chunks) {
        const HopOrder order{chunks, lag, two_hops};
        for (std::uint32_t firsts = 0; firsts <= chunks; ++firsts) {
          for (std::uint32_t seconds = 0; seconds <= (two_hops ? chunks : 0); ++seconds) {
            std::vector<bool> there(order.slices(), false);
            for (std::uint32_t l = 0; l < firsts; ++l) there[order.first(l)] = true;
            for (std::uint32_t l = 0; l < seconds; ++l) there[order.second(l)] = true;
            std::uint32_t prefix = 0, of_first = 0;
            while (prefix < there.size() && there[prefix]) ++prefix;
            for (std::uint32_t l = 0; l < chunks; ++l) of_first += order.first(l) < prefix ? 1 : 0;
            EXPECT_EQ(order.prefix(firsts, seconds), prefix);
            EXPECT_EQ(order.firsts_in(prefix), of_first);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace unjam
