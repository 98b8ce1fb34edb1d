#include "plan/selector.h"

#include <algorithm>
#include <cstdint>

#include "plan/carried.h"
#include "plan/common.h"
#include "plan/host_table.h"
#include "plan/registry.h"

namespace unjam {
namespace {

// On hosts the first row decides that is about the kind, the group's size and how many ranks share
// a core, and whose bound is not exceeded; if there is none, ring, chain or pairwise
// (algorithm_for_many()). The bound is of count x element size: so many bytes, and so many more for
// each rank of the group.
//
// Each bound is where two algorithms cross in bench/algorithms_bench, between two powers of two:
// unrooted kinds back to back, rooted ones with --apart, for a root that waits for nobody runs
// ahead of a call's end. What is behind them: a message of at most a guaranteed slot goes to all
// others at once (rsag); a one-shot plan's packets of some KiB are one hop, but each rank reads
// all; where ranks share cores every slice wakes a thread, so that the fewest slices win: trees,
// and rings of all-gathers. Gather, scatter and send_recv take one hop either way, and a root that
// waits for all its peers at once is woken more often than one that takes them in turn. Groups that
// span hosts are as those of one: where hosts are one machine, hierarchical and PAT plans take as
// long as the best or longer. They are asked for by name.
struct HostRow {
  Kind kind;
  int least_ranks, most_ranks;
  int least_a_core, most_a_core;  // PlanLimits::ranks_a_core
  std::uint64_t bytes, bytes_a_rank;
  Algorithm algorithm;
};
constexpr int kAll = kMaxGroupRanks, kInSets = kMaxRanksInSets;
constexpr std::uint64_t kKiB = 1024, kAny = std::uint64_t{1} << 62;
constexpr HostRow kHostTable[] = {
    {Kind::kAllReduce, 2, 2, 1, kAll, 8 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kAllReduce, 8, kAll, 2, kAll, 0, 6 * kKiB, Algorithm::kDoubleBinaryTree},
    {Kind::kAllReduce, 12, kAll, 1, 1, 0, 3 * kKiB / 2, Algorithm::kDoubleBinaryTree},
    {Kind::kAllReduce, 3, 11, 1, kAll, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kAllReduce, 3, 7, 1, kAll, 0, 8 * kKiB, Algorithm::kRsag},
    {Kind::kAllReduce, 8, kInSets, 1, 1, 0, 8 * kKiB, Algorithm::kRsag},
    {Kind::kAllGather, 8, kMaxLinearRanks, 4, kAll, kAny, 0, Algorithm::kRing},
    {Kind::kAllGather, 2, kInSets, 1, kAll, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kAllGather, 3, kInSets, 1, kAll, 8 * kKiB, 0, Algorithm::kRsag},
    {Kind::kReduceScatter, 8, kMaxLinearRanks, 4, kAll, kAny, 0, Algorithm::kRing},
    {Kind::kReduceScatter, 2, kInSets, 1, kAll, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kReduceScatter, 3, kInSets, 1, kAll, 8 * kKiB, 0, Algorithm::kRsag},
    {Kind::kAllToAll, 2, kInSets, 1, kAll, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kAllToAll, 3, kInSets, 1, kAll, 16 * kKiB, 0, Algorithm::kRsag},
    {Kind::kAllToAll, 24, kInSets, 1, kAll, 32 * kKiB, 0, Algorithm::kRsag},
    {Kind::kBroadcast, 3, 7, 1, kAll, 8 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kBroadcast, 8, 15, 1, kAll, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kBroadcast, 8, kAll, 1, kAll, 0, 4 * kKiB, Algorithm::kDoubleBinaryTree},
    {Kind::kReduce, 3, 15, 1, kAll, 8 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kReduce, 16, kInSets, 1, 7, 4 * kKiB, 0, Algorithm::kOneShot},
    {Kind::kReduce, 4, kAll, 1, kAll, 0, 8 * kKiB, Algorithm::kDoubleBinaryTree},
    {Kind::kBarrier, 2, 7, 1, kAll, kAny, 0, Algorithm::kOneShot},
    {Kind::kBarrier, 8, kAll, 1, kAll, kAny, 0, Algorithm::kDoubleBinaryTree},
};

Algorithm select_for_host(const PlanRequest& request, const PlanLimits& limits,
                          std::uint64_t bytes) {
  const auto n = static_cast<std::uint64_t>(request.ranks);
  for (const HostRow& row : kHostTable) {
    if (row.kind != request.kind || limits.guaranteed_slots < row_of(row.algorithm).fewest_slots) {
      continue;
    }
    const bool size = row.least_ranks <= request.ranks && request.ranks <= row.most_ranks;
    const bool crowd =
        row.least_a_core <= limits.ranks_a_core && limits.ranks_a_core <= row.most_a_core;
    if (size && crowd && bytes <= row.bytes + row.bytes_a_rank * n) return row.algorithm;
  }
  return algorithm_for_many(request.kind);
}

// GPUs whose links are fully connected: everything goes in one hop while a lane's stretch is one
// loop, so that a call in a stream needs no engine (kernels/call_by_packets.cuh), and a rank sends
// no more than so much, as packets, which are twice as much in links, or as lines. To more than
// one, as lines, more, unless kernels ask for each unit, see is_common_sum().
constexpr int kCudaOneShotRanks = 8;
constexpr std::uint64_t kCudaOneShotBytes = 2048 * kKiB;  // count × element size
constexpr std::uint64_t kCudaOneShotSent = 4096 * kKiB;   // by a rank,
constexpr std::uint64_t kCudaManySent = 6144 * kKiB;      // and to more than one

// All-reduces of middling size in two hops of packets: among n ranks, of b bytes, a rank sends
// 2 (n-1)/n b instead of (n-1) b, which must be worth a hop. While one loop carries all, so that a
// call needs no engine, and until an rsag plan has enough to keep links busy. Kernels are faster
// where parts are alike, sums of common formats (StreamCall::plain), and lines. (And aligned, as
// all but few buffers are, which ranks need not have alike.)
struct TwoShotBounds {
  std::uint64_t hop;   // what must be sent less: of 4 ranks from 256 KiB on, or 341
  std::uint64_t most;  // count × element size
  bool pays_between_two;
};
constexpr TwoShotBounds kFastTwoShot{384 * kKiB, 8192 * kKiB, true},
    kTwoShot{512 * kKiB, 2048 * kKiB, false};
// Between two ranks from here on two shots are faster than a one-shot plan, in a stream and beside.
constexpr std::uint64_t kPairTwoShotBytes = 2048 * kKiB;
TwoShotBounds two_shot_bounds(const PlanRequest& request, const PlanLimits& limits,
                              std::uint64_t bytes) {
  const auto n = static_cast<unsigned>(request.ranks);
  const bool alike = bytes % (std::uint64_t{16} * n) == 0;
  const bool lines = packet_protocol(limits, bytes / n) == Protocol::kLine;
  return is_common_sum(request.dtype, request.op) && alike && lines ? kFastTwoShot : kTwoShot;
}

// Whether all lanes carry messages of so many bytes in one loop of packets. (Lanes' stretches are
// whole pieces.)
bool one_loop(const PlanLimits& limits, std::uint64_t message) {
  constexpr std::uint32_t kPieceBytes = 16;
  const Protocol protocol = packet_protocol(limits, message);
  const std::uint32_t slot =
      limits.packet_slot_bytes != 0 ? limits.packet_slot_bytes : limits.guaranteed_slot_bytes;
  const std::uint32_t lane = payload_bytes(protocol, slot);
  return message <= std::uint64_t{limits.lanes} * (lane - lane % kPieceBytes);
}

bool two_shot_pays(const PlanRequest& request, const PlanLimits& limits, std::uint64_t bytes) {
  const auto n = static_cast<std::uint64_t>(request.ranks);
  const TwoShotBounds bounds = two_shot_bounds(request, limits, bytes);
  if (!two_shot_serves(request.kind) || n > kCudaOneShotRanks ||
      limits.guaranteed_slots < kMinTwoShotSlots || bytes > bounds.most ||
      !one_loop(limits, (bytes + n - 1) / n)) {
    return false;
  }
  // Two ranks send as much in two hops, but each reduces half, and as messages are half as long
  // more goes in one loop.
  if (n == 2) return bounds.pays_between_two && bytes > kPairTwoShotBytes;
  // (n-1) b - 2 (n-1)/n b
  return (n - 1) * (n - 2) * bytes >= bounds.hop * n;
}

// Whether a broadcast or a reduction goes down a chain, of which each GPU sends to one and receives
// from one: faster than an rsag plan at every size that is no packet's.
bool chain_pays(const PlanRequest& request) {
  return chain_serves(request.kind) && request.ranks > 2 && request.ranks <= kShortChainRanks;
}

// Beyond the ranks that plans with sets serve, rings and chains have as many steps as there are
// ranks, trees about as many as that number has bits; rings of all-reduces keep links busier. Not
// measured: by the clock, for 72 GPUs of one domain.
constexpr std::uint64_t kCudaTreeBytesARank = 256 * kKiB;  // count × element size
bool trees_pay(const PlanRequest& request, std::uint64_t bytes) {
  if (request.ranks <= kMaxRanksInSets || !double_binary_tree_serves(request.kind)) return false;
  return request.kind != Kind::kAllReduce ||
         bytes <= kCudaTreeBytesARank * static_cast<std::uint64_t>(request.ranks);
}

Algorithm select_for_cuda(const PlanRequest& request, const PlanLimits& limits,
                          std::uint64_t bytes) {
  if (two_shot_pays(request, limits, bytes)) return Algorithm::kTwoShot;
  const std::uint64_t sent = static_cast<std::uint64_t>(request.ranks - 1) * bytes;
  const bool lines = packet_protocol(limits, bytes) == Protocol::kLine;
  const bool short_enough = bytes <= kCudaOneShotBytes || lines;
  const bool fast = lines && (!reduces(request.kind) || is_common_sum(request.dtype, request.op));
  const std::uint64_t most_sent = fast && request.ranks > 2 ? kCudaManySent : kCudaOneShotSent;
  if (request.ranks <= kCudaOneShotRanks && short_enough && sent <= most_sent &&
      one_loop(limits, bytes)) {
    return Algorithm::kOneShot;
  }
  if (chain_pays(request)) return Algorithm::kChain;
  if (trees_pay(request, bytes)) return Algorithm::kDoubleBinaryTree;
  const bool rsag = rsag_serves(request.kind) && request.ranks <= kMaxRanksInSets;
  return rsag ? Algorithm::kRsag : algorithm_for_many(request.kind);
}

}  // namespace

Algorithm select_algorithm(const PlanRequest& request, const PlanLimits& limits) {
  // A group of one only copies: these plans spread that over the bulk lanes.
  if (request.ranks == 1) return algorithm_for_many(request.kind);
  if (request.ranks > kMaxLinearRanks && double_binary_tree_serves(request.kind)) {
    return Algorithm::kDoubleBinaryTree;
  }
  const std::uint64_t bytes = request.count * dtype_bytes(request.dtype);
  return limits.device == Device::kHost ? select_for_host(request, limits, bytes)
                                        : select_for_cuda(request, limits, bytes);
}

bool suits_hosts(Algorithm algorithm, const PlanRequest& request) {
  return !row_of(algorithm).on_rails || request.hosts == nullptr || request.hosts->is_regular();
}

std::optional<Plan> make_plan(const PlanRequest& request, const PlanLimits& limits,
                              std::optional<Algorithm> algorithm, std::string* error) {
  const std::string problem = request_error(request, limits);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  if (algorithm.has_value() && static_cast<int>(*algorithm) >= kNumAlgorithms) {
    if (error != nullptr) *error = "unknown algorithm";
    return std::nullopt;
  }
  Algorithm chosen = algorithm.value_or(select_algorithm(request, limits));
  // Who asks for an algorithm asks for it wherever it can serve.
  if (!row_of(chosen).serves(request.kind)) chosen = algorithm_for_many(request.kind);
  const bool carried = may_be_carried(request, limits, chosen);
  std::optional<Plan> plan =
      row_of(chosen).plan(request, carried ? carried_limits(limits) : limits, error);
  if (!plan.has_value()) return plan;
  plan->algorithm = chosen;
  if (carried) mark_carried(limits, &*plan);
  return plan;
}

}  // namespace unjam
