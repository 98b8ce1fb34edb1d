// As call.cu, of calls some of whose slices copy engines move (exec/slots/carry.cuh): a kernel of
// its own, for all others would pay for what this one asks at each slice.
#include "device/cuda/kernels/call_by_engine.cuh"
#include "device/cuda/kernels/call_by_slots.cuh"

namespace unjam {

// The call has lanes, and is by slots.
__global__ void __launch_bounds__(512, 1)
    unjam_carried_call_kernel(CudaRank* rank, const __grid_constant__ CudaLaunch launch) {
  UNJAM_DYNAMIC_SHARED(engine_shared);
  alignas(16) __shared__ unsigned char dev_shared[sizeof(DevShared)];
  CudaRank& r = *rank;
  const SlotRunEnd end = run_by_slots<in_stream::CarriedSlotCall>(r, launch, engine_shared);
  if (end == SlotRunEnd::kLeaves) return;
  wait_for_stream();  // as in call.cu
  call_by_engine(r, launch, /*without_engine=*/true, end == SlotRunEnd::kServes, engine_shared,
                 dev_shared);
}

const void* carried_call_kernel() {
  return reinterpret_cast<const void*>(&unjam_carried_call_kernel);
}

}  // namespace unjam
