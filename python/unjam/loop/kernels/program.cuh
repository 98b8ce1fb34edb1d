// What a launch is given. codegen.py writes the same layouts.
#pragma once

#include <hardware.cuh>  // not as a neighbour: tests put another one in front

namespace unjam_loop {

inline constexpr u32 kMostRanks = 72;
inline constexpr u32 kUnit = 16;  // bytes: offsets count these
inline constexpr u32 kComputingWarps = 8;
inline constexpr u32 kComputing = kComputingWarps * kWarp;
inline constexpr u32 kThreads = kComputing + kWarp;  // the last warp loads pages

// A task, as a block's stream has it.
struct alignas(16) Instruction {
  u32 task;
  u16 variant;  // case of the program's switch
  u16 experts;  // whose weights it takes, by the routing in in1; 0: its weights are known
  u32 first_wait, num_waits;
  u32 signal;
  u32 a, b;                      // tile, and what the operator says
  u32 in0, in1, in2, out, out2;  // units, each in the room that the operator knows
  u16 pages, page_units;         // of weights that are loaded ahead, for each expert
  u32 aux, aux2;                 // units, of other weights; of experts: aux2 is their distance
  u32 weight;                    // units
};
static_assert(sizeof(Instruction) == 64);

struct Wait {
  u32 counter, threshold;
};

// Why a launch has ended early. The first one is kept.
enum ReportKind : u32 { kNothing = 0, kCounter = 1, kPackets = 2, kPages = 3, kStep = 4 };
struct Report {
  u32 claimed, written;  // 1: by somebody; all the rest is there
  u32 kind, rank, block, task;
  u32 what;        // counter, or peer
  u32 have, want;  // arrivals, or flags of packets
  u32 step;
  u64 program, other_program;  // the peer's latest, 0: it never came
  u64 waited_ns;
};

struct Parameters {
  const Instruction* instructions;
  const u32* streams;  // of each block the first instruction; one more at the end
  const Wait* waits;
  u32* counters;
  u8* pages;
  u8* state;
  u8* mail;               // own: a word for each peer, then both halves
  u8* peers[kMostRanks];  // theirs
  const u8* weights;
  u32* history;  // [steps, batch]: tokens
  Report* report;
  u32* stop;
  u64 program;
  u64 limit_ns;   // of each wait for a peer; of others it is twice that
  u64 mail_half;  // bytes of packets
  u32 rank, ranks;
  u32 epoch;  // steps that have ended before this launch
  u32 steps;
  u32 finish;  // the counter of whole steps
};

// Words at the head of the mail, by which a rank says what it runs.
inline constexpr u64 kHelloBytes = 8 * kMostRanks;

// What a block's threads know of the task that runs.
struct Task {
  const Parameters& p;
  const Instruction& i;
  u32 step;  // of this launch
  u32 epoch;
  u8* scratch;  // of the block: kScratchBytes
  u8* staging;  // what the program says
  volatile u32*
      failed;    // of the block: a wait was given up; the task runs to its end, and tells nobody
  u32* page_at;  // of this warp: pages taken so far
};
inline constexpr u32 kScratchBytes = 1024;

LOOP_DEVICE u8* at_pages(const Task& t, u32 units) { return t.p.pages + u64{units} * kUnit; }
LOOP_DEVICE u8* at_state(const Task& t, u32 units) { return t.p.state + u64{units} * kUnit; }
LOOP_DEVICE const u8* at_weights(const Task& t, u32 units) {
  return t.p.weights + u64{units} * kUnit;
}
LOOP_DEVICE u32 warp_here() { return thread_here() / kWarp; }
LOOP_DEVICE u32 lane_here() { return thread_here() % kWarp; }

// Of packets: never 0, which fresh memory has; another one each step.
LOOP_DEVICE u32 flag_of(const Task& t) {
  return (static_cast<u32>(t.p.program) | 0x80000000u) + t.epoch;
}

}  // namespace unjam_loop
