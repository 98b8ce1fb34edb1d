// Waits for an operation: of a thread, and of a stream.
#include <algorithm>
#include <cstdlib>
#include <string>
#include <thread>

#include "call.h"
#include "gil.h"

namespace unjam_torch {

void Call::throw_if_aborted() const {
  TORCH_CHECK_WITH(DistBackendError, !status_->aborted(), "unjam: ", what_,
                   ": its process group was aborted on this rank");
}

void Call::throw_if_over() const {
  throw_if_aborted();
  TORCH_CHECK_WITH(DistBackendError, !status_->over(), "unjam: ", what_,
                   ": the process group was destroyed");
  status_->check();
}

void Call::timed_out(std::chrono::milliseconds limit) const {
  // A wait that only looks, shorter than the call's own limit, is no reason for a dump.
  if (Clock::now() >= begun_ + timeout_) dump_on_timeout();
  const std::shared_ptr<Groups> groups = groups_.lock();
  TORCH_CHECK_WITH(DistBackendError, false, "unjam: ", what_, " was not complete within ",
                   limit.count(), " ms",
                   groups != nullptr ? groups->who_has_not_called(device_, key_) +
                                           groups->called_with_other_tensors(device_, key_)
                                     : "",
                   "; it is still pending. unjam.explain() tells more");
  std::abort();  // not reached
}

void Call::look_around() const {
  run_signal_handlers();
  throw_if_aborted();
  if (!device_.is_cuda()) return;  // there wait() has told
  release_complete(true);
  status_->check(std::string("; ") + what_ + ", which was waited for, is still pending");
}

void Call::wait_for(unjamRequest_t request, Clock::time_point deadline,
                    std::chrono::milliseconds limit) const {
  for (;;) {
    const auto left =
        std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
    const auto step = std::clamp(left, std::chrono::microseconds(0), kLook);
    const unjamResult_t code = unjamWait(request, step.count());
    if (RequestSet::test(request).done) return;  // error_at_end() tells how it ended
    if (code != UNJAM_ERROR_TIMEOUT) raise(what_, code, unjamGetLastError());
    look_around();
    if (Clock::now() >= deadline) timed_out(limit);
  }
}

void Call::complete_on_host(std::chrono::milliseconds timeout) {
  const bool own = timeout == kNoTimeout;
  const auto limit = own ? timeout_ : timeout;
  const auto deadline = (own ? begun_ : Clock::now()) + limit;
  try {
    wait_for_post(deadline, limit);
    for (unjamRequest_t request : requests_) {
      wait_for(request, deadline, limit);
      if (requests_.decides(request) && RequestSet::test(request).code != UNJAM_SUCCESS) break;
    }
  } catch (const c10::Error&) {  // and not what a signal's handler has raised
    // How it ends afterwards, at the engine's limit say, is no news.
    if (own) outcome_.set_told();
    throw;
  }
  note_end();
  state_.advance(OperationEvent::kEnded);
}

void Call::wait_for_event(const c10::Event& event) {
  constexpr std::chrono::microseconds kSleep{20};
  auto look = Clock::now() + kLook;
  for (int polls = 0; !event.query(); ++polls) {
    if (polls < 100) {
      std::this_thread::yield();
      continue;
    }
    std::this_thread::sleep_for(kSleep);
    if (Clock::now() < look) continue;
    run_signal_handlers();
    look = Clock::now() + kLook;
  }
}

void Call::stream_wait(unjamRequest_t request, const c10::Stream& stream) const {
  std::optional<NoGil> no_gil;
  for (auto look = Clock::now() + kLook;;) {
    const unjamResult_t code = unjamStreamWait(request, stream.native_handle());
    if (code == UNJAM_SUCCESS) return;
    if (unjamLastErrorIsTransient() == 0) raise(what_, code, unjamGetLastError());
    if (!no_gil) no_gil.emplace();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (Clock::now() < look) continue;
    look_around();
    if (Clock::now() >= begun_ + timeout_) timed_out(timeout_);
    look = Clock::now() + kLook;
  }
}

void Call::wait_for_post(Clock::time_point deadline, std::chrono::milliseconds limit) {
  if (!state_.open()) return;
  for (;;) {
    {
      std::unique_lock lock(post_mutex_);
      const auto until = std::min(deadline, Clock::now() + kLook);
      if (posted_.wait_until(lock, until, [this] { return !state_.open(); })) return;
    }
    look_around();
    if (Clock::now() >= deadline) timed_out(limit);
  }
}

}  // namespace unjam_torch
