// Couriers, mirrors and connectors under the schedule explorer: two and three ranks, each in a
// process of its own, over a loop fabric whose every choice is explored, too: which frame gets on,
// by how many bytes, when a payload is let go. And mistakes that it must find.
#define UNJAM_EXPLORER
#define unjam unjam_explored

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/support/explorer.h"

#if UNJAM_HAS_EXPLORER
#include "tests/support/network_world.h"
#include "transport/network/courier.cc"          // NOLINT(bugprone-suspicious-include)
#include "transport/network/courier_receive.cc"  // NOLINT(bugprone-suspicious-include)
#include "transport/network/frame.cc"            // NOLINT(bugprone-suspicious-include)
#include "transport/network/loop_fabric.cc"      // NOLINT(bugprone-suspicious-include)

namespace unjam_test {
namespace {

using unjam_explored::ArenaShape;
using unjam_explored::InEndpoint;
using unjam_explored::kNoConnector;
using unjam_explored::LoopOptions;
using unjam_explored::Mistake;
using unjam_explored::NetworkWorld;
using unjam_explored::OutEndpoint;
using unjam_explored::WorldOptions;

// What a rank does with a key of one other rank, step by step.
struct Operation {
  enum What : std::uint8_t { kEnd, kSend, kReceive, kRelease } what = kEnd;
  std::uint8_t peer = 0, key = 0;
};
constexpr int kKeys = 3, kMostOperations = 12;

struct Scenario {
  const char* name;
  std::uint32_t ranks = 2;
  Operation programs[3][kMostOperations] = {};
  std::uint32_t bytes = 40;
  std::uint32_t piece = 0, copied_bytes = 0, pool_slots = 0;
  bool cuts = false, repeats = false;
  // A rank does what it can do of its program, in any order but that of a key's.
  bool any_order = false;
  std::uint8_t loses = 0;
};

struct Ends {
  OutEndpoint out[NetworkWorld::kMostRanks][kKeys];
  InEndpoint in[NetworkWorld::kMostRanks][kKeys];
  bool done[kMostOperations] = {};
  std::uint32_t left = 0;
  std::uint32_t heard = 0;
};

// All that fibers share, in one piece.
struct Shared {
  Ends ends[3];
  std::uint32_t not_in_use = 0;
  bool cut = false;
  bool refused[3] = {};  // the network has not let go of a payload of this rank's just now
  alignas(64) unsigned char network_room[sizeof(NetworkWorld)];
  alignas(64) unsigned char memory[400 << 10];  // of which a part is used

