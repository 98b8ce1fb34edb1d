// A rank's messages to itself: whichever of the two calls comes first, whatever stands between
// them, what differs, what never comes, and what ends while one of them waits. (point_to_point_test
// has them among all other messages.)
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/job.h"

namespace unjam_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One call of a message of rank `me` to itself.
struct Own {
  unjamGroup_t group;
  int me;
  unjamRequest_t send(const char* key, const std::vector<std::int32_t>& x) const {
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamSend(group, key, x.data(), x.size(), UNJAM_INT32, me, nullptr, &q));
    return q;
  }
  unjamRequest_t recv(const char* key, std::vector<std::int32_t>& x) const {
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamRecv(group, key, x.data(), x.size(), UNJAM_INT32, me, nullptr, &q));
    return q;
  }
};

std::vector<std::int32_t> numbers(std::size_t count, std::int32_t from) {
  std::vector<std::int32_t> x(count);
  std::iota(x.begin(), x.end(), from);
  return x;
}

bool pending(unjamRequest_t q) {
  int done = 0;
  UNJAM_CHECK(unjamTest(q, &done));
  return done == 0;
}

// The n-th send under a key meets the n-th receive under it, in any order of the calls, beside
// other keys; in jobs of one rank, too, and in groups that are a part of the job.
TEST(OwnMessages, TheNthMeetsTheNth) {
  for (const int ranks : {1, 3}) {
    Job job(ranks);
    job.run([&](Rank& me) {
      std::vector<unjamGroup_t> groups = {me.all};
      if (ranks == 3 && me.rank != 1) {
        const int members[2] = {2, 0};
        groups.emplace_back();
        UNJAM_CHECK(unjamGroupCreate(me.context, members, 2, "two", &groups.back()));
      }
      std::mt19937_64 draw(mix(job.seed(), static_cast<std::uint64_t>(me.rank)));
      for (const unjamGroup_t group : groups) {
        int in_group = 0;
        UNJAM_CHECK(unjamGroupRank(group, &in_group));
        const Own own{group, in_group};
        constexpr int kKeys = 5, kUses = 6;
        struct Half {
          int key;
          bool sends;
        };
        std::vector<Half> order;
        for (int i = 0; i < kKeys * kUses; ++i) {
          order.push_back({i % kKeys, true});
          order.push_back({i % kKeys, false});
        }
        std::shuffle(order.begin(), order.end(), draw);
        std::vector<std::vector<std::int32_t>> out[kKeys], in[kKeys];
        for (int key = 0; key < kKeys; ++key) {
          for (int use = 0; use < kUses; ++use) {
            const std::size_t count = use == 2 ? 0 : use == 3 ? 200000 : 3;
            out[key].push_back(numbers(count, 1000 * key + use));
            in[key].emplace_back(count, -1);
          }
        }
        std::vector<unjamRequest_t> requests;
        std::size_t sent[kKeys] = {}, received[kKeys] = {};
        for (const auto& [key, sends] : order) {
          const std::string name = "k" + std::to_string(key);
          const auto k = static_cast<std::size_t>(key);
          requests.push_back(sends ? own.send(name.c_str(), out[k][sent[k]++])
                                   : own.recv(name.c_str(), in[k][received[k]++]));
        }
        std::shuffle(requests.begin(), requests.end(), draw);
        for (const unjamRequest_t q : requests) me.wait(q, "a message to itself");
        for (std::size_t key = 0; key < kKeys; ++key) {
          if (in[key] != out[key]) fail("a wrong number under key " + std::to_string(key));
        }
      }
    });
  }
}

