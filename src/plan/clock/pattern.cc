#include "plan/clock/pattern.h"

#include <algorithm>
#include <string_view>

#include "plan/algorithms/double_binary_tree.h"
#include "plan/check/validate.h"
#include "plan/common.h"
#include "plan/host_table.h"
#include "plan/registry.h"
#include "plan/selector.h"

namespace unjam {
namespace {

// That the clock alone has, for comparison: all-reduces of whole nodes.
constexpr std::string_view kRing2d = "ring_2d", kNodeTrees = "node_trees";

bool is_of_nodes(std::string_view name) { return name == kRing2d || name == kNodeTrees; }
bool serves_nodes(Kind kind) { return kind == Kind::kAllReduce || kind == Kind::kBarrier; }

ClockStep step_of(const Primitive& p, std::size_t num_from, std::size_t num_to) {
  ClockStep s;
  s.flags = p.flags;
  s.part = p.part;
  s.lag = p.lag;
  const auto has = [&](unsigned flag) { return (p.flags & flag) != 0; };
  const std::size_t local = has(kScatter) ? num_to : has(kLocal) ? 1 : 0;
  const std::size_t stored = has(kScatter) ? num_to : has(kCollect) ? num_from : 1;
  s.reads = static_cast<std::uint16_t>(num_from + local);
  s.writes = static_cast<std::uint16_t>(num_to + (has(kCopy) ? stored : 0));
  return s;
}

void add_primitive(const Primitive& p, std::span<const int> from, std::span<const int> to,
                   Pattern* pattern) {
  pattern->add_step(step_of(p, from.size(), to.size()), from, to);
}

// Each node is a host to plans.
HostTable nodes_of(int ranks, int ranks_per_node) {
  std::vector<int> nodes(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    nodes[static_cast<std::size_t>(rank)] = rank / ranks_per_node;
  }
  return HostTable(nodes);
}

std::optional<Pattern> pattern_of_plans(PlanRequest request, const Machine& machine,
                                        Algorithm algorithm, std::string* error) {
  const PlanLimits limits = limits_of(machine);
  const HostTable nodes = nodes_of(request.ranks, machine.gpus_per_node);
  if (nodes.hosts() > 1) request.hosts = &nodes;
  Pattern pattern;
  pattern.ranks = request.ranks;
  pattern.all_ranks = request.ranks;
  pattern.first_step.push_back(0);
  for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
    const std::optional<Plan> plan = make_plan(request, limits, algorithm, error);
    if (!plan) return std::nullopt;
    if (request.rank == 0) {
      add_geometry(plan->geometry, limits.guaranteed_slot_bytes, plan->protocol, &pattern);
    }
    for (std::size_t i = 0; i < plan->primitives.size(); ++i) {
      add_primitive(plan->primitives[i], ranks_received_from(*plan, i), ranks_sent_to(*plan, i),
                    &pattern);
    }
    pattern.end_rank();
  }
  return pattern;
}

// Trees of more ranks than a plan can name: their geometry does not depend on the ranks.
std::optional<Pattern> pattern_of_trees(PlanRequest request, const PlanLimits& limits,
                                        std::string* error) {
  PlanRequest fewer = request;
  fewer.ranks = kMaxGroupRanks;
  fewer.root = 0;
  const std::optional<Plan> plan = plan_double_binary_tree(fewer, limits, error);
  if (!plan) return std::nullopt;
  Pattern pattern;
  pattern.ranks = request.ranks;
  pattern.all_ranks = request.ranks;
  pattern.first_step.push_back(0);
  add_geometry(plan->geometry, limits.guaranteed_slot_bytes, plan->protocol, &pattern);
  const int trees = static_cast<int>(plan->geometry.parts);
  for (request.rank = 0; request.rank < request.ranks; ++request.rank) {
    const ProgramBuilder program = double_binary_tree_program(request, trees);
    for (const auto& s : program.steps()) {
      add_primitive(s.primitive, s.from.ranks(), s.to.ranks(), &pattern);
    }
    pattern.end_rank();
  }
  return pattern;
}

void say(std::string* error, std::string text) {
  if (error != nullptr) *error = std::move(text);
}

}  // namespace

std::uint64_t Pattern::wire_bytes(std::uint64_t payload) const {
  if (protocol == Protocol::kPacket) return 2 * payload;
  return protocol == Protocol::kLine ? line_places(payload) * kWordBytes : payload;
}

void Pattern::add_step(ClockStep step, std::span<const int> from, std::span<const int> to) {
  step.first_peer = static_cast<std::uint32_t>(peers.size());
  step.num_from = static_cast<std::uint16_t>(from.size());
  step.num_to = static_cast<std::uint16_t>(to.size());
  peers.insert(peers.end(), from.begin(), from.end());
  peers.insert(peers.end(), to.begin(), to.end());
  steps.push_back(step);
}

