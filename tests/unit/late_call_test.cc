// Calls that other ranks have ended before they were made: between their announcement and their
// reasons, too, they must not go on, since the others' data may be there already.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>

#include "tests/support/job.h"
#include "tests/support/processes.h"
#include "tests/support/stages.h"

namespace unjam_test {
namespace {

// Of this process: it hears nothing of others while it is held.
class ControlThread {
 public:
  ControlThread() {
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name;
      std::getline(std::ifstream(task.path() / "comm"), name);
      if (name == "unjam control") thread_ = std::stoi(task.path().filename());
    }
    if (thread_ < 0) fail("this process has no control thread");
    struct sigaction action = {};
    action.sa_handler = stay;
    sigaction(SIGUSR1, &action, nullptr);
  }
  ~ControlThread() { let_go(); }
  ControlThread(const ControlThread&) = delete;
  ControlThread& operator=(const ControlThread&) = delete;

  // Where it has no lock that calls need: if it has, it is let go and held again.
  void hold(unjamContext_t context) {
    for (int i = 0; i < 100; ++i) {
      held_.store(true);
      syscall(SYS_tgkill, getpid(), thread_, SIGUSR1);
      if (!eventually([] { return stays_.load(); })) fail("the control thread cannot be held");
      std::atomic<bool> passed{false};
      std::jthread call([&] {
        int absent = 0;
        unjamContextAbsent(context, nullptr, 0, &absent);  // takes the lock of all calls
        passed.store(true);
      });
      for (int ms = 0; ms < 1000 && !passed.load(); ++ms) sleep_ms(1);
      if (passed.load()) return;
      let_go();
      if (!eventually([&] { return passed.load() && !stays_.load(); })) fail("a lock stays taken");
    }
    fail("the control thread is never held without a lock");
  }
  void let_go() { held_.store(false); }

 private:
  static void stay(int) {
    stays_.store(true);
    while (held_.load()) usleep(1000);
    stays_.store(false);
  }

  static inline std::atomic<bool> held_{false}, stays_{false};
  pid_t thread_ = -1;
};

unjamResult_t all_reduce(const Rank& rank, float* data) {
  unjamRequest_t request = nullptr;
  const unjamResult_t code =
      unjamAllReduce(rank.all, "key", data, data, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &request);
  if (code != UNJAM_SUCCESS) return code;
  const unjamResult_t end = unjamWait(request, kPatienceUs);
  unjamRequestFree(request);
  return end;
}

// Rank 0's call ends by its time limit; then rank 1 makes its own, with its control thread held, in
// a thread of its own: `meanwhile` gets that thread's result as it comes, and since when it is due.
// Returns what that returns: false if it came too late to tell.
using Clock = std::chrono::steady_clock;
bool late_call(const std::function<bool(ControlThread&, const std::atomic<int>&,
                                        Clock::time_point)>& meanwhile) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  const Stages stages;
  enum { kHeld = 1, kEnded, kOver };
  Processes all(2, "", [&](Child& me) {
    unjamConfig_t config = default_config();
    config.timeout_ms = 100;
    Job job(id, 2, {me.index()}, config, base_seed());
    job.run([&](Rank& rank) {
      float x = 1;
      if (rank.rank == 0) {
        stages.await(kHeld);
        if (const unjamResult_t code = all_reduce(rank, &x); code != UNJAM_ERROR_TIMEOUT) {
          fail("a call that nobody else makes gave " + code_text(code));
        }
        stages.reach(kEnded);
        stages.await(kOver);
        return;
      }
      std::atomic<int> result{-1};
      std::jthread caller;
      ControlThread control;  // is let go before the caller is waited for
      control.hold(rank.context);
      stages.reach(kHeld);
      stages.await(kEnded);
      const Clock::time_point begun = Clock::now();
      caller = std::jthread([&] { result.store(all_reduce(rank, &x)); });
      if (meanwhile(control, result, begun)) me.say("told");
      stages.reach(kOver);
    });
  });
  return all.finish() && !all.said(1).empty();
}

TEST(LateCall, WaitsForTheReasonsOfThoseWhoEndedIt) {
  const auto waits = [](ControlThread& control, const std::atomic<int>& result,
                        Clock::time_point begun) {
    sleep_ms(200);
    const bool early = result.load() == UNJAM_SUCCESS;
    control.let_go();
    if (!eventually([&] { return result.load() >= 0; })) fail("it does not end");
    // For five seconds: where threads were kept from running, that may have been over.
    if (Clock::now() - begun > std::chrono::milliseconds(4500)) return false;
    if (early) fail("it completes, though it has failed elsewhere");
    if (result.load() != UNJAM_ERROR_TIMEOUT) {
      fail("it gave " + code_text(static_cast<unjamResult_t>(result.load())));
    }
    return true;
  };
  bool told = false;
  for (int i = 0; i < 3 && !told && !HasFailure(); ++i) told = late_call(waits);
  EXPECT_TRUE(told);
}

TEST(LateCall, DoesNotWaitForReasonsThatNeverCome) {
  if (kSanitized) GTEST_SKIP() << "waits, and nothing else";
  late_call([](ControlThread&, const std::atomic<int>& result, Clock::time_point) {
    if (!eventually([&] { return result.load() >= 0; })) fail("it waits for good");
    return true;
  });
}

}  // namespace
}  // namespace unjam_test
