#include "sim/sparse_orders.h"

namespace unjam::sim {

void SparseOrders::build(const std::vector<Disorder>& disorders) {
  for (const std::uint32_t gpu : disordered_) ranges_[gpu] = {};
  disordered_.clear();
  segments_.clear();
  bases_.clear();
  actuals_.clear();
  for (std::size_t i = 0; i < disorders.size();) {
    const std::uint32_t gpu = disorders[i].gpu;
    disordered_.push_back(gpu);
    ranges_[gpu].begin = static_cast<std::uint32_t>(segments_.size());
    while (i < disorders.size() && disorders[i].gpu == gpu) {
      // Plays the list from the disorder until nothing that was skipped is left: the remaining list
      // is pending_, then the base order from `next` on.
      Segment segment{disorders[i].at, 0, bases_.size()};
      pending_.clear();
      std::uint32_t next = segment.lo, now = segment.lo;
      do {
        std::uint32_t skips = 0;
        if (i < disorders.size() && disorders[i].gpu == gpu && disorders[i].at == now) {
          skips = disorders[i++].skips;
        }
        while (pending_.size() <= skips) pending_.push_back(next++);
        bases_.push_back(pending_[skips]);
        pending_.erase(pending_.begin() + skips);
        ++now;
      } while (!pending_.empty());
      segment.end = now;
      segments_.push_back(segment);
      actuals_.resize(bases_.size());
      for (std::uint32_t p = segment.lo; p < now; ++p) {
        actuals_[segment.first + (bases_[segment.first + (p - segment.lo)] - segment.lo)] = p;
      }
    }
    ranges_[gpu].end = static_cast<std::uint32_t>(segments_.size());
  }
}

}  // namespace unjam::sim
