// Rooms: who adds, clears, offers and maps memory between ranks, whoever comes first; and jobs
// whose ranks meet and ask for more while they run. Where memory has yet to come it may not be
// touched, so a lane that does crashes.
#include "runtime/rooms.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "base/atomics.h"
#include "tests/support/job.h"
#include "tests/support/processes.h"

namespace unjam_test {
namespace {

using unjam::ArenaShape;
using unjam::ClearRoom;
using unjam::Fd;
using unjam::Room;
using unjam::RoomMessage;
using unjam::Rooms;

ArenaShape shape_of(std::uint32_t ranks) {
  ArenaShape s;
  s.ranks = ranks;
  s.connectors = 13;
  s.first_connectors_log2 = 1;
  s.guaranteed_slots = 3;
  s.guaranteed_slot_bytes = 256;
  s.derive();
  return s;
}

// Some processes with ranks, in this one: rank r is of process r % processes. What they do is
// written down before it can have any effect.
class Machine {
 public:
  Machine(int ranks, int processes)
      : shape_(shape_of(static_cast<std::uint32_t>(ranks))), count_(processes) {
    for (int p = 0; p < processes; ++p) processes_.push_back(std::make_unique<Process>(*this, p));
    for (int r = 0; r < ranks; ++r) tables_.push_back(rooms(r).table(r, why_));
  }
  ~Machine() {
    for (auto& p : processes_) p->rooms.stop();
  }

  Rooms& rooms(int rank) { return process(rank).rooms; }
  const ArenaShape& shape() const { return shape_; }
  void attach(int rank) {
    rooms(rank).attach(rank, &process(rank).users[static_cast<std::size_t>(rank)]);
  }
  // As a rank's submission does it. False: there was no memory.
  bool meet(int rank, int peer) {
    ClearRoom room;
    std::string error;
    User& user = process(rank).users[static_cast<std::size_t>(rank)];
    const std::lock_guard lock(user.mutex);
    const bool met = rooms(rank).meet(rank, peer, room, error);
    EXPECT_EQ(met, error.empty());
    if (room.to != 0) user.to_clear.push_back(room);
    return met;
  }
  void want(int rank, int peer, std::uint32_t connectors) {
    unjam::store_relaxed(tables_[static_cast<std::size_t>(rank)][peer].wanted, connectors);
    rooms(rank).look(rank);
  }
  std::uint32_t usable(int rank, int peer) {
    return unjam::load_acquire(tables_[static_cast<std::size_t>(rank)][peer].usable);
  }
  bool comes_to(int rank, int peer, std::uint32_t connectors) {
    return eventually([&] { return usable(rank, peer) == connectors; });
  }
  // What a rank may use is there, and clear, and so is the first portion of its own block, of which
  // the peer has been told.
  void check(int rank, int peer) {
    const std::uint32_t now = usable(rank, peer);
    if (now == 0) return;
    const std::lock_guard lock(mutex_);
    EXPECT_GE((cleared_[{peer, rank}]), now);
    EXPECT_GE((cleared_[{rank, peer}]), shape_.next_connectors(0));
    EXPECT_EQ(offered_.count({rank, peer}), 1u);
    EXPECT_TRUE((reached_.count({rank, peer, now}))) << "rank " << rank << " peer " << peer;
  }
  void fail_adds(int times) { failing_ = times; }
  bool failing() const { return failing_ > 0; }
  void fail_maps(int times) { unmapped_ = times; }
  int warnings() const { return warnings_; }
  bool is_reached(int rank, int peer, std::uint32_t connectors) {
    const std::lock_guard lock(mutex_);
    return reached_.count({rank, peer, connectors}) != 0;
  }
  std::size_t rings(int rank) {
    const std::lock_guard lock(mutex_);
    return rings_[rank];
  }

 private:
  struct Process;
  class User : public Rooms::User {
   public:
    bool clear_room(const ClearRoom& room) override {
      const std::lock_guard lock(mutex);
      to_clear.push_back(room);
      return true;
    }
    void take_in_cleared() override {
      std::vector<ClearRoom> now;
      {
        const std::lock_guard lock(mutex);
        now.swap(to_clear);
      }
      for (const ClearRoom& room : now) {
        {
          const std::lock_guard lock(machine->mutex_);
          std::uint32_t& clear = machine->cleared_[{rank, static_cast<int>(room.peer)}];
          EXPECT_EQ(clear, room.from);
          clear = room.to;
        }
        machine->rooms(rank).cleared(rank, room);
      }
    }
    void room_came() override {
      const std::lock_guard lock(machine->mutex_);
      ++machine->rings_[rank];
    }
    Machine* machine = nullptr;
    int rank = 0;
    std::mutex mutex;
    std::vector<ClearRoom> to_clear;
  };

