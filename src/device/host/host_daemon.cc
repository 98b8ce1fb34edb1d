#include "device/host/host_daemon.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>

#include "base/clock.h"
#include "base/hash.h"
#include "base/pause.h"
#include "device/host/lane_bell.h"
#include "device/host/leaves.h"
#include "engine/engine.h"
#include "engine/lease.h"
#include "transport/network/courier_driver.h"

namespace unjam {

struct HostDaemon::Lane {
  std::uint32_t index = 0;
  std::uint32_t* doorbell = nullptr;
  BlockShared shared;
  pthread_barrier_t barrier;
  bool leave = false;  // leader to block, ordered by the barrier
  // The doorbell's value with which a driver last rested, or tried to. The word differs: the lane
  // was rung, its taker must look. Stored before the exchange that puts it into the word (release),
  // so whoever reads the word (acquire) finds this value or that of a later look.
  std::atomic<std::uint32_t> rested{0};
  // Odd while an engine runs; every change is notified.
  std::atomic<std::uint64_t> transitions{0};
  EventCount changed;
  // Both are the driver's, handed on with the lease.
  std::uint64_t delay_state = 0;
  std::uint64_t crowded_until_ns = 0;  // see HostDev::threshold()
  std::vector<std::thread> threads;
};

// The engine's device on the host, see engine/device_contract.h.
class HostDev {
 public:
  using Handle = HostDev&;
  static constexpr bool kInlinePacketFlags = false;
  static constexpr bool kLaneInShared = false;
  static constexpr bool kHostWatches = true;
  static constexpr bool kWide = true;
  static constexpr bool kPipelines = false;  // one thread alone would only look on

  // How the thread that drives the lane does it.
  struct Manner {
    bool holds = false;        // sleeps on the lane itself: keeps it when nothing can move
    bool hurries = false;      // makes short attempts and goes
    bool goes_on_cqe = false;  // a completion may be what it waits for
  };

  HostDev(RankState& rank, std::uint32_t lane, unsigned thread, unsigned threads,
          pthread_barrier_t* barrier, EventCount& completions,
          const HostDaemon::Completes* completes, std::atomic<std::uint32_t>& rested,
          std::uint64_t& delay_state, const HostDaemonOptions& options,
          std::uint64_t& crowded_until_ns)
      : rank_(rank),
        lane_(lane),
        thread_(thread),
        threads_(threads),
        barrier_(barrier),
        completions_(completions),
        completes_(completes),
        rested_(rested),
        delay_state_(delay_state),
        options_(options),
        crowded_until_ns_(crowded_until_ns) {}

  unsigned thread() const { return thread_; }
  // One thread controls.
  bool controls() const { return thread_ == 0; }
  static constexpr bool leads() { return true; }
  static constexpr std::uint32_t first() { return 0; }
  static constexpr std::uint32_t stride() { return 1; }
  static constexpr bool all(bool x) { return x; }
  void sync_control() {}
  void sync() {
    if (threads_ > 1) pthread_barrier_wait(barrier_);
  }
  void leaf(const SliceJob& job) { run_leaf_host(job, thread_, threads_); }

  // Ranks outnumber cores here: the one that we wait for may be waiting for our core.
  void relax(std::uint32_t polls) {
    if (polls % kPollsAYield != 0 || manner.hurries) {
      pause_core();
      return;
    }
    const std::uint64_t before = monotonic_ns();
    sched_yield();
    if (const std::uint64_t now = monotonic_ns(); now - before > kLongYieldNs) {
      crowded_until_ns_ = now + kCrowdedNs;
    }
  }

  void delay() {
    if (delay_state_ == 0) return;
    delay_state_ = mix64(delay_state_) | 1;
    const std::uint64_t r = delay_state_ >> 8;
    if (r % 16 == 0) {
      usleep(static_cast<useconds_t>((r >> 8) % (options_.delay_max_us + 1)));
    } else if (r % 16 < 4) {
      sched_yield();
    }
  }

