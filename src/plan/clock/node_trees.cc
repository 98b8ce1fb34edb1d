// Two trees between nodes and a chain in each, as NCCL has them, for the clock: plans have trees
// over all ranks. The nodes' trees are those of plan/algorithms/trees.h.
#include <algorithm>
#include <vector>

#include "plan/algorithms/double_binary_tree.h"
#include "plan/algorithms/trees.h"
#include "plan/clock/pattern.h"

namespace unjam {
namespace {

class NodeTrees {
 public:
  NodeTrees(const PlanRequest& request, int gpus, Pattern* pattern)
      : gpus_(gpus), nodes_(request.ranks / gpus), pattern_(pattern) {}

  void write(int trees) {
    for (int rank = 0; rank < nodes_ * gpus_; ++rank) {
      for (int t = 0; t < trees; ++t) up(t, rank);
      for (int t = 0; t < trees; ++t) down(t, rank);
      pattern_->end_rank();
    }
  }

 private:
  // Each tree has its chain begin at another GPU, and so at another NIC.
  int head(int tree) const { return tree * (gpus_ / 2); }
  int place(int tree, int rank) const { return (rank % gpus_ - head(tree) + gpus_) % gpus_; }
  int rank_at(int tree, int node, int place) const {
    return node * gpus_ + (head(tree) + place) % gpus_;
  }

  // Who is below the rank: the next one of the chain, and the heads of two nodes.
  std::vector<int> below(int tree, int rank, const TreeNode& node) const {
    std::vector<int> ranks;
    const int here = place(tree, rank);
    if (here + 1 < gpus_) ranks.push_back(rank_at(tree, rank / gpus_, here + 1));
    if (here != 0) return ranks;
    for (const int child : node.children) {
      if (child != kNoNode) ranks.push_back(rank_at(tree, child, 0));
    }
    return ranks;
  }
  std::vector<int> above(int tree, int rank, const TreeNode& node) const {
    const int here = place(tree, rank);
    if (here > 0) return {rank_at(tree, rank / gpus_, here - 1)};
    if (node.parent != kNoNode) return {rank_at(tree, node.parent, 0)};
    return {};
  }

  void add(unsigned flags, int tree, int lag, const std::vector<int>& from,
           const std::vector<int>& to) {
    ClockStep s;
    if (!from.empty()) flags |= kRecv;
    if (!to.empty()) flags |= kSend;
    s.flags = static_cast<std::uint16_t>(flags);
    s.part = static_cast<std::uint32_t>(tree);
    s.lag = static_cast<std::uint32_t>(lag);
    s.reads = static_cast<std::uint16_t>(from.size() + ((flags & kLocal) != 0));
    s.writes = static_cast<std::uint16_t>(to.size() + ((flags & kCopy) != 0));
    pattern_->add_step(s, from, to);
  }

  void up(int tree, int rank) {
    const TreeNode node = double_tree_node(tree, rank / gpus_, nodes_);
    const std::vector<int> from = below(tree, rank, node), to = above(tree, rank, node);
    const unsigned add_up = from.empty() ? 0u : unsigned{kReduce};
    if (to.empty()) {
      add(kLocal | kCopy | add_up, tree, 0, from, from);  // on top: the result goes down at once
    } else {
      add(kLocal | add_up, tree, 0, from, to);
    }
  }

  void down(int tree, int rank) {
    const TreeNode node = double_tree_node(tree, rank / gpus_, nodes_);
    const std::vector<int> from = above(tree, rank, node);
    if (from.empty()) return;
    add(kCopy, tree, node.depth + place(tree, rank), from, below(tree, rank, node));
  }

  const int gpus_, nodes_;
  Pattern* pattern_;
};

}  // namespace

std::optional<Pattern> node_trees_pattern(const PlanRequest& request, const Machine& machine,
                                          std::string* error) {
  PlanRequest fewer = request;
  fewer.ranks = std::min(request.ranks, kMaxGroupRanks);
  fewer.rank = 0;
  const std::optional<Plan> plan = plan_double_binary_tree(fewer, limits_of(machine), error);
  if (!plan) return std::nullopt;
  Pattern pattern;
  pattern.ranks = request.ranks;
  pattern.all_ranks = request.ranks;
  pattern.first_step.push_back(0);
  add_geometry(plan->geometry, machine.slot_bytes, plan->protocol, &pattern);
  NodeTrees(request, machine.gpus_per_node, &pattern).write(static_cast<int>(pattern.parts));
  return pattern;
}

}  // namespace unjam
