// Copies that lanes ask for and may take back (engine/copy_ring.h), under the schedule explorer:
// lanes with a few pool slots each, who serves their ring in the order of CopyServer::take(),
// and a receiver for each that reads what was published. Who serves copies as late as it likes, or
// never. And mistakes that the explorer must find.
#define UNJAM_EXPLORER
#define unjam unjam_explored

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "engine/copy_ring.h"
#include "tests/support/explored.h"
#include "transport/connector.h"

#if UNJAM_HAS_EXPLORER

namespace unjam_test {
namespace {

using unjam_explored::CopyPost;
using unjam_explored::CopyRing;
using unjam_explored::fetch_add;
using unjam_explored::find_post;
using unjam_explored::is_taken_back;
using unjam_explored::kCopyPosts;
using unjam_explored::load_acquire;
using unjam_explored::load_relaxed;
using unjam_explored::PoolUse;
using unjam_explored::post_copy;
using unjam_explored::post_mark;
using unjam_explored::store_relaxed;
using unjam_explored::store_release;
using unjam_explored::take_back_copy;

enum class Mistake : std::uint8_t {
  kNone,
  kForgetsTheSlot,   // that a copy which was taken back may still come to
  kIntoOwnSlots,     // posts copies into slots that it cannot leave alone
  kCarriesTooSoon,   // begins a carried call in slots that earlier copies may still come to
  kPublishesFirst,   // the flag, and does not wait until `done` has counted the copy
  kCountsFirst,      // `done`, then copies
  kCountsNoDropped,  // stops at what was taken back, and does not count it
  kFindsEarly,       // by the first word, before the others are there
  kReusesThePlace,   // of a post that nobody has found yet
  kTakesAllBack,     // posts of other lanes, too
  kTakesPlacesBack,  // whoever's post stands there
  kWaitsForCopies,   // and never takes them back
};

constexpr std::uint32_t kWords = 2;                       // of a slice
constexpr std::uint32_t kMostChunks = 3, kMostSlots = 3;  // of a call; borrowed
constexpr std::uint32_t kMostCalls = 3, kOwnSlots = 2, kMostLanes = 2;
constexpr std::uint32_t kMostSlices = kMostCalls * kMostChunks;
constexpr std::uint32_t kPlaces = kMostLanes * kMostSlices;

struct Scenario {
  const char* name;
  std::uint32_t lanes = 1, chunks = 3, slots = 2, batch = 1;
  // A letter for each call: c: marked for copy engines; p: not, and blocks fill pool slots.
  const char* calls = "cc";
  bool stops = false;      // who serves may stop for ever, whatever it has claimed
  bool any_order = false;  // a post's words come in any order, as a device's relaxed stores do
  std::uint32_t places = kPlaces;  // of the ring, that are used
};

struct Slot {
  std::uint64_t words[kWords];
};
struct Lane {
  Slot source[kMostChunks];            // the user's, another call's in each call
  Slot slots[kMostSlots + kOwnSlots];  // at the receiver, borrowed ones first
  std::uint64_t flags[kMostSlices];    // step's: 1 + where
  std::uint64_t consumed;              // slices
  // The lane's own.
  std::uint64_t latest, sent;  // post, + 1; slices
  PoolUse uses[kMostSlots];
  bool over;
  // Nobody's: what is true of slots.
  std::uint8_t expects[kMostSlots];   // copies that may still come
  std::uint8_t readable[kMostSlots];  // slices that are published and not consumed
};
// All that fibers share. Of the ring the places that are used.
struct World {
  Lane lanes[kMostLanes];
  std::uint64_t done, drawn;  // posts
  bool stopped;
  std::uint32_t carried, taken_back, late;
  CopyRing ring;
};
static_assert(std::is_trivially_copyable_v<World>);

World world;
const Scenario* scenario = nullptr;
Mistake mistake = Mistake::kNone;
const char* error = nullptr;
// Of all schedules, so that none of this is missed.
std::uint64_t ever_carried = 0, ever_taken_back = 0, ever_late = 0;

void want(bool condition, const char* what) {
  if (!condition && error == nullptr) error = what;
}
Explorer& explorer() { return *Explorer::self(); }
std::uint64_t value(std::uint32_t lane, std::uint64_t slice, std::uint32_t word) {
  return 1000 * (lane + 1) + slice * 10 + word;
}
// Posts stand in so many places: the numbers between are left out.
std::uint64_t number_of(std::uint64_t n) {
  return n / scenario->places * kCopyPosts + n % scenario->places;
}
std::uint64_t num_slices() { return std::strlen(scenario->calls) * scenario->chunks; }

// ---- a lane ----

struct Sender {
  const std::uint32_t me;
  Lane& lane() const { return world.lanes[me]; }

