// Runs of plans of cross-mesh resharding: every element at every rank that wants it, whatever the
// ranks' order. Who holds what is told index by index (tests/support/reshard_cases.h). What is
// refused, and ranks that die: tests/python/test_reshard_run.py.
#include "runtime/reshard_run.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/host/boxes.h"
#include "reshard/plan.h"
#include "tests/support/job.h"
#include "tests/support/reshard_cases.h"
#include "tests/support/reshard_mover.h"

namespace unjam_test {
namespace {

using unjam::BoxPlace;
using unjam::ReshardPlan;
namespace reshard = unjam::reshard;

// ---- boxes ----

TEST(Boxes, StridesOfEitherSignAreCopied) {
  std::vector<std::int32_t> from(4 * 6), to(3 * 4, -1);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::int32_t>(i);
  // Rows 3, 2, 1 and columns 0, 2, 4, transposed.
  const BoxPlace source{reinterpret_cast<std::uint8_t*>(&from[18]), DType::kInt32, {8, -24}};
  const BoxPlace target{reinterpret_cast<std::uint8_t*>(&to[1]), DType::kInt32, {16, 4}};
  unjam::copy_box(source, target, {3, 3});
  EXPECT_EQ(to, (std::vector<std::int32_t>{-1, 18, 12, 6, -1, 20, 14, 8, -1, 22, 16, 10}));
}

TEST(Boxes, NothingAndOneElementAreBoxes) {
  std::int64_t from = 7, to = 0;
  const BoxPlace source{reinterpret_cast<std::uint8_t*>(&from), DType::kInt64, {}};
  const BoxPlace target{reinterpret_cast<std::uint8_t*>(&to), DType::kInt64, {}};
  unjam::copy_box(source, target, {});
  EXPECT_EQ(to, 7);
  const BoxPlace nowhere{nullptr, DType::kInt64, {8, 8}};
  unjam::copy_box(nowhere, nowhere, {0, 5});
}

template <class From, class To>
To cast(From value, DType from, DType to) {
  To result{};
  unjam::copy_box({reinterpret_cast<std::uint8_t*>(&value), from, {}},
                  {reinterpret_cast<std::uint8_t*>(&result), to, {}}, {});
  return result;
}

TEST(Boxes, WhatATypeCannotHoldBecomesItsNearestValue) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ((cast<float, std::int8_t>(-7.9f, DType::kFloat32, DType::kInt8)), -7);
  EXPECT_EQ((cast<float, std::int8_t>(1e9f, DType::kFloat32, DType::kInt8)), 127);
  EXPECT_EQ((cast<float, std::uint8_t>(-3.0f, DType::kFloat32, DType::kUint8)), 0);
  EXPECT_EQ((cast<float, std::int64_t>(nan, DType::kFloat32, DType::kInt64)), 0);
  EXPECT_EQ((cast<double, std::int64_t>(1e300, DType::kFloat64, DType::kInt64)), INT64_MAX);
  EXPECT_EQ((cast<double, std::uint64_t>(0x1p63, DType::kFloat64, DType::kUint64)),
            std::uint64_t{1} << 63);
  EXPECT_EQ((cast<std::int64_t, double>(-5, DType::kInt64, DType::kFloat64)), -5.0);
  EXPECT_EQ((cast<float, std::uint16_t>(1.0f, DType::kFloat32, DType::kBfloat16)), 0x3f80);
  EXPECT_EQ((cast<std::uint16_t, double>(0x3c00, DType::kFloat16, DType::kFloat64)), 1.0);
}

// ---- runs ----

TEST(ReshardRun, RandomRequestsInCrossedOrder) { move_random_requests(kThreadSanitized ? 4 : 12); }

}  // namespace
}  // namespace unjam_test
