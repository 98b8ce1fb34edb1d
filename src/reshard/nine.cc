#include "reshard/nine.h"

#include <array>
#include <numeric>
#include <string>
#include <utility>

namespace unjam::reshard {
namespace {

// Of each tensor dimension: "0" is cut over the hosts, "1" over the devices of each, "01" over
// all, "R" over none.
using Spec = std::array<const char*, 3>;

struct Case {
  Spec src, dst;
  std::array<std::int64_t, 2> src_mesh, dst_mesh;
  std::array<std::int64_t, 3> shape;
};

constexpr std::array<std::int64_t, 3> kShape = {1024, 1024, 512};
constexpr std::array<Case, kNumNineCases> kCases = {{
    {{"0", "R", "R"}, {"0", "R", "R"}, {2, 4}, {2, 4}, kShape},
    {{"R", "R", "R"}, {"0", "R", "R"}, {2, 4}, {2, 4}, kShape},
    {{"R", "0", "R"}, {"0", "R", "R"}, {2, 4}, {2, 4}, kShape},
    {{"R", "01", "R"}, {"01", "R", "R"}, {2, 4}, {2, 4}, kShape},
    {{"1", "R", "R"}, {"0", "R", "R"}, {2, 4}, {2, 4}, kShape},
    {{"0", "R", "R"}, {"0", "R", "R"}, {2, 4}, {3, 4}, {3072, 1024, 170}},
    {{"1", "R", "R"}, {"R", "R", "R"}, {1, 4}, {2, 4}, kShape},
    {{"R", "R", "R"}, {"R", "R", "R"}, {2, 3}, {3, 2}, kShape},
    {{"R", "0", "R"}, {"R", "R", "0"}, {2, 4}, {2, 4}, kShape},
}};

std::vector<Placement> placements(const Spec& spec) {
  std::vector<Placement> list(2);
  for (std::size_t d = 0; d < spec.size(); ++d) {
    const std::string axes = spec[d];
    for (std::size_t m = 0; m < list.size(); ++m) {
      if (axes.find(static_cast<char>('0' + m)) == std::string::npos) continue;
      list[m] = {PlacementKind::kShard, static_cast<std::int32_t>(d), 1};
    }
  }
  return list;
}

}  // namespace

Request nine_case(int number) {
  const Case& c = kCases[static_cast<std::size_t>(number - 1)];
  Request request;
  std::int32_t rank = 0, host = 0;
  for (auto [mesh, dims] : {std::pair(&request.src, &c.src_mesh), {&request.dst, &c.dst_mesh}}) {
    mesh->dims.assign(dims->begin(), dims->end());
    for (std::int64_t h = 0; h < (*dims)[0]; ++h, ++host) {
      for (std::int64_t d = 0; d < (*dims)[1]; ++d) {
        mesh->ranks.push_back(rank++);
        request.topology.host.push_back(host);
        request.topology.nic.push_back(0);
      }
    }
  }
  Tensor tensor;
  tensor.name = "w";
  tensor.shape.assign(c.shape.begin(), c.shape.end());
  tensor.src = placements(c.src);
  tensor.dst = placements(c.dst);
  request.tensors.push_back(std::move(tensor));
  return request;
}

}  // namespace unjam::reshard
