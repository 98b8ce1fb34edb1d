// Agents that meet, learn of deaths, ask each other and part, over TCP on loopback. Who dies is
// destroyed: its sockets close as those of a process that is killed. Who is stopped is run no more.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <random>
#include <thread>

#include "tests/support/agent_messages.h"
#include "tests/support/agents.h"

namespace unjam_test {
namespace {

using unjam::kNoAgent;
using State = unjam::Agent::State;

constexpr std::int64_t kLongMs = kPatienceUs / 1000;

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

// All that live.
void expect_all_failed(TestAgents& job, const std::vector<std::string>& parts) {
  ASSERT_TRUE(job.until([&] { return job.all_live([](auto& t) { return !t.failed.empty(); }); }));
  for (const auto& t : job.all) {
    if (!t->agent) continue;
    for (const std::string& part : parts) {
      EXPECT_TRUE(has(t->failed, part))
          << t->config.host << " was told: " << t->failed << "\nwithout: " << part;
    }
    EXPECT_FALSE(t->started);
  }
}

// ---- the start ----

TEST(AgentStart, AllLearnWhoIsWhere) {
  for (const std::uint32_t n : {1u, 2u, 33u, 34u, 40u}) {
    SCOPED_TRACE(n);
    const int before = open_descriptors();
    {
      const std::uint32_t each = n == 40 ? 3 : 1;
      TestAgents job(n * each);
      for (std::uint32_t a = 0; a < n; ++a) {
        NumberList ranks;  // ranks of a machine need not be neighbours, nor in the agents' order
        for (std::uint32_t k = 0; k < each; ++k) ranks.push_back(n * k + (n - 1 - a));
        job.add(ranks);
      }
      job.expect_started();
      const std::set<std::uint16_t> ports = listening_ports();
      for (const auto& t : job.all) {
        const unjam::AgentTable& table = t->agent->table();
        ASSERT_EQ(table.agents(), n);
        ASSERT_EQ(table.ranks(), n * each);
        for (std::uint32_t r = 0; r < table.ranks(); ++r) {
          EXPECT_EQ(table.agent_of(r), n - 1 - r % n);
          EXPECT_EQ(table.card(r), 1000 + r);
        }
        for (std::uint32_t a = 0; a < n; ++a) {
          EXPECT_EQ(table.host(a), "node" + std::to_string(a));
          EXPECT_EQ(table.ranks_of(a).size(), each);
        }
        EXPECT_EQ(t->agent->parent(), unjam::agent_parent(t->agent->number()));
        EXPECT_LE(t->agent->counts().connections, unjam::kAgentFanOut + 1);
        EXPECT_EQ(ports.count(t->agent->door().port), 0u) << "a door is open after the start";
        EXPECT_EQ(t->agent->counts().refused, 0u);
      }
    }
    EXPECT_EQ(open_descriptors(), before);
  }
}

TEST(AgentStart, WhoComesFirstWaitsForTheRoot) {
  TestAgents job(2);
  unjam::Door door;  // a port where nobody is yet
  std::string error;
  ASSERT_TRUE(door.open(loopback_address(), error));
  const SocketAddress at = door.address();
  door.release();
  auto early = std::make_unique<TestAgents>(2);
  early->base.root_address = at;
  bool started = false;
  AgentConfig c = job.base;
  c.ranks = {{1, 1}};
  c.root_address = at;
  unjam::AgentEvents e;
  e.started = [&] { started = true; };
  Agent first(job.poller, c, e);
  ASSERT_TRUE(first.start(error)) << error;
  for (int i = 0; i < 5; ++i) job.run_once();
  job.begin({0}, [&](AgentConfig& root) { root.root_address = at; });
  ASSERT_TRUE(job.until([&] { return started && job.all[0]->started; }));
}

TEST(AgentStart, TheMissingAreNamedToAll) {
  TestAgents job(100);
  job.base.start_ms = 700;
  job.add({0, 1});
  NumberList odd;  // 20 gaps of one rank: more than are named
  for (std::uint32_t r = 3; r < 42; r += 2) odd.push_back(r);
  job.add(odd);
  job.add({50});
  expect_all_failed(job, {"not all ranks had joined after 700 ms", "of 100 ranks 77 had not joined",
                          "ranks 2, 4, 6, 8", "more", "allow more time"});
}

// Who has less patience than the root speaks for all, and the root says who is missing.
TEST(AgentStart, TheImpatientEndItForAll) {
  TestAgents job(40);
  job.add_many(33);
  job.add({33}, [](AgentConfig& c) { c.start_ms = 300; });  // below agent 1
  expect_all_failed(job, {"node33 (rank 33) gave up", "after 300 ms", "ranks 34-39"});
}

TEST(AgentStart, ARankThatComesTwiceIsNamed) {
  for (const std::uint32_t place : {1u, 33u}) {  // at the root, and below another
    TestAgents job(60);
    job.add_many(place);
    job.add({place, 50});
    job.add({place + 1});
    job.begin({50});
    expect_all_failed(
        job, {"rank 50 has joined twice", "host node" + std::to_string(place),
              "host node" + std::to_string(place + 2), "give every rank a number of its own"});
  }
}

TEST(AgentStart, WhatDiffersIsNamed) {
  for (const std::uint32_t place : {1u, 33u}) {
    TestAgents job(60);
    job.add_many(place);
    job.begin({place}, [](AgentConfig& c) { c.job_ranks = 61; });
    expect_all_failed(
        job, {"says that the job has 61 ranks", "says 60", "give the same number everywhere"});
  }
  for (const std::uint32_t place : {1u, 33u}) {
    TestAgents job(60);
    job.add_many(place);
    job.begin({place},
              [](AgentConfig& c) { c.settings = "UNJAM_LANES=3, UNJAM_GUARANTEED_SLOTS=5"; });
    expect_all_failed(job, {"settings differ", "UNJAM_LANES=2", "UNJAM_LANES=3",
                            "rank " + std::to_string(place)});
    EXPECT_FALSE(has(job.all[0]->failed, "ESCAPE"));
  }
}

TEST(AgentStart, WhatMakesNoSenseIsRefusedAtOnce) {
  TestAgents job(4);
  const auto error_of = [&](const std::function<void(AgentConfig&)>& change) {
    AgentConfig c = job.base;
    c.root = true;
    c.ranks = {{0, 0}};
    change(c);
    std::string error;
    Agent a(job.poller, c, {});
    EXPECT_FALSE(a.start(error));
    return error;
  };
  EXPECT_TRUE(has(error_of([](auto& c) { c.ranks = {{4, 0}}; }), "job's number of ranks, 4"));
  EXPECT_TRUE(has(error_of([](auto& c) { c.ranks.clear(); }), "needs ranks"));
  EXPECT_TRUE(has(error_of([](auto& c) { c.ranks = {{1, 0}, {1, 0}}; }), "twice"));
  EXPECT_TRUE(has(error_of([](auto& c) { c.host.resize(65, 'h'); }), "too long"));
  EXPECT_TRUE(has(error_of([](auto& c) { c.job_ranks = 70000; }), "65536"));
  unjam::Door taken;
  std::string error;
  ASSERT_TRUE(taken.open(loopback_address(), error));
  EXPECT_TRUE(has(error_of([&](auto& c) { c.root_address = taken.address(); }), "cannot listen"));
}

// It is told so at once; the others do not notice, and start with who has the right one.
TEST(AgentStart, AWrongSecretKeepsNobodyElseOut) {
  TestAgents job(3);
  job.add_many(2);
  TestAgent& wrong = job.begin({2}, [](AgentConfig& c) { c.secret = secret_from(99); });
  ASSERT_TRUE(job.until([&] { return !wrong.failed.empty(); }));
  EXPECT_TRUE(has(wrong.failed, "the wrong secret")) << wrong.failed;
  EXPECT_TRUE(has(wrong.failed, "node2 (rank 2)")) << wrong.failed;
  EXPECT_TRUE(job.all[0]->failed.empty());
  wrong.agent.reset();
  job.add({2});
  job.expect_started();
}

TEST(AgentStart, ARootThatIsNotOursIsNotBelieved) {
  TestAgents job(2);
  unjam::Door door;
  std::string error;
  ASSERT_TRUE(door.open(loopback_address(), error));
  job.add({0});
  TestAgent& t = job.begin({1}, [&](AgentConfig& c) {
    c.root_address = door.address();
    c.start_ms = 1000;
  });
  std::vector<TaggedChannel> impostors;
  ASSERT_TRUE(job.until([&] {
    bool crowded;
    if (Fd s = door.accept(crowded)) {
      impostors.emplace_back(std::move(s), TaggedChannel::Role::kDoor, secret_from(5),
                             unjam::kAgentProtocolVersion, 4096);
    }
    for (auto& c : impostors) {
      std::string unused;
      c.flush(unused);
      c.receive(unused);
    }
    return !t.failed.empty();
  }));
  EXPECT_FALSE(t.started);
  EXPECT_TRUE(has(t.failed, "secret")) << t.failed;
}

TEST(AgentStart, StrangersKeepNobodyOut) {
  TestAgents job(35);
  job.add_many(2);
  std::vector<Fd> silent, noisy;
  for (int i = 0; i < 300; ++i) {  // more than are let in at once
    silent.push_back(connect_to(job.all[i % 2]->agent->door()));
    ASSERT_TRUE(silent.back()) << i;
  }
  for (int i = 0; i < 40; ++i) {
    noisy.push_back(connect_to(job.all[i % 2]->agent->door()));
    send_raw(noisy.back().get(), i % 3 == 0   ? "GET / HTTP/1.0\r\n\r\n"
                                 : i % 3 == 1 ? frame_bytes(2, "", 0x7fffffff, 0)
                                              : frame_bytes(2, std::string(36, 'x')));
  }
  job.add_many(33);
  job.expect_started();
  for (auto* fds : {&silent, &noisy}) {
    for (const Fd& s : *fds) EXPECT_TRUE(closed_within(s, kLongMs, [&] { job.run_once(1); }));
  }
  for (const auto& t : job.all) EXPECT_EQ(t->news.size(), 0u);
}

// One that knows the secret, and then breaks the rules, ends itself, or the meeting, with a reason.
TEST(AgentStart, AMemberThatBreaksTheRules) {
  for (int kind = 0; kind < 7; ++kind) {
    SCOPED_TRACE(kind);
    TestAgents job(3);
    job.add_many(2);
    Fd s = connect_to(job.all[0]->agent->door());
    fcntl(s.get(), F_SETFL, O_NONBLOCK);
    TaggedChannel c(std::move(s), TaggedChannel::Role::kCaller, job.base.secret,
                    unjam::kAgentProtocolVersion, unjam::kLongestAgentFrame);
    std::string error;
    bool live = true;
    const auto turn = [&] {
      job.run_once(1);
      live = live && c.flush(error) && c.receive(error);
    };
    ASSERT_TRUE(job.until([&] {
      turn();
      return c.proven();
    }));
    unjam::AttachMessage attach;
    attach.agent = 2, attach.job_ranks = 3, attach.first_rank = 2, attach.host = "rogue";
    attach.settings = job.base.settings;
    const auto post = [&](AgentMessageType type, const std::string& bytes) {
      c.post(number_of(type), bytes);
    };
    const bool fatal = kind >= 3 && kind < 6;  // 6: it has no seat
    switch (kind) {
      case 0:
        post(AgentMessageType::kTable, "not yours to say");
        break;
      case 1:
        attach.agent = 1;  // is there already
        post(AgentMessageType::kAttach, attach.encode());
        break;
      case 2:
        post(AgentMessageType::kEnter, "x");
        break;
      default: {
        unjam::EnterMessage enter;
        enter.id = 7, enter.door.port = 1;
        if (kind != 6) post(AgentMessageType::kEnter, enter.encode());
        post(AgentMessageType::kAttach, attach.encode());
        unjam::JoinsMessage joins;
        joins.joins = {{kind == 3 ? 40u : 2u, "rogue", {{kind == 4 ? 7u : 2u, 0}}}};
        if (kind == 5) joins.joins.push_back(joins.joins[0]);
        post(AgentMessageType::kJoins, joins.encode());
      }
    }
    ASSERT_TRUE(job.until([&] {
      turn();
      return !live;
    }));
    if (fatal) {
      expect_all_failed(job, {"left before all ranks had joined", "it sent what makes no sense"});
    } else {
      job.add({2});
      job.expect_started();
      EXPECT_EQ(job.all[0]->agent->counts().refused, 1u);
    }
  }
}

TEST(AgentStart, WhoLeavesBeforeItIsNamed) {
  TestAgents job(40);
  job.add_many(36);
  ASSERT_TRUE(job.until([&] { return job.all[35]->agent->parent() == 1; }));
  // The root has heard of it.
  const std::uint64_t frames = job.all[0]->agent->counts().frames;
  for (int i = 0; i < 10; ++i) job.run_once(5);
  EXPECT_EQ(job.all[0]->agent->counts().frames, frames);
  job.kill(35);
  expect_all_failed(job, {"node35 (rank 35) left before all ranks had joined"});
}

// Agents in threads that sleep now and then: nothing depends on who is faster.
TEST(AgentStart, InAnyOrderAndAtAnyPace) {
  std::mt19937_64 seeds(static_cast<std::uint64_t>(7));
  for (int turn = 0; turn < 3; ++turn) {
    constexpr std::uint32_t kThreads = 4, kAgents = 48;
    std::vector<std::unique_ptr<Poller>> pollers;
    for (std::uint32_t t = 0; t < kThreads; ++t) pollers.push_back(std::make_unique<Poller>());
    std::vector<std::unique_ptr<Agent>> agents(kAgents);
    std::atomic<std::uint32_t> started{0}, finished{0}, knew{0}, bad{0};
    std::atomic<bool> stop{false};
    AgentConfig c;
    c.secret = secret_from(3);
    c.root_address = c.door = loopback_address();
    c.job_ranks = kAgents;
    c.start_ms = c.silence_ms = c.rejoin_ms = kLongMs;
    std::string error;
    for (std::uint32_t a = 0; a < kAgents; ++a) {
      c.root = a == 0;
      c.ranks = {{a, a}};
      c.host = "node" + std::to_string(a);
      unjam::AgentEvents e;
      e.started = [&] { started.fetch_add(1); };
      e.finished = [&] { finished.fetch_add(1); };
      e.failed = e.cut_off = [&](const std::string&) { bad.fetch_add(1); };
      e.gone = [&](const unjam::AgentNews&) { knew.fetch_add(1); };
      agents[a] = std::make_unique<Agent>(*pollers[a % kThreads], c, e);
      ASSERT_TRUE(agents[a]->start(error)) << error;
      if (a == 0) c.root_address = agents[0]->door();
    }
    std::vector<std::thread> threads;
    for (std::uint32_t t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t, seed = seeds()] {
        std::mt19937_64 random(seed);
        while (!stop.load()) {
          pollers[t]->run_once(5);
          if (random() % 4 == 0) {
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          }
        }
      });
    }
    const auto wait_for = [&](const std::atomic<std::uint32_t>& count, std::uint32_t n) {
      const std::uint64_t deadline = unjam::monotonic_ns() + std::uint64_t{kLongMs} * 1000000;
      while (count.load() < n && bad.load() == 0 && unjam::monotonic_ns() < deadline) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
      return count.load() == n;
    };
    EXPECT_TRUE(wait_for(started, kAgents));
    // Two ranks end at once, at different places.
    for (const std::uint32_t a : {5u, 47u}) {
      pollers[a % kThreads]->post([&, a] { agents[a]->report_gone({a}, "it ended"); });
    }
    EXPECT_TRUE(wait_for(knew, 2 * kAgents));
    for (std::uint32_t a = 0; a < kAgents; ++a) {
      pollers[a % kThreads]->post([&, a] { agents[a]->finish(); });
    }
    EXPECT_TRUE(wait_for(finished, kAgents));
    EXPECT_EQ(bad.load(), 0u);
    stop.store(true);
    for (auto& t : threads) t.join();
  }
}

