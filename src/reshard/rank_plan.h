// What one rank does: from whom it gets each bundle, to whom it sends it, and what it copies
// between its tensors and the bundle.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/plan.h"

namespace unjam::reshard {

// A box of a local tensor, as one piece of a bundle, row-major in both.
struct Segment {
  std::uint32_t tensor = 0;
  std::int64_t at = 0;  // byte of the bundle
  std::vector<std::int64_t> start, size;
};

struct Step {
  std::uint32_t bundle = 0;  // its place in the plan
  std::int32_t parent = -1;  // the rank that it comes from; -1: it begins here
  std::vector<std::int32_t> children;
  std::vector<Segment> pack;    // from source tensors, where it begins
  std::vector<Segment> unpack;  // into destination tensors, elsewhere
};

// From the rank's source tensor into its destination tensor.
struct CopyBox {
  std::uint32_t tensor = 0;
  Box box;
};

struct RankPlan {
  std::vector<Step> steps;  // in the plan's order
  std::vector<CopyBox> copies;
};

RankPlan rank_plan(const Plan& plan, std::int32_t rank);
// Of all ranks of the topology.
std::vector<RankPlan> rank_plans(const Plan& plan);

// The shape of a rank's own part of a tensor; of a rank that is not in the mesh: none.
struct LocalShapes {
  std::vector<std::int64_t> src, dst;
  bool in_src = false, in_dst = false;
};
LocalShapes local_shapes(const Plan& plan, std::uint32_t tensor, std::int32_t rank);

}  // namespace unjam::reshard
