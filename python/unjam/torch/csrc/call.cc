// An operation's end: how it is found, and who is told of it.
#include "call.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include "context.h"
#include "executor.h"
#include "gil.h"

namespace unjam_torch {

Call::Call(const char* what, at::Device device, std::chrono::milliseconds timeout,
           std::shared_ptr<GroupStatus> status, std::weak_ptr<Groups> groups, std::string key)
    : what_(what),
      device_(device),
      timeout_(timeout),
      begun_(Clock::now()),
      status_(std::move(status)),
      groups_(std::move(groups)),
      key_(std::move(key)),
      issued_(device.is_cuda() ? std::make_optional(current_stream(device)) : std::nullopt),
      results_(device) {}

void Call::set_observed(std::unique_ptr<Range> range, Recorder::RecordPtr record,
                        std::function<Recorder::Place(int)> place) {
  range_ = std::move(range);
  record_ = std::move(record);
  place_ = std::move(place);
  if (record_ != nullptr) record_->call = weak_from_this();
}

// ---- a request that comes later ----

void Call::post(unjamRequest_t request, int source) {
  requests_.add(request);
  source_rank_.store(source);
  if (place_) Recorder::get().move(record_, place_(source));
  close();
}

void Call::fail(unjamResult_t code, const char* text) {
  {
    const std::lock_guard lock(mutex_);
    set_error(code, text);
  }
  close();
}

void Call::close() {
  OperationStateWord::Change change{};
  {
    const std::lock_guard lock(post_mutex_);
    change = state_.advance(OperationEvent::kPosted);
  }
  posted_.notify_all();
  if (change.begins_to_listen()) listen();
}

// ---- what a look finds ----

bool Call::complete() {
  if (state_.complete()) return true;
  if (state_.open() || !requests_.over()) return false;
  note_end();
  state_.advance(OperationEvent::kEnded);
  return true;
}

bool Call::finished() {
  if (!complete()) return false;
  if (!device_.is_cuda()) {
    error_at_end();
    return true;
  }
  std::unique_lock lock(mutex_);
  read_error();
  if (outcome_.error() != nullptr) return true;  // there will be no results
  if (results_.unfinished()) return false;
  lock.unlock();  // CUDA may take its time
  return !results_.event() || results_.event()->query();
}

void Call::note_end() {
  if (range_ != nullptr) range_->end();
  if (record_ == nullptr) return;
  // Before it counts as over: a record that is complete without this is taken for a success.
  if (requests_.failure()) record_->failed.store(true);
  record_->complete();
}

// ---- how it ended ----

void Call::set_error(unjamResult_t code, const char* text) {
  if (record_ != nullptr) record_->failed.store(true);
  outcome_.set(what_, code, text);
}

void Call::read_error() {
  if (outcome_.error() != nullptr) return;
  if (const auto failure = requests_.failure()) set_error(failure->code, failure->text);
}

std::exception_ptr Call::error_at_end() {
  std::function<void()> gone;
  std::unique_lock lock(mutex_);
  read_error();
  if (outcome_.error() == nullptr && !device_.is_cuda()) finish(lock, gone);
  return outcome_.error();
}

std::exception_ptr Call::explained_error() {
  const std::exception_ptr error = error_at_end();
  std::string late;
  {
    const std::lock_guard lock(mutex_);
    late = outcome_.take_late();
  }
  if (!late.empty()) dump_on_timeout();
  const std::shared_ptr<Groups> groups = late.empty() ? nullptr : groups_.lock();
  if (groups == nullptr) return error;
  late += groups->called_with_other_tensors(device_, key_);
  const std::lock_guard lock(mutex_);
  set_error(UNJAM_ERROR_TIMEOUT, late.c_str());
  outcome_.drop_late();
  return outcome_.error();
}

std::exception_ptr Call::tell_error() {
  std::exception_ptr error = explained_error();
  if (error != nullptr) outcome_.set_told();
  return error;
}

void Call::report_unseen_error() noexcept {
  try {
    // Nothing more is said of a group that is out of use.
    if (!device_.is_cuda() || outcome_.told() || status_->over() || status_->broken()) return;
    std::exception_ptr error;
    {
      const NoGil no_gil;  // it may ask other processes
      error = explained_error();
    }
    if (error == nullptr || outcome_.set_told()) return;
    try {
      std::rethrow_exception(error);
    } catch (const c10::Error& e) {
      failed_unseen(e.what_without_backtrace());
    } catch (const std::exception& e) {
      failed_unseen(e.what());
    }
  } catch (...) {  // a warning that was made an error; the next call says it
  }
}

void Call::failed_unseen(const std::string& why) {
  if (!status_->break_off("is out of use on this rank, since an operation failed that nobody had "
                          "waited for on the host (its outputs are wrong): " +
                          why)) {
    return;
  }
  TORCH_WARN("process group ", status_->name(), " is out of use on this rank: ", why,
             ". Nobody had waited for that on the host, so what the outputs were used for is "
             "wrong; the group's next call raises this");
}

// ---- results ----

bool Call::finish(std::unique_lock<std::mutex>& lock, std::function<void()>& gone) {
  const auto look = [this] {
    run_signal_handlers();
    throw_if_aborted();
  };
  const Results::Finished finished = results_.finish(lock, gone, look, kLook);
  if (finished.error != nullptr) outcome_.set_if_none(finished.error);
  return finished.here;
}

void Call::finish_in(const c10::Stream& stream, std::function<void()>& gone) {
  std::unique_lock lock(mutex_);
  if (finish(lock, gone) || !results_.event()) return;
  lock.unlock();  // a full stream takes its time; the event stays as it is
  if (Executor::runs_this_thread()) {
    results_.event()->synchronize();  // as in order_stream()
  } else {
    results_.event()->block(stream);
  }
}

bool Call::wait(std::chrono::milliseconds timeout) {
  if (device_.is_cuda() && timeout == kNoTimeout && !blocks_host_) {
    order_stream();
    return true;
  }
  complete_on_host(timeout);
  if (device_.is_cuda()) {
    order_stream();  // what it has seen of the event stays
    if (results_.event()) wait_for_event(*results_.event());
  }
  if (const std::exception_ptr error = tell_error()) std::rethrow_exception(error);
  if (device_.is_cuda() && blocks_host_) {
    // What the stream held before a barrier is complete now: also what has failed.
    release_complete(true);
    status_->check();
  }
  return true;
}

void Call::order_stream(bool keep) {
  if (!device_.is_cuda()) return;
  if (Executor::runs_this_thread()) {
    const NoGil no_gil;
    complete_on_host(kNoTimeout);
  } else {
    wait_for_post(begun_ + timeout_, timeout_);
  }
  if (complete()) {
    if (const std::exception_ptr error = tell_error()) std::rethrow_exception(error);
  } else {
    throw_if_aborted();  // nobody would end the stream's wait
  }
  {
    // These die without the mutex, for that may take the GIL.
    std::vector<at::Tensor> held;
    std::function<void()> gone;
    const c10::Stream stream = current_stream(device_);
    // Without the mutex, too: a full stream takes a wait when what is in front of it has come, and
    // that may take callbacks, which run in one thread.
    if (!in_stream_ || *in_stream_ != stream) {
      for (unjamRequest_t request : requests_) stream_wait(request, stream);
    }
    finish_in(stream, gone);
    const std::lock_guard lock(mutex_);
    if (outcome_.error() != nullptr) {
      outcome_.set_told();
      std::rethrow_exception(outcome_.error());
    }
    // Another stream's memory may be given out again in that stream, which does not wait for the
    // call.
    if (!keep && (!issued_ || *issued_ == stream)) held = tensors_.end(HoldEnd::kStreamFollows);
    following_stream_ = stream;
  }
  // What it comes to is looked at later, whether or not anybody keeps the Work.
  if (tensors_.stream_follows() && !state_.complete()) keep_until_complete(shared_from_this());
}

// ---- who is told ----

void Call::call_when_complete() {
  const auto change = state_.advance(OperationEvent::kAwaited);
  if (change.begins_to_listen()) {
    listen();
  } else if (change.after == OperationState::kTold) {
    complete_in_executor();  // it had been told before there was this future
  }
}

struct Call::Listener {
  std::shared_ptr<Call> call;
  bool decides;  // whether its failure is the operation's end
};

void Call::listen() {
  if (requests_.empty()) return on_complete();
  waiting_for_.store(requests_.size());
  for (unjamRequest_t request : requests_) {
    auto* listener = new Listener{shared_from_this(), requests_.decides(request)};
    check(unjamOnComplete(
              request,
              [](unjamResult_t result, void* user) noexcept {
                auto* own = static_cast<Listener*>(user);
                const bool last = own->call->waiting_for_.fetch_sub(1) == 1;
                if (last || (own->decides && result != UNJAM_SUCCESS)) own->call->on_complete();
                keep_until_complete(std::move(own->call));
                delete own;
              },
              listener),
          what_);
  }
}

void Call::on_complete() noexcept {
  note_end();
  if (!state_.advance(OperationEvent::kNotified).made()) return;  // another request was before
  complete_in_executor();
}

void Call::complete_in_executor() noexcept {
  if (!device_.is_cuda()) error_at_end();
  std::vector<FuturePtr> futures;
  bool finishes = false;
  {
    const std::lock_guard lock(mutex_);
    futures = futures_.claim_all();
    finishes = results_.has_finish();
  }
  if (futures.empty() && !finishes) return;
  // They tell a failure, if it is one. Before anybody else may find it, and count it as unseen.
  if (!futures.empty()) outcome_.set_told();
  Executor::get().run([call = shared_from_this(), futures] { call->complete_futures(futures); });
}

void Call::complete_futures(const std::vector<FuturePtr>& futures) noexcept {
  try {
    // CUDA: the host has seen the end, so any stream comes after it. This one is of the pool that
    // users take fewer of theirs from: what they queue there may wait for other ranks. There is
    // none for all callbacks, which may queue such things as well.
    std::optional<c10::StreamGuard> guard;
    if (device_.is_cuda()) {
      const c10::impl::VirtualGuardImpl cuda(device_.type());
      guard.emplace(cuda.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
    }
    std::function<void()> gone;
    std::exception_ptr error = explained_error();
    if (device_.is_cuda() && error == nullptr) {
      finish_in(current_stream(device_), gone);
      const std::lock_guard lock(mutex_);
      error = outcome_.error();
    }
    if (error != nullptr && futures.empty()) {
      keep_until_complete(shared_from_this());  // release_complete() reports it, if nobody asks
    } else if (error != nullptr) {
      outcome_.set_told();
    }
    const KeyScope scope({"", kUnordered, 0, nullptr});  // of callbacks that are in no context
    for (const FuturePtr& future : futures) {
      if (error != nullptr) {
        future->setError(error);
      } else {
        future->markCompleted(c10::IValue(outputs()));
      }
    }
  } catch (...) {
    for (const FuturePtr& future : futures) {
      if (!future->completed()) future->setError(std::current_exception());
    }
  }
}

FuturePtr Call::future(FutureTaker taker) {
  const bool over = complete();
  const std::exception_ptr error = over ? tell_error() : nullptr;
  bool here = over && (!device_.is_cuda() || error != nullptr);
  FuturePtr future;
  {
    const std::lock_guard lock(mutex_);
    if (futures_.of(taker)) return futures_.of(taker);
    here |= taker == kCpp && following_stream_ && *following_stream_ == current_stream(device_);
    future = futures_.make(taker, device_, here);
    tensors_.set_in_future();
  }
  if (!here) {
    call_when_complete();
  } else if (error != nullptr) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs()));  // records the current stream
  }
  return future;
}

