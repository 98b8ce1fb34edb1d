// How the blocks of a call without the engine agree on its end
// (device/cuda/kernels/stream_call_reports.h), under the schedule explorer: whatever each lane
// comes to, the call ends once, or is brought to the engine once, behind all that its lanes have
// stored, and leaves both words zero for the slot's next call. The steps are the real ones; a block
// is a fiber of one thread.
#include "device/cuda/kernels/stream_call_reports.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>

#include "tests/support/explorer.h"

#if UNJAM_HAS_EXPLORER

namespace unjam_test {
namespace {

using namespace unjam::in_stream;  // NOLINT: the protocol under test

constexpr std::uint32_t kMost = 3;  // lanes
constexpr int kCalls = 2;           // one behind the other, in one slot

struct Told {
  std::uint8_t stored[kMost], head_start[kMost], let_next[kMost];
  std::uint8_t ended, brought, servers, freed;
  std::uint64_t place;  // plus 1
};
struct World {
  std::uint64_t reports, stored, tail;
  std::uint32_t lanes;
  Told told[kCalls];
  std::uint8_t over;  // calls
};
static_assert(std::is_trivially_copyable_v<World>);

World world;
const char* error = nullptr;

void want(bool condition, const char* what) {
  if (!condition && error == nullptr) error = what;
}
Explorer& explorer() { return *Explorer::self(); }
void point() { explorer().point(true); }

// As ReportingCall (call_in_stream.cuh).
struct ModelCall {
  std::uint32_t lanes, lane;
  int number;

