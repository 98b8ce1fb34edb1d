// One operation of torch: over unjam's requests.
//
// A Call is one operation of torch: one request, or several that are complete together, and the
// tensors that they use. It lives as long as anybody needs it: the Work that the user has, and, if
// the user lets go of that first, a list that keeps the tensors until the operation is complete.
//
// On the CPU wait() blocks the calling thread, which drives the engine meanwhile. On CUDA nothing
// is put on a stream before wait(): that orders the calling thread's current stream behind the
// operation (unjamStreamWait: whoever waits, helps); but in callbacks, see order_stream(). Every
// operation is complete on its own: there is no stream of the library's that would put one behind
// another.
//
// Where results have to be copied to their places ("finish"), whoever comes first does it: who
// waits, or, if nobody does, a thread of the executor. On CUDA the copies are in that one's stream,
// and an event behind them orders everybody else's.
//
// A future is completed when the host has seen the operation's end. On CUDA that makes whoever
// waits for it wait on the host, as DistributedDataParallel's reducer does at the end of each
// backward pass; so what C++ code takes inside of a backward pass is completed at the end of that
// pass at the latest, with the stream ordered (complete_after_backward()). Python has a future of
// its own: its callbacks are a user's, who may have them wait for what comes behind the pass, and
// nobody expects them to run inside of it.
//
// On CUDA wait() mostly returns before the operation is complete, so it cannot tell that it fails
// later: the stream goes on, without the results. Every operation is therefore looked at once more
// when it is complete (release_complete()), and one that failed without anybody being told puts its
// process group out of use on this rank: the next call says so, with the reason (GroupStatus), and
// whoever waits on the host.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/Event.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "context.h"
#include "executor.h"
#include "gil.h"
#include "group_status.h"
#include "observe.h"
#include "recorder.h"
#include "unjam/unjam.h"
#include "world.h"

