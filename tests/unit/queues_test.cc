// The engine's queues: order, capacity, and many threads (TSan checks the memory orders).
#include "engine/queues.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <random>
#include <thread>
#include <vector>

#include "engine/cq.h"
#include "engine/slot_batch.h"
#include "engine/task_queue.h"
#include "tests/support/queue_with_links.h"
#include "tests/support/scan_cq.h"

namespace unjam {
namespace {

using unjam_test::QueueWithLinks;

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
constexpr std::uint64_t kMany = 20000;
#else
constexpr std::uint64_t kMany = 500000;
#endif

TEST(SpscRing, KeepsOrderAcrossThreads) {
  std::vector<std::uint64_t> places(8);
  SpscRing<std::uint64_t> ring;
  ring.places = places.data();
  ring.capacity = 8;
  std::atomic<std::uint64_t> under_way{0};  // stands for the free invocation slots
  std::thread producer([&] {
    for (std::uint64_t i = 0; i < kMany; ++i) {
      while (under_way.load(std::memory_order_acquire) == 8) std::this_thread::yield();
      under_way.fetch_add(1, std::memory_order_acq_rel);
      ring.push(i);
    }
  });
  for (std::uint64_t i = 0; i < kMany; ++i) {
    std::uint64_t v = 0;
    while (!ring.pop(v)) std::this_thread::yield();
    ASSERT_EQ(v, i);
    under_way.fetch_sub(1, std::memory_order_acq_rel);
  }
  producer.join();
  EXPECT_TRUE(ring.empty());
}

// P producers, each with its share of the slots; every slot's entry carries data written before it.
template <class Push, class Pop>
void check_cq(std::uint32_t producers, std::uint32_t slots, Push push, Pop pop) {
  std::vector<std::uint64_t> data(slots, 0);  // plain: published through the queue only
  std::vector<std::atomic<bool>> busy(slots);
  for (auto& b : busy) b = false;
  const std::uint64_t each = kMany / 4 / producers;
  std::vector<std::thread> threads;
  for (std::uint32_t p = 0; p < producers; ++p) {
    threads.emplace_back([&, p] {
      for (std::uint64_t i = 0; i < each; ++i) {
        const std::uint32_t slot =
            p + producers * static_cast<std::uint32_t>(i % (slots / producers));
        while (busy[slot].load(std::memory_order_acquire)) std::this_thread::yield();
        busy[slot].store(true, std::memory_order_relaxed);
        data[slot] = i + 1;
        while (!push(
            Cqe{static_cast<std::uint16_t>(slot), i % 2 ? Outcome::kDone : Outcome::kCancelled},
            slot)) {
          std::this_thread::yield();
        }
      }
    });
  }
  std::vector<std::uint64_t> next(slots, 0);
  for (std::uint64_t got = 0; got < each * producers;) {
    Cqe e;
    if (!pop(e)) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_LT(e.slot, slots);
    const std::uint64_t value = data[e.slot];
    ASSERT_GT(value, next[e.slot]) << "an entry came twice or early";
    ASSERT_EQ(e.outcome, (value - 1) % 2 ? Outcome::kDone : Outcome::kCancelled);
    next[e.slot] = value;
    busy[e.slot].store(false, std::memory_order_release);
    ++got;
  }
  for (auto& t : threads) t.join();
}

TEST(RingCq, ManyProducers) {
  std::vector<std::uint64_t> words(16, 0);
  RingCq cq;
  cq.words = words.data();
  cq.capacity = 16;
  check_cq(
      4, 16, [&](Cqe e, std::uint32_t) { return cq.push(e), true; },
      [&](Cqe& e) { return cq.pop(e); });
}

TEST(ScanCq, ManyProducers) {
  std::vector<std::uint64_t> words(8, 0);  // fewer than slots: producers meet a full queue
  ScanCq cq;
  cq.words = words.data();
  cq.capacity = 8;
  std::uint32_t cursor = 0;
  check_cq(
      4, 16, [&](Cqe e, std::uint32_t start) { return cq.push(e, start); },
      [&](Cqe& e) { return cq.pop(e, cursor); });
}

TEST(ScanCq, FullQueueRefusesAndLosesNothing) {
  std::vector<std::uint64_t> words(2, 0);
  ScanCq cq;
  cq.words = words.data();
  cq.capacity = 2;
  EXPECT_TRUE(cq.push({1, Outcome::kDone}, 0));
  EXPECT_TRUE(cq.push({2, Outcome::kDone}, 0));
  EXPECT_FALSE(cq.push({3, Outcome::kDone}, 0));
  std::uint32_t cursor = 0;
  Cqe a, b, c;
  ASSERT_TRUE(cq.pop(a, cursor));
  ASSERT_TRUE(cq.pop(b, cursor));
  EXPECT_FALSE(cq.pop(c, cursor));
  EXPECT_EQ(a.slot + b.slot, 3);
}

TEST(SlotBatch, KeepsItsSlotsInOrder) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 100; ++round) {
    SlotBatch batch;
    std::vector<std::uint16_t> slots;
    while (!batch.full()) {
      ASSERT_EQ(batch.size(), slots.size());
      slots.push_back(static_cast<std::uint16_t>(round == 0 ? kNoSlot : random()));
      batch.push_back(slots.back());
      for (std::uint32_t i = 0; i < batch.size(); ++i) ASSERT_EQ(batch[i], slots[i]);
    }
    ASSERT_EQ(slots.size(), SlotBatch::kMost);
  }
}

TEST(TaskQueue, FifoAndRemovalKeepOrder) {
  QueueWithLinks q(8);
  EXPECT_TRUE(q.empty());
  for (const std::uint16_t s : {3, 1, 4, 5}) q.push_back(s, 0);
  q.remove(4);
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{3, 1, 5}));
  q.remove(3);
  q.remove(5);
  q.push_back(2, 0);
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{1, 2}));
  EXPECT_EQ(q.size(), 2u);
}

TEST(TaskQueue, PriorityIsStable) {
  QueueWithLinks q(8);
  q.push_by_priority(0, 1);
  q.push_by_priority(1, 5);
  q.push_by_priority(2, 1);
  q.push_by_priority(3, 5);
  q.push_by_priority(4, -2);
  q.push_by_priority(5, 9);
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{5, 1, 3, 0, 2, 4}));
}

TEST(TaskQueue, RandomOperationsAgainstAVector) {
  std::vector<std::int32_t> priority(64);
  QueueWithLinks q(64);
  std::vector<std::uint16_t> model;
  std::mt19937 rng(5);
  for (int i = 0; i < 20000; ++i) {
    const auto slot = static_cast<std::uint16_t>(rng() % 64);
    const auto at = std::find(model.begin(), model.end(), slot);
    if (at != model.end()) {
      q.remove(slot);
      model.erase(at);
    } else {
      priority[slot] = static_cast<std::int32_t>(rng() % 5);
      q.push_by_priority(slot, priority[slot]);
      const auto place = std::find_if(model.begin(), model.end(), [&](std::uint16_t s) {
        return priority[s] < priority[slot];
      });
      model.insert(place, slot);
    }
    ASSERT_EQ(q.order(), model) << "operation " << i;
  }
}

}  // namespace
}  // namespace unjam
