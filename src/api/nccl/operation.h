// A collective, send or receive that the program has called: what is queued in a stream, at once or
// at the end of a group.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "api/nccl/scale.h"
#include "api/nccl/status.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

class Communicator;

enum class What : std::uint8_t {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kGather,
  kScatter,
  kSend,
  kRecv
};

struct Operation {
  What what = What::kAllReduce;
  std::shared_ptr<Communicator> comm;
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  unjamDataType_t dtype = UNJAM_UINT8;
  unjamOp_t op = UNJAM_SUM;
  std::shared_ptr<const Scale> scale;  // null: none
  int peer = 0;                        // the root, or the other end
  void* stream = nullptr;

  bool transfers() const { return what == What::kSend || what == What::kRecv; }
  bool is_to_itself() const;
  // Of `send`, where it is reduced.
  std::size_t reduced_elements() const;
};

// The call of the C API. input: instead of `send`. stream: where the order is not NONE.
unjamResult_t call(const Operation& operation, const void* input, unjamStreamOrder_t order,
                   unjamRequest_t* request);
// Longer than a rank is away to write its state; shorter than torch's watchdog waits.
inline constexpr std::chrono::milliseconds kPatience{300'000};
// The same; waits while there is no room for it, but no longer than `patience` while nothing moves.
Status submit(const Operation& operation, const void* input, unjamStreamOrder_t order,
              unjamRequest_t* request, std::chrono::milliseconds patience = kPatience);

// Of the operations that are queued together: what each may wait for, see stream_launch.cc.
bool may_go_in_order(const std::vector<Operation>& operations, std::size_t which);
// What a rank sends to itself needs its receive in the same group. Takes both out: what is left of
// them is a copy, in the receive's stream.
struct OwnCopy {
  Operation send, recv;
  std::size_t bytes() const { return recv.count * bytes_of(recv.dtype); }
};
Status take_own_copies(std::vector<Operation>& operations, std::vector<OwnCopy>& copies);

}  // namespace unjam::nccl
