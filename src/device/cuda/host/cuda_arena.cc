#include "device/cuda/host/cuda_arena.h"

#include <cuda.h>
#include <unistd.h>

#include <vector>

#include "device/cuda/host/cuda_error.h"

namespace unjam {
namespace {

// The driver's functions, found at run time: libunjam_cuda.so loads without a driver.
struct Driver {
  decltype(&cuMemGetAllocationGranularity) granularity = nullptr;
  decltype(&cuMemCreate) create = nullptr;
  decltype(&cuMemRelease) release = nullptr;
  decltype(&cuMemAddressReserve) reserve = nullptr;
  decltype(&cuMemAddressFree) free_address = nullptr;
  decltype(&cuMemMap) map = nullptr;
  decltype(&cuMemUnmap) unmap = nullptr;
  decltype(&cuMemSetAccess) set_access = nullptr;
  decltype(&cuMemExportToShareableHandle) share = nullptr;
  decltype(&cuMemImportFromShareableHandle) import = nullptr;
  decltype(&cuGetErrorString) error_string = nullptr;

  bool load(std::string& error) {
    const auto find = [&](const char* name, auto& place) {
      void* found = nullptr;
      cudaDriverEntryPointQueryResult how{};
      if (!cuda_ok(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &how),
                   name, error)) {
        return false;
      }
      if (found == nullptr) error = std::string("the driver has no ") + name;
      place = reinterpret_cast<std::remove_reference_t<decltype(place)>>(found);
      return found != nullptr;
    };
    return find("cuMemGetAllocationGranularity", granularity) && find("cuMemCreate", create) &&
           find("cuMemRelease", release) && find("cuMemAddressReserve", reserve) &&
           find("cuMemAddressFree", free_address) && find("cuMemMap", map) &&
           find("cuMemUnmap", unmap) && find("cuMemSetAccess", set_access) &&
           find("cuMemExportToShareableHandle", share) &&
           find("cuMemImportFromShareableHandle", import) && find("cuGetErrorString", error_string);
  }
  bool ok(CUresult code, const char* what, std::string& error) const {
    if (code == CUDA_SUCCESS) return true;
    const char* text = nullptr;
    error_string(code, &text);
    error = std::string(what) + ": " + (text == nullptr ? "unknown error" : text);
    return false;
  }
};

class CudaArena : public DeviceArena {
 public:
  ~CudaArena() override {
    if (mapped_) driver_.unmap(address_, bytes_);
    if (address_ != 0) driver_.free_address(address_, bytes_);
    if (handle_known_) driver_.release(handle_);
  }

  bool create(int device, std::uint64_t bytes, std::string& error) {
    if (!prepare(bytes, device, error)) return false;
    if (!driver_.ok(driver_.create(&handle_, bytes_, &properties_, 0), "cuMemCreate", error)) {
      error = "cannot allocate " + std::to_string(bytes_) + " bytes on device " +
              std::to_string(device) + ": " + error;
      return false;
    }
    handle_known_ = true;
    if (!map(error) || !map_for(device, error)) return false;
    const OnDevice on(device);
    return cuda_ok(cudaMemset(data(), 0, bytes), "cudaMemset", error) &&
           cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize", error);
  }

  bool adopt(int device, int fd, std::uint64_t bytes, std::string& error) {
    const bool good =
        prepare(bytes, device, error) &&
        // The driver takes the descriptor itself in the place of a pointer.
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        driver_.ok(driver_.import(&handle_, reinterpret_cast<void*>(static_cast<std::intptr_t>(fd)),
                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                   "cuMemImportFromShareableHandle", error);
    close(fd);
    handle_known_ = good;
    return good && map(error);
  }

  unsigned char* data() const override {
    return reinterpret_cast<unsigned char*>(address_);  // NOLINT(performance-no-int-to-ptr)
  }

  int share(std::string& error) override {
    int fd = -1;
    driver_.ok(driver_.share(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
               "cuMemExportToShareableHandle", error);
    return fd;
  }

  bool map_for(int device, std::string& error) override {
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_.ok(driver_.set_access(address_, bytes_, &access, 1), "cuMemSetAccess", error);
  }

 private:
  bool prepare(std::uint64_t bytes, int device, std::string& error) {
    const OnDevice on(device);
    // Makes the device's context: the driver's functions want one.
    if (!cuda_ok(cudaFree(nullptr), "starting CUDA", error) || !driver_.load(error)) return false;
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device;
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    std::size_t unit = 0;
    if (!driver_.ok(driver_.granularity(&unit, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                    "cuMemGetAllocationGranularity", error)) {
      return false;
    }
    bytes_ = (bytes + unit - 1) / unit * unit;
    return true;
  }
  bool map(std::string& error) {
    if (!driver_.ok(driver_.reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve", error)) {
      address_ = 0;
      return false;
    }
    mapped_ = driver_.ok(driver_.map(address_, bytes_, 0, handle_, 0), "cuMemMap", error);
    return mapped_;
  }

  Driver driver_;
  CUmemAllocationProp properties_{};
  CUmemGenericAllocationHandle handle_ = 0;
  bool handle_known_ = false;
  CUdeviceptr address_ = 0;
  std::uint64_t bytes_ = 0;
  bool mapped_ = false;
};

}  // namespace

std::unique_ptr<DeviceArena> create_cuda_arena(int device, std::uint64_t bytes,
                                               std::string& error) {
  auto arena = std::make_unique<CudaArena>();
  if (!arena->create(device, bytes, error)) return nullptr;
  return arena;
}

std::unique_ptr<DeviceArena> adopt_cuda_arena(int device, int fd, std::uint64_t bytes,
                                              std::string& error) {
  auto arena = std::make_unique<CudaArena>();
  if (!arena->adopt(device, fd, bytes, error)) return nullptr;
  return arena;
}

}  // namespace unjam
