// Couriers over network plugins: within one process, between processes, with faults planted into
// the plugin, and with messages that were changed on their way.
#include "transport/network/plugin_fabric.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "tests/net/carried_rank.h"
#include "tests/net/plugins.h"
#include "tests/net/traffic.h"
#include "tests/support/job.h"
#include "tests/support/processes.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::Child;
using unjam_test::kSanitized;
using unjam_test::net_faults;
using unjam_test::net_plugin_file;
using unjam_test::Processes;
using unjam_test::reset;

std::unique_ptr<PluginFabric> fabric_of(NetPlugin& plugin, const CarriedRank& rank,
                                        std::uint32_t ranks, std::string& error,
                                        std::uint32_t patience_ms = 10'000) {
  PluginFabricSettings s;
  s.greeting_patience_ms = patience_ms;
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
        if (!fabrics_[a]->meet(b, of_b, error) || !fabrics_[b]->meet(a, of_a, error)) {
          return false;
        }
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

class Carried : public testing::TestWithParam<int> {
 public:
  ~Carried() override { reset(faults_); }

 protected:
  Carried() : file_(net_plugin_file(GetParam())), faults_(net_faults(file_)) {
    reset(faults_);
    std::string error;
    plugin_ = NetPlugin::load(file_, error);
    if (plugin_ == nullptr) ADD_FAILURE() << error;
  }
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
  } nets[] = {{2, 0, 0, 0, 0, 64, 0},
              {2, 50, 7, 3, 5, 64, 2000},
              {3, 20, 500, 0, 2, 3000, 9000},
              {2, 0, 0, 20, 0, 20000, 0}};
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
      const std::uint32_t most = std::max(net.escape, net.borrow);
      Traffic traffic(net.ranks, 6, 30, {60, most, net.escape, most, most, 3});
      traffic.drives = n % 2 == 0 ? 6 : 1;
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
  } cases[] = {
      {NetFaults::kConnect, "connect() gives 6", 7}, {NetFaults::kAccept, "accept() gives 6", 7},
      {NetFaults::kRegister, "regMr() gives 6", 60}, {NetFaults::kSend, "isend() gives 6", 120},
      {NetFaults::kReceive, "irecv() gives 6", 120}, {NetFaults::kTest, "test() gives 6", 400}};
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
  hosts.fabric(0).send(1, FrameChannel::kBulk, {}, elsewhere.data(), 2000, 0);
  hosts[0].courier().drive();
  EXPECT_NE(hosts.why().find("outside of the memory that was named"), std::string::npos);
  EXPECT_EQ(faults_.misused, 0);
}

// Somebody who has found the port, and does not know the key; or connects to another port than he
// says, or says nothing that makes sense, or nothing at all, or is gone at once. Who knows all of
// it is let in. The peer, which comes behind, is let in whatever the stranger has said.
TEST_P(Carried, AStrangersConnectionIsNotTakenForAPeers) {
  enum { kRight, kWrongWord, kWrongKey, kWrongNumber, kTooShort, kSilent, kGone, kCases };
  for (int what = 0; what < kCases; ++what) {
    SCOPED_TRACE(what);
    {
      CarriedRank rank(shape_of_slots(64), 2, 0);
      std::string error;
      const auto fabric = fabric_of(*plugin_, rank, 2, error, 50);
      ASSERT_NE(fabric, nullptr) << error;
      rank.begin(*fabric);
      PluginAddress address;
      ASSERT_TRUE(fabric->invite(1, &address, error)) << error;
      ASSERT_TRUE(fabric->meet(1, address, error))
          << error;  // (it meets itself: that is its peer here)
      void* comm = nullptr;
      ASSERT_TRUE(plugin_->connect(0, address.handles[0], &comm));
      ASSERT_NE(comm, nullptr);
      unsigned char greeting[24] = {'u', 'n', 'j', 'a', 'm', '1'};
      std::memcpy(greeting + 8, &address.key, 8);
      if (what == kWrongWord) greeting[3] ^= 1;
      if (what == kWrongKey) greeting[15] ^= 1;
      if (what == kWrongNumber) greeting[16] = 1;
      const std::size_t bytes = what == kTooShort ? 16 : 24;
      void* memory = nullptr;
      void* request = nullptr;
      ASSERT_TRUE(plugin_->enroll(comm, greeting, sizeof(greeting), &memory));
      if (what < kSilent) {
        ASSERT_TRUE(plugin_->send(comm, greeting, bytes, memory, &request));
      }
      const auto leave = [&] {
        EXPECT_TRUE(plugin_->dismiss(comm, memory) && plugin_->close_send(comm));
      };
      if (what == kGone) leave();
      const Patience patience;
      while (!fabric->met(1)) {
        ASSERT_FALSE(patience.lost());
        rank.courier().drive();
        ASSERT_EQ(rank.home().gone_count, 0u) << rank.home().why;
      }
      EXPECT_EQ(fabric->strangers(), what == kRight ? 0u : 1u);
      if (what != kGone) leave();
    }
    expect_clean();
  }
}

