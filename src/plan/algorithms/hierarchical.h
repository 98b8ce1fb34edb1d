// The hierarchical planner: all-reduce and barrier in two levels, for groups that span hosts. In a
// host a reduce-scatter, between hosts trees, in a host an all-gather. (NCCL's trees go between
// hosts, too, with a chain in each; rails are what UCC's split-rail all-reduce has.)
//
// There is a part for each rail (host_table.h), so each rank owns its rail's part. It gets its
// mates' contributions to that part, adds its own, and sends the sum up a tree over its rail; the
// result comes down, and each rank passes it on to its mates as well. Rails take turns with the two
// trees of trees.h, so that hosts that are inside in one are leaves in the other. Where hosts have
// one rank each there is one rail, and the trees have lanes of their own, as in
// double_binary_tree.h.
//
// In one step a rank adds up its mates' contributions and its children's sums, so 16-bit sums are
// rounded once a host. A call makes 2 log2(hosts) hops between hosts and two in them.
//
// On the way down a rank lags by its host's depth in that part's tree: it works on the chunk that
// its parent has sent a pass before. In a pass a rank sends its mates their contributions; then
// adds up its own part; then passes on the own part's result, and collects the others from its
// mates. Nobody waits in a circle, with two slots. Take the rank that is least far (pass; step; of
// those that add up, deeper hosts first). Who adds up waits for mates at the first step, and for
// deeper hosts. Who passes on waits for what was sent a pass before; who collects, for mates that
// pass on. Whom a rank waits for to make room has yet to take what came two slices before, which it
// does in an earlier step or pass. With one slot that is not so of tops: they send results while
// the contributions before them are taken in the same step.
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
