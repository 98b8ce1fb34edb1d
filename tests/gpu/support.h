// What every GPU test program needs besides CUDA: failing, options, a watchdog, statistics,
// threads. A failure in any thread ends the process: the other ranks would wait for the one that
// failed.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "unjam/unjam.h"

namespace unjam_gpu {

inline constexpr int kExitFailed = 1, kExitHung = 2, kExitUsage = 64;

// ---- time and numbers ----

inline std::uint64_t now_ns() {
  return static_cast<std::uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                        std::chrono::steady_clock::now().time_since_epoch())
                                        .count());
}
inline double us_since(std::uint64_t begin_ns) {
  return static_cast<double>(now_ns() - begin_ns) * 1e-3;
}

inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  std::uint64_t z = a + 0x9e3779b97f4a7c15u * (b + 1);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

struct Spread {
  double median = 0, p10 = 0, p90 = 0, max = 0;
};
inline Spread spread(std::vector<double> v) {
  if (v.empty()) return {};
  std::sort(v.begin(), v.end());
  const auto at = [&](double share) {
    return v[static_cast<std::size_t>(share * static_cast<double>(v.size() - 1) + 0.5)];
  };
  return {at(0.5), at(0.1), at(0.9), v.back()};
}

// ---- watchdog ----

// Says what each rank was doing, and what unjam knows, when nothing has moved for `stall_s`, or
// when `limit_s` has passed in all; then ends the process.
class Watchdog {
 public:
  static Watchdog& instance() {
    static Watchdog watchdog;
    return watchdog;
  }

  void start(double limit_s, double stall_s) {
    std::lock_guard lock(mutex_);
    end_ns_ = now_ns() + static_cast<std::uint64_t>(limit_s * 1e9);
    stall_ns_ = static_cast<std::uint64_t>(stall_s * 1e9);
    last_ns_ = now_ns();
    if (!thread_.joinable()) thread_ = std::thread([this] { watch(); });
  }

  // What the calling thread of `rank` does from now on. Also a sign of life.
  void doing(int rank, std::string what) {
    if (trace_) std::printf("  [%d] %s\n", rank, what.c_str());
    std::lock_guard lock(mutex_);
    doing_[rank] = std::move(what);
    last_ns_ = now_ns();
  }
  void alive() { last_ns_ = now_ns(); }
  void trace(bool on) { trace_ = on; }

  // One more context of this process that is asked for an explanation; and one less.
  void explain_with(unjamContext_t context) {
    std::lock_guard lock(mutex_);
    contexts_.push_back(context);
  }
  void explain_without(unjamContext_t context) {
    std::lock_guard lock(mutex_);
    std::erase(contexts_, context);
  }

  // What everybody is doing, unjamExplain's words, and what the devices say of each rank's engine.
  // Does not wait for more than 5 s.
  void report(const char* why) {
    std::printf("\n==== %s; %.1f s after the start ====\n", why,
                static_cast<double>(now_ns() - begin_ns_) * 1e-9);
    std::vector<unjamContext_t> contexts;
    if (mutex_.try_lock()) {
      for (const auto& [rank, what] : doing_) std::printf("  rank %d: %s\n", rank, what.c_str());
      contexts = contexts_;
      mutex_.unlock();
    }
    if (contexts.empty()) return;
    struct Answer {
      std::atomic<bool> done{false};
    };
    // Left alone where it hangs: the library may be what is broken.
    auto* answer = new Answer;
    std::thread([contexts, answer] {
      static char text[1 << 22];
      unjamExplain(contexts.front(), text, sizeof(text), nullptr);
      std::printf("%s\n", text);
      for (unjamContext_t context : contexts) {
        int rank = -1;
        unjamContextRank(context, &rank);
        text[0] = 0;
        unjamInfo(context, text, sizeof(text), nullptr);
        const char* now = std::strstr(text, "\"now\":");
        const int length = now == nullptr ? 0 : static_cast<int>(std::strcspn(now, "}"));
        std::printf("  rank %d %.*s\n", rank, length, now == nullptr ? "" : now);
      }
      answer->done = true;
    }).detach();
    for (int i = 0; i < 500 && !answer->done; ++i) usleep(10000);
    if (!answer->done) std::printf("  (unjam does not answer)\n");
  }

