// Who is where, by what agents say; processes of several hosts that connect with each other, with
// strangers at their doors; and the mesh on such connections. All in one process, over loopback.
#include "control/hosts_meeting.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "control/mesh.h"
#include "control/pair_meeting.h"
#include "tests/support/agents.h"

namespace unjam {
namespace {

constexpr std::uint64_t kPatienceNs = 60'000'000'000;

bool until(const std::function<bool()>& what, const std::function<void()>& meanwhile) {
  const std::uint64_t end = monotonic_ns() + kPatienceNs;
  while (!what()) {
    if (monotonic_ns() > end) return false;
    meanwhile();
  }
  return true;
}

SocketAddress address(const std::string& text) {
  SocketAddress a;
  std::string error;
  EXPECT_TRUE(resolve_address(text, a, error)) << error;
  return a;
}

// ---- places ----

TEST(Places, AreReadAsTheyWereWritten) {
  for (const char* const text : {"10.0.0.1:4567", "[fe80::1]:65535", "255.255.255.255:65535"}) {
    for (const std::string& name : {std::string("node 7 at home"), std::string(100, 'n')}) {
      const std::string said = place_text(name, address(text));
      EXPECT_LE(said.size(), kLongestAgentHost);
      std::string read;
      SocketAddress door;
      ASSERT_TRUE(read_place(said, read, door)) << said;
      EXPECT_EQ(door, address(text));
      EXPECT_EQ(read, name.substr(0, read.size()));
      EXPECT_FALSE(read.empty());
    }
  }
  std::string name;
  SocketAddress door;
  for (const char* const text : {"", "a", " at ", "a at ", "a at b:5", "a at 1.2.3.4",
                                 "a at 1.2.3.4:0", "a at 1.2.3.4:70000"}) {
    EXPECT_FALSE(read_place(text, name, door)) << text;
  }
}

AgentTable table_of(const std::vector<std::pair<std::string, std::uint64_t>>& ranks) {
  std::vector<AgentJoin> joins;
  for (std::uint32_t r = 0; r < ranks.size(); ++r) {
    joins.push_back({r, ranks[r].first, {{r, ranks[r].second}}});
  }
  return AgentTable(static_cast<std::uint32_t>(ranks.size()), joins, {});
}

TEST(Places, AreProcessesAndHostsInTheOrderOfTheirRanks) {
  HostPlaces places;
  std::string error;
  const std::string a = "a at 10.0.0.1:1", b = "b at 10.0.0.2:1", c = "a at 10.0.0.1:2";
  ASSERT_TRUE(places_of(table_of({{a, 7}, {b, 3}, {c, 7}, {b, 3}}), places, error)) << error;
  EXPECT_EQ(places.process_of, (std::vector<std::uint32_t>{0, 1, 2, 1}));
  EXPECT_EQ(places.hosts, (std::vector<std::string>{"a", "b"}));
  ASSERT_EQ(places.processes.size(), 3u);
  EXPECT_EQ(places.processes[2].host, 0u);
  EXPECT_EQ(places.processes[2].door, address("10.0.0.1:2"));
  EXPECT_EQ(places.host_of(3), 1u);
  EXPECT_FALSE(places_of(table_of({{a, 7}, {a, 8}}), places, error)) << "one process, two hosts";
  EXPECT_FALSE(places_of(table_of({{"nowhere", 7}}), places, error));
}

// ---- pairs ----

class Pairs : public testing::Test {
 protected:
  static constexpr std::uint32_t kProcesses = 4;

  void open(std::uint32_t process, const JobSecret& secret) {
    all.resize(kProcesses);
    all[process] = std::make_unique<PairMeeting>(poller, secret);
    std::string error;
    ASSERT_TRUE(all[process]->open(address("127.0.0.1:0"), error)) << error;
  }
  void meet(std::uint32_t process) {
    std::map<std::uint32_t, SocketAddress> others;
    for (std::uint32_t p = 0; p < kProcesses; ++p) {
      if (p != process) others[p] = all[p]->address();
    }
    all[process]->meet(process, others, [process](std::uint32_t to) {
      GreetingMessage g;
      g.from = process, g.to = to;
      g.pid = 100 * process + to;
      g.carrier = "the address";
      return g;
    });
  }
  void run() { poller.run_once(5); }
  bool done(std::uint32_t process) { return all[process]->done(); }

