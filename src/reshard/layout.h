// Who holds which part of a tensor: meshes, placements, and the tiles that they make, as torch's
// DTensor defines them. Nothing here is rounded up: shards may be uneven, and may be empty.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace unjam::reshard {

// Places of a mesh. With the most bytes of a request, sums over all ranks fit 64 bits.
inline constexpr std::int64_t kMostPlaces = 1 << 16;

// Ranks in a grid. ranks: row-major, as many as the product of dims; no rank twice.
struct Mesh {
  std::vector<std::int64_t> dims;
  std::vector<std::int32_t> ranks;

  bool operator==(const Mesh&) const = default;
};

enum class PlacementKind : std::uint8_t { kReplicate, kShard, kStridedShard };

// What one mesh dimension does with a tensor. kShard cuts tensor dimension `dim` into chunks, as
// torch.chunk does. kStridedShard cuts it into `split` chunks first and takes a chunk of each: what
// FSDP2 makes of a dimension that tensor parallelism has cut before.
struct Placement {
  PlacementKind kind = PlacementKind::kReplicate;
  std::int32_t dim = 0;
  std::int64_t split = 1;

  bool operator==(const Placement&) const = default;
};

// Indices [begin, end) of a tensor dimension; the first one lies at place `local` of its tile.
struct Run {
  std::int64_t begin = 0, end = 0, local = 0;

  bool operator==(const Run&) const = default;
};
using Tile = std::vector<Run>;  // in local order; none if the tile is empty
std::int64_t tile_size(const Tile& tile);

// The tiles of one tensor dimension. They have every index once.
struct DimTiles {
  std::vector<int> mesh_dims;  // those that cut it, in order; the last one counts fastest
  std::vector<Tile> tiles;
};

struct Layout {
  std::vector<DimTiles> dims;

  // Of each position in the mesh and each tensor dimension, which tile.
  std::vector<std::vector<std::int32_t>> tile_of;
};

// "" if placements fit a tensor of that shape on that mesh, else what does not, and the cure.
std::string mesh_error(const Mesh& mesh);
std::string placements_error(const Mesh& mesh, const std::vector<Placement>& placements,
                             const std::vector<std::int64_t>& shape);

// Only for what has no error.
Layout make_layout(const Mesh& mesh, const std::vector<Placement>& placements,
                   const std::vector<std::int64_t>& shape);

std::string to_string(const Placement& placement);

}  // namespace unjam::reshard
