// kill -9 of one of the processes of a job (one a GPU) at a random moment of running all-reduces,
// 20 times: the others get UNJAM_ERROR_PEER within a second, their GPUs go on working, they shrink
// the group and run checked collectives, and in the end all GPU memory is free again. With
// --registered peers store into the outputs themselves, also of the one that dies.
#include <signal.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <random>
#include <sstream>
#include <vector>

#include "tests/gpu/children.h"
#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr std::size_t kWindow = 4;
constexpr std::array<std::size_t, 6> kCounts = {1, 100, 4096, 65536, 1 << 20, 8 << 20};

// What a collective of a dead peer may end with. Anything else ends the program.
struct PeerGone {};

// A window of all-reduces of mixed sizes over one group, again and again.
class Driver {
 public:
  Driver(const Member& me, unjamGroup_t group, std::uint64_t seed, bool streams_wait,
         bool registered)
      : me_(me),
        group_(group),
        seed_(seed),
        streams_wait_(streams_wait),
        registered_(registered),
        reports_(kWindow) {
    check(unjamGroupSize(group, &size_));
    check(unjamGroupRank(group, &at_));
    Spec largest;
    largest.count = kCounts.back();
    for (DeviceMemory& m : memory_) {
      m = DeviceMemory(memory_of(largest));
      if (registered_) check(unjamMemRegister(me_.context, m.get(), memory_of(largest)));
    }
  }
  // Not before the others have ended the calls that have failed here.
  ~Driver() {
    for (const DeviceMemory& m : memory_) {
      if (!registered_) break;
      const unjamResult_t code = unjamMemDeregister(me_.context, m.get());
      if (code != UNJAM_ERROR_PEER) check(code);
    }
  }
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Throws PeerGone after all that was called has ended.
  void iterate(int iteration) {
    bool gone = false;
    std::size_t called = 0;
    for (std::size_t w = 0; w < kWindow && !gone; ++w) {
      Spec& s = spec_[w];
      s.seed = mix(seed_, static_cast<std::uint64_t>(iteration) * kWindow + w);
      s.count = kCounts[s.seed % kCounts.size()];
      s.size = size_;
      s.at = at_;
      place_[w] = place_in(memory_[w].get(), s);
      start_fill(s, place_[w], streams_[w].get());
      const unjamCallOptions_t options = ordered(UNJAM_STREAM_ASYNC, streams_[w]);
      request_[w] = nullptr;
      const unjamResult_t code =
          call(group_, ("w" + std::to_string(w)).c_str(), s, place_[w], &options, &request_[w]);
      gone = code == UNJAM_ERROR_PEER;
      if (gone) break;
      check(code);
      ++called;
      if (!streams_wait_) continue;
      const unjamResult_t waits = unjamStreamWait(request_[w], streams_[w].get());
      if (waits != UNJAM_ERROR_PEER) check(waits);  // it may have failed already
    }
    bool good[kWindow] = {};
    for (std::size_t w = 0; w < called; ++w) {
      if (streams_wait_) streams_[w].synchronize();  // must end, if the peer is gone too
      const unjamResult_t code = unjamWait(request_[w], -1);
      good[w] = code == UNJAM_SUCCESS;
      gone = gone || code == UNJAM_ERROR_PEER;
      if (!good[w] && code != UNJAM_ERROR_PEER) {
        fail(std::string("an all-reduce ended with ") + unjamGetErrorString(code) + ": " +
             unjamRequestError(request_[w]));
      }
      check(unjamRequestFree(request_[w]));
    }
    if (gone && error_ns_ == 0) error_ns_ = now_ns();
    for (std::size_t w = 0; w < called; ++w) {
      if (good[w]) start_check(spec_[w], place_[w], reports_.on_device(w), streams_[w].get());
      streams_[w].synchronize();
    }
    reports_.start_fetch(streams_[0].get());
    streams_[0].synchronize();
    for (std::size_t w = 0; w < called; ++w) {
      if (good[w]) finish_check(spec_[w], reports_[w], "rank " + std::to_string(me_.rank));
    }
    if (gone) throw PeerGone{};
  }

  std::uint64_t error_ns() const { return error_ns_; }

 private:
  const Member& me_;
  const unjamGroup_t group_;
  const std::uint64_t seed_;
  const bool streams_wait_, registered_;
  int size_ = 0, at_ = 0;
  Reports reports_;
  std::array<DeviceMemory, kWindow> memory_;
  Stream streams_[kWindow];
  std::array<Spec, kWindow> spec_;
  std::array<Place, kWindow> place_;
  std::array<unjamRequest_t, kWindow> request_{};
  std::uint64_t error_ns_ = 0;
};

// The survivors, until all know of the same absences.
int run_survivors(const Member& me, std::uint64_t seed, bool streams_wait, bool registered) {
  unjamGroup_t group = me.all;
  std::vector<std::unique_ptr<Driver>> drivers;  // to the end, see ~Driver()
  for (int attempt = 0; attempt < me.ranks; ++attempt) {
    me.doing("shrinks the group");
    check(unjamGroupShrink(group, "again", &group));
    int size = 0;
    check(unjamGroupSize(group, &size));
    drivers.push_back(std::make_unique<Driver>(me, group, mix(seed, 1), streams_wait, registered));
    Driver& driver = *drivers.back();
    try {
      for (int i = 0; i < 10; ++i) {
        me.doing("survivors, iteration " + std::to_string(i));
        driver.iterate(i);
      }
      return size;
    } catch (const PeerGone&) {
    }
  }
  fail("no end of shrinking");
}

