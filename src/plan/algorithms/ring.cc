#include "plan/algorithms/ring.h"

#include <algorithm>

#include "plan/common.h"

namespace unjam {
namespace {

// The ring as rank `rank` sees it, and the program it writes.
class RingProgram {
 public:
  RingProgram(const PlanRequest& request, std::vector<Primitive>* program)
      : ranks_(request.ranks), rank_(request.rank), root_(request.root), program_(program) {}

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

  void reduce() {
    if (rank_ == wrap(root_ + 1)) {
      add(kLocal | kOwn | kSend, 0);
    } else if (rank_ == root_) {
      add(kRecv | kLocal | kReduce | kOwn | kFinish | kCopy, 0);
    } else {
      add(kRecv | kLocal | kReduce | kOwn | kSend, 0);
    }
  }

  void broadcast() {
    if (rank_ == root_) {
      add(kLocal | kCopy | kSend | kIntoOutput, 0);
    } else if (rank_ == wrap(root_ - 1)) {
      add(kRecv | kCopy, 0);
    } else {
      add(kPassOn, 0);
    }
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
    Primitive p;
    p.flags = static_cast<std::uint16_t>(flags);
    if (flags & kRecv) p.recv_peer = static_cast<std::uint16_t>(wrap(rank_ - 1));
    if (flags & kSend) p.send_peer = static_cast<std::uint16_t>(wrap(rank_ + 1));
    p.part = static_cast<std::uint16_t>(wrap(part));
    program_->push_back(p);
  }

  int ranks_, rank_, root_;
  std::vector<Primitive>* program_;
};

}  // namespace

bool ring_serves(Kind kind) { return algorithm_for_many(kind) == Algorithm::kRing; }

std::optional<Plan> plan_ring(const PlanRequest& request, const PlanLimits& limits,
                              std::string* error) {
  std::string problem = request_error(request, limits);
  if (problem.empty() && limits.escape_slots < kMinRingSlots) {
    problem = "ring plans need at least " + std::to_string(kMinRingSlots) +
              " guaranteed slots, not " + std::to_string(limits.escape_slots);
  }
  if (problem.empty() && !ring_serves(request.kind)) {
    problem = std::string("ring plans do not serve ") + to_string(request.kind) + ": use pairwise";
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  const auto ranks = static_cast<std::uint32_t>(request.ranks);
  plan.geometry = make_geometry(request, has_root(request.kind) ? 1 : ranks);
  const bool chain = has_root(request.kind) && limits.device == Device::kCuda;
  const bool short_chain = chain && request.ranks > 1 && request.ranks <= kShortChainRanks;
  // (As a mesh plan.)
  assign_bulk_lanes(request, limits, short_chain ? 0 : 1, &plan.geometry);
  if (short_chain) {
    plan.geometry.chunk = slot_chunk(limits, plan.geometry);
    even_chunks(&plan.geometry);
  } else {
    const std::uint64_t but_one = std::uint64_t{limits.escape_slots - 1} * limits.escape_slot_bytes;
    const std::uint64_t bytes = chain ? chain_chunk_bytes(limits, plan.geometry) : but_one;
    plan.geometry.chunk = chunk_elements(bytes, plan.geometry);
  }

  RingProgram program(request, &plan.primitives);
  if (request.ranks == 1) {
    program.alone(reduces(request.kind));
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
    case Kind::kReduce:
      program.reduce();
      break;
    case Kind::kBroadcast:
      program.broadcast();
      break;
    default:  // refused above
      break;
  }
  return plan;
}

}  // namespace unjam