TEST_P(Carried, AnAddressIsNotBelieved) {
  {
    CarriedRank rank(shape_of_slots(64), 2, 0);
    std::string error;
    const auto fabric = fabric_of(*plugin_, rank, 2, error);
    ASSERT_NE(fabric, nullptr) << error;
    PluginAddress address;
    EXPECT_FALSE(fabric->meet(1, address, error));
    EXPECT_EQ(error, "process 1 was not invited, or was met before");
    ASSERT_TRUE(fabric->invite(1, &address, error)) << error;
    for (std::size_t n = 0; n < sizeof(address); ++n) {
      PluginAddress changed = address;
      reinterpret_cast<unsigned char*>(&changed)[n] ^= 1;
      ASSERT_FALSE(fabric->meet(1, changed, error)) << "byte " << n;
      EXPECT_EQ(error, "the address of process 1 is none of a network plugin's, or was damaged");
    }
    // Of another version, and of another size.
    const int other = GetParam() == NetPlugin::kNewest ? NetPlugin::kOldest : NetPlugin::kNewest;
    {
      const auto plugin = NetPlugin::load(net_plugin_file(other), error);
      ASSERT_NE(plugin, nullptr) << error;
      const auto of_other = fabric_of(*plugin, rank, 2, error);
      ASSERT_NE(of_other, nullptr) << error;
      PluginAddress foreign;
      ASSERT_TRUE(of_other->invite(1, &foreign, error)) << error;
      EXPECT_FALSE(fabric->meet(1, foreign, error));
      EXPECT_EQ(error, "process 1 uses the network plugin unjam-test, v" + std::to_string(other) +
                           ", and here it is " + plugin_->title() + ". Give both the same one");
    }
    CarriedRank longer(shape_of_slots(128), 2, 1);
    const auto of_longer = fabric_of(*plugin_, longer, 2, error);
    ASSERT_NE(of_longer, nullptr) << error;
    PluginAddress foreign;
    ASSERT_TRUE(of_longer->invite(0, &foreign, error)) << error;
    EXPECT_FALSE(fabric->meet(1, foreign, error));
    EXPECT_NE(error.find("at most 128 bytes, and here it is 64"), std::string::npos) << error;
    EXPECT_TRUE(fabric->meet(1, address, error)) << error;
  }
  expect_clean();
}

// Whoever cannot end a connection may end what was registered with it, or the other way round.
// Where both fail, memory stays where it is.
TEST_P(Carried, WhatDoesNotEndKeepsItsMemory) {
  if (kSanitized) GTEST_SKIP() << "leaks, as it has to";
  for (int what = 0; what < 4; ++what) {
    SCOPED_TRACE(what);
    {
      Hosts hosts(*plugin_, 2, shape_of_slots(64));
      const Patience patience;
      while (!hosts.fabric(0).met(1)) {
        ASSERT_FALSE(patience.lost());
        for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
      }
      EXPECT_FALSE(hosts.fabric(0).drained(1)) << "it is open";
      faults_.stays_registered = what & 1;
      faults_.stays_open = what & 2;
      hosts.fabric(0).close(1);
      faults_.stays_registered = faults_.stays_open = 0;
      EXPECT_EQ(hosts.fabric(0).drained(1), what != 3);
      hosts.fabric(0).close(1);
      EXPECT_EQ(hosts.fabric(0).drained(1), what != 3);
      hosts[0].courier().drive();
    }
    expect_clean();
  }
}

