// What a lane does for calls that go through slots, by its engine: as calls.cuh has it of one, of
// several calls with the same members and hops (docs/internals/batches.md). Each hop takes the
// first of them that has what its next chunk needs. The first warp alone counts what movers have
// moved, and says so to the second warp:
//   done    of a call's hop; release: with what it has acquired of movers
//   events  counts those, so that the second warp looks at calls only when there is news
// And the second warp to the first, both hints: which calls have `ended`, and whether what was
// moved lasts (`went_on`). Of a call that was left, `behind` of each hop are chunks that nobody
// moves again. Slots are each connector's own; a call that is alone, and begins, borrows others.
#pragma once

#include "device/cuda/exec/several_calls.cuh"
#include "device/cuda/exec/slots/calls.cuh"

namespace unjam {
namespace in_stream {

struct BatchSlotCall : SlotCallState {
  std::uint32_t behind[kSlotSteps];  // as it was left
  std::uint32_t next[kSlotSteps];    // chunks that were given
  std::uint32_t done[kSlotSteps];    // and moved
  // What the first warp's threads know that have left the call for others: see steer_several().
  std::uint32_t watched[kWatches][kStreamCallRanks];
  std::uint64_t heard[kSlotSteps][kStreamCallRanks];
  __device__ __forceinline__ bool begins() const {
    return (behind[kSends] | behind[kGathers] | behind[kCollects]) == 0;
  }
};
struct PipelinedBatch {
  SlotShared slots;
  BatchSlotCall calls[kMostInBatch];  // by their entries in BatchCalls
  std::uint32_t num_calls;
  std::uint32_t entries[kMostInBatch];                   // of those that go together
  std::uint32_t given_of[kSlotSteps * kInHand];          // whose slice a description is
  std::uint32_t to[kMostInBatch][2 * kStreamCallRanks];  // of who publishes
  std::uint32_t events;
  std::uint32_t total[kSlotSteps];  // chunks of all that go together, see steer_several()
  bool borrows;                     // it is one call, from the beginning: as without an engine
  Descriptions descriptions;        // as all of them have them
  std::uint32_t patient;            // calls, as bits: worth a longer wait
  std::uint32_t ended;              // calls, as bits, of which all is told; the second warp's
  // Calls, as bits: those whose connectors are there, and of these such as can do something at
  // once.
  std::uint32_t there, ready;
  std::uint32_t went_on;  // something was moved that is not forgotten; the second warp's
  // See BatchDev::Interrupts: how the calls end that are not done, or BatchEnd::kDone.
  BatchEnd interrupted;
  std::uint64_t turn_ns, looked_ns;
};
alignas(16) __shared__ unsigned char pipelined_batch_bytes[sizeof(PipelinedBatch)];
__device__ __forceinline__ PipelinedBatch& pipelined_batch() {
  return *reinterpret_cast<PipelinedBatch*>(pipelined_batch_bytes);
}
// In BatchCalls' order.
__device__ __forceinline__ SlotCall slot_call_of(const LaneTransport& t, std::uint32_t entry) {
  PipelinedBatch& x = pipelined_batch();
  return {batch_calls().call[entry], batch_calls().inv[entry], t, x.slots, x.calls[entry]};
}

// Whether hops have the same peers, and are as far apart.
__device__ __forceinline__ bool go_together(const StreamCall& a, const StreamCall& b) {
  const SlotSteps &x = a.steps, &y = b.steps;
  bool same = a.places == b.places && a.place == b.place;
  for (std::uint32_t q = 0; q < kStreamCallRanks; ++q) same = same && a.members[q] == b.members[q];
  return same && x.sends_to == y.sends_to && x.gathers_from == y.gathers_from &&
         x.results_to == y.results_to && x.collects_from == y.collects_from &&
         x.scatters == y.scatters && x.reduces == y.reduces && x.sums == y.sums &&
         x.stores_sent == y.stores_sent && x.stores_result == y.stores_result && x.lag == y.lag &&
         x.tuning == y.tuning;
}

}  // namespace in_stream
}  // namespace unjam
