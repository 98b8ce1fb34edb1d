// sent_away: large calls beside streams, while something short waits for a rank that is not there.
// For the short call a lane interrupts the large ones behind each turn: yet it is to send all for
// which peers have room (send_window.h), and to come to all of them (engine.h), for the rank that
// is missing waits for one.
//
// Per round all ranks but the last make four calls: the short one; a broadcast from the last rank,
// of which they can move nothing; an all-gather, of which they send some ahead; and behind it, so
// that lanes try both together, the one that the last rank waits for before it makes the other
// calls. Every other round each rank makes them in an order of its own, and lanes may not.
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr int kCalls = 4, kWaitedFor = 3;
constexpr std::size_t kMiB = std::size_t{1} << 20;

std::vector<Spec> make_specs(const Member& me, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  // Bytes a rank: a lane of 32 has five to eight chunks of the first all-gather.
  const auto between = [&](std::size_t least, std::size_t most) {
    return least + random() % (most - least);
  };
  const std::size_t sizes[] = {2048, between(8 * kMiB, 16 * kMiB), between(10 * kMiB, 16 * kMiB),
                               between(4 * kMiB, 8 * kMiB)};
  const unjamKind_t kinds[] = {UNJAM_ALL_REDUCE, UNJAM_BROADCAST, UNJAM_ALL_GATHER,
                               UNJAM_ALL_GATHER};
  std::vector<Spec> specs(kCalls);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    Spec& s = specs[i];
    s.kind = kinds[i];
    s.count = sizes[i] / sizeof(float);
    s.size = me.ranks;
    s.at = me.rank;
    s.root = me.ranks - 1;
    s.seed = mix(seed, i);
  }
  return specs;
}

void run_round(const Member& me, Barrier& barrier, std::uint64_t seed, bool apart, bool shuffles) {
  const std::string where = "rank " + std::to_string(me.rank) + ", seed " + std::to_string(seed);
  const Stream stream;
  me.doing(where + ": fills");
  const Exchanges calls(make_specs(me, seed), stream);
  stream.synchronize();
  std::vector<int> order(kCalls);
  std::iota(order.begin(), order.end(), 0);
  std::mt19937_64 random(mix(seed, 100 + static_cast<std::uint64_t>(me.rank)));
  if (shuffles) std::shuffle(order.begin(), order.end(), random);
  const bool is_missing = apart && me.rank == me.ranks - 1;
  if (is_missing) std::swap(order[0], *std::find(order.begin(), order.end(), kWaitedFor));
  barrier.meet();
  std::vector<unjamRequest_t> requests(kCalls);
  for (int n = 0; n < kCalls; ++n) {
    const auto i = static_cast<std::size_t>(order[static_cast<std::size_t>(n)]);
    me.doing(where + ": makes call " + std::to_string(i));
    check(call(me.all, key_of(static_cast<int>(i)).c_str(), calls.spec(i), calls.place(i), nullptr,
               &requests[i]));
    if (!is_missing || n != 0) continue;
    me.doing(where + ": waits for call " + std::to_string(i) + " before it makes the others");
    const unjamResult_t code = unjamWait(requests[i], -1);
    if (code != UNJAM_SUCCESS) fail(where + ": " + unjamRequestError(requests[i]));
  }
  for (const int i : order) {
    me.wait(requests[static_cast<std::size_t>(i)], where + ", call " + std::to_string(i));
  }
  calls.look_at(0, kCalls, where);
  barrier.meet();  // memory that peers may be storing into
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int rounds = options.integer("rounds", 60, "of the four calls");
  const int wanted = options.integer("ranks", 0, "at least two; 0: the GPUs, or four that share");
  options.done(100, 20);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : std::max(4, device_count());
  if (ranks < 2) fail("--ranks must be at least 2");
  std::printf("sent_away: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  const Job job(ranks, cuda_config());
  Barrier barrier(ranks);
  job.run([&](const Member& me) {
    for (int r = 0; r < rounds; ++r) {
      // First uses of keys go slice by slice, and the last rank is there.
      const bool apart = r > 0;
      run_round(me, barrier, mix(seed, static_cast<std::uint64_t>(r)), apart, r % 2 == 0);
    }
    me.doing("done");
  });
  print_stats(job);
  std::printf("sent_away: PASS\n");
  return 0;
}
