// Plans that are marked for copy engines (plan/carried.h): which, how alike they are on all ranks,
// and what becomes of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "base/kinds.h"
#include "device/cuda/host/bind.h"
#include "engine/set_plan.h"
#include "plan/carried.h"
#include "plan/check/checker.h"
#include "plan/common.h"
#include "plan/lower.h"
#include "plan/selector.h"

namespace unjam {
namespace {

constexpr std::uint64_t kFrom = std::uint64_t{64} << 20;
constexpr std::uint16_t kLanes = 32, kFewerLanes = 16;

PlanLimits cuda_limits(int ranks, bool carries = true) {
  PlanLimits limits;
  limits.device = Device::kCuda;
  limits.lanes = kLanes;
  limits.guaranteed_slots = 4;
  limits.guaranteed_slot_bytes = ranks == 2 ? 149824 : 74944;
  limits.pool_slot_bytes = 2 * limits.guaranteed_slot_bytes;
  limits.overlap = limits.lines = true;
  if (!carries) return limits;
  limits.carried_from = kFrom;
  limits.carried_lanes = kFewerLanes;
  return limits;
}
PlanRequest request_of(Kind kind, int ranks, std::uint64_t count, DType dtype = DType::kFloat32,
                       Op op = Op::kSum) {
  PlanRequest request;
  request.kind = kind;
  request.dtype = dtype;
  request.op = op;
  request.count = count;
  request.ranks = ranks;
  return request;
}
// All ranks'.
std::vector<Plan> plans_of(PlanRequest request, const PlanLimits& limits,
                           std::optional<Algorithm> algorithm = std::nullopt) {
  std::vector<Plan> plans;
  for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
    std::string error;
    std::optional<Plan> plan = make_plan(request, limits, algorithm, &error);
    EXPECT_TRUE(plan.has_value()) << error;
    if (plan.has_value()) plans.push_back(*std::move(plan));
  }
  return plans;
}
std::string title(const PlanRequest& x) {
  return std::string(to_string(x.kind)) + " " + to_string(x.op) + ", " + std::to_string(x.ranks) +
         " ranks, " + std::to_string(x.count) + " elements";
}
int marks(const Plan& plan) {
  int n = 0;
  for (const Primitive& p : plan.primitives) n += carrier_of(p) != Carrier::kBlocks ? 1 : 0;
  return n;
}
void expect_equal(const Plan& a, const Plan& b) {
  EXPECT_EQ(a.algorithm, b.algorithm);
  EXPECT_EQ(a.protocol, b.protocol);
  EXPECT_EQ(a.geometry.lanes, b.geometry.lanes);
  EXPECT_EQ(a.geometry.chunk, b.geometry.chunk);
  EXPECT_EQ(a.neighbours, b.neighbours);
  EXPECT_EQ(a.sets, b.sets);
  ASSERT_EQ(a.primitives.size(), b.primitives.size());
  for (std::size_t i = 0; i < a.primitives.size(); ++i) {
    EXPECT_EQ(a.primitives[i].flags, b.primitives[i].flags) << "primitive " << i;
    EXPECT_EQ(a.primitives[i].from, b.primitives[i].from) << "primitive " << i;
    EXPECT_EQ(a.primitives[i].to, b.primitives[i].to) << "primitive " << i;
    EXPECT_EQ(a.primitives[i].part, b.primitives[i].part) << "primitive " << i;
    EXPECT_EQ(a.primitives[i].lag, b.primitives[i].lag) << "primitive " << i;
  }
}

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                           Kind::kReduce,    Kind::kBroadcast, Kind::kAllToAll,
                           Kind::kGather,    Kind::kScatter};
constexpr Kind kServed[] = {Kind::kAllReduce, Kind::kReduceScatter, Kind::kReduce, Kind::kAllGather,
                            Kind::kBroadcast};
