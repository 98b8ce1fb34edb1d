// The planners of "On Optimizing the Communication of Model Parallelism", section 3.2, for
// comparison: they choose a sender and an order for whole tasks. What they find is timed by
// time_in_order().
#pragma once

#include <cstdint>

#include "reshard/multicast.h"

namespace unjam::reshard {

// The first sender of each task, in the tasks' order.
Schedule plan_naive(const Tasks& tasks);

// The sender that has least to send so far, task after task: "load balance only". sorted: the
// largest task first, as the paper says.
Schedule plan_by_size(const Tasks& tasks, bool sorted);

// Depth-first search over order and senders. A branch is left when the busiest port, with each task
// to come counted at its receivers, and at the sender where there is but one, cannot be done before
// the best schedule so far. Ends after `most_nodes` decisions with the best one found.
// Recursive: for thousands of tasks at most.
Schedule plan_depth_first(const Tasks& tasks, std::uint64_t most_nodes);

// Sets of tasks that meet nowhere, one after the other: each the largest of `tries` random ones.
// Equal seeds give equal schedules.
Schedule plan_greedy(const Tasks& tasks, int tries, std::uint64_t seed);

// The better one of the last two: what the paper calls "ours".
Schedule plan_paper(const Tasks& tasks, std::uint64_t most_nodes, int tries, std::uint64_t seed);

}  // namespace unjam::reshard
