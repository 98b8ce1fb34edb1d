// A program written against NVIDIA's nccl.h, for two GPUs and more: whose libnccl.so.2 is loaded
// answers. Ranks are threads with a GPU each. Every result is checked.
//
//   nccl_check [NAME...]     the checks of these names; none: all
//   nccl_check --times       µs a call, in a stream, of several sizes
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr std::size_t kMost = std::size_t{256} << 20;  // bytes of the largest message

[[noreturn]] void fail(const std::string& text) { throw std::runtime_error(text); }

void check(ncclResult_t code, const char* what) {
  if (code == ncclSuccess) return;
  fail(std::string(what) + ": " + ncclGetErrorString(code) + ": " + ncclGetLastError(nullptr));
}
void check(cudaError_t code, const char* what) {
  if (code != cudaSuccess) fail(std::string(what) + ": " + cudaGetErrorString(code));
}
#define CHECK(call) check((call), #call)

struct Type {
  const char* name;
  ncclDataType_t nccl;
  std::size_t bytes;
};
constexpr Type kTypes[] = {
    {"int8", ncclInt8, 1},         {"uint8", ncclUint8, 1},     {"int32", ncclInt32, 4},
    {"uint32", ncclUint32, 4},     {"int64", ncclInt64, 8},     {"uint64", ncclUint64, 8},
    {"float16", ncclFloat16, 2},   {"float32", ncclFloat32, 4}, {"float64", ncclFloat64, 8},
    {"bfloat16", ncclBfloat16, 2}, {"e4m3", ncclFloat8e4m3, 1}, {"e5m2", ncclFloat8e5m2, 1}};
constexpr Type kFloat{"float32", ncclFloat32, 4};

template <class F>
void with_type(ncclDataType_t type, F&& f) {
  switch (type) {
    case ncclInt8:
      return f(std::int8_t{});
    case ncclUint8:
      return f(std::uint8_t{});
    case ncclInt32:
      return f(std::int32_t{});
    case ncclUint32:
      return f(std::uint32_t{});
    case ncclInt64:
      return f(static_cast<long long>(0));
    case ncclUint64:
      return f(static_cast<unsigned long long>(0));
    case ncclFloat16:
      return f(__half{});
    case ncclFloat32:
      return f(float{});
    case ncclFloat64:
      return f(double{});
    case ncclBfloat16:
      return f(__nv_bfloat16{});
    case ncclFloat8e4m3:
      return f(__nv_fp8_e4m3{});
    case ncclFloat8e5m2:
      return f(__nv_fp8_e5m2{});
    default:
      fail("a type");
  }
}

// Whole numbers that every type holds, as their sums and products do.
__device__ float number(std::uint64_t seed, std::size_t i) {
  return static_cast<float>(1 + (i * 2654435761u + seed * 40503u >> 7) % 2);
}

template <class T>
__global__ void fill(T* x, std::size_t count, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    x[i] = static_cast<T>(number(seed, i));
  }
}

// what: -1: of the rank `seed` alone; else the operator, over ranks from 0, times `factor`.
template <class T>
__global__ void compare_values(const T* x, std::size_t count, std::size_t from, int ranks, int what,
                               std::uint64_t seed, float factor, unsigned long long* wrong) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < count;
       i += std::size_t{gridDim.x} * blockDim.x) {
    float expected = number(seed, from + i);
    if (what >= 0) {
      expected = number(0, from + i);
      for (int r = 1; r < ranks; ++r) {
        const float v = number(r, from + i);
        if (what == ncclSum || what == ncclAvg) expected += v;
        if (what == ncclProd) expected *= v;
        if (what == ncclMax) expected = fmaxf(expected, v);
        if (what == ncclMin) expected = fminf(expected, v);
      }
      if (what == ncclAvg) expected /= ranks;
    }
    const auto rounded = static_cast<float>(static_cast<T>(expected * factor));
    if (rounded != static_cast<float>(x[i])) atomicAdd(wrong, 1ull);
  }
}

