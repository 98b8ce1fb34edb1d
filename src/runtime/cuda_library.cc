#include "runtime/cuda_library.h"

#include <dlfcn.h>

#include <mutex>

#include "base/fork_guard.h"

namespace unjam {
namespace {

struct Library {
  std::mutex mutex;
  CudaDriver* driver = nullptr;
  bool has_devices = false;
};

// The directory of the library (or program) that this function is in, with the last "/".
std::string own_directory() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&own_directory), &info) == 0 || info.dli_fname == nullptr) {
    return "";
  }
  const std::string path = info.dli_fname;
  const auto slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

// With the lock.
CudaDriver* load(Library& library, std::string& error) {
  if (library.driver != nullptr) return library.driver;
  const std::string path = own_directory() + "libunjam_cuda.so";
  void* handle = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* why = dlerror();
    error = std::string("the CUDA device needs libunjam_cuda.so beside libunjam.so: ") +
            (why == nullptr ? "" : why) +
            ". Build unjam where nvcc 13 is found, or use the host device (UNJAM_DEVICE=host)";
    return nullptr;
  }
  const auto factory = reinterpret_cast<CudaDriverFactory>(dlsym(handle, kCudaDriverFactory));
  CudaDriver* driver = factory == nullptr ? nullptr : factory(kCudaDriverVersion);
  if (driver == nullptr) {
    error = path + " belongs to another version of unjam: install both libraries together";
    return nullptr;
  }
  return library.driver = driver;
}

}  // namespace

CudaDriver* cuda_driver_alone(std::string& error) {
  Library& library = per_process<Library>();  // CUDA does not survive a fork()
  std::lock_guard lock(library.mutex);
  return load(library, error);
}

CudaDriver* cuda_driver(std::string& error) {
  Library& library = per_process<Library>();
  std::lock_guard lock(library.mutex);
  CudaDriver* const driver = load(library, error);
  if (driver == nullptr || library.has_devices) return driver;
  if (driver->devices(error) == 0) {
    error =
        "there is no CUDA device: " + error +
        ". It takes an NVIDIA GPU that this process sees (CUDA_VISIBLE_DEVICES) and a driver for "
        "CUDA 13; without, use the host device (UNJAM_DEVICE=host)";
    return nullptr;
  }
  library.has_devices = true;
  return driver;
}

void replace_cuda_driver(CudaDriver* driver) {
  Library& library = per_process<Library>();
  std::lock_guard lock(library.mutex);
  library.driver = driver;
  library.has_devices = false;
}

}  // namespace unjam
