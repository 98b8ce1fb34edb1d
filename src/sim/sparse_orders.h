// The orders in which the GPUs of a round invoke, as differences from their base orders: a disorder
// moves a few neighbouring entries, everything else stays where it was.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "sim/draws.h"
#include "sim/job.h"

namespace unjam::sim {

// Positions lo..end-1 of a GPU's order are a permutation of the same positions of its base order.
// Segments of a GPU are disjoint and ascend.
struct Segment {
  std::uint32_t lo = 0;
  std::uint32_t end = 0;
  std::size_t first = 0;  // in the arrays of SparseOrders

  bool holds(std::uint32_t position) const { return lo <= position && position < end; }
};

class SparseOrders {
 public:
  explicit SparseOrders(const Job& job) : ranges_(job.gpus()) {}

  // Forgets the last round and takes in this one's disorders.
  void build(const std::vector<Disorder>& disorders);

  // GPUs that have segments, in drawing order.
  const std::vector<std::uint32_t>& disordered() const { return disordered_; }
  std::size_t segments(std::uint32_t gpu) const { return ranges_[gpu].end - ranges_[gpu].begin; }
  const Segment* begin(std::uint32_t gpu) const { return segments_.data() + ranges_[gpu].begin; }
  const Segment* end(std::uint32_t gpu) const { return segments_.data() + ranges_[gpu].end; }
  // The segment with this position, or nullptr.
  const Segment* find(std::uint32_t gpu, std::uint32_t position) const {
    const Segment* s =
        std::upper_bound(begin(gpu), end(gpu), position,
                         [](std::uint32_t p, const Segment& segment) { return p < segment.end; });
    return s != end(gpu) && s->holds(position) ? s : nullptr;
  }

  // Inside a segment: which base position is invoked at `position`, and the other way round.
  std::uint32_t base(const Segment& s, std::uint32_t position) const {
    return bases_[s.first + (position - s.lo)];
  }
  std::uint32_t actual(const Segment& s, std::uint32_t base) const {
    return actuals_[s.first + (base - s.lo)];
  }
  // The same for any position.
  std::uint32_t base(std::uint32_t gpu, std::uint32_t position) const {
    const Segment* s = find(gpu, position);
    return s == nullptr ? position : base(*s, position);
  }
  std::uint32_t actual(std::uint32_t gpu, std::uint32_t position) const {
    const Segment* s = find(gpu, position);
    return s == nullptr ? position : actual(*s, position);
  }

 private:
  struct Range {
    std::uint32_t begin = 0;
    std::uint32_t end = 0;
  };

  std::vector<Range> ranges_;
  std::vector<std::uint32_t> disordered_;
  std::vector<Segment> segments_;
  std::vector<std::uint32_t> bases_, actuals_;
  std::vector<std::uint32_t> pending_;
};

}  // namespace unjam::sim
