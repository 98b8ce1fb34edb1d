// What is to happen, in order of time: a radix heap, for times never go back. Events lie in buckets
// by the highest bit in which their time differs from now, so that each moves a few times only, and
// to where others lie; a heap of all would be walked through memory for each.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace unjam {

// Of what happens at one time, what concerns a lower lane comes first, so that the order is the
// same in folded runs and others; then what was foreseen first.
struct Event {
  enum Type : std::uint32_t { kSliceDone, kPort, kArrival, kRoom };
  std::int64_t time = 0;
  std::uint32_t who = 0;  // a lane, by its number
  Type type = kSliceDone;
  std::uint64_t order = 0;
  std::uint32_t what = 0;  // a message, or a channel
};

class EventQueue {
 public:
  // time: not before that of the last event taken.
  void push(std::int64_t time, std::uint32_t who, Event::Type type, std::uint32_t what) {
    const Event event{time, who, type, order_++, what};
    ++size_;
    if (time != now_) {
      buckets_[bucket_of(time)].push_back(event);
      return;
    }
    present_.push_back(event);
    std::push_heap(present_.begin(), present_.end(), behind);
  }

  bool empty() const { return size_ == 0; }

  // The queue must have one.
  Event pop() {
    if (present_.empty()) proceed();
    std::pop_heap(present_.begin(), present_.end(), behind);
    const Event event = present_.back();
    present_.pop_back();
    --size_;
    return event;
  }

 private:
  static bool behind(const Event& a, const Event& b) {
    return a.who != b.who ? a.who > b.who : a.order > b.order;
  }
  std::size_t bucket_of(std::int64_t time) const {
    return static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(time ^ now_)));
  }

  // To the next time at which something happens: in the first bucket that is not empty.
  void proceed() {
    std::size_t b = 1;
    while (buckets_[b].empty()) ++b;
    std::vector<Event> events;
    events.swap(buckets_[b]);
    now_ = std::min_element(events.begin(), events.end(), [](const Event& x, const Event& y) {
             return x.time < y.time;
           })->time;
    for (const Event& event : events) {
      if (event.time == now_) {
        present_.push_back(event);
      } else {
        buckets_[bucket_of(event.time)].push_back(event);
      }
    }
    std::make_heap(present_.begin(), present_.end(), behind);
    events.clear();
    if (buckets_[b].empty()) buckets_[b].swap(events);  // its memory is wanted again
  }

  std::int64_t now_ = 0;
  std::uint64_t order_ = 0, size_ = 0;
  std::vector<Event> present_;  // at this time: a heap
  std::array<std::vector<Event>, 65> buckets_;
};

}  // namespace unjam
