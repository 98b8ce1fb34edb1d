// Calls in streams that may run without the engine (UNJAM_IN_STREAM): every kind, with sizes that
// end anywhere, at any alignment, in place and not, checked bit by bit against a reference of its
// own; first undisturbed, then with ranks that come late, GPUs that are nearly full and daemons
// that have the lanes. All of it twice, by the engine, then without it, and once more with calls
// beside their streams among them, others on each rank: the bits must be the same. Then the same of
// all-reduces by the two-shot plan, with sizes around its bounds; and of rsag plans and chains, of
// one chunk to many, also with no patience at all: the engine takes over what each call has come
// to.
#include <chrono>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <thread>
#include <vector>

#include "tests/gpu/exchange.cuh"
#include "tests/gpu/job.h"

namespace {

using namespace unjam_gpu;

constexpr int kSend = kNumKinds, kBarrier = kNumKinds + 1, kAllKinds = kNumKinds + 2;
constexpr const char* kNames[kAllKinds] = {"all-reduce", "all-gather", "reduce-scatter", "reduce",
                                           "broadcast",  "all-to-all", "gather",         "scatter",
                                           "send",       "barrier"};

// ---- elements ----

struct Format {
  unjamDataType_t type;
  unjamOp_t op;
  const char* name;
  std::size_t bytes;
};
constexpr Format kFormats[] = {
    {UNJAM_FLOAT32, UNJAM_SUM, "float32 sum", 4},   {UNJAM_BFLOAT16, UNJAM_SUM, "bfloat16 sum", 2},
    {UNJAM_INT8, UNJAM_SUM, "int8 sum", 1},         {UNJAM_INT32, UNJAM_AVG, "int32 avg", 4},
    {UNJAM_FLOAT32, UNJAM_AVG, "float32 avg", 4},   {UNJAM_BFLOAT16, UNJAM_AVG, "bfloat16 avg", 2},
    {UNJAM_INT8, UNJAM_AVG, "int8 avg", 1},         {UNJAM_FLOAT16, UNJAM_MAX, "float16 max", 2},
    {UNJAM_FLOAT64, UNJAM_PROD, "float64 prod", 8}, {UNJAM_INT64, UNJAM_AVG, "int64 avg", 8}};
constexpr std::size_t kCopied = 3;  // formats of kinds that do not reduce

template <class F>
void with_element(unjamDataType_t type, const F& f) {
  if (type == UNJAM_INT8) return f(std::int8_t{});
  with_type(type, f);
}

bool reduces(int kind) {
  return kind == UNJAM_ALL_REDUCE || kind == UNJAM_REDUCE_SCATTER || kind == UNJAM_REDUCE;
}

__host__ __device__ inline std::uint64_t bits_of(std::uint64_t seed, int rank, std::size_t i) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(rank) * 0x9e3779b97f4a7c15u +
                    static_cast<std::uint64_t>(i) * 0xd1342543de82ef95u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  z = (z ^ (z >> 29)) * 0x94d049bb133111ebu;
  return z ^ (z >> 32);
}

template <class T>
struct Accumulator {
  using Type = T;
  static constexpr bool kFloats = false;
};
template <>
struct Accumulator<float> {
  using Type = float;
  static constexpr bool kFloats = true;
};
template <>
struct Accumulator<double> {
  using Type = double;
  static constexpr bool kFloats = true;
};
template <>
struct Accumulator<__nv_bfloat16> {
  using Type = float;
  static constexpr bool kFloats = true;
};
template <>
struct Accumulator<__half> {
  using Type = float;
  static constexpr bool kFloats = true;
};

template <class T>
__device__ T rounded(typename Accumulator<T>::Type x) {
  return x;
}
template <>
__device__ __nv_bfloat16 rounded<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __half rounded<__half>(float x) {
  return __float2half_rn(x);
}
template <class T>
__device__ typename Accumulator<T>::Type widened(T x) {
  return static_cast<typename Accumulator<T>::Type>(x);
}

// What a rank contributes. Fractions, so that the order of adding up shows; `exact`: few small
// numbers, for plans whose order is another one.
template <class T>
__device__ T element_of(std::uint64_t seed, int rank, std::size_t i, bool exact) {
  const std::uint64_t bits = bits_of(seed, rank, i);
  if constexpr (Accumulator<T>::kFloats) {
    if (exact) return rounded<T>(static_cast<float>(1 + bits % 2));
    const float x = static_cast<float>(static_cast<int>(bits & 0xffff) - 0x8000) / 256.0f;
    return rounded<T>(bits >> 62 == 0 ? x / 64.0f : x);
  } else {
    return static_cast<T>(exact ? bits % 8 : bits);
  }
}

struct Want {
  std::uint64_t seed;
  std::size_t count;
  int kind;
  unjamOp_t op;
  int size, at, root;
  bool exact;

  template <class T>
  __device__ T value(std::size_t i) const {
    const std::size_t own = static_cast<std::size_t>(at) * count;
    switch (kind) {
      case UNJAM_SCATTER:
        return element_of<T>(seed, root, own + i, exact);
      case UNJAM_ALL_TO_ALL:
        return element_of<T>(seed, static_cast<int>(i / count), own + i % count, exact);
      case UNJAM_ALL_GATHER:
      case UNJAM_GATHER:
        return element_of<T>(seed, static_cast<int>(i / count), i % count, exact);
      case UNJAM_BROADCAST:
      case kSend:
        return element_of<T>(seed, root, i, exact);
      default:
        return reduced<T>(kind == UNJAM_REDUCE_SCATTER ? own + i : i);
    }
  }

