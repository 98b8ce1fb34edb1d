// What plans are lowered to (plan/lower.h), and calls without the engine are told of it
// (device/cuda/host/bind.h), against the planners' programs: carried out here with plain copies and
// sums, for every kind, group and root, it must give what the collective is to give. And what it
// must not take on, and how lanes share it. (That it is what it was: call_golden_test.cc.)
#include "plan/lower.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "device/cuda/host/bind.h"
#include "engine/set_plan.h"
#include "plan/algorithms/chain.h"
#include "plan/algorithms/rsag.h"
#include "plan/common.h"
#include "plan/registry.h"
#include "plan/selector.h"
#include "tests/support/written_programs.h"

namespace unjam {
namespace {

using Element = std::int32_t;
// (Without a slot's bytes: those of the plan's limits.)
constexpr LowerLimits kLimits{512, 32, true, 20};

// A call of a group: what each rank's plan and description are.
struct Group {
  PlanRequest request;
  std::vector<Plan> plans;
  std::vector<Invocation> invocations;
  std::vector<Lowered> lowered;
  std::vector<StreamCall> calls;
  std::vector<unsigned> threads;
  std::vector<std::vector<Element>> inputs, outputs;
  LowerLimits limits_;

  Group(Kind kind, Algorithm algorithm, int ranks, int root, std::uint64_t count,
        const LowerLimits& lowering = kLimits, bool lines = false, bool in_place = false,
        bool has_data = false, DType dtype = DType::kInt32) {
    request.kind = kind;
    request.dtype = dtype;
    request.count = count;
    request.ranks = ranks;
    request.root = root;
    PlanLimits limits;
    limits.device = Device::kCuda;
    limits.lanes = 32;
    limits.guaranteed_slots = 4;
    limits.guaranteed_slot_bytes = ranks <= 2 ? 149824 : 74944;
    limits.lines = lines;
    const auto n = static_cast<std::size_t>(ranks);
    plans.resize(n), invocations.resize(n), lowered.resize(n), calls.resize(n), threads.resize(n);
    inputs.resize(n), outputs.resize(n);
    for (int r = 0; r < ranks; ++r) {
      const auto at = static_cast<std::size_t>(r);
      request.rank = r;
      std::string error;
      const std::optional<Plan> plan = make_plan(request, limits, algorithm, &error);
      EXPECT_TRUE(plan.has_value()) << error;
      if (!plan) continue;
      plans[at] = *plan;
      if (has_data) {
        inputs[at].resize(blocks(true) * count);
        outputs[at].assign(blocks(false) * count, -1);
        for (std::size_t i = 0; i < inputs[at].size(); ++i) inputs[at][i] = value(r, i);
      }
      Invocation& inv = invocations[at];
      set_plan(plans[at], static_cast<std::uint16_t>(r), &inv);
      // (Nobody looks there but carry_out(): an address says how it is aligned.)
      inv.input = has_data ? inputs[at].data() : reinterpret_cast<Element*>(0x10000);
      inv.output = has_data ? outputs[at].data() : reinterpret_cast<Element*>(0x20000);
      if (in_place) inv.output = const_cast<void*>(inv.input);
      if (plans[at].protocol != Protocol::kSlot) {  // as the runtime, by a key's tag
        inv.geometry.first_lane = spread_lanes(count, inv.geometry.lanes, limits.lanes);
      }
      inv.group_size = static_cast<std::uint16_t>(ranks);
      limits_ = lowering;
      if (limits_.slot_bytes == 0) limits_.slot_bytes = limits.guaranteed_slot_bytes;
      lower_again(at);
    }
  }

  // Rank at's plan, or invocation, is another.
  void lower_again(std::size_t at) {
    lowered[at] = lower(plans[at], request.ranks, static_cast<int>(at), limits_);
    threads[at] = lowered[at].threads;
    calls[at] = StreamCall{};
    if (lowered[at].why != NeedsEngine::kNo) return;
    bind(lowered[at], invocations[at], calls[at]);
    calls[at].lanes = invocations[at].geometry.lanes;  // as the daemon
  }
  std::uint8_t whole(std::size_t at) const { return batch_of(lowered[at], calls[at]); }
  void set_dtype(std::size_t at, DType dtype) {
    plans[at].geometry.dtype = invocations[at].geometry.dtype = dtype;
    lower_again(at);
  }

