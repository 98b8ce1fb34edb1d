// A plan as an invocation carries it.
#pragma once

#include <algorithm>

#include "engine/invocation.h"
#include "plan/plan.h"

namespace unjam {

// Of rank group_rank. The plan's tables must stay where they are while the invocation lasts.
inline void set_plan(const Plan& plan, std::uint16_t group_rank, Invocation* inv) {
  inv->program = plan.primitives.data();
  inv->num_primitives = static_cast<std::uint32_t>(plan.primitives.size());
  inv->neighbours = plan.neighbours.data();
  inv->num_neighbours = static_cast<std::uint16_t>(plan.neighbours.size());
  inv->neighbours_below = static_cast<std::uint16_t>(
      std::lower_bound(plan.neighbours.begin(), plan.neighbours.end(), group_rank) -
      plan.neighbours.begin());
  inv->sets = plan.sets.data();
  inv->num_sets = static_cast<std::uint8_t>(plan.sets.size());
  inv->wide_peers = plan.wide_peers.empty() ? nullptr : plan.wide_peers.data();
  inv->geometry = plan.geometry;
  inv->protocol = plan.protocol;
  inv->group_rank = group_rank;
}

}  // namespace unjam
