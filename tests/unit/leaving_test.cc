// What kernels of the CUDA device ring for as they leave lanes (device/cuda/dev/leaving.h),
// under the schedule explorer: nothing that the host says may be lost, cancellations least of all,
// for which no peer pokes. The looks are the real ones; who does them is a model of engine.cu and
// cuda_dev.cuh: a daemon of two blocks, calls of one block, the launcher, and a host that submits
// and cancels. Nothing ever comes from a peer, so what is submitted ends by being cancelled.
#define UNJAM_EXPLORER        // scheduling points in base/atomics.h, here only
#define unjam unjam_explored  // apart from the library's copies of the same functions
#include "device/cuda/dev/leaving.h"

#include "device/cuda/dev/residency.h"
#undef unjam

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "tests/support/explored.h"

#if UNJAM_HAS_EXPLORER

namespace unjam_test {
namespace {

using namespace unjam_explored;  // NOLINT: the protocol under test

constexpr int kCalls = 3, kLanes = 2;
enum Fiber { kUser, kLauncher, kDaemon, kCall = kDaemon + kLanes, kFibers = kCall + kLanes };

// A program's operations.
enum class Do : std::uint8_t {
  kEnd,
  kSubmit,   // x, for lane x % kLanes
  kCancel,   // x
  kCall,     // launches a call that serves lane x for a while, unless somebody drives it
  kCallEnd,  // waits until it has ended
  kServe,    // launches a kernel that serves all lanes, for x rounds; 0: until all has ended
};
struct Operation {
  Do what = Do::kEnd;
  std::uint8_t x = 0;
};
using Program = std::vector<Operation>;

struct Link {
  HostLink residency;
  std::uint32_t attention;
  std::uint64_t sq_written;
};
// As CudaRank, with bits for queues.
struct Rank {
  Link* link;
  std::uint64_t lanes;  // low half: driven; high half: left with something
  std::uint64_t closed;
  std::uint64_t sq_read;
  std::uint32_t readied, attention;
  std::uint32_t mailboxes[kLanes];
  std::uint32_t cancelled[kCalls];
  std::uint8_t queues[kLanes], completed[kCalls], sq[kCalls];
};
struct World {
  Link link;
  Rank rank;
  std::uint64_t generation;
  const Operation* program;
  bool launcher_woken;
  std::uint32_t asked[kLanes];  // what a call has been told
  std::uint8_t submitted, ended;
  bool has_said_all;          // the user
  std::uint8_t stays_to_cut;  // how often a daemon may leave because its time is up
  std::uint8_t long_turns;    // how often a turn may take so long that it looks at what is posted
};
static_assert(std::is_trivially_copyable_v<World>);

World world;
const char* error = nullptr;

void wrong(const char* what) {
  if (error == nullptr) error = what;
}
Explorer& explorer() { return *Explorer::self(); }
bool chosen(std::uint8_t& left) {
  if (left == 0 || explorer().choose(2) == 0) return false;
  --left;
  return true;
}

// ---- the looks, and the same with mistakes ----

struct Right : LeavingSteps {
  static constexpr bool kClosesFirst = true, kPaysDebts = true, kLooksAtHost = true;
};
struct ForgetsCancellations : Right {  // as before accd4a6
  static bool host_has_said_more(Rank& r, const auto& s) {
    return s.sq_written != s.sq_read || load_seq_cst(r.link->residency.posted) != s.posted;
  }
};
struct LooksBeforeItCloses : Right {
  static constexpr bool kClosesFirst = false;
};
struct BelievesARest : Right {  // the host has said nothing since the lane was at rest
  static bool lane_may_move(Rank& r, const auto& s) {
    return s.rested == 0 || load_acquire_local(r.readied) != s.readied_seen;
  }
};
struct ForgetsDebts : Right {  // who has given a lane something, and has not been there
  static constexpr bool kPaysDebts = false;
};
struct LeavesTooSoon : Right {  // who comes back to the first lane leaves it before it has looked
  static constexpr bool kLooksAtHost = false;
};
struct SaysOldNews : Right {  // who asked first may say so last
  static void tell_lanes(Rank& r, std::uint32_t attention) {
    if (attention != 0) store_relaxed_local(r.attention, attention);
  }
};

// ---- fibers ----

// As DevShared.
struct Seen {
  std::uint32_t rested, attention, posted, readied_seen;
  std::uint64_t sq_written, sq_read;
};

template <class Steps>
struct Model {
  static Rank& rank() { return world.rank; }
  static Link& link() { return world.link; }
  static std::uint64_t bit(int lane) { return std::uint64_t{1} << lane; }
  static std::uint64_t left_bit(int lane) { return std::uint64_t{1} << (lane + 32); }

