// Couriers over a loop fabric, driven by hand: what they bring, and what they refuse. The schedule
// explorer runs the same code in courier_explored_test, engines in courier_engines_test.
#include "transport/network/courier.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "tests/net/carried_rank.h"
#include "tests/support/job.h"
#include "tests/support/network_world.h"
#include "transport/announcement.h"
#include "transport/network/frame.h"
#include "transport/network/loop_fabric.h"
#include "transport/network/mirror.h"

namespace unjam {
namespace {

using unjam_test::base_seed;

constexpr std::uint64_t kTag = 0xabcdef0123456789ull, kOther = 0x1111222233334445ull,
                        kGroup = 0x1234567890abcdefull;
constexpr std::uint32_t kNotInUse = 0;

// A world, and how its network chooses.
class World {
 public:
  explicit World(WorldOptions o, std::uint64_t seed = base_seed()) : random_(seed) {
    o.loop.choose = [](void* me, LoopOptions::Choice, std::uint32_t n) {
      return static_cast<std::uint32_t>(static_cast<World*>(me)->random_() % n);
    };
    o.loop.context = this;
    bytes_ = sizeof(NetworkWorld) + 64 + NetworkWorld::memory_bytes(o);
    bytes_ = (bytes_ + 4095) / 4096 * 4096;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(4096, bytes_)));
    std::memset(memory_.get(), 0, bytes_);
    // (Arenas begin where pages do not: nothing here asks for that.)
    world_ =
        new (memory_.get()) NetworkWorld(o, memory_.get() + (sizeof(NetworkWorld) + 63) / 64 * 64);
  }
  NetworkWorld* operator->() { return world_; }
  NetworkWorld& operator*() { return *world_; }
  std::mt19937_64& random() { return random_; }

