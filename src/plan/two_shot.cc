#include "plan/two_shot.h"

#include <algorithm>
#include <vector>

#include "plan/common.h"

namespace unjam {
namespace {

// What one lane of a GPU carries of each part: 8 bytes for each of a block's 512 threads, so that
// every thread adds one unit of packets as soon as it has come. With less the lanes are more than
// what they do is worth, with more a call waits for its lanes.
constexpr std::uint64_t kLaneBytes = 4 * 1024;

Primitive primitive(unsigned flags, int part) {
  Primitive p;
  p.flags = static_cast<std::uint16_t>(flags);
  p.part = static_cast<std::uint16_t>(part);
  return p;
}

}  // namespace

bool two_shot_serves(Kind kind) { return kind == Kind::kAllReduce; }

std::optional<Plan> plan_two_shot(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error) {
  std::string problem = request_error(request, limits);
  if (problem.empty() && request.ranks > kMaxDirectRanks) {
    problem = "two-shot plans serve at most " + std::to_string(kMaxDirectRanks) +
              " ranks, this group has " + std::to_string(request.ranks) + ": use " +
              to_string(algorithm_for_many(request.kind));
  }
  if (problem.empty() && limits.escape_slots < kMinTwoShotSlots) {
    problem = "two-shot plans need at least " + std::to_string(kMinTwoShotSlots) +
              " guaranteed slots, not " + std::to_string(limits.escape_slots);
  }
  if (problem.empty() && !two_shot_serves(request.kind)) {
    problem = std::string("two-shot plans do not serve ") + to_string(request.kind) + ": use " +
              to_string(algorithm_for_many(request.kind));
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.algorithm = Algorithm::kTwoShot;
  plan.protocol = Protocol::kPacket;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  plan.geometry.chunk = chunk_elements(limits.escape_slot_bytes / 2, plan.geometry);
  if (limits.device == Device::kCuda) {
    const std::uint64_t part = plan.geometry.part(0).length * dtype_bytes(request.dtype);
    plan.geometry.lanes = static_cast<std::uint16_t>(
        std::clamp<std::uint64_t>((part + kLaneBytes - 1) / kLaneBytes, 1, limits.lanes));
  }
  const unsigned result = kLocal | kCopy | kContribute | kFinish;
  if (request.ranks == 1) {
    plan.primitives = {primitive(result, 0)};
  } else {
    plan.primitives = {primitive(kLocal | kScatter, 0),
                       primitive(result | kGather | kReduce | kSendAll, request.rank),
                       primitive(kCollect | kCopy | kSecondHop, 0)};
  }
  return plan;
}

}  // namespace unjam