  static bool take_lease(int lane) {
    explorer_point(true);
    const bool was_free = (rank().lanes & bit(lane)) == 0;
    rank().lanes |= bit(lane);
    return was_free;
  }
  static std::uint64_t change_lanes(std::uint64_t clear, std::uint64_t set) {
    explorer_point(true);
    return std::exchange(rank().lanes, (rank().lanes & ~clear) | set);
  }
  static void ring() { store_release(link().residency.rung, 1u); }
  static void close_daemon() {
    store_seq_cst(link().residency.resident, 0u);
    store_release_local(rank().closed, world.generation);
  }
  static bool closed() { return load_acquire_local(rank().closed) == world.generation; }
  static std::uint32_t read_attention() {
    explorer_point(false);
    const std::uint32_t attention = load_relaxed(link().attention);
    Steps::tell_lanes(rank(), attention);
    return attention;
  }
  static void look_at_posted(Seen& s) {
    const std::uint32_t posted = load_seq_cst(link().residency.posted);
    if (posted == s.posted) return;
    s.posted = posted;
    s.sq_written = load_acquire(link().sq_written);
  }

  // CudaDev and Engine, all that matters here. Returns with s.rested set if nothing can move.
  // `owes`: of who serves a stream: whether there are DevShared::owed_lanes.
  static void run_engine(int lane, bool daemon, Seen& s, bool* owes) {
    Rank& r = rank();
    bool moved = false;
    int idle = 0;
    for (;;) {
      if (daemon) explorer().poll_begin();  // others do not stay here until something changes
      // epoch(), attend()
      if (lane == 0 && daemon) {
        look_at_posted(s);
        if (!moved) s.attention = read_attention();
      } else if (lane == 0) {
        // Every 16 passes, so it may be long ago; but where there is news, until it has seen it.
        if (load_relaxed_local(r.attention) != s.attention) s.attention = read_attention();
      } else {
        s.attention = load_relaxed_local(r.attention);
      }
      s.readied_seen = load_acquire_local(r.readied);
      moved = false;
      while (lane == 0 && s.sq_read != s.sq_written) {
        const std::uint8_t x = r.sq[s.sq_read];
        r.sq_read = ++s.sq_read;
        moved = true;
        const int to = x % kLanes;
        explorer_point(true);
        r.mailboxes[to] |= 1u << x;
        // settle()
        if (to == lane || (change_lanes(0, 0) & bit(to)) != 0) continue;
        if (owes != nullptr) {
          *owes = true;
        } else {
          ring();
        }
      }
      if (lane == 0 && daemon && chosen(world.long_turns)) {
        look_at_posted(s);  // may_go_on()
        moved = true;
      }
      if (load_acquire_local(r.mailboxes[lane]) != 0) {
        r.queues[lane] |= static_cast<std::uint8_t>(std::exchange(r.mailboxes[lane], 0u));
        moved = true;
      }
      for (std::uint8_t x = 0; x < kCalls && s.attention != 0; ++x) {
        if ((r.queues[lane] >> x & 1) == 0 || load_relaxed(r.cancelled[x]) == 0) continue;
        r.queues[lane] &= static_cast<std::uint8_t>(~(1u << x));
        if (r.completed[x]++ != 0) wrong("a call has ended twice");
        ++world.ended;
        moved = true;
      }
      // end_pass()
      if (lane == 0 && daemon && chosen(world.stays_to_cut)) return;
      idle = moved ? 0 : idle + 1;
      // EnginePolicy::idle_passes: the second one asks for attention.
      if (idle < 2 || load_acquire_local(r.mailboxes[lane]) != 0) continue;
      // try_quit()
      if (lane == 0 && daemon) {
        if (load_acquire(link().residency.queued) != 0) return;
        store_seq_cst(link().residency.resident, 0u);
        if (load_seq_cst(link().residency.posted) == s.posted && s.sq_written == s.sq_read) break;
        store_release(link().residency.resident, 1u);
        continue;
      }
      if (daemon && !closed()) {
        explorer().poll_again();
        continue;
      }
      if (load_relaxed_local(r.attention) == s.attention) break;
    }
    s.rested = 1;
  }

