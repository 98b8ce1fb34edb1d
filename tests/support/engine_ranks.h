// Ranks of one process that are made without the API: arenas, keys and engines, for tests that
// submit programs of their own to the engine. Who drives it is the test's choice: the host device;
// blocks of several control threads (Warp), which stand for a warp's; or the test itself (ByHand).
#pragma once

#include <gtest/gtest.h>
#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/futex.h"
#include "base/hash.h"
#include "device/host/host_daemon.h"
#include "device/host/leaves.h"
#include "engine/engine.h"
#include "engine/set_plan.h"
#include "plan/program_builder.h"
#include "runtime/engine_memory.h"
#include "runtime/settings.h"
#include "tests/support/job.h"

namespace unjam {

enum class What {
  kTwoStepAllReduce,
  kOneStepAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  // As rsag plans do them, of at least two ranks: the root's part is empty, see empty_part().
  kMeshBroadcast,
  kMeshReduce,
  // As a ring plan does them, of at least two ranks.
  kChainBroadcast,
  kChainReduce,
};
constexpr int kWhats = 9, kWhatsOfOneRank = 5;

inline bool is_chain(What what) {
  return what == What::kChainBroadcast || what == What::kChainReduce;
}
inline bool has_empty_part(What what) {
  return what == What::kMeshBroadcast || what == What::kMeshReduce;
}

struct Case {
  int ranks = 2;
  int threads = 1;
  int control = 0;  // how many of them control; 0: the host device, where one does
  int lanes = 1;
  int guaranteed_slots = 2;
  int pool_slots = 0;
  bool delays = false;
  bool heap = false;      // most outputs lie in arenas' heaps, so that peers store into them
  bool together = false;  // what only sends and what only receives are one slice
  // Each rank has mirrors of the others' arenas: what it stores there somebody has to take to where
  // it belongs, see Ranks::deliver().
  bool mirrors = false;
  // With mirrors: of so many hosts, each of ranks that follow each other, who reach their arenas.
  // 0: each rank is alone.
  int hosts = 0;

