#include "reshard/bundles.h"

#include <algorithm>
#include <tuple>
#include <utility>

namespace unjam::reshard {

std::vector<Bundle> make_bundles(const Request& request, std::vector<Stripe>* stripes) {
  const std::int64_t most = request.options.max_bytes / request.options.window;
  const auto each = [&](const Stripe& s) { return wire_bytes(request.tensors[s.tensor]); };
  std::sort(stripes->begin(), stripes->end(), [&](const Stripe& a, const Stripe& b) {
    return std::tuple(a.route, -each(a), a.tensor, a.cell, a.begin) <
           std::tuple(b.route, -each(b), b.tensor, b.cell, b.begin);
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
