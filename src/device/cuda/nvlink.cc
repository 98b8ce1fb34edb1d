#include "device/cuda/nvlink.h"

#include <dlfcn.h>

#include <string>
#include <vector>

namespace unjam {
namespace {

// The few words of NVML's interface (nvml.h) that this needs. It comes with the driver, whose
// version need not be the toolkit's.
struct NvmlGpu;  // opaque
constexpr int kNvmlSuccess = 0, kP2pThroughNvlink = 2, kP2pStatusOk = 0;

class Nvml {
 public:
  Nvml() : library_(dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    const bool complete = find("nvmlInit_v2", init_) && find("nvmlShutdown", shutdown_) &&
                          find("nvmlDeviceGetCount_v2", count_) &&
                          find("nvmlDeviceGetHandleByIndex_v2", by_index_) &&
                          find("nvmlDeviceGetCudaComputeCapability", capability_) &&
                          find("nvmlDeviceGetP2PStatus", status_);
    begun_ = complete && init_() == kNvmlSuccess;
  }
  ~Nvml() {
    if (begun_) shutdown_();
    if (library_ != nullptr) dlclose(library_);
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;

  bool ok() const { return begun_; }
  unsigned devices() const {
    unsigned n = 0;
    return count_(&n) == kNvmlSuccess ? n : 0;
  }
  NvmlGpu* device(unsigned index) const {
    NvmlGpu* d = nullptr;
    return by_index_(index, &d) == kNvmlSuccess ? d : nullptr;
  }
  // The major number of its compute capability.
  int generation(NvmlGpu* gpu) const {
    int major = 0, minor = 0;
    return capability_(gpu, &major, &minor) == kNvmlSuccess ? major : 0;
  }
  bool linked(NvmlGpu* a, NvmlGpu* b) const {
    int status = -1;
    return status_(a, b, kP2pThroughNvlink, &status) == kNvmlSuccess && status == kP2pStatusOk;
  }

 private:
  template <class Function>
  bool find(const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library_, name));
    return function != nullptr;
  }

  void* library_;
  bool begun_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*by_index_)(unsigned, NvmlGpu**) = nullptr;
  int (*capability_)(NvmlGpu*, int*, int*) = nullptr;
  int (*status_)(NvmlGpu*, NvmlGpu*, int, int*) = nullptr;
};

NvlinkAnswer ask() {
  constexpr int kHopper = 9;
  const Nvml nvml;
  if (!nvml.ok()) return {false, "NVML (libnvidia-ml.so.1) cannot be asked"};
  const unsigned n = nvml.devices();
  if (n < 2) return {false, "NVML knows of " + std::to_string(n) + " GPU"};
  std::vector<NvmlGpu*> gpus;
  for (unsigned i = 0; i < n; ++i) {
    const std::string name = "GPU " + std::to_string(i);
    NvmlGpu* const gpu = nvml.device(i);
    if (gpu == nullptr) return {false, "NVML does not tell of " + name};
    const int generation = nvml.generation(gpu);
    if (generation != kHopper) {
      return {false, name + " has compute capability " + std::to_string(generation) +
                         ".x: only 9.x, H100 and H200, was tested"};
    }
    for (unsigned j = 0; j < i; ++j) {
      if (nvml.linked(gpu, gpus[j]) && nvml.linked(gpus[j], gpu)) continue;
      return {false, name + " has no NVLink to GPU " + std::to_string(j)};
    }
    gpus.push_back(gpu);
  }
  return {true, "NVLink between all " + std::to_string(n) + " GPUs"};
}

}  // namespace

const NvlinkAnswer& nvlink_answer() {
  static const NvlinkAnswer answer = ask();
  return answer;
}

}  // namespace unjam
