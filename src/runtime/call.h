// A collective call on its way through a rank: as it was made, and as it is pending.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "control/waitfor.h"
#include "plan/lower.h"
#include "plan/plan.h"
#include "runtime/request.h"
#include "runtime/result.h"
#include "runtime/signature.h"
#include "unjam/unjam.h"

namespace unjam {

struct Key;

// A pending call, for diagnosis.
struct CallRecord {
  CallId id;
  Signature signature;
  std::vector<int> members;
  double age_ms = 0;
  const char* lacks = nullptr;  // of a rank's message to itself: which of its two calls is missing
};

// Of a rank's message to itself: which of its two calls it is. kNone: of every other call, and of
// the two together.
enum class Half : std::uint8_t { kNone, kSend, kRecv };

struct Call {
  Signature signature;
  Half half = Half::kNone;
  const void* send = nullptr;
  void* recv = nullptr;
  std::int32_t priority = 0;
  unjamCallback_t callback = nullptr;
  void* user = nullptr;
  unjamStreamOrder_t stream_order = UNJAM_STREAM_NONE;
  void* stream = nullptr;
};

// An invocation that was submitted and is not complete.
struct Submitted {
  Call call;
  Key* key = nullptr;
  std::uint64_t n = 0;
  std::shared_ptr<const Plan> plan;
  std::shared_ptr<const Lowered> lowered;  // what the plan is without the engine, of GPUs
  unjamRequest* request = nullptr;         // owns a reference; may be null
  std::uint64_t order = 0;                 // of submission at this rank
  std::uint64_t since_ns = 0;
  bool in_engine = false;
  std::uint16_t slot = 0;    // in the engine
  std::uint64_t serial = 0;  // of submissions to the engine; CUDA's wait kernels look for it
  Result cancel;             // why it was cancelled, if it was
  // Of a rank's message to itself, see own_messages.cc.
  std::shared_ptr<void> called;      // CUDA: where the stream of the call that came first was
  std::unique_ptr<Submitted> other;  // the call that came first, which is complete with this one

  // What it waits for: the other call of a message to itself; nullptr: not for that.
  const char* lacks() const {
    return call.half == Half::kSend ? "receive" : call.half == Half::kRecv ? "send" : nullptr;
  }
};

}  // namespace unjam
