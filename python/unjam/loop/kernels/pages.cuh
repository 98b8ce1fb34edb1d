// The ring of pages: one warp loads weights ahead of the tasks that take them, in their order.
//
// Weights depend on nothing, so the ring fills while a task waits. Those of experts are named by
// the routing: there the loader waits for the task's inputs, too.
#pragma once

#include "block.cuh"

namespace unjam_loop {

// Where gates and pages are; the program has the numbers.
template <u32 kSlots, u32 kPageBytes, u32 kStagingBytes>
struct Layout {
  static constexpr u32 kSlotCount = kSlots;
  static constexpr u32 kSlotBytes = kPageBytes;
  static constexpr u32 kGates = 0;  // full, then free
  static constexpr u32 kWords = kGates + 16 * kSlots;
  static constexpr u32 kScratch = (kWords + 16 + 127) / 128 * 128;
  static constexpr u32 kStaging = kScratch + kScratchBytes;
  static constexpr u32 kPages = (kStaging + kStagingBytes + 127) / 128 * 128;
  static constexpr u32 kBytes = kPages + kSlots * kPageBytes;
};

template <class L>
LOOP_DEVICE u64* full_gate(u32 page) {
  return reinterpret_cast<u64*>(block_memory() + L::kGates) + page % L::kSlotCount;
}
template <class L>
LOOP_DEVICE u64* free_gate(u32 page) {
  return reinterpret_cast<u64*>(block_memory() + L::kGates) + L::kSlotCount + page % L::kSlotCount;
}
template <class L>
LOOP_DEVICE u8* page_memory(u32 page) {
  return block_memory() + L::kPages + page % L::kSlotCount * L::kSlotBytes;
}

template <class L>
LOOP_DEVICE void begin_pages() {
  if (thread_here() == 0) {
    for (u32 n = 0; n < L::kSlotCount; ++n) {
      gate_init(full_gate<L>(n), kArrivalsOfPage);
      gate_init(free_gate<L>(n), kComputingWarps);
    }
    gates_are_ready();
  }
}

// ---- the loader ----

// kAhead: not behind a task's waits, which grid barriers want.
template <class L, bool kAhead>
LOOP_DEVICE void load_pages(const Parameters& p) {
  const u32 lane = lane_here();
  const u32 first = p.streams[block_here()], last = p.streams[block_here() + 1];
  u32 page = 0;
  bool goes_on = true;
  for (u32 step = 0; goes_on && step < p.steps; ++step) {
    for (u32 n = first; goes_on && n < last; ++n) {
      const Instruction& i = p.instructions[n];
      if (i.pages == 0) continue;
      const u32 epoch = p.epoch + step;
      if (!kAhead || i.experts != 0) {
        goes_on =
            wait_for_step(p, epoch, i.task, step, lane) && wait_for_inputs(p, i, epoch, step, lane);
      }
      const u32 rounds = i.experts == 0 ? 1 : i.experts;
      for (u32 round = 0; goes_on && round < rounds; ++round) {
        u64 from = i.weight;
        if (i.experts != 0) {
          sync_warp();  // all lanes see what the waits of some have seen
          const auto* pairs = reinterpret_cast<const float*>(p.pages + u64{i.in1} * kUnit);
          from += u64{i.aux2} * static_cast<u32>(pairs[2 * (i.b * i.experts + round)]);
        }
        for (u32 k = 0; goes_on && k < i.pages; ++k) {
          if (page >= L::kSlotCount) {
            const u32 turn = page / L::kSlotCount - 1;
            goes_on = all_of_warp(wait_for_gate(p, free_gate<L>(page), turn & 1, i.task, step));
            if (!goes_on) break;
          }
          const u32 bytes = u32{i.page_units} * kUnit;
          load_page(page_memory<L>(page), p.weights + from * kUnit + u64{k} * bytes, bytes,
                    full_gate<L>(page), lane);
          ++page;
        }
      }
    }
  }
  if (goes_on) return;
  // What is under way may not outlive the block: it comes, unless the GPU is broken.
  const u64 since = now_ns();
  for (u32 n = page < L::kSlotCount ? 0 : page - L::kSlotCount; n < page; ++n) {
    while (!gate_is_past(full_gate<L>(n), n / L::kSlotCount & 1)) {
      if (now_ns() - since > p.limit_ns) return;
    }
  }
}

// ---- who takes them: each computing warp, page by page ----

template <class L>
LOOP_DEVICE const u8* take_page(const Task& t) {
  const u32 page = *t.page_at;
  if (*t.failed == 0 &&
      !wait_for_gate(t.p, full_gate<L>(page), page / L::kSlotCount & 1, t.i.task, t.step)) {
    *t.failed = 1;
  }
  sync_warp();
  return page_memory<L>(page);
}
template <class L>
LOOP_DEVICE void give_page_back(const Task& t) {
  sync_warp();
  if (lane_here() == 0) gate_arrive(free_gate<L>(*t.page_at));
  ++*t.page_at;
}

}  // namespace unjam_loop
