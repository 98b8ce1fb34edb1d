// Which cycle is shown where there are several: a rule for each model, so that both engines name
// the same one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "sim/job.h"
#include "sim/outcome.h"

namespace unjam::sim {

// Single queue, when nobody moves any more. offer(gpu): the collective that it stands at, nothing
// if it is done. From the first GPU (from `least` on) that stands, follow the first member that
// stands elsewhere, until one comes again. Empty if nobody stands.
template <class Offer>
std::vector<Wait> cycle_of_offers(const Job& job, std::uint32_t least, Offer&& offer) {
  std::uint32_t gpu = least;
  while (gpu < job.gpus() && !offer(gpu)) ++gpu;
  if (gpu == job.gpus()) return {};
  std::vector<Wait> path;
  for (;;) {
    const auto seen = std::ranges::find(path, gpu, &Wait::gpu);
    if (seen != path.end()) return {seen, path.end()};
    const Collective c = *offer(gpu);
    std::uint32_t on = gpu;
    for (const Member& m : job.members(c.group)) {
      const std::optional<Collective> other = offer(m.gpu);
      if (!other || !(*other == c)) {
        on = m.gpu;
        break;
      }
    }
    path.push_back({gpu, c, on});
    gpu = on;
  }
}

// The shortest cycle through `start` over edges among `nodes` (ascending); breadth first, lower
// GPUs first. edge(a, b): whether a waits for b. label(a, b): on what.
template <class Edge, class Label>
std::vector<Wait> shortest_cycle(std::uint32_t start, std::span<const std::uint32_t> nodes,
                                 Edge&& edge, Label&& label) {
  struct Step {
    std::uint32_t gpu;
    std::size_t from;
  };
  std::vector<Step> queue{{start, 0}};
  for (std::size_t i = 0; i < queue.size(); ++i) {
    if (i > 0 && edge(queue[i].gpu, start)) {
      std::vector<Wait> cycle{{queue[i].gpu, label(queue[i].gpu, start), start}};
      for (std::size_t at = i; at != 0; at = queue[at].from) {
        const std::uint32_t a = queue[queue[at].from].gpu, b = queue[at].gpu;
        cycle.insert(cycle.begin(), {a, label(a, b), b});
      }
      return cycle;
    }
    for (const std::uint32_t next : nodes) {
      const bool seen = std::ranges::find(queue, next, &Step::gpu) != queue.end();
      if (!seen && edge(queue[i].gpu, next)) queue.push_back({next, i});
    }
  }
  return {};
}

}  // namespace unjam::sim
