// Which ranks share a host, and which a NIC. A port is a NIC of a host: it sends and receives at
// the same time. Inside a host data are taken to be free.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace unjam::reshard {

struct Topology {
  // Of each rank; NICs are numbered inside their host.
  std::vector<std::int32_t> host, nic;
};

// Every rank a host of its own, with one NIC: so are GPUs between which only NVLink counts.
Topology ranks_alone(std::int64_t ranks);
// Consecutive ranks a host; NICs are given to them in turns: the first ones have the first.
Topology equal_hosts(std::int64_t ranks, int ranks_per_host, int nics_per_host);

std::string topology_error(const Topology& topology, std::int32_t highest_rank);

// Hosts and ports by dense numbers, in the order of the topology's.
struct Ports {
  explicit Ports(const Topology& topology);

  int count = 0, hosts = 0;
  std::vector<int> port_of, host_of;    // by rank
  std::vector<std::int32_t> host, nic;  // of a port: the topology's numbers
};

}  // namespace unjam::reshard