  Poller poller;
  std::vector<std::unique_ptr<PairMeeting>> all;
};

JobSecret secret_of(unsigned char byte) {
  JobSecret secret;
  secret.fill(byte);
  return secret;
}

TEST_F(Pairs, MeetInAnyOrderWithStrangersAtTheDoors) {
  for (std::uint32_t p = 0; p < kProcesses; ++p) open(p, secret_of(1));
  std::vector<Fd> strangers;
  for (std::uint32_t p = 0; p < kProcesses; ++p) {
    for (int i = 0; i < 10; ++i) {
      strangers.push_back(unjam_test::connect_to(all[p]->address()));
      ASSERT_TRUE(strangers.back());
      const std::string noise(static_cast<std::size_t>(i) * 20, 'x');
      if (i % 2 == 1) send(strangers.back().get(), noise.data(), noise.size(), MSG_NOSIGNAL);
    }
  }
  for (const std::uint32_t p : {2u, 0u, 3u, 1u}) {
    meet(p);
    for (int i = 0; i < 20; ++i) run();
    EXPECT_TRUE(p == 1 || !done(p)) << "who is not there cannot be met";
  }
  ASSERT_TRUE(until([&] { return done(0) && done(1) && done(2) && done(3); }, [&] { run(); }));
  for (std::uint32_t p = 0; p < kProcesses; ++p) {
    const SocketAddress door = all[p]->address();
    auto met = all[p]->take();
    ASSERT_EQ(met.size(), kProcesses - 1);
    for (auto& [other, m] : met) {
      EXPECT_EQ(m.greeting.from, other);
      EXPECT_EQ(m.greeting.pid, 100 * other + p);
      EXPECT_TRUE(m.channel.proven());
    }
    EXPECT_FALSE(unjam_test::connect_to(door)) << "a door is open behind the meeting";
  }
}

TEST_F(Pairs, DoNotMeetWhoHasAnotherSecret) {
  for (std::uint32_t p = 0; p < kProcesses; ++p) open(p, secret_of(p == 3 ? 2 : 1));
  for (std::uint32_t p = 0; p < kProcesses; ++p) meet(p);
  const auto others_met = [&] {
    return std::all_of(all.begin(), all.begin() + 3,
                       [](const auto& m) { return m->missing().size() == 1; });
  };
  ASSERT_TRUE(until(others_met, [&] { run(); }));
  for (int i = 0; i < 100; ++i) run();
  for (std::uint32_t p = 0; p < 3; ++p) {
    EXPECT_EQ(all[p]->missing().begin()->first, 3u);
    EXPECT_FALSE(done(p));
  }
  EXPECT_EQ(all[3]->missing().size(), 3u);
  // It called nobody; each of them has called it, and was told.
  EXPECT_NE(all[0]->missing().begin()->second.find("secret"), std::string::npos)
      << all[0]->missing().begin()->second;
}

// ---- the mesh between hosts ----

class RemoteMesh : public Pairs {
 protected:
  // Two ends of a connection between processes 0 and 1.
  void connect(const Mesh::Beats& beats) {
    for (std::uint32_t p = 0; p < kProcesses; ++p) open(p, secret_of(1));
    for (std::uint32_t p = 0; p < kProcesses; ++p) meet(p);
    ASSERT_TRUE(until([&] { return done(0) && done(1); }, [&] { run(); }));
    for (std::uint32_t p = 0; p < 2; ++p) {
      auto met = all[p]->take();
      mesh[p].add_remote(static_cast<int>(1 - p), std::move(met.at(1 - p).channel), beats);
    }
  }
  void poll(std::uint32_t p, std::int64_t ms = 5) {
    mesh[p].poll(ms, {[this, p](int, Frame& f) { heard[p].push_back(f.payload); },
                      [this, p](int, bool died, const std::string& why) {
                        EXPECT_FALSE(died);
                        lost[p] = why;
                      }});
  }

  Mesh mesh[2];
  std::vector<std::string> heard[2];
  std::string lost[2];
};

TEST_F(RemoteMesh, CarriesMessagesAndBeats) {
  connect({20, 60'000});
  const std::string long_text(3 << 20, 'l');
  mesh[0].send(1, MessageType::kFail, "one");
  mesh[0].send(1, MessageType::kFail, long_text);
  mesh[1].send_all(MessageType::kFail, "two");
  ASSERT_TRUE(until([&] { return heard[1].size() == 2 && heard[0].size() == 1; },
                    [&] { poll(0), poll(1); }));
  EXPECT_EQ(heard[1], (std::vector<std::string>{"one", long_text}));
  EXPECT_EQ(heard[0], std::vector<std::string>{"two"});
  EXPECT_EQ(lost[0] + lost[1], "");
}

TEST_F(RemoteMesh, LosesWhoSaysNothing) {
  connect({50, 400});
  // While both are polled, beats go both ways.
  const std::uint64_t end = monotonic_ns() + 600'000'000;
  while (monotonic_ns() < end) poll(0), poll(1);
  EXPECT_EQ(lost[0] + lost[1], "");
  ASSERT_TRUE(until([&] { return !lost[0].empty(); }, [&] { poll(0); }));
  EXPECT_NE(lost[0].find("nothing was heard of it for 400 ms"), std::string::npos) << lost[0];
  // It learns it.
  ASSERT_TRUE(until([&] { return !lost[1].empty(); }, [&] { poll(1); }));
  EXPECT_EQ(mesh[0].live(), std::vector<int>{});
}

TEST_F(RemoteMesh, ForgivesSilenceInWhichItDidNotListen) {
  connect({50, 400});
  for (int i = 0; i < 3; ++i) {
    poll(0), poll(1);
    ::poll(nullptr, 0, 600);  // both stand still
  }
  for (int i = 0; i < 20; ++i) poll(0), poll(1);
  EXPECT_EQ(lost[0] + lost[1], "");
}

}  // namespace
}  // namespace unjam
