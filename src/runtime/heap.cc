#include "runtime/heap.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

namespace unjam {

Heap::Heap(unsigned char* base, std::uint64_t bytes)
    : base_(base), bytes_(bytes / kAlignment * kAlignment) {
  if (bytes_ != 0) holes_.emplace(0, bytes_);
}

Result Heap::allocate(std::uint64_t bytes, void*& pointer) {
  pointer = nullptr;
  if (bytes == 0) return {};
  if (bytes_ == 0) {
    return {UNJAM_ERROR_RESOURCES,
            "this job has no heap to allocate " + std::to_string(bytes) +
                " bytes from: set UNJAM_HEAP (heap_bytes) on all ranks to what each needs"};
  }
  std::lock_guard lock(mutex_);
  auto best = holes_.end();
  if (bytes <= bytes_) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
      if (hole->second < bytes) continue;
      if (best == holes_.end() || hole->second < best->second) best = hole;
    }
  }
  if (best == holes_.end()) {
    const Usage u = usage_locked();
    return {UNJAM_ERROR_RESOURCES,
            "the heap has no room for " + std::to_string(bytes) + " bytes: of " +
                std::to_string(u.bytes) + " bytes " + std::to_string(u.bytes - u.used) +
                " are free, at most " + std::to_string(u.largest_free) +
                " of them in one piece; free what is not needed (unjamMemFree), or raise "
                "UNJAM_HEAP (heap_bytes) on all ranks"};
  }
  // The only step that can fail for want of memory comes first.
  used_.emplace(best->first, bytes);
  pointer = base_ + best->first;
  auto rest = holes_.extract(best);
  rest.key() += bytes;
  rest.mapped() -= bytes;
  if (rest.mapped() != 0) holes_.insert(std::move(rest));
  return {};
}

Result Heap::free(const void* pointer) {
  if (pointer == nullptr) return {};
  if (!holds(pointer, 1)) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            "the pointer is not in this rank's heap: free what unjamMemAlloc gave, by the context "
            "that it was allocated from"};
  }
  const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(pointer) - base();
  std::lock_guard lock(mutex_);
  const auto next = used_.upper_bound(offset);
  const auto at = next == used_.begin() ? used_.end() : std::prev(next);
  if (at == used_.end() || offset - at->first >= at->second) {
    return {UNJAM_ERROR_INVALID_USAGE,
            "nothing is allocated where the pointer points: it was freed already; free each "
            "allocation once"};
  }
  if (offset != at->first) {
    return {UNJAM_ERROR_INVALID_ARGUMENT, "the pointer is " + std::to_string(offset - at->first) +
                                              " bytes behind the beginning of an allocation of " +
                                              std::to_string(at->second) +
                                              ": free the pointer that unjamMemAlloc gave"};
  }
  if (retired_.contains(offset)) {
    used_.erase(at);
    return {};
  }
  // From one list to the other without an allocation: this cannot fail half-way.
  auto hole = holes_.insert(used_.extract(at)).position;
  const auto after = std::next(hole);
  if (after != holes_.end() && hole->first + hole->second == after->first) {
    hole->second += after->second;
    holes_.erase(after);
  }
  if (hole != holes_.begin()) {
    const auto before = std::prev(hole);
    if (before->first + before->second == hole->first) {
      before->second += hole->second;
      holes_.erase(hole);
    }
  }
  return {};
}

void Heap::retire(const void* pointer) {
  const std::uint64_t offset = reinterpret_cast<std::uintptr_t>(pointer) - base();
  std::lock_guard lock(mutex_);
  const auto next = used_.upper_bound(offset);
  if (next == used_.begin()) return;
  const auto at = std::prev(next);
  if (offset - at->first < at->second) retired_.insert(at->first);
}

bool Heap::holds(const void* pointer, std::uint64_t bytes) const {
  const auto p = reinterpret_cast<std::uintptr_t>(pointer);
  if (p < base()) return false;
  const std::uint64_t offset = p - base();
  return offset <= bytes_ && bytes <= bytes_ - offset;
}

Heap::Usage Heap::usage() const {
  std::lock_guard lock(mutex_);
  return usage_locked();
}

Heap::Usage Heap::usage_locked() const {
  Usage u;
  u.bytes = bytes_;
  u.allocations = used_.size();
  u.used = bytes_;  // what was retired, too
  for (const auto& [offset, bytes] : holes_) {
    u.used -= bytes;
    u.largest_free = std::max(u.largest_free, bytes);
  }
  return u;
}

}  // namespace unjam
