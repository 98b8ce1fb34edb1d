// Couriers over UCX's active messages. Without UCX these tests are skipped: UNJAM_TEST_UCX names a
// libucp.so.0, else the system's is taken. All traffic is on the loopback device.
#include "transport/network/ucx_fabric.h"

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "tests/net/carried_rank.h"
#include "tests/net/plugins.h"
#include "tests/net/traffic.h"
#include "tests/support/job.h"
#include "tests/support/processes.h"
#include "transport/network/ucx_library.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::Child;
using unjam_test::Processes;

const UcxLibrary* library(std::string& error) {
  const char* const file = std::getenv("UNJAM_TEST_UCX");
  return UcxLibrary::load(file == nullptr ? "" : file, error);
}

std::unique_ptr<UcxFabric> ucx_of(const UcxLibrary& ucx, const CarriedRank& rank,
                                  std::uint32_t ranks, std::string& error) {
  UcxFabricSettings s;
  s.processes = ranks;
  s.self = rank.rank();
  s.most_payload = rank.most_payload();
  s.transports = "tcp";
  s.devices = "lo";
  return UcxFabric::make(ucx, s, error);
}

// UCX in a process of its own: what it leaves behind is nobody else's, and a fork after it is none.
// False: there is none.
bool with_ucx(int count, const std::function<void(Child&, const UcxLibrary&)>& body,
              int killed = -1) {
  const std::string seed = ", seed " + std::to_string(base_seed());
  Processes all(count, seed, [&](Child& me) {
    std::string error;
    const UcxLibrary* const ucx = library(error);
    me.say(ucx == nullptr ? "none: " + error : "there");
    if (ucx != nullptr) body(me, *ucx);
  });
  if (killed >= 0) all.expect_killed(killed);
  std::string first;
  all.wait_until([&] {
    if (!all.said(0).empty()) first = all.said(0)[0];
    return !first.empty() || all.ended(0);
  });
  const bool there = first == "there";
  if (!there && killed >= 0) return false;
  EXPECT_TRUE(all.finish());
  return there;
}
#define UNJAM_SKIP_WITHOUT(there) \
  if (!(there)) GTEST_SKIP() << "UCX is not here: UNJAM_TEST_UCX names a libucp.so.0"

class Hosts {
 public:
  Hosts(const UcxLibrary& ucx, std::uint32_t ranks, const ArenaShape& shape) {
    std::string error;
    for (std::uint32_t r = 0; r < ranks; ++r) {
      all_.push_back(std::make_unique<CarriedRank>(shape, ranks, r));
      fabrics_.push_back(ucx_of(ucx, *all_[r], ranks, error));
      if (fabrics_.back() == nullptr) unjam_test::fail(error);
      all_[r]->begin(*fabrics_[r]);
    }
    for (std::uint32_t a = 0; a < ranks; ++a) {
      for (std::uint32_t b = 0; b < a; ++b) {
        const std::string of_a = fabrics_[a]->invite(b), of_b = fabrics_[b]->invite(a);
        EXPECT_TRUE(fabrics_[a]->meet(b, of_b, error)) << error;
        EXPECT_TRUE(fabrics_[b]->meet(a, of_a, error)) << error;
      }
    }
  }
  std::uint32_t size() const { return static_cast<std::uint32_t>(all_.size()); }
  CarriedRank& operator[](std::uint32_t r) { return *all_[r]; }
  UcxFabric& fabric(std::uint32_t r) { return *fabrics_[r]; }

 private:
  std::vector<std::unique_ptr<CarriedRank>> all_;
  std::vector<std::unique_ptr<UcxFabric>> fabrics_;
};

