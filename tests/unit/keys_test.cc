// What a day of use leaves behind: ten thousand keys, destroyed groups, mismatches. Memory is
// bounded by what unjamInfo reports, results are right, and a use is matched with the peers' use of
// the same number after a key was forgotten.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/job.h"
#include "tests/support/json.h"

namespace unjam_test {
namespace {

// A variable of the environment, as long as this lives.
class Variable {
 public:
  Variable(const char* name, int value) : name_(name) {
    setenv(name, std::to_string(value).c_str(), 1);
  }
  ~Variable() { unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

Json info_of(unjamContext_t context) { return JsonReader::parse(info(context)); }

struct Held {
  double arena = 0;       // bytes
  double keys = 0;        // bytes
  double records = 0;     // bytes
  double objects = 0;     // keys held in full
  double touched = 0;     // connectors, the most to one peer
  double taken_over = 0;  // over all peers
  double abandoned = 0;
};

Held held(unjamContext_t context) {
  const Json i = info_of(context);
  Held h;
  h.arena = i["memory"]["arena_bytes_committed"].number;
  h.keys = i["memory"]["keys_bytes"].number;
  h.records = i["memory"]["key_records_bytes"].number;
  for (const char* name : {"busy", "lingering", "idle", "registered", "doomed", "leaving"}) {
    h.objects += i["held"][std::string("keys_") + name].number;
  }
  for (const Json& peer : i["peers"].array) {
    h.touched = std::max(h.touched, peer["connectors_touched"].number);
    h.taken_over += peer["connectors_taken_over"].number;
    h.abandoned += peer["connectors_abandoned"].number;
  }
  return h;
}

struct Call {
  std::size_t group = 0;
  int key = 0;
  int n = 0;
  bool broadcast = false;
  int root = 0;
};

std::int32_t word(const Call& c, int member, int i) {
  return static_cast<std::int32_t>(mix(static_cast<std::uint64_t>(c.key) << 32 |
                                       static_cast<std::uint32_t>(c.n * 1000 + member * 100 + i)) &
                                   0xffff);
}

// Calls in windows of `window` different keys: new ones, and some used before.
std::vector<std::vector<Call>> make_calls(std::size_t groups, int keys, std::size_t window,
                                          std::mt19937_64& random) {
  std::vector<std::vector<Call>> windows;
  std::vector<int> uses(static_cast<std::size_t>(keys), 0);
  for (int next = 0; next < keys;) {
    std::vector<Call> calls;
    std::vector<int> taken;
    while (calls.size() < window && next < keys) {
      const bool again = next > 10 && random() % 3 == 0;
      const int k = again ? static_cast<int>(random() % static_cast<std::uint64_t>(next)) : next++;
      if (std::find(taken.begin(), taken.end(), k) != taken.end()) continue;
      taken.push_back(k);
      Call c;
      c.group = static_cast<std::size_t>(k) % groups;
      c.key = k;
      c.n = uses[static_cast<std::size_t>(k)]++;
      c.broadcast = random() % 3 == 0;
      c.root = static_cast<int>(random() % 2);
      calls.push_back(c);
    }
    windows.push_back(std::move(calls));
  }
  return windows;
}

const std::vector<std::vector<int>> kGroups = {{0, 1, 2, 3}, {0, 1}, {2, 0, 3}, {3, 1}, {1, 2, 0}};

void day_of_use(const unjamConfig_t& config, std::uint64_t seed) {
  const int keys = kSanitized ? 1500 : 10000, early = keys / (kSanitized ? 2 : 5);
  const int idle_keys = kSanitized ? 64 : 512;
  const Variable limit("UNJAM_IDLE_KEYS", idle_keys);
  std::mt19937_64 random(seed);
  const auto windows = make_calls(kGroups.size(), keys, 40, random);
  Job job(4, config, seed);
  std::vector<Held> first(4);
  const bool ok = job.run([&](Rank& me) {
    std::mt19937_64 mine(mix(seed, static_cast<std::uint64_t>(me.rank)));
    std::vector<unjamGroup_t> groups(kGroups.size());
    for (std::size_t g = 0; g < kGroups.size(); ++g) {
      const auto& m = kGroups[g];
      if (std::find(m.begin(), m.end(), me.rank) == m.end()) continue;
      UNJAM_CHECK(unjamGroupCreate(me.context, m.data(), static_cast<int>(m.size()),
                                   std::to_string(g).c_str(), &groups[g]));
    }
    constexpr int kCount = 50;
    for (const auto& window : windows) {
      std::vector<std::size_t> order;
      for (std::size_t i = 0; i < window.size(); ++i) {
        if (groups[window[i].group] != nullptr) order.push_back(i);
      }
      std::shuffle(order.begin(), order.end(), mine);
      std::vector<std::vector<std::int32_t>> in, out;
      std::vector<unjamRequest_t> requests(order.size());
      for (std::size_t i = 0; i < order.size(); ++i) {
        const Call& c = window[order[i]];
        int member = 0;
        UNJAM_CHECK(unjamGroupRank(groups[c.group], &member));
        in.emplace_back(kCount);
        out.emplace_back(kCount);
        for (int e = 0; e < kCount; ++e) in[i][static_cast<std::size_t>(e)] = word(c, member, e);
        const std::string key = "key " + std::to_string(c.key);
        UNJAM_CHECK(c.broadcast
                        ? unjamBroadcast(groups[c.group], key.c_str(), in[i].data(), out[i].data(),
                                         kCount, UNJAM_INT32, c.root, nullptr, &requests[i])
                        : unjamAllReduce(groups[c.group], key.c_str(), in[i].data(), out[i].data(),
                                         kCount, UNJAM_INT32, UNJAM_SUM, nullptr, &requests[i]));
      }
      for (std::size_t i = 0; i < order.size(); ++i) {
        const Call& c = window[order[i]];
        me.wait(requests[i], "key " + std::to_string(c.key) + " use " + std::to_string(c.n));
        const int members = static_cast<int>(kGroups[c.group].size());
        for (int e = 0; e < kCount; ++e) {
          std::int32_t expected = 0;
          for (int m = 0; m < members; ++m) {
            if (!c.broadcast || m == c.root) expected += word(c, m, e);
          }
          if (out[i][static_cast<std::size_t>(e)] != expected) {
            fail("key " + std::to_string(c.key) + " use " + std::to_string(c.n) + ": wrong data");
          }
        }
      }
      Held& h = first[static_cast<std::size_t>(me.rank)];
      if (h.arena == 0 && window.back().key >= early) h = held(me.context);
    }
  });
  if (!ok) return;
  for (int r = 0; r < 4; ++r) {
    const Held &a = first[static_cast<std::size_t>(r)], b = held(job.context(r));
    std::printf(
        "  rank %d: after %d keys arena %.2f MB, keys %.0f (%.0f kB), records %.0f kB, at most "
        "%.0f "
        "connectors a peer; after %d keys %.2f MB, %.0f (%.0f kB), %.0f kB, %.0f\n",
        r, early, a.arena / 1e6, a.objects, a.keys / 1e3, a.records / 1e3, a.touched, keys,
        b.arena / 1e6, b.objects, b.keys / 1e3, b.records / 1e3, b.touched);
    // What grows with the number of keys is a record each.
    EXPECT_LE(b.records, 150.0 * keys);
    // What completes in one go lingers until somebody looks.
    EXPECT_LE(b.objects, idle_keys + 300) << "rank " << r;
    EXPECT_LE(b.keys, (idle_keys + 300) * 3000.0) << "rank " << r;
    // 64, and those that were busy when one was wanted; far from the 1024 that there are.
    EXPECT_LE(b.touched, 192) << "rank " << r;
    EXPECT_LE(b.arena, a.arena * 1.25 + 2e6) << "rank " << r;
    EXPECT_EQ(b.abandoned, 0);
  }
}

TEST(Keys, TenThousandLeaveBoundedMemory) { day_of_use(default_config(), base_seed()); }

TEST(Keys, TenThousandUnderDelays) {
  unjamConfig_t config = default_config();
  config.delay_seed = mix(base_seed(), 1) | 1;
  config.delay_max_us = 5;
  config.lanes = 2;
  day_of_use(config, mix(base_seed(), 1));
}

// Runs one all-reduce on every rank, and checks it.
void all_reduce(Rank& me, unjamGroup_t group, const std::string& key, std::int32_t value,
                std::int32_t expected) {
  std::int32_t x = value;
  unjamRequest_t q = nullptr;
  UNJAM_CHECK(unjamAllReduce(group, key.c_str(), &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
  me.wait(q, key);
  if (x != expected) fail(key + ": " + std::to_string(x));
}

TEST(Keys, ASteadyWorkingSetTakesNothingOver) {
  Job job(2);
  for (const int keys : {60, 100, kSanitized ? 120 : 300}) {
    const auto rounds = [&](int count) {
      return job.run([&](Rank& me) {
        for (int round = 0; round < count; ++round) {
          for (int k = 0; k < keys; ++k) {
            all_reduce(me, me.all, std::to_string(keys) + "/" + std::to_string(k), me.rank + k,
                       2 * k + 1);
          }
        }
      });
    };
    ASSERT_TRUE(rounds(6));
    const Held before = held(job.context(0));
    ASSERT_TRUE(rounds(4));
    const Held after = held(job.context(0));
    EXPECT_EQ(before.taken_over, after.taken_over) << keys << " keys in turn";
    EXPECT_EQ(before.touched, after.touched);
    EXPECT_LE(after.touched, 1.5 * (60 + 100 + 300));
  }
}

// A root runs ahead of a rank that has forgotten the key.
TEST(Keys, AForgottenKeyGoesOnWhereItWas) {
  const Variable limit("UNJAM_IDLE_KEYS", 0);
  Job job(2);
  const auto broadcast = [](Rank& me, int n) {
    std::int32_t x = me.rank == 0 ? 1000 + n : -1;
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamBroadcast(me.all, "k", &x, &x, 1, UNJAM_INT32, 0, nullptr, &q));
    me.wait(q, "k");
    if (x != 1000 + n) fail("use " + std::to_string(n) + ": " + std::to_string(x));
  };
  const auto others = [](Rank& me, const char* prefix) {
    for (int i = 0; i < 100; ++i) all_reduce(me, me.all, prefix + std::to_string(i), 1, 2);
  };
  ASSERT_TRUE(job.run([&](Rank& me) {
    broadcast(me, 0);
    others(me, "a");
    if (me.rank == 0) {
      for (int n = 1; n < 4; ++n) broadcast(me, n);  // nobody waits for rank 1
    }
    others(me, "b");
  }));
  for (int r = 0; r < 2; ++r) {
    const Json i = info_of(job.context(r));
    EXPECT_GE(i["held"]["key_records"].integer(), 50);
    const auto& keys = i["keys"].array;
    const auto k = std::find_if(keys.begin(), keys.end(),
                                [](const Json& key) { return key["key"].string == "k"; });
    if (r == 1) {
      EXPECT_EQ(k, keys.end()) << "the key was not forgotten";
      continue;
    }
    ASSERT_NE(k, keys.end()) << "a key with undelivered data was forgotten";
    EXPECT_EQ((*k)["state"].string, "lingering");
    EXPECT_EQ((*k)["undelivered_to"].size(), 1u);
  }
  ASSERT_TRUE(job.run([&](Rank& me) {
    for (int n = 1; n < 4 && me.rank == 1; ++n) broadcast(me, n);
    others(me, "c");
    broadcast(me, 4);
    others(me, "a");
    broadcast(me, 5);
  }));
}

TEST(Keys, DestroyedGroupsGiveTheirMemoryBack) {
  Job job(3);
  const int groups = kSanitized ? 20 : 200;
  ASSERT_TRUE(job.run([&](Rank& me) {
    for (int g = 0; g < groups; ++g) {
      unjamGroup_t group = nullptr;
      UNJAM_CHECK(unjamGroupCreate(me.context, nullptr, 0, "short-lived", &group));
      unjamCollective_t registered = nullptr;
      UNJAM_CHECK(
          unjamRegisterAllReduce(group, "registered", UNJAM_INT32, UNJAM_SUM, 0, &registered));
      for (int k = 0; k < 20; ++k) all_reduce(me, group, std::to_string(k), g + me.rank, 3 * g + 3);
      // A root that leaves data which the others never ask for.
      std::int32_t x = 0;
      unjamRequest_t q = nullptr;
      if (me.rank == 0) {
        UNJAM_CHECK(unjamBroadcast(group, "unread", &x, &x, 1, UNJAM_INT32, 0, nullptr, &q));
        me.wait(q, "unread");
      }
      UNJAM_CHECK(unjamGroupDestroy(group));
      if (unjamRun(registered, &x, &x, 1, nullptr, nullptr, &q) != UNJAM_ERROR_INVALID_USAGE) {
        fail("a destroyed group's collective was run");
      }
    }
  }));
  // Once the others have destroyed theirs too, and this rank does something.
  EXPECT_TRUE(eventually([&] {
    return job.run([](Rank& me) { all_reduce(me, me.all, "k", 1, 3); }) &&
           info_of(job.context(0))["held"]["groups"].integer() == 1;
  })) << info(job.context(0)).substr(0, 4000);
  const Held h = held(job.context(0));
  EXPECT_LE(h.objects, 1);
  EXPECT_LE(h.touched, 100);
  EXPECT_EQ(h.abandoned, 0);
}

// Each leaves slices that nobody will read. Without an end to them, the 32 connectors that 16
// active keys have would be gone soon, and calls refused.
TEST(Keys, MismatchesCostNoConnectorForGood) {
  unjamConfig_t config = default_config();
  config.max_active_keys = 16;
  config.stall_ms = 20;
  Job job(3, config);
  const int mismatches = kSanitized ? 60 : 300;
  ASSERT_TRUE(job.run([&](Rank& me) {
    for (int i = 0; i < mismatches; ++i) {
      const std::string key = "wrong " + std::to_string(i);
      std::vector<std::int32_t> x(200, 1);
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, key.c_str(), x.data(), x.data(),
                                 me.rank == i % 3 ? 100 : 200, UNJAM_INT32, UNJAM_SUM, nullptr,
                                 &q));
      wait_error(me.context, q, UNJAM_ERROR_MISMATCH, key);
      all_reduce(me, me.all, "right", i + me.rank, 3 * i + 3);
      // It stays out of use, also when it is but a record.
      if (i >= 40) {
        const std::string old = "wrong " + std::to_string(i - 40);
        const unjamResult_t code = unjamAllReduce(me.all, old.c_str(), x.data(), x.data(), 200,
                                                  UNJAM_INT32, UNJAM_SUM, nullptr, nullptr);
        if (code != UNJAM_ERROR_MISMATCH) fail(old + " was accepted: " + code_text(code));
      }
    }
  }));
  for (int r = 0; r < 3; ++r) {
    const Held h = held(job.context(r));
    EXPECT_LE(h.touched, 32);
    EXPECT_EQ(h.abandoned, 0);
    EXPECT_LE(h.objects, 100);
  }
}

}  // namespace
}  // namespace unjam_test
