#include "reshard/subset.h"

#include <algorithm>
#include <cstddef>
#include <set>
#include <utility>

#include "reshard/plan.h"

namespace unjam::reshard {
namespace {

using Ranks = std::set<std::int32_t>;

struct Side {
  const char* name;
  Mesh Request::* mesh;
  std::vector<Placement> Tensor::* placements;
};
constexpr Side kSides[] = {{"source", &Request::src, &Tensor::src},
                           {"destination", &Request::dst, &Tensor::dst}};

// Whether every tensor is replicated in that mesh dimension.
bool replicated(const Request& request, const Side& side, std::size_t dim) {
  return std::all_of(request.tensors.begin(), request.tensors.end(), [&](const Tensor& t) {
    return (t.*side.placements)[dim].kind == PlacementKind::kReplicate;
  });
}

[[noreturn]] void refuse_part(const Request& request, const Side& side, std::int32_t rank,
                              bool copied) {
  for (const Tensor& tensor : request.tensors) {
    for (const Placement& p : tensor.*side.placements) {
      if (copied || p.kind == PlacementKind::kReplicate) continue;
      throw BadRequest("tensor \"" + tensor.name + "\": rank " + std::to_string(rank) +
                       " has a part of the " + side.name +
                       " that no other rank has, so it cannot be left out: have it on another "
                       "rank, and make a plan of that");
    }
  }
  throw BadRequest("rank " + std::to_string(rank) + " is in the " + side.name +
                   "'s only replica: without it nothing is left");
}

void drop(Request& request, const Side& side, const Ranks& gone) {
  Mesh& mesh = request.*side.mesh;
  std::vector<bool> copies(mesh.dims.size());
  std::size_t replicas = 1;
  for (std::size_t d = 0; d < mesh.dims.size(); ++d) {
    copies[d] = replicated(request, side, d);
    if (copies[d]) replicas *= static_cast<std::size_t>(mesh.dims[d]);
  }
  // Of each place its replica: its place in the dimensions of copies, row-major.
  std::vector<std::size_t> replica_of(mesh.ranks.size());
  std::vector<bool> left(replicas, true);
  std::int32_t first_gone = -1;
  for (std::size_t at = 0; at < mesh.ranks.size(); ++at) {
    std::size_t rest = at, step = 1;
    for (std::size_t d = mesh.dims.size(); d-- > 0;) {
      const auto size = static_cast<std::size_t>(mesh.dims[d]);
      if (copies[d]) {
        replica_of[at] += rest % size * step;
        step *= size;
      }
      rest /= size;
    }
    if (gone.count(mesh.ranks[at]) == 0) continue;
    left[replica_of[at]] = false;
    if (first_gone < 0 || mesh.ranks[at] < first_gone) first_gone = mesh.ranks[at];
  }
  const auto count = static_cast<std::size_t>(std::count(left.begin(), left.end(), true));
  if (count == replicas) return;
  const auto first =
      static_cast<std::size_t>(std::find(copies.begin(), copies.end(), true) - copies.begin());
  if (count == 0) refuse_part(request, side, first_gone, first < copies.size());
  const auto stays = [&](std::size_t d) { return d == first || !copies[d]; };
  Mesh smaller;
  for (std::size_t d = 0; d < mesh.dims.size(); ++d) {
    if (stays(d)) {
      smaller.dims.push_back(d == first ? static_cast<std::int64_t>(count) : mesh.dims[d]);
    }
  }
  smaller.ranks.resize(count * (mesh.ranks.size() / replicas));
  std::vector<std::size_t> number(replicas);  // among those that are left
  for (std::size_t r = 1; r < replicas; ++r) number[r] = number[r - 1] + (left[r - 1] ? 1 : 0);
  for (std::size_t at = 0; at < mesh.ranks.size(); ++at) {
    if (!left[replica_of[at]]) continue;
    std::size_t rest = at, step = 1, place = 0;
    for (std::size_t d = mesh.dims.size(); d-- > 0;) {
      const auto size = static_cast<std::size_t>(mesh.dims[d]);
      const std::size_t index = d == first ? number[replica_of[at]] : rest % size;
      rest /= size;
      if (!stays(d)) continue;
      place += index * step;
      step *= d == first ? count : size;
    }
    smaller.ranks[place] = mesh.ranks[at];
  }
  mesh = std::move(smaller);
  for (Tensor& tensor : request.tensors) {
    std::vector<Placement> fewer;
    for (std::size_t d = 0; d < copies.size(); ++d) {
      if (stays(d)) fewer.push_back((tensor.*side.placements)[d]);
    }
    tensor.*side.placements = std::move(fewer);
  }
}

bool alone(const Topology& topology) {
  const Topology each = ranks_alone(static_cast<std::int64_t>(topology.host.size()));
  return topology.host == each.host && topology.nic == each.nic;
}

}  // namespace

Request without(const Request& request, const std::vector<std::int32_t>& ranks,
                const std::vector<std::string>& tensors, bool renumber) {
  Request part = request;
  for (const std::string& name : tensors) {
    const auto is_it = [&](const Tensor& t) { return t.name == name; };
    if (std::none_of(request.tensors.begin(), request.tensors.end(), is_it)) {
      throw BadRequest("the plan has no tensor \"" + name + "\": name one that it has");
    }
    std::erase_if(part.tensors, is_it);
  }
  if (part.tensors.empty()) {
    throw BadRequest("no tensor is left: name fewer of those that are to be left out");
  }
  const Ranks gone(ranks.begin(), ranks.end());
  for (const Side& side : kSides) drop(part, side, gone);
  const bool each_alone = alone(request.topology);
  if (renumber) {
    for (const Side& side : kSides) {
      for (std::int32_t& rank : (part.*side.mesh).ranks) {
        rank -= static_cast<std::int32_t>(std::distance(gone.begin(), gone.lower_bound(rank)));
      }
    }
    Topology fewer;
    for (std::size_t r = 0; r < part.topology.host.size(); ++r) {
      if (gone.count(static_cast<std::int32_t>(r)) != 0) continue;
      fewer.host.push_back(part.topology.host[r]);
      fewer.nic.push_back(part.topology.nic[r]);
    }
    part.topology = std::move(fewer);
  }
  if (each_alone) {
    std::int32_t highest = -1;
    for (const Side& side : kSides) {
      for (const std::int32_t rank : (part.*side.mesh).ranks) highest = std::max(highest, rank);
    }
    part.topology = ranks_alone(std::int64_t{highest} + 1);
  }
  return part;
}

}  // namespace unjam::reshard
