// Sends, receives, probes and barriers: matched by pair, direction, key and use, in any order among
// each other and with collectives; what is refused, what disagrees, who dies, what is told of it.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/exchange.h"
#include "tests/support/job.h"
#include "tests/support/json.h"
#include "tests/support/processes.h"

namespace unjam_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// One send and its receive. Every byte of every element counts, whatever the type.
struct Message {
  int from = 0, to = 0;
  std::string key;
  std::size_t count = 0;
  unjamDataType_t dtype = UNJAM_UINT8;
  std::uint64_t seed = 0;
  Guarded out, in;

  std::size_t bytes() const { return count * static_cast<std::size_t>(type_info(dtype).bytes); }
  unsigned char byte(std::size_t i) const {
    return static_cast<unsigned char>(mix(seed, i / 8) >> (8 * (i % 8)));
  }
  void prepare() {
    const auto element = static_cast<std::size_t>(type_info(dtype).bytes);
    out.allocate(bytes(), element * (seed % 16));
    in.allocate(bytes(), element * (seed / 16 % 16));
    for (std::size_t i = 0; i < bytes(); ++i) out.data()[i] = byte(i);
    std::memset(in.data(), ~byte(0), bytes());
  }
  unjamResult_t send(unjamGroup_t group, unjamRequest_t* request) {
    return unjamSend(group, key.c_str(), out.data(), count, dtype, to, nullptr, request);
  }
  unjamResult_t receive(unjamGroup_t group, unjamRequest_t* request) {
    return unjamRecv(group, key.c_str(), in.data(), count, dtype, from, nullptr, request);
  }
  std::string text() const {
    return std::to_string(from) + " -> " + std::to_string(to) + " key " + key + " " +
           type_info(dtype).name + " count " + std::to_string(count);
  }
  void check() const {
    if (!in.guards_intact() || !out.guards_intact()) fail(text() + ": a guard was hit");
    for (std::size_t i = 0; i < bytes(); ++i) {
      if (in.data()[i] != byte(i)) fail(text() + ": byte " + std::to_string(i) + " is wrong");
      if (out.data()[i] != byte(i)) fail(text() + ": the input was written to");
    }
  }
};

// Submits all of a rank's part of the messages, keys in an order of its own (the uses of one key
// stay in order), then waits for all in yet another one. `more` submits something else now and
// then; when it is told that these are the last ones, all of it.
using More = std::function<void(std::mt19937_64&, std::vector<unjamRequest_t>&, bool last)>;
void exchange(Rank& me, unjamGroup_t group, int rank, std::vector<Message>& messages,
              std::uint64_t seed, const More& more = {}) {
  struct Part {
    std::size_t message;
    bool sends;
  };
  std::map<std::string, std::vector<Part>> channels;  // of this rank
  for (std::size_t i = 0; i < messages.size(); ++i) {
    const Message& m = messages[i];
    const std::string name = std::to_string(m.from) + ">" + std::to_string(m.to) + ">" + m.key;
    if (m.from == rank) channels[name + " out"].push_back({i, true});
    if (m.to == rank) channels[name + " in"].push_back({i, false});
  }
  std::vector<std::vector<Part>*> order;
  for (auto& [name, uses] : channels) {
    for (std::size_t i = 0; i < uses.size(); ++i) order.push_back(&uses);
    std::reverse(uses.begin(), uses.end());
  }
  std::mt19937_64 random(mix(seed, static_cast<std::uint64_t>(me.rank)));
  std::shuffle(order.begin(), order.end(), random);
  std::vector<unjamRequest_t> requests;
  for (auto* uses : order) {
    if (more && random() % 8 == 0) more(random, requests, false);
    Message& m = messages[uses->back().message];
    const bool sends = uses->back().sends;
    uses->pop_back();
    requests.emplace_back();
    const unjamResult_t code =
        sends ? m.send(group, &requests.back()) : m.receive(group, &requests.back());
    if (code != UNJAM_SUCCESS) fail(m.text() + ": " + unjamGetLastError());
  }
  if (more) more(random, requests, true);
  std::shuffle(requests.begin(), requests.end(), random);
  for (const unjamRequest_t q : requests) me.wait(q, "a send, a receive or a collective");
}

struct Setting {
  const char* name;
  void (*apply)(unjamConfig_t&);
};
void PrintTo(const Setting& s, std::ostream* out) { *out << s.name; }

class PointToPoint : public testing::TestWithParam<Setting> {
 protected:
  unjamConfig_t config() const {
    unjamConfig_t c = default_config();
    GetParam().apply(c);
    return c;
  }
};

