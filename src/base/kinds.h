// The kinds of collectives, a row each: what a kind is called, who has data of which part before
// and after it, and whether it may be called in place. Whoever needs such a fact asks here: the
// checks of a call's buffers, geometry, the plan checker, calls that overlap; Python by
// unjamGetKindInfo.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

// As unjamKind_t. A value's row is kKinds[value].
enum class Kind : std::uint8_t {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kReduce,
  kBroadcast,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier,
  kSendRecv,
};

// Which ranks have data of a part, on one side of a collective. The parts are the blocks of a kind
// that has them; else the vector is one, and no kind says kOwner.
enum class Holders : std::uint8_t {
  kAll,     // every rank, of every part
  kOwner,   // of part p, rank p
  kRoot,    // the root, of every part
  kOthers,  // all but the root, of every part
};

struct KindRow {
  const char* name;
  bool reduces;   // so that it has an operator
  bool has_root;  // some rank is named; of a send/recv it is the sender
  bool blocks;    // the data are a block of `count` elements for each rank, in or out or both
  Holders reads;  // who has an input
  Holders writes;
  bool in_place;  // input and output may be the same memory, where a block's place allows it
  bool buffers;   // false: the element that it moves is the library's own
};

// A barrier is planned as an all-reduce of one element, which no rank has before all have called.
// An all-to-all cannot be done in place: what a rank sends and what it receives for the same place
// are different blocks.
inline constexpr KindRow kKinds[] = {
    // name, reduces, has_root, blocks, reads, writes, in_place, buffers
    {"all_reduce", true, false, false, Holders::kAll, Holders::kAll, true, true},
    {"all_gather", false, false, true, Holders::kOwner, Holders::kAll, true, true},
    {"reduce_scatter", true, false, true, Holders::kAll, Holders::kOwner, true, true},
    {"reduce", true, true, false, Holders::kAll, Holders::kRoot, true, true},
    {"broadcast", false, true, false, Holders::kRoot, Holders::kAll, true, true},
    {"all_to_all", false, false, true, Holders::kAll, Holders::kAll, false, true},
    {"gather", false, true, true, Holders::kOwner, Holders::kRoot, true, true},
    {"scatter", false, true, true, Holders::kRoot, Holders::kOwner, true, true},
    {"barrier", true, false, false, Holders::kAll, Holders::kAll, true, false},
    {"send_recv", false, true, false, Holders::kRoot, Holders::kOthers, true, true},
};
inline constexpr int kNumKinds = static_cast<int>(sizeof(kKinds) / sizeof(kKinds[0]));
static_assert(kNumKinds == static_cast<int>(Kind::kSendRecv) + 1, "a row for each kind");

constexpr const KindRow& row_of(Kind kind) { return kKinds[static_cast<std::uint8_t>(kind)]; }
constexpr const char* to_string(Kind kind) { return row_of(kind).name; }

// Bit k: whether kind k fits. (Device code cannot read the table, but what is made of it.)
template <class Fits>
constexpr std::uint32_t kinds_where(Fits fits) {
  std::uint32_t bits = 0;
  for (int k = 0; k < kNumKinds; ++k) bits |= fits(kKinds[k]) ? 1u << k : 0u;
  return bits;
}
// kind: one that there is.
UNJAM_HD constexpr bool is_among(Kind kind, std::uint32_t bits) {
  return (bits >> static_cast<std::uint8_t>(kind) & 1u) != 0;
}

UNJAM_HD constexpr bool reduces(Kind kind) {
  constexpr std::uint32_t kBits = kinds_where([](const KindRow& row) { return row.reduces; });
  return is_among(kind, kBits);
}
UNJAM_HD constexpr bool has_root(Kind kind) {
  constexpr std::uint32_t kBits = kinds_where([](const KindRow& row) { return row.has_root; });
  return is_among(kind, kBits);
}
UNJAM_HD constexpr bool blocked(Kind kind) {
  constexpr std::uint32_t kBits = kinds_where([](const KindRow& row) { return row.blocks; });
  return is_among(kind, kBits);
}
// Input or output of every rank that has one is its own block; else it is the whole vector.
UNJAM_HD constexpr bool input_is_block(Kind kind) {
  constexpr std::uint32_t kBits =
      kinds_where([](const KindRow& row) { return row.reads == Holders::kOwner; });
  return is_among(kind, kBits);
}
UNJAM_HD constexpr bool output_is_block(Kind kind) {
  constexpr std::uint32_t kBits =
      kinds_where([](const KindRow& row) { return row.writes == Holders::kOwner; });
  return is_among(kind, kBits);
}
// The whole vector is at the root and goes to every rank, or is every rank's and goes to the root.
UNJAM_HD constexpr bool whole_at_root(Kind kind) {
  constexpr std::uint32_t kBits = kinds_where([](const KindRow& row) {
    return !row.blocks && (row.reads == Holders::kRoot || row.writes == Holders::kRoot) &&
           (row.reads == Holders::kAll || row.writes == Holders::kAll);
  });
  return is_among(kind, kBits);
}
// What comes from rank q's input belongs at place q of the output, and was at the receiver's place
// in the input: all ranks have all parts of both, and nothing is reduced.
UNJAM_HD constexpr bool exchanges(Kind kind) {
  constexpr std::uint32_t kBits = kinds_where([](const KindRow& row) {
    return row.blocks && !row.reduces && row.reads == Holders::kAll && row.writes == Holders::kAll;
  });
  return is_among(kind, kBits);
}

// Whether `rank` is among the holders of a part.
constexpr bool holds(Holders holders, int rank, int root, int part) {
  switch (holders) {
    case Holders::kOwner:
      return rank == part;
    case Holders::kRoot:
      return rank == root;
    case Holders::kOthers:
      return rank != root;
    default:
      return true;
  }
}
// Whether it has data of any part.
constexpr bool holds_some(Holders holders, int rank, int root) {
  return holds(holders, rank, root, rank);
}

}  // namespace unjam
