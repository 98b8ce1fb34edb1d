#include "reshard/senders.h"

#include <algorithm>
#include <functional>
#include <map>
#include <unordered_map>
#include <utility>

#include "reshard/balance.h"

namespace unjam::reshard {
namespace {

// A port that lacks no more than this part of a cell takes all of it.
constexpr std::int64_t kFineness = 64;
constexpr std::uint32_t kNone = UINT32_MAX;

// Gives equal things equal numbers, in the order in which they come.
template <class T>
class Numbers {
 public:
  std::uint32_t of(const T& thing) {
    const auto [at, is_new] = numbers_.try_emplace(thing, static_cast<std::uint32_t>(size()));
    if (is_new) things_.push_back(&at->first);
    return at->second;
  }
  std::size_t size() const { return things_.size(); }
  const T& operator[](std::uint32_t number) const { return *things_[number]; }

 private:
  std::map<T, std::uint32_t> numbers_;
  std::vector<const T*> things_;
};

// What happens to every cell that one set of ranks holds and another one wants.
struct Traffic {
  std::vector<std::int32_t> own;       // wanters that hold it
  std::vector<std::uint32_t> inside;   // routes inside of hosts that hold it
  std::uint32_t audience = kNone;      // hosts that have to get it through NICs
  std::uint32_t senders = kNone;       // which work on out-ports that is
  std::vector<std::uint32_t> entries;  // of each host of the audience: which work on its in-ports
  bool one_way_in = true;              // each of these hosts has but one port for it
  // By the port that it leaves, and the ports by which it comes in if there is a choice.
  std::map<std::vector<int>, std::uint32_t> routes;
};

using RouteKey = std::pair<std::pair<std::int32_t, std::uint32_t>, std::vector<std::int32_t>>;
using HostsKey = std::vector<std::vector<std::int32_t>>;

// How much of some work each of its ports is still to do. Whoever has most to do is next.
struct Quota {
  std::vector<int> ports;
  std::vector<std::int64_t> left;
};

struct Part {
  std::int64_t begin = 0, end = 0;
  int port = 0;
};

// Cuts elements [begin, end) by the ports' quotas, into `most` parts at most.
void cut(Quota* quota, std::int64_t begin, std::int64_t end, std::int64_t bytes_each, int most,
         std::int64_t grain, std::vector<Part>* parts) {
  while (begin < end) {
    const auto first = std::max_element(quota->left.begin(), quota->left.end());
    const auto i = static_cast<std::size_t>(first - quota->left.begin());
    const std::int64_t rest = end - begin, fits = *first / bytes_each;
    // With few parts left each must be larger than its port's quota, or the last one is too large.
    const std::int64_t n = std::max(fits, rest / most + (rest % most != 0 ? 1 : 0));
    const bool whole = most-- == 1 || fits < grain || rest - n < grain;
    const std::int64_t take = whole ? rest : n;
    *first -= take * bytes_each;
    parts->push_back({begin, begin + take, quota->ports[i]});
    begin += take;
  }
}

class Assigner {
 public:
  Assigner(const Request& request, const Ports& ports, const std::vector<TensorClass>& classes,
           const std::vector<std::uint32_t>& class_of)
      : request_(request), ports_(ports), classes_(classes), class_of_(class_of) {}

  Assignment run() {
    find_traffic();
    count_work();
    set_quotas();
    give_out();
    for (std::uint32_t i = 0; i < audiences_.size(); ++i) {
      result_.audiences.push_back({audiences_[i]});
    }
    for (std::uint32_t i = 0; i < routes_.size(); ++i) {
      const RouteKey& key = routes_[i];
      result_.routes.push_back({key.first.first, key.first.second, key.second});
    }
    return std::move(result_);
  }

 private:
  struct ClassCell {
    std::uint32_t traffic = 0;
    std::int64_t elements = 0;
  };

  int port_of(std::int32_t rank) const { return ports_.port_of[static_cast<std::size_t>(rank)]; }
  int host_of(std::int32_t rank) const { return ports_.host_of[static_cast<std::size_t>(rank)]; }
  std::vector<int> ports_of(const std::vector<std::int32_t>& ranks) const {
    std::vector<int> ports;
    for (const std::int32_t rank : ranks) ports.push_back(port_of(rank));
    std::sort(ports.begin(), ports.end());
    ports.erase(std::unique(ports.begin(), ports.end()), ports.end());
    return ports;
  }

