// The plans of all ranks of a group.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/selector.h"

namespace unjam_test {

// The request's `rank` is not looked at. Nothing, and a failure, if a rank has none.
inline std::vector<unjam::Plan> make_plans(unjam::PlanRequest request,
                                           const unjam::PlanLimits& limits,
                                           std::optional<unjam::Algorithm> algorithm) {
  std::vector<unjam::Plan> plans;
  for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
    std::string error;
    std::optional<unjam::Plan> plan = unjam::make_plan(request, limits, algorithm, &error);
    EXPECT_TRUE(plan.has_value()) << error;
    if (!plan) return {};
    plans.push_back(*std::move(plan));
  }
  return plans;
}

}  // namespace unjam_test
