// Calls through slots by a lane's engine (docs/internals/batches.md), as exec/slots/several.cuh
// has it: which of them go together, where they were left, and how they have ended.
#pragma once

#include "device/cuda/exec/slots/count.cuh"
#include "device/cuda/exec/slots/move.cuh"
#include "device/cuda/exec/slots/publish_several.cuh"
#include "device/cuda/exec/slots/steer_several.cuh"

namespace unjam {
namespace in_stream {

inline constexpr std::uint32_t kAlonePatienceNs = 50000;  // where a call is alone, and begins

// ---- before ----

// By a warp: where a call's slices lie, and whether there is something to do about them.
__device__ __forceinline__ void look_at_slot_call(const SlotCall& c, BatchSlotCall& of,
                                                  const BatchEntry& t, std::uint32_t entry) {
  constexpr std::uint32_t kWarp = 0xffffffff;
  PipelinedBatch& x = pipelined_batch();
  const SlotSteps& steps = c.call.steps;
  const std::uint32_t thread = threadIdx.x % 32, chunks = c.call.chunks_of_all();
  if (thread < kSlotSteps) {
    const std::uint32_t done = c.has(thread) ? t.done[steps.primitives[thread]] : 0;
    of.behind[thread] = of.next[thread] = of.done[thread] = done;
  }
  __syncwarp();
  const Member m = member_of(c.call, {nullptr, nullptr, 1, 1}, thread);
  const HopOrder order = c.order();
  bool ok = true;
  // Hints: what is found is looked at again, with acquire.
  bool lacks[kSlotSteps] = {};
  if (m.part == kOutgoing && c.sends_to(m.q)) {
    const OutEndpoint& out = *out_endpoint(c.call, m, c.transport.lane);
    ok = out.connector != kNoConnector;
    Wire wire = c.transport.wire(out);
    const std::uint32_t sent = c.prefix_to(m.q, of.behind);
    wire.count -= sent;
    of.outs[m.q] = wire;
    of.sent[m.q] = sent;
    const bool sends = has_member(steps.sends_to, m.q) && of.behind[kSends] != chunks;
    const bool results = has_member(steps.results_to, m.q) && of.behind[kGathers] != chunks;
    const std::uint64_t first = wire.count + order.first(of.behind[kSends]),
                        second = wire.count + order.second(of.behind[kGathers]);
    std::uint64_t credit = out.credit;
    const auto has_room = [&](std::uint64_t step) {
      return c.transport.own_slot_is_free(step - credit);
    };
    if (ok && ((sends && !has_room(first)) || (results && !has_room(second)))) {
      credit = load_relaxed(wire.cell->consumed);
    }
    of.credits[m.q] = out.credit;
    // (What is sent out of the connector's turn is not published, and forgotten. Of what comes out
    // of turn the same is true.)
    const bool in_turn = order.first(of.behind[kSends]) == sent;
    lacks[kSends] = sends && (!in_turn || !has_room(first));
    lacks[kGathers] = results && !has_room(second);
  } else if (m.part == kIncoming && c.receives_from(m.q)) {
    const InEndpoint& in = *endpoint_of(c.call, m, c.transport.lane);
    ok = in.connector != kNoConnector;
    Wire wire = c.transport.wire(in);
    const std::uint32_t taken = c.prefix_from(m.q, of.behind);
    wire.count -= taken;
    of.ins[m.q] = wire;
    of.taken[m.q] = taken;
    const auto has_come = [&](std::uint32_t slice) {
      const std::uint64_t step = wire.count + slice;
      Wire in = wire;
      in.count = step;
      const std::uint64_t flag = load_relaxed(LaneTransport::header_of(wire.steps, step).flag);
      return LaneTransport::is_next(flag, in, c.inv.seed);
    };
    // Where the connector is not the key's any more, or began anew, slices may come elsewhere: that
    // is to be found out, which steering does.
    const bool known = ok &&
                       load_relaxed(c.transport.tag_word(m.peer, in.connector)) == c.call.tag &&
                       load_relaxed(c.transport.base_word(m.peer, in.connector)) <= in.consumed;
    if (known) {
      lacks[kGathers] = has_member(steps.gathers_from, m.q) && of.behind[kGathers] != chunks &&
                        !has_come(order.first(of.behind[kGathers]));
      const std::uint32_t collected = order.second(of.behind[kCollects]);
      lacks[kCollects] = has_member(steps.collects_from, m.q) && of.behind[kCollects] != chunks &&
                         (collected != taken || !has_come(collected));
    }
  }
  ok = __all_sync(kWarp, ok) != 0;
  bool can = false;
#pragma unroll
  for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
    const bool missing = __any_sync(kWarp, lacks[hop]) != 0;
    can = can || (c.has(hop) && of.behind[hop] != chunks && !missing);
  }
  if (thread != 0 || !ok) return;
  atomicOr(&x.there, 1u << entry);
  if (can) atomicOr(&x.ready, 1u << entry);
}

// By one thread: those that are there go together. None, if nothing can be done at once.
__device__ __forceinline__ void line_up(const BatchEntry* tries) {
  PipelinedBatch& x = pipelined_batch();
  std::uint32_t n = 0;
  x.patient = 0;
  for (std::uint32_t left = x.ready != 0 ? x.there : 0; left != 0; left &= left - 1) {
    const auto entry = static_cast<std::uint32_t>(__ffs(static_cast<int>(left)) - 1);
    if (tries[entry].patient) x.patient |= 1u << entry;
    x.entries[n++] = entry;
  }
  x.num_calls = n;
}

// By all threads; a barrier is in front and behind.
__device__ __forceinline__ void set_up_together(const SlotCall& first) {
  PipelinedBatch& x = pipelined_batch();
  const bool borrows = x.num_calls == 1 && x.calls[x.entries[0]].begins();
  const std::uint32_t i = threadIdx.x % 32;
  if (threadIdx.x / 32 == 1) {
    if (i < kStreamCallRanks) x.slots.borrowed[i] = borrows ? kNotYet : 0;
    if (i < kSlotSteps * kInHand) {
      x.slots.stored[i] = 0;
      x.given_of[i] = x.entries[0];
    }
    if (i < kGroups) x.slots.costs[i] = x.slots.given[i] = 0;
    if (i == 0) {
      x.slots.closed = x.events = x.ended = x.went_on = 0;
      x.interrupted = BatchEnd::kDone;
      x.borrows = borrows;
      x.descriptions = first.descriptions();
    }
  } else if (threadIdx.x / 32 == 2 && i < kSlotSteps * kInHand) {
    describe_hop(first, first.hop_of_description(i), x.slots.jobs[i]);
  }
}

// ---- behind all ----

// By one thread: how the calls have ended, of which `alike` were looked at.
__device__ __forceinline__ void say_ends(const LaneTransport& t, LaneStats& stats,
                                         BatchEntry* tries, std::uint32_t n, std::uint32_t alike) {
  const PipelinedBatch& x = pipelined_batch();
  for (std::uint32_t entry = 0; entry < n; ++entry) {
    const bool unable = entry < alike && (x.there >> entry & 1) == 0;
    tries[entry].end = unable ? BatchEnd::kUnable : BatchEnd::kWaits;
    tries[entry].left_out = entry >= alike;  // it was not looked at
  }
  for (std::uint32_t i = 0; i < x.num_calls; ++i) {
    const std::uint32_t entry = x.entries[i];
    const SlotCall c = slot_call_of(t, entry);
    BatchEntry& its = tries[entry];
    count_slot_call(stats, c, x.calls[entry].behind, false,
                    [](std::uint64_t& figure, std::uint64_t by) { figure += by; });
    for (std::uint32_t hop = 0; hop < kSlotSteps; ++hop) {
      if (!c.has(hop)) continue;
      const std::uint32_t behind = c.hops_behind(hop);
      std::uint32_t& done = its.done[c.call.steps.primitives[hop]];
      if (hop != kSends && behind != done) its.receives = true;
      done = behind;
    }
    bool elsewhere = false;
    for (std::uint32_t q = 0; q < c.call.places; ++q) {
      elsewhere = elsewhere || (c.receives_from(q) && c.of.found[q] == kIsNot);
    }
    if (all_moved(c)) {
      its.end = BatchEnd::kDone;
    } else if (elsewhere) {
      its.end = BatchEnd::kElsewhere;
    } else if (x.interrupted != BatchEnd::kDone) {
      its.end = x.interrupted;
    }
  }
}

}  // namespace in_stream

