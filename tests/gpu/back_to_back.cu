// back_to_back: calls that follow each other in a stream, some of which may begin while the one in
// front ends (src/device/cuda/host/overlap_rule.h).
//
// First, what that relies on: CUDA counts launches one by one, and whatever is no kernel (a copy,
// an event, a host function, a graph) is between two kernels a fence, even where the first has let
// the second begin early.
//
// Then programs of random calls and kernels on a few buffers, one behind the other, with nothing
// waited for in between: in place and not, the same again, reading what the call in front has
// written and writing what it reads; and kernels of the user's which change a buffer and let the
// next kernel begin before they do. Elements of each rank's block of a buffer are integers on a
// line, so a model of a few numbers says what every element is to be.
//
// On a GPU for each rank some calls are to begin early, with UNJAM_IN_STREAM_OVERLAP=0 none.
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/gpu/early_launch.cuh"
#include "tests/gpu/holds.cuh"
#include "tests/gpu/job.h"

using namespace unjam_gpu;

namespace {

using Element = std::uint32_t;
constexpr int kBuffers = 4;

// ---- what is relied on ----

__device__ std::uint64_t now() {
  std::uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

struct Times {
  std::uint64_t number, begin, end;
};
// Lets the next kernel begin at once, and ends `ns` later.
__global__ void time_kernel(Times* times, std::uint64_t ns) {
  let_next_begin();
  std::uint64_t number;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(number));
  times->number = number;
  times->begin = now();
  while (now() - times->begin < ns) {
  }
  times->end = now();
}

void check_premises() {
  constexpr std::uint64_t kLongNs = 300'000;
  check(cudaSetDevice(0));
  const Stream stream, other;
  const Event event;
  const PinnedMemory memory(4096);
  Times* const t = memory.as<Times>();
  const DeviceMemory some(8192);
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t graph_exec = nullptr;
  check(cudaStreamBeginCapture(other.get(), cudaStreamCaptureModeThreadLocal));
  launch(true, time_kernel, 1, 1, other.get(), t + 2, kLongNs);
  check(cudaStreamEndCapture(other.get(), &graph));
  check(cudaGraphInstantiate(&graph_exec, graph, 0));
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  const bool may_overlap = major >= 9;
  enum { kNothing, kSet, kCopy, kEvent, kHost, kGraph, kAll };
  const char* const names[] = {"nothing",  "a memset",        "a copy",
                               "an event", "a host function", "a graph"};
  for (int what = 0; what < kAll; ++what) {
    for (int i = 0; i < 3; ++i) t[i] = {};
    // (So that it is no event that has happened, which CUDA would leave out.)
    if (what == kEvent) {
      launch(true, time_kernel, 1, 1, other.get(), t + 2, 2 * kLongNs);
      event.record(other);
    }
    launch(true, time_kernel, 1, 1, stream.get(), t, kLongNs);
    switch (what) {
      case kSet:
        check(cudaMemsetAsync(some.get(), 1, 1024, stream.get()));
        break;
      case kCopy:
        check(cudaMemcpyAsync(some.as<char>() + 4096, some.get(), 1024, cudaMemcpyDeviceToDevice,
                              stream.get()));
        break;
      case kEvent:
        check(cudaStreamWaitEvent(stream.get(), event.get()));
        break;
      case kHost:
        check(cudaLaunchHostFunc(stream.get(), [](void*) {}, nullptr));
        break;
      case kGraph:
        check(cudaGraphLaunch(graph_exec, stream.get()));
        break;
      default:
        break;
    }
    launch(true, time_kernel, 1, 1, stream.get(), t + 1, std::uint64_t{0});
    stream.synchronize();
    const std::uint64_t ended = what == kGraph || what == kEvent ? t[2].end : t[0].end;
    const bool overlapped = t[1].begin < ended;
    std::printf(
        "%-16s between: launches %llu and %llu, the second began %s what is in front had ended\n",
        names[what], static_cast<unsigned long long>(t[0].number),
        static_cast<unsigned long long>(t[1].number), overlapped ? "before" : "after");
    if (what == kNothing && t[1].number != t[0].number + 1)
      fail("launches are not counted one by one");
    if (what == kNothing && may_overlap && !overlapped) {
      fail("no kernel begins early, so nothing is shown here");
    }
    if (what != kNothing && overlapped) {
      fail("a kernel began before what was in front of it had ended");
    }
  }
  check(cudaGraphExecDestroy(graph_exec));
  check(cudaGraphDestroy(graph));
}

// ---- programs ----

// Changes a buffer, behind `ns`; what is behind it in the stream may begin before.
__global__ void change_kernel(Element* x, std::size_t count, Element by, std::uint64_t ns) {
  let_next_begin();
  wait_for_stream();
  const std::uint64_t begun = now();
  while (now() - begun < ns) {
  }
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    x[i] = x[i] * 3 + by;
  }
}
// An element is `a` + `b` times its place in its block; so are sums of such, and what
// change_kernel() makes of them.
struct Line {
  Element a = 0, b = 0;
};
__global__ void begin_kernel(Element* x, std::size_t block, std::size_t count, Line line) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    x[i] = line.a + line.b * static_cast<Element>(i % block);
  }
}
__global__ void check_kernel(const Element* x, std::size_t count, Line expected,
                             unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    if (x[i] != expected.a + expected.b * static_cast<Element>(i)) atomicAdd(wrong, 1ull);
  }
}

