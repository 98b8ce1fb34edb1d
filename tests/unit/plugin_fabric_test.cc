// Couriers over network plugins: within one process, between processes, with faults planted into
// the plugin, and with messages that were changed on their way.
#include "transport/network/plugin_fabric.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "tests/net/carried_rank.h"
#include "tests/net/plugins.h"
#include "tests/support/job.h"
#include "tests/support/processes.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::Child;
using unjam_test::kPatienceUs;
using unjam_test::kSanitized;
using unjam_test::net_faults;
using unjam_test::net_plugin_file;
using unjam_test::Processes;
using unjam_test::reset;

class Patience {
 public:
  bool lost() const { return std::chrono::steady_clock::now() > end_; }

 private:
  const std::chrono::steady_clock::time_point end_ =
      std::chrono::steady_clock::now() + std::chrono::microseconds(kPatienceUs);
};

// Short slices go with their heads, long ones by themselves.
ArenaShape shape_of_slots(std::uint32_t escape, std::uint32_t borrow = 0) {
  ArenaShape s;
  s.connectors = 3;
  s.first_connectors_log2 = 1;
  s.escape_slots = 3;
  s.escape_slot_bytes = escape;
  s.borrow_slots = borrow == 0 ? 0 : 3;
  s.borrow_slot_bytes = borrow;
  return s;
}

std::unique_ptr<PluginFabric> fabric_of(NetPlugin& plugin, const CarriedRank& rank,
                                        std::uint32_t ranks, std::string& error) {
  PluginFabricSettings s;
  s.processes = ranks;
  s.self = rank.rank();
  s.most_payload = rank.most_payload();
  s.memory = rank.memory();
  return PluginFabric::make(plugin, s, error);
}

// Ranks in this process, each with a fabric.
class Hosts {
 public:
  Hosts(NetPlugin& plugin, std::uint32_t ranks, const ArenaShape& shape, bool introduced = true) {
    for (std::uint32_t r = 0; r < ranks; ++r) {
      all_.push_back(std::make_unique<CarriedRank>(shape, ranks, r));
      std::string error;
      fabrics_.push_back(fabric_of(plugin, *all_[r], ranks, error));
      if (fabrics_.back() == nullptr) ADD_FAILURE() << error;
      all_[r]->begin(*fabrics_[r]);
    }
    if (introduced) {
      std::string error;
      if (!introduce(error)) ADD_FAILURE() << error;
    }
  }
  bool introduce(std::string& error) {
    for (std::uint32_t a = 0; a < size(); ++a) {
      for (std::uint32_t b = 0; b < a; ++b) {
        PluginAddress of_a, of_b;
        if (!fabrics_[a]->invite(b, &of_a, error) || !fabrics_[b]->invite(a, &of_b, error)) {
          return false;
        }
        fabrics_[a]->meet(b, of_b);
        fabrics_[b]->meet(a, of_a);
      }
    }
    return true;
  }

  std::uint32_t size() const { return static_cast<std::uint32_t>(all_.size()); }
  CarriedRank& operator[](std::uint32_t r) { return *all_[r]; }
  PluginFabric& fabric(std::uint32_t r) { return *fabrics_[r]; }
  std::uint32_t gone() {
    std::uint32_t n = 0;
    for (auto& r : all_) n += r->home().gone_count;
    return n;
  }
  std::string why() {
    std::string text;
    for (auto& r : all_) {
      if (r->home().why != nullptr) text += std::string(r->home().why) + "\n";
    }
    return text;
  }

 private:
  std::vector<std::unique_ptr<CarriedRank>> all_;
  std::vector<std::unique_ptr<PluginFabric>> fabrics_;
};

// Slices of several keys between all ranks, in any order.
struct Traffic {
  struct Way {
    std::uint32_t from, to;
    CarriedStream stream;
  };
  std::vector<Way> ways;
  std::uint64_t each = 0;

