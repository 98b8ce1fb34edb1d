// What programs do that may wait for everything on a GPU: the rows of the synchronisation matrix.
#pragma once

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/cuda_objects.h"

namespace unjam_gpu {

// Kernels that are loaded at their first use, if CUDA_MODULE_LOADING=LAZY: each serves once.
template <int kNumber>
__global__ void lazy_kernel(int* out) {
  *out = kNumber;
}
inline constexpr int kLazyKernels = 192;
using LazyKernel = void (*)(int*);
template <int... kNumbers>
std::array<LazyKernel, sizeof...(kNumbers)> lazy_kernels(std::integer_sequence<int, kNumbers...>) {
  return {&lazy_kernel<kNumbers>...};
}

template <int = 0>
__global__ void count_kernel(int* counter) {
  atomicAdd(counter, 1);
}

// Operations on the current device. before() and after() run while nothing is pending.
class Operations {
 public:
  struct Operation {
    const char* name;
    std::function<void()> before, run, after;
    bool lazy = false;  // cannot be repeated for ever
  };

  Operations() : cell_(sizeof(int)), target_(kBytes), pageable_(kBytes) {
    kernels_ = lazy_kernels(std::make_integer_sequence<int, kLazyKernels>());
    const auto nothing = [] {};
    const auto allocate = [this] { check(cudaMalloc(&memory_, kBytes)); };
    const auto release = [this] { check(cudaFree(memory_)); };
    const auto allocate_host = [this] { check(cudaMallocHost(&host_, kBytes)); };
    const auto release_host = [this] { check(cudaFreeHost(host_)); };
    list_ = {
        {"cudaDeviceSynchronize", nothing, [] { check(cudaDeviceSynchronize()); }, nothing},
        {"cudaFree", allocate, release, nothing},
        {"cudaFreeHost", allocate_host, release_host, nothing},
        {"cudaMalloc", nothing, allocate, release},
        {"cudaMallocHost", nothing, allocate_host, release_host},
        {"lazily loaded kernel", nothing, [this] { use_lazy_kernel(); }, nothing, true},
        {"default-stream kernel", nothing,
         [this] {
           count_kernel<><<<1, 1>>>(cell_.as<int>());
           check(cudaGetLastError());
           check(cudaStreamSynchronize(nullptr));
         },
         nothing},
        {"pageable cudaMemcpy", nothing,
         [this] {
           check(cudaMemcpy(target_.get(), pageable_.data(), kBytes, cudaMemcpyHostToDevice));
         },
         nothing},
        {"pageable copy to host", nothing,
         [this] {
           check(cudaMemcpy(pageable_.data(), target_.get(), kBytes, cudaMemcpyDeviceToHost));
         },
         nothing},
    };
  }

  const std::vector<Operation>& list() const { return list_; }
  int lazy_left() const { return kLazyKernels - next_; }

 private:
  static constexpr std::size_t kBytes = std::size_t{4} << 20;  // more than an allocator's remains

  void use_lazy_kernel() {
    if (next_ == kLazyKernels) fail("no lazily loaded kernel is left");
    int* out = cell_.as<int>();
    void* arguments[] = {&out};
    check(
        cudaLaunchKernel(reinterpret_cast<const void*>(kernels_[static_cast<std::size_t>(next_++)]),
                         dim3(1), dim3(1), arguments, 0, stream_.get()));
    stream_.synchronize();
  }

  DeviceMemory cell_, target_;
  std::vector<char> pageable_;
  Stream stream_;
  std::array<LazyKernel, kLazyKernels> kernels_{};
  inline static int next_ = 0;  // the process's: each is loaded once
  void* memory_ = nullptr;
  void* host_ = nullptr;
  std::vector<Operation> list_;
};

}  // namespace unjam_gpu
