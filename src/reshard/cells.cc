#include "reshard/cells.h"

#include <algorithm>
#include <map>
#include <utility>

namespace unjam::reshard {
namespace {

struct Owned {
  Run run;
  std::int32_t tile = 0;
};

std::vector<Owned> in_order(const DimTiles& dim) {
  std::vector<Owned> owned;
  for (std::size_t t = 0; t < dim.tiles.size(); ++t) {
    for (const Run& run : dim.tiles[t]) owned.push_back({run, static_cast<std::int32_t>(t)});
  }
  std::sort(owned.begin(), owned.end(),
            [](const Owned& a, const Owned& b) { return a.run.begin < b.run.begin; });
  return owned;
}

std::vector<Overlap> overlaps(const DimTiles& src, const DimTiles& dst) {
  std::map<std::pair<std::int32_t, std::int32_t>, Overlap> found;
  const std::vector<Owned> from = in_order(src), to = in_order(dst);
  std::size_t i = 0, j = 0;
  while (i < from.size() && j < to.size()) {
    const Run &a = from[i].run, &b = to[j].run;
    const std::int64_t begin = std::max(a.begin, b.begin), end = std::min(a.end, b.end);
    Overlap& overlap = found[{from[i].tile, to[j].tile}];
    overlap.src_tile = from[i].tile;
    overlap.dst_tile = to[j].tile;
    overlap.size += end - begin;
    overlap.intervals.push_back(
        {begin, end - begin, a.local + begin - a.begin, b.local + begin - b.begin});
    if (a.end == end) ++i;
    if (b.end == end) ++j;
  }
  std::vector<Overlap> list;
  for (auto& [tiles, overlap] : found) list.push_back(std::move(overlap));
  return list;
}

// The elements [first, last) of a box, as boxes: what is cut off one dimension's first and last
// place is cut further along the next one.
void add_cut(const Box& box, std::size_t dim, std::int64_t first, std::int64_t last,
             std::vector<Box>* boxes) {
  std::int64_t inner = 1;
  for (std::size_t d = dim + 1; d < box.size.size(); ++d) inner *= box.size[d];
  const auto add = [&](std::int64_t place, std::int64_t places, std::int64_t from,
                       std::int64_t to) {
    Box part = box;
    part.size[dim] = places;
    part.src_start[dim] += place;
    part.dst_start[dim] += place;
    if (from == 0 && to == inner) {
      boxes->push_back(std::move(part));
    } else {
      add_cut(part, dim + 1, from, to, boxes);
    }
  };
  std::int64_t place = first / inner;
  if (place == (last - 1) / inner) {
    add(place, 1, first - place * inner, last - place * inner);
    return;
  }
  if (first % inner != 0) {
    add(place, 1, first % inner, inner);
    ++place;
  }
  const std::int64_t end = last / inner;
  if (place < end) add(place, end - place, 0, inner);
  if (last % inner != 0) add(end, 1, 0, last % inner);
}

}  // namespace

Cells::Cells(const Layout& src, const Layout& dst) {
  for (std::size_t d = 0; d < src.dims.size(); ++d) {
    dims_.push_back(overlaps(src.dims[d], dst.dims[d]));
    src_tiles_.push_back(src.dims[d].tiles.size());
    dst_tiles_.push_back(dst.dims[d].tiles.size());
    count_ *= dims_.back().size();
  }
}

std::vector<std::size_t> Cells::places(std::uint64_t cell) const {
  std::vector<std::size_t> at(dims_.size());
  for (std::size_t d = dims_.size(); d-- > 0;) {
    at[d] = cell % dims_[d].size();
    cell /= dims_[d].size();
  }
  return at;
}

std::int64_t Cells::elements(std::uint64_t cell) const {
  std::int64_t n = 1;
  for (std::size_t d = dims_.size(); d-- > 0;) {
    n *= dims_[d][cell % dims_[d].size()].size;
    cell /= dims_[d].size();
  }
  return n;
}

std::uint64_t Cells::src_tile(std::uint64_t cell) const {
  const std::vector<std::size_t> at = places(cell);
  std::uint64_t tile = 0;
  for (std::size_t d = 0; d < at.size(); ++d) {
    tile = tile * src_tiles_[d] + static_cast<std::uint64_t>(dims_[d][at[d]].src_tile);
  }
  return tile;
}

std::uint64_t Cells::dst_tile(std::uint64_t cell) const {
  const std::vector<std::size_t> at = places(cell);
  std::uint64_t tile = 0;
  for (std::size_t d = 0; d < at.size(); ++d) {
    tile = tile * dst_tiles_[d] + static_cast<std::uint64_t>(dims_[d][at[d]].dst_tile);
  }
  return tile;
}

void Cells::add_boxes(std::uint64_t cell, std::int64_t first, std::int64_t last,
                      std::vector<Box>* boxes) const {
  const std::vector<std::size_t> at = places(cell);
  const std::size_t ndims = at.size();
  std::vector<std::size_t> which(ndims, 0);
  std::int64_t begin = 0;
  while (begin < last) {
    Box box;
    std::int64_t elements = 1;
    for (std::size_t d = 0; d < ndims; ++d) {
      const Interval& interval = dims_[d][at[d]].intervals[which[d]];
      box.size.push_back(interval.size);
      box.src_start.push_back(interval.src_local);
      box.dst_start.push_back(interval.dst_local);
      elements *= interval.size;
    }
    const std::int64_t from = std::max(first, begin), to = std::min(last, begin + elements);
    if (from < to) {
      if (to - from == elements) {
        boxes->push_back(std::move(box));
      } else {
        add_cut(box, 0, from - begin, to - begin, boxes);
      }
    }
    begin += elements;
    std::size_t d = ndims;
    while (d-- > 0) {
      if (++which[d] < dims_[d][at[d]].intervals.size()) break;
      which[d] = 0;
    }
    if (d == static_cast<std::size_t>(-1)) break;
  }
}

std::vector<std::vector<std::int32_t>> ranks_by_tile(const Mesh& mesh, const Layout& layout) {
  std::uint64_t tiles = 1;
  for (const DimTiles& dim : layout.dims) tiles *= dim.tiles.size();
  std::vector<std::vector<std::int32_t>> ranks(tiles);
  for (std::size_t position = 0; position < mesh.ranks.size(); ++position) {
    std::uint64_t tile = 0;
    for (std::size_t d = 0; d < layout.dims.size(); ++d) {
      tile = tile * layout.dims[d].tiles.size() +
             static_cast<std::uint64_t>(layout.tile_of[position][d]);
    }
    ranks[tile].push_back(mesh.ranks[position]);
  }
  return ranks;
}

}  // namespace unjam::reshard