  // In the order of the ranks, rounded once at the end.
  template <class T>
  __device__ T reduced(std::size_t i) const {
    using A = typename Accumulator<T>::Type;
    A sum{};
    for (int r = 0; r < size; ++r) {
      A x = widened(element_of<T>(seed, r, i, exact));
      if constexpr (Accumulator<T>::kFloats) {
        if (op == UNJAM_AVG) x = times(x, static_cast<A>(1.0 / size));
      }
      if (r == 0) {
        sum = x;
      } else if (op == UNJAM_MAX) {
        sum = sum < x ? x : sum;
      } else if (op == UNJAM_PROD) {
        sum = times(sum, x);
      } else {
        sum = plus(sum, x);
      }
    }
    if constexpr (!Accumulator<T>::kFloats) {
      if (op == UNJAM_AVG) sum = static_cast<A>(sum / size);
    }
    return rounded<T>(sum);
  }

  static __device__ float times(float a, float b) { return __fmul_rn(a, b); }
  static __device__ double times(double a, double b) { return __dmul_rn(a, b); }
  static __device__ float plus(float a, float b) { return __fadd_rn(a, b); }
  static __device__ double plus(double a, double b) { return __dadd_rn(a, b); }
  template <class T>
  static __device__ T times(T a, T b) {
    return static_cast<T>(static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(b));
  }
  template <class T>
  static __device__ T plus(T a, T b) {
    return static_cast<T>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  }
};

template <class T>
__global__ void fill_elements(T* data, std::size_t elems, std::uint64_t seed, int rank,
                              bool exact) {
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < elems;
       i += std::size_t{gridDim.x} * blockDim.x) {
    data[i] = element_of<T>(seed, rank, i, exact);
  }
}

// `guards`: whether what is in front of the data and behind them must still be poison.
template <class T>
__global__ void check_elements(const T* data, std::size_t elems, Want want, bool guards,
                               Report* report) {
  unsigned long long wrong = 0, digest = 0, first = 0;
  for (std::size_t i = blockIdx.x * std::size_t{blockDim.x} + threadIdx.x; i < elems;
       i += std::size_t{gridDim.x} * blockDim.x) {
    const T expected = want.value<T>(i), got = data[i];
    unsigned long long a = 0, b = 0;
    memcpy(&a, &expected, sizeof(T));
    memcpy(&b, &got, sizeof(T));
    if (a != b && wrong++ == 0) first = ~static_cast<unsigned long long>(i);
    digest += (b + 1) * (i * 0x9e3779b97f4a7c15u + 1);
  }
  if (guards && blockIdx.x == 0 && threadIdx.x < kGuardBytes) {
    const auto* begin = reinterpret_cast<const unsigned char*>(data);
    const auto* end = reinterpret_cast<const unsigned char*>(data + elems);
    if (end[threadIdx.x] != kPoison) atomicAdd(&report->overwritten, 1ull);
    if (begin[-1 - static_cast<int>(threadIdx.x)] != kPoison) atomicAdd(&report->overwritten, 1ull);
  }
  atomicAdd(&report->digest, digest);
  if (wrong != 0) {
    atomicAdd(&report->wrong, wrong);
    atomicMax(&report->first_inverted, first);
  }
}

// A barrier: who is in front of it says so, who is behind it looks.
__global__ void arrive(std::uint64_t* places, int rank, std::uint64_t round) {
  reinterpret_cast<volatile std::uint64_t*>(places)[rank] = round;
  __threadfence_system();
}
__global__ void look_round(const std::uint64_t* places, int ranks, std::uint64_t round,
                           Report* report) {
  for (int r = 0; r < ranks; ++r) {
    if (reinterpret_cast<const volatile std::uint64_t*>(places)[r] < round) ++report->wrong;
  }
}

// ---- cases ----

struct Case {
  int kind = 0;
  const Format* format = kFormats;
  std::size_t count = 1;
  int root = 0;
  bool in_place = false;
  bool shifted = false;  // by an element, and another number of them on the other side
  bool exact = false;
  std::uint64_t seed = 0;

  std::string text() const {
    return std::string(kNames[kind]) + " of " + std::to_string(count) + " " + format->name +
           ", root " + std::to_string(root) + (in_place ? ", in place" : "") +
           (shifted ? ", shifted" : "");
  }
};

// From here on other plans than one-shot ones may serve, with another order of adding up.
constexpr std::size_t kExactBytes = 16 * 1024;

// The case, in place and not, and its buffers shifted and not. Its seeds are numbered from `first`
// on.
void add_ways(const Case& like, std::uint64_t seed, std::size_t first, std::vector<Case>& cases) {
  for (int way = 0; way < 4; ++way) {
    Case c = like;
    c.seed = mix(seed, first + cases.size());
    c.in_place = (way & 1) != 0 && c.kind != UNJAM_ALL_TO_ALL && c.kind != kSend;
    c.shifted = (way & 2) != 0;
    cases.push_back(c);
  }
}

void choose_roots(int ranks, std::size_t first, std::vector<Case>& cases) {
  for (std::size_t i = first; i < cases.size(); ++i) {
    cases[i].root = static_cast<int>(cases[i].seed % static_cast<std::uint64_t>(ranks));
  }
}

std::vector<Case> make_cases(int ranks, std::uint64_t seed, std::size_t most, int only) {
  std::vector<Case> cases;
  for (int kind = 0; kind < kAllKinds; ++kind) {
    if (only >= 0 && kind != only) continue;
    if (kind == kSend && ranks < 2) continue;
    if (kind == kBarrier) {
      for (int i = 0; i < 20; ++i) {
        Case c;
        c.kind = kind;
        c.seed = mix(seed, cases.size());
        cases.push_back(c);
      }
      continue;
    }
    const std::size_t formats = reduces(kind) ? std::size(kFormats) : kCopied;
    for (std::size_t f = 0; f < formats; ++f) {
      const std::size_t bytes = kFormats[f].bytes;
      for (const std::size_t count :
           {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{5}, std::size_t{1000},
            std::size_t{1023}, 8192 / bytes + 1, 16384 / bytes, 65536 / bytes, 65536 / bytes + 7,
            (std::size_t{1} << 20) / bytes, (std::size_t{3} << 19) / bytes + 5,
            (std::size_t{3} << 20) / bytes + 7, (std::size_t{4} << 20) / bytes - 1,
            (std::size_t{4} << 20) / bytes, (std::size_t{4} << 20) / bytes + 5}) {
        // The largest, which packets just carry between two ranks, of a format of each size.
        if (count * bytes > (std::size_t{2} << 20) && f % 4 != 0) continue;
        if (count * bytes > most) continue;
        Case like;
        like.kind = kind;
        like.format = &kFormats[f];
        like.count = count;
        like.exact = count * bytes > kExactBytes;
        const std::size_t first = cases.size();
        add_ways(like, seed, 0, cases);
        choose_roots(ranks, first, cases);
      }
    }
  }
  return cases;
}