  Traffic(std::uint32_t ranks, std::uint64_t keys, std::uint64_t of_each,
          const std::vector<std::uint32_t>& bytes)
      : each(of_each) {
    for (std::uint32_t a = 0; a < ranks; ++a) {
      for (std::uint32_t b = 0; b < ranks; ++b) {
        for (std::uint64_t key = 0; a != b && key < keys; ++key) {
          CarriedStream s;
          s.tag = mix64(key + 1) | 1;
          s.seed = hash_combine(s.tag, a * 10 + b);
          s.bytes = bytes[key % bytes.size()];
          ways.push_back({a, b, s});
        }
      }
    }
  }
  // A turn of whoever it is. False: a wrong slice.
  bool turn(Hosts& hosts, std::mt19937_64& random) {
    Way& w = ways[random() % ways.size()];
    CarriedStream& s = w.stream;
    const std::uint64_t what = random() % 8;
    if (what == 0) {
      if (s.sent != each) s.send(hosts[w.from], w.to);
      LaneTransport& t = hosts[w.from].transport();
      // Keys are forgotten when all was consumed, and come again.
      if (random() % 8 == 0 && t.drained(w.to, s.out)) t.release(w.to, s.out);
    } else if (what == 1) {
      return s.receive(hosts[w.to], w.from) >= 0;
    } else {
      hosts[static_cast<std::uint32_t>(random() % hosts.size())].courier().drive();
    }
    return true;
  }
  bool all_here() const {
    for (const Way& w : ways) {
      if (w.stream.received != each) return false;
    }
    return true;
  }
};

class Carried : public testing::TestWithParam<int> {
 protected:
  Carried() : file_(net_plugin_file(GetParam())), faults_(net_faults(file_)) {
    reset(faults_);
    std::string error;
    plugin_ = NetPlugin::load(file_, error);
    if (plugin_ == nullptr) ADD_FAILURE() << error;
  }
  ~Carried() override { reset(faults_); }
  // Nothing is left open, and the plugin was asked for nothing that it does not have to bear.
  void expect_clean() {
    EXPECT_EQ(faults_.open, 0);
    EXPECT_EQ(faults_.registered, 0);
    EXPECT_EQ(faults_.misused, 0);
    EXPECT_LE(faults_.most, plugin_->requests());
  }

  const std::string file_;
  NetFaults& faults_;
  std::unique_ptr<NetPlugin> plugin_;
};

TEST_P(Carried, EverythingArrivesOverAPluginThatTakesItsTime) {
  const struct {
    std::uint32_t ranks, no_room, piece, delay, not_yet, escape, borrow;
  } nets[] = {{2, 0, 0, 0, 0, 64, 0},         {2, 50, 7, 3, 5, 64, 2000},
              {3, 20, 500, 0, 2, 3000, 9000}, {2, 0, 0, 20, 0, 20000, 0}};
  for (std::uint64_t n = 0; n < std::size(nets); ++n) {
    const auto& net = nets[n];
    const std::uint64_t seed = base_seed() + n;
    SCOPED_TRACE("net " + std::to_string(n) + ", seed " + std::to_string(seed));
    reset(faults_);
    faults_.no_room = net.no_room;
    faults_.piece = net.piece;
    faults_.delay = net.delay;
    faults_.not_yet = net.not_yet;
    {
      std::mt19937_64 random(seed);
      Hosts hosts(*plugin_, net.ranks, shape_of_slots(net.escape, net.borrow));
      Traffic traffic(net.ranks, 6, 30, {60, net.escape, std::max(net.escape, net.borrow), 3});
      const Patience patience;
      while (!traffic.all_here()) {
        ASSERT_FALSE(patience.lost()) << "somebody waits for ever; " << hosts.why();
        ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice";
        ASSERT_EQ(hosts.gone(), 0u) << hosts.why();
      }
      for (std::uint32_t r = 0; r < hosts.size(); ++r) {
        EXPECT_EQ(hosts[r].courier().counts().dropped, 0u);
      }
    }
    expect_clean();
    EXPECT_EQ(faults_.most, plugin_->requests()) << "as many receives as there can be";
  }
}

