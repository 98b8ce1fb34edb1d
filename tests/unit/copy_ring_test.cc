// Copies that lanes ask for and may take back (engine/copy_ring.h), and who serves them
// (engine/copy_server.h): what it claims, counts and hands to copy engines; and lanes, server and
// receivers as threads, with random delays. (In all schedules: copy_ring_explored_test.cc.)
#include "engine/copy_ring.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/copy_server.h"
#include "tests/support/job.h"
#include "transport/connector.h"

namespace unjam {
namespace {

// ---- posts ----

TEST(CopyRing, AFreshRingHasNoPosts) {
  CopyRing ring{};
  CopyPost post;
  for (std::uint64_t n = 0; n < 3 * kCopyPosts; ++n) EXPECT_FALSE(find_post(ring, n, post));
}

TEST(CopyRing, APostIsFoundByItsNumberAlone) {
  CopyRing ring{};
  const CopyPost posted{0xfedcba987654, 0x123456789abc, (std::uint64_t{1} << 48) - 1};
  ASSERT_TRUE(fits_post(posted));
  const std::uint64_t n = 5 + 3 * kCopyPosts;
  post_copy(ring, n, posted);
  CopyPost found;
  ASSERT_TRUE(find_post(ring, n, found));
  EXPECT_EQ(found.source, posted.source);
  EXPECT_EQ(found.target, posted.target);
  EXPECT_EQ(found.bytes, posted.bytes);
  for (std::uint64_t other = 0; other < 8 * kCopyPosts; ++other) {
    EXPECT_EQ(find_post(ring, other, found), other == n) << other;
  }
}

TEST(CopyRing, APostIsNotFoundBeforeAllOfItsWordsAreThere) {
  for (std::uint32_t missing = 0; missing < CopyRing::kWords; ++missing) {
    CopyRing ring{};
    // (The place has had another post.)
    post_copy(ring, 0, {1, 2, 3});
    std::uint64_t* const words = ring.places[0].words;
    const std::uint64_t before = words[missing];
    post_copy(ring, kCopyPosts, {4, 5, 6});
    const std::uint64_t late = std::exchange(words[missing], before);
    CopyPost found;
    EXPECT_FALSE(find_post(ring, kCopyPosts, found)) << "word " << missing;
    words[missing] = late;
    EXPECT_TRUE(find_post(ring, kCopyPosts, found));
  }
}

TEST(CopyRing, WhoTakesAPostBackTakesNoOther) {
  CopyRing ring{};
  for (std::uint64_t n = 0; n < kCopyPosts; ++n) EXPECT_FALSE(is_taken_back(ring, n)) << n;
  take_back_copy(ring, 0);
  take_back_copy(ring, 7);
  for (std::uint64_t n = 0; n < 4 * kCopyPosts; ++n) {
    EXPECT_EQ(is_taken_back(ring, n), n == 0 || n == 7) << n;
  }
}

TEST(CopyRing, PostsThatFollowEachOtherInAPlaceDiffer) {
  for (std::uint64_t n = 0; n < 0x20000; ++n) {
    ASSERT_NE(post_mark(n), 0u);
    ASSERT_NE(post_mark(n), post_mark(n + kCopyPosts));
    ASSERT_LE(post_mark(n), 0xffffu);
  }
}

TEST(CopyRing, WhatHasMoreThan48BitsFitsNoPost) {
  constexpr std::uint64_t kTooMuch = std::uint64_t{1} << 48;
  EXPECT_TRUE(fits_post({kTooMuch - 1, kTooMuch - 1, kTooMuch - 1}));
  EXPECT_FALSE(fits_post({kTooMuch, 0, 0}));
  EXPECT_FALSE(fits_post({0, kTooMuch, 0}));
  EXPECT_FALSE(fits_post({0, 0, kTooMuch}));
}

// ---- who serves ----

// What was issued, as it was.
class Recorder : public CopyEngines {
 public:
  struct Batch {
    std::uint32_t peer;
    std::vector<std::uint64_t> sources, lengths, rows, source_pitches, target_pitches;
    std::uint64_t done;
  };
  std::vector<Batch> batches;
  std::array<std::uint64_t, 4> flying{};  // batches
  // Batches that are refused: with a copy from there, or of several copies or rows.
  std::uint64_t refused_source = 0;
  bool refuses_several = false;
  std::function<void()> before_refusal;