// All-reduces for the two-shot plan. Its order of adding up is the ranks', whatever the size.
constexpr int kTwoShot = 4;  // unjamConfig_t::algorithm
std::vector<Case> make_two_shot_cases(int ranks, std::uint64_t seed, std::size_t most) {
  const auto n = static_cast<std::size_t>(ranks);
  // Of a part: pieces of 16 bytes, a lane's 4 KiB, and what one loop of the default 32 lanes
  // carries: half a slot each, or, of lines, seven eighths. Beyond that it is the engine's, in
  // several loops.
  constexpr std::size_t kPiece = 16, kLane = 4096;
  const std::size_t kLoop = 32 * (ranks == 2 ? 131072 : 65536);
  std::vector<Case> cases;
  for (const Format& format : kFormats) {
    const std::size_t piece = kPiece / format.bytes, lane = kLane / format.bytes;
    const std::size_t loop = kLoop / format.bytes;
    for (const std::size_t count :
         {std::size_t{1}, n * piece - piece, n * piece - piece + 1, n * piece, n * piece + 1,
          n * piece * 7 + piece + 1, n * lane - 1, n * lane, n * lane + 1, n * lane * 3 / 2 + 3,
          n * lane * 16 + 7, n * lane * 32, n * lane * 64 - piece - 1, n * loop / 2 + 5,
          n * loop - 1, n * loop, n * loop + 1, 2 * n * loop + 3}) {
      if (count * format.bytes > most) continue;
      Case like;
      like.kind = UNJAM_ALL_REDUCE;
      like.format = &format;
      like.count = count;
      add_ways(like, seed, 1'000'000, cases);
    }
  }
  return cases;
}

// Rsag plans in slots of 4 KiB, which 32 lanes have a chunk each of from 128 KiB a part on.
// Chains have one part; each rank adds its own contribution, and rounds.
constexpr int kRsag = 2, kChain = 5;
constexpr unsigned kMeshSlot = 4096;
std::vector<Case> make_mesh_cases(int ranks, std::uint64_t seed, std::size_t most, int only,
                                  bool chains) {
  std::vector<Case> cases;
  for (const int kind :
       {UNJAM_ALL_REDUCE, UNJAM_ALL_GATHER, UNJAM_REDUCE_SCATTER, UNJAM_REDUCE, UNJAM_BROADCAST}) {
    const bool rooted = kind == UNJAM_REDUCE || kind == UNJAM_BROADCAST;
    if ((only >= 0 && kind != only) || (chains && !rooted)) continue;
    std::size_t parts = kind == UNJAM_ALL_REDUCE ? static_cast<std::size_t>(ranks) : 1;
    if (rooted && !chains) parts = static_cast<std::size_t>(ranks - 1);
    const std::size_t formats = reduces(kind) ? std::size(kFormats) : kCopied;
    for (std::size_t f = 0; f < formats; ++f) {
      const std::size_t loop = parts * 32 * kMeshSlot / kFormats[f].bytes;
      const std::size_t piece = 16 / kFormats[f].bytes;
      for (const std::size_t count :
           {loop / 16 + 1, loop / 2 + 3, loop - 1, loop, loop + 1, loop + loop / 2 + 5, 2 * loop,
            2 * loop - piece - 1, 3 * loop - 7, 7 * loop + 3, 16 * loop}) {
        if (count * kFormats[f].bytes > most) continue;
        // (A third of anything is not exact.)
        const bool is_exact = kFormats[f].op != UNJAM_AVG || (ranks & (ranks - 1)) == 0;
        if (chains && kind == UNJAM_REDUCE && !is_exact) continue;
        Case like;
        like.kind = kind;
        like.format = &kFormats[f];
        like.count = count;
        like.exact = chains;
        const std::size_t first = cases.size();
        add_ways(like, seed, chains ? 3'000'000 : 2'000'000, cases);
        choose_roots(ranks, first, cases);
      }
    }
  }
  return cases;
}

// ---- a rank ----

struct Blocks {
  std::size_t send, recv;  // elements
  bool sends, receives;
};
Blocks blocks_of(const Case& c, int ranks, int at) {
  const auto n = static_cast<std::size_t>(ranks);
  const bool send_blocks =
      c.kind == UNJAM_REDUCE_SCATTER || c.kind == UNJAM_SCATTER || c.kind == UNJAM_ALL_TO_ALL;
  const bool recv_blocks =
      c.kind == UNJAM_ALL_GATHER || c.kind == UNJAM_GATHER || c.kind == UNJAM_ALL_TO_ALL;
  Blocks b{c.count * (send_blocks ? n : 1), c.count * (recv_blocks ? n : 1), true, true};
  if (c.kind == UNJAM_REDUCE || c.kind == UNJAM_GATHER) b.receives = at == c.root;
  if (c.kind == UNJAM_BROADCAST || c.kind == UNJAM_SCATTER) b.sends = at == c.root;
  if (c.kind == kSend) {
    b.sends = at == c.root;
    b.receives = at == (c.root + 1) % ranks;
  }
  return b;
}

std::size_t memory_of(const Case& c, int ranks) {
  const Blocks b = blocks_of(c, ranks, 0);
  return (b.send + b.recv + 8) * c.format->bytes + 6 * kGuardBytes;
}

