// Real engines of two to four ranks as two hosts: what they post for the other host couriers take
// there, over a loop fabric that delays, reorders and cuts into pieces, or over a network plugin.
// Every kind by every algorithm, and programs of sets, on many keys, each rank in an order of its
// own.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "engine/engine.h"
#include "plan/host_table.h"
#include "plan/registry.h"
#include "tests/net/plugins.h"
#include "tests/support/all_plans.h"
#include "tests/support/engine_ranks.h"
#include "tests/support/job.h"
#include "transport/network/courier.h"
#include "transport/network/loop_fabric.h"
#include "transport/network/net_plugin.h"
#include "transport/network/plugin_fabric.h"

namespace unjam {
namespace {

using unjam_test::base_seed;
using unjam_test::kPatienceUs;
using unjam_test::kSanitized;

struct Aligned {
  void operator()(unsigned char* p) const { std::free(p); }
};
using Memory = std::unique_ptr<unsigned char, Aligned>;
Memory zeroed(std::size_t bytes) {
  bytes = (bytes + Carver::kAlignment) / Carver::kAlignment * Carver::kAlignment;
  Memory m(static_cast<unsigned char*>(std::aligned_alloc(Carver::kAlignment, bytes)));
  std::memset(m.get(), 0, bytes);
  return m;
}

// The engine of one lane, with a courier.
class Networked : public ByHand {
 public:
  using Handle = Networked&;

  using Ring = std::function<void(std::uint32_t rank, std::uint32_t lane, RingFor)>;
  Networked(RankState& rank, Courier& courier, std::uint32_t of_lane, Ring ring)
      : ByHand(rank, false), courier_(courier), ring_(std::move(ring)) {
    lane = of_lane;
  }
  // Whether somebody would wake the lane: it has not looked yet, or was rung for something that it
  // waits for.
  std::atomic<bool> woken{true};
  void stay() {
    woken = false;
    doorbell_awake(doorbell());
    Engine<Networked>::run(*this, rank_, lane, shared_);
    if (!asleep()) woken = true;
  }
  bool posted(std::uint32_t rank, std::uint32_t of_lane, const PublishedWord& word) {
    return courier_.posted(transport().rank, of_lane, rank, word);
  }
  void ring(std::uint32_t rank, std::uint32_t of_lane, RingFor what) {
    if (courier_.is_remote(rank)) ADD_FAILURE() << "a remote lane is rung by its courier";
    ring_(rank, of_lane, what);
  }
  void attend() {}
  void ring_own_lanes() {
    for (std::uint32_t l = 0; l < rank_.num_lanes; ++l) {
      if (l != lane) ring(transport().rank, l, RingFor::kData);
    }
  }
  std::uint32_t epoch() { return doorbell_epoch(doorbell()); }
  bool try_quit(std::uint32_t e, std::uint32_t interest) {
    return doorbell_try_sleep(doorbell(), e, kAsleep | interest);
  }

 private:
  LaneTransport& transport() { return rank_.lanes[lane].transport; }
  std::uint32_t& doorbell() { return transport().lane_cell(transport().rank, lane).doorbell; }