// A future is completed when the host has seen the operation's end. On CUDA that makes whoever
// waits for it wait on the host, as DistributedDataParallel's reducer does at the end of each
// backward pass. So what C++ code takes inside of a backward pass is completed at the end of that
// pass at the latest, with the stream ordered. Python has a future of its own: its callbacks are a
// user's, who may have them wait for what comes after the pass, and nobody expects them to run
// inside of it.
//
// DDP's reducer takes a bucket's future right after the call, in the hook of the bucket's last
// gradient, and queues its own final callback, which waits for all of them, after the hook of the
// last bucket (Reducer::mark_variable_ready). The engine runs a pass's final callbacks in the order
// in which they were queued, one at a time, in the streams that were current where the pass was
// begun. Ours are all ahead of the reducer's, and order the stream in which that goes on.
//
// Other things may happen: the reducer waits in the very callback that takes the future (the first
// pass with static_graph, Reducer::delay_all_reduce), before ours is run; the pass fails, and no
// callback is run; somebody waits in the middle of it. So the host's way, which future() has begun,
// stays, and whoever claims the future first completes it.
void Call::complete_after_backward() {
  namespace autograd = torch::autograd;
  if (autograd::get_current_graph_task_id() == -1) return;
  autograd::Engine::get_default_engine().queue_callback(
      [call = shared_from_this()] { call->complete_in_backward(); });
}

