#include "plan/check/validate.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "plan/common.h"
#include "plan/describe.h"

namespace unjam {
namespace {

template <typename T>
std::string differs(const char* what, T here, T there) {
  if (here == there) return "";
  return std::string(what) + " " + std::to_string(here) + ", rank 0's has " + std::to_string(there);
}

// Both ends of every connector compute lengths from their own plan: they must be equal.
std::string disagreement(const Plan& plan, const Plan& reference) {
  const Geometry &g = plan.geometry, &h = reference.geometry;
  for (const std::string& text :
       {differs("algorithm", static_cast<int>(plan.algorithm),
                static_cast<int>(reference.algorithm)),
        differs("protocol", static_cast<int>(plan.protocol), static_cast<int>(reference.protocol)),
        differs("kind", static_cast<int>(g.kind), static_cast<int>(h.kind)),
        differs("data type", static_cast<int>(g.dtype), static_cast<int>(h.dtype)),
        differs("count", g.count, h.count), differs("parts", g.parts, h.parts),
        differs("empty part", +g.empty_part, +h.empty_part),
        differs("parts by lanes", +g.by_lane, +h.by_lane), differs("chunk", g.chunk, h.chunk),
        differs("first lane", +g.first_lane, +h.first_lane),
        differs("lanes", +g.lanes, +h.lanes)}) {
    if (!text.empty()) return text;
  }
  return "";
}

std::string geometry_error(const PlanRequest& request, const Plan& plan, std::uint32_t slot_bytes) {
  const Geometry& g = plan.geometry;
  if (g.kind != request.kind || g.dtype != request.dtype || g.count != request.count) {
    return "the plan's geometry is not the request's";
  }
  if (g.parts < 1 || g.parts > kMaxGroupRanks || g.lanes < 1 || g.chunk < 1) {
    return "the geometry has no parts, lanes or chunk";
  }
  if (g.parts > static_cast<std::uint32_t>(request.ranks)) {
    return "more parts than ranks: " + std::to_string(g.parts);
  }
  if (g.blocked() && g.parts != static_cast<std::uint32_t>(request.ranks)) {
    return "a block-structured kind needs one part per rank, the plan has " +
           std::to_string(g.parts);
  }
  if (g.empty_part != kNoPart && (g.blocked() || g.parts < 2 || g.empty_part >= g.parts)) {
    return "part " + std::to_string(g.empty_part) + " cannot be empty";
  }
  if (g.by_lane && (g.blocked() || g.empty_part != kNoPart || g.lanes < g.parts)) {
    return "parts by lanes need as many lanes, no block for each rank, and no empty part";
  }
  if (g.chunk % g.align() != 0) {
    return "chunk " + std::to_string(g.chunk) + " is not a multiple of the alignment " +
           std::to_string(g.align());
  }
  const std::uint64_t slice = slice_elements(plan, slot_bytes);
  if (has_inline_flags(plan.protocol) && g.chunk > slice) {
    return "a packet chunk must be one slice of at most " + std::to_string(slice) +
           " elements, the plan has " + std::to_string(g.chunk);
  }
  // Parts and lanes tile the vector: each begins where the last one ended.
  std::uint64_t next = 0;
  for (std::uint32_t p = 0; p < g.parts; ++p) {
    for (std::uint32_t i = 0; i < g.lanes; ++i) {
      const Range r = g.lane_part(p, g.first_lane + i);
      if (r.length == 0) continue;
      if (r.offset != next) return "part " + std::to_string(p) + " leaves a gap or an overlap";
      if ((r.length + g.chunk - 1) / g.chunk > g.loops(g.first_lane + i)) {
        return "part " + std::to_string(p) + " needs more loops than the geometry makes";
      }
      next += r.length;
    }
  }
  if (next != vector_elements(request)) return "the parts do not cover the data";
  return "";
}

// Whom the primitive receives from, or sends to: that the plan has them, and what a set may have.
std::string peers_error(const Plan& plan, std::size_t i, bool receives) {
  const Primitive& p = plan.primitives[i];
  const Peers peers = receives ? p.from : p.to;
  const std::string does = receives ? "receive" : "send";
  if ((p.flags & (receives ? kRecv : kSend)) == 0) {
    return peers == kNobody ? "" : "it has a " + does + " peer without a " + does;
  }
  const std::vector<int> ranks = receives ? ranks_received_from(plan, i) : ranks_sent_to(plan, i);
  if (ranks.empty()) {
    if (peers == kNobody) return "it has a " + does + " without a peer";
    return is_set(peers) ? "the set that it has to " + does + " with is empty"
                         : "its " + does + " peer is no neighbour of the plan";
  }
  if (is_set(peers) && plan.sets[set_of(peers)].neighbours >> (plan.neighbours.size() - 1) > 1) {
    return "the set that it has to " + does + " with has more than the plan's neighbours";
  }
  return "";
}

// Of a scatter, or a collect: its peers' parts.
std::string parts_error(const PlanRequest& request, int rank, const Plan& plan, std::size_t i) {
  const Primitive& p = plan.primitives[i];
  const Geometry& g = plan.geometry;
  const bool scatters = (p.flags & kScatter) != 0;
  if (!(scatters ? to_set(p) : from_set(p))) return "a scatter or collect needs a set";
  if (g.by_lane) return "a scatter or collect needs each rank's part on each lane";
  if (g.parts != static_cast<std::uint32_t>(request.ranks)) {
    return "a scatter or collect needs one part per rank, the plan has " + std::to_string(g.parts);
  }
  const std::uint32_t longest = plan.sets[set_of(scatters ? p.to : p.from)].longest_part;
  std::uint64_t most = 0;
  for (const int q : scatters ? ranks_sent_to(plan, i) : ranks_received_from(plan, i)) {
    most = std::max(most, g.part(static_cast<std::uint32_t>(q)).length);
    if (q == g.empty_part) continue;
    if (scatters && !has_input(request, rank, q)) {
      return "this rank has no input in part " + std::to_string(q);
    }
    if ((p.flags & kCopy) != 0 && !has_output(request, rank, q)) {
      return "this rank has no output in part " + std::to_string(q);
    }
  }
  if (longest >= g.parts || g.part(longest).length != most) {
    return "part " + std::to_string(longest) + " is not as long as the longest of its set";
  }
  return "";
}

std::string flags_error(const PlanRequest& request, int rank, const Plan& plan, std::size_t i,
                        std::uint32_t slot_bytes) {
  const Primitive& p = plan.primitives[i];
  constexpr unsigned kTravel = kWithNext | kSecondHop | kIntoOutput | kCarrierBits;
  const unsigned f = p.flags & ~kTravel;
  const auto has = [f](unsigned flag) { return (f & flag) != 0; };
  const bool packets = has_inline_flags(plan.protocol);
  const bool gathers = from_set(p) && !has(kCollect);
  if (carrier_of(p) != Carrier::kBlocks) {
    if (carrier_of(p) != Carrier::kCopyEngine) return "there is no such carrier";
    // (Others than blocks neither reduce nor scale, and whoever waits for packets polls the data.
    // With kCopy the mark counts in place, where nothing is copied.)
    constexpr unsigned kRead = kLocal | kContribute | kScatter | kCopy;
    if (packets || (f & ~kRead) != kSend) return "a copy engine carries slices that are only sent";
  }
  if ((p.flags & kSecondHop) != 0) {
    if (!packets) return "only packets have hops";
    if (!has(kRecv)) return "it has a second hop without a receive";
  }
  if (packets && has(kSend) && hop_sent(p) > 1) return "packets make two hops at most";
  if (p.lag != 0 && packets) return "packets do not lag";
  if ((p.flags & kIntoOutput) != 0) {
    if (packets) return "packets do not go straight into an output";
    if (!has(kSend)) return "it sends nothing that could go into an output";
    if (exchanges(request.kind)) return "its data have another place in the output";
  }
  if (p.part >= plan.geometry.parts) return "there is no such part";
  if (!has(kRecv | kLocal)) return "it has no source";
  if (!has(kSend | kCopy)) return "it has no destination";
  for (const bool receives : {true, false}) {
    const std::string text = peers_error(plan, i, receives);
    if (!text.empty()) return text;
  }
  if (has(kScatter) && (f & ~kCopy) != (kLocal | kScatter | kSend)) {
    return "a scatter sends local slices, nothing else";
  }
  if (has(kScatter) && has(kCopy)) {
    if (packets) return "packets that are scattered are not copied";
    if (exchanges(request.kind)) return "its data have another place in the output";
  }
  if (has(kCollect) && f != (kRecv | kCollect | kCopy)) {
    return "a collect copies received slices into the output, nothing else";
  }
  if (gathers && (!has(kLocal) || !has(kReduce) || has(kFromOutput))) {
    return "a gather reduces the received slices with the local input, nothing else";
  }
  if (has(kPartials) && !gathers) return "only what a set sends can be its sums";
  // Here alone data change their place in the vector: the checker can follow one hop of that.
  if (exchanges(request.kind) &&
      (has(kFromOutput) || (to_set(p) && !has(kScatter)) || (has(kRecv) && has(kSend)))) {
    return "a slice of an all-to-all goes straight from one rank's input to one other's output";
  }
  if ((from_set(p) || to_set(p)) && plan.geometry.chunk > slice_elements(plan, slot_bytes)) {
    return "it moves one slice a peer, and a chunk needs more";
  }
  if (has(kScatter | kCollect)) return parts_error(request, rank, plan, i);
  if (has(kReduce) != (has(kRecv) && has(kLocal))) {
    return "a received and a local slice need kReduce, and kReduce needs both";
  }
  if (has(kFromOutput | kContribute) && !has(kLocal)) {
    return "kFromOutput and kContribute need a local slice";
  }
  if (has(kReduce | kContribute | kFinish) && !reduces(request.kind)) {
    return std::string(to_string(request.kind)) + " reduces nothing";
  }
  if (has(kLocal) && !has(kFromOutput) && !has_input(request, rank, static_cast<int>(p.part))) {
    return "this rank has no input there";
  }
  if (has(kCopy | kFromOutput) && !has_output(request, rank, static_cast<int>(p.part))) {
    return "this rank has no output there";
  }
  return "";
}

// Of a primitive that goes together with the next one.
std::string pair_error(const Plan& plan, std::size_t i) {
  const Primitive& p = plan.primitives[i];
  if ((p.flags & kWithNext) == 0) return "";
  if (has_inline_flags(plan.protocol)) return "packets go alone";
  if (i + 1 == plan.primitives.size()) return "there is none after it that it could go with";
  const Primitive& next = plan.primitives[i + 1];
  if (!to_set(p) || (p.flags & (kRecv | kFromOutput)) != 0) {
    return "it goes with the next one, so it is to send the input to several, and nothing else";
  }
  if (!from_set(next) || (next.flags & (kSend | kWithNext)) != 0) {
    return "the next one, which it goes with, is to receive from several, and nothing else";
  }
  if (next.lag <= p.lag) return "the next one, which it goes with, is to lag behind it";
  return "";
}

// Of the plan's own tables. (The engine looks at all neighbours, those too that no primitive
// names.)
std::string neighbours_error(const PlanRequest& request, int rank, const Plan& plan) {
  const std::vector<std::uint16_t>& n = plan.neighbours;
  for (const int q : n) {
    if (q >= request.ranks) return "neighbour " + std::to_string(q) + " is not in the group";
    if (q == rank) return "neighbour " + std::to_string(q) + " is the rank itself";
  }
  if (std::adjacent_find(n.begin(), n.end(), std::greater_equal<>()) != n.end()) {
    return "its neighbours are not in ascending order";
  }
  const bool wide = n.size() > kMostNeighbours;
  if (plan.wide_peers.size() != (wide ? plan.primitives.size() : 0)) {
    return wide ? "more than " + std::to_string(kMostNeighbours) +
                      " neighbours need wide peers of each primitive"
                : "it has wide peers for few neighbours";
  }
  if (plan.sets.size() > (wide ? 0 : kMostSets)) {
    return wide ? "a plan with wide peers has no sets"
                : "it has more than " + std::to_string(kMostSets) + " sets";
  }
  for (const Primitive& p : plan.primitives) {
    const auto fits = [&](Peers peers) {
      return peers == kNobody || (wide            ? peers == kWidePeer
                                  : is_set(peers) ? set_of(peers) < plan.sets.size()
                                                  : peers < n.size());
    };
    if (!fits(p.from) || !fits(p.to)) return "a primitive's peer is not in its tables";
  }
  return "";
}

}  // namespace

std::uint64_t slice_elements(const Plan& plan, std::uint32_t slot_bytes) {
  return payload_bytes(plan.protocol, slot_bytes) / dtype_bytes(plan.geometry.dtype);
}

bool has_input(const PlanRequest& request, int rank, int part) {
  return holds(row_of(request.kind).reads, rank, request.root, part);
}

bool has_output(const PlanRequest& request, int rank, int part) {
  return holds(row_of(request.kind).writes, rank, request.root, part);
}

std::string primitive_text(int rank, std::size_t index, const Plan& plan, int ranks) {
  return "rank " + std::to_string(rank) + " primitive " + std::to_string(index) + " (" +
         describe(plan, index, ranks) + ")";
}

std::string validate_plans(const PlanRequest& request, const std::vector<Plan>& plans,
                           std::uint32_t slot_bytes) {
  if (plans.size() != static_cast<std::size_t>(request.ranks)) {
    return "one plan per rank is needed, there are " + std::to_string(plans.size()) + " for " +
           std::to_string(request.ranks) + " ranks";
  }
  for (std::size_t r = 1; r < plans.size(); ++r) {
    const std::string text = disagreement(plans[r], plans[0]);
    if (!text.empty()) {
      return "rank " + std::to_string(r) + "'s plan disagrees, so lengths differ: it has " + text;
    }
  }
  const std::string geometry = geometry_error(request, plans[0], slot_bytes);
  if (!geometry.empty()) return geometry;
  for (int r = 0; r < request.ranks; ++r) {
    const Plan& plan = plans[static_cast<std::size_t>(r)];
    // The engine runs the first primitive without a look at how many there are.
    if (plan.primitives.empty()) return "rank " + std::to_string(r) + "'s program is empty";
    const std::string tables = neighbours_error(request, r, plan);
    if (!tables.empty()) return "rank " + std::to_string(r) + "'s plan: " + tables;
    for (std::size_t i = 0; i < plan.primitives.size(); ++i) {
      const std::string text = flags_error(request, r, plan, i, slot_bytes);
      if (!text.empty()) return primitive_text(r, i, plan, request.ranks) + ": " + text;
      if (plan.primitives[i].lag > plan.primitives.back().lag) {
        return primitive_text(r, i, plan, request.ranks) + ": it lags more than the last one";
      }
      const std::string together = pair_error(plan, i);
      if (!together.empty()) return primitive_text(r, i, plan, request.ranks) + ": " + together;
    }
  }
  return "";
}

}  // namespace unjam
