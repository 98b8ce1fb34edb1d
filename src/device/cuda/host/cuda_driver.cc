// The factory of libunjam_cuda.so: CUDA devices as libunjam.so sees them.
#include "engine/cuda_driver.h"

#include <cstdlib>

#include "device/cuda/host/cuda_arena.h"
#include "device/cuda/host/cuda_daemon.h"
#include "device/cuda/host/cuda_error.h"
#include "device/cuda/host/cuda_windows.h"
#include "device/cuda/host/nvlink.h"

namespace unjam {
namespace {

class Driver : public CudaDriver {
 public:
  Driver() {
    // Only if CUDA has not started in this process: it reads this once. With the default of 8,
    // eight waiting streams with work behind them stop all others (docs/environment.md).
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  }

  int devices(std::string& why) override {
    int count = 0;
    return cuda_ok(cudaGetDeviceCount(&count), "cudaGetDeviceCount", why) ? count : 0;
  }
  int current() override {
    int device = 0;
    cudaGetDevice(&device);
    return device;
  }
  std::string name(int device) override {
    cudaDeviceProp properties{};
    return cudaGetDeviceProperties(&properties, device) == cudaSuccess ? properties.name : "";
  }

  int sms(int device) override {
    int count = 0;
    const cudaError_t code = cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (code == cudaSuccess) return count;
    cudaGetLastError();  // it is not the caller's
    return 0;
  }

  bool lines_come_whole() override { return nvlink_answer().whole_lines; }

  std::unique_ptr<DeviceArena> create_arena(int device, std::uint64_t bytes, std::uint64_t base,
                                            std::string& error) override {
    return create_cuda_arena(device, bytes, base, error);
  }
  std::unique_ptr<DeviceArena> adopt_arena(int device, int fd, std::uint64_t bytes,
                                           std::uint64_t base, std::string& error) override {
    return adopt_cuda_arena(device, fd, bytes, base, error);
  }
  bool register_host(void* memory, std::uint64_t bytes, std::string& error) override {
    return cuda_ok(
        cudaHostRegister(memory, bytes, cudaHostRegisterPortable | cudaHostRegisterMapped),
        "cudaHostRegister", error);
  }
  void unregister_host(void* memory) override { cudaHostUnregister(memory); }
  std::uint64_t engine_bytes(const CudaRankOptions& options) override {
    return cuda_engine_bytes(options);
  }

  bool check_window(int device, const void* memory, std::uint64_t bytes,
                    std::string& error) override {
    return CudaWindows::check(device, memory, bytes, error);
  }
  bool name_window(int device, const void* memory, WindowName& name, std::string& error) override {
    return CudaWindows::name(device, memory, name, error);
  }
  bool reach(int device, int other, std::string& error) override {
    return CudaWindows::reach(device, other, error);
  }
  unsigned char* open_window(int device, const WindowName& name, std::string& error) override {
    return windows_.open(device, name, error);
  }
  void close_window(int device, const WindowName& name) override { windows_.close(device, name); }

  std::unique_ptr<StreamDaemon> start(const CudaRankOptions& options, RankState& copy,
                                      std::string& error) override {
    return start_cuda_rank(options, copy, error);
  }

 private:
  CudaWindows windows_;
};

}  // namespace
}  // namespace unjam

extern "C" __attribute__((visibility("default"))) unjam::CudaDriver* unjam_cuda_driver(
    int version) {
  // Never destroyed: what is mapped may be closed by who outlives static objects.
  static auto* const driver = new unjam::Driver;
  return version == unjam::kCudaDriverVersion ? driver : nullptr;
}
