#include "reshard/rank_plan.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace unjam::reshard {
namespace {

std::vector<Box> boxes_of(const Plan& plan, const Stripe& stripe) {
  std::vector<Box> boxes;
  plan.classes[plan.class_of[stripe.tensor]].cells.add_boxes(stripe.cell, stripe.begin, stripe.end,
                                                             &boxes);
  return boxes;
}

std::int64_t elements(const Box& box) {
  std::int64_t n = 1;
  for (const std::int64_t size : box.size) n *= size;
  return n;
}

// Gives steps and copies to `of(rank)`, which is null for ranks that nobody asks for.
void fill(const Plan& plan, const std::function<RankPlan*(std::int32_t)>& of) {
  for (std::uint32_t b = 0; b < plan.bundles.size(); ++b) {
    const Bundle& bundle = plan.bundles[b];
    std::vector<Segment> pack, unpack;
    bool ready = false;
    for (const Hop& hop : bundle.hops) {
      RankPlan* mine = of(hop.rank);
      if (mine == nullptr) continue;
      if (!ready) {
        std::int64_t at = 0;
        for (std::uint64_t i = 0; i < bundle.num_stripes; ++i) {
          const Stripe& stripe = plan.stripes[bundle.first_stripe + i];
          for (Box& box : boxes_of(plan, stripe)) {
            const std::int64_t bytes =
                elements(box) * wire_bytes(plan.request.tensors[stripe.tensor]);
            pack.push_back({stripe.tensor, at, std::move(box.src_start), box.size});
            unpack.push_back({stripe.tensor, at, std::move(box.dst_start), std::move(box.size)});
            at += bytes;
          }
        }
        ready = true;
      }
      Step step;
      step.bundle = b;
      step.parent = hop.parent;
      for (const Hop& other : bundle.hops) {
        if (other.parent == hop.rank) step.children.push_back(other.rank);
      }
      (hop.parent < 0 ? step.pack : step.unpack) = hop.parent < 0 ? pack : unpack;
      mine->steps.push_back(std::move(step));
    }
  }
  for (const LocalCopy& copy : plan.copies) {
    RankPlan* mine = of(copy.rank);
    if (mine == nullptr) continue;
    const Cells& cells = plan.classes[plan.class_of[copy.tensor]].cells;
    std::vector<Box> boxes;
    cells.add_boxes(copy.cell, 0, cells.elements(copy.cell), &boxes);
    for (Box& box : boxes) mine->copies.push_back({copy.tensor, std::move(box)});
  }
}

bool find_shape(const Mesh& mesh, const Layout& layout, std::int32_t rank,
                std::vector<std::int64_t>* shape) {
  const auto at = std::find(mesh.ranks.begin(), mesh.ranks.end(), rank);
  if (at == mesh.ranks.end()) return false;
  const auto position = static_cast<std::size_t>(at - mesh.ranks.begin());
  for (std::size_t d = 0; d < layout.dims.size(); ++d) {
    const auto tile = static_cast<std::size_t>(layout.tile_of[position][d]);
    shape->push_back(tile_size(layout.dims[d].tiles[tile]));
  }
  return true;
}

}  // namespace

RankPlan rank_plan(const Plan& plan, std::int32_t rank) {
  RankPlan mine;
  fill(plan, [&](std::int32_t other) { return other == rank ? &mine : nullptr; });
  return mine;
}

std::vector<RankPlan> rank_plans(const Plan& plan) {
  std::vector<RankPlan> all(plan.ports.port_of.size());
  fill(plan, [&](std::int32_t rank) { return &all[static_cast<std::size_t>(rank)]; });
  return all;
}

LocalShapes local_shapes(const Plan& plan, std::uint32_t tensor, std::int32_t rank) {
  const TensorClass& of = plan.classes[plan.class_of[tensor]];
  LocalShapes shapes;
  shapes.in_src = find_shape(plan.request.src, of.src, rank, &shapes.src);
  shapes.in_dst = find_shape(plan.request.dst, of.dst, rank, &shapes.dst);
  return shapes;
}

}  // namespace unjam::reshard
