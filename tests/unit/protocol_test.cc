// The protocol of engine instances (device/cuda/dev/residency.h with leases, doorbells, SQ and CQ,
// and the model of the lanes' part in tests/support/residency_model.h) under a deterministic
// schedule explorer, against a fake device: streams that share hardware queues, few SMs, a driver
// lock. The explorer switches at every atomic operation. Planted mistakes show that it would find
// some.
#define UNJAM_EXPLORER        // scheduling points in base/atomics.h, here only
#define unjam unjam_explored  // apart from the library's copies of the same functions
#include "device/cuda/dev/residency.h"
#include "engine/cq.h"
#include "engine/lease.h"
#include "engine/queues.h"
#include "tests/support/residency_model.h"
#undef unjam

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>
#include <vector>

#include "tests/support/explored.h"

#if UNJAM_HAS_EXPLORER

namespace unjam_test {
namespace {

using namespace unjam_explored;  // NOLINT: the protocol under test

constexpr int kCalls = 3;  // invocations, each with a key of its own
constexpr int kRanks = 2, kLanes = 2, kQueues = 2, kStreams = 4;
// Fibers of a rank, and kernels: daemons, then what users launch.
constexpr int kUserA = 0, kUserB = 1, kLauncher = 2, kKernels = 3;
constexpr int kDaemons = 2, kMaxKernels = 7, kFibers = 10;
constexpr int kDaemonStream = 0;

// A program's operations. Kernels are launched on `stream`.
enum class Do : std::uint8_t {
  kEnd,
  kSubmit,    // call x: its SQE
  kHostMark,  // call x is ready: its stream was idle
  kMark,      // kernel: call x is ready
  kWait,      // wait kernel for call x
  kWork,      // the user's kernel
  kSynchronize,
  kFree,      // takes the driver lock, and waits for every kernel
  kHostWait,  // for the CQE of call x
  kRaise,     // flag x, for other users
  kAwait,     // flag x
};
struct Operation {
  Do what = Do::kEnd;
  std::uint8_t x = 0;
  std::uint8_t stream = 1;
};
using Program = std::vector<Operation>;

enum class State : std::uint8_t { kNone, kQueued, kRuns };
struct Kernel {
  State state = State::kNone;
  Operation op;
};

struct Fifo {
  std::uint8_t items[kMaxKernels] = {};
  std::uint8_t size = 0;
  void push(int k) { items[size++] = static_cast<std::uint8_t>(k); }
  bool first(int k) const { return size != 0 && items[0] == k; }
  void pop() {
    for (int i = 1; i < size; ++i) items[i - 1] = items[i];
    items[--size] = 0;
  }
};

struct Rank {
  // The protocol's.
  HostLink link;
  std::uint32_t words[kLanes];
  SpscRing<std::uint8_t> sq;
  SpscRing<std::uint8_t> mailbox[kLanes];
  RingCq cq;
  MarkCell marks[kCalls];
  std::uint8_t sq_places[kCalls];
  std::uint8_t mailbox_places[kLanes][kCalls];
  std::uint64_t cq_words[kCalls];
  // The calls. `arrived`: the peer's data.
  std::uint32_t arrived[kCalls], done[kCalls], result[kCalls];
  std::uint8_t pending[kLanes], sent[kLanes];  // bits
  std::uint8_t drivers[kLanes], popped[kCalls], completed[kCalls];
  // Host and device.
  bool launcher_woken, driver_locked;
  std::uint8_t free_sms, stays_to_cut;
  std::uint8_t synchronizes[2];  // what the user waits for: bits of kernels
  Kernel kernels[kMaxKernels];
  Fifo queues[kQueues], streams[kStreams];
};

struct World {
  Rank ranks[kRanks];
  std::uint8_t flags;
  std::uint8_t num_ranks, lanes, num_queues;
  const Operation* programs[kRanks][2];
};
static_assert(std::is_trivially_copyable_v<World>);

World world;
const char* error = nullptr;

void wrong(const char* what) {
  if (error == nullptr) error = what;
}
Explorer& explorer() { return *Explorer::self(); }
int fiber(int rank, int which) { return rank * kFibers + which; }
Rank& rank_of(int f) { return world.ranks[f / kFibers]; }

// ---- the fake device ----

// A queue passes its first kernel on when the kernel's stream has got so far and an SM is free.
bool may_start(int f) {
  const Rank& r = rank_of(f);
  const int k = f % kFibers - kKernels;
  const int stream = r.kernels[k].op.stream;
  return r.free_sms > 0 && r.streams[stream].first(k) &&
         r.queues[stream % world.num_queues].first(k);
}
bool driver_is_free(int f) { return !rank_of(f).driver_locked; }
bool daemon_slot_is_free(int f) {
  const Rank& r = rank_of(f);
  return std::any_of(r.kernels, r.kernels + kDaemons,
                     [](const Kernel& k) { return k.state == State::kNone; });
}
bool synchronized(int f) { return rank_of(f).synchronizes[f % kFibers] == 0; }
bool launcher_has_cause(int f) {
  const Rank& r = rank_of(f);
  return r.launcher_woken || r.link.rung != 0;
}

// ---- the host takes completions ----

bool reap(Rank& r) {
  Cqe e;
  bool any = false;
  while (r.cq.pop(e)) {
    any = true;
    if (e.slot >= kCalls || r.completed[e.slot]++ != 0) {
      wrong("a CQE came twice");
    } else if (r.result[e.slot] == 0) {
      wrong("a CQE came before the result");
    }
  }
  return any;
}

// ---- the steps, and the same with mistakes ----

struct Right : ModelSteps {
  static constexpr bool kMarkFirst = true, kResultFirst = true, kWaitersPoll = true;
};
struct LooksBeforeItClears : Right {
  static bool rest(HostLink& link, std::uint32_t& word, bool first, Look look,
                   std::uint32_t interest) {
    if (first && load_seq_cst(link.posted) != look.posted) return false;
    if (first) store_seq_cst(link.resident, 0u);
    if (lease_rest(word, look.word, interest)) return true;
    if (first) store_release(link.resident, 1u);
    return false;
  }
};
struct RingsBeforeItMarks : Right {
  static constexpr bool kMarkFirst = false;
};
struct FreesAfterTheLastLook : Right {  // no exchange: whatever was rung since the look is lost
  static bool rest(HostLink& link, std::uint32_t& word, bool first, Look look,
                   std::uint32_t interest) {
    if (first) {
      store_seq_cst(link.resident, 0u);
      if (load_seq_cst(link.posted) != look.posted) {
        store_release(link.resident, 1u);
        return false;
      }
    }
    fetch_add<std::uint32_t>(word, kAsleep | interest);
    return true;
  }
};
struct TakesOnce : Right {  // gives up where a ring that wakes nobody came in between
  static bool take(HostLink& link, std::uint32_t& word, bool first) {
    const std::uint32_t w = load_acquire(word);
    const std::uint32_t taken = w & ~static_cast<std::uint32_t>(kSleepMask);
    if (!lease_free(w) || !compare_exchange(word, w, taken)) return false;
    if (first) store_release(link.resident, 1u);
    return true;
  }
};
struct ForgetsToHandOver : Right {
  static void hand_over(HostLink&, std::uint32_t&, bool) {}
};
struct HandsOverInSilence : Right {  // "the registered waiters will see"
  static void hand_over(HostLink& link, std::uint32_t& word, bool first) {
    if (first) store_seq_cst(link.resident, 0u);
    lease_hand_over(word);
  }
};
struct CqeBeforeResult : Right {
  static constexpr bool kResultFirst = false;
};
struct TakesWithoutExchange : Right {
  static bool take(HostLink& link, std::uint32_t& word, bool first) {
    const std::uint32_t w = load_acquire(word);
    if (!lease_free(w)) return false;
    store_release<std::uint32_t>(word, w & ~static_cast<std::uint32_t>(kSleepMask));
    if (first) store_release(link.resident, 1u);
    return true;
  }
};
struct ClearsRungAfterLaunch : Right {
  static bool should_launch(HostLink& link) {
    const bool launches = load_seq_cst(link.queued) == 0;
    if (launches) store_seq_cst(link.queued, 1u);
    return launches;  // the model's launcher clears `rung` then
  }
  static constexpr bool kClearsLate = true;
};
struct WaitersSleep : Right {  // a waiter without leases looks only at its own call
  static constexpr bool kWaitersPoll = false;
};
struct StaysWhilePending : Right {  // the first implementation's: hole 1
  static bool rest(HostLink& link, std::uint32_t& word, bool first, Look look,
                   std::uint32_t interest) {
    if (interest == 0) return Right::rest(link, word, first, look, interest);
    explorer().poll_again();
    return false;
  }
};

template <class S>
concept ClearsLate = requires { S::kClearsLate; };

// ---- fibers ----

template <class Steps>
struct Model {
  struct Env {
    int f;
    Rank& r;
    bool daemon;

