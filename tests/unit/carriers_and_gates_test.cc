// What the engine has ready for devices that are not there yet, each with a device made for it
// here: carriers that copy slices at their own pace (copy engines), and gates in front of memory
// that is slow to look at (networks). See docs/internals/engine.md and engine/readiness.h.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/atomics.h"
#include "base/hash.h"
#include "engine/engine.h"
#include "plan/check/checker.h"
#include "plan/lower.h"
#include "plan/program_builder.h"
#include "tests/support/engine_ranks.h"
#include "tests/support/job.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::kPatienceUs;

constexpr std::uint64_t kSliceElements = Ranks::kSlotBytes / sizeof(std::int32_t);

// Rank 0 sends its input to each other rank, whom it marks for a copy engine, and copies it.
Use marked_broadcast(std::uint32_t ranks, std::uint64_t slices, std::uint64_t n = 0) {
  Use u;
  u.what = What::kBroadcast;
  u.count = slices * kSliceElements;
  u.n = n;
  std::mt19937_64 random(base_seed() + n);
  fill(u, ranks, random);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    ProgramBuilder program(static_cast<int>(ranks), static_cast<int>(r));
    if (r == 0) {
      for (std::uint32_t q = 1; q < ranks; ++q) {
        program.add(kLocal | static_cast<unsigned>(Carrier::kCopyEngine), 0, PeerRanks::nobody(),
                    PeerRanks::one(static_cast<int>(q)));
      }
      program.add(kLocal | kCopy, 0);
    } else {
      program.add(kCopy, 0, PeerRanks::one(0));
    }
    program.write(&u.plans[r]);
  }
  return u;
}

// ---- carriers ----

// A device with a copy engine, which copies when the test says so.
class Carrying : public ByHand {
 public:
  using Handle = Carrying&;
  static constexpr bool kCarries = true;
  using ByHand::ByHand;

  // As one that says so too early would.
  bool lies = false;

  void stay() {
    doorbell_awake(doorbell());
    Engine<Carrying>::run(*this, rank_, lane, shared_);
  }
  void carry(std::uint16_t slot, const SliceJob& job, const PublishedWord& word,
             std::uint32_t rank) {
    // The description is the next slice's when this returns.
    const std::lock_guard lock(mutex_);
    given_.push_back(
        {slot, job.src[0], job.dst_slot[0], job.elems * dtype_bytes(job.dtype), word, rank});
    ++outstanding_[slot];
    ++carried;
  }
  bool drained(std::uint16_t slot) {
    // Acquire: by the lock. The carrier has read the user's input, and published, before.
    const std::lock_guard lock(mutex_);
    return lies || outstanding_[slot] == 0;
  }
  std::uint32_t rings() { return load_acquire(doorbell()) / kRing; }
  std::size_t outstanding() {
    const std::lock_guard lock(mutex_);
    return given_.size();
  }
  // Copies the i-th of those that it has (any, if there are not as many); false: it has none.
  bool copy(std::size_t i) {
    Slice slice;
    {
      const std::lock_guard lock(mutex_);
      if (given_.empty()) return false;
      const auto it = given_.begin() + static_cast<std::ptrdiff_t>(i % given_.size());
      slice = *it;
      given_.erase(it);
    }
    std::memcpy(slice.to, slice.from, slice.bytes);
    // Behind the payload, and behind what the engine has written about the slice.
    store_release(*slice.word.place, slice.word.value);
    ring(slice.rank, 0, RingFor::kData);
    {
      const std::lock_guard lock(mutex_);
      --outstanding_[slice.slot];
    }
    const std::uint32_t me = rank_.lanes[0].transport.rank;
    ring(me, 0, RingFor::kWork);
    return true;
  }

  std::atomic<std::uint64_t> carried{0};

 private:
  struct Slice {
    std::uint16_t slot = 0;
    const void* from = nullptr;
    void* to = nullptr;
    std::size_t bytes = 0;
    PublishedWord word;
    std::uint32_t rank = 0;
  };
  std::mutex mutex_;
  std::deque<Slice> given_;
  std::map<std::uint16_t, std::uint32_t> outstanding_;
};

