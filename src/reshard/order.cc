#include "reshard/order.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace unjam::reshard {
namespace {

// Rounds in which a port, in one direction, is taken: a bit each.
using Taken = std::vector<std::uint64_t>;

}  // namespace

void set_order(const Ports& ports, std::vector<Bundle>* bundles) {
  const auto rank_at = [](const std::vector<int>& of, std::int32_t rank) {
    return static_cast<std::size_t>(of[static_cast<std::size_t>(rank)]);
  };
  std::stable_sort(bundles->begin(), bundles->end(),
                   [](const Bundle& a, const Bundle& b) { return a.bytes > b.bytes; });
  std::vector<Taken> taken(2 * static_cast<std::size_t>(ports.count));
  std::vector<std::size_t> used;
  for (Bundle& bundle : *bundles) {
    used.clear();
    for (const Hop& hop : bundle.hops) {
      if (hop.parent < 0) continue;
      if (rank_at(ports.host_of, hop.rank) == rank_at(ports.host_of, hop.parent)) continue;
      used.push_back(2 * rank_at(ports.port_of, hop.parent));
      used.push_back(2 * rank_at(ports.port_of, hop.rank) + 1);
    }
    // The first round that is free at all of them.
    for (std::size_t word = 0;; ++word) {
      std::uint64_t busy = 0;
      for (const std::size_t port : used) {
        if (word < taken[port].size()) busy |= taken[port][word];
      }
      if (busy == UINT64_MAX) continue;
      const auto bit = static_cast<std::size_t>(std::countr_one(busy));
      bundle.round = static_cast<std::uint32_t>(64 * word + bit);
      for (const std::size_t port : used) {
        if (taken[port].size() <= word) taken[port].resize(word + 1);
        taken[port][word] |= std::uint64_t{1} << bit;
      }
      break;
    }
  }
  std::stable_sort(bundles->begin(), bundles->end(),
                   [](const Bundle& a, const Bundle& b) { return a.round < b.round; });
}

}  // namespace unjam::reshard
