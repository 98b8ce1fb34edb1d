#include "device/host/leaves.h"

#include <algorithm>
#include <cstring>

#include "device/host/leaf_tables.h"

namespace unjam {
namespace {

constexpr std::uint64_t kPieceAlignment = 64;  // a cache line
// Small enough that the later destinations' copies find the source in the first-level cache.
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

// What this thread does of `bytes` bytes.
struct Share {
  std::uint64_t begin, end;
};

Share share_of(std::uint64_t bytes, unsigned thread, unsigned threads) {
  if (threads == 1) return {0, bytes};
  const std::uint64_t share = (bytes + threads - 1) / threads;
  const std::uint64_t piece = (share + kPieceAlignment - 1) / kPieceAlignment * kPieceAlignment;
  const std::uint64_t begin = std::min(bytes, thread * piece);
  return {begin, std::min(bytes, begin + piece)};
}

// One source to every destination.
void spread(const SliceJob& job, Share share) {
  const char* src = static_cast<const char*>(job.src[0]);
  const int first = job.dst_user == nullptr ? 0 : -1;
  const std::uint64_t tile = job.num_dst - first > 1 ? kCopyTile : share.end - share.begin;
  for (std::uint64_t at = share.begin; at < share.end; at += tile) {
    const std::uint64_t bytes = std::min(tile, share.end - at);
    for (int d = first; d < job.num_dst; ++d) {
      char* dst = static_cast<char*>(d < 0 ? job.dst_user : job.dst_slot[d]);
      if (dst != src) std::memcpy(dst + at, src + at, bytes);
    }
  }
}

// Each source to its own destinations.
void copy_each(const SliceJob& job, unsigned thread, unsigned threads) {
  for (int i = 0; i < job.num_src; ++i) {
    const Share share =
        share_of(job.copy_elems[i] * std::uint64_t{dtype_bytes(job.dtype)}, thread, threads);
    if (share.begin == share.end || job.src[i] == nullptr) continue;
    const char* src = static_cast<const char*>(job.src[i]);
    for (void* const dst : {job.dst_slot[i], job.dst_copy[i]}) {
      if (dst == nullptr) continue;
      std::memcpy(static_cast<char*>(dst) + share.begin, src + share.begin,
                  share.end - share.begin);
    }
  }
}

void run(const HostLeafTable& table, const SliceJob& job, unsigned thread, unsigned threads) {
  if (job.copies) {
    copy_each(job, thread, threads);
    return;
  }
  const std::uint64_t element = dtype_bytes(job.dtype);
  const Share share = share_of(job.elems * element, thread, threads);
  if (share.begin == share.end) return;
  if (is_copy(job)) {
    spread(job, share);
  } else {
    table[static_cast<int>(job.dtype)][static_cast<int>(job.op)](job, share.begin / element,
                                                                 share.end / element);
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