  static Element value(int rank, std::size_t i) {
    return static_cast<Element>(rank * 1000003 + static_cast<int>(i % 999983));
  }
  // Of `count` elements, in the input or the output.
  std::size_t blocks(bool input) const {
    const Kind k = request.kind;
    const bool many =
        k == Kind::kAllToAll || (input ? k == Kind::kReduceScatter || k == Kind::kScatter
                                       : k == Kind::kAllGather || k == Kind::kGather);
    return many ? static_cast<std::size_t>(request.ranks) : 1;
  }
  bool receives(int rank) const {
    return (request.kind != Kind::kReduce && request.kind != Kind::kGather) || rank == request.root;
  }
  Element expected(int rank, std::size_t i) const {
    const std::size_t count = request.count;
    const int block = static_cast<int>(i / count);
    Element sum = 0;
    switch (request.kind) {
      case Kind::kAllReduce:
      case Kind::kReduce:
        for (int r = 0; r < request.ranks; ++r) sum += value(r, i);
        return sum;
      case Kind::kReduceScatter:
        for (int r = 0; r < request.ranks; ++r) {
          sum += value(r, static_cast<std::size_t>(rank) * count + i);
        }
        return sum;
      case Kind::kAllGather:
      case Kind::kGather:
        return value(block, i % count);
      case Kind::kBroadcast:
        return value(request.root, i);
      case Kind::kScatter:
        return value(request.root, static_cast<std::size_t>(rank) * count + i);
      default:
        return value(block, static_cast<std::size_t>(rank) * count + i % count);
    }
  }
  void check() const {
    for (int r = 0; r < request.ranks; ++r) {
      const auto& output = outputs[static_cast<std::size_t>(r)];
      std::size_t i = 0;
      while (i < output.size() && output[i] == (receives(r) ? expected(r, i) : -1)) ++i;
      ASSERT_EQ(i, output.size()) << "rank " << r << ": the first wrong element";
    }
  }
};

std::string title(const Group& g) {
  return std::string(to_string(g.request.kind)) + ", " + std::to_string(g.request.ranks) +
         " ranks, root " + std::to_string(g.request.root) + ", " + std::to_string(g.request.count) +
         " elements";
}

// The bytes that a description means, of one rank.
class Side {
 public:
  Side(Group& g, std::size_t rank)
      : call_(g.calls[rank]),
        input_(reinterpret_cast<const unsigned char*>(g.inputs[rank].data())),
        input_bytes_(g.inputs[rank].size() * sizeof(Element)),
        output_(reinterpret_cast<unsigned char*>(g.outputs[rank].data())),
        output_bytes_(g.outputs[rank].size() * sizeof(Element)) {}

  const StreamCall& call() const { return call_; }
  std::vector<unsigned char> read(std::uint64_t at) const {
    EXPECT_LE(at + call_.block_bytes, input_bytes_);
    return {input_ + at, input_ + at + call_.block_bytes};
  }
  void write(std::uint64_t at, const std::vector<unsigned char>& bytes) const {
    ASSERT_LE(at + bytes.size(), output_bytes_);
    std::memcpy(output_ + at, bytes.data(), bytes.size());
  }

 private:
  const StreamCall& call_;
  const unsigned char* input_;
  std::size_t input_bytes_;
  unsigned char* output_;
  std::size_t output_bytes_;
};

void add(std::vector<unsigned char>& to, const std::vector<unsigned char>& from) {
  ASSERT_EQ(to.size(), from.size());
  for (std::size_t i = 0; i < to.size(); i += sizeof(Element)) {
    Element a = 0, b = 0;
    std::memcpy(&a, &to[i], sizeof(a));
    std::memcpy(&b, &from[i], sizeof(b));
    a += b;
    std::memcpy(&to[i], &a, sizeof(a));
  }
}

// As run_by_packets<1>(): all send, then all receive.
void carry_out(Group& g) {
  const auto size = static_cast<unsigned>(g.request.ranks);
  std::map<std::pair<unsigned, unsigned>, std::vector<unsigned char>> messages;
  std::vector<Side> sides;
  for (std::size_t r = 0; r < size; ++r) sides.emplace_back(g, r);
  for (unsigned r = 0; r < size; ++r) {
    const StreamCall& c = sides[r].call();
    for (unsigned k = 0; k < c.num_sent; ++k) {
      const unsigned q = (c.first_sent + k) % size;
      ASSERT_NE(q, r);
      const std::uint64_t at = c.sent_from + (c.scatters ? std::uint64_t{q} * c.block_bytes : 0);
      messages[{r, q}] = sides[r].read(at);
    }
  }
  for (unsigned r = 0; r < size; ++r) {
    const StreamCall& c = sides[r].call();
    if (c.copies) sides[r].write(c.own_to, sides[r].read(c.own_from));
    std::vector<unsigned char> sum;
    if (c.reduces) sum = sides[r].read(c.own_from);
    for (unsigned k = 0; k < c.num_received; ++k) {
      const unsigned q = (c.first_received + k) % size;
      const auto message = messages.find({q, r});
      ASSERT_NE(message, messages.end()) << q << " sends nothing to " << r;
      if (c.reduces) {
        add(sum, message->second);
      } else {
        sides[r].write(c.received_to + (c.collects ? std::uint64_t{q} * c.block_bytes : 0),
                       message->second);
      }
      messages.erase(message);
    }
    if (c.reduces) sides[r].write(c.received_to, sum);
  }
  EXPECT_TRUE(messages.empty()) << "sent, and received by nobody";
}

// As run_by_packets<2>(), of plain calls: all scatter, then all reduce their part and send it, then
// all collect.
void carry_out_two_shot(Group& g) {
  const auto size = static_cast<unsigned>(g.request.ranks);
  std::vector<Side> sides;
  for (std::size_t r = 0; r < size; ++r) sides.emplace_back(g, r);
  std::vector<std::vector<unsigned char>> sums;
  for (unsigned r = 0; r < size; ++r) {
    const StreamCall& c = sides[r].call();
    sums.push_back(sides[r].read(c.own_from));
    for (unsigned k = 0; k < c.num_received; ++k) {
      const unsigned q = (c.first_received + k) % size;
      ASSERT_NE(q, r);
      ASSERT_TRUE(sides[q].call().scatters);
      add(sums[r], sides[q].read(sides[q].call().sent_from + std::uint64_t{r} * c.block_bytes));
    }
    sides[r].write(c.received_to, sums[r]);
  }
  for (unsigned r = 0; r < size; ++r) {
    const StreamCall& c = sides[r].call();
    ASSERT_TRUE(c.collects);
    for (unsigned k = 0; k < c.num_received; ++k) {
      const unsigned q = (c.first_received + k) % size;
      sides[r].write(std::uint64_t{q} * c.block_bytes, sums[q]);
    }
  }
}

// Each lane's stretch of a message, in pieces of 16 bytes, is the geometry's.
void check_stretches(const Group& g) {
  for (std::size_t r = 0; r < g.calls.size(); ++r) {
    const StreamCall& c = g.calls[r];
    const Geometry& geometry = g.invocations[r].geometry;
    const std::uint32_t parts = c.two_hops ? geometry.parts : 1;
    for (std::uint32_t p = 0; p < parts; ++p) {
      std::uint64_t at = geometry.part(p).offset * sizeof(Element);
      const std::uint64_t end = at + geometry.part(p).length * sizeof(Element);
      for (std::uint32_t l = 0; l < geometry.lanes; ++l) {
        const bool longer = l < c.longer_lanes + (c.two_hops && p < c.longer_parts ? 1 : 0);
        const std::uint64_t bytes =
            std::min<std::uint64_t>(16 * (c.lane_pieces + (longer ? 1u : 0u)), end - at);
        const Range lane = geometry.lane_part(p, geometry.first_lane + l);
        ASSERT_EQ(bytes, lane.length * sizeof(Element)) << "part " << p << ", lane " << l;
        if (bytes != 0) {
          ASSERT_EQ(at, lane.offset * sizeof(Element)) << "part " << p << ", lane " << l;
        }
        at += bytes;
      }
      ASSERT_EQ(at, end) << "part " << p;
    }
  }
}

constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                           Kind::kReduce,    Kind::kBroadcast, Kind::kAllToAll,
                           Kind::kGather,    Kind::kScatter};

TEST(Lower, OneShotGivesWhatTheCollectiveGives) {
  for (const Kind kind : kKinds) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      for (int root = 0; root < (has_root(kind) ? ranks : 1); ++root) {
        for (const std::uint64_t count : {1u, 3u, 257u, 5000u}) {
          Group g(kind, Algorithm::kOneShot, ranks, root, count, kLimits, /*lines=*/false,
                  /*in_place=*/false, /*has_data=*/true);
          SCOPED_TRACE(title(g));
          for (const unsigned threads : g.threads) {
            ASSERT_GE(threads, kLeastThreads);
            ASSERT_LE(threads, kLimits.block_threads);
            ASSERT_EQ(threads % 64, 0u);
          }
          check_stretches(g);
          carry_out(g);
          g.check();
          if (testing::Test::HasFailure()) return;
        }
      }
    }
  }
}

