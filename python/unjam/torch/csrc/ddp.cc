// DistributedDataParallel's averages under keys, waited for by streams.
//
// The reducer waits for a bucket's future at the end of the backward pass. A future of torch's that
// is not complete makes the host wait (c10::ivalue::Future is final; and an event of a stream that
// waits for the operation would have a stream wait before anybody has asked for it). So what a
// bucket's future holds, complete at once, is the Work; it is waited for where the reducer takes
// the result out of the future: in its stream then, on the CPU in its thread. (Without this hook
// the future is completed just ahead of the reducer's wait, mostly: complete_after_backward() in
// call.h. Here nothing depends on the pass's callbacks.)
#include "ddp.h"

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <utility>

#include "backend.h"
#include "launch.h"

namespace unjam_torch {

namespace {

struct Averaged : torch::CustomClassHolder {
  Averaged(WorkPtr w, at::Tensor t) : work(std::move(w)), tensor(std::move(t)) {}
  const WorkPtr work;
  const at::Tensor tensor;
};

class AverageHook : public c10d::CommHookInterface {
 public:
  AverageHook(c10::intrusive_ptr<UnjamBackend> backend, std::string prefix)
      : backend_(std::move(backend)), prefix_(std::move(prefix)) {}

  c10::intrusive_ptr<c10::ivalue::Future> runHook(c10d::GradBucket& bucket) override {
    const at::Tensor tensor = bucket.getBuffer();
    tensor.div_(backend_->getSize());
    std::vector<at::Tensor> tensors{tensor};
    c10d::AllreduceOptions options;
    options.asyncOp = true;
    const KeyScope key(nested_key(prefix_ + " bucket " + std::to_string(bucket.getIndex())));
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::AnyType::get());
    future->markCompleted(c10::IValue::make_capsule(
        c10::make_intrusive<Averaged>(backend_->allreduce(tensors, options), tensor)));
    return future;
  }
  at::Tensor parseHookResult(const c10::IValue& result) override {
    const auto averaged = c10::static_intrusive_pointer_cast<Averaged>(result.toCapsule());
    averaged->work->wait();
    return averaged->tensor;
  }

 private:
  const c10::intrusive_ptr<UnjamBackend> backend_;
  const std::string prefix_;
};

}  // namespace

void average_by_keys(c10d::Reducer& reducer, c10::intrusive_ptr<UnjamBackend> backend,
                     const std::string& prefix) {
  reducer.register_comm_hook(std::make_unique<AverageHook>(std::move(backend), prefix));
}

}  // namespace unjam_torch
