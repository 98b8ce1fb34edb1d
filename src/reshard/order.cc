#include "reshard/order.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace unjam::reshard {
namespace {

// Rounds in which a port, in one direction, is taken: a bit each.
struct Taken {
  std::vector<std::uint64_t> words;
  std::size_t full = 0;  // so many words at the beginning have no round left

  std::uint64_t word(std::size_t i) const { return i < words.size() ? words[i] : 0; }
  void take(std::size_t i, std::uint64_t bit) {
    if (words.size() <= i) words.resize(i + 1);
    words[i] |= bit;
    while (full < words.size() && words[full] == UINT64_MAX) ++full;
  }
};

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
    std::size_t word = 0;
    for (const std::size_t port : used) word = std::max(word, taken[port].full);
    for (;; ++word) {
      std::uint64_t busy = 0;
      for (const std::size_t port : used) busy |= taken[port].word(word);
      if (busy == UINT64_MAX) continue;
      const auto bit = static_cast<std::size_t>(std::countr_one(busy));
      bundle.round = static_cast<std::uint32_t>(64 * word + bit);
      for (const std::size_t port : used) taken[port].take(word, std::uint64_t{1} << bit);
      break;
    }
  }
  std::stable_sort(bundles->begin(), bundles->end(),
                   [](const Bundle& a, const Bundle& b) { return a.round < b.round; });
}

}  // namespace unjam::reshard
