// Failures: what ends invocations before their time.
#include <algorithm>
#include <utility>

#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {

void Context::abort(unjamResult_t code, const std::string& why) {
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    reap_locked();
    closed_ = true;
    closed_why_ = {code, why};
    if (first_error_.ok()) first_error_ = closed_why_;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      if (slots_[i] != nullptr) cancel_locked(i, closed_why_);
    }
    for (auto& [tag, key] : keys_) fail_waiting(*key, 0, closed_why_);
    daemon_->ring_all();
  }
  completions_.notify();
  world_->tell_peers_gone(rank_, why);
}

void Context::fail_key(Key& key, std::uint64_t from, const Result& why) {
  if (first_error_.ok()) first_error_ = why;
  if (from >= key.failed_from) return;
  if (key.failed_from == UINT64_MAX) failing_.push_back(&key);
  key.failed_from = from;
  key.failed = why;
}

// Ends the uses from `from` on that wait outside of the engine.
void Context::fail_waiting(Key& key, std::uint64_t from, const Result& why) {
  while (!key.waiting.empty() && key.waiting.back()->n >= from) {
    complete(*key.waiting.back(), why);
    key.waiting.pop_back();
    --waiting_;
  }
}

Result Context::async_error() const {
  std::lock_guard lock(mutex_);
  return first_error_;
}

void Context::cancel_locked(std::size_t slot, const Result& why) {
  Submitted& s = *slots_[slot];
  if (!s.cancel.ok()) return;
  s.cancel = why;
  daemon_->cancel(static_cast<std::uint16_t>(slot));
}

// Without the lock, which a call in progress may hold for long: the one who says so has the rest of
// the job to tell.
void Context::peer_left(int peer) { gone_[static_cast<std::size_t>(peer)] = true; }

void Context::peer_gone(int peer, const std::string& why) {
  if (streams_ != nullptr) streams_->peer_gone(peer);
  {
    std::lock_guard lock(mutex_);
    if (closed_) return;
    reap_locked();
    const Result result = gone_result(peer, why);
    gone_[static_cast<std::size_t>(peer)] = true;
    for (auto& group : groups_) {
      if (std::find(group->members.begin(), group->members.end(), peer) != group->members.end()) {
        fail_group(*group, result);
      }
    }
    daemon_->ring_all();
  }
  completions_.notify();
}

void Context::fail_group(unjamGroup& group, const Result& why) {
  if (group.failed.ok()) group.failed = why;
  release_group(group);
  for (auto& [name, key] : group.keys) fail_waiting(*key, 0, why);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i] != nullptr && slots_[i]->key->group == &group) cancel_locked(i, group.failed);
  }
}

void Context::fail_call(std::uint64_t tag, std::uint64_t n, const Result& why) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  const auto found = keys_.find(tag);
  if (found == keys_.end()) return fail_record(tag, n, why);
  fail_key(*found->second, n, why);
  fail_waiting(*found->second, n, why);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    // Later uses of the key cannot start any more; earlier ones go on.
    const Submitted* s = slots_[i].get();
    if (s != nullptr && s->key == found->second && s->n >= n) cancel_locked(i, why);
  }
  completions_.notify();
  daemon_->ring_all();
}

}  // namespace unjam
