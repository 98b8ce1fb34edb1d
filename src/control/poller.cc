#include "control/poller.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>

#include "base/clock.h"

namespace unjam {
namespace {

constexpr int kEventsAtOnce = 256;
constexpr int kMostFullRounds = 64;

std::uint32_t mask(bool read, bool write) {
  return (read ? EPOLLIN : 0u) | (write ? EPOLLOUT : 0u);
}

}  // namespace

Poller::Poller()
    : epoll_(epoll_create1(EPOLL_CLOEXEC)), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  epoll_event e{};
  e.events = EPOLLIN;
  if (!epoll_ || !wake_ || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &e) != 0) {
    throw std::runtime_error(std::string("epoll: ") + std::strerror(errno));
  }
}

std::uint64_t Poller::watch(Watcher* watcher, int fd, bool read, bool write) {
  epoll_event e{};
  e.events = mask(read, write);
  e.data.u64 = last_token_ + 1;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &e) != 0) return 0;
  entries_[++last_token_] = {watcher, fd, e.events};
  return last_token_;
}

void Poller::change(std::uint64_t token, bool read, bool write) {
  const auto at = entries_.find(token);
  if (at == entries_.end() || at->second.events == mask(read, write)) return;
  epoll_event e{};
  e.events = at->second.events = mask(read, write);
  e.data.u64 = token;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, at->second.fd, &e) != 0) std::perror("unjam: epoll");
}

void Poller::forget(std::uint64_t token) {
  const auto at = entries_.find(token);
  if (at == entries_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, at->second.fd, nullptr);
  entries_.erase(at);
}

void Poller::at(Watcher* watcher, std::uint64_t deadline_ns) {
  std::uint64_t& known = deadline_of_[watcher];
  if (known == deadline_ns) return;
  if (known != 0) deadlines_.erase({known, watcher});
  known = deadline_ns;
  if (deadline_ns != 0) deadlines_.insert({deadline_ns, watcher});
}

void Poller::at_round_end(Watcher* watcher) { round_end_.push_back(watcher); }

void Poller::leave(Watcher* watcher) {
  at(watcher, 0);
  deadline_of_.erase(watcher);
  std::erase(round_end_, watcher);
}

void Poller::run_once(std::int64_t timeout_ms) {
  if (!deadlines_.empty()) {
    const std::uint64_t now = monotonic_ns(), next = deadlines_.begin()->first;
    const std::int64_t until =
        next <= now ? 0 : static_cast<std::int64_t>((next - now) / 1000000) + 1;
    timeout_ms = timeout_ms < 0 ? until : std::min(timeout_ms, until);
  }
  if (!round_end_.empty()) timeout_ms = 0;
  epoll_event events[kEventsAtOnce];
  const int wait = static_cast<int>(std::clamp<std::int64_t>(timeout_ms, -1, 1 << 30));
  const int n = epoll_wait(epoll_.get(), events, kEventsAtOnce, wait);
  for (int i = 0; i < n; ++i) {
    if (events[i].data.u64 == 0) {
      std::uint64_t unused;
      if (read(wake_.get(), &unused, sizeof(unused)) < 0 && errno != EAGAIN) {
        std::perror("unjam: eventfd");
      }
      continue;
    }
    const auto at = entries_.find(events[i].data.u64);
    if (at == entries_.end()) continue;  // forgotten in this round
    const bool broken = (events[i].events & (EPOLLHUP | EPOLLERR)) != 0;
    at->second.watcher->on_ready(events[i].data.u64, broken || (events[i].events & EPOLLIN) != 0,
                                 broken || (events[i].events & EPOLLOUT) != 0);
  }
  std::vector<std::function<void()>> posted;
  {
    std::lock_guard lock(mutex_);
    posted.swap(posted_);
  }
  for (const auto& what : posted) what();
  // Deadlines come after what has arrived: news that is there already is not late. So they wait
  // while there is more of it, though not for ever.
  full_rounds_ = n < kEventsAtOnce ? 0 : full_rounds_ + 1;
  if (full_rounds_ % kMostFullRounds == 0) {
    const std::uint64_t now = monotonic_ns();
    std::vector<Watcher*> due;
    for (const auto& [deadline, watcher] : deadlines_) {
      if (deadline > now) break;
      due.push_back(watcher);
    }
    for (Watcher* watcher : due) {
      const auto known = deadline_of_.find(watcher);
      if (known == deadline_of_.end() || known->second == 0 || known->second > now) continue;
      at(watcher, 0);
      watcher->on_time();
    }
  }
  // One that leaves meanwhile takes itself out of the list.
  while (!round_end_.empty()) {
    Watcher* watcher = round_end_.back();
    round_end_.pop_back();
    watcher->on_round_end();
  }
}

void Poller::post(std::function<void()> what) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(what));
  }
  const std::uint64_t one = 1;
  if (write(wake_.get(), &one, sizeof(one)) < 0 && errno != EAGAIN) std::perror("unjam: eventfd");
}

}  // namespace unjam
