// A process of a job dies at a random moment (kill -9): the others' collectives with its ranks end
// with an error that names them, groups without them go on, the survivors regroup and run, and
// nothing is left behind.
#include <dirent.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/job.h"
#include "tests/support/processes.h"

namespace unjam_test {
namespace {

constexpr int kMostRanks = 12;
constexpr std::size_t kMostGroups = 5;
constexpr int kInitTimeoutMs = 1000;  // of the points that kill in unjamInit
// kNoticedSeconds is for the median of a run: of hundreds of threads, some may be kept from running
// for as long. For each of them it is this.
constexpr double kLastNoticedSeconds = 4 * kNoticedSeconds;

std::uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<std::uint64_t>(t.tv_sec) * 1000000000u + static_cast<std::uint64_t>(t.tv_nsec);
}

enum class How {
  kRunning,      // while collectives of all sizes run
  kLarge,        // within large ones
  kAfterSubmit,  // right after a call, by the calling thread
  kStopped,      // SIGSTOP, then SIGKILL
  kForked,       // it has a child of fork()
  kCloned,  // it has a child that no handler of fork() knows of, with copies of all descriptors
  kInit,    // during unjamInit
};
constexpr std::array<const char*, 7> kHowNames = {
    "running", "in large ones", "after a call", "stopped", "forked", "cloned", "in unjamInit"};

struct Point {
  std::uint64_t seed = 0;
  How how = How::kRunning;
  Layout processes;
  int ranks = 0;
  int victim = 0;  // a process
  std::uint64_t delay_us = 0;
  int submit = 0;  // kAfterSubmit: after so many calls of the victim
  bool by_trees = false;
  std::vector<std::vector<int>> groups;

  // of_tree: which one dies of five ranks whose collectives go along trees, those that can.
  explicit Point(std::uint64_t s, How h, int of_tree = -1)
      : seed(s), how(h), by_trees(of_tree >= 0) {
    std::mt19937_64 random(seed);
    std::vector<int> sizes;
    const std::size_t n = by_trees ? 5 : 4 + random() % 3;
    for (std::size_t i = 0; i < n; ++i) sizes.push_back(!by_trees && random() % 3 == 0 ? 2 : 1);
    processes = layout(sizes);
    for (const int size : sizes) ranks += size;
    victim = by_trees ? of_tree : static_cast<int>(random() % n);
    delay_us = random() % (how == How::kInit ? 12000 : 30000);
    submit = 1 + static_cast<int>(random() % 60);
    // All; two with a victim among others; two without.
    std::vector<int> all, others;
    for (int r = 0; r < ranks; ++r) {
      all.push_back(r);
      if (!dies(r)) others.push_back(r);
    }
    groups.push_back(all);
    const auto some = [&](std::vector<int> of, std::size_t least) {
      std::shuffle(of.begin(), of.end(), random);
      of.resize(least + random() % (of.size() - least + 1));
      return of;
    };
    for (int i = 0; i < 2; ++i) {
      std::vector<int> g = some(others, 1);
      const auto& dead = processes[static_cast<std::size_t>(victim)];
      g.insert(g.begin() + static_cast<std::ptrdiff_t>(random() % (g.size() + 1)),
               dead[random() % dead.size()]);
      groups.push_back(g);
    }
    for (int i = 0; i < 2; ++i) groups.push_back(some(others, 2));
  }

  bool dies(int rank) const {
    const auto& dead = processes[static_cast<std::size_t>(victim)];
    return std::find(dead.begin(), dead.end(), rank) != dead.end();
  }
  bool safe(std::size_t group) const {
    return std::none_of(groups[group].begin(), groups[group].end(),
                        [this](int r) { return dies(r); });
  }
  std::string text() const {
    std::string t = std::string("kill ") + kHowNames[static_cast<std::size_t>(how)] + ", " +
                    (by_trees ? "by trees, " : "") + text_of(processes) + ", victim: process " +
                    std::to_string(victim) + ", after " +
                    (how == How::kAfterSubmit ? std::to_string(submit) + " calls"
                                              : std::to_string(delay_us) + " us") +
                    ", groups";
    for (const auto& g : groups) {
      t += " {";
      for (const int r : g) t += (t.back() == '{' ? "" : " ") + std::to_string(r);
      t += "}";
    }
    return t;
  }
  std::string where() const {
    return "\n  [" + text() + ", seed " + std::to_string(seed) +
           "; UNJAM_TEST_SEED=" + std::to_string(base_seed()) + "]";
  }
};

// What parent and children share.
struct Board {
  std::atomic<std::uint64_t> killed_ns{0};
  std::atomic<int> running{0};         // ranks that have begun
  std::atomic<int> stop{0};            // groups without a victim: end
  std::atomic<int> release{0};         // children of the victim: end
  std::atomic<int> has_child{0};       // the victim's child is there
  std::atomic<int> submitted{0};       // calls of the victim
  std::atomic<int> init_failed{0};     // ranks that could not join
  std::atomic<int> failed_threads{0};  // of groups with a victim: those that have had the error
  std::atomic<std::uint64_t> iterations[kMostRanks][kMostGroups] = {};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free);

struct SharedBoard {
  SharedBoard()
      : board(new (mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS,
                        -1, 0)) Board) {}
  ~SharedBoard() { munmap(board, sizeof(Board)); }
  Board* const board;
};

