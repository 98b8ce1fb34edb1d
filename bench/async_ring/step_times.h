// When each transfer and each addition of one call began and ended, by events in their streams.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "bench/async_ring/overlap.h"
#include "tests/gpu/cuda_objects.h"

namespace async_ring {

class StepTimes {
 public:
  enum Kind { kCopy, kSum };
  struct Piece {
    Kind kind = kCopy;
    int stream = 0, chunk = 0;
    Span us;  // since origin()
  };

  // Events of at most `pieces` pieces, made beforehand: making them takes time.
  explicit StepTimes(int pieces) {
    for (int i = 0; i < 2 * pieces; ++i) events_.push_back(std::make_unique<unjam_gpu::Event>());
  }

  // What times count from; all pieces' streams are this device's, of which the first is given.
  void origin(const unjam_gpu::Stream& first) {
    first_ = &first;
    pieces_.clear();
    origin_.record(first);
    first.synchronize();
  }
  void begin(Kind kind, int chunk, const unjam_gpu::Stream& stream) {
    pieces_.push_back({kind, &stream == first_ ? 0 : 1, chunk, {}});
    event(0).record(stream);
  }
  void end(const unjam_gpu::Stream& stream) { event(1).record(stream); }

  // Once all is done.
  std::vector<Piece> pieces() const {
    std::vector<Piece> all = pieces_;
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i].us = {unjam_gpu::us_between(origin_, *events_[2 * i]),
                   unjam_gpu::us_between(origin_, *events_[2 * i + 1])};
    }
    return all;
  }

 private:
  const unjam_gpu::Event& event(std::size_t which) const {
    const std::size_t i = 2 * (pieces_.size() - 1) + which;
    if (i >= events_.size()) unjam_gpu::fail("more pieces than StepTimes was made for");
    return *events_[i];
  }

  const unjam_gpu::Stream* first_ = nullptr;
  unjam_gpu::Event origin_;
  std::vector<std::unique_ptr<unjam_gpu::Event>> events_;
  std::vector<Piece> pieces_;
};

}  // namespace async_ring
