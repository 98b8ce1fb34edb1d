// One collective of one rank with data that can be checked: filled and checked on the device.
// Values are small integers, so that every sum is exact in every type here, whatever the order.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/gpu/cuda_objects.h"
#include "tests/gpu/holds.cuh"
#include "tests/gpu/support.h"

namespace unjam_gpu {

// ---- types ----

struct TypeInfo {
  unjamDataType_t type;
  const char* name;
  std::size_t bytes;
};
inline constexpr TypeInfo kTypes[] = {
    {UNJAM_FLOAT32, "float32", 4}, {UNJAM_INT32, "int32", 4}, {UNJAM_BFLOAT16, "bfloat16", 2},
    {UNJAM_FLOAT16, "float16", 2}, {UNJAM_UINT8, "uint8", 1}, {UNJAM_FLOAT64, "float64", 8},
    {UNJAM_INT64, "int64", 8}};
inline constexpr const char* kKindNames[] = {"all-reduce", "all-gather", "reduce-scatter",
                                             "reduce",     "broadcast",  "all-to-all",
                                             "gather",     "scatter"};
inline constexpr int kNumKinds = 8;  // that move data between all ranks of a group
inline constexpr const char* kOpNames[] = {"sum", "prod", "min", "max", "avg"};

inline const TypeInfo& type_info(unjamDataType_t type) {
  for (const TypeInfo& t : kTypes) {
    if (t.type == type) return t;
  }
  fail("a type that these tests do not know");
}

// f(T{}) for the C++ type of a kind of elements.
template <class F>
void with_type(unjamDataType_t type, const F& f) {
  switch (type) {
    case UNJAM_FLOAT32:
      return f(float{});
    case UNJAM_INT32:
      return f(std::int32_t{});
    case UNJAM_BFLOAT16:
      return f(__nv_bfloat16{});
    case UNJAM_FLOAT16:
      return f(__half{});
    case UNJAM_UINT8:
      return f(std::uint8_t{});
    case UNJAM_FLOAT64:
      return f(double{});
    case UNJAM_INT64:
      return f(std::int64_t{});
    default:
      fail("a type that these tests do not know");
  }
}

// ---- what is exchanged ----

struct Spec {
  unjamKind_t kind = UNJAM_ALL_REDUCE;
  unjamDataType_t dtype = UNJAM_FLOAT32;
  unjamOp_t op = UNJAM_SUM;  // sum, min or max
  std::size_t count = 0;
  int root = 0;
  bool in_place = false;
  std::uint64_t seed = 0;  // the same on all ranks
  int size = 1, at = 0;    // of the group; this rank in it

  bool receives() const { return (kind != UNJAM_REDUCE && kind != UNJAM_GATHER) || at == root; }
  bool sends() const { return (kind != UNJAM_BROADCAST && kind != UNJAM_SCATTER) || at == root; }
  // The input, or the output, has a block for every rank.
  bool sends_blocks() const {
    return kind == UNJAM_REDUCE_SCATTER || kind == UNJAM_SCATTER || kind == UNJAM_ALL_TO_ALL;
  }
  bool receives_blocks() const {
    return kind == UNJAM_ALL_GATHER || kind == UNJAM_GATHER || kind == UNJAM_ALL_TO_ALL;
  }
  bool placed_in_place() const { return in_place && kind != UNJAM_ALL_TO_ALL; }
  std::size_t send_elems() const {
    return count * static_cast<std::size_t>(sends_blocks() ? size : 1);
  }
  std::size_t recv_elems() const {
    return count * static_cast<std::size_t>(receives_blocks() ? size : 1);
  }
  std::string text() const {
    return std::string(kKindNames[kind]) + " of " + std::to_string(count) + " " +
           type_info(dtype).name + ", " + kOpNames[op] + ", root " + std::to_string(root) +
           (placed_in_place() ? ", in place" : "");
  }
};

// Past each buffer, to see what is written beyond its end.
inline constexpr std::size_t kGuardBytes = 256;
inline constexpr unsigned char kPoison = 0xee;

inline std::size_t padded(std::size_t bytes) { return (bytes + 255) / 256 * 256 + kGuardBytes; }

// Device memory that one rank's side of an exchange needs, guards included.
inline std::size_t memory_of(const Spec& s) {
  const std::size_t bytes = type_info(s.dtype).bytes;
  return padded(s.send_elems() * bytes) + padded(s.recv_elems() * bytes);
}

// Where the data lie: send, then recv; in place the smaller inside the larger.
struct Place {
  unsigned char* send = nullptr;
  unsigned char* recv = nullptr;
};
inline Place place_in(void* memory, const Spec& s) {
  const std::size_t bytes = type_info(s.dtype).bytes;
  auto* base = static_cast<unsigned char*>(memory);
  if (!s.placed_in_place()) return {base, base + padded(s.send_elems() * bytes)};
  const std::size_t offset = static_cast<std::size_t>(s.at) * s.count * bytes;
  if (s.receives_blocks()) return {base + offset, base};
  if (s.sends_blocks()) return {base, base + offset};
  return {base, base};
}

// ---- on the device ----

__host__ __device__ inline std::uint32_t element(std::uint64_t seed, int rank, std::size_t i) {
  std::uint64_t z = seed + static_cast<std::uint64_t>(rank) * 0x9e3779b97f4a7c15u +
                    static_cast<std::uint64_t>(i) * 0xd1342543de82ef95u;
  z = (z ^ (z >> 32)) * 0xd6e8feb86659fd93u;
  return static_cast<std::uint32_t>(z >> 61) & 3u;  // 64 ranks sum to at most 192: exact in bf16
}

struct Expect {
  std::uint64_t seed;
  std::size_t count;
  unjamKind_t kind;
  unjamOp_t op;
  int size, at, root;

