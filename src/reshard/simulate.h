// How long tasks take in the paper's model: links of one rate and no latency, full duplex. Times
// are in bytes: of a port that is never idle, so many as go through it.
#pragma once

#include <cstdint>

#include "reshard/multicast.h"

namespace unjam::reshard {

// A task holds its sender and all its receivers until it ends, and begins as soon as it can, but
// not before those that stand before it at one of these.
double time_in_order(const Tasks& tasks, const Schedule& schedule);

// The bytes through the busiest port, in one direction. If tasks share ports by their sizes, that
// is how long they take all in flight: each port is served at least at its load over the busiest
// one's.
std::int64_t busiest_port(const Tasks& tasks, const std::vector<int>& sender);

// All tasks are under way from the beginning, and share the ports that they meet at: rates are
// max-min fair, weighted by the tasks' sizes (`by_size`) or equal. A chain's first host sends what
// its receivers, in their order, hand on, each as soon as it has `chunk` bytes; 0: at once.
double time_all_in_flight(const Tasks& tasks, const std::vector<int>& sender, std::int64_t chunk,
                          bool by_size);

}  // namespace unjam::reshard
