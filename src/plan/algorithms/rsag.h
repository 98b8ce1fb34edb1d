// The rsag planner: reduce-scatter and all-gather straight between all pairs, through slots, in two
// hops whatever the group's size, for groups of at most 64 ranks (docs/algorithms/rsag.md). Rank p
// owns part p: everybody sends it their contribution (scatter), it adds them in ascending order of
// rank, so that all ranks hold the same bits, and sends the result to everybody (collect). With a
// root the others own the data: the root's part is empty (Geometry::empty_part).
//
// Overlap: the hops of a chunk lie d passes apart (Primitive's lag). 2d + 2 slots are enough, or d
// + 1 for kinds of one hop: docs/internals/plan-checker.md. Together (PlanLimits::together): a
// scatter and a collect are one slice (kWithNext), and a pass adds chunk l-d-1, then scatters chunk
// l and collects chunk l-2d-1: the order in which data come. Plans with a root are never so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinRsagSlots = 2;  // guaranteed slots, see above

// How many passes a chunk's hops lie apart with so many guaranteed slots, see above; 0: none.
constexpr std::uint32_t overlap_distance(std::uint32_t hops, std::uint32_t slots) {
  const std::uint32_t most = hops == 2 ? slots / 2 - 1 : slots - 1;
  return most < 2 ? most : 2;
}

bool rsag_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_rsag(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error = nullptr);

}  // namespace unjam