// What is in the way, in the disturbed rounds.
struct Disturbance {
  std::uint64_t delay_ns = 0;  // of this rank's stream
  bool crowd = false;          // hardly an SM is free on this rank's GPU
  bool beside = false;         // a collective beside the stream: a daemon has the lanes
};

Disturbance disturb(const Case& c, int repeat, int rank) {
  std::mt19937_64 random(mix(mix(c.seed, static_cast<std::uint64_t>(repeat)), 77));
  Disturbance d;
  d.beside = random() % 16 == 0;  // the same on all ranks
  for (int i = 0; i < rank; ++i) random.discard(4);
  const std::uint64_t what = random() % 8, ns = random() % 1'000'000, crowd = random() % 8;
  // About as long as a lane waits before it gives up: some lanes do.
  if (what < 3) d.delay_ns = what == 0 ? ns : 100'000 + ns % 500'000;
  d.crowd = crowd == 0;
  return d;
}

// How calls are made: within their streams, with the engine's help or without it at all; or some
// beside them.
enum class Way { kEngine, kInStream, kMixed };

class Rank {
 public:
  Rank(const Member& me, Way way, std::size_t memory, int repeats, std::uint64_t* places)
      : me_(me),
        way_(way),
        memory_(memory),
        beside_memory_(kBesideFloats * sizeof(float)),
        reports_(static_cast<std::size_t>(repeats)),
        repeats_(repeats),
        places_(places) {
    check(cudaMemset(beside_memory_.get(), 0, kBesideFloats * sizeof(float)));
    check(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, me.device));
  }

  // Returns the digest of what was received in all repetitions.
  std::uint64_t run(const Case& c, bool disturbed) {
    std::vector<unjamRequest_t> requests;
    me_.doing((disturbed ? "disturbed: " : "undisturbed: ") + c.text());
    for (int i = 0; i < repeats_; ++i) {
      check(cudaMemsetAsync(reports_.on_device(static_cast<std::size_t>(i)), 0, sizeof(Report),
                            stream_.get()));
      if (c.kind == kBarrier) {
        run_barrier(c, i, disturbed, requests);
      } else {
        run_call(c, i, disturbed, requests);
      }
    }
    reports_.start_fetch(stream_.get());
    stream_.synchronize();
    aside_.synchronize();
    std::uint64_t digest = 0;
    for (unjamRequest_t request : requests) me_.wait(request, c.text());
    for (int i = 0; i < repeats_; ++i) {
      const Report& r = reports_[static_cast<std::size_t>(i)];
      if (r.wrong != 0 || r.overwritten != 0) {
        fail("A WRONG NUMBER: rank " + std::to_string(me_.rank) + ", repetition " +
             std::to_string(i) + (disturbed ? ", disturbed: " : ": ") + c.text() + ": " +
             std::to_string(r.wrong) + " wrong elements, the first is " +
             std::to_string(~r.first_inverted) + "; " + std::to_string(r.overwritten) +
             " bytes written beside them");
      }
      digest = mix(digest, r.digest);
    }
    return digest;
  }

 private:
  static constexpr std::size_t kBesideFloats = std::size_t{1} << 18;

  void get_in_the_way(const Case& c, int repeat, std::vector<unjamRequest_t>& requests) {
    const Disturbance d = disturb(c, repeat, me_.rank);
    if (d.beside) {
      unjamRequest_t request = nullptr;
      auto* data = beside_memory_.as<float>();
      check(unjamAllReduce(me_.all, "beside", data, data, kBesideFloats, UNJAM_FLOAT32, UNJAM_SUM,
                           nullptr, &request));
      requests.push_back(request);
    }
    if (d.crowd) {
      // Two blocks fill an SM; some SMs have none.
      spin_kernel<><<<static_cast<unsigned>(2 * sms_ - 6), 1024, 0, aside_.get()>>>(400'000);
    }
    if (d.delay_ns != 0) spin_kernel<><<<1, 1, 0, stream_.get()>>>(d.delay_ns);
    check(cudaGetLastError());
  }

  void run_call(const Case& c, int i, bool disturbed, std::vector<unjamRequest_t>& requests) {
    const Blocks b = blocks_of(c, me_.ranks, me_.rank);
    const std::size_t bytes = c.format->bytes;
    auto* base = memory_.as<unsigned char>();
    unsigned char* send = base + kGuardBytes + (c.shifted ? bytes : 0);
    unsigned char* recv =
        send + (b.send * bytes + 2 * kGuardBytes + 15) / 16 * 16 + (c.shifted ? 2 * bytes : 0);
    const std::size_t own = static_cast<std::size_t>(me_.rank) * c.count * bytes;
    if (c.in_place) {
      recv = send;
      if (b.recv > b.send) send = recv + own;
      if (b.recv < b.send) recv = send + own;
    }
    // Guards: not where the rest of the input is around what is received.
    const bool guarded = !(c.in_place && b.send > b.recv);
    const std::uint64_t seed = mix(c.seed, static_cast<std::uint64_t>(i));
    const unsigned blocks = blocks_for(std::max(b.send, b.recv));
    if (b.receives) {
      check(cudaMemsetAsync(guarded ? recv - kGuardBytes : recv, kPoison,
                            b.recv * bytes + (guarded ? 2 * kGuardBytes : 0), stream_.get()));
    }
    with_element(c.format->type, [&](auto zero) {
      using T = decltype(zero);
      if (b.sends) {
        fill_elements<T><<<blocks, 256, 0, stream_.get()>>>(reinterpret_cast<T*>(send), b.send,
                                                            seed, me_.rank, c.exact);
      }
    });
    if (disturbed) get_in_the_way(c, i, requests);
    const bool beside = way_ == Way::kMixed && mix(mix(seed, 78), me_.rank) % 3 != 0;
    const unjamCallOptions_t within =
        ordered(beside ? UNJAM_STREAM_ASYNC : UNJAM_STREAM_SYNC, stream_);
    unjamRequest_t request = nullptr;
    const std::string key = kNames[c.kind];
    if (c.kind == kSend) {
      const int to = (c.root + 1) % me_.ranks;
      if (b.sends) {
        check(
            unjamSend(me_.all, key.c_str(), send, c.count, c.format->type, to, &within, &request));
      } else if (b.receives) {
        check(unjamRecv(me_.all, key.c_str(), recv, c.count, c.format->type, c.root, &within,
                        &request));
      }
    } else {
      Spec s;
      s.kind = static_cast<unjamKind_t>(c.kind);
      s.dtype = c.format->type;
      s.op = c.format->op;
      s.count = c.count;
      s.root = c.root;
      s.size = me_.ranks;
      s.at = me_.rank;
      check(call(me_.all, key.c_str(), s, Place{send, recv}, &within, &request));
    }
    if (request != nullptr) requests.push_back(request);
    // (What is sent is overwritten next.)
    if (beside && request != nullptr) check(unjamStreamWait(request, stream_.get()));
    if (!b.receives) return;
    const Want want{seed, c.count, c.kind, c.format->op, me_.ranks, me_.rank, c.root, c.exact};
    with_element(c.format->type, [&](auto zero) {
      using T = decltype(zero);
      check_elements<T><<<blocks, 256, 0, stream_.get()>>>(
          reinterpret_cast<const T*>(recv), b.recv, want, guarded,
          reports_.on_device(static_cast<std::size_t>(i)));
    });
    check(cudaGetLastError());
  }

  void run_barrier(const Case& c, int i, bool disturbed, std::vector<unjamRequest_t>& requests) {
    if (disturbed) get_in_the_way(c, i, requests);
    ++round_;
    arrive<<<1, 1, 0, stream_.get()>>>(places_, me_.rank, round_);
    const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream_);
    unjamRequest_t request = nullptr;
    check(unjamBarrier(me_.all, kNames[kBarrier], &within, &request));
    requests.push_back(request);
    look_round<<<1, 1, 0, stream_.get()>>>(places_, me_.ranks, round_,
                                           reports_.on_device(static_cast<std::size_t>(i)));
    check(cudaGetLastError());
  }

  const Member& me_;
  const Way way_;
  const Stream stream_, aside_;
  const DeviceMemory memory_, beside_memory_;
  const Reports reports_;
  const int repeats_;
  std::uint64_t* const places_;
  std::uint64_t round_ = 0;
  int sms_ = 0;
};

