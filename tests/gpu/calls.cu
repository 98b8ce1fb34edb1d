// calls: what calls in a stream cost back to back, without a peer to compare with. Ranks are
// threads of this process and may share a GPU, so one is enough.
//
// A kernel in front of the calls holds each stream until all ranks have issued a hundred, so that
// they run as fast as the device can. Per kind and size: us a call between events (rank 0, or
// the late one; median, p10 and p90 of rounds), and the issuing thread's us a call. Results are not
// looked at.
//
// --late: one rank, another each round, begins so much later than the others, which (from about 500
// us on; of 1 GiB from 2,300 on) have given up waiting for it by then. Its own us a call are what
// is printed, and how many calls of a round went through a rank's engine (the mean of all ranks and
// rounds): that some did must not stay with those that follow. --engine-share: fails if it were
// more than so many of all. (It is told on four GPUs: what reductions did wrong was hardly seen
// between two ranks.)
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/gpu/holds.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr int kAhead = 100;  // calls that are issued before the first begins
constexpr int kWarmUp = 20;

struct Kind {
  const char* name;
  unjamKind_t kind;
};
constexpr Kind kKinds[] = {{"all_reduce", UNJAM_ALL_REDUCE},
                           {"all_gather", UNJAM_ALL_GATHER},
                           {"reduce_scatter", UNJAM_REDUCE_SCATTER},
                           {"broadcast", UNJAM_BROADCAST},
                           {"reduce", UNJAM_REDUCE}};

// `count`: elements of the whole vector.
void call(const Member& me, const Kind& kind, const char* key, float* from, float* to,
          std::size_t count, cudaStream_t stream) {
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.stream = stream;
  options.stream_order = UNJAM_STREAM_SYNC;
  const std::size_t part = count / static_cast<std::size_t>(me.ranks);
  switch (kind.kind) {
    case UNJAM_ALL_REDUCE:
      return check(unjamAllReduce(me.all, key, from, to, count, UNJAM_FLOAT32, UNJAM_SUM, &options,
                                  nullptr));
    case UNJAM_ALL_GATHER:
      return check(unjamAllGather(me.all, key, from, to, part, UNJAM_FLOAT32, &options, nullptr));
    case UNJAM_REDUCE_SCATTER:
      return check(unjamReduceScatter(me.all, key, from, to, part, UNJAM_FLOAT32, UNJAM_SUM,
                                      &options, nullptr));
    case UNJAM_REDUCE:
      return check(unjamReduce(me.all, key, from, to, count, UNJAM_FLOAT32, UNJAM_SUM, 0, &options,
                               nullptr));
    default:
      return check(
          unjamBroadcast(me.all, key, from, to, count, UNJAM_FLOAT32, 0, &options, nullptr));
  }
}

struct Costs {
  std::vector<double> device_us, issue_us;      // of the rank that is timed, by round
  std::atomic<std::uint64_t> all{0}, quick{0};  // calls of all ranks; without their engine
};

// Which rank is timed, and how much later than the others it begins.
struct Timed {
  int rank = 0;
  std::uint64_t late_ns = 0;
};