TEST(Ucx, EverythingArrives) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    const struct {
      std::uint32_t ranks, escape, borrow;
    } nets[] = {{2, 64, 0}, {3, 3000, 9000}, {2, 300000, 0}};
    for (const auto& net : nets) {
      std::mt19937_64 random(base_seed());
      Hosts hosts(ucx, net.ranks, shape_of_slots(net.escape, net.borrow));
      Traffic traffic(net.ranks, 4, 20, {60, net.escape, std::max(net.escape, net.borrow), 3});
      const Patience patience;
      while (!traffic.all_here()) {
        ASSERT_FALSE(patience.lost()) << "somebody waits for ever";
        ASSERT_TRUE(traffic.turn(hosts, random)) << "a wrong slice";
        for (std::uint32_t r = 0; r < hosts.size(); ++r) {
          ASSERT_EQ(hosts[r].home().gone_count, 0u) << hosts[r].home().why;
          ASSERT_EQ(hosts.fabric(r).strangers(), 0u);
        }
      }
    }
  }));
}

// Who has armed and sleeps is woken by what comes.
TEST(Ucx, ADescriptorWakesWhoSleeps) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    Hosts hosts(ucx, 2, shape_of_slots(3000));
    CarriedStream stream;
    stream.bytes = 2000;
    const Patience patience;
    for (std::uint64_t n = 0; n < 20; ++n) {
      while (!stream.send(hosts[0], 1)) hosts[0].courier().drive();
      hosts[0].courier().drive();
      while (stream.received <= n) {
        ASSERT_FALSE(patience.lost());
        hosts[0].courier().drive();
        if (!hosts[1].courier().drive() && hosts[1].courier().arm()) {
          pollfd fd = {hosts.fabric(1).descriptor(), POLLIN, 0};
          poll(&fd, 1, 10);
        }
        ASSERT_GE(stream.receive(hosts[1], 0), 0);
      }
    }
  }));
}

// A frame that UCX has sent at once is not told of by any descriptor: poll() has it to tell.
TEST(Ucx, NobodySleepsOverWhatIsDone) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    Hosts hosts(ucx, 2, shape_of_slots(3000));
    CarriedStream stream;
    const Patience patience;
    while (stream.received == 0) {
      ASSERT_FALSE(patience.lost());
      if (stream.sent == 0) stream.send(hosts[0], 1);
      for (std::uint32_t r = 0; r < 2; ++r) hosts[r].courier().drive();
      ASSERT_GE(stream.receive(hosts[1], 0), 0);
    }
    const auto settle = [&] {
      for (int quiet = 0; quiet < 3 && !patience.lost();) {
        const bool moved = hosts[0].courier().drive();
        quiet = hosts[1].courier().drive() || moved ? 0 : quiet + 1;
      }
    };
    // (UCX may be busy for reasons of its own.)
    const auto arms_once = [&] {
      settle();
      while (!hosts[0].courier().arm()) {
        ASSERT_FALSE(patience.lost());
        settle();
      }
    };
    arms_once();
    CourierFrame f;
    f.type = FrameType::kAnnounce;
    f.dst = 1;
    ASSERT_TRUE(hosts.fabric(0).send(1, FrameChannel::kShort, encode(f), nullptr, 0, 0));
    for (int i = 0; i < 20; ++i) EXPECT_FALSE(hosts[0].courier().arm());
    arms_once();
  }));
}

// Frames that were under way when their connection was closed are still UCX's, until it says that
// they are not.
TEST(Ucx, MemoryIsFreeWhenAllIsDrained) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    Hosts hosts(ucx, 2, shape_of_slots(300000));
    EXPECT_FALSE(hosts.fabric(0).drained(1)) << "it is open";
    // (Nobody drives the receiver, so all this cannot have gone.)
    const std::vector<unsigned char> payload(300000);
    for (std::uint64_t n = 0; n < 32; ++n) {
      ASSERT_TRUE(hosts.fabric(0).send(1, FrameChannel::kBulk, {}, payload.data(), 300000, n));
    }
    hosts.fabric(0).close(1);
    EXPECT_FALSE(hosts.fabric(0).drained(1));
    const Patience patience;
    while (!hosts.fabric(0).drained(1)) {
      ASSERT_FALSE(patience.lost());
      hosts[0].courier().drive();
    }
  }));
}

