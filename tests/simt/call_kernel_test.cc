// The kernel of calls in streams, the very source, on the CPU: all that its threads could do before
// each other, by seeds.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#define UNJAM_EXPLORER
#define unjam unjam_on_cpu
#include "tests/simt/cuda_words.h"
//
#include "device/cuda/kernels/call.cu"
#include "device/cuda/kernels/carried_call.cu"
#include "tests/simt/gpu_ranks.h"

namespace unjam {
void explorer_point(bool) { unjam_simt::step(); }
void explorer_look(const void* at) { host_memory.look(at); }

namespace {

using unjam_simt::Launch;
using unjam_simt::Machine;

struct Case {
  Kind kind;
  Algorithm algorithm;
  std::uint32_t ranks, lanes;
  std::uint64_t count;
  bool in_place = false;
  std::uint32_t patience_us = 1000;
  // Of the last rank's kernels: so many steps behind the others'; and, somewhere in each, so many
  // in which one of their blocks stands still.
  std::uint64_t late = 0, held = 0;
  DType dtype = DType::kInt32;
  Op op = Op::kSum;
  Copies copies = Copies::kNone;
  // Which use of which key a call is: keys take turns.
  std::uint32_t keys = 1;
  bool root_is_first = false;  // else the last rank
  // Of each block, somewhere in each call: so many steps its second warp, which publishes, stands
  // still.
  std::uint64_t mute = 0;
  std::optional<GpuShape> shape = {};  // else by the seed
};
// About what a block of a call does.
constexpr std::uint64_t kStepsABlock = 30'000;
struct Figures {
  std::uint64_t calls = 0, without_engine = 0, steps = 0;
  std::uint64_t left = 0;  // by a lane, to the engine, with some of it done
  std::uint64_t copies = 0, taken_back = 0;
};

std::string text(const Case& x, std::uint64_t seed) {
  return std::string(to_string(x.algorithm)) + " " + to_string(x.kind) + " of " +
         std::to_string(x.count) + ", " + std::to_string(x.ranks) + " ranks, " +
         std::to_string(x.lanes) + " lanes" + (x.in_place ? ", in place" : "") +
         (x.late != 0 ? ", the last rank late" : "") +
         (x.held != 0 ? ", a block stands still" : "") +
         (x.copies != Copies::kNone ? ", carried " + std::to_string(static_cast<int>(x.copies))
                                    : "") +
         ", seed " + std::to_string(seed);
}

// Somewhere in a call the last rank's block of one lane stands still, so that this lane gives up
// elsewhere, and other lanes hear of it in the middle of what they do; and in each block some warp
// is late with its part meanwhile.
void hold(Machine& machine, const std::vector<const Launch*>& launches, const Case& x,
          std::uint64_t draw) {
  const auto at = [&] { return (draw = mix64(draw)) % kStepsABlock; };
  const auto lane = static_cast<std::uint32_t>(draw >> 32) % x.lanes;
  machine.hold(launches.back(), {lane, unjam_simt::kAllWarps, at(), x.held});
  for (const Launch* launch : launches) {
    for (std::uint32_t block = 0; block < x.lanes; ++block) {
      const std::uint64_t from = at();
      machine.hold(launch, {block, static_cast<std::uint32_t>(draw >> 32), from, x.held / 4});
    }
  }
}

// As that, but what stands still is who publishes.
void mute(Machine& machine, const std::vector<const Launch*>& launches, const Case& x,
          std::uint64_t draw) {
  for (const Launch* launch : launches) {
    for (std::uint32_t block = 0; block < x.lanes; ++block) {
      draw = mix64(draw);
      machine.hold(launch, {block, /*warp=*/1, draw % kStepsABlock, x.mute});
    }
  }
}

bool has_large_slots(const Case& x, std::uint64_t seed) {
  if (x.shape) return false;
  const bool packets = x.algorithm == Algorithm::kOneShot || x.algorithm == Algorithm::kTwoShot;
  return seed % 2 == 0 && !packets;
}
GpuShape shape_of(const Case& x, std::uint64_t seed) {
  GpuShape shape = x.shape.value_or(GpuShape{});
  shape.ranks = x.ranks;
  shape.lanes = x.lanes;
  shape.patience_us = x.patience_us;
  if (x.shape) return shape;
  // Small ones, of which a call needs many; or such that each warp of a group has a part to move.
  if (has_large_slots(x, seed)) shape.guaranteed_slot_bytes = 4096;
  // Where there are few, hops wait for room, each at another time.
  shape.guaranteed_slots = 2u << seed / 2 % 3;
  shape.pool_slots = seed / 6 % 2 == 0 ? 16 : 0;
  if (seed / 12 % 3 == 2) shape.overlap = seed / 36 % 2 == 0 ? 0 : 2;
  shape.copies = x.copies;
  if (x.copies != Copies::kNone) {
    shape.overlap = seed % 3 == 0 ? 0 : 1;
    if (seed % 2 == 1) shape.pool_slots = 6;  // fewer than a connector has headers
    shape.copy_patience_us = x.copies == Copies::kPrompt ? 100'000 : 20;
  }
  return shape;
}

// The same key over and over, each rank's calls in a stream of its own: the first use is the
// engine's, which opens connectors.
class Job {
 public:
  Job(const Case& x, std::uint64_t seed, std::uint32_t uses)
      : x_(x), ranks_(shape_of(x, seed)), machine_(seed), calls_(uses), launches_(x.ranks) {
    for (std::uint32_t n = 0; n < uses && error_.empty(); ++n) {
      GpuCall& call = calls_[n];
      call.key = n % x.keys;
      call.n = n / x.keys;
      call.kind = x.kind;
      call.count = has_large_slots(x, seed) ? 4 * x.count : x.count;
      call.algorithm = x.algorithm;
      call.in_place = x.in_place;
      call.dtype = x.dtype;
      call.op = x.op;
      call.root = x.root_is_first ? 0 : static_cast<int>(x.ranks) - 1;
      error_ = ranks_.prepare(call);
      if (error_.empty()) launch(call, mix64(seed * uses + n));
    }
  }