// A peer is gone. What else goes wrong throws Failure.
struct PeerGone {
  std::string message;
};

// The collectives of one rank over one group.
class Driver {
 public:
  Driver(const Point& point, unjamContext_t context, unjamGroup_t group, int size, int at,
         std::uint64_t seed)
      : context_(context),
        group_(group),
        n_(size),
        at_(at),
        seed_(seed),
        large_(point.how == How::kLarge) {
    for (auto& w : window_) {
      w.in.reserve(kMost * static_cast<std::size_t>(n_));
      w.out.reserve(kMost * static_cast<std::size_t>(n_));
    }
  }

  // One iteration: some collectives of mixed kinds and sizes at once, each checked. Returns the sum
  // over the members of `flag`. submitted: called after each call. Throws PeerGone, after all that
  // was called has ended.
  template <class F>
  int iterate(std::uint64_t iteration, int flag, const F& submitted) {
    std::string gone;
    std::size_t called = 0;
    for (std::size_t w = 0; w < kWindow; ++w) {
      prepare(w, mix(seed_, iteration * 16 + w));
      if (!call(w)) {
        gone = unjamGetLastError();
        break;
      }
      ++called;
      submitted();
    }
    std::int32_t flags = flag, sum = 0;
    unjamRequest_t flag_request = nullptr;
    if (gone.empty()) {
      const unjamResult_t code = unjamAllReduce(group_, "flag", &flags, &sum, 1, UNJAM_INT32,
                                                UNJAM_SUM, nullptr, &flag_request);
      if (code == UNJAM_ERROR_PEER) {
        gone = unjamGetLastError();
      } else {
        check(code, "flag");
      }
      submitted();
    }
    for (std::size_t w = 0; w < called; ++w) {
      if (wait(window_[w].request, gone)) verify(w);
    }
    if (flag_request != nullptr) wait(flag_request, gone);
    if (!gone.empty()) throw PeerGone{gone};
    return sum;
  }

 private:
  static constexpr std::size_t kWindow = 3, kMost = 400000;
  struct Slot {
    unjamKind_t kind = UNJAM_ALL_REDUCE;
    std::size_t count = 0;
    int root = 0;
    std::uint64_t seed = 0;
    std::vector<std::int32_t> in, out;
    unjamRequest_t request = nullptr;
  };

  static std::int32_t element(std::uint64_t seed, int rank, std::size_t i) {
    return static_cast<std::int32_t>(mix(seed, static_cast<std::uint64_t>(rank)) & 0xffff) +
           static_cast<std::int32_t>(i & 1023);
  }

  void prepare(std::size_t w, std::uint64_t seed) {
    Slot& s = window_[w];
    static constexpr std::array<std::size_t, 6> kCounts = {1, 16, 1000, 6000, 30000, 100000};
    s.seed = seed;
    s.kind = static_cast<unjamKind_t>(seed % 5);
    s.count = large_ ? kMost - seed % 1000 : kCounts[(seed >> 8) % kCounts.size()];
    if (s.kind == UNJAM_ALL_GATHER || s.kind == UNJAM_REDUCE_SCATTER) {
      s.count = s.count / static_cast<std::size_t>(n_) + 1;
    }
    s.root = static_cast<int>((seed >> 16) % static_cast<std::uint64_t>(n_));
    const auto n = static_cast<std::size_t>(n_);
    s.in.resize(s.count * (s.kind == UNJAM_REDUCE_SCATTER ? n : 1));
    s.out.resize(s.count * (s.kind == UNJAM_ALL_GATHER ? n : 1));
    written_here(s.in.data(), s.in.size() * sizeof(std::int32_t));
    written_here(s.out.data(), s.out.size() * sizeof(std::int32_t));
    write(s.in.data(), s.in.size(), element(seed, at_, 0), 1);
    write(s.out.data(), s.out.size(), -1, 0);
  }
  UNJAM_UNWATCHED static void write(std::int32_t* to, std::size_t n, std::int32_t base,
                                    std::int32_t times) {
    for (std::size_t i = 0; i < n; ++i) to[i] = base + times * static_cast<std::int32_t>(i & 1023);
  }