  struct Process : Rooms::Memory {
    Process(Machine& m, int p)
        : machine(m),
          me(p),
          users(m.shape_.ranks),
          rooms(static_cast<int>(m.shape_.ranks), m.shape_, *this) {
      for (std::uint32_t r = 0; r < m.shape_.ranks; ++r) {
        users[r].machine = &m;
        users[r].rank = static_cast<int>(r);
      }
    }
    bool is_local(int rank) const override { return machine.process_of(rank) == me; }
    bool add_memory(int owner, std::uint64_t offset, std::uint64_t bytes,
                    std::string& error) override {
      EXPECT_TRUE(is_local(owner));
      if (machine.failing_ > 0 && machine.failing_.fetch_sub(1) > 0) {
        error = "none is left";
        return false;
      }
      const std::lock_guard lock(machine.mutex_);
      EXPECT_TRUE(machine.added_[owner].emplace(offset, bytes).second) << "added twice";
      return true;
    }
    bool share_memory(int owner, std::uint64_t offset, Fd&, std::string& error) override {
      machine.expect_added(owner, offset, 0);
      return machine.maps(error);
    }
    bool let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) override {
      machine.expect_added(owner, offset, 0);
      if (!machine.maps(error)) return false;
      machine.reach(owner, offset, viewer);
      machine.is_offered(owner, viewer);
      return true;
    }
    bool adopt_memory(int owner, std::uint64_t offset, std::uint64_t bytes, Fd, int viewer,
                      std::string& error) override {
      machine.expect_added(owner, offset, bytes);
      if (!machine.maps(error)) return false;
      machine.reach(owner, offset, viewer);
      return true;
    }
    void tell_of_room(int rank, const RoomMessage& m, Fd) override {
      RoomMessage copy;
      EXPECT_TRUE(copy.decode(m.encode()));
      if (m.offers) machine.is_offered(static_cast<int>(m.owner), rank);
      machine.rooms(rank).hear(copy, {});
    }
    void warn(const std::string& text) override {
      EXPECT_NE(text.find("none is left"), std::string::npos);
      ++machine.warnings_;
    }
    Machine& machine;
    const int me;
    std::vector<User> users;
    Rooms rooms;
  };

  Process& process(int rank) { return *processes_[static_cast<std::size_t>(process_of(rank))]; }
  void is_offered(int owner, int viewer) {
    const std::lock_guard lock(mutex_);
    offered_.insert({owner, viewer});
  }
  bool maps(std::string& error) {
    if (unmapped_ <= 0 || unmapped_.fetch_sub(1) <= 0) return true;
    error = "none is left for maps";
    return false;
  }
  int process_of(int rank) const { return rank % count_; }
  void expect_added(int owner, std::uint64_t offset, std::uint64_t bytes) {
    const std::lock_guard lock(mutex_);
    const auto found = added_[owner].find(offset);
    ASSERT_NE(found, added_[owner].end());
    if (bytes != 0) {
      EXPECT_EQ(found->second, bytes);
    }
  }
  void reach(int owner, std::uint64_t offset, int viewer) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t block =
        shape_.block(static_cast<std::uint32_t>(owner), static_cast<std::uint32_t>(viewer));
    std::uint32_t from = 0;
    while (from != 0 || offset != block) {
      if (from != 0 && block + shape_.room_bytes(from) == offset) break;
      from = shape_.next_connectors(from);
      ASSERT_LT(from, shape_.connectors);
    }
    reached_.insert({viewer, owner, shape_.next_connectors(from)});
  }

  const ArenaShape shape_;
  const int count_;  // processes
  std::mutex mutex_;
  std::map<int, std::map<std::uint64_t, std::uint64_t>> added_;  // by owner: offset, bytes
  std::map<std::pair<int, int>, std::uint32_t> cleared_;         // of (owner, peer)
  std::set<std::tuple<int, int, std::uint32_t>> reached_;        // viewer, owner, connectors
  std::set<std::pair<int, int>> offered_;  // the first portion of (owner, viewer)
  std::map<int, std::size_t> rings_;
  std::atomic<int> failing_{0}, unmapped_{0}, warnings_{0};
  std::string why_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<Room*> tables_;
};

