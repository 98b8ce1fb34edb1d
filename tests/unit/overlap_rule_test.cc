// Which calls may begin before the one in front of them has ended
// (device/cuda/host/overlap_rule.h).
#include "device/cuda/host/overlap_rule.h"

#include <gtest/gtest.h>

#include <cstdint>

namespace unjam {
namespace {

constexpr std::uint64_t kCount = 1 << 20, kBytes = 4 * kCount, kStream = 7;

// A call of 4 ranks on float32, through slots, of buffers at these addresses.
struct Call {
  Invocation inv;
  StreamCall call;

  Call(std::uint64_t serial, std::uintptr_t input, std::uintptr_t output,
       Kind kind = Kind::kAllReduce) {
    inv.serial = serial;
    inv.input = reinterpret_cast<const void*>(input);
    inv.output = reinterpret_cast<void*>(output);
    inv.group_size = 4;
    inv.geometry.kind = kind;
    inv.geometry.dtype = DType::kFloat32;
    inv.geometry.count = blocked(kind) ? kCount / 4 : kCount;
    inv.geometry.parts = 4;
    inv.geometry.lanes = 32;
    inv.geometry.chunk = 16384;
    call.lanes = 32;
    call.by_slots = true;
  }
};
constexpr std::uintptr_t kA = 1 << 30, kB = std::uintptr_t{2} << 30, kC = std::uintptr_t{3} << 30;

std::uint32_t follows(const Call& first, const Call& second, std::uint64_t first_stream = kStream,
                      std::uint64_t second_stream = kStream) {
  OverlapRule calls;
  EXPECT_EQ(calls.next(first.inv, first.call, first_stream), 0u);
  return calls.next(second.inv, second.call, second_stream);
}

TEST(OverlapRule, TheSameCallOnceMore) {
  EXPECT_EQ(follows({5, kA, kB}, {6, kA, kB}), 5u);
  EXPECT_EQ(follows({5, kA, kA}, {6, kA, kA}), 5u);
}

TEST(OverlapRule, BuffersApart) {
  EXPECT_EQ(follows({5, kA, kA}, {6, kB, kB}), 5u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kC, kC}), 5u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kA, kC}), 5u);                    // both only read kA
  EXPECT_EQ(follows({5, kA, kA}, {6, kA + kBytes, kA + kBytes}), 5u);  // side by side
}

TEST(OverlapRule, ReadsWhatIsWritten) {
  EXPECT_EQ(follows({5, kA, kB}, {6, kB, kC}), 0u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kB + kBytes - 4, kC}), 0u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kB - kBytes + 4, kC}), 0u);
}

TEST(OverlapRule, WritesWhatIsReadOrWritten) {
  EXPECT_EQ(follows({5, kA, kB}, {6, kC, kA}), 0u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kC, kB}), 0u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kA, kB + 16}), 0u);
}

TEST(OverlapRule, OfBlocksOnlyWhatIsTheRanks) {
  // An all-gather reads one block: the rest of that buffer may be written behind it.
  EXPECT_EQ(follows({5, kA, kB, Kind::kAllGather}, {6, kC, kA + kBytes / 4}), 5u);
  EXPECT_EQ(follows({5, kA, kB, Kind::kAllGather}, {6, kC, kA + kBytes / 4 - 4}), 0u);
  EXPECT_EQ(follows({5, kA, kB, Kind::kAllGather}, {6, kB + kBytes - 4, kC}), 0u);
  // A reduce-scatter writes one.
  EXPECT_EQ(follows({5, kA, kB, Kind::kReduceScatter}, {6, kB + kBytes / 4, kC}), 5u);
  EXPECT_EQ(follows({5, kA, kB, Kind::kReduceScatter}, {6, kB + kBytes / 4 - 4, kC}), 0u);
  EXPECT_EQ(follows({5, kA, kB, Kind::kReduceScatter}, {6, kC, kA + kBytes - 4}), 0u);
}

TEST(OverlapRule, AnotherOneOnTheSameBuffers) {
  const Call first{5, kA, kB};
  const auto other = [&](const auto& change) {
    Call second{6, kA, kB};
    change(second);
    return follows(first, second);
  };
  EXPECT_EQ(other([](Call&) {}), 5u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.kind = Kind::kReduce; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.chunk /= 2; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.lanes = 16; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.parts = 1; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.empty_part = 2; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.count /= 2; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.inv.geometry.dtype = DType::kInt32; }), 0u);
  EXPECT_EQ(other([](Call& c) { c.call.steps.parts[1] = 1; }), 0u);
}

TEST(OverlapRule, OnlyThroughSlots) {
  Call second{6, kC, kC};
  second.call.by_slots = false;
  EXPECT_EQ(follows({5, kA, kB}, second), 0u);
  Call first{5, kA, kB};
  first.call.by_slots = false;
  EXPECT_EQ(follows(first, {6, kC, kC}), 0u);
}

TEST(OverlapRule, LanesOfTheOther) {
  Call first{5, kA, kA}, second{6, kB, kB};
  first.inv.geometry.lanes = 16;
  EXPECT_EQ(follows(first, second), 5u);
  EXPECT_EQ(follows({5, kA, kA},
                    [&] {
                      second.inv.geometry.lanes = 16;
                      return second;
                    }()),
            0u);
}

TEST(OverlapRule, OneStream) {
  EXPECT_EQ(follows({5, kA, kB}, {6, kA, kB}, 7, 8), 0u);
  EXPECT_EQ(follows({5, kA, kB}, {6, kA, kB}, 0, 0), 0u);  // streams without a number
  // One in another stream is between them, and the numbers of launches would say so, too.
  OverlapRule calls;
  const Call a{5, kA, kA}, b{6, kB, kB}, c{7, kC, kC};
  EXPECT_EQ(calls.next(a.inv, a.call, 7), 0u);
  EXPECT_EQ(calls.next(b.inv, b.call, 8), 0u);
  EXPECT_EQ(calls.next(c.inv, c.call, 7), 0u);
}

}  // namespace
}  // namespace unjam