// Signal handlers and the C library are as they were, and loading it starts no thread.
TEST(Ucx, LeavesTheProcessAlone) {
  const auto threads = [] {
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Threads:")) return line;
    }
    return std::string();
  };
  std::string error;
  const int count = 1;
  Processes all(count, "", [&](Child& me) {
    struct sigaction before[32] = {};
    for (int s = 1; s < 32; ++s) sigaction(s, nullptr, &before[s]);
    const std::string alone = threads();
    unsigned char code[2][16];
    const auto* const function =
        reinterpret_cast<const unsigned char*>(dlsym(RTLD_DEFAULT, "munmap"));
    std::memcpy(code[0], function, sizeof(code[0]));
    const UcxLibrary* const ucx = library(error);
    me.say(ucx == nullptr ? "none" : "there");
    if (ucx == nullptr) return;
    EXPECT_EQ(std::getenv("UCX_MEM_EVENTS"), nullptr);
    EXPECT_EQ(threads(), alone);  // (TCP connections have one, later)
    Hosts hosts(*ucx, 2, shape_of_slots(64));
    for (int s = 1; s < 32; ++s) {
      struct sigaction after = {};
      sigaction(s, nullptr, &after);
      EXPECT_EQ(after.sa_handler, before[s].sa_handler) << "signal " << s;
    }
    std::memcpy(code[1], function, sizeof(code[1]));
    EXPECT_EQ(std::memcmp(code[0], code[1], sizeof(code[0])), 0) << "munmap() was patched";
  });
  EXPECT_TRUE(all.finish());
  UNJAM_SKIP_WITHOUT(!all.said(0).empty() && all.said(0)[0] == "there");
}

TEST(Ucx, WhatCannotBeIsSaid) {
  std::string error;
  EXPECT_EQ(UcxLibrary::load("/nowhere/libucp.so.0", error), nullptr);
  EXPECT_NE(error.find("UCX cannot be loaded: /nowhere/libucp.so.0"), std::string::npos) << error;
  EXPECT_EQ(UcxLibrary::load(unjam_test::net_plugin_file("none"), error), nullptr);
  EXPECT_NE(error.find("has no ucp_get_version: it is no UCX"), std::string::npos) << error;
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    UcxFabricSettings s;
    s.processes = 2;
    s.transports = "nosuchthing";
    std::string why;
    EXPECT_EQ(UcxFabric::make(ucx, s, why), nullptr);
    EXPECT_NE(why.find("UCX 1."), std::string::npos) << why;
    CarriedRank rank(shape_of_slots(64), 2, 0);
    const auto fabric = ucx_of(ucx, rank, 2, why);
    ASSERT_NE(fabric, nullptr) << why;
    const std::string address = fabric->invite(1);
    for (std::size_t n = 0; n < address.size(); n += 7) {
      EXPECT_FALSE(fabric->meet(1, address.substr(0, n), why));
      EXPECT_NE(why.find("is none of UCX's, or was damaged"), std::string::npos) << why;
    }
    for (std::size_t n = 0; n < address.size(); ++n) {
      std::string changed = address;
      changed[n] = static_cast<char>(changed[n] ^ 1);
      EXPECT_FALSE(fabric->meet(1, changed, why)) << "byte " << n;
      EXPECT_NE(why.find("is none of UCX's, or was damaged"), std::string::npos) << why;
    }
  }));
}

// Who has a copy already uses it, whatever is asked for, and says which one that is.
TEST(Ucx, NamesTheFileThatWasLoaded) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    std::string error;
    const UcxLibrary* const again = UcxLibrary::load("/nowhere/libucp.so.0", error);
    ASSERT_NE(again, nullptr) << error;
    EXPECT_TRUE(again->was_there());
    EXPECT_EQ(again->file(), ucx.file());
    EXPECT_EQ(again->title().find("nowhere"), std::string::npos) << again->title();
    EXPECT_EQ(access(ucx.file().c_str(), R_OK), 0) << ucx.file();
  }));
}

