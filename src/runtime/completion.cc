// Completion: out of the CQ, to requests, callbacks and successors.
#include <chrono>
#include <utility>

#include "runtime/context.h"

namespace unjam {

void Context::complete(Submitted& s, const Result& result) {
  Key& key = *s.key;
  --key.group->pending;
  ++key.completed;
  ++completed_;
  if (!result.ok()) fail_key(key, s.n, result);
  if (s.call.callback != nullptr) {
    --callbacks_;
    finished_.push_back({s.call.callback, s.call.user, result.code});
    background_changed_.notify_one();
  }
  if (s.request != nullptr) {
    s.request->result = result.code;
    s.request->message = result.message;
    s.request->done.store(true, std::memory_order_release);
    s.request->release();
    s.request = nullptr;
  }
}

void Context::reap_locked() {
  if (memory_ == nullptr) return;
  Cqe e;
  bool any = false;
  while (memory_->rank().cq.pop(e)) {
    any = true;
    std::unique_ptr<Submitted> s = std::move(slots_[e.slot]);
    free_slots_.push_back(e.slot);
    Key& key = *s->key;
    --key.in_engine;
    complete(*s, e.outcome == Outcome::kDone ? Result{} : s->cancel);
    if (key.failed_from != UINT64_MAX) fail_waiting(key, key.failed_from, key.failed);
    if (!key.waiting.empty()) {
      std::unique_ptr<Submitted> next = std::move(key.waiting.front());
      key.waiting.pop_front();
      --waiting_;
      admit(std::move(next));
    } else if (key.in_engine == 0) {
      --active_keys_;
      ++lingering_keys_;
      key.active = false;
      key.lingering = true;
      if (!key.listed) lingering_.push_back(&key);
      key.listed = true;
    }
  }
  // Threads that wait for requests which we have completed on their behalf.
  if (any) completions_.notify();
}

void Context::reap() {
  std::lock_guard lock(mutex_);
  reap_locked();
}

bool Context::wait(unjamRequest& request, std::int64_t timeout_us) {
  if (timeout_us > kLongestTimeoutUs) timeout_us = -1;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  for (;;) {
    if (request.done.load(std::memory_order_acquire)) return true;
    const std::uint32_t epoch = completions_.epoch();
    reap();
    if (request.done.load(std::memory_order_acquire)) return true;
    std::int64_t left = -1;
    if (timeout_us >= 0) {
      left = std::chrono::duration_cast<std::chrono::microseconds>(deadline -
                                                                   std::chrono::steady_clock::now())
                 .count();
      if (left <= 0) return false;
    }
    completions_.wait(epoch, left);
  }
}

void Context::need_background() {
  if (!background_.joinable()) background_ = std::thread([this] { background(); });
  background_changed_.notify_one();
}

namespace {
thread_local bool on_callback_thread = false;
}

bool Context::in_callback() { return on_callback_thread; }

void Context::background() {
  on_callback_thread = true;
  std::unique_lock lock(mutex_);
  while (!background_stop_ || !finished_.empty()) {
    if (!finished_.empty()) {
      const Finished f = finished_.front();
      finished_.pop_front();
      lock.unlock();
      f.callback(f.result, f.user);
      lock.lock();
      continue;
    }
    if (callbacks_ == 0 && waiting_ == 0) {
      background_changed_.wait(lock);
      continue;
    }
    const std::uint32_t epoch = completions_.epoch();
    reap_locked();
    if (!finished_.empty() || (callbacks_ == 0 && waiting_ == 0)) continue;
    lock.unlock();
    completions_.wait(epoch, -1);
    lock.lock();
  }
}

bool Context::synchronize(std::int64_t timeout_us) {
  HostDaemon* daemon = nullptr;
  {
    std::lock_guard lock(mutex_);
    daemon = daemon_.get();
  }
  return daemon == nullptr || daemon->synchronize(timeout_us);
}

}  // namespace unjam
