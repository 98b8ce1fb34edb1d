// Agents of a job in this process, over TCP on loopback, and clients that do as they like.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/agent.h"
#include "control/poller.h"
#include "tests/support/control.h"
#include "tests/support/job.h"

namespace unjam_test {

using unjam::Agent;
using unjam::AgentConfig;
using unjam::NumberList;
using unjam::Poller;
using unjam::SocketAddress;
using unjam::TaggedChannel;

inline SocketAddress loopback_address() {
  SocketAddress a;
  std::string error;
  EXPECT_TRUE(unjam::resolve_address("127.0.0.1:0", a, error)) << error;
  return a;
}

// An agent, and what its events have said.
struct TestAgent {
  std::unique_ptr<Poller> own_poller;  // none: that of all
  std::unique_ptr<Agent> agent;
  AgentConfig config;
  bool started = false, finished = false;
  bool answers = true;
  std::string failed, cut_off;
  std::vector<unjam::AgentNews> news;
  std::vector<std::pair<std::uint32_t, bool>> suspects;
  std::map<std::uint64_t, std::map<std::uint32_t, std::string>> heard;  // by question
  std::map<std::uint64_t, NumberList> settled;                          // who did not answer

  NumberList gone_agents() const {
    NumberList list;
    for (const auto& n : news) {
      if (n.agent != unjam::kNoAgent) list.push_back(n.agent);
    }
    std::sort(list.begin(), list.end());
    return list;
  }
};

class TestAgents {
 public:
  AgentConfig base;

  explicit TestAgents(std::uint32_t job_ranks, std::uint64_t seed = 1) {
    base.secret = secret_from(seed);
    base.root_address = base.door = loopback_address();
    base.job_ranks = job_ranks;
    base.start_ms = kPatienceUs / 1000;
    base.silence_ms = kPatienceUs / 1000;  // other tests' load is no silence
    base.settings = "UNJAM_LANES=2, UNJAM_GUARANTEED_SLOTS=5";
  }

  // The first is the root. Arrives before the next is started, so that its number is its place
  // here.
  TestAgent& add(NumberList ranks, const std::function<void(AgentConfig&)>& change = {},
                 bool own_poller = false) {
    TestAgent& t = begin(std::move(ranks), change, own_poller);
    until([&] { return t.agent->number() != unjam::kNoAgent || !t.failed.empty(); });
    return t;
  }
  // Not waited for.
  TestAgent& begin(NumberList ranks, const std::function<void(AgentConfig&)>& change = {},
                   bool own_poller = false) {
    all.push_back(std::make_unique<TestAgent>());
    TestAgent& t = *all.back();
    t.config = base;
    t.config.root = all.size() == 1;
    if (!t.config.root) t.config.root_address = all[0]->agent->door();
    t.config.host = "node" + std::to_string(all.size() - 1);
    for (const auto r : ranks) t.config.ranks.push_back({r, 1000 + r});
    if (change) change(t.config);
    if (own_poller) t.own_poller = std::make_unique<Poller>();
    unjam::AgentEvents e;
    e.started = [&t] { t.started = true; };
    e.failed = [&t](const std::string& why) { t.failed = why; };
    e.cut_off = [&t](const std::string& why) { t.cut_off = why; };
    e.finished = [&t] { t.finished = true; };
    e.gone = [&t](const unjam::AgentNews& n) { t.news.push_back(n); };
    e.suspect = [&t](std::uint32_t a, bool s) { t.suspects.emplace_back(a, s); };
    e.asked = [&t](std::uint32_t from, std::uint64_t number, const std::string& payload) {
      if (t.answers) t.agent->answer(from, number, t.config.host + " " + payload);
    };
    e.answer = [&t](std::uint64_t number, std::uint32_t from, const std::string& payload) {
      EXPECT_TRUE(t.heard[number].emplace(from, payload).second) << "an answer came twice";
    };
    e.settled = [&t](std::uint64_t number, const NumberList& missing) {
      EXPECT_TRUE(t.settled.emplace(number, missing).second) << "a question was settled twice";
    };
    t.agent = std::make_unique<Agent>(t.own_poller ? *t.own_poller : poller, t.config, e);
    std::string error;
    EXPECT_TRUE(t.agent->start(error)) << error;
    return t;
  }
  // One rank each.
  void add_many(std::uint32_t n) {
    for (std::uint32_t i = 0; i < n; ++i) add({static_cast<std::uint32_t>(all.size())});
  }

  void run_once(int wait_ms = 20) {
    bool others = false;
    for (const auto& t : all) others |= t->own_poller != nullptr && t->agent != nullptr;
    poller.run_once(others ? 1 : wait_ms);
    for (const auto& t : all) {
      if (t->own_poller && t->agent && !stopped.count(t.get())) t->own_poller->run_once(0);
    }
  }
  bool until(const std::function<bool()>& reached, std::int64_t timeout_ms = kPatienceUs / 1000) {
    const std::uint64_t deadline =
        unjam::monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1'000'000;
    while (!reached()) {
      if (unjam::monotonic_ns() > deadline) return false;
      run_once();
    }
    return true;
  }
  bool all_live(const std::function<bool(const TestAgent&)>& is) const {
    for (const auto& t : all) {
      if (t->agent && !stopped.count(t.get()) && !is(*t)) return false;
    }
    return true;
  }
  void expect_started() {
    ASSERT_TRUE(until([&] { return all_live([](const TestAgent& t) { return t.started; }); }));
  }
  void kill(std::size_t i) { all[i]->agent.reset(); }

  Poller poller;
  std::vector<std::unique_ptr<TestAgent>> all;
  std::set<const TestAgent*> stopped;  // as by SIGSTOP; need pollers of their own
};

// ---- by hand ----

inline Fd connect_to(const SocketAddress& to) {
  Fd s(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_storage storage;
  const socklen_t size = to.to(storage);
  if (connect(s.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) return {};
  return s;
}

// Whether the other end has closed it, or does within that time.
inline bool closed_within(const Fd& s, std::int64_t ms, const std::function<void()>& meanwhile) {
  const std::uint64_t deadline = unjam::monotonic_ns() + static_cast<std::uint64_t>(ms) * 1'000'000;
  char buffer[4096];
  while (unjam::monotonic_ns() < deadline) {
    meanwhile();
    const ssize_t n = recv(s.get(), buffer, sizeof(buffer), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) return true;
  }
  return false;
}

}  // namespace unjam_test