  Courier& courier_;
  const Ring ring_;
};

// Ranks on two hosts, each with a courier.
class Networks {
 public:
  // `plugin`: otherwise they use a loop fabric.
  Networks(const Case& c, std::size_t keys, std::uint64_t seed, std::uint32_t piece,
           std::uint64_t window, NetPlugin* plugin = nullptr)
      : case_(c), ranks_(c, keys, seed), random_(seed) {
    LoopOptions loop;
    loop.processes = kHosts;
    loop.depth = 8;
    loop.piece = piece;
    loop.copied_bytes = Ranks::kSlotBytes;
    loop.choose = [](void* me, LoopOptions::Choice, std::uint32_t n) {
      auto& self = *static_cast<Networks*>(me);
      const std::lock_guard lock(self.mutex_);
      return static_cast<std::uint32_t>(self.random_() % n);
    };
    loop.context = this;
    net_memory_ = zeroed(LoopNet::memory_bytes(loop));
    net_ = std::make_unique<LoopNet>(loop, net_memory_.get());
    CourierSettings settings;
    settings.shape = ranks_.state(0).lanes[0].transport.shape;
    settings.processes = kHosts;
    settings.window = window;
    for (std::uint32_t r = 0; r < ranks(); ++r) {
      process_of_.push_back(static_cast<std::uint16_t>(c.host_of(r)));
      bases_.push_back(ranks_.state(r).lanes[0].transport.bases);
    }
    settings.process_of = process_of_.data();
    settings.bases = bases_.data();
    for (std::uint32_t h = 0; h < kHosts; ++h) {
      settings.self = h;
      hosts_.push_back(std::make_unique<Host>(*this, settings, fabric_of(settings, plugin)));
    }
    if (plugin != nullptr) introduce();
    for (std::uint32_t r = 0; r < ranks(); ++r) {
      for (std::uint32_t l = 0; l < static_cast<std::uint32_t>(c.lanes); ++l) {
        Courier& courier = hosts_[process_of_[r]]->courier;
        ranks_.state(r).lanes[l].transport.groups = courier.groups(r, l);
        lanes_.push_back(std::make_unique<Networked>(
            ranks_.state(r), courier, l,
            [this](std::uint32_t to, std::uint32_t of, RingFor what) { ring(to, of, what); }));
      }
    }
  }

  static constexpr std::uint32_t kHosts = 2;
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(case_.ranks); }
  Ranks& all() { return ranks_; }
  LoopNet& net() { return *net_; }
  Courier& courier(std::uint32_t h) { return hosts_[h]->courier; }
  std::uint32_t gone() const { return gone_; }
  const std::string& why() const { return why_; }
  Networked& engine(std::uint32_t r, std::uint32_t lane = 0) {
    return *lanes_[r * static_cast<std::uint32_t>(case_.lanes) + lane];
  }

  // All uses on each rank in an order of its own.
  void submit(std::vector<Use>& uses, std::size_t keys) {
    for (std::uint32_t r = 0; r < ranks(); ++r) {
      std::vector<std::size_t> order(uses.size());
      for (std::size_t i = 0; i < order.size(); ++i) order[i] = i % keys;
      std::shuffle(order.begin(), order.end(), random_);
      std::vector<std::size_t> used(keys);
      for (const std::size_t k : order) {
        const std::size_t i = used[k]++ * keys + k;
        ranks_.submit(uses[i], r, static_cast<std::uint16_t>(i));
      }
    }
  }
  std::size_t ended(std::uint32_t r) {
    std::size_t n = 0;
    Cqe e;
    while (ranks_.state(r).cq.pop(e)) {
      EXPECT_EQ(e.outcome, Outcome::kDone);
      ++n;
    }
    return n;
  }
  void ring(std::uint32_t r, std::uint32_t lane, RingFor what) {
    LaneTransport& t = ranks_.state(r).lanes[lane].transport;
    if (doorbell_ring(t.lane_cell(r, lane).doorbell, what) != Wake::kNobody) {
      engine(r, lane).woken = true;
    }
  }
  // Whoever it is has a turn, but engines that sleep, until so many calls have ended at all ranks
  // together.
  bool run(std::size_t calls) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(kPatienceUs);
    while (calls != 0) {
      if (std::chrono::steady_clock::now() > end || gone_ != 0) return false;
      const std::size_t who = random_() % (lanes_.size() + 3 * kHosts);
      if (who < lanes_.size()) {
        if (!lanes_[who]->woken) continue;
        lanes_[who]->stay();
        const auto r = static_cast<std::uint32_t>(who / static_cast<std::size_t>(case_.lanes));
        calls -= std::min(calls, ended(r));
      } else {
        hosts_[who % kHosts]->courier.drive();
      }
    }
    return true;
  }

