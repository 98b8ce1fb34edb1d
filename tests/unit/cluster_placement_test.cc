// When a call's blocks keep the next call's from coming early
// (device/cuda/placement/cluster_placement.h).
#include "device/cuda/placement/cluster_placement.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace unjam_test {
namespace {

using namespace unjam;  // NOLINT: what is tested

// How many of its blocks keep the next call's, of a call that has them on these SMs.
int keepers(ClusterPlacement& places, const std::vector<std::uint32_t>& sms, std::uint32_t call) {
  for (const std::uint32_t sm : sms) places.note(sm, call);
  int n = 0;
  for (const std::uint32_t sm : sms) n += places.keep(sm, call) ? 1 : 0;
  return n;
}

const std::vector<std::uint32_t> kWhole = {0, 1, 16, 17, 130, 131}, kAlsoWhole = {2, 3, 18, 19},
                                 kHalves = {0, 1, 17, 2, 4, 5};

TEST(ClusterPlacement, WhereTpcsAreWholeNothingIsKept) {
  ClusterPlacement places;
  for (std::uint32_t call = 1; call < 40; ++call) {
    EXPECT_EQ(keepers(places, call % 2 != 0 ? kWhole : kAlsoWhole, call), 0) << call;
  }
}

TEST(ClusterPlacement, BlocksOnHalvesKeepTheNextCalls) {
  ClusterPlacement places;
  EXPECT_EQ(keepers(places, kHalves, 1), 2);
  EXPECT_EQ(keepers(places, kWhole, 2), 0);
  // The other half had a block of a call before.
  EXPECT_EQ(keepers(places, {16, 0, 1}, 100), 1);
}

// The calls up to `last`, from `first` on, that keep the next one's blocks, if all lie on halves.
std::vector<std::uint32_t> calls_that_keep(ClusterPlacement& places, std::uint32_t first,
                                           std::uint32_t last) {
  std::vector<std::uint32_t> calls;
  for (std::uint32_t call = first; call <= last; ++call) {
    const int n = keepers(places, kHalves, call);
    EXPECT_TRUE(n == 0 || n == 2) << call;
    if (n != 0) calls.push_back(call);
  }
  return calls;
}

TEST(ClusterPlacement, NotAgainSoon) {
  ClusterPlacement places;
  EXPECT_EQ(keepers(places, kHalves, 5), 2);
  EXPECT_EQ(keepers(places, kWhole, 6), 0);
  EXPECT_EQ(calls_that_keep(places, 7, 14), (std::vector<std::uint32_t>{14}));
}

TEST(ClusterPlacement, LessOftenWhereItIsInVain) {
  ClusterPlacement places;
  EXPECT_EQ(calls_that_keep(places, 1, 600),
            (std::vector<std::uint32_t>{1, 18, 51, 116, 245, 502}));
  EXPECT_EQ(calls_that_keep(places, 601, 2100), (std::vector<std::uint32_t>{1015, 1528, 2041}));
  // It helps for once: then after eight calls again.
  EXPECT_EQ(calls_that_keep(places, 2101, 2553), std::vector<std::uint32_t>{});
  EXPECT_EQ(keepers(places, kHalves, 2554), 2);
  EXPECT_EQ(keepers(places, kWhole, 2555), 0);
  EXPECT_EQ(calls_that_keep(places, 2556, 3067), (std::vector<std::uint32_t>{3067}));
  EXPECT_EQ(keepers(places, kWhole, 3068), 0);
  EXPECT_EQ(calls_that_keep(places, 3069, 3076), (std::vector<std::uint32_t>{3076}));
}

// Of two that overlap the later one has begun as the blocks of the former ask.
TEST(ClusterPlacement, TheNextCallHasBegun) {
  ClusterPlacement places;
  for (const std::uint32_t sm : kWhole) places.note(sm, 7);
  for (const std::uint32_t sm : kAlsoWhole) places.note(sm, 8);
  for (const std::uint32_t sm : kWhole) EXPECT_FALSE(places.keep(sm, 7)) << sm;
}

TEST(ClusterPlacement, SerialsComeAround) {
  ClusterPlacement places;
  EXPECT_EQ(keepers(places, kHalves, 0xfffffffe), 2);
  EXPECT_EQ(keepers(places, kWhole, 0xffffffff), 0);
  EXPECT_EQ(keepers(places, kHalves, 1), 0);
  EXPECT_EQ(keepers(places, kHalves, 7), 2);
}

TEST(ClusterPlacement, SmsThatItDoesNotKnow) {
  ClusterPlacement places;
  EXPECT_EQ(keepers(places, {ClusterPlacement::kSms, 0xffffffff}, 3), 0);
}

}  // namespace
}  // namespace unjam_test