// Until a greeting has come, or went, a connection has nothing but messages registered with it.
TEST_P(Carried, MemoryIsRegisteredForWhoIsProvedToBeThePeer) {
  faults_.no_room = 100;  // no greeting goes
  {
    Hosts hosts(*plugin_, 2, shape_of_slots(64));
    for (int i = 0; i < 100; ++i) {
      for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
    }
    EXPECT_EQ(faults_.registered, std::int64_t{4 * PluginAddress::kConnections});
    faults_.no_room = 0;
    const Patience patience;
    while (!hosts.fabric(0).met(1) || !hosts.fabric(1).met(0)) {
      ASSERT_FALSE(patience.lost());
      for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
    }
    // Two views of arenas, and what nobody wants.
    EXPECT_EQ(faults_.registered, std::int64_t{4 * PluginAddress::kConnections * (1 + 3)});
  }
  expect_clean();
}

// ---- messages that were changed on their way ----

struct Mutator {
  std::mt19937_64 random{0};
  std::uint32_t one_in = 1;
  bool of_heads = true;  // otherwise of payloads that go by themselves
  bool cuts = false;     // all are too short, and nothing else
  std::uint64_t mutated = 0;

  static void received(void* me, unsigned char* data, std::uint64_t* bytes) {
    static_cast<Mutator*>(me)->mutate(data, bytes);
  }
  void mutate(unsigned char* data, std::uint64_t* bytes) {
    constexpr std::uint64_t kGreeting = 24, kHead = 72;
    const bool is_head = *bytes <= PluginFabric::kMessageBytes;
    if (*bytes == kGreeting || is_head != of_heads || random() % one_in != 0) return;
    ++mutated;
    if (cuts || random() % 8 == 0) {
      const std::uint64_t now =
          random() % (cuts ? *bytes : std::uint64_t{PluginFabric::kMessageBytes + 1});
      if (now < *bytes) std::memset(data + now, 0xee, *bytes - now);
      *bytes = now;
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

TEST_P(Carried, ATruncatedMessageIsTheEndOfThePeer) {
  for (int round = 0; round < 20; ++round) {
    const bool of_heads = round % 2 == 0;
    const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(round);
    SCOPED_TRACE("seed " + std::to_string(seed));
    {
      Mutator mutator;
      mutator.random.seed(seed);
      mutator.of_heads = of_heads;
      mutator.cuts = true;
      faults_.received = Mutator::received;
      faults_.context = &mutator;
      std::mt19937_64 random(seed);
      Hosts hosts(*plugin_, 2, shape_of_slots(3000));
      Traffic traffic(2, 2, 1000, {of_heads ? 900u : 3000u});
      const Patience patience;
      while (hosts.gone() == 0) {
        ASSERT_FALSE(patience.lost());
        ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice";
      }
      const char* const says = of_heads ? "a message that is none of ours" : "of a payload of ";
      EXPECT_NE(hosts.why().find(says), std::string::npos) << hosts.why();
      for (const auto& w : traffic.ways) EXPECT_EQ(w.stream.received, 0u);
    }
    expect_clean();
  }
}

// A message that says it is longer than the receive it has come into, and all of whose parts agree
// with that: its size, its preamble, and the head.
TEST_P(Carried, AMessageLongerThanItsPlaceIsNoneOfOurs) {
  {
    constexpr std::uint64_t kHead = 72;
    static constexpr std::uint32_t kClaimed = 2900;
    faults_.received = [](void*, unsigned char* data, std::uint64_t* bytes) {
      constexpr unsigned char kInline = 1;
      if (*bytes <= kHead || *bytes > PluginFabric::kMessageBytes || data[4] != kInline) return;
      *bytes = kHead + kClaimed;
      std::memcpy(data, &kClaimed, sizeof(kClaimed));
      std::memcpy(data + 16, &kClaimed, sizeof(kClaimed));  // CourierFrame::bytes
    };
    Hosts hosts(*plugin_, 2, shape_of_slots(3000));
    Traffic traffic(2, 2, 1000, {900u});
    std::mt19937_64 random(base_seed());
    const Patience patience;
    while (hosts.gone() == 0) {
      ASSERT_FALSE(patience.lost());
      ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice, seed " << base_seed();
    }
    EXPECT_NE(hosts.why().find("a message that is none of ours"), std::string::npos) << hosts.why();
  }
  expect_clean();
}

// Whoever has said good-bye and says more: the message was taken, and its receive is not asked of
// the plugin again.
TEST_P(Carried, AFrameAfterTheGoodByeIsTheEndOfTheConnection) {
  {
    Hosts hosts(*plugin_, 2, shape_of_slots(64));
    const Patience patience;
    while (!hosts.fabric(0).met(1) || !hosts.fabric(1).met(0)) {
      ASSERT_FALSE(patience.lost());
      for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
    }
    CourierFrame bye;
    bye.type = FrameType::kBye;  // step 0: nothing has come before it
    for (int i = 0; i < 2; ++i) {
      ASSERT_TRUE(hosts.fabric(0).send(1, FrameChannel::kShort, encode(bye), nullptr, 0, 0));
    }
    while (hosts.fabric(1).met(0)) {
      ASSERT_FALSE(patience.lost());
      hosts.fabric(0).poll(hosts[0].courier());
      hosts[1].courier().drive();
      ASSERT_EQ(faults_.misused, 0);
    }
    for (int i = 0; i < 10; ++i) hosts[1].courier().drive();
    EXPECT_TRUE(hosts.fabric(1).drained(0)) << "the courier, for which it has left, closes nothing";
    EXPECT_EQ(hosts[1].home().left_count, 1u);
    EXPECT_EQ(hosts[1].home().gone_count, 0u);
  }
  expect_clean();
}

// ---- two processes ----

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
    if (!fabric->meet(1 - self, theirs, error)) unjam_test::fail(error);
  }
};

void between_processes(const std::string& file) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  Processes both(2, "", [&](Child& me) {
    const auto self = static_cast<std::uint32_t>(me.index());
    Alone here(file, self, ends[self]);
    exchange_and_leave(*here.rank, ends[self]);
  });
  EXPECT_TRUE(both.finish());
  close(ends[0]), close(ends[1]);
}