// Ranks r and p, where both are of one process, and of two.
class TwoRanks : public testing::TestWithParam<int> {
 protected:
  TwoRanks() : machine_(2, GetParam()) {}
  Machine machine_;
};
INSTANTIATE_TEST_SUITE_P(Rooms, TwoRanks, testing::Values(1, 2));

TEST_P(TwoRanks, NothingIsThereBeforeTheyMeet) {
  machine_.attach(0);
  machine_.attach(1);
  sleep_ms(20);
  EXPECT_EQ(machine_.usable(0, 1), 0u);
  EXPECT_EQ(machine_.rooms(0).usage(0).bytes, 0u);
}

TEST_P(TwoRanks, WhoComesFirstMakesTheOtherReady) {
  machine_.attach(0);
  machine_.attach(1);
  ASSERT_TRUE(machine_.meet(0, 1));
  EXPECT_TRUE(machine_.comes_to(0, 1, 2)) << "rank 1 has called nothing";
  EXPECT_TRUE(machine_.comes_to(1, 0, 2));
  machine_.check(0, 1);
  machine_.check(1, 0);
  EXPECT_GT(machine_.rings(0), 0u);
  EXPECT_GT(machine_.rings(1), 0u);
  const Rooms::Usage u = machine_.rooms(0).usage(0);
  EXPECT_EQ(u.met, 1u);
  EXPECT_EQ(u.connectors, 2u);
  EXPECT_EQ(u.bytes, machine_.shape().room_bytes(2));
}

TEST_P(TwoRanks, AnEngineThatComesLaterFindsWhatWasOffered) {
  machine_.attach(0);
  ASSERT_TRUE(machine_.meet(0, 1));
  sleep_ms(20);
  EXPECT_EQ(machine_.usable(0, 1), 0u) << "nobody could clear rank 1's memory";
  machine_.attach(1);
  EXPECT_TRUE(machine_.comes_to(0, 1, 2));
  EXPECT_TRUE(machine_.comes_to(1, 0, 2));
}

TEST_P(TwoRanks, WhatIsWantedComesPortionByPortion) {
  machine_.attach(0);
  machine_.attach(1);
  ASSERT_TRUE(machine_.meet(0, 1));
  ASSERT_TRUE(machine_.comes_to(0, 1, 2));
  machine_.want(0, 1, 3);
  EXPECT_TRUE(machine_.comes_to(0, 1, 4));
  EXPECT_EQ(machine_.usable(1, 0), 2u) << "it has wanted nothing";
  machine_.want(0, 1, 13);
  EXPECT_TRUE(machine_.comes_to(0, 1, 13));
  machine_.check(0, 1);
  EXPECT_EQ(machine_.rooms(1).usage(1).bytes, machine_.shape().block_bytes());
}

TEST_P(TwoRanks, ACallGetsAnErrorWhereThereIsNoMemoryAndMaySucceedLater) {
  machine_.attach(0);
  machine_.attach(1);
  machine_.fail_adds(1);
  EXPECT_FALSE(machine_.meet(0, 1));
  EXPECT_TRUE(machine_.meet(0, 1));
  EXPECT_TRUE(machine_.comes_to(0, 1, 2));
  EXPECT_EQ(machine_.warnings(), 0);
}

TEST_P(TwoRanks, WhatAPeerWantsIsTriedUntilThereIsMemory) {
  machine_.attach(0);
  machine_.attach(1);
  ASSERT_TRUE(machine_.meet(0, 1));
  ASSERT_TRUE(machine_.comes_to(0, 1, 2));
  machine_.fail_adds(2);
  machine_.want(0, 1, 4);
  EXPECT_TRUE(machine_.comes_to(0, 1, 4));
  EXPECT_FALSE(machine_.failing());
  EXPECT_EQ(machine_.warnings(), 1) << "it is said once";
  EXPECT_EQ(machine_.rooms(1).usage(1).lacks, "");
}