TEST_P(Carried, WhoSaysGoodByeIsNotGone) {
  {
    Hosts hosts(*plugin_, 2, shape_of_slots(3000));
    Traffic traffic(2, 3, 20, {60, 3000});
    std::mt19937_64 random(base_seed());
    const Patience patience;
    while (!traffic.all_here()) {
      ASSERT_FALSE(patience.lost());
      ASSERT_TRUE(traffic.turn(hosts, random));
    }
    hosts[0].courier().leave(1);
    hosts[1].courier().leave(0);
    while (hosts[0].home().left_count + hosts[1].home().left_count != 2) {
      ASSERT_FALSE(patience.lost());
      hosts[0].courier().drive();
      hosts[1].courier().drive();
    }
    hosts.fabric(0).close(1);
    for (int i = 0; i < 10; ++i) hosts[1].courier().drive();
    EXPECT_EQ(hosts.gone(), 0u) << hosts.why();
  }
  expect_clean();
}

// Each function of the plugin fails, at once or later: the peer is gone, and the text says why.
TEST_P(Carried, AnErrorIsTheEndOfThePeer) {
  const struct {
    int fails;
    const char* says;
    std::int64_t most_calls;
  } cases[] = {{NetFaults::kConnect, "connect() gives 6", 7},
               {NetFaults::kAccept, "accept() gives 6", 7},
               {NetFaults::kRegister, "regMr() gives 6", 60},
               {NetFaults::kSend, "isend() gives 6", 120},
               {NetFaults::kReceive, "irecv() gives 6", 120},
               {NetFaults::kTest, "test() gives 6", 400}};
  for (const auto& c : cases) {
    for (std::int64_t after = 0; after <= c.most_calls; after = after * 3 + 1) {
      SCOPED_TRACE(std::string(c.says) + " after " + std::to_string(after));
      reset(faults_);
      {
        Hosts hosts(*plugin_, 2, shape_of_slots(3000), false);
        faults_.fails = c.fails;
        faults_.after = after;
        std::string error;
        ASSERT_TRUE(hosts.introduce(error)) << error;
        Traffic traffic(2, 4, ~std::uint64_t{0}, {60, 3000});
        std::mt19937_64 random(base_seed() + static_cast<std::uint64_t>(after));
        const Patience patience;
        // (Who has not met yet need not notice.)
        const auto noticed = [&] {
          return hosts.gone() == 2 ||
                 (hosts.gone() == 1 && !hosts.fabric(0).met(1) && !hosts.fabric(1).met(0));
        };
        while (!noticed()) {
          ASSERT_FALSE(patience.lost()) << hosts.why();
          ASSERT_TRUE(traffic.turn(hosts, random));
        }
        const std::string why = hosts.why();
        EXPECT_NE(why.find(c.says), std::string::npos) << why;
        EXPECT_NE(why.find("a planted fault"), std::string::npos) << why;
        EXPECT_NE(why.find("the network plugin unjam-test (" + file_), std::string::npos) << why;
        for (int i = 0; i < 10; ++i) hosts[0].courier().drive();
        EXPECT_LE(hosts[0].home().gone_count, 1u);
      }
      expect_clean();
    }
  }
}