  int host_of(std::uint32_t r) const {
    return hosts == 0 ? static_cast<int>(r) : static_cast<int>(r) * hosts / ranks;
  }
};

// One use of a key on all ranks.
struct Use {
  What what = What::kTwoStepAllReduce;
  std::size_t key = 0;
  std::uint64_t n = 0;
  std::uint64_t count = 0;
  std::uint32_t root = 0;
  Op op = Op::kSum;
  std::vector<std::vector<std::int32_t>> inputs, outputs;  // [rank]
  std::vector<Plan> plans;                                 // [rank]
};

// Of two ranks the root of a reduce owns all.
inline std::uint32_t empty_part(const Use& u) {
  return u.what == What::kMeshReduce && u.inputs.size() == 2 ? 1 - u.root : u.root;
}

inline Kind kind_of(What what) {
  switch (what) {
    case What::kAllGather:
      return Kind::kAllGather;
    case What::kReduceScatter:
      return Kind::kReduceScatter;
    case What::kBroadcast:
    case What::kMeshBroadcast:
    case What::kChainBroadcast:
      return Kind::kBroadcast;
    case What::kMeshReduce:
    case What::kChainReduce:
      return Kind::kReduce;
    default:
      return Kind::kAllReduce;
  }
}

// The geometry is the use's.
inline void write_program(const Use& u, int me, Plan* plan) {
  constexpr unsigned kResult = kLocal | kContribute | kFinish | kCopy;
  constexpr unsigned kAdd = kLocal | kReduce | kContribute;
  const int n = static_cast<int>(u.inputs.size()), root = static_cast<int>(u.root);
  const int before = (me + n - 1) % n, next = (me + 1) % n;
  ProgramBuilder program(n, me);
  const PeerRanks nobody = PeerRanks::nobody(), others = program.all_others();
  const auto one = [](int rank) { return PeerRanks::one(rank); };
  const auto scatter = [&](unsigned more = 0) {
    if (n > 1) program.add(kScatter | kLocal | more, 0, nobody, others);
  };
  const auto gather = [&](unsigned flags, int part, const PeerRanks& to = PeerRanks::nobody()) {
    program.add(n > 1 ? flags | kReduce : flags & ~kIntoOutput, part, others, to);
  };
  const auto collect = [&] {
    if (n > 1) program.add(kCollect | kCopy, 0, others);
  };
  const unsigned into_outputs = n > 1 ? kIntoOutput : 0;
  switch (u.what) {
    case What::kTwoStepAllReduce:
      scatter();
      gather(kResult | kIntoOutput, me, others);
      collect();
      break;
    case What::kOneStepAllReduce:
      if (n > 1) program.add(kLocal, 0, nobody, others);
      gather(kResult, 0);
      break;
    case What::kAllGather:
      program.add(kLocal | kCopy | into_outputs, me, nobody, others);
      collect();
      break;
    case What::kReduceScatter:
      scatter();
      gather(kResult, me);
      break;
    case What::kBroadcast:
      if (me == root) {
        program.add(kLocal | kCopy | into_outputs, 0, nobody, others);
      } else {
        program.add(kCopy, 0, one(root));
      }
      break;
    case What::kMeshBroadcast:
      if (me == root) {
        scatter(kCopy | kIntoOutput);
      } else if (n == 2) {
        program.add(kCopy, me, one(root));
      } else {
        program.add(kCopy | kIntoOutput, me, one(root), program.all_others(root));
        collect();
      }
      break;
    case What::kMeshReduce:
      if (n == 2) {
        me == root ? gather(kResult, me) : scatter();
        break;
      }
      scatter();
      if (me == root) {
        collect();
      } else {
        gather((kResult & ~kCopy) | kIntoOutput, me, one(root));
      }
      break;
    case What::kChainBroadcast:
      if (me == root) {
        program.add(kLocal | kCopy | kIntoOutput, 0, nobody, one(next));
      } else if (next == root) {
        program.add(kCopy, 0, one(before));
      } else {
        program.add(kCopy | kIntoOutput, 0, one(before), one(next));
      }
      break;
    case What::kChainReduce:
      if (me == root) {
        program.add(kAdd | kFinish | kCopy, 0, one(before));
      } else if (before == root) {
        program.add(kLocal | kContribute, 0, nobody, one(next));
      } else {
        program.add(kAdd, 0, one(before), one(next));
      }
      break;
  }
  program.write(plan);
}

// What the devices here have in common.
struct Looking {
  static constexpr bool kInlinePacketFlags = false;
  void delay() {}
  void ended(std::uint16_t) {}
  bool is_over() const { return false; }
  bool called_away() const { return false; }
  std::uint32_t threshold(std::uint32_t polls) const { return polls; }
  void fence() {}
  bool ready(const Invocation&) { return true; }
  template <class T>
  static void publish(T& x, T v) {
    store_release(x, v);
  }
};

// A block of which several threads control, and which never sleeps: it looks again and again, and
// nothing is told.
class Warp {
 public:
  Warp(RankState& rank, EventCount& completions, std::uint32_t lane, int threads, int control)
      : rank_(rank), completions_(completions), control_(static_cast<std::uint32_t>(control)) {
    pthread_barrier_init(&block_, nullptr, static_cast<unsigned>(threads));
    pthread_barrier_init(&warp_, nullptr, static_cast<unsigned>(control));
    pthread_barrier_init(&posters_, nullptr, static_cast<unsigned>(control));
    for (int t = 0; t < threads; ++t) {
      threads_.emplace_back([this, t, threads, lane] {
        Dev dev{{}, *this, static_cast<std::uint32_t>(t), static_cast<std::uint32_t>(threads)};
        // Whatever makes it leave, it comes back, until all threads have seen the same stop.
        do {
          Engine<Dev>::run(dev, rank_, lane, shared_);
          if (t == 0) leaves_ = load_acquire(rank_.stop) != 0;
          std::this_thread::sleep_for(std::chrono::microseconds(20));  // others need the core
          dev.sync();
        } while (!leaves_);
      });
    }
  }
  ~Warp() {
    for (std::thread& t : threads_) t.join();
    pthread_barrier_destroy(&block_);
    pthread_barrier_destroy(&warp_);
    pthread_barrier_destroy(&posters_);
  }