// Each lacks one thing that the engine asks for.
class Deaf : public Carrying {
  using Carrying::cancelled;
};
class Tireless : public Carrying {
  using Carrying::try_quit;
};
class Unstirred : public Carrying {
  using Carrying::sync_control;
};
class Unasked : public Carrying {
  using Carrying::next_submission;
};
class Posting : public Carrying {
 public:
  static constexpr bool kPipelines = true;
};
static_assert(unjam::EngineDevice<Carrying>);
static_assert(!unjam::SpeaksToOthers<Deaf> && !unjam::EngineDevice<Deaf>);
static_assert(!unjam::HostsALane<Tireless> && !unjam::EngineDevice<Tireless>);
static_assert(!unjam::DrivesABlock<Unstirred> && !unjam::EngineDevice<Unstirred>);
static_assert(!unjam::TakesSubmissions<Unasked> && !unjam::EngineDevice<Unasked>);
static_assert(!unjam::EngineDevice<Posting>, "posters would have to hand slices to carriers");

// Outcomes of the calls that have ended at a rank.
std::vector<Outcome> ended(Ranks& ranks, std::uint32_t r) {
  std::vector<Outcome> outcomes;
  Cqe e;
  while (ranks.state(r).cq.pop(e)) outcomes.push_back(e.outcome);
  return outcomes;
}

class Carriers : public testing::Test {
 protected:
  static constexpr int kBorrowed = 8;

  explicit Carriers(int pool_slots = kBorrowed)
      : ranks_(Case{2, 0, 0, 1, 2, pool_slots, false}, 3, 80),
        sender_(ranks_.state(0), false),
        receiver_(ranks_.state(1), false) {}

  std::uint32_t receiver_rings() {
    const LaneTransport& t = ranks_.state(0).lanes[0].transport;
    return load_acquire(t.lane_cell(1, 0).doorbell) / kRing;
  }
  void submit(std::uint64_t slices) {
    use_ = marked_broadcast(2, slices);
    for (const std::uint32_t r : {0u, 1u}) ranks_.submit(use_, r, 0);
  }

  Ranks ranks_;
  Carrying sender_;
  ByHand receiver_;
  Use use_;
};

TEST_F(Carriers, CopyWhileTheProgramGoesOnAndTheEndWaitsForThem) {
  submit(5);
  sender_.stay();
  EXPECT_EQ(sender_.outstanding(), 5u);
  EXPECT_EQ(load_relaxed(ranks_.stats(0).slices), 10u) << "its own copies were not waited for";
  receiver_.stay();
  EXPECT_EQ(load_relaxed(ranks_.stats(1).slices), 0u);
  for (int left = 4; left >= 0; --left) {
    EXPECT_TRUE(ended(ranks_, 0).empty()) << "the carrier still reads the input";
    EXPECT_TRUE(sender_.asleep());
    const std::uint32_t rings = sender_.rings(), receivers = receiver_rings();
    EXPECT_TRUE(receiver_.asleep());
    ASSERT_TRUE(sender_.copy(0));
    EXPECT_EQ(sender_.rings(), rings + 1);
    EXPECT_EQ(receiver_rings(), receivers + 1) << "who waits for it sleeps on";
    sender_.stay();
    receiver_.stay();
    EXPECT_EQ(load_relaxed(ranks_.stats(1).slices), static_cast<std::uint64_t>(5 - left));
  }
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  EXPECT_EQ(ended(ranks_, 1), std::vector{Outcome::kDone});
  check(use_);
}

TEST_F(Carriers, MayCopyInAnyOrder) {
  submit(8);
  std::mt19937_64 random(base_seed());
  sender_.stay();
  ASSERT_EQ(sender_.outstanding(), 8u);
  while (sender_.copy(random())) receiver_.stay();
  sender_.stay();
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  EXPECT_EQ(ended(ranks_, 1), std::vector{Outcome::kDone});
  check(use_);
}

TEST_F(Carriers, HaveNoMoreSlicesThanThereAreBorrowedSlots) {
  submit(20);
  for (int i = 0; i < 4; ++i) {
    sender_.stay();
    receiver_.stay();
    EXPECT_LE(sender_.outstanding(), static_cast<std::size_t>(kBorrowed));
  }
  // The guaranteed slots have the next ones, which wait behind those with the carrier.
  EXPECT_EQ(sender_.carried, std::uint64_t{kBorrowed});
  EXPECT_EQ(load_relaxed(ranks_.stats(1).slices), 0u);
  for (int i = 0; i < 100 && ended(ranks_, 1).empty(); ++i) {
    while (sender_.copy(0)) {
    }
    receiver_.stay();
    sender_.stay();
  }
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  check(use_);
}

