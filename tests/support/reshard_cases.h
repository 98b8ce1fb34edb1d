// Random requests of cross-mesh resharding, and who holds an element, told index by index.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "reshard/request.h"

namespace unjam_test {

using unjam::DType;
using unjam::reshard::equal_hosts;
using unjam::reshard::Mesh;
using unjam::reshard::Placement;
using unjam::reshard::PlacementKind;
using unjam::reshard::Request;
using unjam::reshard::Tensor;

class Cases {
 public:
  explicit Cases(std::uint64_t seed) : random_(seed) {}

  std::int64_t between(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(random_);
  }
  bool chance(int percent) { return between(1, 100) <= percent; }

  // Meshes with no host in common, unless `overlapping`. Each tensor's last dimension has a size of
  // which `row` is a factor, and nobody cuts it.
  Request request(bool overlapping, std::int64_t row) {
    const int per_host = static_cast<int>(between(1, 4));
    return request_of(per_host, static_cast<int>(between(1, per_host)), overlapping, row);
  }
  // Meshes of whole hosts of that kind, with none in common.
  Request request_of_hosts(int per_host, int nics, std::int64_t row) {
    return request_of(per_host, nics, false, row);
  }

 private:
  Request request_of(int per_host, int nics, bool overlapping, std::int64_t row) {
    Request r;
    const std::int64_t src_hosts = between(1, 3), dst_hosts = between(1, 3);
    const std::int64_t hosts =
        overlapping ? std::max(src_hosts, dst_hosts) + between(0, 1) : src_hosts + dst_hosts;
    r.topology = equal_hosts(hosts * per_host, per_host, nics);
    r.src = mesh(overlapping ? some_ranks(hosts * per_host) : ranks(0, src_hosts * per_host));
    r.dst = mesh(overlapping ? some_ranks(hosts * per_host)
                             : ranks(src_hosts * per_host, hosts * per_host));
    const std::int64_t tensors = between(1, 4);
    for (std::int64_t i = 0; i < tensors; ++i) r.tensors.push_back(tensor(r, i, row));
    return r;
  }

  std::vector<std::int32_t> ranks(std::int64_t begin, std::int64_t end) {
    std::vector<std::int32_t> list(static_cast<std::size_t>(end - begin));
    std::iota(list.begin(), list.end(), static_cast<std::int32_t>(begin));
    if (chance(25)) std::shuffle(list.begin(), list.end(), random_);
    return list;
  }
  std::vector<std::int32_t> some_ranks(std::int64_t all) {
    std::vector<std::int32_t> list = ranks(0, all);
    std::shuffle(list.begin(), list.end(), random_);
    list.resize(static_cast<std::size_t>(between(1, all)));
    if (chance(75)) std::sort(list.begin(), list.end());
    return list;
  }
  Mesh mesh(std::vector<std::int32_t> list) {
    Mesh m;
    auto rest = static_cast<std::int64_t>(list.size());
    while (rest > 1) {
      std::int64_t dim = between(1, rest);
      while (rest % dim != 0) --dim;
      m.dims.push_back(dim);
      rest /= dim;
      if (m.dims.size() == 2 && rest > 1) {
        m.dims.push_back(rest);
        rest = 1;
      }
    }
    if (m.dims.empty()) m.dims.push_back(1);
    m.ranks = std::move(list);
    return m;
  }
  std::vector<Placement> placements(const Mesh& on, std::int64_t dims) {
    std::vector<Placement> list(on.dims.size());
    for (Placement& p : list) {
      if (dims == 0 || chance(30)) continue;
      p.kind = chance(25) ? PlacementKind::kStridedShard : PlacementKind::kShard;
      p.dim = static_cast<std::int32_t>(between(0, dims - 1));
      if (p.kind == PlacementKind::kStridedShard) p.split = between(1, 4);
    }
    return list;
  }
  Tensor tensor(const Request& r, std::int64_t number, std::int64_t row) {
    constexpr DType kTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kInt8, DType::kFloat64};
    Tensor t;
    t.name = "t" + std::to_string(number);
    const std::int64_t dims = between(0, 3);
    for (std::int64_t d = 0; d < dims; ++d) t.shape.push_back(between(chance(5) ? 0 : 1, 9));
    if (row > 1) t.shape.push_back(row * between(1, 3));
    t.src_dtype = kTypes[between(0, 3)];
    t.dst_dtype = chance(70) ? t.src_dtype : kTypes[between(0, 3)];
    t.src = placements(r.src, dims);
    t.dst = placements(r.dst, dims);
    return t;
  }

  std::mt19937_64 random_;
};

inline std::int64_t chunk_size(std::int64_t n, std::int64_t parts) {
  return (n + parts - 1) / parts;
}
inline std::int64_t chunk_length(std::int64_t n, std::int64_t parts, std::int64_t i) {
  const std::int64_t size = chunk_size(n, parts);
  return std::clamp<std::int64_t>(n - i * size, 0, size);
}

// Whether a position of a mesh holds index i of a dimension of n.
inline bool holds_index(const Mesh& mesh, const std::vector<Placement>& placements,
                        std::size_t position, std::int32_t dim, std::int64_t n, std::int64_t i) {
  std::int64_t stride = static_cast<std::int64_t>(mesh.ranks.size());
  for (std::size_t m = 0; m < placements.size(); ++m) {
    const std::int64_t parts = mesh.dims[m];
    stride /= parts;
    const std::int64_t mine = static_cast<std::int64_t>(position) / stride % parts;
    const Placement& p = placements[m];
    if (p.kind == PlacementKind::kReplicate || p.dim != dim) continue;
    const std::int64_t split = p.kind == PlacementKind::kStridedShard ? p.split : 1;
    const std::int64_t group = i / chunk_size(n, split);
    const std::int64_t inside = i % chunk_size(n, split);
    const std::int64_t size = chunk_size(chunk_length(n, split, group), parts);
    if (inside / size != mine) return false;
    i = inside % size;
    std::int64_t all = 0;
    for (std::int64_t g = 0; g < split; ++g) {
      const std::int64_t length = chunk_length(chunk_length(n, split, g), parts, mine);
      if (g < group) i += length;
      all += length;
    }
    n = all;
  }
  return true;
}

inline std::string text_of(const Request& r) {
  std::string text = "ranks a host and NICs:";
  for (std::size_t i = 0; i < r.topology.host.size(); ++i) {
    text += " " + std::to_string(r.topology.host[i]) + "." + std::to_string(r.topology.nic[i]);
  }
  for (const Mesh* mesh : {&r.src, &r.dst}) {
    text += mesh == &r.src ? "\nsource" : "\ndestination";
    for (const std::int64_t dim : mesh->dims) text += " x" + std::to_string(dim);
    text += ":";
    for (const std::int32_t rank : mesh->ranks) text += " " + std::to_string(rank);
  }
  for (const Tensor& t : r.tensors) {
    text += "\n" + t.name + " (";
    for (const std::int64_t dim : t.shape) text += std::to_string(dim) + ",";
    text += ") ";
    for (const Placement& p : t.src) text += unjam::reshard::to_string(p) + " ";
    text += "->";
    for (const Placement& p : t.dst) text += " " + unjam::reshard::to_string(p);
  }
  return text;
}

}  // namespace unjam_test