int run_child(std::uint64_t seed, bool streams_wait, bool registered) {
  Job job(cuda_config());
  const Member& me = job.member(0);
  check(cudaSetDevice(me.device));
  {
    Driver driver(me, me.all, seed, streams_wait, registered);
    try {
      for (int i = 0;; ++i) {
        if (i == 2) say("R");  // running
        me.doing("iteration " + std::to_string(i));
        driver.iterate(i);
      }
    } catch (const PeerGone&) {
      say("E " + std::to_string(driver.error_ns()));
    }
    say("S " + std::to_string(run_survivors(me, seed, streams_wait, registered)));
    me.doing("synchronises the device");
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

// Microseconds from the kill to each survivor's error; ends the program where one does not come.
std::vector<double> run_round(int ranks, std::uint64_t seed, bool streams_wait, bool registered) {
  std::mt19937_64 random(seed);
  const int victim = static_cast<int>(random() % static_cast<std::uint64_t>(ranks));
  const auto delay_us = static_cast<useconds_t>(random() % 200000);
  std::vector<std::string> arguments = {"--child", "--seed", std::to_string(seed), "--streams-wait",
                                        streams_wait ? "1" : "0"};
  if (registered) arguments.emplace_back("--registered");
  Children children(ranks, arguments);
  const auto count = [&](char what) {
    int n = 0;
    for (int r = 0; r < ranks; ++r) {
      n += std::any_of(children.said(r).begin(), children.said(r).end(),
                       [&](const std::string& line) { return line[0] == what; });
    }
    return n;
  };
  const auto ended_early = [&] {
    for (int r = 0; r < ranks; ++r) {
      if (children.ended(r) && r != victim) return true;
    }
    return false;
  };
  const bool began =
      children.until(60, [&] { return count('R') == ranks || ended_early(); }) && !ended_early();
  if (!began) fail("not all processes began");
  usleep(delay_us);
  const std::uint64_t killed = now_ns();
  children.kill(victim);
  Watchdog::instance().doing(-1, "waits for the survivors");
  children.until(30, [&] {
    for (int r = 0; r < ranks; ++r) {
      if (!children.ended(r)) return false;
    }
    return true;
  });
  std::vector<double> us;
  for (int r = 0; r < ranks; ++r) {
    if (r == victim) continue;
    if (!children.ended(r) || children.status(r) != 0) {
      fail("survivor " + std::to_string(r) + " of seed " + std::to_string(seed) +
           (children.ended(r) ? " failed" : " hangs") + "; it has said " +
           std::to_string(children.said(r).size()) + " lines");
    }
    bool survived = false;
    for (const std::string& line : children.said(r)) {
      std::istringstream fields(line);
      std::string what;
      std::uint64_t number = 0;
      fields >> what >> number;
      if (what == "E") us.push_back(static_cast<double>(number - killed) * 1e-3);
      if (what == "S") survived = number == static_cast<std::uint64_t>(ranks - 1);
    }
    if (!survived) fail("survivor " + std::to_string(r) + " ran with another number of ranks");
  }
  if (us.size() != static_cast<std::size_t>(ranks - 1)) fail("not all survivors had the error");
  return us;
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

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int rounds = options.integer("rounds", 20, "processes to kill");
  const int wanted = options.integer("ranks", 0, "processes; 0: one a GPU, 4 at most");
  const double most_ms = options.number("most-ms", 5000, "from the kill to the error");
  const bool registered = options.flag("registered", "outputs are registered");
  const bool child = options.flag("child", "be one of the processes");
  const bool streams_wait =
      options.integer("streams-wait", 0, "child: streams wait for the collectives") != 0;
  options.done(child ? 120 : 560, child ? 40 : 90);
  load_eagerly();
  if (child) {
    die_with_parent();
    return run_child(seed, streams_wait, registered);
  }

  const int devices = device_count();
  const int ranks = wanted > 0 ? wanted : std::min(4, devices);
  std::printf("kill: %d processes, %d rounds, seed %llu\n", ranks, rounds,
              static_cast<unsigned long long>(seed));
  free_memory(devices);  // makes this process's own contexts
  const std::vector<std::size_t> before = free_memory(devices);
  std::vector<double> all, last;
  bool ok = true;
  std::printf("%5s %20s %-8s %12s %12s %14s\n", "round", "seed", "waits", "first ms", "last ms",
              "bytes missing");
  for (int i = 0; i < rounds; ++i) {
    const std::uint64_t s = mix(seed, static_cast<std::uint64_t>(i));
    Watchdog::instance().doing(-1, "round " + std::to_string(i));
    const std::vector<double> us = run_round(ranks, s, i % 2 == 1, registered);
    const std::size_t missing = missing_memory(before);
    const auto [least, most] = std::minmax_element(us.begin(), us.end());
    all.insert(all.end(), us.begin(), us.end());
    last.push_back(*most);
    ok = ok && *most < most_ms * 1e3 && missing <= std::size_t{4} << 20;
    std::printf("%5d %20llu %-8s %12.2f %12.2f %14zu\n", i, static_cast<unsigned long long>(s),
                i % 2 == 1 ? "stream" : "host", *least * 1e-3, *most * 1e-3, missing);
  }
  const Spread a = spread(all), l = spread(last);
  std::printf(
      "kill: error after %.2f ms (median; p90 %.2f, max %.2f), the last survivor's %.2f ms; "
      "the goal is 1000 ms\n",
      a.median * 1e-3, a.p90 * 1e-3, a.max * 1e-3, l.median * 1e-3);
  std::printf("kill: %s\n", ok ? "PASS" : "FAIL");
  return ok ? 0 : 1;
}
