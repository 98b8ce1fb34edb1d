#include "reshard/plan.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "base/hash.h"
#include "reshard/order.h"

namespace unjam::reshard {
namespace {

// Changes whenever the same request may be planned in another way.
constexpr std::uint64_t kPlannerVersion = 1;
// Cells of all tensors: what is kept of each fits memory up to here.
constexpr std::uint64_t kMostCells = std::uint64_t{1} << 26;

// Ranks of all bundles, for the same reason.
constexpr std::int64_t kMostHops = std::int64_t{1} << 26;

using Shape = std::vector<std::int64_t>;
using PlacementKey = std::vector<std::tuple<int, std::int32_t, std::int64_t>>;

PlacementKey key_of(const std::vector<Placement>& placements) {
  PlacementKey key;
  for (const Placement& p : placements) key.emplace_back(static_cast<int>(p.kind), p.dim, p.split);
  return key;
}

void find_classes(Plan* plan) {
  std::map<std::tuple<Shape, PlacementKey, PlacementKey>, std::uint32_t> known;
  std::uint64_t cells = 0;
  for (const Tensor& tensor : plan->request.tensors) {
    const auto [at, is_new] =
        known.try_emplace(std::tuple(tensor.shape, key_of(tensor.src), key_of(tensor.dst)),
                          static_cast<std::uint32_t>(plan->classes.size()));
    if (is_new) plan->classes.emplace_back(plan->request, tensor);
    plan->class_of.push_back(at->second);
    const std::uint64_t more = plan->classes[at->second].cells.count();
    if (more > kMostCells - cells) {
      throw BadRequest("the tensors have more than " + std::to_string(kMostCells) +
                       " pairs of tiles that meet: plan fewer at once");
    }
    cells += more;
  }
}

// Before there are any bundles.
void check_hops(const Plan& plan, const Assignment& assignment) {
  std::vector<std::int64_t> bytes(assignment.routes.size(), 0);
  for (const Stripe& stripe : plan.stripes) {
    bytes[stripe.route] +=
        (stripe.end - stripe.begin) * wire_bytes(plan.request.tensors[stripe.tensor]);
  }
  const std::int64_t most = plan.request.options.max_bytes / plan.request.options.window;
  std::int64_t left = kMostHops;
  for (std::size_t r = 0; r < bytes.size(); ++r) {
    std::int64_t ranks = 1;
    for (const auto& host : assignment.audiences[assignment.routes[r].audience].hosts) {
      ranks += static_cast<std::int64_t>(host.size());
    }
    const std::int64_t bundles = bytes[r] / most + 1;
    if (bundles > left / ranks) {
      throw BadRequest("the plan has more than " + std::to_string(kMostHops) +
                       " ranks in its bundles: give a larger max_bytes, or plan fewer tensors");
    }
    left -= bundles * ranks;
  }
}

std::uint64_t digest_of(const Plan& plan) {
  std::uint64_t hash = hash_combine(request_hash(plan.request), kPlannerVersion);
  const auto mix = [&hash](auto value) {
    hash = hash_combine(hash, static_cast<std::uint64_t>(value));
  };
  for (const Bundle& bundle : plan.bundles) {
    mix(bundle.round);
    for (const Hop& hop : bundle.hops)
      mix(std::uint64_t{static_cast<std::uint32_t>(hop.rank)} << 32 |
          static_cast<std::uint32_t>(hop.parent));
    mix(bundle.num_stripes);
    for (std::uint64_t i = 0; i < bundle.num_stripes; ++i) {
      const Stripe& stripe = plan.stripes[bundle.first_stripe + i];
      mix(stripe.tensor);
      mix(stripe.cell);
      mix(stripe.begin);
      mix(stripe.end);
    }
  }
  return hash;
}

}  // namespace

std::int64_t Plan::busiest() const {
  std::int64_t most = 0;
  for (const std::int64_t bytes : loads.out) most = std::max(most, bytes);
  for (const std::int64_t bytes : loads.in) most = std::max(most, bytes);
  return most;
}

std::int64_t Plan::received() const {
  std::int64_t sum = 0;
  for (const std::int64_t bytes : loads.in) sum += bytes;
  return sum;
}

Plan make_plan(Request request) {
  const std::string error = request_error(request);
  if (!error.empty()) throw BadRequest(error);
  sort_tensors(&request);
  Ports ports(request.topology);
  Plan plan{std::move(request), std::move(ports), {}, {}, {}, {}, {}, {}, 0, 0};
  find_classes(&plan);
  Assignment assignment = assign(plan.request, plan.ports, plan.classes, plan.class_of);
  plan.stripes = std::move(assignment.stripes);
  plan.copies = std::move(assignment.copies);
  check_hops(plan, assignment);
  plan.bundles = make_bundles(plan.request, assignment.routes.size(), &plan.stripes);
  plan.loads = set_hops(plan.ports, assignment, &plan.bundles);
  set_order(plan.ports, &plan.bundles);
  plan.bound = std::max(assignment.out_bound, assignment.in_bound);
  plan.digest = digest_of(plan);
  return plan;
}

}  // namespace unjam::reshard