  Told& told() const { return world.told[number]; }
  static std::uint64_t add(std::uint64_t& word, std::uint64_t by) {
    point();
    const std::uint64_t before = word;
    word += by;
    return before;
  }
  std::uint64_t add_report(std::uint64_t by) const { return add(world.reports, by); }
  std::uint64_t add_last_report(std::uint64_t by) const { return add(world.reports, by); }
  std::uint64_t add_stored(std::uint64_t by) const { return add(world.stored, by); }
  void say_place(std::uint64_t by) const { add(world.stored, by); }
  void await_stored(std::uint64_t n) const {
    explorer().block([](int count) { return world.stored == static_cast<std::uint64_t>(count); },
                     static_cast<int>(n));
  }
  void clear() const {
    point();
    world.reports = 0;
    point();
    world.stored = 0;
  }
  void fence() const {}
  std::uint64_t take_place() const {
    const std::uint64_t at = add(world.tail, 1);
    told().place = at + 1;
    return at;
  }
  void free_key() const {
    point();
    ++told().freed;
  }
  void let_next_begin() const { told().let_next[lane] = 1; }
  void end(std::uint64_t at) const {
    for (std::uint32_t l = 0; l < lanes; ++l) {
      want(told().stored[l] != 0, "a call ends before a lane has stored");
    }
    want(told().place == at + 1, "a call ends at another place of the CQ");
    want(told().freed == 1, "a call ends whose key was not freed once");
    want(world.reports == 0 && world.stored == 0, "a call ends and leaves a word");
    point();
    ++told().ended;
    ++world.over;
  }
  void end_lane(std::uint64_t at) const { end(at); }
  // And the engine does the rest.
  void hand_over(std::uint64_t word) const {
    for (std::uint32_t l = 0; l < lanes; ++l) {
      const std::uint64_t report = word >> (kReportBits * l) & 3;
      want(report != 0, "a call is brought before a lane has reported");
      want(report != kDone || told().stored[l] != 0, "a call is brought before a lane has stored");
      want(report != kBegun || told().head_start[l] != 0, "a head start is missing");
    }
    want(told().freed == 0, "the key of a call for the engine was freed");
    want(told().let_next[lane] == 0, "the block that serves lets the next call come");
    want(lanes == 1 || (world.reports == 0 && world.stored == 0), "a call is brought with a word");
    point();
    ++told().brought;
    ++told().servers;
    ++world.over;
  }
};

// ---- the steps, and the same with mistakes ----

struct Right : ReportSteps {};
struct EndsWithTheLastReport : Right {  // and not with the last that has stored
  static void finish_lane(const ModelCall& call, const Ending& ending) {
    if (ending.reports == 0) return;
    call.clear();
    call.end(ending.at);
  }
};
struct WaitsForNobody : Right {
  static void bring_to_engine(const ModelCall& call, std::uint64_t word, bool) {
    call.clear();
    call.hand_over(word);
  }
};
struct CountsItself : Right {
  static void bring_to_engine(const ModelCall& call, std::uint64_t word, bool) {
    ReportSteps::bring_to_engine(call, word, false);
  }
};
struct ClearsBehindTheEnd : Right {
  static void finish_lane(const ModelCall& call, const Ending& ending) {
    struct Late : ModelCall {
      void clear() const {}
      void end(std::uint64_t at) const {
        world.told[number].place = at + 1;
        point();
        ++world.told[number].ended;
        ++world.over;
        ModelCall::clear();
      }
    };
    ReportSteps::finish_lane(Late{call}, ending);
  }
};
struct SaysItsPlaceBehindItsCount : Right {
  static bool decide(const ModelCall& call, Ending& ending) {
    struct Late : ModelCall {
      void say_place(std::uint64_t) const {}
    };
    return ReportSteps::decide(Late{call}, ending);
  }
  static void finish_lane(const ModelCall& call, const Ending& ending) {
    ReportSteps::finish_lane(call, ending);
    if (ending.reports != 0) call.say_place(call.told().place << kStoredBits);
  }
};

// ---- fibers ----

template <class Steps>
void run_block(int number) {
  const auto index = static_cast<std::uint32_t>(number) / kCalls;
  const ModelCall call{world.lanes, index, number % kCalls};
  if (call.number != 0) {
    explorer().block([](int calls) { return world.over >= calls; }, call.number);
  }
  std::uint32_t fate = kDone;  // of all lanes of the second call
  if (call.number == 0) fate = kUntried + static_cast<std::uint32_t>(explorer().choose(3));
  // As call_in_stream.cuh: leave_untried(), finish() and say_how_far().
  Told& told = call.told();
  if (fate == kDone) {
    Ending ending = Steps::begin_end(call);
    const bool serves = Steps::decide(call, ending);
    point();
    told.stored[index] = 1;
    if (serves) {
      Steps::bring_to_engine(call, ending.reports, true);
    } else {
      Steps::finish_lane(call, ending);
    }
    return;
  }
  if (fate == kBegun) {
    point();
    told.head_start[index] = 1;
  }
  const std::uint64_t word = Steps::give_up(call, static_cast<Report>(fate));
  if (word != 0) Steps::bring_to_engine(call, word, false);
}

const char* check_end() {
  for (int f = 0; f < kCalls * static_cast<int>(world.lanes); ++f) {
    if (explorer().running(f)) return "a block waits for ever";
  }
  for (const Told& told : world.told) {
    if (told.ended + told.brought != 1) return "a call has not one end";
    if (told.servers != told.brought) return "a call that is the engine's has not one server";
    for (std::uint32_t l = 0; l < world.lanes && told.ended != 0; ++l) {
      if (told.let_next[l] == 0) return "a block of a call that is done keeps the next from coming";
    }
  }
  if (world.reports != 0 || world.stored != 0) return "a word is left";
  return error;
}

template <class Steps>
Explorer::Verdict explore(std::uint32_t lanes) {
  Explorer e(&world, sizeof(world), check_end, &error);
  std::memset(static_cast<void*>(&world), 0, sizeof(world));
  error = nullptr;
  world.lanes = lanes;
  static const char* const kNames[] = {"block 0", "block 0 of the next",
                                       "block 1", "block 1 of the next",
                                       "block 2", "block 2 of the next"};
  for (int f = 0; f < kCalls * static_cast<int>(lanes); ++f) {
    e.name(f, kNames[f]);
    e.start(f, run_block<Steps>, f);
  }
  Explorer::Verdict v = e.explore(-1, 30000000);
  std::printf("  %u lanes: %llu states, %llu transitions, %llu ends%s\n", lanes,
              static_cast<unsigned long long>(v.states),
              static_cast<unsigned long long>(v.transitions),
              static_cast<unsigned long long>(v.schedules),
              v.error.empty() ? "" : (": " + v.error).c_str());
  return v;
}

TEST(StreamCallReports, OneEndBehindAllThatIsStored) {
  for (std::uint32_t lanes = 1; lanes <= kMost; ++lanes) {
    const Explorer::Verdict v = explore<Right>(lanes);
    EXPECT_EQ(v.error, "") << lanes << " lanes\n" << v.schedule;
    EXPECT_TRUE(v.complete);
    EXPECT_GT(v.schedules, 0u);
  }
}

TEST(StreamCallReports, ExplorerFindsPlantedMistakes) {
  EXPECT_EQ(explore<EndsWithTheLastReport>(2).error, "a call ends before a lane has stored");
  EXPECT_EQ(explore<WaitsForNobody>(2).error, "a call ends before a lane has stored");
  EXPECT_EQ(explore<CountsItself>(2).error, "a block waits for ever");
  EXPECT_EQ(explore<ClearsBehindTheEnd>(2).error, "a call has not one end");
  EXPECT_EQ(explore<SaysItsPlaceBehindItsCount>(2).error, "a call ends at another place of the CQ");
}

}  // namespace
}  // namespace unjam_test
#else
TEST(StreamCallReports, NeedsStacksThatNoSanitizerWatches) {
  GTEST_SKIP() << "the explorer copies stacks; x86-64, without sanitizers";
}
#endif