TEST_P(Carried, WhatCannotBeIsSaid) {
  std::string error;
  CarriedRank rank(shape_of_slots(64), 2, 0);
  PluginFabricSettings s;
  s.processes = 2;
  s.device = 1;
  EXPECT_EQ(PluginFabric::make(*plugin_, s, error), nullptr);
  EXPECT_NE(error.find("has no device 1: it has 1, from 0 on"), std::string::npos) << error;
  s.device = 0;
  s.most_payload = 0x7fffffff;
  EXPECT_EQ(PluginFabric::make(*plugin_, s, error), nullptr);
  EXPECT_NE(error.find("a slice may have 2147483647"), std::string::npos) << error;
  const auto fabric = fabric_of(*plugin_, rank, 2, error);
  ASSERT_NE(fabric, nullptr);
  PluginAddress address;
  faults_.fails = NetFaults::kListen;
  EXPECT_FALSE(fabric->invite(1, &address, error));
  EXPECT_NE(error.find("cannot listen: listen() gives 6"), std::string::npos) << error;
  expect_clean();
}

TEST_P(Carried, PayloadsComeFromTheMemoryThatWasNamedOnly) {
  Hosts hosts(*plugin_, 2, shape_of_slots(3000));
  const Patience patience;
  while (!hosts.fabric(0).met(1)) {
    ASSERT_FALSE(patience.lost());
    for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
  }
  const std::vector<unsigned char> elsewhere(2000);
  hosts.fabric(0).send(1, Channel::kBulk, {}, elsewhere.data(), 2000, 0);
  hosts[0].courier().drive();
  EXPECT_NE(hosts.why().find("outside of the memory that was named"), std::string::npos);
  EXPECT_EQ(faults_.misused, 0);
}

// Somebody who has found the port, and does not know the key.
TEST_P(Carried, AStrangersConnectionIsNotTakenForAPeers) {
  CarriedRank rank(shape_of_slots(64), 2, 0);
  std::string error;
  const auto fabric = fabric_of(*plugin_, rank, 2, error);
  ASSERT_NE(fabric, nullptr) << error;
  rank.begin(*fabric);
  PluginAddress address;
  ASSERT_TRUE(fabric->invite(1, &address, error)) << error;
  PluginAddress theirs = address;  // that nobody listens at matters to nobody
  fabric->meet(1, theirs);
  void* comm = nullptr;
  ASSERT_TRUE(plugin_->connect(0, address.handles[0], &comm));
  ASSERT_NE(comm, nullptr);
  unsigned char greeting[24] = {1, 2, 3};
  void* memory = nullptr;
  void* request = nullptr;
  ASSERT_TRUE(plugin_->enroll(comm, greeting, sizeof(greeting), &memory));
  ASSERT_TRUE(plugin_->send(comm, greeting, sizeof(greeting), memory, &request));
  const Patience patience;
  while (rank.home().gone_count == 0) {
    ASSERT_FALSE(patience.lost());
    rank.courier().drive();
  }
  EXPECT_NE(std::string(rank.home().why).find("somebody else has connected"), std::string::npos)
      << rank.home().why;
  EXPECT_TRUE(plugin_->dismiss(comm, memory) && plugin_->close_send(comm));
}

// ---- messages that were changed on their way ----

struct Mutator {
  std::mt19937_64 random;
  std::uint32_t one_in = 1;
  bool of_heads = true;  // otherwise the lengths of payloads that go by themselves
  std::uint64_t mutated = 0;

  static void received(void* me, unsigned char* data, std::uint64_t* bytes) {
    static_cast<Mutator*>(me)->mutate(data, bytes);
  }
  void mutate(unsigned char* data, std::uint64_t* bytes) {
    constexpr std::uint64_t kGreeting = 24, kHead = 72;
    const bool is_head = *bytes <= PluginFabric::kMessageBytes;
    if (*bytes == kGreeting || is_head != of_heads || random() % one_in != 0) return;
    ++mutated;
    if (!of_heads || random() % 8 == 0) {
      *bytes = of_heads ? random() % (PluginFabric::kMessageBytes + 1) : random() % *bytes;
      return;
    }
    // Of the preamble and the head: what a payload says nobody can know.
    for (std::uint64_t times = 1 + random() % 3; times-- > 0;) {
      const std::uint64_t at = random() % kHead;
      data[at] = random() % 2 == 0 ? static_cast<unsigned char>(random())
                                   : static_cast<unsigned char>(data[at] ^ 1u << random() % 8);
    }
  }
};

