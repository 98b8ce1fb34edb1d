// Mesh plans whose hops lie passes apart, and who sends what to whom by them.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "plan/algorithms/mesh.h"

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
  limits.escape_slots = slots;
  limits.lanes = 4;
  limits.overlap = true;
  const std::optional<Plan> plan = plan_mesh(request, limits);
  EXPECT_TRUE(plan.has_value());
  return plan.value_or(Plan{});
}

// Whether a primitive of rank `me` sends something to another rank, or receives something from it.
inline bool sends_to(const Plan& plan, const Primitive& p, int me, int q) {
  if (q == me) return false;
  if ((p.flags & kScatter) != 0) return q != plan.geometry.empty_part;
  if ((p.flags & kSendAll) != 0) return (p.flags & kRecv) == 0 || q != p.recv_peer;
  return (p.flags & kSend) != 0 && q == p.send_peer;
}
inline bool receives_from(const Plan& plan, const Primitive& p, int me, int q) {
  if (q == me) return false;
  if ((p.flags & kCollect) != 0) return q != plan.geometry.empty_part;
  return (p.flags & kGather) != 0 || ((p.flags & kRecv) != 0 && q == p.recv_peer);
}

}  // namespace unjam
