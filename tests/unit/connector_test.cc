// Connectors between two ranks in plain memory: directory, room, pool slots, give-back, void
// slices, flags.
#include "transport/connector.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace unjam {
namespace {

// Arenas and send states of `ranks` ranks with one lane.
class Fabric {
 public:
  explicit Fabric(ArenaShape shape) {
    shape.derive();
    shape_ = shape;
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
        state->borrows.emplace_back(shape.pool_slots);
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
  const PeerSendState& send_state(std::uint32_t r, std::uint32_t peer) {
    return states_[r]->peers[peer];
  }

 private:
  struct State {
    std::vector<PeerSendState> peers;
    std::vector<std::vector<ConnectorOwner>> owners;
    std::vector<std::vector<PoolUse>> borrows;
    std::vector<std::vector<std::uint16_t>> places;
    LaneTransport transport;
  };
  ArenaShape shape_;
  std::vector<std::unique_ptr<unsigned char, decltype(&std::free)>> arenas_;
  std::vector<unsigned char*> bases_;
  std::vector<std::unique_ptr<State>> states_;
};

SendGrant room(LaneTransport& t, std::uint32_t peer, const OutEndpoint& out, std::uint32_t want) {
  return t.grant(peer, t.wire(out), want, load_acquire(t.credit_word(peer, out.connector)));
}

void post(LaneTransport& t, std::uint32_t peer, OutEndpoint& out, const SendGrant& g,
          std::uint32_t bytes, std::uint64_t seed) {
  Wire wire = t.wire(out);
  const PublishedWord w = t.post(peer, wire, seed, g.location, bytes);
  store_release(*w.place, w.value);
  out.posted = wire.count;
}

bool poll(LaneTransport& t, std::uint32_t peer, const InEndpoint& in, std::uint64_t seed,
          RecvView& view) {
  return t.poll(peer, t.wire(in), seed, view);
}

void consume(LaneTransport& t, std::uint32_t peer, InEndpoint& in) {
  Wire wire = t.wire(in);
  const PublishedWord w = t.take(wire);
  in.consumed = wire.count;
  EXPECT_EQ(w.place, t.consumption(peer, in).place);
  store_release(*w.place, w.value);
}

ArenaShape small_shape() {
  ArenaShape s;
  s.ranks = 2;
  s.connectors = 4;
  s.guaranteed_slots = 3;
  s.guaranteed_slot_bytes = 256;
  s.pool_slots = 2;
  s.pool_slot_bytes = 512;
  return s;
}

constexpr std::uint64_t kTag = 0xabcdef0123456789ull;
constexpr std::uint64_t kGroup = 0x1234567890abcdefull;

TEST(Arena, BlocksLieSideBySideAndNoRankHasOneForItself) {
  for (const std::uint32_t ranks : {1u, 2u, 3u, 8u}) {
    for (const std::uint64_t heap : {0u, 12288u}) {
      ArenaShape shape;
      shape.ranks = ranks;
      shape.lanes = 3;
      shape.connectors = 4;
      shape.first_connectors_log2 = 1;
      shape.heap_bytes = heap;
      shape.derive();
      for (std::uint32_t owner = 0; owner < ranks; ++owner) {
        std::uint64_t at = shape.base_bytes();
        for (std::uint32_t peer = 0; peer < ranks; ++peer) {
          if (peer == owner) continue;
          EXPECT_EQ(shape.block(owner, peer), at) << ranks << " ranks";
          at += shape.block_bytes();
        }
        EXPECT_EQ(at, shape.total_bytes()) << ranks << " ranks";
      }
    }
  }
}

// Every part of a block has a place of its own, in the portion that it comes with.
TEST(Arena, PartsOfABlockDoNotOverlapAndComeInPortions) {
  for (const std::uint32_t page : {4096u, 1u << 21}) {
    for (const std::uint32_t connectors : {5u, 16u, 24u}) {
      ArenaShape shape;
      shape.ranks = 2;
      shape.lanes = 3;
      shape.connectors = connectors;
      shape.first_connectors_log2 = 1;
      shape.guaranteed_slots = 3;
      shape.guaranteed_slot_bytes = 320;
      shape.pool_slots = 2;
      shape.page_bytes = page;
      shape.derive();
      std::map<std::uint64_t, std::uint64_t> parts;
      const auto part = [&](std::uint64_t at, std::uint64_t bytes) {
        EXPECT_TRUE(parts.emplace(at, bytes).second);
      };
      for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
        part(shape.head(lane), shape.head_bytes());
        part(shape.borrowed(lane), shape.pool_bytes());
      }
      std::uint32_t portions = 0;
      for (std::uint32_t from = 0; from < connectors; from = shape.next_connectors(from)) {
        ++portions;
        const std::uint32_t to = shape.next_connectors(from);
        ASSERT_GT(to, from);
        EXPECT_EQ(shape.room_bytes(to) % page, 0u);
        for (std::uint32_t i = from; i < to; ++i) {
          for (std::uint32_t lane = 0; lane < shape.lanes; ++lane) {
            const std::uint64_t at = shape.connector(lane, i);
            EXPECT_EQ(at % kLineBytes, 0u);
            EXPECT_GE(at, from == 0 ? shape.stages_offset() : shape.room_bytes(from));
            EXPECT_LE(at + shape.connector_bytes(), shape.room_bytes(to));
            part(at, shape.connector_bytes());
          }
        }
      }
      EXPECT_GE(portions, 2u);
      std::uint64_t end = 0;
      for (const auto& [at, bytes] : parts) {
        EXPECT_GE(at, end);
        end = at + bytes;
      }
      EXPECT_LE(end, shape.block_bytes());
    }
  }
}

// A room of a few connectors: what lies behind is not touched, and more is asked for.
TEST(Rooms, ASenderStaysWithinWhatIsUsableAndAsksForMore) {
  ArenaShape shape = small_shape();
  shape.connectors = 8;
  shape.first_connectors_log2 = 1;
  Fabric f(shape);
  std::vector<Room> sender(2), receiver(2);
  f.at(0).rooms = sender.data();
  f.at(1).rooms = receiver.data();
  std::vector<OutEndpoint> out(8);
  InEndpoint in;
  const std::uint32_t in_use = 1;
  const auto open = [&](std::size_t k) {
    return f.at(0).open(1, kTag + (k << 20), kGroup, out[k], &in_use);
  };
  EXPECT_FALSE(open(0)) << "they have not met";
  EXPECT_EQ(sender[1].wanted, 0u) << "they are about to";
  sender[1].usable = 2;
  ASSERT_TRUE(open(0));
  EXPECT_FALSE(f.at(1).resolve(0, kTag, in)) << "the reader has not met the sender";
  receiver[0].usable = 2;
  EXPECT_TRUE(f.at(1).resolve(0, kTag, in));
  ASSERT_TRUE(open(1));
  EXPECT_EQ(sender[1].wanted, 0u);
  EXPECT_FALSE(open(2));
  EXPECT_EQ(sender[1].wanted, 4u);
  sender[1].usable = 4;
  ASSERT_TRUE(open(2));
  ASSERT_TRUE(open(3));
  EXPECT_EQ(out[3].connector, 3u);
  EXPECT_FALSE(open(4));
  EXPECT_EQ(sender[1].wanted, 8u);
  sender[1].usable = 8;
  for (std::size_t k = 4; k < 8; ++k) ASSERT_TRUE(open(k));
}

// Where a connector of an idle key will do, nobody waits for more.
TEST(Rooms, WhileMoreIsAwaitedIdleKeysLendTheirConnectors) {
  ArenaShape shape = small_shape();
  shape.first_connectors_log2 = 1;
  Fabric f(shape);
  std::vector<Room> rooms(2);
  rooms[1].usable = 2;
  f.at(0).rooms = rooms.data();
  std::vector<OutEndpoint> out(4);
  const std::uint32_t idle = 0;
  for (std::size_t k = 0; k < 4; ++k) {
    ASSERT_TRUE(f.at(0).open(1, kTag + (k << 20), kGroup, out[k], &idle)) << k;
    EXPECT_LT(out[k].connector, 2u);
  }
  EXPECT_EQ(rooms[1].wanted, 4u) << "a pool of more would spare them that";
}

TEST(Rooms, ClearingARoomClearsItsPortionAndNothingElse) {
  ArenaShape shape = small_shape();
  shape.ranks = 3;
  shape.lanes = 2;
  shape.connectors = 8;
  shape.first_connectors_log2 = 1;
  shape.derive();
  for (std::uint32_t from = 0; from < 8; from = shape.next_connectors(from)) {
    std::vector<unsigned char> arena(shape.total_bytes() + 64, 0x5a);
    unsigned char* const base =
        arena.data() + (64 - reinterpret_cast<std::uintptr_t>(arena.data()) % 64) % 64;
    unsigned char* bases[3] = {nullptr, base, nullptr};
    LaneTransport t;
    t.shape = shape;
    t.bases = bases;
    t.rank = 1;
    const std::uint32_t to = shape.next_connectors(from);
    for (std::uint32_t thread = 0; thread < 5; ++thread) t.clear_room(2, from, to, thread, 5);
    const std::uint64_t begin = shape.block(1, 2);
    for (std::uint64_t i = 0; i < shape.total_bytes(); ++i) {
      const std::uint64_t at = i - begin;
      const bool head = i >= begin && from == 0 && at < shape.heads_bytes();
      const bool slots = i >= begin && at < shape.room_bytes(to) &&
                         at >= (from == 0 ? shape.stages_offset() : shape.room_bytes(from));
      ASSERT_EQ(base[i], head || slots ? 0 : 0x5a) << i << " from " << from;
    }
  }
}

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
  EXPECT_FALSE(poll(f.at(1), 0, in, 7, view));
}