TEST(Lower, LanesOfAOneShotPlanHaveTheGeometrysStretches) {
  for (const Kind kind : kKinds) {
    for (std::uint64_t count = 20000; count < 120000; count += 1237) {
      const Group g(kind, Algorithm::kOneShot, 3, 1, count);
      SCOPED_TRACE(title(g));
      const Geometry& geometry = g.invocations[0].geometry;
      ASSERT_GT(geometry.lanes, 1);
      check_stretches(g);
      // A thread for each unit of the first lane's, which is a longest one, while there are any.
      const std::uint64_t units = geometry.lane_part(0, geometry.first_lane).length *
                                  sizeof(Element) / kStreamCallUnitBytes;
      ASSERT_GE(g.threads[0], std::min<std::uint64_t>(units + kStreamCallControl, 512));
    }
  }
}

TEST(Lower, LanesOfATwoShotPlanHaveTheGeometrysStretches) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const std::uint64_t count : {4096u, 40001u, 262144u, 300000u}) {
      const Group g(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, count);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_NE(g.threads[r], 0u);
        ASSERT_TRUE(g.calls[r].two_hops);
        ASSERT_EQ(g.calls[r].num_sent, ranks - 1);
        ASSERT_EQ(g.calls[r].num_received, ranks - 1);
        ASSERT_EQ(g.whole(r), 0);
      }
      check_stretches(g);
    }
  }
}

// (The data are numbers of four bytes either way.)
TEST(Lower, TwoShotGivesWhatTheCollectiveGives) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const std::uint64_t pieces : {40u, 4099u}) {
      const std::uint64_t count = 4 * pieces * static_cast<unsigned>(ranks);
      Group g(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, count, kLimits, false, false, true,
              DType::kFloat32);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_TRUE(g.calls[r].two_hops);
        ASSERT_TRUE(g.calls[r].plain);
        ASSERT_EQ(g.whole(r), kBatchTwoHops);
      }
      check_stretches(g);
      carry_out_two_shot(g);
      g.check();
      // Other operators, and buffers that are not aligned.
      StreamCall other_call;
      Invocation inv = g.invocations[0];
      inv.op = Op::kMax;
      bind(g.lowered[0], inv, other_call);
      ASSERT_TRUE(other_call.two_hops && !other_call.plain);
      inv = g.invocations[0];
      inv.output = static_cast<char*>(inv.output) + sizeof(Element);
      bind(g.lowered[0], inv, other_call);
      ASSERT_TRUE(other_call.two_hops && !other_call.plain);
      // Parts that are not alike, and other formats.
      for (const auto& [n, type] :
           {std::pair{count + 4, DType::kFloat32}, std::pair{count + 1, DType::kFloat32},
            std::pair{count, DType::kInt32}}) {
        Group other(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, n, kLimits, false, false,
                    false, type);
        SCOPED_TRACE(title(other));
        ASSERT_TRUE(other.calls[0].two_hops);
        ASSERT_FALSE(other.calls[0].plain);
        ASSERT_EQ(other.whole(0), 0);
      }
    }
  }
}