  // Until all has ended. "" or what is wrong.
  std::string run() { return error_.empty() ? machine_.run() : error_; }

  Machine& machine() { return machine_; }
  GpuRanks& ranks() { return ranks_; }
  std::vector<GpuCall>& calls() { return calls_; }
  std::vector<const Launch*>& launches_of(std::uint32_t r) { return launches_[r]; }

  // Lanes that have been left with some of a call done, since this was asked last: to be asked
  // often.
  std::uint64_t lanes_left() {
    std::uint64_t found = 0;
    const std::uint32_t places = ranks_.shape().slots * x_.lanes;
    was_left_.resize(std::size_t{x_.ranks} * places);
    for (std::uint32_t i = 0; i < x_.ranks * places; ++i) {
      const HandOver& handed = ranks_.rank(i / places).handed[i % places];
      const bool is_left = handed.stage == Stage::kLeft &&
                           std::any_of(std::begin(handed.done), std::end(handed.done),
                                       [](std::uint32_t n) { return n != 0; });
      found += is_left && !was_left_[i] ? 1 : 0;
      was_left_[i] = is_left;
    }
    return found;
  }

 private:
  void launch(GpuCall& call, std::uint64_t draw) {
    std::vector<const Launch*> now;
    for (std::uint32_t r = 0; r < x_.ranks; ++r) {
      const NeedsEngine why = call.lowered[r]->why;
      if (why != NeedsEngine::kNo) {
        error_ = std::string("it needs the engine: ") + to_string(why);
        return;
      }
      const Launch* const behind = launches_[r].empty() ? nullptr : launches_[r].back();
      now.push_back(ranks_.launch(machine_, unjam_call_kernel, call, behind, r,
                                  /*without_engine=*/call.n != 0, unjam_carried_call_kernel));
      launches_[r].push_back(now.back());
    }
    if (call.n == 0) return;
    machine_.delay(now.back(), x_.late);
    if (x_.held != 0) hold(machine_, now, x_, draw);
    if (x_.mute != 0) mute(machine_, now, x_, draw);
  }