  bool issue(std::uint32_t peer, const std::vector<CopyRows>& copies, std::uint64_t done) override {
    Batch& batch = batches.emplace_back(Batch{peer, {}, {}, {}, {}, {}, done});
    for (const CopyRows& c : copies) {
      batch.sources.push_back(c.source);
      batch.lengths.push_back(c.bytes);
      batch.rows.push_back(c.rows);
      batch.source_pitches.push_back(c.source_pitch);
      batch.target_pitches.push_back(c.target_pitch);
    }
    std::size_t rows = 0;
    bool refused = false;
    for (const CopyRows& c : copies) {
      rows += c.rows;
      refused = refused || (refused_source != 0 && c.source == refused_source);
    }
    if (refused && before_refusal) before_refusal();
    return !refused && (!refuses_several || rows <= 1);
  }
  std::uint64_t in_flight(std::uint32_t peer) override { return flying[peer]; }
};

class CopyServerTest : public ::testing::Test {
 protected:
  static constexpr std::uint32_t kRanks = 3;
  static constexpr auto kNothing = CopyServer::Swept::kNothing;
  static constexpr auto kSome = CopyServer::Swept::kSome;
  using Sources = std::vector<std::uint64_t>;

  // The next for the peer; its number.
  std::uint64_t post(std::uint32_t peer, std::uint64_t source, std::uint64_t bytes) {
    post_copy(rings_[peer], drawn_[peer], {source, 1000 + source, bytes});
    return drawn_[peer]++;
  }
  CopyServer server(std::uint64_t most, std::uint64_t lane_pitch = std::uint64_t{1} << 40) {
    return {rings_.data(), kRanks, lane_pitch, most};
  }

  Recorder engines_;
  std::vector<CopyRing> rings_ = std::vector<CopyRing>(kRanks);
  std::array<std::uint64_t, kRanks> drawn_{};
};

TEST_F(CopyServerTest, HandsOverWhatItFindsForAPeerTogether) {
  CopyServer s = server(1 << 20);
  EXPECT_EQ(s.sweep(engines_), kNothing);
  EXPECT_TRUE(engines_.batches.empty());
  post(1, 10, 8), post(1, 11, 8), post(2, 20, 8), post(1, 12, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  ASSERT_EQ(engines_.batches.size(), 2u);
  EXPECT_EQ(engines_.batches[0].peer, 1u);
  EXPECT_EQ(engines_.batches[0].sources, (Sources{10, 11, 12}));
  EXPECT_EQ(engines_.batches[0].done, 3u);
  EXPECT_EQ(engines_.batches[1].peer, 2u);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{20}));
  EXPECT_EQ(engines_.batches[1].done, 1u);
  EXPECT_EQ(s.sweep(engines_), kNothing);
  // Counts go on.
  post(1, 13, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[2].sources, (Sources{13}));
  EXPECT_EQ(engines_.batches[2].done, 4u);
  EXPECT_EQ(s.posts(), 5u);
  EXPECT_EQ(s.batches(), 3u);
  EXPECT_EQ(s.bytes(), 40u);
  EXPECT_EQ(s.dropped(), 0u);
}

// A lane that has drawn a number and not posted yet holds up what is behind it, and nothing else.
TEST_F(CopyServerTest, KeepsTheRingsOrder) {
  CopyServer s = server(1 << 20);
  post_copy(rings_[1], 1, {11, 1011, 8});
  post(2, 20, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  ASSERT_EQ(engines_.batches.size(), 1u);
  EXPECT_EQ(engines_.batches[0].peer, 2u);
  post_copy(rings_[1], 0, {10, 1010, 8});
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{10, 11}));
  EXPECT_EQ(engines_.batches[1].done, 2u);
}

TEST_F(CopyServerTest, IssuesNoMoreTogetherThanItMay) {
  CopyServer s = server(100);
  for (std::uint64_t i = 0; i < 5; ++i) post(1, i, 60);
  post(2, 50, 60);
  ASSERT_EQ(s.sweep(engines_), kSome);
  ASSERT_EQ(engines_.batches.size(), 2u);
  EXPECT_EQ(engines_.batches[0].sources, (Sources{0, 1})) << "up to the one that reaches it";
  EXPECT_EQ(engines_.batches[0].done, 2u);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{50})) << "another peer has its own";
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[2].sources, (Sources{2, 3}));
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[3].sources, (Sources{4}));
  EXPECT_EQ(engines_.batches[3].done, 5u);
  EXPECT_EQ(s.sweep(engines_), kNothing);
  EXPECT_EQ(s.bytes(), 360u);
}

