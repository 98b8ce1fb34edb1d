#include "transport/network/courier_driver.h"

#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/atomics.h"
#include "base/limits.h"
#include "base/pause.h"

namespace unjam {
namespace {

// Looks in vain before the thread sleeps: what comes next is mostly an answer to what went just
// now. Where cores are few, each look gives the core away.
constexpr std::uint32_t kLooks = 64, kLooksAYield = 8;
// A carrier without a descriptor tells of nothing: so long is slept at first, and at most.
constexpr std::int64_t kShortSleepUs = 50, kLongSleepUs = 1000;
// With one, somebody wakes the thread; and this is how late it is if nobody did.
constexpr std::int64_t kSleepUs = 1'000'000;

}  // namespace

CourierDriver::CourierDriver(Courier& courier, Fabric& fabric)
    : courier_(courier), fabric_(fabric), event_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) {
    throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno) + limit_text(errno));
  }
}

CourierDriver::~CourierDriver() { stop(); }

void CourierDriver::start() {
  thread_ = std::thread([this] { run(); });
}

void CourierDriver::stop() {
  if (!thread_.joinable()) return;
  store_release(stop_, 1u);
  wake();
  thread_.join();
}

// Either this one's read-modify-write of `asleep_` is behind that of the thread, and finds 1, or
// the thread's is behind this one, and what was posted before is seen by the look that follows.
void CourierDriver::wake() {
  if (fetch_add(asleep_, 0u) == 0 || fetch_and(asleep_, 0u) == 0) return;
  const std::uint64_t one = 1;
  // Fails only if it is readable already.
  [[maybe_unused]] const ssize_t n = write(event_.get(), &one, sizeof(one));
}

void CourierDriver::give_up(std::uint32_t peer) {
  {
    const std::lock_guard lock(mutex_);
    given_up_.push_back(peer);
  }
  store_release(asked_, 1u);
  wake();
}

// Nobody else drives: so this is the driver's to do.
void CourierDriver::take_given_up() {
  if (load_acquire(asked_) == 0) return;
  store_relaxed(asked_, 0u);
  const std::lock_guard lock(mutex_);
  for (const std::uint32_t peer : given_up_) courier_.broken(peer, "it was given up");
  given_up_.clear();
}

void CourierDriver::run() {
  pthread_setname_np(pthread_self(), "unjam net");
  std::uint32_t vain = 0;
  std::int64_t nap_us = kShortSleepUs;
  while (load_acquire(stop_) == 0) {
    take_given_up();
    if (courier_.drive()) {
      vain = 0;
      nap_us = kShortSleepUs;
      continue;
    }
    if (++vain < kLooks) {
      if (vain % kLooksAYield == 0) {
        sched_yield();
      } else {
        pause_core();
      }
      continue;
    }
    fetch_add(asleep_, 1u);  // it was 0: nobody else raises it
    if (load_acquire(stop_) == 0 && load_acquire(asked_) == 0 && !courier_.drive() &&
        courier_.arm()) {
      const bool is_told = fabric_.descriptor() >= 0;
      sleep(is_told ? kSleepUs : nap_us);
      nap_us = std::min(2 * nap_us, kLongSleepUs);
    } else {
      vain = 0;
    }
    fetch_and(asleep_, 0u);
  }
}

void CourierDriver::sleep(std::int64_t most_us) {
  pollfd polled[2] = {{event_.get(), POLLIN, 0}, {fabric_.descriptor(), POLLIN, 0}};
  const timespec most = {most_us / 1'000'000, most_us % 1'000'000 * 1000};
  if (ppoll(polled, 2, &most, nullptr) <= 0) return;  // (-1: ignored by poll)
  std::uint64_t value = 0;
  // Fails only if nobody has woken it.
  [[maybe_unused]] const ssize_t n = read(event_.get(), &value, sizeof(value));
}

}  // namespace unjam
