// The hierarchical planner: all-reduce and barrier in two levels, for groups that span hosts. In a
// host a reduce-scatter, between hosts trees, in a host an all-gather. (NCCL's trees go between
// hosts, too, with a chain in each; rails are what UCC's split-rail all-reduce has.)
//
// There is a part for each rail (host_table.h), which its ranks own. A rank adds up its mates'
// contributions and its children's sums in one step, so 16-bit sums are rounded once a host. Rails
// take turns with the two trees of trees.h. Where hosts have one rank each there is one rail, and
// the trees have lanes of their own, as in double_binary_tree.h. On the way down a rank lags by its
// host's depth in that part's tree. Two slots are enough: docs/internals/slots-enough.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinHierarchicalSlots = 2;  // guaranteed slots, see above

bool hierarchical_serves(Kind kind);

// Nothing if the request, the limits or the hosts are unsuitable; then *error (may be null) says
// why. Hosts must have as many ranks each.
std::optional<Plan> plan_hierarchical(const PlanRequest& request, const PlanLimits& limits,
                                      std::string* error = nullptr);

}  // namespace unjam