namespace unjam_torch {

using namespace c10d;  // kNoTimeout and the like: global in some versions of torch, c10d's in
                       // others
using Clock = std::chrono::steady_clock;

inline c10::Stream current_stream(const at::Device& device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

class Call : public std::enable_shared_from_this<Call> {
 public:
  // status: of the process group; if it is aborted, blocked waits end. groups, key: for messages.
  Call(const char* what, at::Device device, std::chrono::milliseconds timeout,
       std::shared_ptr<GroupStatus> status, std::weak_ptr<Groups> groups, std::string key)
      : what_(what),
        device_(device),
        timeout_(timeout),
        begun_(Clock::now()),
        status_(std::move(status)),
        groups_(std::move(groups)),
        key_(std::move(key)),
        issued_(device.is_cuda() ? std::make_optional(current_stream(device)) : std::nullopt),
        inference_(c10::InferenceMode::is_enabled()) {}
  ~Call() {
    for (unjamRequest_t request : requests_) unjamRequestFree(request);
  }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // ---- while it is put together, by one thread ----

  void add(unjamRequest_t request) { requests_.push_back(request); }
  bool has_requests() const { return !requests_.empty(); }
  // Memory that the operation uses.
  void hold(const at::Tensor& tensor) { held_.push_back(tensor); }
  void hold(const std::vector<at::Tensor>& tensors) {
    held_.insert(held_.end(), tensors.begin(), tensors.end());
  }
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }
  // What remains to be done when the data are there: by whoever finds that they are, once. On CUDA
  // it queues work in the current stream, and must record that stream at tensors of others.
  void set_finish(std::function<void()> finish) { finish_ = std::move(finish); }
  // CUDA: this stream is behind the operation already.
  void set_in_stream(const c10::Stream& stream) { in_stream_ = stream; }
  // CUDA: an operation without requests is over when the current stream gets here.
  void set_ends_here() {
    finished_event_.emplace(device_.type());
    finished_event_->record(current_stream(device_));
  }
  void set_blocks_host() { blocks_host_ = true; }
  // Where the first request fails the others may never be complete: the operation is over then. (If
  // another one fails the rest are still to come to their end, and write outputs until then.)
  void set_first_decides() { first_decides_ = true; }
  void set_source_rank(int rank) { source_rank_.store(rank); }
  // Its request is still to come: post() or fail() will be called.
  void set_open() { open_.store(true); }
  // What tools see of it; either may be null. place(source): in the record, of a receive from any
  // source.
  void set_observed(std::unique_ptr<Range> range, Recorder::RecordPtr record,
                    std::function<Recorder::Place(int)> place) {
    range_ = std::move(range);
    record_ = std::move(record);
    place_ = std::move(place);
    if (record_ != nullptr) record_->call = weak_from_this();
  }

  // ---- a request that comes later, from another thread ----

  void post(unjamRequest_t request, int source) {
    requests_.push_back(request);
    source_rank_.store(source);
    if (place_) Recorder::get().move(record_, place_(source));
    close();
  }
  void fail(unjamResult_t code, const char* text) {
    {
      const std::lock_guard lock(mutex_);
      set_error(code, text);
    }
    close();
  }

  // ---- afterwards, by any thread ----

  const char* what() const { return what_; }
  // Calls with CPU tensors and calls with CUDA tensors do not meet.
  std::string channel() const {
    return device_.is_cuda() ? status_->channel() + " on CUDA" : status_->channel();
  }
  const at::Device& device() const { return device_; }
  // "float32 of (2, 3)", of the first tensor that it uses; "" of a call without any.
  std::string first_tensor() const {
    if (held_.empty()) return "";
    std::ostringstream text;
    text << held_.front().scalar_type() << " of " << held_.front().sizes();
    return text.str();
  }
  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  int source_rank() const { return source_rank_.load(); }

  // Whether all requests are complete, or one has failed that decides. Does not block.
  bool complete() {
    if (complete_.load(std::memory_order_acquire)) return true;
    if (open_.load(std::memory_order_acquire)) return false;
    for (unjamRequest_t request : requests_) {
      int done = 0;
      const unjamResult_t code = unjamTest(request, &done);
      if (done == 0) return false;
      if (code != UNJAM_SUCCESS && decides(request)) break;
    }
    set_complete();
    return true;
  }
  // Of a complete operation: whether nothing uses its tensors any more. Not so where the first
  // request has failed and others go on.
  bool idle() const {
    if (!first_decides_) return true;
    return std::all_of(requests_.begin(), requests_.end(), [](unjamRequest_t request) {
      int done = 0;
      unjamTest(request, &done);
      return done != 0;
    });
  }
  // Whether the results are in the outputs.
  bool finished() {
    if (!complete()) return false;
    if (!device_.is_cuda()) {
      settle();
      return true;
    }
    std::unique_lock lock(mutex_);
    read_error();
    if (error_ != nullptr) return true;  // there will be none
    if (finish_ != nullptr || finishing_) return false;
    lock.unlock();  // nobody waits for CUDA with it
    return !finished_event_ || finished_event_->query();
  }

  // Of a complete operation: what went wrong, or null. On the CPU the results are in the outputs
  // then.
  std::exception_ptr settle() {
    std::function<void()> gone;
    std::unique_lock lock(mutex_);
    read_error();
    if (error_ == nullptr && !device_.is_cuda()) finish(lock, gone);
    return error_;
  }
  // The same for a user, who knows then.
  std::exception_ptr tell_error() {
    std::exception_ptr error = settle_and_explain();
    if (error != nullptr) error_told_.store(true);
    return error;
  }

  bool wait(std::chrono::milliseconds timeout) {
    if (device_.is_cuda() && timeout == kNoTimeout && !blocks_host_) {
      order_stream();
      return true;
    }
    complete_on_host(timeout);
    if (device_.is_cuda()) {
      order_stream();  // (What it has seen of the event stays.)
      if (finished_event_) wait_for_event(*finished_event_);
    }
    if (const std::exception_ptr error = tell_error()) std::rethrow_exception(error);
    if (device_.is_cuda() && blocks_host_) {
      // What the stream held before a barrier is complete now: also what has failed.
      release_complete(true);
      status_->check();
    }
    return true;
  }

  // CUDA: work queued in the calling thread's current stream from now on sees the results. keep:
  // what the operation uses stays until it is complete, not until here.
  //
  // In a callback in a thread of the executor's that thread waits, and the stream has nothing to
  // wait for. Callbacks have their streams by turns from torch's pool, of which several may share
  // one of CUDA's hardware queues: there a kernel that waits keeps the other streams' from running,
  // and callbacks come in another order on every rank. (Where a thread of the user's adds a
  // callback to what is complete already, and so runs it, the stream waits: the callbacks that this
  // thread adds next may be what another rank has first.)
  void order_stream(bool keep = false) {
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
      // What dies here may take the GIL: outside of the lock.
      std::vector<at::Tensor> held;
      std::function<void()> gone;
      const c10::Stream stream = current_stream(device_);
      // Outside of the lock, too: a full stream takes a wait when what is in front of it has come,
      // and that may take callbacks, which run in one thread.
      if (!in_stream_ || *in_stream_ != stream) {
        for (unjamRequest_t request : requests_) {
          stream_wait(request, stream);
        }
      }
      finish_in(stream, gone);
      const std::lock_guard lock(mutex_);
      if (error_ != nullptr) {
        error_told_.store(true);
        std::rethrow_exception(error_);
      }
      // Another stream's memory may be given out again in that stream, which is not behind the
      // call.
      if (!keep && (!issued_ || *issued_ == stream)) held.swap(held_);
      behind_stream_ = stream;
    }
    // What it comes to is looked at later, whether or not anybody keeps the Work.
    if (!behind_.exchange(true) && !complete_.load()) keep_until_complete(shared_from_this());
  }

