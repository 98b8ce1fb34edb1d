// From a plan's schedule to one call of it: what the call's buffers, alignment and operator say.
// Lanes, flags and where the ranks' memory is RankMemory::address() fills in; CudaDaemon::prepare()
// calls both. Allocates nothing.
#pragma once

#include <cstdint>

#include "base/types.h"
#include "device/cuda/dev/stream_call.h"
#include "engine/invocation.h"
#include "plan/lower.h"

namespace unjam {

// Whether every address in the call is a whole unit's, and its sums are common ones. (Lanes'
// stretches begin on pieces of 16 bytes.)
inline bool is_plain(const Lowered& lowered, const Invocation& inv) {
  const auto bits =
      reinterpret_cast<std::uintptr_t>(inv.input) | reinterpret_cast<std::uintptr_t>(inv.output);
  return lowered.is_even && bits % kStreamCallUnitBytes == 0 &&
         (!lowered.schedule.reduces || is_common_sum(inv.geometry.dtype, inv.op));
}

// Whether the own block of the input lies where the output has it.
inline bool is_in_place(const Invocation& inv) {
  const Range own = inv.geometry.part(inv.geometry.blocked() ? inv.group_rank : 0u);
  return inv.input_at(own.offset) == inv.output_at(own.offset);
}

// `lowered` must be. Leaves `call.lanes` to who knows whether the call may go without the engine.
inline void bind(const Lowered& lowered, const Invocation& inv, StreamCall& call) {
  call = StreamCall{};  // of the call before
  static_cast<Schedule&>(call) = lowered.schedule;
  if (call.by_slots) {
    SlotSteps& steps = call.steps;
    if (steps.copies || steps.stores_sent) {
      // In place there is nothing to copy. Elsewhere blocks copy, and move what is sent, too.
      const bool in_place = is_in_place(inv);
      steps.copies = steps.copies && !in_place;
      steps.carried = steps.carried && in_place;
    }
    return;
  }
  call.plain = is_plain(lowered, inv);
  if (!call.two_hops || !call.plain) return;
  // Parts that are alike are blocks.
  call.block_bytes /= call.places;
  call.own_from = call.received_to = call.place * call.block_bytes;
  call.scatters = call.collects = true;
}

// Invocation::batch, of a call that has lanes. (Reductions of rare types want more memory of a
// thread than kernels have, see tools/ptxas_report.py.)
inline std::uint8_t batch_of(const Lowered& lowered, const StreamCall& call) {
  if (call.lanes == 0) return 0;
  if (call.two_hops) return call.plain ? kBatchTwoHops : std::uint8_t{0};
  if (call.by_slots) return lowered.if_contended ? kPipelinedIfContended : kPipelined;
  const bool common = call.plain || !call.reduces;
  return common ? static_cast<std::uint8_t>(call.before + 1) : std::uint8_t{0};
}

}  // namespace unjam
