// The chain planner: broadcast and reduce for groups of up to 1,024 ranks. The ranks stand in a
// row, in group order round the root: each receives from the one before it and sends to the one
// after it. A broadcast's row begins with the root, a reduction's ends with it. There is one part,
// the vector; the parallelism is the pipeline of slices.
//
// Chains have no cycle: the rank at the end only receives, so something can always move, and one
// slot is enough whatever the chunk (the checker's slots_needed). A chunk is sent slice by slice,
// so a larger one costs no pipelining, and it makes fewer passes over the program. On the host it
// is as large as a ring's. On GPUs it is up to eight pool slots, so that slices can be large;
// at least 16 chunks a lane keep the pipeline full. The engine cuts slices at the slots that it
// gets. Chunks of few ranks are a slot, so that their calls need no engine
// (kernels/call_by_slots.cuh).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "plan/plan.h"

namespace unjam {

inline constexpr std::uint32_t kMinChainSlots = 1;  // guaranteed slots, see above

// Among so many ranks at most, on GPUs, a chain's last rank waits no longer than an rsag plan's:
// each GPU sends to one other, and receives from one, which links are faster at.
inline constexpr int kShortChainRanks = 4;

bool chain_serves(Kind kind);

// Nothing if the request or the limits are unsuitable; then *error (may be null) says why.
std::optional<Plan> plan_chain(const PlanRequest& request, const PlanLimits& limits,
                               std::string* error = nullptr);

}  // namespace unjam
