// An operation of torch on its way to unjam.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "backend.h"
#include "gil.h"
#include "observe.h"
#include "recorder.h"

namespace unjam_torch {

// One operation while it is put together: where it goes, under which key, and how it stands to the
// current stream. The operation consists of the requests that run() has made when done() is called.
class UnjamBackend::Launch {
 public:
  // sync: the caller's stream comes after the operation when the call returns. several: it
  // will have more than one request (none of them may hold up the stream before all are made).
  // more: added to the key, begins with "#".
  Launch(UnjamBackend& backend, const char* what, c10d::OpType type, at::Device device, bool sync,
         std::chrono::milliseconds timeout, bool several = false, const std::string& more = "")
      : backend_(backend),
        groups_(without_complete_calls(backend)),
        group_(groups_->on(device)),
        guard_(device.is_cuda() ? std::optional<at::Device>(device) : std::nullopt),
        sync_(sync),
        type_(type),
        timeout_(timeout == c10d::kUnsetTimeout ? backend.options_->timeout : timeout),
        thread_key_(key_of(backend, what, type)),
        common_key_(join(backend.prefix_, join(thread_key_.own, thread_key_.context))),
        more_(more),
        key_(join(common_key_, more)),
        call_(std::make_shared<Call>(what, device, timeout_, backend.status_, groups_, key_)) {
    if (!device.is_cuda()) return;
    const c10::Stream stream = current_stream(device);
    options_.stream = stream.native_handle();
    // In a callback the thread waits, see Call::order_stream().
    const bool in_stream = sync && !several && !Executor::runs_this_thread();
    options_.stream_order = in_stream ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC;
    if (in_stream) call_->set_in_stream(stream);
  }
  ~Launch() {
    comms_.reset();
    if (range_ != nullptr) range_->end_call();
    if (done_ || !call_->has_requests()) return;
    // It has failed half way. What was begun still uses its tensors, and the other ranks will wait
    // for what was not.
    backend_.status_->break_off("is out of step with the other ranks, since " +
                                std::string(call_->what()) + " failed half way on this rank");
    keep_until_complete(std::move(call_));
  }
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  Call& call() { return *call_; }

  // From here on the operation is seen by profilers. flat_…: tensors that are pieces of one.
  void observe(const OpNames& names, const Tensors& inputs, const Tensors& outputs,
               bool flat_inputs = false, bool flat_outputs = false,
               const std::vector<std::int64_t>& in_splits = {},
               const std::vector<std::int64_t>& out_splits = {}) {
    // On CUDA the profiler has what the GPU does from elsewhere; there its range tells what the
    // call costs the host, as NCCL's.
    range_ = Range::begin(names.range, join(backend_.prefix_, thread_key_.own), inputs,
                          /*to_end=*/!call_->device().is_cuda());
    comms_ = ParamComms::begin(names.comms, backend_.sequence_.load() + 1, is_point_to_point(type_),
                               !sync_, inputs, outputs, in_splits, out_splits, [this] {
                                 return ParamComms::Group{group_name(), backend_.getGroupDesc(),
                                                          backend_.getRank(), groups_->ranks()};
                               });
    if (Recorder::get().on()) {
      record_ = Recorder::get().begin(names.recorded, inputs, outputs, flat_inputs, flat_outputs,
                                      timeout_);
      record_->p2p = is_point_to_point(type_);
      record_->on_device = call_->device().is_cuda();
    }
  }

  // It is a send or a receive between these two.
  void between(int source, int destination) {
    source_ = source;
    destination_ = destination;
  }
  // What else of it, beside its tensor, the ranks agree on: for the log.
  void by(int root) { root_ = root; }
  void by(unjamOp_t op) { op_ = op; }
  const std::shared_ptr<Call>& share() const { return call_; }
  const std::shared_ptr<Groups>& groups() const { return groups_; }
  unjamGroup_t group() const { return group_; }
  const char* key() const { return key_.c_str(); }
  const char* common_key() const { return common_key_.c_str(); }  // without what was added
  // Of a call without data.
  const unjamCallOptions_t* options() { return options(Elements{}); }
  const unjamCallOptions_t* options(const Elements& elements) {
    match_text_ = elements.match_text;
    if (thread_key_.scope != nullptr) {
      match_text_ += (match_text_.empty() ? "" : ", ") + thread_key_.scope->who_calls();
    }
    shorten(match_text_);
    options_.match_text = match_text_.c_str();
    return &options_;
  }

