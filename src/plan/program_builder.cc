#include "plan/program_builder.h"

#include <algorithm>
#include <iterator>
#include <optional>

namespace unjam {
namespace {

std::size_t place_of(const std::vector<std::uint16_t>& neighbours, int rank) {
  const auto at =
      std::lower_bound(neighbours.begin(), neighbours.end(), static_cast<std::uint16_t>(rank));
  return static_cast<std::size_t>(std::distance(neighbours.begin(), at));
}

PeerSet make_set(const Plan& plan, const std::vector<int>& ranks) {
  PeerSet set;
  for (const int q : ranks) set.neighbours |= std::uint64_t{1} << place_of(plan.neighbours, q);
  std::optional<std::uint64_t> longest;
  for (std::size_t k = 0; k < plan.neighbours.size(); ++k) {
    const std::uint32_t part = plan.neighbours[k];
    if ((set.neighbours >> k & 1) == 0 || part >= plan.geometry.parts) continue;
    const std::uint64_t length = plan.geometry.part(part).length;
    if (longest && length <= *longest) continue;
    longest = length;
    set.longest_part = part;
  }
  return set;
}

Peers set_code(Plan* plan, const PeerSet& set) {
  auto at = std::find(plan->sets.begin(), plan->sets.end(), set);
  if (at == plan->sets.end()) at = plan->sets.insert(at, set);
  return static_cast<Peers>(kFirstSet + std::distance(plan->sets.begin(), at));
}

Peers code_of(Plan* plan, const PeerRanks& peers) {
  if (peers.ranks().empty()) return kNobody;
  if (peers.is_set()) return set_code(plan, make_set(*plan, peers.ranks()));
  return static_cast<Peers>(place_of(plan->neighbours, peers.ranks().front()));
}

}  // namespace

PeerRanks ProgramBuilder::all_others(int but) const {
  std::vector<int> others;
  for (int q = 0; q < ranks_; ++q) {
    if (q != rank_ && q != but) others.push_back(q);
  }
  return PeerRanks::set(std::move(others));
}

void ProgramBuilder::add(unsigned flags, int part, PeerRanks from, PeerRanks to,
                         std::uint32_t lag) {
  Primitive p;
  if (!from.ranks().empty()) flags |= kRecv;
  if (!to.ranks().empty()) flags |= kSend;
  p.flags = static_cast<std::uint16_t>(flags);
  p.part = static_cast<std::uint32_t>(part) & (kMostParts - 1);
  p.lag = lag & kMostLag;
  steps_.push_back({p, std::move(from), std::move(to)});
}

void ProgramBuilder::write(Plan* plan) const {
  plan->primitives.clear();
  plan->sets.clear();
  plan->wide_peers.clear();
  std::vector<std::uint16_t>& neighbours = plan->neighbours;
  neighbours.clear();
  for (const Step& s : steps_) {
    for (const PeerRanks* peers : {&s.from, &s.to}) {
      for (const int q : peers->ranks()) neighbours.push_back(static_cast<std::uint16_t>(q));
    }
  }
  std::sort(neighbours.begin(), neighbours.end());
  neighbours.erase(std::unique(neighbours.begin(), neighbours.end()), neighbours.end());
  const bool wide = neighbours.size() > kMostNeighbours;
  for (const Step& s : steps_) {
    Primitive p = s.primitive;
    if (wide) {
      WidePeers peers;
      if ((p.flags & kRecv) != 0) {
        p.from = kWidePeer;
        peers.from = static_cast<std::uint16_t>(place_of(neighbours, s.from.ranks().front()));
      }
      if ((p.flags & kSend) != 0) {
        p.to = kWidePeer;
        peers.to = static_cast<std::uint16_t>(place_of(neighbours, s.to.ranks().front()));
      }
      plan->wide_peers.push_back(peers);
    } else {
      p.from = code_of(plan, s.from);
      p.to = code_of(plan, s.to);
    }
    plan->primitives.push_back(p);
  }
}

}  // namespace unjam