  // False: a peer is gone.
  bool call(std::size_t w) {
    Slot& s = window_[w];
    const std::string name = "w" + std::to_string(w);
    const char* key = name.c_str();
    unjamResult_t code = UNJAM_SUCCESS;
    switch (s.kind) {
      case UNJAM_ALL_REDUCE:
        code = unjamAllReduce(group_, key, s.in.data(), s.out.data(), s.count, UNJAM_INT32,
                              UNJAM_SUM, nullptr, &s.request);
        break;
      case UNJAM_ALL_GATHER:
        code = unjamAllGather(group_, key, s.in.data(), s.out.data(), s.count, UNJAM_INT32, nullptr,
                              &s.request);
        break;
      case UNJAM_REDUCE_SCATTER:
        code = unjamReduceScatter(group_, key, s.in.data(), s.out.data(), s.count, UNJAM_INT32,
                                  UNJAM_SUM, nullptr, &s.request);
        break;
      case UNJAM_REDUCE:
        code = unjamReduce(group_, key, s.in.data(), s.out.data(), s.count, UNJAM_INT32, UNJAM_SUM,
                           s.root, nullptr, &s.request);
        break;
      default:
        code = unjamBroadcast(group_, key, s.in.data(), s.out.data(), s.count, UNJAM_INT32, s.root,
                              nullptr, &s.request);
    }
    if (code == UNJAM_ERROR_PEER) return false;
    check(code, "a call");
    return true;
  }

  // True: complete without an error.
  bool wait(unjamRequest_t request, std::string& gone) const {
    const unjamResult_t code = unjamWait(request, kPatienceUs);
    if (code != UNJAM_ERROR_PEER) {
      wait_ok(context_, request, "a collective");
      return true;
    }
    gone = unjamRequestError(request);
    unjamRequestFree(request);
    return false;
  }

  void verify(std::size_t w) const {
    const Slot& s = window_[w];
    if (s.kind == UNJAM_REDUCE && at_ != s.root) return;
    std::int32_t sum = 0;
    for (int r = 0; r < n_; ++r) sum += element(s.seed, r, 0);
    read_here(s.out.data(), s.out.size() * sizeof(std::int32_t));
    // A part of so many elements is base + times × (first + i modulo 1024).
    const auto check_part = [&](std::size_t at, std::size_t n, std::int32_t base,
                                std::int32_t times, std::size_t first) {
      const std::size_t i = first_wrong(s.out.data() + at, n, base, times, first);
      if (i == n) return;
      fail("a wrong number: kind " + std::to_string(s.kind) + ", count " + std::to_string(s.count) +
           ", element " + std::to_string(at + i));
    };
    if (s.kind == UNJAM_ALL_GATHER) {
      for (int r = 0; r < n_; ++r) {
        check_part(static_cast<std::size_t>(r) * s.count, s.count, element(s.seed, r, 0), 1, 0);
      }
    } else if (s.kind == UNJAM_BROADCAST) {
      check_part(0, s.out.size(), element(s.seed, s.root, 0), 1, 0);
    } else {
      const std::size_t block =
          s.kind == UNJAM_REDUCE_SCATTER ? static_cast<std::size_t>(at_) * s.count : 0;
      check_part(0, s.out.size(), sum, n_, block);
    }
  }
  UNJAM_UNWATCHED static std::size_t first_wrong(const std::int32_t* p, std::size_t n,
                                                 std::int32_t base, std::int32_t times,
                                                 std::size_t first) {
    for (std::size_t i = 0; i < n; ++i) {
      if (p[i] != base + times * static_cast<std::int32_t>((first + i) & 1023)) return i;
    }
    return n;
  }

