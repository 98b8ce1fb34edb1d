// A pattern's ranks on a machine: who stands where, and which ports lie on the way between two.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "plan/clock/clock.h"

namespace unjam {

// Picoseconds for a byte; none at an infinite rate.
constexpr double ps_per_byte(double gb_per_s) { return 1000.0 / gb_per_s; }

// From one rank to another, as they are numbered where all are run: of a folded pattern one of them
// may stand for another rank that is run.
struct Way {
  int from = 0, to = 0;              // ranks that are run
  int from_place = 0, to_place = 0;  // whom they stand for
  std::uint32_t num_ports = 0;
  bool between_nodes = false, between_leaves = false;
  Picoseconds latency = 0;
};

class Network {
 public:
  Network(const Pattern& pattern, const Machine& machine);

  const std::vector<Way>& ways() const { return ways_; }
  // The ways of a step's peers are way(first_way(s)), …: from whom, then to whom.
  std::uint32_t first_way(const ClockStep& s) const { return s.first_peer; }
  std::uint32_t way(std::uint32_t i) const { return way_of_peer_[i]; }

  int nodes() const { return nodes_; }
  int node_of(int rank) const { return rank / machine_.gpus_per_node; }

  // The i-th port on a way, by the given lane.
  std::uint32_t port(const Way& way, std::uint32_t i, std::uint32_t lane) const;
  PortClass slowest(const Way& way) const;

  std::uint32_t num_ports() const { return first_[kNumPortClasses]; }
  std::uint32_t num_ports(PortClass c) const { return first_[index(c) + 1] - first_[index(c)]; }
  PortClass class_of(std::uint32_t port) const;
  // Of the ports of its class, which one.
  std::uint32_t place_of(std::uint32_t port) const { return port - first_[index(class_of(port))]; }
  double ps_of(std::uint32_t port) const { return ps_[index(class_of(port))]; }

 private:
  static std::size_t index(PortClass c) { return static_cast<std::size_t>(c); }
  std::uint32_t first(PortClass c) const { return first_[index(c)]; }
  Way make_way(int from, int to) const;
  std::uint32_t nic(int rank, std::uint32_t lane) const;
  std::uint32_t leaf(int rank) const;

  const Machine& machine_;
  int ranks_ = 0, nodes_ = 0, leaves_ = 0;
  bool one_leaf_ = false;  // of a pattern that is folded onto a node
  std::vector<Way> ways_;
  std::vector<std::uint32_t> way_of_peer_;
  std::array<std::uint32_t, kNumPortClasses + 1> first_ = {};
  std::array<double, kNumPortClasses> ps_ = {};
};

}  // namespace unjam
