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
#include "tests/simt/gpu_ranks.h"

namespace unjam {
void explorer_point(bool) { unjam_simt::step(); }

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
  // Of the last rank's kernels: so many steps behind the others'.
  std::uint64_t late = 0;
};
struct Figures {
  std::uint64_t calls = 0, solo = 0, steps = 0;
};

std::string text(const Case& x, std::uint64_t seed) {
  return std::string(to_string(x.algorithm)) + " " + to_string(x.kind) + " of " +
         std::to_string(x.count) + ", " + std::to_string(x.ranks) + " ranks, " +
         std::to_string(x.lanes) + " lanes" + (x.in_place ? ", in place" : "") +
         (x.late != 0 ? ", the last rank late" : "") + ", seed " + std::to_string(seed);
}

// The same key over and over, each rank's calls in a stream of its own: the first use is the
// engine's, which opens connectors. "" or what is wrong.
std::string run(const Case& x, std::uint64_t seed, std::uint32_t uses, Figures& figures) {
  GpuShape shape;
  shape.ranks = x.ranks;
  shape.lanes = x.lanes;
  shape.patience_us = x.patience_us;
  GpuRanks ranks(shape);
  Machine machine(seed);
  std::vector<GpuCall> calls(uses);
  std::vector<const Launch*> last;
  for (std::uint32_t n = 0; n < uses; ++n) {
    GpuCall& call = calls[n];
    call.n = n;
    call.kind = x.kind;
    call.count = x.count;
    call.algorithm = x.algorithm;
    call.in_place = x.in_place;
    call.root = static_cast<int>(x.ranks) - 1;
    if (std::string error = ranks.prepare(call); !error.empty()) return error;
    std::vector<const Launch*> now;
    for (std::uint32_t r = 0; r < x.ranks; ++r) {
      const NeedsEngine why = call.lowered[r]->why;
      if (why != NeedsEngine::kNo) return std::string("it needs the engine: ") + to_string(why);
      const Launch* const behind = last.empty() ? nullptr : last[r];
      now.push_back(ranks.launch(machine, unjam_call_kernel, call, behind, r, n != 0));
      if (r == x.ranks - 1 && n != 0) machine.delay(now.back(), x.late);
    }
    last = now;
  }
  if (std::string error = machine.run(); !error.empty()) return error;
  figures.steps += machine.steps();
  for (std::uint32_t r = 0; r < x.ranks; ++r) {
    if (const std::uint32_t ended = ranks.take_ended(r); ended != uses) {
      return std::to_string(ended) + " calls of rank " + std::to_string(r) + " have ended";
    }
    figures.calls += uses - 1;
    figures.solo += ranks.rank(r).solo_calls;
    for (const GpuCall& call : calls) {
      if (std::string error = ranks.check(call, r); !error.empty()) {
        return "use " + std::to_string(call.n) + ": " + error;
      }
    }
  }
  for (const Outcome outcome : ranks.outcomes()) {
    if (outcome != Outcome::kDone) return "a call was cancelled";
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
    add(kind, Algorithm::kDirect, {1, 61, 150});
    add(kind, Algorithm::kMesh, {512, 2000, 5003});
  }
  add(Kind::kAllReduce, Algorithm::kTwoShot, {24, 61, 150});
  add(Kind::kBroadcast, Algorithm::kChain, {512, 5000});
  add(Kind::kReduce, Algorithm::kChain, {512, 5000});
  return all;
}

struct Trial {
  std::uint64_t late = 0;
  std::uint32_t patience_us = 1000;
  bool in_place = false;
};
// All ends, with the right numbers; and where nobody is late, most calls without the engine. Of the
// cases each `share`-th.
void run_all(const Trial& trial, std::uint64_t seeds, std::size_t share) {
  Figures figures;
  std::uint64_t runs = 0, skipped = 0;
  const std::vector<Case> all = cases();
  for (std::size_t i = base_seed() % share; i < all.size(); i += share) {
    Case x = all[i];
    x.late = trial.late;
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
      "%llu runs, %llu not lowered; of %llu calls %llu without the engine; %.1f million steps\n",
      static_cast<unsigned long long>(runs), static_cast<unsigned long long>(skipped),
      static_cast<unsigned long long>(figures.calls), static_cast<unsigned long long>(figures.solo),
      static_cast<double>(figures.steps) / 1e6);
  EXPECT_GT(runs, skipped);
  if (trial.late == 0) {
    EXPECT_GE(2 * figures.solo, figures.calls);
  }
}

constexpr Trial kPlain{}, kInPlace{0, 1000, true};
// Lanes give up, each somewhere, and the engine goes on.
constexpr Trial kLate{40'000, 5}, kLateInPlace{40'000, 5, true};

TEST(CallKernel, EndsWithTheRightNumbers) { run_all(kPlain, 1, 4); }
TEST(CallKernel, InPlace) { run_all(kInPlace, 1, 2); }
TEST(CallKernel, GivesUpAnywhere) {
  run_all(kLate, 1, 4);
  run_all(kLateInPlace, 1, 2);
}
TEST(CallKernelSoak, ManySeeds) {
  for (const Trial& trial : {kPlain, kInPlace, kLate, kLateInPlace}) run_all(trial, 10, 1);
}

}  // namespace
}  // namespace unjam