  std::uint64_t now_ns() const { return monotonic_ns(); }
  bool residency_matters() const { return true; }
  void ended(std::uint16_t) {}
  static constexpr bool is_over() { return false; }
  bool called_away() const { return manner.hurries || (manner.goes_on_cqe && wrote_cqe); }
  // Where a yield gives the core away for a whole time slice, others want it who have nothing to do
  // with us. Yielding on would take such a slice for each step of a collective; whoever sleeps is
  // woken at once when there is something.
  std::uint32_t threshold(std::uint32_t polls) const {
    if (manner.hurries) return 1;
    if (crowded_until_ns_ == 0 || monotonic_ns() > crowded_until_ns_) return polls;
    return std::min(polls, kPollsAYield - 1);
  }

  // Each store releases for itself: a fence would be no cheaper here, and TSan does not see it.
  void fence() {}
  template <class T>
  static void publish(T& x, T v) {
    store_release(x, v);
  }

  void ring(std::uint32_t rank, std::uint32_t lane, RingFor what) {
    ring_lane(doorbell(rank, lane), what);
  }
  // What is for a rank on another host a courier takes there, and rings.
  bool posted(std::uint32_t rank, std::uint32_t lane, const PublishedWord& word) {
    return options_.network != nullptr &&
           options_.network->posted(rank_.lanes[lane_].transport.rank, lane, rank, word);
  }
  void marked(std::uint32_t rank, std::uint32_t lane) {
    if (options_.network != nullptr) {
      options_.network->marked(rank_.lanes[lane_].transport.rank, lane, rank);
    }
  }
  void ring_own_lanes() {
    for (std::uint32_t l = 0; l < rank_.num_lanes; ++l) {
      if (l != lane_) ring(rank_.lanes[l].transport.rank, l, RingFor::kData);
    }
  }

  bool next_submission(std::uint16_t& slot) {
    Sqe sqe;
    if (!rank_.sq.pop(sqe)) return false;
    slot = sqe.inv.slot;
    rank_.invocations[slot] = sqe.inv;
    return true;
  }
  bool submissions_wait() { return !rank_.sq.empty(); }
  bool stopped() { return load_acquire(rank_.stop) != 0; }
  bool cancelled(std::uint16_t slot) { return load_acquire(rank_.cancelled[slot]) != 0; }
  bool cancelled_by_any(std::uint16_t slot) { return cancelled(slot); }
  // The host's calls come with their input.
  static constexpr bool ready(const Invocation&) { return true; }
  static constexpr HandOver handed_over(std::uint16_t) { return {}; }
  void attend() {}
  void complete(std::uint16_t slot, Outcome outcome) {
    // In front of the completion: with that the slot may be another's.
    if (const HostDaemon::Completes& c = completes_[slot];
        outcome == Outcome::kDone && c.word != nullptr) {
      store_release(*c.word, c.value);
    }
    rank_.cq.push({slot, outcome});
    wrote_cqe = true;
    completions_.notify();
  }

  std::uint32_t epoch() { return doorbell_epoch(my_doorbell()); }

  // The engine has yet to leave: it saves contexts, and its threads look whether it quits. Until
  // then the lane must not be another driver's, so the exchange waits for that, see sleep().
  bool try_quit(std::uint32_t epoch, std::uint32_t interest) {
    if (doorbell_epoch(my_doorbell()) != epoch) return false;
    sleeps_ = true;
    epoch_ = epoch;
    interest_ = interest;
    return true;
  }

  // After the engine has left: what try_quit() was asked for. The lane stays driven if it was rung
  // since; then the engine goes on in another run.
  void sleep() {
    if (!sleeps_) return;
    sleeps_ = false;
    std::uint32_t bits = kAsleep | interest_;
    if (manner.holds && !called_away()) {
      // Another lane's engine says so when it ends an invocation: it rings for data.
      if (rank_.num_lanes > 1) bits |= kAsleepForData;
      if (doorbell_try_sleep(my_doorbell(), epoch_, bits | kHeld)) held = epoch_ | bits | kHeld;
      return;
    }
    rested_.store(epoch_ | bits, std::memory_order_release);
    rests = lease_rest(my_doorbell(), epoch_, interest_);
  }