  Traffic make_traffic(const std::vector<std::int32_t>& holders,
                       const std::vector<std::int32_t>& wanters) {
    Traffic traffic;
    std::map<int, std::int32_t> holder_on;  // of each host, its first
    for (const std::int32_t rank : holders) holder_on.try_emplace(host_of(rank), rank);
    std::map<int, std::vector<std::int32_t>> near, far;
    std::vector<std::int32_t> sorted = holders;
    std::sort(sorted.begin(), sorted.end());
    for (const std::int32_t rank : wanters) {
      const int host = host_of(rank);
      if (std::binary_search(sorted.begin(), sorted.end(), rank)) {
        traffic.own.push_back(rank);
      } else if (holder_on.contains(host)) {
        near[host].push_back(rank);
      } else {
        far[host].push_back(rank);
      }
    }
    for (auto& [host, ranks] : near) {
      const std::uint32_t audience = audiences_.of({ranks});
      traffic.inside.push_back(routes_.of({{holder_on[host], audience}, {ranks[0]}}));
    }
    if (far.empty()) return traffic;
    HostsKey hosts;
    for (auto& [host, ranks] : far) {
      const std::vector<int> entries = ports_of(ranks);
      traffic.one_way_in = traffic.one_way_in && entries.size() == 1;
      traffic.entries.push_back(ins_.of(entries));
      hosts.push_back(std::move(ranks));
    }
    traffic.audience = audiences_.of(hosts);
    traffic.senders = outs_.of(ports_of(holders));
    return traffic;
  }

  void find_traffic() {
    Numbers<std::vector<std::int32_t>> sets;
    std::unordered_map<std::uint64_t, std::uint32_t> known;
    cells_.resize(classes_.size());
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      const TensorClass& of = classes_[c];
      std::vector<std::uint32_t> src_set, dst_set;
      for (const auto& ranks : of.holders) src_set.push_back(sets.of(ranks));
      for (const auto& ranks : of.wanters) dst_set.push_back(sets.of(ranks));
      cells_[c].resize(of.cells.count());
      for (std::uint64_t i = 0; i < of.cells.count(); ++i) {
        const std::uint32_t src = src_set[of.cells.src_tile(i)];
        const std::uint32_t dst = dst_set[of.cells.dst_tile(i)];
        const auto [at, is_new] = known.try_emplace(std::uint64_t{src} << 32 | dst,
                                                    static_cast<std::uint32_t>(traffic_.size()));
        if (is_new) traffic_.push_back(make_traffic(sets[src], sets[dst]));
        cells_[c][i] = {at->second, of.cells.elements(i)};
      }
    }
  }

  void count_work() {
    std::vector<std::int64_t> bytes(traffic_.size(), 0);
    for (std::size_t t = 0; t < class_of_.size(); ++t) {
      const std::int64_t each = wire_bytes(request_.tensors[t]);
      for (const ClassCell& cell : cells_[class_of_[t]]) {
        bytes[cell.traffic] += cell.elements * each;
      }
    }
    out_bytes_.assign(outs_.size(), 0);
    in_bytes_.assign(ins_.size(), 0);
    for (std::size_t i = 0; i < traffic_.size(); ++i) {
      if (traffic_[i].audience == kNone) continue;
      out_bytes_[traffic_[i].senders] += bytes[i];
      for (const std::uint32_t entry : traffic_[i].entries) in_bytes_[entry] += bytes[i];
    }
  }

  std::int64_t set_quotas(const Numbers<std::vector<int>>& sets,
                          const std::vector<std::int64_t>& bytes, std::vector<Quota>* quotas) {
    std::vector<SharedWork> work;
    for (std::uint32_t i = 0; i < sets.size(); ++i) work.push_back({sets[i], bytes[i]});
    Balance balanced = balance(ports_.count, work);
    for (std::uint32_t i = 0; i < sets.size(); ++i) {
      quotas->push_back({sets[i], std::move(balanced.bytes[i])});
    }
    return balanced.most;
  }
  void set_quotas() {
    result_.out_bound = set_quotas(outs_, out_bytes_, &out_quota_);
    result_.in_bound = set_quotas(ins_, in_bytes_, &in_quota_);
  }

  // Large cells first: small ones fill up what is left then. Equal ones in turns over the tensors.
  void give_out() {
    using Cell = std::uint32_t;
    std::vector<std::map<std::int64_t, std::vector<Cell>>> by_elements(classes_.size());
    for (std::size_t c = 0; c < classes_.size(); ++c) {
      for (Cell i = 0; i < cells_[c].size(); ++i) {
        by_elements[c][cells_[c][i].elements].push_back(i);
      }
    }
    using Some = std::pair<std::uint32_t, const std::vector<Cell>*>;  // a tensor's, all of a size
    std::map<std::int64_t, std::vector<Some>, std::greater<>> by_bytes;
    for (std::uint32_t t = 0; t < class_of_.size(); ++t) {
      const std::int64_t each = wire_bytes(request_.tensors[t]);
      for (const auto& [elements, cells] : by_elements[class_of_[t]]) {
        by_bytes[elements * each].emplace_back(t, &cells);
      }
    }
    for (const auto& [bytes, all] : by_bytes) {
      for (const auto& [tensor, cells] : all) {
        for (const Cell cell : *cells) give_out(tensor, cell);
      }
    }
  }