TEST_P(Carried, ChangedMessagesWriteNothingWrong) {
  const int rounds = kSanitized ? 20 : 60;
  std::uint64_t mutated = 0, refused = 0, ended = 0;
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t seed = hash_combine(base_seed(), static_cast<std::uint64_t>(round));
    SCOPED_TRACE("seed " + std::to_string(seed));
    reset(faults_);
    Mutator mutator;
    mutator.random.seed(seed);
    mutator.one_in = 20;
    faults_.received = Mutator::received;
    faults_.context = &mutator;
    {
      std::mt19937_64 random(seed);
      Hosts hosts(*plugin_, 2, shape_of_slots(200, 3000));
      Traffic traffic(2, 6, 1000, {60, 3000});
      // (A changed step may wait for one that never comes.)
      for (int turns = 0; turns < 4000 && hosts.gone() == 0; ++turns) {
        ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice";
      }
      if (hosts.gone() != 0) ++ended;
      refused += hosts[0].courier().counts().refused + hosts[1].courier().counts().refused;
    }
    mutated += mutator.mutated;
    expect_clean();
  }
  std::printf("  %llu messages changed: %llu of %d connections ended, %llu of them by a courier\n",
              static_cast<unsigned long long>(mutated), static_cast<unsigned long long>(ended),
              rounds, static_cast<unsigned long long>(refused));
  EXPECT_GT(mutated, static_cast<std::uint64_t>(rounds) / 2);
  EXPECT_GT(ended, static_cast<std::uint64_t>(rounds) / 2);
  EXPECT_GT(refused, 0u);
}

TEST_P(Carried, ATruncatedPayloadIsTheEndOfThePeer) {
  {
    Mutator mutator;
    mutator.random.seed(base_seed());
    mutator.of_heads = false;
    faults_.received = Mutator::received;
    faults_.context = &mutator;
    std::mt19937_64 random(base_seed());
    Hosts hosts(*plugin_, 2, shape_of_slots(3000));
    Traffic traffic(2, 2, 1000, {3000});
    const Patience patience;
    while (hosts.gone() == 0) {
      ASSERT_FALSE(patience.lost());
      ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice";
    }
    EXPECT_NE(hosts.why().find("of a payload of "), std::string::npos) << hosts.why();
    for (const auto& w : traffic.ways) EXPECT_EQ(w.stream.received, 0u);
  }
  expect_clean();
}

// ---- two processes ----

void write_all(int fd, const void* from, std::size_t bytes) {
  ASSERT_EQ(write(fd, from, bytes), static_cast<ssize_t>(bytes));
}
void read_all(int fd, void* to, std::size_t bytes) {
  ASSERT_EQ(recv(fd, to, bytes, MSG_WAITALL), static_cast<ssize_t>(bytes));
}

// A rank in a process of its own, and the way to the other one.
struct Alone {
  std::unique_ptr<NetPlugin> plugin;
  std::unique_ptr<CarriedRank> rank;
  std::unique_ptr<PluginFabric> fabric;

  Alone(const std::string& file, std::uint32_t self, int to_other) {
    std::string error;
    plugin = NetPlugin::load(file, error);
    if (plugin == nullptr) unjam_test::fail(error);
    rank = std::make_unique<CarriedRank>(shape_of_slots(200, 5000), 2, self);
    fabric = fabric_of(*plugin, *rank, 2, error);
    if (fabric == nullptr) unjam_test::fail(error);
    rank->begin(*fabric);
    PluginAddress mine, theirs;
    if (!fabric->invite(1 - self, &mine, error)) unjam_test::fail(error);
    write_all(to_other, &mine, sizeof(mine));
    read_all(to_other, &theirs, sizeof(theirs));
    fabric->meet(1 - self, theirs);
  }
};

