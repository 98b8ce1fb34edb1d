#include "reshard/bundles.h"

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

namespace unjam::reshard {
namespace {

// By the routes' numbers, and by `less` on each. There are many stripes and few on a route.
template <class Less>
void sort_by_route(std::size_t num_routes, std::vector<Stripe>* stripes, const Less& less) {
  std::vector<std::size_t> ends(num_routes + 1, 0);
  for (const Stripe& stripe : *stripes) ++ends[stripe.route + 1];
  for (std::size_t r = 0; r < num_routes; ++r) ends[r + 1] += ends[r];
  std::vector<std::size_t> next(ends.begin(), ends.end() - 1);
  std::vector<Stripe> sorted(stripes->size());
  for (const Stripe& stripe : *stripes) sorted[next[stripe.route]++] = stripe;
  const auto at = [&](std::size_t i) { return sorted.begin() + static_cast<std::ptrdiff_t>(i); };
  for (std::size_t r = 0; r < num_routes; ++r) std::sort(at(ends[r]), at(ends[r + 1]), less);
  *stripes = std::move(sorted);
}

}  // namespace

std::vector<Bundle> make_bundles(const Request& request, std::size_t num_routes,
                                 std::vector<Stripe>* stripes) {
  const std::int64_t most = request.options.max_bytes / request.options.window;
  std::vector<std::int64_t> bytes_of;
  for (const Tensor& tensor : request.tensors) bytes_of.push_back(wire_bytes(tensor));
  const auto each = [&](const Stripe& s) { return bytes_of[s.tensor]; };
  sort_by_route(num_routes, stripes, [&](const Stripe& a, const Stripe& b) {
    return std::tuple(-each(a), a.tensor, a.cell, a.begin) <
           std::tuple(-each(b), b.tensor, b.cell, b.begin);
  });
  std::vector<Bundle> bundles;
  std::vector<Stripe> cut;
  cut.reserve(stripes->size());
  for (Stripe stripe : *stripes) {
    const std::int64_t size = each(stripe), end = stripe.end;
    while (stripe.begin < end) {
      const bool full = bundles.empty() || bundles.back().route != stripe.route ||
                        most - bundles.back().bytes < size;
      if (full) {
        bundles.emplace_back();
        bundles.back().route = stripe.route;
        bundles.back().first_stripe = cut.size();
      }
      Bundle& bundle = bundles.back();
      stripe.end = std::min(end, stripe.begin + (most - bundle.bytes) / size);
      bundle.bytes += (stripe.end - stripe.begin) * size;
      ++bundle.num_stripes;
      cut.push_back(stripe);
      stripe.begin = stripe.end;
    }
  }
  *stripes = std::move(cut);
  return bundles;
}

}  // namespace unjam::reshard
