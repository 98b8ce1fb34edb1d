// The clock: contended cases worked out by hand, closed forms, and that what is left out of a run
// (ranks, loops, repeats) would have said the same.
#include "plan/clock/clock.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "plan/clock/timing.h"
#include "unjam/unjam.h"

namespace unjam {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- by hand ----

// Four GPUs a node, links of 10 GB/s and 2 us, one NIC of 5 GB/s and 5 us, and 1 us more between
// leaves of two nodes; a slice takes 1 us. Messages have 100,000 bytes: 10 us on a link, 20 on a
// NIC.
constexpr std::uint64_t kBytes = 100'000;
Machine hand_machine() {
  Machine m;
  m.gpus_per_node = 4;
  m.nodes_per_leaf = 2;
  m.link_us = 2;
  m.link_gb_per_s = 10;
  m.network_us = 5;
  m.nic_gb_per_s = 5;
  m.leaf_us = 1;
  m.slice_us = 1;
  m.engine_gb_per_s = kInfinity;
  m.slots = 1;
  return m;
}

// What one rank does, in one lane; chunks of one slice.
struct Written {
  std::vector<int> from, to;
};
Pattern written(const std::vector<std::vector<Written>>& programs, std::uint64_t bytes = kBytes) {
  Pattern p;
  p.ranks = static_cast<int>(programs.size());
  p.all_ranks = p.ranks;
  p.chunk_bytes = p.slice_bytes = kBytes;
  p.lane_bytes = {bytes};
  p.first_step.push_back(0);
  for (const std::vector<Written>& program : programs) {
    for (const Written& w : program) {
      ClockStep s;
      s.reads = static_cast<std::uint16_t>(w.from.size());
      s.writes = static_cast<std::uint16_t>(w.to.size());
      p.add_step(s, w.from, w.to);
    }
    p.end_rank();
  }
  return p;
}

double end_of(const Pattern& p, const Machine& m, const RunOptions& options = {}) {
  const RunResult result = run_clock(p, m, options);
  EXPECT_EQ(result.error, "");
  return static_cast<double>(result.end) / 1e6;
}

// (bench/simgrid_witness.py has these five for SimGrid, under the same names.)
TEST(ByHand, Incast) {
  // Sent at 1; into the link of rank 0 from 1 to 11, 21, 31; there at 33; reduced at 34.
  const Pattern p = written({{{{1, 2, 3}, {}}}, {{{}, {0}}}, {{{}, {0}}}, {{{}, {0}}}});
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine()), 34);
}

TEST(ByHand, Outcast) {
  // Out of the link of rank 0 from 1 to 11, 21, 31; the last one is there at 33, taken at 34, and
  // sent on: 34 + 10 + 2, taken at 47.
  const Pattern p = written({{{{}, {1, 2, 3}}}, {{{0}, {}}, {{3}, {}}}, {{{0}, {}}}, {{{0}, {1}}}});
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine()), 47);
}

TEST(ByHand, SharedNic) {
  // Ranks 0 and 1 send through their node's NIC, from 1 to 21 and 41, there at 46; rank 4 reduces
  // till 47 and sends to rank 5: 10 + 2, taken at 60.
  const Pattern p =
      written({{{{}, {4}}}, {{{}, {4}}}, {}, {}, {{{0, 1}, {5}}}, {{{4}, {}}}, {}, {}});
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine()), 60);
}

TEST(ByHand, Trunk) {
  // The leaf's two NICs have a trunk of a quarter, 40 us a message. Ranks 0 and 4, of two nodes,
  // send to the other leaf: through the trunk from 1 to 41 and 81, there 6 us later, taken at 88.
  Machine m = hand_machine();
  m.oversubscription = 4;
  std::vector<std::vector<Written>> programs(16);
  programs[0] = {{{}, {8}}};
  programs[4] = {{{}, {12}}};
  programs[8] = {{{0}, {}}};
  programs[12] = {{{4}, {}}};
  EXPECT_DOUBLE_EQ(end_of(written(programs), m), 88);
}

TEST(ByHand, OneSlot) {
  // Five slices, and half a microsecond more for who has waited. The first one is sent at 1, there
  // at 13, taken at 14.5, its room known at 16.5. The next is sent at 18, 17 us after the one
  // before; so the fifth at 69, and taken at 82.5.
  Machine m = hand_machine();
  m.wait_us = 0.5;
  const Pattern p = written({{{{}, {1}}}, {{{0}, {}}}}, 5 * kBytes);
  EXPECT_DOUBLE_EQ(end_of(p, m), 82.5);
}

