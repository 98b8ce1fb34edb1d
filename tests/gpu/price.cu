// What preemption costs: the latency of an all-reduce of one number; a small urgent all-reduce
// beside a progressing one of 1 GiB; context switches; the paper's Fig. 7, what an engine does
// about a call besides moving its data; what the host's threads take meanwhile; and its Fig. 11,
// several GPUs of which one is late, with the fixed and the adaptive policy. Tables for people, CSV
// lines ("csv,…") of Fig. 11 for plots.
#include <algorithm>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/job.h"
#include "tests/support/json.h"

namespace {

using namespace unjam_gpu;

std::string key_name(std::size_t k) { return std::string(1, static_cast<char>('A' + k)); }

void print_spread(const char* what, const std::vector<double>& us) {
  const Spread s = spread(us);
  std::printf("%-52s %10.2f %10.2f %10.2f %10.2f\n", what, s.median, s.p10, s.p90, s.max);
}
void print_head(const char* title) {
  std::printf("\n%-52s %10s %10s %10s %10s\n", title, "median us", "p10", "p90", "max");
}

// In place, of floats that are all zero: what is sent does not matter here.
unjamRequest_t start(const Member& me, const char* key, float* data, std::size_t floats) {
  unjamRequest_t request = nullptr;
  check(
      unjamAllReduce(me.all, key, data, data, floats, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &request));
  return request;
}

DeviceMemory zeros(std::size_t floats) {
  DeviceMemory memory(floats * sizeof(float));
  check(cudaMemset(memory.get(), 0, floats * sizeof(float)));
  check(cudaDeviceSynchronize());
  return memory;
}

// Whether calls are tried whole, or go by slices only, of contexts that begin meanwhile.
class Whole {
 public:
  explicit Whole(bool whole) {
    if (const char* users = std::getenv(kName)) kept_ = users;
    setenv(kName, whole ? "1" : "0", 1);
  }
  Whole(const Whole&) = delete;
  Whole& operator=(const Whole&) = delete;
  ~Whole() { kept_ ? setenv(kName, kept_->c_str(), 1) : unsetenv(kName); }

