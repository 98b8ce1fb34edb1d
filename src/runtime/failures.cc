// Failures: what ends invocations before their time.
#include <algorithm>
#include <utility>

#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {
namespace {

bool is_member(const unjamGroup& group, int rank) {
  return std::find(group.members.begin(), group.members.end(), rank) != group.members.end();
}

}  // namespace

// Whose call was refused, who is gone, who gives up: it is told by threads that must not wait for
// this context's lock. (Whoever has it does not wait for a device, see StreamDaemon, but may be
// busy for long.) And who tells holds the world's lock: behind it nothing would be heard or said
// any more, of other ranks and groups neither.
//
// So what concerns the engine, cancellations, is said without the lock, by what in_engine_ says;
// the rest is done by who has the lock next, before it takes completions or makes calls: hear().
// Whoever waits is woken, and takes the lock. A call that enters the engine in between finds the
// news there.
void Context::tell(News news) {
  {
    const std::lock_guard lock(news_mutex_);
    for (std::size_t i = 0; i < in_engine_.size(); ++i) {
      if (concerns(news, in_engine_[i])) daemon_->cancel(static_cast<std::uint16_t>(i));
    }
    news_.push_back(std::move(news));
    has_news_.store(true, std::memory_order_release);
    // (Behind it: whoever sees what the engine ends for it, finds why. It would end all: where
    // something can still be had of the peer, what cannot is cancelled one by one, above.)
    const News& last = news_.back();
    if (last.what == News::kPeer && last.legacy == nullptr) daemon_->peer_gone(last.peer);
  }
  daemon_->ring_all();
  completions_.notify();
  if (const std::unique_lock lock = look()) reap_locked();
}

// Whether a member of the group says so.
bool Context::heeds(const News& news, const unjamGroup& group) {
  return news.speakers.empty() || std::any_of(news.speakers.begin(), news.speakers.end(),
                                              [&](int rank) { return is_member(group, rank); });
}

bool Context::concerns(const News& news, const InEngine& call) const {
  if (call.group == nullptr) return false;
  switch (news.what) {
    case News::kCall:
      // Later uses of the key cannot start any more; earlier ones go on.
      return call.tag == news.tag && call.n >= news.n && heeds(news, *call.group);
    case News::kPeer:
      return is_member(*call.group, news.peer) &&
             (news.legacy == nullptr || !news.legacy->covers(call.tag, call.n));
    case News::kGaveUp:
      return is_member(*call.group, news.peer) && is_member(*call.group, news.gone) &&
             !has_completed(world_->ledger(news.peer), call.tag, call.n);
    case News::kAbort:
      break;
  }
  return true;
}

void Context::enter_slot(std::uint16_t slot, const Submitted& s) {
  const std::lock_guard lock(news_mutex_);
  store_release<std::uint32_t>(memory_->rank().cancelled[slot], 0);
  InEngine& call = in_engine_[slot];
  call = {s.key->group, s.key->state.tag, s.n};
  for (const News& news : news_) {
    if (concerns(news, call)) daemon_->cancel(slot);
  }
}

Result Context::leave_slot(std::uint16_t slot) {
  const std::lock_guard lock(news_mutex_);
  const InEngine call = std::exchange(in_engine_[slot], {});
  for (const News& news : news_) {
    if (concerns(news, call)) return news.why;
  }
  return {};
}

void Context::hear() {
  while (has_news_.load(std::memory_order_acquire)) {
    std::vector<News> news;
    {
      const std::lock_guard lock(news_mutex_);
      news.swap(news_);
      has_news_.store(false, std::memory_order_relaxed);
    }
    for (const News& n : news) hear(n);
  }
}

void Context::hear(const News& news) {
  if (closed_) return;
  switch (news.what) {
    case News::kCall: {
      const auto found = keys_.find(news.tag);
      if (found == keys_.end()) return fail_record(news);
      if (!heeds(news, *found->second->group)) break;
      fail_key(*found->second, news.n, news.why);
      fail_waiting(*found->second, news.n, news.why);
      break;
    }
    case News::kPeer:
      gone_[static_cast<std::size_t>(news.peer)] = true;
      for (auto& group : groups_) {
        if (is_member(*group, news.peer)) {
          lose_member(*group, {news.peer, news.why, news.legacy, {}});
        }
      }
      break;
    case News::kGaveUp:
      for (auto& group : groups_) {
        if (!is_member(*group, news.peer)) continue;
        for (unjamGroup::Gone& gone : group->gone) {
          if (gone.rank == news.gone) gone.given_up.push_back(news.peer);
        }
        lose_reach(*group);
      }
      break;
    case News::kAbort:
      closed_ = true;
      closed_why_ = news.why;
      if (first_error_.ok()) first_error_ = closed_why_;
      launched_.notify_all();
      for (auto& [tag, key] : keys_) fail_waiting(*key, 0, closed_why_);
      break;
  }
  // In the engine they are cancelled, or about to be: this says why.
  for (const std::unique_ptr<Submitted>& s : slots_) {
    if (s != nullptr && concerns(news, {s->key->group, s->key->state.tag, s->n}) &&
        s->cancel.ok()) {
      s->cancel = news.why;
    }
  }
  daemon_->ring_all();
  completions_.notify();
}

void Context::abort(unjamResult_t code, const std::string& why) {
  if (ends_.exchange(true)) return;
  News news;
  news.what = News::kAbort;
  news.why = {code, why};
  tell(std::move(news));
  world_->tell_peers_gone(rank_, why);
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
  if (!key.busy() && key.place == KeyPlace::kBusy) rest(key);
}

Result Context::async_error() {
  std::lock_guard lock(mutex_);
  hear();
  return first_error_;
}

void Context::cancel_locked(std::size_t slot, const Result& why) {
  Submitted& s = *slots_[slot];
  if (!s.cancel.ok()) return;
  s.cancel = why;
  daemon_->cancel(static_cast<std::uint16_t>(slot));
}

// Without the lock, see tell().
void Context::peer_left(int peer) { gone_[static_cast<std::size_t>(peer)] = true; }

void Context::peer_gone(int peer, const std::string& why, std::shared_ptr<const Legacy> legacy) {
  News news;
  news.what = News::kPeer;
  news.peer = peer;
  news.why = gone_result(peer, why);
  news.legacy = std::move(legacy);
  tell(std::move(news));
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
  {
    const std::lock_guard lock(giving_up_);
    if (is_given_up_[static_cast<std::size_t>(rank)]) return;
    is_given_up_[static_cast<std::size_t>(rank)] = true;
    given_up_.push_back(rank);
    num_given_up_.store(given_up_.size(), std::memory_order_release);
  }
  world_->gave_up(rank_, rank);
}

std::vector<int> Context::given_up(std::size_t known) const {
  if (num_given_up_.load(std::memory_order_acquire) <= known) return {};
  const std::lock_guard lock(giving_up_);
  return {given_up_.begin() + static_cast<std::ptrdiff_t>(known), given_up_.end()};
}

void Context::peer_gave_up(int peer, int gone, const std::string& why) {
  News news;
  news.what = News::kGaveUp;
  news.peer = peer;
  news.gone = gone;
  news.why = gone_result(gone, why);
  tell(std::move(news));
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
  News news;
  news.tag = tag;
  news.n = n;
  news.why = why;
  news.speakers = speakers;
  tell(std::move(news));
}

}  // namespace unjam
