// cancelled: calls that end with an error while large ones of the same ranks move, in lots or slice
// by slice, in either order of the queue: one that no other rank makes, at the time limit, and one
// that ranks disagree on, at once. The others go on, and are right.
#include <atomic>
#include <string>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

constexpr std::uint32_t kTimeoutMs = 300;
constexpr double kLateness = 5;  // times a limit: this is no benchmark
constexpr int kLookedAt = 8;     // rounds

struct Settings {
  std::uint64_t seed = 0;
  std::size_t bytes = 0;
  int calls = 0;
  double seconds = 0;
};

void expect(const Member& me, unjamRequest_t request, unjamResult_t code, const char* what) {
  const unjamResult_t found = unjamWait(request, 20'000'000);
  if (found != code) {
    fail("rank " + std::to_string(me.rank) + ": " + what + " should end with '" +
         unjamGetErrorString(code) + "': " + unjamGetErrorString(found) + ": " +
         unjamRequestError(request));
  }
  check(unjamRequestFree(request));
}

// A call that is to end with an error, and when it did.
struct Failing {
  const char* key;
  unjamResult_t code;
  double limit_us;  // from the call
  unjamRequest_t request = nullptr;
  std::uint64_t begin_ns = 0;
  double us = 0;

  void look(const Member& me) {
    int done = 0;
    if (request != nullptr) unjamTest(request, &done);
    if (done != 0) finish(me);
  }
  void finish(const Member& me) {
    if (request == nullptr) return;
    expect(me, request, code, key);
    us = us_since(begin_ns);
    request = nullptr;
  }
};

void run(const Member& me, const Settings& set, Barrier& barrier, const char* title) {
  const Stream stream;
  std::vector<Spec> specs(static_cast<std::size_t>(set.calls));
  for (std::size_t i = 0; i < specs.size(); ++i) {
    specs[i].count = set.bytes / sizeof(float);
    specs[i].size = me.ranks;
    specs[i].at = me.rank;
    specs[i].seed = mix(set.seed, i);
  }
  const Exchanges large(std::move(specs), stream);
  const std::string where = std::string(title) + ", rank " + std::to_string(me.rank);
  const std::size_t some = 1 << 20;
  const DeviceMemory spare(2 * (some + kGuardBytes) * sizeof(float));
  check(cudaMemset(spare.get(), 0, 2 * (some + kGuardBytes) * sizeof(float)));
  check(cudaDeviceSynchronize());
  const auto odd = [&](const char* key, std::size_t count, unjamRequest_t* request) {
    float* const at = spare.as<float>();
    check(unjamAllReduce(me.all, key, at, at + some, count, UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                         request));
  };
  barrier.meet();
  me.doing(std::string("calls, ") + title);
  Failing late{"nobody else's", UNJAM_ERROR_TIMEOUT, kLateness * kTimeoutMs * 1e3};
  Failing mismatched{"disagreed on", UNJAM_ERROR_MISMATCH, kLateness * 1e5};
  std::vector<unjamRequest_t> requests(large.size(), nullptr);
  const std::uint64_t begin = now_ns();
  int round = 0;
  static std::atomic<int> last{0};
  if (me.rank == 0) last = 1 << 30;
  barrier.meet();
  for (; round <= last.load(); ++round) {
    for (std::size_t i = 0; i < large.size(); ++i) {
      // The others' former uses move meanwhile, so there is something at any time.
      if (requests[i] != nullptr) me.wait(requests[i], "a large call");
      // What is there is not to pass for the next one's result; and now and then it is looked at.
      if (requests[i] != nullptr && round % kLookedAt == 0) large.look_at(i, 1, where);
      check(cudaMemsetAsync(large.place(i).recv, kPoison, set.bytes, stream.get()));
      stream.synchronize();
      check(call(me.all, key_of(static_cast<int>(i)).c_str(), large.spec(i), large.place(i),
                 nullptr, &requests[i]));
      late.look(me), mismatched.look(me);
    }
    if (round == 3) {
      if (me.rank == 0) {
        late.begin_ns = now_ns();
        odd(late.key, some, &late.request);
      }
      mismatched.begin_ns = now_ns();
      odd(mismatched.key, some - static_cast<std::size_t>(me.rank), &mismatched.request);
    }
    // (All ranks make as many calls: rank 0 says which round is to be the last one. They are two
    // rounds apart at most, for they wait for each other's calls.)
    if (me.rank == 0 && last.load() == 1 << 30 && us_since(begin) > set.seconds * 1e6) {
      last = round + 3;
    }
  }
  for (unjamRequest_t request : requests) me.wait(request, "a large call");
  for (Failing* f : {&late, &mismatched}) {
    f->finish(me);
    if (f->us > f->limit_us) {
      fail("rank " + std::to_string(me.rank) + ", " + title + ": the call under the key '" +
           f->key + "' ended late: after " + std::to_string(f->us * 1e-3) + " ms");
    }
  }
  // Whoever makes the call now is told how it has ended, and does not wait for a limit of its own.
  if (me.rank != 0) {
    unjamRequest_t request = nullptr;
    const std::uint64_t asked = now_ns();
    odd(late.key, some, &request);
    expect(me, request, late.code, "a late call");
    if (us_since(asked) > kTimeoutMs * 1e3 / 2) fail("a late call waits to be told that it failed");
  }
  large.look_at(0, large.size(), where);
  if (me.rank == 0) {
    std::printf("%-28s %6d large calls; timed out after %.0f ms, mismatch after %.1f ms\n", title,
                round * set.calls, late.us * 1e-3, mismatched.us * 1e-3);
  }
  barrier.meet();
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  Settings set;
  set.seed = options.seed();
  set.bytes = static_cast<std::size_t>(options.number("bytes", 256 << 20, "of a large call"));
  set.calls = options.integer("calls", 8, "large ones at a time");
  set.seconds = options.number("seconds", 1, "for which they move, in each setting");
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all");
  options.done(100, 20);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : device_count();
  if (ranks < 2) fail("--ranks: one alone disagrees with nobody");
  if (set.seconds * 1e3 < 2 * kTimeoutMs) fail("--seconds: the time limit is to pass within");
  std::printf("cancelled: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(set.seed));
  for (const bool whole : {true, false}) {
    setenv("UNJAM_IN_STREAM", whole ? "1" : "0", 1);
    for (const unjamOrder_t order : {UNJAM_ORDER_FIFO, UNJAM_ORDER_PRIORITY}) {
      unjamConfig_t config = cuda_config();
      config.order = order;
      config.timeout_ms = kTimeoutMs;
      std::string title = whole ? "in lots" : "slice by slice";
      title += order == UNJAM_ORDER_FIFO ? ", first come" : ", by priority";
      const Job job(ranks, config);
      Barrier barrier(ranks);
      job.run([&](const Member& me) { run(me, set, barrier, title.c_str()); });
    }
  }
  std::printf("cancelled: PASS\n");
  return 0;
}
