// Plans and check results as text, for people and for the C API.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "plan/check/checker.h"
#include "plan/plan.h"

namespace unjam {

// Of a plan's i-th primitive, in a group of so many ranks: "recv_reduce_copy_send",
// "gather_reduce_copy", "copy_send_all", "send", …
std::string primitive_name(const Plan& plan, std::size_t i, int ranks);

// "recv_reduce_send part 3 from 1 to 3"
std::string describe(const Plan& plan, std::size_t i, int ranks);

// One JSON object. plans: of all ranks; with list the primitives of each are in it.
std::string check_json(const PlanRequest& request, const std::vector<Plan>& plans,
                       const CheckResult& result, bool list);

// Plans the collective for all ranks (request.rank is ignored) and checks the plans with `slots`
// guaranteed slots per connector; slots <= 0: as many as the plans were made for
// (limits.guaranteed_slots). *ok (may be null): the plans exist and hold. Always a JSON object with
// at least "ok" and "error".
std::string plan_check_json(const PlanRequest& request, const PlanLimits& limits,
                            std::optional<Algorithm> algorithm, int slots, bool list, bool* ok);

}  // namespace unjam
