// Waits end: with what was waited for, with the launch, or with a report.
#pragma once

#include "program.cuh"

namespace unjam_loop {

// How long somebody has polled. Who waits for this rank's own tasks waits twice as long as who
// waits for a peer, and who waits for pages twice as long as that: so that the cause is named, and
// not who waits behind it.
inline constexpr u32 kForPeers = 1, kForOwn = 2, kForPages = 4;
class Patience {
 public:
  LOOP_DEVICE Patience(const Parameters& p, u32 times) : p_(p), limit_ns_(times * p.limit_ns) {}
  // To be called each time that nothing was there. False: it is over.
  LOOP_DEVICE bool goes_on() {
    if (++rounds_ % kRoundsApart != 0) return true;
    if (load_acquire(p_.stop) != 0) return false;
    const u64 now = now_ns();
    if (since_ == 0) since_ = now;
    is_late_ = now - since_ > limit_ns_;
    return !is_late_;
  }
  LOOP_DEVICE bool is_late() const { return is_late_; }
  LOOP_DEVICE u64 waited() const { return since_ == 0 ? 0 : now_ns() - since_; }

 private:
  const Parameters& p_;
  u64 limit_ns_;
  u32 rounds_ = 0;
  u64 since_ = 0;
  bool is_late_ = false;
};

// The first who is late says so, and stops all blocks of the launch.
LOOP_DEVICE void report(const Parameters& p, const Patience& patience, ReportKind kind, u32 task,
                        u32 step, u32 what, u32 have, u32 want) {
  if (patience.is_late() && claim(&p.report->claimed)) {
    Report& r = *p.report;
    r.kind = kind;
    r.rank = p.rank;
    r.block = block_here();
    r.task = task;
    r.what = what;
    r.have = have;
    r.want = want;
    r.step = step;
    r.program = p.program;
    r.other_program =
        kind == kPackets ? load_word_system(reinterpret_cast<const u64*>(p.mail) + what) : 0;
    r.waited_ns = patience.waited();
    store_release(&r.written, 1);
  }
  if (patience.is_late()) store_release(p.stop, 1);
}

// By one thread. Counters only grow, so one behind the target (also past 2^32) is enough.
LOOP_DEVICE bool wait_for_counter(const Parameters& p, u32 counter, u32 target, ReportKind kind,
                                  u32 task, u32 step) {
  Patience patience(p, kForOwn);
  u32 have;
  while (static_cast<int>((have = load_acquire(p.counters + counter)) - target) < 0) {
    if (patience.goes_on()) continue;
    report(p, patience, kind, task, step, counter, have, target);
    return false;
  }
  return true;
}

// What an instruction waits for, by a whole warp: its lanes share the waits.
LOOP_DEVICE bool wait_for_inputs(const Parameters& p, const Instruction& i, u32 epoch, u32 step,
                                 u32 lane) {
  bool there = true;
  for (u32 n = lane; n < i.num_waits; n += kWarp) {
    const Wait wait = p.waits[i.first_wait + n];
    there =
        wait_for_counter(p, wait.counter, (epoch + 1) * wait.threshold, kCounter, i.task, step) &&
        there;
  }
  return all_of_warp(there);
}

// The step in front has ended.
LOOP_DEVICE bool wait_for_step(const Parameters& p, u32 epoch, u32 task, u32 step, u32 lane) {
  bool there = true;
  if (lane == 0) there = wait_for_counter(p, p.finish, epoch, kStep, task, step);
  return all_of_warp(there);
}

// Until a page is there, or free. By any thread; afterwards by all who want to see its bytes.
LOOP_DEVICE bool wait_for_gate(const Parameters& p, u64* gate, u32 parity, u32 task, u32 step) {
  Patience patience(p, kForPages);
  while (!gate_is_past(gate, parity)) {
    if (patience.goes_on()) continue;
    report(p, patience, kPages, task, step, 0, 0, 0);
    return false;
  }
  return true;
}

}  // namespace unjam_loop