class NoBorrowedSlots : public Carriers {
 protected:
  NoBorrowedSlots() : Carriers(0) {}
};
TEST_F(NoBorrowedSlots, BlocksMoveWhatIsMarked) {
  submit(20);
  for (int i = 0; i < 100 && ended(ranks_, 1).empty(); ++i) {
    sender_.stay();
    receiver_.stay();
  }
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  EXPECT_EQ(sender_.carried, 0u);
  check(use_);
}

TEST_F(Carriers, WhoIsCancelledEndsWhenTheyAreThrough) {
  submit(30);
  sender_.stay();
  const std::size_t given = sender_.outstanding();
  ASSERT_NE(given, 0u);
  sender_.cancelled_slots.insert(0);
  for (std::size_t left = given; left != 0; --left) {
    sender_.stay();
    EXPECT_TRUE(ended(ranks_, 0).empty()) << "the carrier still reads the input";
    EXPECT_EQ(sender_.carried, given) << "who is cancelled sends no more";
    sender_.copy(0);
  }
  sender_.stay();
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kCancelled});
}

// What these tests would find: a device that says too early that all is copied.
TEST_F(Carriers, OneThatLiesIsFound) {
  submit(5);
  sender_.lies = true;
  sender_.stay();
  ASSERT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  const std::vector<std::int32_t> was = use_.inputs[0];
  std::fill(use_.inputs[0].begin(), use_.inputs[0].end(), -7);  // it is the user's again
  while (sender_.copy(0)) receiver_.stay();
  use_.inputs[0] = was;
  EXPECT_NE(use_.outputs[1][0], was[0]);
}

// An engine's thread and a carrier's, of each of three ranks: calls of two keys, one behind the
// other; and whoever's call has ended overwrites its input.
TEST(CarriersAtOnce, GiveTheRightResults) {
  constexpr std::uint32_t kRanks = 3;
  constexpr std::uint16_t kUses = 12;
  Ranks ranks(Case{kRanks, 0, 0, 1, 2, 4, false}, 2, 81);
  std::vector<Use> uses;
  for (std::uint16_t i = 0; i < kUses; ++i) {
    uses.push_back(marked_broadcast(kRanks, 1 + i % 7, i / 2));
    uses.back().key = i % 2;
  }
  std::vector<std::vector<std::int32_t>> inputs;
  for (const Use& u : uses) inputs.push_back(u.inputs[0]);
  std::vector<std::unique_ptr<Carrying>> devices;
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    devices.push_back(std::make_unique<Carrying>(ranks.state(r), false));
    for (std::uint16_t i = 0; i < kUses; ++i) ranks.submit(uses[i], r, i);
  }
  std::atomic<std::uint32_t> at_work{kRanks};
  std::atomic<bool> late{false};
  std::vector<std::thread> threads;
  for (std::uint32_t r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      const std::uint64_t deadline = monotonic_ns() + std::uint64_t{kPatienceUs} * 1000;
      for (std::uint32_t left = kUses; left != 0 && !late;) {
        devices[r]->stay();
        Cqe e;
        while (ranks.state(r).cq.pop(e)) {
          --left;
          if (r == 0) std::fill(uses[e.slot].inputs[0].begin(), uses[e.slot].inputs[0].end(), -7);
        }
        if (monotonic_ns() > deadline) late = true;
        std::this_thread::yield();
      }
      --at_work;
    });
    threads.emplace_back([&, r] {
      std::mt19937_64 random(base_seed() + r);
      while (at_work != 0) {
        if (random() % 4 != 0) devices[r]->copy(random());
        std::this_thread::yield();
      }
    });
  }
  for (std::thread& t : threads) t.join();
  ASSERT_FALSE(late);
  EXPECT_NE(devices[0]->carried, 0u);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    uses[i].inputs[0] = inputs[i];
    check(uses[i]);
  }
}

// A marked program is proved like any other.
TEST(CarriersAtOnce, MarksAreProved) {
  PlanRequest request;
  request.kind = Kind::kBroadcast;
  request.dtype = DType::kInt32;
  request.ranks = 3;
  const Use u = marked_broadcast(3, 4);
  request.count = u.count;
  CheckOptions options;
  options.slots = 2;
  options.slot_bytes = Ranks::kSlotBytes;
  const CheckResult report = check_plans(request, u.plans, options);
  EXPECT_TRUE(report.ok) << report.error;
}

