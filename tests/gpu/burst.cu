// burst: what many calls beside a stream cost, of which each may be overtaken by any other, without
// a peer to compare with; and where their time goes. Ranks are threads of this process. Results are
// not looked at.
//
// Per round: calls under `keys` keys are made at once, then waited for. Prints us a call (rank 0;
// median, p10, p90), each rank's figures, and with --events, for the last round, how long each
// lane had calls in hand, and each event of the slowest.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

struct Settings {
  std::size_t bytes = 0;
  std::uint64_t seed = 0;
  int keys = 0, rounds = 0, events = 0, lane = 0;
  double slow_us = 0;
  bool shuffles = false, registered = false;
  std::string kind;
};

bool knows(const std::string& kind) {
  return kind == "all_reduce" || kind == "all_gather" || kind == "broadcast" ||
         kind == "reduce_scatter" || kind == "reduce";
}
void call(const Member& me, const Settings& s, const std::string& key, float* from, float* to,
          unjamRequest_t* request) {
  const std::size_t count = s.bytes / sizeof(float),
                    part = count / static_cast<std::size_t>(me.ranks);
  if (s.kind == "all_gather") {
    check(unjamAllGather(me.all, key.c_str(), from, to, part, UNJAM_FLOAT32, nullptr, request));
  } else if (s.kind == "broadcast") {
    check(unjamBroadcast(me.all, key.c_str(), from, to, count, UNJAM_FLOAT32, 0, nullptr, request));
  } else if (s.kind == "reduce") {
    check(unjamReduce(me.all, key.c_str(), from, to, count, UNJAM_FLOAT32, UNJAM_SUM, 0, nullptr,
                      request));
  } else if (s.kind == "reduce_scatter") {
    check(unjamReduceScatter(me.all, key.c_str(), from, to, part, UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                             request));
  } else {
    check(unjamAllReduce(me.all, key.c_str(), from, to, count, UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                         request));
  }
}

// (nvcc 13.0 fails on a vector of a struct without a name.)
struct TraceEvent : unjamTraceEvent_t {};

const char* name_of(std::uint16_t type) {
  constexpr const char* kNames[] = {"start", "preempt", "yield", "finish", "quit", "restart"};
  return type < std::size(kNames) ? kNames[type] : "?";
}

struct Trace {
  std::vector<TraceEvent> events;
  std::vector<std::uint64_t> hashes;  // of keys
  std::uint32_t round = 0;            // which of each key's uses
  std::uint64_t begin = ~std::uint64_t{0};

  Trace(const Member& me, const Settings& s, int last_round)
      : events(static_cast<std::size_t>(s.events) * 64),
        hashes(static_cast<std::size_t>(s.keys)),
        round(static_cast<std::uint32_t>(last_round)) {
    std::size_t n = 0;
    check(unjamGetTrace(me.context, events.data(), events.size(), &n));
    events.resize(n);
    for (std::size_t k = 0; k < hashes.size(); ++k) {
      check(unjamKeyHash(me.all, key_of(static_cast<int>(k)).c_str(), &hashes[k]));
    }
    for (const TraceEvent& e : events) {
      if (key(e) >= 0) begin = std::min(begin, e.time_ns);
    }
  }
  // -1: it is not of a call of the round.
  int key(const TraceEvent& e) const {
    if (e.type > UNJAM_TRACE_FINISH || e.n != round) return -1;
    const auto found = std::find(hashes.begin(), hashes.end(), e.key_hash);
    return found == hashes.end() ? -1 : static_cast<int>(found - hashes.begin());
  }
  double us(std::uint64_t time_ns) const { return static_cast<double>(time_ns - begin) * 1e-3; }
};

// Returns how long the lane was at the round.
double print_lane(const Member& me, const Trace& trace, int lane) {
  std::vector<int> in_hand(trace.hashes.size());
  int now = 0, starts = 0;  // now: in hand
  double busy = 0, since = 0, last = 0;
  for (const TraceEvent& e : trace.events) {
    const int k = e.lane == lane ? trace.key(e) : -1;
    if (k < 0) continue;
    last = trace.us(e.time_ns);
    int& hand = in_hand[static_cast<std::size_t>(k)];
    if (e.type == UNJAM_TRACE_START) {
      ++starts;
      if (hand++ == 0 && now++ == 0) since = last;
    } else if (hand != 0) {
      hand = 0;
      if (--now == 0) busy += last - since;
    }
  }
  if (starts != 0) {
    std::printf("rank %d lane %2d: %.1f us, of which %.1f with calls in hand, %d starts\n", me.rank,
                lane, last, busy, starts);
  }
  return last;
}

