// A rank's engine on its device, as the runtime sees it: what takes submissions and runs them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/futex.h"
#include "engine/box_mover.h"
#include "engine/invocation.h"
#include "engine/state.h"
#include "plan/lower.h"

namespace unjam {

class Daemon {
 public:
  virtual ~Daemon() = default;

  // Ends all engines of the rank wherever they are (contexts saved); nothing runs or is launched
  // any more. Calls after that do nothing.
  virtual void stop() = 0;

  // Puts an invocation, or a command (see KeyRelease), into the SQ; ring() follows. One thread at a
  // time. `fresh`: the first of its key's state, which the engine then sets up from it.
  virtual void submit(const Invocation& inv, const KeyState* fresh) = 0;
  // Before a submission into that slot: when it is completed with success, at once and whoever has
  // yet to hear of it, the word becomes `value` (release: behind all that it has posted). nullptr:
  // no word. (Of a device whose lanes do not write to the host's memory: nothing, see
  // Context::take_completions().)
  virtual void completes(std::uint16_t /*slot*/, std::uint64_t* /*word*/, std::uint64_t /*value*/) {
  }
  // Ends the invocation in that slot as cancelled; ring_all() follows.
  virtual void cancel(std::uint16_t slot) = 0;
  // A rank is gone: invocations with it end as cancelled. Unlike cancel() without the caller's
  // lock, which may be held by a thread that waits for the device. (Where none does: nothing.)
  virtual void peer_gone(int /*rank*/) {}
  // Tells lanes of this rank that there is something new (a submission, a cancellation).
  virtual void ring(std::uint32_t lane) = 0;
  virtual void ring_all() = 0;

  // The completion of what was in that slot has been taken out of the CQ.
  virtual void ended(std::uint16_t /*slot*/) {}

  // Sleeps until the CQ has an entry, `completions` was notified since `epoch`, or the time is
  // over.
  virtual void wait(EventCount& completions, std::uint32_t epoch, std::int64_t timeout_us) {
    completions.wait(epoch, timeout_us);
  }
  // Waits until every lane was seen outside its engine since the call; false on timeout
  // (timeout_us < 0: none).
  virtual bool synchronize(std::int64_t timeout_us) = 0;

  // Where threads of the host can run the engine, see HostDaemon. ring_and_attempt() runs it in the
  // calling thread if no other does; on CUDA it launches a daemon from there.
  virtual bool can_help() const { return false; }
  virtual void ring_and_attempt() { ring(0); }
  virtual bool help(const std::function<bool()>& /*look*/, std::uint64_t /*deadline_ns*/) {
    return false;
  }
};

// One whose engine works beside streams, which order calls and wait for them.
class StreamDaemon : public Daemon {
 public:
  // Where the engine keeps a key's state, zero as far as the engine minds; nullptr: none is left.
  virtual KeyState* take_key(LaneKey*& lanes) = 0;
  virtual void return_key(KeyState* key) = 0;

  // All of these: false: `error` says what was refused, and nothing was queued.
  // A full stream takes more only when what it waits for has come, which may be another call of
  // this rank. So they let go of the caller's `lock`, with which all else here is called, while
  // they are in the driver; several may be there at once.

  // Queues a mark, unless all work queued in the stream is done (`queued`): the inputs of the
  // invocation with this ticket are there.
  virtual bool queue_mark(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                          std::uint64_t ticket, bool& queued, std::string& error) = 0;
  // What plans are lowered by, for Invocation::lowered.
  virtual LowerLimits lower_limits() const = 0;
  // Queues the invocation itself: runs as a kernel in the stream.
  virtual bool queue_call(std::unique_lock<std::mutex>& lock, void* stream, const Invocation& inv,
                          const KeyState* fresh, std::string& error) = 0;
  // Queues what a group of one makes of a call: a copy of so many bytes from its input to its
  // output, and its end. It waits for nobody, so it is in the stream whatever the call's order is;
  // without one (`in_stream` false) it is in a stream of this object's. (False may leave the copy
  // queued without its end.) after: what note() gave, which it comes behind, too; or nullptr.
  virtual bool queue_copy(std::unique_lock<std::mutex>& lock, void* stream, bool in_stream,
                          const Invocation& inv, std::uint64_t bytes, void* after,
                          std::string& error) = 0;
  // How far the stream is now. nullptr: it was refused.
  virtual std::shared_ptr<void> note(std::unique_lock<std::mutex>& lock, void* stream,
                                     std::string& error) = 0;
  // Queues a wait for the invocation with this serial number in this slot.
  virtual bool queue_wait(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                          std::uint64_t serial, std::string& error) = 0;

  // What packs and unpacks tensors on the device; nullptr: `why` nothing does.
  virtual BoxMover* boxes(std::string& why) {
    why = "the device library has no kernels for that";
    return nullptr;
  }

  // Copies what the engine has told of itself into the host's copy of its state (statistics, what
  // runs).
  virtual void refresh(RankState& copy) = 0;
  // JSON fields: "blocks": …, what `unjam info` shows of the device.
  virtual std::string footprint() const = 0;
};

}  // namespace unjam