// ---- deaths ----

class AgentDeaths : public ::testing::Test {
 protected:
  // All that live know that exactly these agents are gone, and are one tree again.
  static void expect_mended(TestAgents& job, const NumberList& dead, std::uint32_t rank_to_end) {
    ASSERT_TRUE(job.until([&] {
      return job.all_live([&](auto& t) { return t.gone_agents().size() >= dead.size(); });
    }));
    for (const auto& t : job.all) {
      if (!t->agent) continue;
      EXPECT_EQ(t->gone_agents(), dead) << t->config.host;
      for (std::uint32_t r = 0; r < job.base.job_ranks; ++r) {
        EXPECT_EQ(t->agent->is_gone(r),
                  std::binary_search(dead.begin(), dead.end(), t->agent->table().agent_of(r)));
      }
      for (const auto& n : t->news) {
        if (n.agent == kNoAgent) continue;
        EXPECT_TRUE(has(n.text, "node" + std::to_string(n.agent))) << n.text;
        EXPECT_TRUE(has(n.text, unjam::ranks_in_words(n.ranks))) << n.text;
      }
      EXPECT_TRUE(t->cut_off.empty()) << t->config.host << ": " << t->cut_off;
    }
    // In the end each has the parent that it should have, and every door is shut again.
    const auto gone = [&](std::uint32_t a) { return std::count(dead.begin(), dead.end(), a) > 0; };
    EXPECT_TRUE(job.until([&] {
      return job.all_live([&](auto& t) {
        return t.agent->parent() == unjam::living_agent_parent(t.agent->number(), gone);
      });
    }));
    NumberList all;
    for (std::uint32_t a = 0; a < job.all.size(); ++a) all.push_back(a);
    // From the last that lives: it has the longest way.
    std::size_t asker = job.all.size();
    do --asker;
    while (!job.all[asker]->agent);
    TestAgent& t = *job.all[asker];
    const std::uint64_t number = t.agent->ask(all, "lives", kLongMs);
    ASSERT_NE(number, 0u);
    ASSERT_TRUE(job.until([&] { return t.settled.count(number) != 0; }));
    EXPECT_EQ(t.settled[number], dead);
    EXPECT_EQ(t.heard[number].size(), all.size() - dead.size());
    t.agent->report_gone({rank_to_end}, "it was aborted");
    EXPECT_TRUE(job.until(
        [&] { return job.all_live([&](auto& u) { return u.agent->is_gone(rank_to_end); }); }));
    const std::set<std::uint16_t> ports = listening_ports();
    for (const auto& u : job.all) {
      if (!u->agent) continue;
      EXPECT_EQ(ports.count(u->agent->door().port), 0u) << "a door stayed open";
    }
  }
};