// But not what may overwrite, in place, what a carrier still reads: the rank reads its input twice,
// and what comes back has that from either.
TEST(CarriersAtOnce, WhatACarrierReadsIsNotOverwritten) {
  PlanRequest request;
  request.kind = Kind::kAllReduce;
  request.dtype = DType::kInt32;
  request.ranks = 2;
  request.count = 4 * kSliceElements;
  Use u = marked_broadcast(2, 4);
  for (const bool marked : {false, true}) {
    const unsigned mark = static_cast<unsigned>(marked ? Carrier::kCopyEngine : Carrier::kBlocks);
    for (int r = 0; r < 2; ++r) {
      Plan& plan = u.plans[static_cast<std::size_t>(r)];
      plan.geometry.kind = request.kind;
      ProgramBuilder program(2, r);
      const PeerRanks nobody = PeerRanks::nobody(), other = PeerRanks::one(1 - r);
      if (r == 0) {
        program.add(kLocal | kContribute | mark, 0, nobody, other);
        program.add(kLocal | kCopy, 0);
        program.add(kCopy, 0, other);
      } else {
        program.add(kLocal | kReduce | kContribute | kFinish | kCopy, 0, other, other);
      }
      program.write(&plan);
    }
    CheckOptions options;
    options.slots = 2;
    options.slot_bytes = Ranks::kSlotBytes;
    const CheckResult report = check_plans(request, u.plans, options);
    EXPECT_EQ(report.ok, !marked) << report.error;
    EXPECT_EQ(report.error.find("carrier may still be reading") != std::string::npos, marked)
        << report.error;
  }
}

// ---- gates ----

// A device whose peers are remote: what it stores for them is taken there by deliver(), as the test
// says.
class Remote : public ByHand {
 public:
  using Handle = Remote&;
  using ByHand::ByHand;

  std::vector<std::uint64_t> gates = std::vector<std::uint64_t>(4);
  bool gated = true;
  std::vector<std::uint32_t> told_of;  // ranks for which a word was published

  std::uint64_t stay() {
    const std::uint64_t before = load_relaxed(rank_.lanes[0].stats.slices);
    doorbell_awake(doorbell());
    Engine<Remote>::run(*this, rank_, lane, shared_);
    return load_relaxed(rank_.lanes[0].stats.slices) - before;
  }
  const std::uint64_t* gate(std::uint32_t rank) const { return gated ? &gates[rank] : nullptr; }
  bool posted(std::uint32_t rank, std::uint32_t, const PublishedWord&) {
    told_of.push_back(rank);
    return true;
  }
  void ring(std::uint32_t, std::uint32_t, RingFor) { ADD_FAILURE() << "the courier rings"; }
};

class Gates : public testing::Test {
 protected:
  static constexpr std::uint32_t kRanks = 2;

  Gates() : ranks_(mirrored(), 2, 82) {
    for (std::uint32_t r = 0; r < kRanks; ++r) {
      devices_.push_back(std::make_unique<Remote>(ranks_.state(r), false));
    }
  }
  static Case mirrored() {
    Case c{kRanks, 0, 0, 1, 2, 2, false};
    c.mirrors = true;
    return c;
  }
  void submit(std::uint64_t slices) {
    use_.what = What::kTwoStepAllReduce;
    use_.count = slices * kSliceElements * kRanks;
    std::mt19937_64 random(base_seed());
    fill(use_, kRanks, random);
    for (std::uint32_t r = 0; r < kRanks; ++r) ranks_.submit(use_, r, 0);
  }
  // What from has stored for to is there, and counted.
  void bring(std::uint32_t from, std::uint32_t to) {
    ranks_.deliver(from, to);
    store_release(devices_[to]->gates[from], devices_[to]->gates[from] + 1);
  }

  Ranks ranks_;
  std::vector<std::unique_ptr<Remote>> devices_;
  Use use_;
};

TEST_F(Gates, AllComesByWhoeverTakesItThere) {
  submit(5);
  std::size_t told = 0;
  for (int i = 0; i < 100; ++i) {
    for (const std::uint32_t r : {0u, 1u}) {
      devices_[r]->stay();
      for (const std::uint32_t to : std::exchange(devices_[r]->told_of, {})) {
        ASSERT_EQ(to, 1 - r);
        ++told;
        bring(r, to);
      }
    }
  }
  EXPECT_EQ(ended(ranks_, 0), std::vector{Outcome::kDone});
  EXPECT_EQ(ended(ranks_, 1), std::vector{Outcome::kDone});
  check(use_);
  // Of each slice its flag and its credit.
  EXPECT_EQ(told, 2u * 2 * 5 * 2);
}

