// The loop: each block runs its stream of tasks, step after step.
//
// One warp loads pages. The others wait for a task's counters, compute, and add to its counter. A
// wait that takes too long ends the launch: whoever gives up says so in the block's `failed`, the
// task runs to its end with what is there, and no counter is told. All threads leave at the same
// place, as `verdict` says: it changes only where none of them can be reading it.
#pragma once

#include "attention.cuh"
#include "exchange.cuh"
#include "experts.cuh"

namespace unjam_loop {

// Program: a Layout, kAhead, and run(Task), the switch over variants.
template <class Program>
LOOP_DEVICE void compute(const Parameters& p, volatile u32* failed, volatile u32* verdict) {
  using L = typename Program::Layout;
  const u32 first = p.streams[block_here()], last = p.streams[block_here() + 1];
  u32 page_at = 0;
  for (u32 step = 0; step < p.steps; ++step) {
    const u32 epoch = p.epoch + step;
    for (u32 n = first; n < last; ++n) {
      const Instruction i = p.instructions[n];
      if (warp_here() == 0) {
        const bool there = (n != first || wait_for_step(p, epoch, i.task, step, lane_here())) &&
                           wait_for_inputs(p, i, epoch, step, lane_here());
        if (lane_here() == 0) *verdict = there && *failed == 0 ? 1 : 0;
      }
      sync_computing();
      if (*verdict == 0) return;
      const Task task{
          p,      i,       step, epoch, block_memory() + L::kScratch, block_memory() + L::kStaging,
          failed, &page_at};
      Program::run(task);
      sync_computing();
      if (thread_here() == 0 && *failed == 0) add_release(p.counters + i.signal, 1);
    }
  }
}

template <class Program>
LOOP_DEVICE void run_program(const Parameters& p) {
  using L = typename Program::Layout;
  auto* const failed = reinterpret_cast<volatile u32*>(block_memory() + L::kWords);
  begin_pages<L>();
  if (thread_here() == 0) *failed = 0;
  if (block_here() == 0 && thread_here() < p.ranks && thread_here() != p.rank) {
    store_word_system(reinterpret_cast<u64*>(p.peers[thread_here()]) + p.rank, p.program);
  }
  sync_block();
  if (warp_here() == kComputingWarps) {
    load_pages<L, Program::kAhead>(p);
  } else {
    compute<Program>(p, failed, failed + 1);
  }
}

}  // namespace unjam_loop