  // Drives all until nothing is under way, and nothing moves.
  void settle() {
    for (std::uint32_t quiet = 0, turns = 0; quiet < 3; ++turns) {
      ASSERT_LT(turns, 1000000u) << "no end";
      bool moved = false;
      for (std::uint32_t r = 0; r < world_->ranks(); ++r) moved |= world_->courier(r).drive();
      quiet = moved || !world_->net().empty() ? 0 : quiet + 1;
    }
  }
  std::vector<unsigned char> save() const { return {memory_.get(), memory_.get() + bytes_}; }
  void restore(const std::vector<unsigned char>& s) {
    std::memcpy(memory_.get(), s.data(), bytes_);
  }
  std::ptrdiff_t offset(const void* p) const {
    return static_cast<const unsigned char*>(p) - memory_.get();
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  std::mt19937_64 random_;
  std::size_t bytes_ = 0;
  std::unique_ptr<unsigned char, Free> memory_;
  NetworkWorld* world_ = nullptr;
};

WorldOptions small_world(std::uint32_t ranks = 2) {
  WorldOptions o;
  o.ranks = ranks;
  o.shape = small_network_shape();
  return o;
}

// ---- mirrors ----

TEST(Mirror, WordsTellWhatTheyAre) {
  for (const std::uint32_t log2 : {0u, 1u, 3u}) {
    ArenaShape shape = small_network_shape();
    shape.ranks = 3;
    shape.lanes = 3;
    shape.connectors = 7;
    shape.first_connectors_log2 = log2;
    shape.pool_slots = 3;
    shape.derive();
    const auto memory = std::make_unique<unsigned char[]>(shape.total_bytes());
    unsigned char* const bases[3] = {nullptr, nullptr, memory.get()};
    LaneTransport t;
    t.shape = shape;
    t.bases = bases;
    for (t.rank = 0; t.rank < 2; ++t.rank) {
      for (t.lane = 0; t.lane < 3; ++t.lane) {
        for (std::uint32_t i = 0; i < shape.connectors; ++i) {
          unsigned char* const steps =
              bases[2] + shape.block(2, t.rank) + shape.connector(t.lane, i);
          for (std::uint64_t step = 0; step < kSlotHeaders; ++step) {
            const Posted p = posted_at(shape, bases[2], 2, t.rank, t.lane,
                                       &LaneTransport::header_of(steps, step).flag);
            ASSERT_FALSE(p.credit);
            ASSERT_EQ(p.connector, i);
          }
          InEndpoint in;
          in.connector = i;
          const Posted p =
              posted_at(shape, bases[2], 2, t.rank, t.lane, t.consumption(2, in).place);
          ASSERT_TRUE(p.credit);
          ASSERT_EQ(p.connector, i);
        }
      }
    }
  }
}

TEST(Mirror, HintsThatWereLostAreSaidToBe) {
  HintRing ring;
  std::uint64_t seen = 0, given = 0;
  for (const std::uint32_t n : {0u, 1u, 5u, 63u, 64u, 65u, 200u, 2u}) {
    for (std::uint32_t k = 0; k < n; ++k) ring.give(static_cast<std::uint32_t>(given++));
    std::vector<std::uint32_t> took;
    const bool all = ring.read(seen, [&](std::uint32_t i) { took.push_back(i); });
    EXPECT_EQ(all, n < HintRing::kPlaces);
    if (!all) continue;
    ASSERT_EQ(took.size(), n);
    for (std::uint32_t k = 0; k < n; ++k) EXPECT_EQ(took[k], given - n + k);
  }
}

// ---- frames ----

CourierFrame data_frame() {
  CourierFrame f;
  f.src = 0, f.dst = 1;
  f.bytes = 40;
  f.flag = step_flag(5, 0);
  f.tag = kTag, f.group = kGroup;
  return f;
}
std::vector<CourierFrame> some_frames() {
  std::vector<CourierFrame> all{data_frame()};
  CourierFrame f = data_frame();
  f.connectors[0] = 1;
  all.push_back(f);
  f = {};
  f.type = FrameType::kCredits;
  f.src = 0, f.dst = 1;
  f.count = 2;
  f.connectors[1] = 1;
  f.consumed[0] = 1, f.consumed[1] = 2;
  all.push_back(f);
  f = {};
  f.type = FrameType::kUnlist;
  f.src = 0, f.dst = 1;
  f.tag = kTag;
  all.push_back(f);
  f = {};
  f.type = FrameType::kAnnounce;
  f.dst = 1;
  f.location = 17;
  f.step = 0x1234567800000001ull;
  all.push_back(f);
  f = {};
  f.type = FrameType::kBye;
  f.step = 7;
  all.push_back(f);
  return all;
}

TEST(Frames, SayWhatTheyWereToldAndNothingElse) {
  ArenaShape shape = small_network_shape();
  shape.ranks = 2;
  for (const CourierFrame& f : some_frames()) {
    const FrameBytes bytes = encode(f);
    CourierFrame back;
    ASSERT_EQ(decode(bytes, shape, &back), nullptr);
    EXPECT_EQ(std::memcmp(encode(back).bytes, bytes.bytes, kFrameBytes), 0);
    EXPECT_EQ(back.type, f.type);
    EXPECT_EQ(back.step, f.step);
    EXPECT_EQ(payload_bytes(back), f.type == FrameType::kData ? f.bytes : 0);
  }
}

TEST(Frames, AreNotBelieved) {
  ArenaShape shape = small_network_shape();
  shape.ranks = 2;
  shape.pool_slots = 2;
  shape.pool_slot_bytes = 128;
  const auto refused = [&](const std::function<void(CourierFrame&)>& change) {
    CourierFrame f = data_frame(), back;
    change(f);
    return decode(encode(f), shape, &back) != nullptr;
  };
  EXPECT_FALSE(refused([](CourierFrame&) {}));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.src = 2; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.dst = 2; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.dst = 0; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.lane = 1; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.connectors[0] = 2; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.connectors[1] = 1; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.bytes = 65; }));
  EXPECT_FALSE(
      refused([](CourierFrame& f) { f.bytes = 128, f.location = 2, f.flag |= kFlagBorrowed; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.location = 3, f.flag |= kFlagBorrowed; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.location = kInOutput, f.flag |= kFlagInOutput; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.location = 1; })) << "its flag says something else";
  EXPECT_TRUE(refused([](CourierFrame& f) { f.flag |= kFlagInOutput; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.flag = 0; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.tag = 0; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.base = 1; }));
  EXPECT_TRUE(refused([](CourierFrame& f) { f.count = 1; }));
  for (const std::uint8_t count : {0, 5}) {
    CourierFrame f, back;
    f.type = FrameType::kCredits;
    f.src = 0, f.dst = 1;
    f.count = count;
    EXPECT_NE(decode(encode(f), shape, &back), nullptr);
  }
}

// ---- bringing ----

