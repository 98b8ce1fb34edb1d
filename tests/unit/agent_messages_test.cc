// Agents: who is whose parent, what is on the wire, the connection that proves the secret.
#include "control/agent_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>

#include "base/clock.h"
#include "control/agent_tree.h"
#include "control/door.h"
#include "control/tagged_channel.h"
#include "tests/support/agent_messages.h"
#include "tests/support/job.h"

namespace unjam_test {
namespace {

using unjam::kAgentFanOut;
using unjam::kNoAgent;
using unjam::NumberList;
using unjam::SocketAddress;
using unjam::TaggedChannel;
using Role = TaggedChannel::Role;

// ---- the tree ----

// Built as agents arrive: each is given to the first that has room.
TEST(AgentTree, IsWhatArrivalsFill) {
  const std::uint32_t most = 5000;
  std::vector<std::uint32_t> parent(most, kNoAgent), children(most, 0), depth(most, 0);
  std::vector<std::uint32_t> first(most, 0);
  std::uint32_t room = 0;
  for (std::uint32_t n = 1; n <= most; ++n) {
    const std::uint32_t a = n - 1;
    if (a > 0) {
      if (children[room] == kAgentFanOut) ++room;
      if (children[room]++ == 0) first[room] = a;
      parent[a] = room;
      depth[a] = depth[room] + 1;
    }
    ASSERT_EQ(unjam::agent_parent(a), parent[a]);
    ASSERT_EQ(unjam::agent_depth(a), depth[a]);
    ASSERT_EQ(unjam::interior_agents(n), n == 1 ? 0 : room + 1);
    ASSERT_EQ(unjam::agent_children(room, n), children[room]);
    ASSERT_EQ(unjam::agent_children(a, n), 0u);
    if (room > 0) {
      ASSERT_EQ(unjam::agent_children(room - 1, n), kAgentFanOut);
      ASSERT_EQ(unjam::first_agent_child(room), first[room] == 0 ? n : first[room]);
    }
  }
  for (std::uint32_t to = 0; to < most; ++to) {
    std::set<std::uint32_t> above;
    for (std::uint32_t below = to, p = parent[to]; p != kNoAgent; below = p, p = parent[p]) {
      ASSERT_EQ(unjam::agent_child_towards(p, to), below);
      above.insert(p);
    }
    for (std::uint32_t from = to % 7; from < most; from += 211) {
      if (above.count(from) == 0) {
        ASSERT_EQ(unjam::agent_child_towards(from, to), kNoAgent);
      }
    }
  }
}

TEST(AgentTree, TheDeadAreSkipped) {
  std::mt19937_64 random(5);
  for (int turn = 0; turn < 200; ++turn) {
    const auto n = static_cast<std::uint32_t>(2 + random() % 3000);
    std::vector<bool> dead(n);
    for (std::uint64_t k = random() % std::min<std::uint64_t>(n, 80); k-- > 0;) {
      dead[random() % (turn % 2 == 0 ? n : std::min(n, 40u))] = true;
    }
    const auto gone = [&](std::uint32_t a) -> bool { return dead[a]; };
    std::uint32_t lowest = 0;
    while (lowest < n && dead[lowest]) ++lowest;
    if (lowest == n) continue;
    ASSERT_EQ(unjam::standing_root(n, gone), lowest);
    for (std::uint32_t a = 0; a < n; ++a) {
      if (dead[a]) continue;
      std::uint32_t p = a, steps = 0;
      do p = unjam::agent_parent(p);
      while (p != kNoAgent && dead[p]);
      if (p == kNoAgent && a != lowest) p = lowest;
      ASSERT_EQ(unjam::living_agent_parent(a, gone), p) << a << " of " << n;
      for (; p != kNoAgent && steps <= n; ++steps) p = unjam::living_agent_parent(p, gone);
      ASSERT_LE(steps, n) << "a circle";
    }
  }
}

// ---- messages ----

TEST(AgentMessages, RoundTripAndNothingElse) {
  for (const SampleAgentMessage& m : sample_agent_messages()) {
    std::string again;
    ASSERT_TRUE(decode_any(m.type, m.bytes, again)) << number_of(m.type);
    EXPECT_EQ(again, m.bytes) << number_of(m.type);
    for (std::size_t cut = 0; cut < m.bytes.size(); ++cut) {
      EXPECT_FALSE(decode_any(m.type, m.bytes.substr(0, cut), again)) << number_of(m.type);
    }
    EXPECT_FALSE(decode_any(m.type, m.bytes + '\0', again)) << number_of(m.type);
  }
}

// Whatever is taken for a message is one, and is the same after encoding and decoding again.
TEST(AgentMessages, MutatedOnesAreRefusedOrWhole) {
  std::mt19937_64 random(11);
  const auto samples = sample_agent_messages();
  int taken = 0;
  for (int i = 0; i < 60000; ++i) {
    const SampleAgentMessage& m = samples[random() % samples.size()];
    std::string bytes = m.bytes;
    for (std::uint64_t times = 1 + random() % 3; times-- > 0 && !bytes.empty();) {
      const std::size_t at = random() % bytes.size();
      const std::uint32_t odd[] = {0, 1, 0x7fffffff, 0xffffffff, 65535, 65536};
      switch (random() % 4) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << random() % 8);
          break;
        case 1:
          bytes.resize(at);
          break;
        case 2:
          if (at + 4 <= bytes.size()) std::memcpy(bytes.data() + at, &odd[random() % 6], 4);
          break;
        default:
          bytes.insert(at, bytes.substr(at, random() % 16));
      }
    }
    std::string once, twice;
    if (!decode_any(m.type, bytes, once)) continue;
    ++taken;
    ASSERT_TRUE(decode_any(m.type, once, twice));
    ASSERT_EQ(once, twice);
  }
  EXPECT_GT(taken, 100);
}