  const Case x_;
  GpuRanks ranks_;
  Machine machine_;
  std::vector<GpuCall> calls_;
  std::vector<std::vector<const Launch*>> launches_;  // by rank
  std::vector<bool> was_left_;
  std::string error_;
};

// "" or what is wrong with a job that has run.
std::string check_all(Job& job, const Case& x, std::uint32_t uses, Figures& figures) {
  GpuRanks& ranks = job.ranks();
  figures.steps += job.machine().steps();
  for (std::uint32_t r = 0; r < x.ranks; ++r) {
    if (const std::uint32_t ended = ranks.take_ended(r); ended != uses) {
      return std::to_string(ended) + " calls of rank " + std::to_string(r) + " have ended";
    }
    figures.calls += uses - x.keys;
    figures.without_engine += ranks.rank(r).calls_without_engine;
    figures.copies += ranks.copies(r);
    figures.taken_back += ranks.taken_back(r);
    for (const GpuCall& call : job.calls()) {
      const std::string use =
          "key " + std::to_string(call.key) + ", use " + std::to_string(call.n) + ": ";
      if (ranks.outcome(call, r) != Outcome::kDone) return use + "it was cancelled";
      if (x.dtype != DType::kInt32) {
        // The first use was the engine's, slice by slice.
        if (call.outputs[r] != job.calls()[0].outputs[r]) return use + "it has other bits";
        continue;
      }
      if (std::string error = ranks.check(call, r); !error.empty()) return use + error;
    }
  }
  return "";
}

// "" or what is wrong.
std::string run(const Case& x, std::uint64_t seed, std::uint32_t uses, Figures& figures) {
  Job job(x, seed, uses);
  std::uint64_t draw = seed;
  job.machine().each_step(100, [&] {
    figures.left += job.lanes_left();
    for (std::uint32_t r = 0; x.copies != Copies::kNone && r < x.ranks; ++r) {
      job.ranks().carry_out(r, draw = mix64(draw));
    }
    // Now and then a host says something, which is about none of these calls: all stop, to look.
    draw = mix64(draw);
    if (x.held == 0 || draw % 64 != 0) return;
    job.ranks().rank(static_cast<std::uint32_t>(draw >> 32) % x.ranks).link->attention += 2;
  });
  if (std::string error = job.run(); !error.empty()) return error;
  return check_all(job, x, uses, figures);
}

enum class End { kDeath, kCancelled };
// Somewhere the first rank dies, and the others' hosts hear of it, each at some time; or all hosts
// cancel what is left, each at some time. All calls end on all that are left, and those that are
// said to be done are.
std::string run_to_an_end(const Case& x, std::uint64_t seed, std::uint32_t uses, End end,
                          Figures& figures) {
  Job job(x, seed, uses);
  GpuRanks& ranks = job.ranks();
  std::uint64_t draw = seed;
  const auto some = [&](std::uint64_t most) { return (draw = mix64(draw)) % most; };
  const std::uint64_t when = 1 + some(kStepsABlock * x.ranks * x.lanes * uses);
  std::vector<std::uint64_t> told;
  for (std::uint32_t r = 0; r < x.ranks; ++r) told.push_back(when + some(2 * kStepsABlock));
  bool dead = false;
  job.machine().each_step(50, [&] {
    const std::uint64_t now = job.machine().steps();
    if (end == End::kDeath && !dead && now >= when) {
      dead = true;
      for (const Launch* launch : job.launches_of(0)) job.machine().drop(launch);
    }
    for (std::uint32_t r = 0; r < x.ranks; ++r) {
      if (now < told[r]) continue;
      told[r] = ~std::uint64_t{0};
      if (end == End::kDeath) ranks.say_gone(r, 0);
      if (end == End::kCancelled) {
        for (const GpuCall& call : job.calls()) ranks.cancel(call, r);
      }
    }
  });
  if (std::string error = job.run(); !error.empty()) return error;
  figures.steps += job.machine().steps();
  for (std::uint32_t r = dead ? 1 : 0; r < x.ranks; ++r) {
    if (const std::uint32_t ended = ranks.take_ended(r); ended != uses) {
      return std::to_string(ended) + " calls of rank " + std::to_string(r) + " have ended";
    }
    for (const GpuCall& call : job.calls()) {
      ++figures.calls;
      if (ranks.outcome(call, r) != Outcome::kDone) continue;
      ++figures.without_engine;
      if (std::string error = ranks.check(call, r); !error.empty()) {
        return "use " + std::to_string(call.n) + ": " + error;
      }
    }
  }
  return "";
}

// Counts of one element, of fewer than lanes have pieces, of one chunk, and of many; and not a
// whole number of anything. (Packets: of one loop.)
std::vector<Case> cases() {
  std::vector<Case> all;
  const auto add = [&](Kind kind, Algorithm algorithm, std::vector<std::uint64_t> counts) {
    for (const std::uint32_t ranks : {2u, 3u, 4u}) {
      if (algorithm == Algorithm::kChain && ranks == 2) continue;
      for (const std::uint64_t count : counts) all.push_back({kind, algorithm, ranks, 2, count});
    }
  };
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                          Kind::kBroadcast, Kind::kReduce}) {
    add(kind, Algorithm::kOneShot, {1, 61, 150});
    add(kind, Algorithm::kRsag, {512, 2000, 5003});
  }
  add(Kind::kAllReduce, Algorithm::kTwoShot, {24, 61, 150});
  add(Kind::kBroadcast, Algorithm::kChain, {512, 5000});
  add(Kind::kReduce, Algorithm::kChain, {512, 5000});
  return all;
}