TEST(Lower, StreamsHaveTheGeometrysChunks) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kReduce,
                          Kind::kBroadcast}) {
    for (const bool in_place : {false, true}) {
      Group g(kind, Algorithm::kRsag, 4, 0, 8 << 20, kLimits, false, in_place);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_EQ(g.threads[r], kLimits.block_threads);
        ASSERT_TRUE(g.calls[r].by_slots);
        const Geometry& geometry = g.invocations[r].geometry;
        for (std::uint32_t lane = 0; lane < geometry.lanes; ++lane) {
          ASSERT_EQ(g.calls[r].chunks_of_all(), geometry.loops(lane)) << "lane " << lane;
        }
        ASSERT_EQ(g.calls[r].patience_ns, kLimits.patience_us * 1000);
        // What a broadcast's root scatters it has itself in place.
        ASSERT_EQ(g.calls[r].steps.copies, kind == Kind::kBroadcast && r == 0 && !in_place);
      }
    }
  }
}

TEST(Lower, LargeCallsArePatientForLonger) {
  const auto patience_ns = [](std::uint64_t count, std::uint32_t patience_us,
                              Kind kind = Kind::kAllReduce) {
    LowerLimits limits = kLimits;
    limits.patience_us = patience_us;
    const Group g(kind, Algorithm::kRsag, 4, 0, count, limits);
    EXPECT_TRUE(g.calls[0].by_slots);
    return g.calls[0].patience_ns;
  };
  EXPECT_EQ(patience_ns((25 << 20) - 64, 200), 200'000);  // of four bytes
  EXPECT_EQ(patience_ns(25 << 20, 200), 400'000);
  EXPECT_EQ(patience_ns(256 << 20, 200), 2'200'000);
  // Three blocks come.
  EXPECT_EQ(patience_ns(64 << 20, 200, Kind::kAllGather), 1'600'000);
  EXPECT_EQ(patience_ns(64 << 20, 200, Kind::kReduceScatter), 1'600'000);
  EXPECT_EQ(patience_ns(4ull << 30, 200), 5'000'000);
  EXPECT_EQ(patience_ns(256 << 20, 0), 0);
  EXPECT_EQ(patience_ns(4ull << 30, 1'000'000), UINT32_MAX);
}

TEST(Lower, ChainsAreStreams) {
  const LowerLimits limits{512, 32, true, 20, 74944};
  for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
    for (const int ranks : {3, 4}) {
      Group g(kind, Algorithm::kChain, ranks, 1, 8 << 20, limits);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_EQ(g.threads[r], limits.block_threads);
        ASSERT_TRUE(g.calls[r].by_slots);
        ASSERT_TRUE(g.calls[r].steps.tuning.paced);
        const Geometry& geometry = g.invocations[r].geometry;
        for (std::uint32_t lane = 0; lane < geometry.lanes; ++lane) {
          ASSERT_EQ(g.calls[r].chunks_of_all(), geometry.loops(lane)) << "lane " << lane;
        }
      }
    }
  }
  // A chunk that needs more than a slot, as longer chains' may, and slots that are too small.
  Group g(Kind::kReduce, Algorithm::kChain, 4, 1, 8 << 20, limits);
  g.plans[0].geometry.chunk *= 2;
  g.lower_again(0);
  EXPECT_EQ(g.lowered[0].why, NeedsEngine::kLongChunks);
  EXPECT_EQ(Group(Kind::kReduce, Algorithm::kChain, 5, 1, 8 << 20, limits).threads[0], 0u);
  const LowerLimits small{512, 32, true, 20, 32768};
  EXPECT_FALSE(Group(Kind::kReduce, Algorithm::kChain, 4, 1, 8 << 20, small).calls[0].by_slots);
}

