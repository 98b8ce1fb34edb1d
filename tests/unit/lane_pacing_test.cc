// LanePacing, played: the lanes of a chain of ranks, with the slots and slices in hand that
// device/cuda/exec/slots/steer.cuh has. In each step of the schedule, which is random, a lane of
// a rank begins a slice or has moved one.
#include "device/cuda/exec/slots/lane_pacing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace unjam {
namespace {

struct Job {
  std::uint32_t ranks, lanes, chunks, slots, in_hand;
};

struct Lane {
  std::uint32_t begun = 0, moved = 0;
};
constexpr std::uint32_t kNone = ~std::uint32_t{0};

class Play {
 public:
  Play(const Job& job, std::uint64_t seed)
      : job_(job), random_(seed), ranks_(job.ranks, std::vector<Lane>(job.lanes)) {}

  // How far lanes of a rank came to be apart.
  std::uint32_t widest = 0;

  const Lane& lane(std::uint32_t rank, std::uint32_t l) const { return ranks_[rank][l]; }

  // Whether all lanes get to the end. `favourite`: a lane that goes whenever it can. `absent`: one
  // of the first rank that never begins.
  bool ends(std::uint32_t favourite, std::uint32_t absent = kNone) {
    for (;;) {
      std::vector<std::pair<std::uint32_t, std::uint32_t>> able;  // ranks' lanes
      bool over = true;
      for (std::uint32_t r = 0; r < job_.ranks; ++r) {
        for (std::uint32_t l = 0; l < job_.lanes; ++l) {
          over = over && ranks_[r][l].moved == job_.chunks;
          if (r == 0 && l == absent) continue;
          if (!may_begin(r, l) && ranks_[r][l].begun == ranks_[r][l].moved) continue;
          able.insert(able.end(), l == favourite ? 51 : 1, {r, l});
        }
      }
      if (over) return true;
      if (able.empty()) return false;
      const auto [r, l] = able[random_() % able.size()];
      Lane& lane = ranks_[r][l];
      if (may_begin(r, l) && (lane.begun == lane.moved || random_() % 2 == 0)) {
        widest = std::max(widest, lane.begun - slowest(r));
        ++lane.begun;
      } else {
        ++lane.moved;
      }
    }
  }

 private:
  // As a lane reads it: words of the call, or of one before.
  std::uint32_t slowest(std::uint32_t r) const {
    constexpr std::uint32_t kCall = 7;
    std::uint32_t least = job_.chunks;
    for (const Lane& lane : ranks_[r]) {
      const bool has_begun = lane.moved != 0;
      const std::uint64_t word = has_begun ? LanePacing::word(kCall, lane.moved)
                                           : LanePacing::word(kCall - 1, job_.chunks);
      least = std::min(least, LanePacing::moved(kCall, word));
    }
    return least;
  }
  bool may_begin(std::uint32_t r, std::uint32_t l) const {
    const Lane& lane = ranks_[r][l];
    const std::uint32_t n = lane.begun;
    if (n == job_.chunks || n - lane.moved == job_.in_hand) return false;
    if (r != 0 && ranks_[r - 1][l].moved <= n) return false;  // it has not come
    if (r + 1 != job_.ranks && n - ranks_[r + 1][l].moved >= job_.slots) return false;  // no room
    return LanePacing::may_begin(n, slowest(r));
  }

  const Job job_;
  std::mt19937_64 random_;
  std::vector<std::vector<Lane>> ranks_;
};

TEST(LanePacing, LanesStayTogetherAndAllEnd) {
  for (const std::uint32_t slots : {1u, 2u, 4u, 12u}) {
    for (const std::uint32_t in_hand : {1u, 2u, 4u}) {
      for (std::uint64_t seed = 0; seed < 8; ++seed) {
        SCOPED_TRACE("slots " + std::to_string(slots) + ", in hand " + std::to_string(in_hand) +
                     ", seed " + std::to_string(seed));
        const std::uint32_t ranks = 2 + static_cast<std::uint32_t>(seed % 3);
        Play play({ranks, 5, 40, slots, in_hand}, seed);
        ASSERT_TRUE(play.ends(static_cast<std::uint32_t>(seed % 5)));
        EXPECT_LT(play.widest, LanePacing::kApart);
      }
    }
  }
}

TEST(LanePacing, AFastLaneGetsAsFarAsItMay) {
  Play play({3, 5, 40, 12, 2}, 1);
  ASSERT_TRUE(play.ends(2));
  EXPECT_EQ(play.widest, LanePacing::kApart - 1);
}

TEST(LanePacing, OfALaneThatDoesNotBeginOthersAreNotFarAhead) {
  constexpr std::uint32_t kAbsent = 3;
  Play play({3, 5, 40, 12, 2}, 1);
  EXPECT_FALSE(play.ends(2, kAbsent));  // they wait until they have no patience any more
  for (std::uint32_t l = 0; l < 5; ++l) {
    EXPECT_EQ(play.lane(0, l).moved, l == kAbsent ? 0 : LanePacing::kApart);
  }
}

TEST(LanePacing, AWordOfAnotherCallSaysNothing) {
  EXPECT_EQ(LanePacing::moved(3, LanePacing::word(3, 40)), 40u);
  EXPECT_EQ(LanePacing::moved(3, LanePacing::word(2, 40)), 0u);
  EXPECT_EQ(LanePacing::moved(0, 0), 0u);
}

}  // namespace
}  // namespace unjam
