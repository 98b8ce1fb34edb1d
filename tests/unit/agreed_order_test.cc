// agreed_order.h: what is put in order, by what, and that nobody is overtaken for ever.
#include "engine/agreed_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "tests/support/job.h"
#include "tests/support/queue_with_links.h"

namespace unjam {
namespace {

using unjam_test::QueueWithLinks;

struct Call {
  std::uint64_t use = 0, seed = 0;
};

// As Passes::put_in_order(). False: there was nothing to be done.
bool put_in_order(TaskQueue& queue, const std::vector<Call>& calls) {
  AgreedOrder o;
  if (!o.take(queue)) return false;
  for (std::uint32_t i = 0; i < o.n; ++i) {
    o.uses[i] = calls[o.slots[i]].use;
    o.seeds[i] = calls[o.slots[i]].seed;
  }
  for (std::uint32_t i = 0; i < o.n; ++i) o.sort(i);
  for (std::uint32_t i = 0; i < o.n; ++i) queue.place(o.sorted, o.n, i, o.after);
  queue.settle(o.sorted, o.n, o.after);
  return true;
}

TEST(AgreedOrder, IsByUsesOfTheKeyThenBySeeds) {
  const std::vector<Call> calls = {{1, 5}, {0, 9}, {1, 2}, {0, 9}, {0, 3}, {2, 0}};
  QueueWithLinks q(calls.size());
  q.push_back(5, 0);
  EXPECT_FALSE(put_in_order(q, calls)) << "one alone";
  for (const std::uint16_t s : {0, 3, 1, 2, 4}) q.push_back(s, 0);
  EXPECT_TRUE(put_in_order(q, calls));
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{4, 3, 1, 2, 0, 5})) << "equal ones stay";
}

TEST(AgreedOrder, WhatIsClosedIsOvertakenByNobody) {
  const std::vector<Call> calls = {{0, 50}, {0, 40}, {0, 10}, {0, 5}, {0, 1}};
  QueueWithLinks q(calls.size());
  q.push_back(0, 0);
  q.push_back(1, 0);
  put_in_order(q, calls);
  q.push_back(2, 0);
  put_in_order(q, calls);
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{2, 1, 0})) << "open: a newcomer may";
  q.close();
  q.push_back(3, 0);
  EXPECT_FALSE(put_in_order(q, calls));
  q.push_back(4, 0);
  EXPECT_TRUE(put_in_order(q, calls));
  EXPECT_EQ(q.order(), (std::vector<std::uint16_t>{2, 1, 0, 4, 3}));
}

// Of all that come and go in any order, with what is closed in front.
TEST(AgreedOrder, RandomOperationsAgainstAVector) {
  constexpr std::uint16_t kSlots = 250;
  std::mt19937_64 random(unjam_test::base_seed());
  std::vector<Call> calls(kSlots);
  QueueWithLinks q(kSlots);
  std::vector<std::uint16_t> model;
  std::size_t closed = 0, sorted = 0;  // so many in front; of the open ones
  int of_many = 0;
  for (int i = 0; i < 40000; ++i) {
    const auto what = random() % 64;
    if (what == 0) {
      put_in_order(q, calls);
      const std::size_t n = std::min<std::size_t>(model.size() - closed, kMostInOrder);
      if (model.size() - closed > kMostInOrder) ++of_many;
      if (n > 1) {
        const auto from = model.begin() + static_cast<std::ptrdiff_t>(closed);
        std::stable_sort(from, from + static_cast<std::ptrdiff_t>(n), [&](auto a, auto b) {
          return std::tie(calls[a].use, calls[a].seed) < std::tie(calls[b].use, calls[b].seed);
        });
        sorted = n;
      }
    } else if (what == 1) {
      q.close();
      closed += sorted;
      sorted = 0;
    } else {
      const auto slot = static_cast<std::uint16_t>(random() % kSlots);
      const auto at = std::find(model.begin(), model.end(), slot);
      if (at == model.end()) {
        calls[slot] = {random() % 3, random() % 50};
        q.push_back(slot, 0);
        model.push_back(slot);
      } else {
        const auto place = static_cast<std::size_t>(at - model.begin());
        q.remove(slot);
        model.erase(at);
        if (place < closed) {
          --closed;
        } else if (place < closed + sorted) {
          --sorted;
        }
      }
    }
    ASSERT_EQ(q.order(), model) << "operation " << i << ", seed " << unjam_test::base_seed();
    ASSERT_EQ(q.size(), model.size());
  }
  EXPECT_GT(of_many, 0) << "some were to stand behind those that are put in order";
}

TEST(AgreedOrder, WhoFollowsItsLikeIsKnown) {
  QueueWithLinks q(4);
  q.push_back(0, 7);
  q.push_back(1, 8);
  q.push_back(2, 8);
  EXPECT_FALSE(q.follows_its_like(0)) << "it is in front";
  EXPECT_FALSE(q.follows_its_like(1));
  EXPECT_TRUE(q.follows_its_like(2));
  q.remove(1);
  EXPECT_FALSE(q.follows_its_like(2));
}

TEST(Disorder, IsExpectedBehindSomeEndsAndForAWhile) {
  Disorder d;
  for (int i = 0; i < 100; ++i) d.note_end(false);
  EXPECT_FALSE(d.expected());
  d.note_end(true);
  EXPECT_FALSE(d.expected()) << "once is nothing";
  d.note_end(true);
  EXPECT_TRUE(d.expected());
  for (int i = 0; i < 1000; ++i) d.note_end(true);
  int in_order = 0;
  while (d.expected()) {
    d.note_end(false);
    ++in_order;
  }
  EXPECT_GE(in_order, 32);
  EXPECT_LE(in_order, 64) << "it is forgotten";
}

}  // namespace
}  // namespace unjam