  const unjamContext_t context_;
  const unjamGroup_t group_;
  const int n_, at_;
  const std::uint64_t seed_;
  const bool large_;
  std::array<Slot, kWindow> window_;
};

int place(const std::vector<int>& members, int rank) {
  const auto found = std::find(members.begin(), members.end(), rank);
  return found == members.end() ? -1 : static_cast<int>(found - members.begin());
}

// A child that does not unjam, and lives until the board says so.
void make_child(const Point& point, Board& board) {
  const long pid = point.how == How::kForked ? fork() : syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
  if (pid != 0) {
    if (pid < 0) fail("fork");
    return;
  }
  // Nothing but system calls: locks may be held by threads that are not here.
  board.has_child = 1;
  for (int i = 0; i < 60000 && board.release == 0; ++i) usleep(1000);
  _exit(0);
}

// One rank's life.
class Life {
 public:
  Life(const Point& point, Board& board, const Child& child, const unjamUniqueId_t& id, int rank)
      : point_(point), board_(board), child_(child), id_(id), rank_(rank) {}

  void run() {
    if (unjamInit(&context_, point_.ranks, id_, rank_, nullptr) != UNJAM_SUCCESS) {
      child_.say("I " + std::to_string(now_ns()) + " " + unjamGetLastError());
      ++board_.init_failed;
      return;
    }
    for (std::size_t g = 0; g < point_.groups.size(); ++g) {
      const auto& m = point_.groups[g];
      handles_.push_back(nullptr);
      if (place(m, rank_) < 0) continue;
      UNJAM_CHECK(unjamGroupCreate(context_, m.data(), static_cast<int>(m.size()),
                                   ("g" + std::to_string(g)).c_str(), &handles_[g]));
    }
    const bool first = point_.processes[static_cast<std::size_t>(child_.index())][0] == rank_;
    if (first) {
      for (const std::string& inode : mapped_memory()) child_.say("M " + inode);
    }
    if (first && child_.index() == point_.victim &&
        (point_.how == How::kForked || point_.how == How::kCloned)) {
      make_child(point_, board_);
    }
    ++board_.running;
    std::vector<std::thread> threads;
    for (std::size_t g = 0; g < point_.groups.size(); ++g) {
      if (handles_[g] != nullptr) {
        threads.emplace_back([this, g] { guarded([&] { drive(g); }); });
      }
    }
    for (std::thread& t : threads) t.join();
    if (failure_.empty()) guarded([&] { regroup(); });
    if (!failure_.empty()) {
      unjamAbort(context_);
      unjamDestroy(context_);
      fail("rank " + std::to_string(rank_) + ": " + failure_);
    }
    UNJAM_CHECK(unjamDestroy(context_));
  }

 private:
  template <class F>
  void guarded(const F& f) {
    try {
      f();
    } catch (const std::exception& e) {
      std::lock_guard lock(mutex_);
      if (failure_.empty()) failure_ = e.what();
      unjamAbort(context_);
    }
  }

  // Until a peer is gone, or, where none is to go, until the members agree to stop.
  void drive(std::size_t g) {
    const auto& m = point_.groups[g];
    Driver driver(point_, context_, handles_[g], static_cast<int>(m.size()), place(m, rank_),
                  mix(point_.seed, g));
    const bool safe = point_.safe(g);
    const auto submitted = [&] {
      if (point_.how != How::kAfterSubmit || !point_.dies(rank_)) return;
      if (board_.running != point_.ranks) return;  // the others have yet to begin
      if (++board_.submitted != point_.submit) return;
      board_.killed_ns = now_ns();
      kill(getpid(), SIGKILL);
    };
    try {
      for (std::uint64_t i = 0;; ++i) {
        if (driver.iterate(i, safe ? board_.stop.load() : 0, submitted) != 0) return;
        ++board_.iterations[rank_][g];
      }
    } catch (const PeerGone& e) {
      const std::uint64_t now = now_ns();
      if (safe && board_.init_failed == 0 && point_.how != How::kInit) {
        fail("a group without a rank that died had the error: " + e.message);
      }
      child_.say("E " + std::to_string(now) + " " + e.message);
      // In unjamInit others may have failed with it, and be named first.
      const bool named = std::any_of(m.begin(), m.end(), [&](int r) {
        return (point_.dies(r) || point_.how == How::kInit) &&
               (e.message + " ").find("rank " + std::to_string(r) + " ") != std::string::npos;
      });
      if (!named) fail("the message does not name who died: " + e.message);
      if (!safe) ++board_.failed_threads;
      // And so it stays.
      try {
        driver.iterate(0, 0, [] {});
        fail("a group with a rank that died took another call");
      } catch (const PeerGone&) {
      }
    }
  }