TEST(Lower, WhatLanesCannotDoNeedsTheEngine) {
  // More than a thread can keep of a reduction, where blocks have few: 40 units of each.
  const LowerLimits few{128, 32, true, 20};
  constexpr std::uint64_t kCount = 320000;  // 40 KB a lane
  EXPECT_EQ(Group(Kind::kAllReduce, Algorithm::kOneShot, 2, 0, kCount, few).threads[0], 0u);
  EXPECT_NE(Group(Kind::kAllGather, Algorithm::kOneShot, 2, 0, kCount, few).threads[0], 0u);
  EXPECT_NE(Group(Kind::kAllReduce, Algorithm::kOneShot, 2, 0, kCount).threads[0], 0u);
  EXPECT_FALSE(
      Group(Kind::kAllReduce, Algorithm::kTwoShot, 2, 0, 2 * kCount, few).calls[0].two_hops);
  EXPECT_TRUE(Group(Kind::kAllReduce, Algorithm::kTwoShot, 2, 0, 2 * kCount).calls[0].two_hops);
  // More than a loop carries.
  EXPECT_EQ(Group(Kind::kAllGather, Algorithm::kOneShot, 2, 0, 6 << 20).threads[0], 0u);
  // Lines, where these may come in pieces.
  const LowerLimits in_pieces{512, 32, false, 20};
  EXPECT_EQ(Group(Kind::kAllGather, Algorithm::kOneShot, 2, 0, 100000, in_pieces, true).threads[0],
            0u);
  EXPECT_NE(Group(Kind::kAllGather, Algorithm::kOneShot, 2, 0, 100000, kLimits, true).threads[0],
            0u);
  // Blocks of too few threads for a stream's warps.
  const LowerLimits small{128, 32, true, 20};
  EXPECT_FALSE(Group(Kind::kAllGather, Algorithm::kRsag, 2, 0, 8 << 20, small).calls[0].by_slots);
}

TEST(Lower, WhatIsPlainIsAligned) {
  Group g(Kind::kAllReduce, Algorithm::kOneShot, 2, 0, 1000);
  Invocation& inv = g.invocations[0];
  g.set_dtype(0, DType::kFloat32);
  StreamCall call;
  const auto plain = [&] {
    EXPECT_EQ(g.lowered[0].why, NeedsEngine::kNo);
    bind(g.lowered[0], inv, call);
    return call.plain;
  };
  EXPECT_TRUE(plain());
  inv.output = reinterpret_cast<Element*>(0x20004);
  EXPECT_FALSE(plain());
  inv.output = reinterpret_cast<Element*>(0x20008);
  EXPECT_TRUE(plain());
  g.set_dtype(0, DType::kInt32);
  EXPECT_FALSE(plain());
}

// Those that would take turns are for crowds, beside streams: of a chain as many bytes as of a
// rsag.
TEST(Lower, LongChainsAreForCrowds) {
  const LowerLimits limits{512, 32, true, 20, 74944};
  const auto whole = [&](int ranks, std::uint64_t chunks) {
    const std::uint64_t count = chunks * 32 * 65536 / sizeof(Element);
    const Group g(Kind::kBroadcast, Algorithm::kChain, ranks, 1, count, limits);
    EXPECT_EQ(g.calls[0].chunks_of_all(), chunks);
    return g.whole(0);
  };
  EXPECT_EQ(whole(3, 64), kPipelined);
  EXPECT_EQ(whole(3, 65), kPipelinedIfContended);
  EXPECT_EQ(whole(4, 96), kPipelined);
  EXPECT_EQ(whole(4, 97), kPipelinedIfContended);
}

// Invocation::batch, as the engine reads it.
TEST(Lower, WhatTheEngineTriesWhole) {
  const auto whole = [](Kind kind, Algorithm algorithm, std::uint64_t count, DType dtype, Op op) {
    Group g(kind, algorithm, 2, 0, count);
    g.invocations[0].op = op;
    g.set_dtype(0, dtype);
    EXPECT_EQ(g.lowered[0].why, NeedsEngine::kNo);
    return g.whole(0);
  };
  // It sends, then it receives.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kOneShot, 1000, DType::kFloat32, Op::kSum), 2);
  EXPECT_EQ(whole(Kind::kAllGather, Algorithm::kOneShot, 1000, DType::kInt32, Op::kSum), 2);
  // Reductions of rare types, or by rare operators, are the engine's.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kOneShot, 1000, DType::kInt32, Op::kSum), 0);
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kOneShot, 1000, DType::kFloat32, Op::kMax), 0);
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kRsag, 16 << 20, DType::kFloat32, Op::kSum),
            kPipelined);
  // More than 192 MiB.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kRsag, 49 << 20, DType::kFloat32, Op::kSum),
            kPipelinedIfContended);
  EXPECT_EQ(whole(Kind::kAllGather, Algorithm::kRsag, 49 << 20, DType::kInt32, Op::kSum),
            kPipelinedIfContended);
}

constexpr Kind kSlotKinds[] = {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter,
                               Kind::kBroadcast, Kind::kReduce};

// What a group's ranks do through slots.
struct SlotGroup {
  PlanRequest request;
  PlanLimits limits;
  std::vector<Plan> plans;
  std::vector<SlotSteps> ranks;

  SlotGroup(Kind kind, int size, int root, std::uint32_t slots, bool overlap) {
    request.kind = kind;
    request.count = 100003;
    request.ranks = size;
    request.root = root;
    limits.device = Device::kCuda;
    limits.guaranteed_slots = slots;
    limits.guaranteed_slot_bytes = 4096;
    limits.lanes = 3;
    limits.overlap = overlap;
    for (request.rank = 0; request.rank < size; ++request.rank) {
      plans.push_back(plan_rsag(request, limits).value());
      const Lowered lowered = of(plans.back(), request.rank);
      EXPECT_EQ(lowered.why, NeedsEngine::kNo);
      ranks.push_back(lowered.schedule.steps);
    }
  }
  Lowered of(const Plan& plan, int rank) const {
    return lower(plan, request.ranks, rank,
                 {512, limits.lanes, true, 20, limits.guaranteed_slot_bytes});
  }
};