// A key between two ranks, and what both ends know of it.
struct Stream {
  std::uint32_t from = 0, to = 1;
  std::uint64_t tag = kTag;
  std::uint64_t seed = 1;
  std::uint32_t bytes = 40;
  OutEndpoint out;
  InEndpoint in;
  std::uint64_t sent = 0, received = 0;
};
bool send(NetworkWorld& w, Stream& s, std::uint64_t group = 3) {
  const std::uint32_t bytes = s.bytes - s.sent % 3;
  if (!w.send(s.from, s.to, s.tag, s.out, kNotInUse, s.seed, bytes, group)) return false;
  ++s.sent;
  return true;
}
bool receive(NetworkWorld& w, Stream& s) {
  const std::uint32_t bytes = s.bytes - s.received % 3;
  const int got = w.receive(s.to, s.from, s.tag, s.in, s.seed, bytes);
  EXPECT_GE(got, 0) << "a wrong slice";
  if (got == 1) ++s.received;
  return got != 0;
}

struct Net {
  std::uint32_t ranks, piece, copied, depth;
  bool reorders;
  std::uint64_t window;
};

// Keys of all pairs of ranks, more than there are connectors, in any order.
TEST(Courier, BringsEverythingOverAnyNetwork) {
  const Net nets[] = {{2, 0, 0, 8, false, 1 << 20}, {2, 1, 0, 3, true, 1 << 20},
                      {3, 7, 64, 4, true, 100},     {4, 0, 500, 2, true, 1},
                      {3, 1, 500, 1, true, 300},    {2, 50, 500, 8, true, 1 << 20}};
  for (std::uint64_t n = 0; n < std::size(nets) * 3; ++n) {
    const Net& net = nets[n % std::size(nets)];
    WorldOptions o = small_world(net.ranks);
    o.shape.connectors = 3;
    o.shape.guaranteed_slots = 3;
    o.shape.pool_slots = n % 2 == 0 ? 0 : 3;
    o.shape.pool_slot_bytes = 192;
    o.loop.piece = net.piece;
    o.loop.copied_bytes = net.copied;
    o.loop.depth = net.depth;
    o.loop.reorders = net.reorders;
    o.window = net.window;
    const std::uint64_t seed = base_seed() + n;
    SCOPED_TRACE("seed " + std::to_string(seed) + ", net " + std::to_string(n));
    World w(o, seed);
    std::vector<Stream> streams;
    for (std::uint32_t a = 0; a < net.ranks; ++a) {
      for (std::uint32_t b = 0; b < net.ranks; ++b) {
        for (std::uint64_t key = 0; a != b && key < 6; ++key) {
          Stream s;
          s.from = a, s.to = b;
          s.tag = mix64(key + 1) | 1;
          s.seed = hash_combine(s.tag, a * 10 + b);
          s.bytes = o.shape.pool_slots != 0 && key % 2 == 0 ? 150 : 60;
          streams.push_back(s);
        }
      }
    }
    constexpr std::uint64_t kEach = 40;
    std::uint64_t left = streams.size() * kEach;
    for (std::uint32_t turns = 0; left != 0; ++turns) {
      ASSERT_LT(turns, 4000000u) << "somebody waits for ever";
      Stream& s = streams[w.random()() % streams.size()];
      const std::uint64_t what = w.random()() % 8;
      if (what == 0) {
        if (s.sent != kEach) send(*w, s);
        // Keys are forgotten when all was consumed, and come again.
        LaneTransport& t = w->transport(s.from);
        if (w.random()() % 8 == 0 && t.drained(s.to, s.out)) t.release(s.to, s.out);
      } else if (what == 1) {
        if (receive(*w, s)) --left;
        ASSERT_FALSE(testing::Test::HasFailure());
      } else {
        w->courier(static_cast<std::uint32_t>(w.random()() % net.ranks)).drive();
      }
    }
    w.settle();
    for (std::uint32_t r = 0; r < net.ranks; ++r) {
      EXPECT_EQ(w->home(r).gone_count, 0u) << w->home(r).why;
      EXPECT_EQ(w->courier(r).counts().dropped, 0u);
    }
    EXPECT_FALSE(w->net().overwritten());
  }
}