const Setting kSettings[] = {
    {"Default", [](unjamConfig_t&) {}},
    {"Direct", [](unjamConfig_t& c) { c.algorithm = 1; }},
    {"ThreeLanes", [](unjamConfig_t& c) { c.lanes = 3; }},
    {"PriorityOrder", [](unjamConfig_t& c) { c.order = UNJAM_ORDER_PRIORITY; }},
    {"TinySlots",
     [](unjamConfig_t& c) {
       c.guaranteed_slots = 2, c.guaranteed_slot_bytes = 256, c.pool_slots = UINT32_MAX;
     }},
    {"LanesThreadsDelays",
     [](unjamConfig_t& c) {
       c.lanes = 2, c.block_threads = 2, c.delay_seed = 77, c.delay_max_us = 20;
       c.quantum_slices = 1, c.residency_us = 50;
     }},
};

// Sizes about the boundaries of vectors, slots (8 KiB), packets (half a slot), all guaranteed slots
// (40 KiB) and borrowed ones, in every type, between all pairs, both directions at once, and to
// oneself.
TEST_P(PointToPoint, EveryTypeAndSize) {
  const int ranks = 3;
  Job job(ranks, config());
  std::vector<std::size_t> sizes = {0,    1,    3,    7,     64,    255,   4095,  4096,  4097,
                                    8191, 8192, 8193, 32768, 40959, 40960, 40961, 300007};
  if (kSanitized) sizes = {0, 1, 7, 4097, 8192, 40961};
  std::vector<Message> messages;
  for (int t = 0; t < kNumDTypes; ++t) {
    for (std::size_t s = 0; s < sizes.size(); ++s) {
      for (int from = 0; from < ranks; ++from) {
        // All pairs in turn: each rank sends each size in each type to one rank.
        const int to = (from + static_cast<int>(s + static_cast<std::size_t>(t))) % ranks;
        Message m;
        m.from = from, m.to = to;
        m.key = "t" + std::to_string(t) + "s" + std::to_string(s % 4);
        m.dtype = static_cast<unjamDataType_t>(t);
        const auto element = static_cast<std::size_t>(type_info(m.dtype).bytes);
        m.count = sizes[s] < 1000 ? sizes[s] : sizes[s] / element + (s % 2);
        m.seed = mix(job.seed(), messages.size());
        messages.push_back(std::move(m));
      }
    }
  }
  for (Message& m : messages) m.prepare();
  const bool ok =
      job.run([&](Rank& me) { exchange(me, me.all, me.rank, messages, mix(job.seed(), 1)); });
  if (!ok) return;
  job.run([&](Rank& me) {
    if (me.rank == 0) {
      for (const Message& m : messages) m.check();
    }
  });
}