// ---- the job ----

struct Outcome {
  std::vector<std::vector<std::uint64_t>> digests;     // by rank, then case, undisturbed first
  std::map<int, std::pair<std::uint64_t, int>> quiet;  // by kind: rank 0's without engine; all
  std::pair<std::uint64_t, int> disturbed;
  std::uint64_t whole = 0;  // lanes' parts of calls that rank 0's engine did whole
};

// `algorithm`: of unjamConfig_t.
Outcome run_job(int ranks, Way way, int algorithm, const std::vector<Case>& cases, int repeats) {
  setenv("UNJAM_IN_STREAM", way == Way::kEngine ? "0" : "1", 1);
  std::size_t memory = 0;
  for (const Case& c : cases) memory = std::max(memory, memory_of(c, ranks));
  Outcome outcome;
  outcome.digests.resize(static_cast<std::size_t>(ranks));
  const PinnedMemory places(static_cast<std::size_t>(ranks) * sizeof(std::uint64_t));
  std::memset(places.as<std::uint64_t>(), 0, static_cast<std::size_t>(ranks) * 8);
  unjamConfig_t config = cuda_config();
  config.algorithm = algorithm;
  if (algorithm == kRsag || algorithm == kChain) config.guaranteed_slot_bytes = kMeshSlot;
  Job job(ranks, config);
  Barrier all(ranks);
  job.run([&](const Member& me) {
    Rank rank(me, way, memory, repeats, places.as<std::uint64_t>());
    std::vector<std::uint64_t>& digests = outcome.digests[static_cast<std::size_t>(me.rank)];
    for (const bool disturbed : {false, true}) {
      std::uint64_t before = 0;
      for (std::size_t i = 0; i < cases.size(); ++i) {
        const Case& c = cases[i];
        if (i == 0 || c.kind != cases[i - 1].kind) {
          if (me.rank == 0) before = without_engine(me.context);
          all.meet();
        }
        digests.push_back(rank.run(c, disturbed));
        if (me.rank != 0) continue;
        auto& count = disturbed ? outcome.disturbed : outcome.quiet[c.kind];
        count.second += repeats;
        if (i + 1 == cases.size() || c.kind != cases[i + 1].kind) {
          count.first += without_engine(me.context) - before;
        }
      }
    }
    if (me.rank == 0) outcome.whole = figure(me.context, "whole_calls");
    me.doing("done");
  });
  print_stats(job);
  return outcome;
}

