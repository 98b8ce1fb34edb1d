// Memory of the user's that peers may store into: unjamMemRegister() and its opposite.
#include <string>
#include <vector>

#include "runtime/call_checks.h"
#include "runtime/context.h"
#include "runtime/texts.h"

namespace unjam {

// Local, and waits for no peer. Nothing here has the context's lock while it is inside of CUDA.
Result Context::register_memory(void* pointer, std::uint64_t bytes) {
  const std::lock_guard registering(registering_);
  {
    const std::lock_guard lock(mutex_);
    if (closed()) return closed_why_;
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  const std::uintptr_t heap = heap_->base();
  if (heap_->bytes() != 0 && pointer != nullptr && begin < heap + heap_->bytes() &&
      heap < begin + bytes) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            "the memory is in this rank's heap (unjamMemAlloc), which peers may store into as it "
            "is: register what is elsewhere"};
  }
  std::uint64_t serial = 0;
  std::string error;
  if (cuda() && pointer != nullptr && bytes != 0 &&
      !world_->cuda()->check_window(world_->device_of(rank_), pointer, bytes, error)) {
    return {UNJAM_ERROR_INVALID_ARGUMENT, error};
  }
  if (Result r = windows_.add(pointer, bytes, serial); !r.ok()) return r;
  unsigned char* const base = static_cast<unsigned char*>(pointer) - begin % kPlaceUnit;
  try {
    world_->open_window(rank_, serial, base, error);
  } catch (...) {
    windows_.remove(serial);
    throw;
  }
  if (!error.empty()) {
    const std::lock_guard lock(mutex_);
    ++not_shared_;
    not_shared_because_ = error;
  }
  return {};
}

Result Context::deregister_memory(void* pointer) {
  const std::lock_guard registering(registering_);
  std::uint64_t bytes = 0, serial = 0;
  Result retired;
  {
    const std::lock_guard lock(mutex_);
    reap_locked();
    // With the lock from here on no call is made that would invite into it.
    if (Result r = windows_.find(pointer, bytes, serial, retired); !r.ok()) return r;
    std::vector<const Submitted*> pending = pending_in_order();
    std::erase_if(pending, [&](const Submitted* s) { return !writes_into(*s, pointer, bytes); });
    if (!pending.empty()) {
      return pending_error("memory was to be deregistered", pending.size(), pending,
                           "wait for them first");
    }
    windows_.remove(serial);
  }
  world_->close_windows(rank_, {{serial, !retired.ok()}});
  if (retired.ok()) return {};
  return {retired.code,
          "the memory is no longer registered, but a call with its output there has failed (" +
              retired.message +
              "), and peers that have yet to end it may still store there: keep the memory until "
              "all ranks of that call have ended it, or are gone"};
}

}  // namespace unjam
