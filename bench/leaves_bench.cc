// Host leaves against memcpy and against the loop one would write without them (compiled as the
// library is: portable). GB/s count every byte that is read or written, once.
//
// leaves_bench [KiB per buffer]...    (default: 64, in the caches, and 65536, beyond them)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "base/float_types.h"
#include "device/host/leaves.h"

namespace unjam {
namespace {

using Bytes = std::vector<unsigned char>;

double gigabytes_per_second(std::size_t bytes_moved, const std::function<void()>& work) {
  using Clock = std::chrono::steady_clock;
  double best = 0;
  const auto deadline = Clock::now() + std::chrono::milliseconds(120);
  for (int round = 0; round < 3 || Clock::now() < deadline; ++round) {
    const int repeats = static_cast<int>(std::max<std::size_t>(1, (1 << 22) / bytes_moved));
    const auto begin = Clock::now();
    for (int i = 0; i < repeats; ++i) work();
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(best, 1e-9 * static_cast<double>(bytes_moved) * repeats / seconds);
  }
  return best;
}

template <class T>
void naive_sum(const void* a, const void* b, void* out, std::size_t bytes) {
  const T* x = static_cast<const T*>(a);
  const T* y = static_cast<const T*>(b);
  T* z = static_cast<T*>(out);
  for (std::size_t i = 0; i < bytes / sizeof(T); ++i) {
    if constexpr (requires { to_float(x[i]); }) {
      z[i] = from_float<T>(to_float(x[i]) + to_float(y[i]));
    } else {
      z[i] = static_cast<T>(x[i] + y[i]);
    }
  }
}

using NaiveSum = void (*)(const void*, const void*, void*, std::size_t);
constexpr NaiveSum kNaiveSums[kNumDTypes] = {
    naive_sum<std::uint8_t>,  naive_sum<std::uint8_t>,  naive_sum<std::uint32_t>,
    naive_sum<std::uint32_t>, naive_sum<std::uint64_t>, naive_sum<std::uint64_t>,
    naive_sum<Float16>,       naive_sum<Bfloat16>,      naive_sum<float>,
    naive_sum<double>,        naive_sum<Float8E4M3>,    naive_sum<Float8E5M2>};

void print_row(const char* name, double peer, std::size_t moved,
               const std::function<void(HostIsa)>& work) {
  std::printf("  %-28s ", name);
  peer > 0 ? std::printf("%8.1f", peer) : std::printf("       -");
  for (int i = 0; i < kNumHostIsas; ++i) {
    const HostIsa isa = static_cast<HostIsa>(i);
    if (host_isa_available(isa)) {
      std::printf(" %8.1f", gigabytes_per_second(moved, [&] { work(isa); }));
    } else {
      std::printf("        -");
    }
  }
  std::printf("\n");
  std::fflush(stdout);
}

void measure(std::size_t bytes) {
  std::printf("%zu KiB per buffer\n  %-28s %8s", bytes / 1024, "GB/s", "peer");
  for (int i = 0; i < kNumHostIsas; ++i) std::printf(" %8s", to_string(static_cast<HostIsa>(i)));
  std::printf("\n");
  // A valid number in every format, not zero, and small enough not to overflow.
  std::vector<Bytes> sources(8, Bytes(bytes, 0x31));
  Bytes user(bytes, 1), slot(bytes, 1);
  SliceJob job;
  for (std::size_t s = 0; s < sources.size(); ++s) job.src[s] = sources[s].data();
  job.dst_slot[0] = slot.data();
  job.num_dst = 1;
  const auto run_job = [&](HostIsa isa) { run_leaf_host_with(isa, job, 0, 1); };

  job.num_src = 1;
  job.elems = bytes;
  print_row(
      "copy (peer: memcpy)",
      gigabytes_per_second(2 * bytes, [&] { std::memcpy(slot.data(), sources[0].data(), bytes); }),
      2 * bytes, run_job);
  job.dst_user = user.data();
  print_row("copy to two (2 memcpy)",
            gigabytes_per_second(3 * bytes,
                                 [&] {
                                   std::memcpy(user.data(), sources[0].data(), bytes);
                                   std::memcpy(slot.data(), sources[0].data(), bytes);
                                 }),
            3 * bytes, run_job);
  job.dst_user = nullptr;

  for (int t = 0; t < kNumDTypes; ++t) {
    job.dtype = static_cast<DType>(t);
    job.elems = bytes / dtype_bytes(job.dtype);
    job.op = Op::kSum;
    job.num_src = 2;
    const double peer = gigabytes_per_second(3 * bytes, [&] {
      kNaiveSums[t](sources[0].data(), sources[1].data(), slot.data(), bytes);
    });
    print_row((std::string(to_string(job.dtype)) + " sum 2 (peer: loop)").c_str(), peer, 3 * bytes,
              run_job);
  }
  struct Other {
    DType dtype;
    Op op;
    int num_src;
    bool two_destinations;
  };
  for (const Other& o :
       {Other{DType::kFloat32, Op::kSum, 2, true}, Other{DType::kFloat32, Op::kMax, 2, false},
        Other{DType::kFloat32, Op::kAvg, 2, false}, Other{DType::kFloat32, Op::kSum, 8, false},
        Other{DType::kBfloat16, Op::kSum, 8, false}, Other{DType::kInt8, Op::kProd, 2, false},
        Other{DType::kInt8, Op::kAvg, 2, false}, Other{DType::kInt32, Op::kAvg, 2, false},
        Other{DType::kInt64, Op::kMax, 2, false}, Other{DType::kInt64, Op::kAvg, 2, false}}) {
    job.dtype = o.dtype;
    job.op = o.op;
    job.num_src = static_cast<std::uint16_t>(o.num_src);
    job.elems = bytes / dtype_bytes(o.dtype);
    job.divisor = 3;
    job.scale = 1.0 / 3;
    job.scale_sources = ScaleSources::kAll;
    job.dst_user = o.two_destinations ? user.data() : nullptr;
    const std::string name = std::string(to_string(o.dtype)) + " " + to_string(o.op) + " " +
                             std::to_string(o.num_src) + (o.two_destinations ? " to two" : "");
    print_row(name.c_str(), 0,
              (static_cast<std::size_t>(o.num_src) + 1 + o.two_destinations) * bytes, run_job);
  }
}

}  // namespace
}  // namespace unjam

int main(int argc, char** argv) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10) * 1024);
  if (sizes.empty()) sizes = {64 << 10, 64 << 20};
  std::printf("leaves in use here: %s\n", unjam::to_string(unjam::best_host_isa()));
  for (std::size_t bytes : sizes) unjam::measure(bytes);
}