// What all threads share.
struct Job {
  explicit Job(int n) : ranks(n), meet(n) {
    for (ncclUniqueId& id : ids) CHECK(ncclGetUniqueId(&id));
  }
  int ranks;
  std::barrier<> meet;
  std::array<ncclUniqueId, 64> ids;
  std::atomic<int> step{0};
};

struct Rank {
  Job& job;
  int rank;
  std::size_t next_id = 0;
  ncclComm_t comm = nullptr;
  cudaStream_t stream = nullptr;
  unsigned char *a = nullptr, *b = nullptr;
  unsigned long long* wrong = nullptr;

  Rank(Job& j, int r) : job(j), rank(r) {
    CHECK(cudaSetDevice(rank));
    comm = make();
    stream = new_stream();
    CHECK(cudaMalloc(&a, kMost * 2));
    CHECK(cudaMalloc(&b, kMost * 2));
    CHECK(cudaMalloc(&wrong, sizeof(*wrong)));
  }
  ncclComm_t make() {
    ncclComm_t made = nullptr;
    CHECK(ncclCommInitRank(&made, job.ranks, job.ids[next_id++ % job.ids.size()], rank));
    return made;
  }
  static cudaStream_t new_stream() {
    cudaStream_t s = nullptr;
    CHECK(cudaStreamCreateWithFlags(&s, cudaStreamNonBlocking));
    return s;
  }
  void put(void* x, std::size_t count, const Type& t, std::uint64_t seed, cudaStream_t s) const {
    with_type(t.nccl, [&](auto e) {
      using T = decltype(e);
      fill<T><<<256, 256, 0, s>>>(static_cast<T*>(x), count, seed);
    });
    CHECK(cudaGetLastError());
  }
  // what: see compare_values.
  void expect(const void* x, std::size_t count, const Type& t, int what, std::uint64_t seed,
              cudaStream_t s, const std::string& text, std::size_t from = 0, float factor = 1) {
    CHECK(cudaMemsetAsync(wrong, 0, sizeof(*wrong), s));
    with_type(t.nccl, [&](auto e) {
      using T = decltype(e);
      compare_values<T><<<256, 256, 0, s>>>(static_cast<const T*>(x), count, from, job.ranks, what,
                                            seed, factor, wrong);
    });
    unsigned long long many = 0;
    CHECK(cudaMemcpyAsync(&many, wrong, sizeof(many), cudaMemcpyDeviceToHost, s));
    CHECK(cudaStreamSynchronize(s));
    if (many != 0)
      fail(text + ": " + std::to_string(many) + " of " + std::to_string(count) + " wrong");
  }
};

// ---- kinds, types, operators, sizes ----

void reductions(Rank& r, const Type& t, std::size_t count, ncclRedOp_t op, bool in_place) {
  const std::string what = std::string(t.name) + " op " + std::to_string(op) + " count " +
                           std::to_string(count) + (in_place ? " in place" : "");
  unsigned char* const out = in_place ? r.a : r.b;
  const int ranks = r.job.ranks;
  r.put(r.a, count, t, r.rank, r.stream);
  CHECK(ncclAllReduce(r.a, out, count, t.nccl, op, r.comm, r.stream));
  r.expect(out, count, t, op, 0, r.stream, "all-reduce " + what);

  r.put(r.a, count, t, r.rank, r.stream);
  CHECK(ncclReduce(r.a, r.rank == 1 ? out : nullptr, count, t.nccl, op, 1, r.comm, r.stream));
  if (r.rank == 1) r.expect(out, count, t, op, 0, r.stream, "reduce " + what);

  const std::size_t part = std::max<std::size_t>(count / ranks, 1);
  r.put(r.a, part * ranks, t, r.rank, r.stream);
  unsigned char* const mine = in_place ? r.a + r.rank * part * t.bytes : r.b;
  CHECK(ncclReduceScatter(r.a, mine, part, t.nccl, op, r.comm, r.stream));
  r.expect(mine, part, t, op, 0, r.stream, "reduce-scatter " + what, r.rank * part);
}

