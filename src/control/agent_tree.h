// The tree of agents: who is whose parent. Agent 0 is the root; agent i's children are the fan-out
// agents behind kAgentFanOut * i. So a parent's number is always lower than its children's, and a
// tree of any size is the beginning of every larger one: it can grow while agents arrive.
// Pure functions of numbers.
#pragma once

#include <algorithm>
#include <cstdint>

namespace unjam {

inline constexpr std::uint32_t kAgentFanOut = 32;
inline constexpr std::uint32_t kNoAgent = ~std::uint32_t{0};

// kNoAgent: of the root.
constexpr std::uint32_t agent_parent(std::uint32_t agent) {
  return agent == 0 ? kNoAgent : (agent - 1) / kAgentFanOut;
}

// Of n agents: the first child, and how many there are. (64 bits: the last agents' would overflow.)
constexpr std::uint64_t first_agent_child(std::uint32_t agent) {
  return std::uint64_t{agent} * kAgentFanOut + 1;
}
constexpr std::uint32_t agent_children(std::uint32_t agent, std::uint32_t n) {
  const std::uint64_t first = first_agent_child(agent);
  if (first >= n) return 0;
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(kAgentFanOut, n - first));
}

// Steps up to the root.
constexpr std::uint32_t agent_depth(std::uint32_t agent) {
  std::uint32_t depth = 0;
  for (; agent != 0; agent = agent_parent(agent)) ++depth;
  return depth;
}

// How many of n agents have children: those with the lowest numbers.
constexpr std::uint32_t interior_agents(std::uint32_t n) {
  return n <= 1 ? 0 : agent_parent(n - 1) + 1;
}

// The child of `from` in whose subtree `to` is, `to` itself perhaps; kNoAgent: in none.
constexpr std::uint32_t agent_child_towards(std::uint32_t from, std::uint32_t to) {
  while (to != kNoAgent && to > from) {
    const std::uint32_t parent = agent_parent(to);
    if (parent == from) return to;
    to = parent;
  }
  return kNoAgent;
}

// The nearest ancestor that is not gone; kNoAgent: there is none.
template <class Gone>
constexpr std::uint32_t living_agent_ancestor(std::uint32_t agent, Gone&& gone) {
  std::uint32_t p = agent_parent(agent);
  while (p != kNoAgent && gone(p)) p = agent_parent(p);
  return p;
}

// Of n agents the one that is, or stands in for, the root: the lowest number that is not gone.
template <class Gone>
constexpr std::uint32_t standing_root(std::uint32_t n, Gone&& gone) {
  for (std::uint32_t a = 0; a < n; ++a) {
    if (!gone(a)) return a;
  }
  return kNoAgent;
}

// Whose child an agent that is left is: its nearest living ancestor's, or else that of who stands
// in for the root; kNoAgent: that is the agent itself. The result is lower than `agent`, so no
// circle arises.
template <class Gone>
constexpr std::uint32_t living_agent_parent(std::uint32_t agent, Gone&& gone) {
  const std::uint32_t p = living_agent_ancestor(agent, gone);
  return p != kNoAgent ? p : standing_root(agent, gone);
}

}  // namespace unjam
