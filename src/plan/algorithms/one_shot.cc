#include "plan/algorithms/one_shot.h"

#include "plan/common.h"
#include "plan/program_builder.h"

namespace unjam {
namespace {

// What one lane of a GPU carries of a rank's largest message: two units for each thread, so that
// all are under way at once. And what a lane alone carries: to bring several together takes longer.
constexpr std::uint64_t kOneShotUnits = 2, kSingleUnits = 4;
// Where each rank has a message of every other one a thread has as many units of each, which come
// after another: of short messages among more than two ranks it gets one of each. That is faster in
// a stream, and slower for many calls beside streams, where lanes cost more.
constexpr std::uint64_t kShortMessage = 16 * 1024;
std::uint64_t units_of(const PlanRequest& request, const Geometry& geometry, std::uint64_t usual) {
  const bool is_short = message_bytes(geometry) <= kShortMessage;
  return request.ranks > 2 && !has_root(request.kind) && is_short ? 1 : usual;
}

class OneShotProgram {
 public:
  explicit OneShotProgram(const PlanRequest& request)
      : ranks_(request.ranks),
        rank_(request.rank),
        root_(request.root),
        program_(request.ranks, request.rank) {}

  void write(Plan* plan) const { program_.write(plan); }

  void all_reduce() {
    if (ranks_ > 1) program_.add(kLocal, 0, PeerRanks::nobody(), others());
    gather(0);
  }

  void all_gather() {
    share(rank_);
    if (ranks_ > 1) collect();
  }

  void reduce_scatter() {
    if (ranks_ > 1) scatter();
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
      share(0);
    } else {
      receive(0, root_);
    }
  }

  void all_to_all() {
    if (ranks_ > 1) scatter();
    program_.add(kLocal | kCopy, rank_);
    if (ranks_ > 1) collect();
  }

  void gather_blocks() {
    if (rank_ != root_) return send(rank_, root_);
    program_.add(kLocal | kCopy, rank_);
    if (ranks_ > 1) collect();
  }

  void scatter_blocks() {
    if (rank_ != root_) return receive(rank_, root_);
    if (ranks_ > 1) scatter();
    program_.add(kLocal | kCopy, rank_);
  }

  void send_recv() {
    if (rank_ == root_) {
      send(0, 1 - root_);
    } else {
      receive(0, root_);
    }
  }

 private:
  PeerRanks others() const { return program_.all_others(); }
  void send(int part, int to) {
    program_.add(kLocal, part, PeerRanks::nobody(), PeerRanks::one(to));
  }
  void receive(int part, int from) { program_.add(kCopy, part, PeerRanks::one(from)); }
  void scatter() { program_.add(kLocal | kScatter, 0, PeerRanks::nobody(), others()); }
  void collect() { program_.add(kCollect | kCopy, 0, others()); }
  // The own data, to all and into the output.
  void share(int part) { program_.add(kLocal | kCopy, part, PeerRanks::nobody(), others()); }
  // What was sent is raw: a contribution is scaled where it is gathered.
  void gather(int part) {
    const unsigned whole = kLocal | kCopy | kContribute | kFinish;
    program_.add(ranks_ == 1 ? whole : whole | kReduce, part, others());
  }

  int ranks_, rank_, root_;
  ProgramBuilder program_;
};

// Units of a message that a thread may have for half of the lanes to carry it, see leave_room().
// With more, a call in a stream loses by it more than calls beside streams gain.
constexpr std::uint64_t kOneShotHalfUnits = 5;

}  // namespace

bool one_shot_serves(Kind /*kind*/) { return true; }

std::optional<Plan> plan_one_shot(const PlanRequest& request, const PlanLimits& limits,
                                  std::string* error) {
  const std::string problem = several_peers_error(request, limits, "one_shot",
                                                  one_shot_serves(request.kind), kMinOneShotSlots);
  if (!problem.empty()) {
    if (error != nullptr) *error = problem;
    return std::nullopt;
  }
  Plan plan;
  // Block-structured kinds have one part, the block, per rank whatever the algorithm.
  plan.geometry =
      make_geometry(request, blocked(request.kind) ? static_cast<std::uint32_t>(request.ranks) : 1);
  plan.protocol = packet_protocol(limits, message_bytes(plan.geometry),
                                  has_root(request.kind) ? kLeastLineBytes : kLeastLineToAllBytes);
  plan.geometry.chunk =
      chunk_elements(payload_bytes(plan.protocol, limits.guaranteed_slot_bytes), plan.geometry);
  if (limits.device == Device::kCuda) {
    plan.geometry.lanes =
        packet_lanes(limits, plan, units_of(request, plan.geometry, kSingleUnits));
    if (plan.geometry.lanes != 1) {
      plan.geometry.lanes =
          packet_lanes(limits, plan, units_of(request, plan.geometry, kOneShotUnits));
      plan.geometry.lanes = leave_room(request, limits, plan, kOneShotHalfUnits);
    }
  }

  OneShotProgram program(request);
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
    case Kind::kAllToAll:
      program.all_to_all();
      break;
    case Kind::kGather:
      program.gather_blocks();
      break;
    case Kind::kScatter:
      program.scatter_blocks();
      break;
    case Kind::kSendRecv:
      program.send_recv();
      break;
  }
  program.write(&plan);
  return plan;
}

}  // namespace unjam