  // The survivors of all groups; as the header says to do it.
  void regroup() {
    std::array<int, kMostRanks> absent;
    int count = 0;
    UNJAM_CHECK(unjamContextAbsent(context_, absent.data(), kMostRanks, &count));
    for (int r = 0; r < point_.ranks; ++r) {
      if (point_.dies(r) &&
          std::find(absent.begin(), absent.begin() + count, r) == absent.begin() + count) {
        fail("rank " + std::to_string(r) + " died and is not absent");
      }
    }
    for (std::size_t g = 0; g < 3; ++g) {
      unjamGroup_t group = handles_[g];
      if (group == nullptr) continue;
      for (int attempt = 0;; ++attempt) {
        UNJAM_CHECK(unjamGroupShrink(group, ("again " + std::to_string(g)).c_str(), &group));
        int size = 0, at = 0;
        UNJAM_CHECK(unjamGroupSize(group, &size));
        UNJAM_CHECK(unjamGroupRank(group, &at));
        Driver driver(point_, context_, group, size, at, mix(point_.seed, 100 + g));
        try {
          for (std::uint64_t i = 0; i < 5; ++i) driver.iterate(i, 0, [] {});
          break;
        } catch (const PeerGone& e) {
          if (attempt > kMostRanks) throw Failure("no end of shrinking: " + e.message);
        }
      }
    }
    child_.say("R");
  }

  const Point& point_;
  Board& board_;
  const Child& child_;
  const unjamUniqueId_t id_;
  const int rank_;
  unjamContext_t context_ = nullptr;
  std::vector<unjamGroup_t> handles_;
  std::mutex mutex_;
  std::string failure_;
};

// ---- what may not be left ----

std::set<std::string> names_in(const char* path, const char* with) {
  std::set<std::string> names;
  DIR* d = opendir(path);
  if (d == nullptr) return names;
  while (const dirent* e = readdir(d)) {
    if (std::strstr(e->d_name, with) != nullptr) names.insert(e->d_name);
  }
  closedir(d);
  return names;
}

std::size_t open_descriptors() { return names_in("/proc/self/fd", "").size(); }

// Processes that have one of these inodes mapped or open.
std::string holders(const std::set<std::string>& inodes) {
  std::string found;
  for (const std::string& pid : names_in("/proc", "")) {
    if (pid.find_first_not_of("0123456789") != pid.npos) continue;
    std::ifstream maps("/proc/" + pid + "/maps");
    for (std::string line; std::getline(maps, line);) {
      if (line.find("memfd:unjam") == line.npos) continue;
      std::istringstream fields(line);
      std::string range, mode, offset, device, inode;
      fields >> range >> mode >> offset >> device >> inode;
      if (inodes.count(inode) != 0) found += " " + pid + " maps " + inode;
    }
    const std::string fds = "/proc/" + pid + "/fd";
    for (const std::string& fd : names_in(fds.c_str(), "")) {
      struct stat st{};
      std::array<char, 64> target{};
      const std::string path = fds + "/" + fd;
      if (readlink(path.c_str(), target.data(), target.size() - 1) < 0) continue;
      if (std::strstr(target.data(), "memfd:unjam") == nullptr) continue;
      if (stat(path.c_str(), &st) == 0 && inodes.count(std::to_string(st.st_ino)) != 0) {
        found += " " + pid + " holds " + std::to_string(st.st_ino);
      }
    }
  }
  return found;
}

struct Figures {
  std::vector<double> ms;          // from the kill to a thread's last error, all points
  std::vector<double> last_ms;     // of each point, the last of all
  std::vector<double> init_ms;     // from the kill to the end of unjamInit, where that failed
  std::vector<double> noticed_ms;  // both, and late joins from their limit on
  std::size_t points = 0, late_joins = 0, regrouped = 0;
  std::set<std::string> inodes, said_by_init;
};

