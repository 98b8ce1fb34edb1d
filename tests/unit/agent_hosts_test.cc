// Agents as processes, each in a network namespace of its own, joined by a bridge in another: as
// machines on a network. Processes are killed and links taken down. All namespaces are this test's,
// and end with its processes, however it ends. It needs root and `ip`; without, it is skipped.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "tests/support/agents.h"

namespace unjam_test {
namespace {

constexpr std::int64_t kLongMs = kPatienceUs / 1000;
// A death is to be known within a second; a busy machine has five.
constexpr double kDeathMs = 5000;
constexpr std::int64_t kSilenceMs = 2000;

// Runs a command in the network namespace of a process.
bool run_in(pid_t pid, const std::string& command) {
  const pid_t child = fork();
  if (child == 0) {
    const std::string path = "/proc/" + std::to_string(pid) + "/ns/net";
    const int ns = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (ns < 0 || setns(ns, CLONE_NEWNET) != 0) _exit(126);
    const int nothing = open("/dev/null", O_WRONLY);
    dup2(nothing, 1);
    dup2(nothing, 2);
    execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
    _exit(127);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

// A child in a namespace of its own, that says lines and waits for a word before it begins.
class Host {
 public:
  explicit Host(const std::function<void(int say)>& body) {
    int up[2], down[2];
    if (pipe2(up, O_CLOEXEC) != 0 || pipe2(down, O_CLOEXEC) != 0) return;
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      ::close(up[0]);
      ::close(down[1]);
      const bool apart = unshare(CLONE_NEWNET) == 0;
      dprintf(up[1], apart ? "apart\n" : "denied\n");
      char go;
      if (!apart || read(down[0], &go, 1) != 1) _exit(1);
      body(up[1]);
      _exit(0);
    }
    ::close(up[1]);
    ::close(down[0]);
    hear_ = Fd(up[0]);
    tell_ = Fd(down[1]);
    fcntl(hear_.get(), F_SETFL, O_NONBLOCK);
  }
  ~Host() {
    kill(SIGKILL);
    if (pid_ > 0) waitpid(pid_, nullptr, 0);
  }
  Host(const Host&) = delete;
  Host& operator=(const Host&) = delete;

  pid_t pid() const { return pid_; }
  void go() { EXPECT_EQ(write(tell_.get(), "g", 1), 1); }
  void kill(int signal) {
    if (pid_ > 0) ::kill(pid_, signal);
    killed |= signal == SIGKILL;
  }
  // All lines by now.
  const std::vector<std::string>& lines() {
    char buffer[65536];
    for (ssize_t n; (n = read(hear_.get(), buffer, sizeof(buffer))) > 0;) {
      rest_.append(buffer, static_cast<std::size_t>(n));
    }
    for (std::size_t end; (end = rest_.find('\n')) != std::string::npos;) {
      lines_.push_back(rest_.substr(0, end));
      rest_.erase(0, end + 1);
    }
    return lines_;
  }
  // The line that begins so; "": none yet.
  std::string line(const std::string& begin) {
    for (const std::string& l : lines()) {
      if (l.compare(0, begin.size(), begin) == 0) return l;
    }
    return {};
  }
  bool await(const std::string& begin, std::int64_t ms = kLongMs) {
    const std::uint64_t deadline = unjam::monotonic_ns() + static_cast<std::uint64_t>(ms) * 1000000;
    while (line(begin).empty()) {
      if (unjam::monotonic_ns() > deadline) return false;
      pollfd p{hear_.get(), POLLIN, 0};
      poll(&p, 1, 20);
    }
    return true;
  }
  bool killed = false;

 private:
  pid_t pid_ = -1;
  Fd hear_, tell_;
  std::string rest_;
  std::vector<std::string> lines_;
};

// A machine: two ranks, whose agent says what it hears.
void be_agent(int say, std::uint32_t place, std::uint32_t hosts) {
  Poller poller;
  AgentConfig c;
  c.secret.fill(7);
  c.root = place == 0;
  std::string error;
  if (!unjam::resolve_address("10.77.0.1:4700", c.root_address, error)) {
    dprintf(say, "failed %s\n", error.c_str());
    return;
  }
  c.host = "machine" + std::to_string(place);
  c.ranks = {{2 * place, 0}, {2 * place + 1, 0}};
  c.job_ranks = 2 * hosts;
  c.start_ms = kLongMs;
  c.beat_ms = 200;
  c.suspect_ms = 800;
  c.silence_ms = kSilenceMs;
  unjam::AgentEvents e;
  std::unique_ptr<Agent> agent;
  e.started = [&] { dprintf(say, "started %u\n", agent->number()); };
  e.failed = [&](const std::string& why) { dprintf(say, "failed %s\n", why.c_str()); };
  e.cut_off = [&](const std::string& why) { dprintf(say, "cut off %s\n", why.c_str()); };
  e.gone = [&](const unjam::AgentNews& n) {
    dprintf(say, "gone %u %s\n", n.agent, n.text.c_str());
  };
  agent = std::make_unique<Agent>(poller, c, e);
  if (!agent->start(error)) dprintf(say, "failed %s\n", error.c_str());
  for (;;) poller.run_once(-1);
}

class AgentHosts : public ::testing::Test {
 protected:
  // False: it cannot be done here, and the test is skipped.
  void connect(std::uint32_t hosts) {
    if (geteuid() != 0) GTEST_SKIP() << "network namespaces need root";
    switch_ = std::make_unique<Host>([](int) {
      for (;;) pause();
    });
    ASSERT_TRUE(switch_->await("apart") || switch_->await("denied", 1));
    if (switch_->line("apart").empty()) GTEST_SKIP() << "no network namespace can be made here";
    if (!run_in(switch_->pid(), "ip link add br0 type bridge && ip link set br0 up")) {
      GTEST_SKIP() << "`ip` is not here, or the kernel has no bridges";
    }
    switch_->go();
    for (std::uint32_t i = 0; i < hosts; ++i) {
      hosts_.push_back(std::make_unique<Host>([=](int say) { be_agent(say, i, hosts); }));
      Host& h = *hosts_.back();
      ASSERT_TRUE(h.await("apart"));
      const std::string v = "v" + std::to_string(i), pid = std::to_string(h.pid());
      if (!run_in(switch_->pid(), "ip link add " + v + " type veth peer name e0 netns " + pid +
                                      " && ip link set " + v + " master br0 up")) {
        GTEST_SKIP() << "the kernel has no pairs of virtual links";
      }
      ASSERT_TRUE(run_in(h.pid(), "ip addr add 10.77.0." + std::to_string(i + 1) +
                                      "/24 dev e0 && ip link set e0 up && ip link set lo up"));
    }
    for (auto& h : hosts_) h->go();
    for (auto& h : hosts_) {
      ASSERT_TRUE(h->await("started") || !h->line("failed").empty()) << "no start";
      ASSERT_EQ(h->line("failed"), "");
      by_number_[static_cast<std::uint32_t>(std::stoul(h->line("started").substr(8)))] = h.get();
    }
  }
  std::uint32_t place_of(const Host* host) const {
    for (std::uint32_t i = 0; i < hosts_.size(); ++i) {
      if (hosts_[i].get() == host) return i;
    }
    return ~0u;
  }
  // All others learn that this machine is gone, and that no other is. How long it took, in ms.
  double expect_gone(std::uint32_t number, std::uint64_t since_ns, const std::string& why) {
    const std::uint32_t place = place_of(by_number_[number]);
    const std::string text = "host machine" + std::to_string(place) + " (ranks " +
                             std::to_string(2 * place) + ", " + std::to_string(2 * place + 1) +
                             ") is gone";
    double ms = 0;
    for (auto& h : hosts_) {
      if (h.get() == by_number_[number] || h->killed) continue;
      EXPECT_TRUE(h->await("gone " + std::to_string(number) + " " + text));
      ms = std::max(ms, static_cast<double>(unjam::monotonic_ns() - since_ns) / 1e6);
      if (!why.empty()) {
        EXPECT_NE(h->line("gone " + std::to_string(number)).find(why), std::string::npos)
            << h->line("gone " + std::to_string(number));
      }
      EXPECT_EQ(h->line("cut off"), "");
    }
    return ms;
  }
  // Nobody has been declared gone but these.
  void expect_no_others(const std::vector<std::uint32_t>& numbers) {
    for (auto& h : hosts_) {
      if (h->killed) continue;
      std::size_t count = 0;
      for (const std::string& l : h->lines()) count += l.compare(0, 5, "gone ") == 0 ? 1 : 0;
      EXPECT_EQ(count, numbers.size());
    }
  }
  // Each is known to all that are left in time, and no other is held to be gone.
  void kill_one_by_one(const std::vector<std::uint32_t>& numbers) {
    for (const std::uint32_t number : numbers) {
      SCOPED_TRACE(number);
      const std::uint64_t at = unjam::monotonic_ns();
      by_number_[number]->kill(SIGKILL);
      const double ms = expect_gone(number, at, "");
      std::printf("agent %u killed: known to all after %.1f ms\n", number, ms);
      EXPECT_LT(ms, kDeathMs);
    }
    expect_no_others(numbers);
  }

  std::unique_ptr<Host> switch_;
  std::vector<std::unique_ptr<Host>> hosts_;
  std::map<std::uint32_t, Host*> by_number_;
};

TEST_F(AgentHosts, AKilledOneIsKnownToAll) {
  connect(16);
  if (IsSkipped() || HasFatalFailure()) return;
  kill_one_by_one({9, 0, 1});  // a leaf, then the root, then who stood in for it
}

TEST_F(AgentHosts, AKilledOneWithOthersBelowIt) {
  connect(36);
  if (IsSkipped() || HasFatalFailure()) return;
  kill_one_by_one({1, 34});  // 33, 34 and 35 are children of 1
}

// No packet tells of it: the heartbeat is missed, at both ends.
TEST_F(AgentHosts, ALinkThatIsDownIsNoticed) {
  connect(16);
  if (IsSkipped() || HasFatalFailure()) return;
  constexpr std::uint32_t kNumber = 7;
  Host* victim = by_number_[kNumber];
  const std::uint64_t at = unjam::monotonic_ns();
  ASSERT_TRUE(run_in(switch_->pid(), "ip link set v" + std::to_string(place_of(victim)) + " down"));
  const double ms = expect_gone(kNumber, at, "it has said nothing for");
  std::printf("link down: known to all after %.1f ms of %lld\n", ms,
              static_cast<long long>(kSilenceMs));
  EXPECT_GE(ms, kSilenceMs / 2.0);
  EXPECT_LT(ms, 5.0 * (kSilenceMs + 1000));
  EXPECT_TRUE(victim->await("cut off this host has lost host machine"));
  victim->kill(SIGKILL);
  expect_no_others({kNumber});
}

// It hangs, and wakes too late.
TEST_F(AgentHosts, AStoppedOneIsToldWhenItWakes) {
  connect(4);
  if (IsSkipped() || HasFatalFailure()) return;
  Host* victim = by_number_[2];
  const std::uint64_t at = unjam::monotonic_ns();
  victim->kill(SIGSTOP);
  expect_gone(2, at, "it has said nothing for");
  victim->kill(SIGCONT);
  EXPECT_TRUE(victim->await("cut off the others count this host as gone"));
}

}  // namespace
}  // namespace unjam_test
