// The doorbell under a deterministic scheduler: every interleaving of a lane and its ringers, at
// the granularity of single atomic operations, over the real functions. The same explorer must find
// planted mistakes, or it would prove nothing.
#include "engine/doorbell.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "engine/lease.h"

namespace unjam {
namespace {

enum class Mistake { kNone, kEpochAfterLook, kRingBeforeWork, kSleepWithoutExchange, kForgetsRoom };

struct Ringer {
  RingFor what = RingFor::kData;
  int rings = 1;  // how often it makes work
  int pc = 0;
};

// The whole state; copied at every branch.
struct Model {
  std::uint32_t word = 0;
  int work = 0;  // published and not yet seen, data
  int room = 0;  // published and not yet seen, room
  // Lane.
  int lane_pc = 0;
  std::uint32_t epoch = 0;
  std::uint32_t asleep = 0;
  bool found = false;
  bool in_futex = false;
  bool waits_for_room = false;
  std::array<Ringer, 2> ringers;

  auto key() const {
    return std::make_tuple(word, work, room, lane_pc, epoch, asleep, found, in_futex, ringers[0].pc,
                           ringers[0].rings, ringers[1].pc, ringers[1].rings);
  }
};

class Explorer {
 public:
  Explorer(Mistake mistake, Model start) : mistake_(mistake) { explore(start); }
  bool lost_wakeup() const { return lost_; }
  std::size_t states() const { return seen_.size(); }

 private:
  bool ringer_can_step(const Ringer& r) const { return r.rings > 0; }

  void ringer_step(Model& m, Ringer& r) {
    const bool ring_first = mistake_ == Mistake::kRingBeforeWork;
    const bool publishes = (r.pc == 0) != ring_first;
    if (publishes) {
      (r.what == RingFor::kData ? m.work : m.room)++;
    } else if (doorbell_ring(m.word, r.what) != Wake::kNobody) {
      m.in_futex = false;  // the futex wake
    }
    if (++r.pc == 2) {
      r.pc = 0;
      --r.rings;
    }
  }

  // 0 epoch, 1 look, 2 try to sleep, 3 enter the futex, 4 in the futex, 5 awake
  bool lane_can_step(const Model& m) const { return m.lane_pc != 4 || !m.in_futex; }

  void lane_step(Model& m) {
    const bool epoch_late = mistake_ == Mistake::kEpochAfterLook;
    switch (m.lane_pc) {
      case 0:
        if (epoch_late) {
          look(m);
        } else {
          m.epoch = doorbell_epoch(m.word);
        }
        m.lane_pc = 1;
        break;
      case 1:
        if (epoch_late) {
          m.epoch = doorbell_epoch(m.word);
        } else {
          look(m);
        }
        m.lane_pc = m.found ? 0 : 2;
        break;
      case 2: {
        const bool room = m.waits_for_room && mistake_ != Mistake::kForgetsRoom;
        if (mistake_ == Mistake::kSleepWithoutExchange) {
          m.asleep = doorbell_epoch(m.word);
          m.lane_pc = 3;
        } else {
          const std::uint32_t bits =
              kAsleep | kHeld | kAsleepForData | (room ? kAsleepForRoom : 0u);
          m.asleep = m.epoch | bits;
          m.lane_pc = doorbell_try_sleep(m.word, m.epoch, bits) ? 3 : 0;
        }
        break;
      }
      case 3:  // the kernel compares and queues in one step
        m.in_futex = m.word == m.asleep;
        m.lane_pc = m.in_futex ? 4 : 5;
        break;
      case 4:
        m.lane_pc = 5;
        break;
      default:
        doorbell_awake(m.word);
        m.lane_pc = 0;
    }
  }

  void look(Model& m) {
    m.found = m.work > 0 || (m.waits_for_room && m.room > 0);
    m.work = 0;
    if (m.waits_for_room) m.room = 0;
  }

  void explore(const Model& m) {
    if (!seen_.insert(m.key()).second) return;
    bool ringers_done = true;
    for (std::size_t i = 0; i < m.ringers.size(); ++i) {
      if (!ringer_can_step(m.ringers[i])) continue;
      ringers_done = false;
      Model next = m;
      ringer_step(next, next.ringers[i]);
      explore(next);
    }
    if (lane_can_step(m)) {
      Model next = m;
      lane_step(next);
      explore(next);
    } else if (ringers_done && (m.work > 0 || (m.waits_for_room && m.room > 0))) {
      lost_ = true;  // asleep for ever beside work
    }
  }