  void publish(std::uint64_t step, std::uint32_t where) const {
    if (where < kMostSlots) ++lane().readable[where];
    store_release(lane().flags[step], std::uint64_t{where} + 1);
  }
  void fill(std::uint32_t where, std::uint32_t chunk) const {
    for (std::uint32_t w = 0; w < kWords; ++w) {
      store_relaxed(lane().slots[where].words[w], load_relaxed(lane().source[chunk].words[w]));
    }
  }
  // As PoolUse: slots that nobody uses.
  std::uint32_t borrow(std::uint8_t (&pool)[kMostSlots]) const {
    std::uint32_t found = 0;
    for (std::uint32_t i = 0; i < scenario->slots; ++i) {
      const PoolUse use = lane().uses[i];
      std::uint64_t& until = use.connector == PoolUse::kCopied ? world.done : lane().consumed;
      if (use.step_end != 0 && load_acquire(until) < use.step_end) continue;
      pool[found++] = static_cast<std::uint8_t>(i);
    }
    return found;
  }
  static std::uint32_t own_slot(std::uint64_t step) {
    return kMostSlots + static_cast<std::uint32_t>(step % kOwnSlots);
  }
  static bool has_room(int lane_and_step) {
    const int step = lane_and_step / static_cast<int>(kMostLanes);
    const Lane& l = world.lanes[lane_and_step % static_cast<int>(kMostLanes)];
    return static_cast<std::uint64_t>(step) < l.consumed + kOwnSlots;
  }
  // Through the connector's own slots.
  void move(std::uint64_t first, std::uint32_t from) const {
    for (std::uint32_t n = from; n < scenario->chunks; ++n) {
      const std::uint64_t step = first + n;
      if (load_acquire(lane().consumed) + kOwnSlots <= step) {
        explorer().block(has_room, static_cast<int>(step * kMostLanes + me));
      }
      fill(own_slot(step), n);
      publish(step, own_slot(step));
    }
  }
  // Its number.
  std::uint64_t post(std::uint32_t chunk, std::uint32_t where) const {
    if (where < kMostSlots) ++lane().expects[where];
    const CopyPost x{me * kMostChunks + chunk + 1, me * 16 + where + 1, kWords};
    const std::uint64_t n = fetch_add(world.drawn, std::uint64_t{1});
    lane().latest = n + 1;
    if (!scenario->any_order) {
      post_copy(world.ring, number_of(n), x);
      return n;
    }
    std::uint64_t* const words = world.ring.places[number_of(n) % kCopyPosts].words;
    const std::uint64_t values[] = {x.source, x.target, x.bytes};
    const auto begin = static_cast<std::uint32_t>(explorer().choose(3));
    for (std::uint32_t i = 0; i < 3; ++i) {
      const std::uint32_t w = (begin + i) % 3;
      store_relaxed(words[w], values[w] << 16 | post_mark(number_of(n)));
    }
    return n;
  }

  // A call that is marked: as Carrying (carry.cuh), and those who publish and move.
  void carried_call(std::uint64_t first) const {
    const std::uint32_t chunks = scenario->chunks;
    const bool own = mistake == Mistake::kIntoOwnSlots;
    const bool too_soon = mistake == Mistake::kCarriesTooSoon;
    std::uint8_t pool[kMostSlots] = {};
    std::uint32_t slots = own ? kOwnSlots : borrow(pool);
    if (too_soon) {
      slots = scenario->slots;
      for (std::uint32_t i = 0; i < slots; ++i) pool[i] = static_cast<std::uint8_t>(i);
    }
    const bool stuck = load_acquire(world.done) < lane().latest && !too_soon;
    if (stuck || slots == 0) return move(first, 0);
    const auto slot_of = [&](std::uint32_t n) {
      return own ? own_slot(first + n) : std::uint32_t{pool[n % slots]};
    };
    std::uint64_t numbers[kMostChunks] = {};
    std::uint32_t posted = 0, published = 0;
    while (published != chunks) {
      const std::uint64_t credit = load_acquire(lane().consumed);
      if (posted != chunks && (posted < slots || credit >= first + posted - slots + 1)) {
        numbers[posted] = post(posted, slot_of(posted));
        ++posted;
        if (mistake != Mistake::kPublishesFirst) continue;
        publish(first + published, slot_of(published));
        ++published;
        continue;
      }
      if (published != posted && load_acquire(world.done) > numbers[published]) {
        ++world.carried;
        publish(first + published, slot_of(published));
        ++published;
        continue;
      }
      // It waits as long as it likes, and no longer.
      const bool waits = mistake == Mistake::kWaitsForCopies;
      if (waits && world.stopped) {
        explorer().block([](int) { return false; }, 0);
      }
      if (!waits && explorer().choose(2) == 1) break;
      explorer().point(false);
    }
    take_back(numbers, published, posted);
    move(first, published);
    if (own) return;
    // As note_carried().
    for (std::uint32_t n = 0; n < published; ++n) {
      lane().uses[slot_of(n)] = {first + n + 1, 0, 0};
    }
    if (mistake == Mistake::kForgetsTheSlot) return;
    for (std::uint32_t n = published; n < posted; ++n) {
      lane().uses[slot_of(n)] = {numbers[n] + 1, PoolUse::kCopied, 0};
    }
  }
  void take_back(const std::uint64_t (&numbers)[kMostChunks], std::uint32_t from,
                 std::uint32_t posted) const {
    if (from == posted) return;
    ++world.taken_back;
    if (mistake == Mistake::kTakesAllBack) {
      for (std::uint64_t n = numbers[from]; n < world.drawn; ++n) {
        take_back_copy(world.ring, number_of(n));
      }
      return;
    }
    for (std::uint32_t n = from; n < posted; ++n) {
      take_back_copy(world.ring, number_of(numbers[n]));
    }
  }