// What copies is carried where lanes are few.
std::uint16_t lanes_for(Kind kind) {
  return kind == Kind::kAllGather || kind == Kind::kBroadcast ? 8 : kFewerLanes;
}
PlanLimits limits_for(Kind kind, int ranks, bool carries = true) {
  PlanLimits limits = cuda_limits(ranks, carries);
  if (carries) limits.carried_lanes = lanes_for(kind);
  return limits;
}
// (Larger groups' vectors go from rank to rank, if one has them: chains are not marked.)
int most_ranks(Kind kind) { return has_root(kind) ? 2 : 8; }
bool is_served(Kind kind) { return std::ranges::find(kServed, kind) != std::end(kServed); }
constexpr Op kOps[] = {Op::kSum, Op::kProd, Op::kMin, Op::kMax};

// Whether the plan sends something that it has not received.
bool sends_own(const Plan& plan) {
  for (const Primitive& p : plan.primitives) {
    if ((p.flags & kSend) != 0 && (p.flags & kRecv) == 0) return true;
  }
  return false;
}
// A marked plan has a mark on what only sends, one at most; and fewer lanes, as many on all ranks.
void expect_marked(const PlanRequest& request, const PlanLimits& limits) {
  SCOPED_TRACE(title(request));
  int all = 0;
  for (const Plan& plan : plans_of(request, limits)) {
    EXPECT_EQ(plan.algorithm, Algorithm::kRsag);
    EXPECT_EQ(plan.protocol, Protocol::kSlot);
    EXPECT_EQ(plan.geometry.lanes, lanes_for(request.kind));
    EXPECT_EQ(marks(plan), sends_own(plan) ? 1 : 0);
    all += marks(plan);
    for (const Primitive& p : plan.primitives) {
      const bool only_sends = (p.flags & kSend) != 0 && (p.flags & kRecv) == 0;
      EXPECT_EQ(carrier_of(p) == Carrier::kCopyEngine, only_sends);
      EXPECT_TRUE(only_sends || carrier_of(p) == Carrier::kBlocks);
    }
  }
  EXPECT_GE(all, request.kind == Kind::kBroadcast ? 1 : request.ranks - 1);
}
// Nothing is otherwise than where copy engines carry nothing.
void expect_unmarked(const PlanRequest& request, const PlanLimits& limits,
                     std::optional<Algorithm> algorithm = std::nullopt) {
  SCOPED_TRACE(title(request));
  PlanLimits without = limits;
  without.carried_from = 0;
  without.carried_lanes = 0;
  const std::vector<Plan> plans = plans_of(request, limits, algorithm),
                          others = plans_of(request, without, algorithm);
  ASSERT_EQ(plans.size(), others.size());
  for (std::size_t r = 0; r < plans.size(); ++r) {
    EXPECT_EQ(marks(plans[r]), 0);
    expect_equal(plans[r], others[r]);
  }
}

TEST(CarriedPlans, LargeOnesAreMarked) {
  for (const Kind kind : kServed) {
    for (int ranks = 2; ranks <= most_ranks(kind); ++ranks) {
      for (const Op op : kOps) {
        expect_marked(request_of(kind, ranks, kFrom / 4, DType::kFloat32, op),
                      limits_for(kind, ranks));
      }
      expect_marked(request_of(kind, ranks, kFrom / 2, DType::kBfloat16), limits_for(kind, ranks));
      expect_marked(request_of(kind, ranks, kFrom, DType::kUint8, Op::kMax),
                    limits_for(kind, ranks));
      expect_marked(request_of(kind, ranks, kFrom / 4 * 16 + 7), limits_for(kind, ranks));
    }
  }
}

TEST(CarriedPlans, SmallerOnesAreNot) {
  for (const Kind kind : kServed) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      for (const std::uint64_t count : {std::uint64_t{1}, kFrom / 16, kFrom / 4 - 1}) {
        expect_unmarked(request_of(kind, ranks, count), limits_for(kind, ranks));
      }
    }
  }
}

