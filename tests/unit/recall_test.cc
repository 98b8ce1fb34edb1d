#include "device/cuda/host/recall.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

namespace unjam {
namespace {

// When looks are due until `end`, asked every `step`.
std::vector<std::uint64_t> looks(Recall& recall, std::uint64_t begin, std::uint64_t end,
                                 std::uint64_t step) {
  std::vector<std::uint64_t> due;
  for (std::uint64_t now = begin; now < end; now += step) {
    if (recall.is_due(now)) due.push_back(now);
  }
  return due;
}

constexpr std::uint64_t kMs = 1'000'000;

TEST(Recall, NobodyPokedNothingIsDue) {
  Recall recall;
  EXPECT_TRUE(looks(recall, 0, 5000 * kMs, kMs).empty());
}

TEST(Recall, FourLooksAndNoMore) {
  Recall recall;
  recall.begin(7 * kMs);
  EXPECT_EQ(looks(recall, 7 * kMs, 20'000 * kMs, kMs),
            (std::vector<std::uint64_t>{8 * kMs, 17 * kMs, 107 * kMs, 1007 * kMs}));
}

TEST(Recall, WhoAsksLateGetsOneLookForAllThatAreOverdue) {
  Recall recall;
  recall.begin(0);
  EXPECT_EQ(looks(recall, 50 * kMs, 20'000 * kMs, kMs),
            (std::vector<std::uint64_t>{50 * kMs, 100 * kMs, 1000 * kMs}));
  recall.begin(30'000 * kMs);
  EXPECT_EQ(looks(recall, 40'000 * kMs, 60'000 * kMs, kMs),
            (std::vector<std::uint64_t>{40'000 * kMs}));
}

TEST(Recall, APokeBeginsAnew) {
  Recall recall;
  recall.begin(0);
  EXPECT_EQ(looks(recall, 0, 5 * kMs, kMs), (std::vector<std::uint64_t>{kMs}));
  recall.begin(5 * kMs);
  EXPECT_EQ(looks(recall, 5 * kMs, 10 * kMs, kMs), (std::vector<std::uint64_t>{6 * kMs}));
}

}  // namespace
}  // namespace unjam
