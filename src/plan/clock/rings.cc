// Rings for the clock: one step repeats, where plan/algorithms/ring.h has as many primitives as
// ranks. Those are what runs, and the same times come out where both can be had (clock_test).
#include <algorithm>
#include <array>

#include "plan/algorithms/ring.h"
#include "plan/clock/pattern.h"
#include "plan/common.h"

namespace unjam {
namespace {

// Nodes that are run: those of a leaf; one, if nothing goes between leaves.
struct Fold {
  int nodes = 1;
  bool folded = false, exact = true;
};

Fold fold_of(int ranks, const Machine& m, bool unfolded) {
  const int nodes = (ranks + m.gpus_per_node - 1) / m.gpus_per_node;
  const bool whole = ranks % m.gpus_per_node == 0;
  if (unfolded || nodes == 1) return {nodes, false, true};
  if (nodes <= m.nodes_per_leaf) return {1, true, whole};
  return {m.nodes_per_leaf, true, whole && nodes % m.nodes_per_leaf == 0};
}

std::uint64_t round_up(std::uint64_t bytes, std::uint64_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

constexpr std::uint64_t kPieceBytes = 16;  // what parts are made of

// Lanes and chunk as plans have them with so many parts, which are all as long as the longest.
void add_data(const PlanRequest& request, const Machine& machine, std::uint32_t parts,
              Pattern* pattern) {
  const PlanLimits limits = limits_of(machine);
  const std::uint64_t element = dtype_bytes(request.dtype);
  // A geometry counts the parts of a group in 16 bits: this is that of one part.
  Geometry part = make_geometry(request, 1);
  if (!blocked(request.kind)) {
    const std::uint64_t pieces = (request.count * element + kPieceBytes - 1) / kPieceBytes;
    part.count = (pieces + parts - 1) / parts * kPieceBytes / element;
    if (part.count * parts != request.count) pattern->exact = false;
  }
  assign_bulk_lanes(request, limits, 1, &part);
  part.chunk = chunk_elements(
      std::uint64_t{limits.guaranteed_slots - 1} * limits.guaranteed_slot_bytes, part);
  pattern->lanes = part.lanes;
  pattern->chunk_bytes = part.chunk * element;
  pattern->slice_bytes = limits.guaranteed_slot_bytes / element * element;
  for (std::uint32_t l = 0; l < part.lanes; ++l) {
    pattern->lane_bytes.push_back(part.lane_part(0, part.first_lane + l).length * element);
  }
}

class RingWriter {
 public:
  explicit RingWriter(Pattern* pattern) : pattern_(pattern) {}

  // The ring that goes from `before` to the rank to `after`, of `members`.
  // Its steps lag by so many passes.
  void set(int before, int after, std::uint32_t part, std::uint32_t lag = 0) {
    before_ = before;
    after_ = after;
    part_ = part;
    lag_ = lag;
  }
  void copy() { add(kLocal | kCopy, 1, false); }
  void send(unsigned flags) { add(kLocal | kSend | flags, 1, false); }
  void pass_on(unsigned flags, int repeats, bool grows) {
    add(kRecv | kSend | flags, repeats, grows);
  }
  void take(unsigned flags) { add(kRecv | flags, 1, false); }

 private:
  void add(unsigned flags, int repeats, bool grows) {
    if (repeats <= 0) return;
    ClockStep s;
    s.flags = static_cast<std::uint16_t>(flags);
    s.part = part_;
    s.lag = lag_;
    s.repeats = static_cast<std::uint32_t>(repeats);
    s.grows = grows;
    const bool in = (flags & kRecv) != 0, out = (flags & kSend) != 0;
    s.reads = static_cast<std::uint16_t>(in + ((flags & kLocal) != 0));
    s.writes = static_cast<std::uint16_t>(out + ((flags & kCopy) != 0));
    const std::array<int, 1> before = {before_}, after = {after_};
    pattern_->add_step(s, std::span(before).first(in ? 1 : 0), std::span(after).first(out ? 1 : 0));
  }

  Pattern* pattern_;
  int before_ = 0, after_ = 0;
  std::uint32_t part_ = 0, lag_ = 0;
};

constexpr unsigned kAdd = kLocal | kReduce;

}  // namespace

Pattern ring_pattern(const PlanRequest& request, const Machine& machine, bool unfolded) {
  const int n = request.ranks;
  const Fold fold = fold_of(n, machine, unfolded);
  Pattern pattern;
  pattern.all_ranks = n;
  pattern.ranks = fold.folded ? fold.nodes * machine.gpus_per_node : n;
  pattern.folded = fold.folded;
  pattern.exact = fold.exact;
  pattern.repeats = static_cast<std::uint32_t>(n - 2);
  pattern.period_repeats = static_cast<std::uint32_t>(pattern.ranks);
  add_data(request, machine, static_cast<std::uint32_t>(n), &pattern);
  pattern.first_step.push_back(0);
  RingWriter ring(&pattern);
  for (int r = 0; r < pattern.ranks; ++r) {
    ring.set(!fold.folded && r == 0 ? n - 1 : r - 1, !fold.folded && r + 1 == n ? 0 : r + 1, 0);
    if (reduces(request.kind)) {
      ring.send(0);
      ring.pass_on(kAdd, n - 2, true);
      if (request.kind == Kind::kReduceScatter) {
        ring.take(kAdd | kCopy);
      } else {
        ring.pass_on(kAdd | kCopy, 1, false);
      }
    } else {
      ring.send(kCopy);
    }
    if (request.kind != Kind::kReduceScatter) {
      ring.pass_on(kCopy, n - 2, true);
      ring.take(kCopy);
    }
    pattern.end_rank();
  }
  return pattern;
}

Pattern ring_2d_pattern(const PlanRequest& request, const Machine& machine, bool unfolded) {
  const int n = request.ranks, g = machine.gpus_per_node, nodes = n / g;
  const Fold fold = fold_of(n, machine, unfolded);
  Pattern pattern;
  pattern.all_ranks = n;
  pattern.ranks = fold.folded ? fold.nodes * g : n;
  pattern.folded = fold.folded;
  pattern.exact = fold.exact;
  pattern.repeats = nodes > 2 ? static_cast<std::uint32_t>(nodes - 2) : 0;
  pattern.period_repeats = nodes > 2 ? static_cast<std::uint32_t>(fold.nodes) : 0;
  // A node's share of the vector is one GPU's part, of which each node has a piece.
  add_data(request, machine, static_cast<std::uint32_t>(g), &pattern);
  pattern.parts = 2;
  for (std::uint32_t l = 0; l < pattern.lanes; ++l) {
    const std::uint64_t piece = (pattern.lane_bytes[l] + static_cast<std::uint64_t>(nodes) - 1) /
                                static_cast<std::uint64_t>(nodes);
    pattern.lane_bytes.push_back(round_up(piece, kPieceBytes));
  }
  // One phase after the other, each with all its chunks.
  const auto loops = [&](std::uint32_t part) {
    const std::uint64_t longest = pattern.lane_bytes[std::size_t{part} * pattern.lanes];
    return static_cast<std::uint32_t>((longest + pattern.chunk_bytes - 1) / pattern.chunk_bytes);
  };
  pattern.phased = true;
  const std::uint32_t across_lag = loops(0), gather_lag = across_lag + loops(1);
  pattern.first_step.push_back(0);
  RingWriter ring(&pattern);
  for (int r = 0; r < pattern.ranks; ++r) {
    const int first = r / g * g, place = r - first;
    const int before = first + (place + g - 1) % g, after = first + (place + 1) % g;
    const auto across = [&](int other) { return fold.folded ? other : (other + n) % n; };
    if (g > 1) {  // every rank's part is reduced in its node
      ring.set(before, after, 0);
      ring.send(0);
      ring.pass_on(kAdd, g - 2, false);
      ring.take(kAdd | kCopy);
    }
    if (nodes > 1) {
      ring.set(across(r - g), across(r + g), 1, across_lag);
      ring.send(0);
      ring.pass_on(kAdd, nodes - 2, true);
      ring.pass_on(kAdd | kCopy, 1, false);
      ring.pass_on(kCopy, nodes - 2, true);
      ring.take(kCopy);
    }
    if (g > 1) {
      ring.set(before, after, 0, gather_lag);
      ring.send(0);
      ring.pass_on(kCopy, g - 2, false);
      ring.take(kCopy);
    }
    if (n == 1) ring.copy();
    pattern.end_rank();
  }
  return pattern;
}

}  // namespace unjam
