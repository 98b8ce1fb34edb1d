#include "device/cuda/host/cuda_windows.h"

#include <cuda.h>

#include <cstring>

#include "device/cuda/host/cuda_error.h"

namespace unjam {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(WindowName::allocation));

// The driver's functions, found at run time: libunjam_cuda.so loads without a driver.
template <class F>
bool find(const char* name, F*& function, std::string& error) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult how{};
  if (!cuda_ok(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &how), name,
               error)) {
    return false;
  }
  if (found == nullptr) error = std::string("the driver has no ") + name;
  function = reinterpret_cast<F*>(found);
  return found != nullptr;
}

CUdeviceptr address_of(const void* memory) { return reinterpret_cast<CUdeviceptr>(memory); }

// Where the allocation begins, and its size.
bool range_of(const void* memory, CUdeviceptr& begin, std::size_t& bytes, std::string& error) {
  decltype(&cuMemGetAddressRange) range = nullptr;
  if (!find("cuMemGetAddressRange", range, error)) return false;
  if (range(&begin, &bytes, address_of(memory)) == CUDA_SUCCESS) return true;
  error = "CUDA does not know the memory's bounds";
  return false;
}

bool has_legacy_handle(const void* memory) {
  decltype(&cuPointerGetAttribute) attribute = nullptr;
  std::string unused;
  int capable = 0;
  return find("cuPointerGetAttribute", attribute, unused) &&
         attribute(&capable, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address_of(memory)) ==
             CUDA_SUCCESS &&
         capable != 0;
}

}  // namespace

bool CudaWindows::check(int device, const void* memory, std::uint64_t bytes, std::string& error) {
  const OnDevice on(device);
  const BesideCapture beside;
  cudaPointerAttributes attributes{};
  if (!cuda_ok(cudaPointerGetAttributes(&attributes, memory), "cudaPointerGetAttributes", error)) {
    return false;
  }
  if (attributes.type != cudaMemoryTypeDevice) {
    error = std::string("the pointer is to ") +
            (attributes.type == cudaMemoryTypeManaged ? "managed memory" : "memory of the host") +
            ": register memory of the rank's GPU, from cudaMalloc";
    return false;
  }
  if (attributes.device != device) {
    error = "the memory is on device " + std::to_string(attributes.device) +
            ", and this rank's device is " + std::to_string(device) +
            ": register memory of the rank's own";
    return false;
  }
  // Other memory is mapped for other devices by other means, which its owner has: storing into it
  // would be a fault.
  if (!has_legacy_handle(memory)) {
    error =
        "the memory is not of cudaMalloc, but of a pool or of the driver's virtual memory "
        "functions "
        "(cudaMallocAsync, torch's expandable segments), which peers cannot map: register memory "
        "of cudaMalloc, or take it from the heap (unjamMemAlloc)";
    return false;
  }
  CUdeviceptr begin = 0;
  std::size_t size = 0;
  if (!range_of(memory, begin, size, error)) return false;
  const std::uint64_t before = address_of(memory) - begin;
  if (before <= size && bytes <= size - before) return true;
  error = "the memory ends " + std::to_string(bytes - (size - before)) +
          " bytes ahead of what was to be registered (its allocation has " + std::to_string(size) +
          " bytes, the pointer is " + std::to_string(before) +
          " behind its beginning): register what is allocated";
  return false;
}

bool CudaWindows::name(int device, const void* memory, WindowName& name, std::string& error) {
  const OnDevice on(device);
  const BesideCapture beside;
  CUdeviceptr begin = 0;
  std::size_t size = 0;
  if (!range_of(memory, begin, size, error)) return false;
  cudaIpcMemHandle_t handle{};
  // NOLINTNEXTLINE(performance-no-int-to-ptr)
  if (!cuda_ok(cudaIpcGetMemHandle(&handle, reinterpret_cast<void*>(begin)), "cudaIpcGetMemHandle",
               error)) {
    return false;
  }
  std::memcpy(name.allocation.data(), &handle, sizeof(handle));
  name.offset = address_of(memory) - begin;
  return true;
}

bool CudaWindows::reach(int device, int other, std::string& error) {
  const OnDevice on(device);
  const BesideCapture beside;
  int can = 0;
  if (!cuda_ok(cudaDeviceCanAccessPeer(&can, device, other), "cudaDeviceCanAccessPeer", error)) {
    return false;
  }
  if (can == 0) {
    error = "device " + std::to_string(device) + " has no peer access to device " +
            std::to_string(other);
    return false;
  }
  const cudaError_t code = cudaDeviceEnablePeerAccess(other, 0);
  if (code == cudaErrorPeerAccessAlreadyEnabled) {
    cudaGetLastError();  // it is no error
    return true;
  }
  return cuda_ok(code, "cudaDeviceEnablePeerAccess", error);
}

unsigned char* CudaWindows::open(int device, const WindowName& name, std::string& error) {
  const std::lock_guard lock(mutex_);
  const Place place{device, name.allocation};
  if (const auto found = mappings_.find(place); found != mappings_.end()) {
    ++found->second.uses;
    return static_cast<unsigned char*>(found->second.base) + name.offset;
  }
  const OnDevice on(device);
  const BesideCapture beside;
  cudaIpcMemHandle_t handle{};
  std::memcpy(&handle, name.allocation.data(), sizeof(handle));
  void* base = nullptr;
  if (!cuda_ok(cudaIpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess),
               "cudaIpcOpenMemHandle", error)) {
    return nullptr;
  }
  mappings_[place] = {base, 1};
  return static_cast<unsigned char*>(base) + name.offset;
}

void CudaWindows::close(int device, const WindowName& name) {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find({device, name.allocation});
  if (found == mappings_.end() || --found->second.uses != 0) return;
  const OnDevice on(device);
  const BesideCapture beside;
  std::string unused;  // it is not mapped, whatever was said of it
  cuda_ok(cudaIpcCloseMemHandle(found->second.base), "cudaIpcCloseMemHandle", unused);
  mappings_.erase(found);
}

}  // namespace unjam
