// nearly_full: calls beside streams on GPUs of which others' kernels hold most SMs, for as long as
// they like. A daemon has more blocks than lanes there, and each chooses its lane as it begins, on
// whatever SM is free (lane_placement.h): as soon as there is an SM for each lane all calls are to
// end, whoever holds the others. With fewer SMs some wait for the holders to end, and are right
// then; meanwhile nothing hangs.
#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

struct Gate {
  unsigned open;
  unsigned waiting;  // blocks that have begun
};

// A block that has an SM to itself, until the gate opens. (One thread looks, now and then: many
// would keep the host's memory from the daemons.)
__global__ void __launch_bounds__(1024, 1) hold_kernel(Gate* gate) {
  extern __shared__ unsigned char all_of_it[];
  if (threadIdx.x == 0) {
    all_of_it[0] = 0;
    atomicAdd_system(&gate->waiting, 1u);
    while (*static_cast<volatile unsigned*>(&gate->open) == 0) __nanosleep(20'000);
  }
  __syncthreads();
}

class Holder {
 public:
  Holder() : memory_(sizeof(Gate)) {
    int device = 0, most = 0;
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
    check(cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    bytes_ = static_cast<std::size_t>(most);
    check(cudaFuncSetAttribute(hold_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
  }
  int sms() const { return sms_; }
  // Returns when all have begun. (A daemon of calls that have ended leaves soon.)
  void hold(int sms) {
    volatile Gate& gate = *memory_.as<volatile Gate>();
    gate.open = 0;
    gate.waiting = 0;
    if (sms == 0) return;
    hold_kernel<<<static_cast<unsigned>(sms), 1024, bytes_, stream_.get()>>>(memory_.as<Gate>());
    check(cudaGetLastError());
    while (gate.waiting < static_cast<unsigned>(sms)) usleep(100);
  }
  void release() {
    memory_.as<volatile Gate>()->open = 1;
    stream_.synchronize();
  }

 private:
  PinnedMemory memory_;
  Stream stream_;
  std::size_t bytes_ = 0;
  int sms_ = 0;
};

constexpr int kCalls = 24;
constexpr double kHeldUs = 20'000;

Spec spec_of(const Member& me, std::uint64_t seed, int i) {
  static constexpr std::size_t kCounts[] = {1, 3000, 260'000, 2'500'000};
  Spec s;
  s.kind = static_cast<unjamKind_t>(i % kNumKinds);
  s.count = kCounts[static_cast<std::size_t>(i) % std::size(kCounts)];
  s.size = me.ranks;
  s.at = me.rank;
  s.root = i % me.ranks;
  s.seed = mix(seed, static_cast<std::uint64_t>(i));
  return s;
}

// All calls with so many SMs left on this rank's GPU. `enough`: all are to end then, on all ranks.
// Returns how many have ended while the others were held.
int round(const Member& me, Holder& holder, Barrier& barrier, int free, bool enough,
          std::uint64_t seed) {
  const std::string what = std::to_string(free) + " SMs free";
  const Stream stream;
  std::vector<Spec> specs;
  for (int i = 0; i < kCalls; ++i) specs.push_back(spec_of(me, seed, i));
  const Exchanges calls(std::move(specs), stream);
  stream.synchronize();
  std::vector<int> order(kCalls);
  for (int i = 0; i < kCalls; ++i) order[static_cast<std::size_t>(i)] = i;
  std::mt19937_64 random(mix(seed, static_cast<std::uint64_t>(me.rank) + 1000));
  std::shuffle(order.begin(), order.end(), random);
  barrier.meet();
  me.doing("calls, " + what);
  holder.hold(std::max(holder.sms() - free, 0));
  barrier.meet();
  std::vector<unjamRequest_t> requests(kCalls);
  for (const int i : order) {
    const auto at = static_cast<std::size_t>(i);
    check(call(me.all, key_of(i).c_str(), calls.spec(at), calls.place(at), nullptr, &requests[at]));
  }
  int done = 0;
  const std::uint64_t begin = now_ns();
  while (done < kCalls && (enough || us_since(begin) < kHeldUs)) {
    done = 0;
    for (unjamRequest_t request : requests) {
      int one = 0;
      check(unjamTest(request, &one));
      done += one;
    }
  }
  barrier.meet();  // else who is slow finds a peer whose SMs are free again
  me.doing("the holders end, " + what);
  holder.release();
  for (unjamRequest_t request : requests) me.wait(request, what);
  calls.look_at(0, kCalls, what + ", rank " + std::to_string(me.rank));
  return done;
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const int rounds = options.integer("rounds", 4, "with each number of free SMs");
  const int lanes = options.integer("lanes", 32, "of each rank");
  const int wanted = options.integer("ranks", 0, "GPUs to use, one a rank; 0: all");
  options.done(100, 20);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : device_count();
  if (ranks > device_count()) fail("--ranks: each needs a GPU of its own");
  if (queues_taken() == 1)
    fail("CUDA_DEVICE_MAX_CONNECTIONS=1: what waits for holders stands behind them");
  std::printf("nearly_full: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  unjamConfig_t config = cuda_config();
  config.lanes = static_cast<std::uint32_t>(lanes);
  const Job job(ranks, config);
  Barrier barrier(ranks);
  std::printf("%9s %10s   calls of %d that ended while the others were held, rank by rank\n",
              "free SMs", "on", kCalls);
  for (const int free : {0, 1, 2, 3, 5, 8, lanes / 2, lanes - 1, lanes, lanes + 1, 2 * lanes - 1}) {
    for (const bool all : {false, true}) {  // on all GPUs, or on the first
      std::vector<std::vector<int>> done(static_cast<std::size_t>(ranks));
      job.run([&](const Member& me) {
        Holder holder;
        for (int r = 0; r < rounds; ++r) {
          const std::uint64_t of_round = mix(mix(seed, static_cast<std::uint64_t>(free)),
                                             static_cast<std::uint64_t>(2 * r + all));
          const int here = all || me.rank == 0 ? free : holder.sms();
          done[static_cast<std::size_t>(me.rank)].push_back(
              round(me, holder, barrier, here, free >= lanes, of_round));
        }
      });
      std::printf("%9d %10s  ", free, all ? "all GPUs" : "the first");
      for (const auto& of_rank : done) {
        for (const int n : of_rank) std::printf(" %d", n);
        std::printf(" %s", &of_rank == &done.back() ? "\n" : "|");
      }
    }
  }
  print_stats(job);
  std::printf("nearly_full: PASS\n");
  return 0;
}
