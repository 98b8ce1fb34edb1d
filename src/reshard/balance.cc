#include "reshard/balance.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

namespace unjam::reshard {
namespace {

constexpr std::int64_t kUnbounded = std::numeric_limits<std::int64_t>::max();

// Dinic's algorithm. Node 0 is the source, node 1 the sink.
class Flow {
 public:
  explicit Flow(std::size_t nodes) : out_(nodes), level_(nodes), next_(nodes) {}

  // The edge's number; its reverse is the next one.
  std::size_t add(std::size_t from, std::size_t to, std::int64_t capacity) {
    const std::size_t edge = to_.size();
    to_.insert(to_.end(), {to, from});
    left_.insert(left_.end(), {capacity, 0});
    out_[from].push_back(edge);
    out_[to].push_back(edge + 1);
    return edge;
  }
  void raise(std::size_t edge, std::int64_t by) { left_[edge] += by; }
  std::int64_t flow(std::size_t edge) const { return left_[edge + 1]; }
  // After run(): what could still get more.
  bool reached(std::size_t node) const { return level_[node] >= 0; }

  // Adds all that still flows; how much that was.
  std::int64_t run() {
    std::int64_t sum = 0;
    while (find_levels()) {
      std::fill(next_.begin(), next_.end(), 0);
      while (const std::int64_t pushed = push(0, kUnbounded)) sum += pushed;
    }
    return sum;
  }

 private:
  bool find_levels() {
    std::fill(level_.begin(), level_.end(), -1);
    level_[0] = 0;
    std::vector<std::size_t> queue{0};
    for (std::size_t i = 0; i < queue.size(); ++i) {
      for (const std::size_t edge : out_[queue[i]]) {
        if (left_[edge] == 0 || level_[to_[edge]] >= 0) continue;
        level_[to_[edge]] = level_[queue[i]] + 1;
        queue.push_back(to_[edge]);
      }
    }
    return level_[1] >= 0;
  }
  // One path. Not recursive: paths are as long as there are nodes.
  std::int64_t push(std::size_t node, std::int64_t limit) {
    std::vector<std::size_t> path;
    while (node != 1) {
      bool found = false;
      for (std::size_t& i = next_[node]; i < out_[node].size(); ++i) {
        const std::size_t edge = out_[node][i];
        if (left_[edge] == 0 || level_[to_[edge]] != level_[node] + 1) continue;
        path.push_back(edge);
        node = to_[edge];
        found = true;
        break;
      }
      if (found) continue;
      if (path.empty()) return 0;
      node = to_[path.back() ^ 1];
      path.pop_back();
      ++next_[node];
    }
    for (const std::size_t edge : path) limit = std::min(limit, left_[edge]);
    for (const std::size_t edge : path) {
      left_[edge] -= limit;
      left_[edge ^ 1] += limit;
    }
    return limit;
  }

  std::vector<std::size_t> to_;
  std::vector<std::int64_t> left_;
  std::vector<std::vector<std::size_t>> out_;
  std::vector<int> level_;
  std::vector<std::size_t> next_;
};

std::int64_t divide_up(std::int64_t a, std::int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }

// Ports that share no work, with each other's neither, are balanced apart.
struct Component {
  std::vector<std::size_t> work;
  std::vector<int> ports;
};

std::vector<Component> components(int num_ports, const std::vector<SharedWork>& work) {
  std::vector<int> of(static_cast<std::size_t>(num_ports));
  std::iota(of.begin(), of.end(), 0);
  const auto root = [&](int port) {
    while (of[static_cast<std::size_t>(port)] != port) {
      int& up = of[static_cast<std::size_t>(port)];
      up = of[static_cast<std::size_t>(up)];
      port = up;
    }
    return port;
  };
  for (const SharedWork& w : work) {
    for (const int port : w.ports) of[static_cast<std::size_t>(root(port))] = root(w.ports[0]);
  }
  std::vector<Component> all(static_cast<std::size_t>(num_ports));
  for (std::size_t i = 0; i < work.size(); ++i) {
    all[static_cast<std::size_t>(root(work[i].ports[0]))].work.push_back(i);
  }
  for (int port = 0; port < num_ports; ++port) {
    all[static_cast<std::size_t>(root(port))].ports.push_back(port);
  }
  std::erase_if(all, [](const Component& c) { return c.work.empty(); });
  return all;
}

std::int64_t balance_part(const Component& part, const std::vector<SharedWork>& work,
                          std::vector<std::size_t>* node_of_port, Balance* result) {
  const std::size_t works = part.work.size(), ports = part.ports.size();
  Flow flow(2 + works + ports);
  std::int64_t total = 0;
  for (std::size_t p = 0; p < ports; ++p) {
    (*node_of_port)[static_cast<std::size_t>(part.ports[p])] = 2 + works + p;
  }
  std::vector<std::vector<std::size_t>> edges(works);
  for (std::size_t i = 0; i < works; ++i) {
    const SharedWork& w = work[part.work[i]];
    total += w.bytes;
    flow.add(0, 2 + i, w.bytes);
    for (const int port : w.ports) {
      edges[i].push_back(
          flow.add(2 + i, (*node_of_port)[static_cast<std::size_t>(port)], kUnbounded / 2));
    }
  }
  std::int64_t most = divide_up(total, static_cast<std::int64_t>(ports)), done = 0;
  std::vector<std::size_t> sinks;
  for (std::size_t p = 0; p < ports; ++p) sinks.push_back(flow.add(2 + works + p, 1, most));
  while ((done += flow.run()) < total) {
    // What cannot flow can be done by the reached ports only, and these are full.
    std::int64_t bytes = 0, full = 0;
    for (std::size_t i = 0; i < works; ++i) {
      if (flow.reached(2 + i)) bytes += work[part.work[i]].bytes;
    }
    for (std::size_t p = 0; p < ports; ++p) full += flow.reached(2 + works + p) ? 1 : 0;
    const std::int64_t higher = divide_up(bytes, full);
    for (const std::size_t sink : sinks) flow.raise(sink, higher - most);
    most = higher;
  }
  for (std::size_t i = 0; i < works; ++i) {
    for (const std::size_t edge : edges[i]) {
      result->bytes[part.work[i]].push_back(flow.flow(edge));
    }
  }
  return most;
}

}  // namespace

Balance balance(int num_ports, const std::vector<SharedWork>& work) {
  Balance result;
  result.bytes.resize(work.size());
  std::vector<std::size_t> node_of_port(static_cast<std::size_t>(num_ports));
  for (const Component& part : components(num_ports, work)) {
    result.most = std::max(result.most, balance_part(part, work, &node_of_port, &result));
  }
  return result;
}

}  // namespace unjam::reshard