 private:
  struct Host final : CourierHome {
    Host(Networks& networks, const CourierSettings& settings, std::unique_ptr<Fabric> with)
        : all(networks),
          memory(zeroed(Courier::memory_bytes(settings))),
          fabric(std::move(with)),
          courier(settings, memory.get(), *fabric, *this) {}

    void ring(std::uint32_t rank, std::uint32_t lane, Came what) override {
      all.ring(rank, lane, what == Came::kData ? RingFor::kData : RingFor::kRoom);
    }
    void gone(std::uint32_t, const char* why) override {
      all.why_ = why;
      ++all.gone_;
    }
    void left(std::uint32_t) override {}
    void differs(std::uint32_t, std::uint32_t, std::uint64_t, std::uint64_t) override {}

    Networks& all;
    Memory memory;
    std::unique_ptr<Fabric> fabric;
    Courier courier;
  };

  std::unique_ptr<Fabric> fabric_of(const CourierSettings& settings, NetPlugin* plugin) {
    if (plugin == nullptr) return std::make_unique<LoopFabric>(*net_, settings.self);
    PluginFabricSettings s;
    s.processes = kHosts;
    s.self = settings.self;
    s.most_payload = std::max(settings.shape.guaranteed_slot_bytes, settings.shape.pool_slot_bytes);
    // Arenas of ranks here, and mirrors of the others. (Ranks lay them out alike.)
    for (std::uint32_t r = 0; r < ranks(); ++r) {
      if (process_of_[r] != settings.self) continue;
      for (std::uint32_t q = 0; q < ranks(); ++q) {
        if (q != r && process_of_[q] == settings.self) continue;
        s.memory.push_back({bases_[r][q], settings.shape.total_bytes()});
      }
    }
    std::string error;
    auto fabric = PluginFabric::make(*plugin, s, error);
    EXPECT_NE(fabric, nullptr) << error;
    return fabric;
  }
  void introduce() {
    PluginAddress address[kHosts];
    std::string error;
    const auto fabric = [&](std::uint32_t h) -> PluginFabric& {
      return static_cast<PluginFabric&>(*hosts_[h]->fabric);
    };
    for (std::uint32_t h = 0; h < kHosts; ++h) {
      EXPECT_TRUE(fabric(h).invite(1 - h, &address[h], error)) << error;
    }
    for (std::uint32_t h = 0; h < kHosts; ++h) {
      EXPECT_TRUE(fabric(h).meet(1 - h, address[1 - h], error)) << error;
    }
  }

  const Case case_;
  Ranks ranks_;
  std::mutex mutex_;
  std::mt19937_64 random_;
  Memory net_memory_;
  std::unique_ptr<LoopNet> net_;
  std::vector<std::uint16_t> process_of_;
  std::vector<unsigned char* const*> bases_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::vector<std::unique_ptr<Networked>> lanes_;
  std::atomic<std::uint32_t> gone_{0};
  std::string why_;
};

Case hosts_of(int ranks, int lanes, int guaranteed_slots, int pool_slots, bool heap = false) {
  Case c{ranks, 0, 0, lanes, guaranteed_slots, pool_slots, false, heap};
  c.mirrors = true;
  c.hosts = 2;
  return c;
}

// ---- programs of sets ----

// The i-th of the uses of some keys, by turns: of which kind, and from which root. (Not how long.)
Use drawn_use(std::size_t i, std::size_t keys, std::uint32_t ranks, std::mt19937_64& random) {
  Use u;
  u.key = i % keys;
  u.n = i / keys;
  u.what = static_cast<What>(random() % kWhats);
  u.root = static_cast<std::uint32_t>(random() % ranks);
  return u;
}

class CourierEngines : public testing::TestWithParam<Case> {};

