// How processes end that have ranks (runtime/ending.h), and what their peers see: what a rank had
// completed arrives, also when it is asked for later; all else ends at once, and says who has gone
// and how.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "runtime/ledger.h"
#include "tests/support/processes.h"

namespace unjam_test {
namespace {

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

enum class Way { kUnderscoreExit, kExit, kKilled, kExec };
struct Ending {
  Way way;
  const char* name;
  const char* told;  // to peers
};
const Ending kEndings[] = {
    {Way::kUnderscoreExit, "_exit", "died"},
    {Way::kExit, "exit", "ended without close()"},
    {Way::kKilled, "SIGKILL", "died"},
    {Way::kExec, "exec", ""},  // what came in its place may have ended by then, or not
};

[[noreturn]] void end_by(Way way) {
  switch (way) {
    case Way::kUnderscoreExit:
      _exit(0);
    case Way::kExit:
      std::exit(0);
    case Way::kKilled:
      kill(getpid(), SIGKILL);
      break;
    case Way::kExec:
      execl("/bin/true", "true", nullptr);
      break;
  }
  _exit(9);
}

// What the processes of a test say to each other.
struct Board {
  std::atomic<int> step{0};
  std::atomic<pid_t> pid{0};
};

// A process with one rank.
class One {
 public:
  One(const unjamUniqueId_t& id, int ranks, int rank) {
    unjamConfig_t config = default_config();
    UNJAM_CHECK(unjamInit(&context, ranks, id, rank, &config));
    UNJAM_CHECK(unjamGroupCreate(context, nullptr, 0, "all", &all));
  }
  // Until the others' ends are known here.
  void miss(const std::vector<int>& ranks) const {
    std::vector<int> absent;
    const bool missed = eventually([&] {
      int count = 0;
      absent.resize(64);
      UNJAM_CHECK(unjamContextAbsent(context, absent.data(), 64, &count));
      absent.resize(static_cast<std::size_t>(count));
      return std::includes(absent.begin(), absent.end(), ranks.begin(), ranks.end());
    });
    if (!missed) fail("the end of a process is not noticed");
  }
  // That a call is refused, or ends, with this.
  std::string error(unjamResult_t code, const unjamRequest_t& request, unjamResult_t expected,
                    const std::string& what) const {
    if (code == UNJAM_SUCCESS) return wait_error(context, request, expected, what);
    if (code != expected) fail(what + " was refused with " + code_text(code));
    return unjamGetLastError();
  }
  std::string peer_error(unjamResult_t code, const unjamRequest_t& request,
                         const std::string& what) const {
    return error(code, request, UNJAM_ERROR_PEER, what);
  }

  unjamContext_t context = nullptr;
  unjamGroup_t all = nullptr;
};

class Ends : public testing::Test {
 protected:
  Ends() {
    void* memory =
        mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) fail("mmap");
    board_ = new (memory) Board;
    UNJAM_CHECK(unjamGetUniqueId(&id_));
  }
  ~Ends() override { munmap(board_, sizeof(Board)); }

  void run(int ranks, const std::string& where, const std::function<void(int)>& body,
           bool first_is_killed = false) {
    Processes processes(ranks, "\n  [" + where + "]", [&](Child& me) { body(me.index()); });
    if (first_is_killed) processes.expect_killed(0);
    EXPECT_TRUE(processes.finish()) << where;
  }
  void reach(int step) { board_->step = step; }
  void await(int step) const {
    if (!eventually([&] { return board_->step >= step; })) fail("a process does not come along");
  }