// What is short does not wait behind more than a window of what is long.
TEST(Courier, GivesTheCarrierAWindowAndShortSlicesFirst) {
  WorldOptions o = small_world();
  o.shape.connectors = 16;
  o.shape.guaranteed_slots = 4;
  o.shape.guaranteed_slot_bytes = 32768;
  o.loop.depth = 64;
  o.window = 100000;
  World w(o);
  std::vector<Stream> longs(8);
  for (std::uint64_t k = 0; k < longs.size(); ++k) {
    longs[k].tag = mix64(k + 1) | 1, longs[k].bytes = 30000;
    while (send(*w, longs[k])) {
    }
    EXPECT_EQ(longs[k].sent, 4u);
  }
  w->courier(0).drive();
  EXPECT_EQ(w->courier(0).counts().sent, 3u) << "as many as fit into the window";
  Stream quick;
  quick.tag = kOther, quick.bytes = 100;
  ASSERT_TRUE(send(*w, quick));
  w->courier(0).drive();
  EXPECT_EQ(w->courier(0).counts().sent, 4u);
  w.settle();
  EXPECT_TRUE(receive(*w, quick));
  for (Stream& s : longs) {
    while (receive(*w, s)) {
    }
    EXPECT_EQ(s.received, 4u);
  }
}

TEST(Courier, LooksAtAllWhenItHasFallenBehind) {
  WorldOptions o = small_world();
  o.shape.connectors = 100;
  World w(o);
  std::vector<Stream> streams(100);
  for (std::uint64_t k = 0; k < streams.size(); ++k) {
    streams[k].tag = mix64(k + 1) | 1;
    ASSERT_TRUE(send(*w, streams[k]));
  }
  w.settle();
  for (Stream& s : streams) EXPECT_TRUE(receive(*w, s));
  w.settle();
  for (Stream& s : streams) EXPECT_TRUE(w->transport(0).drained(1, s.out));
}

// A key's connector goes to nobody, and the key gets another one: who has the former cached must
// look again.
TEST(Courier, EndsListings) {
  for (const bool loses : {false, true}) {
    World w(small_world());
    Stream a, b;
    b.tag = kOther, b.seed = 2;
    for (Stream* s : {&a, &b}) {
      ASSERT_TRUE(send(*w, *s));
      w.settle();
      ASSERT_TRUE(receive(*w, *s));
      w.settle();
    }
    w->transport(0).release(1, a.out);
    w->transport(0).release(1, b.out);
    if (loses) w->net().loses = static_cast<std::uint8_t>(FrameType::kUnlist);
    ASSERT_TRUE(send(*w, a));
    ASSERT_NE(a.out.connector, a.in.connector) << "it was to get b's";
    w.settle();
    EXPECT_EQ(receive(*w, a), !loses);
  }
}

// The same, but a third key begins at the former connector before its listing's end has gone out.
TEST(Courier, EndsNoListingOfALaterOwner) {
  World w(small_world());
  Stream a, b, c;
  b.tag = kOther, b.seed = 2;
  c.tag = kOther + 6, c.seed = 3;
  for (Stream* s : {&a, &b}) {
    ASSERT_TRUE(send(*w, *s));
    w.settle();
    ASSERT_TRUE(receive(*w, *s));
    w.settle();
  }
  w->transport(0).release(1, a.out);
  w->transport(0).release(1, b.out);
  ASSERT_TRUE(send(*w, a) && send(*w, c));
  ASSERT_EQ(c.out.connector, a.in.connector);
  w.settle();
  EXPECT_TRUE(receive(*w, a) && receive(*w, c));
  w.settle();
  EXPECT_TRUE(send(*w, a) && send(*w, c));
  w.settle();
  EXPECT_TRUE(receive(*w, a) && receive(*w, c));
  EXPECT_EQ(w->home(1).gone_count, 0u) << w->home(1).why;
}

TEST(Courier, ConsumesInThePlaceOfWhoReadsNoMore) {
  for (int i = 0; i < 8; ++i) {
    const bool of_group = (i & 1) != 0, before = (i & 2) != 0, other = (i & 4) != 0;
    World w(small_world());
    Stream s;
    const auto mark = [&] {
      w->transport(1).mark_void(0, other ? kOther : of_group ? kGroup : kTag);
      w->courier(1).marked(1, 0, 0);
    };
    if (before) mark();
    ASSERT_TRUE(send(*w, s, kGroup));
    ASSERT_TRUE(send(*w, s, kGroup));
    w.settle();
    if (!before) mark();
    w.settle();
    EXPECT_EQ(w->transport(0).drained(1, s.out), !other);
    // What comes later, too.
    if (other) continue;
    ASSERT_TRUE(send(*w, s, kGroup));
    w.settle();
    EXPECT_TRUE(w->transport(0).drained(1, s.out));
    w->transport(0).release(1, s.out);
    Stream next;
    next.tag = kOther;
    for (int k = 0; k < 5; ++k) {
      ASSERT_TRUE(send(*w, next));
      w.settle();
      ASSERT_TRUE(receive(*w, next));
      w.settle();
    }
    EXPECT_EQ(w->home(0).gone_count + w->home(1).gone_count, 0u);
  }
}