// Many tags, several uses of each, all pairs, both directions, oneself, crossing with collectives
// and barriers under the very same keys, every rank in an order of its own.
TEST_P(PointToPoint, AnyOrderAmongCollectives) {
  for (std::uint64_t round = 0; round < (kSanitized ? 1 : 3); ++round) {
    const int ranks = 4;
    Job job(ranks, config());
    std::mt19937_64 draw(mix(job.seed(), round));
    std::vector<Message> messages;
    for (int from = 0; from < ranks; ++from) {
      for (int to = 0; to < ranks; ++to) {
        for (int tag = 0; tag < (kSanitized ? 6 : 20); ++tag) {
          const std::size_t uses = 1 + draw() % 3;
          for (std::size_t n = 0; n < uses; ++n) {
            Message m;
            m.from = from, m.to = to;
            m.key = "k" + std::to_string(tag);
            m.dtype = static_cast<unjamDataType_t>(draw() % kNumDTypes);
            m.count = draw() % 4 == 0 ? draw() % 20000 : draw() % 50;
            m.seed = draw();
            messages.push_back(std::move(m));
          }
        }
      }
    }
    for (Message& m : messages) m.prepare();
    constexpr int kCollectives = 12;
    std::vector<std::unique_ptr<Exchange>> collectives;
    for (int i = 0; i < kCollectives; ++i) {
      Spec s;
      s.kind = static_cast<unjamKind_t>(i % kNumKinds);
      s.count = draw() % 3000;
      s.root = static_cast<int>(draw() % ranks);
      s.seed = draw();
      collectives.push_back(std::make_unique<Exchange>(s, ranks));
    }
    const bool ok = job.run([&](Rank& me) {
      // One collective a key, scattered among the messages.
      std::vector<std::size_t> left(collectives.size());
      for (std::size_t i = 0; i < left.size(); ++i) left[i] = i;
      const More more = [&](std::mt19937_64& random, std::vector<unjamRequest_t>& requests,
                            bool last) {
        while (!left.empty()) {
          std::swap(left[random() % left.size()], left.back());
          const std::size_t i = left.back();
          left.pop_back();
          requests.emplace_back();
          UNJAM_CHECK(collectives[i]->submit(me.rank, me.all, ("k" + std::to_string(i)).c_str(),
                                             nullptr, &requests.back()));
          if (!last) break;
        }
      };
      exchange(me, me.all, me.rank, messages, mix(job.seed(), round), more);
    });
    if (!ok) return;
    for (const auto& e : collectives) EXPECT_EQ(e->check(), "") << job.where();
    job.run([&](Rank& me) {
      if (me.rank == 0) {
        for (const Message& m : messages) m.check();
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Settings, PointToPoint, testing::ValuesIn(kSettings),
                         [](const auto& info) { return std::string(info.param.name); });

// Larger than all slots: neither send can complete before its receive runs.
TEST(SendRecv, BothDirectionsAtOnceUnderOneKey) {
  Job job(2);
  job.run([&](Rank& me) {
    std::vector<std::int32_t> out(1 << 20), in(1 << 20, -1);
    for (std::size_t i = 0; i < out.size(); ++i) {
      out[i] = static_cast<std::int32_t>(i) * (me.rank + 1);
    }
    unjamRequest_t sent = nullptr, received = nullptr;
    UNJAM_CHECK(
        unjamSend(me.all, "", out.data(), out.size(), UNJAM_INT32, 1 - me.rank, nullptr, &sent));
    UNJAM_CHECK(
        unjamRecv(me.all, "", in.data(), in.size(), UNJAM_INT32, 1 - me.rank, nullptr, &received));
    me.wait(sent, "send");
    me.wait(received, "recv");
    for (std::size_t i = 0; i < in.size(); ++i) {
      if (in[i] != static_cast<std::int32_t>(i) * (2 - me.rank)) fail("wrong element");
    }
  });
}

// Groups of the same members are apart, by name and by how often they were made; ranks are those of
// the group, whose order is not the job's; a larger group's pairs are apart from both.
TEST(SendRecv, GroupsWithTheSameMembers) {
  Job job(3);
  job.run([&](Rank& me) {
    if (me.rank == 1) return;
    const int pair[2] = {2, 0};
    std::vector<unjamGroup_t> groups(3);
    UNJAM_CHECK(unjamGroupCreate(me.context, pair, 2, "a", &groups[0]));
    UNJAM_CHECK(unjamGroupCreate(me.context, pair, 2, "a", &groups[1]));
    UNJAM_CHECK(unjamGroupCreate(me.context, pair, 2, "b", &groups[2]));
    groups.push_back(me.all);
    std::vector<std::int64_t> values(8, -1);
    std::vector<unjamRequest_t> requests;
    // World rank 2 (rank 0 of the pair) sends; 0 receives, in the opposite order of groups.
    for (std::size_t i = 0; i < groups.size(); ++i) {
      const std::size_t g = me.rank == 2 ? i : groups.size() - 1 - i;
      const bool all = groups[g] == me.all;
      requests.emplace_back();
      if (me.rank == 2) {
        values[g] = static_cast<std::int64_t>(100 + g);
        UNJAM_CHECK(unjamSend(groups[g], "k", &values[g], 1, UNJAM_INT64, all ? 0 : 1, nullptr,
                              &requests.back()));
      } else {
        UNJAM_CHECK(unjamRecv(groups[g], "k", &values[g], 1, UNJAM_INT64, all ? 2 : 0, nullptr,
                              &requests.back()));
      }
    }
    for (const unjamRequest_t q : requests) me.wait(q, "of a group");
    for (std::size_t g = 0; g < groups.size(); ++g) {
      if (values[g] != static_cast<std::int64_t>(100 + g)) fail("groups were mixed up");
    }
  });
}

// Far more tags than keys that are kept: forgotten ones come back with their numbering.
TEST(SendRecv, ManyTagsComeBack) {
  Job job(2);
  const int tags = kSanitized ? 300 : 3000;
  job.run([&](Rank& me) {
    for (int round = 0; round < 2; ++round) {
      for (int tag = 0; tag < tags; ++tag) {
        std::int32_t x = me.rank == 0 ? 2 * tag + round : -1;
        const std::string key = "tag " + std::to_string(tag);
        unjamRequest_t q = nullptr;
        if (me.rank == 0) {
          UNJAM_CHECK(unjamSend(me.all, key.c_str(), &x, 1, UNJAM_INT32, 1, nullptr, &q));
        } else {
          UNJAM_CHECK(unjamRecv(me.all, key.c_str(), &x, 1, UNJAM_INT32, 0, nullptr, &q));
        }
        me.wait(q, key);
        if (x != 2 * tag + round) fail("a wrong message under " + key);
        // A sender that is far ahead runs out of room for messages that nobody has taken.
        if (tag % 256 != 255) continue;
        UNJAM_CHECK(unjamBarrier(me.all, "so far", nullptr, &q));
        me.wait(q, "so far");
      }
    }
  });
}

TEST(SendRecv, WhatIsRefused) {
  Job job(3);
  unjamGroup_t g = job.all(1);
  double x[2] = {0, 0};
  const auto send = [&](const void* p, std::size_t n, unjamDataType_t t, int peer) {
    return unjamSend(g, "k", p, n, t, peer, nullptr, nullptr);
  };
  const auto recv = [&](void* p, std::size_t n, unjamDataType_t t, int peer) {
    return unjamRecv(g, "k", p, n, t, peer, nullptr, nullptr);
  };
  int ready = 7;
  for (const int peer : {-1, 3}) {
    const char* why = "the group has ranks 0 to 2";
    EXPECT_EQ(send(x, 1, UNJAM_FLOAT64, peer), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(unjamGetLastError(), why)) << unjamGetLastError();
    EXPECT_EQ(recv(x, 1, UNJAM_FLOAT64, peer), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(unjamGetLastError(), why)) << unjamGetLastError();
    EXPECT_EQ(unjamProbe(g, "k", peer, &ready), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(unjamGetLastError(), why)) << unjamGetLastError();
  }
  EXPECT_EQ(unjamProbe(g, "k", 0, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(send(nullptr, 1, UNJAM_FLOAT64, 0), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(unjamGetLastError(),
                  "rank 1's part of send_recv(count=1, float64, source=1, destination=0) reads it"))
      << unjamGetLastError();
  EXPECT_EQ(recv(nullptr, 1, UNJAM_FLOAT64, 2), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(has(unjamGetLastError(), "source=2, destination=1) writes it"));
  EXPECT_EQ(send(reinterpret_cast<char*>(x) + 1, 1, UNJAM_FLOAT64, 0),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(recv(reinterpret_cast<char*>(x) + 4, 1, UNJAM_FLOAT64, 0),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(send(x, 1, static_cast<unjamDataType_t>(99), 0), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(send(x, SIZE_MAX / 4, UNJAM_FLOAT64, 0), UNJAM_ERROR_INVALID_ARGUMENT);
  unjamCollective_t c = nullptr;
  for (const unjamKind_t kind : {UNJAM_SEND_RECV, UNJAM_BARRIER}) {
    EXPECT_EQ(unjamRegister(g, "r", kind, UNJAM_FLOAT32, UNJAM_SUM, 0, 0, &c),
              UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(unjamGetLastError(), "is not registered")) << unjamGetLastError();
  }
  // Nothing of all that was submitted.
  EXPECT_EQ(stats_of(job.context(1)).submitted, 0u);
}

TEST(AllToAll, IsNotDoneInPlace) {
  Job job(2);
  float x[12] = {};
  for (const int shift : {0, 1, 3}) {
    EXPECT_EQ(unjamAllToAll(job.all(0), "k", x, x + shift, 2, UNJAM_FLOAT32, nullptr, nullptr),
              UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(has(unjamGetLastError(), "all_to_all cannot be done in place"))
        << unjamGetLastError();
  }
}

// Both sides get the error, it names both calls in the group's ranks, and nothing but this key of
// this direction is out of use.
TEST(SendRecv, Mismatch) {
  struct Case {
    std::size_t count;
    unjamDataType_t dtype;
    const char* text;
  };
  for (const bool receive_first : {false, true}) {
    for (const Case& c :
         {Case{11, UNJAM_FLOAT32, "count=11, float32"}, Case{10, UNJAM_INT32, "count=10, int32"}}) {
      Job job(3);
      std::atomic<int> turn{0};
      job.run([&](Rank& me) {
        const int members[2] = {2, 1};
        if (me.rank == 0) return;
        unjamGroup_t g = nullptr;
        UNJAM_CHECK(unjamGroupCreate(me.context, members, 2, "pair", &g));
        std::vector<double> x(100);
        unjamRequest_t q = nullptr;
        // World rank 2 is rank 0 and sends. More than the slots hold: it cannot be complete first.
        std::vector<float> large(1 << 20);
        const bool sender = me.rank == 2;
        while (turn.load() != (sender == receive_first ? 1 : 0)) sleep_ms(1);
        if (sender) {
          UNJAM_CHECK(unjamSend(g, "k", large.data(), large.size(), UNJAM_FLOAT32, 1, nullptr, &q));
        } else {
          UNJAM_CHECK(unjamRecv(g, "k", x.data(), c.count, c.dtype, 0, nullptr, &q));
        }
        turn.fetch_add(1);
        const std::string text = wait_error(me.context, q, UNJAM_ERROR_MISMATCH, "a mismatch");
        for (const std::string& part :
             {std::string("the send from rank 0 to rank 1 under key 'k' of group 'pair'"),
              std::string("send_recv(count=1048576, float32, source=0, destination=1)"),
              "send_recv(" + std::string(c.text) + ", source=0, destination=1)",
              std::string("rank 2 called"), std::string("rank 1 called")}) {
          if (!has(text, part)) fail("no '" + part + "' in: " + text);
        }
        // The key is out of use in this direction…
        const unjamResult_t again =
            sender ? unjamSend(g, "k", x.data(), 1, UNJAM_FLOAT32, 1, nullptr, nullptr)
                   : unjamRecv(g, "k", x.data(), 1, UNJAM_FLOAT32, 0, nullptr, nullptr);
        if (again != UNJAM_ERROR_MISMATCH) fail("a key whose ranks disagree was accepted again");
        if (!has(unjamGetLastError(), "sends from rank 0 to rank 1 under key 'k'")) {
          fail(unjamGetLastError());
        }
        if (!sender) {
          int ready = 0;
          if (unjamProbe(g, "k", 0, &ready) != UNJAM_ERROR_MISMATCH) fail("a probe of it goes on");
        }
        // … and in the other one, and for collectives, in use.
        if (sender) {
          UNJAM_CHECK(unjamRecv(g, "k", x.data(), 5, UNJAM_FLOAT64, 1, nullptr, &q));
        } else {
          UNJAM_CHECK(unjamSend(g, "k", x.data(), 5, UNJAM_FLOAT64, 0, nullptr, &q));
        }
        me.wait(q, "the other direction");
        UNJAM_CHECK(unjamBarrier(g, "k", nullptr, &q));
        me.wait(q, "a barrier under the key");
      });
    }
  }
}

// A rank that is gone ends what waits for it, and nothing else.
TEST(SendRecv, AGoneRankEndsItsOwnPairsOnly) {
  Job job(3);
  std::atomic<int> waiting{0};
  std::atomic<bool> gone{false};
  job.run([&](Rank& me) {
    if (me.rank == 2) {
      while (waiting.load() != 2) sleep_ms(1);
      UNJAM_CHECK(unjamAbort(me.context));
      gone = true;
      return;
    }
    float x = 0, y = 0;
    unjamRequest_t from_gone = nullptr, from_other = nullptr;
    UNJAM_CHECK(unjamRecv(me.all, "k", &x, 1, UNJAM_FLOAT32, 2, nullptr, &from_gone));
    UNJAM_CHECK(unjamRecv(me.all, "k", &y, 1, UNJAM_FLOAT32, 1 - me.rank, nullptr, &from_other));
    waiting.fetch_add(1);
    const std::string text = wait_error(me.context, from_gone, UNJAM_ERROR_PEER, "a gone sender");
    if (!has(text, "rank 2 is gone")) fail(text);
    int ready = 0;
    if (unjamProbe(me.all, "k", 2, &ready) != UNJAM_ERROR_PEER) fail("a gone rank was probed");
    if (unjamSend(me.all, "new", &x, 1, UNJAM_FLOAT32, 2, nullptr, nullptr) != UNJAM_ERROR_PEER) {
      fail("a send to a rank that is gone was accepted");
    }
    const float mine = 10.0f + static_cast<float>(me.rank);
    unjamRequest_t sent = nullptr;
    UNJAM_CHECK(unjamSend(me.all, "k", &mine, 1, UNJAM_FLOAT32, 1 - me.rank, nullptr, &sent));
    me.wait(sent, "a send between those that are left");
    me.wait(from_other, "a receive between those that are left");
    if (y != 11.0f - static_cast<float>(me.rank)) fail("a wrong number");
  });
}

TEST(SendRecv, AbortEndsAPendingReceive) {
  Job job(2);
  float x = 0;
  unjamRequest_t q = nullptr;
  ASSERT_EQ(unjamRecv(job.all(0), "k", &x, 1, UNJAM_FLOAT32, 1, nullptr, &q), UNJAM_SUCCESS);
  EXPECT_EQ(unjamWait(q, 20000), UNJAM_ERROR_TIMEOUT);
  ASSERT_EQ(unjamAbort(job.context(0)), UNJAM_SUCCESS);
  EXPECT_EQ(unjamWait(q, kPatienceUs), UNJAM_ERROR_ABORTED);
  unjamRequestFree(q);
  EXPECT_EQ(unjamRecv(job.all(0), "k", &x, 1, UNJAM_FLOAT32, 1, nullptr, nullptr),
            UNJAM_ERROR_ABORTED);
}

TEST(SendRecv, APeerThatLeavesWithoutSending) {
  unjamConfig_t config = default_config();
  config.stall_ms = 50;
  Job job(2, config);
  float x = 0;
  unjamRequest_t q = nullptr;
  ASSERT_EQ(unjamRecv(job.all(0), "k", &x, 1, UNJAM_FLOAT32, 1, nullptr, &q), UNJAM_SUCCESS);
  ASSERT_EQ(job.destroy(1), UNJAM_SUCCESS);
  EXPECT_EQ(unjamWait(q, kPatienceUs), UNJAM_ERROR_PEER);
  EXPECT_TRUE(
      has(unjamRequestError(q),
          "rank 1 left the job without calling the send from rank 1 to rank 0 under key 'k'"))
      << unjamRequestError(q);
  unjamRequestFree(q);
}

TEST(SendRecv, ExplainNamesTheMissingSender) {
  Job job(3);
  float x = 0;
  unjamRequest_t q = nullptr, p = nullptr;
  ASSERT_EQ(unjamRecv(job.all(0), "late", &x, 1, UNJAM_FLOAT32, 2, nullptr, &q), UNJAM_SUCCESS);
  ASSERT_TRUE(eventually([&] {
    const Json all = JsonReader::parse(explain(job.context(1)));
    const Json& pending = all["ranks"][0]["pending"];
    if (pending.size() != 1) return false;
    const Json& call = pending[0];
    EXPECT_EQ(call["what"].string, "send_recv(count=1, float32, source=2, destination=0)");
    EXPECT_EQ(call["key"].string, "late");
    EXPECT_EQ(call["called_by"].size(), 1u);
    EXPECT_EQ(call["called_by"][0].integer(), 0);
    EXPECT_EQ(call["not_called_by"].size(), 1u);
    EXPECT_EQ(call["not_called_by"][0].integer(), 2);
    EXPECT_EQ(all["ranks"][0]["waits_for"].size(), 1u);
    EXPECT_EQ(all["ranks"][0]["waits_for"][0].integer(), 2);
    const Json& engine = call["engines"][0];
    return engine["waits_for"].string == "data" && engine["rank"].integer() == 2;
  })) << explain(job.context(1));
  ASSERT_EQ(unjamSend(job.all(2), "late", &x, 1, UNJAM_FLOAT32, 0, nullptr, &p), UNJAM_SUCCESS);
  wait_ok(job.context(2), p, "send");
  wait_ok(job.context(0), q, "recv");
}

TEST(SendRecv, EndsWithItsGroup) {
  Job job(2);
  const int members[2] = {0, 1};
  unjamGroup_t g[2] = {};
  for (const int r : {0, 1}) {
    ASSERT_EQ(unjamGroupCreate(job.context(r), members, 2, "g", &g[r]), UNJAM_SUCCESS);
  }
  float x = 1, y = 0;
  unjamRequest_t q = nullptr, p = nullptr;
  const auto channels = [&] {
    return JsonReader::parse(info(job.context(1)))["held"]["channels"].integer();
  };
  EXPECT_EQ(channels(), 0);
  ASSERT_EQ(unjamRecv(g[1], "k", &y, 1, UNJAM_FLOAT32, 0, nullptr, &q), UNJAM_SUCCESS);
  EXPECT_EQ(channels(), 1);
  EXPECT_EQ(unjamGroupDestroy(g[1]), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_TRUE(has(unjamGetLastError(), "sends from rank 0 to rank 1 under key 'k' of group 'g'"))
      << unjamGetLastError();
  ASSERT_EQ(unjamSend(g[0], "k", &x, 1, UNJAM_FLOAT32, 1, nullptr, &p), UNJAM_SUCCESS);
  wait_ok(job.context(0), p, "send");
  wait_ok(job.context(1), q, "recv");
  EXPECT_EQ(y, 1);
  for (const int r : {0, 1}) EXPECT_EQ(unjamGroupDestroy(g[r]), UNJAM_SUCCESS);
  EXPECT_EQ(unjamRecv(g[1], "k", &y, 1, UNJAM_FLOAT32, 0, nullptr, nullptr),
            UNJAM_ERROR_INVALID_USAGE);
  int ready = 0;
  EXPECT_EQ(unjamProbe(g[1], "k", 0, &ready), UNJAM_ERROR_INVALID_USAGE);
  // The engine lets go of it as of any key (with the next completions).
  EXPECT_TRUE(eventually([&] {
    unjamRequest_t b[2] = {};
    for (const int r : {0, 1}) UNJAM_CHECK(unjamBarrier(job.all(r), "tidy", nullptr, &b[r]));
    for (const int r : {0, 1}) wait_ok(job.context(r), b[r], "a barrier");
    return channels() == 0;
  })) << info(job.context(1));
}

// ---- probes ----

TEST(Probe, TellsWhatTheNextReceiveWouldMeet) {
  Job job(3);
  unjamGroup_t sender = job.all(0), receiver = job.all(1);
  const auto probe = [&](const char* key, int peer) {
    int ready = 7;
    UNJAM_CHECK(unjamProbe(receiver, key, peer, &ready));
    return ready;
  };
  const auto send = [&](std::size_t count) {
    static const std::vector<float> x(1 << 20);
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamSend(sender, "k", x.data(), count, UNJAM_FLOAT32, 1, nullptr, &q));
    return q;
  };
  const auto receive = [&](std::size_t count) {
    std::vector<float> x(count);
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamRecv(receiver, "k", x.data(), count, UNJAM_FLOAT32, 0, nullptr, &q));
    wait_ok(job.context(1), q, "recv");
  };
  EXPECT_EQ(probe("k", 0), 0);
  std::vector<unjamRequest_t> sent = {send(1), send(0), send(1 << 20)};  // also one without data
  for (const std::size_t count : {std::size_t{1}, std::size_t{0}, std::size_t{1} << 20}) {
    EXPECT_EQ(probe("k", 0), 1);
    EXPECT_EQ(probe("k", 0), 1) << "a probe takes nothing";
    EXPECT_EQ(probe("k", 2), 0);
    EXPECT_EQ(probe("other", 0), 0);
    receive(count);
  }
  EXPECT_EQ(probe("k", 0), 0);
  for (const unjamRequest_t q : sent) wait_ok(job.context(0), q, "send");
  // A receive that is under way has a use of its own: the next one meets the next send.
  float x = 0;
  unjamRequest_t pending = nullptr;
  ASSERT_EQ(unjamRecv(receiver, "k", &x, 1, UNJAM_FLOAT32, 0, nullptr, &pending), UNJAM_SUCCESS);
  wait_ok(job.context(0), send(1), "send");
  wait_ok(job.context(1), pending, "recv");
  EXPECT_EQ(probe("k", 0), 0);
}

// ---- between processes ----

TEST(SendRecvProcesses, AnyOrderProbesAndAKilledSender) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  const int ranks = 3;
  Processes all(ranks, "", [&](Child& child) {
    Job job(id, ranks, {child.index()}, default_config(), base_seed());
    job.run([&](Rank& me) {
      std::mt19937_64 draw(base_seed());
      std::vector<Message> messages;
      for (int i = 0; i < 120; ++i) {
        Message m;
        m.from = static_cast<int>(draw() % ranks);
        m.to = static_cast<int>(draw() % ranks);
        m.key = "k" + std::to_string(draw() % 9);
        m.count = draw() % 5 == 0 ? draw() % 200000 : draw() % 100;
        m.seed = draw();
        messages.push_back(std::move(m));
      }
      for (Message& m : messages) m.prepare();
      exchange(me, me.all, me.rank, messages, base_seed());
      for (const Message& m : messages) {
        if (m.to == me.rank) m.check();
      }

      // Rank 2 sends one message when rank 0 has probed in vain, and never the other one.
      float x = 5;
      unjamRequest_t q = nullptr;
      if (me.rank == 2) {
        UNJAM_CHECK(unjamRecv(me.all, "go", &x, 1, UNJAM_FLOAT32, 0, nullptr, &q));
        me.wait(q, "go");
        UNJAM_CHECK(unjamSend(me.all, "probed", &x, 1, UNJAM_FLOAT32, 0, nullptr, &q));
        me.wait(q, "probed");
      } else if (me.rank == 0) {
        const auto probe = [&] {
          int ready = 7;
          UNJAM_CHECK(unjamProbe(me.all, "probed", 2, &ready));
          return ready == 1;
        };
        for (int i = 0; i < 20; ++i) {
          if (probe()) fail("a probe found what was not sent");
          sleep_ms(1);
        }
        UNJAM_CHECK(unjamSend(me.all, "go", &x, 1, UNJAM_FLOAT32, 2, nullptr, &q));
        me.wait(q, "go");
        if (!eventually(probe)) fail("a probe never found what was sent");
        UNJAM_CHECK(unjamRecv(me.all, "probed", &x, 1, UNJAM_FLOAT32, 2, nullptr, &q));
        me.wait(q, "probed");
        if (probe()) fail("a probe found what was received already");
      }

      if (me.rank == 2) {
        child.say("kill me");
        sleep_ms(3600 * 1000);
      }
      UNJAM_CHECK(unjamRecv(me.all, "never", &x, 1, UNJAM_FLOAT32, 2, nullptr, &q));
      child.say("rank 2 may die");  // nothing else that it has a part in is under way
      const std::string text = wait_error(me.context, q, UNJAM_ERROR_PEER, "a killed sender");
      if (!has(text, "rank 2 is gone")) fail(text);
      // Those that are left go on, in the same group.
      UNJAM_CHECK(me.rank == 0 ? unjamSend(me.all, "after", &x, 1, UNJAM_FLOAT32, 1, nullptr, &q)
                               : unjamRecv(me.all, "after", &x, 1, UNJAM_FLOAT32, 0, nullptr, &q));
      me.wait(q, "after");
    });
  });
  all.expect_killed(2);
  // Rank 2's sends are complete before they are taken, so it alone does not know when it may die.
  ASSERT_TRUE(all.wait_until(
      [&] { return !all.said(0).empty() && !all.said(1).empty() && !all.said(2).empty(); }));
  all.signal(2, SIGKILL);
  EXPECT_TRUE(all.finish());
}

TEST(SendRecvProcesses, Mismatch) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(2, "", [&](Child& child) {
    unjamConfig_t config = default_config();
    config.stall_ms = 100;
    Job job(id, 2, {child.index()}, config, base_seed());
    job.run([&](Rank& me) {
      std::vector<float> x(1 << 20);
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(me.rank == 0
                      ? unjamSend(me.all, "k", x.data(), x.size(), UNJAM_FLOAT32, 1, nullptr, &q)
                      : unjamRecv(me.all, "k", x.data(), 7, UNJAM_FLOAT32, 0, nullptr, &q));
      const std::string text = wait_error(me.context, q, UNJAM_ERROR_MISMATCH, "a mismatch");
      for (const char* part : {"count=1048576, float32, source=0, destination=1",
                               "count=7, float32, source=0, destination=1"}) {
        if (!has(text, part)) fail(text);
      }
    });
  });
  EXPECT_TRUE(all.finish());
}

// ---- barriers ----

TEST(Barrier, NoRankIsThroughBeforeAllHaveCalled) {
  for (const int ranks : {1, 2, 5}) {
    for (const int algorithm : {-1, 0, 1, 2}) {
      unjamConfig_t config = default_config();
      config.algorithm = algorithm;
      Job job(ranks, config);
      constexpr int kRounds = 50;
      std::array<std::atomic<int>, kRounds> called{};
      job.run([&](Rank& me) {
        std::mt19937_64 random(mix(job.seed(), static_cast<std::uint64_t>(me.rank)));
        for (std::size_t i = 0; i < kRounds; ++i) {
          if (random() % 8 == 0) std::this_thread::sleep_for(std::chrono::microseconds(300));
          called[i].fetch_add(1);
          unjamRequest_t q = nullptr;
          UNJAM_CHECK(unjamBarrier(me.all, i % 2 == 0 ? "even" : nullptr, nullptr, &q));
          me.wait(q, "barrier");
          if (called[i].load() != ranks) fail("a barrier was passed before all had called it");
        }
      });
    }
  }
}

TEST(Barrier, MetByAnotherCallIsAMismatch) {
  Job job(2);
  job.run([&](Rank& me) {
    unsigned char x = 0;
    unjamRequest_t q = nullptr;
    // Of the element that a barrier is planned with, even.
    UNJAM_CHECK(me.rank == 0
                    ? unjamBarrier(me.all, "k", nullptr, &q)
                    : unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_UINT8, UNJAM_SUM, nullptr, &q));
    const std::string text = wait_error(me.context, q, UNJAM_ERROR_MISMATCH, "a mismatch");
    for (const char* part :
         {"rank 0 called barrier()", "rank 1 called all_reduce(count=1, uint8, sum)", "key 'k'"}) {
      if (!has(text, part)) fail(text);
    }
  });
}

TEST(Barrier, ExplainNamesWhoIsMissing) {
  Job job(2);
  unjamRequest_t q = nullptr, p = nullptr;
  ASSERT_EQ(unjamBarrier(job.all(0), "here", nullptr, &q), UNJAM_SUCCESS);
  EXPECT_EQ(unjamWait(q, 20000), UNJAM_ERROR_TIMEOUT);
  const Json all = JsonReader::parse(explain(job.context(0)));
  const Json& call = all["ranks"][0]["pending"][0];
  EXPECT_EQ(call["what"].string, "barrier()");
  EXPECT_EQ(call["not_called_by"][0].integer(), 1);
  ASSERT_EQ(unjamBarrier(job.all(1), "here", nullptr, &p), UNJAM_SUCCESS);
  wait_ok(job.context(0), q, "barrier");
  wait_ok(job.context(1), p, "barrier");
}

}  // namespace
}  // namespace unjam_test