TEST_F(CopyServerTest, GathersWhatIsPostedWhileThePeerIsBusy) {
  CopyServer s = server(1 << 20);
  engines_.flying[1] = 2;
  for (std::uint64_t i = 0; i < 3; ++i) {
    post(1, i, 8);
    EXPECT_EQ(s.sweep(engines_), kNothing);
  }
  post(2, 20, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  ASSERT_EQ(engines_.batches.size(), 1u);
  EXPECT_EQ(engines_.batches[0].peer, 2u) << "another peer is not";
  engines_.flying[1] = 0;
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{0, 1, 2}));
}

// Another batch beside one that is under way must be worth it: half of the most.
TEST_F(CopyServerTest, WaitsForMoreWhileTheEngineHasSomethingToDo) {
  CopyServer s = server(100);
  engines_.flying[1] = 1;
  post(1, 0, 30), post(1, 100, 19);
  EXPECT_EQ(s.sweep(engines_), kNothing);
  post(1, 200, 1);
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[0].sources, (Sources{0, 100, 200}));
  post(1, 300, 1);
  EXPECT_EQ(s.sweep(engines_), kNothing);
  engines_.flying[1] = 0;
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{300}));
}

TEST_F(CopyServerTest, CountsWhatWasTakenBackAndDoesNotCopyIt) {
  CopyServer s = server(1 << 20);
  const std::uint64_t claimed = post(1, 0, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  // What is claimed already stays so.
  take_back_copy(rings_[1], claimed);
  take_back_copy(rings_[1], post(1, 1, 8));
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[1].sources, Sources{});
  EXPECT_EQ(engines_.batches[1].done, 2u);
  EXPECT_EQ(s.dropped(), 1u);
  // Others' among them are copied.
  post(1, 2, 8);
  take_back_copy(rings_[1], post(1, 3, 8));
  post(1, 4, 8);
  take_back_copy(rings_[1], post(1, 5, 8));
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[2].sources, (Sources{2, 4}));
  EXPECT_EQ(engines_.batches[2].done, 6u);
  EXPECT_EQ(s.dropped(), 3u);
  EXPECT_EQ(s.posts(), 3u);
  EXPECT_EQ(s.sweep(engines_), kNothing);
}

// As slices do in slots without gaps.
TEST_F(CopyServerTest, PostsThatContinueEachOtherAreOneCopy) {
  CopyServer s = server(100);
  const auto post_to = [&](std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
    post_copy(rings_[1], drawn_[1]++, {source, target, bytes});
  };
  post_to(0, 1000, 8);
  post_to(500, 2000, 8);
  post_to(8, 1008, 8);    // goes on with the first
  post_to(508, 3000, 8);  // in the source alone
  post_to(600, 2008, 8);  // in the target alone
  post_to(16, 1016, 4);   // with the first again
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[0].sources, (Sources{0, 500, 600, 508}));
  EXPECT_EQ(engines_.batches[0].lengths, (Sources{20, 8, 8, 8}));
  EXPECT_EQ(engines_.batches[0].done, 6u);
  EXPECT_EQ(s.posts(), 6u);
  EXPECT_EQ(s.bytes(), 44u);
  // Not what was issued before, nor over what was taken back; and the bound is of bytes.
  post_to(20, 1020, 60);
  const std::uint64_t back = drawn_[1];
  post_to(80, 1080, 20), post_to(100, 1100, 40), post_to(140, 1140, 40);
  take_back_copy(rings_[1], back);
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[1].sources, (Sources{20, 100}));
  EXPECT_EQ(engines_.batches[1].lengths, (Sources{60, 40}));
  EXPECT_EQ(engines_.batches[1].done, 9u);
}

