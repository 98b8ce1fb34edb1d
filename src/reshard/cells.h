// What a source tile and a destination tile have in common: a cell, the paper's unit task. All
// tensors of one shape and one pair of layouts have the same cells.
#pragma once

#include <cstdint>
#include <vector>

#include "reshard/layout.h"

namespace unjam::reshard {

// Indices [begin, begin + size) of a tensor dimension, and where they lie in both tiles.
struct Interval {
  std::int64_t begin = 0, size = 0, src_local = 0, dst_local = 0;
};

// Along one tensor dimension.
struct Overlap {
  std::int32_t src_tile = 0, dst_tile = 0;
  std::int64_t size = 0;
  std::vector<Interval> intervals;  // ascending
};

// A part of a cell without gaps: one interval a dimension, row-major in both tiles.
struct Box {
  std::vector<std::int64_t> size, src_start, dst_start;
};

class Cells {
 public:
  Cells(const Layout& src, const Layout& dst);

  std::uint64_t count() const { return count_; }
  std::int64_t elements(std::uint64_t cell) const;
  // Numbers of the tiles that meet in a cell; tiles of all dimensions, the last one counts fastest.
  std::uint64_t src_tile(std::uint64_t cell) const;
  std::uint64_t dst_tile(std::uint64_t cell) const;

  // The elements of a cell are numbered box by box, each row-major. Adds the boxes that have those
  // from `first` to before `last`, cut to these, in that order.
  void add_boxes(std::uint64_t cell, std::int64_t first, std::int64_t last,
                 std::vector<Box>* boxes) const;

 private:
  std::vector<std::size_t> places(std::uint64_t cell) const;

  std::vector<std::vector<Overlap>> dims_;
  std::vector<std::uint64_t> src_tiles_, dst_tiles_;  // of each dimension
  std::uint64_t count_ = 1;
};

// Ranks of each tile, by the tile's number, in the mesh's order.
std::vector<std::vector<std::int32_t>> ranks_by_tile(const Mesh& mesh, const Layout& layout);

}  // namespace unjam::reshard
