#include "plan/algorithms/two_shot.h"

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// What one lane of a GPU carries of each part: a unit for each thread, so that every one
// adds one unit of packets as soon as it has come. With less the lanes are more than what they do
// is worth, with more a call waits for its lanes.
constexpr std::uint64_t kTwoShotUnits = 1;
// Units of a part for half of the lanes to carry it, see leave_room(). With more, a call in a
// stream loses by it more than calls beside streams gain.
constexpr std::uint64_t kTwoShotHalfUnits = 3;

}  // namespace

bool two_shot_serves(Kind kind) { return kind == Kind::kAllReduce; }

std::optional<Plan> plan_two_shot(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error) {
  const std::string problem = several_peers_error(request, limits, "two-shot",
                                                  two_shot_serves(request.kind), kMinTwoShotSlots);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  plan.protocol = packet_protocol(limits, message_bytes(plan.geometry));
  plan.geometry.chunk =
      chunk_elements(payload_bytes(plan.protocol, limits.guaranteed_slot_bytes), plan.geometry);
  if (limits.device == Device::kCuda) {
    plan.geometry.lanes = packet_lanes(limits, plan, kTwoShotUnits);
    plan.geometry.lanes = leave_room(request, limits, plan, kTwoShotHalfUnits);
  }
  const unsigned result = kLocal | kCopy | kContribute | kFinish;
  ProgramBuilder program(request.ranks, request.rank);
  if (request.ranks == 1) {
    program.add(result, 0);
  } else {
    const PeerRanks others = program.all_others();
    program.add(kLocal | kScatter, 0, PeerRanks::nobody(), others);
    program.add(result | kReduce, request.rank, others, others);
    program.add(kCollect | kCopy | kSecondHop, 0, others);
  }
  program.write(&plan);
  return plan;
}

}  // namespace unjam