// As lanes' slices do, each in its lane's slots.
TEST_F(CopyServerTest, PostsThatLieAlikeInLanesAreRowsOfOneCopy) {
  constexpr std::uint64_t kPitch = 1000;
  CopyServer s = server(1 << 20, kPitch);
  const auto post_to = [&](std::uint64_t source, std::uint64_t target, std::uint64_t bytes) {
    post_copy(rings_[1], drawn_[1]++, {source, target, bytes});
  };
  post_to(700, 3050, 8), post_to(100, 1050, 8), post_to(400, 2050, 8);     // three rows
  post_to(1000, 4050, 4);                                                  // shorter
  post_to(1300, 5050, 8);                                                  // behind a gap
  post_to(5000, 2500, 8), post_to(4000, 3500, 8);                          // sources go back
  post_to(6000, 2600, 8), post_to(6004, 3600, 8);                          // and overlap
  post_to(7000, 2700, 8), post_to(7300, 3700, 8), post_to(7601, 4700, 8);  // not as far apart
  ASSERT_EQ(s.sweep(engines_), kSome);
  const Recorder::Batch& b = engines_.batches[0];
  EXPECT_EQ(b.sources, (Sources{100, 1000, 1300, 5000, 4000, 6000, 6004, 7000, 7601}));
  EXPECT_EQ(b.lengths, (Sources{8, 4, 8, 8, 8, 8, 8, 8, 8}));
  EXPECT_EQ(b.rows, (Sources{3, 1, 1, 1, 1, 1, 1, 2, 1}));
  EXPECT_EQ(b.source_pitches, (Sources{300, 0, 0, 0, 0, 0, 0, 300, 0}));
  EXPECT_EQ(b.target_pitches, (Sources{kPitch, 0, 0, 0, 0, 0, 0, kPitch, 0}));
  EXPECT_EQ(b.done, 12u);
  EXPECT_EQ(s.posts(), 12u);
  EXPECT_EQ(s.copies(), 9u);
}

TEST_F(CopyServerTest, CountsEmptyCopies) {
  CopyServer s = server(1 << 20);
  post(1, 1, 0), post(1, 2, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches[0].sources, (Sources{2}));
  EXPECT_EQ(engines_.batches[0].done, 2u);
  EXPECT_EQ(s.dropped(), 0u);
}

TEST_F(CopyServerTest, StopsWhereACopyThatIsWantedIsRefused) {
  CopyServer s = server(1 << 20);
  engines_.refused_source = 1;
  post(1, 1, 8), post(2, 2, 8);
  EXPECT_EQ(s.sweep(engines_), CopyServer::Swept::kFailed);
  EXPECT_EQ(engines_.batches.size(), 2u) << "together and alone; nothing more is given to them";
}

// As of calls whose buffers are different allocations.
TEST_F(CopyServerTest, IssuesApartWhatIsRefusedTogether) {
  CopyServer s = server(1 << 20);
  engines_.refuses_several = true;
  const std::uint64_t first = post(1, 1000, 8);
  post(1, 2000, 8), post(1, 3000, 8);
  ASSERT_EQ(s.sweep(engines_), kSome);
  ASSERT_EQ(engines_.batches.size(), 4u);
  for (std::uint64_t i = 0; i < 3; ++i) {
    const auto& alone = engines_.batches[i + 1];
    EXPECT_EQ(alone.sources, Sources{1000 * (i + 1)});
    EXPECT_EQ(alone.done, first + i + 1) << "each is counted behind its own copy";
  }
}

// Its source was freed, and the call is over.
TEST_F(CopyServerTest, CountsWhatIsRefusedAndWasTakenBack) {
  CopyServer s = server(1 << 20);
  const std::uint64_t first = post(1, 1000, 8);
  post(1, 2000, 8);
  engines_.refused_source = 1000;
  engines_.before_refusal = [&] { take_back_copy(rings_[1], first); };
  ASSERT_EQ(s.sweep(engines_), kSome);
  EXPECT_EQ(engines_.batches.back().sources, Sources{2000});
  EXPECT_EQ(engines_.batches.back().done, first + 2);
}

TEST_F(CopyServerTest, GoesRoundTheRingAndItsMarks) {
  CopyServer s = server(std::uint64_t{1} << 40);
  std::uint64_t seen = 0;
  for (int round = 0; round * std::uint64_t{kCopyPosts} < 0x12000; ++round) {
    for (std::uint32_t i = 0; i < kCopyPosts; ++i) {
      const std::uint64_t n = post(0, 2 * drawn_[0], 1);
      if (n % 3 == 0) take_back_copy(rings_[0], n);
    }
    ASSERT_EQ(s.sweep(engines_), kSome);
    for (const std::uint64_t source : engines_.batches.back().sources) {
      if (seen % 3 == 0) ++seen;
      ASSERT_EQ(source, 2 * seen++);
    }
    ASSERT_EQ(engines_.batches.back().done, drawn_[0]);
  }
  EXPECT_EQ(s.posts() + s.dropped(), drawn_[0]);
}

