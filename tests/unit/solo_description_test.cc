// What calls without the engine are told (device/cuda/host/solo_description.h), against the
// planners' programs: carried out here with plain copies and sums, for every kind, group and root,
// it must give what the collective is to give. And what it must not take on, and how lanes share
// it.
#include "device/cuda/host/solo_description.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "plan/common.h"
#include "plan/registry.h"
#include "plan/selector.h"

namespace unjam {
namespace {

using Element = std::int32_t;
constexpr SoloLimits kLimits{512, kSoloRanks, true, 20};

// A call of a group: what each rank's plan and description are.
struct Group {
  PlanRequest request;
  std::vector<Plan> plans;
  std::vector<Invocation> invocations;
  std::vector<SoloCall> calls;
  std::vector<unsigned> threads;
  std::vector<std::vector<Element>> inputs, outputs;

  Group(Kind kind, Algorithm algorithm, int ranks, int root, std::uint64_t count,
        const SoloLimits& solo = kLimits, bool lines = false, bool in_place = false,
        bool has_data = false, DType dtype = DType::kInt32) {
    request.kind = kind;
    request.dtype = dtype;
    request.count = count;
    request.ranks = ranks;
    request.root = root;
    PlanLimits limits;
    limits.device = Device::kCuda;
    limits.lanes = 32;
    limits.escape_slots = 4;
    limits.escape_slot_bytes = ranks <= 2 ? 149824 : 74944;
    limits.lines = lines;
    const auto n = static_cast<std::size_t>(ranks);
    plans.resize(n), invocations.resize(n), calls.resize(n), threads.resize(n);
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
      inv.program = plans[at].primitives.data();
      inv.num_primitives = static_cast<std::uint32_t>(plans[at].primitives.size());
      // (Nobody looks there but carry_out(): an address says how it is aligned.)
      inv.input = has_data ? inputs[at].data() : reinterpret_cast<Element*>(0x10000);
      inv.output = has_data ? outputs[at].data() : reinterpret_cast<Element*>(0x20000);
      if (in_place) inv.output = const_cast<void*>(inv.input);
      inv.geometry = plans[at].geometry;
      if (plans[at].protocol != Protocol::kSlot) {  // as the runtime, by a key's tag
        inv.geometry.first_lane = spread_lanes(count, inv.geometry.lanes, limits.lanes);
      }
      inv.group_size = static_cast<std::uint16_t>(ranks);
      inv.group_rank = static_cast<std::uint16_t>(r);
      inv.protocol = plans[at].protocol;
      threads[at] = SoloDescription(inv, solo, calls[at]).in_stream();
    }
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

  const SoloCall& call() const { return call_; }
  std::vector<unsigned char> read(std::uint64_t at) const {
    EXPECT_LE(at + call_.block_bytes, input_bytes_);
    return {input_ + at, input_ + at + call_.block_bytes};
  }
  void write(std::uint64_t at, const std::vector<unsigned char>& bytes) const {
    ASSERT_LE(at + bytes.size(), output_bytes_);
    std::memcpy(output_ + at, bytes.data(), bytes.size());
  }

