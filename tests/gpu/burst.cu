// burst: what many calls beside a stream cost, of which each may be overtaken by any other, without
// a peer to compare with; and where their time goes. Ranks are threads of this process. Results are
// not looked at.
//
// Per round: calls under `keys` keys are made at once, then waited for. Prints us a call (rank 0;
// median, p10, p90), each rank's figures, and with --trace, for lanes named by --lanes, what share
// of the last round they had a call in hand, how long tries took, and each event of the last calls.
#include <algorithm>
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
  int keys = 0, rounds = 0, events = 0, lanes = 0;
  bool shuffles = false, registered = false;
  std::string kind;
};

std::string key_of(int k) {
  std::string key = "k";
  key += std::to_string(k);
  return key;
}

void call(const Member& me, const Settings& s, const std::string& key, float* from, float* to,
          unjamRequest_t* request) {
  const std::size_t count = s.bytes / sizeof(float),
                    part = count / static_cast<std::size_t>(me.ranks);
  if (s.kind == "all_gather") {
    check(unjamAllGather(me.all, key.c_str(), from, to, part, UNJAM_FLOAT32, nullptr, request));
  } else if (s.kind == "broadcast") {
    check(unjamBroadcast(me.all, key.c_str(), from, to, count, UNJAM_FLOAT32, 0, nullptr, request));
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

void print_trace(const Member& me, const Settings& s, std::uint64_t begin, std::uint64_t end) {
  std::vector<TraceEvent> events(static_cast<std::size_t>(s.events) * 64);
  std::size_t n = 0;
  check(unjamGetTrace(me.context, events.data(), events.size(), &n));
  std::vector<std::uint64_t> hashes(static_cast<std::size_t>(s.keys));
  for (std::size_t k = 0; k < hashes.size(); ++k) {
    check(unjamKeyHash(me.all, key_of(static_cast<int>(k)).c_str(), &hashes[k]));
  }
  for (int lane = 0; lane < 64; ++lane) {
    std::uint64_t busy = 0, since = 0, tries = 0, finished = 0, first = 0, last = 0;
    std::string lines;
    for (std::size_t i = 0; i < n; ++i) {
      const unjamTraceEvent_t& e = events[i];
      if (e.lane != lane || e.time_ns < begin || e.time_ns > end) continue;
      if (first == 0) first = e.time_ns;
      last = e.time_ns;
      if (e.type == UNJAM_TRACE_START) since = e.time_ns;
      if (since != 0 && e.type != UNJAM_TRACE_START && e.type <= UNJAM_TRACE_FINISH) {
        busy += e.time_ns - since;
        ++tries;
        if (e.type == UNJAM_TRACE_FINISH) ++finished;
        since = 0;
      }
      if (lane < s.lanes) {
        char line[96];
        const auto found = std::find(hashes.begin(), hashes.end(), e.key_hash);
        std::snprintf(line, sizeof(line), "    %9.1f %-8s k%d\n",
                      static_cast<double>(e.time_ns - begin) * 1e-3, name_of(e.type),
                      static_cast<int>(found - hashes.begin()));
        lines += line;
      }
    }
    if (first == 0) continue;
    std::printf(
        "rank %d lane %2d: events from %.1f to %.1f us, in hand %.0f %%, %llu tries, %llu "
        "finished\n%s",
        me.rank, lane, static_cast<double>(first - begin) * 1e-3,
        static_cast<double>(last - begin) * 1e-3,
        100.0 * static_cast<double>(busy) / static_cast<double>(last - first + 1),
        static_cast<unsigned long long>(tries), static_cast<unsigned long long>(finished),
        lines.c_str());
  }
}

void burst(const Member& me, const Settings& s, Barrier& barrier) {
  const std::size_t all = 2 * s.bytes * static_cast<std::size_t>(s.keys);
  const DeviceMemory memory(all);
  check(cudaMemset(memory.get(), 0, all));
  check(cudaDeviceSynchronize());
  if (s.registered) check(unjamMemRegister(me.context, memory.get(), all));
  std::vector<double> us;
  std::vector<unjamRequest_t> requests(static_cast<std::size_t>(s.keys));
  std::vector<int> order(requests.size());
  for (std::size_t k = 0; k < order.size(); ++k) order[k] = static_cast<int>(k);
  std::mt19937_64 random(static_cast<std::uint64_t>(me.rank));
  std::uint64_t begin = 0, end = 0;
  for (int round = 0; round < s.rounds; ++round) {
    if (s.shuffles) std::shuffle(order.begin(), order.end(), random);
    barrier.meet();
    me.doing("calls");
    begin = now_ns();
    for (const int k : order) {
      const auto at = static_cast<std::size_t>(k);
      float* const from = memory.as<float>() + at * 2 * s.bytes / sizeof(float);
      call(me, s, key_of(k), from, from + s.bytes / sizeof(float), &requests[at]);
    }
    me.doing("waits");
    for (const int k : order) me.wait(requests[static_cast<std::size_t>(k)], "burst");
    end = now_ns();
    if (round > 1) us.push_back(static_cast<double>(end - begin) * 1e-3 / s.keys);
  }
  barrier.meet();
  if (me.rank == 0) {
    const Spread x = spread(us);
    std::printf("%s of %zu bytes, %d outstanding: %.1f us a call (p10 %.1f, p90 %.1f)\n",
                s.kind.c_str(), s.bytes, s.keys, x.median, x.p10, x.p90);
  }
  for (int r = 0; r < me.ranks && s.events != 0; ++r) {
    if (r == me.rank) print_trace(me, s, begin, end);
    barrier.meet();
  }
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  Settings s;
  s.kind = options.text("kind", "all_reduce", "or all_gather, reduce_scatter, broadcast");
  s.bytes = static_cast<std::size_t>(options.number("bytes", 1 << 26, "of the whole vector"));
  s.keys = options.integer("keys", 16, "calls at a time");
  s.rounds = options.integer("rounds", 12, "the first two are not counted");
  s.events = options.integer("trace", 0, "events kept a lane; 0: no trace");
  s.lanes = options.integer("lanes", 1, "of whose events all are printed");
  s.shuffles = options.flag("shuffle", "each rank calls in an order of its own, each round anew");
  s.registered = options.flag("registered", "outputs are registered");
  const int ranks = options.integer("ranks", 0, "GPUs to use; 0: all");
  options.done(100, 20);
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
