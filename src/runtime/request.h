// The state behind an unjamRequest_t.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/box_memory.h"
#include "unjam/unjam.h"

namespace unjam {
class Context;
struct Submitted;
}  // namespace unjam

struct unjamRequest {
  // Keeps the context's memory alive for a wait that is under way while the context is destroyed.
  std::shared_ptr<unjam::Context> context;
  std::atomic<int> references{1};
  // Set last (release), read first (acquire): result, message and the collective's output are then
  // visible.
  std::atomic<bool> done{false};
  unjamResult_t result = UNJAM_SUCCESS;
  std::string message;
  // The invocation while it is pending; under the context's mutex.
  unjam::Submitted* submitted = nullptr;

  // Of what takes several invocations (Context::begin_request). Under the context's mutex: its
  // callback. Set before it is done: the names of tensors that were not moved as a whole.
  bool several = false;
  unjamCallback_t callback = nullptr;
  void* user = nullptr;
  std::vector<std::string> incomplete;
  unjam::BoxMemory::End end;  // of a GPU: what streams wait for

  void retain() { references.fetch_add(1, std::memory_order_relaxed); }
  // Acquire-release: the last owner destroys after all others' uses.
  void release() {
    if (references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};