TEST(ByHand, TwoSlots) {
  // The second is sent at 2 and leaves behind the first, till 21, there at 23. The third has room
  // at 16.5, is sent at 18, leaves at 31; so the link is never idle: the fifth leaves at 51, and is
  // taken at 54.5.
  Machine m = hand_machine();
  m.wait_us = 0.5;
  m.slots = 2;
  const Pattern p = written({{{{}, {1}}}, {{{0}, {}}}}, 5 * kBytes);
  EXPECT_DOUBLE_EQ(end_of(p, m), 54.5);
}

TEST(ByHand, BytesThatTheLaneMoves) {
  // 10 GB/s: 10 us for each slice read or written, whichever are more. Rank 0 writes two: sent at
  // 21, through the link at 31 and 41; the last is there at 43, read in 11 us.
  Machine m = hand_machine();
  m.engine_gb_per_s = 10;
  const Pattern p = written({{{{}, {1, 2}}}, {{{0}, {}}}, {{{0}, {}}}});
  EXPECT_DOUBLE_EQ(end_of(p, m), 54);
}

TEST(ByHand, FurtherPeers) {
  // Half a microsecond for each: rank 0 sends at 2, through its link at 12, 22, 32, and the last
  // one is taken at 35.
  Machine m = hand_machine();
  m.peer_us = 0.5;
  const Pattern p = written({{{{}, {1, 2, 3}}}, {{{0}, {}}}, {{{0}, {}}}, {{{0}, {}}}});
  EXPECT_DOUBLE_EQ(end_of(p, m), 35);
}

TEST(ByHand, OneProcessorForAll) {
  // Ranks 0 and 1 each take it for 1 us; the messages are there at 1 + 12 and 2 + 12, and ranks 2
  // and 3 take it from 13 and 14 on.
  Machine m = hand_machine();
  m.cores = 1;
  const Pattern p = written({{{{}, {2}}}, {{{}, {3}}}, {{{0}, {}}}, {{{1}, {}}}});
  EXPECT_DOUBLE_EQ(end_of(p, m), 15);
}

TEST(ByHand, LateRanks) {
  const Pattern p = written({{{{}, {1}}}, {{{0}, {}}}});
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine()), 14);
  RunOptions late;
  late.late = {{0, 100}};
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine(), late), 114);
  late.late = {{1, 100}};
  EXPECT_DOUBLE_EQ(end_of(p, hand_machine(), late), 101);
}

TEST(ByHand, WhoCannotGoOnIsNamed) {
  // Rank 1 never sends.
  const RunResult result =
      run_clock(written({{{{1}, {}}}, {{{0}, {0}}}}), hand_machine(), RunOptions{});
  EXPECT_NE(result.error.find("rank 0 cannot go on"), std::string::npos) << result.error;
}

// ---- closed forms ----

// Only hops take time.
Machine hops_machine(int gpus, double link_us, double network_us) {
  Machine m;
  m.gpus_per_node = gpus;
  m.nodes_per_leaf = 1 << 20;
  m.link_us = link_us;
  m.network_us = network_us;
  m.link_gb_per_s = m.nic_gb_per_s = m.engine_gb_per_s = kInfinity;
  m.lanes = 3;
  m.slots = 4;
  return m;
}

Timing time_of(const std::string& algorithm, int ranks, std::uint64_t bytes, const Machine& m,
               const TimeOptions& options = {}, Kind kind = Kind::kAllReduce) {
  ClockRequest request;
  request.algorithm = algorithm;
  request.request.kind = kind;
  request.request.ranks = ranks;
  request.request.count = bytes / 4;
  std::string error;
  const std::optional<Timing> timing = time_plan(request, m, options, &error);
  EXPECT_TRUE(timing.has_value()) << algorithm << " " << ranks << " " << bytes << ": " << error;
  return timing.value_or(Timing{});
}

int log2_below(int n) {
  int log = 0;
  while ((2 << log) <= n) ++log;
  return log;
}

TEST(ClosedForm, TreesHaveTwiceTheirHeightInHops) {
  for (int n = 2; n <= 130; ++n) {
    EXPECT_DOUBLE_EQ(time_of("double_binary_tree", n, 8, hops_machine(1, 1, 3)).us,
                     2 * 3 * log2_below(n))
        << n;
  }
}

