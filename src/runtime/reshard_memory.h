// Where the bundles of a run of resharding lie, and how boxes of tensors come there and back: in
// host memory, by the run's thread; or in a GPU's, by kernels that the run's thread queues.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/box.h"
#include "runtime/box_memory.h"
#include "runtime/result.h"

namespace unjam {

// Of one run. Its thread calls all but the constructor and reserve(). What a device refuses is an
// exception.
class ReshardMemory {
 public:
  struct Copy {
    BoxPlace from, to;
    const std::vector<std::int64_t>* size = nullptr;
  };

  virtual ~ReshardMemory() = default;

  // Before anything is submitted: for so many bundles at once, of so many bytes at most, and so
  // many words.
  virtual Result reserve(std::size_t bundles, std::int64_t bytes, std::size_t words) = 0;
  // Zero at first. Sends read them and receives write them.
  virtual std::uint64_t* words() = 0;
  // Memory for a bundle, which the next one may have after give_back().
  virtual std::uint8_t* take() = 0;
  virtual void give_back(std::uint8_t* bundle) = 0;

  // No copy reads or writes what another one of them writes.
  virtual void copy(const std::vector<Copy>& copies) = 0;
  virtual void clear(std::uint8_t* memory, std::int64_t bytes) = 0;

  // Behind which calls must come that read or write memory of take(); nullptr: at once.
  virtual void* stream() const { return nullptr; }
  // Called first in the run's thread.
  virtual void enter() {}
  // Whether the caller's stream has come to where it was.
  virtual bool sources_are_ready() { return true; }
  // All copies are done.
  virtual void finish() {}
};

// boxes: of a device; nullptr: host memory. after: what BoxMover::note() gave, or nullptr.
std::unique_ptr<ReshardMemory> make_reshard_memory(BoxMemory* boxes, std::shared_ptr<void> after);

}  // namespace unjam
