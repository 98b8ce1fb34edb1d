// One operation of torch: one request of unjam's, or several that are complete together, and the
// tensors that they use. It lives as long as anybody needs it: the Work that the user has, and, if
// the user lets go of that first, the list in kept_calls.h.
//
//   operation_state.h   how far it is, and whether somebody is to be told of its end
//   request_set.h       its requests
//   held_tensors.h      what it keeps alive, and until when
//   results.h           what remains to be done when the data are there
//   outcome.h           how it ended, and whether a user knows
//   future_slots.h      the futures that were taken of it
#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "future_slots.h"
#include "group_status.h"
#include "held_tensors.h"
#include "kept_calls.h"
#include "observe.h"
#include "operation_state.h"
#include "outcome.h"
#include "recorder.h"
#include "request_set.h"
#include "results.h"
#include "unjam/unjam.h"
#include "world.h"

namespace unjam_torch {

using namespace c10d;  // kNoTimeout and the like: global in some versions of torch, c10d's in
                       // others
using Clock = std::chrono::steady_clock;

// On the CPU wait() blocks the calling thread, which drives the engine meanwhile. On CUDA no
// wait is put on a stream before wait() (a mark is, and a synchronous call itself), which orders
// the calling thread's current stream after the operation (unjamStreamWait: whoever waits, helps).
// Every operation is complete on its own: no stream of the library's puts one after another.
//
// On CUDA wait() mostly returns before the operation is complete, so it cannot tell that it fails
// later: the stream goes on, without the results. Every operation is therefore looked at once more
// when it is complete, and one that failed without anybody being told puts its process group out of
// use on this rank: the next call says so, and whoever waits on the host.
class Call : public std::enable_shared_from_this<Call> {
 public:
  // status: of the process group; if it is aborted, blocked waits end. groups, key: for messages.
  Call(const char* what, at::Device device, std::chrono::milliseconds timeout,
       std::shared_ptr<GroupStatus> status, std::weak_ptr<Groups> groups, std::string key);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // ---- while it is put together, by one thread ----

  void add(unjamRequest_t request) { requests_.add(request); }
  bool has_requests() const { return !requests_.empty(); }
  // Memory that the operation uses.
  template <class T>
  void hold(const T& tensors) {
    tensors_.hold(tensors);
  }
  void set_outputs(std::vector<at::Tensor> outputs) { tensors_.set_outputs(std::move(outputs)); }
  // See Results.
  void set_finish(std::function<void()> finish) { results_.set_finish(std::move(finish)); }
  void set_ends_here() { results_.set_ends_here(); }
  // CUDA: this stream comes after the operation already.
  void set_in_stream(const c10::Stream& stream) { in_stream_ = stream; }
  // wait() blocks the calling thread on CUDA, too.
  void set_blocks_host() { blocks_host_ = true; }
  void set_first_decides() { requests_.set_first_decides(); }
  void set_source_rank(int rank) { source_rank_.store(rank); }
  // Its request is still to come: post() or fail() will be called.
  void set_open() { state_.set_open(); }
  // What tools see of it; either may be null. place(source): in the record, of a receive from any
  // source.
  void set_observed(std::unique_ptr<Range> range, Recorder::RecordPtr record,
                    std::function<Recorder::Place(int)> place);

  // ---- a request that comes later, from another thread ----

  void post(unjamRequest_t request, int source);
  void fail(unjamResult_t code, const char* text);

  // ---- afterwards, by any thread ----

  const char* what() const { return what_; }
  // Calls with CPU tensors and calls with CUDA tensors do not meet.
  std::string channel() const {
    return device_.is_cuda() ? status_->channel() + " on CUDA" : status_->channel();
  }
  const at::Device& device() const { return device_; }
  std::string first_tensor() const { return tensors_.first(); }
  const std::vector<at::Tensor>& outputs() const { return tensors_.outputs(); }
  int source_rank() const { return source_rank_.load(); }

  // Whether all requests are complete, or one has failed that decides. Does not block.
  bool complete();
  // Of a complete operation: whether nothing uses its tensors any more.
  bool idle() const { return requests_.idle(); }
  // Whether the results are in the outputs.
  bool finished();

  // Of a complete operation: what went wrong, or null, for a user, who knows then. On the CPU the
  // results are in the outputs then.
  std::exception_ptr tell_error();

  bool wait(std::chrono::milliseconds timeout);

  // CUDA: work queued in the calling thread's current stream from now on sees the results. keep:
  // what the operation uses stays until it is complete, not until here.
  //
  // In a callback in a thread of the executor's that thread waits, and the stream has nothing to
  // wait for. Callbacks have their streams by turns from torch's pool, of which several may share
  // one of CUDA's hardware queues. There a kernel that waits keeps the other streams' from running,
  // and callbacks come in another order on every rank. (Where a thread of the user's adds a
  // callback to what is complete already, and so runs it, the stream waits: the callbacks that this
  // thread adds next may be what another rank has first.)
  void order_stream(bool keep = false);