  // One that is not: each slice in a pool slot, while there are some.
  void plain_call(std::uint64_t first) const {
    std::uint8_t pool[kMostSlots] = {};
    const std::uint32_t slots = borrow(pool);
    std::uint32_t n = 0;
    for (; n < slots && n < scenario->chunks; ++n) {
      want(lane().readable[pool[n]] == 0, "a slot is written that somebody reads");
      fill(pool[n], n);
      publish(first + n, pool[n]);
      lane().uses[pool[n]] = {first + n + 1, 0, 0};
    }
    move(first, n);
  }

  void run() const {
    for (const char* call = scenario->calls; *call != 0 && error == nullptr; ++call) {
      const std::uint64_t first = lane().sent;
      // (The user's memory is the user's behind each call: what reads it late reads this.)
      for (std::uint32_t n = 0; n < scenario->chunks; ++n) {
        for (std::uint32_t w = 0; w < kWords; ++w) {
          store_relaxed(lane().source[n].words[w], value(me, first + n, w));
        }
      }
      *call == 'c' ? carried_call(first) : plain_call(first);
      lane().sent += scenario->chunks;
    }
    lane().over = true;
  }
};
void lane_fiber(int me) { Sender{static_cast<std::uint32_t>(me)}.run(); }

// ---- who serves ----

bool find(std::uint64_t n, CopyPost& x) {
  if (mistake != Mistake::kFindsEarly) return find_post(world.ring, number_of(n), x);
  std::uint64_t* const words = world.ring.places[number_of(n) % kCopyPosts].words;
  const std::uint64_t first = load_acquire(words[0]);
  x = {first >> 16, load_acquire(words[1]) >> 16, load_acquire(words[2]) >> 16};
  return (first & 0xffff) == post_mark(number_of(n));
}
bool need_not_copy(std::uint64_t n) {
  if (mistake != Mistake::kTakesPlacesBack) return is_taken_back(world.ring, number_of(n));
  return load_relaxed(world.ring.places[number_of(n) % kCopyPosts].taken_back) != 0;
}
// The lane, and the slot of its that the post is about. False: none.
bool target_of(const CopyPost& x, std::uint32_t& lane, std::uint32_t& where) {
  lane = static_cast<std::uint32_t>(x.target - 1) / 16;
  where = static_cast<std::uint32_t>(x.target - 1) % 16;
  return x.target != 0 && lane < scenario->lanes && where < kMostSlots + kOwnSlots;
}
void came(const CopyPost& x) {
  std::uint32_t lane = 0, where = 0;
  if (!target_of(x, lane, where) || where >= kMostSlots) return;
  std::uint8_t& expected = world.lanes[lane].expects[where];
  if (expected != 0) --expected;
}
void carry_out(const CopyPost& x) {
  std::uint32_t lane = 0, where = 0;
  const bool is_one = target_of(x, lane, where) && x.source != 0 &&
                      x.source <= std::uint64_t{kMostLanes} * kMostChunks && x.bytes == kWords;
  if (!is_one) return want(false, "a post is found that is none");
  const auto source = static_cast<std::uint32_t>(x.source - 1);
  Lane& l = world.lanes[lane];
  for (std::uint32_t w = 0; w < kWords; ++w) {
    const std::uint64_t word =
        load_acquire(world.lanes[source / kMostChunks].source[source % kMostChunks].words[w]);
    explorer().point(true);
    want(where >= kMostSlots || l.readable[where] == 0, "a copy lands where somebody reads");
    l.slots[where].words[w] = word;
  }
  if (l.over) ++world.late;
  came(x);
}

void server_fiber(int) {
  std::uint64_t taken = 0;
  for (;;) {
    explorer().poll_begin();
    CopyPost claimed[4];
    std::uint32_t n = 0, seen = 0;
    for (CopyPost x; seen < scenario->batch && find(taken, x); ++seen) {
      if (need_not_copy(taken)) {
        if (mistake == Mistake::kCountsNoDropped) return;
        came(x);
      } else {
        claimed[n++] = x;
      }
      ++taken;
    }
    if (seen == 0) {
      explorer().poll_again();
      continue;
    }
    if (scenario->stops && explorer().choose(2) == 1) {
      world.stopped = true;
      return;
    }
    if (mistake == Mistake::kCountsFirst) store_release(world.done, taken);
    for (std::uint32_t i = 0; i < n && error == nullptr; ++i) carry_out(claimed[i]);
    if (mistake != Mistake::kCountsFirst) store_release(world.done, taken);
  }
}

// ---- who receives ----

bool has_come(int lane_and_step) {
  const auto x = static_cast<std::uint32_t>(lane_and_step);
  return world.lanes[x % kMostLanes].flags[x / kMostLanes] != 0;
}

void receiver_fiber(int me) {
  Lane& l = world.lanes[me];
  for (std::uint64_t step = 0; step < num_slices() && error == nullptr; ++step) {
    if (load_acquire(l.flags[step]) == 0) {
      explorer().block(has_come, static_cast<int>(step * kMostLanes) + me);
    }
    const auto where = static_cast<std::uint32_t>(load_acquire(l.flags[step]) - 1);
    for (std::uint32_t w = 0; w < kWords; ++w) {
      want(load_acquire(l.slots[where].words[w]) == value(static_cast<std::uint32_t>(me), step, w),
           "wrong bytes are read");
    }
    if (where < kMostSlots) --l.readable[where];
    store_release(l.consumed, step + 1);
  }
}

// Where nothing can go on.
const char* check_end() {
  ever_carried += world.carried;
  ever_taken_back += world.taken_back;
  ever_late += world.late;
  for (std::uint32_t i = 0; i < scenario->lanes; ++i) {
    const Lane& l = world.lanes[i];
    if (!l.over || l.consumed != num_slices()) return "somebody waits for ever";
  }
  if (world.stopped) return nullptr;
  if (world.done != world.drawn) return "copies are never done";
  for (const Lane& l : world.lanes) {
    for (const std::uint8_t expected : l.expects) {
      if (expected != 0) return "a copy was counted and never came";
    }
  }
  return nullptr;
}

class Exploration {
 public:
  Exploration(const Scenario& s, Mistake planted)
      : e_(&world, offsetof(World, ring) + s.places * sizeof(CopyRing::Place), check_end, &error) {
    static const char* const kLanes[] = {"lane 0", "lane 1"};
    static const char* const kReceivers[] = {"receiver 0", "receiver 1"};
    scenario = &s;
    mistake = planted;
    error = nullptr;
    std::memset(static_cast<void*>(&world), 0, sizeof(world));
    for (std::uint32_t i = 0; i < s.lanes; ++i) {
      const int lane = static_cast<int>(i), receiver = static_cast<int>(kMostLanes + i);
      e_.start(lane, lane_fiber, lane);
      e_.start(receiver, receiver_fiber, lane);
      e_.name(lane, kLanes[i]), e_.name(receiver, kReceivers[i]);
    }
    e_.start(kServer, server_fiber, 0);
    e_.name(kServer, "server");
  }
  Explorer& operator*() { return e_; }