void moves(Rank& r, const Type& t, std::size_t count, bool in_place) {
  const std::string what =
      std::string(t.name) + " count " + std::to_string(count) + (in_place ? " in place" : "");
  const int ranks = r.job.ranks;
  r.put(r.a, count, t, r.rank, r.stream);
  unsigned char* const out = in_place ? r.a : r.b;
  CHECK(ncclBroadcast(r.a, out, count, t.nccl, 1, r.comm, r.stream));
  r.expect(out, count, t, -1, 1, r.stream, "broadcast " + what);

  const std::size_t part = std::max<std::size_t>(count / ranks, 1), bytes = part * t.bytes;
  unsigned char* const mine = in_place ? r.b + r.rank * bytes : r.a;
  r.put(mine, part, t, r.rank, r.stream);
  CHECK(ncclAllGather(mine, r.b, part, t.nccl, r.comm, r.stream));
  for (int p = 0; p < ranks; ++p) {
    r.expect(r.b + p * bytes, part, t, -1, p, r.stream, "all-gather " + what);
  }
  r.put(mine, part, t, r.rank, r.stream);
  CHECK(ncclGather(mine, r.b, part, t.nccl, 0, r.comm, r.stream));
  for (int p = 0; p < ranks && r.rank == 0; ++p) {
    r.expect(r.b + p * bytes, part, t, -1, p, r.stream, "gather " + what);
  }
  for (int p = 0; p < ranks; ++p) r.put(r.b + p * bytes, part, t, 10 * r.rank + p, r.stream);
  const bool at_place = in_place && r.rank == 0;
  unsigned char* const got = at_place ? r.b : r.a;
  CHECK(ncclScatter(r.b, got, part, t.nccl, 0, r.comm, r.stream));
  r.expect(got, part, t, -1, r.rank, r.stream, "scatter " + what);
  for (int p = 0; p < ranks; ++p) r.put(r.b + p * bytes, part, t, 10 * r.rank + p, r.stream);
  CHECK(ncclAlltoAll(r.b, r.a, part, t.nccl, r.comm, r.stream));
  for (int p = 0; p < ranks; ++p) {
    r.expect(r.a + p * bytes, part, t, -1, 10 * p + r.rank, r.stream, "all-to-all " + what);
  }
}

void exchange(Rank& r, const Type& t, std::size_t count, bool send_first) {
  const int to = (r.rank + 1) % r.job.ranks, from = (r.rank + r.job.ranks - 1) % r.job.ranks;
  r.put(r.a, count, t, r.rank, r.stream);
  CHECK(ncclGroupStart());
  if (send_first) CHECK(ncclSend(r.a, count, t.nccl, to, r.comm, r.stream));
  CHECK(ncclRecv(r.b, count, t.nccl, from, r.comm, r.stream));
  if (!send_first) CHECK(ncclSend(r.a, count, t.nccl, to, r.comm, r.stream));
  CHECK(ncclGroupEnd());
  r.expect(r.b, count, t, -1, from, r.stream, "send and receive " + std::to_string(count));
}