  enum Taker { kCpp, kPython, kTakers };

  // C++: of what the current stream waits for already the future is complete at once, and does not
  // tell how it ends. DDP's reducer reads the value out of a future in the line behind its wait()
  // (Reducer::set_divide_factor).
  c10::intrusive_ptr<c10::ivalue::Future> future(Taker taker) {
    const bool over = complete();
    const std::exception_ptr error = over ? tell_error() : nullptr;
    bool here = over && (!device_.is_cuda() || error != nullptr);
    FuturePtr future;
    {
      const std::lock_guard lock(mutex_);
      Taken& taken = taken_[taker];
      if (taken.future) return taken.future;
      here |= taker == kCpp && behind_stream_ && *behind_stream_ == current_stream(device_);
      std::vector<c10::Device> devices;
      if (device_.is_cuda()) devices.push_back(device_);
      future = taken.future = c10::make_intrusive<c10::ivalue::Future>(
          c10::ListType::create(c10::TensorType::get()), std::move(devices));
      taken.told = here;
    }
    if (!here) {
      call_when_complete();
    } else if (error != nullptr) {
      future->setError(error);
    } else {
      future->markCompleted(c10::IValue(outputs_));  // records the current stream
    }
    return future;
  }

  // Has the future completed at the end of the backward pass that this thread is in, if it is in
  // one and nobody has completed it by then. There the stream waits for the operation (on the CPU
  // the thread does): it is for futures that are waited for at that point, or before.
  //
  // DistributedDataParallel's are. Its reducer takes a bucket's future right behind the call, in
  // the hook of the bucket's last gradient, and queues its own final callback, which waits for all
  // of them, behind the hook of the last bucket (Reducer::mark_variable_ready). The engine runs a
  // pass's final callbacks in the order in which they were queued, one at a time, in the streams
  // that were current where the pass was begun: ours are all ahead of the reducer's, and order the
  // stream in which that goes on.
  //
  // What else may be: the reducer waits in the very callback that takes the future (the first pass
  // with static_graph, Reducer::delay_all_reduce), before ours is run; the pass fails, and no
  // callback is run; somebody waits in the middle of it. So the host's way, armed by future(),
  // stays; whoever sets Taken::told first completes the future.
  void complete_after_backward() {
    namespace autograd = torch::autograd;
    if (autograd::get_current_graph_task_id() == -1) return;
    autograd::Engine::get_default_engine().queue_callback(
        [call = shared_from_this()] { call->complete_in_backward(); });
  }

  // Makes sure that the results get to the outputs even if nobody waits.
  void call_when_complete() {
    if (armed_.exchange(true)) {
      if (told_.load()) on_complete();  // it had been told before there was a future
      return;
    }
    // Sequentially consistent with close(): at least one of the two sees the other's store.
    if (!open_.load()) listen();
  }

  // ---- what nobody holds any more ----