  void give_out(std::uint32_t tensor, std::uint32_t cell) {
    const ClassCell& of = cells_[class_of_[tensor]][cell];
    Traffic& traffic = traffic_[of.traffic];
    for (const std::int32_t rank : traffic.own) result_.copies.push_back({tensor, rank, cell});
    for (const std::uint32_t route : traffic.inside) {
      result_.stripes.push_back({tensor, route, cell, 0, of.elements});
    }
    if (traffic.audience != kNone) give_out(tensor, cell, of.elements, traffic);
  }

  void give_out(std::uint32_t tensor, std::uint64_t cell, std::int64_t elements, Traffic& traffic) {
    const std::int64_t each = wire_bytes(request_.tensors[tensor]);
    const std::int64_t grain = std::max<std::int64_t>(1, elements / kFineness);
    const int most = request_.options.stripes;
    parts_.clear();
    cut(&out_quota_[traffic.senders], 0, elements, each, most, grain, &parts_);
    // Of each part, the ports on its way.
    ways_.resize(parts_.size());
    for (std::size_t i = 0; i < parts_.size(); ++i) ways_[i].assign(1, parts_[i].port);
    if (!traffic.one_way_in) cut_by_entries(traffic, each, most, grain);
    const TensorClass& of = classes_[class_of_[tensor]];
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      auto known = traffic.routes.find(ways_[i]);
      if (known == traffic.routes.end()) {
        const std::uint32_t route =
            route_of(of.holders[of.cells.src_tile(cell)], traffic, ways_[i]);
        known = traffic.routes.emplace(ways_[i], route).first;
      }
      result_.stripes.push_back({tensor, known->second, cell, parts_[i].begin, parts_[i].end});
    }
  }

  // Into each host through the ports that it has for this. Their quotas seldom end where those of
  // senders do, so parts are cut further; into four times as many at most.
  void cut_by_entries(const Traffic& traffic, std::int64_t each, int most, std::int64_t grain) {
    for (const std::uint32_t entry : traffic.entries) {
      std::vector<Part> finer;
      std::vector<std::vector<int>> finer_ways;
      int spare = std::min(most, 4 * most - static_cast<int>(parts_.size()));
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        const std::size_t before = finer.size();
        cut(&in_quota_[entry], parts_[i].begin, parts_[i].end, each, 1 + std::max(0, spare), grain,
            &finer);
        spare -= static_cast<int>(finer.size() - before) - 1;
        for (std::size_t k = before; k < finer.size(); ++k) {
          finer_ways.push_back(ways_[i]);
          finer_ways.back().push_back(finer[k].port);
        }
      }
      parts_ = std::move(finer);
      ways_ = std::move(finer_ways);
    }
  }

  std::int32_t first_at(const std::vector<std::int32_t>& ranks, int port) const {
    return *std::find_if(ranks.begin(), ranks.end(),
                         [&](std::int32_t rank) { return port_of(rank) == port; });
  }

  std::uint32_t route_of(const std::vector<std::int32_t>& holders, const Traffic& traffic,
                         const std::vector<int>& way) {
    const HostsKey& hosts = audiences_[traffic.audience];
    RouteKey key{{first_at(holders, way[0]), traffic.audience}, {}};
    for (std::size_t h = 0; h < hosts.size(); ++h) {
      const int port = traffic.one_way_in ? ins_[traffic.entries[h]][0] : way[h + 1];
      key.second.push_back(first_at(hosts[h], port));
    }
    return routes_.of(key);
  }

  const Request& request_;
  const Ports& ports_;
  const std::vector<TensorClass>& classes_;
  const std::vector<std::uint32_t>& class_of_;

  std::vector<Traffic> traffic_;
  std::vector<std::vector<ClassCell>> cells_;  // by class
  Numbers<std::vector<int>> outs_, ins_;       // sets of ports that can do the same work
  std::vector<std::int64_t> out_bytes_, in_bytes_;
  std::vector<Quota> out_quota_, in_quota_;
  Numbers<HostsKey> audiences_;
  Numbers<RouteKey> routes_;
  std::vector<Part> parts_;  // of the cell that is given out now
  std::vector<std::vector<int>> ways_;
  Assignment result_;
};

}  // namespace

TensorClass::TensorClass(const Request& request, const Tensor& tensor)
    : src(make_layout(request.src, tensor.src, tensor.shape)),
      dst(make_layout(request.dst, tensor.dst, tensor.shape)),
      cells(src, dst),
      holders(ranks_by_tile(request.src, src)),
      wanters(ranks_by_tile(request.dst, dst)) {}

Assignment assign(const Request& request, const Ports& ports,
                  const std::vector<TensorClass>& classes,
                  const std::vector<std::uint32_t>& class_of) {
  return Assigner(request, ports, classes, class_of).run();
}

}  // namespace unjam::reshard