// Also when portions behind the one that fails are there first.
TEST_P(TwoRanks, WhatCannotBeMappedIsTriedAgain) {
  machine_.attach(0);
  machine_.attach(1);
  machine_.fail_maps(2);
  ASSERT_TRUE(machine_.meet(0, 1));
  EXPECT_TRUE(machine_.comes_to(0, 1, 2));
  EXPECT_TRUE(machine_.comes_to(1, 0, 2));
  machine_.fail_maps(3);
  machine_.want(0, 1, 13);
  EXPECT_TRUE(machine_.comes_to(0, 1, 13));
  EXPECT_GT(machine_.warnings(), 0);
  EXPECT_EQ(machine_.rooms(0).usage(0).lacks, "");
  EXPECT_EQ(machine_.rooms(1).usage(1).lacks, "");
}

// Else one that sends and ends at once would leave its peer without what reading takes.
TEST_P(TwoRanks, NobodyMaySendBeforeTheOtherWasOfferedRoom) {
  machine_.attach(1);
  ASSERT_TRUE(machine_.meet(1, 0));
  ASSERT_TRUE(eventually([&] { return machine_.is_reached(0, 1, 2); }));
  machine_.fail_maps(1 << 20);  // rank 0's memory is there, and clear, and rank 1 cannot have it
  machine_.attach(0);
  ASSERT_TRUE(eventually([&] { return machine_.warnings() != 0; }));
  EXPECT_EQ(machine_.usable(0, 1), 0u);
  machine_.fail_maps(0);
  EXPECT_TRUE(machine_.comes_to(0, 1, 2));
  machine_.check(0, 1);
}

TEST_P(TwoRanks, NonsenseIsPassedOver) {
  machine_.attach(0);
  machine_.attach(1);
  RoomMessage m;
  m.owner = 1, m.peer = 0, m.connectors = 8, m.offers = true;
  machine_.rooms(0).hear(m, {});  // not the portion that comes next
  m.connectors = 14;              // more than there are
  machine_.rooms(0).hear(m, {});
  m.connectors = 2, m.owner = 0;  // of itself
  machine_.rooms(0).hear(m, {});
  m.offers = false, m.connectors = 15, m.peer = 1;
  machine_.rooms(0).hear(m, {});
  m.connectors = 2, m.peer = 2;  // a rank that there is not
  machine_.rooms(0).hear(m, {});
  m.offers = true, m.owner = 7, m.peer = 0;
  machine_.rooms(0).hear(m, {});
  ASSERT_TRUE(machine_.meet(0, 1));
  EXPECT_TRUE(machine_.comes_to(0, 1, 2));
}

// Everybody meets everybody from both sides at once, and wants more, while others look on.
TEST(Rooms, RanksMeetInAnyOrder) {
  for (std::uint64_t seed = base_seed(); seed != base_seed() + 6; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    constexpr int kRanks = 7;
    Machine machine(kRanks, 1 + static_cast<int>(seed % 3));
    std::atomic<bool> over{false};
    std::thread watcher([&] {
      while (!over) {
        for (int r = 0; r < kRanks; ++r) {
          for (int p = 0; p < kRanks; ++p) {
            if (p != r) machine.check(r, p);
          }
        }
        std::this_thread::sleep_for(std::chrono::microseconds(200));  // others want the lock, too
      }
    });
    std::vector<std::thread> ranks;
    for (int r = 0; r < kRanks; ++r) {
      ranks.emplace_back([&, r] {
        std::uint64_t random = mix(seed, static_cast<std::uint64_t>(r));
        if (r % 2 == 0) machine.attach(r);
        for (int i = 0; i < 60; ++i) {
          random = mix(random);
          const int peer = static_cast<int>((random >> 8) % kRanks);
          if (peer == r) continue;
          if (random % 16 == 0) machine.fail_adds(1);
          if (random % 16 == 1) machine.fail_maps(1);
          if (random % 3 != 0) machine.meet(r, peer);
          if (random % 3 == 0) {
            machine.want(r, peer, 1 + static_cast<std::uint32_t>((random >> 20) % 13));
          }
          if (random % 5 == 0) std::this_thread::yield();
        }
        if (r % 2 != 0) machine.attach(r);
        for (int p = 0; p < kRanks; ++p) {
          while (p != r && !machine.meet(r, p)) std::this_thread::yield();
        }
      });
    }
    for (auto& t : ranks) t.join();
    for (int r = 0; r < kRanks; ++r) {
      for (int p = 0; p < kRanks; ++p) {
        if (p == r) continue;
        EXPECT_TRUE(eventually([&] { return machine.usable(r, p) >= 2; }));
        machine.want(r, p, 13);
      }
    }
    for (int r = 0; r < kRanks; ++r) {
      for (int p = 0; p < kRanks; ++p) {
        if (p == r) continue;
        EXPECT_TRUE(machine.comes_to(r, p, 13)) << r << " " << p << ": " << machine.usable(r, p)
                                                << "; " << machine.rooms(p).usage(p).lacks;
      }
    }
    over = true;
    watcher.join();
  }
}