  ~Watchdog() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    if (thread_.joinable()) thread_.join();
  }

 private:
  Watchdog() = default;

  void watch() {
    std::unique_lock lock(mutex_);
    while (!wake_.wait_for(lock, std::chrono::milliseconds(100), [this] { return stop_; })) {
      const std::uint64_t now = now_ns();
      const bool over = now > end_ns_;
      if (!over && now < last_ns_.load() + stall_ns_) continue;
      lock.unlock();
      report(over ? "TIME LIMIT" : "NOTHING MOVES");
      _exit(kExitHung);
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::thread thread_;
  bool stop_ = false;
  std::atomic<bool> trace_{false};
  std::map<int, std::string> doing_;
  std::vector<unjamContext_t> contexts_;
  const std::uint64_t begin_ns_ = now_ns();
  std::uint64_t end_ns_ = 0, stall_ns_ = 0;
  std::atomic<std::uint64_t> last_ns_{0};
};

// ---- failing ----

[[noreturn]] inline void fail(const std::string& what) {
  static std::atomic<bool> failing{false};
  if (failing.exchange(true)) {
    for (;;) usleep(1000000);  // the first one speaks, then ends the process
  }
  Watchdog::instance().report(("FAILED: " + what).c_str());
  _exit(kExitFailed);
}

inline void check(unjamResult_t code,
                  const std::source_location at = std::source_location::current()) {
  if (code == UNJAM_SUCCESS) return;
  fail(std::string(at.file_name()) + ":" + std::to_string(at.line()) + ": " +
       unjamGetErrorString(code) + ": " + unjamGetLastError());
}

// ---- options: --name value, --name ----

class Options {
 public:
  Options(int argc, char** argv) {
    setvbuf(stdout, nullptr, _IONBF, 0);
    setvbuf(stderr, nullptr, _IONBF, 0);
    program_ = argv[0];
    for (int i = 1; i < argc; ++i) {
      std::string name = argv[i];
      if (name.rfind("--", 0) != 0) usage("unexpected: " + name);
      name = name.substr(2);
      const bool has_value = i + 1 < argc && std::string(argv[i + 1]).rfind("--", 0) != 0;
      given_[name] = has_value ? argv[++i] : "";
    }
  }

  std::string text(const char* name, const char* otherwise, const char* what) {
    help_ += std::string("  --") + name + " (" + otherwise + "): " + what + "\n";
    known_[name] = true;
    const auto found = given_.find(name);
    return found == given_.end() ? otherwise : found->second;
  }
  double number(const char* name, double otherwise, const char* what) {
    char words[32];
    std::snprintf(words, sizeof(words), "%g", otherwise);
    const std::string value = text(name, words, what);
    char* end = nullptr;
    const double n = std::strtod(value.c_str(), &end);
    if (end == value.c_str() || *end != '\0') usage(std::string("--") + name + " takes a number");
    return n;
  }
  int integer(const char* name, int otherwise, const char* what) {
    return static_cast<int>(number(name, otherwise, what));
  }
  std::uint64_t seed(std::uint64_t otherwise = 1) {
    const std::string value =
        text("seed", std::to_string(otherwise).c_str(), "of all that is random");
    return std::strtoull(value.c_str(), nullptr, 0);
  }
  bool flag(const char* name, const char* what) {
    help_ += std::string("  --") + name + ": " + what + "\n";
    known_[name] = true;
    return given_.count(name) != 0;
  }
  bool given(const char* name) const { return given_.count(name) != 0; }

  // After all have been asked for: nothing unknown may be left. Starts the watchdog.
  void done(double limit_s, double stall_s = 30) {
    const double limit = number("limit", limit_s, "seconds after which the program counts as hung");
    const double stall = number("stall", stall_s, "seconds without progress that count as hung");
    Watchdog::instance().trace(flag("trace", "print every step, so that a hang shows where"));
    for (const auto& [name, unused] : given_) {
      if (name == "help" || !known_.count(name)) usage(name == "help" ? "" : "unknown: --" + name);
    }
    Watchdog::instance().start(limit, stall);
  }

 private:
  [[noreturn]] void usage(const std::string& error) const {
    if (!error.empty()) std::printf("%s\n", error.c_str());
    std::printf("%s takes\n%s", program_.c_str(), help_.c_str());
    std::exit(error.empty() ? 0 : kExitUsage);
  }

  std::string program_, help_;
  std::map<std::string, std::string> given_;
  std::map<std::string, bool> known_;
};

// ---- threads ----

// f(i) for i < n, each in a thread of its own; returns when all have.
template <class F>
void each(int n, const F& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back([&f, i] { f(i); });
  for (std::thread& t : threads) t.join();
}

// Threads that meet: nobody leaves before all have come. Spins, so that they leave together.
class Barrier {
 public:
  explicit Barrier(int n) : n_(n) {}
  void meet() {
    const int round = round_.load();
    if (arrived_.fetch_add(1) + 1 == n_) {
      arrived_ = 0;
      ++round_;
      return;
    }
    while (round_.load() == round) std::this_thread::yield();
  }

 private:
  const int n_;
  std::atomic<int> arrived_{0}, round_{0};
};

}  // namespace unjam_gpu