 private:
  const SoloCall& call_;
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

// As solo_one_shot.cuh: all send, then all receive.
void carry_out(Group& g) {
  const auto size = static_cast<unsigned>(g.request.ranks);
  std::map<std::pair<unsigned, unsigned>, std::vector<unsigned char>> messages;
  std::vector<Side> sides;
  for (std::size_t r = 0; r < size; ++r) sides.emplace_back(g, r);
  for (unsigned r = 0; r < size; ++r) {
    const SoloCall& c = sides[r].call();
    for (unsigned k = 0; k < c.num_sent; ++k) {
      const unsigned q = (c.first_sent + k) % size;
      ASSERT_NE(q, r);
      const std::uint64_t at = c.sent_from + (c.scatters ? std::uint64_t{q} * c.block_bytes : 0);
      messages[{r, q}] = sides[r].read(at);
    }
  }
  for (unsigned r = 0; r < size; ++r) {
    const SoloCall& c = sides[r].call();
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

// As solo_two_shot.cuh, of plain calls: all scatter, then all reduce their part and send it, then
// all collect.
void carry_out_two_shot(Group& g) {
  const auto size = static_cast<unsigned>(g.request.ranks);
  std::vector<Side> sides;
  for (std::size_t r = 0; r < size; ++r) sides.emplace_back(g, r);
  std::vector<std::vector<unsigned char>> sums;
  for (unsigned r = 0; r < size; ++r) {
    const SoloCall& c = sides[r].call();
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
    const SoloCall& c = sides[r].call();
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
    const SoloCall& c = g.calls[r];
    const Geometry& geometry = g.invocations[r].geometry;
    const std::uint32_t parts = c.two_shot ? geometry.parts : 1;
    for (std::uint32_t p = 0; p < parts; ++p) {
      std::uint64_t at = geometry.part(p).offset * sizeof(Element);
      const std::uint64_t end = at + geometry.part(p).length * sizeof(Element);
      for (std::uint32_t l = 0; l < geometry.lanes; ++l) {
        const bool longer = l < c.longer_lanes + (c.two_shot && p < c.longer_parts ? 1 : 0);
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

TEST(SoloDescription, OneShotGivesWhatTheCollectiveGives) {
  for (const Kind kind : kKinds) {
    for (int ranks = 2; ranks <= 8; ++ranks) {
      for (int root = 0; root < (has_root(kind) ? ranks : 1); ++root) {
        for (const std::uint64_t count : {1u, 3u, 257u, 5000u}) {
          Group g(kind, Algorithm::kDirect, ranks, root, count, kLimits, /*lines=*/false,
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

TEST(SoloDescription, LanesOfAOneShotPlanHaveTheGeometrysStretches) {
  for (const Kind kind : kKinds) {
    for (std::uint64_t count = 20000; count < 120000; count += 1237) {
      const Group g(kind, Algorithm::kDirect, 3, 1, count);
      SCOPED_TRACE(title(g));
      const Geometry& geometry = g.invocations[0].geometry;
      ASSERT_GT(geometry.lanes, 1);
      check_stretches(g);
      // A thread for each unit of the first lane's, which is a longest one, while there are any.
      const std::uint64_t units =
          geometry.lane_part(0, geometry.first_lane).length * sizeof(Element) / kSoloUnitBytes;
      ASSERT_GE(g.threads[0], std::min<std::uint64_t>(units + kSoloControl, 512));
    }
  }
}

TEST(SoloDescription, LanesOfATwoShotPlanHaveTheGeometrysStretches) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const std::uint64_t count : {4096u, 40001u, 262144u, 300000u}) {
      const Group g(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, count);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_NE(g.threads[r], 0u);
        ASSERT_TRUE(g.calls[r].two_shot);
        ASSERT_EQ(g.calls[r].num_sent, ranks - 1);
        ASSERT_EQ(g.calls[r].num_received, ranks - 1);
        ASSERT_EQ(SoloDescription::whole_of(g.calls[r], g.invocations[r].geometry), 0);
      }
      check_stretches(g);
    }
  }
}

// (The data are numbers of four bytes either way.)
TEST(SoloDescription, TwoShotGivesWhatTheCollectiveGives) {
  for (int ranks = 2; ranks <= 8; ++ranks) {
    for (const std::uint64_t pieces : {40u, 4099u}) {
      const std::uint64_t count = 4 * pieces * static_cast<unsigned>(ranks);
      Group g(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, count, kLimits, false, false, true,
              DType::kFloat32);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_TRUE(g.calls[r].two_shot);
        ASSERT_TRUE(g.calls[r].plain);
        g.calls[r].lanes = g.invocations[r].geometry.lanes;  // as the daemon
        ASSERT_EQ(SoloDescription::whole_of(g.calls[r], g.invocations[r].geometry), kWholeTwoShot);
      }
      check_stretches(g);
      carry_out_two_shot(g);
      g.check();
      // Other operators, and buffers that are not aligned.
      SoloCall other_call;
      Invocation inv = g.invocations[0];
      inv.op = Op::kMax;
      ASSERT_NE(SoloDescription(inv, kLimits, other_call).in_stream(), 0u);
      ASSERT_TRUE(other_call.two_shot && !other_call.plain);
      inv = g.invocations[0];
      inv.output = static_cast<char*>(inv.output) + sizeof(Element);
      ASSERT_NE(SoloDescription(inv, kLimits, other_call).in_stream(), 0u);
      ASSERT_TRUE(other_call.two_shot && !other_call.plain);
      // Parts that are not alike, and other formats.
      for (const auto& [n, type] :
           {std::pair{count + 4, DType::kFloat32}, std::pair{count + 1, DType::kFloat32},
            std::pair{count, DType::kInt32}}) {
        Group other(Kind::kAllReduce, Algorithm::kTwoShot, ranks, 0, n, kLimits, false, false,
                    false, type);
        SCOPED_TRACE(title(other));
        other.calls[0].lanes = other.invocations[0].geometry.lanes;
        ASSERT_TRUE(other.calls[0].two_shot);
        ASSERT_FALSE(other.calls[0].plain);
        ASSERT_EQ(SoloDescription::whole_of(other.calls[0], other.invocations[0].geometry), 0);
      }
    }
  }
}

TEST(SoloDescription, StreamsHaveTheGeometrysChunks) {
  for (const Kind kind : {Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kReduce,
                          Kind::kBroadcast}) {
    for (const bool in_place : {false, true}) {
      Group g(kind, Algorithm::kMesh, 4, 0, 8 << 20, kLimits, false, in_place);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_EQ(g.threads[r], kLimits.block_threads);
        ASSERT_TRUE(g.calls[r].streams);
        const Geometry& geometry = g.invocations[r].geometry;
        for (std::uint32_t lane = 0; lane < geometry.lanes; ++lane) {
          ASSERT_EQ(g.calls[r].chunks, geometry.loops(lane)) << "lane " << lane;
        }
        ASSERT_EQ(g.calls[r].patience_ns, kLimits.patience_us * 1000);
        // What a broadcast's root scatters it has itself in place.
        ASSERT_EQ(g.calls[r].hops.copies, kind == Kind::kBroadcast && r == 0 && !in_place);
      }
    }
  }
}

TEST(SoloDescription, LargeCallsArePatientForLonger) {
  const auto patience_ns = [](std::uint64_t count, std::uint32_t patience_us,
                              Kind kind = Kind::kAllReduce) {
    SoloLimits limits = kLimits;
    limits.patience_us = patience_us;
    const Group g(kind, Algorithm::kMesh, 4, 0, count, limits);
    EXPECT_TRUE(g.calls[0].streams);
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

TEST(SoloDescription, ChainsAreStreams) {
  const SoloLimits limits{512, kSoloRanks, true, 20, 74944};
  for (const Kind kind : {Kind::kReduce, Kind::kBroadcast}) {
    for (const int ranks : {3, 4}) {
      Group g(kind, Algorithm::kChain, ranks, 1, 8 << 20, limits);
      SCOPED_TRACE(title(g));
      for (std::size_t r = 0; r < g.calls.size(); ++r) {
        ASSERT_EQ(g.threads[r], limits.block_threads);
        ASSERT_TRUE(g.calls[r].streams);
        ASSERT_TRUE(g.calls[r].hops.chain);
        const Geometry& geometry = g.invocations[r].geometry;
        for (std::uint32_t lane = 0; lane < geometry.lanes; ++lane) {
          ASSERT_EQ(g.calls[r].chunks, geometry.loops(lane)) << "lane " << lane;
        }
      }
    }
  }
  // A chunk that needs more than a slot, as longer chains' may, and slots that are too small.
  Group g(Kind::kReduce, Algorithm::kChain, 4, 1, 8 << 20, limits);
  g.invocations[0].geometry.chunk *= 2;
  SoloCall call;
  EXPECT_EQ(SoloDescription(g.invocations[0], limits, call).in_stream(), 0u);
  EXPECT_EQ(Group(Kind::kReduce, Algorithm::kChain, 5, 1, 8 << 20, limits).threads[0], 0u);
  const SoloLimits small{512, kSoloRanks, true, 20, 32768};
  EXPECT_FALSE(Group(Kind::kReduce, Algorithm::kChain, 4, 1, 8 << 20, small).calls[0].streams);
}

TEST(SoloDescription, WhatLanesCannotDoNeedsTheEngine) {
  // As many ranks as a job may have without the engine, and one more.
  const SoloLimits crowded{512, kSoloRanks + 1, true, 20};
  EXPECT_EQ(Group(Kind::kAllReduce, Algorithm::kDirect, 2, 0, 100, crowded).threads[0], 0u);
  EXPECT_EQ(Group(Kind::kAllReduce, Algorithm::kMesh, 2, 0, 8 << 20, crowded).threads[0], 0u);
  // More than a thread can keep of a reduction, where blocks have few: 40 units of each.
  const SoloLimits few{128, kSoloRanks, true, 20};
  constexpr std::uint64_t kCount = 320000;  // 40 KB a lane
  EXPECT_EQ(Group(Kind::kAllReduce, Algorithm::kDirect, 2, 0, kCount, few).threads[0], 0u);
  EXPECT_NE(Group(Kind::kAllGather, Algorithm::kDirect, 2, 0, kCount, few).threads[0], 0u);
  EXPECT_NE(Group(Kind::kAllReduce, Algorithm::kDirect, 2, 0, kCount).threads[0], 0u);
  EXPECT_FALSE(
      Group(Kind::kAllReduce, Algorithm::kTwoShot, 2, 0, 2 * kCount, few).calls[0].two_shot);
  EXPECT_TRUE(Group(Kind::kAllReduce, Algorithm::kTwoShot, 2, 0, 2 * kCount).calls[0].two_shot);
  // More than a loop carries.
  EXPECT_EQ(Group(Kind::kAllGather, Algorithm::kDirect, 2, 0, 6 << 20).threads[0], 0u);
  // Lines, where these may come in pieces.
  const SoloLimits in_pieces{512, kSoloRanks, false, 20};
  EXPECT_EQ(Group(Kind::kAllGather, Algorithm::kDirect, 2, 0, 100000, in_pieces, true).threads[0],
            0u);
  EXPECT_NE(Group(Kind::kAllGather, Algorithm::kDirect, 2, 0, 100000, kLimits, true).threads[0],
            0u);
  // Blocks of too few threads for a stream's warps.
  const SoloLimits small{128, kSoloRanks, true, 20};
  EXPECT_FALSE(Group(Kind::kAllGather, Algorithm::kMesh, 2, 0, 8 << 20, small).calls[0].streams);
}

TEST(SoloDescription, WhatIsPlainIsAligned) {
  Group g(Kind::kAllReduce, Algorithm::kDirect, 2, 0, 1000);
  Invocation& inv = g.invocations[0];
  inv.geometry.dtype = DType::kFloat32;
  SoloCall call;
  const auto plain = [&] {
    EXPECT_NE(SoloDescription(inv, kLimits, call).in_stream(), 0u);
    return call.plain;
  };
  EXPECT_TRUE(plain());
  inv.output = reinterpret_cast<Element*>(0x20004);
  EXPECT_FALSE(plain());
  inv.output = reinterpret_cast<Element*>(0x20008);
  EXPECT_TRUE(plain());
  inv.geometry.dtype = DType::kInt32;
  EXPECT_FALSE(plain());
}

// Those that would take turns are for crowds, beside streams: of a chain as many bytes as of a
// mesh.
TEST(SoloDescription, LongChainsAreForCrowds) {
  const SoloLimits limits{512, kSoloRanks, true, 20, 74944};
  const auto whole = [&](int ranks, std::uint64_t chunks) {
    const std::uint64_t count = chunks * 32 * 65536 / sizeof(Element);
    Group g(Kind::kBroadcast, Algorithm::kChain, ranks, 1, count, limits);
    SoloCall& call = g.calls[0];
    EXPECT_EQ(call.chunks, chunks);
    call.lanes = g.invocations[0].geometry.lanes;
    call.group_size = static_cast<std::uint16_t>(ranks);
    return SoloDescription::whole_of(call, g.invocations[0].geometry);
  };
  EXPECT_EQ(whole(3, 64), kWholeStream);
  EXPECT_EQ(whole(3, 65), kWholeCrowd);
  EXPECT_EQ(whole(4, 96), kWholeStream);
  EXPECT_EQ(whole(4, 97), kWholeCrowd);
}

// Invocation::whole, as the engine reads it.
TEST(SoloDescription, WhatTheEngineTriesWhole) {
  const auto whole = [](Kind kind, Algorithm algorithm, std::uint64_t count, DType dtype, Op op) {
    Group g(kind, algorithm, 2, 0, count);
    g.invocations[0].geometry.dtype = dtype;
    g.invocations[0].op = op;
    SoloCall call;
    EXPECT_TRUE(SoloDescription(g.invocations[0], kLimits, call).beside_streams());
    call.lanes = g.invocations[0].geometry.lanes;
    return SoloDescription::whole_of(call, g.invocations[0].geometry);
  };
  // It sends, then it receives.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kDirect, 1000, DType::kFloat32, Op::kSum), 2);
  EXPECT_EQ(whole(Kind::kAllGather, Algorithm::kDirect, 1000, DType::kInt32, Op::kSum), 2);
  // Reductions of rare types, or by rare operators, are the engine's.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kDirect, 1000, DType::kInt32, Op::kSum), 0);
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kDirect, 1000, DType::kFloat32, Op::kMax), 0);
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kMesh, 16 << 20, DType::kFloat32, Op::kSum),
            kWholeStream);
  // More than 192 MiB.
  EXPECT_EQ(whole(Kind::kAllReduce, Algorithm::kMesh, 49 << 20, DType::kFloat32, Op::kSum),
            kWholeCrowd);
  EXPECT_EQ(whole(Kind::kAllGather, Algorithm::kMesh, 49 << 20, DType::kInt32, Op::kSum),
            kWholeCrowd);
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
          limits.escape_slots = 4;
          limits.escape_slot_bytes = ranks <= 2 ? 149824 : 74944;
          limits.lines = true;
          limits.overlap = true;
          for (int rank = 0; rank < ranks; ++rank) {
            r.rank = rank;
            const std::optional<Plan> plan = make_plan(r, limits, std::nullopt);
            ASSERT_TRUE(plan.has_value());
            Invocation inv{};
            inv.program = plan->primitives.data();
            inv.num_primitives = static_cast<std::uint32_t>(plan->primitives.size());
            inv.input = reinterpret_cast<Element*>(0x10000);
            inv.output = reinterpret_cast<Element*>(0x20000);
            inv.geometry = plan->geometry;
            inv.group_size = static_cast<std::uint16_t>(ranks);
            inv.group_rank = static_cast<std::uint16_t>(rank);
            inv.protocol = plan->protocol;
            SoloLimits solo = kLimits;
            solo.ranks = static_cast<std::uint32_t>(ranks);
            solo.slot_bytes = limits.escape_slot_bytes;
            SoloCall call;
            SoloDescription description(inv, solo, call);
            const bool runs = description.in_stream() != 0;
            ASSERT_EQ(runs, description.why() == NeedsEngine::kNo);
            if (runs) continue;
            const std::string which =
                std::string(to_string(plan->algorithm)) + " " + to_string(kind);
            std::uint64_t& least =
                found[to_string(description.why())].try_emplace(which, bytes).first->second;
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
            "a program that no kernel knows: mesh all_to_all 1048576; mesh gather 1048576; "
            "mesh scatter 1048576; pairwise send_recv 16777216;\n"
            "more than 8 ranks: mesh all_gather 64; mesh all_reduce 64; mesh all_to_all 64; "
            "mesh barrier 64; mesh broadcast 64; mesh gather 64; mesh reduce 64; "
            "mesh reduce_scatter 64; mesh scatter 64;\n");
}

// What a call itself, or the device, is in the way of.
TEST(NeedsEngine, NamesWhatIsInTheWay) {
  const auto why = [](Kind kind, Algorithm algorithm, int ranks, std::uint64_t count,
                      const SoloLimits& solo, bool lines = false) {
    const Group group(kind, algorithm, ranks, 0, count, solo, lines);
    SoloCall call;
    SoloDescription description(group.invocations[0], solo, call);
    const bool runs = description.in_stream() != 0;
    EXPECT_EQ(runs, description.why() == NeedsEngine::kNo);
    return description.why();
  };
  constexpr std::uint64_t kLarge = 16 << 20;
  SoloLimits solo = kLimits;
  solo.slot_bytes = 149824;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 2, 1000, solo), NeedsEngine::kNo);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 2, 0, solo), NeedsEngine::kNoData);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 1, 1000, solo), NeedsEngine::kOneRank);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 9, 1000, solo), NeedsEngine::kManyRanks);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 2, kLarge, solo), NeedsEngine::kManyLoops);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kRing, 2, kLarge, solo), NeedsEngine::kOtherProgram);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kMesh, 2, kLarge, solo), NeedsEngine::kNo);
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kMesh, 2, 1000, solo), NeedsEngine::kOtherLanes);
  SoloLimits other = solo;
  other.block_threads = 64;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kMesh, 2, kLarge, other), NeedsEngine::kFewThreads);
  other = solo;
  other.whole_lines = false;
  EXPECT_EQ(why(Kind::kAllReduce, Algorithm::kDirect, 2, 100000, other, true),
            NeedsEngine::kSplitLines);
  other = solo;
  other.slot_bytes = 64;
  EXPECT_EQ(why(Kind::kBroadcast, Algorithm::kChain, 2, kLarge, other), NeedsEngine::kLongChunks);
}

}  // namespace
}  // namespace unjam