  // f(request) makes one of unjam's calls.
  template <class F>
  void run(F f) {
    unjamRequest_t request = nullptr;
    unjamResult_t code = f(&request);
    if (code != UNJAM_SUCCESS && unjamLastErrorIsTransient() != 0) {
      code = run_when_there_is_room(f, &request);
    }
    check(code, call_->what());
    call_->add(request);
  }

  // finish: what is left to do with the results.
  WorkPtr done(Tensors outputs, std::function<void()> finish = nullptr) {
    const bool finishes = finish != nullptr;
    call_->set_outputs(std::move(outputs));
    call_->set_finish(std::move(finish));
    if (CallLog::get().on()) {
      CallLog::get().add({backend_.name_, key_, call_->what(), source_, destination_,
                          "root " + std::to_string(root_) + ", op " + std::to_string(op_),
                          call_->first_tensor(), call_site()});
    }
    const bool to_be_told = set_observed();
    std::shared_ptr<Names> names;
    if (!is_point_to_point(type_)) {
      const std::string key = call_->channel() + "\n" + common_key_;
      names = thread_key_.scope != nullptr ? thread_key_.scope->names(key) : groups_->names(key);
    }
    WorkPtr work = c10::make_intrusive<UnjamWork>(call_, backend_.getRank(), type_,
                                                  backend_.sequence_.fetch_add(1),
                                                  std::move(thread_key_), std::move(names));
    done_ = true;  // the Work sees to its tensors from here
    if (to_be_told) call_->call_when_complete();
    if (sync_) {
      // It may wait on the host: who destroys the process group meanwhile leaves the job with it.
      groups_.reset();
      call_->order_stream();
    } else if (finishes) {
      call_->call_when_complete();
    }
    return work;
  }

 private:
  using Clock = std::chrono::steady_clock;

  // With a key for each bucket, say, there can be more keys under way than there is room for. The
  // call waits until some have ended, for the operation's time at most. The engine's own threads
  // complete what it waits for, so it cannot wait for itself.
  template <class F>
  unjamResult_t run_when_there_is_room(F f, unjamRequest_t* request) {
    constexpr std::chrono::microseconds kShortest{50}, kLongest{1000};
    constexpr std::chrono::milliseconds kLook{50};
    constexpr std::chrono::seconds kTold{5};
    const NoGil no_gil;
    const Clock::time_point now = Clock::now();
    Clock::time_point looked = now;
    if (!waits_since_) waits_since_ = now;
    bool told = false;
    for (auto pause = kShortest;; pause = std::min(2 * pause, kLongest)) {
      std::this_thread::sleep_for(pause);
      if (const auto past = Clock::now(); past - looked >= kLook) {
        run_signal_handlers();
        looked = past;
      }
      call_->throw_if_over();
      const unjamResult_t code = f(request);
      if (code == UNJAM_SUCCESS || unjamLastErrorIsTransient() == 0) return code;
      const auto waited = Clock::now() - *waits_since_;
      if (waited >= timeout_) return code;
      if (told || waited < kTold) continue;
      told = true;
      TORCH_WARN("unjam: ", call_->what(), " under key '", key_, "' of process group ",
                 backend_.status_->name(),
                 " waits for room, for 5 s by now: ", unjamGetLastError());
    }
  }

  // Hands on to the call what goes on after its making. True: it is to be told of its end at once,
  // whether or not anybody waits. Where torch waits as the next thing, that is not worth a thread.
  bool set_observed() {
    comms_.reset();  // it began after the range
    if (range_ == nullptr && record_ == nullptr) return false;
    bool to_be_told = false;
    if (range_ != nullptr) {
      range_->end_call();
      to_be_told = range_->goes_on() && (!sync_ || call_->device().is_cuda());
    }
    std::function<Recorder::Place(int)> place;
    if (record_ != nullptr && type_ == c10d::OpType::RECVANYSOURCE) {
      place = [channel = channel(), description = backend_.getGroupDesc(), ranks = groups_->ranks(),
               me = backend_.getRank()](int source) {
        return between(channel, description, ranks, source, me);
      };
    }
    call_->set_observed(std::move(range_), record_, std::move(place));
    if (record_ != nullptr) Recorder::get().add(std::move(record_), this->place());
    return to_be_told;
  }