TEST(Courier, CarriesAnnouncements) {
  World w(small_world(3));
  const auto table = [&](std::uint32_t in, std::uint32_t of) {
    return reinterpret_cast<std::uint64_t*>(w->view(in, of) + w->shape().announcements());
  };
  const auto say = [&](std::uint32_t who, std::uint64_t signature) {
    announce(table(who, 2), kTag, 0, signature);
    w->courier(who).announced();
    w.settle();
  };
  say(0, 7);
  EXPECT_EQ(announce(table(2, 2), kTag, 0, 7), Announced::kAgreed);
  EXPECT_EQ(announce(table(2, 2), kTag, 0, 9), Announced::kDiffers);
  say(1, 7);
  EXPECT_EQ(w->home(2).differs_count, 0u);
  World other(small_world(3));
  announce(reinterpret_cast<std::uint64_t*>(w->view(1, 2) + w->shape().announcements()), kOther, 3,
           1);
  w->courier(1).announced();
  w.settle();
  say(0, 7);
  announce(table(0, 2), kOther, 3, 5);
  w->courier(0).announced();
  w.settle();
  EXPECT_EQ(w->home(2).differs_count, 1u);
  announce_end(table(1, 2), kOther, 3);
  w->courier(1).announced();
  w.settle();
  EXPECT_EQ(announce(table(2, 2), kOther, 3, 5), Announced::kEnded);
}

TEST(Courier, WhoSaysGoodByeIsNotGone) {
  for (std::uint64_t k = 0; k < 20; ++k) {
    WorldOptions o = small_world();
    Stream s;
    if (k % 2 == 1) {  // of long slices one is sent at once
      o.shape.guaranteed_slot_bytes = 16384;
      o.window = 1;
      s.bytes = 10000;
    }
    World w(o, base_seed() + k);
    ASSERT_TRUE(send(*w, s));
    ASSERT_TRUE(send(*w, s));
    w->courier(0).leave(1);
    w.settle();
    EXPECT_EQ(w->home(1).left_count, 1u);
    EXPECT_TRUE(receive(*w, s) && receive(*w, s)) << "it came behind the good-bye";
    w->net().cut(0, 1);
    for (int i = 0; i < 3; ++i) w->courier(1).drive();
    EXPECT_EQ(w->home(1).gone_count, 0u);
  }
}

TEST(Courier, ACutEndsThePeerOnce) {
  WorldOptions o = small_world(3);
  o.loop.piece = 1;
  for (std::uint64_t k = 0; k < 50; ++k) {
    World w(o, base_seed() + k);
    Stream a, b;
    b.to = 2;
    for (Stream* s : {&a, &b}) {
      while (send(*w, *s)) {
      }
    }
    for (std::uint64_t i = 0; i < 7 * k; ++i) w->courier(i % 2).drive();
    w->net().cut(0, 1);
    for (int i = 0; i < 10; ++i) {
      for (const std::uint32_t r : {0u, 1u}) w->courier(r).drive();
    }
    EXPECT_EQ(w->home(0).gone_peers, 1u << 1);
    EXPECT_EQ(w->home(1).gone_peers, 1u << 0);
    EXPECT_EQ(w->home(0).gone_count, 1u);
    // Others go on.
    w.settle();
    while (receive(*w, b)) w.settle();
    EXPECT_EQ(b.received, b.sent);
    EXPECT_EQ(w->home(2).gone_count, 0u);
  }
}

// ---- frames without a place ----

// As a carrier would bring it to rank 1, from rank 0. What the landing said.
Landing bring(NetworkWorld& w, const FrameBytes& head, const unsigned char* payload = nullptr) {
  Courier& c = w.courier(1);
  const Landing to = c.land(0, head);
  if (to.refused) return to;
  if (to.at != nullptr && payload != nullptr) std::memcpy(to.at, payload, to.bytes);
  if (to.at != nullptr && payload == nullptr) std::memset(to.at, 0xee, to.bytes);
  c.arrived(0, head, to.cookie);
  return to;
}

