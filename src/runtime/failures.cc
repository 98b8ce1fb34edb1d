// Failures: what ends invocations before their time.
#include <algorithm>
#include <utility>

#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {

// Whoever waits is woken, and takes the lock.
void Context::post_notice(FailureNotice notice) {
  notices_.post(std::move(notice), *daemon_);
  daemon_->ring_all();
  completions_.notify();
  if (const std::unique_lock lock = look()) reap_locked();
}

void Context::enter_slot(std::uint16_t slot, const Submitted& s) {
  notices_.enter(slot, {s.key->group, s.key->state.tag, s.n}, memory_->rank().cancelled[slot],
                 *daemon_);
}

void Context::apply_notices() {
  for (;;) {
    const std::vector<FailureNotice> notices = notices_.take();
    if (notices.empty()) return;
    for (const FailureNotice& notice : notices) apply_notice(notice);
  }
}

void Context::apply_notice(const FailureNotice& notice) {
  if (closed_) return;
  switch (notice.what) {
    case FailureNotice::kCall: {
      const auto found = keys_.find(notice.tag);
      if (found == keys_.end()) return fail_record(notice);
      if (!notice.is_heeded_by(*found->second->group)) break;
      fail_key(*found->second, notice.n, notice.why);
      fail_waiting(*found->second, notice.n, notice.why);
      break;
    }
    case FailureNotice::kPeer:
      gone_[static_cast<std::size_t>(notice.peer)] = true;
      for (auto& group : groups_) {
        if (is_member(*group, notice.peer)) {
          lose_member(*group, {notice.peer, notice.why, notice.legacy, {}});
        }
      }
      break;
    case FailureNotice::kGaveUp:
      for (auto& group : groups_) {
        if (!is_member(*group, notice.peer)) continue;
        for (unjamGroup::Gone& gone : group->gone) {
          if (gone.rank == notice.gone) gone.given_up.push_back(notice.peer);
        }
        lose_reach(*group);
      }
      break;
    case FailureNotice::kAbort:
      closed_ = true;
      closed_why_ = notice.why;
      if (first_error_.ok()) first_error_ = closed_why_;
      launched_.notify_all();
      for (auto& [tag, key] : keys_) fail_waiting(*key, 0, closed_why_);
      break;
  }
  // In the engine they are cancelled, or about to be: this says why.
  for (const std::unique_ptr<Submitted>& s : slots_) {
    if (s != nullptr && notices_.concerns(notice, {s->key->group, s->key->state.tag, s->n}) &&
        s->cancel.ok()) {
      s->cancel = notice.why;
    }
  }
  daemon_->ring_all();
  completions_.notify();
}

void Context::abort(unjamResult_t code, const std::string& why) {
  if (ends_.exchange(true)) return;
  FailureNotice notice;
  notice.what = FailureNotice::kAbort;
  notice.why = {code, why};
  post_notice(std::move(notice));
  world_->tell_peers_gone(rank_, why);
}

Result Context::abort_group(unjamGroup& group, const std::string& why) {
  // What peers send to this rank, or await from it, ends too, also where it has never called that.
  for (int peer = 0; peer < static_cast<int>(group.members.size()); ++peer) {
    unjamGroup* unused = nullptr;
    for (const bool sends : {true, false}) {
      if (Result r = open_channel(group, peer, sends, unused); !r.ok()) return r;
    }
  }
  struct Ended {
    std::uint64_t tag, n;
    const std::vector<int>* members;
  };
  std::vector<Ended> ended;
  {
    const std::lock_guard lock(mutex_);
    if (closed()) return closed_why_;
    if (group.destroyed) return {UNJAM_ERROR_INVALID_USAGE, "the group was destroyed"};
    reap_locked();
    const auto end = [&](unjamGroup& g) {
      if (g.failed.ok()) g.failed = {UNJAM_ERROR_ABORTED, why};
      const std::uint64_t common = key_tag(g, "");
      bool has_common = false;
      for (const auto& [name, key] : g.keys) {
        has_common = has_common || key->state.tag == common;
        ended.push_back({key->state.tag, key->completed, &g.members});
      }
      for (const auto& [tag, record] : records_) {
        if (record.group != &g) continue;
        has_common = has_common || tag == common;
        ended.push_back({tag, record.uses, &g.members});
      }
      if (!has_common) ended.push_back({common, 0, &g.members});
      release_group(g);
    };
    end(group);
    for (const auto& [ends, channel] : group.channels) end(*channel);
  }
  for (const Ended& e : ended) {
    fail_call(e.tag, e.n, {UNJAM_ERROR_ABORTED, why});  // first: this rank's own word for it
    if (e.members->size() > 1) {
      world_->abandon(e.tag, e.n, *e.members,
                      "rank " + std::to_string(rank_) + " has given up the group: " + why);
    }
  }
  return {};
}

void Context::fail_key(Key& key, std::uint64_t from, const Result& why) {
  if (first_error_.ok()) first_error_ = why;
  if (from >= key.failed_from) return;
  if (key.group->is_own()) {
    key.voided = true;  // there is no peer to know it
  } else if (key.failed_from == UINT64_MAX) {
    failing_.push_back(&key);
  }
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
  while (!key.halves.empty() && key.halves.back()->n >= from) {
    end_call(*key.halves.back(), why);
    key.halves.pop_back();
  }
  if (!key.busy() && key.list == KeyList::kBusy) rest(key);
}

