// Of a build without a compiler for CUDA: communicators are of host memory only.
#include "api/nccl/cuda_calls.h"

namespace unjam::nccl::cuda {
namespace {

Status not_built() {
  return {Code::kUnhandledCudaError,
          "this libnccl.so.2 of unjam was built without its CUDA part: install the +cu13 wheel, or "
          "build where nvcc 13 is found; UNJAM_DEVICE=host is for host memory"};
}

}  // namespace

Status current_device(int&) { return not_built(); }
int multiprocessors(int) { return 0; }
Status allocate(std::size_t, void**) { return not_built(); }
Status release(void*) { return not_built(); }
Status check_stream(void*) { return not_built(); }
Status join(int, const std::vector<void*>&) { return not_built(); }
Status copy(int, const void*, void*, std::size_t, void*) { return not_built(); }
Status take_scratch(int, std::size_t, void*, void**) { return not_built(); }
void leave_scratch(int, void*, void*) {}
Status multiply(int, const Scale&, const void*, void*, std::size_t, void*) { return not_built(); }

}  // namespace unjam::nccl::cuda
