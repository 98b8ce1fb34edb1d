// Connectors between two ranks in plain memory: directory, room, borrowed slots, give-back, flags.
#include "transport/connector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace unjam {
namespace {

// Arenas and send states of `ranks` ranks with one lane.
class Fabric {
 public:
  explicit Fabric(ArenaShape shape) : shape_(shape) {
    for (std::uint32_t r = 0; r < shape.ranks; ++r) {
      arenas_.emplace_back(
          static_cast<unsigned char*>(std::aligned_alloc(4096, shape.total_bytes())), &std::free);
      std::memset(arenas_.back().get(), 0, shape.total_bytes());
      bases_.push_back(arenas_.back().get());
    }
    for (std::uint32_t r = 0; r < shape.ranks; ++r) {
      auto state = std::make_unique<State>();
      state->peers.resize(shape.ranks);
      for (auto& p : state->peers) {
        state->owners.emplace_back(shape.connectors);
        state->borrows.emplace_back(shape.borrow_slots);
        state->places.emplace_back(shape.places());
        p.owners = state->owners.back().data();
        p.borrows = state->borrows.back().data();
        p.places = state->places.back().data();
        p.pool = std::min(shape.connectors, kFirstPool);
      }
      state->transport.shape = shape;
      state->transport.bases = bases_.data();
      state->transport.peers = state->peers.data();
      state->transport.rank = r;
      states_.push_back(std::move(state));
    }
  }
  LaneTransport& at(std::uint32_t r) { return states_[r]->transport; }

 private:
  struct State {
    std::vector<PeerSendState> peers;
    std::vector<std::vector<ConnectorOwner>> owners;
    std::vector<std::vector<BorrowUse>> borrows;
    std::vector<std::vector<std::uint16_t>> places;
    LaneTransport transport;
  };
  ArenaShape shape_;
  std::vector<std::unique_ptr<unsigned char, decltype(&std::free)>> arenas_;
  std::vector<unsigned char*> bases_;
  std::vector<std::unique_ptr<State>> states_;
};

ArenaShape small_shape() {
  ArenaShape s;
  s.ranks = 2;
  s.connectors = 4;
  s.escape_slots = 3;
  s.escape_slot_bytes = 256;
  s.borrow_slots = 2;
  s.borrow_slot_bytes = 512;
  return s;
}

constexpr std::uint64_t kTag = 0xabcdef0123456789ull;
constexpr std::uint64_t kGroup = 0x1234567890abcdefull;

TEST(Connector, NothingIsFoundBeforeItIsAnnounced) {
  Fabric f(small_shape());
  InEndpoint in;
  EXPECT_FALSE(f.at(1).resolve(0, kTag, in));
  OutEndpoint out;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
  EXPECT_TRUE(f.at(1).resolve(0, kTag, in));
  EXPECT_EQ(in.connector, out.connector);
  RecvView view;
  EXPECT_FALSE(f.at(1).poll(0, in, 7, view));
}

TEST(Connector, AnotherInvocationsSliceIsNotReadAsData) {
  Fabric f(small_shape());
  OutEndpoint out;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  const SendGrant g = f.at(0).grant(1, out, 100);
  f.at(0).post(1, out, g, 100, /*seed=*/1);
  RecvView view;
  EXPECT_FALSE(f.at(1).poll(0, in, /*seed=*/2, view)) << "the seed holds count, dtype, n, plan";
  EXPECT_TRUE(f.at(1).poll(0, in, 1, view));
  EXPECT_EQ(view.bytes, 100u);
}

TEST(Connector, RoomIsEscapeSlotsThenBorrowedOnesThenNone) {
  Fabric f(small_shape());
  OutEndpoint out;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
  std::vector<std::uint32_t> locations;
  for (;;) {
    const SendGrant g = f.at(0).grant(1, out, 64);
    if (g.capacity == 0) break;
    locations.push_back(g.location);
    f.at(0).post(1, out, g, 64, 9);
  }
  // Small slices take the guaranteed slots first; then the pool; then they wait.
  EXPECT_EQ(locations, (std::vector<std::uint32_t>{0, 0, 0, 1, 2}));
  // One consumed step makes room again, whichever it was.
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(f.at(1).poll(0, in, 9, view));
    f.at(1).consume(0, in);
  }
  EXPECT_EQ(f.at(0).grant(1, out, 64).location, 0u);
  // A large slice prefers a borrowed slot, but both are still in use.
  EXPECT_EQ(f.at(0).grant(1, out, 512).location, 0u);
  ASSERT_TRUE(f.at(1).poll(0, in, 9, view));
  f.at(1).consume(0, in);
  EXPECT_EQ(f.at(0).grant(1, out, 512).location, 1u);
}

