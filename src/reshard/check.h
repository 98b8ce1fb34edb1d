// Executes all ranks' plans on the numbers of elements. What each rank must hold is told here by
// its definition, index after index, not by what plans are made of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "reshard/rank_plan.h"
#include "reshard/request.h"

namespace unjam::reshard {

struct CheckReport {
  bool ok = false;
  std::string error;          // the first fault: rank, tensor, element
  std::int64_t elements = 0;  // that destinations want, each counted at every rank that wants it
};

// Local tensors of all ranks together; larger ones are refused by BadRequest.
inline constexpr std::int64_t kMostCheckedElements = std::int64_t{1} << 24;

// plans: of each rank. Whether each wanted element comes to its place exactly once, whether each
// rank has what it is to hand on, and whether a bundle fits its part of the staging memory.
CheckReport check(const Request& request, const std::vector<RankPlan>& plans);

// The plan's own; refuses what is too large before the ranks' plans are made.
CheckReport check(const Plan& plan);

}  // namespace unjam::reshard
