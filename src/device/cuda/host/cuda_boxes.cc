#include "device/cuda/host/cuda_boxes.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "device/cuda/host/cuda_arena.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/streams.h"
#include "device/cuda/kernels/boxes.h"

namespace unjam {
namespace {

constexpr unsigned kThreads = 256, kWarps = kThreads / 32;
// Of addresses, which cost nothing: more than a device has memory, and little beside what there
// are, for a process may have many ranks.
constexpr std::uint64_t kAddresses = std::uint64_t{1} << 38;
// In which memory is added, which is what CUDA hands out.
constexpr std::uint64_t kUnit = std::uint64_t{2} << 20;

}  // namespace

CudaBoxes::~CudaBoxes() {
  if (stream_ == nullptr && pinned_ == nullptr) return;
  const OnDevice on(device_);
  stop();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
  cudaFreeHost(pinned_);
}

bool CudaBoxes::start(std::string& error) {
  const OnDevice on(device_);
  void* pinned = nullptr;
  if (!cuda_ok(cudaHostAlloc(&pinned, kPinnedBytes, cudaHostAllocPortable | cudaHostAllocMapped),
               "allocating pinned memory for resharding", error)) {
    return false;
  }
  pinned_ = static_cast<unsigned char*>(pinned);  // freed with the rank, when nobody waits for it
  std::memset(pinned_, 0, kPinnedBytes);
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how{};
  int greatest = 0, least = 0, sms = 0, a_sm = 0;
  cudaFuncAttributes attributes{};
  // (The kernel is loaded: loading it later would wait for one that spins.)
  if (!cuda_ok(cudaFuncGetAttributes(&attributes, boxes_kernel()), "loading kernels", error) ||
      !cuda_ok(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&a_sm, boxes_kernel(), kThreads, 0),
               "measuring the kernel", error) ||
      !cuda_ok(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device_),
               "reading the device", error) ||
      !cuda_ok(cudaDeviceGetStreamPriorityRange(&least, &greatest), "stream priorities", error) ||
      !cuda_ok(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest),
               "creating a stream", error) ||
      !cuda_ok(cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000,
                                                cudaEnableDefault, &how),
               "cuStreamBatchMemOp", error)) {
    return false;
  }
  if (found == nullptr) {
    error = "the driver has no cuStreamBatchMemOp";
    return false;
  }
  batch_mem_op_ = reinterpret_cast<decltype(batch_mem_op_)>(found);
  blocks_ = static_cast<unsigned>(std::max(1, sms * a_sm));
  // (Nothing is launched yet: a stream takes one of the process's queues with its first launch, and
  // most ranks never reshard.)
  memory_ = reserve_cuda_arena(device_, kAddresses, error);
  return memory_ != nullptr;
}

void CudaBoxes::stop() {
  if (stream_ == nullptr) return;
  const OnDevice on(device_);
  cudaStreamSynchronize(stream_);
}

bool CudaBoxes::copy(const std::vector<BoxCopy>& boxes, std::string& error) {
  const OnDevice on(device_);
  const BesideCapture beside;
  for (std::size_t begin = 0; begin < boxes.size();) {
    BoxBatch batch;
    for (; begin < boxes.size() && batch.count < kBoxesABatch; ++begin) {
      add_box(boxes[begin], batch);
    }
    const std::uint64_t wanted = (batch.end[batch.count - 1] + kWarps - 1) / kWarps;
    const auto blocks = static_cast<unsigned>(std::min<std::uint64_t>(wanted, blocks_));
    void* arguments[] = {&batch};
    const std::unique_lock first = first_launch_.guard(stream_);
    if (!cuda_ok(
            cudaLaunchKernel(boxes_kernel(), dim3(blocks), dim3(kThreads), arguments, 0, stream_),
            "copying boxes of tensors", error)) {
      return false;
    }
  }
  return true;
}

