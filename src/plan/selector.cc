#include "plan/selector.h"

#include <cstdint>

#include "plan/common.h"
#include "plan/direct.h"
#include "plan/ring.h"

namespace unjam {
namespace {

struct Row {
  Kind kind;
  int max_ranks;
  std::uint64_t max_bytes;  // that the busiest rank of the direct plan sends or receives
  Algorithm algorithm;
};

// First row that fits; ring if none does. The bytes are (ranks-1) × count × element size for every
// kind: what a rank of a direct all-reduce, all-gather or reduce-scatter sends, what the root of a
// reduce receives, what the root of a broadcast sends. Two ranks gain no hop by going direct (but
// for all-reduce one of two), so only the packets' lower latency counts there; the larger the
// group, the more hops a byte may buy. First guesses, to be replaced by measurements.
constexpr std::uint64_t kKiB = 1024;
constexpr Row kTable[] = {
    {Kind::kAllReduce, 2, 16 * kKiB, Algorithm::kDirect},
    {Kind::kAllReduce, 8, 32 * kKiB, Algorithm::kDirect},
    {Kind::kAllReduce, kMaxDirectRanks, 64 * kKiB, Algorithm::kDirect},
    {Kind::kAllGather, 8, 32 * kKiB, Algorithm::kDirect},
    {Kind::kAllGather, kMaxDirectRanks, 64 * kKiB, Algorithm::kDirect},
    {Kind::kReduceScatter, 8, 32 * kKiB, Algorithm::kDirect},
    {Kind::kReduceScatter, kMaxDirectRanks, 64 * kKiB, Algorithm::kDirect},
    {Kind::kReduce, 8, 16 * kKiB, Algorithm::kDirect},
    {Kind::kReduce, kMaxDirectRanks, 32 * kKiB, Algorithm::kDirect},
    {Kind::kBroadcast, 8, 16 * kKiB, Algorithm::kDirect},
    {Kind::kBroadcast, kMaxDirectRanks, 32 * kKiB, Algorithm::kDirect},
};

}  // namespace

Algorithm select_algorithm(const PlanRequest& request) {
  // A group of one only copies: ring plans spread that over the bulk lanes.
  if (request.ranks == 1) return Algorithm::kRing;
  const std::uint64_t bytes =
      static_cast<std::uint64_t>(request.ranks - 1) * request.count * dtype_bytes(request.dtype);
  for (const Row& row : kTable) {
    if (row.kind == request.kind && request.ranks <= row.max_ranks && bytes <= row.max_bytes) {
      return row.algorithm;
    }
  }
  return Algorithm::kRing;
}

std::optional<Plan> make_plan(const PlanRequest& request, const PlanLimits& limits,
                              std::optional<Algorithm> algorithm, std::string* error) {
  const std::string problem = request_error(request, limits);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  switch (algorithm.value_or(select_algorithm(request))) {
    case Algorithm::kRing:
      return plan_ring(request, limits, error);
    case Algorithm::kDirect:
      return plan_direct(request, limits, error);
  }
  if (error != nullptr) *error = "unknown algorithm";
  return std::nullopt;
}

}  // namespace unjam