 private:
  struct Dev : Looking {
    using Handle = Dev&;
    static constexpr bool kLaneInShared = true;
    static constexpr bool kHostWatches = true;
    static constexpr bool kPipelines = true;

    Warp& w;
    const std::uint32_t thread, threads;
    std::uint32_t votes = 0;

    void attend() {}
    std::uint32_t epoch() { return 0; }
    bool try_quit(std::uint32_t, std::uint32_t) { return true; }
    void hold_sleep(std::uint32_t) {}
    void ring(std::uint32_t, std::uint32_t, RingFor) {}
    void ring_own_lanes() {}
    HandOver handed_over(std::uint16_t) const { return {}; }
    bool controls() const { return thread < w.control_; }
    bool leads() const { return thread == 0; }
    std::uint32_t first() const { return thread % w.control_; }
    std::uint32_t stride() const { return w.control_; }
    void sync() { pthread_barrier_wait(&w.block_); }
    void sync_control() { pthread_barrier_wait(&w.warp_); }
    // Relaxed: a vote orders nothing. The word after the next was read by all before any came here.
    bool all(bool x) {
      std::atomic<std::uint32_t>& word = w.votes_[votes % 3];
      if (leads()) w.votes_[(votes + 1) % 3].store(0, std::memory_order_relaxed);
      ++votes;
      word.fetch_add(x ? 1 : 0x10001, std::memory_order_relaxed);
      for (;;) {
        const std::uint32_t v = word.load(std::memory_order_relaxed);
        if ((v & 0xffff) == w.control_) return v >> 16 == 0;
        sched_yield();
      }
    }
    // As on a GPU: some control, as many publish, the others move the data; where there are enough.
    bool pipelines() const { return threads > 2 * w.control_; }
    bool posts() const { return thread >= w.control_ && thread < 2 * w.control_; }
    bool posters_first() const { return thread == w.control_; }
    void sync_posters() { pthread_barrier_wait(&w.posters_); }
    std::uint32_t all_movers() const { return threads - 2 * w.control_; }
    std::uint32_t groups() const { return all_movers() % 2 == 0 ? 2 : 1; }
    std::uint32_t movers() const { return all_movers() / groups(); }
    std::uint32_t group() const { return (thread - 2 * w.control_) / movers(); }
    void stored(std::uint32_t& count) { fetch_add<std::uint32_t>(count, 1); }
    static std::uint32_t load_block(std::uint32_t& x) { return load_acquire(x); }
    static void store_block(std::uint32_t& x, std::uint32_t v) { store_release(x, v); }
    void leaf(const SliceJob& job) {
      if (!pipelines()) return run_leaf_host(job, thread, threads);
      run_leaf_host(job, (thread - 2 * w.control_) % movers(), movers());
    }
    void relax(std::uint32_t) { sched_yield(); }
    std::uint64_t now_ns() const { return monotonic_ns(); }
    bool residency_matters() const { return true; }
    bool next_submission(std::uint16_t& slot) {
      if (leads()) {
        Sqe sqe;
        w.taken_ = kNoSlot;
        if (w.rank_.sq.pop(sqe)) {
          w.taken_ = sqe.inv.slot;
          w.rank_.invocations[w.taken_] = sqe.inv;
        }
      }
      sync_control();
      slot = w.taken_;
      sync_control();
      return slot != kNoSlot;
    }
    bool submissions_wait() { return !w.rank_.sq.empty(); }
    bool stopped() { return load_acquire(w.rank_.stop) != 0; }
    bool cancelled(std::uint16_t slot) { return load_acquire(w.rank_.cancelled[slot]) != 0; }
    bool cancelled_by_any(std::uint16_t slot) { return cancelled(slot); }
    void complete(std::uint16_t slot, Outcome outcome) {
      w.rank_.cq.push({slot, outcome});
      w.completions_.notify();
    }
  };