bool CudaBoxes::clear(void* memory, std::uint64_t bytes, std::string& error) {
  const OnDevice on(device_);
  const BesideCapture beside;
  const std::unique_lock first = first_launch_.guard(stream_);
  return cuda_ok(cudaMemsetAsync(memory, 0, bytes, stream_), "clearing a bundle", error);
}

bool CudaBoxes::operate(cudaStream_t stream, CUstreamBatchMemOpParams operation, const char* what,
                        std::string& error) {
  const CUresult code = batch_mem_op_(stream, 1, &operation, 0);
  if (code == CUDA_SUCCESS) return true;
  error = std::string(what) + ": the driver's error " + std::to_string(static_cast<int>(code));
  return false;
}

bool CudaBoxes::tell(std::uint64_t* word, std::uint64_t value, std::string& error) {
  const OnDevice on(device_);
  const BesideCapture beside;
  CUstreamBatchMemOpParams op{};
  op.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_64;
  op.writeValue.address = reinterpret_cast<CUdeviceptr>(word);
  op.writeValue.value64 = value;
  op.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  const std::unique_lock first = first_launch_.guard(stream_);
  return operate(stream_, op, "telling that boxes are copied", error);
}

bool CudaBoxes::wait_in(void* stream, const std::uint64_t* word, std::uint64_t value,
                        std::string& error) {
  const OnDevice on(device_);
  if (!check_stream(stream, error)) return false;
  CUstreamBatchMemOpParams op{};
  op.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_64;
  op.waitValue.address = reinterpret_cast<CUdeviceptr>(word);
  op.waitValue.value64 = value;
  op.waitValue.flags = CU_STREAM_WAIT_VALUE_GEQ;
  const std::unique_lock first = first_launch_.guard(as_stream(stream));
  return operate(as_stream(stream), op, "queueing a wait for a resharding", error);
}

std::shared_ptr<void> CudaBoxes::note(void* stream, std::string& error) {
  const OnDevice on(device_);
  return check_stream(stream, error) ? events_.record(as_stream(stream), error) : nullptr;
}

bool CudaBoxes::is_past(void* noted, bool& past, std::string& error) {
  const OnDevice on(device_);
  const BesideCapture beside;
  const cudaError_t code = cudaEventQuery(static_cast<cudaEvent_t>(noted));
  past = code == cudaSuccess;
  if (code != cudaErrorNotReady) return cuda_ok(code, "the stream of a resharding", error);
  cudaGetLastError();
  return true;
}

unsigned char* CudaBoxes::add(std::uint64_t bytes, std::string& error) {
  const std::lock_guard lock(mutex_);
  const std::uint64_t rounded = (bytes + kUnit - 1) / kUnit * kUnit;
  if (rounded > kAddresses - added_) {
    error = "no addresses are left for " + std::to_string(bytes) + " bytes";
    return nullptr;
  }
  unsigned char* const begin = memory_->data() + added_;
  // (Of addresses at which this failed nothing more is made: a part of another size may lie there.)
  const std::uint64_t at = added_;
  added_ += rounded;
  return memory_->add(at, rounded, error) ? begin : nullptr;
}

bool CudaBoxes::reaches(const void* memory, std::string& error) {
  const OnDevice on(device_);
  const BesideCapture beside;
  cudaPointerAttributes of{};
  if (!cuda_ok(cudaPointerGetAttributes(&of, memory), "looking at memory", error)) return false;
  if (of.type == cudaMemoryTypeUnregistered) {
    error = "is in host memory, and the rank works on cuda:" + std::to_string(device_) +
            ": give memory of that device";
    return false;
  }
  if (of.type == cudaMemoryTypeDevice && of.device != device_) {
    error = "is on cuda:" + std::to_string(of.device) +
            ", and the rank works on cuda:" + std::to_string(device_) +
            ": give memory of that device";
    return false;
  }
  return true;
}

}  // namespace unjam