TEST(Connector, AnotherInvocationsSliceIsNotReadAsData) {
  Fabric f(small_shape());
  OutEndpoint out;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  const SendGrant g = room(f.at(0), 1, out, 100);
  post(f.at(0), 1, out, g, 100, /*seed=*/1);
  RecvView view;
  EXPECT_FALSE(poll(f.at(1), 0, in, /*seed=*/2, view)) << "the seed holds count, dtype, n, plan";
  EXPECT_TRUE(poll(f.at(1), 0, in, 1, view));
  EXPECT_EQ(view.bytes, 100u);
}

// The memory of a key that was forgotten may be another key's, of a group with other members.
TEST(Connector, AnEndpointThatWasAnotherPeersFindsItsOwn) {
  ArenaShape shape = small_shape();
  shape.ranks = 3;
  Fabric f(shape);
  OutEndpoint before, out;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, before, &in_use));
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  ASSERT_TRUE(f.at(2).open(1, kTag + 1, kGroup, out, &in_use));
  ASSERT_EQ(out.connector, in.connector) << "of the other sender, with the same number";
  const SendGrant g = room(f.at(2), 1, out, 100);
  post(f.at(2), 1, out, g, 100, /*seed=*/1);
  ASSERT_TRUE(f.at(1).resolve(2, kTag + 1, in));
  RecvView view;
  ASSERT_TRUE(poll(f.at(1), 2, in, 1, view));
  EXPECT_EQ(view.data, g.data);
  consume(f.at(1), 2, in);
  EXPECT_TRUE(f.at(2).drained(1, out));
}