void add_geometry(const Geometry& g, std::uint32_t slot_bytes, Protocol protocol,
                  Pattern* pattern) {
  const std::uint64_t element = dtype_bytes(g.dtype);
  pattern->protocol = protocol;
  pattern->parts = g.parts;
  pattern->lanes = g.lanes;
  pattern->chunk_bytes = g.chunk * element;
  pattern->slice_bytes = payload_bytes(protocol, slot_bytes) / element * element;
  pattern->lane_bytes.reserve(std::size_t{g.parts} * g.lanes);
  for (std::uint32_t p = 0; p < g.parts; ++p) {
    for (std::uint32_t l = 0; l < g.lanes; ++l) {
      pattern->lane_bytes.push_back(g.lane_part(p, g.first_lane + l).length * element);
    }
  }
}

PlanLimits limits_of(const Machine& machine) {
  PlanLimits limits;
  const bool cuda = machine.device == Device::kCuda;
  limits.guaranteed_slots = machine.slots;
  limits.guaranteed_slot_bytes = machine.slot_bytes;
  limits.lanes = machine.lanes;
  limits.device = machine.device;
  limits.overlap = cuda;
  limits.lines = cuda;
  if (machine.cores > 0) {
    limits.ranks_a_core =
        static_cast<std::uint16_t>((machine.gpus_per_node + machine.cores - 1) / machine.cores);
  }
  return limits;
}

std::string clock_algorithms(Kind kind) {
  std::string names = algorithms_for(kind);
  if (serves_nodes(kind)) names.append("|").append(kRing2d).append("|").append(kNodeTrees);
  return names;
}

std::optional<std::string> clock_algorithm(const ClockRequest& request, const Machine& machine,
                                           std::string* error) {
  const PlanRequest& r = request.request;
  const std::string cure = ": give auto|" + clock_algorithms(r.kind);
  if (is_of_nodes(request.algorithm)) {
    if (serves_nodes(r.kind)) return request.algorithm;
    say(error, request.algorithm + " does not serve " + to_string(r.kind) + cure);
    return std::nullopt;
  }
  const std::optional<int> number = algorithm_named(request.algorithm);
  if (!number) {
    say(error, "there is no algorithm " + request.algorithm + cure);
    return std::nullopt;
  }
  if (*number < 0) return to_string(select_algorithm(r, limits_of(machine)));
  if (kAlgorithms[*number].serves(r.kind)) return request.algorithm;
  say(error, request.algorithm + " does not serve " + to_string(r.kind) + cure);
  return std::nullopt;
}

std::optional<Pattern> make_pattern(const ClockRequest& request, const Machine& machine,
                                    std::string* error) {
  const std::optional<std::string> name = clock_algorithm(request, machine, error);
  if (!name) return std::nullopt;
  const PlanRequest& r = request.request;
  const PlanLimits limits = limits_of(machine);
  std::optional<Pattern> pattern;
  if ((*name == kRing2d || *name == to_string(Algorithm::kRing)) &&
      limits.guaranteed_slots < kMinRingSlots) {
    say(error, *name + " needs at least " + std::to_string(kMinRingSlots) + " slots, not " +
                   std::to_string(limits.guaranteed_slots));
    return std::nullopt;
  }
  if (is_of_nodes(*name)) {
    if (r.ranks % machine.gpus_per_node != 0) {
      say(error, *name + " needs whole nodes of " + std::to_string(machine.gpus_per_node) +
                     " ranks, not " + std::to_string(r.ranks) + " ranks");
      return std::nullopt;
    }
    pattern = *name == kRing2d ? ring_2d_pattern(r, machine, request.unfolded)
                               : node_trees_pattern(r, machine, error);
  } else {
    const Algorithm algorithm = static_cast<Algorithm>(*algorithm_named(*name));
    if (algorithm == Algorithm::kRing && !request.unfolded && r.ranks > machine.gpus_per_node) {
      pattern = ring_pattern(r, machine, false);
      // Plans know how long each part is.
      if (!pattern->exact && r.ranks <= kMaxLinearRanks) pattern.reset();
    }
    if (pattern) {
      // Nothing is left to do.
    } else if (algorithm == Algorithm::kRing && r.ranks > kMaxLinearRanks) {
      say(error,
          "rings of more than " + std::to_string(kMaxLinearRanks) +
              " ranks are timed by those of one leaf, which is not possible with late ranks, "
              "nor where ranks share processors: give fewer ranks");
    } else if (algorithm == Algorithm::kDoubleBinaryTree && r.ranks > kMaxGroupRanks) {
      pattern = pattern_of_trees(r, limits, error);
    } else {
      pattern = pattern_of_plans(r, machine, algorithm, error);
    }
  }
  if (pattern) pattern->algorithm = *name;
  return pattern;
}

}  // namespace unjam
