// What remains to be done with the results of one operation of torch, when the data are there.
#pragma once

#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>

namespace unjam_torch {

inline c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Copies to the outputs' places, say: by whoever finds first that the data are there. Guarded by
// the operation's mutex.
class Results {
 public:
  explicit Results(at::Device device)
      : device_(device), inference_(c10::InferenceMode::is_enabled()) {}

  // On CUDA it queues work in the current stream, and must record that stream at tensors of others.
  void set_finish(std::function<void()> finish) { finish_ = std::move(finish); }
  // CUDA: an operation without requests is over when the current stream gets here.
  void set_ends_here() { record_event().swap(event_); }

  bool has_finish() const { return finish_ != nullptr; }
  // Whether somebody has yet to finish, or is at it.
  bool unfinished() const { return finish_ != nullptr || running_; }
  // CUDA: what the results come after, if it is not the requests alone. It does not change once it
  // is there, which is when nothing is left to finish: whoever has seen that may use it without the
  // mutex.
  const std::optional<c10::Event>& event() const { return event_; }

  struct Finished {
    bool here = false;         // by this call
    std::exception_ptr error;  // of the work
  };
  // Does what is left to do, once: who comes meanwhile waits until it is done. The work itself runs
  // without the mutex: on CUDA a full stream takes it only when what is in front of it has come,
  // and that may take callbacks, which need the mutex. look_around(): between two waits on CUDA,
  // without the mutex; it may throw. gone takes what must die without the mutex.
  template <class F>
  Finished finish(std::unique_lock<std::mutex>& lock, std::function<void()>& gone, F look_around,
                  std::chrono::microseconds look_each) {
    while (running_) {
      over_.wait_for(lock, look_each);
      if (!device_.is_cuda() || !running_) continue;
      lock.unlock();
      look_around();
      lock.lock();
    }
    if (finish_ == nullptr) return {};
    gone = std::exchange(finish_, nullptr);
    running_ = true;
    std::optional<c10::Event> event;
    std::exception_ptr error;
    lock.unlock();
    try {
      const at::NoGradGuard no_grad;
      const c10::InferenceMode inference(inference_);  // as where the tensors were made
      gone();
      if (device_.is_cuda()) event = record_event();
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    running_ = false;
    if (event) event_.emplace(std::move(*event));
    over_.notify_all();
    return {true, error};
  }

 private:
  std::optional<c10::Event> record_event() const {
    std::optional<c10::Event> event(std::in_place, device_.type());
    event->record(current_stream(device_));
    return event;
  }

  const at::Device device_;
  const bool inference_;  // whether torch.inference_mode was on
  std::function<void()> finish_;
  bool running_ = false;  // a thread is at it
  std::condition_variable over_;
  std::optional<c10::Event> event_;
};

}  // namespace unjam_torch