 private:
  static constexpr const char* kName = "UNJAM_IN_STREAM";
  std::optional<std::string> kept_;
};

unjamStats_t difference(const unjamStats_t& a, const unjamStats_t& b) {
  unjamStats_t d = b;
  d.preemptions -= a.preemptions;
  d.quantum_switches -= a.quantum_switches;
  d.context_loads -= a.context_loads;
  d.context_saves -= a.context_saves;
  d.spins -= a.spins;
  d.slices -= a.slices;
  d.starts -= a.starts;
  d.quits -= a.quits;
  return d;
}

// ---- one number, from the call to its completion ----

struct Latencies {
  std::vector<double> call, wait, callback;
};

struct Completion {
  std::atomic<std::uint64_t> ns{0};
};
void note_completion(unjamResult_t, void* user) { static_cast<Completion*>(user)->ns = now_ns(); }

void measure_latency(int ranks, int repeats) {
  Job job(ranks, cuda_config());
  Latencies l;
  std::vector<double> in_stream, pipelined;
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    const bool first = me.rank == 0;
    const DeviceMemory data = zeros(1);
    unjamCollective_t collective = nullptr;
    check(unjamRegisterAllReduce(me.all, "tiny", UNJAM_FLOAT32, UNJAM_SUM, 0, &collective));
    for (int i = -20; i < repeats; ++i) {
      me.doing("one number, waits, " + std::to_string(i));
      barrier.meet();
      const std::uint64_t begin = now_ns();
      unjamRequest_t request = nullptr;
      check(unjamRun(collective, data.get(), data.get(), 1, nullptr, nullptr, &request));
      const double called = us_since(begin);
      me.wait(request, "one number");
      if (!first || i < 0) continue;
      l.call.push_back(called);
      l.wait.push_back(us_since(begin));
    }
    for (int i = -20; i < repeats; ++i) {
      me.doing("one number, callback, " + std::to_string(i));
      barrier.meet();
      Completion done;
      const std::uint64_t begin = now_ns();
      check(unjamRun(collective, data.get(), data.get(), 1, note_completion, &done, nullptr));
      while (done.ns == 0) std::this_thread::yield();
      if (first && i >= 0) l.callback.push_back(static_cast<double>(done.ns - begin) * 1e-3);
    }
    me.doing("one number, in a stream");
    const Stream stream;
    const Event begin, end;
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.stream = stream.get();
    options.stream_order = UNJAM_STREAM_SYNC;
    for (int i = -2; i < 10; ++i) {
      stream.synchronize();
      barrier.meet();
      begin.record(stream);
      constexpr int kQueued = 1000;
      for (int q = 0; q < kQueued; ++q) {
        check(unjamRunWithOptions(collective, data.get(), data.get(), 1, &options, nullptr));
      }
      end.record(stream);
      stream.synchronize();
      if (first && i >= 0) in_stream.push_back(us_between(begin, end) / kQueued);
    }
    me.doing("one number, 64 outstanding");
    for (int i = -2; i < 10; ++i) {
      barrier.meet();
      const std::uint64_t from = now_ns();
      std::vector<unjamRequest_t> requests(64);
      for (unjamRequest_t& q : requests) {
        check(unjamRun(collective, data.get(), data.get(), 1, nullptr, nullptr, &q));
      }
      for (const unjamRequest_t q : requests) me.wait(q, "one of 64");
      if (first && i >= 0) pipelined.push_back(us_since(from) / 64);
    }
    check(unjamDeregister(collective));
  });
  print_head("an all-reduce of one float");
  print_spread("the call alone", l.call);
  print_spread("call to unjamWait's return", l.wait);
  print_spread("call to callback", l.callback);
  print_spread("in-stream, each of 1,000 queued", in_stream);
  print_spread("each of 64 outstanding of one key", pipelined);
}

// ---- the host's threads ----