// Rank 1 has two slices of kTag at connector 0 (steps 2 and 3, of which one in pool slot 1), of
// which it has consumed none; two former ones were consumed.
class Forged : public testing::Test {
 protected:
  Forged() : w_(options()) {
    for (int i = 0; i < 2; ++i) {
      EXPECT_TRUE(send(*w_, s_));
      w_.settle();
      EXPECT_TRUE(receive(*w_, s_));
    }
    EXPECT_TRUE(send(*w_, s_));
    s_.bytes = 100;
    EXPECT_TRUE(send(*w_, s_));
    w_.settle();
    start_ = w_.save();
  }
  static WorldOptions options() {
    WorldOptions o = small_world();
    o.shape.pool_slots = 3;
    o.shape.pool_slot_bytes = 128;
    return o;
  }
  static CourierFrame next() {  // that is right
    CourierFrame f = data_frame();
    f.step = 4;
    f.group = 3;
    f.location = 2;
    f.flag = step_flag(5, 4) | kFlagBorrowed;
    return f;
  }
  // All that rank 1 has: its arena, and its mirror of rank 0.
  bool arenas_are_as_they_were() {
    for (const std::uint32_t of : {0u, 1u}) {
      unsigned char* const at = w_->view(1, of);
      if (std::memcmp(at, start_.data() + w_.offset(at), w_->shape().total_bytes()) != 0) {
        return false;
      }
    }
    return true;
  }
  void must_end(const char* what, const std::function<void(CourierFrame&)>& change) {
    SCOPED_TRACE(what);
    CourierFrame f = next();
    change(f);
    w_.restore(start_);
    const Landing to = bring(*w_, encode(f));
    EXPECT_TRUE(w_->courier(1).is_gone(0));
    EXPECT_EQ(to.at, nullptr);
    EXPECT_EQ(w_->home(1).gone_count, 1u);
    EXPECT_EQ(w_->courier(1).counts().refused, 1u);
    EXPECT_TRUE(arenas_are_as_they_were());
    EXPECT_TRUE(bring(*w_, encode(next())).refused) << "nothing of it is heard any more";
  }

  World w_;
  Stream s_;
  std::vector<unsigned char> start_;
};

TEST_F(Forged, WhatHasAPlaceIsTaken) {
  EXPECT_FALSE(bring(*w_, encode(next())).refused);
  EXPECT_FALSE(arenas_are_as_they_were());
  EXPECT_EQ(w_->courier(1).counts().refused, 0u);
}
TEST_F(Forged, WhatIsHereAlreadyIsDropped) {
  for (const std::uint64_t step : {0u, 1u, 2u, 3u}) {
    CourierFrame f = next();
    f.step = step;
    EXPECT_EQ(bring(*w_, encode(f)).at, nullptr);
  }
  EXPECT_EQ(w_->courier(1).counts().dropped, 4u);
  EXPECT_TRUE(arenas_are_as_they_were());
}
TEST_F(Forged, WithoutAPlaceItEndsThePeer) {
  must_end("a header that is taken", [](CourierFrame& f) { f.step = 2 + kSlotHeaders; });
  must_end("far away", [](CourierFrame& f) { f.step = ~std::uint64_t{0}; });
  must_end("a guaranteed slot that is taken",
           [](CourierFrame& f) { f.location = 0, f.flag &= ~kFlagBorrowed; });
  must_end("a pool slot that is taken", [](CourierFrame& f) { f.location = 1; });
  must_end("another key", [](CourierFrame& f) { f.tag = kOther; });
  must_end("another group", [](CourierFrame& f) { f.group = kOther; });
  must_end("an owner that has not begun", [](CourierFrame& f) { f.tag = kOther, f.base = 4; });
  must_end("an owner of before", [](CourierFrame& f) { f.connectors[0] = 1, f.base = 1; });
  must_end("other ranks", [](CourierFrame& f) { f.src = 1, f.dst = 0; });
  const auto credit = [](std::uint64_t n) {
    return [n](CourierFrame& f) {
      f = {};
      f.type = FrameType::kCredits;
      f.src = 0, f.dst = 1, f.count = 1;
      f.consumed[0] = n;
    };
  };
  must_end("credit for what was never sent", credit(1));
  const auto unlist = [](std::uint32_t connector, std::uint64_t tag, std::uint64_t base) {
    return [=](CourierFrame& f) {
      f = {};
      f.type = FrameType::kUnlist;
      f.src = 0, f.dst = 1;
      f.connectors[0] = static_cast<std::uint16_t>(connector);
      f.tag = tag, f.base = base;
    };
  };
  must_end("the end of what is in use", unlist(0, kTag, 0));
  must_end("the end of what never began", unlist(1, kTag, 0));
  must_end("the end of what has yet to begin", unlist(0, kTag, 5));
  must_end("the end of another's", unlist(0, kOther, 0));
  const auto bye = [](CourierFrame& f) {
    f = {};
    f.type = FrameType::kBye;
    f.step = 1;
  };
  must_end("a good-bye of too few", bye);
}

