// Programs that no planner makes (tests/support/written_programs.h), on GPUs: trees and two levels,
// whose sets are neither one rank nor all others. The library's own make_plan() is replaced by one
// that gives what is asked for (written_plans.cc), so this program has the library inside. Says
// which ranks' plans run without the engine, and why others do not.
#include <cstdio>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"
#include "tests/gpu/written_plans.h"

namespace {

using namespace unjam_gpu;

struct Case {
  Written written;
  const char* name;
  unjamKind_t kind;
};
constexpr Case kCases[] = {
    {Written::kTreeBroadcast, "tree broadcast", UNJAM_BROADCAST},
    {Written::kLaggingTreeBroadcast, "tree broadcast, lag 1", UNJAM_BROADCAST},
    {Written::kTreeReduce, "tree reduce", UNJAM_REDUCE},
    {Written::kTwoLevels, "two levels", UNJAM_ALL_REDUCE},
    {Written::kTwoLevelsApart, "two levels, 1 apart", UNJAM_ALL_REDUCE},
    {Written::kHalves, "broadcast in halves", UNJAM_BROADCAST},
};
constexpr std::size_t kCounts[] = {1, 1000, 262144, (std::size_t{4} << 20) + 3};
constexpr unjamDataType_t kDTypes[] = {UNJAM_FLOAT32, UNJAM_INT32, UNJAM_BFLOAT16};

std::size_t most_memory(int ranks) {
  Spec s;
  s.count = kCounts[3];
  s.size = ranks;
  return memory_of(s);
}

void run_case(const Member& me, const Spec& spec, const std::string& key, bool in_stream,
              void* memory, const Reports& reports, const Stream& stream) {
  Spec s = spec;
  s.at = me.rank;
  const Place place = place_in(memory, s);
  const std::string what = key + ": " + s.text();
  me.doing(what);
  start_fill(s, place, stream.get());
  if (!in_stream) stream.synchronize();
  const unjamCallOptions_t options =
      ordered(in_stream ? UNJAM_STREAM_SYNC : UNJAM_STREAM_NONE, stream);
  unjamRequest_t request = nullptr;
  check(call(me.all, key.c_str(), s, place, in_stream ? &options : nullptr, &request));
  me.wait(request, what);
  start_check(s, place, reports.on_device(0), stream.get());
  reports.start_fetch(stream.get());
  stream.synchronize();
  finish_check(s, reports[0], what + ", rank " + std::to_string(me.rank));
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const int ranks = options.integer("ranks", 4, "of the job: an even number, from 4 on");
  const int repeats = options.integer("repeats", 3, "of each case; every other one is in place");
  const std::uint64_t seed = options.seed();
  options.done(180, 20);
  if (ranks < 4 || ranks % 2 != 0) fail("an even number of ranks, from 4 on");
  load_eagerly();
  Job job(ranks, cuda_config());
  const std::size_t memory = most_memory(ranks);
  std::size_t cases = 0;
  for (const Case& c : kCases) {
    set_written(c.written);
    std::vector<std::uint64_t> before(static_cast<std::size_t>(ranks)), after = before;
    std::size_t calls = 0;
    job.run([&](const Member& me) {
      const auto at = static_cast<std::size_t>(me.rank);
      before[at] = without_engine(me.context);
      const Stream stream;
      const DeviceMemory device(memory);
      const Reports reports(1);
      std::size_t n = 0;
      for (const std::size_t count : kCounts) {
        for (const unjamDataType_t dtype : kDTypes) {
          for (int i = 0; i < 2 * repeats; ++i, ++n) {
            Spec s;
            s.kind = c.kind;
            s.dtype = dtype;
            s.count = count;
            s.seed = mix(seed, n);
            s.root = static_cast<int>(n) % ranks;
            s.in_place = i % 2 == 1;
            s.size = ranks;
            // (A key's plan is made once for equal calls: its name says which program's it is.)
            const std::string key = std::string(c.name) + (i < repeats ? "" : ", in no stream");
            run_case(me, s, key, i < repeats, device.get(), reports, stream);
          }
        }
      }
      if (me.rank == 0) calls = n;
      after[at] = without_engine(me.context);
    });
    cases += calls;
    std::printf("%-24s %zu calls a rank right; without the engine, by rank:", c.name, calls);
    for (std::size_t r = 0; r < after.size(); ++r) {
      std::printf(" %llu", static_cast<unsigned long long>(after[r] - before[r]));
    }
    std::printf("\n");
  }
  std::printf("why not, of all: %s\n", lowering_reasons().c_str());
  std::printf("written: PASS, %zu calls on %d ranks\n", cases, ranks);
  return 0;
}
