// A mesh plan whose hops lie passes apart: that of rank 1.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "plan/mesh.h"

namespace unjam {

inline Plan mesh_plan(Kind kind, std::uint32_t slots, int ranks) {
  PlanRequest request;
  request.kind = kind;
  request.count = 1 << 20;
  request.ranks = ranks;
  request.rank = 1;
  PlanLimits limits;
  limits.escape_slots = slots;
  limits.lanes = 4;
  limits.overlap = true;
  const std::optional<Plan> plan = plan_mesh(request, limits);
  EXPECT_TRUE(plan.has_value());
  return plan.value_or(Plan{});
}

}  // namespace unjam
