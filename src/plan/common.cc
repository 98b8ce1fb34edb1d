#include "plan/common.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "plan/host_table.h"
#include "plan/registry.h"

namespace unjam {

std::string request_error(const PlanRequest& request, const PlanLimits& limits) {
  if (static_cast<int>(request.kind) >= kNumKinds) return "unknown kind of collective";
  if (static_cast<int>(request.dtype) >= kNumDTypes) return "unknown data type";
  if (static_cast<int>(request.op) >= kNumOps) return "unknown operator";
  if (request.ranks < 1 || request.ranks > kMaxGroupRanks) {
    return "a group has 1 to " + std::to_string(kMaxGroupRanks) + " ranks, not " +
           std::to_string(request.ranks);
  }
  const std::string in_group = " is not in a group of " + std::to_string(request.ranks) + " ranks";
  if (request.rank < 0 || request.rank >= request.ranks) {
    return "rank " + std::to_string(request.rank) + in_group;
  }
  if (request.kind == Kind::kSendRecv && request.ranks != 2) {
    return "a send_recv is between 2 ranks, not " + std::to_string(request.ranks);
  }
  if (has_root(request.kind) && (request.root < 0 || request.root >= request.ranks)) {
    return "root " + std::to_string(request.root) + in_group;
  }
  if (request.hosts != nullptr && request.hosts->ranks() != request.ranks) {
    return "the host table has " + std::to_string(request.hosts->ranks()) +
           " ranks, the group has " + std::to_string(request.ranks);
  }
  if (limits.lanes < 1) return "at least one lane is needed";
  if (limits.guaranteed_slots < 1) return "at least one guaranteed slot is needed";
  if (limits.guaranteed_slot_bytes == 0 || limits.guaranteed_slot_bytes % kSlotGranularity != 0) {
    return "slots must be a multiple of " + std::to_string(kSlotGranularity) + " bytes, not " +
           std::to_string(limits.guaranteed_slot_bytes);
  }
  // Offsets and rounded-up lengths must not overflow anywhere.
  const std::uint64_t most = (std::uint64_t{1} << 60) / dtype_bytes(request.dtype) /
                             static_cast<std::uint64_t>(request.ranks);
  if (request.count > most) {
    return "count " + std::to_string(request.count) + " is beyond what can be addressed";
  }
  return "";
}

Algorithm algorithm_for_many(Kind kind) {
  for (const Algorithm algorithm : {Algorithm::kRing, Algorithm::kChain}) {
    if (row_of(algorithm).serves(kind)) return algorithm;
  }
  return Algorithm::kPairwise;
}

namespace {

// Behind what an algorithm cannot do for so many ranks: one that can, if there is any.
std::string cure(Kind kind, int ranks) {
  const Algorithm other =
      ranks <= kMaxLinearRanks ? algorithm_for_many(kind) : Algorithm::kDoubleBinaryTree;
  return row_of(other).serves(kind) ? std::string(": use ") + row_of(other).name : "";
}

}  // namespace

std::string planner_error(const PlanRequest& request, const PlanLimits& limits, const char* name,
                          bool serves, std::uint32_t slots, int most_ranks) {
  const std::string problem = request_error(request, limits);
  if (!problem.empty()) return problem;
  const std::string plans = std::string(name) + " plans ";
  if (request.ranks > most_ranks) {
    return plans + "serve at most " + std::to_string(most_ranks) + " ranks, this group has " +
           std::to_string(request.ranks) + cure(request.kind, request.ranks);
  }
  if (limits.guaranteed_slots < slots) {
    return plans + "need at least " + std::to_string(slots) + " guaranteed slots, not " +
           std::to_string(limits.guaranteed_slots);
  }
  return serves ? ""
                : plans + "do not serve " + to_string(request.kind) +
                      cure(request.kind, request.ranks);
}

std::string several_peers_error(const PlanRequest& request, const PlanLimits& limits,
                                const char* name, bool serves, std::uint32_t slots) {
  return planner_error(request, limits, name, serves, slots, kMaxRanksInSets);
}

std::string rails_error(const PlanRequest& request, const char* name) {
  if (request.hosts == nullptr) return "";
  const std::string irregularity = request.hosts->irregularity();
  if (irregularity.empty()) return "";
  return std::string(name) + " plans need as many ranks on each host: " + irregularity +
         cure(request.kind, request.ranks);
}

std::uint64_t vector_elements(const PlanRequest& request) {
  return blocked(request.kind) ? request.count * static_cast<std::uint64_t>(request.ranks)
                               : request.count;
}

Geometry make_geometry(const PlanRequest& request, std::uint32_t parts) {
  Geometry geometry;
  geometry.kind = request.kind;
  geometry.dtype = request.dtype;
  geometry.count = request.count;
  geometry.parts = parts;
  return geometry;
}

void assign_bulk_lanes(const PlanRequest& request, const PlanLimits& limits,
                       std::uint16_t first_bulk, Geometry* geometry) {
  geometry->first_lane = 0;
  geometry->lanes = 1;
  if (limits.lanes == 1) return;
  const std::uint64_t element_bytes = dtype_bytes(request.dtype);
  const std::uint64_t part_bytes = geometry->part(geometry->longest_part()).length * element_bytes;
  const std::uint64_t slot_bytes = limits.guaranteed_slot_bytes;
  if (part_bytes <= slot_bytes && vector_elements(request) * element_bytes <= kLatencyLaneBytes) {
    return;
  }
  // What is worth a lane: on the host a slot, where lanes share cores; on a GPU less, where they
  // are there and a slice's bytes take as long as all that is done about it.
  constexpr std::uint64_t kBlockGrain = 32 * 1024;
  const std::uint64_t grain =
      limits.device == Device::kCuda ? std::min(slot_bytes, kBlockGrain) : slot_bytes;
  const std::uint64_t useful = std::max<std::uint64_t>(1, part_bytes / grain);
  geometry->first_lane = first_bulk;
  const std::uint64_t lanes = limits.lanes - std::uint64_t{first_bulk};
  geometry->lanes = static_cast<std::uint16_t>(std::min(useful, lanes));
}

std::uint64_t chain_chunk_bytes(const PlanLimits& limits, const Geometry& geometry) {
  constexpr std::uint64_t kMostSlots = 8, kFewestChunks = 16;
  const std::uint64_t slot = limits.guaranteed_slot_bytes;
  const std::uint64_t lane =
      geometry.lane_part(0, geometry.first_lane).length * dtype_bytes(geometry.dtype);
  const std::uint64_t most = std::max(slot, kMostSlots * limits.pool_slot_bytes);
  return std::clamp(lane / kFewestChunks / slot * slot, slot, most);
}

std::uint32_t chunk_elements(std::uint64_t bytes, const Geometry& geometry) {
  const std::uint64_t align = geometry.align();
  const std::uint64_t elements = std::min<std::uint64_t>(bytes / dtype_bytes(geometry.dtype),
                                                         std::numeric_limits<std::uint32_t>::max());
  return static_cast<std::uint32_t>(elements / align * align);
}

std::uint32_t slot_chunk(const PlanLimits& limits, const Geometry& geometry) {
  const std::uint32_t slot = limits.guaranteed_slot_bytes;
  std::uint32_t bytes = slot;
  if (limits.device == Device::kCuda) {
    // Reductions are faster by whole turns of their movers, broadcasts by powers of two.
    bytes = std::bit_floor(slot);
    if (geometry.kind != Kind::kBroadcast) {
      bytes = std::max(bytes, slot / kSlotTurnBytes * kSlotTurnBytes);
    }
  }
  return chunk_elements(bytes, geometry);
}

void even_chunks(Geometry* geometry) {
  // Less takes as long as what is done about it. (A GPU's line of memory is 128 bytes.)
  constexpr std::uint64_t kWorthwhileBytes = 32 * 1024, kEvenBytes = 128;
  const std::uint64_t element = dtype_bytes(geometry->dtype);
  const std::uint64_t stretch =
      geometry->lane_part(geometry->longest_part(), geometry->first_lane).length;
  const std::uint64_t half = std::max((stretch + 1) / 2 * element + 15, kWorthwhileBytes);
  if (half < geometry->chunk * element) {
    geometry->chunk = chunk_elements(half, *geometry);
    return;
  }
  const std::uint64_t chunks = (stretch + geometry->chunk - 1) / geometry->chunk;
  if (chunks < 2) return;
  const std::uint64_t even = (stretch + chunks - 1) / chunks * element;
  const std::uint64_t bytes = (even + kEvenBytes - 1) / kEvenBytes * kEvenBytes;
  if (bytes < geometry->chunk * element) geometry->chunk = chunk_elements(bytes, *geometry);
}

std::uint64_t message_bytes(const Geometry& geometry) {
  return geometry.part(0).length * dtype_bytes(geometry.dtype);
}

Protocol packet_protocol(const PlanLimits& limits, std::uint64_t message_bytes,
                         std::uint64_t least_of_lines) {
  const bool lines =
      limits.lines && limits.device == Device::kCuda && message_bytes >= least_of_lines;
  return lines ? Protocol::kLine : Protocol::kPacket;
}

std::uint16_t packet_lanes(const PlanLimits& limits, const Plan& plan, std::uint64_t units) {
  std::uint64_t lane = kPacketMovers * units * kPacketUnitBytes;
  // One thread in so many has the flags.
  if (plan.protocol == Protocol::kLine) lane = lane / kLineBytes * kLineDataBytes;
  const std::uint64_t lanes = (message_bytes(plan.geometry) + lane - 1) / lane;
  return static_cast<std::uint16_t>(std::clamp<std::uint64_t>(lanes, 1, limits.lanes));
}

std::uint16_t leave_room(const PlanRequest& request, const PlanLimits& limits, const Plan& plan,
                         std::uint64_t most_units) {
  constexpr int kManyLanes = 24, kFewRanks = 4;
  const std::uint16_t half = limits.lanes / 2;
  const Geometry& g = plan.geometry;
  if (request.ranks > kFewRanks || limits.lanes < kManyLanes || g.lanes <= half) return g.lanes;
  const std::uint64_t carried = half * std::uint64_t{g.chunk} * dtype_bytes(g.dtype);
  const bool fits = message_bytes(g) <= carried && packet_lanes(limits, plan, most_units) <= half;
  return fits ? half : g.lanes;
}

}  // namespace unjam
