#include "base/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <mutex>
#include <set>

namespace unjam {

std::atomic<std::uint32_t> process_generation_{0};

namespace {

struct Descriptors {
  std::mutex mutex;
  std::set<int> open;
};
Descriptors& descriptors() {
  static auto* d = new Descriptors;  // never destroyed: descriptors may outlive static destructors
  return *d;
}

// Held over the fork, so that the child finds it free and the set whole.
void before_fork() { descriptors().mutex.lock(); }

void after_fork_in_parent() { descriptors().mutex.unlock(); }

void after_fork_in_child() {
  Descriptors& d = descriptors();
  for (const int fd : d.open) close(fd);
  d.open.clear();  // their owners are the parent's, and never destroyed here
  process_generation_.fetch_add(1, std::memory_order_relaxed);
  d.mutex.unlock();
}

[[maybe_unused]] const bool kInstalled =
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child) == 0;

}  // namespace

void close_in_children(int fd) {
  Descriptors& d = descriptors();
  std::lock_guard lock(d.mutex);
  d.open.insert(fd);
}

void forget_descriptor(int fd) {
  Descriptors& d = descriptors();
  std::lock_guard lock(d.mutex);
  d.open.erase(fd);
}

}  // namespace unjam