void run_point(const Point& point, Figures& figures) {
  SCOPED_TRACE(point.text());
  SharedBoard shared;
  Board& board = *shared.board;
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(static_cast<int>(point.processes.size()), point.where(), [&](Child& child) {
    if (point.how == How::kInit) {
      setenv("UNJAM_INIT_TIMEOUT_MS", std::to_string(kInitTimeoutMs).c_str(), 1);
    }
    if (point.by_trees) {
      setenv("UNJAM_ALGORITHM", "double_binary_tree", 1);
      setenv("UNJAM_LANES", "3", 1);  // two trees
    }
    std::vector<std::thread> threads;
    std::mutex mutex;
    for (const int rank : point.processes[static_cast<std::size_t>(child.index())]) {
      threads.emplace_back([&, rank] {
        try {
          Life(point, board, child, id, rank).run();
        } catch (const std::exception& e) {
          std::lock_guard lock(mutex);
          ADD_FAILURE() << e.what() << point.where();
        }
      });
    }
    for (std::thread& t : threads) t.join();
  });
  const auto over = [&] {  // something went wrong
    for (int p = 0; p < all.count(); ++p) {
      if (p != point.victim && all.ended(p)) return true;
    }
    return false;
  };
  const auto give_up = [&](const char* what) {
    board.release = 1;
    board.stop = 1;
    ADD_FAILURE() << what << point.where();
    all.finish(3000000);
  };
  if (point.how != How::kInit &&
      !all.wait_until([&] { return board.running == point.ranks || over(); })) {
    return give_up("not all ranks began");
  }
  if ((point.how == How::kForked || point.how == How::kCloned) &&
      !all.wait_until([&] { return board.has_child != 0 || over(); })) {
    return give_up("the victim's child did not begin");
  }
  all.expect_killed(point.victim);
  if (point.how == How::kAfterSubmit) {
    if (!all.wait_until([&] { return all.ended(point.victim); })) {
      return give_up("the victim lives");
    }
  } else {
    const std::uint64_t at = now_ns() + point.delay_us * 1000;
    const std::uint64_t stop_at = point.how == How::kStopped ? at - point.delay_us * 500 : at;
    if (point.how == How::kStopped) {
      while (now_ns() < stop_at) usleep(20);
      all.signal(point.victim, SIGSTOP);
    }
    while (now_ns() < at) usleep(20);
    board.killed_ns = now_ns();
    all.signal(point.victim, SIGKILL);
  }
  // The errors come, and the others go on: each has to do more than what may have been under way.
  int expected = 0;
  for (std::size_t g = 0; g < point.groups.size(); ++g) {
    for (const int r : point.groups[g]) expected += !point.safe(g) && !point.dies(r) ? 1 : 0;
  }
  std::array<std::array<std::uint64_t, kMostGroups>, kMostRanks> before{};
  for (std::size_t r = 0; r < kMostRanks; ++r) {
    for (std::size_t g = 0; g < kMostGroups; ++g) before[r][g] = board.iterations[r][g];
  }
  if (!all.wait_until(
          [&] { return board.failed_threads == expected || board.init_failed != 0 || over(); })) {
    return give_up("not all ranks had the error");
  }
  const auto goes_on = [&] {
    for (std::size_t g = 0; g < point.groups.size(); ++g) {
      if (!point.safe(g)) continue;
      for (const int rank : point.groups[g]) {
        const auto r = static_cast<std::size_t>(rank);
        if (board.iterations[r][g] < before[r][g] + 3) return false;
      }
    }
    return true;
  };
  if (!all.wait_until([&] { return goes_on() || board.init_failed != 0 || over(); })) {
    return give_up("a group without a victim does not go on");
  }
  board.stop = 1;
  board.release = 1;
  if (!all.finish()) return;

  ++figures.points;
  double last = 0;
  for (int p = 0; p < all.count(); ++p) {
    for (const std::string& text : all.said(p)) {
      std::istringstream fields(text);
      std::string what, message;
      std::uint64_t ns = 0;
      fields >> what;
      if (what == "M") {
        fields >> message;
        figures.inodes.insert(message);
      } else if (what == "R") {
        ++figures.regrouped;
      } else {
        fields >> ns;
        std::getline(fields, message);
        const double ms =
            ns < board.killed_ns ? 0 : static_cast<double>(ns - board.killed_ns) / 1e6;
        double noticed_ms = ms;
        if (what == "E") {
          figures.ms.push_back(ms);
          last = std::max(last, ms);
        } else if (message.find("did not join within") != message.npos) {
          ++figures.late_joins;  // the victim had not been heard of yet
          noticed_ms = ms - kInitTimeoutMs;
        } else {
          figures.init_ms.push_back(ms);
          EXPECT_NE(message, "") << point.where();
          figures.said_by_init.insert(message);
        }
        figures.noticed_ms.push_back(noticed_ms);
        EXPECT_LT(noticed_ms, kLastNoticedSeconds * 1e3) << message << point.where();
      }
    }
  }
  figures.last_ms.push_back(last);
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}
double most(const std::vector<double>& v) {
  return v.empty() ? 0 : *std::max_element(v.begin(), v.end());
}

