// HopOrder against the programs that the mesh planner writes: the closed forms say what an engine
// that runs them pass by pass does.
#include "engine/hop_order.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/support/mesh_plan.h"

namespace unjam {
namespace {

struct Slice {
  std::uint32_t hop;  // 0, 1: of its chunk
  std::uint32_t chunk;
  std::uint32_t sent_before, gathered_before, collected_before;  // chunks, by the same rank
};

// What a rank sends each peer, in order, by its program.
std::vector<Slice> walk(const Plan& plan, std::uint32_t chunks) {
  std::vector<Slice> slices;
  std::uint32_t sent = 0, gathered = 0, collected = 0;
  const std::uint32_t passes = chunks + plan.primitives.back().lag;
  for (std::uint32_t pass = 0; pass < passes; ++pass) {
    for (const Primitive& p : plan.primitives) {
      if (pass < p.lag || pass - p.lag >= chunks) continue;
      const std::uint32_t chunk = pass - p.lag;
      const bool gathers = (p.flags & kGather) != 0;
      if ((p.flags & (kScatter | kSendAll)) != 0) {
        slices.push_back({gathers ? 1u : 0u, chunk, sent, gathered, collected});
        if (!gathers) ++sent;
      }
      if (gathers) ++gathered;
      if ((p.flags & kCollect) != 0) ++collected;
    }
  }
  return slices;
}

TEST(HopOrder, IsThatOfTheProgram) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
    for (const std::uint32_t slots : {2u, 3u, 4u, 6u, 8u}) {
      const Plan plan = mesh_plan(kind, slots, 4);
      for (std::uint32_t chunks = 1; chunks < 12; ++chunks) {
        const HopOrder order{chunks, plan.primitives[1].lag, kind == Kind::kAllReduce};
        const std::vector<Slice> slices = walk(plan, chunks);
        SCOPED_TRACE("slots " + std::to_string(slots) + ", chunks " + std::to_string(chunks));
        ASSERT_EQ(slices.size(), order.slices());
        for (std::uint32_t i = 0; i < slices.size(); ++i) {
          const Slice& s = slices[i];
          EXPECT_EQ(s.hop == 0 ? order.first(s.chunk) : order.second(s.chunk), i);
          if (s.hop == 0) continue;
          EXPECT_EQ(order.sent_before_gather(s.chunk), s.sent_before);
          EXPECT_EQ(order.collected_before_gather(s.chunk), s.collected_before);
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