 private:
  static constexpr int kServer = 2 * kMostLanes;
  Explorer e_;
};

std::uint64_t seed() {
  const char* text = std::getenv("UNJAM_TEST_SEED");
  return text == nullptr ? 20240229 : std::strtoull(text, nullptr, 0);
}
void print(const Scenario& s, const char* how, const Explorer::Verdict& v) {
  std::printf("  %-36s %-8s: %8llu states, %9llu steps, %7llu ends%s\n", s.name, how,
              static_cast<unsigned long long>(v.states),
              static_cast<unsigned long long>(v.transitions),
              static_cast<unsigned long long>(v.schedules),
              v.error.empty() ? (v.complete ? "" : ", cut") : (": " + v.error).c_str());
}

std::vector<Scenario> scenarios() {
  Scenario two{"two carried calls"};
  Scenario plain{"a call that borrows behind it"};
  plain.calls = "cp", plain.chunks = 2;
  Scenario three{"three calls"};
  three.calls = "cpc", three.chunks = 2;
  Scenario batches{"copies in batches"};
  batches.batch = 3, batches.slots = 3;
  Scenario one{"one slot"};
  one.slots = 1;
  Scenario stops{"who serves stops"};
  stops.stops = true, stops.calls = "cpc", stops.chunks = 2;
  Scenario words{"words in any order"};
  words.any_order = true, words.chunks = 2;
  // A place comes to be used again as soon as it may.
  Scenario narrow{"as many places as slots"};
  narrow.places = 2;
  Scenario lanes{"two lanes"};
  lanes.lanes = 2, lanes.chunks = 2, lanes.batch = 2;
  Scenario crowded{"two lanes, as many places as slots"};
  crowded.lanes = 2, crowded.chunks = 2, crowded.slots = 1, crowded.places = 2;
  return {two, plain, three, batches, one, stops, words, narrow, lanes, crowded};
}

void explore_all(int bound, std::uint64_t most) {
  ever_carried = ever_taken_back = ever_late = 0;
  for (const Scenario& s : scenarios()) {
    Exploration run(s, Mistake::kNone);
    const int delays = s.lanes == 1 ? bound : bound - 1;
    const Explorer::Verdict v = (*run).explore(delays, most);
    print(s, (std::to_string(delays) + " delays").c_str(), v);
    EXPECT_EQ(v.error, "") << s.name << "\n" << v.schedule;
    EXPECT_GT(v.schedules, 0u);
  }
  EXPECT_GT(ever_carried, 0u);
  EXPECT_GT(ever_taken_back, 0u);
  EXPECT_GT(ever_late, 0u) << "no copy came when the lane had ended";
}
TEST(CopyRingExplored, OnlyRightBytesAreReadInAnySchedule) { explore_all(3, 400000); }
TEST(CopyRingExploredSoak, Deeper) { explore_all(6, 4000000); }

void walk_all(std::uint64_t walks) {
  for (const Scenario& s : scenarios()) {
    Exploration run(s, Mistake::kNone);
    const Explorer::Verdict v = (*run).walk(seed(), walks);
    print(s, "walks", v);
    EXPECT_EQ(v.error, "") << s.name << ": " << v.schedule;
  }
}
TEST(CopyRingExplored, RandomSchedules) { walk_all(5000); }
TEST(CopyRingExploredSoak, RandomSchedules) { walk_all(500000); }

void must_be_found(const char* name, Mistake planted, const std::string& expected) {
  for (const Scenario& s : scenarios()) {
    if (std::string(s.name) != name) continue;
    Scenario x = s;
    if (planted == Mistake::kReusesThePlace) --x.places;
    Exploration run(x, planted);
    // (Always the same walks: what a mistake leads to first is another thing in others.)
    const Explorer::Verdict v = (*run).walk(1, 100000);
    print(x, "planted", v);
    EXPECT_EQ(v.error, expected) << v.schedule;
    return;
  }
  FAIL() << "no scenario " << name;
}
TEST(CopyRingExplored, PlantedMistakesAreFound) {
  const char* const lands = "a copy lands where somebody reads";
  must_be_found("a call that borrows behind it", Mistake::kForgetsTheSlot, lands);
  must_be_found("two carried calls", Mistake::kIntoOwnSlots, "wrong bytes are read");
  must_be_found("two carried calls", Mistake::kCarriesTooSoon, lands);
  must_be_found("two carried calls", Mistake::kPublishesFirst, "wrong bytes are read");
  must_be_found("two carried calls", Mistake::kCountsFirst, "wrong bytes are read");
  must_be_found("two carried calls", Mistake::kCountsNoDropped, "copies are never done");
  must_be_found("words in any order", Mistake::kFindsEarly, "a post is found that is none");
  must_be_found("as many places as slots", Mistake::kReusesThePlace, "copies are never done");
  must_be_found("two lanes", Mistake::kTakesAllBack, "wrong bytes are read");
  must_be_found("two lanes, as many places as slots", Mistake::kTakesPlacesBack,
                "wrong bytes are read");
  must_be_found("who serves stops", Mistake::kWaitsForCopies, "somebody waits for ever");
}

}  // namespace
}  // namespace unjam_test
#else
TEST(CopyRingExplored, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
