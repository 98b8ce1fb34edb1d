// Kernels that begin before what is in front of them in their stream has ended ("programmatic
// dependent launch"), as unjam's calls do. Not by the library's own functions: programs look here
// at what CUDA itself does with such kernels, which the library relies on.
#pragma once

#include "tests/gpu/cuda_objects.h"

namespace unjam_gpu {

// As far as this block is concerned the next kernel's blocks may come, if it was launched early.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until all in front has ended.
__device__ __forceinline__ void wait_for_stream() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// `early`: it may begin when the kernel in front of it lets it.
template <class... Parameters, class... Arguments>
void launch(bool early, void (*kernel)(Parameters...), unsigned blocks, unsigned threads,
            cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = early ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

}  // namespace unjam_gpu
