// Ranks as processes: forks children, runs a function in each, collects what they say, and ends
// those that hang, after each has printed what it waits for.
//
// The parent uses nothing of unjam but unjamGetUniqueId, since a child must not inherit contexts or
// threads. A child's failures are printed where they happen; the parent adds one that names the
// process, and the seed.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/support/job.h"

namespace unjam_test {

// Ranks of each process: {3, 3, 2} is {{0, 1, 2}, {3, 4, 5}, {6, 7}}.
using Layout = std::vector<std::vector<int>>;
inline Layout layout(const std::vector<int>& sizes) {
  Layout l;
  int rank = 0;
  for (const int n : sizes) {
    l.emplace_back();
    for (int i = 0; i < n; ++i) l.back().push_back(rank++);
  }
  return l;
}
inline std::string text_of(const Layout& l) {
  std::string t;
  for (const auto& ranks : l) t += (t.empty() ? "" : "+") + std::to_string(ranks.size());
  return t + (l.size() == 1 ? " ranks in one process" : " ranks");
}

// What a child gets.
class Child {
 public:
  Child(int index, int fd) : index_(index), fd_(fd) {}
  int index() const { return index_; }
  // Hands a message to the parent. Any thread; a message up to PIPE_BUF is never torn.
  void say(std::string_view text) const {
    std::string frame(sizeof(std::uint32_t), '\0');
    const auto size = static_cast<std::uint32_t>(text.size());
    std::memcpy(frame.data(), &size, sizeof(size));
    frame += text;
    for (std::size_t sent = 0; sent < frame.size();) {
      const ssize_t n = write(fd_, frame.data() + sent, frame.size() - sent);
      if (n < 0 && errno != EINTR) _exit(3);  // the parent is gone
      if (n > 0) sent += static_cast<std::size_t>(n);
    }
  }

 private:
  int index_, fd_;
};

class Processes {
 public:
  Processes(int count, std::string where, const std::function<void(Child&)>& body)
      : where_(std::move(where)) {
    // Else a child would print it again.
    std::fflush(stdout);
    std::fflush(stderr);
    for (int i = 0; i < count; ++i) start(i, body);
  }
  Processes(const Processes&) = delete;
  Processes& operator=(const Processes&) = delete;
  ~Processes() {
    for (One& p : all_) {
      if (!p.ended) {
        ::kill(p.pid, SIGKILL);
        waitpid(p.pid, &p.status, 0);
      }
      if (p.fd >= 0) close(p.fd);
    }
  }

  int count() const { return static_cast<int>(all_.size()); }
  pid_t pid(int i) const { return at(i).pid; }
  bool ended(int i) const { return at(i).ended; }
  const std::vector<std::string>& said(int i) const { return at(i).messages; }

  void signal(int i, int number) const {
    if (!at(i).ended) ::kill(at(i).pid, number);
  }
  // The child's death by SIGKILL is meant; it will be no failure.
  void expect_killed(int i) { all_[static_cast<std::size_t>(i)].to_be_killed = true; }

  // Takes in what children say, for at most so long.
  void pump(int timeout_ms) {
    std::vector<pollfd> polled;
    std::vector<One*> who;
    for (One& p : all_) {
      if (p.fd < 0) continue;
      polled.push_back({p.fd, POLLIN, 0});
      who.push_back(&p);
    }
    if (poll(polled.data(), polled.size(), timeout_ms) > 0) {
      for (std::size_t i = 0; i < who.size(); ++i) {
        if (polled[i].revents != 0) take(*who[i]);
      }
    }
    // Not by the end of the pipe: a child's child may hold it.
    for (One& p : all_) {
      if (!p.ended && waitpid(p.pid, &p.status, WNOHANG) == p.pid) {
        p.ended = true;
        take(p);
        close(p.fd);
        p.fd = -1;
      }
    }
  }

  // False if it is not true within the patience.
  bool wait_until(const std::function<bool()>& condition, std::int64_t patience_us = kPatienceUs) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(patience_us);
    while (!condition()) {
      if (std::chrono::steady_clock::now() > end) return false;
      pump(1);
    }
    return true;
  }

  // Waits for all; false, and a test failure, if one failed or did not end. The children's own
  // waits have a shorter patience, and say more when they lose it. `explained`: whether those that
  // did not end have said all that they will; none: they get some time for that.
  bool finish(std::int64_t patience_us = 2 * kPatienceUs,
              const std::function<bool()>& explained = nullptr) {
    const bool in_time = wait_until([&] { return all_ended(); }, patience_us);
    bool ok = true;
    if (!in_time) {
      ok = false;
      std::string hung;
      for (const One& p : all_) {
        if (p.ended) continue;
        hung += (hung.empty() ? "" : ", ") + std::to_string(p.index);
        ::kill(p.pid, SIGCONT);
        ::kill(p.pid, SIGUSR2);  // prints what it waits for
      }
      wait_until([&] { return all_ended() || (explained && explained()); }, kPatienceUs / 4);
      for (const One& p : all_) {
        if (!p.ended) ::kill(p.pid, SIGKILL);
      }
      wait_until([&] { return all_ended(); });
      ADD_FAILURE() << "processes " << hung << " did not end; what they wait for is on stderr"
                    << where_;
    }
    for (const One& p : all_) {
      const bool killed = WIFSIGNALED(p.status) && WTERMSIG(p.status) == SIGKILL;
      if (p.to_be_killed && killed) continue;
      if (WIFEXITED(p.status) && WEXITSTATUS(p.status) == 0 && !p.to_be_killed) continue;
      ok = false;
      if (killed && !in_time) continue;  // said above
      ADD_FAILURE() << "process " << p.index << " "
                    << (WIFSIGNALED(p.status)
                            ? "was ended by signal " + std::to_string(WTERMSIG(p.status))
                        : p.to_be_killed ? "was to be killed, and ended by itself"
                                         : "failed (its failures are printed above)")
                    << where_;
    }
    return ok;
  }