enum class What {
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kBroadcast,
  kReduce,
  kChange,
  kSet,
  kDelay
};
struct Step {
  What what;
  int from, to;
  int block;  // of an all-gather's input
  int root;
  Element by;
  bool early;
  int us;
};
// buffer, rank, block
using Model = std::array<std::vector<std::vector<Line>>, kBuffers>;

Line first_line(std::size_t buffer, std::size_t rank) {
  return {static_cast<Element>(buffer), static_cast<Element>(7 * buffer + rank + 1)};
}

std::vector<Step> make_program(std::mt19937_64& random, int ranks, int steps) {
  const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
  std::vector<Step> program;
  while (static_cast<int>(program.size()) < steps) {
    Step s{};
    const int draw = below(16);
    s.what = draw < 4    ? What::kAllReduce
             : draw < 6  ? What::kAllGather
             : draw < 8  ? What::kReduceScatter
             : draw < 10 ? What::kBroadcast
             : draw < 12 ? What::kReduce
             : draw < 14 ? What::kChange
             : draw < 15 ? What::kSet
                         : What::kDelay;
    s.from = below(kBuffers);
    s.to = below(kBuffers);
    s.block = below(ranks);
    s.root = below(ranks);
    s.by = static_cast<Element>(random());
    s.early = below(2) == 0;
    s.us = below(60);
    // Of an all-gather or reduce-scatter in place the block is the rank's own.
    if (s.from == s.to) s.block = -1;
    for (int again = below(3) == 0 ? 1 + below(3) : 1; again > 0; --again) program.push_back(s);
  }
  return program;
}

void follow(const Step& s, int ranks, Model& m) {
  const auto n = static_cast<std::size_t>(ranks);
  const auto from = m[static_cast<std::size_t>(s.from)];  // as it was
  auto& to = m[static_cast<std::size_t>(s.to)];
  const auto root = static_cast<std::size_t>(s.root);
  const auto sum = [&](std::size_t block) {
    Line x;
    for (std::size_t r = 0; r < n; ++r) x.a += from[r][block].a, x.b += from[r][block].b;
    return x;
  };
  for (std::size_t r = 0; r < n; ++r) {
    for (std::size_t b = 0; b < n; ++b) {
      switch (s.what) {
        case What::kAllReduce:
          to[r][b] = sum(b);
          break;
        case What::kAllGather:
          to[r][b] = from[b][s.block < 0 ? b : static_cast<std::size_t>(s.block)];
          break;
        case What::kReduceScatter:
          if (b == (s.block < 0 ? r : static_cast<std::size_t>(s.block))) to[r][b] = sum(r);
          break;
        case What::kBroadcast:
          to[r][b] = from[root][b];
          break;
        case What::kReduce:
          if (r == root) to[r][b] = sum(b);
          break;
        case What::kChange:
          to[r][b] = {to[r][b].a * 3 + s.by + static_cast<Element>(r), to[r][b].b * 3};
          break;
        case What::kSet:
          to[r][b] = {0x01010101u * (s.by & 0xff), 0};
          break;
        case What::kDelay:
          break;
      }
    }
  }
}

void call(const Member& me, const Step& s, Element* from, Element* to, std::size_t block,
          const std::string& key, cudaStream_t stream) {
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.stream = stream;
  options.stream_order = UNJAM_STREAM_SYNC;
  const auto own = block * static_cast<std::size_t>(s.block < 0 ? me.rank : s.block);
  const std::size_t count = block * static_cast<std::size_t>(me.ranks);
  switch (s.what) {
    case What::kAllReduce:
      return check(unjamAllReduce(me.all, key.c_str(), from, to, count, UNJAM_UINT32, UNJAM_SUM,
                                  &options, nullptr));
    case What::kAllGather:
      return check(unjamAllGather(me.all, key.c_str(), from + own, to, block, UNJAM_UINT32,
                                  &options, nullptr));
    case What::kReduceScatter:
      return check(unjamReduceScatter(me.all, key.c_str(), from, to + own, block, UNJAM_UINT32,
                                      UNJAM_SUM, &options, nullptr));
    case What::kBroadcast:
      return check(unjamBroadcast(me.all, key.c_str(), from, to, count, UNJAM_UINT32, s.root,
                                  &options, nullptr));
    case What::kReduce:
      return check(unjamReduce(me.all, key.c_str(), from, to, count, UNJAM_UINT32, UNJAM_SUM,
                               s.root, &options, nullptr));
    case What::kChange: {
      const Element by = s.by + static_cast<Element>(me.rank);
      const auto ns = static_cast<std::uint64_t>(s.us) * 1000;
      return launch(s.early, change_kernel, 8, 256, stream, to, count, by, ns);
    }
    case What::kSet:
      return check(
          cudaMemsetAsync(to, static_cast<int>(s.by & 0xff), count * sizeof(Element), stream));
    case What::kDelay:
      if (s.root == me.rank)
        spin_kernel<><<<1, 1, 0, stream>>>(static_cast<unsigned long long>(s.us) * 4000);
      return check(cudaGetLastError());
  }
}

