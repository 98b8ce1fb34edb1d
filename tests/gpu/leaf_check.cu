// The CUDA leaves against the host leaves, bit for bit: every dtype, operator and protocol, several
// numbers of sources, sizes and alignments.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "device/cuda/leaves/leaves.cuh"
#include "device/host/leaves.h"

namespace {

using namespace unjam;

constexpr std::uint64_t kFlag = 0x1badcafe5eed1231;
constexpr int kMaxSources = 8;

void check(cudaError_t e) {
  if (e == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(e));
  std::exit(1);
}

// A leaf whose data are there, of any protocol. Packets: packets_ready_cuda() was true in every
// thread; and of lines, which only whole warps move, all threads have been at a barrier since.
__device__ __forceinline__ void run_leaf_cuda(const SliceJob& the_job, unsigned thread,
                                              unsigned threads) {
  const SliceJob& job = cuda_leaves::forget(the_job, thread, threads);
  if (job.num_src == 0) return;
  cuda_leaves::Held nothing;
  auto inside = cuda_leaves::LineFlags::kInside;
  if (job.protocol == Protocol::kSlot) {
    cuda_leaves::dispatch<Protocol::kSlot>(job, thread, threads, nothing);
  } else if (job.protocol == Protocol::kPacket) {
    cuda_leaves::dispatch<Protocol::kPacket>(job, thread, threads, nothing);
  } else {
    cuda_leaves::dispatch<Protocol::kLine>(job, thread, threads, inside);
  }
}

// Whether the units that run_leaf_cuda() will read in this thread from packet connectors all have
// the flag. Reads once, from all sources together; the caller polls.
__device__ __forceinline__ bool packets_ready_cuda(const SliceJob& the_job, unsigned thread,
                                                   unsigned threads) {
  const SliceJob& job = cuda_leaves::forget(the_job, thread, threads);
  if (job.num_src == 0) return true;
  if (job.protocol == Protocol::kLine) {
    return cuda_leaves::lines_ready(job, thread, threads, cuda_leaves::LineFlags::kInside);
  }
  if (job.copies) return cuda_leaves::copies_ready<false>(job, thread, threads, nullptr);
  return cuda_leaves::combine_ready<false>(job, thread, threads, nullptr);
}

// fused: polls and executes in one; else one look, then the leaf. behind: lines' flags are stored
// last.
__global__ void __launch_bounds__(512)
    leaf_kernel(SliceJob job, bool fused, bool behind, int* ready) {
  __shared__ alignas(16) unsigned char raw[sizeof(SliceJob)];
  if (threadIdx.x == 0) *reinterpret_cast<SliceJob*>(raw) = job;
  __syncthreads();
  const SliceJob& shared = *reinterpret_cast<SliceJob*>(raw);
  const auto vote = [](bool mine) { return __syncthreads_and(mine) != 0; };
  if (shared.protocol == Protocol::kPacket && fused) {
    const bool done = run_packet_leaf_cuda(shared, threadIdx.x, blockDim.x, 3, vote);
    if (threadIdx.x == 0) *ready = done;
    return;
  }
  if (shared.protocol == Protocol::kLine && fused) {
    using cuda_leaves::LineFlags;
    const bool done = run_line_leaf_cuda(shared, threadIdx.x, blockDim.x, 3, vote,
                                         behind ? LineFlags::kBehind : LineFlags::kInside);
    if (threadIdx.x == 0) *ready = done;
    return;
  }
  bool all = true;
  if (has_inline_flags(shared.protocol)) {
    all = vote(packets_ready_cuda(shared, threadIdx.x, blockDim.x));
  }
  if (threadIdx.x == 0) *ready = all;
  run_leaf_cuda(shared, threadIdx.x, blockDim.x);
}

// Connector memory that holds these data. What fills the last packet, or line, up, is anything.
std::vector<unsigned char> packed(Protocol protocol, const std::vector<unsigned char>& data,
                                  std::size_t bytes) {
  constexpr unsigned char kFilling = 0xb7;
  if (protocol == Protocol::kSlot) return {data.begin(), data.begin() + bytes};
  std::vector<unsigned char> slot;
  if (protocol == Protocol::kPacket) {
    // Whole units, in each half of a unit half the flag.
    slot.resize((bytes + 7) / 8 * 16, kFilling);
    const auto* flag = reinterpret_cast<const unsigned char*>(&kFlag);
    for (std::size_t at = 0; 2 * at < slot.size(); at += 4) {
      if (at < bytes) std::memcpy(&slot[2 * at], &data[at], bytes - at < 4 ? bytes - at : 4);
      std::memcpy(&slot[2 * at + 4], flag + at % 8, 4);
    }
    return slot;
  }
  slot.resize((bytes + kLineDataBytes - 1) / kLineDataBytes * kLineBytes, kFilling);
  for (std::size_t line = 0; line * kLineBytes < slot.size(); ++line) {
    const std::size_t at = line * kLineDataBytes, left = bytes - at;
    std::memcpy(&slot[line * kLineBytes], &data[at], left < kLineDataBytes ? left : kLineDataBytes);
    std::memcpy(&slot[line * kLineBytes + kLineDataBytes], &kFlag, sizeof(kFlag));
  }
  return slot;
}

// Whether connector memory holds these data, and nothing behind them.
bool holds(const void* slot, const std::vector<unsigned char>& data, Protocol protocol) {
  const auto want = packed(protocol, data, data.size());
  std::vector<unsigned char> have(want.size() + 1);
  check(cudaMemcpy(have.data(), slot, have.size(), cudaMemcpyDeviceToHost));
  if (have.back() != 0xaa) return false;
  for (std::size_t at = 0; at < want.size(); ++at) {
    const bool filling = protocol == Protocol::kPacket
                             ? at % 8 < 4 && at / 8 * 4 + at % 8 >= data.size()
                         : protocol == Protocol::kLine
                             ? at % kLineBytes < kLineDataBytes &&
                                   at / kLineBytes * kLineDataBytes + at % kLineBytes >= data.size()
                             : false;
    if (!filling && have[at] != want[at]) return false;
  }
  return true;
}

struct Case {
  DType dtype;
  Op op;
  Protocol protocol;
  int sources;
  int local;  // -1: none
  std::uint64_t elems;
  int misalign;  // elements
  bool user;
  int slots;
  bool fused, behind;
};

// True if the device's bytes equal the host's.
bool run(const Case& c, std::mt19937_64& rng) {
  const std::size_t size = dtype_bytes(c.dtype), bytes = c.elems * size, shift = c.misalign * size;
  std::vector<std::vector<unsigned char>> source(c.sources, std::vector<unsigned char>(bytes + 64));
  for (auto& s : source) {
    for (auto& b : s) b = static_cast<unsigned char>(rng());
  }
  SliceJob job;
  job.elems = c.elems;
  job.num_src = static_cast<std::uint16_t>(c.sources);
  job.local_src = static_cast<std::int16_t>(c.local);
  job.dtype = c.dtype;
  job.op = c.op;
  job.flag = job.sent_flag = kFlag;
  job.scale = 1.0 / c.sources;
  if (c.op == Op::kAvg) {
    if (is_integer(c.dtype)) {
      job.divisor = static_cast<std::uint32_t>(c.sources);
    } else {
      job.scale_sources = c.local >= 0 && rng() % 2 ? ScaleSources::kLocal : ScaleSources::kAll;
    }
  }
  // Host: everything linear.
  std::vector<unsigned char> expected(bytes, 0xaa);
  SliceJob host = job;
  for (int s = 0; s < c.sources; ++s) host.src[s] = source[s].data();
  host.dst_user = expected.data();
  run_leaf_host(host, 0, 1);

  // Device.
  std::vector<void*> allocations;
  const auto device = [&](std::size_t n) {
    void* p = nullptr;
    check(cudaMalloc(&p, n + 256));
    check(cudaMemset(p, 0xaa, n + 256));
    allocations.push_back(p);
    return static_cast<unsigned char*>(p);
  };
  job.protocol = c.protocol;
  for (int s = 0; s < c.sources; ++s) {
    const auto protocol = s == c.local ? Protocol::kSlot : c.protocol;
    const auto memory = packed(protocol, source[s], bytes);
    unsigned char* p = device(memory.size()) + (protocol == Protocol::kSlot ? shift : 0);
    check(cudaMemcpy(p, memory.data(), memory.size(), cudaMemcpyHostToDevice));
    job.src[s] = p;
  }
  unsigned char* user = c.user ? device(bytes) + shift : nullptr;
  job.dst_user = user;
  job.num_dst = static_cast<std::uint16_t>(c.slots);
  for (int d = 0; d < c.slots; ++d) job.dst_slot[d] = device(2 * bytes + kLineBytes);
  int* ready = reinterpret_cast<int*>(device(sizeof(int)));
  leaf_kernel<<<1, 512>>>(job, c.fused, c.behind, ready);
  check(cudaDeviceSynchronize());
  int was_ready = 0;
  check(cudaMemcpy(&was_ready, ready, sizeof(int), cudaMemcpyDeviceToHost));
  bool ok = was_ready == 1;
  std::vector<unsigned char> got(bytes + 1, 0);
  if (user != nullptr) {
    check(cudaMemcpy(got.data(), user, bytes + 1, cudaMemcpyDeviceToHost));
    ok = ok && std::memcmp(got.data(), expected.data(), bytes) == 0 && got[bytes] == 0xaa;
  }
  for (int d = 0; d < c.slots; ++d) ok = ok && holds(job.dst_slot[d], expected, c.protocol);
  for (void* p : allocations) check(cudaFree(p));
  if (!ok) {
    std::printf("FAIL %s %s %s: %d sources, local %d, %llu elements, misaligned by %d, ready %d\n",
                to_string(c.dtype), to_string(c.op), to_string(c.protocol), c.sources, c.local,
                static_cast<unsigned long long>(c.elems), c.misalign, was_ready);
  }
  return ok;
}

// Copies of different lengths, every third one empty, all in the direction `to_slots`; of what goes
// to slots (not of packets) every other one also to the user.
bool run_copies(DType dtype, Protocol protocol, bool to_slots, std::uint64_t elems, int misalign,
                bool fused, std::mt19937_64& rng) {
  const std::size_t size = dtype_bytes(dtype), shift = misalign * size;
  const bool packets = has_inline_flags(protocol);
  std::vector<void*> allocations;
  const auto device = [&](std::size_t n) {
    void* p = nullptr;
    check(cudaMalloc(&p, n + 256));
    check(cudaMemset(p, 0xaa, n + 256));
    allocations.push_back(p);
    return static_cast<unsigned char*>(p);
  };
  SliceJob job;
  job.copies = true;
  job.dtype = dtype;
  job.protocol = protocol;
  job.flag = job.sent_flag = kFlag;
  job.num_src = kMaxSources;
  std::vector<std::vector<unsigned char>> data(kMaxSources);
  for (int i = 0; i < kMaxSources; ++i) {
    job.copy_elems[i] = i % 3 == 1 ? 0 : static_cast<std::uint32_t>(elems - i % 2);
    if (job.copy_elems[i] == 0) continue;
    data[i].resize(job.copy_elems[i] * size);
    for (auto& b : data[i]) b = static_cast<unsigned char>(rng());
    const auto source = to_slots ? Protocol::kSlot : protocol;
    const auto bytes = packed(source, data[i], data[i].size());
    unsigned char* from = device(bytes.size()) + (source == Protocol::kSlot ? shift : 0);
    check(cudaMemcpy(from, bytes.data(), bytes.size(), cudaMemcpyHostToDevice));
    job.src[i] = from;
    unsigned char* to = device(2 * data[i].size() + kLineBytes) + (packets && to_slots ? 0 : shift);
    (to_slots ? job.dst_slot : job.dst_copy)[i] = to;
    if (to_slots && !packets && i % 2 == 0) job.dst_copy[i] = device(data[i].size()) + shift;
  }
  int* ready = reinterpret_cast<int*>(device(sizeof(int)));
  leaf_kernel<<<1, 512>>>(job, fused, rng() % 2 == 0, ready);
  check(cudaDeviceSynchronize());
  int was_ready = 0;
  check(cudaMemcpy(&was_ready, ready, sizeof(int), cudaMemcpyDeviceToHost));
  bool ok = was_ready == 1;
  for (int i = 0; i < kMaxSources; ++i) {
    if (job.copy_elems[i] == 0) continue;
    ok = ok && holds((to_slots ? job.dst_slot : job.dst_copy)[i], data[i],
                     to_slots ? protocol : Protocol::kSlot);
    if (to_slots && job.dst_copy[i] != nullptr) {
      ok = ok && holds(job.dst_copy[i], data[i], Protocol::kSlot);
    }
  }
  for (void* p : allocations) check(cudaFree(p));
  if (!ok) {
    std::printf("FAIL copies %s %s: to slots %d, %llu elements, misaligned by %d, fused %d\n",
                to_string(dtype), to_string(protocol), to_slots,
                static_cast<unsigned long long>(elems), misalign, fused);
  }
  return ok;
}

// A packet's unit, or line, of one source whose flag is not there, or only half of it: the leaf
// says so, and stores nothing. `copies`: of a copy out of slots, else of a combine. Half 0 or 1 is
// another's, or (2, 3) as the other half should be.
bool run_missing(Protocol protocol, bool copies, std::uint64_t elems, std::size_t unit, int half,
                 bool fused) {
  constexpr int kSources = 3;
  std::vector<unsigned char> data(elems * sizeof(float), 1);
  std::vector<void*> allocations;
  const auto device = [&](std::size_t n) {
    void* p = nullptr;
    check(cudaMalloc(&p, n));
    check(cudaMemset(p, 0xaa, n));
    allocations.push_back(p);
    return static_cast<unsigned char*>(p);
  };
  SliceJob job;
  job.dtype = DType::kFloat32;
  job.protocol = protocol;
  job.flag = job.sent_flag = kFlag;
  job.copies = copies;
  job.num_src = kSources;
  job.elems = copies ? 0 : elems;
  unsigned char* out[kSources] = {};
  for (int i = 0; i < kSources; ++i) {
    auto memory = packed(protocol, data, data.size());
    if (i == 1) {
      const std::uint64_t other = half < 2 ? kFlag + 0x200000002 : kFlag >> 32 | kFlag << 32;
      const std::size_t which = half % 2;
      const std::size_t at = protocol == Protocol::kPacket
                                 ? 16 * unit + 8 * which + 4
                                 : unit * kLineBytes + kLineDataBytes + 4 * which;
      std::memcpy(&memory[at], reinterpret_cast<const unsigned char*>(&other) + 4 * which, 4);
    }
    unsigned char* from = device(memory.size());
    check(cudaMemcpy(from, memory.data(), memory.size(), cudaMemcpyHostToDevice));
    job.src[i] = from;
    out[i] = device(data.size());
    if (copies) {
      job.dst_copy[i] = out[i];
      job.copy_elems[i] = static_cast<std::uint32_t>(elems);
    }
  }
  if (!copies) job.dst_user = out[0];
  int* ready = reinterpret_cast<int*>(device(sizeof(int)));
  leaf_kernel<<<1, 512>>>(job, fused, false, ready);
  check(cudaDeviceSynchronize());
  int was_ready = -1;
  check(cudaMemcpy(&was_ready, ready, sizeof(int), cudaMemcpyDeviceToHost));
  bool ok = was_ready == 0;
  // (Not fused it is run all the same.)
  const std::vector<unsigned char> untouched(data.size(), 0xaa);
  std::vector<unsigned char> got(data.size());
  for (int i = 0; fused && i < kSources; ++i) {
    check(cudaMemcpy(got.data(), out[i], got.size(), cudaMemcpyDeviceToHost));
    ok = ok && got == untouched;
  }
  for (void* p : allocations) check(cudaFree(p));
  if (!ok) {
    std::printf("FAIL what lacks: %s, copies %d, %llu elements, unit %zu, half %d, fused %d\n",
                to_string(protocol), copies, static_cast<unsigned long long>(elems), unit, half,
                fused);
  }
  return ok;
}

}  // namespace

