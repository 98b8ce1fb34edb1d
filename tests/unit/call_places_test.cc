// When a call's blocks keep the next call's from coming early (device/cuda/call_places.h).
#include "device/cuda/call_places.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace unjam_test {
namespace {

using namespace unjam;  // NOLINT: what is tested

// How many of its blocks keep the next call's, of a call that has them on these SMs.
int keepers(CallPlaces& places, const std::vector<std::uint32_t>& sms, std::uint32_t call) {
  for (const std::uint32_t sm : sms) places.note(sm, call);
  int n = 0;
  for (const std::uint32_t sm : sms) n += places.keeps_next(sm, call) ? 1 : 0;
  return n;
}

const std::vector<std::uint32_t> kWhole = {0, 1, 16, 17, 130, 131}, kAlsoWhole = {2, 3, 18, 19},
                                 kHalves = {0, 1, 17, 2, 4, 5};

TEST(CallPlaces, WhereTpcsAreWholeNothingIsKept) {
  CallPlaces places;
  for (std::uint32_t call = 1; call < 40; ++call) {
    EXPECT_EQ(keepers(places, call % 2 != 0 ? kWhole : kAlsoWhole, call), 0) << call;
  }
}

TEST(CallPlaces, BlocksOnHalvesKeepTheNextCalls) {
  CallPlaces places;
  EXPECT_EQ(keepers(places, kHalves, 1), 2);
  EXPECT_EQ(keepers(places, kWhole, 2), 0);
  // The other half had a block of a call before.
  EXPECT_EQ(keepers(places, {16, 0, 1}, 100), 1);
}

TEST(CallPlaces, NotAgainSoon) {
  CallPlaces places;
  EXPECT_EQ(keepers(places, kHalves, 5), 2);
  for (std::uint32_t call = 6; call <= 13; ++call) {
    EXPECT_EQ(keepers(places, kHalves, call), 0) << call;
  }
  EXPECT_EQ(keepers(places, kHalves, 14), 2);
  EXPECT_EQ(keepers(places, kHalves, 15), 0);
}

TEST(CallPlaces, SerialsComeAround) {
  CallPlaces places;
  EXPECT_EQ(keepers(places, kHalves, 0xfffffffe), 2);
  EXPECT_EQ(keepers(places, kHalves, 1), 0);
  EXPECT_EQ(keepers(places, kHalves, 7), 2);
}

TEST(CallPlaces, SmsThatItDoesNotKnow) {
  CallPlaces places;
  EXPECT_EQ(keepers(places, {CallPlaces::kSms, 0xffffffff}, 3), 0);
}

}  // namespace
}  // namespace unjam_test