bool has(unsigned members, int q) { return (members >> q & 1) != 0; }

template <class Body>
void each_group(Body body) {
  for (const Kind kind : kSlotKinds) {
    for (int size = 2; size <= 8; ++size) {
      for (int root = 0; root < (has_root(kind) ? size : 1); ++root) {
        for (const std::uint32_t slots : {2u, 4u, 5u}) {
          for (const bool overlap : {false, true}) {
            SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::to_string(size) +
                         " ranks, root " + std::to_string(root) + ", " + std::to_string(slots) +
                         " slots");
            body(SlotGroup(kind, size, root, slots, overlap));
          }
        }
      }
    }
  }
}

TEST(LowerToSlots, BothEndsOfAConnectorAgree) {
  each_group([](const SlotGroup& g) {
    const int n = g.request.ranks;
    const std::uint16_t empty = g.plans[0].geometry.empty_part;
    for (int from = 0; from < n; ++from) {
      const SlotSteps& s = g.ranks[static_cast<std::size_t>(from)];
      for (int to = 0; to < n; ++to) {
        const SlotSteps& r = g.ranks[static_cast<std::size_t>(to)];
        const bool sends = has(s.sends_to, to), passes_on = has(s.results_to, to);
        const bool gathers = has(r.gathers_from, from), collects = has(r.collects_from, from);
        ASSERT_EQ(sends || passes_on, gathers || collects) << from << " to " << to;
        ASSERT_FALSE(from == to && (sends || passes_on));
        if (!sends && !passes_on) continue;
        // Two hops, or one at both ends.
        ASSERT_EQ(sends && passes_on, gathers && collects);
        ASSERT_EQ(sends && passes_on, g.request.kind == Kind::kAllReduce);
        if (sends && passes_on) continue;
        const int sent_part = sends && s.scatters ? to : from;
        const int received_part = gathers ? to : from;
        ASSERT_EQ(sent_part, received_part);
        ASSERT_NE(sent_part, empty);
      }
    }
  });
}

TEST(LowerToSlots, EveryRankKnowsWhatBecomesOfItsPart) {
  each_group([](const SlotGroup& g) {
    const auto n = static_cast<int>(g.ranks.size());
    for (int r = 0; r < n; ++r) {
      const SlotSteps& hops = g.ranks[static_cast<std::size_t>(r)];
      ASSERT_EQ(hops.two_hops(), g.request.kind == Kind::kAllReduce);
      ASSERT_EQ(hops.lag,
                hops.reduces
                    ? g.plans[static_cast<std::size_t>(r)].primitives[hops.scatters ? 1 : 0].lag
                    : 0);
      // A sum is everybody's; what is passed on comes from the root.
      const int sources = std::popcount(hops.gathers_from);
      if (hops.reduces) {
        ASSERT_EQ(sources, n - 1);
      } else if (sources != 0) {
        ASSERT_EQ(hops.gathers_from, 1u << g.request.root);
      }
      const bool is_root = r == g.request.root;
      if (g.request.kind == Kind::kBroadcast) {
        ASSERT_EQ(hops.copies, is_root);
        ASSERT_EQ(hops.stores_result, !is_root);
      }
      if (g.request.kind == Kind::kReduce) {
        ASSERT_EQ(hops.stores_result, is_root && n == 2);
      }
    }
  });
}

// What is gathered waits for other steps (plan/order_rule.h) where results go behind contributions,
// and nothing else does.
TEST(LowerToSlots, WhatIsGatheredWaitsWhereConnectorsCarryTwoSteps) {
  each_group([](const SlotGroup& g) {
    for (const SlotSteps& steps : g.ranks) {
      ASSERT_EQ(steps.gather_waits_for_sent, steps.two_hops());
      ASSERT_EQ(steps.gather_waits_for_collected, steps.two_hops());
    }
  });
}