TEST(Connector, RoomIsGuaranteedSlotsThenPoolSlotsThenNone) {
  Fabric f(small_shape());
  OutEndpoint out;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, out, &in_use));
  std::vector<std::uint32_t> locations;
  for (;;) {
    const SendGrant g = room(f.at(0), 1, out, 64);
    if (g.capacity == 0) break;
    locations.push_back(g.location);
    post(f.at(0), 1, out, g, 64, 9);
  }
  // Small slices take the guaranteed slots first; then the pool; then they wait.
  EXPECT_EQ(locations, (std::vector<std::uint32_t>{0, 0, 0, 1, 2}));
  // One consumed step makes room again, whichever it was.
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(poll(f.at(1), 0, in, 9, view));
    consume(f.at(1), 0, in);
  }
  EXPECT_EQ(room(f.at(0), 1, out, 64).location, 0u);
  // A large slice prefers a pool slot, but both are still in use.
  EXPECT_EQ(room(f.at(0), 1, out, 512).location, 0u);
  ASSERT_TRUE(poll(f.at(1), 0, in, 9, view));
  consume(f.at(1), 0, in);
  EXPECT_EQ(room(f.at(0), 1, out, 512).location, 1u);
}

TEST(Connector, ABorrowedSlotOfOneKeyServesAnotherOnceConsumed) {
  Fabric f(small_shape());
  OutEndpoint a, b;
  InEndpoint in;
  std::uint32_t in_use = 1;
  ASSERT_TRUE(f.at(0).open(1, kTag, kGroup, a, &in_use));
  ASSERT_TRUE(f.at(0).open(1, kTag + 2, kGroup, b, &in_use));
  for (int i = 0; i < 2; ++i) {
    const SendGrant g = room(f.at(0), 1, a, 512);
    ASSERT_NE(g.location, 0u);
    post(f.at(0), 1, a, g, 512, 3);
  }
  EXPECT_EQ(room(f.at(0), 1, b, 512).location, 0u)
      << "the pool is empty: the guaranteed slot serves";
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag, in));
  ASSERT_TRUE(poll(f.at(1), 0, in, 3, view));
  consume(f.at(1), 0, in);
  EXPECT_NE(room(f.at(0), 1, b, 512).location, 0u);
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
  post(f.at(0), 1, out[2], room(f.at(0), 1, out[2], 8), 8, 5);
  in_use[2] = 0;
  EXPECT_FALSE(f.at(0).open(1, kTag + 1000, kGroup, out[connectors], &in_use[connectors]));
  RecvView view;
  ASSERT_TRUE(f.at(1).resolve(0, kTag + 8, in[2]));
  ASSERT_TRUE(poll(f.at(1), 0, in[2], 5, view));
  consume(f.at(1), 0, in[2]);
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
  post(f.at(0), 1, out[2], room(f.at(0), 1, out[2], 8), 8, 6);
  ASSERT_TRUE(f.at(1).resolve(0, kTag + 8, in[2]));
  EXPECT_TRUE(poll(f.at(1), 0, in[2], 6, view));
}

