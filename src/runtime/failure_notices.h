// Failures that somebody has met, on their way to a context that may be busy.
//
// Whose call was refused, who is gone, who gives up: threads that post it must not wait for the
// context's lock. (Whoever has that lock does not wait for a device, see StreamDaemon, but may be
// busy for long. And who posts holds the world's lock: behind it nothing would be heard or said any
// more, of other ranks and groups neither.) So what concerns the engine, cancellations, is said
// here without that lock, by what this box knows of the engine's slots; the rest waits here for who
// has the context's lock next: Context::apply_notices(). A call that enters the engine in between
// finds the notices here.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/daemon.h"
#include "runtime/group.h"
#include "runtime/ledger.h"
#include "runtime/result.h"

namespace unjam {

struct FailureNotice {
  enum What : std::uint8_t { kCall, kPeer, kGaveUp, kAbort };
  What what = kCall;
  std::uint64_t tag = 0, n = 0;          // kCall: from this use of a key on
  int peer = 0;                          // kPeer, kGaveUp
  int gone = 0;                          // kGaveUp: the rank whose end the peer has met
  std::shared_ptr<const Legacy> legacy;  // kPeer, see Context::peer_gone()
  std::vector<int> speakers;             // kCall, see Context::fail_call()
  Result why;

  // Whether it may speak for the group: a member says so, or this process does.
  bool is_heeded_by(const unjamGroup& group) const;
};

bool is_member(const unjamGroup& group, int rank);

class FailureNotices {
 public:
  // A call in a slot of the engine.
  struct Call {
    const unjamGroup* group = nullptr;  // nullptr: nothing
    std::uint64_t tag = 0, n = 0;
  };
  // Whether a rank, which may go on, has completed use n of a key.
  using HasCompleted = std::function<bool(int rank, std::uint64_t tag, std::uint64_t n)>;

  explicit FailureNotices(HasCompleted has_completed) : has_completed_(std::move(has_completed)) {}

  void set_slots(std::size_t slots) { in_engine_.resize(slots); }

  // Any thread. Cancels what it concerns in the engine; others of it are woken by the caller.
  void post(FailureNotice notice, Daemon& daemon);
  // Whoever has the context's lock: what was posted and not taken yet, the oldest first.
  std::vector<FailureNotice> take();

  // A call comes to a slot of the engine, whose word of cancellation this is; or has left it: what
  // was posted about it that nobody has taken yet.
  void enter(std::uint16_t slot, const Call& call, std::uint32_t& cancelled, Daemon& daemon);
  Result leave(std::uint16_t slot);

  bool concerns(const FailureNotice& notice, const Call& call) const;

 private:
  const HasCompleted has_completed_;
  // Held for a moment only, also with the context's lock, and with no other taken behind it but the
  // daemon's.
  std::mutex mutex_;
  std::vector<FailureNotice> posted_;
  // Spares the lock where there is nothing. Release, behind the notice; take() acquires.
  std::atomic<bool> any_{false};
  std::vector<Call> in_engine_;  // by slot
};

}  // namespace unjam