  // Under the hold policy the engine sleeps where it is, its lane taken, as a spinning kernel keeps
  // its SM.
  void hold_sleep(std::uint32_t epoch) {
    look_at_wishes();
    const std::uint32_t bits = kAsleep | kAsleepForData | kAsleepForRoom | kHeld;
    if (!doorbell_try_sleep(my_doorbell(), epoch, bits)) return;
    futex_wait(my_doorbell(), epoch | bits, -1, kHolderSleeps);
    doorbell_awake(my_doorbell());
  }

  // What the lane has lacked may be a connector.
  void look_at_wishes() const {
    if (options_.look_at_wishes) options_.look_at_wishes();
  }

  static constexpr std::uint32_t kPollsAYield = 8;
  static constexpr std::uint64_t kLongYieldNs = 200'000;
  static constexpr std::uint64_t kCrowdedNs = 200'000'000;

  Manner manner;
  // How the last run ended; neither: it left the lane driven.
  bool rests = false;      // the lane is free
  std::uint32_t held = 0;  // not 0: the lane is asleep with this value, and ours
  bool wrote_cqe = false;

 private:
  std::uint32_t& doorbell(std::uint32_t rank, std::uint32_t lane) {
    return rank_.lanes[lane_].transport.lane_cell(rank, lane).doorbell;
  }
  std::uint32_t& my_doorbell() { return doorbell(rank_.lanes[lane_].transport.rank, lane_); }

  RankState& rank_;
  const std::uint32_t lane_;
  const unsigned thread_;
  const unsigned threads_;
  pthread_barrier_t* barrier_;
  EventCount& completions_;
  const HostDaemon::Completes* const completes_;  // by slot
  std::atomic<std::uint32_t>& rested_;
  std::uint64_t& delay_state_;
  const HostDaemonOptions& options_;
  std::uint64_t& crowded_until_ns_;
  bool sleeps_ = false;
  std::uint32_t epoch_ = 0;
  std::uint32_t interest_ = 0;
};

// Hooks that the engine finds by their names.
static_assert(requires(HostDev& dev, const PublishedWord& word) {
  { dev.posted(0u, 0u, word) } -> std::same_as<bool>;
  dev.marked(0u, 0u);
});

// A thread from outside, for as long as it is here. Both it and stop() change one word, so either
// stop() waits for it or it finds the daemon stopped.
class HostDaemon::Guest {
 public:
  explicit Guest(HostDaemon& daemon)
      : guests_(daemon.guests_),
        welcome_((guests_.fetch_add(1, std::memory_order_acq_rel) & kStopped) == 0) {}
  ~Guest() {
    if ((guests_.fetch_sub(1, std::memory_order_acq_rel) & kStopped) != 0) guests_.notify_all();
  }
  Guest(const Guest&) = delete;
  Guest& operator=(const Guest&) = delete;
  bool welcome() const { return welcome_; }