  RankState& rank_;
  EventCount& completions_;
  const std::uint32_t control_;
  BlockShared shared_;
  bool leaves_ = false;
  std::uint16_t taken_ = kNoSlot;
  std::atomic<std::uint32_t> votes_[3] = {};
  pthread_barrier_t block_, warp_, posters_;
  std::vector<std::thread> threads_;
};

// The engine in the caller's thread, with a clock that goes on only when a slice is moved: how long
// it stays is counted, not measured. It sleeps by its lane's doorbell, as the host device does;
// only that here a sleep is where stay() ends, since who could ring is the caller.
class ByHand : public Looking {
 public:
  using Handle = ByHand&;
  static constexpr bool kLaneInShared = false;
  static constexpr bool kHostWatches = false;
  static constexpr bool kPipelines = false;
  static constexpr bool kWide = true;
  static constexpr std::uint64_t kSliceUs = 100;
  static constexpr std::uint64_t kLateSlices = 3, kLateNs = kLateSlices * kSliceUs * 1000;

  ByHand(RankState& rank, bool residency_matters)
      : rank_(rank), residency_matters_(residency_matters) {}

  // What of the next invocation its lane has done by itself.
  HandOver done_before;
  // What comes to pass between the look after which it would sleep for the first time and that
  // sleep.
  std::function<void()> before_it_sleeps;
  // What comes to pass when a slice was moved.
  std::function<void()> after_slice;
  // And when a pass begins.
  std::function<void()> before_pass;
  bool is_called_away = false;
  bool called_away() const { return is_called_away; }
  // How long a turn takes that moves nothing.
  std::uint64_t turn_ns = 0;
  // Whose turns they were, and how often each has looked in vain at most, at a time.
  std::vector<std::uint16_t> turns;
  std::map<std::uint16_t, std::uint32_t> most_polls;
  // What comes to pass when somebody has looked in vain.
  std::function<void(std::uint16_t slot, std::uint32_t polls)> after_poll;
  std::uint32_t lane = 0;  // that it drives
  void delay() {
    if (turns.empty() || turns.back() != shared_.slot) turns.push_back(shared_.slot);
    waited_ns_ += turn_ns;
  }
  void relax(std::uint32_t polls) {
    std::uint32_t& most = most_polls[shared_.slot];
    most = std::max(most, polls);
    if (after_poll) after_poll(shared_.slot, polls);
  }

  // One stay; returns how many slices it has moved.
  std::uint64_t stay() {
    const std::uint64_t before = moved_;
    doorbell_awake(doorbell());
    Engine<ByHand>::run(*this, rank_, lane, shared_);
    return moved_ - before;
  }

  bool controls() const { return true; }
  bool leads() const { return true; }
  std::uint32_t first() const { return 0; }
  std::uint32_t stride() const { return 1; }
  bool all(bool x) const { return x; }
  void sync() {}
  void sync_control() {}
  void leaf(const SliceJob& job) {
    run_leaf_host(job, 0, 1);
    ++moved_;
    if (after_slice) after_slice();
  }
  std::uint64_t now_ns() const { return moved_ * kSliceUs * 1000 + waited_ns_; }
  void pass_time(std::uint64_t ns) { waited_ns_ += ns; }
  bool residency_matters() const { return residency_matters_; }
  bool next_submission(std::uint16_t& slot) {
    Sqe sqe;
    if (!rank_.sq.pop(sqe)) return false;
    slot = sqe.inv.slot;
    rank_.invocations[slot] = sqe.inv;
    return true;
  }
  bool submissions_wait() { return !rank_.sq.empty(); }
  HandOver handed_over(std::uint16_t) { return std::exchange(done_before, {}); }
  void attend() {
    const LaneStats& stats = rank_.lanes[0].stats;
    EXPECT_GE(stats.completed, completed_) << "it fell";
    completed_ = stats.completed;
    if (before_pass) before_pass();
  }
  bool stopped() { return stuck_; }
  std::set<std::uint16_t> cancelled_slots;
  bool cancelled(std::uint16_t slot) { return cancelled_slots.contains(slot); }
  bool cancelled_by_any(std::uint16_t slot) { return cancelled(slot); }
  void complete(std::uint16_t slot, Outcome outcome) { rank_.cq.push({slot, outcome}); }