// Kernels of calls look at the host's memory at most once in so many steps. They do less than half
// as often; lanes that ask whenever they may would do twice as often.
constexpr std::uint64_t kStepsALook = 60'000;

struct Trial {
  std::uint64_t late = 0;
  std::uint32_t patience_us = 1000;
  bool in_place = false;
  std::uint64_t held = 0;
};
// Sanitizers take long: there fewer cases.
#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t kFewer = 4;
#else
constexpr std::size_t kFewer = 1;
#endif

// All ends, with the right numbers; and where nobody is late, most calls without the engine. Of the
// cases each `share`-th.
void run_all(const Trial& trial, std::uint64_t seeds, std::size_t share) {
  Figures figures;
  host_memory.looks = 0;
  std::uint64_t runs = 0, skipped = 0;
  const std::vector<Case> all = cases();
  for (std::size_t i = base_seed() % share; i < all.size(); i += share * kFewer) {
    Case x = all[i];
    x.late = trial.late;
    x.held = trial.held;
    x.patience_us = trial.patience_us;
    x.in_place = trial.in_place && x.kind == Kind::kAllReduce;
    if (trial.in_place && !x.in_place) continue;
    for (std::uint64_t seed = 0; seed < seeds; ++seed) {
      const std::uint64_t own = base_seed() + runs;
      const std::string error = run(x, own, 3, figures);
      if (error.rfind("it needs the engine", 0) == 0) {
        ++skipped;
        continue;
      }
      ++runs;
      ASSERT_EQ(error, "") << text(x, own);
    }
  }
  std::printf(
      "%llu runs, %llu not lowered; of %llu calls %llu without the engine, lanes left %llu in "
      "the middle; %.1f million steps, "
      "%llu looks at the host's memory\n",
      static_cast<unsigned long long>(runs), static_cast<unsigned long long>(skipped),
      static_cast<unsigned long long>(figures.calls),
      static_cast<unsigned long long>(figures.without_engine),
      static_cast<unsigned long long>(figures.left), static_cast<double>(figures.steps) / 1e6,
      static_cast<unsigned long long>(host_memory.looks));
  EXPECT_GT(runs, skipped);
  // (One as it begins; and not where the host has much to say.)
  if (trial.held == 0) {
    EXPECT_LE(kStepsALook * (host_memory.looks - figures.calls), figures.steps);
  }
  if (trial.late == 0 && trial.held == 0) {
    EXPECT_GE(4 * figures.without_engine, figures.calls);
  }
}