TEST_P(CourierEngines, ManyKeysInAnyOrder) {
  const Case c = GetParam();
  const auto n = static_cast<std::uint32_t>(c.ranks);
  constexpr std::size_t kKeys = 12, kUses = 3 * kKeys;
  for (std::uint64_t round = 0; round < (kSanitized ? 1 : 4); ++round) {
    const std::uint64_t seed = mix64(base_seed() + round);
    SCOPED_TRACE("round " + std::to_string(round) + ", seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    std::vector<Use> uses(kUses);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      Use& u = uses[i] = drawn_use(i, kKeys, n, random);
      u.count = random() % 3 == 0 ? random() % 17 : random() % 1500;
      fill(u, n, random, c.guaranteed_slots >= 4 ? Laid::kOverlapping : Laid::kOneByOne, c.lanes);
    }
    const std::uint32_t pieces[] = {30, 100, 7, 0};
    Networks all(c, kKeys, seed, pieces[round], round % 2 == 0 ? 1000 : 1 << 20);
    all.submit(uses, kKeys);
    ASSERT_TRUE(all.run(kUses * n)) << "somebody waits for ever; " << all.why();
    all.all().fetch();
    for (const Use& u : uses) check(u);
    EXPECT_FALSE(all.net().overwritten());
    if (HasFailure()) return;
    for (std::uint32_t h = 0; h < Networks::kHosts; ++h) {
      EXPECT_GT(all.courier(h).counts().came, 0u);
      EXPECT_EQ(all.courier(h).counts().dropped, 0u);
    }
  }
}

TEST_P(CourierEngines, ManyKeysOverANetworkPlugin) {
  const Case c = GetParam();
  const auto n = static_cast<std::uint32_t>(c.ranks);
  constexpr std::size_t kKeys = 12, kUses = 3 * kKeys;
  const int version = c.ranks % 2 == 0 ? 8 : 11;
  const std::string file = unjam_test::net_plugin_file(version);
  std::string error;
  const auto plugin = NetPlugin::load(file, error);
  ASSERT_NE(plugin, nullptr) << error;
  NetFaults& faults = unjam_test::net_faults(file);
  const std::uint64_t seed = mix64(base_seed() + 1000);
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<Use> uses(kUses);
  for (std::size_t i = 0; i < uses.size(); ++i) {
    Use& u = uses[i] = drawn_use(i, kKeys, n, random);
    u.count = random() % 1500;
    fill(u, n, random, c.guaranteed_slots >= 4 ? Laid::kOverlapping : Laid::kOneByOne, c.lanes);
  }
  unjam_test::reset(faults);
  faults.no_room = 20;
  faults.piece = 100;
  {
    Networks all(c, kKeys, seed, 0, 4000, plugin.get());
    all.submit(uses, kKeys);
    ASSERT_TRUE(all.run(kUses * n)) << "somebody waits for ever; " << all.why();
    all.all().fetch();
    for (const Use& u : uses) check(u);
    for (std::uint32_t h = 0; h < Networks::kHosts; ++h) {
      EXPECT_GT(all.courier(h).counts().came, 0u);
    }
  }
  EXPECT_EQ(faults.misused, 0);
  EXPECT_EQ(faults.open, 0);
}

INSTANTIATE_TEST_SUITE_P(TwoHosts, CourierEngines,
                         testing::Values(hosts_of(2, 1, 2, 0), hosts_of(3, 1, 2, 0),
                                         hosts_of(4, 1, 2, 2), hosts_of(4, 2, 4, 0),
                                         hosts_of(2, 2, 3, 4), hosts_of(4, 1, 2, 0, true),
                                         hosts_of(3, 1, 4, 2, true)));

// ---- plans of all kinds ----

struct PlannedUse {
  Use use;
  PlanRequest request;
  const char* algorithm = "";

