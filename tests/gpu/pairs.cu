// Groups of two in a job of more ranks than a kernel has places for (kMostPlaces): their calls need
// no engine all the same. Ranks r and r + half of the job are a pair, on two GPUs where there are
// two.
#include <cstdio>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr unjamKind_t kKinds[] = {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER,
                                  UNJAM_REDUCE, UNJAM_BROADCAST};
constexpr std::size_t kCounts[] = {1000, 262144, (std::size_t{8} << 20) + 3};

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const int ranks = options.integer("ranks", 12, "of the job: an even number");
  const int repeats = options.integer("repeats", 5, "of each call; the first one needs the engine");
  const std::uint64_t seed = options.seed();
  options.done(180, 20);
  if (ranks < 2 || ranks % 2 != 0) fail("an even number of ranks");
  load_eagerly();
  Job job(ranks, cuda_config());
  const std::size_t calls =
      std::size(kKinds) * std::size(kCounts) * static_cast<std::size_t>(repeats);
  std::vector<std::uint64_t> alone(static_cast<std::size_t>(ranks));
  job.run([&](const Member& me) {
    me.doing("makes its group");
    const int half = ranks / 2, first = me.rank % half;
    const int members[] = {first, first + half};
    unjamGroup_t pair = nullptr;
    check(unjamGroupCreate(me.context, members, 2, "pair", &pair));
    Spec largest;
    largest.kind = UNJAM_ALL_GATHER;
    largest.count = kCounts[2];
    largest.size = 2;
    const Stream stream;
    const DeviceMemory memory(memory_of(largest));
    const Reports reports(1);
    const unjamCallOptions_t in_stream = ordered(UNJAM_STREAM_SYNC, stream);
    for (const unjamKind_t kind : kKinds) {
      for (const std::size_t count : kCounts) {
        for (int i = 0; i < repeats; ++i) {
          Spec s;
          s.kind = kind;
          s.count = count;
          s.seed = mix(seed, static_cast<std::uint64_t>(first * 100 + i));
          s.root = i % 2;
          s.size = 2;
          s.at = me.rank == first ? 0 : 1;
          const Place place = place_in(memory.get(), s);
          const std::string what = "rank " + std::to_string(me.rank) + ", " + s.text();
          me.doing(what);
          start_fill(s, place, stream.get());
          unjamRequest_t request = nullptr;
          check(call(pair, kKindNames[kind], s, place, &in_stream, &request));
          me.wait(request, what);
          start_check(s, place, reports.on_device(0), stream.get());
          reports.start_fetch(stream.get());
          stream.synchronize();
          finish_check(s, reports[0], what);
        }
      }
    }
    alone[static_cast<std::size_t>(me.rank)] = without_engine(me.context);
    check(unjamGroupDestroy(pair));
  });
  std::uint64_t least = alone[0];
  for (const std::uint64_t n : alone) least = std::min(least, n);
  std::printf("pairs: of %zu calls a rank, without the engine at least %llu\n", calls,
              static_cast<unsigned long long>(least));
  // (A call's lanes may give up for reasons of their own: not half of them.)
  if (least < calls / 2) fail("calls of a pair in a large job need the engine");
  std::printf("pairs: PASS, %d ranks\n", ranks);
  return 0;
}