  std::uint32_t epoch() { return doorbell_epoch(doorbell()); }
  bool try_quit(std::uint32_t epoch, std::uint32_t interest) {
    return sleep(epoch, kAsleep | interest);
  }
  void hold_sleep(std::uint32_t epoch) {
    if (sleep(epoch, kAsleep | kAsleepForData | kAsleepForRoom | kHeld)) stuck_ = true;
  }
  bool asleep() { return (load_acquire(doorbell()) & kAsleep) != 0; }
  // It has slept in the middle of a stay.
  bool stuck() const { return stuck_; }
  void ring(std::uint32_t rank, std::uint32_t lane, RingFor what) {
    doorbell_ring(rank_.lanes[0].transport.lane_cell(rank, lane).doorbell, what);
  }
  void ring_own_lanes() {}  // there is one

 protected:
  std::uint32_t& doorbell() {
    const LaneTransport& t = rank_.lanes[0].transport;
    return t.lane_cell(t.rank, 0).doorbell;
  }
  RankState& rank_;
  BlockShared shared_;

 private:
  bool sleep(std::uint32_t epoch, std::uint32_t bits) {
    if (const auto first = std::exchange(before_it_sleeps, nullptr)) first();
    return doorbell_try_sleep(doorbell(), epoch, bits);
  }

  const bool residency_matters_;
  std::uint64_t moved_ = 0, waited_ns_ = 0;
  std::uint64_t completed_ = 0;
  bool stuck_ = false;
};

class Ranks {
 public:
  Ranks(const Case& c, std::size_t keys, std::uint64_t seed)
      : case_(c), n_(static_cast<std::uint32_t>(c.ranks)) {
    Settings settings;
    settings.lanes = c.lanes;
    settings.guaranteed_slots = c.guaranteed_slots;
    settings.guaranteed_slot_bytes = kSlotBytes;
    settings.pool_slots = c.pool_slots;
    settings.max_active_keys = 64;
    settings.spin_head = 64;
    settings.spin_base = 4;
    settings.spin_cap = 1024;
    if (c.delays || c.control != 0) settings.order_after_us = 0;  // at once
    if (c.heap) settings.heap_bytes = 16 << 20;
    const ArenaShape shape = arena_shape(settings, c.ranks);
    heap_ = shape.heap();
    for (std::uint32_t r = 0; r < n_; ++r) {
      bases_.push_back(make_arena(shape));
      members_.push_back(static_cast<std::uint16_t>(r));
    }
    for (std::uint32_t r = 0; r < n_; ++r) {
      auto& view = views_.emplace_back(bases_);
      for (std::uint32_t q = 0; c.mirrors && q < n_; ++q) {
        if (c.host_of(q) != c.host_of(r)) view[q] = make_arena(shape);
      }
    }
    for (std::uint32_t r = 0; r < n_; ++r) {
      auto rank = std::make_unique<Rank>();
      // Each rank's heap is a window, too.
      auto& table = tables_.emplace_back(std::size_t{n_} * kWindows);
      for (std::uint32_t p = 0; p < n_; ++p) {
        table[p * kWindows + kWindow % kWindows].set(kWindow, bases_[p] + heap_);
      }
      rank->memory = std::make_unique<EngineMemory>(settings, shape, views_[r].data(),
                                                    static_cast<int>(r), table.data());
      for (std::size_t k = 0; k < keys; ++k) {
        auto key = std::make_unique<Key>();
        key->lanes.resize(static_cast<std::size_t>(c.lanes));
        for (LaneKey& l : key->lanes) {
          key->out.emplace_back(n_);
          key->in.emplace_back(n_);
          l.out = key->out.back().data();
          l.in = key->in.back().data();
        }
        key->state.tag = mix64(seed + k) | 1;
        key->state.group = mix64(seed - 1) | 1;
        key->state.lanes = key->lanes.data();
        rank->keys.push_back(std::move(key));
      }
      ranks_.push_back(std::move(rank));
    }
    // Not before all arenas are there.
    for (std::uint32_t r = 0; r < n_; ++r) {
      Rank& rank = *ranks_[r];
      if (c.control != 0) {
        for (std::uint32_t l = 0; l < static_cast<std::uint32_t>(c.lanes); ++l) {
          rank.warps.push_back(std::make_unique<Warp>(rank.memory->rank(), rank.completions, l,
                                                      c.threads, c.control));
        }
        continue;
      }
      if (c.threads == 0) continue;  // by hand
      HostDaemonOptions options;
      options.block_threads = static_cast<unsigned>(c.threads);
      options.delay_seed = c.delays ? seed + r + 1 : 0;
      options.delay_max_us = 20;
      rank.daemon = std::make_unique<HostDaemon>(rank.memory->rank(), rank.completions, options);
    }
  }
  ~Ranks() { stop(); }
  void stop() {
    for (auto& r : ranks_) {
      if (r->daemon != nullptr) r->daemon->stop();
      store_release<std::uint32_t>(r->memory->rank().stop, 1);
    }
    for (auto& r : ranks_) r->warps.clear();
  }