// Of all threads of this process, which sleep meanwhile as far as they are the test's: cores.
double cpu_in_a_second() {
  const auto cpu_s = [] {
    timespec t{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
  };
  const double before = cpu_s();
  const std::uint64_t begin = now_ns();
  std::this_thread::sleep_for(std::chrono::seconds(1));
  return (cpu_s() - before) / (us_since(begin) * 1e-6);
}

void measure_cpu(int ranks) {
  Job job(ranks, cuda_config());
  std::barrier barrier(ranks);  // (who waits there sleeps)
  job.run([&](const Member& me) {
    const bool last = me.rank == me.ranks - 1;
    const DeviceMemory data = zeros(1);
    const auto print = [&](const char* what) {
      if (last) std::printf("%-52s %10.3f\n", what, cpu_in_a_second() / me.ranks);
    };
    me.doing("nothing");
    me.wait(start(me, "all", data.as<float>(), 1), "one number");
    barrier.arrive_and_wait();
    if (last) std::printf("\n%-52s %10s\n", "threads of the host", "cores a rank");
    print("nothing is pending");
    barrier.arrive_and_wait();
    me.doing("a call that the last rank is late for");
    unjamRequest_t request = nullptr;
    if (!last) request = start(me, "late", data.as<float>(), 1);
    barrier.arrive_and_wait();
    print("a call is, which the last rank has yet to make");
    barrier.arrive_and_wait();
    if (last) {
      print("the others wait for it in unjamWait");
      request = start(me, "late", data.as<float>(), 1);
    }
    me.wait(request, "the late one");
  });
}

// ---- a small urgent one beside a large one ----

enum class Way { kPriority, kFifo, kInStreams };
constexpr const char* kWays[] = {"priority order", "FIFO order", "each in a stream of its own"};

// In place, of floats that are all zero. The host waits for the request, or for the stream.
class Started {
 public:
  Started(const Member& me, Way way, const char* key, const DeviceMemory& data, std::size_t floats,
          int priority, const Stream& stream)
      : me_(me), stream_(way == Way::kInStreams ? &stream : nullptr) {
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.priority = priority;
    if (stream_ != nullptr) {
      options.stream = stream_->get();
      options.stream_order = UNJAM_STREAM_SYNC;
    }
    check(unjamAllReduce(me.all, key, data.get(), data.get(), floats, UNJAM_FLOAT32, UNJAM_SUM,
                         &options, stream_ == nullptr ? &request_ : nullptr));
  }
  bool done() const {
    if (stream_ != nullptr) {
      const cudaError_t state = cudaStreamQuery(stream_->get());
      if (state != cudaErrorNotReady) check(state);
      return state == cudaSuccess;
    }
    int done = 0;
    check(unjamTest(request_, &done));
    return done != 0;
  }
  void wait(const char* what) const {
    stream_ != nullptr ? stream_->synchronize() : me_.wait(request_, what);
  }

 private:
  const Member& me_;
  const Stream* stream_;
  unjamRequest_t request_ = nullptr;
};

void measure_urgent(int ranks, int repeats, std::size_t large_bytes, Way way) {
  unjamConfig_t config = cuda_config();
  config.order = way == Way::kPriority ? UNJAM_ORDER_PRIORITY : UNJAM_ORDER_FIFO;
  Job job(ranks, config);
  constexpr std::size_t kSmall = 8192 / sizeof(float);
  const std::size_t large = large_bytes / sizeof(float);
  std::vector<double> alone, beside, large_alone, large_beside;
  int overtaken = 0;
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    const bool first = me.rank == 0;
    const DeviceMemory big = zeros(large), small = zeros(kSmall);
    const Stream large_stream, small_stream;
    const auto start_large = [&] { return Started(me, way, "large", big, large, 0, large_stream); };
    const auto start_small = [&] {
      return Started(me, way, "small", small, kSmall, 10, small_stream);
    };
    for (int i = -3; i < repeats; ++i) {
      me.doing("the small one alone, " + std::to_string(i));
      barrier.meet();
      std::uint64_t begin = now_ns();
      start_small().wait("the small one");
      if (first && i >= 0) alone.push_back(us_since(begin));
      me.doing("the large one alone, " + std::to_string(i));
      barrier.meet();
      begin = now_ns();
      start_large().wait("the large one");
      if (first && i >= 0) large_alone.push_back(us_since(begin));

      me.doing("the small one beside the large one, " + std::to_string(i));
      barrier.meet();
      begin = now_ns();
      const Started slow = start_large();
      usleep(500 + static_cast<useconds_t>(i < 0 ? 0 : i) * 37 % 1000);
      barrier.meet();
      const std::uint64_t urgent = now_ns();
      start_small().wait("the small one");
      const double us = us_since(urgent);
      const bool done = slow.done();
      slow.wait("the large one");
      if (!first || i < 0) continue;
      beside.push_back(us);
      large_beside.push_back(us_since(begin));
      overtaken += !done;
    }
  });
  char title[80];
  std::snprintf(title, sizeof(title), "8 KiB beside %.0f MiB, %s",
                static_cast<double>(large_bytes) / (1 << 20), kWays[static_cast<int>(way)]);
  print_head(title);
  print_spread("8 KiB alone", alone);
  print_spread("8 KiB beside the large one", beside);
  print_spread("the large one alone", large_alone);
  print_spread("the large one, with the small one between", large_beside);
  std::printf("the small one was done before the large one in %d of %d\n", overtaken, repeats);
}

// ---- context switches ----

struct Alternation {
  double us = 0;         // of all calls
  unjamStats_t stats{};  // of rank 0, all repetitions
};

// More keys than a lane has contexts at hand.
constexpr std::size_t kAlternating = 16;