  NetworkWorld& network() { return *reinterpret_cast<NetworkWorld*>(network_room); }
};
Shared world;
const Scenario* scenario = nullptr;
const char* error = nullptr;

Explorer& explorer() { return *Explorer::self(); }

// Fibers: ranks, then couriers, then who cuts.
constexpr int kCouriers = 3, kCutter = 6;

std::uint32_t choose(void*, LoopOptions::Choice what, std::uint32_t n) {
  // A frame that nobody chooses comes late: couriers are scheduled as others are.
  bool lets_go = what == LoopOptions::Choice::kLetsGo;
  bool& refused = world.refused[explorer().current() % kCouriers];
  // Nor is a payload kept for ever, though others may go on meanwhile.
  if (what == LoopOptions::Choice::kDelivers || (lets_go && refused)) --n;
  if (lets_go && refused) lets_go = refused = false;
  const auto chosen =
      n < 2 ? 0 : static_cast<std::uint32_t>(explorer().choose(static_cast<int>(n)));
  if (lets_go && chosen == n - 1) refused = true;
  return chosen;
}

std::uint64_t tag_of(std::uint32_t key) { return 0x1000100010001ull * (key + 1) | 1; }
std::uint64_t seed_of(std::uint32_t from, std::uint32_t key) { return from * 16 + key + 1; }

bool gone(std::uint32_t rank, std::uint32_t peer) {
  return (world.network().home(rank).gone_peers >> peer & 1) != 0;
}

bool attempt(std::uint32_t me, const Operation& op) {
  NetworkWorld& w = world.network();
  Ends& ends = world.ends[me];
  if (gone(me, op.peer)) return true;  // the call has ended
  switch (op.what) {
    case Operation::kSend:
      return w.send(me, op.peer, tag_of(op.key), ends.out[op.peer][op.key], world.not_in_use,
                    seed_of(me, op.key), scenario->bytes);
    case Operation::kReceive: {
      const int got = w.receive(me, op.peer, tag_of(op.key), ends.in[op.peer][op.key],
                                seed_of(op.peer, op.key), scenario->bytes);
      if (got < 0) error = "a wrong slice was read";
      return got != 0;
    }
    case Operation::kRelease: {
      OutEndpoint& out = ends.out[op.peer][op.key];
      if (!w.transport(me).drained(op.peer, out)) return false;
      w.transport(me).release(op.peer, out);
      return true;
    }
    default:
      return true;
  }
}

// What a rank was rung for, or told of: it looks again when that has changed, and only then.
std::uint32_t heard(int me) {
  const NetworkWorld::Home& home = world.network().home(static_cast<std::uint32_t>(me));
  return home.data + home.room + home.gone_count;
}
bool was_rung(int me) { return heard(me) != world.ends[me].heard; }

void rank_fiber(int me) {
  const auto rank = static_cast<std::uint32_t>(me);
  Ends& ends = world.ends[me];
  const Operation* const program = scenario->programs[me];
  while (ends.left != 0) {
    ends.heard = heard(me);
    bool moved = false;
    for (int i = 0; i < kMostOperations && !moved; ++i) {
      const Operation& op = program[i];
      if (op.what == Operation::kEnd || ends.done[i]) continue;
      bool first = true;  // of this key and peer
      for (int k = 0; k < i; ++k) {
        const bool same =
            program[k].peer == op.peer && program[k].key == op.key &&
            (program[k].what == Operation::kReceive) == (op.what == Operation::kReceive);
        if (!ends.done[k] && (same || !scenario->any_order)) first = false;
      }
      if (!first || !attempt(rank, op)) continue;
      ends.done[i] = moved = true;
      --ends.left;
    }
    if (!moved && ends.left != 0) explorer().block(was_rung, me);
  }
}

void courier_fiber(int argument) {
  const auto me = static_cast<std::uint32_t>(argument);
  for (;;) {
    explorer().poll_begin();
    const bool moved = world.network().courier(me).drive();
    if (world.network().net().overwritten()) error = "a payload was overwritten";
    if (moved || world.refused[me]) {
      explorer().point(moved);
    } else {
      explorer().poll_again();
    }
  }
}

void cutter(int) {
  explorer().point(false);
  world.network().net().cut(0, 1);
  world.cut = true;
  explorer().point(true);
}

const char* check_end() {
  for (std::uint32_t r = 0; r < scenario->ranks; ++r) {
    const NetworkWorld::Home& home = world.network().home(r);
    if (!world.cut && home.gone_count != 0) return home.why;
    if (home.gone_count > 1) return "a peer is gone twice";
    if (world.ends[r].left != 0) return "somebody waits for ever";
  }
  return error;
}

class Exploration {
 public:
  Exploration(const Scenario& s, Mistake planted)
      : e_(&world, offsetof(Shared, memory) + used(s), check_end, &error) {
    static const char* const kNames[] = {"rank 0",    "rank 1",    "rank 2", "courier 0",
                                         "courier 1", "courier 2", "cut"};
    scenario = &s;
    error = nullptr;
    unjam_explored::mistake() = planted;
    std::memset(static_cast<void*>(&world), 0, sizeof(world));
    const WorldOptions o = options(s);
    if (NetworkWorld::memory_bytes(o) > sizeof(world.memory)) std::abort();
    new (world.network_room) NetworkWorld(o, world.memory);
    world.network().net().loses = s.loses;
    world.network().net().repeats = s.repeats;
    for (std::uint32_t r = 0; r < s.ranks; ++r) {
      new (&world.ends[r]) Ends;
      for (const Operation& op : s.programs[r]) {
        if (op.what != Operation::kEnd) ++world.ends[r].left;
      }
      const int f = static_cast<int>(r);
      e_.start(f, rank_fiber, f);
      e_.start(kCouriers + f, courier_fiber, f);
    }
    if (s.cuts) e_.start(kCutter, cutter, 0);
    for (int f = 0; f <= kCutter; ++f) e_.name(f, kNames[f]);
  }
  ~Exploration() { unjam_explored::mistake() = Mistake::kNone; }
  Explorer& operator*() { return e_; }

