#include "plan/clock/network.h"

#include <algorithm>
#include <cmath>

namespace unjam {
namespace {

int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Orders ways; both ranks may be below 0.
std::uint64_t key_of(int from, int to) {
  constexpr std::uint32_t kZero = 1u << 31;
  return std::uint64_t{static_cast<std::uint32_t>(from) + kZero} << 32 |
         (static_cast<std::uint32_t>(to) + kZero);
}
int from_of(std::uint64_t key) {
  return static_cast<int>(static_cast<std::uint32_t>(key >> 32) - (1u << 31));
}
int to_of(std::uint64_t key) {
  return static_cast<int>(static_cast<std::uint32_t>(key) - (1u << 31));
}

}  // namespace

Network::Network(const Pattern& pattern, const Machine& machine)
    : machine_(machine),
      ranks_(pattern.ranks),
      nodes_((pattern.ranks + machine.gpus_per_node - 1) / machine.gpus_per_node) {
  leaves_ = (nodes_ + machine.nodes_per_leaf - 1) / machine.nodes_per_leaf;
  one_leaf_ = pattern.folded && nodes_ < machine.nodes_per_leaf;
  const auto nics = static_cast<std::uint32_t>(nodes_ * machine.nics_per_node);
  const auto ranks = static_cast<std::uint32_t>(ranks_);
  const auto leaves = static_cast<std::uint32_t>(leaves_);
  const std::array<std::uint32_t, kNumPortClasses> counts = {ranks, ranks,  nics,
                                                             nics,  leaves, leaves};
  for (std::size_t c = 0; c < counts.size(); ++c) first_[c + 1] = first_[c] + counts[c];
  const double link = ps_per_byte(machine.link_gb_per_s), nic = ps_per_byte(machine.nic_gb_per_s);
  const double trunk =
      nic * machine.oversubscription / machine.nodes_per_leaf / machine.nics_per_node;
  ps_ = {link, link, nic, nic, trunk, trunk};

  // Of a folded pattern a way begins at a rank that is run.
  const auto key = [&](int from, int to) {
    const int turns = pattern.folded ? floor_div(from, ranks_) * ranks_ : 0;
    return key_of(from - turns, to - turns);
  };
  std::vector<std::uint64_t> keys;
  way_of_peer_.resize(pattern.peers.size());
  const auto for_each_peer = [&](auto&& f) {
    for (int r = 0; r < ranks_; ++r) {
      for (const ClockStep& s : pattern.program(r)) {
        std::uint32_t i = s.first_peer;
        for (const int q : pattern.from(s)) f(i++, key(q, r));
        for (const int q : pattern.to(s)) f(i++, key(r, q));
      }
    }
  };
  for_each_peer([&](std::uint32_t, std::uint64_t k) {
    const std::size_t n = keys.size();  // programs name few peers, again and again
    if ((n > 0 && keys[n - 1] == k) || (n > 1 && keys[n - 2] == k)) return;
    keys.push_back(k);
  });
  std::sort(keys.begin(), keys.end());
  keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
  for_each_peer([&](std::uint32_t i, std::uint64_t k) {
    way_of_peer_[i] =
        static_cast<std::uint32_t>(std::lower_bound(keys.begin(), keys.end(), k) - keys.begin());
  });
  ways_.reserve(keys.size());
  for (const std::uint64_t k : keys) ways_.push_back(make_way(from_of(k), to_of(k)));
}

Way Network::make_way(int from, int to) const {
  Way way;
  way.from_place = from;
  way.to_place = to;
  const auto run = [&](int place) { return place - floor_div(place, ranks_) * ranks_; };
  way.from = run(from);
  way.to = run(to);
  const int from_node = floor_div(from, machine_.gpus_per_node);
  const int to_node = floor_div(to, machine_.gpus_per_node);
  way.between_nodes = from_node != to_node;
  way.between_leaves = !one_leaf_ && floor_div(from_node, machine_.nodes_per_leaf) !=
                                         floor_div(to_node, machine_.nodes_per_leaf);
  way.num_ports = way.between_leaves ? 4 : 2;
  const double us = way.between_nodes ? machine_.network_us : machine_.link_us;
  way.latency = std::llround((us + (way.between_leaves ? machine_.leaf_us : 0)) * 1e6);
  return way;
}

std::uint32_t Network::nic(int rank, std::uint32_t lane) const {
  const int nics = machine_.nics_per_node, gpus = machine_.gpus_per_node;
  const int own = static_cast<int>(std::int64_t{rank % gpus} * nics / gpus);
  const int turn = machine_.nics_by_lane ? static_cast<int>(lane ^ lane >> 1) : 0;
  return static_cast<std::uint32_t>(rank / gpus * nics + (own + turn) % nics);
}

std::uint32_t Network::leaf(int rank) const {
  return static_cast<std::uint32_t>(node_of(rank) / machine_.nodes_per_leaf);
}

std::uint32_t Network::port(const Way& way, std::uint32_t i, std::uint32_t lane) const {
  if (!way.between_nodes) {
    return i == 0 ? first(PortClass::kLinkOut) + static_cast<std::uint32_t>(way.from)
                  : first(PortClass::kLinkIn) + static_cast<std::uint32_t>(way.to);
  }
  if (i == 0) return first(PortClass::kNicOut) + nic(way.from, lane);
  if (i + 1 == way.num_ports) return first(PortClass::kNicIn) + nic(way.to, lane);
  return i == 1 ? first(PortClass::kTrunkUp) + leaf(way.from)
                : first(PortClass::kTrunkDown) + leaf(way.to);
}

PortClass Network::slowest(const Way& way) const {
  if (!way.between_nodes) return PortClass::kLinkOut;
  const bool trunk =
      way.between_leaves && ps_[index(PortClass::kTrunkUp)] > ps_[index(PortClass::kNicOut)];
  return trunk ? PortClass::kTrunkUp : PortClass::kNicOut;
}

PortClass Network::class_of(std::uint32_t port) const {
  int c = 0;
  while (port >= first_[static_cast<std::size_t>(c) + 1]) ++c;
  return static_cast<PortClass>(c);
}

}  // namespace unjam
