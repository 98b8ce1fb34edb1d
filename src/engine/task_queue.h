// A lane's task queue: invocations in scheduling order, as a doubly linked list over slot indices,
// so that a finished one leaves from anywhere in O(1) and the others keep their order.
#pragma once

#include <cstdint>

#include "base/portability.h"

namespace unjam {

inline constexpr std::uint16_t kNoSlot = 0xffff;

struct QueueLink {
  std::uint16_t next = kNoSlot;
  std::uint16_t prev = kNoSlot;
  std::int32_t priority = 0;
};

class TaskQueue {
 public:
  UNJAM_HD void attach(QueueLink* links) { links_ = links; }
  UNJAM_HD bool empty() const { return head_ == kNoSlot; }
  UNJAM_HD std::uint16_t head() const { return head_; }
  UNJAM_HD std::uint16_t next(std::uint16_t slot) const { return links_[slot].next; }
  UNJAM_HD std::uint32_t size() const { return size_; }

  UNJAM_HD void push_back(std::uint16_t slot, std::int32_t priority) {
    insert_after(tail_, slot, priority);
  }

  // Behind all of equal or higher priority: first come, first served among equals.
  UNJAM_HD void push_by_priority(std::uint16_t slot, std::int32_t priority) {
    std::uint16_t at = tail_;
    while (at != kNoSlot && links_[at].priority < priority) at = links_[at].prev;
    insert_after(at, slot, priority);
  }

  UNJAM_HD void remove(std::uint16_t slot) {
    const QueueLink& l = links_[slot];
    if (l.prev == kNoSlot) {
      head_ = l.next;
    } else {
      links_[l.prev].next = l.next;
    }
    if (l.next == kNoSlot) {
      tail_ = l.prev;
    } else {
      links_[l.next].prev = l.prev;
    }
    --size_;
  }

 private:
  UNJAM_HD void insert_after(std::uint16_t at, std::uint16_t slot, std::int32_t priority) {
    QueueLink& l = links_[slot];
    l.priority = priority;
    l.prev = at;
    l.next = at == kNoSlot ? head_ : links_[at].next;
    if (l.prev == kNoSlot) {
      head_ = slot;
    } else {
      links_[l.prev].next = slot;
    }
    if (l.next == kNoSlot) {
      tail_ = slot;
    } else {
      links_[l.next].prev = slot;
    }
    ++size_;
  }

  QueueLink* links_ = nullptr;
  std::uint16_t head_ = kNoSlot;
  std::uint16_t tail_ = kNoSlot;
  std::uint32_t size_ = 0;
};

}  // namespace unjam