// Executors and the engine's slices make the same bits, wherever they take turns.
void same_bits(std::uint64_t seeds, std::size_t share) {
  Figures figures;
  std::uint64_t runs = 0;
  const std::vector<Case> all = cases();
  for (std::size_t i = base_seed() % share; i < all.size(); i += share * kFewer) {
    if (!reduces(all[i].kind)) continue;
    for (const auto& [dtype, op] :
         {std::pair{DType::kFloat32, Op::kSum}, std::pair{DType::kFloat32, Op::kAvg},
          std::pair{DType::kBfloat16, Op::kSum}, std::pair{DType::kBfloat16, Op::kMax}}) {
      Case x = all[i];
      x.dtype = dtype;
      x.op = op;
      for (std::uint64_t s = 0; s < seeds; ++s) {
        const std::uint64_t own = base_seed() + runs;
        x.in_place = x.kind == Kind::kAllReduce && own % 2 == 0;
        x.held = own % 4 < 2 ? 0 : 400'000;
        x.patience_us = x.held != 0 ? 20 : 1000;
        const std::string error = run(x, own, 3, figures);
        if (error.rfind("it needs the engine", 0) == 0) continue;
        ++runs;
        ASSERT_EQ(error, "") << to_string(dtype) << ": " << text(x, own);
      }
    }
  }
  std::printf("%llu runs; of %llu calls %llu without the engine, lanes left %llu in the middle\n",
              static_cast<unsigned long long>(runs), static_cast<unsigned long long>(figures.calls),
              static_cast<unsigned long long>(figures.without_engine),
              static_cast<unsigned long long>(figures.left));
  EXPECT_GE(4 * figures.without_engine, figures.calls);
  EXPECT_GT(figures.left, 0u);
}
TEST(CallKernel, SameBitsAsTheEngines) { same_bits(1, 5); }
TEST(CallKernelSoak, SameBits) { same_bits(5, 1); }