ArenaShape many_connectors(std::uint32_t connectors) {
  ArenaShape s = small_shape();
  s.connectors = connectors;
  s.guaranteed_slots = 2;
  return s;
}

// Keys that rank 0 uses towards rank 1: a slice at a time, sent and read.
class Keys {
 public:
  Keys(Fabric& f, std::size_t count)
      : f_(f), out_(count), in_(count), uses_(count), in_use_(count) {}
  static std::uint64_t tag(std::size_t k) { return mix64(k) | 2; }
  bool send(std::size_t k) {
    in_use_[k] = 1;
    OutEndpoint& out = out_[k];
    const bool open =
        out.connector != kNoConnector || f_.at(0).open(1, tag(k), kGroup, out, &in_use_[k]);
    if (open) post(f_.at(0), 1, out, room(f_.at(0), 1, out, 8), 8, tag(k) + uses_[k]++);
    in_use_[k] = 0;
    return open;
  }
  bool read(std::size_t k) {
    RecvView view;
    if (!f_.at(1).resolve(0, tag(k), in_[k])) return false;
    if (!poll(f_.at(1), 0, in_[k], tag(k) + uses_[k] - 1, view)) return false;
    consume(f_.at(1), 0, in_[k]);
    return true;
  }
  bool use(std::size_t k) { return send(k) && read(k); }
  OutEndpoint& out(std::size_t k) { return out_[k]; }
  // As when the runtime has forgotten the key on a rank.
  void forget_sender(std::size_t k, bool known_void = false) {
    f_.at(0).release(1, out_[k], known_void);
    out_[k] = {};
  }
  void forget_reader(std::size_t k) { in_[k] = {}; }

 private:
  Fabric& f_;
  std::vector<OutEndpoint> out_;
  std::vector<InEndpoint> in_;
  std::vector<std::uint64_t> uses_;
  std::vector<std::uint32_t> in_use_;
};

TEST(Connector, AMissLooksAtFewPlaces) {
  Fabric f(many_connectors(1024));
  Keys keys(f, 4000);
  // All connectors held, then many keys more that take them over: the table never fills.
  for (std::size_t k = 0; k < 4000; ++k) ASSERT_TRUE(keys.send(k) && keys.read(k)) << k;
  for (std::size_t k = 0; k < 1024; ++k) ASSERT_TRUE(keys.send(k)) << k;  // and stays unread
  EXPECT_EQ(f.send_state(0, 1).touched, 1024u);
  EXPECT_LE(f.send_state(0, 1).longest_probe, 64u) << "of 2048 places, half of them taken";
  InEndpoint in;
  EXPECT_FALSE(f.at(1).resolve(0, kTag, in));
  for (std::size_t k = 0; k < 1024; ++k) ASSERT_TRUE(keys.read(k)) << k;
}

