// The PAT planner (parallel trees, as NCCL's algorithm of that name): all-gather, reduce-scatter,
// and one behind the other, all-reduce and barrier; each takes log2(hosts) hops between hosts.
// (J. Bruck et al. 1997, "Efficient algorithms for all-to-all communications in multiport
// message-passing systems", with distances from far to near; S. Jeaugey 2025, "PAT: a new algorithm
// for all-gather and reduce-scatter operations at scale".) All ranks' blocks travel at once, each
// down a tree of its own. Other than there, hosts may have several ranks, and each block is a
// message of its own.
//
// An all-gather on a rail (host_table.h). Host h's block comes to host h+x (modulo the hosts) from
// host h+x-d, where d is the lowest bit of x; so after as many hops as x has ones. In the step in
// which a rank receives it, it sends it on: to the hosts at distances d/2, d/4, …, 1, and to its
// mates. So each block is one primitive of its rail, and one for each other rail, in which it comes
// from the mate there.
//
// A reduce-scatter is the same backwards. A rank adds up what its mates and the hosts below it have
// of a block, and sends the sum on. An all-reduce is a reduce-scatter of the ranks' parts, then an
// all-gather. The number of hosts need not be a power of two.
//
// Where all are on one host, each rank counts as a host of its own.
//
// In which order blocks come. Let W be the largest power of two of at most all guaranteed slots.
// Windows of 2 W values of x follow each other. In a window far distances come first, so that it
// takes log2(2 W) hops, and a connector has W blocks at most. Without windows a connector of a near
// distance would have half as many blocks as there are hosts. So up to 2 W hosts take log2(hosts)
// hops, and more take about log2(2 W) for each window. Blocks of mates are taken as many blocks
// later as slots allow.
//
// Nobody waits in a circle. All ranks' programs have the same steps, and what a step waits for was
// sent in an earlier one. For room it waits until the peer has taken what was sent W blocks before,
// which is an earlier step, too. So one slot is enough, but for an all-reduce: there a rank sends
// results in the step in which peers take contributions of the same connector, and two are.
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