TEST(ClosedForm, RingsHaveTwiceTheRanksInHops) {
  for (const int n : {2, 3, 4, 7, 8, 64, 130}) {
    EXPECT_DOUBLE_EQ(time_of("ring", n, 64 * 130 * 7, hops_machine(1, 1, 3)).us, 2 * 3 * (n - 1))
        << n;
  }
}

TEST(ClosedForm, RingsOfNodesAndTreesOfNodes) {
  for (const int nodes : {1, 2, 3, 8, 20}) {
    const Machine m = hops_machine(6, 1, 3);
    EXPECT_DOUBLE_EQ(time_of("ring_2d", nodes * 6, 8, m).us, 2 * (5 + 3 * (nodes - 1))) << nodes;
    EXPECT_DOUBLE_EQ(time_of("node_trees", nodes * 6, 8, m).us, 2 * (5 + 3 * log2_below(nodes)))
        << nodes;
  }
}

TEST(ClosedForm, BaseIsAdded) {
  Machine m = hops_machine(1, 1, 3);
  m.base_us = 7;
  EXPECT_DOUBLE_EQ(time_of("double_binary_tree", 8, 8, m).us, 18 + 7);
}

// ---- what is left out ----

// Everything takes time, and leaves' trunks are narrow.
Machine full_machine(int nodes_per_leaf) {
  Machine m;
  m.gpus_per_node = 6;
  m.nics_per_node = 2;
  m.nics_by_lane = true;
  m.nodes_per_leaf = nodes_per_leaf;
  m.link_us = 0.7;
  m.link_gb_per_s = 50;
  m.network_us = 3.1;
  m.nic_gb_per_s = 12.5;
  m.leaf_us = 1.3;
  m.oversubscription = 2;
  m.slice_us = 0.4;
  m.wait_us = 0.3;
  m.peer_us = 0.1;
  m.engine_gb_per_s = 20;
  m.lanes = 5;
  m.slots = 4;
  m.slot_bytes = 32768;
  return m;
}

TEST(Folded, RingsTakeAsLongAsAllTheirRanks) {
  TimeOptions all;
  all.unfolded = true;
  for (const int ranks : {96, 108, 216}) {
    for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter}) {
      for (const std::uint64_t block : {16u, 4096u, 200'000u}) {
        const std::uint64_t bytes =
            kind == Kind::kAllReduce ? block * static_cast<unsigned>(ranks) : block;
        const Machine m = full_machine(ranks == 108 ? 6 : 4);
        const Timing folded = time_of("ring", ranks, bytes, m, {}, kind);
        const Timing whole = time_of("ring", ranks, bytes, m, all, kind);
        EXPECT_DOUBLE_EQ(folded.us, whole.us) << ranks << " " << to_string(kind) << " " << block;
        EXPECT_LT(folded.ranks_run, ranks);
        EXPECT_TRUE(folded.exact);
        EXPECT_EQ(whole.ranks_run, ranks);
        EXPECT_EQ(whole.repeats, 0u);  // it was the planner's
      }
    }
  }
}