  __host__ __device__ std::uint32_t value(std::size_t i) const {
    const std::size_t own = static_cast<std::size_t>(at) * count;
    if (kind == UNJAM_SCATTER) return element(seed, root, own + i);
    if (kind == UNJAM_ALL_TO_ALL) {
      return element(seed, static_cast<int>(i / count), own + i % count);
    }
    if (kind == UNJAM_ALL_GATHER || kind == UNJAM_GATHER)
      return element(seed, static_cast<int>(i / count), i % count);
    if (kind == UNJAM_BROADCAST) return element(seed, root, i);
    if (kind == UNJAM_REDUCE_SCATTER) i += static_cast<std::size_t>(at) * count;
    std::uint32_t v = element(seed, 0, i);
    for (int r = 1; r < size; ++r) {
      const std::uint32_t e = element(seed, r, i);
      if (op == UNJAM_MIN) {
        v = e < v ? e : v;
      } else if (op == UNJAM_MAX) {
        v = e > v ? e : v;
      } else {
        v += e;
      }
    }
    return v;
  }
};

// Of one exchange on one rank; zeroed before. The digest does not depend on the order of adding up.
struct Report {
  unsigned long long wrong, digest, first_inverted, overwritten;
};

template <class T>
__device__ T from_value(std::uint32_t v) {
  return static_cast<T>(static_cast<float>(v));
}
template <class T>
__device__ double to_value(T v) {
  if constexpr (sizeof(T) == 2) {
    return static_cast<double>(static_cast<float>(v));
  } else {
    return static_cast<double>(v);
  }
}

template <class T>
__global__ void fill_kernel(T* data, std::size_t elems, std::uint64_t seed, int rank) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems;
       i += step) {
    data[i] = from_value<T>(element(seed, rank, i));
  }
}

template <class T>
__global__ void check_kernel(const T* data, std::size_t elems, Expect expect, Report* report) {
  const std::size_t step = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  unsigned long long wrong = 0, digest = 0, first = 0;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < elems;
       i += step) {
    const double got = to_value(data[i]);
    if (got != static_cast<double>(expect.value(i))) {
      if (wrong++ == 0) first = ~static_cast<unsigned long long>(i);
    }
    digest += (static_cast<unsigned long long>(static_cast<long long>(got)) + 1) *
              (i * 0x9e3779b97f4a7c15u + 1);
  }
  if (blockIdx.x == 0 && threadIdx.x < kGuardBytes) {
    const auto* guard = reinterpret_cast<const unsigned char*>(data + elems);
    if (guard[threadIdx.x] != kPoison) atomicAdd(&report->overwritten, 1ull);
  }
  for (int offset = 16; offset > 0; offset /= 2) digest += __shfl_down_sync(~0u, digest, offset);
  if (threadIdx.x % 32 == 0) atomicAdd(&report->digest, digest);
  if (wrong != 0) {
    atomicAdd(&report->wrong, wrong);
    atomicMax(&report->first_inverted, first);
  }
}

inline unsigned blocks_for(std::size_t elems) {
  return static_cast<unsigned>(std::clamp<std::size_t>(elems / 1024, 1, 264));
}

// ---- from the host ----

// Queues: the input filled, the output and both guards poisoned.
inline void start_fill(const Spec& s, const Place& p, cudaStream_t stream) {
  const std::size_t bytes = type_info(s.dtype).bytes;
  const std::size_t send = s.send_elems() * bytes, recv = s.recv_elems() * bytes;
  if (s.receives()) check(cudaMemsetAsync(p.recv, kPoison, recv + kGuardBytes, stream));
  if (!s.placed_in_place()) check(cudaMemsetAsync(p.send + send, kPoison, kGuardBytes, stream));
  if (s.placed_in_place() &&
      send > recv) {  // the guard behind the part that is received lies in the input
    check(cudaMemsetAsync(p.send + send, kPoison, kGuardBytes, stream));
  }
  with_type(s.dtype, [&](auto zero) {
    using T = decltype(zero);
    fill_kernel<T><<<blocks_for(s.send_elems()), 256, 0, stream>>>(reinterpret_cast<T*>(p.send),
                                                                   s.send_elems(), s.seed, s.at);
  });
  check(cudaGetLastError());
}

