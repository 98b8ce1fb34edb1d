#include "reshard/multicast.h"

#include <algorithm>
#include <map>
#include <utility>

namespace unjam::reshard {
namespace {

// Of each host, the first port that one of the ranks has there.
std::map<int, int> first_ports(const Ports& ports, const std::vector<std::int32_t>& ranks) {
  std::map<int, int> first;
  for (const std::int32_t rank : ranks) {
    const auto r = static_cast<std::size_t>(rank);
    first.try_emplace(ports.host_of[r], ports.port_of[r]);
  }
  return first;
}

Tasks tasks_of(const Plan& plan, bool multicast) {
  Tasks all;
  all.ports = plan.ports.count;
  for (std::size_t t = 0; t < plan.class_of.size(); ++t) {
    const TensorClass& of = plan.classes[plan.class_of[t]];
    const std::int64_t each = wire_bytes(plan.request.tensors[t]);
    for (std::uint64_t cell = 0; cell < of.cells.count(); ++cell) {
      const auto holders = first_ports(plan.ports, of.holders[of.cells.src_tile(cell)]);
      const std::vector<std::int32_t>& wanters = of.wanters[of.cells.dst_tile(cell)];
      Task task;
      task.bytes = of.cells.elements(cell) * each;
      for (const auto& [host, port] : holders) task.senders.push_back(port);
      if (multicast) {
        for (const auto& [host, port] : first_ports(plan.ports, wanters)) {
          if (!holders.contains(host)) task.receivers.push_back(port);
        }
        if (!task.receivers.empty()) all.tasks.push_back(std::move(task));
        continue;
      }
      // Whoever holds it may send: a copy has no host's first port to go by.
      task.senders.clear();
      for (const std::int32_t rank : of.holders[of.cells.src_tile(cell)]) {
        const int port = plan.ports.port_of[static_cast<std::size_t>(rank)];
        if (std::find(task.senders.begin(), task.senders.end(), port) == task.senders.end()) {
          task.senders.push_back(port);
        }
      }
      for (const std::int32_t rank : wanters) {
        const auto r = static_cast<std::size_t>(rank);
        if (holders.contains(plan.ports.host_of[r])) continue;
        task.receivers = {plan.ports.port_of[r]};
        all.tasks.push_back(task);
      }
    }
  }
  return all;
}

}  // namespace

Tasks tasks_of(const Plan& plan) { return tasks_of(plan, true); }
Tasks copies_of(const Plan& plan) { return tasks_of(plan, false); }

Tasks bundles_as_tasks(const Plan& plan) {
  const auto at = [](const std::vector<int>& of, std::int32_t rank) {
    return of[static_cast<std::size_t>(rank)];
  };
  Tasks all;
  all.ports = plan.ports.count;
  std::map<std::pair<int, std::vector<int>>, std::size_t> ways;
  for (const Bundle& bundle : plan.bundles) {
    Task task;
    task.senders = {at(plan.ports.port_of, bundle.hops[0].rank)};
    task.bytes = bundle.bytes;
    for (const Hop& hop : bundle.hops) {
      if (hop.parent < 0) continue;
      if (at(plan.ports.host_of, hop.rank) == at(plan.ports.host_of, hop.parent)) continue;
      task.receivers.push_back(at(plan.ports.port_of, hop.rank));
    }
    if (task.receivers.empty()) continue;
    const auto [way, is_new] =
        ways.try_emplace(std::pair(task.senders[0], task.receivers), all.tasks.size());
    if (is_new) {
      all.tasks.push_back(std::move(task));
    } else {
      all.tasks[way->second].bytes += task.bytes;
    }
  }
  return all;
}

}  // namespace unjam::reshard
