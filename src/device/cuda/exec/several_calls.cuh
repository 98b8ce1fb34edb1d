// Several calls that a block of the engine does together: what calls in streams have as their
// kernel's arguments, in the block's shared memory.
#pragma once

#include "device/cuda/exec/packets/look.cuh"

namespace unjam {

inline constexpr std::uint32_t kCallWatchers =
    16;  // threads of the first warp, see in_stream::Member
static_assert(kCallWatchers == 2 * kStreamCallRanks);

// What the engine has as a kernel's arguments for calls without it, in shared memory, of a block.
struct BatchCalls {
  StreamCall call[kMostInBatch];
  Invocation inv[kMostInBatch];
  in_stream::Shared shared[kMostInBatch];
  in_stream::Known known[kMostInBatch][kCallWatchers];
  BatchWay how[kMostInBatch];
  std::uint32_t come[kMostInBatch];
  std::uint32_t gathered[kMostInBatch];  // of two hops: the first has come, now
  std::uint32_t looked;
  std::uint32_t looked_again;
  std::uint32_t received;
  std::uint32_t to_poke[kRankWords];  // ranks, as bits

  // What call i sends, and receives: packets that each peer is still sent, and so many from it.
  __device__ __forceinline__ std::uint32_t to_send(std::uint32_t i) const {
    if (!call[i].two_hops) return 1;
    return how[i] == BatchWay::kAll ? 2 : how[i] == BatchWay::kReceiving ? 1 : 0;
  }
  __device__ __forceinline__ std::uint32_t to_take(std::uint32_t i) const {
    return call[i].two_hops && how[i] != BatchWay::kCollecting ? 2 : 1;
  }
  // And what it has.
  __device__ __forceinline__ std::uint32_t sent(std::uint32_t i) const {
    if (!call[i].two_hops) return 1;
    return (how[i] == BatchWay::kAll ? 1 : 0) + gathered[i];
  }
  __device__ __forceinline__ std::uint32_t taken(std::uint32_t i) const {
    return come[i] != 0 ? to_take(i) : gathered[i];
  }
};
// (Raw: shared variables have no constructors. At one known address: in registers of functions that
// move data there is no room for pointers to it.)
alignas(16) __shared__ unsigned char batch_calls_bytes[sizeof(BatchCalls)];
__device__ __forceinline__ BatchCalls& batch_calls() {
  return *reinterpret_cast<BatchCalls*>(batch_calls_bytes);
}

// By all threads: what the calls' descriptions are. A barrier follows.
__device__ __forceinline__ void fetch_calls(CudaRank& r, const BatchEntry* tries, std::uint32_t n) {
  BatchCalls& x = batch_calls();
  constexpr std::uint32_t kCall = sizeof(StreamCall) / sizeof(uint4);
  constexpr std::uint32_t kAll = kCall + sizeof(Invocation) / sizeof(uint4);
  for (std::uint32_t k = threadIdx.x; k < n * kAll; k += blockDim.x) {
    const std::uint32_t i = k / kAll, v = k % kAll, slot = tries[i].slot;
    const bool of_call = v < kCall;
    const auto* from = of_call
                           ? reinterpret_cast<const uint4*>(&r.calls[slot]) + v
                           : reinterpret_cast<const uint4*>(&r.rank.invocations[slot]) + v - kCall;
    auto* to = of_call ? reinterpret_cast<uint4*>(&x.call[i]) + v
                       : reinterpret_cast<uint4*>(&x.inv[i]) + v - kCall;
    *to = *from;
  }
}

}  // namespace unjam
