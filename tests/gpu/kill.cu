// kill -9 of one of the processes of a job (one a GPU) at a random moment of running collectives,
// 20 times: the others get UNJAM_ERROR_PEER within a second, with a text that names the process,
// streams that wait for calls go on, their GPUs go on working, they shrink the group and run
// checked collectives, and in the end all GPU memory is free again. With --registered peers store
// into the outputs themselves, also of the one that dies.
//
// Each round draws how calls are made (beside streams; beside streams, which wait for them; in one
// stream, by kernels of their own), which kinds, and of which sizes; the first rounds are fixed, so
// that few rounds have what differs most. --way, --kinds and --sizes hold one of the three.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <random>
#include <set>
#include <sstream>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kWindow = 4;  // places in memory, and keys

// ---- what a round is about ----

enum { kBeside, kAwaited, kInStream };
constexpr const char* kWays[] = {"beside", "awaited", "in stream"};

struct KindSet {
  const char* name;
  std::size_t n;
  unjamKind_t kinds[5];
};
enum { kAllReduces, kRooted, kUnrooted, kAllKinds };
constexpr KindSet kKindSets[] = {
    {"all-reduce", 1, {UNJAM_ALL_REDUCE}},
    {"rooted", 2, {UNJAM_REDUCE, UNJAM_BROADCAST}},
    {"unrooted", 3, {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER}},
    {"all",
     5,
     {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER, UNJAM_REDUCE, UNJAM_BROADCAST}}};

// Floats of the larger buffer, ascending. In all sets but the first they are about alike: of mixed
// ones the largest take nearly all the time, and so the deaths.
struct SizeSet {
  const char* name;
  std::size_t n;
  std::size_t floats[6];
  std::size_t in_stream;  // calls queued at a time: a GPU goes on for a while without its process
};
enum { kMixed, kPackets, kMiddling, kLarge };
constexpr SizeSet kSizeSets[] = {{"4 B-32 MiB", 6, {1, 100, 4096, 65536, 1 << 20, 8 << 20}, 8},
                                 {"1-16 KiB", 5, {1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12}, 32},
                                 {"1-8 MiB", 4, {1 << 18, 1 << 19, 1 << 20, 1 << 21}, 16},
                                 {"16-64 MiB", 3, {1 << 22, 1 << 23, 1 << 24}, 8}};

struct Draw {
  int way = kBeside, kinds = kAllReduces, sizes = kMixed;

  const KindSet& kind_set() const { return kKindSets[kinds]; }
  const SizeSet& size_set() const { return kSizeSets[sizes]; }
};

struct Round {
  int number = 0;
  std::uint64_t seed = 0;
  Draw draw;
  bool registered = false;

  std::string text() const {
    std::ostringstream words;
    words << "round " << number << ", seed " << seed << " (" << kWays[draw.way] << ", "
          << draw.kind_set().name << ", " << draw.size_set().name << ")";
    return words.str();
  }
};

// After the fixed ones all ways with all sizes, in an order of the seed's, again and again.
std::vector<Draw> draw_rounds(std::size_t rounds, std::uint64_t seed) {
  std::vector<Draw> draws = {{kBeside, kAllReduces, kMixed},
                             {kAwaited, kAllReduces, kMixed},
                             {kInStream, kAllKinds, kPackets},
                             {kInStream, kRooted, kLarge},     // chains, of 3 and 4 ranks
                             {kInStream, kUnrooted, kLarge}};  // meshes
  std::mt19937_64 random(mix(~seed, 0));
  while (draws.size() < rounds) {
    std::vector<Draw> deck;
    for (int way = 0; way < static_cast<int>(std::size(kWays)); ++way) {
      for (int sizes = 0; sizes < static_cast<int>(std::size(kSizeSets)); ++sizes) {
        deck.push_back({way, static_cast<int>(random() % std::size(kKindSets)), sizes});
      }
    }
    std::shuffle(deck.begin(), deck.end(), random);
    draws.insert(draws.end(), deck.begin(), deck.end());
  }
  draws.resize(rounds);
  return draws;
}

// A call, of a seed that all ranks have alike.
Spec spec_of(const Draw& draw, std::uint64_t seed, int size, int at) {
  const KindSet& kinds = draw.kind_set();
  const SizeSet& sizes = draw.size_set();
  const std::uint64_t more = mix(seed, 1);
  Spec s;
  s.seed = seed;
  s.size = size;
  s.at = at;
  s.kind = kinds.kinds[more % kinds.n];
  s.root = static_cast<int>((more >> 8) % static_cast<std::uint64_t>(size));
  std::size_t floats = sizes.floats[seed % sizes.n];
  // Every other one ends anywhere.
  if (draw.sizes != kMixed && (more >> 16) % 2 == 1) floats -= (more >> 24) % 64;
  const bool blocked = s.sends_blocks() || s.receives_blocks();
  s.count = std::max<std::size_t>(1, blocked ? floats / static_cast<std::size_t>(size) : floats);
  return s;
}

