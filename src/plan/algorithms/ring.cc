#include "plan/algorithms/ring.h"

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// The ring as rank `rank` sees it, and the program it writes.
class RingProgram {
 public:
  explicit RingProgram(const PlanRequest& request)
      : ranks_(request.ranks), rank_(request.rank), program_(request.ranks, request.rank) {}

  void write(Plan* plan) const { program_.write(plan); }

  // The one primitive of a group of one. `reducing`: the own contribution is the whole result.
  void alone(bool reducing) { add(reducing ? kLocal | kCopy | kOwn | kFinish : kLocal | kCopy, 0); }

  void all_reduce() {
    reduce_round();
    add(kRecv | kLocal | kReduce | kOwn | kFinish | kCopy | kSend | kIntoOutput, rank_);
    for (int back = 1; back <= ranks_ - 2; ++back) add(kPassOn, rank_ - back);
    add(kRecv | kCopy, rank_ + 1);
  }

  void all_gather() {
    add(kLocal | kCopy | kSend | kIntoOutput, rank_);
    for (int back = 1; back <= ranks_ - 2; ++back) add(kPassOn, rank_ - back);
    add(kRecv | kCopy, rank_ + 1);
  }

  void reduce_scatter() {
    reduce_round();
    add(kRecv | kLocal | kReduce | kOwn | kFinish | kCopy, rank_);
  }

 private:
  // Wherever a rank's own data enters a ring's reduction, it is a contribution.
  static constexpr unsigned kOwn = kContribute;
  // A result that others want, too.
  static constexpr unsigned kPassOn = kRecv | kCopy | kSend | kIntoOutput;

  // All parts but the own one are passed on with the own contribution added.
  void reduce_round() {
    add(kLocal | kOwn | kSend, rank_ - 1);
    for (int back = 2; back <= ranks_ - 1; ++back) {
      add(kRecv | kLocal | kReduce | kOwn | kSend, rank_ - back);
    }
  }

  int wrap(int i) const { return (i % ranks_ + ranks_) % ranks_; }

  void add(unsigned flags, int part) {
    const auto peer = [](bool is_there, int rank) {
      return is_there ? PeerRanks::one(rank) : PeerRanks::nobody();
    };
    program_.add(flags, wrap(part), peer((flags & kRecv) != 0, wrap(rank_ - 1)),
                 peer((flags & kSend) != 0, wrap(rank_ + 1)));
  }

  int ranks_, rank_;
  ProgramBuilder program_;
};

}  // namespace

bool ring_serves(Kind kind) {
  return kind == Kind::kAllReduce || kind == Kind::kAllGather || kind == Kind::kReduceScatter ||
         kind == Kind::kBarrier;
}

std::optional<Plan> plan_ring(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error) {
  const std::string problem = planner_error(request, limits, "ring", ring_serves(request.kind),
                                            kMinRingSlots, kMaxLinearRanks);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry = make_geometry(request, static_cast<std::uint32_t>(request.ranks));
  assign_bulk_lanes(request, limits, 1, &plan.geometry);
  plan.geometry.chunk = chunk_elements(
      std::uint64_t{limits.guaranteed_slots - 1} * limits.guaranteed_slot_bytes, plan.geometry);

  RingProgram program(request);
  if (request.ranks == 1) {
    program.alone(reduces(request.kind));
    program.write(&plan);
    return plan;
  }
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kBarrier:
      program.all_reduce();
      break;
    case Kind::kAllGather:
      program.all_gather();
      break;
    case Kind::kReduceScatter:
      program.reduce_scatter();
      break;
    default:  // refused above
      break;
  }
  program.write(&plan);
  return plan;
}

}  // namespace unjam
