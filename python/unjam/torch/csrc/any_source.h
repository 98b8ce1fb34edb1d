// Receives whose sender is not known: a thread looks which ranks have sent (unjamProbe), as long as
// there are any, and then makes the receive that meets it.
#pragma once

#include <c10/core/Event.h>

#include <chrono>
#include <list>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>

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
    std::string alike;
    int rank;
    int size;
    // CUDA: behind what the caller's stream held at the call. (That stream itself may hold more by
    // now, for example something that waits for the rank that sends.)
    std::shared_ptr<c10::Event> called;
    int next = 0;  // where the next look begins, so that nobody starves
  };

  static AnySource& get() {
    static AnySource* const all = new AnySource;
    return *all;
  }

  void add(Receive receive) {
    const std::lock_guard lock(mutex_);
    receives_.push_back(std::move(receive));
    if (running_) return;
    std::thread([this] { look(); }).detach();
    running_ = true;
  }

  // Receives of a process group that ends: nobody can look for their senders any more.
  void cancel(const void* owner, const char* why) {
    const std::lock_guard lock(mutex_);
    for (auto it = receives_.begin(); it != receives_.end();) {
      if (it->owner != owner) {
        ++it;
        continue;
      }
      it->call->fail(UNJAM_ERROR_ABORTED, why);
      Call::leave(std::move(it->call));
      it = receives_.erase(it);
    }
  }

  void forked() {
    new (&mutex_) std::mutex;
    new (&receives_) std::list<Receive>;
    running_ = false;
  }

 private:
  static constexpr std::chrono::microseconds kShortest{20}, kLongest{1000};

  void look() noexcept {
    for (auto pause = kShortest;;) {
      bool found = false;
      {
        const std::lock_guard lock(mutex_);
        // Under one key in the order of the calls: what comes between two looks is the first one's.
        std::set<std::pair<unjamGroup_t, std::string>> waiting;
        for (auto it = receives_.begin(); it != receives_.end();) {
          if (waiting.count({it->group, it->key}) == 0 && matched(*it)) {
            found = true;
            Call::leave(std::move(it->call));  // its tensors are not this thread's to free
            it = receives_.erase(it);
          } else {
            waiting.emplace(it->group, it->key);
            ++it;
          }
        }
        if (receives_.empty()) {
          running_ = false;
          return;
        }
      }
      pause = found ? kShortest : std::min(2 * pause, kLongest);
      std::this_thread::sleep_for(pause);
    }
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
      if (from == r.rank) continue;
      int ready = 0;
      unjamResult_t code = unjamProbe(r.group, r.key.c_str(), from, &ready);
      if (code == UNJAM_SUCCESS && ready == 0) continue;
      // Not in a stream, to be behind it: any that torch has to offer may be the user's, too, and
      // wait for what comes after this receive.
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
    options.alike = r.alike.c_str();
    return unjamRecv(r.group, r.key.c_str(), r.tensor.data_ptr(), r.count, r.dtype, from, &options,
                     request);
  }

  std::mutex mutex_;
  std::list<Receive> receives_;
  bool running_ = false;
};

}  // namespace unjam_torch
