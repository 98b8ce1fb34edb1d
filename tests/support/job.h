// A job of N ranks in this process, or this process's ranks of one that spans several
// (processes.h), and a thread a rank to drive it.
//
// A rank's function reports failure by throwing (check(), wait(), fail()); the job then aborts all
// contexts, so that no other rank waits for the one that has failed, and run() adds one GoogleTest
// failure that names the ranks, what they said and the seed.
#pragma once

#include <gtest/gtest.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "unjam/unjam.h"

namespace unjam_test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Under the thread sanitizer, UNJAM_UNWATCHED is for what is called for every element of a test's
// data: watched one by one, they are most of the time that a test takes. Where another thread has
// written or reads them, read_here() and written_here() show the sanitizer all of them at once.
// Such a function inlines nothing that is watched, so it calls only others of its kind, and takes
// pointers instead of containers.
#if defined(__SANITIZE_THREAD__)
#define UNJAM_UNWATCHED __attribute__((no_sanitize_thread))
extern "C" void __tsan_read_range(void* begin, unsigned long bytes);
extern "C" void __tsan_write_range(void* begin, unsigned long bytes);
inline constexpr bool kThreadSanitized = true;
inline void read_here(const void* begin, std::size_t bytes) {
  if (bytes != 0) __tsan_read_range(const_cast<void*>(begin), bytes);
}
inline void written_here(void* begin, std::size_t bytes) {
  if (bytes != 0) __tsan_write_range(begin, bytes);
}
#else
#define UNJAM_UNWATCHED
inline constexpr bool kThreadSanitized = false;
inline void read_here(const void*, std::size_t) {}
inline void written_here(void*, std::size_t) {}
#endif

// Deadlines decide only between "comes" and "never comes".
inline constexpr std::int64_t kPatienceUs = (kSanitized ? 300 : 60) * std::int64_t{1000000};
// A process that is killed is noticed within a second: that is promised. Five times as much, since
// test machines do other things; sanitizers are slower by as much again.
inline constexpr double kNoticedSeconds = kSanitized ? 25 : 5;

// The seed of everything random in a test: UNJAM_TEST_SEED, or always the same.
inline std::uint64_t base_seed() {
  static const std::uint64_t seed = [] {
    const char* text = std::getenv("UNJAM_TEST_SEED");
    return text == nullptr ? std::uint64_t{20240229} : std::strtoull(text, nullptr, 0);
  }();
  return seed;
}

UNJAM_UNWATCHED inline std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
UNJAM_UNWATCHED inline std::uint64_t mix(std::uint64_t a, std::uint64_t b) {
  return mix(a ^ mix(b));
}

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] inline void fail(const std::string& what) { throw Failure(what); }

inline std::string code_text(unjamResult_t code) {
  return std::string(unjamGetErrorString(code)) + " (" + std::to_string(code) + ")";
}

inline void check(unjamResult_t code, const char* what) {
  if (code == UNJAM_SUCCESS) return;
  fail(std::string(what) + ": " + code_text(code) + ": " + unjamGetLastError());
}
#define UNJAM_CHECK(call) ::unjam_test::check((call), #call)

inline unjamConfig_t default_config() {
  unjamConfig_t c = UNJAM_CONFIG_INITIALIZER;
  return c;
}

inline std::string text_of(unjamResult_t (*function)(unjamContext_t, char*, size_t, size_t*),
                           unjamContext_t context) {
  for (std::size_t bytes = 1 << 16;; bytes *= 4) {
    std::string text(bytes, '\0');
    std::size_t needed = 0;
    const unjamResult_t code = function(context, text.data(), text.size(), &needed);
    if (code == UNJAM_ERROR_RESOURCES && bytes < (std::size_t{1} << 28)) continue;  // it grew
    if (code != UNJAM_SUCCESS) return "(no text: " + code_text(code) + ")";
    text.resize(needed - 1);
    return text;
  }
}
inline std::string explain(unjamContext_t context) { return text_of(unjamExplain, context); }
inline std::string info(unjamContext_t context) { return text_of(unjamInfo, context); }

inline unjamStats_t stats_of(unjamContext_t context) {
  unjamStats_t s{};
  s.size = sizeof(s);
  UNJAM_CHECK(unjamGetStats(context, &s));
  return s;
}

// CPU time that this process has used, all threads.
inline double cpu_seconds() {
  timespec t;
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

inline void sleep_ms(int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); }

// True as soon as `condition` is, false if it is not within the patience of the tests.
inline bool eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(kPatienceUs);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    sleep_ms(1);
  }
  return true;
}

// Inodes of the jobs' shared memory, as this process has it mapped.
inline std::set<std::string> mapped_memory() {
  std::set<std::string> inodes;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:unjam") == line.npos) continue;
    std::istringstream fields(line);
    std::string range, mode, offset, device, inode;
    fields >> range >> mode >> offset >> device >> inode;
    inodes.insert(inode);
  }
  return inodes;
}

// Waits for a request that must succeed, and frees it.
inline void wait_ok(unjamContext_t context, unjamRequest_t request, const std::string& what) {
  const unjamResult_t code = unjamWait(request, kPatienceUs);
  if (code == UNJAM_SUCCESS) {
    unjamRequestFree(request);
    return;
  }
  std::string text = what + ": " + code_text(code) + ": " + unjamGetLastError();
  if (code == UNJAM_ERROR_TIMEOUT) {
    text += "\n  explain: " + explain(context).substr(0, 20000);
    text += "\n  info: " + info(context).substr(0, 20000);
  }
  unjamRequestFree(request);
  fail(text);
}