int main() {
  std::mt19937_64 rng(1);
  int passed = 0, failed = 0;
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int o = 0; o < kNumOps; ++o) {
      for (int p = 0; p < kNumProtocols; ++p) {
        for (const int sources : {1, 2, 3, kMaxSources}) {
          for (const std::uint64_t elems : {1, 3, 17, 1000, 12289}) {
            for (const int misalign : {0, 1}) {
              const int local = static_cast<int>(rng() % (sources + 1)) - 1;
              const int dst = static_cast<int>(rng() % 3);
              const Case c{static_cast<DType>(t),
                           static_cast<Op>(o),
                           static_cast<Protocol>(p),
                           sources,
                           local,
                           elems,
                           misalign,
                           dst != 1,
                           dst == 0   ? 0
                           : dst == 1 ? 1
                                      : kMaxSources - 1,
                           rng() % 2 == 0,
                           rng() % 2 == 0};
              (run(c, rng) ? passed : failed)++;
            }
          }
        }
      }
    }
  }
  for (int t = 0; t < kNumDTypes; ++t) {
    for (int p = 0; p < kNumProtocols; ++p) {
      for (const std::uint64_t elems : {2, 3, 17, 1000, 12289}) {
        for (int bits = 0; bits < 8; ++bits) {
          const bool ok = run_copies(static_cast<DType>(t), static_cast<Protocol>(p), bits & 1,
                                     elems, bits >> 1 & 1, bits >> 2 & 1, rng);
          (ok ? passed : failed)++;
        }
      }
    }
  }
  for (const Protocol protocol : {Protocol::kPacket, Protocol::kLine}) {
    const std::size_t bytes = protocol == Protocol::kPacket ? 8 : kLineDataBytes;
    for (const std::uint64_t elems : {1, 14, 15, 1000, 12289}) {
      const std::size_t units = (elems * sizeof(float) + bytes - 1) / bytes;
      for (const std::size_t unit : {std::size_t{0}, units / 2, units - 1}) {
        for (int bits = 0; bits < 16; ++bits) {
          const bool ok = run_missing(protocol, bits & 1, elems, unit, bits >> 2, bits >> 1 & 1);
          (ok ? passed : failed)++;
        }
      }
    }
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
