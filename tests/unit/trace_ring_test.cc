// The trace of a lane: what a reader takes for an event was written as one, whatever the writer
// does meanwhile, and the newest events are all there when it rests.
#define UNJAM_EXPLORER        // scheduling points in base/atomics.h, here only
#define unjam unjam_explored  // apart from the library's copies of the same functions
#include "engine/trace_ring.h"
#undef unjam

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/explored.h"

namespace unjam_test {
namespace {

using namespace unjam_explored;  // NOLINT: what is tested

// Two at a time: a GPU's clock is not fine.
std::uint64_t time_of(std::uint64_t i) { return i / 2 + 1; }
TraceEvent event(std::uint64_t i) { return {time_of(i), i + 1, i + 1}; }

// Null, or what is wrong with `count` events that a reader found while `written` had been written.
const char* check(const TraceEvent* events, std::uint64_t count, std::uint64_t written) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const TraceEvent& e = events[i];
    if (e.time_ns != time_of(e.tag - 1) || e.tag != e.what) return "a torn event";
    if (i > 0 && e.tag != events[i - 1].tag + 1) return "events out of order";
  }
  if (count > 0 && events[count - 1].tag > written) return "an event before it was written";
  return nullptr;
}

TEST(TraceRing, KeepsTheNewest) {
  for (std::uint64_t kept = 1; kept < 5; ++kept) {
    std::vector<TraceEvent> places(TraceRing::places_for(kept));
    TraceRing ring{places.data(), places.size(), 0};
    std::vector<TraceEvent> out(kept);
    for (std::uint64_t n = 0; n < 12; ++n) {
      for (std::uint64_t most = 0; most <= kept; ++most) {
        const std::uint64_t found = ring.newest(out.data(), most);
        ASSERT_EQ(found, std::min(n, most));
        ASSERT_EQ(check(out.data(), found, n), nullptr);
        if (found > 0) {
          ASSERT_EQ(out[found - 1].tag, n);
        }
      }
      ring.record<true>(event(n));
    }
  }
  EXPECT_EQ(TraceRing::places_for(0), 0u);
  TraceRing none;
  EXPECT_EQ(none.newest(nullptr, 0), 0u);
}

// Copies of places whose writer goes on, word by word in any order, while they are made place by
// place; faster than he is. He has counted `count` some time before, perhaps rounds ago.
TEST(TraceRing, KeepsWhatACopyHasWhole) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 50000; ++round) {
    const std::uint64_t kept = 1 + random() % 8;
    const std::uint64_t count = random() % 20;
    std::vector<TraceEvent> places(TraceRing::places_for(kept)), copied(places.size());
    TraceRing ring{places.data(), places.size(), 0};
    const std::uint64_t since = random() % 2 == 0 ? 0 : random() % (3 * places.size());
    for (std::uint64_t i = 0; i < count + since; ++i) ring.record<false>(event(i));
    std::uint64_t whole = count + since;
    const bool goes_on = random() % 2 == 0;
    // What is being written: an event's words, in any order.
    std::array<int, 3> order = {0, 1, 2};
    std::size_t done = 0;
    const auto write_word = [&] {
      if (done == 0) std::shuffle(order.begin(), order.end(), random);
      TraceEvent& e = places[whole % places.size()];
      const TraceEvent next = event(whole);
      std::uint64_t* const words[] = {&e.time_ns, &e.tag, &e.what};
      const std::uint64_t values[] = {next.time_ns, next.tag, next.what};
      *words[order[done]] = values[order[done]];
      if (++done == 3) ++whole, done = 0;
    };
    const std::uint64_t before = goes_on ? random() % 4 : 0;
    for (std::uint64_t i = 0; i < before; ++i) write_word();
    for (std::size_t p = 0; p < places.size(); ++p) {
      copied[p] = places[p];
      if (goes_on && random() % 2 == 0) write_word();
    }
    const bool rests = whole == count && done == 0;
    std::vector<TraceEvent> own(places.size()), out(kept);
    TraceRing copy{own.data(), own.size(), 0};
    copy.keep(copied.data(), count, rests);
    const std::uint64_t found = copy.newest(out.data(), kept);
    const std::string what = "kept " + std::to_string(kept) + ", counted " + std::to_string(count) +
                             ", then " + std::to_string(since) + ", goes on " +
                             std::to_string(goes_on);
    for (std::uint64_t i = 0; i < found; ++i) {
      ASSERT_EQ(out[i].time_ns, time_of(out[i].tag - 1)) << what;
      ASSERT_EQ(out[i].tag, out[i].what) << what;
      ASSERT_LE(out[i].tag, whole + 1) << what;
      if (i > 0) {
        ASSERT_LT(out[i - 1].tag, out[i].tag) << what;
      }
    }
    if (rests) {
      ASSERT_EQ(found, std::min(count, kept)) << what;
    } else if (!goes_on) {
      // The newest is left out, and the oldest of as many as there are places.
      ASSERT_EQ(found, std::min(whole - 1, kept - 1)) << what;
      if (found > 0) {
        ASSERT_EQ(out[found - 1].tag, whole - 1) << what;
      }
    }
  }
}