// ---- a rank ----

// What a collective of a dead peer may end with. Anything else ends the program.
struct PeerGone {};

// A window of collectives over one group, again and again.
class Driver {
 public:
  Driver(const Member& me, unjamGroup_t group, const Round& round, std::uint64_t seed)
      : me_(me),
        group_(group),
        round_(round),
        seed_(seed),
        way_(round.draw.way),
        calls_(way_ == kInStream ? round.draw.size_set().in_stream : kWindow),
        reports_(calls_.size()) {
    check(unjamGroupSize(group, &size_));
    check(unjamGroupRank(group, &at_));
    const SizeSet& sizes = round.draw.size_set();
    const std::size_t most = std::max(sizes.floats[sizes.n - 1], static_cast<std::size_t>(size_));
    // (No less than what CUDA maps at a time, so that no two windows share that.)
    bytes_ = std::max(std::size_t{2} << 20, 2 * padded(most * sizeof(float)));
    for (DeviceMemory& m : memory_) {
      m = DeviceMemory(bytes_);
      if (round_.registered) check(unjamMemRegister(me_.context, m.get(), bytes_));
    }
  }
  // Not before the others have ended the calls that have failed here.
  ~Driver() {
    for (const DeviceMemory& m : memory_) {
      if (!round_.registered) break;
      const unjamResult_t code = unjamMemDeregister(me_.context, m.get());
      if (code != UNJAM_ERROR_PEER) check(code);
    }
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Throws PeerGone after all that was called has ended.
  void iterate(int iteration) {
    where_ = round_.text() + ", iteration " + std::to_string(iteration);
    std::size_t called = 0;
    while (called < calls_.size() &&
           make_call(called, static_cast<std::uint64_t>(iteration) * calls_.size() + called)) {
      ++called;
    }
    bool failed = false;
    for (std::size_t w = 0; w < called; ++w) {
      end_call(w);
      failed = failed || !calls_[w].good;
    }
    const bool gone = failed || called < calls_.size();
    if (gone && error_ns_ == 0) error_ns_ = now_ns();
    if (failed) check_async_error();
    me_.doing(where_ + ": checks");
    for (std::size_t w = 0; w < called && way_ == kBeside; ++w) {
      if (calls_[w].good) start_check_of(w);
      stream_of(w).synchronize();
    }
    reports_.start_fetch(streams_[0].get());
    streams_[0].synchronize();
    for (std::size_t w = 0; w < called; ++w) {
      if (!calls_[w].good) continue;
      finish_check(calls_[w].spec, reports_[w], where_ + ", rank " + std::to_string(me_.rank));
    }
    if (gone) throw PeerGone{};
  }

  std::uint64_t error_ns() const { return error_ns_; }

 private:
  struct Call {
    Spec spec;
    Place place;
    unjamRequest_t request = nullptr;
    bool good = false;
  };

  // Calls in streams would wait in a circle if ranks had them in different orders: so they are in
  // one stream, which also lets them have their memory in turns.
  const Stream& stream_of(std::size_t w) const { return streams_[way_ == kInStream ? 0 : w]; }

  void start_check_of(std::size_t w) {
    start_check(calls_[w].spec, calls_[w].place, reports_.on_device(w), stream_of(w).get());
  }

  // False: a peer is gone, and nothing was called.
  bool make_call(std::size_t w, std::uint64_t number) {
    Call& c = calls_[w];
    c = Call{};
    c.spec = spec_of(round_.draw, mix(seed_, number), size_, at_);
    if (memory_of(c.spec) > bytes_) fail(where_ + ": no room for " + c.spec.text());
    c.place = place_in(memory_[w % kWindow].get(), c.spec);
    me_.doing(where_ + ": calls " + c.spec.text());
    const Stream& stream = stream_of(w);
    start_fill(c.spec, c.place, stream.get());
    const unjamCallOptions_t options =
        ordered(way_ == kInStream ? UNJAM_STREAM_SYNC : UNJAM_STREAM_ASYNC, stream);
    const std::string key = key_of(static_cast<int>(w % kWindow));
    const unjamResult_t code = call(group_, key.c_str(), c.spec, c.place, &options, &c.request);
    if (code == UNJAM_ERROR_PEER) {
      note(unjamGetLastError());
      return false;
    }
    check(code);
    if (way_ == kAwaited) {
      const unjamResult_t waits = unjamStreamWait(c.request, stream.get());
      if (waits != UNJAM_ERROR_PEER) check(waits);  // it may have failed already
    }
    // (Of one that fails nobody looks at what this finds, but the stream must come to it.)
    if (way_ != kBeside) start_check_of(w);
    return true;
  }

  void end_call(std::size_t w) {
    Call& c = calls_[w];
    if (way_ != kBeside) {
      me_.doing(where_ + ": waits for the stream with " + c.spec.text());
      stream_of(w).synchronize();  // must end, if the peer is gone too
    }
    me_.doing(where_ + ": waits for " + c.spec.text());
    const unjamResult_t code = unjamWait(c.request, -1);
    c.good = code == UNJAM_SUCCESS;
    if (code == UNJAM_ERROR_PEER) {
      note(unjamRequestError(c.request));
    } else if (!c.good) {
      fail(where_ + ", rank " + std::to_string(me_.rank) + ": " + c.spec.text() + " ended with " +
           unjamGetErrorString(code) + ": " + unjamRequestError(c.request));
    }
    check(unjamRequestFree(c.request));
  }

  // What who keeps no requests learns, which calls in streams hardly need.
  void check_async_error() {
    unjamResult_t error = UNJAM_SUCCESS;
    char text[1024] = "";
    check(unjamGetAsyncError(me_.context, &error, text, sizeof(text)));
    if (error != UNJAM_ERROR_PEER) {
      fail(where_ + ", rank " + std::to_string(me_.rank) + ": calls have failed, the context's " +
           "error is " + unjamGetErrorString(error) + ": " + text);
    }
    note(text);
  }

  // For the parent, which knows who has died.
  void note(std::string text) {
    std::replace(text.begin(), text.end(), '\n', ' ');
    if (noted_.insert(text).second) say("M " + text);
  }

  const Member& me_;
  const unjamGroup_t group_;
  const Round& round_;
  const std::uint64_t seed_;
  const int way_;
  int size_ = 0, at_ = 0;
  std::size_t bytes_ = 0;
  std::vector<Call> calls_;
  Reports reports_;
  std::array<DeviceMemory, kWindow> memory_;
  Stream streams_[kWindow];
  std::string where_;
  std::set<std::string> noted_;
  std::uint64_t error_ns_ = 0;
};

// The survivors, until all know of the same absences.
int run_survivors(const Member& me, const Round& round) {
  unjamGroup_t group = me.all;
  std::vector<std::unique_ptr<Driver>> drivers;  // to the end, see ~Driver()
  for (int attempt = 0; attempt < me.ranks; ++attempt) {
    me.doing(round.text() + ": shrinks the group");
    check(unjamGroupShrink(group, "again", &group));
    int size = 0;
    check(unjamGroupSize(group, &size));
    drivers.push_back(std::make_unique<Driver>(me, group, round, mix(round.seed, 1)));
    Driver& driver = *drivers.back();
    try {
      for (int i = 0; i < 10; ++i) driver.iterate(i);
      me.doing(round.text() + ": survivors end");
      return size;
    } catch (const PeerGone&) {
    }
  }
  fail(round.text() + ", rank " + std::to_string(me.rank) + ": no end of shrinking");
}

int run_child(const Round& round) {
  Job job(cuda_config());
  const Member& me = job.member(0);
  check(cudaSetDevice(me.device));
  say("P " + std::to_string(getpid()));
  {
    Driver driver(me, me.all, round, round.seed);
    try {
      for (int i = 0;; ++i) {
        if (i == 2) say("R");  // running
        driver.iterate(i);
      }
    } catch (const PeerGone&) {
      say("E " + std::to_string(driver.error_ns()));
    }
    say("S " + std::to_string(run_survivors(me, round)));
    me.doing(round.text() + ": synchronises the device");
    check(cudaDeviceSynchronize());
  }
  return 0;
}

// ---- the parent ----

std::vector<std::size_t> free_memory(int devices) {
  std::vector<std::size_t> bytes;
  for (int d = 0; d < devices; ++d) {
    std::size_t free = 0, total = 0;
    check(cudaSetDevice(d));
    check(cudaMemGetInfo(&free, &total));
    bytes.push_back(free);
  }
  return bytes;
}

struct Outcome {
  std::vector<double> us;  // from the kill to each survivor's error
  bool named = true;       // all errors have named the process
};

// What a line of that kind says; of several, the last. Empty: there is none.
std::string last_said(const Children& children, int rank, char kind) {
  std::string text;
  for (const std::string& line : children.said(rank)) {
    if (line.size() > 2 && line[0] == kind) text = line.substr(2);
  }
  return text;
}

// Whether all that the survivor was told says who has died.
bool all_named(const Children& children, int survivor, int victim, const std::string& where) {
  const std::string rank = "rank " + std::to_string(victim) + " is gone";
  const std::string process = "(" + last_said(children, victim, 'P') + ")";
  bool any = false, named = true;
  for (const std::string& line : children.said(survivor)) {
    if (line[0] != 'M') continue;
    any = true;
    if (line.find(rank) != std::string::npos && line.find(process) != std::string::npos) continue;
    named = false;
    std::printf("%s: survivor %d is not told that rank %d, process %s, is gone, but: %s\n",
                where.c_str(), survivor, victim, process.c_str(), line.c_str() + 2);
  }
  if (!any) std::printf("%s: survivor %d is told nothing\n", where.c_str(), survivor);
  return any && named;
}

// Ends the program where a survivor's error does not come, or a survivor fails.
Outcome run_round(int ranks, const Round& round) {
  std::mt19937_64 random(round.seed);
  const int victim = static_cast<int>(random() % static_cast<std::uint64_t>(ranks));
  const auto delay_us = static_cast<useconds_t>(random() % 200000);
  const std::string where = round.text();
  std::vector<std::string> arguments = {"--child",
                                        "--seed",
                                        std::to_string(round.seed),
                                        "--round",
                                        std::to_string(round.number),
                                        "--way",
                                        std::to_string(round.draw.way),
                                        "--kinds",
                                        std::to_string(round.draw.kinds),
                                        "--sizes",
                                        std::to_string(round.draw.sizes)};
  if (round.registered) arguments.emplace_back("--registered");
  Children children(ranks, arguments);
  const auto running = [&](int r) {
    return std::any_of(children.said(r).begin(), children.said(r).end(),
                       [](const std::string& line) { return line[0] == 'R'; });
  };
  const auto count = [&](const auto& is) {
    int n = 0;
    for (int r = 0; r < ranks; ++r) n += is(r) ? 1 : 0;
    return n;
  };
  const auto ended = [&](int r) { return children.ended(r); };
  children.until(60, [&] { return count(running) == ranks || count(ended) != 0; });
  if (count(running) != ranks || count(ended) != 0) {
    std::string who;
    for (int r = 0; r < ranks; ++r) {
      if (ended(r)) who += "; rank " + std::to_string(r) + " has ended";
      if (!ended(r) && !running(r)) who += "; rank " + std::to_string(r) + " does not run";
    }
    fail(where + ": not all processes began" + who);
  }
  usleep(delay_us);
  const std::uint64_t killed = now_ns();
  children.kill(victim);
  Watchdog::instance().doing(-1, where + ": waits for the survivors");
  // (Longer than a child waits before it says what it waits for: main().)
  children.until(60, [&] { return count(ended) == ranks; });
  // First who has failed: the others may only have lost that one as well.
  for (int r = 0; r < ranks; ++r) {
    if (r == victim || (ended(r) && children.status(r) == 0)) continue;
    const int status = ended(r) ? children.status(r) : 0;
    fail(where + ": survivor " + std::to_string(r) +
         (!ended(r)           ? " hangs"
          : WIFEXITED(status) ? " failed, exit code " + std::to_string(WEXITSTATUS(status))
                              : " ended by signal " + std::to_string(WTERMSIG(status))) +
         "; it has said " + std::to_string(children.said(r).size()) + " lines; rank " +
         std::to_string(victim) + " was killed");
  }
  Outcome outcome;
  for (int r = 0; r < ranks; ++r) {
    if (r == victim) continue;
    const std::string survivor = where + ": survivor " + std::to_string(r);
    const std::string error = last_said(children, r, 'E'), size = last_said(children, r, 'S');
    if (error.empty()) fail(survivor + " had no error");
    const std::uint64_t error_ns = std::strtoull(error.c_str(), nullptr, 10);
    if (error_ns < killed) {
      fail(survivor + " had an error before the death: " + last_said(children, r, 'M'));
    }
    if (size != std::to_string(ranks - 1)) fail(survivor + " ran with " + size + " ranks");
    outcome.us.push_back(static_cast<double>(error_ns - killed) * 1e-3);
    outcome.named = all_named(children, r, victim, where) && outcome.named;
  }
  return outcome;
}

// Bytes of GPU memory that have not come back after 10 s.
std::size_t missing_memory(const std::vector<std::size_t>& before) {
  std::size_t missing = 0;
  for (int i = 0; i < 100; ++i) {
    const std::vector<std::size_t> now = free_memory(static_cast<int>(before.size()));
    missing = 0;
    for (std::size_t d = 0; d < now.size(); ++d) {
      if (before[d] > now[d]) missing += before[d] - now[d];
    }
    if (missing <= std::size_t{4} << 20) break;
    usleep(100000);
  }
  return missing;
}

// An option that holds one of n choices; -1: each round has its own.
int choice(Options& options, const char* name, std::size_t n, const char* what) {
  const int value = options.integer(name, -1, what);
  if (value < -1 || value >= static_cast<int>(n)) {
    fail(std::string("--") + name + ": -1 to " + std::to_string(n - 1));
  }
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int rounds = options.integer("rounds", 20, "processes to kill");
  const int wanted = options.integer("ranks", 0, "processes; 0: one a GPU, 4 at most");
  const double most_ms = options.number("most-ms", 5000, "from the kill to the error");
  const bool registered = options.flag("registered", "outputs are registered");
  const Draw held{
      choice(options, "way", std::size(kWays),
             "0: beside streams, 1: streams wait, 2: in a stream; -1: drawn"),
      choice(options, "kinds", std::size(kKindSets),
             "0: all-reduce, 1: with a root, 2: without, 3: all of these; -1: drawn"),
      choice(options, "sizes", std::size(kSizeSets),
             "0: 4 B to 32 MiB, 1: to 16 KiB, 2: 1 to 8 MiB, 3: 16 to 64 MiB; -1: drawn")};
  const bool child = options.flag("child", "be one of the processes");
  const int number = options.integer("round", 0, "child: of which round");
  options.done(child ? 120 : 560, child ? 40 : 90);
  load_eagerly();
  if (child) {
    die_with_parent();
    if (held.way < 0 || held.kinds < 0 || held.sizes < 0) fail("a child draws nothing");
    return run_child({number, seed, held, registered});
  }

  const int devices = device_count();
  const int ranks = wanted > 0 ? wanted : std::min(4, devices);
  if (ranks < 2) fail("--ranks: one alone has no survivors");
  std::printf("kill: %d processes, %d rounds, seed %llu\n", ranks, rounds,
              static_cast<unsigned long long>(seed));
  free_memory(devices);  // makes this process's own contexts
  const std::vector<std::size_t> before = free_memory(devices);
  std::vector<double> all, last;
  bool ok = true;
  std::printf("%5s %20s %-10s %-11s %-11s %12s %12s %14s\n", "round", "seed", "calls", "kinds",
              "sizes", "first ms", "last ms", "bytes missing");
  const std::vector<Draw> draws = draw_rounds(static_cast<std::size_t>(std::max(0, rounds)), seed);
  for (int i = 0; i < rounds; ++i) {
    Round round{i, mix(seed, static_cast<std::uint64_t>(i)), draws[static_cast<std::size_t>(i)],
                registered};
    Draw& draw = round.draw;
    if (held.way >= 0) draw.way = held.way;
    if (held.kinds >= 0) draw.kinds = held.kinds;
    if (held.sizes >= 0) draw.sizes = held.sizes;
    Watchdog::instance().doing(-1, round.text());
    const Outcome outcome = run_round(ranks, round);
    const std::vector<double>& us = outcome.us;
    const std::size_t missing = missing_memory(before);
    const auto [least, most] = std::minmax_element(us.begin(), us.end());
    all.insert(all.end(), us.begin(), us.end());
    last.push_back(*most);
    ok = ok && outcome.named && *most < most_ms * 1e3 && missing <= std::size_t{4} << 20;
    std::printf("%5d %20llu %-10s %-11s %-11s %12.2f %12.2f %14zu\n", i,
                static_cast<unsigned long long>(round.seed), kWays[draw.way], draw.kind_set().name,
                draw.size_set().name, *least * 1e-3, *most * 1e-3, missing);
  }
  const Spread a = spread(all), l = spread(last);
  std::printf(
      "kill: error after %.2f ms (median; p90 %.2f, max %.2f), the last survivor's %.2f ms; "
      "the goal is 1000 ms\n",
      a.median * 1e-3, a.p90 * 1e-3, a.max * 1e-3, l.median * 1e-3);
  std::printf("kill: %s\n", ok ? "PASS" : "FAIL");
  return ok ? 0 : 1;
}