  // As torch calls the group.
  const std::string& group_name() const {
    const std::string& uid = backend_.getGroupUid();
    return uid.empty() ? backend_.name_ : uid;
  }
  // What counts this call's like, in the recorder: see there.
  std::string channel() const {
    const std::string key = join(thread_key_.own, thread_key_.context);
    std::string text = group_name();
    if (!key.empty()) text += " key " + key;
    // Calls with CPU tensors and calls with CUDA tensors do not meet.
    if (groups_->world().cuda_device() >= 0 && !call_->device().is_cuda()) text += " cpu";
    if (is_point_to_point(type_) && !more_.empty()) text += " " + more_.substr(1);  // the tag
    return text;
  }
  Recorder::Place place() const {
    const std::string& description = backend_.getGroupDesc();
    if (!is_point_to_point(type_)) return {channel(), description, groups_->ranks()};
    if (type_ == c10d::OpType::RECVANYSOURCE) {
      const int me = groups_->ranks().at(static_cast<std::size_t>(backend_.getRank()));
      return {channel() + " to " + std::to_string(me), description, {me}, 0, 0};
    }
    return between(channel(), description, groups_->ranks(), source_, destination_);
  }
  // Of a message between two ranks of the group: only these are to call it.
  static Recorder::Place between(const std::string& channel, const std::string& description,
                                 const std::vector<int>& ranks, int source, int destination) {
    const int from = ranks.at(static_cast<std::size_t>(source));
    const int to = ranks.at(static_cast<std::size_t>(destination));
    Recorder::Place place{channel + " " + std::to_string(from) + "->" + std::to_string(to),
                          description,
                          {std::min(from, to)},
                          from > to,
                          to > from};
    if (from != to) place.ranks.push_back(std::max(from, to));
    return place;
  }

  // Looks first how earlier calls have ended: that may put the group out of use.
  static std::shared_ptr<Groups> without_complete_calls(const UnjamBackend& backend) {
    release_complete();
    return backend.groups();
  }

  // To what the library takes.
  static void shorten(std::string& text) {
    constexpr std::size_t kMost = UNJAM_MATCH_TEXT_BYTES - 1, kHash = 16;
    if (text.size() > kMost) text = text.substr(0, kMost - kHash - 1) + "~" + hashed(text);
  }

  static ThreadKey key_of(const UnjamBackend& backend, const char* what, c10d::OpType type) {
    ThreadKey key = thread_key();
    if (key.context.empty()) return key;
    const bool named = key.own.size() != key.given || !backend.prefix_.empty();
    if (is_point_to_point(type) || (key.context == kUnordered && named)) {
      key.context.clear();
      key.scope = nullptr;
      return key;
    }
    TORCH_CHECK_WITH(DistBackendError, key.context != kUnordered, "unjam: ", what,
                     ": called in the callback of a future, where nothing tells in which order the "
                     "ranks come to it: give it a key there (with unjam.key(name): …), or call it "
                     "in a callback of one collective's own future (work.get_future().then)");
    TORCH_CHECK_WITH(DistBackendError, key.context != kCrowded, "unjam: ", what,
                     ": called in the callback of a future whose name is another's: of two calls "
                     "under one key that are ",
                     Names::kNames,
                     " or a multiple of that apart one has callbacks that have not ended, or the "
                     "later one has had some: wait for those before, or make the calls under "
                     "several keys (unjam.key)");
    TORCH_CHECK_WITH(DistBackendError, key.context != kDeep, "unjam: ", what,
                     ": called on the 17th level of what callbacks have called: make one of the "
                     "calls outside of callbacks");
    return key;
  }

  UnjamBackend& backend_;
  std::shared_ptr<Groups> groups_;
  const unjamGroup_t group_;
  const c10::OptionalDeviceGuard guard_;
  const at::NoGradGuard no_grad_;  // of copies and factors: collectives have no gradient
  const bool sync_;
  const c10d::OpType type_;
  const std::chrono::milliseconds timeout_;
  std::optional<Clock::time_point> waits_since_;  // for room
  ThreadKey thread_key_;
  const std::string common_key_;
  const std::string more_;
  const std::string key_;
  std::shared_ptr<Call> call_;
  unjamCallOptions_t options_ = UNJAM_CALL_OPTIONS_INITIALIZER;
  std::string match_text_;  // which that points to
  int source_ = -1, destination_ = -1;
  int root_ = -1, op_ = -1;
  std::unique_ptr<Range> range_;       // until the call has it
  std::unique_ptr<ParamComms> comms_;  // on this thread, so it goes before the range
  Recorder::RecordPtr record_;
  bool done_ = false;
};

}  // namespace unjam_torch
