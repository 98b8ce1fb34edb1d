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
#include <vector>

#include "tests/support/explored.h"

namespace unjam_test {
namespace {

using namespace unjam_explored;  // NOLINT: what is tested

TraceEvent event(std::uint64_t i) { return {i + 1, i + 1, i + 1}; }

// Null, or what is wrong with `count` events that a reader found while `written` had been written.
const char* check(const TraceEvent* events, std::uint64_t count, std::uint64_t written) {
  for (std::uint64_t i = 0; i < count; ++i) {
    const TraceEvent& e = events[i];
    if (e.time_ns != e.tag || e.tag != e.what) return "a torn event";
    if (i > 0 && e.time_ns != events[i - 1].time_ns + 1) return "events out of order";
  }
  if (count > 0 && events[count - 1].time_ns > written) return "an event before it was written";
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
          ASSERT_EQ(out[found - 1].time_ns, n);
        }
      }
      ring.record<true>(event(n));
    }
  }
  EXPECT_EQ(TraceRing::places_for(0), 0u);
  TraceRing none;
  EXPECT_EQ(none.newest(nullptr, 0), 0u);
}

// A copy that was made from one end to the other while the writer went on.
TEST(TraceRing, KeepsWhatACopyHasWhole) {
  std::mt19937_64 random(1);
  for (int round = 0; round < 20000; ++round) {
    const std::uint64_t kept = 1 + random() % 6;
    const std::uint64_t counted = random() % 15;
    std::vector<TraceEvent> places(TraceRing::places_for(kept)), copied(places.size());
    TraceRing ring{places.data(), places.size(), 0};
    for (std::uint64_t i = 0; i < counted; ++i) ring.record<false>(event(i));
    // The writer goes on for less than a round, and may be within an event.
    const std::uint64_t more = random() % places.size();
    for (std::uint64_t i = 0; i < more; ++i) ring.record<false>(event(counted + i));
    if (more + 1 < places.size() && random() % 2 == 0) {
      TraceEvent& half = places[(counted + more) % places.size()];
      const std::uint64_t words = random() % 3;
      if (words > 0) half.time_ns = counted + more + 1;
      if (words > 1) half.tag = counted + more + 1;
    }
    copied = places;
    std::vector<TraceEvent> own(places.size()), out(kept);
    TraceRing copy{own.data(), own.size(), 0};
    copy.keep(copied.data(), counted);
    const std::uint64_t found = copy.newest(out.data(), kept);
    ASSERT_EQ(check(out.data(), found, counted + more), nullptr)
        << "kept " << kept << ", counted " << counted << ", more " << more;
    if (more == 0) {
      ASSERT_EQ(found, std::min(counted, kept));
    }
  }
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
