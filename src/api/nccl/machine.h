// Where the ranks' buffers and streams are: CUDA devices; or, with UNJAM_DEVICE=host, this process,
// whose "streams" are threads (to try programs and to test without a GPU).
#pragma once

#include <cstddef>
#include <vector>

#include "api/nccl/operation.h"
#include "api/nccl/status.h"
#include "unjam/unjam.h"

namespace unjam::nccl {

class Machine {
 public:
  // The process's.
  static Machine& get();

  virtual ~Machine() = default;
  virtual unjamDevice_t kind() const = 0;
  // The calling thread's device.
  virtual Status current_device(int& device) = 0;
  // Of a device; 0: communicators need not share them.
  virtual int multiprocessors(int device) = 0;
  virtual Status allocate(std::size_t bytes, void** memory) = 0;
  virtual Status release(void* memory) = 0;
  // Queues operations that were called together in their streams. On failure some may be queued.
  virtual Status launch(std::vector<Operation> operations) = 0;
};

Machine& cuda_machine();

}  // namespace unjam::nccl
