// A rank's heap: the part of its arena that its user allocates from (unjamMemAlloc()).
//
// The memory is not looked at, since it may be a device's: what is where is known here, on the
// host. Best fit, the lowest of equals, with holes joined at once. Has a lock of its own, under
// which nothing waits, so that no allocation stands behind a call that is inside of CUDA.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>

#include "runtime/result.h"

namespace unjam {

class Heap {
 public:
  // What every allocation begins at a multiple of, if the heap does, and is rounded up to.
  static constexpr std::uint64_t kAlignment = 512;

  Heap(unsigned char* base, std::uint64_t bytes);

  // Of no bytes: null, as cudaMalloc() gives.
  Result allocate(std::uint64_t bytes, void*& pointer);
  // Null is nothing to free.
  Result free(const void* pointer);
  // Peers may still store there: nobody gets the allocation again, whether it is freed or not.
  void retire(const void* pointer);

  std::uintptr_t base() const { return reinterpret_cast<std::uintptr_t>(base_); }
  std::uint64_t bytes() const { return bytes_; }
  // Whether all of that memory is the heap's, allocated or not.
  bool holds(const void* pointer, std::uint64_t bytes) const;

  struct Usage {
    std::uint64_t bytes = 0;
    std::uint64_t used = 0;          // or retired; as rounded up
    std::uint64_t largest_free = 0;  // what the largest allocation can have
    std::uint64_t allocations = 0;   // that were not freed
  };
  Usage usage() const;

 private:
  using Blocks = std::map<std::uint64_t, std::uint64_t>;  // offset -> bytes
  Usage usage_locked() const;

  unsigned char* const base_;
  const std::uint64_t bytes_;
  mutable std::mutex mutex_;
  Blocks used_;
  std::set<std::uint64_t> retired_;  // offsets of allocations: of used_, or freed since
  Blocks holes_;                     // no two touch
};

}  // namespace unjam