// Waits for a request that must end with `expected`; returns its message, and frees it.
inline std::string wait_error(unjamContext_t context, unjamRequest_t request,
                              unjamResult_t expected, const std::string& what) {
  const unjamResult_t code = unjamWait(request, kPatienceUs);
  const std::string message = unjamRequestError(request);
  unjamRequestFree(request);
  if (code == expected) return message;
  fail(what + ": expected " + code_text(expected) + ", got " + code_text(code) + ": " + message +
       "\n  explain: " + explain(context).substr(0, 4000));
}

class Job;

// What a rank's function gets.
struct Rank {
  Job* job = nullptr;
  unjamContext_t context = nullptr;
  int rank = 0;
  int ranks = 0;
  unjamGroup_t all = nullptr;  // the group of all ranks

  void wait(unjamRequest_t request, const std::string& what) const {
    wait_ok(context, request, what);
  }
};

class Job {
 public:
  explicit Job(int ranks, const unjamConfig_t& config = default_config(),
               std::uint64_t seed = base_seed())
      : seed_(seed),
        local_(static_cast<std::size_t>(ranks)),
        contexts_(local_.size()),
        all_(local_.size()) {
    std::iota(local_.begin(), local_.end(), 0);
    UNJAM_CHECK(unjamInitAll(contexts_.data(), ranks, &config));
    create_groups();
  }
  // The ranks `local` of a job whose other ranks are in other processes.
  Job(const unjamUniqueId_t& id, int ranks, std::vector<int> local, const unjamConfig_t& config,
      std::uint64_t seed)
      : seed_(seed),
        local_(std::move(local)),
        contexts_(static_cast<std::size_t>(ranks)),
        all_(contexts_.size()) {
    std::vector<std::string> errors(contexts_.size());
    std::vector<std::thread> threads;
    for (const int rank : local_) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<std::size_t>(rank);
        if (unjamInit(&contexts_[r], ranks, id, rank, &config) != UNJAM_SUCCESS) {
          errors[r] = "rank " + std::to_string(rank) + ": unjamInit: " + unjamGetLastError();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    for (const std::string& e : errors) {
      if (!e.empty()) fail(e);
    }
    create_groups();
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    const bool failed = failed_.load();
    if (failed) abort_all();
    for (unjamContext_t c : contexts_) {
      if (c == nullptr) continue;
      const unjamResult_t code = unjamDestroy(c);
      if (code != UNJAM_SUCCESS && !failed) {
        ADD_FAILURE() << "unjamDestroy: " << code_text(code) << ": " << unjamGetLastError()
                      << where();
        unjamAbort(c);
        unjamDestroy(c);
      }
    }
  }

  int ranks() const { return static_cast<int>(contexts_.size()); }
  const std::vector<int>& local() const { return local_; }  // ranks of this process
  bool is_local(int r) const { return std::find(local_.begin(), local_.end(), r) != local_.end(); }
  std::uint64_t seed() const { return seed_; }
  unjamContext_t context(int r) const { return contexts_[static_cast<std::size_t>(r)]; }
  unjamGroup_t all(int r) const { return all_[static_cast<std::size_t>(r)]; }
  bool failed() const { return failed_.load(); }

  // Destroys one rank's context ahead of the others.
  unjamResult_t destroy(int r) {
    const unjamResult_t code = unjamDestroy(context(r));
    if (code == UNJAM_SUCCESS) contexts_[static_cast<std::size_t>(r)] = nullptr;
    return code;
  }

  void abort_all() {
    for (unjamContext_t c : contexts_) {
      if (c != nullptr) unjamAbort(c);
    }
  }

  // Runs `body` once a rank of this process, each in its own thread. False if one failed.
  bool run(const std::function<void(Rank&)>& body) {
    std::vector<std::pair<int, std::function<void(Rank&)>>> all;
    for (const int r : local_) all.emplace_back(r, body);
    return run_threads(all);
  }

  // Runs several functions at once, each as some rank: a rank may have none or many.
  bool run_threads(const std::vector<std::pair<int, std::function<void(Rank&)>>>& bodies) {
    std::vector<std::string> failures;
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (const auto& entry : bodies) {
      threads.emplace_back([&] {
        Rank me{this, context(entry.first), entry.first, ranks(), all(entry.first)};
        try {
          entry.second(me);
        } catch (const std::exception& e) {
          {
            std::lock_guard lock(mutex);
            failures.push_back("rank " + std::to_string(me.rank) + ": " + e.what());
          }
          if (!failed_.exchange(true)) abort_all();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    for (std::size_t i = 0; i < failures.size() && i < 2; ++i) {
      // Later ones mostly follow from the first.
      ADD_FAILURE() << (i == 0 ? "" : "(after that) ") << failures[i] << where();
    }
    return failures.empty();
  }

  std::string where() const {
    return "\n  [" + std::to_string(ranks()) + " ranks, seed " + std::to_string(seed_) +
           "; UNJAM_TEST_SEED=" + std::to_string(base_seed()) + "]";
  }

 private:
  void create_groups() {
    for (const int rank : local_) {
      const auto r = static_cast<std::size_t>(rank);
      UNJAM_CHECK(unjamGroupCreate(contexts_[r], nullptr, 0, "", &all_[r]));
    }
  }

  const std::uint64_t seed_;
  std::vector<int> local_;
  std::vector<unjamContext_t> contexts_;
  std::vector<unjamGroup_t> all_;
  std::atomic<bool> failed_{false};
};

}  // namespace unjam_test