    explicit Env(int fiber, bool is_daemon) : f(fiber), r(rank_of(fiber)), daemon(is_daemon) {}
    std::uint32_t lanes() const { return world.lanes; }
    std::uint32_t& word(std::uint32_t l) { return r.words[l]; }
    HostLink& link() { return r.link; }
    bool done(int x) { return load_acquire(r.done[x]) != 0; }
    bool time_is_up() {
      if (r.stays_to_cut == 0 || explorer().choose(2) == 0) return false;
      --r.stays_to_cut;
      return true;
    }
    void poll_begin() { explorer().poll_begin(); }
    void poll_again() { explorer().poll_again(); }

    bool pass(std::uint32_t l, std::uint32_t& interest) {
      if (daemon) poll_begin();  // for StaysWhilePending
      if (r.drivers[l]++ != 0) wrong("two engines drive one lane");
      const bool moved = run(l);
      --r.drivers[l];
      interest = r.pending[l] != 0 ? kAsleepForData : 0u;
      return moved;
    }

   private:
    bool run(std::uint32_t l) {
      bool moved = false;
      std::uint8_t x = 0;
      while (l == 0 && r.sq.pop(x)) {
        if (r.popped[x]++ != 0) wrong("an SQE was popped twice");
        const std::uint32_t to = x % world.lanes;
        moved = true;
        if (to == 0) {
          r.pending[0] |= static_cast<std::uint8_t>(1u << x);
          continue;
        }
        r.mailbox[to].push(x);
        Steps::ring(r.link, r.words[to], RingFor::kWork);
      }
      while (l != 0 && r.mailbox[l].pop(x)) {
        r.pending[l] |= static_cast<std::uint8_t>(1u << x);
        moved = true;
      }
      Rank& peer = world.ranks[world.num_ranks - 1 - f / kFibers];
      for (x = 0; x < kCalls; ++x) {
        const auto bit = static_cast<std::uint8_t>(1u << x);
        if ((r.pending[l] & bit) == 0) continue;
        if ((r.sent[l] & bit) == 0) {
          if (!mark_is_set(r.marks[x], x + 1u)) continue;
          r.sent[l] |= bit;
          moved = true;
          store_release(peer.arrived[x], 1u);
          if (&peer != &r) Steps::ring(peer.link, peer.words[l], RingFor::kData);
        }
        if (load_acquire(r.arrived[x]) == 0) continue;
        r.pending[l] &= static_cast<std::uint8_t>(~bit);
        moved = true;
        if (!Steps::kResultFirst) r.cq.push({x, Outcome::kDone});
        store_relaxed(r.result[x], 1u);
        if (Steps::kResultFirst) r.cq.push({x, Outcome::kDone});
        store_release(r.done[x], 1u);
      }
      return moved;
    }
  };

