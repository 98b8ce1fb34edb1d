// What travels together: all stripes of one route, cut so that a window of bundles fits the
// staging memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "reshard/senders.h"

namespace unjam::reshard {

// A rank that a bundle reaches, and from which rank. The root stands first and has parent -1; a
// parent stands before its children.
struct Hop {
  std::int32_t rank = 0, parent = -1;
};

struct Bundle {
  std::vector<Hop> hops;
  std::int64_t bytes = 0;
  std::uint64_t first_stripe = 0, num_stripes = 0;  // one behind the other, as they are packed
  std::uint32_t route = 0;
  std::uint32_t round = 0;  // of bundles that meet at no port; see order.h
};

// The bundles, without hops; puts the stripes into their order, cutting some. Elements of larger
// types come first in a bundle, so that all are aligned without gaps.
std::vector<Bundle> make_bundles(const Request& request, std::size_t num_routes,
                                 std::vector<Stripe>* stripes);

}  // namespace unjam::reshard