TEST(AgentMessages, ListsAreAscendingRanges) {
  unjam::AgentQuestionMessage m;
  for (std::uint32_t a = 0; a < unjam::kMostAgents; ++a) m.to.push_back(a);
  const std::string bytes = m.encode();
  EXPECT_LT(bytes.size(), 64u);
  unjam::AgentQuestionMessage back;
  ASSERT_TRUE(back.decode(bytes));
  EXPECT_EQ(back.to, m.to);
  m.to = {3, 3};
  EXPECT_FALSE(back.decode(m.encode())) << "twice";
  m.to = {5, 3};
  EXPECT_FALSE(back.decode(m.encode())) << "descending";
  m.to = {unjam::kMostAgents};
  EXPECT_FALSE(back.decode(m.encode())) << "too large";
}

TEST(AgentMessages, TheLargestTableIsAFrame) {
  std::mt19937_64 random(3);
  std::vector<unjam::AgentJoin> joins(unjam::kMostAgents);
  for (std::uint32_t a = 0; a < unjam::kMostAgents; ++a) {
    joins[a].host.resize(unjam::kLongestAgentHost);
    for (char& c : joins[a].host) c = static_cast<char>('a' + random() % 26);
    joins[a].ranks = {{a, random()}};
  }
  const unjam::AgentTable table(unjam::kMostAgentRanks, joins,
                                std::vector<SocketAddress>(unjam::agent_doors(unjam::kMostAgents)));
  const std::string bytes = table.encode();
  EXPECT_LT(bytes.size(), unjam::kLongestAgentFrame);
  unjam::AgentTable back;
  ASSERT_TRUE(back.decode(bytes));
  EXPECT_EQ(back.encode(), bytes);
  EXPECT_EQ(back.host(777), joins[777].host);
  EXPECT_EQ(back.ranks_of(65535), NumberList{65535});
}

TEST(AgentMessages, RanksInWords) {
  EXPECT_EQ(unjam::ranks_in_words({3}), "rank 3");
  EXPECT_EQ(unjam::ranks_in_words({3, 4, 7, 8, 9}), "ranks 3, 4, 7-9");
  NumberList even;
  for (std::uint32_t r = 0; r < 100; r += 2) even.push_back(r);
  EXPECT_EQ(unjam::ranks_in_words(even, 3), "ranks 0, 2, 4 and 47 more");
}

TEST(SocketAddresses, AreReadAndWritten) {
  for (const char* text : {"127.0.0.1:80", "[::1]:8080", "10.1.2.3:0"}) {
    SocketAddress a;
    std::string error;
    if (!unjam::resolve_address(text, a, error) && text[0] == '[') continue;  // no IPv6 here
    EXPECT_EQ(a.text(), text) << error;
    EXPECT_EQ(a.loopback(), text[1] != '0');
  }
  for (const char* text :
       {"", "host", "host:", ":80", "::1:80", "1.2.3.4:65536", "1.2.3.4:8x", "1.2.3.4:-1"}) {
    SocketAddress a;
    std::string error;
    EXPECT_FALSE(unjam::resolve_address(text, a, error)) << text;
    EXPECT_FALSE(error.empty());
  }
}

