// Programs that no planner makes, written by hand: their sets are neither one rank nor all others,
// several of their phases share a connector, sums come from sets. Each function gives the plans of
// all ranks of a request (whose `rank` is not looked at), by slots, of any number of loops. They
// look at the limits' guaranteed slots and their size, and the number of lanes, and use the first
// lanes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "plan/common.h"
#include "plan/plan.h"
#include "plan/program_builder.h"

namespace unjam_test {

namespace written {

using unjam::PeerRanks;
using unjam::Plan;
using unjam::PlanLimits;
using unjam::PlanRequest;
using unjam::ProgramBuilder;

// A plan without a program. The data are cut into so many parts, and chunks of one slot.
inline Plan empty_plan(const PlanRequest& request, const PlanLimits& limits, int parts,
                       std::uint16_t empty_part = unjam::kNoPart) {
  Plan plan;
  plan.protocol = unjam::Protocol::kSlot;
  plan.geometry = unjam::make_geometry(request, static_cast<std::uint32_t>(parts));
  plan.geometry.empty_part = empty_part;
  plan.geometry.chunk = unjam::chunk_elements(limits.guaranteed_slot_bytes, plan.geometry);
  plan.geometry.lanes = limits.lanes;
  return plan;
}

// write(rank, builder) adds the rank's primitives.
template <class Write>
std::vector<Plan> plans_of_all(int ranks, const Plan& empty, const Write& write) {
  std::vector<Plan> plans;
  for (int rank = 0; rank < ranks; ++rank) {
    ProgramBuilder program(ranks, rank);
    write(rank, program);
    program.write(&plans.emplace_back(empty));
  }
  return plans;
}

// Those of the ranks that are in a half of all, but two.
inline std::vector<int> half(int ranks, bool upper, int but, int and_but) {
  std::vector<int> members;
  for (int q = upper ? ranks / 2 : 0; q < (upper ? ranks : ranks / 2); ++q) {
    if (q != but && q != and_but) members.push_back(q);
  }
  return members;
}

// Who is where in a tree over all ranks, the root on top, in which each has so many below it.
struct Heap {
  int ranks, root, below;

