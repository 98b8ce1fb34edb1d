#include "device/cuda/host/nvlink.h"

#include <dlfcn.h>

#include <string>
#include <utility>
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
    const bool complete =
        find("nvmlInit_v2", init_) && find("nvmlShutdown", shutdown_) &&
        find("nvmlDeviceGetCount_v2", count_) && find("nvmlDeviceGetHandleByIndex_v2", by_index_) &&
        find("nvmlDeviceGetName", name_) && find("nvmlDeviceGetP2PStatus", status_);
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
  // As nvidia-smi prints it.
  std::string name(NvmlGpu* gpu) const {
    char text[96] = {};
    return name_(gpu, text, sizeof(text)) == kNvmlSuccess ? text : "";
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
  int (*name_)(NvmlGpu*, char*, unsigned) = nullptr;
  int (*status_)(NvmlGpu*, NvmlGpu*, int, int*) = nullptr;
};

NvlinkAnswer ask() {
  const Nvml nvml;
  if (!nvml.ok()) return {false, "NVML (libnvidia-ml.so.1) cannot be asked"};
  std::vector<NvmlGpu*> handles;
  std::vector<SeenGpu> gpus;
  for (unsigned i = 0; i < nvml.devices(); ++i) {
    NvmlGpu* const gpu = nvml.device(i);
    if (gpu == nullptr) return {false, "NVML does not tell of GPU " + std::to_string(i)};
    SeenGpu seen{nvml.name(gpu), {}};
    for (NvmlGpu* const other : handles) {
      seen.linked.push_back(nvml.linked(gpu, other) && nvml.linked(other, gpu));
    }
    handles.push_back(gpu);
    gpus.push_back(std::move(seen));
  }
  return judge_links(gpus);
}

}  // namespace

const NvlinkAnswer& nvlink_answer() {
  static const NvlinkAnswer answer = ask();
  return answer;
}

}  // namespace unjam