  // C++: of what the current stream waits for already the future is complete at once, and does not
  // tell how it ends. DDP's reducer reads the value out of a future in the line after its wait()
  // (Reducer::set_divide_factor).
  FuturePtr future(FutureTaker taker);

  // Has the future completed at the end of the backward pass that this thread is in, if it is in
  // one and nobody has completed it by then. There the stream waits for the operation (on the CPU
  // the thread does): it is for futures that are waited for at that point, or before. See call.cc.
  void complete_after_backward();

  // Makes sure that the results get to the outputs even if nobody waits.
  void call_when_complete();

  // By the Work's end.
  static void release(std::shared_ptr<Call> call);
  bool group_is_over() const { return status_->over(); }
  // Of a complete operation on CUDA: has its process group say that it failed, if nobody was told.
  // (On the CPU wait() tells.)
  void report_unseen_error() noexcept;

  // Throws if its process group can have no more calls.
  void throw_if_over() const;

 private:
  friend void keep_until_complete(std::shared_ptr<Call> call);
  friend void release_complete(bool all);

  // How long a blocked wait goes without a look around: what is shorter does not take the GIL.
  static constexpr std::chrono::microseconds kLook{50'000};

  // ---- waiting: call_waits.cc ----

  void throw_if_aborted() const;
  [[noreturn]] void timed_out(std::chrono::milliseconds limit) const;
  // What may have come to the process group meanwhile: an abort, or that an earlier operation has
  // failed that nobody had waited for on the host. Then other ranks, which have heard of it at
  // their next call, do not come.
  void look_around() const;
  void wait_for(unjamRequest_t request, Clock::time_point deadline,
                std::chrono::milliseconds limit) const;
  void wait_for_post(Clock::time_point deadline, std::chrono::milliseconds limit);
  // Waits on the host until the operation is complete. timeout: from now; kNoTimeout: its own, from
  // when it was begun.
  void complete_on_host(std::chrono::milliseconds timeout);
  // What cudaEventSynchronize does, but that it looks around.
  static void wait_for_event(const c10::Event& event);
  // The stream waits. Of a rank's message to itself it can when both calls are made: the thread
  // waits for that.
  void stream_wait(unjamRequest_t request, const c10::Stream& stream) const;

  // ---- the end: call.cc ----

  // All that post() has stored is seen by who sees this.
  void close();
  // Once: has the library call on_complete() when all requests are complete, or one has failed that
  // decides.
  void listen();
  struct Listener;
  // On unjam's callback thread, or the caller's.
  void on_complete() noexcept;
  // Completes the futures that nobody has claimed, and does what is left to finish, in a thread of
  // the executor's.
  void complete_in_executor() noexcept;
  void complete_futures(const std::vector<FuturePtr>& futures) noexcept;
  void complete_in_backward() noexcept;
  // By whoever has seen the end, and by several threads at once. What tools see ends before the
  // operation counts as complete: who finds it complete may stop the profile. Range and record are
  // this call's until its end, and whoever comes here holds the call.
  void note_end();

  // Of a complete operation: what went wrong, or null.
  std::exception_ptr error_at_end();
  // The same. Of an operation that the engine has ended for its age it says, too, who has made it
  // with tensors on another device, which the engine does not know. That asks other processes: not
  // for the library's own threads.
  std::exception_ptr explained_error();
  // With the mutex.
  void set_error(unjamResult_t code, const char* text);
  void read_error();
  // With the mutex, see Results::finish(). True: it was done here.
  bool finish(std::unique_lock<std::mutex>& lock, std::function<void()>& gone);
  // CUDA, without the mutex: `stream`, the current one, comes after what was left to do.
  void finish_in(const c10::Stream& stream, std::function<void()>& gone);
  void failed_unseen(const std::string& why);

  const char* const what_;
  const at::Device device_;
  const std::chrono::milliseconds timeout_;
  const Clock::time_point begun_;
  const std::shared_ptr<GroupStatus> status_;
  const std::weak_ptr<Groups> groups_;
  const std::string key_;
  const std::optional<c10::Stream> issued_;  // CUDA: the stream that was current

  // Constant once the operation is put together.
  bool blocks_host_ = false;
  std::optional<c10::Stream> in_stream_;
  std::unique_ptr<Range> range_;
  Recorder::RecordPtr record_;
  std::function<Recorder::Place(int)> place_;

  OperationStateWord state_;
  std::mutex post_mutex_;  // guards that the state is no longer open, for who waits for that
  std::condition_variable posted_;
  std::atomic<int> source_rank_{-1};

  std::atomic<std::size_t> waiting_for_{0};  // requests that have yet to call a Listener
  bool kept_ = false;                        // in the list of kept_calls.cc, whose mutex guards it

  std::mutex mutex_;  // guards what follows
  HeldTensors tensors_;
  Results results_;
  Outcome outcome_;
  FutureSlots futures_;
  std::optional<c10::Stream> following_stream_;  // the last one that waits for the results

  // Constant once the operation is put together, or, of an open one, once it is posted. Last, so
  // that requests end before the tensors that they use.
  RequestSet requests_;
};

}  // namespace unjam_torch