  // As in instance.cuh.
  static void drive(int lane, bool daemon, bool* owes = nullptr) {
    Rank& r = rank();
    Seen s{};
    s.attention = load_relaxed_local(r.attention);
    s.readied_seen = load_acquire_local(r.readied);
    change_lanes(left_bit(lane), 0);
    if (lane == 0) {
      s.sq_read = r.sq_read;
      // (With the mistake it stays long enough to look only if it is not called away.)
      const bool serves_all = owes != nullptr && (Steps::kLooksAtHost || !is_alone(1));
      const bool looks = daemon || serves_all;
      s.sq_written = looks ? load_acquire(link().sq_written) : s.sq_read;
      if (serves_all) s.attention = read_attention();
    }
    run_engine(lane, daemon, s, owes);
    const bool residents = lane == 0 && daemon, looks = residents && s.rested == 0;
    bool needs = false;
    if (!Steps::kClosesFirst && looks) needs = Steps::host_has_said_more(r, s);
    if (residents) close_daemon();
    const bool left = r.queues[lane] != 0;
    change_lanes(bit(lane), left ? left_bit(lane) : 0);
    if (left && Steps::lane_may_move(r, s)) needs = true;
    if (load_acquire_local(r.mailboxes[lane]) != 0) needs = true;
    if (Steps::kClosesFirst && looks && Steps::host_has_said_more(r, s)) needs = true;
    if (needs) ring();
  }
  static bool take_over(int lane) {
    for (;;) {
      explorer().poll_begin();
      if (take_lease(lane)) return true;
      if (lane != 0) {
        if (closed()) return take_lease(lane);
        explorer().poll_again();
        continue;
      }
      const std::uint32_t attention = read_attention();
      if (load_acquire(link().residency.queued) == 0 && !chosen(world.stays_to_cut)) {
        explorer().poll_again();
        continue;
      }
      close_daemon();
      bool needs = load_acquire(link().sq_written) != load_relaxed(rank().sq_read) ||
                   read_attention() != attention;
      if (take_lease(lane)) {
        const std::uint64_t lanes = change_lanes(bit(lane), 0);
        needs = needs || (lanes & left_bit(lane)) != 0;
      }
      if (needs) ring();
      return false;
    }
  }

  static void daemon(int lane) {
    if (lane == 0) {
      store_seq_cst(link().residency.resident, 1u);
      ResidencySteps::begin(link().residency);
    }
    if (take_over(lane)) drive(lane, true);
  }
  static void call(int lane) {
    if (!take_lease(lane)) return;
    Steps::tell_lanes(rank(), world.asked[lane]);
    drive(lane, false);
  }

  // serve(), of a call whose own invocation was handed on: the first lane, then the other one if it
  // has nobody. It may end behind either, as that invocation does.
  static void serve(int rounds) {
    bool owes = false;
    for (int i = 1;; ++i) {
      explorer().poll_begin();
      if (take_lease(0)) drive(0, false, &owes);
      if (i == rounds) break;
      if (is_alone(1) && take_lease(1)) drive(1, false);
      if (rounds != 0) continue;
      explorer_point(false);
      if (world.has_said_all && world.submitted == world.ended) return;
      explorer().poll_again();
    }
    if (!Steps::kPaysDebts || !owes) return;
    if ((change_lanes(0, 0) & bit(1)) == 0 && load_acquire_local(rank().mailboxes[1]) != 0) ring();
  }
  static bool is_alone(int lane) {
    const std::uint64_t lanes = load_relaxed_local(rank().lanes);
    return (lanes & bit(lane)) == 0 &&
           ((lanes & left_bit(lane)) != 0 || load_acquire_local(rank().mailboxes[lane]) != 0);
  }