// Reports of n exchanges: written in device memory, fetched into pinned.
class Reports {
 public:
  explicit Reports(std::size_t n) : n_(n), device_(n * sizeof(Report)), host_(n * sizeof(Report)) {
    // Also those that nobody fills are fetched (initcheck of compute-sanitizer minds).
    check(cudaMemset(device_.get(), 0, n * sizeof(Report)));
    check(cudaStreamSynchronize(nullptr));
  }
  Report* on_device(std::size_t i) const { return device_.as<Report>() + i; }
  const Report& operator[](std::size_t i) const { return host_.as<Report>()[i]; }
  void start_fetch(cudaStream_t stream) const {
    check(cudaMemcpyAsync(host_.as<Report>(), device_.get(), n_ * sizeof(Report),
                          cudaMemcpyDeviceToHost, stream));
  }

 private:
  std::size_t n_;
  DeviceMemory device_;
  PinnedMemory host_;
};

// Queues the check of what was received. report: in device memory.
inline void start_check(const Spec& s, const Place& p, Report* report, cudaStream_t stream) {
  check(cudaMemsetAsync(report, 0, sizeof(Report), stream));
  if (!s.receives()) return;
  const Expect expect{s.seed, s.count, s.kind, s.op, s.size, s.at, s.root};
  with_type(s.dtype, [&](auto zero) {
    using T = decltype(zero);
    check_kernel<T><<<blocks_for(s.recv_elems()), 256, 0, stream>>>(
        reinterpret_cast<const T*>(p.recv), s.recv_elems(), expect, report);
  });
  check(cudaGetLastError());
}

// In a reduce-scatter or scatter in place other ranks' parts of the input follow what is received.
inline void finish_check(const Spec& s, const Report& r, const std::string& where) {
  const bool guarded = !(s.placed_in_place() && s.sends_blocks());
  if (r.wrong == 0 && (r.overwritten == 0 || !guarded)) return;
  fail("A WRONG NUMBER: " + where + ": " + s.text() + ": " + std::to_string(r.wrong) +
       " wrong elements, the first is " + std::to_string(~r.first_inverted) + "; " +
       std::to_string(r.overwritten) + " bytes written past the end");
}

// Exchanges that may be under way at the same time: each has memory of its own, and is filled as it
// is made, in the stream.
class Exchanges {
 public:
  Exchanges(std::vector<Spec> specs, const Stream& stream)
      : specs_(std::move(specs)), stream_(stream), reports_(specs_.size()) {
    for (const Spec& s : specs_) {
      memory_.emplace_back(memory_of(s));
      places_.push_back(place_in(memory_.back().get(), s));
      start_fill(s, places_.back(), stream_.get());
    }
  }
  std::size_t size() const { return specs_.size(); }
  const Spec& spec(std::size_t i) const { return specs_[i]; }
  const Place& place(std::size_t i) const { return places_[i]; }
  // What n of them have received, from the first on.
  void look_at(std::size_t first, std::size_t n, const std::string& where) const {
    for (std::size_t i = first; i < first + n; ++i) {
      start_check(specs_[i], places_[i], reports_.on_device(i), stream_.get());
    }
    reports_.start_fetch(stream_.get());
    stream_.synchronize();
    for (std::size_t i = first; i < first + n; ++i) finish_check(specs_[i], reports_[i], where);
  }

 private:
  std::vector<Spec> specs_;
  const Stream& stream_;
  Reports reports_;
  std::vector<DeviceMemory> memory_;
  std::vector<Place> places_;
};

inline unjamResult_t call(unjamGroup_t group, const char* key, const Spec& s, const Place& p,
                          const unjamCallOptions_t* options, unjamRequest_t* request) {
  void* recv = s.receives() ? p.recv : nullptr;
  switch (s.kind) {
    case UNJAM_ALL_REDUCE:
      return unjamAllReduce(group, key, p.send, recv, s.count, s.dtype, s.op, options, request);
    case UNJAM_ALL_GATHER:
      return unjamAllGather(group, key, p.send, recv, s.count, s.dtype, options, request);
    case UNJAM_REDUCE_SCATTER:
      return unjamReduceScatter(group, key, p.send, recv, s.count, s.dtype, s.op, options, request);
    case UNJAM_REDUCE:
      return unjamReduce(group, key, p.send, recv, s.count, s.dtype, s.op, s.root, options,
                         request);
    case UNJAM_ALL_TO_ALL:
      return unjamAllToAll(group, key, p.send, recv, s.count, s.dtype, options, request);
    case UNJAM_GATHER:
      return unjamGather(group, key, p.send, recv, s.count, s.dtype, s.root, options, request);
    case UNJAM_SCATTER:
      return unjamScatter(group, key, s.sends() ? p.send : nullptr, recv, s.count, s.dtype, s.root,
                          options, request);
    default:
      return unjamBroadcast(group, key, s.sends() ? p.send : nullptr, recv, s.count, s.dtype,
                            s.root, options, request);
  }
}

inline unjamCallOptions_t ordered(unjamStreamOrder_t order, const Stream& stream) {
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.stream_order = order;
  options.stream = stream.get();
  return options;
}

inline constexpr const char* kOrderNames[] = {"none", "async", "sync"};

}  // namespace unjam_gpu
