// c10d::Work over an operation: what a user of torch holds.
#pragma once

#include <ATen/ATen.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <utility>
#include <vector>

#include "call.h"
#include "context.h"
#include "gil.h"

namespace unjam_torch {

inline bool is_point_to_point(c10d::OpType type) {
  return type == c10d::OpType::SEND || type == c10d::OpType::RECV ||
         type == c10d::OpType::RECVANYSOURCE;
}

class UnjamWork : public c10d::Work {
 public:
  // key: that the call was made under. names: of collectives under that key; else null.
  UnjamWork(std::shared_ptr<Call> call, int rank, c10d::OpType type, std::uint64_t sequence,
            ThreadKey key, std::shared_ptr<Names> names)
      : c10d::Work(rank, type),
        call_(std::move(call)),
        sequence_(sequence),
        key_(std::move(key)),
        names_(std::move(names)),
        number_(names_ != nullptr ? names_->next_number() : 0) {}
  ~UnjamWork() override {
    const NoGil no_gil;
    Call::release(std::move(call_));
  }

  // For a future of it. With the GIL.
  std::shared_ptr<Callbacks> callbacks() {
    if (operation_ == nullptr && names_ != nullptr) {
      operation_ = std::make_shared<Operation>(names_, number_, call_->channel(), key_);
    }
    return std::make_shared<Callbacks>(operation_, key_.own);
  }

  bool isCompleted() override {
    const NoGil no_gil;
    return call_->finished();
  }
  bool isSuccess() const override { return exception() == nullptr && call_->complete(); }
  std::exception_ptr exception() const override {
    const NoGil no_gil;
    return call_->complete() ? call_->tell_error() : nullptr;
  }
  int sourceRank() const override { return call_->source_rank(); }
  std::vector<at::Tensor> result() override { return call_->outputs(); }
  void synchronize() override {
    const NoGil no_gil;
    if (call_->device().is_cuda()) {
      call_->order_stream();
    } else {
      call_->wait(kNoTimeout);
    }
  }
  void blockCurrentStream() override { synchronize(); }
  bool wait(std::chrono::milliseconds timeout) override {
    const NoGil no_gil;
    return call_->wait(timeout);
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    // Python has the GIL where it asks for a future, and may mean that for later.
    const bool from_python = PyGILState_Check() != 0;
    const NoGil no_gil;
    const c10::intrusive_ptr<c10::ivalue::Future> future =
        call_->future(from_python ? kPython : kCpp);
    if (!from_python && !future->completed()) call_->complete_after_backward();
    return future;
  }
  std::uint64_t getSequencenumber() const override { return sequence_; }
  void abort() override {
    TORCH_CHECK(false,
                "unjam: one operation cannot be aborted alone: abort the process group "
                "(torch.distributed.distributed_c10d._abort_process_group)");
  }

 private:
  std::shared_ptr<Call> call_;
  const std::uint64_t sequence_;
  const ThreadKey key_;
  const std::shared_ptr<Names> names_;
  const std::uint64_t number_;  // among the operations of those
  std::shared_ptr<Operation> operation_;
};

}  // namespace unjam_torch
