// Which algorithm serves a collective: a table over values on which all ranks of the group agree
// (kind, group size, bytes, the limits), and nothing else, so that all ranks choose alike.
#pragma once

#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

// The table's answer. The request must be valid.
Algorithm select_algorithm(const PlanRequest& request, const PlanLimits& limits);

// Whether the group's hosts let the algorithm serve: all but those along rails, which need as many
// ranks on each.
bool suits_hosts(Algorithm algorithm, const PlanRequest& request);

// The plan by the given algorithm (by algorithm_for_many(), where it does not serve the kind), or
// by the table's. Nothing if there is none; then *error (may be null) names the cause.
std::optional<Plan> make_plan(const PlanRequest& request, const PlanLimits& limits,
                              std::optional<Algorithm> algorithm, std::string* error = nullptr);

}  // namespace unjam
