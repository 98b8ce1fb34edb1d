// Calls that other ranks have ended before they were made: between their announcement and their
// reasons, too, they must not go on, since the others' data may be there already.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
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

  void hold() {
    held_.store(true);
    syscall(SYS_tgkill, getpid(), thread_, SIGUSR1);
    if (!eventually([] { return stays_.load(); })) fail("the control thread cannot be held");
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
// a thread of its own: `meanwhile` gets that thread's result as it comes.
void late_call(const std::function<void(ControlThread&, const std::atomic<int>&)>& meanwhile) {
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
      control.hold();
      stages.reach(kHeld);
      stages.await(kEnded);
      caller = std::jthread([&] { result.store(all_reduce(rank, &x)); });
      meanwhile(control, result);
      stages.reach(kOver);
    });
  });
  all.finish();
}

TEST(LateCall, WaitsForTheReasonsOfThoseWhoEndedIt) {
  late_call([](ControlThread& control, const std::atomic<int>& result) {
    sleep_ms(200);
    if (result.load() == UNJAM_SUCCESS) fail("it completes, though it has failed elsewhere");
    control.let_go();
    if (!eventually([&] { return result.load() >= 0; })) fail("it does not end");
    if (result.load() != UNJAM_ERROR_TIMEOUT) {
      fail("it gave " + code_text(static_cast<unjamResult_t>(result.load())));
    }
  });
}

TEST(LateCall, DoesNotWaitForReasonsThatNeverCome) {
  if (kSanitized) GTEST_SKIP() << "waits, and nothing else";
  late_call([](ControlThread&, const std::atomic<int>& result) {
    if (!eventually([&] { return result.load() >= 0; })) fail("it waits for good");
  });
}

}  // namespace
}  // namespace unjam_test