// Copy engines move what is only sent, or not, or too late.
void carried(Copies copies, std::uint64_t seeds, std::uint64_t held) {
  Figures figures;
  std::uint64_t runs = 0;
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduceScatter, Kind::kReduce, Kind::kAllGather,
                          Kind::kBroadcast}) {
    // (What others do is a part of what all-reduces do.)
    const bool others = kind != Kind::kAllReduce && kind != Kind::kReduceScatter;
    for (const std::uint32_t ranks : {2u, 3u, 4u}) {
      if (others && ranks != 2 && seeds < 10) continue;
      for (std::uint64_t seed = 0; seed < (others && seeds < 10 ? 1 : seeds); ++seed) {
        const std::uint64_t own = base_seed() + runs++;
        Case x{kind, Algorithm::kRsag, ranks, 2, own % 3 == 0 ? 3001u : 2003u};
        x.copies = copies;
        // (What is copied as well is carried in place alone.)
        const bool copies_own = kind == Kind::kAllGather || kind == Kind::kBroadcast;
        x.in_place = kind != Kind::kReduceScatter && (copies_own ? own % 4 != 0 : own % 2 == 0);
        x.root_is_first = own % 2 == 0;
        x.held = own % 3 == 1 ? held : 0;
        x.patience_us = x.held != 0 ? 20 : 1000;
        const std::string error = run(x, own, 4, figures);
        if (error.rfind("it needs the engine", 0) == 0) continue;
        ASSERT_EQ(error, "") << text(x, own);
      }
    }
  }
  std::printf(
      "%llu runs; of %llu calls %llu without the engine; %llu copies, %llu taken back, lanes left "
      "%llu in the middle; %.1f million steps\n",
      static_cast<unsigned long long>(runs), static_cast<unsigned long long>(figures.calls),
      static_cast<unsigned long long>(figures.without_engine),
      static_cast<unsigned long long>(figures.copies),
      static_cast<unsigned long long>(figures.taken_back),
      static_cast<unsigned long long>(figures.left), static_cast<double>(figures.steps) / 1e6);
  EXPECT_EQ(figures.copies != 0, copies != Copies::kStuck);
  if (copies == Copies::kPrompt) EXPECT_EQ(figures.taken_back, 0u);
  if (copies == Copies::kStuck || copies == Copies::kStalls) EXPECT_GT(figures.taken_back, 0u);
}
TEST(CallKernelCarried, Promptly) { carried(Copies::kPrompt, 1, 0); }
TEST(CallKernelCarried, Slowly) { carried(Copies::kSlow, 1, 400'000); }
TEST(CallKernelCarried, TakesBackWhatStalls) { carried(Copies::kStalls, 2, 400'000); }
TEST(CallKernelCarried, TakesBackWhatNobodyCarriesOut) { carried(Copies::kStuck, 1, 400'000); }
TEST(CallKernelSoak, ManyCarried) {
  for (const Copies x : {Copies::kPrompt, Copies::kSlow, Copies::kStalls, Copies::kStuck})
    carried(x, 30, 400'000);
}

constexpr Trial kPlain{}, kInPlace{0, 1000, true};
// Lanes give up, each somewhere, and the engine goes on.
constexpr Trial kLate{40'000, 5}, kLateInPlace{40'000, 5, true};
constexpr Trial kHeld{0, 20, false, 400'000}, kHeldInPlace{0, 20, true, 400'000};

TEST(CallKernel, EndsWithTheRightNumbers) { run_all(kPlain, 1, 4); }
TEST(CallKernel, InPlace) { run_all(kInPlace, 1, 2); }
// Who waits for a late rank asks its host no more than else.
TEST(CallKernel, WaitsAndLetsTheHostBe) { run_all({400'000, 1000}, 1, 4); }
TEST(CallKernel, GivesUpAtFirst) { run_all(kLate, 1, 4); }
TEST(CallKernel, GivesUpAtFirstInPlace) { run_all(kLateInPlace, 1, 2); }
TEST(CallKernel, GivesUpAnywhere) { run_all(kHeld, 1, 4); }
TEST(CallKernel, GivesUpAnywhereInPlace) { run_all(kHeldInPlace, 1, 2); }
void end_all(End end, std::uint64_t seeds, std::size_t share) {
  Figures figures;
  const std::vector<Case> all = cases();
  for (std::size_t i = base_seed() % share; i < all.size(); i += share * kFewer) {
    Case x = all[i];
    x.patience_us = i % 2 == 0 ? 20 : 1000;
    for (std::uint64_t s = 0; s < seeds; ++s) {
      const std::uint64_t seed = base_seed() + i + 1000 * s;
      const std::string error = run_to_an_end(x, seed, 4, end, figures);
      if (error.rfind("it needs the engine", 0) == 0) continue;
      ASSERT_EQ(error, "") << text(x, seed);
    }
  }
  std::printf("of %llu calls %llu were done; %.1f million steps\n",
              static_cast<unsigned long long>(figures.calls),
              static_cast<unsigned long long>(figures.without_engine),
              static_cast<double>(figures.steps) / 1e6);
  EXPECT_LT(figures.without_engine, figures.calls);
}
TEST(CallKernel, AllEndsWhenARankDies) { end_all(End::kDeath, 1, 4); }
TEST(CallKernel, AllEndsWhenItIsCancelled) { end_all(End::kCancelled, 1, 4); }

void run_some(const std::vector<Case>& some, std::uint64_t seeds, std::uint32_t uses) {
  Figures figures;
  for (const Case& x : some) {
    for (std::uint64_t s = 0; s < seeds; ++s) {
      const std::uint64_t seed = base_seed() + s;
      ASSERT_EQ(run(x, seed, uses * x.keys, figures), "") << text(x, seed);
    }
  }
  std::printf(
      "of %llu calls %llu without the engine, lanes left %llu in the middle; %.1f million steps\n",
      static_cast<unsigned long long>(figures.calls),
      static_cast<unsigned long long>(figures.without_engine),
      static_cast<unsigned long long>(figures.left), static_cast<double>(figures.steps) / 1e6);
}
// A shape of slots of 1 KiB.
GpuShape with_slots(std::uint32_t own, std::uint32_t borrowed) {
  GpuShape shape;
  shape.guaranteed_slots = own;
  shape.pool_slots = borrowed;
  return shape;
}
constexpr std::uint64_t kWordsAChunk = 256;

// Calls of two keys, each of which fits in slots that are lent, to somebody who begins late: who
// sends the second one's finds the first one's not taken yet.
TEST(CallKernel, BorrowsWhatIsTaken) {
  std::vector<Case> some;
  for (const std::uint64_t chunks : {5, 7}) {
    Case x{Kind::kBroadcast, Algorithm::kRsag, 2, 2, 2 * chunks * kWordsAChunk};
    x.late = 100'000;
    x.keys = 2;
    x.root_is_first = true;
    x.shape = with_slots(4, 16);
    some.push_back(x);
  }
  run_some(some, 2, 3);
}
// Packets of one use after the other, to somebody who begins late: there is room for those of two.
TEST(CallKernel, SendsPacketsWhereThereIsRoom) {
  Case x{Kind::kBroadcast, Algorithm::kOneShot, 2, 2, 61};
  x.late = 100'000;
  x.root_is_first = true;
  x.shape = with_slots(2, 0);
  run_some({x}, 2, 6);
}
// Lanes give up while who publishes stands still, and peers have filled all slots that they know to
// be free: they must hear of what was taken.
TEST(CallKernel, TellsTheLastCredits) {
  std::vector<Case> some;
  for (const Kind kind : {Kind::kAllGather, Kind::kAllReduce, Kind::kBroadcast}) {
    Case x{kind, Algorithm::kRsag, 2, 2, 0};
    x.count = (kind == Kind::kAllReduce ? 2 : 1) * 2 * 8 * kWordsAChunk;
    x.patience_us = 20;
    x.mute = 100'000;
    x.root_is_first = true;
    x.shape = with_slots(2, 0);
    some.push_back(x);
  }
  run_some(some, 4, 3);
}
// Somebody else who drives lanes: takes leases that are free, and gives them back soon. Meanwhile
// nobody else may have one, or count in the lane's figures.
class OtherDriver {
 public:
  static constexpr std::uint64_t kSteps = 5'000;  // that it has a lease

  OtherDriver(Job& job, const Case& x, std::uint64_t draw) : job_(job), draw_(draw) {
    lanes_.resize(std::size_t{x.ranks} * x.lanes);
  }
  void look() {
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
      const std::uint32_t lanes = job_.ranks().shape().lanes;
      see_to(static_cast<std::uint32_t>(i) / lanes, static_cast<std::uint32_t>(i) % lanes,
             lanes_[i]);
    }
  }
  std::uint64_t taken() const { return taken_; }
  const std::string& error() const { return error_; }

 private:
  struct Lane {
    bool has = false;
    std::uint64_t since = 0, completed = 0, pokes = 0;
  };
  void see_to(std::uint32_t r, std::uint32_t lane, Lane& mine) {
    CudaRank& rank = job_.ranks().rank(r);
    const std::uint64_t bit = std::uint64_t{1} << lane, now = job_.machine().steps();
    const std::uint64_t completed = job_.ranks().stats(r, lane).completed;
    const std::uint64_t pokes = rank.poke_counts[lane];
    if (mine.has) {
      const bool is_left_alone =
          (rank.lanes & bit) != 0 && completed == mine.completed && pokes == mine.pokes;
      if (!is_left_alone && error_.empty()) {
        error_ = "somebody else was in lane " + std::to_string(lane) + " of rank " +
                 std::to_string(r) + ", which was taken";
      }
      if (now - mine.since < kSteps) return;
      mine.has = false;
      rank.lanes &= ~bit;
      return;
    }
    // (The engine, which has the first use of the key, counts on who has a lane to look at it.)
    if (rank.calls_without_engine == 0 || (rank.lanes & bit) != 0) return;
    draw_ = mix64(draw_);
    if (draw_ % 4 != 0) return;
    mine = {true, now, completed, pokes};
    rank.lanes |= bit;
    ++taken_;
  }

  Job& job_;
  std::uint64_t draw_, taken_ = 0;
  std::vector<Lane> lanes_;
  std::string error_;
};
// (Short calls: what goes to the engine needs drivers that see to more than their own.)
TEST(CallKernel, WaitsForItsLanesLeases) {
  Figures figures;
  std::uint64_t taken = 0;
  for (const Algorithm algorithm : {Algorithm::kOneShot, Algorithm::kTwoShot}) {
    const Case x{Kind::kAllReduce, algorithm, 2, 2, 61};
    constexpr std::uint32_t kUses = 8;
    for (std::uint64_t s = 0; s < 2; ++s) {
      const std::uint64_t seed = base_seed() + s;
      Job job(x, seed, kUses);
      OtherDriver other(job, x, seed);
      job.machine().each_step(20, [&] { other.look(); });
      std::string error = job.run();
      if (error.empty()) error = other.error();
      if (error.empty()) error = check_all(job, x, kUses, figures);
      ASSERT_EQ(error, "") << text(x, seed);
      taken += other.taken();
    }
  }
  std::printf("%llu leases were taken; of %llu calls %llu without the engine; %.1f million steps\n",
              static_cast<unsigned long long>(taken),
              static_cast<unsigned long long>(figures.calls),
              static_cast<unsigned long long>(figures.without_engine),
              static_cast<double>(figures.steps) / 1e6);
  EXPECT_GT(taken, 0u);
  EXPECT_GT(figures.without_engine, 0u);
}

// Who stops forgets what is in no prefix of its connector's slices. Of a chunk that may be gathered
// and is, what it took and what became of it are in prefixes at once, whatever else was moved; and
// of no other chunk: so who waits does so for nothing else.
TEST(CallKernel, GathersWhatNobodyForgets) {
  std::uint64_t told = 0, for_sent = 0, for_collected = 0;
  for (const std::uint32_t number_of_ranks : {2u, 3u, 4u}) {
    for (const std::uint32_t slots : {2u, 4u, 8u}) {
      GpuShape shape = with_slots(slots, 0);
      shape.ranks = number_of_ranks;
      shape.lanes = 2;
      const GpuRanks ranks(shape);
      GpuCall call;
      call.count = number_of_ranks * shape.lanes * 12 * kWordsAChunk;
      call.algorithm = Algorithm::kRsag;
      call.in_place = true;
      ASSERT_EQ(ranks.prepare(call), "");
      for (std::uint32_t r = 0; r < number_of_ranks; ++r) {
        if (call.lowered[r]->why != NeedsEngine::kNo) continue;
        StreamCall scheduled;
        static_cast<Schedule&>(scheduled) = call.lowered[r]->schedule;
        const auto shared = std::make_unique<in_stream::SlotShared>();
        const auto streamed = std::make_unique<in_stream::SlotCallState>();
        const Invocation inv;
        const LaneTransport transport;
        const in_stream::SlotCall c{scheduled, inv, transport, *shared, *streamed};
        const std::uint32_t chunks = scheduled.chunks_of_all();
        const HopOrder order = c.order();
        for (std::uint32_t i = 0; i < (chunks + 1) * chunks * (chunks + 1); ++i) {
          const std::uint32_t sent = i % (chunks + 1), n = i / (chunks + 1) % chunks,
                              collected = i / (chunks + 1) / chunks;
          const std::uint32_t moved[kSlotSteps] = {sent, n + 1, collected};
          bool sent_on = true, given_back = true;
          for (std::uint32_t q = 0; q < number_of_ranks; ++q) {
            if (c.sends_to(q)) sent_on = sent_on && c.prefix_to(q, moved) > order.second(n);
            if (c.receives_from(q))
              given_back = given_back && c.prefix_from(q, moved) > order.first(n);
          }
          ASSERT_EQ(c.may_gather(n, sent, collected), sent_on && given_back)
              << number_of_ranks << " ranks, rank " << r << ", " << slots << " slots: chunk " << n
              << " of " << chunks << ", " << sent << " sent, " << collected << " collected";
          told += sent_on && given_back ? 1 : 0;
          for_sent += given_back && !sent_on ? 1 : 0;
          for_collected += sent_on && !given_back ? 1 : 0;
        }
      }
    }
  }
  std::printf(
      "%llu chunks may be gathered; %llu wait for slices that are sent, %llu for slices that are "
      "collected\n",
      static_cast<unsigned long long>(told), static_cast<unsigned long long>(for_sent),
      static_cast<unsigned long long>(for_collected));
  EXPECT_GT(told, 0u);
  EXPECT_GT(for_sent, 0u);
  EXPECT_GT(for_collected, 0u);
}
TEST(CallKernelSoak, ManyEnds) {
  end_all(End::kDeath, 10, 1);
  end_all(End::kCancelled, 10, 1);
}
TEST(CallKernelSoak, ManySeeds) {
  for (const Trial& trial : {kPlain, kInPlace, kLate, kLateInPlace, kHeld, kHeldInPlace})
    run_all(trial, 10, 1);
}

}  // namespace
}  // namespace unjam