TEST(CarriedPlans, OtherKindsAndAveragesAreNot) {
  for (int ranks = 2; ranks <= 8; ranks += 3) {
    for (const Kind kind : kKinds) {
      if (is_served(kind)) {
        for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
          const PlanRequest request = request_of(kind, ranks, kFrom, dtype, Op::kAvg);
          if (reduces(kind)) expect_unmarked(request, limits_for(kind, ranks));
        }
      } else {
        expect_unmarked(request_of(kind, ranks, kFrom), limits_for(kind, ranks));
      }
    }
  }
}

TEST(CarriedPlans, OtherAlgorithmsAndHostsAreNot) {
  for (const Kind kind : kServed) {
    const PlanRequest request = request_of(kind, 4, kFrom);
    expect_unmarked(request, cuda_limits(4), Algorithm::kRing);
    PlanLimits host = cuda_limits(4);
    host.device = Device::kHost;
    expect_unmarked(request, host);
    expect_unmarked(request, host, Algorithm::kRsag);
    expect_unmarked(request_of(kind, 1, kFrom), cuda_limits(1));
  }
}

TEST(CarriedPlans, WithoutLanesForThemNothingIsOtherwise) {
  for (const Kind kind : kKinds) {
    PlanLimits limits = cuda_limits(4);
    limits.carried_lanes = 0;
    expect_unmarked(request_of(kind, 4, kFrom), limits);
  }
}

// It is an upper bound.
TEST(CarriedPlans, HaveNoMoreLanesThanThereAre) {
  PlanLimits limits = cuda_limits(4);
  limits.lanes = 8;
  for (const Plan& plan : plans_of(request_of(Kind::kAllReduce, 4, kFrom), limits)) {
    EXPECT_EQ(plan.geometry.lanes, 8);
    EXPECT_EQ(marks(plan), 1);
  }
}

// The mark, and chunks that fill slots, are all that they have of their own.
TEST(CarriedPlans, AreElseThePlansOfSoManyLanes) {
  for (const Kind kind : kServed) {
    const PlanRequest request = request_of(kind, most_ranks(kind), kFrom);
    PlanLimits fewer = cuda_limits(most_ranks(kind), false);
    fewer.lanes = lanes_for(kind);
    const std::vector<Plan> others = plans_of(request, fewer, Algorithm::kRsag);
    std::vector<Plan> plans = plans_of(request, limits_for(kind, most_ranks(kind)));
    ASSERT_EQ(plans.size(), others.size());
    for (std::size_t r = 0; r < plans.size(); ++r) {
      Geometry& geometry = plans[r].geometry;
      EXPECT_EQ(geometry.chunk, chunk_elements(fewer.guaranteed_slot_bytes, geometry));
      EXPECT_EQ(geometry.chunk * dtype_bytes(geometry.dtype), fewer.guaranteed_slot_bytes);
      geometry.chunk = others[r].geometry.chunk;
      for (Primitive& p : plans[r].primitives) {
        p.flags = static_cast<std::uint16_t>(p.flags & ~unsigned{kCarrierBits});
      }
      expect_equal(plans[r], others[r]);
    }
  }
}

TEST(CarriedPlans, AreProved) {
  for (const Kind kind : kServed) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      PlanLimits limits = limits_for(kind, ranks);
      // (Less to prove, and as many loops of every sort.)
      limits.lanes = 4;
      limits.guaranteed_slot_bytes = 4096;
      limits.carried_from = 1 << 20;
      for (const std::uint64_t count : {std::uint64_t{1} << 18, (std::uint64_t{1} << 18) + 1237}) {
        const PlanRequest request = request_of(kind, ranks, count);
        SCOPED_TRACE(title(request));
        const std::vector<Plan> plans = plans_of(request, limits, Algorithm::kRsag);
        for (const Plan& plan : plans) EXPECT_EQ(marks(plan), sends_own(plan) ? 1 : 0);
        CheckOptions options;
        options.slots = static_cast<int>(limits.guaranteed_slots);
        options.slot_bytes = limits.guaranteed_slot_bytes;
        const CheckResult report = check_plans(request, plans, options);
        EXPECT_TRUE(report.ok) << report.error;
        EXPECT_LE(report.slots_needed, options.slots);
      }
    }
  }
}