TEST_F(Forged, AListingEndsOnce) {
  w_.restore(start_);
  s_.bytes = 40;
  EXPECT_TRUE(receive(*w_, s_));
  s_.bytes = 100;
  EXPECT_TRUE(receive(*w_, s_));
  CourierFrame f;
  f.type = FrameType::kUnlist;
  f.src = 0, f.dst = 1;
  f.tag = kTag;
  start_ = w_.save();
  for (const bool again : {true, false}) {
    w_.restore(start_);
    EXPECT_FALSE(bring(*w_, encode(f)).refused);
    EXPECT_FALSE(w_->courier(1).is_gone(0));
    bring(*w_, again ? encode(f) : encode(next()));
    EXPECT_TRUE(w_->courier(1).is_gone(0)) << "the owner has gone";
  }
}

TEST(Courier, AFrameOfAnotherProcessesRanksEndsThePeer) {
  for (CourierFrame f : some_frames()) {
    if (f.type == FrameType::kAnnounce || f.type == FrameType::kBye) continue;
    World w(small_world(3));
    f.src = 2;
    bring(*w, encode(f));
    EXPECT_TRUE(w->courier(1).is_gone(0));
    EXPECT_EQ(w->courier(1).counts().refused, 1u);
    EXPECT_FALSE(w->courier(1).is_gone(2));
  }
}

// ---- fuzz ----

// Numbers that lie where limits are.
std::uint64_t odd_number(std::mt19937_64& random) {
  const std::uint64_t some[] = {0,   1,   2,      3,          4,           5,          15,
                                16,  17,  18,     63,         64,          65,         127,
                                128, 129, 0xffff, 0x7fffffff, 0xffffffffu, ~0ull >> 1, ~0ull};
  return random() % 8 == 0 ? random() : some[random() % std::size(some)];
}
void mutate(FrameBytes& f, std::mt19937_64& random) {
  for (std::uint64_t times = random() % 4; times-- > 0;) {
    const std::uint64_t width = std::uint64_t{1} << random() % 4;
    const std::uint64_t at = random() % (kFrameBytes / width) * width;
    const std::uint64_t v = odd_number(random);
    switch (random() % 4) {
      case 0:
        f.bytes[random() % kFrameBytes] ^= static_cast<unsigned char>(1u << random() % 8);
        break;
      case 1:
        f.bytes[at] = static_cast<unsigned char>(random());
        break;
      default:
        std::memcpy(f.bytes + at, &v, width);
    }
  }
}

