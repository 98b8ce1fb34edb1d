// Who sends each cell, and by which rank of each host it comes in: shared out so that no NIC has
// more to do than it must.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/cells.h"
#include "reshard/request.h"

namespace unjam::reshard {

// Tensors of one shape and one pair of layouts.
struct TensorClass {
  TensorClass(const Request& request, const Tensor& tensor);

  Layout src, dst;
  Cells cells;
  std::vector<std::vector<std::int32_t>> holders, wanters;  // by tile
};

// Ranks that are to get the same, by host.
struct Audience {
  std::vector<std::vector<std::int32_t>> hosts;
};

// From its root into each host of the audience, to the entry; the others there get it from that.
struct Route {
  std::int32_t root = 0;
  std::uint32_t audience = 0;
  std::vector<std::int32_t> entries;  // of each host of the audience
};

// Elements [begin, end) of a cell that go one way.
struct Stripe {
  std::uint32_t tensor = 0, route = 0;
  std::uint64_t cell = 0;
  std::int64_t begin = 0, end = 0;
};

// A cell that a rank both holds and wants.
struct LocalCopy {
  std::uint32_t tensor = 0;
  std::int32_t rank = 0;
  std::uint64_t cell = 0;
};

struct Assignment {
  std::vector<Audience> audiences;
  std::vector<Route> routes;
  std::vector<Stripe> stripes;
  std::vector<LocalCopy> copies;
  // The least that the busiest NIC must send, and receive, whoever plans.
  std::int64_t out_bound = 0, in_bound = 0;
};

// class_of: of each tensor, its place in `classes`.
Assignment assign(const Request& request, const Ports& ports,
                  const std::vector<TensorClass>& classes,
                  const std::vector<std::uint32_t>& class_of);

}  // namespace unjam::reshard