TEST(Folded, RingsOfNodesTakeAsLongAsAllTheirRanks) {
  TimeOptions all;
  all.unfolded = true;
  for (const int ranks : {96, 108, 216}) {
    for (const std::uint64_t block : {16u, 4096u, 200'000u}) {
      const Machine m = full_machine(ranks == 108 ? 6 : 4);
      const std::uint64_t bytes = block * static_cast<unsigned>(ranks);
      EXPECT_DOUBLE_EQ(time_of("ring_2d", ranks, bytes, m).us,
                       time_of("ring_2d", ranks, bytes, m, all).us)
          << ranks << " " << block;
    }
  }
}

TEST(LeftOut, RepeatsTakeAsLongAsAll) {
  TimeOptions all;
  all.run_all = true;
  for (const char* algorithm : {"ring", "ring_2d"}) {
    for (const std::uint64_t bytes : {1u << 20, 1u << 26}) {
      const Timing some = time_of(algorithm, 3 * 1536, bytes, full_machine(4));
      EXPECT_LT(some.repeats_run, some.repeats) << algorithm;
      // (Lanes that contend for trunks need not do the same each time.)
      EXPECT_NEAR(some.us / time_of(algorithm, 3 * 1536, bytes, full_machine(4), all).us, 1, 0.005)
          << algorithm << " " << bytes;
    }
  }
}

TEST(LeftOut, LoopsTakeAsLongAsAll) {
  TimeOptions all;
  all.run_all = true;
  for (const char* algorithm : {"double_binary_tree", "ring", "one_shot", "rsag"}) {
    Machine m = full_machine(4);
    m.gpus_per_node = 8;  // a node alone: ports that nobody shares but by turns
    const Timing some = time_of(algorithm, 8, 100'000'000, m);
    EXPECT_LT(some.loops_run, some.loops) << algorithm;
    EXPECT_NEAR(some.us / time_of(algorithm, 8, 100'000'000, m, all).us, 1, 0.03) << algorithm;
  }
}

// ---- what must hold whatever the constants ----

TEST(Clock, FasterLinksAreNeverSlowerWithoutContention) {
  for (const char* algorithm : {"double_binary_tree", "ring"}) {
    for (const int ranks : {2, 5, 8, 33}) {
      for (const std::uint64_t bytes : {std::uint64_t{1056}, std::uint64_t{10'560'000}}) {
        Machine slow = full_machine(1 << 20);
        slow.gpus_per_node = slow.nics_per_node = 1;
        slow.nics_by_lane = false;
        slow.lanes = 1;
        Machine wide = slow, near = slow;
        wide.nic_gb_per_s *= 2;
        near.network_us /= 2;
        const double us = time_of(algorithm, ranks, bytes, slow).us;
        EXPECT_LE(time_of(algorithm, ranks, bytes, wide).us, us) << algorithm << ranks;
        EXPECT_LE(time_of(algorithm, ranks, bytes, near).us, us) << algorithm << ranks;
      }
    }
  }
}

TEST(Clock, ALateLeafDelaysAllByAsMuch) {
  Machine m = hops_machine(1, 1, 3);
  TimeOptions late;
  late.late = {{0, 1000}};  // of eight, rank 0 is a leaf, and as deep as any
  EXPECT_DOUBLE_EQ(time_of("double_binary_tree", 8, 8, m, late).us, 1000 + 18);
  // Among rings each rank is.
  late.late = {{3, 1000}};
  EXPECT_GE(time_of("ring", 96, 1 << 20, full_machine(4), late).us,
            1000 + time_of("ring", 96, 1 << 20, full_machine(4)).us / 2);
}

TEST(Clock, ThePathIsAllOfTheTime) {
  for (const char* algorithm : {"double_binary_tree", "ring", "one_shot", "node_trees"}) {
    Machine m = full_machine(4);
    TimeOptions options;
    options.keep_path = true;
    options.unfolded = true;
    const Timing timing = time_of(algorithm, 48, 1 << 20, m, options);
    ASSERT_FALSE(timing.run.path.empty());
    Picoseconds before = 0;
    for (const PathSlice& s : timing.run.path) {
      EXPECT_EQ(s.start, before + s.queue + s.transmit + s.latency + s.core) << algorithm;
      EXPECT_GE(s.queue, 0);
      EXPECT_GE(s.transmit, 0);
      EXPECT_GT(s.end, s.start);
      before = s.end;
    }
    EXPECT_EQ(before, timing.run.end) << algorithm;
  }
}

TEST(Clock, ThePathHasAHopForEachLevel) {
  TimeOptions options;
  options.keep_path = true;
  const Timing timing = time_of("double_binary_tree", 130, 8, hops_machine(1, 1, 3), options);
  int hops = 0;
  for (const PathSlice& s : timing.run.path) hops += s.cause == Cause::kData;
  EXPECT_EQ(hops, 2 * 7);
}

TEST(Clock, PortsAreBusyWithWhatPassesThem) {
  Machine m = hand_machine();
  const RunResult result = run_clock(
      written({{{{1, 2, 3}, {}}}, {{{}, {0}}}, {{{}, {0}}}, {{{}, {0}}}}), m, RunOptions{});
  const PortUse& in = result.use[static_cast<std::size_t>(PortClass::kLinkIn)];
  EXPECT_EQ(in.busy, 30'000'000);
  EXPECT_EQ(in.port, 0u);
  EXPECT_EQ(in.ports, 4u);
  EXPECT_EQ(result.use[static_cast<std::size_t>(PortClass::kNicOut)].busy, 0);
  EXPECT_EQ(result.messages, 3u);
}

TEST(Clock, AllKindsOfAllAlgorithms) {
  for (int kind = 0; kind < kNumKinds; ++kind) {
    const Kind k = static_cast<Kind>(kind);
    const int ranks = k == Kind::kSendRecv ? 2 : 12;
    std::string names = clock_algorithms(k) + "|";
    for (std::size_t begin = 0, end; (end = names.find('|', begin)) != std::string::npos;
         begin = end + 1) {
      for (const std::uint64_t bytes : {4u, 100'000u}) {
        const Timing t =
            time_of(names.substr(begin, end - begin), ranks, bytes, full_machine(4), {}, k);
        EXPECT_GT(t.us, 0) << to_string(k) << " " << names.substr(begin, end - begin);
      }
    }
    EXPECT_GT(time_of("auto", ranks, 4096, full_machine(4), {}, k).us, 0) << to_string(k);
  }
}

TEST(Clock, ManyRanks) {
  const Machine m = hops_machine(6, 1, 3);
  EXPECT_GT(time_of("double_binary_tree", 24'576, 8, m).us, 0);
  // More than a plan can name.
  EXPECT_DOUBLE_EQ(time_of("double_binary_tree", 131'072, 8, hops_machine(1, 1, 3)).us, 2 * 17 * 3);
  EXPECT_DOUBLE_EQ(time_of("ring", 131'072, 4 * 131'072, hops_machine(1, 1, 3)).us,
                   2.0 * 131'071 * 3);
}

// ---- what is refused ----

std::string error_of(const ClockRequest& request, const Machine& m, const TimeOptions& o = {}) {
  std::string error;
  EXPECT_FALSE(time_plan(request, m, o, &error).has_value());
  return error;
}

TEST(Refused, RanksAndAlgorithms) {
  const Machine m = hops_machine(6, 1, 3);
  ClockRequest r;
  r.request.count = 100;
  r.request.ranks = 0;
  EXPECT_EQ(error_of(r, m), "the clock runs 1 to 1048576 ranks, not 0");
  r.request.ranks = 1'000'000'000;
  EXPECT_EQ(error_of(r, m), "the clock runs 1 to 1048576 ranks, not 1000000000");
  r.request.ranks = 7;
  r.algorithm = "ring_2d";
  EXPECT_EQ(error_of(r, m), "ring_2d needs whole nodes of 6 ranks, not 7 ranks");
  r.algorithm = "tree";
  EXPECT_NE(error_of(r, m).find("there is no algorithm tree: give auto|ring|"), std::string::npos);
  r.algorithm = "chain";
  EXPECT_NE(error_of(r, m).find("chain does not serve all_reduce: give auto|"), std::string::npos);
  r.algorithm = "node_trees";
  r.request.kind = Kind::kBroadcast;
  EXPECT_NE(error_of(r, m).find("node_trees does not serve broadcast"), std::string::npos);
  r.algorithm = "one_shot";
  r.request.ranks = 100;
  EXPECT_NE(error_of(r, m).find("one_shot plans serve at most 64 ranks"), std::string::npos);
  r.algorithm = "double_binary_tree";
  r.request.ranks = 100'000;
  r.request.root = 100'000;
  EXPECT_NE(error_of(r, m).find("root 100000 is not in a group"), std::string::npos);
}

TEST(Refused, LateRanks) {
  const Machine m = hops_machine(6, 1, 3);
  ClockRequest r;
  r.request.count = 100;
  r.request.ranks = 6;
  TimeOptions o;
  o.late = {{6, 1}};
  EXPECT_EQ(error_of(r, m, o), "late rank 6 is not one of 6 ranks");
  o.late = {{1, -1}};
  EXPECT_NE(error_of(r, m, o).find("late rank 1 is late by no time"), std::string::npos);
  o.late = {{1, std::nan("")}};
  EXPECT_NE(error_of(r, m, o).find("late rank 1 is late by no time"), std::string::npos);
  o.late = {{1, 1}};
  r.request.ranks = 6000;
  r.algorithm = "ring";
  EXPECT_NE(error_of(r, m, o).find("rings of more than 1024 ranks"), std::string::npos);
}

TEST(Refused, WhatTakesTooLong) {
  Machine m = full_machine(4);
  m.nic_gb_per_s = 0.001;
  m.slot_bytes = 1 << 26;
  m.oversubscription = 1000;
  ClockRequest r;
  r.request.ranks = 768;
  r.request.count = std::uint64_t{1} << 38;
  r.algorithm = "double_binary_tree";
  EXPECT_EQ(error_of(r, m), "it takes more than 1000000 s");
  r.request.ranks = 1 << 20;
  m.lanes = 32;
  EXPECT_NE(error_of(r, m).find("more than 4194304 lanes"), std::string::npos);
}

TEST(Refused, Machines) {
  ClockRequest r;
  r.request.count = 100;
  r.request.ranks = 6;
  const auto with = [&](auto change) {
    Machine m = hops_machine(6, 1, 3);
    change(m);
    return error_of(r, m);
  };
  EXPECT_NE(with([](Machine& m) { m.gpus_per_node = 0; }).find("gpus_per_node 0"),
            std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.link_us = -1; }).find("link_us"), std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.network_us = std::nan(""); }).find("network_us"),
            std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.nic_gb_per_s = 0; }).find("nic_gb_per_s"), std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.oversubscription = 0; }).find("oversubscription"),
            std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.lanes = 33; }).find("lanes 33"), std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.slots = 0; }).find("slots 0"), std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.slot_bytes = 100; }).find("slot_bytes 100"), std::string::npos);
  EXPECT_NE(with([](Machine& m) { m.cores = -1; }).find("cores -1"), std::string::npos);
}

