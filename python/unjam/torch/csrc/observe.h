// What torch's profiler and NVTX tools see of an operation.
//
// Two kinds of entries, as torch's own backends give them. A range, "unjam:all_reduce", goes from
// the call to its end. "record_param_comms" is over when the call has been made, and holds what
// torch's readers of traces ask for: group, sizes, type. Where nobody looks there is neither: an
// operation asks torch whether it has observers, and reads one pointer.
#pragma once

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "executor.h"
#include "nvtx.h"

namespace unjam_torch {

// What others call an operation. The texts live as long as the process.
struct OpNames {
  const char* range;     // in profiles
  const char* comms;     // in record_param_comms, as torch's backend for NCCL says it
  const char* recorded;  // in flight recorders, likewise
};

// Of one operation, from its call to its end.
class Range {
 public:
  // Null where nobody looks. key: "" for none. to_end: whether the profiler's range goes on to the
  // operation's end; else it ends with the call.
  static std::unique_ptr<Range> begin(const char* title, const std::string& key,
                                      const std::vector<at::Tensor>& inputs, bool to_end) {
    auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::USER_SCOPE);
    const bool nvtx = nvtx_domain() != nullptr;
    if (!observers && !nvtx) return nullptr;
    std::unique_ptr<Range> range(new Range);
    if (nvtx) range->nvtx_ = nvtx_begin(key.empty() ? title : title + (" key=" + key));
    if (observers) range->profile(std::move(*observers), title, inputs, to_end);
    return range;
  }
  ~Range() { end(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

  // Whether something is left for the operation's end.
  bool goes_on() const { return nvtx_.has_value() || (function_ && to_end_); }

  // When the call has been made.
  void end_call() {
    if (!function_ || to_end_) return;
    const std::lock_guard lock(mutex_);
    function_->end();
  }

  // At the operation's end, by any thread, any number of times. When it returns the range is over.
  // So a profile that is stopped after a wait() finds it over, whoever has seen the end first.
  void end() {
    const std::lock_guard lock(mutex_);
    if (std::exchange(over_, true)) return;
    if (nvtx_) nvtx_end(*nvtx_);
    if (function_ && to_end_) end_function();
  }

 private:
  Range() = default;

  void profile(at::StepCallbacks&& observers, const char* title,
               const std::vector<at::Tensor>& inputs, bool to_end) {
    namespace profiler = torch::profiler::impl;
    // These push a range at its beginning and pop one at its end, in the thread that comes to it.
    const profiler::ActiveProfilerType type = profiler::profilerType();
    // What observes all threads (profile_all_threads, ExecutionTraceObserver) keeps its state where
    // everybody finds it: a range that ends after it would be written into the next profile.
    const bool of_this_thread =
        !at::hasGlobalCallbacks() &&
        c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr;
    to_end_ = to_end && of_this_thread && type != profiler::ActiveProfilerType::NVTX &&
              type != profiler::ActiveProfilerType::ITT;
    profiler_ = c10::ThreadLocalDebugInfo::current();
    function_.emplace(std::move(observers));
    if (to_end_) function_->_setAsync();
    if (function_->needsInputs()) {
      const std::vector<c10::IValue> values(inputs.begin(), inputs.end());  // for before() alone
      function_->before(title, c10::ArrayRef<const c10::IValue>(values.data(), values.size()));
    } else {
      function_->before(title);
    }
  }

  // Tells torch's observers in the name of the thread that has begun the range. The profiler looks
  // for its state among the thread's local ones. The thread that has started the profiler stops it,
  // takes the state away, and frees what the range is written into. So a weak reference finds the
  // state here: where it has gone, nothing is written. A profile that stops between the look and
  // the write is not covered. This thread's own state is put aside: it may be a later profile's.
  //
  // torch's whole local state would not do: it holds Python objects, and this may be unjam's
  // callback thread, which must not take the GIL to free them.
  void end_function() {
    std::shared_ptr<c10::ThreadLocalDebugInfo> info = profiler_.lock();
    {
      auto own = c10::ThreadLocalDebugInfo::current();
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(info);
      function_->end();
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(own));
    }
    // It may be stopped meanwhile, and this the last to hold it: what it holds may be Python's.
    if (info != nullptr) Executor::get().run([kept = std::move(info)] {});
  }

  std::mutex mutex_;
  bool over_ = false;
  bool to_end_ = false;
  std::optional<NvtxRange> nvtx_;
  std::optional<at::RecordFunction> function_;
  std::weak_ptr<c10::ThreadLocalDebugInfo> profiler_;
};

// "record_param_comms", from here to its end, on the calling thread.
class ParamComms {
 public:
  struct Group {
    std::string name, description;
    int rank = 0;
    std::vector<int> ranks;  // in the default group
  };