// Calls back to back, right behind one beside the stream whose daemon has the lanes: after a few
// they must be without the engine again.
void check_return(int ranks) {
  constexpr int kCalls = 400, kAtLeast = 300;
  constexpr std::size_t kCount = 16 * 1024;
  setenv("UNJAM_IN_STREAM", "1", 1);
  Job job(ranks, cuda_config());
  Barrier all(ranks);
  job.run([&](const Member& me) {
    const Stream stream;
    const auto size = static_cast<std::size_t>(me.ranks);
    const DeviceMemory memory((size + 1) * kCount * sizeof(float));
    auto* data = memory.as<float>();
    auto* bytes = memory.as<unsigned char>();
    check(cudaMemset(bytes, 0, (size + 1) * kCount * sizeof(float)));
    const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream);
    const auto gather = [&](std::vector<unjamRequest_t>& requests) {
      Spec s;
      s.kind = UNJAM_ALL_GATHER;
      s.dtype = UNJAM_FLOAT32;
      s.count = kCount;
      s.size = me.ranks;
      s.at = me.rank;
      unjamRequest_t request = nullptr;
      check(call(me.all, "gathers", s, Place{bytes, bytes + kCount * sizeof(float)}, &within,
                 &request));
      requests.push_back(request);
    };
    for (int round = 0; round < 3; ++round) {
      me.doing("calls behind one beside the stream, round " + std::to_string(round));
      unjamRequest_t beside = nullptr;
      check(unjamAllReduce(me.all, "beside", data, data, kCount, UNJAM_FLOAT32, UNJAM_SUM, nullptr,
                           &beside));
      me.wait(beside, "the call beside");
      const std::uint64_t before = without_engine(me.context);
      all.meet();
      std::vector<unjamRequest_t> requests;
      for (int i = 0; i < kCalls; ++i) gather(requests);
      stream.synchronize();
      for (unjamRequest_t request : requests) me.wait(request, "a gather");
      const std::uint64_t alone = without_engine(me.context) - before;
      if (me.rank == 0) {
        std::printf("behind a call beside the stream: %llu of %d without engine\n",
                    static_cast<unsigned long long>(alone), kCalls);
      }
      if (ranks > 1 && alone < kAtLeast) {
        fail("rank " + std::to_string(me.rank) + ": only " + std::to_string(alone) + " of " +
             std::to_string(kCalls) + " calls back to back ran without the engine");
      }
      all.meet();
    }
    me.doing("done");
  });
}

template <class Want>
void check_numbers(const Member& me, const std::vector<float>& numbers, int round,
                   const std::string& what, const Want& want) {
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if (numbers[i] == static_cast<float>(want(i))) continue;
    fail("A WRONG NUMBER: rank " + std::to_string(me.rank) + ", round " + std::to_string(round) +
         " of " + what + ": " + std::to_string(numbers[i]) + " instead of " +
         std::to_string(want(i)));
  }
}

// A key's second use, in a stream that is ahead of the first one's, waits for it; also where the
// key's place on the device was another key's, which had been used as often: of a group that was
// destroyed. (Places are few, so most rounds find such ones.)
void check_overtaking(int ranks) {
  constexpr int kRounds = 100;
  constexpr std::size_t kCount = 1000;
  setenv("UNJAM_IN_STREAM", "1", 1);
  setenv("UNJAM_IDLE_KEYS", "4", 1);
  Job job(ranks, cuda_config());
  Barrier all(ranks);
  job.run([&](const Member& me) {
    const Stream first, second;
    const DeviceMemory memory(2 * kCount * sizeof(float));
    auto* data = memory.as<float>();
    std::vector<float> numbers(2 * kCount);
    const std::size_t bytes = numbers.size() * sizeof(float);
    const auto reduce = [&](unjamGroup_t group, float* x, const Stream& stream) {
      const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream);
      unjamRequest_t request = nullptr;
      check(
          unjamAllReduce(group, "key", x, x, kCount, UNJAM_FLOAT32, UNJAM_SUM, &within, &request));
      return request;
    };
    const auto create = [&](const char* name) {
      unjamGroup_t group = nullptr;
      check(unjamGroupCreate(me.context, nullptr, me.ranks, name, &group));
      return group;
    };
    // When all ranks are through with it.
    const auto destroy = [&](unjamGroup_t group) {
      all.meet();
      check(unjamGroupDestroy(group));
    };
    check(cudaMemset(data, 0, bytes));
    for (int round = 0; round < kRounds; ++round) {
      me.doing("a use that overtakes, round " + std::to_string(round));
      const unjamGroup_t once = create("once");
      me.wait(reduce(once, data, first), "the former key's only use");
      destroy(once);
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = static_cast<float>(me.rank + 1 + round + (i < kCount ? 0 : 1000));
      }
      check(cudaMemcpy(data, numbers.data(), bytes, cudaMemcpyHostToDevice));
      check(cudaDeviceSynchronize());
      all.meet();  // or it would wait for streams of ranks on the same device
      const unjamGroup_t twice = create("twice");
      spin_kernel<><<<1, 1, 0, first.get()>>>(100'000);
      check(cudaGetLastError());
      const unjamRequest_t behind = reduce(twice, data, first);
      const unjamRequest_t ahead = reduce(twice, data + kCount, second);
      me.wait(behind, "the first use");
      me.wait(ahead, "the second use");
      first.synchronize();
      second.synchronize();
      check(cudaMemcpy(numbers.data(), data, bytes, cudaMemcpyDeviceToHost));
      destroy(twice);
      const int own = me.ranks * (me.ranks + 1) / 2 + me.ranks * round;
      check_numbers(me, numbers, round, "uses that overtake",
                    [&](std::size_t i) { return own + (i < kCount ? 0 : 1000 * me.ranks); });
    }
    me.doing("done");
  });
  unsetenv("UNJAM_IDLE_KEYS");
  std::printf("a key's uses in two streams, the second ahead: %d rounds\n", kRounds);
}