Alternation alternate(int ranks, int repeats, bool whole, std::uint64_t seed) {
  constexpr std::size_t kKeys = kAlternating, kFloats = std::size_t{4} << 18;  // 4 MiB
  const Whole set(whole);
  Job job(ranks, cuda_config());
  Alternation a;
  std::vector<double> us;
  unjamStats_t before{};
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    const DeviceMemory data = zeros(kKeys * kFloats);
    std::mt19937_64 random(mix(seed, static_cast<std::uint64_t>(me.rank)));
    for (int i = -3; i < repeats; ++i) {
      me.doing("some that alternate, " + std::to_string(i));
      if (i == 0 && me.rank == 0) before = stats_of(me.context);
      std::vector<std::size_t> order(kKeys);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), random);
      std::vector<unjamRequest_t> requests;
      barrier.meet();
      const std::uint64_t begin = now_ns();
      for (const std::size_t k : order) {
        requests.push_back(start(me, key_name(k).c_str(), data.as<float>() + k * kFloats, kFloats));
      }
      for (const unjamRequest_t q : requests) me.wait(q, "one of them");
      if (me.rank == 0 && i >= 0) us.push_back(us_since(begin));
    }
    if (me.rank == 0) a.stats = difference(before, stats_of(me.context));
  });
  a.us = spread(us).median;
  return a;
}

void measure_switches(int ranks, int repeats, std::uint64_t seed) {
  std::printf("\n%zu x 4 MiB in random orders%4s %12s %14s %14s %12s %16s\n", kAlternating, "",
              "us for all", "loads/lane/rep", "saves/lane/rep", "preempt", "switches/s/lane");
  for (const bool whole : {true, false}) {
    const Alternation a = alternate(ranks, repeats, whole, seed);
    const double per = static_cast<double>(a.stats.lanes) * repeats;
    const double loads = static_cast<double>(a.stats.context_loads) / per;
    std::printf("%-32s %12.1f %14.1f %14.1f %12.1f %16.0f\n", whole ? "whole" : "by slices", a.us,
                loads, static_cast<double>(a.stats.context_saves) / per,
                static_cast<double>(a.stats.preemptions) / per, loads / (a.us * 1e-6));
  }
}

// ---- Fig. 7: an engine's steps ----

constexpr const char* kSteps[] = {"read_sqe", "prepare", "load_context", "save_context",
                                  "write_cqe"};

struct Steps {
  std::uint64_t count = 0, ns = 0;
};
// Of all lanes of a rank, since it began.
std::map<std::string, Steps> steps_of(const Member& me) {
  std::map<std::string, Steps> all;
  const unjam_test::Json info_json = unjam_test::JsonReader::parse(info(me.context));
  for (const unjam_test::Json& lane : info_json["lanes"].array) {
    for (const char* name : kSteps) {
      const unjam_test::Json& step = lane["steps"][name];
      all[name].count += static_cast<std::uint64_t>(step["count"].number);
      all[name].ns += static_cast<std::uint64_t>(step["ns"].number);
    }
  }
  return all;
}

// Means on rank 0, of the first keys' calls, which alternate where they are several. `whole`: calls
// are done whole where they can be, as usual; else all go slice by slice, with contexts.
void measure_steps(int ranks, int repeats, std::size_t keys, std::size_t floats, bool whole) {
  unjamConfig_t config = cuda_config();
  config.trace_events = 64;  // steps are timed while traces are kept
  const Whole set(whole);
  Job job(ranks, config);
  std::map<std::string, Steps> before, after;
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    const DeviceMemory data = zeros(keys * floats);
    for (int i = -20; i < repeats; ++i) {
      me.doing("an engine's steps, " + std::to_string(i));
      barrier.meet();
      if (i == 0 && me.rank == 0) before = steps_of(me);
      std::vector<unjamRequest_t> requests;
      for (std::size_t k = 0; k < keys; ++k) {
        requests.push_back(start(me, key_name(k).c_str(), data.as<float>() + k * floats, floats));
      }
      for (const unjamRequest_t q : requests) me.wait(q, "one of the calls");
    }
    if (me.rank == 0) after = steps_of(me);
  });
  for (const char* name : kSteps) {
    const std::uint64_t count = after[name].count - before[name].count;
    const double us = static_cast<double>(after[name].ns - before[name].ns) * 1e-3;
    std::printf("%-14s %2zu x %-10zu %-7s %12.2f %12.3f\n", name, keys, floats * sizeof(float),
                whole ? "whole" : "slices", static_cast<double>(count) / repeats,
                count == 0 ? 0.0 : us / static_cast<double>(count));
  }
}

