// The double binary tree planner: all-reduce, barrier, broadcast and reduce, in 2 log2 n hops. (P.
// Sanders, J. Speck, J. L. Traff, "Two-tree algorithms for full bandwidth broadcast, reduction and
// scan", 2009; the trees: trees.h.)
//
// One half of the vector goes through one tree, the other half through the other, in which the
// first one's leaves are inside. The trees have lanes of their own (Geometry::by_lane). With one
// lane there is one tree. A root stands outside of both. Up, a rank adds its contribution to its
// children's sums, which come as a set; down, it copies the result and sends it to its children, a
// set. On the way down it lags by its depth, so all chunks are under way at once. One slot is
// enough: docs/internals/slots-enough.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"
#include "plan/program_builder.h"

namespace unjam {

// One is enough, see above; two hide a hop.
inline constexpr std::uint32_t kMinDoubleTreeSlots = 1;

bool double_binary_tree_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_double_binary_tree(const PlanRequest& request, const PlanLimits& limits,
                                            std::string* error = nullptr);

// The same rank's program by itself, along one tree or two: of any number of ranks, for those that
// no plan can name (plan/clock). The request must be valid but for that.
ProgramBuilder double_binary_tree_program(const PlanRequest& request, int trees);

}  // namespace unjam