// ---- threads ----

constexpr std::uint32_t kWords = 8, kChunks = 8, kSlots = 5, kOwnSlots = 3;
constexpr std::uint32_t kLanes = 2, kPeers = 2, kCalls = 6;
constexpr std::uint64_t kSlices = std::uint64_t{kCalls} * kChunks;

enum class Serves { kPromptly, kSlowly, kStalls, kNever };

using Slot = std::array<std::uint64_t, kWords>;
// From a lane to a peer. Slots are plain memory: what orders their uses is the protocol alone, and
// TSan looks whether that is enough.
struct Wire {
  std::array<std::uint64_t, kSlices> flags{};  // 1 + where
  std::uint64_t consumed = 0;
  std::array<Slot, kSlots + kOwnSlots> slots{};
  // The lane's.
  std::array<PoolUse, kSlots> uses{};
  std::uint64_t latest = 0;  // of its posts, + 1
};

// Copies go on when the test says.
class LateEngines : public CopyEngines {
 public:
  explicit LateEngines(std::array<std::uint64_t, kPeers>& done) : done_(done) {}
  bool issue(std::uint32_t peer, const std::vector<CopyRows>& copies, std::uint64_t done) override {
    for (const CopyRows& c : copies) {
      for (std::uint32_t i = 0; i < c.rows; ++i) {
        const CopyPost row{c.source + i * c.source_pitch, c.target + i * c.target_pitch, c.bytes};
        queues_[peer].push_back({row, 0});
      }
    }
    queues_[peer].push_back({{}, done});
    return true;
  }
  std::uint64_t in_flight(std::uint32_t peer) override { return queues_[peer].size() / 3; }
  void step(std::uint32_t peer) {
    if (queues_[peer].empty()) return;
    const auto [copy, done] = queues_[peer].front();
    queues_[peer].pop_front();
    if (copy.bytes == 0) return store_release(done_[peer], done);
    auto* const from = reinterpret_cast<std::uint64_t*>(copy.source);
    auto* const to = reinterpret_cast<std::uint64_t*>(copy.target);
    // (The user may store there at the same time, see CopyRing.)
    for (std::uint64_t w = 0; w < copy.bytes / 8; ++w) to[w] = load_relaxed(from[w]);
  }

 private:
  std::array<std::uint64_t, kPeers>& done_;
  std::array<std::deque<std::pair<CopyPost, std::uint64_t>>, kPeers> queues_;
};

class Threads {
 public:
  Threads(Serves serves, std::uint64_t seed) : serves_(serves), seed_(seed) {}