// ---- Fig. 11: one is late ----

struct Seen {
  std::uint64_t submitted_ns = 0, finished_ns = 0;
  std::uint32_t switches = 0, preemptions = 0;
  double queue = 0;  // pending collectives, itself too, mean over the time that it was pending
};

// What the trace tells of round n: events of all lanes; finished: on the last lane.
void read_trace(const Member& me, std::uint32_t round, std::vector<Seen>& seen) {
  // (No vector: nvcc 13.0 fails on one of a struct that has a name by typedef only.)
  constexpr std::size_t kMostEvents = 1 << 16;
  const auto events = std::make_unique<unjamTraceEvent_t[]>(kMostEvents);
  std::size_t count = 0;
  check(unjamGetTrace(me.context, events.get(), kMostEvents, &count));
  std::vector<std::uint64_t> hashes(seen.size());
  for (std::size_t k = 0; k < seen.size(); ++k) {
    check(unjamKeyHash(me.all, key_name(k).c_str(), &hashes[k]));
  }
  for (std::size_t i = 0; i < count; ++i) {
    const unjamTraceEvent_t& e = events[i];
    if (e.type > UNJAM_TRACE_FINISH || e.n != round) continue;
    for (std::size_t k = 0; k < seen.size(); ++k) {
      if (e.key_hash != hashes[k]) continue;
      seen[k].switches += e.type == UNJAM_TRACE_START;
      seen[k].preemptions += e.type == UNJAM_TRACE_PREEMPT;
      if (e.type == UNJAM_TRACE_FINISH) {
        seen[k].finished_ns = std::max(seen[k].finished_ns, e.time_ns);
      }
    }
  }
  for (Seen& s : seen) {
    if (s.finished_ns <= s.submitted_ns) continue;  // the trace does not tell
    for (const Seen& other : seen) {
      const std::uint64_t from = std::max(s.submitted_ns, other.submitted_ns);
      const std::uint64_t to = std::min(s.finished_ns, other.finished_ns);
      if (to > from) {
        s.queue +=
            static_cast<double>(to - from) / static_cast<double>(s.finished_ns - s.submitted_ns);
      }
    }
  }
}