// A wait looks once, and then when it is told that there is something.
TEST_F(Gates, AreWaitedForBeforeTheNextLook) {
  submit(1);
  devices_[0]->stay();
  Remote& waits = *devices_[1];
  std::uint32_t came = 0, counted = 0;
  waits.after_poll = [&](std::uint16_t, std::uint32_t polls) {
    if (counted != 0) return;
    if (polls == 2) {
      ranks_.deliver(0, 1);
      came = polls;
    }
    if (polls == 5) {
      EXPECT_EQ(load_relaxed(ranks_.stats(1).received), 0u)
          << "it has looked at memory that nobody has said anything about";
      store_release(waits.gates[0], std::uint64_t{1});
      counted = polls;
    }
  };
  waits.stay();
  ASSERT_EQ(came, 2u);
  ASSERT_EQ(counted, 5u);
  EXPECT_EQ(load_relaxed(ranks_.stats(1).received), 1u) << "it has missed what it was told of";
}

TEST_F(Gates, APeerWithoutOneIsLookedAtEachTime) {
  submit(1);
  devices_[0]->stay();
  Remote& waits = *devices_[1];
  waits.gated = false;
  std::uint32_t polls_at_first = 0;
  waits.after_poll = [&](std::uint16_t, std::uint32_t polls) {
    if (load_relaxed(ranks_.stats(1).received) != 0) return;
    polls_at_first = polls;
    if (polls == 2) ranks_.deliver(0, 1);
  };
  waits.stay();
  EXPECT_EQ(polls_at_first, 2u);
  EXPECT_EQ(load_relaxed(ranks_.stats(1).received), 1u);
}

// A new wait looks whatever the gates say: what came between two waits was counted before.
TEST_F(Gates, WhatWasCountedBetweenWaitsIsFound) {
  submit(1);
  devices_[1]->stay();  // in vain
  devices_[0]->stay();
  bring(0, 1);
  devices_[1]->stay();
  EXPECT_EQ(load_relaxed(ranks_.stats(1).received), 1u);
}

// ---- steps that a lane has not ----

// Of parts that lie on lanes in turn each lane has chunks of some steps alone.
TEST(ChunksOfSteps, ThatNotAllLanesHaveAreTheEngines) {
  std::vector<Use> uses(1);
  Use& u = uses[0];
  u.what = What::kOneStepAllReduce;
  u.count = 8 * kSliceElements;
  std::mt19937_64 random(base_seed());
  fill(u, 2, random, Laid::kOneByOne, 2);
  const LowerLimits executors{512, 2, true, 20, 8192};
  EXPECT_EQ(lower(u.plans[0], 2, 0, executors).why, NeedsEngine::kNo);
  std::uint32_t chunks = 0;
  for (const std::uint32_t n : lower(u.plans[0], 2, 0, executors).schedule.chunks) {
    EXPECT_EQ(n, u.plans[0].geometry.loops(0));
    chunks = n;
  }
  EXPECT_NE(chunks, 0u);
  // Two parts, each with steps of its own.
  for (int r = 0; r < 2; ++r) {
    Plan& plan = u.plans[static_cast<std::size_t>(r)];
    plan.geometry.parts = 2;
    plan.geometry.by_lane = true;
    ProgramBuilder program(2, r);
    for (int part = 0; part < 2; ++part) {
      program.add(kLocal, part, PeerRanks::nobody(), program.all_others());
      program.add(kLocal | kContribute | kReduce | kFinish | kCopy, part, program.all_others());
    }
    program.write(&plan);
    EXPECT_EQ(lower(plan, 2, r, executors).why, NeedsEngine::kUnevenSteps);
  }
  Ranks ranks(Case{2, 1, 0, 2, 2, 0, false}, 1, 83);
  for (const std::uint32_t r : {0u, 1u}) ranks.submit(u, r, 0);
  for (const std::uint32_t r : {0u, 1u}) ASSERT_TRUE(ranks.wait(r, 1));
  check(u);
}

}  // namespace
}  // namespace unjam
