// Completion: out of the CQ, to requests, callbacks and successors.
#include <utility>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "runtime/context.h"

namespace unjam {

void Context::complete(Submitted& s, const Result& result) {
  Key& key = *s.key;
  ++key.completed;
  if (!result.ok()) fail_key(key, s.n, result);
  if (s.other != nullptr) end_call(*s.other, result);
  end_call(s, result);
}

void Context::end_call(Submitted& s, const Result& result) {
  --s.key->group->pending;
  ++completed_;
  log_ended(s, result);
  if (s.call.callback != nullptr) {
    --callbacks_;
    finished_.push_back({s.call.callback, s.call.user, result.code});
    background_changed_.notify_one();
  }
  if (s.request != nullptr) {
    // A helper sleeps on its lane, not on the completions.
    const bool tell = helping_;
    s.request->result = result.code;
    s.request->message = result.message;
    s.request->submitted = nullptr;
    s.request->done.store(true, std::memory_order_release);
    s.request->release();
    s.request = nullptr;
    if (tell) daemon_->ring(0);
  }
}

Result Context::on_complete(unjamRequest& request, unjamCallback_t callback, void* user) {
  {
    std::lock_guard lock(mutex_);
    if (Submitted* s = request.submitted; s != nullptr) {
      if (s->call.callback != nullptr) {
        return {UNJAM_ERROR_INVALID_USAGE, "the request has a callback already: it takes one"};
      }
      need_background();
      s->call.callback = callback;
      s->call.user = user;
      ++callbacks_;
      return {};
    }
    if (request.several && !request.done.load(std::memory_order_relaxed)) {
      if (request.callback != nullptr) {
        return {UNJAM_ERROR_INVALID_USAGE, "the request has a callback already: it takes one"};
      }
      need_background();
      request.callback = callback;
      request.user = user;
      return {};
    }
  }
  callback(request.result, user);
  return {};
}

Result Context::begin_request(unjamGroup& group, unjamCallback_t callback, void* user,
                              unjamRequest** request) {
  std::lock_guard lock(mutex_);
  if (closed()) return closed_why_;
  if (group.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
  auto made = std::make_unique<unjamRequest>();
  if (callback != nullptr) need_background();
  made->context = shared_from_this();
  made->several = true;
  made->callback = callback;
  made->user = user;
  made->retain();
  ++group.pending;
  ++submitted_;
  *request = made.release();
  return {};
}

void Context::end_request(unjamGroup& group, unjamRequest* request, const Result& result,
                          std::vector<std::string> incomplete, bool callback) {
  const std::shared_ptr<Context> keep = request->context;
  {
    std::lock_guard lock(mutex_);
    --group.pending;
    ++completed_;
    if (callback && request->callback != nullptr) {
      finished_.push_back({request->callback, request->user, result.code});
      background_changed_.notify_one();
    }
    request->result = result.code;
    request->message = result.message;
    request->incomplete = std::move(incomplete);
    request->done.store(true, std::memory_order_release);
    if (helping_) daemon_->ring(0);
    request->release();
  }
  completions_.notify();
}

void Context::reap_locked() {
  apply_notices();
  take_completions();
}

// Applies no notices, so what was seen of groups and keys stays as it was.
void Context::take_completions() {
  // (Of a rank that could not start, the device's memory is gone again.)
  if (memory_ == nullptr || daemon_ == nullptr) return;
  // A request that is kept keeps a destroyed context, and others may look at it. What its engine
  // has still to say is of keys that were let go, and their groups are freed: see dropped().
  if (destroyed_) return;
  Cqe e;
  bool any = false;
  while (memory_->rank().cq.pop(e)) {
    any = true;
    daemon_->ended(e.slot);
    if (e.slot >= slots_.size()) {
      room_is_cleared(e.slot);
      continue;
    }
    std::unique_ptr<Submitted> s = std::move(slots_[e.slot]);
    if (s != nullptr) {
      const Result why = notices_.leave(e.slot);
      if (s->cancel.ok()) s->cancel = why;
    }
    free_slots_.push_back(e.slot);
    if (s == nullptr) {
      dropped();
      continue;
    }
    Key& key = *s->key;
    --key.in_engine;
    // (On the host the engine has said so.)
    if (cuda() && e.outcome == Outcome::kDone && key.ledger != nullptr) {
      store_release(key.ledger->done, s->n + 1);
    }
    // (Whoever has the engine end something has said why, see Context::post_notice().)
    if (e.outcome != Outcome::kDone && s->cancel.ok()) {
      s->cancel = {UNJAM_ERROR_PEER, "a rank of the group is gone: shrink the group to those left"};
    }
    if (e.outcome != Outcome::kDone) give_up(*key.group);
    // (Of a failed call: a peer that has not heard of it yet may still store into its output.)
    if (e.outcome != Outcome::kDone) {
      const std::uint64_t place = output_place(*key.group, s->call);
      if (in_window(place)) {
        // (To others nobody was invited.)
        if (s->plan->protocol == Protocol::kSlot && key.group->members.size() > 1) {
          windows_.retire(place, s->cancel);
        }
      } else if (place != 0) {
        heap_->retire(s->call.recv);
      }
    }
    complete(*s, e.outcome == Outcome::kDone ? Result{} : s->cancel);
    if (key.failed_from != UINT64_MAX) fail_waiting(key, key.failed_from, key.failed);
    if (!key.waiting.empty()) {
      std::unique_ptr<Submitted> next = std::move(key.waiting.front());
      key.waiting.pop_front();
      --waiting_;
      admit(std::move(next));
      daemon_->ring(0);
    } else if (!key.busy()) {
      rest(key);
    }
  }
  if (!any) return;
  tidy();
  // Threads that wait for requests which we have completed on their behalf.
  completions_.notify();
}

void Context::reap() {
  std::lock_guard lock(mutex_);
  reap_locked();
}

// Whoever waits, helps: runs the engine where no other thread does, else sleeps on the completions.
// `helping_` is set while a thread may sleep in the engine's lane without having seen what others
// have completed since it last had the lock; they ring.
bool Context::wait(unjamRequest& request, std::int64_t timeout_us) {
  if (timeout_us > kLongestTimeoutUs) timeout_us = -1;
  const std::uint64_t deadline =
      timeout_us < 0 ? UINT64_MAX : monotonic_ns() + static_cast<std::uint64_t>(timeout_us) * 1000;
  const auto done = [&] { return request.done.load(std::memory_order_acquire); };
  if (done()) return true;
  std::unique_lock lock(mutex_, std::defer_lock);
  for (;;) {
    const std::uint32_t epoch = completions_.epoch();
    lock.lock();
    reap_locked();
    if (done()) return true;
    const std::uint64_t now = timeout_us < 0 ? 0 : monotonic_ns();
    if (now >= deadline) return false;
    if (!helping_ && !closed_ && daemon_->can_help()) {
      helping_ = true;
      lock.unlock();
      const auto look = [&] {
        lock.lock();
        helping_ = false;
        reap_locked();
        helping_ = !done();
        lock.unlock();
        return !done();
      };
      const bool helped = daemon_->help(look, deadline);
      lock.lock();
      helping_ = false;
      lock.unlock();
      if (helped) continue;
    } else {
      lock.unlock();
    }
    daemon_->wait(completions_, epoch,
                  timeout_us < 0 ? -1 : static_cast<std::int64_t>((deadline - now) / 1000 + 1));
  }
}

void Context::need_background() {
  if (!background_.joinable()) background_ = std::thread([this] { background(); });
  background_changed_.notify_one();
}

namespace {
// The process generation (fork_guard.h) in which this thread became a context's callback thread: a
// child that a callback forks is free of it.
constexpr std::uint32_t kNeverOne = UINT32_MAX;
thread_local std::uint32_t callback_thread_since = kNeverOne;
}  // namespace

bool Context::in_callback() { return callback_thread_since == process_generation(); }

void Context::background() {
  callback_thread_since = process_generation();
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
    daemon_->wait(completions_, epoch, -1);
    lock.lock();
  }
}

bool Context::synchronize(std::int64_t timeout_us) {
  Daemon* daemon = nullptr;
  {
    std::lock_guard lock(mutex_);
    daemon = daemon_.get();
  }
  return daemon == nullptr || daemon->synchronize(timeout_us);
}

}  // namespace unjam