// By all threads of the block; ends with a barrier. interrupted: see in_stream::steer_several().
template <class Interrupted, class EndEarly>
inline __device__ __noinline__ void run_pipelined_batch(CudaRank* rank, LaneStats* stats,
                                                        std::uint32_t lane,
                                                        BatchEntry* shared_tries, std::uint32_t n,
                                                        Interrupted interrupted,
                                                        EndEarly end_early) {
  using namespace in_stream;
  CudaRank& r = *rank;
  BatchCalls& calls = batch_calls();
  PipelinedBatch& x = pipelined_batch();
  BatchEntry* const tries = &in_shared(*shared_tries);
  const std::uint32_t warp = threadIdx.x / 32;

  fetch_calls(r, tries, n);
  sync_block();
  if (threadIdx.x < n && calls.call[threadIdx.x].patience_ns > kAlonePatienceNs) {
    calls.call[threadIdx.x].patience_ns = kAlonePatienceNs;
  }
  if (threadIdx.x == 0) {
    x.there = x.ready = 0;
    x.slots.poke = load_relaxed_local(r.poke_counts[lane]);
  }
  sync_block();
  std::uint32_t alike = 1;
  while (alike < n && go_together(calls.call[0], calls.call[alike])) ++alike;
  const LaneTransport t = transport_of(calls.call[0], lane);
  // (From the last thread on: the first warps look first.)
  for (std::uint32_t at = blockDim.x - 1 - threadIdx.x; at < alike * kStreamCallRanks;
       at += blockDim.x) {
    const std::uint32_t entry = at / kStreamCallRanks, q = at % kStreamCallRanks;
    x.calls[entry].found[q] = kNotLooked;
    x.calls[entry].invited[q] = nullptr;
    x.calls[entry].straight[q] = kNoSlice;
    if (q >= calls.call[entry].places) continue;
    x.calls[entry].parts[q] = slot_call_of(t, entry).stretch_of(q);
  }
  __syncwarp();
  for (std::uint32_t entry = warp; entry < alike; entry += blockDim.x / 32) {
    look_at_slot_call(slot_call_of(t, entry), x.calls[entry], tries[entry], entry);
  }
  sync_block();
  if (threadIdx.x == 0) line_up(tries);
  sync_block();
  if (x.num_calls != 0) {
    const SlotCall first = slot_call_of(t, x.entries[0]);
    set_up_together(first);
    if (threadIdx.x == 0) interrupted.dev.set_moving(true);
    sync_block();
    // (What is alone, and begins, is steered with fewer questions, so faster.)
    if (warp == 0 && x.borrows) {
      steer(r, first, interrupted, [] {}, {}, /*rehearses=*/false, /*may_be_sure=*/true);
    } else if (warp == 0) {
      steer_several(t, interrupted);
    } else if (warp == 1) {
      x.borrows ? publish_call(r, first) : publish_several(r, t, end_early);
    } else {
      move(first);
    }
    sync_block();
    if (warp == 0) {
      const Member m = member_of(first.call, {nullptr, nullptr, 1, 1});
      for (std::uint32_t i = 0; i < x.num_calls; ++i) {
        const std::uint32_t entry = x.entries[i];
        if ((x.ended >> entry & 1) == 0) tell_end(slot_call_of(t, entry), m);
      }
      poke_in_the_end(r, first, m);
    }
  }
  if (threadIdx.x == 0) say_ends(t, *stats, tries, n, alike);
  sync_block();
}

}  // namespace unjam
