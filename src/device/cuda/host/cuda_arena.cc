#include "device/cuda/host/cuda_arena.h"

#include <cuda.h>
#include <unistd.h>

#include <map>
#include <mutex>

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
    for (const auto& [offset, part] : parts_) {
      driver_.unmap(address_ + offset, part.bytes);
      driver_.release(part.handle);
    }
    if (address_ != 0) driver_.free_address(address_, bytes_);
  }

  bool create(int device, std::uint64_t bytes, std::uint64_t base, std::string& error) {
    if (!prepare(device, bytes, error) || !add(0, base, error)) return false;
    const OnDevice on(device);
    return cuda_ok(cudaMemset(data(), 0, base), "cudaMemset", error) &&
           cuda_ok(cudaDeviceSynchronize(), "cudaDeviceSynchronize", error);
  }
  bool reserve(int device, std::uint64_t bytes, std::string& error) {
    return prepare(device, bytes, error);
  }
  bool adopt(int device, int fd, std::uint64_t bytes, std::uint64_t base, std::string& error) {
    if (prepare(device, bytes, error)) return adopt(0, base, fd, error);
    close(fd);
    return false;
  }

  unsigned char* data() const override {
    return reinterpret_cast<unsigned char*>(address_);  // NOLINT(performance-no-int-to-ptr)
  }

  bool add(std::uint64_t offset, std::uint64_t bytes, std::string& error) override {
    const OnDevice on(properties_.location.id);
    const BesideCapture beside;
    // (Another try, of what could not be made accessible.)
    if (is_there(offset)) return map_for(properties_.location.id, offset, error);
    Part part{0, round_up(bytes)};
    if (!driver_.ok(driver_.create(&part.handle, part.bytes, &properties_, 0), "cuMemCreate",
                    error)) {
      error = "cannot allocate " + std::to_string(part.bytes) + " bytes on device " +
              std::to_string(properties_.location.id) + ": " + error;
      return false;
    }
    return map(offset, part, error) && map_for(properties_.location.id, offset, error);
  }

  bool adopt(std::uint64_t offset, std::uint64_t bytes, int fd, std::string& error) override {
    const OnDevice on(properties_.location.id);
    const BesideCapture beside;
    if (is_there(offset)) {
      close(fd);
      return true;
    }
    Part part{0, round_up(bytes)};
    // The driver takes the descriptor itself in the place of a pointer.
    // NOLINTNEXTLINE(performance-no-int-to-ptr)
    void* const shared = reinterpret_cast<void*>(static_cast<std::intptr_t>(fd));
    const bool good =
        driver_.ok(driver_.import(&part.handle, shared, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
                   "cuMemImportFromShareableHandle", error);
    close(fd);
    return good && map(offset, part, error);
  }

  int share(std::uint64_t offset, std::string& error) override {
    const std::lock_guard lock(mutex_);
    int fd = -1;
    if (const Part* const part = find(offset, error)) {
      driver_.ok(driver_.share(&fd, part->handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                 "cuMemExportToShareableHandle", error);
    }
    return fd;
  }

  bool map_for(int device, std::uint64_t offset, std::string& error) override {
    const BesideCapture beside;
    const std::lock_guard lock(mutex_);
    const Part* const part = find(offset, error);
    if (part == nullptr) return false;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    return driver_.ok(driver_.set_access(address_ + offset, part->bytes, &access, 1),
                      "cuMemSetAccess", error);
  }

  std::uint64_t bytes() const override {
    const std::lock_guard lock(mutex_);
    std::uint64_t all = 0;
    for (const auto& [offset, part] : parts_) all += part.bytes;
    return all;
  }

 private:
  struct Part {
    CUmemGenericAllocationHandle handle = 0;
    std::uint64_t bytes = 0;
  };

  bool prepare(int device, std::uint64_t bytes, std::string& error) {
    const OnDevice on(device);
    // Makes the device's context: the driver's functions want one.
    if (!cuda_ok(cudaFree(nullptr), "starting CUDA", error) || !driver_.load(error)) return false;
    properties_.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties_.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    properties_.location.id = device;
    properties_.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (!driver_.ok(driver_.granularity(&unit_, &properties_, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                    "cuMemGetAllocationGranularity", error)) {
      return false;
    }
    bytes_ = bytes;
    if (bytes % unit_ != 0) {
      error = "the driver hands out memory in units of " + std::to_string(unit_) +
              " bytes, which arenas are not made of";
      return false;
    }
    if (driver_.ok(driver_.reserve(&address_, bytes_, 0, 0, 0), "cuMemAddressReserve", error)) {
      return true;
    }
    address_ = 0;
    error = "cannot reserve " + std::to_string(bytes_) + " bytes of addresses: " + error;
    return false;
  }
  // With the lock. Null: `error`.
  const Part* find(std::uint64_t offset, std::string& error) const {
    const auto part = parts_.find(offset);
    if (part != parts_.end()) return &part->second;
    error = "nothing was added there";
    return nullptr;
  }
  bool is_there(std::uint64_t offset) const {
    const std::lock_guard lock(mutex_);
    return parts_.count(offset) != 0;
  }
  std::uint64_t round_up(std::uint64_t bytes) const { return (bytes + unit_ - 1) / unit_ * unit_; }
  // Takes the handle in any case.
  bool map(std::uint64_t offset, const Part& part, std::string& error) {
    const std::lock_guard lock(mutex_);
    const bool fits = offset % unit_ == 0 && offset + part.bytes <= bytes_;
    if (!fits) error = "a part of " + std::to_string(part.bytes) + " bytes does not fit there";
    if (fits && driver_.ok(driver_.map(address_ + offset, part.bytes, 0, part.handle, 0),
                           "cuMemMap", error)) {
      parts_[offset] = part;
      return true;
    }
    driver_.release(part.handle);
    return false;
  }

  Driver driver_;
  CUmemAllocationProp properties_{};
  std::size_t unit_ = 1;
  CUdeviceptr address_ = 0;
  std::uint64_t bytes_ = 0;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, Part> parts_;  // by offset
};

}  // namespace

std::unique_ptr<DeviceArena> create_cuda_arena(int device, std::uint64_t bytes, std::uint64_t base,
                                               std::string& error) {
  auto arena = std::make_unique<CudaArena>();
  if (!arena->create(device, bytes, base, error)) return nullptr;
  return arena;
}

std::unique_ptr<DeviceArena> reserve_cuda_arena(int device, std::uint64_t bytes,
                                                std::string& error) {
  auto arena = std::make_unique<CudaArena>();
  if (!arena->reserve(device, bytes, error)) return nullptr;
  return arena;
}

std::unique_ptr<DeviceArena> adopt_cuda_arena(int device, int fd, std::uint64_t bytes,
                                              std::uint64_t base, std::string& error) {
  auto arena = std::make_unique<CudaArena>();
  if (!arena->adopt(device, fd, bytes, base, error)) return nullptr;
  return arena;
}

}  // namespace unjam