void until_one_is_killed(const std::string& file) {
  for (std::uint64_t round = 0; round < 3; ++round) {
    int ends[2];
    ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
    const std::uint64_t seed = base_seed() + round;
    Processes both(2, ", seed " + std::to_string(seed), [&](Child& me) {
      const auto self = static_cast<std::uint32_t>(me.index());
      Alone here(file, self, ends[self]);
      exchange_until_killed(*here.rank, self == 1, seed);
      const std::string why = here.rank->home().why;
      EXPECT_NE(why.find(here.plugin->title()), std::string::npos) << why;
      EXPECT_NE(why.find(" gives "), std::string::npos) << why;
    });
    both.expect_killed(1);
    EXPECT_TRUE(both.finish());
    close(ends[0]), close(ends[1]);
  }
}

TEST_P(Carried, BetweenProcesses) { between_processes(file_); }
TEST_P(Carried, AKilledProcessIsTheEndOfThePeer) { until_one_is_killed(file_); }

// Any other plugin, whose device 0 reaches this machine.
TEST(ForeignPlugin, BetweenProcesses) {
  const char* const file = std::getenv("UNJAM_TEST_NET_PLUGIN");
  if (file == nullptr) GTEST_SKIP() << "UNJAM_TEST_NET_PLUGIN names no libnccl-net*.so";
  between_processes(file);
}
TEST(ForeignPlugin, AKilledProcessIsTheEndOfThePeer) {
  const char* const file = std::getenv("UNJAM_TEST_NET_PLUGIN");
  if (file == nullptr) GTEST_SKIP() << "UNJAM_TEST_NET_PLUGIN names no libnccl-net*.so";
  until_one_is_killed(file);
}

INSTANTIATE_TEST_SUITE_P(Abi, Carried, testing::Range(NetPlugin::kOldest, NetPlugin::kNewest + 1));

}  // namespace
}  // namespace unjam