  static bool launcher_has_cause(int) {
    const HostLink& h = world.link.residency;
    return world.submitted != world.ended && h.resident == 0 && h.queued == 0 &&
           (world.launcher_woken || h.rung != 0);
  }
  static bool daemon_is_gone(int) {
    for (int l = 0; l < kLanes; ++l) {
      if (explorer().running(kDaemon + l)) return false;
    }
    return true;
  }
  static void launcher(int) {
    for (;;) {
      explorer().block(launcher_has_cause, 0);
      world.launcher_woken = false;
      if (load_seq_cst(link().residency.resident) != 0) continue;
      if (!ResidencySteps::should_launch(link().residency)) continue;
      explorer().block(daemon_is_gone, 0);  // in its stream
      ++world.generation;
      for (int l = 0; l < kLanes; ++l) explorer().start(kDaemon + l, daemon, l);
    }
  }

  static void post() {
    if (ResidencySteps::post(link().residency)) world.launcher_woken = true;
  }
  static void user(int) {
    for (const Operation* op = world.program; op->what != Do::kEnd; ++op) {
      switch (op->what) {
        case Do::kSubmit:
          rank().sq[world.submitted++] = op->x;
          store_release(link().sq_written, link().sq_written + 1);
          post();
          break;
        case Do::kCancel:
          store_release(rank().cancelled[op->x], 1u);
          store_release(link().attention, link().attention + 2);
          post();
          break;
        case Do::kCall:
          // See look_in_time(): it asks before it waits for what is in front of it.
          world.asked[op->x] = load_relaxed(link().attention);
          explorer().start(kCall + op->x, call, op->x);
          break;
        case Do::kServe:
          explorer().start(kCall, serve, op->x);
          break;
        default:
          explorer().block([](int lane) { return !explorer().running(kCall + lane); }, op->x);
      }
    }
    explorer_point(true);
    world.has_said_all = true;
  }
};

// Nothing can run any more: then all that was cancelled has ended.
const char* check_end() {
  for (int f = 0; f < kFibers; ++f) {
    if (f != kLauncher && explorer().running(f)) return "somebody is stuck for ever";
  }
  for (int x = 0; x < kCalls; ++x) {
    if (world.rank.cancelled[x] != 0 && world.rank.completed[x] != 1) {
      return "a call that was cancelled never ends";
    }
  }
  return error;
}

struct Scenario {
  const char* name;
  Program program;
  int stays_to_cut = 1;
  int long_turns = 0;
  int bound = -1;  // delays; < 0: all schedules
  // Calls 0 to held - 1 were left in their lanes at rest, after some cancellation; then somebody
  // has rung.
  int held = 0;
  bool launches = true;  // else nothing can be launched: a thread in cudaFree has the driver
};

template <class Steps>
Explorer::Verdict explore(Scenario s, std::uint64_t most) {
  Explorer e(&world, sizeof(world), check_end, &error);
  std::memset(static_cast<void*>(&world), 0, sizeof(world));
  error = nullptr;
  s.program.push_back({});
  Rank& r = world.rank;
  r.link = &world.link;
  for (int x = 0; x < s.held; ++x) {
    r.sq[world.submitted++] = static_cast<std::uint8_t>(x);
    r.queues[x % kLanes] |= static_cast<std::uint8_t>(1u << x);
    r.lanes |= Model<Steps>::left_bit(x % kLanes);
    world.link.attention = r.attention = 2;
    world.link.residency.rung = 1;
  }
  world.link.sq_written = r.sq_read = world.submitted;
  world.program = s.program.data();
  world.stays_to_cut = static_cast<std::uint8_t>(s.stays_to_cut);
  world.long_turns = static_cast<std::uint8_t>(s.long_turns);
  static const char* const kNames[kFibers] = {"user",     "launcher", "daemon 0",
                                              "daemon 1", "call 0",   "call 1"};
  for (int f = 0; f < kFibers; ++f) e.name(f, kNames[f]);
  e.start(kUser, Model<Steps>::user, 0);
  if (s.launches) e.start(kLauncher, Model<Steps>::launcher, 0);
  const Explorer::Verdict v = e.explore(s.bound, most);
  std::printf("  %-50s %9llu states, %9llu transitions, %6llu ends%s\n", s.name,
              static_cast<unsigned long long>(v.states),
              static_cast<unsigned long long>(v.transitions),
              static_cast<unsigned long long>(v.schedules),
              !v.error.empty() ? (": " + v.error).c_str()
              : v.complete     ? ""
                               : ", cut");
  return v;
}

// ---- scenarios ----

constexpr Operation submit(int x) { return {Do::kSubmit, static_cast<std::uint8_t>(x)}; }
constexpr Operation cancel(int x) { return {Do::kCancel, static_cast<std::uint8_t>(x)}; }
constexpr Operation call(int x) { return {Do::kCall, static_cast<std::uint8_t>(x)}; }
constexpr Operation serve(int rounds) { return {Do::kServe, static_cast<std::uint8_t>(rounds)}; }
constexpr Operation call_end(int x) { return {Do::kCallEnd, static_cast<std::uint8_t>(x)}; }

const Scenario kCutStay = {"a stay is cut", {submit(1), cancel(1)}, 1, 0, 4};
const Scenario kLongTurn = {"a stay is cut behind a long turn", {submit(1), cancel(1)}, 1, 1, 4};
const Scenario kBothLanes = {
    "both lanes hold something", {submit(2), cancel(1), cancel(0), cancel(2)}, 1, 0, 3, 2};
const Scenario kCallInFront = {
    "a daemon waits for a call's lane", {call(0), cancel(0)}, 1, 0, 4, 2};
const Scenario kOtherLane = {
    "the same, and the other lane has it", {call(0), cancel(1)}, 1, 0, 4, 2};
const Scenario kCallBeside = {
    "a call drives the other lane", {call(1), submit(2), cancel(1)}, 1, 0, 3, 2};
const Scenario kTwoCalls = {
    "two calls", {call(0), call(1), submit(2), cancel(1), call_end(1), cancel(0)}, 1, 0, 3, 2};
const Scenario kServed = {
    "a stream's kernel gives a lane something", {serve(1), submit(1), cancel(1)}, 1, 0, 4};
const Scenario kServedTwice = {
    "the same, and it goes there", {serve(2), submit(1), cancel(1), submit(0)}, 1, 0, 3};
const Scenario kServedAlone = {
    .name = "the same, and nobody else comes",
    .program = {serve(0), submit(1), cancel(1), submit(0), cancel(0)},
    .stays_to_cut = 0,
    .bound = 3,
    .launches = false,
};

std::vector<Scenario> searches() {
  return {kCutStay,    kLongTurn, kBothLanes, kCallInFront, kOtherLane,
          kCallBeside, kTwoCalls, kServed,    kServedTwice, kServedAlone};
}

TEST(Leaving, NothingThatTheHostSaysIsLost) {
  for (const Scenario& s : searches()) {
    const Explorer::Verdict v = explore<Right>(s, 3000000);
    EXPECT_EQ(v.error, "") << s.name << "\n" << v.schedule;
    EXPECT_TRUE(v.complete) << s.name;
    EXPECT_GT(v.schedules, 0u);
  }
}

TEST(LeavingSoak, Deeper) {
  for (Scenario s : searches()) {
    for (const int bound : {4, 5, 6, 8}) {
      s.bound = bound;
      const Explorer::Verdict v = explore<Right>(s, 6000000);
      EXPECT_EQ(v.error, "") << s.name << "\n" << v.schedule;
      if (!v.complete || !v.error.empty()) break;
    }
  }
}

template <class Steps>
void must_be_found(const char* mistake, Scenario s,
                   const char* what = "a call that was cancelled never ends") {
  Explorer::Verdict v;
  s.name = mistake;
  for (s.bound = 0; s.bound <= 4 && v.error.empty(); ++s.bound) v = explore<Steps>(s, 1000000);
  EXPECT_EQ(v.error, what) << mistake << "\n" << v.schedule;
}

TEST(Leaving, ExplorerFindsPlantedMistakes) {
  must_be_found<ForgetsCancellations>("forgets cancellations", kLongTurn);
  must_be_found<LooksBeforeItCloses>("looks before it closes", kCutStay);
  must_be_found<BelievesARest>("believes a rest", kCallInFront);
  must_be_found<SaysOldNews>("says old news", kOtherLane);
  must_be_found<ForgetsDebts>("forgets what it owes", kServed);
  must_be_found<LeavesTooSoon>("leaves the first lane before it has looked", kServedAlone,
                               "somebody is stuck for ever");
}

}  // namespace
}  // namespace unjam_test
#else
TEST(Leaving, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
