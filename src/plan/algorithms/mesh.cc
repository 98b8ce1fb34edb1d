#include "plan/algorithms/mesh.h"

#include <algorithm>

#include "plan/common.h"

namespace unjam {
namespace {

// In plans of one hop, all of whose slices are pairs: what is sent in a slice is looked for so many
// slices later, at most.
constexpr std::uint32_t kPassesApart = 3;

bool receives(const Primitive& p) { return (p.flags & (kGather | kCollect)) != 0; }
bool sends(const Primitive& p) { return (p.flags & (kSendAll | kScatter)) != 0; }

// Each primitive that receives works on what was sent passes ago. Together: and what only sends,
// which is first, goes with what only receives, which is last. (Not with a root: its two hops go
// over different connectors, and what is last may send.)
void overlap(Kind kind, const PlanLimits& limits, std::vector<Primitive>* program) {
  std::vector<Primitive>& p = *program;
  const auto hops = static_cast<std::uint32_t>(std::count_if(p.begin(), p.end(), receives));
  if (!limits.overlap || hops == 0 || p.size() == 1) return;
  const std::uint32_t distance = overlap_distance(hops, limits.escape_slots);
  const bool together = limits.together && !has_root(kind);
  if (!together || distance == 0 || !sends(p.front())) {
    std::uint32_t lag = 0;
    for (Primitive& q : p) {
      if (receives(q)) lag += distance;
      q.lag = static_cast<std::uint16_t>(lag);
    }
    return;
  }
  std::rotate(p.begin(), p.begin() + 1, p.end() - 1);
  if (hops == 2) p.front().lag = static_cast<std::uint16_t>(distance + 1);
  p.back().lag = static_cast<std::uint16_t>(
      hops == 2 ? 2 * distance + 1 : std::min(limits.escape_slots - 1, kPassesApart));
  p[p.size() - 2].flags |= kWithNext;
}

// Whose part is empty, see mesh.h.
std::uint16_t empty_part(const PlanRequest& request) {
  if (request.ranks == 1 || !whole_at_root(request.kind)) return kNoPart;
  const bool reduces = request.kind == Kind::kReduce;
  return static_cast<std::uint16_t>(reduces && request.ranks == 2 ? 1 - request.root
                                                                  : request.root);
}

std::vector<Primitive> make_program(const PlanRequest& request) {
  const unsigned result = kLocal | kCopy | kContribute | kFinish;
  if (request.ranks == 1) {
    return {primitive(reduces(request.kind) ? result : kLocal | kCopy, 0)};
  }
  const bool is_root = request.rank == request.root;
  const auto straight = [&](unsigned flags) {
    Primitive p = primitive(flags, request.rank);
    ((flags & kSend) != 0 ? p.send_peer : p.recv_peer) = static_cast<std::uint16_t>(request.root);
    return p;
  };
  const bool pair = request.ranks == 2;
  const Primitive own = primitive(kLocal | kCopy, request.rank);
  const Primitive scatter = primitive(kLocal | kScatter, 0);
  const Primitive collect = primitive(kCollect | kCopy, 0);
  const auto gather = [&](unsigned more) {
    return primitive(result | kGather | kReduce | more, request.rank);
  };
  const Primitive reduced_for_root =
      straight((result & ~kCopy) | kGather | kReduce | kSend | kIntoOutput);
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kBarrier:
      return {scatter, gather(kSendAll | kIntoOutput), collect};
    case Kind::kReduceScatter:
      return {scatter, gather(0)};
    case Kind::kAllToAll:
      return {scatter, own, collect};
    case Kind::kGather:
      if (!is_root) return {straight(kLocal | kSend | kIntoOutput)};
      return {own, collect};
    case Kind::kScatter:
      if (!is_root) return {straight(kRecv | kCopy)};
      return {scatter, own};
    case Kind::kBroadcast:
      if (is_root) return {primitive(kLocal | kScatter | kCopy | kIntoOutput, 0)};
      if (pair) return {straight(kRecv | kCopy)};
      return {straight(kRecv | kCopy | kSendAll | kIntoOutput), collect};
    case Kind::kReduce:
      if (pair) return {is_root ? gather(0) : scatter};
      if (is_root) return {scatter, collect};
      return {scatter, reduced_for_root};
    default:
      return {primitive(kLocal | kCopy | kSendAll | kIntoOutput, request.rank), collect};
  }
}

}  // namespace

bool mesh_serves(Kind kind) { return reduces(kind) || blocked(kind) || whole_at_root(kind); }

std::optional<Plan> plan_mesh(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error) {
  const std::string problem =
      several_peers_error(request, limits, "mesh", mesh_serves(request.kind), kMinMeshSlots);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  plan.geometry.empty_part = empty_part(request);
  plan.geometry.chunk = slot_chunk(limits, plan.geometry);
  // On a GPU a bulk plan takes every block: links and memory are what it shares with small calls.
  assign_bulk_lanes(request, limits, limits.device == Device::kCuda ? 0 : 1, &plan.geometry);
  plan.primitives = make_program(request);
  overlap(request.kind, limits, &plan.primitives);
  if (limits.overlap && request.ranks > 1) even_chunks(&plan.geometry);
  return plan;
}

}  // namespace unjam