// At the end of a backward pass, as one of its final callbacks.
void Call::complete_in_backward() noexcept {
  // In a pass inside of a pass (reentrant checkpoints) the outer one goes on, and the reducer may
  // not be waiting yet; a node of the outer one is being evaluated here. The host is left to
  // complete the future. (A pass so deep that the engine gives it another thread is not told apart.
  // Its futures are complete early then, and the stream waits early.)
  if (torch::autograd::get_current_node() != nullptr) return;
  const NoGil no_gil;
  FuturePtr future;
  {
    const std::lock_guard lock(mutex_);
    future = futures_.claim(kCpp);
  }
  if (!future) return;
  try {
    if (device_.is_cuda() && !blocks_host_) {
      // As wait(); but there it is the user who chose the stream. This one need not be the one in
      // whose order the allocator hands out again what the operation uses: that stays.
      order_stream(true);
    } else {
      wait(kNoTimeout);
    }
    // Records the current stream, which comes after the results.
    future->markCompleted(c10::IValue(outputs()));
  } catch (...) {  // not out of here: the final callbacks after this one are others'
    if (!future->completed()) future->setError(std::current_exception());
  }
}

// ---- what nobody holds any more ----

void Call::release(std::shared_ptr<Call> call) {
  // The allocator hands memory out again in the order of a stream that follows: so nothing need
  // keep the outputs.
  std::vector<at::Tensor> outputs;
  if (call->tensors_.has_stream_that_follows()) {
    const std::lock_guard lock(call->mutex_);
    outputs = call->tensors_.end(HoldEnd::kWorkIsGone);
  }
  if (!call->complete() || !call->idle()) return keep_until_complete(std::move(call));
  call->report_unseen_error();
}

}  // namespace unjam_torch
