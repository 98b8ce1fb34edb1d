// The PAT planner (parallel trees, as NCCL's algorithm of that name): all-gather, reduce-scatter,
// and one behind the other, all-reduce and barrier; each takes log2(hosts) hops between hosts. (J.
// Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", with distances from far to near; S. Jeaugey 2025, "PAT: a new algorithm
// for all-gather and reduce-scatter operations at scale".)
//
// An all-gather on a rail (host_table.h): host h's block comes to host h+x (modulo the hosts) from
// host h+x-d, where d is the lowest bit of x. In the step in which a rank receives it, it sends it
// on: to the hosts at distances d/2, d/4, …, 1, and to its mates. A reduce-scatter is the same
// backwards. Windows of blocks, and slots: docs/algorithms/pat.md, docs/internals/slots-enough.md.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinPatSlots = 2;  // guaranteed slots of an all-reduce, see above

bool pat_serves(Kind kind);

// Nothing if the request, the limits or the hosts are unsuitable; then *error (may be null) says
// why. Hosts must have as many ranks each.
std::optional<Plan> plan_pat(const PlanRequest& request, const PlanLimits& limits,
                             std::string* error = nullptr);

}  // namespace unjam
