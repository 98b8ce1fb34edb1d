// The kernel that copies boxes of tensors, and its arguments. (Resharding packs, unpacks and casts
// with it: runtime/reshard_run.cc.)
#pragma once

#include <cstdint>

#include "device/box.h"

namespace unjam {

// Units that a warp moves between two looks at where they lie.
inline constexpr std::uint32_t kPieceUnits = 256;
// Rows shorter than this are cut into pieces as if they were one.
inline constexpr std::uint32_t kShortRow = 32;

// As many as fit into a kernel's arguments everywhere.
inline constexpr std::uint32_t kBoxesABatch = 24;
struct BoxBatch {
  std::uint32_t count = 0;
  std::uint64_t end[kBoxesABatch] = {};  // pieces of the boxes up to this one
  BoxCopy boxes[kBoxesABatch];
};
static_assert(sizeof(BoxBatch) <= 4096);

inline std::uint64_t pieces_of_row(const BoxCopy& box) {
  return (box.row + kPieceUnits - 1) / kPieceUnits;
}
inline std::uint64_t pieces_of(const BoxCopy& box) {
  if (box.row >= kShortRow) return box.rows * pieces_of_row(box);
  return (box.rows * box.row + kPieceUnits - 1) / kPieceUnits;
}
inline void add_box(const BoxCopy& box, BoxBatch& batch) {
  const std::uint32_t i = batch.count++;
  batch.end[i] = (i == 0 ? 0 : batch.end[i - 1]) + pieces_of(box);
  batch.boxes[i] = box;
}

// (BoxBatch): any shape of whole warps.
const void* boxes_kernel();

}  // namespace unjam