  void fill(const HostTable& hosts, const PlanLimits& limits, Algorithm with,
            std::mt19937_64& random) {
    request.hosts = &hosts;
    algorithm = to_string(with);
    const auto n = static_cast<std::uint64_t>(request.ranks);
    const KindRow& row = row_of(request.kind);
    const bool many_in = row.blocks && row.reads != Holders::kOwner;
    const bool many_out = row.blocks && row.writes != Holders::kOwner;
    use.count = request.count;
    use.root = static_cast<std::uint32_t>(request.root);
    use.plans = unjam_test::make_plans(request, limits, with);
    for (std::uint64_t r = 0; r < n; ++r) {
      std::vector<std::int32_t>& input = use.inputs.emplace_back(use.count * (many_in ? n : 1));
      for (std::int32_t& x : input) x = static_cast<std::int32_t>(random() % 100000);
      use.outputs.emplace_back(use.count * (many_out ? n : 1) + 1, -1);
    }
  }
  // Of rank r, at i; -1: nobody may touch it.
  std::int32_t expected(std::size_t r, std::size_t i) const {
    const std::size_t n = use.inputs.size(), count = use.count, root = use.root;
    const auto sum = [&](std::size_t at) {
      std::int32_t s = 0;
      for (const auto& in : use.inputs) s += in[at];
      return s;
    };
    switch (request.kind) {
      case Kind::kAllReduce:
      case Kind::kBarrier:
        return sum(i);
      case Kind::kAllGather:
        return use.inputs[i / count][i % count];
      case Kind::kReduceScatter:
        return sum(r * count + i);
      case Kind::kReduce:
        return r == root ? sum(i) : -1;
      case Kind::kBroadcast:
        return use.inputs[root][i];
      case Kind::kAllToAll:
        return use.inputs[i / count][r * count + i % count];
      case Kind::kGather:
        return r == root ? use.inputs[i / count][i % count] : -1;
      case Kind::kScatter:
        return use.inputs[root][r * count + i];
      case Kind::kSendRecv:
        return n == 2 && r != root ? use.inputs[root][i] : -1;
    }
    return -1;
  }
  void check() const {
    for (std::size_t r = 0; r < use.outputs.size(); ++r) {
      const auto& out = use.outputs[r];
      ASSERT_EQ(out.back(), -1) << "written past the end";
      for (std::size_t i = 0; i + 1 < out.size(); ++i) {
        ASSERT_EQ(out[i], expected(r, i)) << to_string(request.kind) << " by " << algorithm
                                          << ", rank " << r << ", element " << i;
      }
    }
  }
};

