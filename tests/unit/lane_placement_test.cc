// Which block of a daemon drives which lane (device/cuda/placement/lane_placement.h): whatever SMs
// are free, and whoever is first, each lane is one block's; and on an empty GPU lanes are where
// they are to be.
#include "device/cuda/placement/lane_placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <barrier>
#include <cstdint>
#include <map>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/job.h"

namespace unjam_test {
namespace {

using namespace unjam;  // NOLINT: what is tested

constexpr std::uint32_t kSms = 132;

// By how many of a daemon's blocks each lane is driven, if they begin on these SMs, one after the
// other.
std::map<std::uint32_t, int> drivers(LanePlacement& choice, std::uint32_t which,
                                     std::uint32_t lanes, const std::vector<std::uint32_t>& sms,
                                     std::vector<std::uint32_t>* where = nullptr,
                                     std::uint64_t ns_apart = 1) {
  const auto now_ns = [&](std::uint32_t b) { return 1'000'000 + b * ns_apart; };
  std::map<std::uint32_t, int> n;
  if (where != nullptr) where->assign(lanes, kNoLane);
  const auto blocks = static_cast<std::uint32_t>(sms.size());
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const std::uint32_t lane = choice.choose(which, sms[b], lanes, blocks, now_ns(b), [] {});
    if (b == 0) {
      EXPECT_EQ(lane, 0u) << "the first lane's block is the first";
    }
    if (lane == kNoLane) continue;
    ++n[lane];
    if (where != nullptr && lane < lanes) (*where)[lane] = sms[b];
  }
  return n;
}
void each_has_one(const std::map<std::uint32_t, int>& n, std::uint32_t lanes) {
  EXPECT_EQ(n.size(), lanes);
  for (const auto& [lane, by] : n) {
    EXPECT_LT(lane, lanes);
    EXPECT_EQ(by, 1) << "lane " << lane;
  }
}

class Lanes : public testing::TestWithParam<std::uint32_t> {
 protected:
  const std::uint32_t lanes_ = GetParam();
  std::mt19937_64 random_{base_seed()};
  LanePlacement choice_;
};

TEST_P(Lanes, HaveSmsOfTheirOwnInPairs) {
  std::map<std::uint32_t, std::uint32_t> sms, gpcs;
  for (std::uint32_t sm = 0; sm < kSms; ++sm) {
    const std::uint32_t lane = lane_of_sm(sm, lanes_);
    if (lane == kNoLane) continue;
    ASSERT_LT(lane, lanes_);
    EXPECT_TRUE(sms.emplace(lane, sm).second) << "two SMs of lane " << lane;
    ++gpcs[sm / 2 % 8];
  }
  EXPECT_EQ(sms.size(), lanes_);
  for (const auto& [lane, sm] : sms) EXPECT_EQ(sm / 2, sms[lane ^ 1] / 2);
  for (const auto& [gpc, n] : gpcs) EXPECT_EQ(n, 4u) << "GPC " << gpc;
}

TEST_P(Lanes, HaveABlockEachWhereverTheseAre) {
  for (std::uint32_t daemon = 0; daemon < 200; ++daemon) {
    // Some SMs are free, and take one block after the other.
    const std::uint32_t free = 1 + static_cast<std::uint32_t>(random_() % kSms);
    std::vector<std::uint32_t> all(kSms), sms(kSms);
    std::iota(all.begin(), all.end(), 0u);
    std::shuffle(all.begin(), all.end(), random_);
    for (std::uint32_t& sm : sms) sm = all[random_() % free];
    const std::uint64_t ns_apart = random_() % 2 == 0 ? 1 : random_() % 1000;
    each_has_one(drivers(choice_, daemon % 2, lanes_, sms, nullptr, ns_apart), lanes_);
  }
}

TEST_P(Lanes, AreOnTheirSmsIfAllAreFree) {
  std::vector<std::uint32_t> sms(kChoosingBlocks), where;
  std::iota(sms.begin(), sms.end(), 0u);
  // (The first takes the first lane, wherever it is.)
  std::shuffle(sms.begin() + 1, sms.end() - 32, random_);
  each_has_one(drivers(choice_, 0, lanes_, sms, &where), lanes_);
  for (std::uint32_t lane = 0; lane < lanes_; ++lane)
    EXPECT_EQ(lane_of_sm(where[lane], lanes_), lane);
}

// On a full GPU blocks begin when others have ended. Those are not to take their time: each takes a
// lane at once, wherever it is.
TEST_P(Lanes, AreTakenByAnyBlockThatBeginsLate) {
  std::vector<std::uint32_t> sms(2 * lanes_, kSms - 1);
  const std::uint32_t blocks = 2 * lanes_;
  for (std::uint32_t b = 0; b < blocks; ++b) {
    const std::uint64_t now_ns = 1 + b * (LanePlacement::kTogetherNs + 1);
    const std::uint32_t lane = choice_.choose(0, sms[b], lanes_, blocks, now_ns,
                                              [] { ADD_FAILURE() << "nobody is to wait"; });
    EXPECT_EQ(lane, b < lanes_ ? b : kNoLane);
  }
}

// As few blocks as there are lanes take one each.
TEST_P(Lanes, HaveABlockEachOfAsMany) {
  std::vector<std::uint32_t> sms(lanes_);
  for (std::uint32_t& sm : sms) sm = static_cast<std::uint32_t>(random_() % kSms);
  each_has_one(drivers(choice_, 1, lanes_, sms), lanes_);
}

TEST_P(Lanes, HaveABlockEachIfAllBeginTogether) {
  constexpr std::uint32_t kThreads = 4, kDaemons = 200;
  const std::uint32_t blocks = std::max(lanes_, 40u) / kThreads * kThreads;
  std::vector<std::vector<std::uint32_t>> taken(kThreads);
  std::vector<std::uint32_t> sms(blocks);
  bool begun = false;
  std::barrier meet(kThreads, [&]() noexcept {
    std::map<std::uint32_t, int> n;
    for (auto& mine : taken) {
      for (const std::uint32_t lane : mine) ++n[lane];
      mine.clear();
    }
    if (std::exchange(begun, true)) each_has_one(n, lanes_);
    for (std::uint32_t& sm : sms) sm = static_cast<std::uint32_t>(random_() % kSms);
  });
  std::vector<std::jthread> threads;
  for (std::uint32_t t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(base_seed() + t);
      for (std::uint32_t daemon = 0; daemon <= kDaemons; ++daemon) {
        meet.arrive_and_wait();
        if (daemon == kDaemons) break;
        for (std::uint32_t b = t; b < blocks; b += kThreads) {
          const std::uint32_t lane =
              choice_.choose(daemon % 2, sms[b], lanes_, blocks, 1 + random() % 12000,
                             [] { std::this_thread::yield(); });
          if (lane != kNoLane) taken[t].push_back(lane);
        }
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(All, Lanes, testing::Values(4u, 8u, 16u, 24u, 28u, 32u));

TEST(LanesOfSms, AreForMultiplesOfFour) {
  for (const std::uint32_t lanes : {0u, 1u, 2u, 6u, 30u, 33u, 36u})
    EXPECT_FALSE(lanes_have_sms(lanes));
  for (const std::uint32_t lanes : {4u, 8u, 24u, 32u}) EXPECT_TRUE(lanes_have_sms(lanes));
}

}  // namespace
}  // namespace unjam_test
