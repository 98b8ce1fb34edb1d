// Copies that a lane asks for and may take back (engine/copy_ring.h), under the schedule explorer:
// a lane with a few borrowed slots, who serves its ring in the order of CopyServer::take(), and a
// receiver that reads what was published. Who serves copies as late as it likes, or never. And
// mistakes that the explorer must find.
#define UNJAM_EXPLORER
#define unjam unjam_explored

#include <gtest/gtest.h>

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

using unjam_explored::BorrowUse;
using unjam_explored::CopyPost;
using unjam_explored::CopyRing;
using unjam_explored::find_post;
using unjam_explored::kCopyPosts;
using unjam_explored::load_acquire;
using unjam_explored::load_relaxed;
using unjam_explored::post_copy;
using unjam_explored::post_mark;
using unjam_explored::store_relaxed;
using unjam_explored::store_release;

enum class Mistake : std::uint8_t {
  kNone,
  kForgetsTheSlot,   // that a copy which was taken back may still come to
  kIntoOwnSlots,     // posts copies into slots that it cannot leave alone
  kCarriesTooSoon,   // begins a carried call while earlier copies are not done
  kPublishesFirst,   // the flag, and does not wait until `done` has counted the copy
  kCountsFirst,      // `done`, then copies
  kCountsTakenBack,  // stops at what was taken back, and does not count it
  kFindsEarly,       // by the first word, before the others are there
  kReusesThePlace,   // of a post that nobody has found yet
  kWaitsForCopies,   // and never takes them back
};

constexpr std::uint32_t kWords = 2;                       // of a slice
constexpr std::uint32_t kMostChunks = 4, kMostSlots = 3;  // of a call; borrowed
constexpr std::uint32_t kMostCalls = 3, kOwnSlots = 2;
constexpr std::uint32_t kMostSlices = kMostCalls * kMostChunks;

struct Scenario {
  const char* name;
  std::uint32_t chunks = 3, slots = 2, batch = 1;
  // A letter for each call: c: marked for copy engines; p: not, and blocks fill borrowed slots.
  const char* calls = "cc";
  bool stops = false;      // who serves may stop for ever, whatever it has claimed
  bool any_order = false;  // a post's words come in any order, as a device's relaxed stores do
  std::uint32_t places = kCopyPosts;  // of the ring, that are used
};

