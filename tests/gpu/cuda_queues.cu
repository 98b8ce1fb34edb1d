// cuda_queues: what CUDA itself, without unjam, does to the threads and streams of one process.
// Two probes that docs/api.md and the engine's rules rest on. No test: it prints what it sees.
//
// Default: a thread waits for a stream in one of several ways. Which calls of other threads, to
// other streams, wait with it? "waits" is said of a call that has not returned after 300 ms.
//
// --circle: P threads, a stream each, launch kernels back to back; the i-th kernel of each stream
// ends once the i-th of all has begun. All fit on the GPU side by side, so it ends if every
// stream's next kernel is started in the end, whatever the others wait for. If not, it prints who
// got how far, with exit status 2.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/early_launch.cuh"
#include "tests/gpu/holds.cuh"

using namespace unjam_gpu;

namespace {

__global__ void nothing() {}

// Begins with its blocks counting themselves; ends when `all` blocks have. With `early`, the kernel
// behind it in the stream may be brought to the SMs meanwhile, as unjam's calls do, and waits here
// for the one in front.
__global__ void meet(unsigned* arrived, unsigned all, bool early, volatile unsigned* began) {
  if (early) {
    let_next_begin();
    wait_for_stream();
  }
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) {
      *began = *began + 1;
      __threadfence_system();
    }
    atomicAdd(arrived, 1u);
    while (*reinterpret_cast<volatile unsigned*>(arrived) < all) __nanosleep(100);
  }
  __syncthreads();
}

// ---- beside a thread that waits ----

enum class Waiter {
  kNobody,
  kStreamSynchronize,
  kEventSynchronize,
  kDeviceSynchronize,
  kQueries,
  kFull
};

struct Way {
  Waiter waiter;
  const char* name;
  int behind;  // kernels in the stream behind the one that holds it
};
constexpr Way kWays[] = {
    {Waiter::kNobody, "nobody waits", 0},
    {Waiter::kStreamSynchronize, "cudaStreamSynchronize", 0},
    {Waiter::kStreamSynchronize, "cudaStreamSynchronize", 400},
    {Waiter::kEventSynchronize, "cudaEventSynchronize", 400},
    {Waiter::kDeviceSynchronize, "cudaDeviceSynchronize", 400},
    {Waiter::kQueries, "cudaStreamQuery, over and over", 400},
    {Waiter::kFull, "a launch into the full stream", 0},
};

struct Operation {
  const char* name;
  std::function<void()> run;
};

