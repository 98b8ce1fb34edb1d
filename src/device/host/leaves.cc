#include "device/host/leaves.h"

#include <algorithm>
#include <cstring>

#include "device/host/leaf_tables.h"

namespace unjam {
namespace {

constexpr std::uint64_t kPieceAlignment = 64;  // a cache line
// Small enough that the second destination's copy finds the source in the first-level cache.
constexpr std::uint64_t kCopyTile = 8 * 1024;

const HostLeafTable& table_of(HostIsa isa) {
#if UNJAM_X86_LEAVES
  if (isa == HostIsa::kAvx512) return kAvx512Leaves;
  if (isa == HostIsa::kAvx2) return kAvx2Leaves;
#endif
  (void)isa;
  return kBaseLeaves;
}

const HostLeafTable& best_table() {
  static const HostLeafTable& table = table_of(best_host_isa());
  return table;
}

// One source that nothing is done to: any dtype, any bits.
bool is_copy(const SliceJob& job) {
  if (job.num_src != 1) return false;
  if (job.op != Op::kAvg) return true;
  if (is_integer(job.dtype)) return job.divisor <= 1;
  return job.scale_sources == ScaleSources::kNone ||
         (job.scale_sources == ScaleSources::kLocal && job.local_src != 0);
}

void copy(const SliceJob& job, std::uint64_t begin, std::uint64_t end) {
  const char* src = static_cast<const char*>(job.src[0]);
  char* dsts[2] = {static_cast<char*>(job.dst_user), static_cast<char*>(job.dst_slot)};
  for (char*& dst : dsts) {
    if (dst == src) dst = nullptr;
  }
  const std::uint64_t tile = dsts[0] != nullptr && dsts[1] != nullptr ? kCopyTile : end - begin;
  for (std::uint64_t at = begin; at < end; at += tile) {
    const std::uint64_t bytes = std::min(tile, end - at);
    for (char* dst : dsts) {
      if (dst != nullptr) std::memcpy(dst + at, src + at, bytes);
    }
  }
}

void run(const HostLeafTable& table, const SliceJob& job, unsigned thread, unsigned threads) {
  const std::uint64_t element = dtype_bytes(job.dtype);
  const std::uint64_t bytes = job.elems * element;
  std::uint64_t begin = 0;
  std::uint64_t end = bytes;
  if (threads > 1) {
    const std::uint64_t share = (bytes + threads - 1) / threads;
    const std::uint64_t piece = (share + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
    begin = std::min(bytes, thread * piece);
    end = std::min(bytes, begin + piece);
  }
  if (begin == end) return;
  if (is_copy(job)) {
    copy(job, begin, end);
  } else {
    table[static_cast<int>(job.dtype)][static_cast<int>(job.op)](job, begin / element,
                                                                 end / element);
  }
}

}  // namespace

bool host_isa_available(HostIsa isa) {
  if (isa == HostIsa::kBase) return true;
#if UNJAM_X86_LEAVES
  __builtin_cpu_init();  // may run before libgcc's own constructor
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == HostIsa::kAvx2) return avx2;
  return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

HostIsa best_host_isa() {
  if (host_isa_available(HostIsa::kAvx512)) return HostIsa::kAvx512;
  if (host_isa_available(HostIsa::kAvx2)) return HostIsa::kAvx2;
  return HostIsa::kBase;
}

void run_leaf_host(const SliceJob& job, unsigned thread, unsigned threads) {
  run(best_table(), job, thread, threads);
}

void run_leaf_host_with(HostIsa isa, const SliceJob& job, unsigned thread, unsigned threads) {
  run(table_of(isa), job, thread, threads);
}

}  // namespace unjam
