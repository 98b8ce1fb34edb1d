// Double binary trees: each is a tree over all ranks, as flat as it can be, and nobody is interior
// in both.
#include "plan/algorithms/trees.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

namespace unjam {
namespace {

int log2_below(int n) {
  int log = 0;
  while ((2 << log) <= n) ++log;
  return log;
}

// "" if `nodes` are one tree over all ranks, with matching ends and depths.
std::string fault_of(const std::vector<TreeNode>& nodes) {
  const auto n = static_cast<int>(nodes.size());
  int tops = 0, edges = 0;
  for (int r = 0; r < n; ++r) {
    const TreeNode& node = nodes[static_cast<std::size_t>(r)];
    const std::string who = "rank " + std::to_string(r);
    if (node.parent == kNoNode) {
      ++tops;
      if (node.depth != 0) return who + " is on top, and has a depth";
    } else {
      if (node.parent < 0 || node.parent >= n) return who + " has a parent that is not there";
      const TreeNode& above = nodes[static_cast<std::size_t>(node.parent)];
      if (std::count(above.children.begin(), above.children.end(), r) != 1) {
        return who + " is not its parent's child";
      }
      // Depths grow downwards, so there is no circle.
      if (node.depth != above.depth + 1) return who + " has a wrong depth";
    }
    if (node.children[0] == kNoNode && node.children[1] != kNoNode) return who + " has a gap";
    for (const int child : node.children) {
      if (child == kNoNode) continue;
      if (child < 0 || child >= n) return who + " has a child that is not there";
      if (nodes[static_cast<std::size_t>(child)].parent != r) return who + " has another's child";
      ++edges;
    }
  }
  if (tops != 1) return std::to_string(tops) + " ranks are on top";
  return edges == n - 1 ? "" : std::to_string(edges) + " edges";
}

std::vector<TreeNode> double_tree(int tree, int n) {
  std::vector<TreeNode> nodes;
  for (int r = 0; r < n; ++r) nodes.push_back(double_tree_node(tree, r, n));
  return nodes;
}

int deepest(const std::vector<TreeNode>& nodes) {
  int depth = 0;
  for (const TreeNode& node : nodes) depth = std::max(depth, node.depth);
  return depth;
}

void expect_two_trees(int n) {
  SCOPED_TRACE(std::to_string(n) + " ranks");
  const std::vector<TreeNode> trees[] = {double_tree(0, n), double_tree(1, n)};
  for (const std::vector<TreeNode>& tree : trees) {
    ASSERT_EQ(fault_of(tree), "");
    ASSERT_EQ(deepest(tree), log2_below(n));
  }
  int leaves_twice = 0;
  for (std::size_t r = 0; r < trees[0].size(); ++r) {
    const int a = trees[0][r].num_children(), b = trees[1][r].num_children();
    ASSERT_TRUE(a == 0 || b == 0) << "rank " << r << " is interior in both";
    if (a + b == 0) {
      ++leaves_twice;
      ASSERT_EQ(r, 0u);
    }
    std::set<int> neighbours;
    for (const std::vector<TreeNode>& tree : trees) {
      neighbours.insert(tree[r].parent);
      neighbours.insert(tree[r].children.begin(), tree[r].children.end());
    }
    neighbours.erase(kNoNode);
    ASSERT_LE(neighbours.size(), 4u);
  }
  ASSERT_EQ(leaves_twice, n % 2);
}

TEST(DoubleTrees, NobodyIsInteriorTwice) {
  for (int n = 1; n <= 2048 && !HasFatalFailure(); ++n) expect_two_trees(n);
  for (const int n : {24576, 64999, 65000, 131072, 131071}) {
    if (HasFatalFailure()) break;
    expect_two_trees(n);
  }
}

// In order: all below a place on its left come before it, all on its right behind.
TEST(DoubleTrees, AreInOrder) {
  for (const int n : {1, 2, 3, 6, 7, 8, 9, 31, 100, 1000}) {
    for (int place = 0; place < n; ++place) {
      const std::array<int, 2> below = tree_children(place, n);
      if (below[0] != kNoNode) {
        EXPECT_LT(below[0], place);
      }
      if (below[1] != kNoNode) {
        EXPECT_GT(below[1], place);
      }
      // What is below lies between the nearest ones above on either side.
      int low = -1, high = n;
      for (int above = tree_parent(place, n); above != kNoNode; above = tree_parent(above, n)) {
        if (above < place) low = std::max(low, above);
        if (above > place) high = std::min(high, above);
      }
      EXPECT_LT(low, place);
      EXPECT_GT(high, place);
      for (const int child : below) {
        if (child == kNoNode) continue;
        EXPECT_GT(child, low);
        EXPECT_LT(child, high);
      }
    }
    EXPECT_EQ(tree_parent(tree_top(n), n), kNoNode);
  }
}

TEST(DoubleTrees, StandWhereTheyAreDrawn) {
  // 0-based in-order trees of six: 3 on top, 1 and 5 below, 0 2 4 below these.
  EXPECT_EQ(double_tree_node(0, 3, 6), (TreeNode{kNoNode, {1, 5}, 0}));
  EXPECT_EQ(double_tree_node(0, 5, 6), (TreeNode{3, {4, kNoNode}, 1}));
  EXPECT_EQ(double_tree_node(0, 2, 6), (TreeNode{1, {kNoNode, kNoNode}, 2}));
  // Mirrored: 2 on top.
  EXPECT_EQ(double_tree_node(1, 2, 6), (TreeNode{kNoNode, {4, 0}, 0}));
  EXPECT_EQ(double_tree_node(1, 0, 6), (TreeNode{2, {1, kNoNode}, 1}));
}

TEST(DoubleTrees, RootsStandOutside) {
  for (int n = 1; n <= 96; ++n) {
    for (int root = 0; root < n; ++root) {
      SCOPED_TRACE(std::to_string(n) + " ranks, root " + std::to_string(root));
      std::vector<TreeNode> trees[2];
      for (int tree = 0; tree < 2; ++tree) {
        for (int r = 0; r < n; ++r) trees[tree].push_back(rooted_tree_node(tree, r, root, n));
        ASSERT_EQ(fault_of(trees[tree]), "");
        ASSERT_EQ(deepest(trees[tree]), n == 1 ? 0 : 1 + log2_below(n - 1));
        ASSERT_EQ(trees[tree][static_cast<std::size_t>(root)].parent, kNoNode);
      }
      // With half of the vector in each tree, nobody sends more than one vector.
      for (std::size_t r = 0; r < trees[0].size(); ++r) {
        ASSERT_LE(trees[0][r].num_children() + trees[1][r].num_children(), 2);
      }
    }
  }
}

}  // namespace
}  // namespace unjam