// A rank of a chain knows its neighbours alone, however large the group is.
TEST(LowerToSlots, AChainGoesFromEachToTheNext) {
  for (const Kind kind : {Kind::kBroadcast, Kind::kReduce}) {
    for (const int n : {2, 3, 4, 8, 40}) {
      for (int root = 0; root < n; ++root) {
        SCOPED_TRACE(std::string(to_string(kind)) + ", " + std::to_string(n) + " ranks, root " +
                     std::to_string(root));
        const bool reduces = kind == Kind::kReduce;
        // Who is last, or first, in the group's order from the root on.
        const int first = reduces ? (root + 1) % n : root, last = (first + n - 1) % n;
        for (int r = 0; r < n; ++r) {
          PlanRequest request;
          request.kind = kind;
          request.count = 100003;
          request.ranks = n;
          request.rank = r;
          request.root = root;
          PlanLimits limits;
          limits.device = Device::kCuda;
          limits.lanes = 3;
          limits.guaranteed_slot_bytes = 4096;
          const LowerLimits executors{512, 3, true, 20, 4096};
          Plan plan = plan_chain(request, limits).value();
          if (n > 4) {  // (Long chains have longer chunks, and leave the first lane alone.)
            plan.geometry.first_lane = 0;
            plan.geometry.chunk = 1024;
          }
          const Lowered lowered = lower(plan, n, r, executors);
          ASSERT_EQ(lowered.why, NeedsEngine::kNo);
          const Schedule& schedule = lowered.schedule;
          const SlotSteps& steps = schedule.steps;
          const auto bit = [&](int q) {
            unsigned bits = 0;
            for (std::uint32_t p = 0; p < schedule.places; ++p) {
              if (schedule.ranks[p] == q) bits |= 1u << p;
            }
            return static_cast<std::uint8_t>(bits);
          };
          ASSERT_LE(schedule.places, 3);
          ASSERT_EQ(schedule.ranks[schedule.place], r);
          const std::uint8_t next = r == last ? std::uint8_t{0} : bit((r + 1) % n);
          ASSERT_EQ(steps.sends_to, r == first ? next : 0);
          ASSERT_EQ(steps.results_to, r == first ? 0 : next);
          ASSERT_EQ(steps.gathers_from, r == first ? 0 : bit((r + n - 1) % n));
          ASSERT_EQ(steps.collects_from, 0);
          ASSERT_EQ(steps.reduces, reduces && r != first);
          ASSERT_EQ(r == first ? steps.stores_sent : steps.stores_result, !reduces || r == last);
          ASSERT_FALSE(steps.two_hops());
          ASSERT_FALSE(steps.gather_waits_for_sent || steps.gather_waits_for_collected);
          // With the same once more in it the program is another.
          plan.primitives.push_back(plan.primitives.front());
          ASSERT_EQ(lower(plan, n, r, executors).why, NeedsEngine::kOtherProgram);
          plan.primitives.pop_back();
          for (const unsigned flags : {+kWithNext, +kFromOutput, +kSecondHop}) {
            Plan other = plan;
            other.primitives[0].flags ^= static_cast<std::uint16_t>(flags);
            ASSERT_EQ(lower(other, n, r, executors).why, NeedsEngine::kOtherProgram) << flags;
          }
          // A mark for copy engines is about what is only sent, and perhaps stored here as well.
          Plan marked = plan;
          marked.primitives[0].flags |= static_cast<std::uint16_t>(Carrier::kCopyEngine);
          const Lowered of_marked = lower(marked, n, r, executors);
          ASSERT_EQ(of_marked.why, NeedsEngine::kNo);
          ASSERT_EQ(of_marked.schedule.steps.carried, r == first);
        }
      }
    }
  }
}

// Programs that no planner makes: by what executors can do.
TEST(LowerToSlots, WrittenProgramsAreLoweredWhereExecutorsCan) {
  PlanLimits limits;
  limits.lanes = 4;
  limits.guaranteed_slot_bytes = 8192;
  PlanRequest request;
  request.ranks = 6;
  request.count = 4 * 2048 * 10;  // ten chunks a lane
  const LowerLimits executors{512, 4, true, 20, 8192};
  const auto reasons = [&](const std::vector<Plan>& plans) {
    std::set<NeedsEngine> found;
    for (std::size_t r = 0; r < plans.size(); ++r) {
      found.insert(lower(plans[r], request.ranks, static_cast<int>(r), executors).why);
    }
    return found;
  };
  const std::set<NeedsEngine> none{NeedsEngine::kNo}, other{NeedsEngine::kOtherProgram};
  request.kind = Kind::kBroadcast;
  EXPECT_EQ(reasons(unjam_test::tree_broadcast(request, limits)), none);
  EXPECT_EQ(reasons(unjam_test::tree_broadcast(request, limits, 2, 1)), none);
  request.kind = Kind::kReduce;
  EXPECT_EQ(reasons(unjam_test::tree_reduce(request, limits)), none);
  // A result that is divided, but not where it is reduced.
  std::vector<Plan> plans = unjam_test::tree_reduce(request, limits, 1);
  plans[0].primitives[0].flags = kRecv | kCopy | kFinish;
  EXPECT_EQ(lower(plans[0], 6, 0, executors).why, NeedsEngine::kOtherProgram);
  request.kind = Kind::kAllReduce;
  EXPECT_EQ(reasons(unjam_test::two_level_all_reduce(request, limits)), other);
  // A step without data, on the rank whose part is empty.
  const SlotGroup g(Kind::kAllReduce, 3, 0, 4, true);
  for (int r = 0; r < 3; ++r) {
    Plan plan = g.plans[static_cast<std::size_t>(r)];
    plan.geometry.empty_part = 2;
    EXPECT_EQ(g.of(plan, r).why, NeedsEngine::kOtherProgram) << r;
  }
}