// A root is through with a broadcast when it has sent it, and may destroy the group: what it sent
// still reaches whoever calls later, and no other group's calls come into its way. Small ones, one
// after the other, so that they want connectors that others have left.
void check_late_receivers(int ranks) {
  constexpr int kRounds = 200;
  constexpr std::size_t kCount = 1000;
  constexpr std::size_t kGroups = 6;  // of a round
  setenv("UNJAM_IN_STREAM", "1", 1);
  setenv("UNJAM_MAX_ACTIVE_KEYS", "4", 1);
  setenv("UNJAM_IDLE_KEYS", "4", 1);
  Job job(ranks, cuda_config());
  Barrier all(ranks);
  job.run([&](const Member& me) {
    const Stream stream;
    const DeviceMemory memory(kGroups * kCount * sizeof(float));
    auto* data = memory.as<float>();
    std::vector<float> numbers(kGroups * kCount);
    const std::size_t bytes = numbers.size() * sizeof(float);
    for (int round = 0; round < kRounds; ++round) {
      me.doing("receivers that are late, round " + std::to_string(round));
      const int root = round % me.ranks;
      const auto want = [&](std::size_t i) { return 1000 * round + static_cast<int>(i % 977); };
      for (std::size_t i = 0; i < numbers.size(); ++i) {
        numbers[i] = me.rank == root ? static_cast<float>(want(i)) : -1.0F;
      }
      check(cudaMemcpy(data, numbers.data(), bytes, cudaMemcpyHostToDevice));
      check(cudaDeviceSynchronize());
      all.meet();
      if (me.rank != root) {
        std::this_thread::sleep_for(std::chrono::microseconds(137 * (round % 8)));
      }
      for (std::size_t g = 0; g < kGroups; ++g) {
        unjamGroup_t group = nullptr;
        check(unjamGroupCreate(me.context, nullptr, me.ranks, "left", &group));
        float* const x = data + g * kCount;
        const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream);
        unjamRequest_t request = nullptr;
        const auto call = [&] {
          return unjamBroadcast(group, "key", x, x, kCount, UNJAM_FLOAT32, root, &within, &request);
        };
        unjamResult_t code = call();
        while (code != UNJAM_SUCCESS && unjamLastErrorIsTransient() != 0) {
          usleep(50);  // the engine has yet to let go of keys of groups that were destroyed
          code = call();
        }
        check(code);
        me.wait(request, "a broadcast");
        check(unjamGroupDestroy(group));
      }
      stream.synchronize();
      check(cudaMemcpy(numbers.data(), data, bytes, cudaMemcpyDeviceToHost));
      check_numbers(me, numbers, round, "late receivers", want);
    }
    me.doing("done");
  });
  unsetenv("UNJAM_MAX_ACTIVE_KEYS");
  unsetenv("UNJAM_IDLE_KEYS");
  std::printf("broadcasts of groups that the root has destroyed: %d rounds of %zu\n", kRounds,
              kGroups);
}

// A stream takes a thousand kernels, then a launch waits for room. Where the stream waits for a
// peer, that must keep no other thread of the rank from its calls, for which the peer may wait
// first.
void check_full_stream(int ranks) {
  constexpr int kCalls = 1500;
  constexpr std::size_t kCount = 1000;
  Job job(ranks, cuda_config());
  Barrier all(ranks);
  job.run([&](const Member& me) {
    const Stream full, other;
    const DeviceMemory memory(2 * kCount * sizeof(float));
    auto* data = memory.as<float>();
    check(cudaMemset(data, 0, 2 * kCount * sizeof(float)));
    check(cudaDeviceSynchronize());
    const auto reduce = [&](const char* key, float* x, const unjamCallOptions_t* options) {
      unjamRequest_t request = nullptr;
      check(unjamAllReduce(me.all, key, x, x, kCount, UNJAM_FLOAT32, UNJAM_SUM, options, &request));
      return request;
    };
    const unjamCallOptions_t in_full = ordered(UNJAM_STREAM_SYNC, full);
    const unjamCallOptions_t in_other = ordered(UNJAM_STREAM_SYNC, other);
    std::atomic<int> made{0};
    std::vector<unjamRequest_t> requests;
    const auto run_ahead = [&] {
      check(cudaSetDevice(me.device));
      for (; made < kCalls; ++made) requests.push_back(reduce("ahead", data, &in_full));
    };
    all.meet();
    me.doing("calls beside a full stream");
    std::thread ahead;
    if (me.rank != 0) {
      ahead = std::thread(run_ahead);
      for (int last = -1; made < kCalls / 3 || last != made;) {
        last = made;
        usleep(100'000);
      }
      if (made == kCalls) fail("the stream took all calls, so it was not full");
    }
    for (int i = 0; i < 10; ++i) {
      me.wait(reduce("other", data + kCount, &in_other), "a call in another stream");
      me.wait(reduce("beside", data + kCount, nullptr), "a call beside streams");
    }
    if (me.rank == 0) {
      run_ahead();
    } else {
      ahead.join();
    }
    for (unjamRequest_t request : requests) me.wait(request, "a call in the full stream");
    full.synchronize();
    all.meet();
    me.doing("done");
  });
  std::printf("calls of other threads beside a full stream: they go on\n");
}

// Ranks whose threads all begin with a fresh stream at the same moment. Where they share a GPU,
// CUDA may give two such streams one queue (`cuda_queues --circle`); with
// src/device/cuda/host/first_launch.h it does not.
void check_fresh_streams(int ranks) {
  constexpr int kRounds = 1000, kCalls = 5;
  constexpr std::size_t kCount = 1000;
  Job job(ranks, cuda_config());
  Barrier all(ranks);
  job.run([&](const Member& me) {
    const DeviceMemory memory(kCount * sizeof(float));
    check(cudaMemset(memory.get(), 0, kCount * sizeof(float)));
    check(cudaStreamSynchronize(nullptr));
    const auto reduce = [&](const unjamCallOptions_t* options) {
      unjamRequest_t request = nullptr;
      check(unjamAllReduce(me.all, "fresh", memory.as<float>(), memory.as<float>(), kCount,
                           UNJAM_FLOAT32, UNJAM_SUM, options, &request));
      return request;
    };
    me.wait(reduce(nullptr), "the key's first use");
    for (int round = 0; round < kRounds; ++round) {
      me.doing("calls in a fresh stream, round " + std::to_string(round));
      const Stream stream;
      const unjamCallOptions_t within = ordered(UNJAM_STREAM_SYNC, stream);
      std::vector<unjamRequest_t> requests;
      all.meet();
      for (int i = 0; i < kCalls; ++i) requests.push_back(reduce(&within));
      for (unjamRequest_t request : requests) me.wait(request, "a call in a fresh stream");
      stream.synchronize();
    }
    all.meet();
    me.doing("done");
  });
  std::printf("calls that begin in fresh streams: they go on\n");
}

void same_bits(const Outcome& engine, const Outcome& without_engine,
               const std::vector<Case>& cases) {
  for (std::size_t r = 0; r < without_engine.digests.size(); ++r) {
    for (std::size_t i = 0; i < without_engine.digests[r].size(); ++i) {
      if (without_engine.digests[r][i] == engine.digests[r][i]) continue;
      fail("rank " + std::to_string(r) +
           " has other bits than with UNJAM_IN_STREAM=0: " + cases[i % cases.size()].text());
    }
  }
}

// Without the engine and with it alone.
void run_both(int ranks, int algorithm, const std::vector<Case>& cases, int repeats) {
  if (cases.empty()) return;
  const Outcome engine = run_job(ranks, Way::kEngine, algorithm, cases, repeats);
  const Outcome without_engine = run_job(ranks, Way::kInStream, algorithm, cases, repeats);

  std::printf("%-15s %10s %18s   (rank 0%s)\n", "kind", "calls", "without engine",
              algorithm == kTwoShot ? ", two-shot"
              : algorithm == kRsag  ? ", rsag"
              : algorithm == kChain ? ", chains"
                                    : "");
  bool missing = false;
  for (const auto& [k, count] : without_engine.quiet) {
    std::printf("%-15s %10d %18llu\n", kNames[k], count.second,
                static_cast<unsigned long long>(count.first));
    missing = missing || count.first == 0;
  }
  std::printf("%-15s %10d %18llu\n", "disturbed", without_engine.disturbed.second,
              static_cast<unsigned long long>(without_engine.disturbed.first));
  if (ranks > 1 && missing) fail("a kind never ran without the engine");
  for (const auto& [k, count] : engine.quiet) {
    if (count.first != 0) fail("calls ran without the engine in spite of UNJAM_IN_STREAM=0");
  }
  same_bits(engine, without_engine, cases);
  if (algorithm < 0 || algorithm == kTwoShot) {
    const Outcome mixed = run_job(ranks, Way::kMixed, algorithm, cases, repeats);
    std::printf("with calls beside streams: %llu lanes' parts done whole\n",
                static_cast<unsigned long long>(mixed.whole));
    same_bits(engine, mixed, cases);
    if (ranks > 1 && (mixed.whole == 0 || engine.whole != 0)) {
      fail("calls beside streams should be done whole, and never with UNJAM_IN_STREAM=0");
    }
  }
  if (algorithm != kRsag && algorithm != kChain) return;
  // As soon as anything is looked at but peers.
  setenv("UNJAM_IN_STREAM_PATIENCE_US", "0", 1);
  const Outcome hasty = run_job(ranks, Way::kInStream, algorithm, cases, repeats);
  unsetenv("UNJAM_IN_STREAM_PATIENCE_US");
  std::uint64_t alone = hasty.disturbed.first, calls = 0;
  for (const auto& [k, count] : hasty.quiet) alone += count.first;
  for (const auto& [k, count] : hasty.quiet) calls += static_cast<std::uint64_t>(count.second);
  calls += static_cast<std::uint64_t>(hasty.disturbed.second);
  std::printf("without patience %9llu %18llu\n", static_cast<unsigned long long>(calls),
              static_cast<unsigned long long>(alone));
  if (ranks > 1 && alone == calls) fail("no call was handed to the engine");
  same_bits(engine, hasty, cases);
}

}  // namespace

