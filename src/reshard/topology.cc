#include "reshard/topology.h"

#include <algorithm>
#include <map>
#include <utility>

namespace unjam::reshard {

Topology ranks_alone(std::int64_t ranks) { return equal_hosts(ranks, 1, 1); }

Topology equal_hosts(std::int64_t ranks, int ranks_per_host, int nics_per_host) {
  Topology topology;
  for (std::int64_t r = 0; r < ranks; ++r) {
    topology.host.push_back(static_cast<std::int32_t>(r / ranks_per_host));
    topology.nic.push_back(
        static_cast<std::int32_t>(r % ranks_per_host * nics_per_host / ranks_per_host));
  }
  return topology;
}

std::string topology_error(const Topology& topology, std::int32_t highest_rank) {
  if (topology.host.size() != topology.nic.size()) {
    return "the topology has " + std::to_string(topology.host.size()) + " hosts and " +
           std::to_string(topology.nic.size()) + " NICs: give both for each rank";
  }
  if (highest_rank >= 0 && topology.host.size() <= static_cast<std::size_t>(highest_rank)) {
    return "the topology knows " + std::to_string(topology.host.size()) + " ranks, not rank " +
           std::to_string(highest_rank) + " of a mesh: give host and NIC of each rank";
  }
  for (std::size_t r = 0; r < topology.host.size(); ++r) {
    if (topology.host[r] < 0 || topology.nic[r] < 0) {
      return "rank " + std::to_string(r) + " has host " + std::to_string(topology.host[r]) +
             " and NIC " + std::to_string(topology.nic[r]) + ": numbers begin at 0";
    }
  }
  return "";
}

Ports::Ports(const Topology& topology) {
  std::map<std::pair<std::int32_t, std::int32_t>, int> ports;
  std::map<std::int32_t, int> known;
  for (std::size_t r = 0; r < topology.host.size(); ++r) {
    ports[{topology.host[r], topology.nic[r]}] = 0;
    known[topology.host[r]] = 0;
  }
  for (auto& [where, number] : ports) {
    number = count++;
    host.push_back(where.first);
    nic.push_back(where.second);
  }
  for (auto& [name, number] : known) number = hosts++;
  for (std::size_t r = 0; r < topology.host.size(); ++r) {
    port_of.push_back(ports[{topology.host[r], topology.nic[r]}]);
    host_of.push_back(known[topology.host[r]]);
  }
}

}  // namespace unjam::reshard