  // slot: a number that is the use's own at each rank.
  void submit(Use& u, std::uint32_t r, std::uint16_t slot, std::uint8_t whole = 0) {
    Rank& rank = *ranks_[r];
    Sqe sqe;
    Invocation& inv = sqe.inv;
    set_plan(u.plans[r], static_cast<std::uint16_t>(r), &inv);
    inv.members = members_.data();
    inv.key = &rank.keys[u.key]->state;
    inv.input = u.inputs[r].data();
    inv.output = u.outputs[r].data();
    if (case_.heap && ++submitted_ % 4 != 0) place_in_heap(u, r, inv);
    inv.n = inv.use = u.n;
    inv.seed = hash_combine(inv.key->tag, u.n);
    inv.group_size = static_cast<std::uint16_t>(n_);
    inv.op = u.op;
    inv.slot = slot;
    inv.batch = whole;
    rank.memory->rank().sq.push(sqe);
    if (rank.daemon != nullptr) rank.daemon->ring(0);
  }

  // Rank r lets go of its endpoints of a key, as when the runtime forgets it.
  void release(std::uint32_t r, std::size_t key, std::uint16_t slot) {
    Rank& rank = *ranks_[r];
    KeyRelease& release = rank.release;
    release.lanes = rank.keys[key]->lanes.data();
    release.members = members_.data();
    release.group_size = n_;
    Sqe sqe;
    sqe.inv.input = &release;
    sqe.inv.n = 1;
    sqe.inv.geometry.lanes = 1;
    sqe.inv.slot = slot;
    rank.memory->rank().sq.push(sqe);
  }

  // What has come to outputs in heaps, behind wait().
  void fetch() {
    for (const auto& [output, place] : in_heap_) {
      std::copy_n(reinterpret_cast<const std::int32_t*>(place), output->size(), output->begin());
    }
  }
  // Slices that went straight into outputs, of all ranks, behind stop(): a device may keep figures
  // in memory of its own while it runs.
  std::uint64_t into_outputs() {
    std::uint64_t sum = 0;
    for (std::uint32_t r = 0; r < n_; ++r) {
      for (int l = 0; l < case_.lanes; ++l) {
        sum +=
            load_relaxed(ranks_[r]->memory->lane(static_cast<std::uint32_t>(l)).stats.into_outputs);
      }
    }
    return sum;
  }