 private:
  std::atomic<std::uint32_t>& guests_;
  const bool welcome_;
};

HostDaemon::HostDaemon(RankState& rank, EventCount& completions, const HostDaemonOptions& options)
    : rank_(rank), completions_(completions), options_(options), completes_(rank.num_slots) {
  for (std::uint32_t l = 0; l < rank.num_lanes; ++l) {
    auto lane = std::make_unique<Lane>();
    const LaneTransport& t = rank.lanes[l].transport;
    lane->index = l;
    lane->doorbell = &t.lane_cell(t.rank, l).doorbell;
    if (options.delay_seed != 0) {
      lane->delay_state = mix64(options.delay_seed + (t.rank << 8) + l) | 1;
    }
    pthread_barrier_init(&lane->barrier, nullptr, options.block_threads);
    lanes_.push_back(std::move(lane));
  }
  // Behind a gate: where one thread cannot be had, those that are there leave without having met
  // the barrier of an incomplete block.
  try {
    for (auto& lane : lanes_) {
      for (unsigned t = 0; t < options.block_threads; ++t) {
        lane->threads.emplace_back([this, &l = *lane, t] {
          gate_.wait(Gate::kClosed);
          if (gate_.load() == Gate::kOpen) lane_main(l, t);
        });
      }
    }
  } catch (...) {
    gate_.store(Gate::kCancelled);
    gate_.notify_all();
    join();
    throw;
  }
  gate_.store(Gate::kOpen);
  gate_.notify_all();
}

HostDaemon::~HostDaemon() { stop(); }

void HostDaemon::stop() {
  if (lanes_.front()->threads.empty()) return;  // stopped before
  guests_.fetch_or(kStopped, std::memory_order_acq_rel);
  store_release<std::uint32_t>(rank_.stop, 1);
  ring_all();
  for (std::uint32_t n; (n = guests_.load(std::memory_order_acquire)) != kStopped;) {
    guests_.wait(n, std::memory_order_acquire);
  }
  join();
}

void HostDaemon::join() {
  for (auto& lane : lanes_) {
    for (std::thread& t : lane->threads) t.join();
    lane->threads.clear();
    pthread_barrier_destroy(&lane->barrier);
  }
}

// Sleeps until the lane is free and rung, and takes it; false: stopped.
bool HostDaemon::take_when_rung(Lane& lane) {
  std::uint32_t& doorbell = *lane.doorbell;
  for (;;) {
    const std::uint32_t w = load_acquire(doorbell);
    if (load_acquire(rank_.stop) != 0) return false;
    if (lease_free(w) && w != lane.rested.load(std::memory_order_acquire)) {
      if (lease_take(doorbell)) return true;
      continue;
    }
    // Free and not rung, or another thread's: it will ring, or be rung, when there is work for us.
    futex_wait(doorbell, w, -1, kTakerSleeps);
  }
}

// One run of the engine, by the thread that drives the lane. (By its leader, for blocks.)
void HostDaemon::stay(Lane& lane, HostDev& dev) {
  if (dev.thread() == 0) {
    dev.rests = dev.wrote_cqe = false;
    dev.held = 0;
    lane.transitions.fetch_add(1, std::memory_order_seq_cst);
  }
  Engine<HostDev>::run(dev, rank_, lane.index, lane.shared);
  if (dev.thread() == 0) {
    lane.transitions.fetch_add(1, std::memory_order_seq_cst);
    dev.sleep();
    lane.changed.notify();
    dev.look_at_wishes();
  }
}

void HostDaemon::hand_over(Lane& lane) {
  lease_hand_over(*lane.doorbell);
  wake_sleeper(*lane.doorbell, Wake::kTaker);
}

void HostDaemon::lane_main(Lane& lane, unsigned thread) {
  if (thread == 0) {
    char name[16];
    std::snprintf(name, sizeof(name), "unjam r%u.%u", rank_.lanes[lane.index].transport.rank & 255,
                  lane.index & 255);
    pthread_setname_np(pthread_self(), name);
  }
  std::uint64_t no_delay = 0, not_crowded = 0;  // of threads that do not control
  HostDev dev(rank_, lane.index, thread, options_.block_threads, &lane.barrier, completions_,
              completes_.data(), lane.rested, thread == 0 ? lane.delay_state : no_delay, options_,
              thread == 0 ? lane.crowded_until_ns : not_crowded);
  bool drives = true;  // the word begins with no bits: the lane is ours
  for (;;) {
    if (thread == 0) {
      lane.leave = drives ? load_acquire(rank_.stop) != 0 : !take_when_rung(lane);
    }
    dev.sync();
    if (lane.leave) return;
    stay(lane, dev);
    drives = !dev.rests;
  }
}

bool HostDaemon::can_help() const {
  return options_.help && options_.block_threads == 1 &&
         rank_.policy.stickiness != StickinessPolicy::kHold;
}

void HostDaemon::ring_and_attempt() {
  const Guest guest(*this);
  Lane& lane = *lanes_.front();
  if (!guest.welcome() || !lease_take(*lane.doorbell)) return ring(0);
  HostDev dev(rank_, 0, 0, 1, nullptr, completions_, completes_.data(), lane.rested,
              lane.delay_state, options_, lane.crowded_until_ns);
  dev.manner.hurries = true;
  stay(lane, dev);
  if (!dev.rests) hand_over(lane);
}

bool HostDaemon::help(const std::function<bool()>& look, std::uint64_t deadline_ns) {
  const Guest guest(*this);
  Lane& lane = *lanes_.front();
  std::uint32_t& doorbell = *lane.doorbell;
  if (!guest.welcome() || !lease_take(doorbell)) return false;
  HostDev dev(rank_, 0, 0, 1, nullptr, completions_, completes_.data(), lane.rested,
              lane.delay_state, options_, lane.crowded_until_ns);
  dev.manner.holds = dev.manner.goes_on_cqe = true;
  const auto goes = [&] { return load_acquire(rank_.stop) != 0 || monotonic_ns() >= deadline_ns; };
  for (bool go = false;;) {
    stay(lane, dev);
    if (dev.wrote_cqe) go = !look();
    go = go || goes();
    if (dev.rests) {
      if (go || !lease_take(doorbell)) return true;
      continue;
    }
    if (dev.held == 0) {
      // Its stay is over: a busy lane must not keep from this thread what other lanes, or a
      // failure, have completed.
      if (!go && !dev.wrote_cqe) go = !look();
      if (go && (dev.wrote_cqe || dev.manner.hurries || load_acquire(rank_.stop) != 0)) {
        hand_over(lane);  // it has tried to rest, and there is work
        return true;
      }
      dev.manner.hurries = go;
      continue;
    }
    // Completions that others wrote before the lane fell asleep; those that come later ring.
    if (!go) go = !look();
    while (!go && load_acquire(doorbell) == dev.held) {
      const std::uint64_t now = monotonic_ns();
      const std::int64_t left = deadline_ns == UINT64_MAX ? -1
                                : now < deadline_ns
                                    ? static_cast<std::int64_t>((deadline_ns - now + 999) / 1000)
                                    : 0;
      futex_wait(doorbell, dev.held, left, kHolderSleeps);
      go = goes();
    }
    if (go) {
      lane.rested.store(dev.held & ~static_cast<std::uint32_t>(kHeld), std::memory_order_release);
      if (lease_stop_holding(doorbell, dev.held)) return true;
    }
    doorbell_awake(doorbell);
    dev.manner.hurries = go = !look() || go;  // others may have completed what this thread awaits
  }
}

void HostDaemon::submit(const Invocation& inv, const KeyState* /*fresh*/) {
  rank_.sq.push(Sqe{inv});
}

void HostDaemon::completes(std::uint16_t slot, std::uint64_t* word, std::uint64_t value) {
  completes_[slot] = {word, value};
}

void HostDaemon::cancel(std::uint16_t slot) {
  store_release<std::uint32_t>(rank_.cancelled[slot], 1);
}

void HostDaemon::ring(std::uint32_t lane) { ring_lane(*lanes_[lane]->doorbell, RingFor::kWork); }

void HostDaemon::ring_all() {
  for (std::uint32_t l = 0; l < rank_.num_lanes; ++l) ring(l);
}

bool HostDaemon::synchronize(std::int64_t timeout_us) {
  if (timeout_us > kLongestTimeoutUs) timeout_us = -1;
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
  for (auto& lane : lanes_) {
    const std::uint64_t before = lane->transitions.load(std::memory_order_seq_cst);
    if (before % 2 == 0) continue;
    for (;;) {
      const std::uint32_t epoch = lane->changed.epoch();
      if (lane->transitions.load(std::memory_order_seq_cst) != before) break;
      std::int64_t left = -1;
      if (timeout_us >= 0) {
        left = std::chrono::duration_cast<std::chrono::microseconds>(
                   deadline - std::chrono::steady_clock::now())
                   .count();
        if (left <= 0) return false;
      }
      lane->changed.wait(epoch, left);
    }
  }
  return true;
}

}  // namespace unjam