  // group(): asked for where somebody looks; else it is null.
  template <class F>
  static std::unique_ptr<ParamComms> begin(const char* name, std::uint64_t sequence, bool p2p,
                                           bool async, const std::vector<at::Tensor>& inputs,
                                           const std::vector<at::Tensor>& outputs,
                                           const std::vector<std::int64_t>& in_splits,
                                           const std::vector<std::int64_t>& out_splits, F group) {
    auto observers = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION);
    if (!observers) return nullptr;
    return std::unique_ptr<ParamComms>(new ParamComms(std::move(*observers), name, sequence, p2p,
                                                      async, inputs, outputs, in_splits, out_splits,
                                                      group()));
  }

 private:
  ParamComms(at::StepCallbacks&& observers, const char* name, std::uint64_t sequence, bool p2p,
             bool async, const std::vector<at::Tensor>& inputs,
             const std::vector<at::Tensor>& outputs, const std::vector<std::int64_t>& in_splits,
             const std::vector<std::int64_t>& out_splits, const Group& group)
      : info_(c10::DebugInfoKind::PARAM_COMMS_INFO,
              made(name, sequence, p2p, async, inputs, outputs, in_splits, out_splits, group)),
        function_(std::move(observers)) {
    if (!function_.needsInputs()) {
      function_.before(at::kParamCommsCallName);
      return;
    }
    const auto [start, stride] = spread(group.ranks);
    values_ = {c10::IValue(inputs),
               c10::IValue(std::make_tuple(static_cast<std::int64_t>(sequence), p2p)),
               c10::IValue(std::make_tuple(group.name, group.description)),
               c10::IValue(group.rank),
               c10::IValue(std::string(name)),
               c10::IValue(in_splits),
               c10::IValue(out_splits),
               c10::IValue(start),
               c10::IValue(stride),
               c10::IValue(static_cast<int>(group.ranks.size()))};
    function_.before(at::kParamCommsCallName,
                     c10::ArrayRef<const c10::IValue>(values_.data(), values_.size()));
    function_.setOutputs(std::vector<c10::IValue>{c10::IValue(outputs)});
  }

  // The first rank and the step of an even list; else what torch says for "uneven".
  static std::pair<int, int> spread(const std::vector<int>& ranks) {
    if (ranks.size() < 2) return {ranks.empty() ? 0 : ranks.front(), 1};
    const int stride = ranks[1] - ranks[0];
    for (std::size_t i = 1; i < ranks.size(); ++i) {
      if (ranks[i] - ranks[i - 1] != stride || stride <= 0) return {ranks.front(), -1};
    }
    return {ranks.front(), stride};
  }
  static std::int64_t elements(const std::vector<at::Tensor>& tensors) {
    std::int64_t sum = 0;
    for (const at::Tensor& t : tensors) sum += t.numel();
    return sum;
  }

  static std::shared_ptr<c10::DebugInfoBase> made(const char* name, std::uint64_t sequence,
                                                  bool p2p, bool async,
                                                  const std::vector<at::Tensor>& inputs,
                                                  const std::vector<at::Tensor>& outputs,
                                                  const std::vector<std::int64_t>& in_splits,
                                                  const std::vector<std::int64_t>& out_splits,
                                                  const Group& group) {
    using Info = torch::ParamCommsDebugInfo;
    const auto [start, stride] = spread(group.ranks);
    const at::ScalarType type = !inputs.empty()    ? inputs.front().scalar_type()
                                : !outputs.empty() ? outputs.front().scalar_type()
                                                   : at::kByte;
    auto pg = std::make_tuple(group.name, group.description);
    const auto size = static_cast<int>(group.ranks.size());
    return build<Info>(sequence, p2p, async, std::move(pg), group.rank, std::string(name),
                       elements(inputs), elements(outputs), type, in_splits, out_splits, start,
                       stride, size);
  }
  // Later versions of torch take, and keep, more.
  template <class Info, class... Words>
  static std::shared_ptr<Info> build(std::uint64_t sequence, bool p2p, bool async, Words... words) {
    std::shared_ptr<Info> info;
    if constexpr (std::is_constructible_v<Info, Words&&..., bool>) {
      info = std::make_shared<Info>(std::move(words)..., async);
    } else {
      info = std::make_shared<Info>(std::move(words)...);
    }
    if constexpr (requires { info->setSequenceInfo(std::int64_t{}, bool{}); }) {
      info->setSequenceInfo(static_cast<std::int64_t>(sequence), p2p);
    }
    return info;
  }

  std::vector<c10::IValue> values_;  // which the function points to
  const c10::DebugInfoGuard info_;   // the function is ended with it in place
  at::RecordFunction function_;
};

}  // namespace unjam_torch