// Mutated frames, some after each other, at a courier in the midst of its work. What the test may
// see change is worked out here from the frame alone, and from what is known of the connectors.
TEST_F(Forged, FramesOfAnyBytesWriteNothingWrong) {
  constexpr int kFrames = 100000;
  const std::uint64_t seed = base_seed();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<CourierFrame> frames = some_frames();
  for (std::uint64_t step = 0; step < 6; ++step) {
    for (std::uint32_t location = 0; location < 4; ++location) {
      CourierFrame f = next();
      f.step = step, f.location = location;
      f.flag = step_flag(5, step) | (location != 0 ? kFlagBorrowed : 0);
      frames.push_back(f);
      f.connectors[0] = 1, f.tag = kOther;
      frames.push_back(f);
    }
  }
  const ArenaShape shape = w_->shape();
  unsigned char* const own = w_->view(1, 1);
  unsigned char* const block = w_->block(1, 0);
  std::vector<unsigned char> before(shape.total_bytes());
  std::vector<unsigned char> payload(64 << 10, 0xee);
  std::uint64_t taken = 0, refused = 0, dropped = 0;
  // Of both connectors: steps that are here and were not consumed, by step; their slots.
  std::set<std::uint64_t> here[2];
  std::set<std::uint32_t> borrowed;
  int left = 0;  // frames until all begins anew
  for (int n = 0; n < kFrames; ++n) {
    if (left-- == 0 || w_->courier(1).is_gone(0)) {
      w_.restore(start_);
      here[0] = {2, 3}, here[1] = {};
      borrowed = {1};
      left = static_cast<int>(random() % 4);
    }
    FrameBytes head = encode(frames[random() % frames.size()]);
    mutate(head, random);
    std::memcpy(before.data(), own, before.size());
    const Landing to = bring(*w_, head, payload.data());
    // Only what is in `may` may differ.
    const auto allow = [&](const void* at, std::size_t bytes) {
      const auto offset = static_cast<std::size_t>(static_cast<const unsigned char*>(at) - own);
      ASSERT_LE(offset + bytes, before.size());
      std::memcpy(before.data() + offset, at, bytes);
    };
    if (to.refused || w_->courier(1).is_gone(0)) {
      ++refused;
      ASSERT_EQ(to.at, nullptr);
    } else if (to.at == nullptr && to.bytes != 0) {
      ++dropped;
    } else {
      ++taken;
      CourierFrame f;
      ASSERT_EQ(decode(head, shape, &f), nullptr);
      const std::uint32_t i = f.connectors[0];
      unsigned char* const entries = block + shape.entries_offset();
      if (f.type == FrameType::kAnnounce) {
        allow(own + shape.announcements() + f.location * 8, 8);
      } else if (f.type == FrameType::kUnlist || f.type == FrameType::kData) {
        allow(block + shape.directory_offset(), shape.entries_offset() - shape.directory_offset());
        allow(entries + i * sizeof(DirectoryEntry), sizeof(DirectoryEntry));
      }
      if (f.type == FrameType::kData && (to.at != nullptr || f.bytes != 0)) {
        const std::uint64_t first = i == 0 ? 2 : 0;
        ASSERT_TRUE(f.step >= first && f.step < first + kSlotHeaders);
        ASSERT_TRUE(here[i].insert(f.step).second) << "it was here";
        unsigned char* const steps = block + shape.connector(0, i);
        if (f.location == 0) {
          ASSERT_LT(f.step, first + shape.guaranteed_slots);
          allow(steps + kSlotHeaders * sizeof(SlotHeader) +
                    f.step % shape.guaranteed_slots * shape.guaranteed_slot_bytes,
                f.bytes);
        } else {
          ASSERT_TRUE(borrowed.insert(f.location).second) << "the slot was another one's";
          allow(block + shape.borrowed(0) + (f.location - 1) * shape.pool_slot_bytes, f.bytes);
        }
        allow(&LaneTransport::header_of(steps, f.step), sizeof(SlotHeader));
      } else if (f.type == FrameType::kData) {  // an empty one
        CourierFrame again = f;
        allow(&LaneTransport::header_of(block + shape.connector(0, i), again.step),
              sizeof(SlotHeader));
        here[i].insert(f.step);
        if (f.location != 0) borrowed.insert(f.location);
      }
    }
    if (std::memcmp(before.data(), own, before.size()) != 0) {
      FAIL() << "frame " << n << " has changed something else";
    }
  }
  std::printf("  %d frames: %llu taken, %llu dropped, %llu refused\n", kFrames,
              static_cast<unsigned long long>(taken), static_cast<unsigned long long>(dropped),
              static_cast<unsigned long long>(refused));
  EXPECT_GT(taken, 1000u);
  EXPECT_GT(dropped, 1000u);
  EXPECT_GT(refused, 1000u);
}

// A fabric whose poll() has somebody else arm it: as it is when another thread drives.
class ArmedWithin final : public Fabric {
 public:
  bool send(std::uint32_t, FrameChannel, const FrameBytes&, const unsigned char*, std::uint32_t,
            std::uint64_t) override {
    return false;
  }
  bool poll(FabricSink&) override {
    polling_ = true;
    within = courier->arm();
    polling_ = false;
    return false;
  }
  void close(std::uint32_t) override {}
  bool arm() override {
    EXPECT_FALSE(polling_) << "two at a time";
    ++arms;
    return has_nothing;
  }

  Courier* courier = nullptr;
  bool within = true, has_nothing = true;
  int arms = 0;

 private:
  bool polling_ = false;
};

TEST(Courier, IsArmedByItsDriverAlone) {
  ArmedWithin fabric;
  CarriedRank rank(small_network_shape(), 2, 0);
  rank.begin(fabric);
  fabric.courier = &rank.courier();
  rank.courier().drive();
  EXPECT_FALSE(fabric.within);
  EXPECT_EQ(fabric.arms, 0);
  EXPECT_TRUE(rank.courier().arm());
  fabric.has_nothing = false;
  EXPECT_FALSE(rank.courier().arm());
  EXPECT_EQ(fabric.arms, 2);
  fabric.within = true;
  rank.courier().drive();  // the right to drive was given back
  EXPECT_FALSE(fabric.within);
}

}  // namespace
}  // namespace unjam