// Neither is complete before the other is called; both are then, callbacks are run, and the key has
// been used once.
TEST(OwnMessages, BothAreCompleteTogether) {
  for (const bool send_first : {true, false}) {
    Job job(2);
    const Own own{job.all(1), 1};
    const std::vector<std::int32_t> out = numbers(1000, 7);
    std::vector<std::int32_t> in(1000);
    std::atomic<int> called{0};
    const auto call = [](unjamResult_t result, void* user) {
      if (result == UNJAM_SUCCESS) static_cast<std::atomic<int>*>(user)->fetch_add(1);
    };
    const unjamRequest_t first = send_first ? own.send("k", out) : own.recv("k", in);
    ASSERT_EQ(unjamOnComplete(first, call, &called), UNJAM_SUCCESS);
    EXPECT_EQ(unjamWait(first, 20000), UNJAM_ERROR_TIMEOUT);
    // What else this rank calls goes on.
    unjamRequest_t b[2] = {};
    for (const int r : {0, 1}) UNJAM_CHECK(unjamBarrier(job.all(r), "k", nullptr, &b[r]));
    for (const int r : {0, 1}) wait_ok(job.context(r), b[r], "a barrier");
    EXPECT_TRUE(pending(first));
    EXPECT_EQ(stats_of(job.context(1)).pending, 1u);
    const unjamRequest_t second = send_first ? own.recv("k", in) : own.send("k", out);
    ASSERT_EQ(unjamOnComplete(second, call, &called), UNJAM_SUCCESS);
    wait_ok(job.context(1), first, "the first call");
    wait_ok(job.context(1), second, "the second call");
    EXPECT_EQ(in, out);
    EXPECT_TRUE(eventually([&] { return called.load() == 2; }));
    EXPECT_EQ(stats_of(job.context(1)).pending, 0u);
  }
}

