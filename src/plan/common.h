// What all planners share: which requests make sense, how large their data is, which lanes carry
// it.
#pragma once

#include <cstdint>
#include <string>

#include "base/hash.h"
#include "plan/plan.h"

namespace unjam {

// With several lanes, lane 0 is kept for latency: one-shot plans, and ring plans whose data is at
// most this much and of which every part fits in one slot, so that nothing on this lane takes long.
inline constexpr std::uint64_t kLatencyLaneBytes = 64 * 1024;

// "" if a plan can be made for the request within the limits, else what is wrong with them.
std::string request_error(const PlanRequest& request, const PlanLimits& limits);

// The algorithm that serves the kind in a group of any size: ring; chain, where the whole vector is
// at a root; or pairwise, where each piece of data goes from one rank to one other.
Algorithm algorithm_for_many(Kind kind);

// The same for a planner: what it calls itself, whether it serves the kind, how many guaranteed
// slots it needs, and for how many ranks it plans at most.
std::string planner_error(const PlanRequest& request, const PlanLimits& limits, const char* name,
                          bool serves, std::uint32_t slots, int most_ranks = kMaxGroupRanks);
// And for one whose primitives have several peers, which do not serve groups of any size.
std::string several_peers_error(const PlanRequest& request, const PlanLimits& limits,
                                const char* name, bool serves, std::uint32_t slots);

// And for one that goes along rails (host_table.h): "" if the group's hosts have as many ranks
// each.
std::string rails_error(const PlanRequest& request, const char* name);

// Elements of the whole vector: blocks of all ranks together for block-structured kinds.
std::uint64_t vector_elements(const PlanRequest& request);

// A geometry with kind, dtype, count and parts of the request; chunk and lanes are still to be set.
Geometry make_geometry(const PlanRequest& request, std::uint32_t parts);

// The lanes for bulk data: lanes first_bulk…, as many as get at least one slot full of each part;
// lane 0 for little data and where it is the only one. The geometry's parts must be set.
void assign_bulk_lanes(const PlanRequest& request, const PlanLimits& limits,
                       std::uint16_t first_bulk, Geometry* geometry);

// Threads of a GPU's block that move packets where it runs without the engine (exec/packets), by
// default, and what one of them moves at once.
inline constexpr std::uint64_t kPacketMovers = 480, kPacketUnitBytes = 8;
// Messages from this size on go as lines, if any do; and those that each rank has for all others in
// one hop, where lines are worth it sooner than where only one rank has a message.
inline constexpr std::uint64_t kLeastLineBytes = 64 << 10, kLeastLineToAllBytes = 32 << 10;

// The first lane for a plan of few lanes on a GPU, of `all`: by the key's tag, so that calls under
// different keys are in each other's way as little as there are lanes. Places of such a plan share
// no lane, so that no lane has more of them than others; they begin with the last lanes, for the
// first one has submissions to hand on. (On the host the first lane is every short call's: others
// would wake more threads.)
constexpr std::uint16_t spread_lanes(std::uint64_t tag, std::uint32_t lanes, std::uint32_t all) {
  if (lanes >= all) return 0;
  return static_cast<std::uint16_t>(all - lanes * (1 + mix64(tag) % (all / lanes)));
}

// How packets of a message of so many bytes are laid out. Lines halve what goes through links, but
// who stores one has to be a warp together, and so has who looks for it.
Protocol packet_protocol(const PlanLimits& limits, std::uint64_t message_bytes,
                         std::uint64_t least_of_lines = kLeastLineBytes);
// A message is a part.
std::uint64_t message_bytes(const Geometry& geometry);

// Lanes of packets on a GPU: as many as have `units` of each message for each thread; one for no
// data.
std::uint16_t packet_lanes(const PlanLimits& limits, const Plan& plan, std::uint64_t units);

// The plan's lanes, or half of all, if these are fewer and carry the message in one loop with at
// most so many units a thread: all of them would leave no room for another key's call
// (spread_lanes()), and beside streams each lane takes its time for each call. (Among few ranks:
// with more a thread has as many units of each, and nobody has measured it.)
std::uint16_t leave_room(const PlanRequest& request, const PlanLimits& limits, const Plan& plan,
                         std::uint64_t most_units);

// The chunk of a plan without a cycle on a GPU: large slices through pool slots, but chunks
// enough that all ranks of a chain have something to do. The geometry's lanes must be set.
std::uint64_t chain_chunk_bytes(const PlanLimits& limits, const Geometry& geometry);

// A chunk of one guaranteed slot; on a GPU, whose slots' size may be for lines, as many whole turns
// or a power of two, whichever is more, of broadcasts the latter.
std::uint32_t slot_chunk(const PlanLimits& limits, const Geometry& geometry);

// Makes a lane's chunks nearly alike: as many as it has anyhow, for a last one that is short takes
// as long as what is done about it. Where its stretch is one chunk its hops would follow each other
// after all: makes it two. (On all ranks alike: not all programs of a gather or scatter have a
// hop.)
void even_chunks(Geometry* geometry);

// Most elements of at most `bytes` bytes that fit geometry.chunk and the alignment.
std::uint32_t chunk_elements(std::uint64_t bytes, const Geometry& geometry);

}  // namespace unjam