TEST_F(AgentDeaths, OfALeafOfInteriorsAndOfTheRoot) {
  // Agents 1 and 2 have children: 33 to 64, and 65 to 69.
  for (const std::uint32_t victim : {69u, 1u, 2u, 20u, 0u}) {
    SCOPED_TRACE(victim);
    TestAgents job(140);
    for (std::uint32_t a = 0; a < 70; ++a) job.add({2 * a, 2 * a + 1});
    job.expect_started();
    job.kill(victim);
    expect_mended(job, {victim}, 138 - (victim == 69 ? 2 : 0));
  }
}

// A parent and its parent at once, whoever stands in for the root, then some at random, until half
// are left.
TEST_F(AgentDeaths, OfOneAfterTheOther) {
  TestAgents job(72);
  job.add_many(72);
  job.expect_started();
  std::mt19937_64 random(9);
  NumberList dead;
  const auto gone = [&](std::uint32_t a) { return std::count(dead.begin(), dead.end(), a) > 0; };
  std::vector<NumberList> turns = {{2, 65}, {0}, {1}, {3}, {33, 34, 35}};
  while (dead.size() < 36) {
    NumberList now;
    if (!turns.empty()) {
      now = turns.front();
      turns.erase(turns.begin());
    } else {
      const std::uint32_t root = unjam::standing_root(72, gone);
      while (now.size() < 6) {
        const auto a = static_cast<std::uint32_t>(random() % 71);
        if (a != root && !gone(a) && std::count(now.begin(), now.end(), a) == 0) now.push_back(a);
      }
    }
    for (const auto a : now) job.kill(a);
    dead.insert(dead.end(), now.begin(), now.end());
    std::sort(dead.begin(), dead.end());
    ASSERT_TRUE(job.until([&] {
      return job.all_live([&](auto& t) {
        return t.gone_agents() == dead &&
               t.agent->parent() == unjam::living_agent_parent(t.agent->number(), gone);
      });
    }));
  }
  expect_mended(job, dead, 71);
}

