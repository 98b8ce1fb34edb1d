// What is to be moved: tensors of one mesh, to be held as another layout says on another mesh.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/types.h"
#include "reshard/layout.h"
#include "reshard/topology.h"

namespace unjam::reshard {

struct Tensor {
  std::string name;
  std::vector<std::int64_t> shape;
  DType src_dtype = DType::kFloat32, dst_dtype = DType::kFloat32;
  std::vector<Placement> src, dst;  // one for each dimension of its mesh
};

// An element on its way has the smaller of both types.
inline std::int64_t wire_bytes(const Tensor& tensor) {
  const std::uint32_t src = dtype_bytes(tensor.src_dtype), dst = dtype_bytes(tensor.dst_dtype);
  return src < dst ? src : dst;
}

struct Options {
  std::int64_t max_bytes = std::int64_t{256} << 20;  // of staging memory, on each side of a rank
  std::int32_t window = 32;                          // bundles under way at once
  std::int32_t stripes = 8;                          // parts of a cell that go different ways
};

struct Request {
  Mesh src, dst;  // may have ranks in common
  std::vector<Tensor> tensors;
  Topology topology;
  Options options;
};

// "" if it can be planned, else what is wrong with it, and the cure.
std::string request_error(const Request& request);

// In the order of the tensors' names, so that ranks that list them differently plan alike.
void sort_tensors(Request* request);

// Of all that ranks must agree on.
std::uint64_t request_hash(const Request& request);

}  // namespace unjam::reshard