 private:
  struct One {
    int index = 0;
    pid_t pid = -1;
    int fd = -1;
    int status = 0;
    bool ended = false, to_be_killed = false;
    std::string raw;
    std::vector<std::string> messages;
  };

  const One& at(int i) const { return all_[static_cast<std::size_t>(i)]; }
  bool all_ended() const {
    for (const One& p : all_) {
      if (!p.ended) return false;
    }
    return true;
  }

  void start(int index, const std::function<void(Child&)>& body) {
    int ends[2];
    if (pipe2(ends, O_CLOEXEC) != 0) fail("pipe2: " + std::string(std::strerror(errno)));
    const pid_t parent = getpid();
    const pid_t pid = fork();
    if (pid < 0) fail("fork: " + std::string(std::strerror(errno)));
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (getppid() != parent) _exit(3);
      for (const One& other : all_) {
        if (other.fd >= 0) close(other.fd);
      }
      close(ends[0]);
      Child me(index, ends[1]);
      try {
        body(me);
      } catch (const std::exception& e) {
        ADD_FAILURE() << "process " << index << ": " << e.what() << where_;
      }
      std::fflush(stdout);
      std::fflush(stderr);
      _exit(testing::Test::HasFailure() ? 1 : 0);
    }
    close(ends[1]);
    fcntl(ends[0], F_SETFL, O_NONBLOCK);
    One p;
    p.index = index;
    p.pid = pid;
    p.fd = ends[0];
    all_.push_back(std::move(p));
  }

  static void take(One& p) {
    char buffer[65536];
    for (;;) {
      const ssize_t n = read(p.fd, buffer, sizeof(buffer));
      if (n <= 0) break;
      p.raw.append(buffer, static_cast<std::size_t>(n));
    }
    std::uint32_t size = 0;
    while (p.raw.size() >= sizeof(size)) {
      std::memcpy(&size, p.raw.data(), sizeof(size));
      if (p.raw.size() < sizeof(size) + size) break;
      p.messages.push_back(p.raw.substr(sizeof(size), size));
      p.raw.erase(0, sizeof(size) + size);
    }
  }

  const std::string where_;
  std::vector<One> all_;
};

// Values between processes of one program, as bytes.
class Packer {
 public:
  template <class T>
  Packer& put(const T& value) {
    static_assert(std::is_trivially_copyable_v<T>);
    text_.append(reinterpret_cast<const char*>(&value), sizeof(value));
    return *this;
  }
  template <class T>
  Packer& put(const std::vector<T>& values) {
    put(values.size());
    for (const T& v : values) put(v);
    return *this;
  }
  const std::string& text() const { return text_; }

 private:
  std::string text_;
};
class Unpacker {
 public:
  explicit Unpacker(std::string_view text) : text_(text) {}
  template <class T>
  T get() {
    T value{};
    if (text_.size() < sizeof(value)) fail("a message of a child is too short");
    std::memcpy(&value, text_.data(), sizeof(value));
    text_.remove_prefix(sizeof(value));
    return value;
  }
  template <class T>
  std::vector<T> get_all() {
    std::vector<T> values(get<std::size_t>());
    for (T& v : values) v = get<T>();
    return values;
  }
  bool empty() const { return text_.empty(); }

 private:
  std::string_view text_;
};

// Runs `body` in each process of a layout with a Job of its ranks, and hands back what each
// returned; empty after a failure, which is reported. A layout of one process is a job as
// unjamInitAll makes it.
inline std::vector<std::string> run_layout(const Layout& processes, const unjamConfig_t& config,
                                           std::uint64_t seed,
                                           const std::function<std::string(Job&)>& body,
                                           std::int64_t patience_us = 2 * kPatienceUs) {
  const std::string where = "\n  [" + text_of(processes) + ", seed " + std::to_string(seed) +
                            "; UNJAM_TEST_SEED=" + std::to_string(base_seed()) + "]";
  int ranks = 0;
  for (const auto& p : processes) ranks += static_cast<int>(p.size());
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(static_cast<int>(processes.size()), where, [&](Child& me) {
    const std::vector<int>& mine = processes[static_cast<std::size_t>(me.index())];
    if (processes.size() == 1) {
      Job job(ranks, config, seed);
      me.say(body(job));
    } else {
      Job job(id, ranks, mine, config, seed);
      me.say(body(job));
    }
  });
  if (!all.finish(patience_us)) return {};
  std::vector<std::string> said;
  for (int i = 0; i < all.count(); ++i) {
    if (all.said(i).size() != 1) {
      ADD_FAILURE() << "process " << i << " said nothing" << where;
      return {};
    }
    said.push_back(all.said(i)[0]);
  }
  return said;
}

}  // namespace unjam_test