int main(int argc, char** argv) {
  take_many_queues();
  Options options(argc, argv);
  const int wanted = options.integer("ranks", 0, "GPUs to use; 0: all");
  const std::uint64_t seed = options.seed();
  const double most = options.number("most", 1e9, "largest message in bytes");
  const int kind = options.integer("kind", -1, "only this kind (8: sends, 9: barriers)");
  const int repeats = options.integer("repeats", 4, "of each case, in one go");
  const int two_shot = options.integer("two-shot", 1, "that plan's: 0: not, 2: nothing else");
  const int rsag = options.integer("rsag", 1, "rsag plans and chains: 0: not, 2: nothing else");
  options.done(400, 30);
  load_eagerly();
  const int ranks = wanted > 0 ? wanted : device_count();
  std::printf("in_stream: %d ranks, seed %llu\n", ranks, static_cast<unsigned long long>(seed));
  const std::vector<Case> cases = make_cases(ranks, seed, static_cast<std::size_t>(most), kind);

  if (two_shot < 2 && rsag < 2) {
    run_both(ranks, -1, cases, repeats);
    check_return(ranks);
    if (kind < 0) check_overtaking(ranks);
    if (kind < 0) check_late_receivers(ranks);
    if ((kind < 0 || kind == 9) && ranks > 1) check_full_stream(ranks);
    if ((kind < 0 || kind == 9) && ranks > 1) check_fresh_streams(ranks);
  }
  std::vector<Case> more;
  if (two_shot > 0 && rsag < 2 && ranks >= 2 && ranks <= 8 &&
      (kind < 0 || kind == UNJAM_ALL_REDUCE)) {
    more = make_two_shot_cases(ranks, seed, static_cast<std::size_t>(most));
    run_both(ranks, kTwoShot, more, repeats);
  }
  std::vector<Case> meshed;
  if (rsag > 0 && two_shot < 2 && ranks >= 2 && ranks <= 8) {
    meshed = make_mesh_cases(ranks, seed, static_cast<std::size_t>(most), kind, false);
    run_both(ranks, kRsag, meshed, repeats);
  }
  // (Of more ranks they are the engine's.)
  std::vector<Case> chained;
  if (rsag > 0 && two_shot < 2 && ranks >= 2 && ranks <= 4) {
    chained = make_mesh_cases(ranks, seed, static_cast<std::size_t>(most), kind, true);
    run_both(ranks, kChain, chained, repeats);
  }
  const std::size_t usual = two_shot < 2 && rsag < 2 ? cases.size() : 0;
  std::printf("in_stream: PASS, %zu cases on %d ranks\n",
              usual + more.size() + meshed.size() + chained.size(), ranks);
  return 0;
}
