#include "plan/plan.h"

namespace unjam {

std::vector<std::uint16_t> ranks_in(const Plan& plan, const PeerSet& set) {
  std::vector<std::uint16_t> ranks;
  for (std::size_t k = 0; k < plan.neighbours.size(); ++k) {
    if ((set.neighbours >> k & 1) != 0) ranks.push_back(plan.neighbours[k]);
  }
  return ranks;
}

namespace {

std::vector<int> ranks_of(const Plan& plan, Peers peers, std::size_t wide) {
  if (is_set(peers)) {
    if (set_of(peers) >= plan.sets.size()) return {};
    const std::vector<std::uint16_t> ranks = ranks_in(plan, plan.sets[set_of(peers)]);
    return {ranks.begin(), ranks.end()};
  }
  if (peers >= kFirstSet && peers != kWidePeer) return {};
  const std::size_t k = peers == kWidePeer ? wide : peers;
  if (k >= plan.neighbours.size()) return {};
  return {plan.neighbours[k]};
}

WidePeers wide_peers(const Plan& plan, std::size_t i) {
  return i < plan.wide_peers.size() ? plan.wide_peers[i] : WidePeers{};
}

}  // namespace

std::vector<int> ranks_received_from(const Plan& plan, std::size_t i) {
  return ranks_of(plan, plan.primitives[i].from, wide_peers(plan, i).from);
}

std::vector<int> ranks_sent_to(const Plan& plan, std::size_t i) {
  return ranks_of(plan, plan.primitives[i].to, wide_peers(plan, i).to);
}

}  // namespace unjam