void run_round(const Job& job, const Kind& kind, std::size_t bytes, int calls, Timed timed,
               volatile int* open, Costs& costs) {
  *open = 0;
  std::atomic<int> ahead{0};
  job.run([&](const Member& me) {
    me.doing(std::string(kind.name) + " of " + std::to_string(bytes) + " bytes");
    const Stream stream;
    const DeviceMemory from(bytes), to(bytes);
    check(cudaMemsetAsync(from.get(), 0, bytes, stream.get()));
    const std::string key = kind.name + std::to_string(bytes);
    const auto one = [&] {
      call(me, kind, key.c_str(), from.as<float>(), to.as<float>(), bytes / sizeof(float),
           stream.get());
    };
    for (int i = 0; i < kWarmUp; ++i) one();
    stream.synchronize();
    const Event begin, end;
    const std::uint64_t before = timed.late_ns != 0 ? without_engine(me.context) : 0;
    hold_kernel<><<<1, 1, 0, stream.get()>>>(open);
    if (timed.late_ns != 0 && me.rank == timed.rank) {
      spin_kernel<><<<1, 1, 0, stream.get()>>>(timed.late_ns);
    }
    check(cudaGetLastError());
    one();  // here the ranks' streams meet
    one();
    begin.record(stream);
    const std::uint64_t begun = now_ns();
    for (int i = 0; i < calls; ++i) {
      one();
      if (i + 1 == kAhead && ahead.fetch_add(1) + 1 == me.ranks) {
        *open = 1;
      }
    }
    const double issue = us_since(begun) / calls;
    end.record(stream);
    stream.synchronize();
    if (timed.late_ns != 0) {
      costs.all += static_cast<std::uint64_t>(calls) + 2;
      costs.quick += without_engine(me.context) - before;
    }
    if (me.rank != timed.rank) return;
    costs.device_us.push_back(us_between(begin, end) / calls);
    costs.issue_us.push_back(issue);
  });
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  const int ranks =
      options.integer("ranks", 2, "threads, each on the GPU of its number, or shared");
  const int calls = options.integer("calls", 300, "of a round, 100 to 2000");
  const int rounds = options.integer("rounds", 7, "of each kind and size");
  const double least = options.number("least", 1024, "bytes of the smallest, then 4 times as many");
  const double most = options.number("most", 4 << 20, "bytes of the largest");
  const std::string only = options.text("kind", "all", "this one alone");
  const double late_us = options.number("late", 0, "us that one rank begins later than the others");
  const double engine_share =
      options.number("engine-share", 1, "of the calls beside a late rank, at most");
  options.seed();
  options.done(300, 30);
  if (calls < kAhead || calls > 2000) fail("--calls: 100 to 2000: so many are under way");
  if (least < 1) fail("--least: at least 1");
  if (late_us != 0 && !(late_us >= 1 && late_us < 1e6)) fail("--late: 1 us to a second");
  if (engine_share < 1 && late_us == 0) fail("--engine-share: of calls beside a --late rank");
  const auto is_known = [&] {
    return only == "all" || std::any_of(std::begin(kKinds), std::end(kKinds),
                                        [&](const Kind& kind) { return only == kind.name; });
  };
  if (!is_known()) fail("--kind: all, all_reduce, all_gather, reduce_scatter, broadcast or reduce");
  load_eagerly();
  const Job job(ranks, cuda_config());
  const PinnedMemory open(sizeof(int));
  std::printf("calls: %d ranks on %d GPUs, %d calls, %d rounds; us a call\n", ranks,
              std::min(ranks, device_count()), calls, rounds);
  std::printf("%-15s %10s %9s %9s %9s %9s%s\n", "kind", "bytes", "median", "p10", "p90", "issue",
              late_us > 0 ? "    engine" : "");
  // (Ranks that share a GPU wait for each other's SMs as well.)
  const bool judges = ranks <= device_count();
  if (engine_share < 1 && !judges) std::printf("ranks share GPUs: --engine-share is not judged\n");
  bool too_many = false;
  for (const Kind& kind : kKinds) {
    if (only != "all" && only != kind.name) continue;
    for (auto size = static_cast<std::size_t>(least); static_cast<double>(size) <= most;
         size *= 4) {
      // Parts that are alike, and aligned.
      const std::size_t step = static_cast<std::size_t>(ranks) * 16;
      const std::size_t bytes = std::max(size / step, std::size_t{1}) * step;
      Costs costs;
      for (int i = 0; i < rounds; ++i) {
        const Timed timed{late_us > 0 ? i % ranks : 0, static_cast<std::uint64_t>(late_us * 1e3)};
        run_round(job, kind, bytes, calls, timed, open.as<int>(), costs);
      }
      const Spread device = spread(costs.device_us);
      std::printf("%-15s %10zu %9.2f %9.2f %9.2f %9.2f", kind.name, bytes, device.median,
                  device.p10, device.p90, spread(costs.issue_us).median);
      if (late_us > 0) {
        const auto all = static_cast<double>(costs.all);
        const double share = (all - static_cast<double>(costs.quick)) / all;
        std::printf(" %9.1f", share * (calls + 2));
        too_many = too_many || (judges && share > engine_share);
      }
      std::printf("\n");
      std::fflush(stdout);
    }
  }
  if (too_many) fail("calls: more of them went through the engine than --engine-share");
  std::printf("calls: all came to an end\n");
  return 0;
}