// ---- jobs ----

// Ranks whose rooms begin with so few connectors, some of whose calls are under way at once.
class FewConnectors : public testing::TestWithParam<std::tuple<int, int>> {
 protected:
  void SetUp() override {
    setenv("UNJAM_FIRST_CONNECTORS", std::to_string(std::get<0>(GetParam())).c_str(), 1);
    setenv("UNJAM_MAX_ACTIVE_KEYS", "24", 1);
  }
  void TearDown() override {
    unsetenv("UNJAM_FIRST_CONNECTORS");
    unsetenv("UNJAM_MAX_ACTIVE_KEYS");
  }
};
INSTANTIATE_TEST_SUITE_P(Rooms, FewConnectors,
                         testing::Combine(testing::Values(1, 2, 8), testing::Values(1, 3)));

// More keys are under way than rooms have connectors, in an order of each rank's own; and each
// round has new neighbours: messages between pairs that have not met.
void many_keys(unjamContext_t context, unjamGroup_t all, int rank, int ranks) {
  constexpr int kKeys = 20, kFloats = 300;
  for (int round = 0; round < ranks; ++round) {
    std::vector<int> order(kKeys);
    for (int k = 0; k < kKeys; ++k) order[static_cast<std::size_t>(k)] = k;
    std::uint64_t random = mix(base_seed(), static_cast<std::uint64_t>(rank * 64 + round));
    for (std::size_t k = kKeys; k-- > 1;) {
      random = mix(random);
      std::swap(order[k], order[random % (k + 1)]);
    }
    std::vector<std::vector<float>> data(kKeys);
    std::vector<unjamRequest_t> requests;
    for (const int k : order) {
      auto& d = data[static_cast<std::size_t>(k)];
      d.assign(kFloats, static_cast<float>(rank + k));
      unjamRequest_t request = nullptr;
      UNJAM_CHECK(unjamAllReduce(all, ("k" + std::to_string(k)).c_str(), d.data(), d.data(),
                                 d.size(), UNJAM_FLOAT32, UNJAM_SUM, nullptr, &request));
      requests.push_back(request);
    }
    std::vector<float> sent(64, static_cast<float>(rank)), got(64);
    const int to = (rank + round) % ranks, from = (rank + ranks - round) % ranks;
    if (round != 0) {
      for (const bool sends : {true, false}) {
        unjamRequest_t request = nullptr;
        UNJAM_CHECK(sends ? unjamSend(all, "p", sent.data(), sent.size(), UNJAM_FLOAT32, to,
                                      nullptr, &request)
                          : unjamRecv(all, "p", got.data(), got.size(), UNJAM_FLOAT32, from,
                                      nullptr, &request));
        requests.push_back(request);
      }
    }
    for (const unjamRequest_t r : requests) wait_ok(context, r, "round " + std::to_string(round));
    for (int k = 0; k < kKeys; ++k) {
      const auto sum = static_cast<float>(ranks * (ranks - 1) / 2 + ranks * k);
      for (const float x : data[static_cast<std::size_t>(k)]) ASSERT_EQ(x, sum) << "key " << k;
    }
    if (round != 0) {
      for (const float x : got) ASSERT_EQ(x, static_cast<float>(from));
    }
  }
}

TEST_P(FewConnectors, InOneProcess) {
  unjamConfig_t config = default_config();
  config.lanes = static_cast<std::uint32_t>(std::get<1>(GetParam()));
  Job job(5, config);
  job.run([](Rank& me) { many_keys(me.context, me.all, me.rank, me.ranks); });
}

TEST_P(FewConnectors, BetweenProcesses) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  const Layout layout = {{0, 1}, {2}, {3, 4}};
  Processes all(3, "", [&](Child& me) {
    unjamConfig_t config = default_config();
    config.lanes = static_cast<std::uint32_t>(std::get<1>(GetParam()));
    Job job(id, 5, layout[static_cast<std::size_t>(me.index())], config, base_seed());
    job.run([](Rank& r) { many_keys(r.context, r.all, r.rank, r.ranks); });
  });
  all.finish();
}

}  // namespace
}  // namespace unjam_test