void types(Rank& r) {
  for (const Type& t : kTypes) {
    for (const std::size_t count : {std::size_t{1027}, std::size_t{300'000}}) {
      for (const bool in_place : {false, true}) {
        for (const ncclRedOp_t op : {ncclSum, ncclProd, ncclMax, ncclMin, ncclAvg}) {
          reductions(r, t, count, op, in_place);
        }
        moves(r, t, count, in_place);
      }
      exchange(r, t, count, r.rank % 2 == 0);
    }
  }
}

void sizes(Rank& r) {
  for (std::size_t bytes = 8; bytes <= kMost; bytes *= 8) {
    for (const bool in_place : {false, true}) {
      reductions(r, kFloat, bytes / 4, ncclSum, in_place);
      moves(r, kFloat, bytes / 4, in_place);
    }
    exchange(r, kFloat, bytes / 4, true);
    if (bytes * 8 > kMost && bytes < kMost) bytes = kMost / 8;
  }
}

void multiply(Rank& r) {
  for (const Type& t : {kTypes[2], kTypes[6], kTypes[7], kTypes[8], kTypes[9]}) {
    for (const ncclScalarResidence_t where : {ncclScalarHostImmediate, ncclScalarDevice}) {
      unsigned char host[8] = {};
      with_type(t.nccl, [&](auto e) {
        using T = decltype(e);
        const T two = static_cast<T>(2.0f);
        std::memcpy(host, &two, sizeof(two));
      });
      void* device = nullptr;
      CHECK(cudaMalloc(&device, 8));
      CHECK(cudaMemcpy(device, host, 8, cudaMemcpyHostToDevice));
      ncclRedOp_t op;
      CHECK(ncclRedOpCreatePreMulSum(&op, where == ncclScalarDevice ? device : host, t.nccl, where,
                                     r.comm));
      for (const std::size_t count : {std::size_t{1000}, std::size_t{4} << 20}) {
        r.put(r.a, count, t, r.rank, r.stream);
        CHECK(ncclAllReduce(r.a, r.b, count, t.nccl, op, r.comm, r.stream));
        r.expect(r.b, count, t, ncclSum, 0, r.stream, std::string("scaled ") + t.name, 0, 2);
        const std::size_t part = count / r.job.ranks;
        CHECK(ncclReduceScatter(r.a, r.b, part, t.nccl, op, r.comm, r.stream));
        r.expect(r.b, part, t, ncclSum, 0, r.stream, "scaled, scattered", r.rank * part, 2);
      }
      CHECK(ncclRedOpDestroy(op, r.comm));
      CHECK(cudaFree(device));
    }
  }
}

// ---- groups and orders ----

void groups(Rank& r) {
  const int ranks = r.job.ranks;
  const std::size_t count = 1 << 20, bytes = count * 4;
  for (int turn = 0; turn < 6; ++turn) {
    // All to all by sends and receives, oneself included, in another order on each rank.
    for (int p = 0; p < ranks; ++p) {
      r.put(r.a + p * bytes, count, kFloat, 10 * r.rank + p, r.stream);
    }
    CHECK(ncclGroupStart());
    for (int i = 0; i < ranks; ++i) {
      const int p = (i + turn * r.rank) % ranks;
      if (turn % 2 == 0) CHECK(ncclSend(r.a + p * bytes, count, ncclFloat, p, r.comm, r.stream));
      CHECK(ncclRecv(r.b + p * bytes, count, ncclFloat, p, r.comm, r.stream));
      if (turn % 2 != 0) CHECK(ncclSend(r.a + p * bytes, count, ncclFloat, p, r.comm, r.stream));
    }
    CHECK(ncclGroupEnd());
    for (int p = 0; p < ranks; ++p) {
      r.expect(r.b + p * bytes, count, kFloat, -1, 10 * p + r.rank, r.stream, "grouped");
    }
  }
  // Two communicators in one group and stream, crossed; and one in two streams, which join.
  const ncclComm_t other = r.make();
  cudaStream_t second = Rank::new_stream();
  for (int turn = 0; turn < 4; ++turn) {
    r.put(r.a, count, kFloat, r.rank, r.stream);
    r.put(r.a + bytes, count, kFloat, r.rank, r.stream);
    CHECK(ncclGroupStart());
    for (int i = 0; i < 2; ++i) {
      const int which = (i + r.rank) % 2;
      CHECK(ncclAllReduce(r.a + which * bytes, r.b + which * bytes, count, ncclFloat, ncclSum,
                          which == 0 ? r.comm : other, r.stream));
    }
    CHECK(ncclGroupEnd());
    r.expect(r.b, count, kFloat, ncclSum, 0, r.stream, "the first of two");
    r.expect(r.b + bytes, count, kFloat, ncclSum, 0, r.stream, "the second of two");
    r.put(r.a, count, kFloat, r.rank, second);
    CHECK(ncclGroupStart());
    CHECK(ncclAllReduce(r.a, r.b, count, ncclFloat, ncclSum, r.comm, r.stream));
    CHECK(ncclAllReduce(r.a + bytes, r.b + bytes, count, ncclFloat, ncclMax, r.comm, second));
    CHECK(ncclGroupEnd());
    r.expect(r.b + bytes, count, kFloat, ncclMax, 0, r.stream, "in the other stream");
    r.expect(r.b, count, kFloat, ncclSum, 0, second, "in two streams");
  }
  CHECK(ncclCommDestroy(other));
}

// Several communicators with a stream each, called in another random order on every rank.
void crossed(Rank& r) {
  constexpr int kComms = 8, kTurns = 40;
  const std::size_t count = 2 << 20;
  std::vector<ncclComm_t> comms;
  std::vector<cudaStream_t> streams;
  for (int c = 0; c < kComms; ++c) {
    comms.push_back(r.make());
    streams.push_back(Rank::new_stream());
  }
  std::mt19937 random(7 + static_cast<unsigned>(r.rank));
  for (int turn = 0; turn < kTurns; ++turn) {
    std::vector<int> order(kComms);
    for (int c = 0; c < kComms; ++c) order[static_cast<std::size_t>(c)] = c;
    std::shuffle(order.begin(), order.end(), random);
    for (const int c : order) {
      const auto i = static_cast<std::size_t>(c);
      unsigned char* const x = r.a + i * count * 4;
      r.put(x, count, kFloat, r.rank, streams[i]);
      CHECK(ncclAllReduce(x, x, count, ncclFloat, ncclSum, comms[i], streams[i]));
    }
    CHECK(cudaDeviceSynchronize());
    for (std::size_t i = 0; i < kComms; ++i) {
      r.expect(r.a + i * count * 4, count, kFloat, ncclSum, 0, streams[i], "crossed");
    }
  }
  for (const ncclComm_t c : comms) CHECK(ncclCommDestroy(c));
}

// Rank 0 calls A, synchronises its device, calls B; the others call B, then A.
void one_synchronises(Rank& r) {
  const std::size_t count = 1 << 20;
  const ncclComm_t a = r.make(), b = r.make();
  const cudaStream_t sa = Rank::new_stream(), sb = Rank::new_stream();
  float* const x = reinterpret_cast<float*>(r.a);
  float* const y = x + count;
  for (int turn = 0; turn < 20; ++turn) {
    r.put(x, count, kFloat, r.rank, sa);
    r.put(y, count, kFloat, r.rank, sb);
    const auto call_a = [&] { CHECK(ncclAllReduce(x, x, count, ncclFloat, ncclSum, a, sa)); };
    const auto call_b = [&] { CHECK(ncclAllReduce(y, y, count, ncclFloat, ncclSum, b, sb)); };
    if (r.rank == 0) {
      call_a();
      CHECK(cudaDeviceSynchronize());
      call_b();
    } else {
      call_b();
      call_a();
    }
    r.expect(x, count, kFloat, ncclSum, 0, sa, "A");
    r.expect(y, count, kFloat, ncclSum, 0, sb, "B");
  }
  CHECK(ncclCommDestroy(a));
  CHECK(ncclCommDestroy(b));
}

// ---- communicators ----

void splits(Rank& r) {
  ncclComm_t all = nullptr, alone = nullptr;
  CHECK(ncclCommSplit(r.comm, 0, -r.rank, &all, nullptr));
  int mine = -1;
  CHECK(ncclCommUserRank(all, &mine));
  if (mine != r.job.ranks - 1 - r.rank) fail("a split has the wrong order");
  CHECK(ncclCommSplit(r.comm, r.rank, 0, &alone, nullptr));
  r.put(r.a, 1000, kFloat, r.rank, r.stream);
  CHECK(ncclAllReduce(r.a, r.b, 1000, ncclFloat, ncclSum, all, r.stream));
  r.expect(r.b, 1000, kFloat, ncclSum, 0, r.stream, "of a split");
  CHECK(ncclAllReduce(r.a, r.b, 1000, ncclFloat, ncclSum, alone, r.stream));
  r.expect(r.b, 1000, kFloat, -1, static_cast<std::uint64_t>(r.rank), r.stream, "of one rank");
  CHECK(ncclCommDestroy(all));
  CHECK(ncclCommDestroy(alone));
}

// Rank 0 has a call in a stream that no other rank makes; rank 1 aborts.
void aborts(Rank& r) {
  const ncclComm_t comm = r.make();
  const cudaStream_t s = Rank::new_stream();
  r.job.meet.arrive_and_wait();
  if (r.rank == 1) {
    while (r.job.step.load() < 1) std::this_thread::yield();
    CHECK(ncclCommAbort(comm));
    r.job.meet.arrive_and_wait();
  } else {
    CHECK(ncclAllReduce(r.a, r.b, 1 << 20, ncclFloat, ncclSum, comm, s));
    if (r.rank == 0) r.job.step = 1;
    ncclResult_t error = ncclSuccess;
    while (error == ncclSuccess) CHECK(ncclCommGetAsyncError(comm, &error));
    std::string text = ncclGetLastError(comm);
    CHECK(cudaStreamSynchronize(s));  // the stream goes on
    if (error != ncclRemoteError) fail("the error is " + std::to_string(error) + ": " + text);
    CHECK(ncclCommAbort(comm));
    r.job.meet.arrive_and_wait();
  }
  // The first communicator does not know of it.
  r.put(r.a, 1000, kFloat, r.rank, r.stream);
  CHECK(ncclAllReduce(r.a, r.b, 1000, ncclFloat, ncclSum, r.comm, r.stream));
  r.expect(r.b, 1000, kFloat, ncclSum, 0, r.stream, "beside an abort");
}

// Ranks that differ in the count hear of it.
void disagrees(Rank& r) {
  const ncclComm_t comm = r.make();
  CHECK(ncclAllReduce(r.a, r.b, 1000 + r.rank, ncclFloat, ncclSum, comm, r.stream));
  ncclResult_t error = ncclSuccess;
  while (error == ncclSuccess) CHECK(ncclCommGetAsyncError(comm, &error));
  const std::string text = ncclGetLastError(comm);
  if (text.find("count=1000") == std::string::npos) fail("no count in: " + text);
  CHECK(cudaStreamSynchronize(r.stream));
  CHECK(ncclCommAbort(comm));
  r.job.meet.arrive_and_wait();
}

void refuses(Rank& r) {
  cudaGraph_t graph = nullptr;
  const cudaStream_t s = Rank::new_stream();
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  const ncclResult_t code = ncclAllReduce(r.a, r.b, 1000, ncclFloat, ncclSum, r.comm, s);
  CHECK(cudaStreamEndCapture(s, &graph));
  CHECK(cudaGraphDestroy(graph));
  if (code != ncclInvalidUsage) fail("a captured stream gave " + std::to_string(code));
  ncclWindow_t window = nullptr;
  if (ncclCommWindowRegister(r.comm, r.a, 4096, &window, 0) != ncclInvalidUsage) fail("a window");
  void *memory = nullptr, *handle = nullptr;
  CHECK(ncclMemAlloc(&memory, 1 << 20));
  CHECK(ncclCommRegister(r.comm, memory, 1 << 20, &handle));
  r.put(r.a, 1000, kFloat, r.rank, r.stream);
  CHECK(ncclAllReduce(r.a, memory, 1000, ncclFloat, ncclSum, r.comm, r.stream));
  r.expect(memory, 1000, kFloat, ncclSum, 0, r.stream, "into registered memory");
  CHECK(ncclCommDeregister(r.comm, handle));
  CHECK(ncclMemFree(memory));
}

struct Check {
  const char* name;
  void (*run)(Rank&);
};
constexpr Check kChecks[] = {{"types", types},
                             {"sizes", sizes},
                             {"multiply", multiply},
                             {"groups", groups},
                             {"splits", splits},
                             {"crossed", crossed},
                             {"one_synchronises", one_synchronises},
                             {"aborts", aborts},
                             {"disagrees", disagrees},
                             {"refuses", refuses}};

// ---- times ----

struct Timed {
  const char* name;
  std::function<void()> call;
};

void times(Rank& r) {
  for (const std::size_t bytes : {std::size_t{1} << 10, std::size_t{64} << 10, std::size_t{1} << 20,
                                  std::size_t{16} << 20, std::size_t{256} << 20}) {
    const int calls = bytes > (8 << 20) ? 50 : 500;
    const std::size_t part = bytes / 4 / static_cast<std::size_t>(r.job.ranks);
    const std::vector<Timed> kinds = {
        {"all_reduce",
         [&] { CHECK(ncclAllReduce(r.a, r.b, bytes / 4, ncclFloat, ncclSum, r.comm, r.stream)); }},
        {"all_gather", [&] { CHECK(ncclAllGather(r.a, r.b, part, ncclFloat, r.comm, r.stream)); }},
        {"reduce_scatter",
         [&] { CHECK(ncclReduceScatter(r.a, r.b, part, ncclFloat, ncclSum, r.comm, r.stream)); }},
        {"exchange", [&] {
           const int peer = r.job.ranks - 1 - r.rank;
           CHECK(ncclGroupStart());
           CHECK(ncclSend(r.a, bytes / 4, ncclFloat, peer, r.comm, r.stream));
           CHECK(ncclRecv(r.b, bytes / 4, ncclFloat, peer, r.comm, r.stream));
           CHECK(ncclGroupEnd());
         }}};
    for (const auto& kind : kinds) {
      double best = 1e30;
      for (int round = 0; round < 4; ++round) {
        cudaEvent_t begin, end;
        CHECK(cudaEventCreate(&begin));
        CHECK(cudaEventCreate(&end));
        for (int i = 0; i < 5; ++i) kind.call();
        CHECK(cudaStreamSynchronize(r.stream));
        r.job.meet.arrive_and_wait();
        CHECK(cudaEventRecord(begin, r.stream));
        for (int i = 0; i < calls; ++i) kind.call();
        CHECK(cudaEventRecord(end, r.stream));
        CHECK(cudaStreamSynchronize(r.stream));
        float ms = 0;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (round > 0) best = std::min(best, 1000.0 * ms / calls);
      }
      if (r.rank == 0) std::printf("%-14s %10zu B %10.2f us\n", kind.name, bytes, best);
    }
  }
}

int run(const std::vector<std::string>& names, bool timed) {
  int ranks = 0;
  CHECK(cudaGetDeviceCount(&ranks));
  if (ranks < 2) {
    std::printf("nccl_check needs two GPUs\n");
    return 2;
  }
  Job job(ranks);
  std::atomic<int> failed{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      const char* at = "the beginning";
      try {
        Rank r(job, rank);
        if (timed) times(r);
        for (const Check& c : kChecks) {
          const bool wanted = names.empty() || std::count(names.begin(), names.end(), c.name) != 0;
          if (timed || !wanted) continue;
          at = c.name;
          job.step = 0;
          job.meet.arrive_and_wait();
          const auto begin = std::chrono::steady_clock::now();
          c.run(r);
          CHECK(cudaDeviceSynchronize());
          job.meet.arrive_and_wait();
          const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
          if (rank == 0) {
            std::printf("ok %-18s %.1f s\n", c.name, took.count());
            std::fflush(stdout);
          }
        }
        CHECK(ncclCommDestroy(r.comm));
      } catch (const std::exception& e) {
        std::printf("FAILED %s, rank %d: %s\n", at, rank, e.what());
        std::fflush(stdout);
        failed = 1;
        std::_Exit(1);  // the others wait for this one
      }
    });
  }
  for (std::thread& t : threads) t.join();
  int version = 0;
  CHECK(ncclGetVersion(&version));
  std::printf("nccl_check: done, %d ranks, version %d\n", ranks, version);
  return failed.load();
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> names(argv + 1, argv + argc);
  const bool timed = !names.empty() && names[0] == "--times";
  try {
    return run(timed ? std::vector<std::string>{} : names, timed);
  } catch (const std::exception& e) {
    std::printf("FAILED: %s\n", e.what());
    return 1;
  }
}