 private:
  static WorldOptions options(const Scenario& s) {
    WorldOptions o;
    o.ranks = s.ranks;
    o.announces = false;
    o.shape = unjam_explored::small_network_shape();
    o.shape.pool_slots = s.pool_slots;
    o.shape.pool_slot_bytes = 64;
    o.loop.depth = 6;
    o.loop.piece = s.piece;
    o.loop.copied_bytes = s.copied_bytes;
    o.loop.choose = choose;
    return o;
  }
  static std::size_t used(const Scenario& s) { return NetworkWorld::memory_bytes(options(s)); }

  Explorer e_;
};

constexpr Operation send(int peer, int key) {
  return {Operation::kSend, static_cast<std::uint8_t>(peer), static_cast<std::uint8_t>(key)};
}
constexpr Operation receive(int peer, int key) {
  return {Operation::kReceive, static_cast<std::uint8_t>(peer), static_cast<std::uint8_t>(key)};
}
constexpr Operation release(int peer, int key) {
  return {Operation::kRelease, static_cast<std::uint8_t>(peer), static_cast<std::uint8_t>(key)};
}

// More slices than there are slots.
Scenario stream(const char* name) {
  return {name,
          2,
          {{send(1, 0), send(1, 0), send(1, 0)}, {receive(0, 0), receive(0, 0), receive(0, 0)}}};
}
Scenario one() { return {"one slice", 2, {{send(1, 0), release(1, 0)}, {receive(0, 0)}}}; }
Scenario pieces() {
  Scenario s = stream("slices in pieces");
  s.piece = 20;
  return s;
}
Scenario bytewise() {
  Scenario s = stream("slices byte by byte");
  s.piece = 1;
  s.bytes = 5;
  return s;
}
Scenario copied() {
  Scenario s = {"slices that are copied, and repeated late",
                2,
                {{send(1, 0), send(1, 0), send(1, 0), send(1, 0), send(1, 0), send(1, 0),
                  send(1, 0), send(1, 0), send(1, 0)},
                 {receive(0, 0), receive(0, 0), receive(0, 0), receive(0, 0), receive(0, 0),
                  receive(0, 0), receive(0, 0), receive(0, 0), receive(0, 0)}}};
  s.copied_bytes = 64;
  s.repeats = true;
  return s;
}
Scenario borrowed() {
  Scenario s = stream("pool slots");
  s.pool_slots = 2;
  s.bytes = 64;
  return s;
}
Scenario both_ways() {
  Scenario s = {"both ways, opposite orders",
                2,
                {{send(1, 0), send(1, 1), receive(1, 0), receive(1, 1)},
                 {send(0, 1), send(0, 0), receive(0, 1), receive(0, 0)}}};
  s.any_order = true;
  return s;
}
// Key 0 gives its connector back, and gets that of key 1.
Scenario moves() {
  return {"a key that moves",
          2,
          {{send(1, 0), send(1, 1), release(1, 0), release(1, 1), send(1, 0)},
           {receive(0, 0), receive(0, 1), receive(0, 0)}}};
}
// More keys than connectors: each takes over an idle one's.
Scenario crowded() {
  Scenario s = {"more keys than connectors",
                2,
                {{send(1, 0), send(1, 1), send(1, 2), send(1, 0)},
                 {receive(0, 2), receive(0, 1), receive(0, 0), receive(0, 0)}}};
  s.any_order = true;
  return s;
}
Scenario cut() {
  Scenario s = stream("a cut");
  s.piece = 20;
  s.cuts = true;
  return s;
}
// A ring of three ranks, and a key across.
Scenario three() {
  Scenario s = {"three ranks",
                3,
                {{send(1, 0), receive(2, 0), send(2, 1), send(1, 0)},
                 {send(2, 0), receive(0, 0), receive(0, 0)},
                 {send(0, 0), receive(0, 1), receive(1, 0)}}};
  s.any_order = true;
  s.piece = 24;
  return s;
}

void print(const Scenario& s, const std::string& how, const Explorer::Verdict& v) {
  std::printf("  %-44s %s: %8llu states, %9llu steps, %6llu ends%s\n", s.name, how.c_str(),
              static_cast<unsigned long long>(v.states),
              static_cast<unsigned long long>(v.transitions),
              static_cast<unsigned long long>(v.schedules),
              v.error.empty() ? (v.complete ? "" : ", cut") : (": " + v.error).c_str());
}

std::uint64_t seed() {
  const char* text = std::getenv("UNJAM_TEST_SEED");
  return text == nullptr ? 20240229 : std::strtoull(text, nullptr, 0);
}

struct Search {
  Scenario scenario;
  int bound;  // delays; what the network chooses is none
};
// What fits into some seconds.
std::vector<Search> searches() {
  return {{one(), 1},      {stream("slices"), 1}, {pieces(), 1},    {bytewise(), 0}, {copied(), 0},
          {borrowed(), 0}, {moves(), 1},          {both_ways(), 0}, {crowded(), 0},  {cut(), 1},
          {three(), 0}};
}

TEST(CouriersExplored, NothingIsLostInAnySchedule) {
  for (const Search& s : searches()) {
    Exploration run(s.scenario, Mistake::kNone);
    const Explorer::Verdict v = (*run).explore(s.bound, 100000);
    print(s.scenario, std::to_string(s.bound) + " delays", v);
    EXPECT_EQ(v.error, "") << s.scenario.name << "\n" << v.schedule;
    EXPECT_TRUE(v.complete);
    EXPECT_GT(v.schedules, 0u);
  }
}

TEST(CouriersExploredSoak, DeeperAndLonger) {
  for (const Search& s : searches()) {
    Exploration run(s.scenario, Mistake::kNone);
    const Explorer::Verdict v = (*run).explore(s.bound + 1, 500000);
    print(s.scenario, std::to_string(s.bound + 1) + " delays", v);
    EXPECT_EQ(v.error, "") << s.scenario.name << "\n" << v.schedule;
  }
}

void walk_all(std::uint64_t walks) {
  for (const Search& s : searches()) {
    Exploration run(s.scenario, Mistake::kNone);
    const Explorer::Verdict v = (*run).walk(seed(), walks, 200000);
    print(s.scenario, std::to_string(walks) + " walks", v);
    EXPECT_EQ(v.error, "") << s.scenario.name << ": " << v.schedule;
  }
}

TEST(CouriersExplored, RandomSchedules) { walk_all(1000); }
TEST(CouriersExploredSoak, RandomSchedules) { walk_all(20000); }

// By random walks: most need a certain choice of the network's at a certain time.
void must_be_found(const Scenario& s, Mistake planted, const std::string& expected) {
  Exploration run(s, planted);
  const Explorer::Verdict v = (*run).walk(seed(), 50000, 200000);
  print(s, "planted", v);
  EXPECT_EQ(v.error, expected) << v.schedule;
}

TEST(CouriersExplored, PlantedMistakesAreFound) {
  must_be_found(pieces(), Mistake::kFlagFirst, "a wrong slice was read");
  must_be_found(stream("a slot that is reused early"), Mistake::kShowsEarly,
                "a payload was overwritten");
  must_be_found(moves(), Mistake::kNeverUnlists, "somebody waits for ever");
  Scenario drops = moves();
  drops.loses = static_cast<std::uint8_t>(unjam_explored::FrameType::kUnlist);
  must_be_found(drops, Mistake::kNone, "somebody waits for ever");
  must_be_found(copied(), Mistake::kBelieves, "a wrong slice was read");
}

}  // namespace
}  // namespace unjam_test

namespace unjam_explored {
void explorer_point(bool writes) {
  if (unjam_test::Explorer::self() == nullptr) return;
  // What a courier stores for itself would keep all others looking: it tells them when it has moved
  // something.
  const bool courier = unjam_test::Explorer::self()->current() >= unjam_test::kCouriers;
  unjam_test::Explorer::self()->point(writes && !courier);
}
void explorer_look(const void*) {}
}  // namespace unjam_explored
#else
TEST(CouriersExplored, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
