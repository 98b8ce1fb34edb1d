#include "device/cuda/host/kernel_launcher.h"

#include <array>

#include "device/cuda/host/cuda_error.h"
#include "device/cuda/kernels/kernels.h"
#include "device/cuda/placement/lane_placement.h"

namespace unjam {
namespace {

// Blocks of a call in a stream that the device begins together, in one GPC: large calls are faster
// so, and less with 8. SMs of those that have ended are free,
// whoever of the cluster goes on: what waits in a stream still holds one. Not a daemon's, which may
// find few SMs free, and those anywhere, and must begin all the same: lane_placement.h.
constexpr unsigned kCluster = 4;

cudaLaunchAttribute clusters_of(unsigned blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim = {blocks, 1, 1};
  return attribute;
}

// Of memory that a kernel's threads have for themselves, before it is launched: a launch that
// wants more than there is waits for all that runs, which may wait for it. (Kernels want less
// than CUDA has at first, see tools/ptxas_report.py.)
bool make_room(const cudaFuncAttributes& kernel, std::string& error) {
  std::size_t there = 0;
  return cuda_ok(cudaDeviceGetLimit(&there, cudaLimitStackSize), "the stack of threads", error) &&
         (there >= kernel.localSizeBytes ||
          cuda_ok(cudaDeviceSetLimit(cudaLimitStackSize, kernel.localSizeBytes),
                  "making room for the stack of threads", error));
}
bool let_share(const void* kernel, std::string& error) {
  return cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(kEngineSharedBytes)),
                 "loading kernels", error);
}

}  // namespace

bool KernelLauncher::count_blocks(const void* kernel, KernelResources& of,
                                  std::string& error) const {
  return cuda_ok(
      cudaOccupancyMaxActiveBlocksPerMultiprocessor(
          &of.blocks_per_sm, kernel, static_cast<int>(o_.block_threads), kEngineSharedBytes),
      "measuring the kernel", error);
}

bool KernelLauncher::load(std::string& error) {
  cudaFuncAttributes unused{};
  cudaDeviceProp properties{};
  if (!cuda_ok(cudaGetDeviceProperties(&properties, o_.device), "reading the device", error) ||
      !cuda_ok(cudaFuncGetAttributes(&engine_.attributes, engine_kernel()), "loading kernels",
               error) ||
      !cuda_ok(cudaFuncGetAttributes(&call_.attributes, call_kernel()), "loading kernels", error) ||
      !cuda_ok(cudaFuncGetAttributes(&unused, mark_kernel()), "loading kernels", error) ||
      !cuda_ok(cudaFuncGetAttributes(&unused, end_kernel()), "loading kernels", error) ||
      !make_room(engine_.attributes, error) || !make_room(call_.attributes, error) ||
      !let_share(engine_kernel(), error) || !let_share(call_kernel(), error) ||
      (o_.copies && !load_carried(error)) || !count_blocks(engine_kernel(), engine_, error) ||
      !count_blocks(call_kernel(), call_, error)) {
    return false;
  }
  name_ = properties.name;
  // What was compiled for older devices has no instruction that waits for the stream, wherever it
  // runs.
  early_ = properties.major >= 9 && engine_.attributes.binaryVersion >= 90 &&
           engine_.attributes.ptxVersion >= 90;
  // (Ranks that share the device have lanes for which SMs are there, wherever they are free.)
  const bool by_place = !o_.shares_device && properties.major >= 9 && clusters_fit();
  if (by_place) cluster_ = kCluster;
  const bool chooses = by_place && properties.major == 9 && lanes_have_sms(o_.shape.lanes);
  daemon_blocks_ = chooses ? kChoosingBlocks : o_.shape.lanes;
  return true;
}

bool KernelLauncher::load_carried(std::string& error) const {
  cudaFuncAttributes attributes{};
  return cuda_ok(cudaFuncGetAttributes(&attributes, carried_call_kernel()), "loading kernels",
                 error) &&
         make_room(attributes, error) && let_share(carried_call_kernel(), error);
}
// Whether all blocks of a call may be there at once, in clusters, beside a daemon's and some that
// wait. (Not on small devices, or partitions.)
bool KernelLauncher::clusters_fit() const {
  cudaLaunchAttribute attribute = clusters_of(kCluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCluster);
  config.blockDim = dim3(o_.block_threads);
  config.dynamicSmemBytes = kEngineSharedBytes;
  config.attrs = &attribute;
  config.numAttrs = 1;
  int clusters = 0;
  if (cudaOccupancyMaxActiveClusters(&clusters, call_kernel(), &config) != cudaSuccess) {
    cudaGetLastError();  // then without
    return false;
  }
  constexpr unsigned kWaits = 8;
  return kCluster * static_cast<unsigned>(clusters) >= 2 * o_.shape.lanes + kWaits;
}

bool KernelLauncher::launch(const void* kernel, unsigned blocks, unsigned threads, void** arguments,
                            cudaStream_t stream, const char* what, std::string& error, bool early,
                            unsigned cluster) {
  std::array<cudaLaunchAttribute, 2> attributes{};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) attributes[count++] = clusters_of(cluster);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  const bool is_engine =
      kernel == engine_kernel() || kernel == call_kernel() || kernel == carried_call_kernel();
  config.dynamicSmemBytes = is_engine ? kEngineSharedBytes : 0;
  config.stream = stream;
  config.attrs = attributes.data();
  config.numAttrs = count;
  const std::unique_lock first = first_launch_.guard(stream);
  return cuda_ok(cudaLaunchKernelExC(&config, kernel, arguments), what, error);
}

}  // namespace unjam