TEST(TraceRing, ReadByAThreadMeanwhile) {
  constexpr std::uint64_t kKept = 5, kMany = 20000;
  std::vector<TraceEvent> places(TraceRing::places_for(kKept));
  TraceRing ring{places.data(), places.size(), 0};
  std::thread writer([&] {
    for (std::uint64_t i = 0; i < kMany; ++i) ring.record<true>(event(i));
  });
  std::vector<TraceEvent> out(kKept);
  std::uint64_t written = 0;
  while (written < kMany) {
    const std::uint64_t found = ring.newest(out.data(), kKept);
    written = load_acquire(ring.written);
    const char* wrong = check(out.data(), found, written);
    EXPECT_EQ(wrong, nullptr) << wrong;
    if (wrong != nullptr) break;
  }
  writer.join();
}

#if UNJAM_HAS_EXPLORER

constexpr std::uint64_t kPlaces = 3, kEvents = 7;
struct World {
  std::array<TraceEvent, kPlaces> places;
  TraceRing ring;
  bool trusts_all;  // the planted mistake
};
World* world;
const char* error;

// As if no place were the writer's: right as long as the count says that nobody writes.
std::uint64_t newest_of_all(TraceRing& ring, TraceEvent* out) {
  const std::uint64_t end = load_acquire(ring.written);
  const std::uint64_t kept = std::min(end, ring.places);
  for (std::uint64_t i = 0; i < kept; ++i) {
    TraceEvent& e = ring.events[(end - kept + i) % ring.places];
    out[i] = {load_acquire(e.time_ns), load_acquire(e.tag), load_acquire(e.what)};
  }
  return load_acquire(ring.written) == end ? kept : 0;
}

void write(int) {
  for (std::uint64_t i = 0; i < kEvents; ++i) world->ring.record<true>(event(i));
}
void read(int) {
  std::array<TraceEvent, kPlaces> out;
  const std::uint64_t found = world->trusts_all ? newest_of_all(world->ring, out.data())
                                                : world->ring.newest(out.data(), kPlaces);
  if (const char* wrong = check(out.data(), found, load_relaxed(world->ring.written))) {
    error = wrong;
  }
}

Explorer::Verdict explore(bool trusts_all) {
  static World memory;
  world = &memory;
  memory = {};
  memory.ring = {memory.places.data(), kPlaces, 0};
  memory.trusts_all = trusts_all;
  error = nullptr;
  Explorer explorer(world, sizeof(World), [] { return static_cast<const char*>(nullptr); }, &error);
  explorer.start(0, write, 0);
  explorer.name(0, "writer");
  explorer.start(1, read, 0);
  explorer.name(1, "reader");
  return explorer.explore(-1, 10'000'000);
}

// (The explorer does not reorder memory, nor does x86: the release in record() and the acquires in
// newest() rest on the argument beside them.)
TEST(TraceRing, EveryInterleaving) {
  const Explorer::Verdict v = explore(false);
  EXPECT_EQ(v.error, "");
  EXPECT_TRUE(v.complete);
  EXPECT_GT(v.states, 500u);
}

TEST(TraceRing, ExplorerSeesWhatTheWriterIsFilling) { EXPECT_NE(explore(true).error, ""); }

#endif

}  // namespace
}  // namespace unjam_test
