#include "plan/algorithms/pairwise.h"

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

class PairwiseProgram {
 public:
  explicit PairwiseProgram(const PlanRequest& request)
      : ranks_(request.ranks),
        rank_(request.rank),
        root_(request.root),
        program_(request.ranks, request.rank) {}

  void write(Plan* plan) const { program_.write(plan); }

  void all_to_all() {
    own();
    for (int k = 1; k < ranks_; ++k) {
      const int to = (rank_ + k) % ranks_, from = (rank_ - k + ranks_) % ranks_;
      send(to, to);
      receive(from, from);
    }
  }

  void gather() {
    if (rank_ != root_) return send(rank_, root_);
    own();
    each_other([this](int q) { receive(q, q); });
  }

  void scatter() {
    if (rank_ != root_) return receive(rank_, root_);
    each_other([this](int q) { send(q, q); });
    own();
  }

  void send_recv() {
    if (rank_ == root_) {
      send(0, 1 - root_);
    } else {
      receive(0, root_);
    }
  }

 private:
  // Beginning with the one after the own rank, so that several roots do not crowd rank 0.
  template <class F>
  void each_other(F f) {
    for (int k = 1; k < ranks_; ++k) f((rank_ + k) % ranks_);
  }
  void own() { program_.add(kLocal | kCopy, rank_); }
  void send(int part, int to) {
    program_.add(kLocal, part, PeerRanks::nobody(), PeerRanks::one(to));
  }
  void receive(int part, int from) { program_.add(kCopy, part, PeerRanks::one(from)); }

  int ranks_, rank_, root_;
  ProgramBuilder program_;
};

}  // namespace

bool pairwise_serves(Kind kind) {
  return kind == Kind::kAllToAll || kind == Kind::kGather || kind == Kind::kScatter ||
         kind == Kind::kSendRecv;
}

std::optional<Plan> plan_pairwise(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error) {
  std::string problem = planner_error(request, limits, "pairwise", pairwise_serves(request.kind),
                                      kMinPairwiseSlots, kMaxLinearRanks);
  // For all ranks alike, also those whose own part names few.
  if (problem.empty() && limits.device == Device::kCuda && request.ranks > kMostNeighbours + 1) {
    problem = "pairwise plans name all " + std::to_string(request.ranks - 1) +
              " others, and on a GPU a plan names up to " + std::to_string(kMostNeighbours) +
              ": call it in groups of up to " + std::to_string(kMostNeighbours + 1) + " ranks";
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.protocol = Protocol::kSlot;
  plan.geometry =
      make_geometry(request, blocked(request.kind) ? static_cast<std::uint32_t>(request.ranks) : 1);
  plan.geometry.chunk = chunk_elements(
      std::uint64_t{limits.guaranteed_slots} * limits.guaranteed_slot_bytes, plan.geometry);
  assign_bulk_lanes(request, limits, limits.device == Device::kCuda ? 0 : 1, &plan.geometry);
  if (limits.device == Device::kCuda && request.kind != Kind::kAllToAll) {
    plan.geometry.chunk = chunk_elements(chain_chunk_bytes(limits, plan.geometry), plan.geometry);
  }

  PairwiseProgram program(request);
  switch (request.kind) {
    case Kind::kAllToAll:
      program.all_to_all();
      break;
    case Kind::kGather:
      program.gather();
      break;
    case Kind::kScatter:
      program.scatter();
      break;
    default:
      program.send_recv();
      break;
  }
  program.write(&plan);
  return plan;
}

}  // namespace unjam