Result Context::async_error() {
  std::lock_guard lock(mutex_);
  apply_notices();
  return first_error_;
}

Result Context::why_closed() {
  std::lock_guard lock(mutex_);
  return closed() ? closed_why_ : Result{};
}

void Context::cancel_locked(std::size_t slot, const Result& why) {
  Submitted& s = *slots_[slot];
  if (!s.cancel.ok()) return;
  s.cancel = why;
  daemon_->cancel(static_cast<std::uint16_t>(slot));
}

// Without the lock, see post_notice().
void Context::peer_left(int peer) { gone_[static_cast<std::size_t>(peer)] = true; }

void Context::peer_gone(int peer, const std::string& why, std::shared_ptr<const Legacy> legacy) {
  FailureNotice notice;
  notice.what = FailureNotice::kPeer;
  notice.peer = peer;
  notice.why = gone_result(peer, why);
  notice.legacy = std::move(legacy);
  post_notice(std::move(notice));
}

Result Context::unreachable(const unjamGroup& group, std::uint64_t tag, std::uint64_t n) const {
  for (const unjamGroup::Gone& gone : group.gone) {
    if (gone.legacy == nullptr || !gone.legacy->covers(tag, n)) return gone.why;
    for (const int rank : gone.given_up) {
      if (!has_completed(world_->ledger(rank), tag, n)) return gone.why;
    }
  }
  return {};
}

Result Context::past_the_end(const unjamGroup& group, std::uint64_t tag, std::uint64_t n) {
  Result why = group.failed.ok() ? unreachable(group, tag, n) : group.failed;
  if (!why.ok()) give_up(group);
  return why;
}

void Context::give_up(const unjamGroup& group) {
  for (const unjamGroup::Gone& gone : group.gone) give_up(gone.rank);
}

void Context::give_up(int rank) {
  if (given_up_.add(rank)) world_->gave_up(rank_, rank);
}

void Context::peer_gave_up(int peer, int gone, const std::string& why) {
  FailureNotice notice;
  notice.what = FailureNotice::kGaveUp;
  notice.peer = peer;
  notice.gone = gone;
  notice.why = gone_result(gone, why);
  post_notice(std::move(notice));
}

bool Context::differs(const unjamGroup& group, std::uint64_t tag, std::uint64_t n,
                      const Signature& signature) {
  return std::any_of(group.gone.begin(), group.gone.end(), [&](const unjamGroup::Gone& gone) {
    return gone.legacy != nullptr && gone.legacy->differs(tag, n, signature.hash());
  });
}

void Context::lose_member(unjamGroup& group, unjamGroup::Gone gone) {
  group.gone.push_back(std::move(gone));
  lose_reach(group);
}

void Context::lose_reach(unjamGroup& group) {
  if (group.gone.empty()) return;
  // Peers are told first: with what its user is told next the process may end.
  for (auto& [name, key] : group.keys) {
    if (key->waiting.empty()) continue;
    // A key's uses keep their order: behind the first that cannot be complete none can.
    Result why;
    std::uint64_t n = key->waiting.front()->n;
    for (; n <= key->waiting.back()->n; ++n) {
      why = unreachable(group, key->state.tag, n);
      if (!why.ok()) break;
    }
    if (why.ok()) continue;
    give_up(group);
    fail_waiting(*key, n, why);
  }
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i] == nullptr || slots_[i]->key->group != &group) continue;
    const Submitted& s = *slots_[i];
    Result why = unreachable(group, s.key->state.tag, s.n);
    if (!why.ok()) give_up(group);
    if (why.ok() && differs(group, s.key->state.tag, s.n, s.call.signature)) {
      why = differs_result(s.call.signature, s.key->name, group.name, s.n, group.gone.front().why);
    }
    if (!why.ok()) cancel_locked(i, why);
  }
  end_if_over(group);
}

void Context::lose_members(unjamGroup& group) {
  for (auto& [rank, gone] : world_->gone(group.members)) {
    const std::lock_guard lock(mutex_);
    std::erase_if(gone.given_up, [&](int r) { return r == rank_ || !is_member(group, r); });
    lose_member(group, {rank, gone_result(rank, gone.why), gone.legacy, gone.given_up});
    daemon_->ring_all();
  }
}

// What peers have for this rank in the group's connectors is let go only then: it may be part of a
// call that can still be made.
void Context::end_if_over(unjamGroup& group) {
  if (group.gone.empty() || !group.failed.ok()) return;
  const auto callable = [&](std::uint64_t tag, std::uint64_t uses) {
    const std::uint64_t n = uses_of(tag);
    return n < uses && unreachable(group, tag, n).ok();
  };
  const bool hopeless =
      group.destroyed || std::any_of(group.gone.begin(), group.gone.end(),
                                     [](const auto& gone) { return gone.legacy == nullptr; });
  if (!hopeless && group.gone.front().legacy->any_of(group.tag, callable)) return;
  group.failed = group.gone.front().why;
  release_group(group);
}

void Context::fail_call(std::uint64_t tag, std::uint64_t n, const Result& why,
                        const std::vector<int>& speakers) {
  FailureNotice notice;
  notice.tag = tag;
  notice.n = n;
  notice.why = why;
  notice.speakers = speakers;
  post_notice(std::move(notice));
}

}  // namespace unjam