TEST(Connector, ABorrowedSlotOfOneKeyServesAnotherOnceConsumed) {
  Fabric f(small_shape());
  OutEndpoint a, b;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, a, &in_use));
  ASSERT_TRUE(f.at(0).open(1, kTag + 2, kGroup, b, &in_use));
  for (int i = 0; i < 2; ++i) {
    const SendGrant g = f.at(0).grant(1, a, 512);
    ASSERT_NE(g.location, 0u);
    f.at(0).post(1, a, g, 512, 3);
  }
  EXPECT_EQ(f.at(0).grant(1, b, 512).location, 0u) << "the pool is empty: the escape slot serves";
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  ASSERT_TRUE(f.at(1).poll(0, in, 3, view));
  f.at(1).consume(0, in);
  EXPECT_NE(f.at(0).grant(1, b, 512).location, 0u);
}

TEST(Connector, IdleKeysGiveTheirConnectorBackAndOpenAnother) {
  Fabric f(small_shape());
  const std::uint32_t connectors = small_shape().connectors;
  std::vector<OutEndpoint> out(connectors + 2);
  std::vector<InEndpoint> in(connectors + 2);
  std::vector<std::uint32_t> in_use(connectors + 2, 1);
  for (std::uint32_t i = 0; i < connectors; ++i) {
    ASSERT_TRUE(f.at(0).open(1, kTag + 4 * i, kGroup, out[i], &in_use[i]));
  }
  EXPECT_FALSE(f.at(0).open(1, kTag + 1000, kGroup, out[connectors], &in_use[connectors]))
      << "all are in use";
  // Key 2 sends one slice and is done here, but the peer has not read it: not idle.
  f.at(0).post(1, out[2], f.at(0).grant(1, out[2], 8), 8, 5);
  in_use[2] = 0;
  EXPECT_FALSE(f.at(0).open(1, kTag + 1000, kGroup, out[connectors], &in_use[connectors]));
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag + 8, in[2]));
  ASSERT_TRUE(f.at(1).poll(0, in[2], 5, view));
  f.at(1).consume(0, in[2]);
  const std::uint32_t taken = out[2].connector;
  ASSERT_TRUE(f.at(0).open(1, kTag + 1000, kGroup, out[connectors], &in_use[connectors]));
  EXPECT_EQ(out[connectors].connector, taken);
  EXPECT_EQ(out[2].connector, kNoConnector);
  // The receiver's view of key 2 is stale and notices; the new key starts where the old one ended.
  EXPECT_FALSE(f.at(1).resolve(0, kTag + 8, in[2]));
  ASSERT_TRUE(f.at(1).resolve(0, kTag + 1000, in[connectors]));
  EXPECT_EQ(in[connectors].consumed, 1u);
  // Key 2 comes back on another connector, that of key 0, which became idle.
  in_use[0] = 0;
  in_use[2] = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag + 8, kGroup, out[2], &in_use[2]));
  EXPECT_NE(out[2].connector, taken);
  f.at(0).post(1, out[2], f.at(0).grant(1, out[2], 8), 8, 6);
  ASSERT_TRUE(f.at(1).resolve(0, kTag + 8, in[2]));
  EXPECT_TRUE(f.at(1).poll(0, in[2], 6, view));
}

// Two threads, random slice sizes and delays, payloads checked; TSan checks the orders.
TEST(Connector, StreamsBetweenThreads) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr int kSlices = 5000;
#else
  constexpr int kSlices = 100000;
#endif
  for (const unsigned seed : {1u, 2u}) {
    Fabric f(small_shape());
    std::thread sender([&] {
      std::mt19937 rng(seed);
      OutEndpoint out;
      std::uint32_t in_use = 1;
      ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
      for (int i = 0; i < kSlices; ++i) {
        const std::uint32_t want = 1 + rng() % 512;
        SendGrant g;
        while ((g = f.at(0).grant(1, out, want)).capacity == 0) std::this_thread::yield();
        const std::uint32_t bytes = want < g.capacity ? want : g.capacity;
        std::memset(g.data, i & 0xff, bytes);
        f.at(0).post(1, out, g, bytes, 42);
        if (rng() % 64 == 0) std::this_thread::yield();
      }
    });
    std::mt19937 rng(seed + 100);
    InEndpoint in;
    while (!f.at(1).resolve(0, kTag, in)) std::this_thread::yield();
    for (int i = 0; i < kSlices; ++i) {
      RecvView view;
      while (!f.at(1).poll(0, in, 42, view)) std::this_thread::yield();
      ASSERT_GE(view.bytes, 1u);
      ASSERT_EQ(view.data[0], static_cast<unsigned char>(i & 0xff)) << "seed " << seed;
      ASSERT_EQ(view.data[view.bytes - 1], static_cast<unsigned char>(i & 0xff));
      if (rng() % 64 == 0) std::this_thread::yield();
      f.at(1).consume(0, in);
    }
    sender.join();
  }
}

TEST(Connector, StepFlagsDifferAndAreNeverZero) {
  std::vector<std::uint64_t> flags;
  for (std::uint64_t seed : {0ull, 1ull, 2ull, ~0ull}) {
    for (std::uint64_t step = 0; step < 1000; ++step) flags.push_back(step_flag(seed, step));
  }
  std::sort(flags.begin(), flags.end());
  EXPECT_NE(flags.front(), 0u);
  EXPECT_EQ(std::adjacent_find(flags.begin(), flags.end()), flags.end());
}

}  // namespace
}  // namespace unjam