  void run() {
    std::vector<std::thread> all;
    for (std::uint32_t lane = 0; lane < kLanes; ++lane) all.emplace_back([=, this] { send(lane); });
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      all.emplace_back([=, this] { receive(peer); });
    }
    std::thread server([this] { serve(); });
    for (std::thread& t : all) t.join();
    lanes_over.store(true);
    server.join();
    EXPECT_EQ(done_, drawn_);
    EXPECT_EQ(copied + dropped, drawn_[0] + drawn_[1]);
    EXPECT_EQ(wrong.load(), 0u) << "words that receivers read";
  }

  std::atomic<std::uint64_t> wrong{0}, carried{0}, taken_back{0};
  std::atomic<bool> lanes_over{false};
  std::uint64_t copied = 0, dropped = 0;

 private:
  static std::uint64_t value(std::uint32_t lane, std::uint64_t slice, std::uint32_t w) {
    return (slice + 1) * 1000 + lane * 100 + w;
  }
  static void delay(std::mt19937_64& random, std::uint32_t seldom) {
    if (random() % seldom == 0) std::this_thread::yield();
  }
  Wire& wire(std::uint32_t lane, std::uint32_t peer) { return wires_[lane * kPeers + peer]; }

  // ---- a lane ----

  void publish(Wire& to, std::uint64_t step, std::uint32_t where) {
    store_release(to.flags[step], std::uint64_t{where} + 1);
  }
  void fill(std::uint32_t lane, Slot& to, std::uint32_t chunk) {
    for (std::uint32_t w = 0; w < kWords; ++w) to[w] = load_relaxed(sources_[lane][chunk][w]);
  }
  std::vector<std::uint32_t> borrow(std::uint32_t lane, std::uint32_t peer) {
    std::vector<std::uint32_t> pool;
    Wire& to = wire(lane, peer);
    for (std::uint32_t i = 0; i < kSlots; ++i) {
      const PoolUse use = to.uses[i];
      std::uint64_t& until = use.connector == PoolUse::kCopied ? done_[peer] : to.consumed;
      if (use.step_end == 0 || load_acquire(until) >= use.step_end) pool.push_back(i);
    }
    return pool;
  }
  void move(std::uint32_t lane, std::uint64_t first, std::uint32_t from) {
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) move_to(lane, peer, first, from);
  }
  void move_to(std::uint32_t lane, std::uint32_t peer, std::uint64_t first, std::uint32_t from) {
    Wire& to = wire(lane, peer);
    for (std::uint32_t n = from; n < kChunks; ++n) {
      const std::uint64_t step = first + n;
      while (load_acquire(to.consumed) + kOwnSlots <= step) std::this_thread::yield();
      const auto where = static_cast<std::uint32_t>(kSlots + step % kOwnSlots);
      fill(lane, to.slots[where], n);
      publish(to, step, where);
    }
  }

  void carried_call(std::uint32_t lane, std::uint64_t first_step, std::mt19937_64& random) {
    std::array<std::vector<std::uint32_t>, kPeers> pools;
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      pools[peer] = borrow(lane, peer);
      if (pools[peer].empty() || load_acquire(done_[peer]) < wire(lane, peer).latest) {
        return move(lane, first_step, 0);
      }
    }
    std::array<std::array<std::uint64_t, kChunks>, kPeers> numbers{};
    std::uint32_t posted = 0, published = 0;
    std::uint64_t patience = random() % 300;
    while (published != kChunks) {
      delay(random, 4);
      if (posted != kChunks && room_for(lane, pools, first_step, posted)) {
        for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
          Slot& slot = wire(lane, peer).slots[pools[peer][posted % pools[peer].size()]];
          const std::uint64_t n = fetch_add(drawn_[peer], std::uint64_t{1});
          delay(random, 4);
          post_copy(rings_[peer], n,
                    {reinterpret_cast<std::uintptr_t>(&sources_[lane][posted]),
                     reinterpret_cast<std::uintptr_t>(&slot), sizeof(slot)});
          numbers[peer][posted] = n;
          wire(lane, peer).latest = n + 1;
        }
        ++posted;
        continue;
      }
      std::uint32_t finished = posted;
      for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
        const std::uint64_t done = load_acquire(done_[peer]);
        std::uint32_t n = published;
        while (n != finished && numbers[peer][n] < done) ++n;
        finished = n;
      }
      if (finished == published && patience-- == 0) break;
      for (; published < finished; ++published) {
        for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
          publish(wire(lane, peer), first_step + published,
                  pools[peer][published % pools[peer].size()]);
        }
        ++carried;
      }
    }
    taken_back += posted - published;
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      for (std::uint32_t n = published; n < posted; ++n) {
        take_back_copy(rings_[peer], numbers[peer][n]);
      }
    }
    move(lane, first_step, published);
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      const std::vector<std::uint32_t>& pool = pools[peer];
      for (std::uint32_t n = 0; n < posted; ++n) {
        PoolUse& use = wire(lane, peer).uses[pool[n % pool.size()]];
        use = n < published ? PoolUse{first_step + n + 1, 0, 0}
                            : PoolUse{numbers[peer][n] + 1, PoolUse::kCopied, 0};
      }
    }
  }
  bool room_for(std::uint32_t lane, const std::array<std::vector<std::uint32_t>, kPeers>& pools,
                std::uint64_t first_step, std::uint32_t n) {
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      const std::size_t slots = pools[peer].size();
      if (n < slots) continue;
      if (load_acquire(wire(lane, peer).consumed) < first_step + n - slots + 1) return false;
    }
    return true;
  }
  void plain_call(std::uint32_t lane, std::uint64_t first_step) {
    for (std::uint32_t peer = 0; peer < kPeers; ++peer) {
      const std::vector<std::uint32_t> pool = borrow(lane, peer);
      Wire& to = wire(lane, peer);
      std::uint32_t n = 0;
      for (; n < pool.size() && n < kChunks; ++n) {
        fill(lane, to.slots[pool[n]], n);
        publish(to, first_step + n, pool[n]);
        to.uses[pool[n]] = {first_step + n + 1, 0, 0};
      }
      move_to(lane, peer, first_step, n);
    }
  }
  void send(std::uint32_t lane) {
    std::mt19937_64 random(seed_ * 16 + lane);
    for (std::uint32_t call = 0; call < kCalls; ++call) {
      const std::uint64_t first = std::uint64_t{call} * kChunks;
      for (std::uint32_t n = 0; n < kChunks; ++n) {
        for (std::uint32_t w = 0; w < kWords; ++w) {
          store_relaxed(sources_[lane][n][w], value(lane, first + n, w));
        }
      }
      call % 3 == 1 ? plain_call(lane, first) : carried_call(lane, first, random);
    }
  }

  // ---- who receives, and who serves ----

  void receive(std::uint32_t peer) {
    std::mt19937_64 random(seed_ * 16 + 4 + peer);
    std::array<std::uint64_t, kLanes> taken{};
    for (std::uint64_t left = kLanes * kSlices; left != 0;) {
      const auto lane = static_cast<std::uint32_t>(random() % kLanes);
      Wire& from = wire(lane, peer);
      const std::uint64_t step = taken[lane];
      const std::uint64_t flag = step == kSlices ? 0 : load_acquire(from.flags[step]);
      if (flag == 0) {
        std::this_thread::yield();
        continue;
      }
      delay(random, 8);
      const Slot& slot = from.slots[flag - 1];
      for (std::uint32_t w = 0; w < kWords; ++w) {
        if (slot[w] != value(lane, step, w)) ++wrong;
      }
      store_release(from.consumed, ++taken[lane]);
      --left;
    }
  }
  void serve() {
    std::mt19937_64 random(seed_ * 16 + 8);
    LateEngines engines(done_);
    CopyServer server(rings_.data(), kPeers, kPeers * sizeof(Wire), 3 * sizeof(Slot));
    std::uint64_t stalls = 0;
    for (;;) {
      // (What is late comes when nobody waits for it: then it is done with.)
      const bool over = lanes_over.load();
      if (over && done_ == drawn_) break;
      if (!over && (serves_ == Serves::kNever || stalls != 0)) {
        if (stalls != 0) --stalls;
        std::this_thread::yield();
        continue;
      }
      if (serves_ == Serves::kPromptly || random() % 4 == 0) server.sweep(engines);
      if (serves_ == Serves::kStalls && random() % 16 == 0) stalls = random() % 500;
      if (stalls != 0) continue;
      const std::uint64_t steps = serves_ == Serves::kPromptly ? 8 : random() % 3;
      for (std::uint64_t i = 0; i < steps; ++i) engines.step(random() % kPeers);
      delay(random, 2);
    }
    copied = server.posts();
    dropped = server.dropped();
  }

  const Serves serves_;
  const std::uint64_t seed_;
  std::vector<CopyRing> rings_ = std::vector<CopyRing>(kPeers);
  std::array<std::uint64_t, kPeers> done_{}, drawn_{};
  std::vector<Wire> wires_ = std::vector<Wire>(kLanes * kPeers);
  std::array<std::array<Slot, kChunks>, kLanes> sources_{};
};

void play(std::uint64_t rounds) {
  std::uint64_t carried = 0, taken_back = 0, late = 0;
  for (std::uint64_t i = 0; i < rounds; ++i) {
    const std::uint64_t seed = unjam_test::base_seed() + i;
    const auto serves = static_cast<Serves>(i % 4);
    SCOPED_TRACE("serves " + std::to_string(i % 4) + ", seed " + std::to_string(seed));
    Threads threads(serves, seed);
    threads.run();
    EXPECT_TRUE(serves != Serves::kNever || threads.carried == 0u);
    carried += threads.carried;
    taken_back += threads.taken_back;
    late += threads.dropped;
    if (::testing::Test::HasFailure()) return;
  }
  std::printf("%llu slices carried, %llu taken back, %llu copies of those dropped\n",
              static_cast<unsigned long long>(carried), static_cast<unsigned long long>(taken_back),
              static_cast<unsigned long long>(late));
  EXPECT_GT(carried, 0u);
  EXPECT_GT(taken_back, 0u);
}
TEST(CopyRingThreads, OnlyRightBytesAreRead) { play(60); }
TEST(CopyRingThreadsSoak, OnlyRightBytesAreRead) { play(20000); }

}  // namespace
}  // namespace unjam
