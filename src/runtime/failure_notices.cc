#include "runtime/failure_notices.h"

#include <algorithm>
#include <utility>

#include "base/atomics.h"

namespace unjam {

bool is_member(const unjamGroup& group, int rank) {
  return std::find(group.members.begin(), group.members.end(), rank) != group.members.end();
}

bool FailureNotice::is_heeded_by(const unjamGroup& group) const {
  return speakers.empty() || std::any_of(speakers.begin(), speakers.end(),
                                         [&](int rank) { return is_member(group, rank); });
}

void FailureNotices::post(FailureNotice notice, Daemon& daemon) {
  const std::lock_guard lock(mutex_);
  for (std::size_t i = 0; i < in_engine_.size(); ++i) {
    if (concerns(notice, in_engine_[i])) daemon.cancel(static_cast<std::uint16_t>(i));
  }
  posted_.push_back(std::move(notice));
  any_.store(true, std::memory_order_release);
  // (Behind it: whoever sees what the engine ends for it, finds why. It would end all: where
  // something can still be had of the peer, what cannot is cancelled one by one, above.)
  const FailureNotice& last = posted_.back();
  if (last.what == FailureNotice::kPeer && last.legacy == nullptr) daemon.peer_gone(last.peer);
}

std::vector<FailureNotice> FailureNotices::take() {
  std::vector<FailureNotice> taken;
  if (!any_.load(std::memory_order_acquire)) return taken;
  const std::lock_guard lock(mutex_);
  taken.swap(posted_);
  any_.store(false, std::memory_order_relaxed);
  return taken;
}

bool FailureNotices::concerns(const FailureNotice& notice, const Call& call) const {
  if (call.group == nullptr) return false;
  switch (notice.what) {
    case FailureNotice::kCall:
      // Later uses of the key cannot start any more; earlier ones go on.
      return call.tag == notice.tag && call.n >= notice.n && notice.is_heeded_by(*call.group);
    case FailureNotice::kPeer:
      return is_member(*call.group, notice.peer) &&
             (notice.legacy == nullptr || !notice.legacy->covers(call.tag, call.n));
    case FailureNotice::kGaveUp:
      return is_member(*call.group, notice.peer) && is_member(*call.group, notice.gone) &&
             !has_completed_(notice.peer, call.tag, call.n);
    case FailureNotice::kAbort:
      break;
  }
  return true;
}

void FailureNotices::enter(std::uint16_t slot, const Call& call, std::uint32_t& cancelled,
                           Daemon& daemon) {
  const std::lock_guard lock(mutex_);
  store_release<std::uint32_t>(cancelled, 0);
  in_engine_[slot] = call;
  for (const FailureNotice& notice : posted_) {
    if (concerns(notice, call)) daemon.cancel(slot);
  }
}

Result FailureNotices::leave(std::uint16_t slot) {
  const std::lock_guard lock(mutex_);
  const Call call = std::exchange(in_engine_[slot], {});
  for (const FailureNotice& notice : posted_) {
    if (concerns(notice, call)) return notice.why;
  }
  return {};
}

}  // namespace unjam
