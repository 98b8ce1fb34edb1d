// A call in a stream, as a kernel: it brings its invocation, tries it without the engine
// (call_in_stream.cuh), and what cannot be done so it serves as an engine until it has ended. Who
// else is one, and when who leaves: engine.cu.
#include "device/cuda/kernels/call_by_engine.cuh"
#include "device/cuda/kernels/call_by_packets.cuh"
#include "device/cuda/kernels/call_by_slots.cuh"

namespace unjam {

// Blocks as unjam_engine_kernel's. One of them, whichever, goes on to serve where the lanes were
// not done at once.
__global__ void __launch_bounds__(512, 1)
    unjam_call_kernel(CudaRank* rank, const __grid_constant__ CudaLaunch launch) {
  UNJAM_DYNAMIC_SHARED(engine_shared);
  alignas(16) __shared__ unsigned char dev_shared[sizeof(DevShared)];
  CudaRank& r = *rank;
  const bool without_engine = launch.call.lanes != 0;
  bool serves = without_engine;
  if (without_engine && launch.call.by_slots) {
    const SlotRunEnd end = run_by_slots<in_stream::SlotCall>(r, launch, engine_shared);
    if (end == SlotRunEnd::kLeaves) return;
    wait_for_stream();  // a close call may not have had its turn, see overlap_rule.h
    serves = end == SlotRunEnd::kServes;
  } else if (without_engine) {
    if (!(launch.call.two_hops ? run_by_packets<2>(r, launch) : run_by_packets<1>(r, launch)))
      return;
  } else {
    wait_for_stream();
  }
  call_by_engine(r, launch, without_engine, serves, engine_shared, dev_shared);
}

const void* call_kernel() { return reinterpret_cast<const void*>(&unjam_call_kernel); }

}  // namespace unjam