struct Slot {
  std::uint64_t words[kWords];
};
// All that fibers share.
struct World {
  CopyRing ring;
  std::uint64_t done;                      // copies
  Slot source[kMostChunks];                // the user's, another call's in each call
  Slot slots[kMostSlots], own[kOwnSlots];  // at the receiver
  std::uint64_t flags[kMostSlices];        // step's: 1 + where
  std::uint64_t consumed;                  // slices
  // The lane's own.
  std::uint64_t posted, sent;
  BorrowUse uses[kMostSlots];
  bool over, stopped;
  // Nobody's: what is true of slots.
  std::uint8_t expects[kMostSlots];   // copies that may still come
  std::uint8_t readable[kMostSlots];  // slices that are published and not consumed
  std::uint32_t carried, taken_back, late;
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
std::uint64_t value(std::uint64_t slice, std::uint32_t word) { return 1000 + slice * 10 + word; }
// Posts stand in so many places: the numbers between are left out.
std::uint64_t number_of(std::uint64_t n) {
  return n / scenario->places * kCopyPosts + n % scenario->places;
}

// ---- the lane ----

bool has_room(int step) { return static_cast<std::uint64_t>(step) < world.consumed + kOwnSlots; }

void publish(std::uint64_t step, std::uint32_t where) {
  if (where < kMostSlots) ++world.readable[where];
  store_release(world.flags[step], std::uint64_t{where} + 1);
}
void fill(Slot& to, std::uint32_t chunk) {
  for (std::uint32_t w = 0; w < kWords; ++w) {
    store_relaxed(to.words[w], load_relaxed(world.source[chunk].words[w]));
  }
}
// As BorrowUse: slots that nobody uses.
std::uint32_t borrow(std::uint8_t (&pool)[kMostSlots]) {
  std::uint32_t found = 0;
  for (std::uint32_t i = 0; i < scenario->slots; ++i) {
    const BorrowUse use = world.uses[i];
    std::uint64_t& until = use.connector == BorrowUse::kCopied ? world.done : world.consumed;
    if (use.step_end != 0 && load_acquire(until) < use.step_end) continue;
    pool[found++] = static_cast<std::uint8_t>(i);
  }
  return found;
}
// Through the connector's own slots.
void move(std::uint64_t first, std::uint32_t from) {
  for (std::uint32_t n = from; n < scenario->chunks; ++n) {
    const std::uint64_t step = first + n;
    if (load_acquire(world.consumed) + kOwnSlots <= step) {
      explorer().block(has_room, static_cast<int>(step));
    }
    fill(world.own[step % kOwnSlots], n);
    publish(step, kMostSlots + static_cast<std::uint32_t>(step % kOwnSlots));
  }
}
void post(std::uint64_t n, const CopyPost& x) {
  if (!scenario->any_order) return post_copy(world.ring, number_of(n), x);
  std::uint64_t* const words = world.ring.posts[number_of(n) % kCopyPosts];
  const std::uint64_t values[] = {x.source, x.target, x.bytes};
  const auto begin = static_cast<std::uint32_t>(explorer().choose(3));
  for (std::uint32_t i = 0; i < 3; ++i) {
    const std::uint32_t w = (begin + i) % 3;
    store_relaxed(words[w], values[w] << 16 | post_mark(number_of(n)));
  }
}

// A call that is marked: as Carrying (carry.cuh), and those who publish and move.
void carried_call(std::uint64_t first_step) {
  const std::uint32_t chunks = scenario->chunks;
  const bool own = mistake == Mistake::kIntoOwnSlots;
  std::uint8_t pool[kMostSlots] = {};
  const std::uint64_t first = world.posted;
  const std::uint32_t slots = own ? kOwnSlots : borrow(pool);
  const bool stuck = load_acquire(world.done) != first && mistake != Mistake::kCarriesTooSoon;
  if (stuck || slots == 0) return move(first_step, 0);
  std::uint32_t posted = 0, published = 0;
  while (published != chunks) {
    const std::uint64_t credit = load_acquire(world.consumed);
    if (posted != chunks && (posted < slots || credit >= first_step + posted - slots + 1)) {
      const std::uint64_t step = first_step + posted;
      const std::uint32_t slot =
          own ? kMostSlots + static_cast<std::uint32_t>(step % kOwnSlots) : pool[posted % slots];
      if (!own) ++world.expects[slot];
      post(first + posted, {posted + 1, slot + 1, kWords});
      world.posted = first + ++posted;
      if (mistake == Mistake::kPublishesFirst) publish(first_step + published++, slot);
      continue;
    }
    const std::uint32_t finished = static_cast<std::uint32_t>(load_acquire(world.done) - first);
    if (mistake != Mistake::kPublishesFirst && finished > published) {
      want(finished <= posted, "copies are counted that this call has not posted");
      for (; published < finished && error == nullptr; ++published) {
        const std::uint64_t step = first_step + published;
        ++world.carried;
        publish(step, own ? kMostSlots + static_cast<std::uint32_t>(step % kOwnSlots)
                          : pool[published % slots]);
      }
      if (error != nullptr) return;
      continue;
    }
    // It waits as long as it likes, and no longer.
    const bool waits = mistake == Mistake::kWaitsForCopies;
    if (waits && world.stopped) {
      explorer().block([](int) { return false; }, 0);
    }
    if (published == chunks || waits || explorer().choose(2) == 0) {
      explorer().point(false);
      continue;
    }
    break;
  }
  if (published != chunks && posted != published) {
    store_relaxed(world.ring.taken_back, number_of(first + posted));
    ++world.taken_back;
  }
  move(first_step, published);
  if (own) return;
  // As note_carried().
  for (std::uint32_t n = 0; n < published; ++n) {
    world.uses[pool[n % slots]] = {first_step + n + 1, 0, 0};
  }
  if (mistake == Mistake::kForgetsTheSlot) return;
  for (std::uint32_t n = published; n < posted; ++n) {
    world.uses[pool[n % slots]] = {first + n + 1, BorrowUse::kCopied, 0};
  }
}

// One that is not: each slice in a borrowed slot, while there are some.
void plain_call(std::uint64_t first_step) {
  std::uint8_t pool[kMostSlots] = {};
  const std::uint32_t slots = borrow(pool);
  std::uint32_t n = 0;
  for (; n < slots && n < scenario->chunks; ++n) {
    want(world.readable[pool[n]] == 0, "a slot is written that somebody reads");
    fill(world.slots[pool[n]], n);
    publish(first_step + n, pool[n]);
    world.uses[pool[n]] = {first_step + n + 1, 0, 0};
  }
  move(first_step, n);
}

void lane_fiber(int) {
  for (const char* call = scenario->calls; *call != 0 && error == nullptr; ++call) {
    const std::uint64_t first = world.sent;
    // (The user's memory is the user's again behind each call: what reads it late reads this.)
    for (std::uint32_t n = 0; n < scenario->chunks; ++n) {
      for (std::uint32_t w = 0; w < kWords; ++w) {
        store_relaxed(world.source[n].words[w], value(first + n, w));
      }
    }
    *call == 'c' ? carried_call(first) : plain_call(first);
    world.sent += scenario->chunks;
  }
  world.over = true;
}

// ---- who serves ----

Slot& slot_at(std::uint64_t target) {
  const auto i = static_cast<std::uint32_t>(target - 1);
  return i < kMostSlots ? world.slots[i] : world.own[i - kMostSlots];
}
bool find(std::uint64_t n, CopyPost& x) {
  if (mistake != Mistake::kFindsEarly) return find_post(world.ring, number_of(n), x);
  std::uint64_t* const words = world.ring.posts[number_of(n) % kCopyPosts];
  const std::uint64_t first = load_acquire(words[0]);
  x = {first >> 16, load_acquire(words[1]) >> 16, load_acquire(words[2]) >> 16};
  return (first & 0xffff) == post_mark(number_of(n));
}
void carry_out(const CopyPost& x) {
  if (x.source == 0 || x.source > kMostChunks || x.target == 0 ||
      x.target > kMostSlots + kOwnSlots || x.bytes != kWords) {
    return want(false, "a post is found that is none");
  }
  const bool borrowed = x.target <= kMostSlots;
  for (std::uint32_t w = 0; w < kWords; ++w) {
    const std::uint64_t word = load_acquire(world.source[x.source - 1].words[w]);
    explorer().point(true);
    if (borrowed) {
      want(world.readable[x.target - 1] == 0, "a copy lands where somebody reads");
    }
    slot_at(x.target).words[w] = word;
  }
  if (world.over) ++world.late;
  if (borrowed && world.expects[x.target - 1] != 0) --world.expects[x.target - 1];
}

void server_fiber(int) {
  std::uint64_t taken = 0;
  for (;;) {
    explorer().poll_begin();
    CopyPost claimed[4];
    std::uint32_t n = 0, seen = 0;
    for (CopyPost x; seen < scenario->batch && find(taken, x); ++seen) {
      if (number_of(taken) < load_acquire(world.ring.taken_back)) {
        if (mistake == Mistake::kCountsTakenBack) return;
        // (Its slot is nobody's yet: `done` says so below.)
        if (x.target - 1 < kMostSlots) --world.expects[x.target - 1];
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

bool has_come(int step) { return world.flags[step] != 0; }

void receiver_fiber(int) {
  const auto slices = static_cast<std::uint64_t>(std::strlen(scenario->calls)) * scenario->chunks;
  for (std::uint64_t step = 0; step < slices && error == nullptr; ++step) {
    if (load_acquire(world.flags[step]) == 0) {
      explorer().block(has_come, static_cast<int>(step));
    }
    const auto where = static_cast<std::uint32_t>(load_acquire(world.flags[step]) - 1);
    Slot& slot = slot_at(where + 1);
    for (std::uint32_t w = 0; w < kWords; ++w) {
      want(load_acquire(slot.words[w]) == value(step, w), "wrong bytes are read");
    }
    if (where < kMostSlots) --world.readable[where];
    store_release(world.consumed, step + 1);
  }
}

// Where nothing can go on.
const char* check_end() {
  ever_carried += world.carried;
  ever_taken_back += world.taken_back;
  ever_late += world.late;
  const std::uint64_t slices =
      static_cast<std::uint64_t>(std::strlen(scenario->calls)) * scenario->chunks;
  if (!world.over || world.consumed != slices) return "somebody waits for ever";
  if (!world.stopped && world.done != world.posted) return "copies are never done";
  if (world.stopped) return nullptr;
  for (const std::uint8_t expected : world.expects) {
    if (expected != 0) return "a copy was counted and never came";
  }
  return nullptr;
}

class Exploration {
 public:
  Exploration(const Scenario& s, Mistake planted) : e_(&world, sizeof(world), check_end, &error) {
    scenario = &s;
    mistake = planted;
    error = nullptr;
    std::memset(static_cast<void*>(&world), 0, sizeof(world));
    e_.start(0, lane_fiber, 0);
    e_.start(1, server_fiber, 0);
    e_.start(2, receiver_fiber, 0);
    e_.name(0, "lane"), e_.name(1, "server"), e_.name(2, "receiver");
  }
  Explorer& operator*() { return e_; }

 private:
  Explorer e_;
};

std::uint64_t seed() {
  const char* text = std::getenv("UNJAM_TEST_SEED");
  return text == nullptr ? 20240229 : std::strtoull(text, nullptr, 0);
}
void print(const Scenario& s, const char* how, const Explorer::Verdict& v) {
  std::printf("  %-36s %-10s: %8llu states, %9llu steps, %7llu ends%s\n", s.name, how,
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
  return {two, plain, three, batches, one, stops, words, narrow};
}

void explore_all(int bound, std::uint64_t most) {
  ever_carried = ever_taken_back = ever_late = 0;
  for (const Scenario& s : scenarios()) {
    Exploration run(s, Mistake::kNone);
    const Explorer::Verdict v = (*run).explore(bound, most);
    print(s, (std::to_string(bound) + " delays").c_str(), v);
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
    if (planted == Mistake::kReusesThePlace) x.places = 1;
    Exploration run(x, planted);
    const Explorer::Verdict v = (*run).walk(seed(), 100000);
    print(x, "planted", v);
    EXPECT_EQ(v.error, expected) << v.schedule;
    return;
  }
  FAIL() << "no scenario " << name;
}
TEST(CopyRingExplored, PlantedMistakesAreFound) {
  must_be_found("a call that borrows behind it", Mistake::kForgetsTheSlot,
                "a copy lands where somebody reads");
  must_be_found("two carried calls", Mistake::kIntoOwnSlots, "wrong bytes are read");
  must_be_found("two carried calls", Mistake::kCarriesTooSoon,
                "copies are counted that this call has not posted");
  must_be_found("two carried calls", Mistake::kPublishesFirst, "a copy lands where somebody reads");
  must_be_found("two carried calls", Mistake::kCountsFirst, "a copy lands where somebody reads");
  must_be_found("two carried calls", Mistake::kCountsTakenBack, "copies are never done");
  must_be_found("words in any order", Mistake::kFindsEarly, "a post is found that is none");
  must_be_found("as many places as slots", Mistake::kReusesThePlace, "copies are never done");
  must_be_found("who serves stops", Mistake::kWaitsForCopies, "somebody waits for ever");
}

}  // namespace
}  // namespace unjam_test
#else
TEST(CopyRingExplored, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
