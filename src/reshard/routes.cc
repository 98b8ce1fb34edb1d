#include "reshard/routes.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace unjam::reshard {

Loads set_hops(const Ports& ports, const Assignment& assignment, std::vector<Bundle>* bundles) {
  const auto port = [&](std::int32_t rank) {
    return static_cast<std::size_t>(ports.port_of[static_cast<std::size_t>(rank)]);
  };
  const auto host = [&](std::int32_t rank) {
    return ports.host_of[static_cast<std::size_t>(rank)];
  };
  Loads loads;
  loads.out.assign(static_cast<std::size_t>(ports.count), 0);
  loads.in = loads.out;
  // What roots send is fixed already; who hands on is chosen in view of that.
  const auto stays_inside = [&](const Route& route) {
    return host(route.entries[0]) == host(route.root);
  };
  for (const Bundle& bundle : *bundles) {
    const Route& route = assignment.routes[bundle.route];
    if (stays_inside(route)) continue;
    loads.out[port(route.root)] += bundle.bytes;
    for (const std::int32_t entry : route.entries) loads.in[port(entry)] += bundle.bytes;
  }
  std::vector<std::size_t> large_first(bundles->size());
  std::iota(large_first.begin(), large_first.end(), std::size_t{0});
  std::stable_sort(large_first.begin(), large_first.end(), [&](std::size_t a, std::size_t b) {
    return (*bundles)[a].bytes > (*bundles)[b].bytes;
  });
  std::vector<std::size_t> order;
  for (const std::size_t b : large_first) {
    Bundle& bundle = (*bundles)[b];
    const Route& route = assignment.routes[bundle.route];
    const Audience& audience = assignment.audiences[route.audience];
    order.resize(route.entries.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](std::size_t i, std::size_t k) {
      return loads.out[port(route.entries[i])] < loads.out[port(route.entries[k])];
    });
    bundle.hops = {{route.root, -1}};
    std::int32_t from = route.root;
    for (std::size_t i = 0; i < order.size(); ++i) {
      const std::int32_t entry = route.entries[order[i]];
      bundle.hops.push_back({entry, from});
      std::int32_t before = entry;
      for (const std::int32_t rank : audience.hosts[order[i]]) {
        if (rank == entry) continue;
        bundle.hops.push_back({rank, before});
        before = rank;
      }
      if (i + 1 < order.size()) loads.out[port(entry)] += bundle.bytes;
      from = entry;
    }
  }
  return loads;
}

}  // namespace unjam::reshard