void measure_late(int ranks, int rounds, unjamPolicy_t policy, std::uint64_t seed) {
  constexpr std::size_t kKeys = 8, kFloats = std::size_t{1} << 18;  // 1 MiB
  unjamConfig_t config = cuda_config();
  config.policy = policy;
  config.trace_events = 1 << 12;
  Job job(ranks, config);
  const char* name = policy == UNJAM_POLICY_FIXED ? "fixed" : "adaptive";
  std::vector<double> total(static_cast<std::size_t>(rounds));
  std::vector<double> lengths, switches, preemptions;
  std::mutex mutex;
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    const DeviceMemory data = zeros(kKeys * kFloats);
    for (int round = 0; round < rounds; ++round) {
      me.doing(std::string("one is late, ") + name + ", round " + std::to_string(round));
      std::mt19937_64 common(mix(seed, static_cast<std::uint64_t>(round)));
      const int late = static_cast<int>(common() % static_cast<std::uint64_t>(ranks));
      const auto delay = static_cast<useconds_t>(common() % 2000);
      std::mt19937_64 own(mix(common(), static_cast<std::uint64_t>(me.rank)));
      std::vector<std::size_t> order(kKeys);
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(), own);
      std::vector<Seen> seen(kKeys);
      std::vector<unjamRequest_t> requests;
      barrier.meet();
      if (me.rank == late) usleep(delay);
      const std::uint64_t begin = now_ns();
      for (const std::size_t k : order) {
        seen[k].submitted_ns = now_ns();
        requests.push_back(start(me, key_name(k).c_str(), data.as<float>() + k * kFloats, kFloats));
      }
      for (const unjamRequest_t q : requests) me.wait(q, "one of eight");
      const double us = us_since(begin);
      read_trace(me, static_cast<std::uint32_t>(round), seen);
      const auto lanes = static_cast<double>(stats_of(me.context).lanes);
      std::lock_guard lock(mutex);
      if (me.rank != late) total[static_cast<std::size_t>(round)] += us / (ranks - 1);
      for (std::size_t position = 0; position < kKeys; ++position) {
        const Seen& s = seen[order[position]];
        lengths.push_back(s.queue);
        switches.push_back(s.switches / lanes);
        preemptions.push_back(s.preemptions / lanes);
        std::printf("csv,%s,%d,%d,%d,%u,%s,%zu,%.2f,%.2f,%.2f,%.1f\n", name, round, me.rank, late,
                    static_cast<unsigned>(delay), key_name(order[position]).c_str(), position,
                    s.preemptions / lanes, s.switches / lanes, s.queue,
                    s.finished_ns < s.submitted_ns
                        ? -1.0
                        : static_cast<double>(s.finished_ns - s.submitted_ns) * 1e-3);
      }
    }
  });
  const auto mean = [](const std::vector<double>& v) {
    return std::accumulate(v.begin(), v.end(), 0.0) / static_cast<double>(v.size());
  };
  std::printf(
      "%-10s: a collective has %.2f preemptions, %.2f context switches a lane; queue length "
      "%.2f; %.1f us for the eight (median; without the late rank's)\n",
      name, mean(preemptions), mean(switches), mean(lengths), spread(total).median);
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all, 4 at most");
  const std::uint64_t seed = options.seed();
  const int repeats = options.integer("repeats", 1000, "of the small measurements");
  const int large_repeats = options.integer("large-repeats", 50, "of those with a large one");
  const int rounds = options.integer("rounds", 20, "of those where one is late");
  const auto large = static_cast<std::size_t>(options.number("large", 1 << 30, "bytes"));
  const std::string only =
      options.text("only", "", "latency, cpu, urgent, switches, steps or late");
  options.done(300, 60);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : std::min(4, device_count());
  std::printf("price: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  const auto runs = [&](const char* name) { return only.empty() || only == name; };
  if (runs("latency")) measure_latency(ranks, repeats);
  if (runs("cpu")) measure_cpu(ranks);
  if (runs("urgent")) {
    for (const Way way : {Way::kPriority, Way::kFifo, Way::kInStreams}) {
      measure_urgent(ranks, large_repeats, large, way);
    }
  }
  if (runs("switches")) measure_switches(ranks, large_repeats, seed);
  if (runs("steps")) {
    std::printf("\n%-14s %-15s %-7s %12s %12s\n", "step (Fig. 7)", "calls x bytes", "", "a round",
                "mean us");
    for (const bool whole : {true, false}) {
      measure_steps(ranks, repeats, 1, 1, whole);
      measure_steps(ranks, large_repeats, 8, std::size_t{1} << 20, whole);
    }
  }
  if (runs("late")) {
    std::printf(
        "\ncsv,policy,round,rank,late_rank,late_us,key,position,preemptions_a_lane,"
        "context_switches_a_lane,queue_length,latency_us\n");
    measure_late(ranks, rounds, UNJAM_POLICY_FIXED, seed);
    measure_late(ranks, rounds, UNJAM_POLICY_ADAPTIVE, seed);
  }
  std::printf("price: PASS\n");
  return 0;
}
