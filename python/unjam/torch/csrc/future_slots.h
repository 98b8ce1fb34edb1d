// The futures that a user has taken of one operation of torch: C++'s, and Python's.
#pragma once

#include <ATen/core/ivalue.h>

#include <exception>
#include <utility>
#include <vector>

namespace unjam_torch {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;

enum FutureTaker { kCpp, kPython, kFutureTakers };

// Guarded by the operation's mutex. Each future is completed once, without the mutex, by who has
// claimed it: its callbacks are a user's.
class FutureSlots {
 public:
  // Null: nobody has taken it.
  const FuturePtr& of(FutureTaker taker) const { return slots_[taker].future; }
  // claimed: the caller completes it.
  FuturePtr make(FutureTaker taker, const at::Device& device, bool claimed) {
    std::vector<c10::Device> devices;
    if (device.is_cuda()) devices.push_back(device);
    slots_[taker].future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    slots_[taker].claimed = claimed;
    return slots_[taker].future;
  }
  // What nobody has claimed; C++'s first, for callbacks of Python's may take their time.
  std::vector<FuturePtr> claim_all() {
    std::vector<FuturePtr> claimed;
    for (Slot& slot : slots_) {
      if (slot.future && !std::exchange(slot.claimed, true)) claimed.push_back(slot.future);
    }
    return claimed;
  }
  // Null: somebody else has.
  FuturePtr claim(FutureTaker taker) {
    Slot& slot = slots_[taker];
    return std::exchange(slot.claimed, true) ? FuturePtr() : slot.future;
  }

 private:
  struct Slot {
    FuturePtr future;
    bool claimed = false;
  };
  Slot slots_[kFutureTakers];
};

}  // namespace unjam_torch