// ---- the C API ----

class Api : public testing::Test {
 protected:
  Api() {
    machine_.size = sizeof(machine_);
    machine_.gpus_per_node = 8;
    machine_.nics_per_node = machine_.nodes_per_leaf = 1;
    machine_.device = UNJAM_DEVICE_CUDA;
    machine_.lanes = 3;
    machine_.slots = 4;
    machine_.slot_bytes = 65536;
    machine_.link_us = 2;
    machine_.link_gb_per_s = machine_.nic_gb_per_s = machine_.engine_gb_per_s = kInfinity;
    machine_.oversubscription = 1;
    timing_.size = sizeof(timing_);
    timing_.kind = UNJAM_ALL_REDUCE;
    timing_.dtype = UNJAM_FLOAT32;
    timing_.op = UNJAM_SUM;
    timing_.count = 2;
    timing_.nranks = 8;
    timing_.algorithm = "double_binary_tree";
    timing_.machine = &machine_;
  }
  unjamResult_t run() {
    std::array<char, 65536> buffer = {};
    const unjamResult_t r = unjamPlanTime(&timing_, buffer.data(), buffer.size(), nullptr);
    text_ = r == UNJAM_SUCCESS ? buffer.data() : unjamGetLastError();
    return r;
  }
  // That it is refused, with this in the message.
  void expect_refused(const std::string& part) {
    EXPECT_EQ(run(), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(text_.find(part), std::string::npos) << text_;
  }

  unjamMachine_t machine_ = {};
  unjamPlanTiming_t timing_ = {};
  std::string text_;
};

TEST_F(Api, SaysTheTime) {
  ASSERT_EQ(run(), UNJAM_SUCCESS) << text_;
  EXPECT_NE(text_.find("\"us\":12,"), std::string::npos) << text_;
  EXPECT_EQ(text_.find("\"path\""), std::string::npos);
  timing_.path = 1;
  ASSERT_EQ(run(), UNJAM_SUCCESS) << text_;
  EXPECT_NE(text_.find("\"path\":{\"us\":12,"), std::string::npos) << text_;
  const std::int32_t rank = 0;
  const double us = 100;
  timing_.late_count = 1;
  timing_.late_ranks = &rank;
  timing_.late_us = &us;
  ASSERT_EQ(run(), UNJAM_SUCCESS) << text_;
  EXPECT_NE(text_.find("\"us\":112,"), std::string::npos) << text_;
}

TEST_F(Api, RefusesStructsThatItDoesNotKnow) {
  EXPECT_EQ(unjamPlanTime(nullptr, nullptr, 0, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  timing_.machine = nullptr;
  expect_refused("machine is NULL");
  timing_.machine = &machine_;
  machine_.size = 8;
  expect_refused("unjamMachine_t has an unknown size");
  timing_.size = 8;
  expect_refused("unjamPlanTiming_t has an unknown size");
}

TEST_F(Api, RefusesWhatNoEnumHas) {
  timing_.kind = 99;
  expect_refused("kind 99 is out of range");
  timing_.kind = UNJAM_ALL_REDUCE;
  timing_.nranks = std::int64_t{1} << 40;
  expect_refused("nranks 1099511627776 is out of range");
  timing_.nranks = 8;
  machine_.lanes = 65536 + 1;
  expect_refused("lanes 65537 is out of range");
  machine_.lanes = 1;
  timing_.late_count = 1;
  expect_refused("late_ranks or late_us is NULL");
}

}  // namespace
}  // namespace unjam
