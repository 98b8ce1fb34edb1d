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
  std::uint32_t alike = 0;  // the same of those whose order says something (agreed_order.h), or 0
};

class TaskQueue {
 public:
  UNJAM_HD void attach(QueueLink* links) { links_ = links; }
  UNJAM_HD bool empty() const { return head_ == kNoSlot; }
  UNJAM_HD std::uint16_t head() const { return head_; }
  UNJAM_HD std::uint16_t next(std::uint16_t slot) const { return links_[slot].next; }
  UNJAM_HD std::uint32_t size() const { return size_; }

  UNJAM_HD void push_back(std::uint16_t slot, std::uint32_t alike) {
    links_[slot].alike = alike;
    insert_after(tail_, slot, 0);
  }

  // Behind all of equal or higher priority: first come, first served among equals.
  UNJAM_HD void push_by_priority(std::uint16_t slot, std::int32_t priority) {
    std::uint16_t at = tail_;
    while (at != kNoSlot && links_[at].priority < priority) at = links_[at].prev;
    insert_after(at, slot, priority);
  }

  UNJAM_HD void remove(std::uint16_t slot) {
    const QueueLink& l = links_[slot];
    if (last_sorted_ == slot) last_sorted_ = l.prev == last_closed_ ? kNoSlot : l.prev;
    if (last_closed_ == slot) last_closed_ = l.prev;
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

  // Whether one that is alike stands right in front of it.
  UNJAM_HD bool follows_its_like(std::uint16_t slot) const {
    const QueueLink& l = links_[slot];
    return l.alike != 0 && l.prev != kNoSlot && links_[l.prev].alike == l.alike;
  }

  // ---- putting what is in it in an order (agreed_order.h), but by priority ----

  // What is closed stands in front, and is put in order no more.
  UNJAM_HD std::uint16_t first_open() const {
    return last_closed_ == kNoSlot ? head_ : links_[last_closed_].next;
  }
  // Closes what was put in order so far.
  UNJAM_HD void close() {
    if (last_sorted_ != kNoSlot) last_closed_ = last_sorted_;
    last_sorted_ = kNoSlot;
  }
  // The first n open ones, which `after` follows, are to stand as in `slots`. First each of them by
  // one thread, then settle() by one.
  UNJAM_HD void place(const std::uint16_t* slots, std::uint32_t n, std::uint32_t i,
                      std::uint16_t after) {
    QueueLink& l = links_[slots[i]];
    l.prev = i == 0 ? last_closed_ : slots[i - 1];
    l.next = i + 1 == n ? after : slots[i + 1];
  }
  UNJAM_HD void settle(const std::uint16_t* slots, std::uint32_t n, std::uint16_t after) {
    if (last_closed_ == kNoSlot) {
      head_ = slots[0];
    } else {
      links_[last_closed_].next = slots[0];
    }
    if (after == kNoSlot) {
      tail_ = slots[n - 1];
    } else {
      links_[after].prev = slots[n - 1];
    }
    last_sorted_ = slots[n - 1];
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
  std::uint16_t last_closed_ = kNoSlot;  // kNoSlot: none is closed
  std::uint16_t last_sorted_ = kNoSlot;  // of the open ones; those in front were put in order, too
  std::uint32_t size_ = 0;
};

}  // namespace unjam