TEST(LowerToSlots, OtherProgramsAreTheEngines) {
  const SlotGroup g(Kind::kAllReduce, 3, 0, 4, true);
  Plan plan = g.plans[1];
  EXPECT_EQ(g.of(plan, 1).why, NeedsEngine::kNo);
  // A lag in which the connectors' order is not the known one; slices that go together.
  ++plan.primitives[2].lag;
  EXPECT_EQ(g.of(plan, 1).why, NeedsEngine::kOtherProgram);
  plan = g.plans[1];
  plan.primitives[0].flags |= kWithNext;
  EXPECT_EQ(g.of(plan, 1).why, NeedsEngine::kOtherProgram);
  // Results to some alone: then connectors carry now one step's slices, now two.
  plan = g.plans[1];
  plan.sets.push_back({1, 0, 0});
  plan.primitives[1].to = static_cast<Peers>(kFirstSet + plan.sets.size() - 1);
  EXPECT_EQ(g.of(plan, 1).why, NeedsEngine::kOtherProgram);
  // Data that change their place.
  SlotGroup other = g;
  other.request.kind = Kind::kAllToAll;
  other.request.rank = 1;
  EXPECT_EQ(other.of(plan_rsag(other.request, other.limits).value(), 1).why,
            NeedsEngine::kOtherProgram);
  // More neighbours than there are places.
  other.request.kind = Kind::kAllReduce;
  other.request.ranks = 9;
  EXPECT_EQ(other.of(plan_rsag(other.request, other.limits).value(), 1).why,
            NeedsEngine::kManyRanks);
}

// Which of the plans that the selector chooses need the engine, and why. What is fast and appears
// here, or from fewer bytes on, has become slow.
TEST(NeedsEngine, IsSaidOfTodaysPlans) {
  std::map<std::string, std::map<std::string, std::uint64_t>> found;  // and the least bytes
  for (int k = 0; k < kNumKinds; ++k) {
    const auto kind = static_cast<Kind>(k);
    for (const int ranks : {2, 3, 4, 8, 9, 16}) {
      if (kind == Kind::kSendRecv && ranks != 2) continue;
      for (const DType dtype : {DType::kInt8, DType::kBfloat16, DType::kFloat32}) {
        for (std::uint64_t bytes = 64; bytes <= std::uint64_t{1} << 30; bytes *= 4) {
          PlanRequest r;
          r.kind = kind;
          r.dtype = dtype;
          r.count = kind == Kind::kBarrier ? 1 : bytes / dtype_bytes(dtype);
          r.ranks = ranks;
          PlanLimits limits;
          limits.device = Device::kCuda;
          limits.lanes = 32;
          limits.guaranteed_slots = 4;
          limits.guaranteed_slot_bytes = ranks <= 2 ? 149824 : 74944;
          limits.pool_slot_bytes = (ranks <= 2 ? 2 : 4) * limits.guaranteed_slot_bytes;
          limits.lines = true;
          limits.overlap = true;
          for (int rank = 0; rank < ranks; ++rank) {
            r.rank = rank;
            const std::optional<Plan> plan = make_plan(r, limits, std::nullopt);
            ASSERT_TRUE(plan.has_value());
            const Lowered lowered =
                lower(*plan, ranks, rank, {512, 32, true, 20, limits.guaranteed_slot_bytes});
            if (lowered.why == NeedsEngine::kNo) continue;
            const std::string which =
                std::string(to_string(plan->algorithm)) + " " + to_string(kind);
            std::uint64_t& least =
                found[to_string(lowered.why)].try_emplace(which, bytes).first->second;
            least = std::min(least, bytes);
          }
        }
      }
    }
  }
  std::string text;
  for (const auto& [why, plans] : found) {
    text += why + ":";
    for (const auto& [plan, least] : plans) text += " " + plan + " " + std::to_string(least) + ";";
    text += "\n";
  }
  EXPECT_EQ(text,
            "a program that no kernel knows: rsag all_to_all 1048576; rsag gather 64; "
            "rsag scatter 64;\n"
            "chunks longer than a slot: pairwise send_recv 268435456;\n"
            "more than 7 peers: rsag all_gather 64; rsag all_reduce 64; rsag all_to_all 64; "
            "rsag barrier 64; rsag broadcast 64; rsag gather 64; rsag reduce 64; "
            "rsag reduce_scatter 64; rsag scatter 64;\n");
}

// What a call itself, or the device, is in the way of.
TEST(NeedsEngine, NamesWhatIsInTheWay) {
  const auto why = [](Kind kind, Algorithm algorithm, int ranks, std::uint64_t count,
                      const LowerLimits& lowering, bool lines = false) {
    return Group(kind, algorithm, ranks, 0, count, lowering, lines).lowered[0].why;
  };
  constexpr std::uint64_t kLarge = 16 << 20;
  LowerLimits lowering = kLimits;
  lowering.slot_bytes = 149824;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 2, 1000, lowering), NeedsEngine::kNo);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 2, 0, lowering), NeedsEngine::kNoData);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 1, 1000, lowering), NeedsEngine::kOneRank);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 9, 1000, lowering), NeedsEngine::kManyRanks);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 2, kLarge, lowering),
            NeedsEngine::kManyLoops);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kRing, 2, kLarge, lowering),
            NeedsEngine::kOtherProgram);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kRsag, 2, kLarge, lowering), NeedsEngine::kNo);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kRsag, 2, 1000, lowering), NeedsEngine::kOtherLanes);
  LowerLimits other = lowering;
  other.block_threads = 64;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kRsag, 2, kLarge, other), NeedsEngine::kFewThreads);
  other = lowering;
  other.whole_lines = false;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kOneShot, 2, 100000, other, true),
            NeedsEngine::kSplitLines);
  other = lowering;
  other.slot_bytes = 64;
  EXPECT_EQ(why(Kind::kBroadcast, Algorithm::kChain, 2, kLarge, other), NeedsEngine::kLongChunks);
}

}  // namespace
}  // namespace unjam