void run_program(const Job& job, std::uint64_t seed, std::size_t block, int steps) {
  std::mt19937_64 random(seed);
  const std::vector<Step> program = make_program(random, job.ranks(), steps);
  const auto n = static_cast<std::size_t>(job.ranks());
  std::string name = "program ";
  name += std::to_string(seed) + " of blocks of " + std::to_string(block);
  Model model;
  for (std::size_t b = 0; b < kBuffers; ++b) {
    model[b].resize(n);
    for (std::size_t r = 0; r < n; ++r) model[b][r].assign(n, first_line(b, r));
  }
  for (const Step& s : program) follow(s, job.ranks(), model);
  job.run([&](const Member& me) {
    me.doing(name);
    const Stream stream;
    const std::size_t count = block * n;
    std::vector<DeviceMemory> buffers;
    for (int b = 0; b < kBuffers; ++b) {
      buffers.emplace_back(count * sizeof(Element));
      begin_kernel<<<32, 256, 0, stream.get()>>>(
          buffers.back().as<Element>(), block, count,
          first_line(static_cast<std::size_t>(b), static_cast<std::size_t>(me.rank)));
      check(cudaGetLastError());
    }
    for (const Step& s : program) {
      // A key for each kind: its next use may begin early, too.
      const std::string key = key_of(static_cast<int>(s.what));
      call(me, s, buffers[static_cast<std::size_t>(s.from)].as<Element>(),
           buffers[static_cast<std::size_t>(s.to)].as<Element>(), block, key, stream.get());
    }
    const PinnedMemory wrong(sizeof(unsigned long long) * kBuffers * n);
    auto* const counts = wrong.as<unsigned long long>();
    for (std::size_t i = 0; i < kBuffers * n; ++i) counts[i] = 0;
    for (std::size_t b = 0; b < kBuffers; ++b) {
      for (std::size_t part = 0; part < n; ++part) {
        check_kernel<<<32, 256, 0, stream.get()>>>(
            buffers[b].as<Element>() + part * block, block,
            model[b][static_cast<std::size_t>(me.rank)][part], counts + b * n + part);
      }
    }
    check(cudaGetLastError());
    stream.synchronize();
    for (std::size_t i = 0; i < kBuffers * n; ++i) {
      if (counts[i] == 0) continue;
      fail(name + ": rank " + std::to_string(me.rank) + ", block " + std::to_string(i % n) +
           " of buffer " + std::to_string(i / n) + ": " + std::to_string(counts[i]) +
           " elements are wrong");
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  const std::uint64_t seed = options.seed();
  const double seconds = options.number("seconds", 10, "that programs run");
  const int steps = options.integer("steps", 40, "of a program, about");
  const int wanted = options.integer("ranks", 0, "threads of this process; 0: one a GPU");
  options.done(100 + seconds, 30);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : device_count();
  check_premises();
  const std::unique_ptr<Job> job = start_job(ranks);
  const std::uint64_t begun = now_ns();
  std::uint64_t programs = 0;
  // In bytes of a buffer: through slots, by a little more than they take, by packets, and chains of
  // a few chunks (of 2 MiB by 32 lanes), about as many as are given before a call may report.
  constexpr std::size_t kSizes[] = {std::size_t{32} << 20, (std::size_t{12} << 20) + 4096,
                                    std::size_t{20} << 20, std::size_t{1} << 20,
                                    std::size_t{6} << 20,  std::size_t{8} << 20,
                                    std::size_t{10} << 20};
  for (; us_since(begun) < seconds * 1e6; ++programs) {
    const std::size_t size = kSizes[programs % std::size(kSizes)];
    run_program(*job, seed + programs, size / sizeof(Element) / static_cast<std::size_t>(ranks),
                steps);
  }
  const std::uint64_t early = figure(job->member(0).context, "calls_begun_early");
  std::printf("back_to_back: %llu programs, %llu calls of rank 0 began early\n",
              static_cast<unsigned long long>(programs), static_cast<unsigned long long>(early));
  const bool overlaps = figure(job->member(0).context, "UNJAM_IN_STREAM_OVERLAP") != 0;
  if (!overlaps && early != 0) fail("calls began early in spite of UNJAM_IN_STREAM_OVERLAP=0");
  if (overlaps && ranks > 1 && ranks <= device_count() && early == 0) fail("no call began early");
  std::printf("back_to_back: PASS\n");
  return 0;
}