TEST_F(AgentDeaths, NewsOfRanksComeOnce) {
  TestAgents job(80);
  for (std::uint32_t a = 0; a < 40; ++a) job.add({2 * a, 2 * a + 1});
  job.expect_started();
  job.all[39]->agent->report_gone({78}, "process 17 was killed");
  job.all[5]->agent->report_gone({78, 10}, "said by another");
  ASSERT_TRUE(job.until([&] {
    return job.all_live([](auto& t) { return t.agent->is_gone(78) && t.agent->is_gone(10); });
  }));
  for (int i = 0; i < 5; ++i) job.run_once(2);
  for (const auto& t : job.all) {
    std::vector<std::uint32_t> told;
    for (const auto& n : t->news) told.insert(told.end(), n.ranks.begin(), n.ranks.end());
    std::sort(told.begin(), told.end());
    EXPECT_EQ(told, (NumberList{10, 78})) << t->config.host;
    EXPECT_TRUE(t->gone_agents().empty());
  }
  // What cannot be is not reported.
  const std::uint64_t frames = job.all[3]->agent->counts().frames;
  job.all[3]->agent->report_gone({80}, "no such rank");
  job.all[3]->agent->report_gone({}, "none");
  job.all[3]->agent->report_gone({78}, "known");
  EXPECT_EQ(job.all[3]->agent->counts().frames, frames);
}

