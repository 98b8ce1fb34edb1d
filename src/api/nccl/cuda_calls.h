// What the layer itself asks of CUDA. cuda_calls.cu has it, and where there is no compiler for
// that, no_cuda_calls.cc, which says so.
#pragma once

#include <cstddef>
#include <vector>

#include "api/nccl/scale.h"
#include "api/nccl/status.h"

namespace unjam::nccl::cuda {

Status current_device(int& device);
int multiprocessors(int device);
Status allocate(std::size_t bytes, void** memory);
Status release(void* memory);
// Refuses a stream that is being captured into a graph.
Status check_stream(void* stream);
// Work that is queued in one of a device's streams from now on is behind what all of them hold.
Status join(int device, const std::vector<void*>& streams);
Status copy(int device, const void* from, void* to, std::size_t bytes, void* stream);
// Memory that is there for what is queued in the stream, until it is let go of there.
Status take_scratch(int device, std::size_t bytes, void* stream, void** memory);
void leave_scratch(int device, void* memory, void* stream);
// Queues output[i] = input[i] * scale.
Status multiply(int device, const Scale& scale, const void* input, void* output,
                std::size_t elements, void* stream);

}  // namespace unjam::nccl::cuda
