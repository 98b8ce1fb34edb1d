// The tensors that one operation of torch keeps alive.
#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

namespace unjam_torch {

// Why a hold ends before the operation is gone:
//
//                     what the operation uses    its outputs
//   kStreamFollows    go                         stay: the Work gives them out
//   kWorkIsGone       stay                       go, unless a future gives them out
//
// What is held then goes with the operation. That dies where its Work does, or, if it is not
// complete there, in a thread that calls torch (see kept_calls.h).
enum class HoldEnd {
  kStreamFollows,  // the stream of the call, in whose order the allocator hands memory out again
  kWorkIsGone,     // and some stream follows
};

// Guarded by the operation's mutex once the operation is put together, but what is atomic.
class HeldTensors {
 public:
  void hold(const at::Tensor& tensor) { used_.push_back(tensor); }
  void hold(const std::vector<at::Tensor>& tensors) {
    used_.insert(used_.end(), tensors.begin(), tensors.end());
  }
  void set_outputs(std::vector<at::Tensor> outputs) { outputs_ = std::move(outputs); }

  const std::vector<at::Tensor>& outputs() const { return outputs_; }
  // "float32 of (2, 3)", of the first tensor that the operation uses; "" if it uses none.
  std::string first() const {
    if (used_.empty()) return "";
    std::ostringstream text;
    text << used_.front().scalar_type() << " of " << used_.front().sizes();
    return text.str();
  }

  // A future gives the outputs out, so they stay until the operation is gone.
  void set_in_future() { in_future_ = true; }
  // A stream waits for the operation. True: none did before.
  bool stream_follows() { return !stream_follows_.exchange(true); }
  bool has_stream_that_follows() const { return stream_follows_.load(); }

  // The one place where a hold ends early. The caller lets what it gets die without the mutex: that
  // may take the GIL, for which another thread may wait with the mutex.
  [[nodiscard]] std::vector<at::Tensor> end(HoldEnd why) {
    switch (why) {
      case HoldEnd::kStreamFollows:
        return std::exchange(used_, {});
      case HoldEnd::kWorkIsGone:
        if (in_future_) return {};
        return std::exchange(outputs_, {});
    }
    return {};
  }

 private:
  std::vector<at::Tensor> used_;
  std::vector<at::Tensor> outputs_;
  bool in_future_ = false;
  std::atomic<bool> stream_follows_{false};
};

}  // namespace unjam_torch
