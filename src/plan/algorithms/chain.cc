#include "plan/algorithms/chain.h"

#include <algorithm>

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// What a rank does: the whole of its program. (In a group of one it is first and last.)
void write_link(const PlanRequest& request, Plan* plan) {
  const int ranks = request.ranks, rank = request.rank;
  const bool reducing = request.kind == Kind::kReduce;
  const int last = reducing ? request.root : (request.root + ranks - 1) % ranks;
  const int first = (last + 1) % ranks;
  unsigned flags = reducing ? kLocal | kContribute : kCopy;
  PeerRanks from = PeerRanks::nobody(), to = PeerRanks::nobody();
  if (rank == first) {
    flags |= kLocal;
  } else {
    if (reducing) flags |= kReduce;
    from = PeerRanks::one((rank + ranks - 1) % ranks);
  }
  if (rank != last) {
    if (!reducing) flags |= kIntoOutput;
    to = PeerRanks::one((rank + 1) % ranks);
  } else if (reducing) {
    flags |= kFinish | kCopy;
  }
  ProgramBuilder program(ranks, rank);
  program.add(flags, 0, from, to);
  program.write(plan);
}

// As a ring's, but for the slot that a ring keeps free where there is one only.
std::uint64_t host_chunk_bytes(const PlanLimits& limits) {
  return std::uint64_t{std::max(limits.guaranteed_slots - 1, 1u)} * limits.guaranteed_slot_bytes;
}

}  // namespace

bool chain_serves(Kind kind) { return whole_at_root(kind); }

std::optional<Plan> plan_chain(const PlanRequest& request, const PlanLimits& limits,
                               std::string* error) {
  const std::string problem = planner_error(request, limits, "chain", chain_serves(request.kind),
                                            kMinChainSlots, kMaxLinearRanks);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, 1);
  const bool cuda = limits.device == Device::kCuda;
  const bool is_short = cuda && request.ranks > 1 && request.ranks <= kShortChainRanks;
  // (As an rsag plan.)
  assign_bulk_lanes(request, limits, is_short ? 0 : 1, &plan.geometry);
  if (is_short) {
    plan.geometry.chunk = slot_chunk(limits, plan.geometry);
    even_chunks(&plan.geometry);
  } else {
    const std::uint64_t bytes =
        cuda ? chain_chunk_bytes(limits, plan.geometry) : host_chunk_bytes(limits);
    plan.geometry.chunk = chunk_elements(bytes, plan.geometry);
  }
  write_link(request, &plan);
  return plan;
}

}  // namespace unjam
