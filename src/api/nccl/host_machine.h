// Host memory, and streams that are threads: what is queued in one runs in order, beside others.
#pragma once

#include "api/nccl/machine.h"

namespace unjam::nccl {

Machine& host_machine();

// As cudaSetDevice and cudaStreamSynchronize: for tests, which have no CUDA.
void set_host_device(int device);
void synchronize_host_stream(void* stream);

}  // namespace unjam::nccl