  static void kernel(int f) {
    Rank& r = rank_of(f);
    const int k = f % kFibers - kKernels;
    explorer().block(may_start, f);
    const Operation op = r.kernels[k].op;
    r.kernels[k].state = State::kRuns;
    r.queues[op.stream % world.num_queues].pop();
    --r.free_sms;
    switch (op.what) {
      case Do::kMark:
        if (Steps::kMarkFirst) mark_set(r.marks[op.x], op.x + 1u);
        Steps::ring(r.link, r.words[0], RingFor::kWork);
        if (!Steps::kMarkFirst) mark_set(r.marks[op.x], op.x + 1u);
        break;
      case Do::kWait: {
        Env env(f, false);
        if (Steps::kWaitersPoll) {
          Instance<Env, Steps>::run_waiter(env, op.x);
        } else {
          sleepy_waiter(env, op.x);
        }
        if (r.result[op.x] == 0) wrong("a wait kernel ended before the result was there");
        break;
      }
      case Do::kWork:
        break;
      default: {
        Env env(f, true);
        Instance<Env, Steps>::run_daemon(env);
      }
    }
    ++r.free_sms;
    r.streams[op.stream].pop();
    r.kernels[k] = Kernel{};
    for (std::uint8_t& waits : r.synchronizes) waits &= static_cast<std::uint8_t>(~(1u << k));
  }

