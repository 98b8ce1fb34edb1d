#include "device/host/host_daemon.h"

#include <sched.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "base/clock.h"
#include "base/hash.h"
#include "device/host/leaves.h"
#include "engine/engine.h"

namespace unjam {

struct HostDaemon::Lane {
  std::uint32_t index = 0;
  BlockShared shared;
  pthread_barrier_t barrier;
  bool leave = false;              // leader to block, ordered by the barrier
  std::uint32_t asleep_value = 0;  // what try_quit put into the doorbell, 0: stayed awake
  // Odd while an engine runs; every change is notified.
  std::atomic<std::uint64_t> transitions{0};
  EventCount changed;
  std::uint64_t delay_state = 0;
  std::vector<std::thread> threads;
};

namespace {

// The host's side of Engine's `Dev`.
class HostDev {
 public:
  using Handle = HostDev&;
  static constexpr bool kInlinePacketFlags = false;

  HostDev(RankState& rank, std::uint32_t lane, unsigned thread, unsigned threads,
          pthread_barrier_t* barrier, EventCount& completions, std::uint32_t& asleep_value,
          std::uint64_t& delay_state, std::uint32_t delay_max_us)
      : rank_(rank),
        lane_(lane),
        thread_(thread),
        threads_(threads),
        barrier_(barrier),
        completions_(completions),
        asleep_value_(asleep_value),
        delay_state_(delay_state),
        delay_max_us_(delay_max_us) {}

  unsigned thread() const { return thread_; }
  void sync() {
    if (threads_ > 1) pthread_barrier_wait(barrier_);
  }
  void leaf(const SliceJob& job) { run_leaf_host(job, thread_, threads_); }

  // Ranks outnumber cores here: the one that we wait for may be waiting for our core.
  void relax(std::uint32_t polls) {
    if (polls % 8 == 0) {
      sched_yield();
    } else {
      __builtin_ia32_pause();
    }
  }

  void delay() {
    if (delay_state_ == 0) return;
    delay_state_ = mix64(delay_state_) | 1;
    const std::uint64_t r = delay_state_ >> 8;
    if (r % 16 == 0) {
      usleep(static_cast<useconds_t>((r >> 8) % (delay_max_us_ + 1)));
    } else if (r % 16 < 4) {
      sched_yield();
    }
  }

  std::uint64_t now_ns() const { return monotonic_ns(); }
  bool residency_matters() const { return true; }

  void wake(std::uint32_t rank, std::uint32_t lane) { futex_wake_all(doorbell(rank, lane)); }
  void notify_host() { completions_.notify(); }

  bool try_quit(std::uint32_t epoch, bool for_room) {
    return doorbell_try_sleep(my_doorbell(), epoch, for_room, asleep_value_);
  }

  // Under the hold policy the engine sleeps where it is, its lane taken, as a spinning kernel keeps
  // its SM.
  void hold_sleep(std::uint32_t epoch) {
    std::uint32_t asleep = 0;
    if (!doorbell_try_sleep(my_doorbell(), epoch, true, asleep)) return;
    futex_wait(my_doorbell(), asleep, -1);
    doorbell_awake(my_doorbell());
  }

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
  std::uint32_t& asleep_value_;
  std::uint64_t& delay_state_;
  const std::uint32_t delay_max_us_;
};

}  // namespace

HostDaemon::HostDaemon(RankState& rank, EventCount& completions, const HostDaemonOptions& options)
    : rank_(rank), completions_(completions), options_(options) {
  for (std::uint32_t l = 0; l < rank.num_lanes; ++l) {
    auto lane = std::make_unique<Lane>();
    lane->index = l;
    if (options.delay_seed != 0) {
      lane->delay_state = mix64(options.delay_seed + (rank.lanes[l].transport.rank << 8) + l) | 1;
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

HostDaemon::~HostDaemon() {
  store_release<std::uint32_t>(rank_.stop, 1);
  ring_all();
  join();
}

void HostDaemon::join() {
  for (auto& lane : lanes_) {
    for (std::thread& t : lane->threads) t.join();
    pthread_barrier_destroy(&lane->barrier);
  }
}

void HostDaemon::lane_main(Lane& lane, unsigned thread) {
  if (thread == 0) {
    char name[16];
    std::snprintf(name, sizeof(name), "unjam r%u.%u", rank_.lanes[lane.index].transport.rank & 255,
                  lane.index & 255);
    pthread_setname_np(pthread_self(), name);
  }
  std::uint64_t no_delay = 0;
  HostDev dev(rank_, lane.index, thread, options_.block_threads, &lane.barrier, completions_,
              lane.asleep_value, thread == 0 ? lane.delay_state : no_delay, options_.delay_max_us);
  std::uint32_t& doorbell =
      rank_.lanes[lane.index]
          .transport.lane_cell(rank_.lanes[lane.index].transport.rank, lane.index)
          .doorbell;
  for (;;) {
    if (thread == 0) {
      lane.asleep_value = 0;
      lane.leave = load_acquire(rank_.stop) != 0;
      if (!lane.leave) lane.transitions.fetch_add(1, std::memory_order_seq_cst);
    }
    dev.sync();
    if (lane.leave) return;
    Engine<HostDev>::run(dev, rank_, lane.index, lane.shared);
    if (thread == 0) {
      lane.transitions.fetch_add(1, std::memory_order_seq_cst);
      lane.changed.notify();
      if (lane.asleep_value != 0) {
        while (load_acquire(doorbell) == lane.asleep_value && load_acquire(rank_.stop) == 0) {
          futex_wait(doorbell, lane.asleep_value, -1);
        }
        doorbell_awake(doorbell);
      }
    }
  }
}

void HostDaemon::ring(std::uint32_t lane) {
  const LaneTransport& t = rank_.lanes[lane].transport;
  std::uint32_t& word = t.lane_cell(t.rank, lane).doorbell;
  if (doorbell_ring(word, RingFor::kData)) futex_wake_all(word);
}

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
