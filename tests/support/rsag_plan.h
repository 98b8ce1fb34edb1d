// Rsag plans whose hops lie passes apart, what they are lowered to, and who sends what to whom by
// them.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>

#include "plan/algorithms/rsag.h"
#include "plan/lower.h"
#include "program/schedule.h"

namespace unjam {

// What a rank is planned; with a root they differ by rank.
inline Plan mesh_plan(Kind kind, std::uint32_t slots, int ranks, int rank, int root = 0) {
  PlanRequest request;
  request.kind = kind;
  request.count = 1 << 20;
  request.ranks = ranks;
  request.rank = rank;
  request.root = root;
  PlanLimits limits;
  limits.device = Device::kCuda;  // whose executors take it
  limits.guaranteed_slots = slots;
  limits.lanes = 4;
  limits.overlap = true;
  const std::optional<Plan> plan = plan_rsag(request, limits);
  EXPECT_TRUE(plan.has_value());
  return plan.value_or(Plan{});
}

// The same as executors run it.
inline Schedule mesh_schedule(const Plan& plan, int ranks, int rank) {
  const PlanLimits limits;
  const Lowered lowered =
      lower(plan, ranks, rank, {512, 4, true, 20, limits.guaranteed_slot_bytes});
  EXPECT_EQ(lowered.why, NeedsEngine::kNo);
  return lowered.schedule;
}

// Whether a primitive's peers include group rank q.
inline bool is_among(const Plan& plan, Peers peers, int q) {
  const auto& all = plan.neighbours;
  const auto at = std::lower_bound(all.begin(), all.end(), q);
  if (at == all.end() || *at != q) return false;
  const auto k = static_cast<std::uint64_t>(at - all.begin());
  return is_set(peers) ? (plan.sets[set_of(peers)].neighbours >> k & 1) != 0 : peers == k;
}

// Whether a primitive of rank `me` sends something to another rank, or receives something from it.
inline bool sends_to(const Plan& plan, const Primitive& p, int me, int q) {
  if (q == me) return false;
  if ((p.flags & kScatter) != 0 && q == plan.geometry.empty_part) return false;
  return (p.flags & kSend) != 0 && is_among(plan, p.to, q);
}
inline bool receives_from(const Plan& plan, const Primitive& p, int me, int q) {
  if (q == me) return false;
  if ((p.flags & kCollect) != 0 && q == plan.geometry.empty_part) return false;
  return (p.flags & kRecv) != 0 && is_among(plan, p.from, q);
}

}  // namespace unjam