TEST(Connector, KeysUsedOnceShareTheFirstConnectors) {
  Fabric f(many_connectors(1024));
  Keys keys(f, 5000);
  for (std::size_t k = 0; k < 5000; ++k) ASSERT_TRUE(keys.use(k)) << k;
  EXPECT_LE(f.send_state(0, 1).touched, kFirstPool + 2);
  EXPECT_EQ(f.send_state(0, 1).pool, kFirstPool) << "no key came back: nothing to learn";
}

TEST(Connector, AWorkingSetKeepsItsConnectors) {
  for (const std::size_t count : {100, 500, 1000}) {
    Fabric f(many_connectors(1024));
    Keys keys(f, count + 500);
    for (int round = 0; round < 8; ++round) {
      for (std::size_t k = 0; k < count; ++k) ASSERT_TRUE(keys.use(k)) << k;
    }
    const std::uint32_t before = f.send_state(0, 1).reclaimed;
    for (int round = 0; round < 3; ++round) {
      for (std::size_t k = 0; k < count; ++k) ASSERT_TRUE(keys.use(k)) << k;
    }
    EXPECT_EQ(f.send_state(0, 1).reclaimed, before) << count << " keys in turn";
    // Among keys that come once, those in use are passed over.
    if (count != 100) continue;
    std::uint32_t lost = 0;
    for (std::size_t k = 0; k < 500; ++k) {
      ASSERT_TRUE(keys.use(count + k));
      if (k % 5 != 0) continue;
      for (std::size_t hot = 0; hot < 20; ++hot) {
        if (keys.out(hot).connector == kNoConnector) ++lost;
        ASSERT_TRUE(keys.use(hot));
      }
    }
    EXPECT_EQ(lost, 0u);
  }
}

TEST(Connector, WhatIsGivenBackServesTheNextKey) {
  Fabric f(many_connectors(64));
  Keys keys(f, 3);
  ASSERT_TRUE(keys.use(0) && keys.use(0));
  keys.forget_sender(0);
  EXPECT_EQ(f.send_state(0, 1).opened, 0u);
  ASSERT_TRUE(keys.send(1));  // on the same connector
  EXPECT_EQ(f.send_state(0, 1).touched, 1u);
  EXPECT_FALSE(keys.read(0)) << "its reader has it cached, but it is another key's now";
  ASSERT_TRUE(keys.read(1));
  // It comes back, elsewhere, and its reader finds it.
  ASSERT_TRUE(keys.use(0));
  EXPECT_EQ(f.send_state(0, 1).touched, 2u);
}

TEST(Connector, AReaderThatForgotAKeyGoesOnWhereItWas) {
  Fabric f(many_connectors(64));
  Keys keys(f, 2);
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(keys.use(0));
  ASSERT_TRUE(keys.send(0));  // unread
  keys.forget_reader(0);
  ASSERT_TRUE(keys.read(0));
  keys.forget_reader(0);
  ASSERT_TRUE(keys.use(0));
}

TEST(Connector, SlicesThatNobodyWillReadAreVoidOnlyByTheReadersWord) {
  Fabric f(many_connectors(2));
  Keys keys(f, 8);
  ASSERT_TRUE(keys.send(0) && keys.send(1));
  EXPECT_FALSE(keys.send(2)) << "both connectors have unread slices";
  f.at(1).mark_void(0, Keys::tag(1));
  EXPECT_FALSE(f.at(0).voided(1, Keys::tag(0)));
  const std::uint32_t connector = keys.out(1).connector;
  ASSERT_TRUE(keys.use(2));
  EXPECT_EQ(keys.out(2).connector, connector);
  EXPECT_EQ(keys.out(1).connector, kNoConnector);
  // Room and steps are as if all had been read.
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(keys.use(2));
  // A whole group's word, and one that the runtime has seen, although another has replaced it.
  ASSERT_TRUE(keys.send(2));
  EXPECT_FALSE(keys.send(3));
  f.at(1).mark_void(0, kGroup);
  ASSERT_TRUE(keys.send(3));
  f.at(1).mark_void(0, kGroup + (std::uint64_t{kVoidMarks} << 8));
  keys.forget_sender(3, /*known_void=*/true);
  ASSERT_TRUE(keys.use(4));
  // Nobody's word: the slice stays where it is, and its connector nobody's.
  ASSERT_TRUE(keys.send(4));
  keys.forget_sender(4);
  EXPECT_EQ(f.send_state(0, 1).abandoned, 1u);
}