void print_events(const Member& me, const Trace& trace, int lane) {
  std::printf("rank %d lane %2d:\n", me.rank, lane);
  for (const TraceEvent& e : trace.events) {
    if (e.lane != lane || e.time_ns < trace.begin) continue;
    const int k = trace.key(e);
    std::printf("    %9.1f %-8s%s\n", trace.us(e.time_ns), name_of(e.type),
                k < 0 ? "" : key_of(k).c_str());
  }
}

// Of the last round: all lanes' times, and the events of that which was the longest at it on rank
// 0. Times are from the round's first event of each rank on.
void print_trace(const Member& me, const Settings& s, Barrier& barrier, int last_round) {
  static std::atomic<int> slowest{0};
  const Trace trace(me, s, last_round);
  double longest = 0;
  for (int r = 0; r < me.ranks; ++r) {
    for (int lane = 0; r == me.rank && lane < 64; ++lane) {
      const double us = print_lane(me, trace, lane);
      if (me.rank == 0 && us > longest) {
        longest = us;
        slowest = lane;
      }
    }
    barrier.meet();
  }
  for (int r = 0; r < me.ranks; ++r) {
    if (r == me.rank) print_events(me, trace, s.lane >= 0 ? s.lane : slowest.load());
    barrier.meet();
  }
}

void burst(const Member& me, const Settings& s, Barrier& barrier) {
  static std::atomic<bool> is_slow{false};
  const std::size_t all = 2 * s.bytes * static_cast<std::size_t>(s.keys);
  const DeviceMemory memory(all);
  check(cudaMemset(memory.get(), 0, all));
  check(cudaDeviceSynchronize());
  if (s.registered) check(unjamMemRegister(me.context, memory.get(), all));
  std::vector<double> us;
  std::vector<unjamRequest_t> requests(static_cast<std::size_t>(s.keys));
  std::vector<int> order(requests.size());
  for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<int>(k);
  std::mt19937_64 random(mix(s.seed, static_cast<std::uint64_t>(me.rank)));
  int round = 0;
  for (; round < s.rounds && !is_slow; ++round) {
    if (s.shuffles) std::shuffle(order.begin(), order.end(), random);
    barrier.meet();
    me.doing("calls");
    const std::uint64_t begin = now_ns();
    for (const int k : order) {
      const auto at = static_cast<std::size_t>(k);
      float* const from = memory.as<float>() + at * 2 * s.bytes / sizeof(float);
      call(me, s, key_of(k), from, from + s.bytes / sizeof(float), &requests[at]);
    }
    me.doing("waits");
    for (const int k : order) me.wait(requests[static_cast<std::size_t>(k)], "burst");
    if (round > 1) us.push_back(us_since(begin) / s.keys);
    if (me.rank == 0 && round > 1) is_slow = us.back() > s.slow_us;
    barrier.meet();
  }
  if (me.rank == 0) {
    const Spread x = spread(us);
    std::printf("%s of %zu bytes, %d outstanding: %.1f us a call (p10 %.1f, p90 %.1f, last %.1f)\n",
                s.kind.c_str(), s.bytes, s.keys, x.median, x.p10, x.p90, us.back());
  }
  if (s.events != 0) print_trace(me, s, barrier, round - 1);
  if (s.registered) check(unjamMemDeregister(me.context, memory.get()));
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  Settings s;
  s.seed = options.seed();
  s.kind = options.text("kind", "all_reduce", "or all_gather, reduce_scatter, broadcast, reduce");
  s.bytes = static_cast<std::size_t>(options.number("bytes", 1 << 26, "of the whole vector"));
  s.keys = options.integer("keys", 16, "calls at a time");
  s.rounds = options.integer("rounds", 12, "the first two are not counted");
  s.events = options.integer("events", 0, "kept a lane, and printed; 0: none");
  s.lane = options.integer("lane", -1, "whose events are printed; -1: the slowest");
  s.slow_us = options.number("slow", 1e9, "us a call; end with the first round that takes longer");
  s.shuffles = options.flag("shuffle", "each rank calls in an order of its own, each round anew");
  s.registered = options.flag("registered", "outputs are registered");
  const int ranks = options.integer("ranks", 0, "GPUs to use; 0: all");
  options.done(100, 20);
  if (!knows(s.kind)) fail("--kind: " + s.kind + " is none of those that --help names");
  if (s.keys < 1 || s.rounds < 3) fail("--keys must be positive, --rounds at least 3");
  load_eagerly();
  unjamConfig_t config = cuda_config();
  config.trace_events = static_cast<std::uint32_t>(s.events);
  const int wanted = ranks > 0 ? ranks : device_count();
  const Job job(wanted, config);
  Barrier barrier(wanted);
  job.run([&](const Member& me) { burst(me, s, barrier); });
  print_stats(job);
  return 0;
}