// Threads of which some send and some receive, without waiting for each other.
TEST(OwnMessages, FromManyThreads) {
  Job job(1);
  const Own own{job.all(0), 0};
  const int uses = kSanitized ? 50 : 400;
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const std::string key = "pair " + std::to_string(t / 2);
      for (int i = 0; i < uses; ++i) {
        std::vector<std::int32_t> x(1 + static_cast<std::size_t>(i % 7), t % 2 == 0 ? i : -1);
        unjamRequest_t q = t % 2 == 0 ? own.send(key.c_str(), x) : own.recv(key.c_str(), x);
        wait_ok(job.context(0), q, "a message to itself");
        if (x != std::vector<std::int32_t>(x.size(), i)) wrong.fetch_add(1);
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(wrong.load(), 0);
}

TEST(OwnMessages, WhatDiffersEndsBoth) {
  struct Case {
    std::size_t count;
    unjamDataType_t dtype;
    const char* match_text;
    const char* text;
  };
  for (const Case& c : {Case{4, UNJAM_FLOAT32, nullptr, "receives count=4, float32"},
                        Case{3, UNJAM_INT32, nullptr, "receives count=3, int32"},
                        Case{3, UNJAM_FLOAT32, "x", "receives count=3, float32 as 'x'"}}) {
    for (const bool send_first : {true, false}) {
      Job job(2);
      const unjamGroup_t g = job.all(0);
      unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
      options.match_text = c.match_text;
      float out[3] = {1, 2, 3}, in[4] = {9, 9, 9, 9};
      unjamRequest_t sent[2] = {}, received[2] = {};
      // Of the kind that comes first a second one, which waits behind, ends as well.
      const auto send = [&](int i) {
        return unjamSend(g, "k", out, 3, UNJAM_FLOAT32, 0, nullptr, &sent[i]);
      };
      const auto recv = [&](int i) {
        return unjamRecv(g, "k", in, c.count, c.dtype, 0, &options, &received[i]);
      };
      if (send_first) {
        UNJAM_CHECK(send(0));
        UNJAM_CHECK(send(1));
        UNJAM_CHECK(recv(0));
      } else {
        UNJAM_CHECK(recv(0));
        UNJAM_CHECK(recv(1));
        UNJAM_CHECK(send(0));
      }
      for (const unjamRequest_t q : {sent[0], received[0], send_first ? sent[1] : received[1]}) {
        const std::string text = wait_error(job.context(0), q, UNJAM_ERROR_MISMATCH, "a mismatch");
        EXPECT_TRUE(has(text, "the send from rank 0 to itself under key 'k'")) << text;
        EXPECT_TRUE(has(text, "sends count=3, float32")) << text;
        EXPECT_TRUE(has(text, c.text)) << text;
        EXPECT_TRUE(has(text, "a key (tag) of its own")) << text;
      }
      EXPECT_EQ(in[0], 9) << "nothing is received";
      EXPECT_EQ(send(0), UNJAM_ERROR_MISMATCH);
      EXPECT_TRUE(has(unjamGetLastError(), "sends from rank 0 to itself under key 'k'"))
          << unjamGetLastError();
      int ready = 0;
      EXPECT_EQ(unjamProbe(g, "k", 0, &ready), UNJAM_ERROR_MISMATCH);
      // Other keys go on, and collectives under this one.
      const Own own{g, 0};
      const std::vector<std::int32_t> x = numbers(5, 1);
      std::vector<std::int32_t> y(5);
      const unjamRequest_t q = own.send("other", x);
      wait_ok(job.context(0), own.recv("other", y), "recv");
      wait_ok(job.context(0), q, "send");
      unjamRequest_t b[2] = {};
      for (const int r : {0, 1}) UNJAM_CHECK(unjamBarrier(job.all(r), "k", nullptr, &b[r]));
      for (const int r : {0, 1}) wait_ok(job.context(r), b[r], "a barrier");
    }
  }
}

TEST(OwnMessages, WhatIsRefused) {
  Job job(2);
  const unjamGroup_t g = job.all(0);
  float x[8] = {};
  EXPECT_EQ(unjamSend(g, "k", nullptr, 1, UNJAM_FLOAT32, 0, nullptr, nullptr),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(unjamGetLastError(), "reads it")) << unjamGetLastError();
  EXPECT_EQ(unjamRecv(g, "k", nullptr, 1, UNJAM_FLOAT32, 0, nullptr, nullptr),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(unjamGetLastError(), "writes it")) << unjamGetLastError();
  EXPECT_EQ(stats_of(job.context(0)).submitted, 0u);
  // Buffers that overlap: the second call is refused, and the first goes on waiting.
  unjamRequest_t sent = nullptr, received = nullptr;
  UNJAM_CHECK(unjamSend(g, "k", x, 4, UNJAM_FLOAT32, 0, nullptr, &sent));
  EXPECT_EQ(unjamRecv(g, "k", x + 1, 4, UNJAM_FLOAT32, 0, nullptr, &received),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(unjamGetLastError(), "overlap")) << unjamGetLastError();
  EXPECT_TRUE(pending(sent));
  UNJAM_CHECK(unjamRecv(g, "k", x, 4, UNJAM_FLOAT32, 0, nullptr, &received));  // the same buffer
  wait_ok(job.context(0), sent, "send");
  wait_ok(job.context(0), received, "recv");
}

TEST(OwnMessages, AProbeSeesASendThatWaits) {
  Job job(1);
  const Own own{job.all(0), 0};
  const auto probe = [&](const char* key) {
    int ready = 7;
    UNJAM_CHECK(unjamProbe(job.all(0), key, 0, &ready));
    return ready;
  };
  const std::vector<std::int32_t> out = numbers(2, 1);
  std::vector<std::int32_t> in(2);
  EXPECT_EQ(probe("k"), 0);
  const unjamRequest_t sent = own.send("k", out);
  EXPECT_EQ(probe("k"), 1);
  EXPECT_EQ(probe("other"), 0);
  wait_ok(job.context(0), own.recv("k", in), "recv");
  wait_ok(job.context(0), sent, "send");
  EXPECT_EQ(probe("k"), 0);
  const unjamRequest_t received = own.recv("k", in);
  EXPECT_EQ(probe("k"), 0) << "a receive is nothing to receive";
  wait_ok(job.context(0), own.send("k", out), "send");
  wait_ok(job.context(0), received, "recv");
}

// A call whose other one never comes is told of, and ends: at the time limit, with its context, and
// not with its group, which it keeps.
TEST(OwnMessages, OneThatIsNotMet) {
  unjamConfig_t config = default_config();
  config.timeout_ms = 300;
  Job job(2, config);
  const Own own{job.all(1), 1};
  std::vector<std::int32_t> x(3);
  unjamRequest_t q = own.recv("k", x);
  EXPECT_TRUE(has(explain(job.context(0)),
                  "send_recv(count=3, int32, source=1, destination=1) without its send"))
      << explain(job.context(0));
  std::string text = wait_error(job.context(1), q, UNJAM_ERROR_TIMEOUT, "a time limit");
  EXPECT_TRUE(has(text, "the send from rank 1 to itself under key 'k'")) << text;
  EXPECT_TRUE(has(text, "rank 1 has not called the send that meets it")) << text;
  q = own.send("k2", x);
  text = wait_error(job.context(1), q, UNJAM_ERROR_TIMEOUT, "a time limit");
  EXPECT_TRUE(has(text, "rank 1 has not called the receive that meets it")) << text;
  EXPECT_EQ(unjamRecv(job.all(1), "k2", x.data(), 3, UNJAM_INT32, 1, nullptr, nullptr),
            UNJAM_ERROR_TIMEOUT);
}

TEST(OwnMessages, EndsWithItsContextAndNotBefore) {
  Job job(2);
  const int members[2] = {0, 1};
  unjamGroup_t g = nullptr;
  ASSERT_EQ(unjamGroupCreate(job.context(0), members, 2, "g", &g), UNJAM_SUCCESS);
  const Own own{g, 0};
  const std::vector<std::int32_t> x(3);
  const unjamRequest_t a = own.send("a", x), b = own.send("a", x);
  EXPECT_EQ(unjamGroupDestroy(g), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_TRUE(has(unjamGetLastError(), "sends from rank 0 to itself under key 'a' of group 'g'"))
      << unjamGetLastError();
  ASSERT_EQ(unjamAbort(job.context(0)), UNJAM_SUCCESS);
  for (const unjamRequest_t q : {a, b}) wait_error(job.context(0), q, UNJAM_ERROR_ABORTED, "abort");
}

// A member that is gone takes no message to oneself along.
TEST(OwnMessages, GoOnWithoutTheOthers) {
  Job job(2);
  const Own own{job.all(0), 0};
  const std::vector<std::int32_t> out = numbers(3, 4);
  std::vector<std::int32_t> in(3);
  const unjamRequest_t sent = own.send("k", out);
  ASSERT_EQ(unjamAbort(job.context(1)), UNJAM_SUCCESS);
  wait_ok(job.context(0), own.recv("k", in), "recv");
  wait_ok(job.context(0), sent, "send");
  EXPECT_EQ(in, out);
}

// Far more keys than are kept; forgotten ones come back with their numbering.
TEST(OwnMessages, ManyKeysComeBack) {
  unjamConfig_t config = default_config();
  config.max_active_keys = 4;
  Job job(1, config);
  const Own own{job.all(0), 0};
  const int keys = kSanitized ? 300 : 3000;
  for (int i = 0; i < 2 * keys; ++i) {
    const std::string key = std::to_string(i % keys);
    const std::vector<std::int32_t> out = {i};
    std::vector<std::int32_t> in = {-1};
    const unjamRequest_t first =
        i % 2 == 0 ? own.send(key.c_str(), out) : own.recv(key.c_str(), in);
    wait_ok(job.context(0), i % 2 == 0 ? own.recv(key.c_str(), in) : own.send(key.c_str(), out),
            "");
    wait_ok(job.context(0), first, key);
    ASSERT_EQ(in, out);
  }
  // Calls that wait count as keys under way.
  std::vector<unjamRequest_t> waiting;
  const std::vector<std::int32_t> x = {1};
  for (int i = 0; i < 4; ++i) waiting.push_back(own.send(std::to_string(i).c_str(), x));
  EXPECT_EQ(unjamSend(job.all(0), "one more", x.data(), 1, UNJAM_INT32, 0, nullptr, nullptr),
            UNJAM_ERROR_RESOURCES);
  std::vector<std::int32_t> y(1);
  for (int i = 0; i < 4; ++i) {
    wait_ok(job.context(0), own.recv(std::to_string(i).c_str(), y), "recv");
    wait_ok(job.context(0), waiting[static_cast<std::size_t>(i)], "send");
  }
}

}  // namespace
}  // namespace unjam_test