  // If no lane is free when it comes, it only polls for its call.
  static void sleepy_waiter(Env& env, int x) {
    bool some_free = false;
    for (std::uint32_t l = 0; l < env.lanes(); ++l) {
      some_free = some_free || lease_free(load_acquire(env.word(l)));
    }
    if (some_free) return Instance<Env, Steps>::run_waiter(env, x);
    for (;;) {
      env.poll_begin();
      if (env.done(x)) break;
      env.poll_again();
    }
  }

  static void launch(int f, int k, Operation op) {
    Rank& r = rank_of(f);
    explorer().block(driver_is_free, f);
    r.kernels[k] = {State::kQueued, op};
    r.streams[op.stream].push(k);
    r.queues[op.stream % world.num_queues].push(k);
    explorer().start(fiber(f / kFibers, kKernels + k), kernel, fiber(f / kFibers, kKernels + k));
  }

  static void launcher(int f) {
    Rank& r = rank_of(f);
    for (;;) {
      explorer().block(launcher_has_cause, f);
      r.launcher_woken = false;
      if (!Steps::should_launch(r.link)) {
        if (ClearsLate<Steps>) store_seq_cst(r.link.rung, 0u);
        continue;
      }
      explorer().block(daemon_slot_is_free, f);
      const int k = r.kernels[0].state == State::kNone ? 0 : 1;
      launch(f, k, {Do::kEnd, 0, kDaemonStream});
      if (ClearsLate<Steps>) store_seq_cst(r.link.rung, 0u);
    }
  }

  static void wait_for_kernels(int f) {
    Rank& r = rank_of(f);
    std::uint8_t& mine = r.synchronizes[f % kFibers];
    mine = 0;
    for (int k = 0; k < kMaxKernels; ++k) {
      if (r.kernels[k].state != State::kNone) mine |= static_cast<std::uint8_t>(1u << k);
    }
    explorer().block(synchronized, f);
  }