  // Waits for so many completions at a rank. False: they did not come.
  bool wait(std::uint32_t r, std::size_t count) {
    Rank& rank = *ranks_[r];
    const std::uint64_t deadline = monotonic_ns() + std::uint64_t{unjam_test::kPatienceUs} * 1000;
    while (count != 0) {
      const std::uint32_t epoch = rank.completions.epoch();
      Cqe e;
      if (rank.memory->rank().cq.pop(e)) {
        if (e.outcome == Outcome::kDone) --count;
        continue;
      }
      if (monotonic_ns() > deadline) return false;
      rank.completions.wait(epoch, 100'000);
    }
    return true;
  }

  std::uint32_t lack(std::uint32_t r, std::size_t key) {
    return static_cast<std::uint32_t>(load_relaxed(ranks_[r]->keys[key]->lanes[0].lack));
  }
  void set_group(std::uint32_t r, std::size_t key, std::uint64_t group) {
    ranks_[r]->keys[key]->state.group = group;
  }
  void set_done(std::uint32_t r, std::size_t key, std::uint64_t done) {
    ranks_[r]->keys[key]->state.done = done;
  }
  std::uint64_t tag(std::uint32_t r, std::size_t key) { return ranks_[r]->keys[key]->state.tag; }
  std::uint32_t in_queue(std::uint32_t r, std::size_t key) {
    return ranks_[r]->keys[key]->lanes[0].in_queue;
  }
  std::uint32_t connector(std::uint32_t r, std::size_t key, std::uint32_t to) {
    return ranks_[r]->keys[key]->out[0][to].connector;
  }
  // Takes all that rank `from` has stored for rank `to` there: slots, and credits for what it was
  // sent. Neither engine may run meanwhile.
  void deliver(std::uint32_t from, std::uint32_t to) {
    const ArenaShape& shape = ranks_[0]->memory->lane(0).transport.shape;
    const auto take = [&](std::uint64_t offset, std::uint64_t bytes) {
      std::memcpy(bases_[to] + offset, views_[from][to] + offset, bytes);
    };
    take(shape.block(to, from), shape.block_bytes());
  }

  RankState& state(std::uint32_t r) { return ranks_[r]->memory->rank(); }
  LaneStats& stats(std::uint32_t r) { return ranks_[r]->memory->lane(0).stats; }

  static constexpr std::uint32_t kSlotBytes = 256;

 private:
  static constexpr std::uint64_t kWindow = 3 * kWindows + 5;  // its number

  static constexpr std::size_t kPageBytes = 4096;

  unsigned char* make_arena(const ArenaShape& shape) {
    std::size_t room = shape.total_bytes() + kPageBytes;
    arenas_.push_back(std::make_unique<ZeroedArray<unsigned char>>(room));
    void* base = arenas_.back()->get();
    return static_cast<unsigned char*>(std::align(kPageBytes, shape.total_bytes(), base, room));
  }

  void place_in_heap(Use& u, std::uint32_t r, Invocation& inv) {
    std::vector<std::int32_t>& output = u.outputs[r];
    // Some where peers' slices are not aligned, which then go through slots.
    const std::uint64_t shift = submitted_ % 7 == 0 ? sizeof(std::int32_t) : 0;
    unsigned char* place = bases_[r] + heap_ + used_[r] + shift;
    used_[r] += (output.size() * sizeof(std::int32_t) + shift + 15) / 16 * 16;
    ASSERT_LE(used_[r], std::uint64_t{16} << 20);
    std::copy(output.begin(), output.end(), reinterpret_cast<std::int32_t*>(place));
    in_heap_.emplace_back(&output, place);
    inv.output = place;
    inv.output_place = static_cast<std::uint64_t>(place - bases_[r]);
    const auto offset = inv.output_place - heap_;
    if (submitted_ % 3 == 0 || offset % kPlaceUnit != 0) return;
    // In a window, of which some nobody has mapped.
    const bool unknown = submitted_ % 5 == 0;
    inv.output_place = place_in_window(unknown ? kWindow + kWindows : kWindow, offset);
  }

  struct Key {
    KeyState state;
    std::vector<LaneKey> lanes;
    std::vector<std::vector<OutEndpoint>> out;
    std::vector<std::vector<InEndpoint>> in;
  };
  struct Rank {
    std::unique_ptr<EngineMemory> memory;
    EventCount completions;
    std::vector<std::unique_ptr<Key>> keys;
    KeyRelease release;
    std::unique_ptr<HostDaemon> daemon;
    std::vector<std::unique_ptr<Warp>> warps;
  };

  const Case case_;
  const std::uint32_t n_;
  std::vector<std::unique_ptr<ZeroedArray<unsigned char>>> arenas_;
  std::vector<unsigned char*> bases_;
  std::vector<std::vector<unsigned char*>> views_;  // each rank's bases
  std::vector<std::uint16_t> members_;
  std::vector<std::vector<WindowEntry>> tables_;
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::uint64_t heap_ = 0;  // offset in arenas
  std::vector<std::uint64_t> used_ = std::vector<std::uint64_t>(n_);
  std::uint64_t submitted_ = 0;
  std::vector<std::pair<std::vector<std::int32_t>*, unsigned char*>> in_heap_;
};

// Every hop works on a chunk some passes before the hop before it's, as rsag plans do with slots
// enough.
inline void overlap(std::vector<Primitive>& program, unsigned passes = 1) {
  unsigned lag = 0;
  for (Primitive& p : program) {
    if (from_set(p)) lag += passes;
    p.lag = lag & kMostLag;
  }
}

// The same with slices that send a chunk and receive an earlier one; four slots are enough.
inline void go_together(std::vector<Primitive>& program) {
  if (program.size() < 2) return;
  std::rotate(program.begin(), program.begin() + 1, program.end() - 1);
  if (program.size() == 3) program.front().lag = 2;
  program.back().lag = 3;
  program[program.size() - 2].flags |= kWithNext;
}

enum class Laid { kOneByOne, kOverlapping, kTogether };

inline Geometry geometry_of(const Use& u, int lanes) {
  const auto ranks = static_cast<std::uint32_t>(u.inputs.size());
  const bool one_part = u.what == What::kOneStepAllReduce || u.what == What::kBroadcast;
  Geometry g;
  g.count = u.count;
  g.parts = one_part || is_chain(u.what) ? 1 : ranks;
  g.chunk = Ranks::kSlotBytes / sizeof(std::int32_t);
  g.lanes = static_cast<std::uint16_t>(lanes);
  g.kind = kind_of(u.what);
  if (has_empty_part(u.what)) g.empty_part = static_cast<std::uint16_t>(empty_part(u));
  g.dtype = DType::kInt32;
  return g;
}

inline void fill(Use& u, std::uint32_t ranks, std::mt19937_64& random, Laid laid = Laid::kOneByOne,
                 int lanes = 1) {
  const bool gathers = u.what == What::kAllGather, scatters = u.what == What::kReduceScatter;
  u.inputs.resize(ranks);
  u.outputs.resize(ranks);
  for (std::uint32_t r = 0; r < ranks; ++r) {
    u.inputs[r].resize(u.count * (scatters ? ranks : 1));
    for (std::int32_t& x : u.inputs[r]) x = static_cast<std::int32_t>(random() % 100000);
    // One more, which nobody may touch.
    u.outputs[r].assign(u.count * (gathers ? ranks : 1) + 1, -1);
    Plan& plan = u.plans.emplace_back();
    plan.geometry = geometry_of(u, lanes);
    write_program(u, static_cast<int>(r), &plan);
    if (laid == Laid::kOneByOne) continue;
    if (laid == Laid::kOverlapping || has_empty_part(u.what)) {
      overlap(plan.primitives);
    } else {
      go_together(plan.primitives);
    }
  }
}

inline std::int32_t expected(const Use& u, std::uint32_t r, std::size_t i) {
  if (kind_of(u.what) == Kind::kBroadcast) return u.inputs[u.root][i];
  if (kind_of(u.what) == Kind::kReduce && r != u.root) return -1;  // nobody may touch it
  if (u.what == What::kAllGather) return u.inputs[i / u.count][i % u.count];
  const std::size_t at = u.what == What::kReduceScatter ? r * u.count + i : i;
  std::int32_t sum = 0;
  for (const auto& in : u.inputs) sum += in[at];
  return sum;
}

inline void check(const Use& u) {
  for (std::uint32_t r = 0; r < u.outputs.size(); ++r) {
    const auto& out = u.outputs[r];
    ASSERT_EQ(out.back(), -1) << "written past the end";
    for (std::size_t i = 0; i + 1 < out.size(); ++i) {
      ASSERT_EQ(out[i], expected(u, r, i)) << "what " << static_cast<int>(u.what) << ", count "
                                           << u.count << ", rank " << r << ", element " << i;
    }
  }
}

inline void PrintTo(const Case& c, std::ostream* out) {
  *out << c.ranks << " ranks, " << c.threads << " threads (" << c.control << " control), "
       << c.lanes << " lanes, " << c.guaranteed_slots << " + " << c.pool_slots << " slots"
       << (c.delays ? ", delays" : "") << (c.heap ? ", outputs in heaps" : "")
       << (c.together ? ", together" : "");
}

}  // namespace unjam
