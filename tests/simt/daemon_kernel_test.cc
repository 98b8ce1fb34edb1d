// The engine as a daemon, the very source, on the CPU: ranks submit calls of several keys beside
// streams, each rank in an order of its own, and as its launcher would, a daemon is launched
// whenever one is needed. All ends, whatever the order.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#define UNJAM_EXPLORER
#define unjam unjam_on_cpu
#include "tests/simt/cuda_words.h"
//
#include "device/cuda/kernels/engine.cu"
#include "tests/simt/gpu_ranks.h"

namespace unjam {
void explorer_point(bool) { unjam_simt::step(); }
void explorer_look(const void* at) { host_memory.look(at); }

namespace {

using unjam_simt::Machine;

struct Figures {
  std::uint64_t calls = 0, without_engine = 0, daemons = 0, preemptions = 0, steps = 0;
  std::uint64_t batched = 0;  // lanes' parts that were done in one go
};

// Keys of these kinds, by these algorithms, by turns; their first uses are the engine's.
struct KeyKind {
  Kind kind;
  Algorithm algorithm;
  std::uint64_t count;
  DType dtype = DType::kInt32;
  Op op = Op::kSum;
};
constexpr KeyKind kKeys[] = {
    {Kind::kAllReduce, Algorithm::kOneShot, 61},
    {Kind::kAllReduce, Algorithm::kRsag, 2000},
    {Kind::kAllGather, Algorithm::kRsag, 700},
    {Kind::kAllReduce, Algorithm::kTwoShot, 64},
    {Kind::kBroadcast, Algorithm::kRsag, 5003},
    {Kind::kAllToAll, Algorithm::kRsag, 300},
    {Kind::kAllReduce, Algorithm::kRing, 900},
    {Kind::kReduce, Algorithm::kOneShot, 150},
    {Kind::kAllReduce, Algorithm::kDoubleBinaryTree, 1500},
};

// Which differ in what their slices' descriptions say, and in nothing that keeps them apart.
constexpr KeyKind kTogether[] = {
    {Kind::kAllReduce, Algorithm::kRsag, 1200},
    {Kind::kAllReduce, Algorithm::kRsag, 1100, DType::kInt32, Op::kMax},
};
// Packets, of all warps.
constexpr KeyKind kPackets[] = {
    {Kind::kAllGather, Algorithm::kOneShot, 480},
    {Kind::kAllReduce, Algorithm::kOneShot, 512, DType::kFloat32},
    {Kind::kBroadcast, Algorithm::kOneShot, 450},
    {Kind::kAllReduce, Algorithm::kTwoShot, 1024, DType::kFloat32},
};

struct Job {
  std::span<const KeyKind> kinds = kKeys;
  std::uint32_t keys = 5, uses = 3;
  std::uint32_t slot_bytes = 1024;
};
std::string run(const Job& job, std::uint32_t number_of_ranks, std::uint64_t seed,
                Figures& figures) {
  const std::uint32_t keys = job.keys, uses = job.uses;
  GpuShape shape;
  shape.ranks = number_of_ranks;
  shape.lanes = 2;
  shape.keys = keys;
  shape.slots = 16;
  shape.guaranteed_slots = 2u << seed % 3;
  shape.guaranteed_slot_bytes = job.slot_bytes;
  GpuRanks ranks(shape);
  Machine::Limits limits;
  limits.most_steps = 60'000'000;
  Machine machine(seed, limits);
  std::mt19937_64 random(seed);
  std::vector<std::vector<GpuCall>> calls(keys);
  for (std::uint32_t k = 0; k < keys; ++k) {
    const KeyKind& of = job.kinds[(k + seed) % job.kinds.size()];
    calls[k].resize(uses);
    for (std::uint32_t n = 0; n < uses; ++n) {
      GpuCall& call = calls[k][n];
      call.key = k;
      call.n = n;
      call.kind = of.kind;
      call.algorithm = of.algorithm;
      call.count = of.count;
      call.dtype = of.dtype;
      call.op = of.op;
      call.root = static_cast<int>((seed + k) % number_of_ranks);
      if (std::string error = ranks.prepare(call); !error.empty()) return error;
    }
  }
  // Each rank's order: of a key its uses, else any.
  std::vector<std::vector<const GpuCall*>> orders(number_of_ranks);
  for (auto& order : orders) {
    std::vector<std::uint32_t> of;
    for (std::uint32_t k = 0; k < keys; ++k) of.insert(of.end(), uses, k);
    std::shuffle(of.begin(), of.end(), random);
    std::vector<std::uint32_t> used(keys);
    for (const std::uint32_t k : of) order.push_back(&calls[k][used[k]++]);
  }
  // The hosts: each now and then submits one, takes what has ended, and launches.
  std::vector<std::size_t> submitted(number_of_ranks), ended(number_of_ranks);
  const auto hosts = [&] {
    for (std::uint32_t r = 0; r < number_of_ranks; ++r) {
      if (submitted[r] < orders[r].size() && ranks.has_room(r) && random() % 4 == 0) {
        ranks.submit(*orders[r][submitted[r]++], r);
      }
      ended[r] += ranks.take_ended(r);
      ranks.launcher(machine, unjam_engine_kernel, r);
    }
  };
  machine.each_step(500, hosts);
  std::string error;
  const auto all = [&](const std::vector<std::size_t>& counts) {
    return std::all_of(counts.begin(), counts.end(),
                       [&](std::size_t n) { return n == std::size_t{keys} * uses; });
  };
  for (int idle = 0; error.empty() && !all(ended) && idle < 1000;) {
    hosts();
    const std::uint64_t before = machine.steps();
    error = machine.run();  // until all daemons have left
    idle = machine.steps() == before ? idle + 1 : 0;
  }
  if (error.empty()) error = machine.run();
  if (!error.empty()) return error;
  figures.steps += machine.steps();
  for (std::uint32_t r = 0; r < number_of_ranks; ++r) {
    if (ended[r] != std::size_t{keys} * uses) {
      return std::to_string(ended[r]) + " calls of rank " + std::to_string(r) + " have ended";
    }
    figures.calls += ended[r];
    figures.daemons += ranks.daemons(r);
    for (std::uint32_t l = 0; l < shape.lanes; ++l) {
      figures.preemptions += ranks.stats(r, l).preemptions;
      figures.batched += ranks.stats(r, l).batched;
    }
    for (const auto& of_key : calls) {
      for (const GpuCall& call : of_key) {
        std::string wrong;
        if (call.dtype == DType::kInt32) {
          wrong = ranks.check(call, r);
        } else if (call.outputs[r] != of_key[0].outputs[r]) {
          wrong = "other bits than by slices";
        }
        if (!wrong.empty()) {
          return "key " + std::to_string(call.key) + ", use " + std::to_string(call.n) + ": " +
                 wrong;
        }
      }
    }
  }
  return "";
}

void run_all(const Job& job, std::uint64_t seeds) {
  Figures figures;
  for (std::uint64_t s = 0; s < seeds; ++s) {
    for (const std::uint32_t ranks : {2u, 3u}) {
      const std::uint64_t seed = base_seed() + s;
      ASSERT_EQ(run(job, ranks, seed, figures), "")
          << ranks << " ranks, seed " << seed << " (UNJAM_TEST_SEED)";
    }
  }
  std::printf("%llu calls, %llu daemons, %llu preemptions, %.1f million steps\n",
              static_cast<unsigned long long>(figures.calls),
              static_cast<unsigned long long>(figures.daemons),
              static_cast<unsigned long long>(figures.preemptions),
              static_cast<double>(figures.steps) / 1e6);
  EXPECT_GT(figures.preemptions, 0u);
  EXPECT_GT(figures.batched, 0u);
}

TEST(DaemonKernel, CallsInAnyOrderEnd) { run_all({}, 2); }
TEST(DaemonKernel, CallsThatGoTogether) { run_all({kTogether, 6, 5}, 1); }
TEST(DaemonKernel, PacketsOfAllWarps) { run_all({kPackets, 4, 5, 4096}, 1); }
TEST(DaemonKernelSoak, ManySeeds) { run_all({}, 60); }

}  // namespace
}  // namespace unjam