void beside() {
  const Stream held, other;
  const PinnedMemory flag(sizeof(int)), numbers(1 << 16);
  auto* open = flag.as<volatile int>();
  const DeviceMemory memory(1 << 16);
  const Event recorded, fresh, end;
  recorded.record(other);
  other.synchronize();
  // Launched once, so that no lazy loading is measured.
  *open = 1;
  hold_kernel<><<<1, 1, 0, held.get()>>>(open);
  nothing<<<1, 1, 0, held.get()>>>();
  held.synchronize();

  const Operation operations[] = {
      {"launch", [&] { nothing<<<1, 1, 0, other.get()>>>(); }},
      {"100 launches",
       [&] {
         for (int i = 0; i < 100; ++i) nothing<<<1, 1, 0, other.get()>>>();
       }},
      {"record an event", [&] { fresh.record(other); }},
      {"wait for an event in a stream",
       [&] { check(cudaStreamWaitEvent(other.get(), recorded.get())); }},
      {"query an event", [&] { check(cudaEventQuery(recorded.get())); }},
      {"query an event of the held stream", [&] { cudaEventQuery(end.get()); }},
      {"query another stream", [&] { cudaStreamQuery(other.get()); }},
      {"query the held stream", [&] { cudaStreamQuery(held.get()); }},
      {"the held stream's id",
       [&] {
         unsigned long long id = 0;
         check(cudaStreamGetId(held.get(), &id));
       }},
      {"whether the held stream is captured",
       [&] {
         cudaStreamCaptureStatus status{};
         check(cudaStreamIsCapturing(held.get(), &status));
       }},
      {"record an event of the held stream", [&] { fresh.record(held); }},
      {"copy, asynchronously",
       [&] {
         check(cudaMemcpyAsync(memory.get(), numbers.as<char>(), 1 << 16, cudaMemcpyHostToDevice,
                               other.get()));
       }},
      {"synchronise another stream", [&] { other.synchronize(); }},
      {"create an event", [] { const Event e; }},
      {"create a stream", [] { const Stream s; }},
      {"cudaMalloc", [] { new DeviceMemory(1 << 16); }},  // not freed: that would wait for all
  };
  for (const Way& way : kWays) {
    std::printf("\n%s, %d kernels behind the one that holds the stream:\n", way.name, way.behind);
    for (const Operation& operation : operations) {
      Watchdog::instance().doing(0, operation.name);
      *open = 0;
      hold_kernel<><<<1, 1, 0, held.get()>>>(open);
      for (int i = 0; i < way.behind; ++i) nothing<<<1, 1, 0, held.get()>>>();
      end.record(held);
      std::atomic<int> launched{0};
      std::thread waiter([&] {
        switch (way.waiter) {
          case Waiter::kNobody:
            break;
          case Waiter::kStreamSynchronize:
            held.synchronize();
            break;
          case Waiter::kEventSynchronize:
            check(cudaEventSynchronize(end.get()));
            break;
          case Waiter::kDeviceSynchronize:
            check(cudaDeviceSynchronize());
            break;
          case Waiter::kQueries:
            while (cudaStreamQuery(held.get()) == cudaErrorNotReady) {
            }
            break;
          case Waiter::kFull:
            for (; launched < 3000 && *open == 0; ++launched) nothing<<<1, 1, 0, held.get()>>>();
            break;
        }
      });
      // Until it waits: a full stream shows by standing still.
      usleep(20'000);
      for (int last = -1; way.waiter == Waiter::kFull && last != launched;) {
        last = launched;
        usleep(50'000);
      }
      std::atomic<bool> done{false};
      std::atomic<double> us{0};
      std::thread asking([&] {
        const std::uint64_t begin = now_ns();
        operation.run();
        us = us_since(begin);
        done = true;
      });
      for (int i = 0; i < 300 && !done; ++i) usleep(1000);
      if (done) {
        std::printf("  %-36s %8.0f us\n", operation.name, us.load());
      } else {
        std::printf("  %-36s    waits\n", operation.name);
      }
      *open = 1;
      asking.join();
      waiter.join();
      check(cudaDeviceSynchronize());
    }
  }
}

// ---- a circle of streams ----

struct Circle {
  int threads, blocks, kernels;
  bool early;  // programmatic dependent launches
  bool slow;   // threads pause at random, so that some run ahead of the others
  bool keep;   // the same streams in all rounds, which have run a kernel before
  // Whose launches exclude each other: "" nobody's; "first" each stream's first; "all"; "one": one
  // thread launches for all streams, in turn; "after": each stream's second waits until the first
  // of all has begun.
  std::string lock;
  // What fresh streams have seen before, one after the other: "" nothing, "record" an event that is
  // recorded, "wait" for one, "set" an asynchronous memset, "copy" a copy from the host.
  std::string touch;
  std::string wait;
};

void launch_meet(const Circle& c, cudaStream_t stream, unsigned* arrived, unsigned* began) {
  launch(c.early, meet, static_cast<unsigned>(c.blocks), 64, stream, arrived,
         static_cast<unsigned>(c.threads * c.blocks), c.early,
         static_cast<volatile unsigned*>(began));
}

struct Progress {
  std::atomic<int> launched{0};
  std::atomic<bool> waiting{false}, done{false};
};

// What all of a round's threads have come to.
struct Round {
  std::vector<Stream>& streams;
  std::vector<Progress> progress;
  unsigned* arrived;            // blocks at each kernel; in device memory
  const PinnedMemory& kernels;  // kernels of each thread, 64 bytes apart

  unsigned* begun(std::size_t t) const { return kernels.as<unsigned>() + t * 16; }
  unsigned kernels_begun(std::size_t t) const { return *static_cast<volatile unsigned*>(begun(t)); }
  bool over() const {
    return std::all_of(progress.begin(), progress.end(),
                       [](const Progress& p) { return p.done.load(); });
  }
  // Changes whenever somebody gets on.
  unsigned long long state() const {
    unsigned long long sum = 0;
    for (std::size_t t = 0; t < progress.size(); ++t) {
      sum +=
          kernels_begun(t) + static_cast<unsigned>(progress[t].launched.load()) + progress[t].done;
    }
    return sum;
  }
};

// Says who got how far, and what another thread can do; then ends the process.
[[noreturn]] void tell_and_exit(const Circle& c, const Round& run) {
  const unsigned long long last = run.state();
  for (std::size_t t = 0; t < run.streams.size(); ++t) {
    std::printf("  thread %zu: launched %d of %d, %s; kernels begun %u\n", t,
                run.progress[t].launched.load(), c.kernels,
                run.progress[t].done      ? "done"
                : run.progress[t].waiting ? "waits for its stream"
                                          : "launches",
                run.kernels_begun(t));
  }
  // Does another thread's launch return? Does one more launch wake the streams that stand?
  std::atomic<int> stage{0};
  std::thread([&] {
    const Stream fifth;
    stage = 1;
    nothing<<<1, 1, 0, fifth.get()>>>();
    stage = 2;
    fifth.synchronize();
    stage = 3;
    for (const Stream& stream : run.streams) nothing<<<1, 1, 0, stream.get()>>>();
    stage = 4;
    usleep(500'000);
    stage = 5;
    usleep(10'000'000);
  }).detach();
  usleep(1'500'000);
  constexpr const char* kStages[] = {"cannot create a stream",
                                     "has a stream, cannot launch",
                                     "launched; its kernel does not run",
                                     "ran a kernel; cannot launch into the streams that stand",
                                     "ran a kernel",
                                     "ran a kernel, launched into all streams"};
  std::printf("  one more thread: %s; then %s\n", kStages[stage.load()],
              run.state() == last ? "nothing moved either" : "THEY GO ON");
  std::printf("  ");
  for (std::size_t t = 0; t < run.streams.size(); ++t) {
    std::printf("%zu: %u ", t, run.kernels_begun(t));
  }
  std::printf("\n");
  std::vector<unsigned> counts(static_cast<std::size_t>(std::min(c.kernels, 4)));
  const Stream copies;
  check(cudaMemcpyAsync(counts.data(), run.arrived, counts.size() * sizeof(unsigned),
                        cudaMemcpyDeviceToHost, copies.get()));
  copies.synchronize();
  std::printf("  blocks that arrived at kernels 0…: ");
  for (unsigned n : counts) std::printf("%u ", n);
  std::printf("\n");
  _exit(kExitHung);  // (Options has stdout unbuffered.)
}

// Ends the process if the streams stand still.
void run_circle(const Circle& c, int round, std::uint64_t seed, std::vector<Stream>& streams) {
  const auto threads = static_cast<std::size_t>(c.threads);
  const DeviceMemory counters(static_cast<std::size_t>(c.kernels) * sizeof(unsigned));
  auto* arrived = counters.as<unsigned>();
  check(cudaMemset(arrived, 0, static_cast<std::size_t>(c.kernels) * sizeof(unsigned)));
  check(cudaDeviceSynchronize());
  const PinnedMemory beginnings(threads * 64);
  std::memset(beginnings.as<char>(), 0, threads * 64);
  const DeviceMemory small(4);
  const Event event;
  check(cudaEventRecord(event.get(), cudaStreamLegacy));
  if (!c.keep) streams.clear();
  while (streams.size() < threads) {
    streams.emplace_back();
    const cudaStream_t made = streams.back().get();
    if (c.touch == "record") check(cudaEventRecord(event.get(), made));
    if (c.touch == "wait") check(cudaStreamWaitEvent(made, event.get()));
    if (c.touch == "set") check(cudaMemsetAsync(small.get(), 0, 4, made));
    if (c.touch == "copy") {
      check(cudaMemcpyAsync(small.get(), beginnings.as<char>(), 4, cudaMemcpyHostToDevice, made));
    }
    if (!c.touch.empty()) check(cudaDeviceSynchronize());
    if (!c.keep) continue;
    nothing<<<1, 1, 0, made>>>();
    check(cudaDeviceSynchronize());
  }
  Round run{streams, std::vector<Progress>(threads), arrived, beginnings};
  std::vector<std::thread> runners;
  Barrier all(c.threads);
  std::mutex launching;
  for (std::size_t t = 0; t < threads; ++t) {
    runners.emplace_back([&, t] {
      Progress& me = run.progress[t];
      const cudaStream_t stream = streams[t].get();
      const Event end;
      all.meet();
      for (int i = 0; i < c.kernels; ++i) {
        if (c.slow && mix(seed + static_cast<std::uint64_t>(round), t * 1000 + i) % 64 == 0) {
          usleep(200);
        }
        if (c.lock == "after" && i == 1) {
          for (std::size_t other = 0; other < threads; ++other) {
            while (run.kernels_begun(other) == 0) usleep(10);
          }
        }
        if (c.lock == "one") {
          for (std::size_t other = 0; t == 0 && other < threads; ++other) {
            launch_meet(c, streams[other].get(), arrived + i, run.begun(other));
            ++run.progress[other].launched;
          }
          continue;
        }
        {
          std::unique_lock lock(launching, std::defer_lock);
          if (c.lock == "all" || (c.lock == "first" && i == 0)) lock.lock();
          launch_meet(c, stream, arrived + i, run.begun(t));
        }
        ++me.launched;
      }
      while (c.lock == "one" && run.progress[t].launched < c.kernels) usleep(10);
      me.waiting = true;
      if (c.wait == "stream") check(cudaStreamSynchronize(stream));
      if (c.wait == "event") {
        end.record(streams[t]);
        check(cudaEventSynchronize(end.get()));
      }
      if (c.wait == "query") {
        while (cudaStreamQuery(stream) == cudaErrorNotReady) usleep(50);
      }
      if (c.wait == "none") {
        while (run.kernels_begun(t) < static_cast<unsigned>(c.kernels)) {
          usleep(50);
        }
      }
      me.done = true;
    });
  }
  unsigned long long last = run.state();
  for (int still = 0; !run.over();) {
    usleep(1000);
    const unsigned long long now = run.state();
    still = now == last ? still + 1 : 0;
    last = now;
    if (still < 3000) continue;
    std::printf("HUNG in round %d: nothing moved for 3 s\n", round);
    tell_and_exit(c, run);
  }
  for (std::thread& t : runners) t.join();
  check(cudaDeviceSynchronize());
}

}  // namespace

int main(int argc, char** argv) {
  Options options(argc, argv);
  const bool circle = options.flag("circle", "streams that wait for each other, see above");
  const bool few = options.flag("few-queues", "leave CUDA_DEVICE_MAX_CONNECTIONS as it is");
  Circle c;
  c.threads = options.integer("threads", 4, "of the circle, a stream each");
  c.blocks = options.integer("blocks", 12, "of each of its kernels");
  c.kernels = options.integer("kernels", 400, "that each thread launches");
  c.early = options.flag("early", "programmatic dependent launches");
  c.slow = options.flag("slow", "threads pause at random");
  c.keep = options.flag("keep", "the same streams in all rounds");
  c.lock = options.text("lock", "", "of launches: first, all, one or after");
  c.touch = options.text("touch", "", "fresh streams before: record, wait, set or copy");
  c.wait = options.text("wait", "stream", "how they wait: stream, event, query or none");
  const int rounds = options.integer("rounds", 20, "of the circle");
  const std::uint64_t seed = options.seed();
  options.done(200, 60);
  const auto among = [](const std::string& word, std::initializer_list<const char*> words) {
    if (std::find(words.begin(), words.end(), word) == words.end()) fail("no such word: " + word);
  };
  among(c.lock, {"", "first", "all", "one", "after"});
  among(c.touch, {"", "record", "wait", "set", "copy"});
  among(c.wait, {"stream", "event", "query", "none"});
  if (!few) take_many_queues();
  load_eagerly();
  if (!circle) {
    beside();
    return 0;
  }
  std::vector<Stream> streams;
  for (int i = 0; i < rounds; ++i) {
    Watchdog::instance().doing(0, "round " + std::to_string(i));
    run_circle(c, i, seed, streams);
  }
  std::printf("%d rounds came to an end\n", rounds);
  return 0;
}
