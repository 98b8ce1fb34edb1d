// Double binary trees: two trees over the same ranks in which nobody is interior twice. Pure
// functions of a rank and the number of ranks, each of O(log n) steps. (Sanders, Speck, Träff 2009,
// "Two-tree algorithms for full bandwidth broadcast, reduction and scan".)
//
// One tree, over places 0 to n-1: in-order, the place's lowest bits say its height. With i = place
// + 1 and b its lowest bit, i has children at i - b/2 and i + b/2 (or what stands for it where the
// tree ends at n), and what has an odd i is a leaf. The top is the largest power of two. The second
// tree is mirrored if n is even, shifted by one if n is odd (then rank 0 is a leaf in both). A root
// stands outside: it feeds, or is fed by, the tops of two trees over the others.
#pragma once

#include <array>
#include <cstdint>

namespace unjam {

inline constexpr int kNoNode = -1;

// Places, or ranks; kNoNode: there is none.
struct TreeNode {
  int parent = kNoNode;
  std::array<int, 2> children = {kNoNode, kNoNode};  // the present ones first
  int depth = 0;                                     // hops to the top

  constexpr int num_children() const { return (children[0] >= 0) + (children[1] >= 0); }
  bool operator==(const TreeNode&) const = default;
};

// ---- one in-order tree over places 0 to n-1 ----

constexpr int tree_top(int n) {
  int top = 1;
  while (top <= n / 2) top *= 2;
  return top - 1;
}

constexpr int tree_parent(int place, int n) {
  const int i = place + 1, b = i & -i;
  if (n - (i ^ b) >= 2 * b) return ((i ^ b) | 2 * b) - 1;  // (compared so that nothing overflows)
  return (i ^ b) - 1;                                      // kNoNode of the top
}

constexpr std::array<int, 2> tree_children(int place, int n) {
  const int i = place + 1, b = i & -i;
  if (b == 1) return {kNoNode, kNoNode};
  int right = b / 2;
  while (right > 0 && n - i < right) right /= 2;
  return {i - b / 2 - 1, right > 0 ? i + right - 1 : kNoNode};
}

constexpr int tree_depth(int place, int n) {
  int depth = 0;
  for (int p = tree_parent(place, n); p != kNoNode; p = tree_parent(p, n)) ++depth;
  return depth;
}

// ---- two of them over ranks ----

inline constexpr int kTwoTrees = 2;

// Where a rank stands in tree 0 or 1, and who stands there.
constexpr int place_in_tree(int tree, int rank, int n) {
  if (tree == 0) return rank;
  if (n % 2 == 0) return n - 1 - rank;
  return rank == 0 ? n - 1 : rank - 1;
}
constexpr int rank_in_tree(int tree, int place, int n) {
  if (tree == 0) return place;
  if (n % 2 == 0) return n - 1 - place;
  return place == n - 1 ? 0 : place + 1;
}

// rank: one of n.
constexpr TreeNode double_tree_node(int tree, int rank, int n) {
  const int place = place_in_tree(tree, rank, n);
  TreeNode node;
  const int parent = tree_parent(place, n);
  if (parent != kNoNode) node.parent = rank_in_tree(tree, parent, n);
  const std::array<int, 2> below = tree_children(place, n);
  for (std::size_t k = 0; k < 2; ++k) {
    if (below[k] != kNoNode) node.children[k] = rank_in_tree(tree, below[k], n);
  }
  node.depth = tree_depth(place, n);
  return node;
}

// The same with the root outside. The root's node is that above tree `tree`'s top.
constexpr TreeNode rooted_tree_node(int tree, int rank, int root, int n) {
  const auto rank_of = [&](int other) { return (root + 1 + other) % n; };  // of 0 to n-2
  if (rank == root) {
    TreeNode node;
    if (n > 1) node.children[0] = rank_of(rank_in_tree(tree, tree_top(n - 1), n - 1));
    return node;
  }
  const int other = (rank - root - 1 + n) % n;
  TreeNode node = double_tree_node(tree, other, n - 1);
  node.parent = node.parent == kNoNode ? root : rank_of(node.parent);
  for (int& child : node.children) child = child == kNoNode ? kNoNode : rank_of(child);
  ++node.depth;
  return node;
}

}  // namespace unjam
