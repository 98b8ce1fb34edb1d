// Receives whose sender is not known: a thread looks which ranks have sent (unjamProbe), as long as
// there are any, and then makes the receive that meets it.
#pragma once

#include <c10/core/Event.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "work.h"

namespace unjam_torch {

class AnySource {
 public:
  struct Receive {
    const void* owner;  // the backend
    std::shared_ptr<Call> call;
    std::shared_ptr<Groups> groups;  // keeps the group
    unjamGroup_t group;
    std::string key;
    at::Tensor tensor;
    std::size_t count;
    unjamDataType_t dtype;
    std::string match_text;
    int size;
    // CUDA: it has come when the caller's stream has done what it held at the call. The stream
    // itself may hold more by now, for example something that waits for the rank that sends.
    std::shared_ptr<c10::Event> called;
    int next = 0;  // where the next look begins, so that nobody starves; the looking thread's
    // Guarded by the lock.
    bool looked_at = false;  // by the thread that looks, which has the call to itself meanwhile
    const char* cancelled = nullptr;  // why
  };

  static AnySource& get() {
    static AnySource* const all = new AnySource;
    return *all;
  }

  void add(Receive receive) {
    const std::lock_guard lock(mutex_);
    // A group that ends says so first, and cancels its receives then: under the lock this one finds
    // that it has ended, or is found.
    if (receive.call->group_is_over()) {
      receive.cancelled = "its process group has ended";
      return end(receive);
    }
    receives_.push_back(std::make_shared<Receive>(std::move(receive)));
    if (running_) return;
    std::thread([this] { look(); }).detach();
    running_ = true;
  }

  // Receives of a process group that ends: nobody can look for their senders any more. One that is
  // being looked at ends after that look. waits: until it has ended, so that nothing uses the group
  // any more, but not for long: it may be making a call that a full stream holds up. False: one
  // still uses it.
  bool cancel(const void* owner, const char* why, bool waits) {
    std::unique_lock lock(mutex_);
    const auto of_owner = [owner](const std::shared_ptr<Receive>& r) { return r->owner == owner; };
    receives_.remove_if([&](const std::shared_ptr<Receive>& r) {
      if (!of_owner(r)) return false;
      r->cancelled = why;
      if (!r->looked_at) end(*r);
      return !r->looked_at;
    });
    const auto none_left = [&] {
      return std::none_of(receives_.begin(), receives_.end(), of_owner);
    };
    if (!waits || changed_.wait_for(lock, kEnds, none_left)) return true;
    // The owner's address may be another's soon.
    for (const auto& r : receives_) {
      if (r->owner == owner) r->owner = nullptr;
    }
    return false;
  }

  void forked() {
    new (&mutex_) std::mutex;
    new (&changed_) std::condition_variable;
    new (&receives_) std::list<std::shared_ptr<Receive>>;
    running_ = false;
  }

 private:
  static constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};
  static constexpr std::chrono::seconds kEnds{10};

  void look() noexcept {
    for (auto pause = kShortest;;) {
      bool found = false;
      for (const std::shared_ptr<Receive>& r : first_ones()) {
        // Without the lock: a call under a key may wait for one that a stream has no room for, and
        // whoever makes or cancels a receive must not wait for that.
        const bool over = matched(*r);
        {
          const std::lock_guard lock(mutex_);
          if (over) {
            keep_until_complete(std::move(r->call));  // its tensors are not this thread's to free
          } else if (r->cancelled != nullptr) {
            end(*r);
          } else {
            r->looked_at = false;
            continue;
          }
        }
        r->groups = nullptr;  // which may end here: without the lock
        {
          const std::lock_guard lock(mutex_);
          receives_.remove(r);
        }
        changed_.notify_all();
        found = true;
      }
      {
        const std::lock_guard lock(mutex_);
        if (receives_.empty()) {
          running_ = false;
          return;
        }
      }
      pause = found ? kShortest : std::min(2 * pause, kLongest);
      std::this_thread::sleep_for(pause);
    }
  }

  // Those to be looked at. Under one key in the order of the calls: what comes between two looks is
  // the first one's.
  std::vector<std::shared_ptr<Receive>> first_ones() {
    const std::lock_guard lock(mutex_);
    std::vector<std::shared_ptr<Receive>> first;
    std::set<std::pair<unjamGroup_t, std::string>> seen;
    for (const std::shared_ptr<Receive>& r : receives_) {
      if (!seen.emplace(r->group, r->key).second) continue;
      r->looked_at = true;
      first.push_back(r);
    }
    return first;
  }

  // With the lock.
  static void end(Receive& r) {
    r.call->fail(UNJAM_ERROR_ABORTED, r.cancelled);
    keep_until_complete(std::move(r.call));
  }

  // True: the receive was made, or has failed.
  static bool matched(Receive& r) noexcept {
    try {
      return try_to_match(r);
    } catch (const std::exception& error) {  // torch's, of a stream
      r.call->fail(UNJAM_ERROR_INTERNAL, error.what());
      return true;
    }
  }
  static bool try_to_match(Receive& r) {
    for (int i = 0; i < r.size; ++i) {
      const int from = (r.next + i) % r.size;
      int ready = 0;
      unjamResult_t code = unjamProbe(r.group, r.key.c_str(), from, &ready);
      if (code == UNJAM_SUCCESS && ready == 0) continue;
      // The receive is not made in a stream, to come after that: any stream that torch has to offer
      // may be the user's, too, and wait for what comes after this receive.
      if (code == UNJAM_SUCCESS && r.called != nullptr && !r.called->query()) return false;
      unjamRequest_t request = nullptr;
      if (code == UNJAM_SUCCESS) {
        code = receive(r, from, &request);
        // Too many keys are under way: it looks again. (A call that is refused is no use of its
        // key.)
        if (code != UNJAM_SUCCESS && unjamLastErrorIsTransient() != 0) return false;
      }
      if (code == UNJAM_SUCCESS) {
        r.call->post(request, from);
      } else {
        r.call->fail(code, unjamGetLastError());
      }
      r.next = from + 1;
      return true;
    }
    return false;
  }

  static unjamResult_t receive(const Receive& r, int from, unjamRequest_t* request) {
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.match_text = r.match_text.c_str();
    return unjamRecv(r.group, r.key.c_str(), r.tensor.data_ptr(), r.count, r.dtype, from, &options,
                     request);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<std::shared_ptr<Receive>> receives_;
  bool running_ = false;
};

}  // namespace unjam_torch