  const Mistake mistake_;
  bool lost_ = false;
  std::set<decltype(Model{}.key())> seen_;
};

Model start(RingFor a, RingFor b, bool waits_for_room) {
  Model m;
  m.ringers[0] = {a, 2, 0};
  m.ringers[1] = {b, 2, 0};
  m.waits_for_room = waits_for_room;
  return m;
}

TEST(Doorbell, NoWakeupIsLostInAnyInterleaving) {
  for (const bool room : {false, true}) {
    for (const RingFor a : {RingFor::kData, RingFor::kRoom}) {
      for (const RingFor b : {RingFor::kData, RingFor::kRoom}) {
        const Explorer e(Mistake::kNone, start(a, b, room));
        EXPECT_FALSE(e.lost_wakeup());
        EXPECT_GT(e.states(), 100u);
      }
    }
  }
}

TEST(Doorbell, ExplorerFindsPlantedMistakes) {
  const Model data = start(RingFor::kData, RingFor::kData, false);
  EXPECT_TRUE(Explorer(Mistake::kEpochAfterLook, data).lost_wakeup());
  EXPECT_TRUE(Explorer(Mistake::kRingBeforeWork, data).lost_wakeup());
  EXPECT_TRUE(Explorer(Mistake::kSleepWithoutExchange, data).lost_wakeup());
  EXPECT_TRUE(
      Explorer(Mistake::kForgetsRoom, start(RingFor::kRoom, RingFor::kRoom, true)).lost_wakeup());
}

TEST(Doorbell, WakesThoseWhoAreInterestedAndNobodyElse) {
  std::uint32_t word = 0;
  ASSERT_TRUE(doorbell_try_sleep(word, doorbell_epoch(word), kAsleep));
  EXPECT_EQ(doorbell_ring(word, RingFor::kRoom), Wake::kNobody);
  EXPECT_EQ(doorbell_ring(word, RingFor::kData), Wake::kNobody);
  EXPECT_EQ(doorbell_ring(word, RingFor::kWork), Wake::kTaker);
  ASSERT_TRUE(lease_take(word));
  EXPECT_EQ(doorbell_ring(word, RingFor::kWork), Wake::kNobody);
  ASSERT_TRUE(lease_rest(word, doorbell_epoch(word), kAsleepForData));
  EXPECT_EQ(doorbell_ring(word, RingFor::kRoom), Wake::kNobody);
  EXPECT_EQ(doorbell_ring(word, RingFor::kData), Wake::kTaker);
  ASSERT_TRUE(lease_take(word));
  ASSERT_TRUE(doorbell_try_sleep(word, doorbell_epoch(word), kAsleep | kAsleepForRoom | kHeld));
  EXPECT_EQ(doorbell_ring(word, RingFor::kData), Wake::kNobody);
  EXPECT_EQ(doorbell_ring(word, RingFor::kRoom), Wake::kHolder);
}

TEST(Lease, OneDriverAtATime) {
  std::uint32_t word = 0;  // driven by whoever made it
  EXPECT_FALSE(lease_take(word));
  ASSERT_TRUE(lease_rest(word, doorbell_epoch(word), 0));
  EXPECT_TRUE(lease_take(word));
  EXPECT_FALSE(lease_take(word));
  const std::uint32_t epoch = doorbell_epoch(word);
  doorbell_ring(word, RingFor::kWork);
  EXPECT_FALSE(lease_rest(word, epoch, 0)) << "it was rung since";
  // Held: asleep, and not for the taking.
  const std::uint32_t held = doorbell_epoch(word) | kAsleep | kHeld;
  ASSERT_TRUE(doorbell_try_sleep(word, doorbell_epoch(word), kAsleep | kHeld));
  EXPECT_FALSE(lease_take(word));
  ASSERT_TRUE(lease_stop_holding(word, held));
  EXPECT_TRUE(lease_take(word));
  // Handed over: free, and rung.
  const std::uint32_t before = word;
  lease_hand_over(word);
  EXPECT_TRUE(lease_free(word));
  EXPECT_NE(word / kRing, before / kRing);
  EXPECT_TRUE(lease_take(word));
  EXPECT_EQ(word & kSleepMask, 0u);
}

TEST(Doorbell, CountWrapsAround) {
  std::uint32_t word = ~static_cast<std::uint32_t>(kSleepMask);
  ASSERT_TRUE(doorbell_try_sleep(word, doorbell_epoch(word), kAsleep | kHeld | kAsleepForData));
  const std::uint32_t asleep = word;
  EXPECT_EQ(doorbell_ring(word, RingFor::kData), Wake::kHolder);
  EXPECT_NE(word, asleep);
  doorbell_awake(word);
  EXPECT_EQ(word & kSleepMask, 0u);
}

}  // namespace
}  // namespace unjam
