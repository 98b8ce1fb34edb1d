// A child of fork() has a copy of this process's objects, but none of its threads, and no business
// with its peers. So the child is told apart (the runtime refuses what was inherited), and its
// copies of our descriptors are closed: a socket that a child still holds would hide its parent's
// death, an arena would outlive the job.
#pragma once

#include <atomic>
#include <cstdint>

namespace unjam {

extern std::atomic<std::uint32_t> process_generation_;

// How many forks lie between the process that loaded the library and this one. What was made under
// another generation belongs to a parent.
inline std::uint32_t process_generation() {
  return process_generation_.load(std::memory_order_relaxed);
}

// A descriptor that children do not keep, until it is closed here.
void close_in_children(int fd);
void forget_descriptor(int fd);

// An object of which every process has its own: global state that a child must not inherit, since a
// thread that does not exist there may have held its lock. Never destroyed: users may outlive
// static destructors. `Tag` tells objects of equal type apart.
template <class T, class Tag = T>
T& per_process() {
  struct Place {
    const std::uint32_t generation = process_generation();
    T object;
  };
  static std::atomic<Place*> place{nullptr};
  Place* p = place.load(std::memory_order_acquire);
  while (p == nullptr || p->generation != process_generation()) {
    auto* made = new Place;
    if (place.compare_exchange_strong(p, made, std::memory_order_acq_rel)) return made->object;
    delete made;  // another thread was faster; p is its place
  }
  return p->object;
}

}  // namespace unjam
