// Ranks as processes: this program again, with the process's rank in the environment, or the first
// of its ranks.
#pragma once

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu/support.h"

extern char** environ;

namespace unjam_gpu {

inline std::string to_hex(const unjamUniqueId_t& id) {
  std::string text;
  for (const char c : id.internal) {
    char two[3];
    std::snprintf(two, sizeof(two), "%02x", static_cast<unsigned>(static_cast<unsigned char>(c)));
    text += two;
  }
  return text;
}

// The options that say how ranks are spread: how many a process has; 0: this one has all.
inline int ranks_per_process(Options& options) {
  const bool processes = options.flag("processes", "one process per rank, started by this one");
  const int n = options.integer("ranks-per-process", processes ? 1 : 0,
                                "start processes of so many ranks, the last may have fewer; 0: "
                                "all ranks are in this one");
  if (n < (processes ? 1 : 0)) {
    fail("--ranks-per-process must be positive; 0, without --processes, is all ranks in this one");
  }
  return n;
}
inline std::string text_of_processes(int per_process) {
  if (per_process == 0) return "one process";
  if (per_process == 1) return "one process each";
  return std::to_string(per_process) + " a process";
}

// Children of which none outlives this object.
class Children {
 public:
  // arguments: after the program's name. Each child writes what it has to say() to descriptor 3.
  // With several ranks per_process (the last may have fewer), it is told the first of them.
  Children(int ranks, const std::vector<std::string>& arguments, int per_process = 1) {
    unjamUniqueId_t id;
    check(unjamGetUniqueId(&id));
    setenv("UNJAM_ID", to_hex(id).c_str(), 1);
    setenv("UNJAM_RANKS", std::to_string(ranks).c_str(), 1);
    for (int r = 0; r < ranks; r += per_process) {
      setenv("UNJAM_RANK", std::to_string(r).c_str(), 1);
      start(arguments);
    }
    for (const char* name : {"UNJAM_ID", "UNJAM_RANKS", "UNJAM_RANK"}) unsetenv(name);
  }
  ~Children() {
    for (Child& c : children_) {
      if (!c.ended) {
        ::kill(c.pid, SIGKILL);
        waitpid(c.pid, nullptr, 0);
      }
      close(c.pipe);
    }
  }
  Children(const Children&) = delete;
  Children& operator=(const Children&) = delete;

  int count() const { return static_cast<int>(children_.size()); }
  void kill(int i) { ::kill(children_[static_cast<std::size_t>(i)].pid, SIGKILL); }

  // Lines that child i has said so far.
  const std::vector<std::string>& said(int i) const {
    return children_[static_cast<std::size_t>(i)].lines;
  }
  bool ended(int i) const { return children_[static_cast<std::size_t>(i)].ended; }
  // As waitpid tells; of a child that has ended.
  int status(int i) const { return children_[static_cast<std::size_t>(i)].status; }

  // Hears and reaps, until done() or the limit; false: the limit.
  template <class F>
  bool until(double limit_s, const F& done) {
    const std::uint64_t begin = now_ns();
    for (;;) {
      listen(5);
      if (done()) return true;
      if (us_since(begin) > limit_s * 1e6) return false;
    }
  }
  // All have ended, each with exit status 0.
  bool all_well(double limit_s) {
    const bool ended = until(limit_s, [this] {
      bool all = true;
      for (const Child& c : children_) {
        all = all && c.ended;
        // Who has failed will not answer the others, which would wait for their own limits.
        if (c.ended && c.status != 0) return true;
      }
      return all;
    });
    bool well = ended;
    for (const Child& c : children_) well = well && c.ended && c.status == 0;
    return well;
  }

 private:
  struct Child {
    pid_t pid = 0;
    int pipe = -1;
    bool ended = false;
    int status = 0;
    std::string part;
    std::vector<std::string> lines;
  };

  void start(const std::vector<std::string>& arguments) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe2");
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
    std::vector<char*> argv = {const_cast<char*>("child")};
    for (const std::string& a : arguments) argv.push_back(const_cast<char*>(a.c_str()));
    argv.push_back(nullptr);
    Child c;
    const int error =
        posix_spawn(&c.pid, "/proc/self/exe", &actions, nullptr, argv.data(), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    if (error != 0) fail("posix_spawn");
    c.pipe = ends[0];
    fcntl(c.pipe, F_SETFL, O_NONBLOCK);
    children_.push_back(c);
  }

  void listen(int timeout_ms) {
    std::vector<pollfd> polls;
    for (const Child& c : children_) polls.push_back({c.ended ? -1 : c.pipe, POLLIN, 0});
    poll(polls.data(), polls.size(), timeout_ms);
    for (Child& c : children_) {
      // First the end, then what was said before it: nothing is missed.
      if (!c.ended && waitpid(c.pid, &c.status, WNOHANG) == c.pid) c.ended = true;
      char buffer[4096];
      for (ssize_t n; (n = read(c.pipe, buffer, sizeof(buffer))) > 0;) {
        c.part.append(buffer, static_cast<std::size_t>(n));
      }
      for (std::size_t end; (end = c.part.find('\n')) != std::string::npos;) {
        c.lines.push_back(c.part.substr(0, end));
        c.part.erase(0, end + 1);
      }
    }
    Watchdog::instance().alive();
  }

  std::vector<Child> children_;
};

// In a child, first: a parent that failed takes it along.
inline void die_with_parent() { prctl(PR_SET_PDEATHSIG, SIGKILL); }

// In a child: a line for the parent.
inline void say(std::string line) {
  line += '\n';
  if (write(3, line.data(), line.size()) < 0) _exit(kExitFailed);
}

}  // namespace unjam_gpu