  static void user(int f) {
    Rank& r = rank_of(f);
    // Kernels of the first user from the bottom, of the second from the top.
    int next = f % kFibers == kUserA ? kDaemons : kMaxKernels - 1;
    for (const Operation* op = world.programs[f / kFibers][f % kFibers]; op->what != Do::kEnd;
         ++op) {
      const std::uint8_t x = op->x;
      switch (op->what) {
        case Do::kSubmit:
          r.sq.push(x);
          if (Steps::post(r.link)) r.launcher_woken = true;
          break;
        case Do::kHostMark:
          if (Steps::kMarkFirst) mark_set(r.marks[x], x + 1u);
          if (Steps::post(r.link)) r.launcher_woken = true;
          if (!Steps::kMarkFirst) mark_set(r.marks[x], x + 1u);
          break;
        case Do::kMark:
        case Do::kWait:
        case Do::kWork:
          launch(f, next, *op);
          next += f % kFibers == kUserA ? 1 : -1;
          break;
        case Do::kSynchronize:
          wait_for_kernels(f);
          break;
        case Do::kFree:
          explorer().block(driver_is_free, f);
          r.driver_locked = true;
          wait_for_kernels(f);
          r.driver_locked = false;
          break;
        case Do::kHostWait:
          while (r.completed[x] == 0) {
            explorer().poll_begin();
            if (!reap(r)) explorer().poll_again();
          }
          break;
        case Do::kRaise:
          world.flags |= static_cast<std::uint8_t>(1u << x);
          break;
        default:
          explorer().block([](int flag) { return (world.flags >> flag & 1) != 0; }, x);
      }
    }
  }
};

// Nothing can run any more: then everything must be complete.
const char* check_end() {
  for (int rank = 0; rank < world.num_ranks; ++rank) {
    Rank& r = world.ranks[rank];
    for (const int u : {kUserA, kUserB}) {
      if (explorer().running(fiber(rank, u))) return "a user's thread is stuck for ever";
    }
    reap(r);
    for (int x = 0; x < kCalls; ++x) {
      bool called = false;
      for (const Operation* p : world.programs[rank]) {
        for (; p->what != Do::kEnd; ++p) called |= p->what == Do::kSubmit && p->x == x;
      }
      if (called && r.completed[x] != 1 && getenv("DBG"))
        for (int q = 0; q < 2; ++q) {
          Rank& z = world.ranks[q];
          printf(
              "rank %d word %x res %u posted %u rung %u queued %u woken %d lock %d pend %x sent %x "
              "sq %lu/%lu arr %u %u done %u %u marks %lu %lu comp %d %d\n",
              q, z.words[0], z.link.resident, z.link.posted, z.link.rung, z.link.queued,
              z.launcher_woken, z.driver_locked, z.pending[0], z.sent[0], z.sq.read, z.sq.written,
              z.arrived[0], z.arrived[1], z.done[0], z.done[1], z.marks[0].ready, z.marks[1].ready,
              z.completed[0], z.completed[1]);
        }
      if (called && r.completed[x] != 1) return "a call that is ready is never complete";
    }
    for (const Kernel& k : r.kernels) {
      if (k.state != State::kNone) return "a kernel never ends";
    }
  }
  return error;
}

struct Scenario {
  const char* name;
  int ranks = 1, lanes = 1, queues = 2, sms = 4;
  int stays_to_cut = 1;  // how often a rank's daemon may leave because its time is up
  Program programs[kRanks][2];
};

template <class Steps>
struct Run {
  explicit Run(Scenario s) : scenario(std::move(s)), e(&world, sizeof(world), check_end, &error) {
    static const char* const kNames[kRanks][kFibers] = {
        {"0:user", "0:user b", "0:launcher", "0:daemon", "0:daemon b", "0:k0", "0:k1", "0:k2",
         "0:k3", "0:k4"},
        {"1:user", "1:user b", "1:launcher", "1:daemon", "1:daemon b", "1:k0", "1:k1", "1:k2",
         "1:k3", "1:k4"}};
    static_assert(kKernels + kMaxKernels == kFibers && kRanks * kFibers == Explorer::kMaxFibers);
    std::memset(static_cast<void*>(&world), 0, sizeof(world));
    error = nullptr;
    world.num_ranks = static_cast<std::uint8_t>(scenario.ranks);
    world.lanes = static_cast<std::uint8_t>(scenario.lanes);
    world.num_queues = static_cast<std::uint8_t>(scenario.queues);
    for (int i = 0; i < scenario.ranks; ++i) {
      Rank& r = world.ranks[i];
      for (std::uint32_t& w : r.words) w = kAsleep;
      const auto attach = [](SpscRing<std::uint8_t>& ring, std::uint8_t* places) {
        ring.places = places;
        ring.capacity = kCalls;
      };
      attach(r.sq, r.sq_places);
      for (int l = 0; l < kLanes; ++l) attach(r.mailbox[l], r.mailbox_places[l]);
      r.cq.words = r.cq_words;
      r.cq.capacity = kCalls;
      r.free_sms = static_cast<std::uint8_t>(scenario.sms);
      r.stays_to_cut = static_cast<std::uint8_t>(scenario.stays_to_cut);
      for (int u = 0; u < 2; ++u) {
        scenario.programs[i][u].push_back({});
        world.programs[i][u] = scenario.programs[i][u].data();
        if (scenario.programs[i][u].size() == 1) continue;
        e.start(fiber(i, u), Model<Steps>::user, fiber(i, u));
      }
      e.start(fiber(i, kLauncher), Model<Steps>::launcher, fiber(i, kLauncher));
    }
    for (int i = 0; i < kRanks; ++i) {
      for (int f = 0; f < kFibers; ++f) e.name(fiber(i, f), kNames[i][f]);
    }
  }
  Scenario scenario;
  Explorer e;
};

// ---- scenarios ----

constexpr Operation submit(int x) { return {Do::kSubmit, static_cast<std::uint8_t>(x), 0}; }
constexpr Operation host_mark(int x) { return {Do::kHostMark, static_cast<std::uint8_t>(x), 0}; }
constexpr Operation on_stream(Do what, int x, int stream) {
  return {what, static_cast<std::uint8_t>(x), static_cast<std::uint8_t>(stream)};
}
constexpr Operation mark(int x, int s) { return on_stream(Do::kMark, x, s); }
constexpr Operation wait(int x, int s) { return on_stream(Do::kWait, x, s); }
constexpr Operation work(int s) { return on_stream(Do::kWork, 0, s); }
constexpr Operation host_wait(int x) { return {Do::kHostWait, static_cast<std::uint8_t>(x), 0}; }
constexpr Operation kSync = {Do::kSynchronize, 0, 0};
constexpr Operation kCudaFree = {Do::kFree, 0, 0};
constexpr Operation raise(int x) { return {Do::kRaise, static_cast<std::uint8_t>(x), 0}; }
constexpr Operation await(int x) { return {Do::kAwait, static_cast<std::uint8_t>(x), 0}; }

// One rank: its own data are all it needs.
const Scenario kAsynchronous = {"asynchronous calls",
                                1,
                                1,
                                2,
                                4,
                                1,
                                {{{submit(0), host_mark(0), submit(1), mark(1, 1)}, {}}, {}}};
const Scenario kHostWaits = {
    "the host waits",
    1,
    1,
    2,
    4,
    1,
    {{{submit(0), host_mark(0), host_wait(0), submit(1), host_mark(1), host_wait(1)}, {}}, {}}};
const Scenario kOneWait = {"one wait kernel, one pending beside it",
                           1,
                           1,
                           2,
                           4,
                           1,
                           {{{submit(0), mark(0, 1), wait(0, 1), submit(1), mark(1, 2)}, {}}, {}}};
const Scenario kTwoWaits = {
    "two wait kernels",
    1,
    1,
    2,
    4,
    1,
    {{{submit(0), submit(1), mark(0, 1), wait(0, 1)}, {mark(1, 2), wait(1, 2)}}, {}}};
const Scenario kTwoLanes = {
    "two lanes, one wait kernel",
    1,
    2,
    2,
    4,
    1,
    {{{submit(0), host_mark(0), submit(1), mark(1, 1), wait(1, 1)}, {}}, {}}};
// Two ranks, opposite orders.
Scenario opposite(const char* name, int queues, int sms) {
  return {name,
          2,
          1,
          queues,
          sms,
          0,
          {{{submit(0), mark(0, 1), wait(0, 1), submit(1), mark(1, 3), wait(1, 3)}, {}},
           {{submit(1), mark(1, 1), wait(1, 1), submit(0), mark(0, 3), wait(0, 3)}, {}}}};
}
// Pending collectives that nobody waits for hold no synchronisation.
Scenario pending_beside(const char* name, Operation synchronize) {
  return {name,
          2,
          1,
          2,
          4,
          1,
          {{{submit(0), host_mark(0), synchronize, raise(0), submit(1), host_mark(1)}, {}},
           {{await(0), submit(1), host_mark(1), synchronize, submit(0), host_mark(0)}, {}}}};
}
// A stream waits, and another thread is in cudaFree: nothing can be launched.
const Scenario kFreeBesideWait = {
    "cudaFree while streams wait, opposite orders",
    2,
    1,
    2,
    4,
    0,
    {{{submit(0), submit(1), host_mark(1), mark(0, 1), wait(0, 1)}, {kCudaFree}},
     {{submit(1), submit(0), host_mark(0), mark(1, 1), wait(1, 1), kCudaFree}, {}}}};

const Scenario kFreeBesideLateData = {
    "cudaFree while a stream waits for a late peer",
    2,
    1,
    2,
    4,
    0,
    {{{submit(0), host_mark(0), wait(0, 1), raise(0), kCudaFree}, {}},
     {{await(0), submit(0), host_mark(0)}, {}}}};
// Work stands behind the wait kernels. With one hardware queue that is the limit of the contract
// (design: "nothing hidden"): the marks stand behind it, too.
Scenario work_behind(int queues) {
  return {"work queued behind the waits",
          2,
          1,
          queues,
          4,
          0,
          {{{submit(0), submit(1), mark(0, 1), wait(0, 1), work(1), mark(1, 2), wait(1, 2)}, {}},
           {{submit(1), submit(0), mark(1, 1), wait(1, 1), work(1), mark(0, 2), wait(0, 2)}, {}}}};
}

template <class Steps>
Explorer::Verdict explore(const Scenario& s, int bound, std::uint64_t most) {
  Run<Steps> run(s);
  const Explorer::Verdict v = run.e.explore(bound, most);
  std::printf(
      "  %-48s %s: %9llu states, %9llu transitions, %6llu ends%s\n", s.name,
      bound < 0 ? "all schedules   " : ("at most " + std::to_string(bound) + " delays").c_str(),
      static_cast<unsigned long long>(v.states), static_cast<unsigned long long>(v.transitions),
      static_cast<unsigned long long>(v.schedules),
      !v.error.empty() ? (": " + v.error).c_str()
      : v.complete     ? ""
                       : ", cut");
  return v;
}

struct Search {
  Scenario scenario;
  int bound;  // delays; < 0: all schedules
};
// What fits into some seconds.
std::vector<Search> searches() {
  return {{kAsynchronous, -1},
          {kHostWaits, -1},
          {kOneWait, 3},
          {kTwoWaits, 3},
          {kTwoLanes, 3},
          {opposite("opposite orders", 2, 4), 1},
          {opposite("opposite orders, one hardware queue", 1, 4), 1},
          {opposite("opposite orders, two SMs", 2, 2), 1},
          {pending_beside("cudaDeviceSynchronize beside pending", kSync), 2},
          {pending_beside("cudaFree beside pending", kCudaFree), 2},
          {kFreeBesideWait, 2},
          {kFreeBesideLateData, 3},
          {work_behind(2), 1}};
}

TEST(Protocol, NothingIsLostInAnySchedule) {
  for (const Search& s : searches()) {
    const Explorer::Verdict v = explore<Right>(s.scenario, s.bound, 1000000);
    EXPECT_EQ(v.error, "") << s.scenario.name << "\n" << v.schedule;
    EXPECT_TRUE(v.complete);
    EXPECT_GT(v.schedules, 0u);
  }
}

std::uint64_t seed() {
  const char* text = std::getenv("UNJAM_TEST_SEED");
  return text == nullptr ? 20240229 : std::strtoull(text, nullptr, 0);
}

template <class Steps>
Explorer::Verdict walk(const Scenario& s, std::uint64_t first, std::uint64_t walks) {
  Run<Steps> run(s);
  return run.e.walk(first, walks);
}

void walk_all(std::uint64_t walks) {
  std::uint64_t schedules = 0, transitions = 0;
  for (const Search& s : searches()) {
    const Explorer::Verdict v = walk<Right>(s.scenario, seed(), walks);
    EXPECT_EQ(v.error, "") << s.scenario.name << ": " << v.schedule;
    schedules += v.schedules;
    transitions += v.transitions;
  }
  std::printf("  seed %llu: %llu random schedules, %llu steps\n",
              static_cast<unsigned long long>(seed()), static_cast<unsigned long long>(schedules),
              static_cast<unsigned long long>(transitions));
}

TEST(Protocol, RandomSchedules) { walk_all(500); }

TEST(ProtocolSoak, DeeperAndLonger) {
  for (const Search& s : searches()) {
    for (const int bound : {2, 3, 4, 6, 8}) {
      if (s.bound < 0) break;  // all of its schedules are in the short test
      const Explorer::Verdict v = explore<Right>(s.scenario, bound, 4000000);
      EXPECT_EQ(v.error, "") << s.scenario.name << "\n" << v.schedule;
      if (!v.complete || !v.error.empty()) break;
    }
  }
  walk_all(50000);
}

// What the contract excludes must show as what it is: streams wait with work queued behind them,
// and there is one hardware queue.
TEST(Protocol, TheNamedLimitIsOne) {
  EXPECT_NE(explore<Right>(work_behind(1), 1, 1000000).error, "");
}

template <class Steps>
void must_be_found(const char* mistake, Scenario s, const char* expected) {
  Explorer::Verdict v;
  s.name = mistake;
  for (int bound = 0; bound <= 4 && v.error.empty(); ++bound) v = explore<Steps>(s, bound, 300000);
  EXPECT_EQ(v.error, expected) << mistake << "\n" << v.schedule;
}

TEST(Protocol, ExplorerFindsPlantedMistakes) {
  const char* const kLost = "a call that is ready is never complete";
  const char* const kStuck = "a user's thread is stuck for ever";
  const Scenario pending = pending_beside("", kSync);
  must_be_found<LooksBeforeItClears>("looks before it clears resident", kHostWaits, kStuck);
  must_be_found<RingsBeforeItMarks>("rings before it marks", kAsynchronous, kLost);
  must_be_found<FreesAfterTheLastLook>("frees the lane after the last look", pending, kLost);
  must_be_found<TakesOnce>("gives up when a ring came in between", pending, kLost);
  must_be_found<ForgetsToHandOver>("forgets to hand over", kTwoWaits, kLost);
  must_be_found<HandsOverInSilence>("relies on waiters to take over", kOneWait, kLost);
  must_be_found<CqeBeforeResult>("CQE before the result", kHostWaits,
                                 "a CQE came before the result");
  must_be_found<TakesWithoutExchange>("takes without an exchange", kTwoWaits,
                                      "two engines drive one lane");
  must_be_found<ClearsRungAfterLaunch>("clears rung after the launch", kAsynchronous, kLost);
  must_be_found<WaitersSleep>("waiters without leases sleep", kFreeBesideLateData, kStuck);
  must_be_found<StaysWhilePending>("stays while something is pending", pending, kStuck);
}

}  // namespace
}  // namespace unjam_test
#else
TEST(Protocol, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