TEST(Connector, WhatAForgottenKeyHasSentIsFoundHoweverLate) {
  Fabric f(many_connectors(2));
  Keys keys(f, 8);
  ASSERT_TRUE(keys.send(0));
  keys.forget_sender(0);
  EXPECT_EQ(f.send_state(0, 1).abandoned, 1u);
  for (std::size_t k = 1; k < 4; ++k) ASSERT_TRUE(keys.use(k)) << "the other connector serves";
  ASSERT_TRUE(keys.send(4));
  EXPECT_FALSE(keys.send(5)) << "both connectors have unread slices";
  ASSERT_TRUE(keys.read(0));
  ASSERT_TRUE(keys.use(5)) << "it serves again";
  EXPECT_EQ(f.send_state(0, 1).abandoned, 0u);
  keys.forget_reader(0);
  EXPECT_FALSE(keys.read(0));
  ASSERT_TRUE(keys.read(4));
  // Or when the reader says that it will never read it.
  ASSERT_TRUE(keys.send(6));
  keys.forget_sender(6);
  ASSERT_TRUE(keys.send(7));
  EXPECT_FALSE(keys.send(5));
  f.at(1).mark_void(0, Keys::tag(6));
  ASSERT_TRUE(keys.use(5));
  EXPECT_EQ(f.send_state(0, 1).abandoned, 0u);
}

// A reader that comes and goes between keys which take each other's connectors over, in threads.
TEST(Connector, TakeOversBetweenThreads) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  constexpr std::uint64_t kUses = 20000;
#else
  constexpr std::uint64_t kUses = 300000;
#endif
  constexpr std::size_t kKeys = 12;
  Fabric f(many_connectors(4));
  std::vector<std::uint64_t> order(kUses);
  std::mt19937 rng(7);
  for (std::uint64_t& k : order) k = rng() % kKeys;
  std::thread sender([&] {
    std::vector<OutEndpoint> out(kKeys);
    std::vector<std::uint32_t> in_use(kKeys, 0);
    std::mt19937 mine(8);
    for (std::uint64_t u = 0; u < kUses; ++u) {
      const std::size_t k = order[u];
      in_use[k] = 1;
      while (out[k].connector == kNoConnector &&
             !f.at(0).open(1, Keys::tag(k), kGroup, out[k], &in_use[k])) {
        std::this_thread::yield();
      }
      SendGrant g;
      while ((g = room(f.at(0), 1, out[k], 8)).capacity == 0) std::this_thread::yield();
      std::memcpy(g.data, &u, 8);
      post(f.at(0), 1, out[k], g, 8, u);
      in_use[k] = 0;
      if (mine() % 50 == 0) {
        while (!f.at(0).drained(1, out[k])) std::this_thread::yield();
        f.at(0).release(1, out[k]);
        out[k] = {};
      }
    }
  });
  std::vector<InEndpoint> in(kKeys);
  for (std::uint64_t u = 0; u < kUses; ++u) {
    InEndpoint& e = in[order[u]];
    if (u % 37 == 0) e = {};
    RecvView view;
    while (!f.at(1).resolve(0, Keys::tag(order[u]), e) || !poll(f.at(1), 0, e, u, view)) {
      std::this_thread::yield();
    }
    std::uint64_t value = 0;
    std::memcpy(&value, view.data, 8);
    ASSERT_EQ(value, u);
    consume(f.at(1), 0, e);
  }
  sender.join();
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
        while ((g = room(f.at(0), 1, out, want)).capacity == 0) std::this_thread::yield();
        const std::uint32_t bytes = want < g.capacity ? want : g.capacity;
        std::memset(g.data, i & 0xff, bytes);
        post(f.at(0), 1, out, g, bytes, 42);
        if (rng() % 64 == 0) std::this_thread::yield();
      }
    });
    std::mt19937 rng(seed + 100);
    InEndpoint in;
    while (!f.at(1).resolve(0, kTag, in)) std::this_thread::yield();
    for (int i = 0; i < kSlices; ++i) {
      RecvView view;
      while (!poll(f.at(1), 0, in, 42, view)) std::this_thread::yield();
      ASSERT_GE(view.bytes, 1u);
      ASSERT_EQ(view.data[0], static_cast<unsigned char>(i & 0xff)) << "seed " << seed;
      ASSERT_EQ(view.data[view.bytes - 1], static_cast<unsigned char>(i & 0xff));
      if (rng() % 64 == 0) std::this_thread::yield();
      consume(f.at(1), 0, in);
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