  int place_of(int rank) const { return (rank - root + ranks) % ranks; }
  int rank_at(int place) const { return (root + place) % ranks; }
  int parent_of(int place) const { return rank_at((place - 1) / below); }
  std::vector<int> children_of(int place) const {
    std::vector<int> found;
    for (int k = 1; k <= below && below * place + k < ranks; ++k) {
      found.push_back(rank_at(below * place + k));
    }
    return found;
  }
};

}  // namespace written

// A broadcast down a tree in which each rank sends to so many below it, a set, at once, as it
// receives from the one above it. lag: by how many passes more each rank is behind the root, which
// changes nothing but when ranks do it.
inline std::vector<unjam::Plan> tree_broadcast(const unjam::PlanRequest& request,
                                               const unjam::PlanLimits& limits, int below = 2,
                                               std::uint32_t lag = 0) {
  using namespace unjam;  // NOLINT(google-build-using-namespace): its flags
  const int ranks = request.ranks;
  const written::Heap tree{ranks, request.root, below};
  const Plan empty = written::empty_plan(request, limits, 1);
  return written::plans_of_all(ranks, empty, [&](int rank, ProgramBuilder& program) {
    const int place = tree.place_of(rank);
    const std::vector<int> to = tree.children_of(place);
    const unsigned into = to.empty() ? 0 : kIntoOutput;
    if (place == 0) {
      program.add(kLocal | kCopy | into, 0, PeerRanks::nobody(), PeerRanks::set(to));
    } else {
      program.add(kCopy | into, 0, PeerRanks::one(tree.parent_of(place)), PeerRanks::set(to), lag);
    }
  });
}

// A reduction up the same tree: each rank adds its own to the sums of those below it.
inline std::vector<unjam::Plan> tree_reduce(const unjam::PlanRequest& request,
                                            const unjam::PlanLimits& limits, int below = 2) {
  using namespace unjam;  // NOLINT(google-build-using-namespace): its flags
  const int ranks = request.ranks;
  const written::Heap tree{ranks, request.root, below};
  const Plan empty = written::empty_plan(request, limits, 1);
  return written::plans_of_all(ranks, empty, [&](int rank, ProgramBuilder& program) {
    const int place = tree.place_of(rank);
    std::vector<int> from = tree.children_of(place);
    const unsigned sums = from.empty() ? 0 : kReduce | kPartials;
    const PeerRanks above =
        place == 0 ? PeerRanks::nobody() : PeerRanks::one(tree.parent_of(place));
    program.add(kLocal | kContribute | sums | (place == 0 ? kFinish | kCopy : 0), 0,
                PeerRanks::set(std::move(from)), above);
  });
}

// An all-reduce among nodes of so many ranks each, at least two of either. Rank (node, i) owns a
// part, and is its node's agent for the parts that ranks i of other nodes own: it adds up what its
// node has of them, and sends the sum to the owner. An owner adds up the contributions of its node
// and the sums of other nodes, and sends the result to both; agents pass it on in their nodes.
//
// Whatever is sent is received so many passes later (`distance`), which makes the lags: of what
// contributions wait for nothing 0; of sums, and what goes to the owner straight, 1; of results 2,
// and so on, by `distance` each. Both ends of a connector then go through its phases in one order.
inline std::vector<unjam::Plan> two_level_all_reduce(const unjam::PlanRequest& request,
                                                     const unjam::PlanLimits& limits,
                                                     int node_ranks = 2,
                                                     std::uint32_t distance = 0) {
  using namespace unjam;  // NOLINT(google-build-using-namespace): its flags
  constexpr unsigned kAdd = kLocal | kReduce | kContribute;
  const int ranks = request.ranks, nodes = ranks / node_ranks;
  const Plan empty = written::empty_plan(request, limits, ranks);
  return written::plans_of_all(ranks, empty, [&](int rank, ProgramBuilder& program) {
    const auto nobody = PeerRanks::nobody();
    const auto one = [](int q) { return PeerRanks::one(q); };
    const int node = rank / node_ranks, i = rank % node_ranks;
    std::vector<int> beside, across;  // of the node; the same of other nodes
    for (int j = 0; j < node_ranks; ++j) {
      if (j != i) beside.push_back(node * node_ranks + j);
    }
    for (int m = 0; m < nodes; ++m) {
      if (m != node) across.push_back(m * node_ranks + i);
    }
    std::vector<int> both = beside;
    both.insert(both.end(), across.begin(), across.end());
    // Of what is other nodes' the node's agents get it.
    for (int part = 0; part < ranks; ++part) {
      if (part / node_ranks == node || part % node_ranks == i) continue;
      program.add(kLocal, part, nobody, one(node * node_ranks + part % node_ranks));
    }
    for (const int part : across) {
      program.add(kAdd, part, PeerRanks::set(beside), one(part), distance);
    }
    for (const int q : beside) program.add(kLocal | kContribute, q, nobody, one(q), distance);
    program.add(kAdd | kPartials | kFinish | kCopy | kIntoOutput, rank, PeerRanks::set(both),
                PeerRanks::set(both), 2 * distance);
    for (const int part : across) {
      program.add(kCopy | kIntoOutput, part, one(part), PeerRanks::set(beside), 3 * distance);
    }
    program.add(kCollect | kCopy, 0, PeerRanks::set(beside), nobody, 3 * distance);
    for (int part = 0; part < ranks; ++part) {
      if (part / node_ranks == node || part % node_ranks == i) continue;
      program.add(kCopy, part, one(node * node_ranks + part % node_ranks), nobody, 4 * distance);
    }
  });
}

// A broadcast among three ranks or more: the root scatters, and the others, each of whom has a
// part, send it to each other. All that goes to, or comes from, several is done in two halves of
// the group, so that of the parts that travel with a set the longest one is not the vector's.
inline std::vector<unjam::Plan> broadcast_in_halves(const unjam::PlanRequest& request,
                                                    const unjam::PlanLimits& limits) {
  using namespace unjam;  // NOLINT(google-build-using-namespace): its flags
  const int ranks = request.ranks, root = request.root;
  const Plan empty = written::empty_plan(request, limits, ranks, static_cast<std::uint16_t>(root));
  return written::plans_of_all(ranks, empty, [&](int rank, ProgramBuilder& program) {
    if (rank != root) {
      program.add(kCopy | kIntoOutput, rank, PeerRanks::one(root), program.all_others(root));
    }
    for (const bool upper : {true, false}) {
      const PeerRanks half = PeerRanks::set(written::half(ranks, upper, rank, root));
      if (half.ranks().empty()) continue;
      if (rank == root) {
        program.add(kLocal | kScatter | kCopy | kIntoOutput, 0, PeerRanks::nobody(), half);
      } else {
        program.add(kCollect | kCopy, 0, half);
      }
    }
  });
}

}  // namespace unjam_test
