#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <string>

#include "api/nccl/cuda_calls.h"

namespace unjam::nccl::cuda {
namespace {

Status status_of(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();  // it is told: what comes next is not to blame
  return {Code::kUnhandledCudaError,
          std::string("CUDA: ") + cudaGetErrorString(error) + " (" + what + ")"};
}

// The calling thread's device, for a while.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    status_ = status_of(cudaGetDevice(&before_), "cudaGetDevice");
    if (status_.ok() && before_ != device) {
      status_ = status_of(cudaSetDevice(device), "cudaSetDevice");
      changed_ = status_.ok();
    }
  }
  ~OnDevice() {
    if (changed_) (void)cudaSetDevice(before_);
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  const Status& status() const { return status_; }

 private:
  int before_ = 0;
  bool changed_ = false;
  Status status_;
};

cudaStream_t as_stream(void* stream) { return static_cast<cudaStream_t>(stream); }

union Element {
  unsigned char bytes[8];
  std::uint64_t word;
};

template <class T>
__global__ void multiply_kernel(const T* input, T* output, std::size_t elements, const T* place,
                                Element value) {
  T by;
  if (place != nullptr) {
    by = *place;
  } else {
    __builtin_memcpy(&by, value.bytes, sizeof(T));
  }
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
       i < elements; i += step) {
    output[i] = scaled(input[i], by);
  }
}

}  // namespace

Status current_device(int& device) { return status_of(cudaGetDevice(&device), "cudaGetDevice"); }

int multiprocessors(int device) {
  int count = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return status_of(error, "cudaDeviceGetAttribute").ok() ? count : 0;
}

Status allocate(std::size_t bytes, void** memory) {
  return status_of(cudaMalloc(memory, bytes), "cudaMalloc");
}

Status release(void* memory) { return status_of(cudaFree(memory), "cudaFree"); }

Status check_stream(void* stream) {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(as_stream(stream), &capture);
  if (error == cudaSuccess && capture == cudaStreamCaptureStatusNone) return {};
  if (error == cudaSuccess || error == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    return invalid_usage(
        "the stream is being captured into a CUDA graph, which unjam does not serve: call outside "
        "of the capture");
  }
  return status_of(error, "cudaStreamIsCapturing");
}

Status join(int device, const std::vector<void*>& streams) {
  const OnDevice on(device);
  if (!on.status().ok()) return on.status();
  std::vector<cudaEvent_t> events;
  Status status;
  for (void* const stream : streams) {
    cudaEvent_t event = nullptr;
    status = status_of(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
    if (!status.ok()) break;
    events.push_back(event);
    status = status_of(cudaEventRecord(event, as_stream(stream)), "cudaEventRecord");
    if (!status.ok()) break;
  }
  for (std::size_t i = 0; i < streams.size() && status.ok(); ++i) {
    for (std::size_t j = 0; j < events.size() && status.ok(); ++j) {
      if (i == j) continue;
      status = status_of(cudaStreamWaitEvent(as_stream(streams[i]), events[j], 0),
                         "cudaStreamWaitEvent");
    }
  }
  for (const cudaEvent_t event : events) (void)cudaEventDestroy(event);
  return status;
}

Status copy(int device, const void* from, void* to, std::size_t bytes, void* stream) {
  const OnDevice on(device);
  if (!on.status().ok()) return on.status();
  if (from == to) return {};
  return status_of(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, as_stream(stream)),
                   "cudaMemcpyAsync");
}

Status take_scratch(int device, std::size_t bytes, void* stream, void** memory) {
  const OnDevice on(device);
  if (!on.status().ok()) return on.status();
  return status_of(cudaMallocAsync(memory, bytes, as_stream(stream)), "cudaMallocAsync");
}

void leave_scratch(int device, void* memory, void* stream) {
  const OnDevice on(device);
  (void)cudaFreeAsync(memory, as_stream(stream));
}

Status multiply(int device, const Scale& scale, const void* input, void* output,
                std::size_t elements, void* stream) {
  const OnDevice on(device);
  if (!on.status().ok()) return on.status();
  Element value{};
  std::copy(scale.value.begin(), scale.value.end(), value.bytes);
  constexpr std::size_t kThreads = 256, kMostBlocks = 1024;
  const auto blocks =
      static_cast<unsigned>(std::min(kMostBlocks, (elements + kThreads - 1) / kThreads));
  with_type(scale.dtype, [&](auto element) {
    using T = decltype(element);
    multiply_kernel<T><<<blocks, kThreads, 0, as_stream(stream)>>>(
        static_cast<const T*>(input), static_cast<T*>(output), elements,
        static_cast<const T*>(scale.place), value);
  });
  return status_of(cudaGetLastError(), "the kernel that multiplies");
}

}  // namespace unjam::nccl::cuda
