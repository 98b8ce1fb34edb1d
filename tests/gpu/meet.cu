// Ranks that meet new neighbours all the time: in each round a new job, in which each rank calls
// with every other one for the first time, in an order of its own, more keys at once than rooms
// have connectors at first. While all of that is under way each rank synchronizes its device, and
// frees memory, which must return.
#include <algorithm>
#include <cstdio>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr int kMostCalls = 63;  // as many keys as may be under way
constexpr std::size_t kCounts[] = {64, 1000, 70'000};

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const int ranks = options.integer("ranks", 8, "of the job");
  const int rounds = options.integer("rounds", 10, "jobs, one after another");
  const std::uint64_t seed = options.seed();
  options.done(180, 20);
  if (ranks < 2 || ranks > kMostCalls + 1) fail("2 to 64 ranks");
  load_eagerly();
  const int keys = std::max(1, std::min(12, kMostCalls / (ranks - 1)));
  std::uint64_t met = 0;
  double longest_us = 0;
  for (int round = 0; round < rounds; ++round) {
    Job job(ranks, cuda_config());
    std::vector<double> synchronized(static_cast<std::size_t>(ranks));
    std::vector<std::uint64_t> neighbours(static_cast<std::size_t>(ranks));
    job.run([&](const Member& me) {
      std::vector<unjamGroup_t> pairs(static_cast<std::size_t>(ranks));
      for (int peer = 0; peer < ranks; ++peer) {
        const int members[] = {std::min(me.rank, peer), std::max(me.rank, peer)};
        if (peer == me.rank) continue;
        check(unjamGroupCreate(me.context, members, 2, "", &pairs[static_cast<std::size_t>(peer)]));
      }
      // Of each peer and key a call; Spec::at is the rank's place in the pair.
      std::vector<Spec> specs;
      std::vector<int> peers;
      for (int peer = 0; peer < ranks; ++peer) {
        for (int k = 0; peer != me.rank && k < keys; ++k) {
          Spec s;
          s.kind = k % 3 == 0 ? UNJAM_ALL_GATHER : UNJAM_ALL_REDUCE;
          s.count = kCounts[static_cast<std::size_t>(k) % std::size(kCounts)];
          s.size = 2;
          s.at = me.rank < peer ? 0 : 1;
          const int low = std::min(me.rank, peer), high = std::max(me.rank, peer);
          s.seed = mix(mix(seed, static_cast<std::uint64_t>(round)),
                       static_cast<std::uint64_t>((low * ranks + high) * keys + k));
          specs.push_back(s);
          peers.push_back(peer);
        }
      }
      const Stream stream;
      std::vector<std::unique_ptr<DeviceMemory>> memory;
      std::vector<Place> places;
      for (const Spec& s : specs) {
        memory.push_back(std::make_unique<DeviceMemory>(memory_of(s)));
        places.push_back(place_in(memory.back()->get(), s));
        start_fill(s, places.back(), stream.get());
      }
      stream.synchronize();
      std::vector<std::size_t> order(specs.size());
      std::iota(order.begin(), order.end(), std::size_t{0});
      std::shuffle(order.begin(), order.end(),
                   std::mt19937_64(mix(seed, static_cast<std::uint64_t>(round * 64 + me.rank))));
      std::vector<unjamRequest_t> requests(specs.size());
      for (const std::size_t i : order) {
        me.doing("calls with rank " + std::to_string(peers[i]));
        const std::string key = key_of(static_cast<int>(i) % keys);
        unjamCallOptions_t none = UNJAM_CALL_OPTIONS_INITIALIZER;
        check(call(pairs[static_cast<std::size_t>(peers[i])], key.c_str(), specs[i], places[i],
                   &none, &requests[i]));
      }
      me.doing("synchronizes its device");
      const std::uint64_t begun = now_ns();
      check(cudaDeviceSynchronize());
      {
        const DeviceMemory freed(1 << 20);
      }
      synchronized[static_cast<std::size_t>(me.rank)] = us_since(begun);
      const Reports reports(specs.size());
      for (std::size_t i = 0; i < specs.size(); ++i) {
        const std::string what = "rank " + std::to_string(me.rank) + " with rank " +
                                 std::to_string(peers[i]) + ", " + specs[i].text();
        me.doing(what);
        me.wait(requests[i], what);
        start_check(specs[i], places[i], reports.on_device(i), stream.get());
      }
      reports.start_fetch(stream.get());
      stream.synchronize();
      for (std::size_t i = 0; i < specs.size(); ++i) {
        finish_check(specs[i], reports[i], "rank " + std::to_string(me.rank));
      }
      neighbours[static_cast<std::size_t>(me.rank)] = figure(me.context, "neighbours_met");
      for (const unjamGroup_t pair : pairs) {
        if (pair != nullptr) check(unjamGroupDestroy(pair));
      }
    });
    for (const std::uint64_t n : neighbours) {
      if (n != static_cast<std::uint64_t>(ranks - 1)) fail("a rank has not met all others");
      met += n;
    }
    longest_us = std::max(longest_us, *std::max_element(synchronized.begin(), synchronized.end()));
  }
  std::printf("meet: %llu meetings; a synchronisation beside them took %.0f us at most\n",
              static_cast<unsigned long long>(met), longest_us);
  std::printf("meet: PASS, %d ranks, %d rounds\n", ranks, rounds);
  return 0;
}
