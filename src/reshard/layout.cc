#include "reshard/layout.h"

#include <algorithm>
#include <set>
#include <utility>

namespace unjam::reshard {
namespace {

// A tile of so many runs is beyond what a plan could list.
constexpr std::int64_t kMostRuns = 1 << 20;

struct Range {
  std::int64_t begin = 0, end = 0;
};

// Chunk i of n things cut into `parts`: all as long as the first, but for the last ones.
Range chunk(std::int64_t n, std::int64_t parts, std::int64_t i) {
  const std::int64_t size = n / parts + (n % parts != 0 ? 1 : 0);
  const std::int64_t begin = size == 0 ? 0 : std::min(n, i > n / size ? n : i * size);
  return {begin, std::min(n, begin + size)};
}

// Adds the places [places.begin, places.end) of `tile` behind `to`.
void append(const Tile& tile, Range places, Tile* to) {
  for (const Run& run : tile) {
    const std::int64_t skip = std::max<std::int64_t>(0, places.begin - run.local);
    const std::int64_t begin = run.begin + skip;
    const std::int64_t end = std::min(run.end, run.begin + (places.end - run.local));
    if (begin >= end) continue;
    if (!to->empty() && to->back().end == begin) {
      to->back().end = end;
    } else {
      to->push_back({begin, end, tile_size(*to)});
    }
  }
}

Tile part_of(const Tile& tile, const Placement& placement, std::int64_t parts, std::int64_t i) {
  Tile part;
  const std::int64_t size = tile_size(tile);
  const std::int64_t groups = placement.kind == PlacementKind::kShard ? 1 : placement.split;
  for (std::int64_t g = 0; g < groups; ++g) {
    const Range group = chunk(size, groups, g);
    if (group.begin == group.end) break;
    const Range places = chunk(group.end - group.begin, parts, i);
    append(tile, {group.begin + places.begin, group.begin + places.end}, &part);
  }
  return part;
}

}  // namespace

std::int64_t tile_size(const Tile& tile) {
  return tile.empty() ? 0 : tile.back().local + tile.back().end - tile.back().begin;
}

std::string to_string(const Placement& placement) {
  const std::string dim = std::to_string(placement.dim);
  switch (placement.kind) {
    case PlacementKind::kReplicate:
      return "Replicate()";
    case PlacementKind::kShard:
      return "Shard(" + dim + ")";
    default:
      return "_StridedShard(" + dim + ", " + std::to_string(placement.split) + ")";
  }
}

std::string mesh_error(const Mesh& mesh) {
  std::int64_t size = 1;
  for (const std::int64_t dim : mesh.dims) {
    if (dim < 1 || dim > kMostPlaces / size) {
      return "a mesh dimension of " + std::to_string(dim) + ": give 1 or more, " +
             std::to_string(kMostPlaces) + " ranks in all";
    }
    size *= dim;
  }
  if (static_cast<std::int64_t>(mesh.ranks.size()) != size) {
    return "the mesh has " + std::to_string(size) + " places and " +
           std::to_string(mesh.ranks.size()) + " ranks: give one rank a place";
  }
  std::set<std::int32_t> seen;
  for (const std::int32_t rank : mesh.ranks) {
    if (rank < 0) return "rank " + std::to_string(rank) + " in the mesh: ranks begin at 0";
    if (!seen.insert(rank).second) {
      return "rank " + std::to_string(rank) + " stands in the mesh twice: give each rank one place";
    }
  }
  return "";
}

std::string placements_error(const Mesh& mesh, const std::vector<Placement>& placements,
                             const std::vector<std::int64_t>& shape) {
  if (placements.size() != mesh.dims.size()) {
    return std::to_string(placements.size()) + " placements on a mesh of " +
           std::to_string(mesh.dims.size()) + " dimensions: give one for each";
  }
  const auto ndims = static_cast<std::int32_t>(shape.size());
  std::vector<std::int64_t> runs(shape.size(), 1);
  for (std::size_t m = 0; m < placements.size(); ++m) {
    const Placement& p = placements[m];
    if (p.kind == PlacementKind::kReplicate) continue;
    if (p.dim < 0 || p.dim >= ndims) {
      return to_string(p) + " of a tensor with " + std::to_string(ndims) +
             " dimensions: there is no dimension " + std::to_string(p.dim);
    }
    if (p.kind == PlacementKind::kStridedShard && p.split < 1) {
      return to_string(p) + ": the split factor must be 1 or more";
    }
    std::int64_t& n = runs[static_cast<std::size_t>(p.dim)];
    const std::int64_t split = p.kind == PlacementKind::kShard ? 1 : p.split;
    // As many runs at most as tiles times splits, and no more than there are indices.
    if (split > kMostRuns / n || mesh.dims[m] > kMostRuns / (n * split)) {
      return to_string(p) + " cuts dimension " + std::to_string(p.dim) +
             " into more parts than a plan can list: " + std::to_string(kMostRuns);
    }
    n *= split * mesh.dims[m];
  }
  return "";
}

Layout make_layout(const Mesh& mesh, const std::vector<Placement>& placements,
                   const std::vector<std::int64_t>& shape) {
  Layout layout;
  layout.dims.resize(shape.size());
  for (std::size_t d = 0; d < shape.size(); ++d) {
    DimTiles& dim = layout.dims[d];
    dim.tiles.emplace_back();
    if (shape[d] > 0) dim.tiles[0].push_back({0, shape[d], 0});
    for (std::size_t m = 0; m < placements.size(); ++m) {
      const Placement& p = placements[m];
      if (p.kind == PlacementKind::kReplicate || p.dim != static_cast<std::int32_t>(d)) continue;
      dim.mesh_dims.push_back(static_cast<int>(m));
      std::vector<Tile> finer;
      for (const Tile& tile : dim.tiles) {
        for (std::int64_t i = 0; i < mesh.dims[m]; ++i) {
          finer.push_back(part_of(tile, p, mesh.dims[m], i));
        }
      }
      dim.tiles = std::move(finer);
    }
  }
  layout.tile_of.resize(mesh.ranks.size());
  std::vector<std::int64_t> at(mesh.dims.size(), 0);
  for (std::vector<std::int32_t>& tiles : layout.tile_of) {
    for (const DimTiles& dim : layout.dims) {
      std::int64_t tile = 0;
      for (const int m : dim.mesh_dims) {
        const auto i = static_cast<std::size_t>(m);
        tile = tile * mesh.dims[i] + at[i];
      }
      tiles.push_back(static_cast<std::int32_t>(tile));
    }
    for (std::size_t m = at.size(); m-- > 0;) {
      if (++at[m] < mesh.dims[m]) break;
      at[m] = 0;
    }
  }
  return layout;
}

}  // namespace unjam::reshard
