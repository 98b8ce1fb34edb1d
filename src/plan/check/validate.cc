#include "plan/check/validate.h"

#include <tuple>

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
        differs("empty part", +g.empty_part, +h.empty_part), differs("chunk", g.chunk, h.chunk),
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
  if (g.blocked() && g.parts != static_cast<std::uint32_t>(request.ranks)) {
    return "a block-structured kind needs one part per rank, the plan has " +
           std::to_string(g.parts);
  }
  if (g.empty_part != kNoPart && (g.blocked() || g.parts < 2 || g.empty_part >= g.parts)) {
    return "part " + std::to_string(g.empty_part) + " cannot be empty";
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

std::string flags_error(const PlanRequest& request, int rank, const Plan& plan, const Primitive& p,
                        std::uint32_t slot_bytes) {
  const unsigned f = p.flags & (kWithNext - 1u);
  const bool second = (p.flags & kSecondHop) != 0;
  const auto has = [f](unsigned flag) { return (f & flag) != 0; };
  if (second && !has_inline_flags(plan.protocol)) return "only packets have hops";
  if (second && !has(kRecv | kGather | kCollect)) return "it has a second hop without a receive";
  if (has_inline_flags(plan.protocol) && has(kSend | kSendAll | kScatter) && hop_sent(p) > 1) {
    return "packets make two hops at most";
  }
  if (p.lag != 0 && has_inline_flags(plan.protocol)) return "packets do not lag";
  if ((p.flags & kIntoOutput) != 0) {
    if (has_inline_flags(plan.protocol)) return "packets do not go straight into an output";
    if (!has(kSend | kSendAll | kScatter)) return "it sends nothing that could go into an output";
    if (exchanges(request.kind)) return "its data have another place in the output";
  }
  if (p.part >= plan.geometry.parts) return "there is no such part";
  if (has(kScatter) && (f & ~kCopy) != (kLocal | kScatter)) {
    return "a scatter sends local slices, nothing else";
  }
  if (has(kScatter) && has(kCopy)) {
    if (has_inline_flags(plan.protocol)) return "packets that are scattered are not copied";
    if (exchanges(request.kind)) return "its data have another place in the output";
  }
  if (has(kCollect) && f != (kCollect | kCopy)) {
    return "a collect copies received slices into the output, nothing else";
  }
  if (!has(kRecv | kLocal | kGather | kCollect)) return "it has no source";
  if (!has(kSend | kCopy | kSendAll | kScatter)) return "it has no destination";
  if (has(kSend) && has(kSendAll)) return "it sends to one and to all";
  if (has(kRecv) && has(kSendAll) && request.ranks == 2) return "there are no others to send to";
  if (has(kGather) && (has(kRecv) || !has(kLocal) || !has(kReduce) || has(kFromOutput))) {
    return "a gather reduces the received slices with the local input, nothing else";
  }
  // Here alone data change their place in the vector: the checker can follow one hop of that.
  if (exchanges(request.kind) && (has(kFromOutput | kSendAll) || (has(kRecv) && has(kSend)))) {
    return "a slice of an all-to-all goes straight from one rank's input to one other's output";
  }
  if (has(kGather | kSendAll | kScatter | kCollect)) {
    if (request.ranks > kMaxDirectRanks) {
      return "a primitive with several peers serves at most " + std::to_string(kMaxDirectRanks) +
             " ranks";
    }
    if (plan.geometry.chunk > slice_elements(plan, slot_bytes)) {
      return "it moves one slice a peer, and a chunk needs more";
    }
  }
  if (has(kScatter | kCollect)) {
    if (plan.geometry.parts != static_cast<std::uint32_t>(request.ranks)) {
      return "a scatter or collect needs one part per rank, the plan has " +
             std::to_string(plan.geometry.parts);
    }
    for (int q = 0; q < request.ranks; ++q) {
      if (q == rank || q == plan.geometry.empty_part) continue;
      if (has(kScatter) && !has_input(request, rank, q)) {
        return "this rank has no input in part " + std::to_string(q);
      }
      if (has(kCopy) && !has_output(request, rank, q)) {
        return "this rank has no output in part " + std::to_string(q);
      }
    }
    return p.recv_peer == kNoPeer && p.send_peer == kNoPeer ? "" : "it has a peer of its own";
  }
  if (!has(kGather) && has(kReduce) != (has(kRecv) && has(kLocal))) {
    return "a received and a local slice need kReduce, and kReduce needs both";
  }
  if (has(kFromOutput | kContribute) && !has(kLocal)) {
    return "kFromOutput and kContribute need a local slice";
  }
  if (has(kReduce | kContribute | kFinish) && !reduces(request.kind)) {
    return std::string(to_string(request.kind)) + " reduces nothing";
  }
  for (const auto& [flag, peer, name] :
       {std::tuple{kRecv, p.recv_peer, "receive"}, std::tuple{kSend, p.send_peer, "send"}}) {
    if (!has(flag)) {
      if (peer != kNoPeer) return std::string("it has a ") + name + " peer without a " + name;
    } else if (peer >= request.ranks) {
      return std::string("its ") + name + " peer is not in the group";
    } else if (peer == rank) {
      return std::string("its ") + name + " peer is the rank itself";
    }
  }
  if (has(kLocal) && !has(kFromOutput) && !has_input(request, rank, p.part)) {
    return "this rank has no input there";
  }
  if (has(kCopy | kFromOutput) && !has_output(request, rank, p.part)) {
    return "this rank has no output there";
  }
  return "";
}

// Of a primitive that goes together with the next one.
std::string pair_error(const Plan& plan, std::size_t i) {
  constexpr unsigned kReceives = kRecv | kGather | kCollect, kSends = kSend | kSendAll | kScatter;
  const Primitive& p = plan.primitives[i];
  if ((p.flags & kWithNext) == 0) return "";
  if (has_inline_flags(plan.protocol)) return "packets go alone";
  if (i + 1 == plan.primitives.size()) return "there is none after it that it could go with";
  const Primitive& next = plan.primitives[i + 1];
  if ((p.flags & (kSendAll | kScatter)) == 0 || (p.flags & (kReceives | kFromOutput)) != 0) {
    return "it goes with the next one, so it is to send the input to several, and nothing else";
  }
  if ((next.flags & (kGather | kCollect)) == 0 || (next.flags & kSends) != 0 ||
      (next.flags & kWithNext) != 0) {
    return "the next one, which it goes with, is to receive from several, and nothing else";
  }
  if (next.lag <= p.lag) return "the next one, which it goes with, is to lag behind it";
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

std::string primitive_text(int rank, std::size_t index, const Primitive& primitive) {
  return "rank " + std::to_string(rank) + " primitive " + std::to_string(index) + " (" +
         describe(primitive) + ")";
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
    for (std::size_t i = 0; i < plan.primitives.size(); ++i) {
      const std::string text = flags_error(request, r, plan, plan.primitives[i], slot_bytes);
      if (!text.empty()) return primitive_text(r, i, plan.primitives[i]) + ": " + text;
      if (plan.primitives[i].lag > plan.primitives.back().lag) {
        return primitive_text(r, i, plan.primitives[i]) + ": it lags more than the last one";
      }
      const std::string together = pair_error(plan, i);
      if (!together.empty()) return primitive_text(r, i, plan.primitives[i]) + ": " + together;
    }
  }
  return "";
}

}  // namespace unjam
