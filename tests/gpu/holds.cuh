// Kernels that hold a stream. (Templates, so that programs without them do not warn.)
#pragma once

namespace unjam_gpu {

// Until the host says so.
template <int = 0>
__global__ void hold_kernel(const volatile int* open) {
  while (*open == 0) __nanosleep(500);
}

// `gridDim.x` blocks, for so long.
template <int = 0>
__global__ void spin_kernel(unsigned long long ns) {
  unsigned long long begin, now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    __nanosleep(200);
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < ns);
}

}  // namespace unjam_gpu