// A machine that hangs: first suspected, then gone, and told so when it wakes.
TEST_F(AgentDeaths, SilenceIsSuspectedThenTheEnd) {
  for (const std::uint32_t victim : {1u, 33u}) {
    SCOPED_TRACE(victim);
    TestAgents job(36);
    job.base.beat_ms = 100;
    job.base.suspect_ms = 400;
    job.base.silence_ms = 2000;
    job.base.rejoin_ms = kLongMs;
    for (std::uint32_t a = 0; a < 36; ++a) job.add({a}, {}, a == victim);
    job.expect_started();
    for (int i = 0; i < 20; ++i) job.run_once();
    TestAgent& stopped = *job.all[victim];
    job.stopped.insert(&stopped);
    const std::uint64_t at = unjam::monotonic_ns();
    ASSERT_TRUE(job.until([&] {
      return job.all_live([&](auto& t) { return t.gone_agents() == NumberList{victim}; });
    }));
    EXPECT_GE(unjam::monotonic_ns() - at, 1'500'000'000u) << "before its time";
    bool suspected = false;
    for (const auto& s : job.all[unjam::agent_parent(victim)]->suspects) {
      suspected |= s == std::pair(victim, true);
    }
    EXPECT_TRUE(suspected);
    EXPECT_TRUE(has(job.all[2]->news[0].text, "has said nothing for")) << job.all[2]->news[0].text;
    job.stopped.clear();
    ASSERT_TRUE(job.until([&] { return !stopped.cut_off.empty(); }));
    EXPECT_TRUE(has(stopped.cut_off, "the others count this host as gone")) << stopped.cut_off;
    EXPECT_EQ(stopped.agent->state(), State::kCutOff);
    for (const auto& t : job.all) {
      if (t.get() == &stopped) continue;
      EXPECT_TRUE(t->cut_off.empty()) << t->cut_off;
    }
  }
}

TEST_F(AgentDeaths, AShortSilenceIsNone) {
  TestAgents job(3);
  job.base.beat_ms = 50;
  job.base.suspect_ms = 200;
  job.base.silence_ms = kLongMs;
  for (std::uint32_t a = 0; a < 3; ++a) job.add({a}, {}, a == 1);
  job.expect_started();
  job.stopped.insert(job.all[1].get());
  ASSERT_TRUE(job.until([&] { return !job.all[0]->suspects.empty(); }));
  job.stopped.clear();
  ASSERT_TRUE(job.until([&] { return job.all[0]->suspects.size() == 2; }));
  EXPECT_EQ(job.all[0]->suspects[1], std::pair(1u, false));
  for (const auto& t : job.all) EXPECT_TRUE(t->news.empty());
}

// The descriptor of an agent's connection to who has that door.
int connection_to(const SocketAddress& door, const std::set<int>& but) {
  for (int fd = 3; fd < 4096; ++fd) {
    if (but.count(fd) == 0 && unjam::peer_address(fd) == door) return fd;
  }
  return -1;
}

// A connection breaks, and both ends live: whoever is accused learns it, and its children find
// their way back.
TEST_F(AgentDeaths, WhoLosesAllOthersIsToldSo) {
  for (const std::uint32_t victim : {2u, 33u}) {
    SCOPED_TRACE(victim);
    TestAgents job(68);
    job.base.rejoin_ms = 1000;
    const std::uint32_t parent = unjam::agent_parent(victim);
    std::set<int> others;
    for (std::uint32_t a = 0; a < victim; ++a) job.add({a});
    ASSERT_TRUE(job.until([&] {
      return job.all_live(
          [&](auto& t) { return t.agent->number() == 0 || t.agent->parent() != kNoAgent; });
    }));
    for (int fd; (fd = connection_to(job.all[parent]->agent->door(), others)) >= 0;) {
      others.insert(fd);
    }
    job.add({victim});
    ASSERT_TRUE(job.until([&] { return job.all[victim]->agent->parent() == parent; }));
    int fd = -1;
    ASSERT_TRUE(job.until([&] {
      fd = connection_to(job.all[parent]->agent->door(), others);
      return fd >= 0;
    }));
    for (std::uint32_t a = victim + 1; a < 68; ++a) job.add({a});
    job.expect_started();
    ASSERT_EQ(shutdown(fd, SHUT_RDWR), 0);
    ASSERT_TRUE(job.until([&] { return !job.all[victim]->cut_off.empty(); }));
    EXPECT_TRUE(has(job.all[victim]->cut_off, "node" + std::to_string(parent)));
    ASSERT_TRUE(job.until([&] {
      return job.all_live([&](auto& t) {
        return t.agent->number() == victim || t.gone_agents() == NumberList{victim};
      });
    }));
    // All others are one tree.
    job.kill(victim);
    expect_mended(job, {victim}, 60);
  }
}

// A connection that breaks between the root and who would stand in for it cannot be told from two
// halves of a network: each half goes on, and ends the other's groups.
TEST_F(AgentDeaths, TwoHalvesEndEachOther) {
  TestAgents job(36);
  job.base.rejoin_ms = 300;
  job.base.beat_ms = 100;
  job.add_many(2);
  ASSERT_TRUE(job.until([&] { return job.all[1]->agent->parent() == 0; }));
  int fd = -1;
  ASSERT_TRUE(job.until([&] {
    fd = connection_to(job.all[0]->agent->door(), {});
    return fd >= 0;
  }));
  job.add_many(34);
  job.expect_started();
  ASSERT_EQ(shutdown(fd, SHUT_RDWR), 0);
  const NumberList half = {1, 33, 34, 35};
  NumberList other;
  for (std::uint32_t a = 0; a < 36; ++a) {
    if (!std::binary_search(half.begin(), half.end(), a)) other.push_back(a);
  }
  EXPECT_TRUE(job.until([&] {
    return job.all_live([&](auto& t) {
      const bool in_half = std::binary_search(half.begin(), half.end(), t.agent->number());
      return t.gone_agents() == (in_half ? other : half);
    });
  }));
}

// ---- questions ----

TEST(AgentQuestions, ReachSetsAndAnswersComeBack) {
  TestAgents job(70);
  job.add_many(70);
  job.expect_started();
  const std::vector<std::pair<std::uint32_t, NumberList>> cases = {
      {69, {0, 33, 68}}, {0, {1, 69, 5}}, {40, {40}}, {40, {41, 2, 66, 40}}, {7, {7, 7, 8}}};
  for (const auto& [from, to] : cases) {
    TestAgent& t = *job.all[from];
    const std::uint64_t number = t.agent->ask(to, "?", kLongMs);
    ASSERT_NE(number, 0u);
    EXPECT_TRUE(t.heard[number].empty()) << "an answer before ask() has returned";
    ASSERT_TRUE(job.until([&] { return t.settled.count(number) != 0; }));
    EXPECT_TRUE(t.settled[number].empty());
    std::set<std::uint32_t> distinct(to.begin(), to.end());
    EXPECT_EQ(t.heard[number].size(), distinct.size());
    for (const auto& [a, text] : t.heard[number]) {
      EXPECT_EQ(distinct.count(a), 1u);
      EXPECT_EQ(text, "node" + std::to_string(a) + " ?");
    }
  }
}

TEST(AgentQuestions, WhoDoesNotAnswerIsMissing) {
  TestAgents job(40);
  job.add_many(40);
  job.expect_started();
  job.all[35]->answers = false;
  TestAgent& t = *job.all[39];
  const std::uint64_t late = t.agent->ask({3, 35}, "?", 200);
  const std::uint64_t patient = t.agent->ask({3, 35}, "?", kLongMs);
  const std::uint64_t nobody = t.agent->ask({}, "?", kLongMs);
  const std::uint64_t strange = t.agent->ask({4000, 3}, "?", kLongMs);
  ASSERT_TRUE(job.until([&] { return t.settled.size() == 3; }));
  EXPECT_EQ(t.settled[late], NumberList{35});
  EXPECT_EQ(t.heard[late].size(), 1u);
  EXPECT_TRUE(t.settled[nobody].empty());
  EXPECT_EQ(t.settled[strange], NumberList{4000});
  // Its end is the end of the question to it.
  job.kill(35);
  ASSERT_TRUE(job.until([&] { return t.settled.count(patient) != 0; }));
  EXPECT_EQ(t.settled[patient], NumberList{35});
  // An answer that comes too late is not heard.
  EXPECT_EQ(t.heard[late].size(), 1u);
}

TEST(AgentQuestions, HaveLimits) {
  TestAgents job(2);
  job.add_many(2);
  job.expect_started();
  job.all[1]->answers = false;
  TestAgent& t = *job.all[0];
  EXPECT_EQ(t.agent->ask({1}, std::string(unjam::kLongestAgentPayload + 1, 'x'), 10), 0u);
  int open = 0;
  while (open < 5000 && t.agent->ask({1}, "?", 1) != 0) ++open;
  EXPECT_EQ(open, 1024);
  ASSERT_TRUE(job.until([&] { return t.settled.size() == 1024; }));
  EXPECT_NE(t.agent->ask({1}, std::string(unjam::kLongestAgentPayload, 'x'), kLongMs), 0u);
  // More than is queued for an agent that does not listen is dropped, and ends no connection.
  TestAgents deaf(2);
  deaf.add({0});
  deaf.add({1}, {}, true);
  deaf.expect_started();
  deaf.stopped.insert(deaf.all[1].get());
  std::size_t asked = 0;
  for (; asked < 600; ++asked) {
    ASSERT_NE(deaf.all[0]->agent->ask({1}, std::string(unjam::kLongestAgentPayload, 'x'), kLongMs),
              0u);
    deaf.poller.run_once(0);
  }
  EXPECT_GT(deaf.all[0]->agent->counts().dropped, 0u);
  deaf.stopped.clear();
  const std::uint64_t last = deaf.all[0]->agent->ask({0}, "?", kLongMs);
  ASSERT_TRUE(deaf.until([&] { return deaf.all[0]->settled.count(last) != 0; }));
  EXPECT_TRUE(deaf.all[0]->news.empty());
}

// ---- the end ----

// Whatever an event's function does in the middle of things.
TEST(AgentEnd, EventsMayEndIt) {
  for (int kind = 0; kind < 3; ++kind) {
    SCOPED_TRACE(kind);
    Poller poller;
    AgentConfig c;
    c.root = true;
    c.root_address = loopback_address();
    c.ranks = {{0, 0}, {1, 0}};
    c.job_ranks = 2;
    bool finished = false;
    int settled = 0;
    std::unique_ptr<Agent> agent;
    unjam::AgentEvents e;
    e.finished = [&] { finished = true; };
    e.started = [&] {
      if (kind == 0) agent->finish();
      for (int i = 0; i < 3; ++i) agent->ask({0, 5}, "?", 20);
      if (kind == 1) agent->report_gone({1}, "it ended");
    };
    e.gone = [&](const unjam::AgentNews&) { agent->finish(); };
    e.settled = [&](std::uint64_t, const NumberList& missing) {
      EXPECT_EQ(missing, (NumberList{0, 5}));
      ++settled;
      agent->finish();
    };
    agent = std::make_unique<Agent>(poller, c, e);
    std::string error;
    ASSERT_TRUE(agent->start(error)) << error;
    const std::uint64_t deadline = unjam::monotonic_ns() + std::uint64_t{kLongMs} * 1000000;
    while (!finished && unjam::monotonic_ns() < deadline) poller.run_once(5);
    EXPECT_TRUE(finished);
    EXPECT_EQ(settled, kind == 2 ? 1 : 0);
    EXPECT_EQ(agent->state(), State::kFinished);
  }
}

TEST(AgentEnd, AllPartTogether) {
  TestAgents job(36);
  job.add_many(36);
  job.expect_started();
  for (std::uint32_t a = 0; a < 36; ++a) {
    if (a != 34) job.all[a]->agent->finish();
  }
  for (int i = 0; i < 20; ++i) job.run_once(2);
  EXPECT_TRUE(job.all_live([](auto& t) { return !t.finished; }));
  // One that dies meanwhile holds up nobody, nor does the mending.
  job.kill(1);
  ASSERT_TRUE(job.until(
      [&] { return job.all_live([](auto& t) { return t.gone_agents() == NumberList{1}; }); }));
  EXPECT_TRUE(job.all_live([](auto& t) { return !t.finished; }));
  job.all[34]->agent->finish();
  ASSERT_TRUE(job.until([&] { return job.all_live([](auto& t) { return t.finished; }); }));
  for (int i = 0; i < 20; ++i) job.run_once(2);
  for (const auto& t : job.all) {
    if (!t->agent) continue;
    EXPECT_EQ(t->gone_agents(), NumberList{1});
    EXPECT_TRUE(t->cut_off.empty());
    EXPECT_EQ(t->agent->ask({0}, "?", 10), 0u);
  }
}

}  // namespace
}  // namespace unjam_test
