// A task queue that brings its links.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/task_queue.h"

namespace unjam_test {

class QueueWithLinks : public unjam::TaskQueue {
 public:
  explicit QueueWithLinks(std::size_t slots) : links_(slots) { attach(links_.data()); }

  std::vector<std::uint16_t> order() const {
    std::vector<std::uint16_t> all;
    for (std::uint16_t s = head(); s != unjam::kNoSlot; s = next(s)) all.push_back(s);
    return all;
  }

 private:
  std::vector<unjam::QueueLink> links_;
};

}  // namespace unjam_test
