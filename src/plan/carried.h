// Which primitives of a plan are marked for copy engines (Carrier): what only sends, of large
// vectors through slots. So the plan's blocks have what comes alone, for which fewer may do.
#pragma once

#include "plan/plan.h"

namespace unjam {

// Whether plans for it are, by that algorithm. The same on all ranks.
bool may_be_carried(const PlanRequest& request, const PlanLimits& limits, Algorithm algorithm);

// What such plans are made by: fewer lanes.
PlanLimits carried_limits(const PlanLimits& limits);

// Marks the plan's primitives. Its chunks fill slots, so that what copy engines move of several,
// one behind the other, is one copy where these have no gaps between them.
void mark_carried(const PlanLimits& limits, Plan* plan);

}  // namespace unjam
