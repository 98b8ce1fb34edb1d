// A plan: what one rank does for one collective, and how its data is cut. Made by a planner (one
// file an algorithm), proved by the checker, interpreted by the engine.
#pragma once

#include <cstdint>
#include <vector>

#include "base/kinds.h"
#include "base/types.h"
#include "program/geometry.h"
#include "program/primitive.h"

namespace unjam {

class HostTable;

// What a planner may look at: values on which all ranks of the group agree, and the own rank.
struct PlanRequest {
  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  std::uint64_t count = 0;  // as in the C API
  int ranks = 1;            // group size
  int rank = 0;             // group rank
  int root = 0;             // group rank, for kinds with a root; of a send_recv the sender
  // Which host each rank of the group is on; null: all are on one. Not owned.
  const HostTable* hosts = nullptr;
};

// Agreed limits of the transport.
struct PlanLimits {
  std::uint32_t guaranteed_slots = 5;          // guaranteed slots of every connector
  std::uint32_t guaranteed_slot_bytes = 8192;  // payload of one
  std::uint16_t lanes = 1;                     // blocks of a rank
  Device device = Device::kHost;               // of all ranks
  std::uint32_t pool_slot_bytes = 0;           // payload of a larger slot; 0: there are none
  bool overlap = false;   // hops of a chunk lie passes apart, where slots suffice
  bool together = false;  // and slices to and from several peers are one
  bool lines = false;     // long packets of GPUs are lines
  // What plans of one loop of packets have of a slot: guaranteed_slot_bytes, unless few lanes have
  // larger ones for their slices (runtime/settings.h). 0: all.
  std::uint32_t packet_slot_bytes = 0;
  // From so many bytes of a vector on (count × element size) copy engines carry what is only sent,
  // in plans of at most so many lanes. 0 lanes: there are none that could.
  std::uint64_t carried_from = 0;
  std::uint16_t carried_lanes = 0;
  // Ranks of the job for each core that they may run on, rounded up; on hosts the selector asks.
  std::uint16_t ranks_a_core = 1;
};

struct Plan {
  Algorithm algorithm = Algorithm::kRing;  // whose planner made it: make_plan() says it
  Protocol protocol = Protocol::kSlot;
  Geometry geometry;
  // One pass; the engine repeats it geometry.loops(lane) times, and as often more as the last one
  // lags.
  std::vector<Primitive> primitives;
  // The members that the program has to do with: group ranks, ascending, the rank itself not among
  // them. Primitives name them by their places here; and sets of them, at most kMostSets.
  std::vector<std::uint16_t> neighbours;
  std::vector<PeerSet> sets;
  // Of each primitive, where there are more neighbours than codes for one (kWidePeer); else empty.
  std::vector<WidePeers> wide_peers;
};

// The group ranks in one of the plan's sets, ascending.
std::vector<std::uint16_t> ranks_in(const Plan& plan, const PeerSet& set);

// The group ranks that the plan's i-th primitive receives from, or sends to, ascending. Of a code
// that says nobody, or what the plan has not, nobody.
std::vector<int> ranks_received_from(const Plan& plan, std::size_t i);
std::vector<int> ranks_sent_to(const Plan& plan, std::size_t i);

}  // namespace unjam