void run_points(const std::vector<Point>& points) {
  // An empty folder to work in; children of children that are left alone become ours.
  std::string folder = "/tmp/unjam-kill-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  std::array<char, 4096> home{};
  ASSERT_NE(getcwd(home.data(), home.size()), nullptr);
  ASSERT_EQ(chdir(folder.c_str()), 0);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  const std::size_t descriptors = open_descriptors();
  const auto shm = names_in("/dev/shm", "unjam");

  Figures figures;
  for (const Point& point : points) {
    if (testing::Test::HasFailure()) break;
    run_point(point, figures);
    // The victim's child has become ours, and was told to end.
    bool none = false;
    eventually([&] {
      while (waitpid(-1, nullptr, WNOHANG) > 0) {
      }
      none = waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD;
      return none;
    });
    EXPECT_TRUE(none) << "a process is left" << point.where();
  }

  EXPECT_EQ(open_descriptors(), descriptors);
  EXPECT_EQ(names_in("/dev/shm", "unjam"), shm);
  EXPECT_EQ(chdir(home.data()), 0);
  EXPECT_EQ(rmdir(folder.c_str()), 0) << "files were left in " << folder;
  if (!figures.ms.empty()) {
    EXPECT_FALSE(figures.inodes.empty()) << "no process had any shared memory: the check is blind";
  }
  EXPECT_EQ(holders(figures.inodes), "");
  EXPECT_LT(median(figures.noticed_ms), kNoticedSeconds * 1e3);
  std::printf(
      "  %zu points: from the kill to the error, %zu threads: median %.2f ms, most %.2f ms (the "
      "last "
      "of a point: median %.2f ms); %zu ranks regrouped; %zu arenas, none left\n",
      figures.points, figures.ms.size(), median(figures.ms), most(figures.ms),
      median(figures.last_ms), figures.regrouped, figures.inodes.size());
  if (!figures.init_ms.empty() || figures.late_joins != 0) {
    std::printf(
        "  unjamInit failed on %zu ranks: median %.2f ms, most %.2f ms; timed out on %zu, whose "
        "peer died before it had joined\n",
        figures.init_ms.size(), median(figures.init_ms), most(figures.init_ms), figures.late_joins);
    for (const std::string& text : figures.said_by_init) std::printf("    %s\n", text.c_str());
  }
}

void run_points(const std::vector<How>& hows, std::size_t points, std::uint64_t seed) {
  std::vector<Point> all;
  for (std::size_t i = 0; i < points; ++i) all.emplace_back(mix(seed, i), hows[i % hows.size()]);
  run_points(all);
}

const std::vector<How> kAfterInit = {How::kRunning, How::kLarge,  How::kAfterSubmit,
                                     How::kStopped, How::kForked, How::kCloned};

TEST(Kill, ARankDies) { run_points(kAfterInit, kSanitized ? 6 : 12, base_seed()); }
TEST(Kill, ARankDiesInInit) { run_points({How::kInit}, kSanitized ? 3 : 6, mix(base_seed(), 1)); }

// Among five ranks 0 is a leaf of both trees, 1 stands between others, and 3 is on top.
TEST(Kill, ARankOfATreeDies) {
  std::vector<Point> points;
  for (const int victim : {0, 1, 3}) {
    for (const How how : {How::kRunning, How::kLarge}) {
      points.emplace_back(mix(base_seed(), 10 + points.size()), how, victim);
    }
  }
  run_points(points);
}

TEST(KillSoak, TwoHundredPoints) { run_points(kAfterInit, 200, mix(base_seed(), 2)); }
TEST(KillSoak, HundredPointsInInit) { run_points({How::kInit}, 100, mix(base_seed(), 3)); }

}  // namespace
}  // namespace unjam_test
