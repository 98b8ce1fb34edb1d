// ncclGroupStart and ncclGroupEnd: what a thread calls in between is done at the end, together.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "api/nccl/communicator.h"
#include "api/nccl/operation.h"
#include "api/nccl/status.h"

namespace unjam::nccl {

// A communicator that is being made, for which ranks wait for each other.
struct Making {
  std::function<Status()> run;
  std::shared_ptr<Communicator> child;  // null: this rank gets none
  ncclComm_t* handle = nullptr;         // where the program wants it; NULL again if it fails
  bool blocking = true;
};

// Where the program wants it. Another thread may look there while the call waits for ranks, to
// abort what is being made.
inline void give(ncclComm_t* place, ncclComm_t handle) {
  std::atomic_ref<ncclComm_t>(*place).store(handle);
}

void start_group();
Status end_group();
// Ends the group without doing what was called in it.
Status discard_group();

// At once, or at the end of the thread's group.
Status enqueue(Operation operation);
Status enqueue(Making making);
// A call in the group was refused: so will be the group. Gives the status back.
Status noted(Status status);

}  // namespace unjam::nccl
