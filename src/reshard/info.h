// Plans as JSON, for reports.
#pragma once

#include <cstdint>
#include <string>

#include "reshard/check.h"
#include "reshard/plan.h"

namespace unjam::reshard {

std::string hex(std::uint64_t digest);
std::string plan_json(const Plan& plan, bool list);
std::string rank_json(const Plan& plan, std::int32_t rank);
std::string check_json(const CheckReport& report);

// The plan beside those of the paper's planners.
struct Effort {
  std::uint64_t nodes = 0;
  int tries = 1;
  std::uint64_t seed = 0;
};
std::string comparison_json(const Plan& plan, const Effort& effort);

}  // namespace unjam::reshard