std::vector<CarriedStream> some_streams(std::uint32_t from) {
  std::vector<CarriedStream> all(6);
  for (std::uint64_t k = 0; k < all.size(); ++k) {
    all[k].tag = mix64(k + 1) | 1;
    all[k].seed = hash_combine(all[k].tag, from);
    all[k].bytes = k % 2 == 0 ? 60 : 5000;
  }
  return all;
}

TEST_P(Carried, BetweenProcesses) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const std::uint64_t seed = base_seed();
  Processes both(2, ", seed " + std::to_string(seed), [&](Child& me) {
    const auto self = static_cast<std::uint32_t>(me.index());
    Alone here(file_, self, ends[self]);
    std::mt19937_64 random(seed + self);
    std::vector<CarriedStream> to = some_streams(self), from = some_streams(1 - self);
    constexpr std::uint64_t kEach = 200;
    std::uint64_t left = from.size() * kEach, unsent = to.size() * kEach;
    HomeThatCounts& home = here.rank->home();
    const Patience patience;
    bool leaving = false;
    while (home.left_count == 0 || !leaving) {
      if (patience.lost()) unjam_test::fail("somebody waits for ever");
      if (home.gone_count != 0) unjam_test::fail(home.why);
      if (!here.rank->courier().drive()) usleep(50);
      for (CarriedStream& s : to) {
        if (s.sent != kEach && s.send(*here.rank, 1 - self)) --unsent;
      }
      for (CarriedStream& s : from) {
        const int got = s.receive(*here.rank, 1 - self);
        if (got < 0) unjam_test::fail("a wrong slice");
        if (got == 1) --left;
      }
      if (left == 0 && unsent == 0 && !leaving) {
        here.rank->courier().leave(1 - self);
        leaving = true;
      }
    }
    EXPECT_EQ(left, 0u);
    // Until the other one has heard of it, too.
    char byte = 0;
    write_all(ends[self], &byte, 1);
    while (recv(ends[self], &byte, 1, MSG_DONTWAIT) != 1) {
      if (patience.lost()) unjam_test::fail("the other one does not end");
      if (!here.rank->courier().drive()) usleep(50);
    }
  });
  EXPECT_TRUE(both.finish());
  close(ends[0]), close(ends[1]);
}

TEST_P(Carried, AKilledProcessIsTheEndOfThePeer) {
  for (std::uint64_t round = 0; round < 3; ++round) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const std::uint64_t seed = base_seed() + round;
    Processes both(2, ", seed " + std::to_string(seed), [&](Child& me) {
      const auto self = static_cast<std::uint32_t>(me.index());
      Alone here(file_, self, ends[self]);
      std::vector<CarriedStream> to = some_streams(self), from = some_streams(1 - self);
      std::mt19937_64 random(seed);
      const std::uint64_t last = 1 + random() % 3000;
      std::uint64_t received = 0;
      HomeThatCounts& home = here.rank->home();
      const Patience patience;
      while (home.gone_count == 0) {
        if (patience.lost()) unjam_test::fail("a death was not seen");
        if (!here.rank->courier().drive()) usleep(50);
        for (CarriedStream& s : to) s.send(*here.rank, 1 - self);
        for (CarriedStream& s : from) {
          const int got = s.receive(*here.rank, 1 - self);
          if (got < 0) unjam_test::fail("a wrong slice");
          if (got == 1) ++received;
        }
        if (self == 1 && received >= last) ::kill(getpid(), SIGKILL);
      }
      const std::string why = home.why;
      EXPECT_NE(why.find("the network plugin unjam-test"), std::string::npos) << why;
      EXPECT_NE(why.find(" gives "), std::string::npos) << why;
    });
    both.expect_killed(1);
    EXPECT_TRUE(both.finish());
    close(ends[0]), close(ends[1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Abi, Carried, testing::Range(NetPlugin::kOldest, NetPlugin::kNewest + 1));

}  // namespace
}  // namespace unjam
