#include "device/cuda/nvlink.h"

#include <dlfcn.h>

#include <string>

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
                          find("nvmlDeviceGetHandleByPciBusId_v2", by_address_) &&
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
  NvmlGpu* device(const std::string& address) const {
    NvmlGpu* d = nullptr;
    return by_address_(address.c_str(), &d) == kNvmlSuccess ? d : nullptr;
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
  int (*by_address_)(const char*, NvmlGpu**) = nullptr;
  int (*status_)(NvmlGpu*, NvmlGpu*, int, int*) = nullptr;
};

}  // namespace

bool nvlink_everywhere(const std::string& pci_address, std::string& why) {
  const Nvml nvml;
  if (!nvml.ok()) {
    why = "NVML (libnvidia-ml.so.1) cannot be asked";
    return false;
  }
  NvmlGpu* const own = nvml.device(pci_address);
  if (own == nullptr) {
    why = "NVML does not know the GPU at " + pci_address;
    return false;
  }
  unsigned others = 0;
  for (unsigned i = 0; i < nvml.devices(); ++i) {
    NvmlGpu* const other = nvml.device(i);
    if (other == own) continue;
    ++others;
    if (other != nullptr && nvml.linked(own, other)) continue;
    why = "the GPU at " + pci_address + " has no NVLink to GPU " + std::to_string(i) +
          " of the machine";
    return false;
  }
  why = others == 0 ? "NVML knows of no other GPU"
                    : "NVLink to all " + std::to_string(others) + " others";
  return others != 0;
}

}  // namespace unjam