  Board* board_;
  unjamUniqueId_t id_;
};

constexpr std::size_t kCount = 4;
constexpr std::int32_t kNine = 9;

// The first rank's part of calls that need nothing of the others, and what they make of it.
struct Part {
  const char* name;
  std::function<unjamResult_t(One&, int rank, std::int32_t* in, std::int32_t* out,
                              unjamRequest_t* request)>
      call;
  // What the rank finds at `out` (kCount at least); 0: nothing.
  std::function<std::int32_t(int rank)> finds;
};
std::vector<Part> parts() {
  const auto nine = [](int rank) { return rank == 0 ? 0 : kNine; };
  std::vector<Part> all;
  for (const char* name : {"send", "send once more"}) {
    all.push_back({name,
                   [](One& me, int rank, std::int32_t* in, std::int32_t* out, unjamRequest_t* q) {
                     if (rank == 0) {
                       unjamRequest_t other = nullptr;
                       const unjamResult_t code =
                           unjamSend(me.all, "s", in, kCount, UNJAM_INT32, 2, nullptr, &other);
                       if (code != UNJAM_SUCCESS) return code;
                       wait_ok(me.context, other, "a send");
                       return unjamSend(me.all, "s", in, kCount, UNJAM_INT32, 1, nullptr, q);
                     }
                     return unjamRecv(me.all, "s", out, kCount, UNJAM_INT32, 0, nullptr, q);
                   },
                   nine});
  }
  all.push_back({"broadcast",
                 [](One& me, int, std::int32_t* in, std::int32_t* out, unjamRequest_t* q) {
                   return unjamBroadcast(me.all, "b", in, out, kCount, UNJAM_INT32, 0, nullptr, q);
                 },
                 nine});
  all.push_back({"scatter",
                 [](One& me, int, std::int32_t* in, std::int32_t* out, unjamRequest_t* q) {
                   return unjamScatter(me.all, "sc", in, out, kCount, UNJAM_INT32, 0, nullptr, q);
                 },
                 nine});
  all.push_back({"gather",
                 [](One& me, int, std::int32_t* in, std::int32_t* out, unjamRequest_t* q) {
                   return unjamGather(me.all, "g", in, out, kCount, UNJAM_INT32, 1, nullptr, q);
                 },
                 [](int rank) { return rank == 1 ? kNine : 0; }});
  return all;
}

TEST_F(Ends, WhatWasCompletedArrivesAndTheRestEndsAtOnce) {
  for (const Ending& ending : kEndings) {
    UNJAM_CHECK(unjamGetUniqueId(&id_));
    board_->step = 0;
    run(
        3, ending.name,
        [&](int rank) {
          One me(id_, 3, rank);
          std::vector<std::int32_t> in(3 * kCount, rank == 0 ? kNine : 1), out(3 * kCount, -1);
          const auto calls = [&] {
            for (const Part& part : parts()) {
              std::fill(out.begin(), out.end(), -1);
              unjamRequest_t q = nullptr;
              check(part.call(me, rank, in.data(), out.data(), &q), part.name);
              wait_ok(me.context, q, part.name);
              const std::int32_t expected = part.finds(rank);
              for (std::size_t i = 0; expected != 0 && i < kCount; ++i) {
                if (out[i] != expected) fail(std::string("a wrong number: ") + part.name);
              }
            }
          };
          if (rank == 0) {
            calls();
            await(2);  // both others are in a call that it has not made
            end_by(ending.way);
          }
          unjamRequest_t never = nullptr;
          UNJAM_CHECK(unjamAllReduce(me.all, "never", in.data(), out.data() + kCount, kCount,
                                     UNJAM_INT32, UNJAM_SUM, nullptr, &never));
          // (One after the other: whoever is told of an end gives up what others may be in.)
          board_->step++;
          me.miss({0});
          const auto told = [&](const std::string& text) {
            if (!has(text, "rank 0 is gone: its process (") || !has(text, ending.told)) fail(text);
          };
          told(me.peer_error(UNJAM_SUCCESS, never, "a call that it has not made"));
        },
        ending.way == Way::kKilled);

    UNJAM_CHECK(unjamGetUniqueId(&id_));
    board_->step = 0;
    run(
        3, ending.name,
        [&](int rank) {
          One me(id_, 3, rank);
          std::vector<std::int32_t> in(3 * kCount, rank == 0 ? kNine : 1), out(3 * kCount, -1);
          if (rank != 0) me.miss({0});
          for (const Part& part : parts()) {
            std::fill(out.begin(), out.end(), -1);
            unjamRequest_t q = nullptr;
            check(part.call(me, rank, in.data(), out.data(), &q), part.name);
            wait_ok(me.context, q, part.name);
            const std::int32_t expected = part.finds(rank);
            for (std::size_t i = 0; expected != 0 && i < kCount; ++i) {
              if (out[i] != expected) fail(std::string("a wrong number: ") + part.name);
            }
          }
          if (rank == 0) end_by(ending.way);
          board_->step++;
          await(2);
          const auto told = [&](const std::string& text) {
            if (!has(text, "rank 0 is gone: its process (") || !has(text, ending.told)) fail(text);
          };
          unjamRequest_t q = nullptr;
          told(
              me.peer_error(unjamRecv(me.all, "s", out.data(), kCount, UNJAM_INT32, 0, nullptr, &q),
                            q, "a third receive"));
          told(me.peer_error(unjamSend(me.all, "s", in.data(), kCount, UNJAM_INT32, 0, nullptr, &q),
                             q, "a send to it"));
          told(me.peer_error(unjamBroadcast(me.all, "b", in.data(), out.data(), kCount, UNJAM_INT32,
                                            0, nullptr, &q),
                             q, "a second broadcast"));
          told(me.peer_error(unjamAllReduce(me.all, "new", in.data(), out.data(), kCount,
                                            UNJAM_INT32, UNJAM_SUM, nullptr, &q),
                             q, "another key"));
          // Those that are left go on.
          unjamGroup_t left = nullptr;
          UNJAM_CHECK(unjamGroupShrink(me.all, "left", &left));
          UNJAM_CHECK(unjamAllReduce(left, "k", in.data(), out.data(), kCount, UNJAM_INT32,
                                     UNJAM_SUM, nullptr, &q));
          wait_ok(me.context, q, "those that are left");
          if (out[0] != 2) fail("a wrong number");
          UNJAM_CHECK(unjamDestroy(me.context));
        },
        ending.way == Way::kKilled);
  }
}

// One ends, another one because of it, and a third sees both ends at once: it is told of the first.
TEST_F(Ends, WhoEndedFirstIsNamed) {
  for (const int first : {0, 1, 2}) {
    const int second = (first + 1) % 3, third = (first + 2) % 3;
    UNJAM_CHECK(unjamGetUniqueId(&id_));
    board_->step = 0;
    run(3, "rank " + std::to_string(first), [&](int rank) {
      if (rank == second && fork() == 0) {  // wakes the third when the second has ended
        const pid_t parent = getppid();
        while (getppid() == parent) usleep(1000);
        kill(board_->pid, SIGCONT);
        _exit(0);
      }
      if (rank == third) board_->pid = getpid();
      const One me(id_, 3, rank);
      std::vector<std::int32_t> in(kCount, 1), out(kCount);
      unjamRequest_t q = nullptr;
      if (rank != first) {
        UNJAM_CHECK(unjamAllReduce(me.all, "never", in.data(), out.data(), kCount, UNJAM_INT32,
                                   UNJAM_SUM, nullptr, &q));
        board_->step++;
      }
      await(2);
      if (rank == first) {
        kill(board_->pid, SIGSTOP);
        end_by(Way::kUnderscoreExit);
      }
      const std::string text = me.peer_error(UNJAM_SUCCESS, q, "a call");
      if (!has(text, "rank " + std::to_string(first) + " is gone")) fail(text);
    });
  }
}

// Nobody waits for the end of the one that has gone, but for another one, whose user has been told
// of it, and makes no more calls in the group.
TEST_F(Ends, WhoMeetsItLeavesNobodyWaiting) {
  for (const bool shrinks : {false, true}) {
    UNJAM_CHECK(unjamGetUniqueId(&id_));
    board_->step = 0;
    run(3, shrinks ? "shrinks" : "calls", [&](int rank) {
      One me(id_, 3, rank);
      std::vector<std::int32_t> in(kCount, kNine), out(3 * kCount, -1);
      unjamRequest_t q = nullptr;
      if (rank == 1) {
        await(1);
        me.miss({0});
        if (shrinks) {
          unjamGroup_t left = nullptr;
          UNJAM_CHECK(unjamGroupShrink(me.all, "left", &left));
        } else {
          static_cast<void>(me.peer_error(unjamAllReduce(me.all, "x", in.data(), out.data(), kCount,
                                                         UNJAM_INT32, UNJAM_SUM, nullptr, &q),
                                          q, "a call that it has not made"));
        }
        await(2);
        UNJAM_CHECK(unjamDestroy(me.context));
        return;
      }
      UNJAM_CHECK(
          unjamGather(me.all, "g", in.data(), out.data(), kCount, UNJAM_INT32, 2, nullptr, &q));
      if (rank == 0) {
        wait_ok(me.context, q, "its part of a gather");
        _exit(0);
      }
      me.miss({0});
      sleep_ms(20);
      int done = 0;
      UNJAM_CHECK(unjamTest(q, &done));
      if (done != 0) fail("a call that the one that has gone does not hold up has ended");
      reach(1);
      const std::string text = wait_error(me.context, q, UNJAM_ERROR_PEER, "the gather");
      if (!has(text, "rank 0 is gone")) fail(text);
      reach(2);
      UNJAM_CHECK(unjamDestroy(me.context));
    });
  }
}

TEST_F(Ends, WhoCalledSomethingElseIsNotWaitedFor) {
  run(2, "", [&](int rank) {
    One me(id_, 2, rank);
    std::vector<std::int32_t> in(2 * kCount, kNine), out(2 * kCount, -1);
    unjamRequest_t q = nullptr;
    if (rank == 0) {
      UNJAM_CHECK(unjamSend(me.all, "k", in.data(), kCount, UNJAM_INT32, 1, nullptr, &q));
      wait_ok(me.context, q, "a send");
      _exit(0);
    }
    me.miss({0});
    const std::string text =
        me.error(unjamRecv(me.all, "k", out.data(), 2 * kCount, UNJAM_INT32, 0, nullptr, &q), q,
                 UNJAM_ERROR_MISMATCH, "a longer receive");
    if (!has(text, "ranks disagree") || !has(text, "rank 0 is gone")) fail(text);
    UNJAM_CHECK(unjamDestroy(me.context));
  });
}

TEST_F(Ends, FinalizeWaitsForWhatMoves) {
  run(2, "", [&](int rank) {
    One me(id_, 2, rank);
    const std::vector<std::int32_t> in(kCount, kNine);
    std::vector<std::int32_t> out(kCount, -1);
    unjamRequest_t q = nullptr;
    if (rank == 1) {
      await(1);
      sleep_ms(50);
    }
    UNJAM_CHECK(unjamAllReduce(me.all, "k", in.data(), out.data(), kCount, UNJAM_INT32, UNJAM_SUM,
                               nullptr, &q));
    reach(1);
    if (rank == 0) {
      UNJAM_CHECK(unjamFinalize(kPatienceUs));
      UNJAM_CHECK(unjamFinalize(0));  // nothing is open
    }
    wait_ok(me.context, q, "the call");
    if (out[0] != 2 * kNine) fail("a wrong number");
    if (rank == 1) me.miss({0});
    UNJAM_CHECK(unjamDestroy(me.context));
  });
}

// The end of a process may come upon threads that close their contexts, and upon a second one that
// ends all: each context is shut down once, whoever comes first.
TEST(EndsOfThreads, FinalizeWhileOthersClose) {
  constexpr int kRanks = 3, kRounds = 40;
  for (int round = 0; round < kRounds; ++round) {
    unjamConfig_t config = default_config();
    config.lanes = 2;
    unjamContext_t contexts[kRanks] = {};
    UNJAM_CHECK(unjamInitAll(contexts, kRanks, &config));
    std::vector<std::int32_t> data(kRanks, 1);
    std::vector<unjamRequest_t> requests(kRanks);
    const bool leaves_one = round % 2 == 0;  // pending: a rank does not call
    for (int r = leaves_one ? 1 : 0; r < kRanks; ++r) {
      unjamGroup_t all = nullptr;
      UNJAM_CHECK(unjamGroupCreate(contexts[r], nullptr, 0, "all", &all));
      UNJAM_CHECK(unjamAllReduce(all, "k", &data[r], &data[r], 1, UNJAM_INT32, UNJAM_SUM, nullptr,
                                 &requests[r]));
    }
    std::atomic<int> ready{0};
    const auto together = [&] {
      ++ready;
      while (ready < kRanks + 2) std::this_thread::yield();
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < 2; ++i) {
      threads.emplace_back([&] {
        together();
        const unjamResult_t code = unjamFinalize(0);
        if (code != UNJAM_SUCCESS && code != UNJAM_ERROR_INVALID_USAGE) fail(code_text(code));
      });
    }
    for (int r = 0; r < kRanks; ++r) {
      threads.emplace_back([&, r] {
        together();
        // Refused while something is pending; then unjamFinalize has ended that, too.
        if (!eventually([&] { return unjamDestroy(contexts[r]) == UNJAM_SUCCESS; })) {
          fail("a context cannot be closed");
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (const unjamRequest_t request : requests) {
      if (request != nullptr) unjamRequestFree(request);
    }
  }
}

TEST_F(Ends, FinalizeAbortsWhatDoesNotAndLosesNothingElse) {
  run(2, "", [&](int rank) {
    One me(id_, 2, rank);
    std::vector<std::int32_t> in(kCount, kNine), out(kCount, -1);
    unjamRequest_t q = nullptr;
    if (rank == 0) {
      unjamRequest_t sent = nullptr;
      UNJAM_CHECK(unjamSend(me.all, "k", in.data(), kCount, UNJAM_INT32, 1, nullptr, &sent));
      wait_ok(me.context, sent, "a send");
      UNJAM_CHECK(unjamAllReduce(me.all, "late", in.data(), out.data(), kCount, UNJAM_INT32,
                                 UNJAM_SUM, nullptr, &q));
      if (unjamFinalize(0) != UNJAM_ERROR_INVALID_USAGE) fail("nothing was pending");
      const std::string text = unjamGetLastError();
      if (!has(text, "rank 0") || !has(text, "key 'late'")) fail(text);
      wait_error(me.context, q, UNJAM_ERROR_ABORTED, "what was pending");
      UNJAM_CHECK(unjamDestroy(me.context));
      return;
    }
    me.miss({0});
    UNJAM_CHECK(unjamRecv(me.all, "k", out.data(), kCount, UNJAM_INT32, 0, nullptr, &q));
    wait_ok(me.context, q, "what was sent");
    if (out[0] != kNine) fail("a wrong number");
    const std::string text =
        me.peer_error(unjamAllReduce(me.all, "late", in.data(), out.data(), kCount, UNJAM_INT32,
                                     UNJAM_SUM, nullptr, &q),
                      q, "what was aborted");
    if (!has(text, "rank 0 is gone") || !has(text, "ended without close()") ||
        !has(text, "key 'late'")) {
      fail(text);
    }
    UNJAM_CHECK(unjamDestroy(me.context));
  });
}

TEST_F(Ends, AChildThatInheritsARankEndsNothing) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  // At the child's end the sanitizer takes locks that threads of the parent held at the fork.
  GTEST_SKIP() << "a sanitizer does not survive fork() of a process with threads";
#endif
  run(2, "", [&](int rank) {
    One me(id_, 2, rank);
    if (rank == 0) {
      const pid_t child = fork();
      if (child == 0) {
        unjamFinalize(0);
        std::exit(0);
      }
      int status = 0;
      if (waitpid(child, &status, 0) != child || status != 0) fail("the child failed");
    }
    const std::int32_t in = kNine;
    std::int32_t out = 0;
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamAllReduce(me.all, "k", &in, &out, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
    wait_ok(me.context, q, "the call");
    if (out != 2 * kNine) fail("a wrong number");
    UNJAM_CHECK(unjamDestroy(me.context));
  });
}

// ---- the ledger itself ----

class LedgerTest : public testing::Test {
 protected:
  // Every key in the same places.
  static constexpr std::uint64_t kGroup = 7;
  std::unique_ptr<unjam::LedgerMemory> memory_ = std::make_unique<unjam::LedgerMemory>();
  unjam::Ledger ledger_{memory_.get()};
};

TEST_F(LedgerTest, SaysWhatIsDone) {
  unjam::LedgerEntry* e = ledger_.open(11, kGroup, 0);
  ASSERT_NE(e, nullptr);
  EXPECT_FALSE(unjam::has_completed(*memory_, 11, 0));
  e->done = 3;
  e->calls[2] = unjam::ledger_call(2, 0x123456789abcdef);
  EXPECT_TRUE(unjam::has_completed(*memory_, 11, 2));
  EXPECT_FALSE(unjam::has_completed(*memory_, 11, 3));
  EXPECT_FALSE(unjam::has_completed(*memory_, 12, 0));
  const std::map<std::uint64_t, std::uint64_t> said = {{11, 4}, {12, 1}};
  for (const bool leaves : {false, true}) {
    const unjam::Legacy legacy(*memory_, leaves ? &said : nullptr);
    EXPECT_TRUE(legacy.covers(11, 2));
    EXPECT_EQ(legacy.covers(11, 3), leaves);
    EXPECT_EQ(legacy.covers(12, 0), leaves);
    EXPECT_TRUE(legacy.differs(11, 2, 0x923456789abcdef));
    EXPECT_FALSE(legacy.differs(11, 2, 0x123456789abcdef));
    EXPECT_FALSE(legacy.differs(11, 7, 0x923456789abcdef)) << "not known any more";
    const auto none = [](std::uint64_t, std::uint64_t) { return false; };
    EXPECT_EQ(legacy.any_of(kGroup, none), leaves) << "a key of some group is not in the ledger";
    EXPECT_TRUE(legacy.any_of(kGroup, [](std::uint64_t tag, std::uint64_t) { return tag == 11; }));
  }
}

TEST_F(LedgerTest, ForgetsKeysThatAreClosedAndNoOthers) {
  std::set<unjam::LedgerEntry*> held;
  std::vector<std::uint64_t> kept;
  for (std::uint64_t tag = 2; tag < 3 * unjam::kLedgerPlaces; ++tag) {
    unjam::LedgerEntry* e = ledger_.open(tag, kGroup, tag);
    if (e == nullptr) continue;
    EXPECT_EQ(e->done, tag);
    if (tag % 64 == 0) {
      EXPECT_TRUE(held.insert(e).second);
      kept.push_back(tag);
    } else {
      EXPECT_EQ(held.count(e), 0u) << "another key's place";
      ledger_.close(e);
    }
  }
  ASSERT_GT(kept.size(), 100u);
  const unjam::Legacy legacy(*memory_, nullptr);
  for (const std::uint64_t tag : kept) {
    EXPECT_TRUE(legacy.covers(tag, tag - 1));
    unjam::LedgerEntry* again = ledger_.open(tag, kGroup, 0);
    EXPECT_EQ(held.count(again), 1u);
    EXPECT_EQ(again->done, tag) << "what it says stays";
  }
}

TEST_F(LedgerTest, APlaceThatChangesHandsSaysNothing) {
  unjam::LedgerEntry* e = ledger_.open(11, kGroup, 5);
  e->tag = 0;  // its rank died just then
  EXPECT_FALSE(unjam::has_completed(*memory_, 11, 0));
  EXPECT_FALSE(unjam::Legacy(*memory_, nullptr).covers(11, 0));
}

}  // namespace
}  // namespace unjam_test
