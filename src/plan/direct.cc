#include "plan/direct.h"

#include "plan/common.h"

namespace unjam {
namespace {

class DirectProgram {
 public:
  DirectProgram(const PlanRequest& request, std::vector<Primitive>* program)
      : ranks_(request.ranks), rank_(request.rank), root_(request.root), program_(program) {}

  void all_reduce() {
    for (int i = 1; i < ranks_; ++i) send(0, peer(i));
    gather(0);
  }

  void all_gather() {
    local_copy(rank_);
    for (int i = 1; i < ranks_; ++i) send(rank_, peer(i));
    // Rank r-1 sends to us first, rank r-2 second, …
    for (int i = 1; i < ranks_; ++i) receive(peer(-i), peer(-i));
  }

  void reduce_scatter() {
    for (int i = 1; i < ranks_; ++i) send(peer(i), peer(i));
    gather(rank_);
  }

  void reduce() {
    if (rank_ == root_) {
      gather(0);
    } else {
      send(0, root_);
    }
  }

  void broadcast() {
    if (rank_ == root_) {
      for (int i = 1; i < ranks_; ++i) send(0, peer(i));
      local_copy(0);
    } else {
      receive(0, root_);
    }
  }

 private:
  int peer(int distance) const { return ((rank_ + distance) % ranks_ + ranks_) % ranks_; }

  // Raw: a contribution is scaled where it is gathered.
  void send(int part, int to) { add(kLocal | kSend, part, kNoPeer, to); }
  void receive(int part, int from) { add(kRecv | kCopy, part, from, kNoPeer); }
  void local_copy(int part) { add(kLocal | kCopy, part, kNoPeer, kNoPeer); }
  void gather(int part) {
    const unsigned whole = kLocal | kCopy | kContribute | kFinish;
    add(ranks_ == 1 ? whole : whole | kGather | kReduce, part, kNoPeer, kNoPeer);
  }

  void add(unsigned flags, int part, int from, int to) {
    Primitive p;
    p.flags = static_cast<std::uint16_t>(flags);
    p.recv_peer = static_cast<std::uint16_t>(from);
    p.send_peer = static_cast<std::uint16_t>(to);
    p.part = static_cast<std::uint16_t>(part);
    program_->push_back(p);
  }

  int ranks_, rank_, root_;
  std::vector<Primitive>* program_;
};

}  // namespace

std::optional<Plan> plan_direct(const PlanRequest& request, const PlanLimits& limits,
                                std::string* error) {
  std::string problem = request_error(request, limits);
  if (problem.empty() && request.ranks > kMaxDirectRanks) {
    problem = "direct plans serve at most " + std::to_string(kMaxDirectRanks) +
              " ranks, this group has " + std::to_string(request.ranks) + ": use ring";
  }
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  plan.algorithm = Algorithm::kDirect;
  plan.protocol = Protocol::kPacket;
  // Block-structured kinds have one part, the block, per rank whatever the algorithm.
  const bool blocked = request.kind == Kind::kAllGather || request.kind == Kind::kReduceScatter;
  plan.geometry = make_geometry(request, blocked ? static_cast<std::uint32_t>(request.ranks) : 1);
  plan.geometry.chunk = chunk_elements(limits.escape_slot_bytes / 2, plan.geometry);

  DirectProgram program(request, &plan.primitives);
  switch (request.kind) {
    case Kind::kAllReduce:
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
  }
  return plan;
}

}  // namespace unjam