TEST(CourierEngines, RunEveryKindByEveryAlgorithm) {
  for (const int ranks : {2, 3, 4}) {
    const Case c = hosts_of(ranks, 1, 5, ranks == 3 ? 4 : 0);
    const std::uint64_t seed = mix64(base_seed() + static_cast<std::uint64_t>(ranks));
    SCOPED_TRACE(std::to_string(ranks) + " ranks, seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const HostTable hosts = HostTable::consecutive(ranks, 2);
    PlanLimits limits;
    limits.guaranteed_slot_bytes = Ranks::kSlotBytes;
    limits.lanes = 1;
    std::vector<PlannedUse> planned;
    std::uint32_t kinds = 0;
    for (int k = 0; k < kNumKinds; ++k) {
      for (int a = 0; a < kNumAlgorithms; ++a) {
        const auto algorithm = static_cast<Algorithm>(a);
        const auto kind = static_cast<Kind>(k);
        if (!row_of(algorithm).serves(kind)) continue;
        if (kind == Kind::kSendRecv && ranks != 2) continue;  // of two ranks, by definition
        PlannedUse p;
        p.request.kind = kind;
        p.request.dtype = DType::kInt32;
        p.request.ranks = ranks;
        p.request.root = has_root(kind) ? static_cast<int>(random() % 2) : 0;
        p.request.count = kind == Kind::kBarrier ? 1 : 1 + random() % 700;
        p.request.hosts = &hosts;
        std::string error;
        if (!suits_hosts(algorithm, p.request)) continue;
        p.fill(hosts, limits, algorithm, random);
        ASSERT_EQ(p.use.plans.size(), static_cast<std::size_t>(ranks));
        kinds |= 1u << k;
        planned.push_back(std::move(p));
      }
    }
    EXPECT_EQ(kinds, (1u << kNumKinds) - 1 - (ranks == 2 ? 0 : 1u << (kNumKinds - 1)));
    // Each is the first use of a key of its own.
    std::vector<Use> uses;
    for (std::size_t i = 0; i < planned.size(); ++i) {
      planned[i].use.key = i;
      uses.push_back(std::move(planned[i].use));
    }
    Networks all(c, uses.size(), seed, 50, 2000);
    all.submit(uses, uses.size());
    ASSERT_TRUE(all.run(uses.size() * static_cast<std::size_t>(ranks)))
        << "somebody waits for ever; " << all.why();
    for (std::size_t i = 0; i < planned.size(); ++i) {
      planned[i].use = std::move(uses[i]);
      planned[i].check();
    }
    if (testing::Test::HasFailure()) return;
  }
}

// ---- threads ----

// An engine's thread for each rank, and for each host one that drives its courier; so do engines
// that find nothing to do.
TEST(CourierEngines, OfManyThreadsGiveTheRightResults) {
  for (const int ranks : {2, 4}) {
    const auto n = static_cast<std::uint32_t>(ranks);
    constexpr std::size_t kKeys = 6, kUses = 3 * kKeys;
    const std::uint64_t seed = mix64(base_seed() + 77);
    std::mt19937_64 random(seed);
    std::vector<Use> uses(kUses);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      Use& u = uses[i] = drawn_use(i, kKeys, n, random);
      u.count = random() % 500;
      fill(u, n, random);
    }
    Networks all(hosts_of(ranks, 1, 2, 2), kKeys, seed, 64, 1 << 20);
    all.submit(uses, kKeys);
    std::atomic<std::uint32_t> at_work{n};
    std::atomic<bool> late{false};
    std::vector<std::thread> threads;
    for (std::uint32_t r = 0; r < n; ++r) {
      threads.emplace_back([&, r] {
        const std::uint64_t deadline = monotonic_ns() + std::uint64_t{kPatienceUs} * 1000;
        for (std::size_t left = kUses; left != 0 && !late;) {
          all.engine(r).stay();
          left -= all.ended(r);
          if (r % 2 == 0) all.courier(r < n / 2 ? 0 : 1).drive();
          if (monotonic_ns() > deadline || all.gone() != 0) late = true;
          std::this_thread::yield();
        }
        --at_work;
      });
    }
    for (std::uint32_t h = 0; h < Networks::kHosts; ++h) {
      threads.emplace_back([&, h] {
        while (at_work != 0) {
          all.courier(h).drive();
          std::this_thread::yield();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_FALSE(late) << all.why();
    for (const Use& u : uses) check(u);
    EXPECT_FALSE(all.net().overwritten());
  }
}

// ---- a host that goes ----

TEST(CourierEngines, ACutIsToldToBothHostsAndTouchesNothing) {
  for (std::uint64_t k = 0; k < 20; k += kSanitized ? 5 : 1) {
    const Case c = hosts_of(4, 1, 2, 0);
    std::mt19937_64 random(base_seed() + k);
    std::vector<Use> uses(4);
    for (std::size_t i = 0; i < uses.size(); ++i) {
      uses[i].key = i;
      uses[i].what = static_cast<What>(random() % kWhats);
      uses[i].count = 3000;
      fill(uses[i], 4, random);
    }
    Networks all(c, uses.size(), base_seed() + k, 16, 1000);
    all.submit(uses, uses.size());
    for (std::uint64_t i = 0; i < 40 * k; ++i) {
      all.engine(static_cast<std::uint32_t>(random() % 4)).stay();
      all.courier(static_cast<std::uint32_t>(random() % 2)).drive();
    }
    ASSERT_EQ(all.gone(), 0u) << all.why();
    all.net().cut(0, 1);
    for (int i = 0; i < 50; ++i) {
      all.engine(static_cast<std::uint32_t>(random() % 4)).stay();
      for (const std::uint32_t h : {0u, 1u}) all.courier(h).drive();
    }
    EXPECT_EQ(all.gone(), 2u);
    for (const Use& u : uses) {
      for (const auto& out : u.outputs) EXPECT_EQ(out.back(), -1);
    }
  }
}

}  // namespace
}  // namespace unjam