// A mark costs lanes, so it is for plans that lanes run without the engine.
TEST(CarriedPlans, AreLoweredToStepsThatAreCarried) {
  for (const Kind kind : kServed) {
    for (int ranks = 2; ranks <= most_ranks(kind); ++ranks) {
      for (const std::uint64_t count : {kFrom / 4, kFrom / 4 + 1237, kFrom - 1}) {
        for (const bool carries : {true, false}) {
          const PlanRequest request = request_of(kind, ranks, count);
          SCOPED_TRACE(title(request));
          const PlanLimits limits = limits_for(kind, ranks, carries);
          LowerLimits lower_limits{512, 32, true, 20};
          lower_limits.slot_bytes = limits.guaranteed_slot_bytes;
          const std::vector<Plan> plans = plans_of(request, limits);
          for (int r = 0; r < ranks; ++r) {
            const auto at = static_cast<std::size_t>(r);
            const Lowered lowered = lower(plans[at], ranks, r, lower_limits);
            ASSERT_EQ(lowered.why, NeedsEngine::kNo) << to_string(lowered.why);
            ASSERT_TRUE(lowered.schedule.by_slots);
            EXPECT_EQ(lowered.schedule.steps.carried, carries && sends_own(plans[at]));
          }
        }
      }
    }
  }
}

// What is stored in the own output as well is carried where it lies there already.
TEST(CarriedPlans, WhatIsCopiedAsWellIsCarriedInPlaceAlone) {
  for (const Kind kind : kServed) {
    const int ranks = std::min(most_ranks(kind), 4);
    const PlanRequest request = request_of(kind, ranks, kFrom);
    const PlanLimits limits = limits_for(kind, ranks);
    LowerLimits lower_limits{512, 32, true, 20};
    lower_limits.slot_bytes = limits.guaranteed_slot_bytes;
    const std::vector<Plan> plans = plans_of(request, limits);
    std::vector<unsigned char> memory(64);
    for (int r = 0; r < ranks; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const Lowered lowered = lower(plans[at], ranks, r, lower_limits);
      Invocation inv;
      set_plan(plans[at], static_cast<std::uint16_t>(r), &inv);
      // (Addresses are compared, nothing is read.)
      inv.output = memory.data();
      const std::uint64_t own = kind == Kind::kAllGather ? at * kFrom * 4 : 0;
      for (const bool in_place : {true, false}) {
        inv.input = reinterpret_cast<const void*>(reinterpret_cast<std::uintptr_t>(inv.output) +
                                                  own + (in_place ? 0 : 4));
        StreamCall call;
        bind(lowered, inv, call);
        const bool copies = kind == Kind::kAllGather || kind == Kind::kBroadcast;
        EXPECT_EQ(call.steps.carried, lowered.schedule.steps.carried && (in_place || !copies))
            << title(request) << ", rank " << r;
      }
    }
  }
}

// With many lanes blocks copy faster.
TEST(CarriedPlans, WhatCopiesIsNotMarkedWithManyLanes) {
  for (const Kind kind : {Kind::kAllGather, Kind::kBroadcast}) {
    for (const std::uint16_t lanes : {9, 16, 32}) {
      PlanLimits limits = cuda_limits(2);
      limits.carried_lanes = lanes;
      expect_unmarked(request_of(kind, 2, kFrom), limits);
    }
  }
}

TEST(CarriedPlans, GroupsThatNeedTheEngineHaveNone) {
  for (const Kind kind : kServed) {
    for (const int ranks : {9, 16}) expect_unmarked(request_of(kind, ranks, kFrom), cuda_limits(9));
  }
}

}  // namespace
}  // namespace unjam