  // By the Work's end.
  static void release(std::shared_ptr<Call> call) {
    // Where a stream is behind the operation, in whose order the allocator hands memory out again,
    // nothing keeps the outputs.
    std::vector<at::Tensor> outputs;
    if (call->behind_.load()) {
      const std::lock_guard lock(call->mutex_);
      if (!call->taken_[kCpp].future && !call->taken_[kPython].future) {
        outputs.swap(call->outputs_);
      }
    }
    if (!call->complete() || !call->idle()) return keep_until_complete(std::move(call));
    call->report_unseen_error();
  }
  // Keeps a call until it is complete, and lets its tensors go in a thread that calls torch: never
  // in one of the library's, which must not take the GIL.
  static void keep_until_complete(std::shared_ptr<Call> call) {
    Kept& kept = kept_calls();
    const std::lock_guard lock(kept.mutex);
    if (std::exchange(call->kept_, true)) return;  // ours is not the last reference
    kept.calls.push_back(std::move(call));
    kept.count.store(kept.calls.size(), std::memory_order_relaxed);
  }
  // By calling threads: lets some go that are complete (all: all of them), and sees how they ended.
  static void release_complete(bool all = false) {
    constexpr std::size_t kMost = 64, kMostPending = 4;
    Kept& kept = kept_calls();
    if (kept.count.load(std::memory_order_relaxed) == 0) return;  // at worst: the next time
    std::vector<std::shared_ptr<Call>> gone;
    {
      const std::lock_guard lock(kept.mutex);
      std::size_t looks = all ? kept.calls.size() : std::min(kept.calls.size(), kMost);
      // Most end in the order of their calls: behind some that are pending, there is little.
      for (std::size_t pending = 0; looks != 0 && (all || pending < kMostPending); --looks) {
        std::shared_ptr<Call> call = std::move(kept.calls.front());
        kept.calls.pop_front();
        if (call->complete() && call->idle()) {
          call->kept_ = false;
          gone.push_back(std::move(call));
        } else {
          kept.calls.push_back(std::move(call));
          ++pending;
        }
      }
      kept.count.store(kept.calls.size(), std::memory_order_relaxed);
    }
    for (const std::shared_ptr<Call>& call : gone) call->report_unseen_error();
  }
  // What was left stays as it is: it is the parent's to end.
  static void forked() {
    new (&kept_calls().mutex) std::mutex;
    new (&kept_calls().calls) std::deque<std::shared_ptr<Call>>;
    kept_calls().count.store(0);
  }

  // Throws if its process group can have no more calls.
  void throw_if_over() const {
    throw_if_aborted();
    TORCH_CHECK_WITH(DistBackendError, !status_->over(), "unjam: ", what_,
                     ": the process group was destroyed");
    status_->check();
  }

 private:
  using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
  struct Taken {
    FuturePtr future;
    bool told = false;  // somebody completes it, or has
  };
  struct Kept {
    std::mutex mutex;
    std::deque<std::shared_ptr<Call>> calls;
    std::atomic<std::size_t> count{0};  // of calls, to look at without the lock
  };
  static Kept& kept_calls() {
    static Kept* const kept = new Kept;
    return *kept;
  }

  // By whoever has seen that it is, and by several threads at once. The range is over in front of
  // the store: who finds the operation complete may stop the profile. Range and record are this
  // call's until its end, and whoever comes here holds the call.
  void set_complete() {
    if (range_ != nullptr) range_->end();
    if (record_ != nullptr) {
      // Before it counts as over: what has failed never is.
      if (any_failed()) record_->failed.store(true);
      record_->complete();
    }
    complete_.store(true, std::memory_order_release);
  }
  bool any_failed() const {
    return std::any_of(requests_.begin(), requests_.end(), [](unjamRequest_t request) {
      int done = 0;
      return unjamTest(request, &done) != UNJAM_SUCCESS;
    });
  }

  // Whether the operation is over where this request fails.
  bool decides(unjamRequest_t request) const {
    return first_decides_ && request == requests_.front();
  }