// A frame with another key than its sender was told, one of an impossible sender, and one that says
// of its payload what is not so.
TEST(Ucx, WrongMessagesAreNotBelieved) {
  UNJAM_SKIP_WITHOUT(with_ucx(1, [](Child&, const UcxLibrary& ucx) {
    Hosts hosts(ucx, 2, shape_of_slots(64));
    std::string error;
    // A third one, who knows where rank 1 is and how its process is numbered, but no key.
    CarriedRank rank(shape_of_slots(64), 2, 0);
    const auto stranger = ucx_of(ucx, rank, 2, error);
    ASSERT_NE(stranger, nullptr) << error;
    rank.begin(*stranger);
    // (The address has a key that another process was told.)
    const std::string address = hosts.fabric(1).invite(1);
    ASSERT_TRUE(stranger->meet(1, address, error)) << error;
    CarriedStream stream;
    ASSERT_TRUE(stream.send(rank, 1));
    const Patience patience;
    while (hosts.fabric(1).strangers() == 0) {
      ASSERT_FALSE(patience.lost());
      rank.courier().drive();
      hosts[1].courier().drive();
    }
    EXPECT_EQ(hosts[1].home().gone_count, 0u);
    // The peer itself, of a frame without its payload.
    CourierFrame f;
    f.src = 0, f.dst = 1;
    f.bytes = 40;
    f.flag = step_flag(1, 0);
    f.tag = 7, f.group = 3;
    ASSERT_TRUE(hosts.fabric(0).send(1, FrameChannel::kShort, encode(f), nullptr, 0, 0));
    while (hosts[1].home().gone_count == 0) {
      ASSERT_FALSE(patience.lost());
      hosts[0].courier().drive();
      hosts[1].courier().drive();
    }
    EXPECT_NE(std::string(hosts[1].home().why).find("another length"), std::string::npos)
        << hosts[1].home().why;
  }));
}

// ---- two processes ----

void meet_over(UcxFabric& fabric, std::uint32_t self, int to_other) {
  std::string error;
  const std::string mine = fabric.invite(1 - self);
  const std::uint64_t bytes = mine.size();
  write_all(to_other, &bytes, sizeof(bytes));
  write_all(to_other, mine.data(), mine.size());
  std::uint64_t theirs = 0;
  read_all(to_other, &theirs, sizeof(theirs));
  std::string address(theirs, '\0');
  read_all(to_other, address.data(), address.size());
  if (!fabric.meet(1 - self, address, error)) unjam_test::fail(error);
}

TEST(Ucx, BetweenProcesses) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const bool there = with_ucx(2, [&](Child& me, const UcxLibrary& ucx) {
    const auto self = static_cast<std::uint32_t>(me.index());
    CarriedRank rank(shape_of_slots(200, 5000), 2, self);
    std::string error;
    const auto fabric = ucx_of(ucx, rank, 2, error);
    if (fabric == nullptr) unjam_test::fail(error);
    rank.begin(*fabric);
    meet_over(*fabric, self, ends[self]);
    exchange_and_leave(rank, ends[self]);
  });
  close(ends[0]), close(ends[1]);
  UNJAM_SKIP_WITHOUT(there);
}

TEST(Ucx, AKilledProcessIsTheEndOfThePeer) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
  const bool there = with_ucx(
      2,
      [&](Child& me, const UcxLibrary& ucx) {
        const auto self = static_cast<std::uint32_t>(me.index());
        CarriedRank rank(shape_of_slots(200, 5000), 2, self);
        std::string error;
        const auto fabric = ucx_of(ucx, rank, 2, error);
        if (fabric == nullptr) unjam_test::fail(error);
        rank.begin(*fabric);
        meet_over(*fabric, self, ends[self]);
        exchange_until_killed(rank, self == 1, base_seed());
        EXPECT_NE(std::string(rank.home().why).find("UCX 1."), std::string::npos)
            << rank.home().why;
      },
      1);
  close(ends[0]), close(ends[1]);
  UNJAM_SKIP_WITHOUT(there);
}

}  // namespace
}  // namespace unjam