TEST(Doors, AreShutAndOpenedAgain) {
  SocketAddress any;
  std::string error;
  ASSERT_TRUE(unjam::resolve_address("127.0.0.1:0", any, error));
  unjam::Door door;
  ASSERT_TRUE(door.open(any, error)) << error;
  const SocketAddress at = door.address();
  const auto knock_at = [&] {
    Fd s(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    sockaddr_storage storage;
    const socklen_t size = at.to(storage);
    return connect(s.get(), reinterpret_cast<sockaddr*>(&storage), size) == 0;
  };
  for (int turn = 0; turn < 3; ++turn) {
    EXPECT_TRUE(knock_at());
    door.shut();
    EXPECT_FALSE(knock_at());
    ASSERT_TRUE(door.reopen(error)) << error;
    EXPECT_EQ(door.address(), at);
  }
  door.release();
  EXPECT_FALSE(knock_at());
  EXPECT_FALSE(door.reopen(error));
}

// ---- tagged channels ----

// Two ends, and between them somebody who hands on what he likes.
struct Wire {
  explicit Wire(const JobSecret& of_door, const JobSecret& of_caller,
                std::uint32_t door_version = 1, std::uint32_t caller_version = 1) {
    auto [a, b] = socket_pair();
    auto [c, d] = socket_pair();
    door = TaggedChannel(std::move(a), Role::kDoor, of_door, door_version, 4096);
    caller = TaggedChannel(std::move(d), Role::kCaller, of_caller, caller_version, 4096);
    at_door = std::move(b);
    at_caller = std::move(c);
  }
  static std::string taken(const Fd& from) {
    std::string all(1 << 16, '\0');
    const ssize_t n = recv(from.get(), all.data(), all.size(), MSG_DONTWAIT);
    all.resize(n > 0 ? static_cast<std::size_t>(n) : 0);
    return all;
  }
  // Both ends say and hear all that they can.
  void talk() {
    for (int i = 0; i < 6; ++i) {
      door.flush(door_error);
      caller.flush(caller_error);
      send_raw(at_caller.get(), taken(at_door));
      send_raw(at_door.get(), taken(at_caller));
      door_live = door_live && door.receive(door_error);
      caller_live = caller_live && caller.receive(caller_error);
    }
  }
  TaggedChannel door, caller;
  Fd at_door, at_caller;
  bool door_live = true, caller_live = true;
  std::string door_error, caller_error;
};

TEST(TaggedChannels, ProveTheSecretAndCarryFrames) {
  const JobSecret secret = secret_from(1);
  Wire w(secret, secret);
  EXPECT_FALSE(w.door.proven());
  EXPECT_THROW(w.caller.post(7, "too early"), std::logic_error);
  w.talk();
  ASSERT_TRUE(w.door.proven() && w.caller.proven()) << w.door_error << w.caller_error;
  Frame f;
  for (int i = 0; i < 100; ++i) {
    w.caller.post(7, std::string(static_cast<std::size_t>(i * 41), 'x'));
    w.door.post(8, std::to_string(i));
    w.talk();
    ASSERT_TRUE(w.door.pop(f));
    EXPECT_EQ(f.type, 7);
    EXPECT_EQ(f.payload, std::string(static_cast<std::size_t>(i * 41), 'x'));
    ASSERT_TRUE(w.caller.pop(f));
    EXPECT_EQ(f.payload, std::to_string(i));
    EXPECT_FALSE(w.caller.pop(f));
  }
  EXPECT_THROW(w.caller.post(7, std::string(4097, 'x')), std::logic_error);
}

TEST(TaggedChannels, RefuseAWrongSecretAndAnotherVersion) {
  {
    Wire w(secret_from(1), secret_from(2));
    w.talk();
    EXPECT_FALSE(w.door.proven() || w.caller.proven() || w.door_live || w.caller_live);
    EXPECT_NE(w.caller_error.find("the wrong secret: use the unique id"), std::string::npos);
    EXPECT_NE(w.door_error.find("the wrong secret"), std::string::npos);
  }
  {
    Wire w(secret_from(1), secret_from(1), 1, 2);
    w.talk();
    EXPECT_FALSE(w.door.proven() || w.caller.proven());
    EXPECT_NE(w.caller_error.find("use one version of unjam"), std::string::npos) << w.caller_error;
  }
}

// Who does not know the secret can lure nobody: the caller asks for the proof, too.
TEST(TaggedChannels, TheDoorMustProveItselfToo) {
  auto [a, b] = socket_pair();
  TaggedChannel caller(std::move(a), Role::kCaller, secret_from(1), 1, 4096);
  unjam::HelloMessage hello;
  hello.version = 1;
  send_raw(b.get(), frame_bytes(number_of(MessageType::kHello), hello.encode()));
  std::string error;
  ASSERT_TRUE(caller.receive(error));
  ASSERT_TRUE(caller.flush(error));
  // It sends back what it was sent: no proof from this end.
  const std::string proof = Wire::taken(b);
  EXPECT_FALSE(proof.empty());
  send_raw(b.get(), proof);
  EXPECT_FALSE(caller.receive(error));
  EXPECT_FALSE(caller.proven());
  EXPECT_NE(error.find("does not know this job's secret"), std::string::npos) << error;
}

TEST(TaggedChannels, StrangersAreNotHeard) {
  std::mt19937_64 random(17);
  for (int i = 0; i < 300; ++i) {
    auto [a, b] = socket_pair();
    TaggedChannel door(std::move(a), Role::kDoor, secret_from(1), 1, 4096);
    std::string noise =
        i % 3 == 0 ? frame_bytes(static_cast<std::uint16_t>(random() % 200), "") : "";
    for (std::uint64_t n = random() % 400; n-- > 0;) noise += static_cast<char>(random());
    if (i % 5 == 0) noise = frame_bytes(2, "x", 0x7fffffff, 0);
    if (i % 7 == 0) noise = frame_bytes(number_of(MessageType::kProof), std::string(36, 'p'));
    send_raw(b.get(), noise);
    b.reset();
    std::string error;
    bool live = true;
    for (int k = 0; k < 4 && live; ++k) live = door.receive(error);
    EXPECT_FALSE(live);
    EXPECT_FALSE(error.empty());
    Frame f;
    EXPECT_FALSE(door.pop(f));
    EXPECT_FALSE(door.proven());
  }
}

// Each thing that somebody on the way could do to frames ends the connection, before any of it is
// taken for a frame.
TEST(TaggedChannels, WhatWasTamperedWithEndsTheConnection) {
  const JobSecret secret = secret_from(1);
  const char* const kinds[] = {"payload",  "type",    "length", "tag",    "repeated",
                               "left out", "swapped", "other",  "mirror", "injected"};
  for (int kind = 0; kind < 10; ++kind) {
    SCOPED_TRACE(kinds[kind]);
    Wire w(secret, secret), other(secret, secret);
    w.talk();
    other.talk();
    ASSERT_TRUE(w.door.proven() && other.caller.proven());
    const auto sent_by = [](TaggedChannel& end, const Fd& out, const char* payload) {
      std::string error;
      end.post(9, payload);
      end.flush(error);
      return Wire::taken(out);
    };
    std::string first = sent_by(w.caller, w.at_caller, "first frame");
    const std::string second = sent_by(w.caller, w.at_caller, "second");
    std::size_t good = 0;  // frames that are right
    switch (kind) {
      case 0:
        first[10] ^= 1;
        break;
      case 1:
        first[4] ^= 1;
        break;
      case 2:
        first[0] = static_cast<char>(first[0] - 1);
        break;
      case 3:
        first.back() ^= 64;
        break;
      case 4:
        first += first;
        good = 1;
        break;
      case 5:
        first.clear();
        break;
      case 6:
        first = second + first;
        break;
      case 7:
        first = sent_by(other.caller, other.at_caller, "first frame");
        break;
      case 8:
        first = sent_by(w.door, w.at_door, "first frame");
        break;
      default:
        first = frame_bytes(9, "first frame12345678");
    }
    send_raw(w.at_door.get(), first + second);
    std::string error;
    Frame f;
    std::size_t popped = 0;
    w.door.receive(error);
    while (w.door.pop(f)) {
      ++popped;
      EXPECT_EQ(f.payload, "first frame");
    }
    EXPECT_EQ(popped, good);
    EXPECT_TRUE(w.door.broken());
    EXPECT_FALSE(w.door.receive(error));
    EXPECT_FALSE(w.door.pop(f));
    EXPECT_FALSE(error.empty());
  }
}

}  // namespace
}  // namespace unjam_test