  // How long a blocked wait goes without a look around: what is shorter does not take the GIL.
  static constexpr std::chrono::microseconds kLook{50'000};
  // What may have come to the process group meanwhile: an abort, or that an earlier operation has
  // failed that nobody had waited for on the host. Then other ranks, which have heard of it at
  // their next call, do not come.
  void look_around() const {
    run_signal_handlers();
    throw_if_aborted();
    if (!device_.is_cuda()) return;  // there wait() has told
    release_complete(true);
    status_->check(std::string("; ") + what_ + ", which was waited for, is still pending");
  }

  void wait_for(unjamRequest_t request, Clock::time_point deadline,
                std::chrono::milliseconds limit) const {
    for (;;) {
      const auto left =
          std::chrono::duration_cast<std::chrono::microseconds>(deadline - Clock::now());
      const auto step = std::clamp(left, std::chrono::microseconds(0), kLook);
      const unjamResult_t code = unjamWait(request, step.count());
      int done = 0;
      unjamTest(request, &done);
      if (done != 0) return;  // settle() tells how it ended
      if (code != UNJAM_ERROR_TIMEOUT) raise(what_, code, unjamGetLastError());
      look_around();
      if (Clock::now() >= deadline) timed_out(limit);
    }
  }
  // Waits on the host until the operation is complete. timeout: from now; kNoTimeout: its own, from
  // when it was begun.
  void complete_on_host(std::chrono::milliseconds timeout) {
    const bool own = timeout == kNoTimeout;
    const auto limit = own ? timeout_ : timeout;
    const auto deadline = (own ? begun_ : Clock::now()) + limit;
    try {
      wait_for_post(deadline, limit);
      for (unjamRequest_t request : requests_) {
        wait_for(request, deadline, limit);
        int done = 0;
        if (decides(request) && unjamTest(request, &done) != UNJAM_SUCCESS) break;
      }
    } catch (const c10::Error&) {  // and not what a signal's handler has raised
      // How it ends afterwards, at the engine's limit say, is no news.
      if (own) error_told_.store(true);
      throw;
    }
    set_complete();
  }
  // What cudaEventSynchronize does, but that it looks around.
  static void wait_for_event(const c10::Event& event) {
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
  // The stream waits. Of a rank's message to itself it can when both calls are made: the thread
  // waits for that.
  void stream_wait(unjamRequest_t request, const c10::Stream& stream) const {
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
  void wait_for_post(Clock::time_point deadline, std::chrono::milliseconds limit) {
    if (!open_.load(std::memory_order_acquire)) return;
    for (;;) {
      {
        std::unique_lock lock(post_mutex_);
        const auto until = std::min(deadline, Clock::now() + kLook);
        if (posted_.wait_until(lock, until, [this] { return !open_.load(); })) return;
      }
      look_around();
      if (Clock::now() >= deadline) timed_out(limit);
    }
  }
  // Of a complete operation on CUDA: has its process group say that it failed, if nobody was told.
  // (On the CPU wait() tells.)
  void report_unseen_error() noexcept {
    try {
      // (Of a group that is out of use nothing more is said.)
      if (!device_.is_cuda() || error_told_.load() || status_->over() || status_->broken()) return;
      std::exception_ptr error;
      {
        const NoGil no_gil;  // it may ask other processes
        error = settle_and_explain();
      }
      if (error == nullptr || error_told_.exchange(true)) return;
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
  void failed_unseen(const std::string& why) {
    if (!status_->break_off("is out of use on this rank, since an operation failed that nobody had "
                            "waited for on the host (its outputs are wrong): " +
                            why)) {
      return;
    }
    TORCH_WARN("process group ", status_->name(), " is out of use on this rank: ", why,
               ". Nobody had waited for that on the host, so what the outputs were used for is "
               "wrong; the group's next call raises this");
  }
  void throw_if_aborted() const {
    TORCH_CHECK_WITH(DistBackendError, !status_->aborted(), "unjam: ", what_,
                     ": its process group was aborted on this rank");
  }
  [[noreturn]] void timed_out(std::chrono::milliseconds limit) const {
    // (Not of a wait that only looks, shorter than the call's own limit.)
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

  // All that post() has stored is behind the store here.
  void close() {
    {
      const std::lock_guard lock(post_mutex_);
      open_.store(false);
    }
    posted_.notify_all();
    if (armed_.load()) listen();
  }

  // Once: has on_complete() called when all requests are complete.
  void listen() {
    if (listening_.exchange(true)) return;
    if (requests_.empty()) return on_complete();
    waiting_for_.store(requests_.size());
    for (unjamRequest_t request : requests_) {
      auto* listener = new Listener{shared_from_this(), decides(request)};
      check(unjamOnDone(
                request,
                [](unjamResult_t result, void* user) noexcept {
                  auto* own = static_cast<Listener*>(user);
                  const bool last = own->call->waiting_for_.fetch_sub(1) == 1;
                  if ((last || (own->decides && result != UNJAM_SUCCESS)) &&
                      !own->call->over_.exchange(true)) {
                    own->call->on_complete();
                  }
                  keep_until_complete(std::move(own->call));
                  delete own;
                },
                listener),
            what_);
    }
  }
  struct Listener {
    std::shared_ptr<Call> call;
    bool decides;  // whether its failure is the operation's end
  };

  // As settle(). Of a call that the engine has ended for its age it says, too, who has made it with
  // tensors on another device, which the engine does not know. That asks other processes: not for
  // the library's own threads.
  std::exception_ptr settle_and_explain() {
    const std::exception_ptr error = settle();
    std::string late;
    {
      const std::lock_guard lock(mutex_);
      late.swap(late_);
    }
    if (!late.empty()) dump_on_timeout();
    const std::shared_ptr<Groups> groups = late.empty() ? nullptr : groups_.lock();
    if (groups == nullptr) return error;
    late += groups->called_with_other_tensors(device_, key_);
    const std::lock_guard lock(mutex_);
    set_error(UNJAM_ERROR_TIMEOUT, late.c_str());
    late_.clear();
    return error_;
  }

  // With mutex_.
  void set_error(unjamResult_t code, const char* text) {
    if (code == UNJAM_ERROR_TIMEOUT) late_ = text;
    if (record_ != nullptr) record_->failed.store(true);
    try {
      raise(what_, code, text);
    } catch (...) {
      error_ = std::current_exception();
    }
  }
  void read_error() {
    if (error_ != nullptr) return;
    for (unjamRequest_t request : requests_) {
      int done = 0;
      const unjamResult_t code = unjamTest(request, &done);
      if (code != UNJAM_SUCCESS) return set_error(code, unjamRequestError(request));
    }
  }
  // With mutex_, but for the work itself: on CUDA a full stream takes that when what is in front of
  // it has come, and that may take callbacks, which on_complete() must not keep waiting. Once: who
  // comes meanwhile waits until it is done. True: it was done here. `gone` takes what must die
  // without the lock.
  bool finish(std::unique_lock<std::mutex>& lock, std::function<void()>& gone) {
    // On CUDA that takes as long as the other thread's stream has no room.
    while (finishing_) {
      finish_over_.wait_for(lock, kLook);
      if (!device_.is_cuda() || !finishing_) continue;
      lock.unlock();
      run_signal_handlers();
      lock.lock();
      throw_if_aborted();
    }
    if (finish_ == nullptr) return false;
    gone = std::exchange(finish_, nullptr);
    finishing_ = true;
    std::optional<c10::Event> event;
    std::exception_ptr error;
    lock.unlock();
    try {
      const at::NoGradGuard no_grad;
      const c10::InferenceMode inference(inference_);  // as where the tensors were made
      gone();
      if (device_.is_cuda()) {
        event.emplace(device_.type());
        event->record(current_stream(device_));
      }
    } catch (...) {
      error = std::current_exception();
    }
    lock.lock();
    finishing_ = false;
    if (error != nullptr) {
      if (error_ == nullptr) error_ = error;
    } else if (event) {
      finished_event_.emplace(std::move(*event));
    }
    finish_over_.notify_all();
    return true;
  }
  // CUDA, without mutex_: `stream`, the current one, is behind what was left to do.
  void finish_in(const c10::Stream& stream, std::function<void()>& gone) {
    std::unique_lock lock(mutex_);
    if (finish(lock, gone) || !finished_event_) return;
    lock.unlock();  // a full stream, again; the event stays as it is
    if (Executor::runs_this_thread()) {
      finished_event_->synchronize();  // as order_stream()
    } else {
      finished_event_->block(stream);
    }
  }

  // All requests are complete, or one has failed that decides. On unjam's callback thread, or the
  // caller's.
  void on_complete() noexcept {
    set_complete();
    if (!device_.is_cuda()) settle();
    // C++'s first: callbacks of Python's may take their time.
    std::vector<FuturePtr> futures;
    bool finishes = false;
    {
      const std::lock_guard lock(mutex_);
      told_.store(true);
      for (Taken& taken : taken_) {
        if (taken.future && !std::exchange(taken.told, true)) futures.push_back(taken.future);
      }
      finishes = finish_ != nullptr;
    }
    if (futures.empty() && !finishes) return;
    Executor::get().run([call = shared_from_this(), futures] { call->complete_futures(futures); });
  }

  // At the end of a backward pass, as one of its final callbacks.
  void complete_in_backward() noexcept {
    // A pass inside of a pass (reentrant checkpoints): the outer one goes on, and the reducer may
    // not be waiting yet; so a node of the outer one is being evaluated here. The host is left to
    // complete the future. (A pass so deep that the engine gives it another thread is not told
    // apart. Its futures are complete early then, and the stream waits early.)
    if (torch::autograd::get_current_node() != nullptr) return;
    const NoGil no_gil;
    FuturePtr future;
    {
      const std::lock_guard lock(mutex_);
      if (std::exchange(taken_[kCpp].told, true)) return;
      future = taken_[kCpp].future;
    }
    try {
      if (device_.is_cuda() && !blocks_host_) {
        // As wait(); but there it is the user who chose the stream. This one need not be the one in
        // whose order the allocator hands out again what the operation uses: that stays.
        order_stream(true);
      } else {
        wait(kNoTimeout);
      }
      // Records the current stream, which is behind the results.
      future->markCompleted(c10::IValue(outputs_));
    } catch (...) {  // not out of here: the final callbacks behind this one are others'
      if (!future->completed()) future->setError(std::current_exception());
    }
  }

  // In an executor's thread.
  void complete_futures(const std::vector<FuturePtr>& futures) noexcept {
    try {
      // CUDA: the host has seen the end, so any stream is behind it. This one is of the pool that
      // users take fewer of theirs from: what they queue there may wait for other ranks. Not one
      // for all callbacks, which may queue such things as well.
      std::optional<c10::StreamGuard> guard;
      if (device_.is_cuda()) {
        const c10::impl::VirtualGuardImpl cuda(device_.type());
        guard.emplace(cuda.getStreamFromGlobalPool(device_, /*isHighPriority=*/true));
      }
      std::function<void()> gone;
      std::exception_ptr error = settle_and_explain();
      if (device_.is_cuda() && error == nullptr) {
        finish_in(current_stream(device_), gone);
        const std::lock_guard lock(mutex_);
        error = error_;
      }
      if (error != nullptr) {
        if (futures.empty()) {
          keep_until_complete(shared_from_this());  // a sweep tells it, unless somebody asks before
        } else {
          error_told_.store(true);
        }
      }
      const KeyScope scope({"", kUnordered, 0, nullptr});  // of callbacks that are in no context
      for (const FuturePtr& future : futures) {
        if (error != nullptr) {
          future->setError(error);
        } else {
          future->markCompleted(c10::IValue(outputs_));
        }
      }
    } catch (...) {
      for (const FuturePtr& future : futures) {
        if (!future->completed()) future->setError(std::current_exception());
      }
    }
  }

  const char* const what_;
  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point begun_;
  const std::shared_ptr<GroupStatus> status_;
  const std::weak_ptr<Groups> groups_;
  const std::string key_;
  const std::optional<c10::Stream> issued_;    // CUDA: the stream that was current
  const bool inference_;                       // whether torch.inference_mode was on
  std::vector<unjamRequest_t> requests_;       // constant once it is put together
  std::vector<at::Tensor> outputs_;            // likewise, until release()
  bool blocks_host_ = false;                   // likewise
  bool first_decides_ = false;                 // likewise
  std::optional<c10::Stream> in_stream_;       // likewise
  std::unique_ptr<Range> range_;               // likewise
  Recorder::RecordPtr record_;                 // likewise
  std::function<Recorder::Place(int)> place_;  // likewise

  // Not yet put together: see post(). What post() stores is read behind an acquire of this.
  std::atomic<bool> open_{false};
  std::mutex post_mutex_;
  std::condition_variable posted_;
  std::atomic<int> source_rank_{-1};

  std::atomic<bool> complete_{false};
  std::atomic<bool> behind_{false};
  std::atomic<bool> armed_{false};
  std::atomic<bool> listening_{false};
  std::atomic<bool> over_{false};  // whoever sets it calls on_complete()
  std::atomic<bool> told_{false};
  std::atomic<bool> error_told_{false};  // to somebody who asked
  bool kept_ = false;                    // guarded by kept_calls(): whether it is among those
  std::atomic<std::size_t> waiting_for_{0};

  std::mutex mutex_;  // guards what follows
  std::vector<at::Tensor> held_;
  std::function<void()> finish_;
  bool finishing_ = false;               // a thread is at it
  std::condition_variable finish_over_;  // it is not any more
  // What the results are behind, if it is not the requests alone. Does not change once it is there,
  // which is when nothing is left to finish: whoever has seen that may use it without the lock.
  std::optional<c10::Event> finished_event_;
  std::optional<c10::Stream> behind_stream_;  // the last one that was put behind the results
  std::exception_ptr error_;
  std::string late_;  // what the engine says of a call that it ended for its age; once
  Taken taken_[kTakers];
};

}  // namespace unjam_torch
