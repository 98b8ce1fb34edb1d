// The paper's abstract model (section 3.2): tasks that one of some hosts sends to all of some
// others, each at full rate or not at all. Hosts are ports here, so that a host with several NICs
// counts as several.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/plan.h"

namespace unjam::reshard {

struct Task {
  std::vector<int> senders;    // ports: one of them sends
  std::vector<int> receivers;  // ports: all of them receive, the first ones hand on
  std::int64_t bytes = 0;
};

struct Tasks {
  int ports = 0;
  std::vector<Task> tasks;
};

// A task for each cell of each tensor that hosts need which hold nothing of it. Tasks have whole
// cells, and the first port of each host: so the paper plans.
Tasks tasks_of(const Plan& plan);
// As sends and receives without multicast: each rank that wants a cell gets a copy of its own.
Tasks copies_of(const Plan& plan);
// The plan's own bundles: one sender each; those that go the same way are one task.
Tasks bundles_as_tasks(const Plan& plan);

// Who sends each task, and in which order they begin.
struct Schedule {
  std::vector<int> sender;         // of each task, a port
  std::vector<std::size_t> order;  // of tasks
};

}  // namespace unjam::reshard
