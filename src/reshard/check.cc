#include "reshard/check.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "reshard/plan.h"

namespace unjam::reshard {
namespace {

using Indices = std::vector<std::int64_t>;
constexpr std::int64_t kNothing = -1;

// torch.chunk, element by element.
std::vector<Indices> chunks(const Indices& indices, std::int64_t parts) {
  std::vector<Indices> result(static_cast<std::size_t>(parts));
  const auto n = static_cast<std::int64_t>(indices.size());
  const std::int64_t size = std::max<std::int64_t>(1, (n + parts - 1) / parts);
  for (std::int64_t i = 0; i < n; ++i) {
    result[static_cast<std::size_t>(i / size)].push_back(indices[static_cast<std::size_t>(i)]);
  }
  return result;
}

// The global indices that a position of the mesh holds of one dimension, in local order.
Indices held(const Mesh& mesh, const std::vector<Placement>& placements, std::size_t position,
             std::int32_t dim, std::int64_t size) {
  Indices indices;
  for (std::int64_t i = 0; i < size; ++i) indices.push_back(i);
  std::int64_t below = static_cast<std::int64_t>(mesh.ranks.size());
  auto rest = static_cast<std::int64_t>(position);
  for (std::size_t m = 0; m < placements.size(); ++m) {
    below /= mesh.dims[m];
    const auto coordinate = static_cast<std::size_t>(rest / below);
    rest %= below;
    const Placement& p = placements[m];
    if (p.kind == PlacementKind::kReplicate || p.dim != dim) continue;
    Indices mine;
    const std::int64_t split = p.kind == PlacementKind::kStridedShard ? p.split : 1;
    for (const Indices& part : chunks(indices, split)) {
      const Indices piece = chunks(part, mesh.dims[m])[coordinate];
      mine.insert(mine.end(), piece.begin(), piece.end());
    }
    indices = std::move(mine);
  }
  return indices;
}

// A local tensor: its shape and, of each place, an element's number.
struct Local {
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> values;
};

Local make_local(const Mesh& mesh, const std::vector<Placement>& placements, std::size_t position,
                 const std::vector<std::int64_t>& shape) {
  Local local;
  local.values = {0};
  for (std::size_t d = 0; d < shape.size(); ++d) {
    const Indices indices =
        held(mesh, placements, position, static_cast<std::int32_t>(d), shape[d]);
    local.shape.push_back(static_cast<std::int64_t>(indices.size()));
    std::vector<std::int64_t> finer;
    finer.reserve(local.values.size() * indices.size());
    for (const std::int64_t value : local.values) {
      for (const std::int64_t i : indices) finer.push_back(value * shape[d] + i);
    }
    local.values = std::move(finer);
  }
  return local;
}

// Calls f(place) for each place of a box, row-major; false if it leaves the tensor.
template <class F>
bool for_places(const Local& local, const std::vector<std::int64_t>& start,
                const std::vector<std::int64_t>& size, F&& f) {
  const std::size_t ndims = local.shape.size();
  if (start.size() != ndims || size.size() != ndims) return false;
  for (std::size_t d = 0; d < ndims; ++d) {
    if (start[d] < 0 || size[d] < 1 || start[d] + size[d] > local.shape[d]) return false;
  }
  std::vector<std::int64_t> at(ndims, 0);
  while (true) {
    std::int64_t place = 0;
    for (std::size_t d = 0; d < ndims; ++d) place = place * local.shape[d] + start[d] + at[d];
    f(static_cast<std::size_t>(place));
    std::size_t d = ndims;
    while (d > 0 && ++at[d - 1] == size[d - 1]) at[--d] = 0;
    if (d == 0) return true;
  }
}

// An element on its way; of a message they ascend by the byte where they begin.
struct Element {
  std::int64_t at = 0;
  std::uint32_t tensor = 0;
  std::int64_t value = 0;
};
using Message = std::vector<Element>;

[[noreturn]] void refuse() {
  throw BadRequest("the ranks' tensors have more than " + std::to_string(kMostCheckedElements) +
                   " elements, too many to check one by one: check smaller shapes");
}

// Before anything is made of the tensors: what is too large as a whole is too large in parts.
void refuse_large(const Request& request) {
  std::int64_t all = 0;
  for (const Tensor& tensor : request.tensors) {
    std::int64_t n = 1;
    for (const std::int64_t dim : tensor.shape) {
      if (dim > kMostCheckedElements) refuse();  // also of an empty tensor: its indices are listed
      n *= dim;
    }
    if ((all += n) > kMostCheckedElements) refuse();
  }
}

class Checker {
 public:
  Checker(const Request& request, const std::vector<RankPlan>& plans)
      : request_(request), plans_(plans), src_(plans.size()), dst_(plans.size()) {}

  CheckReport run() {
    fill();
    for (std::size_t rank = 0; rank < plans_.size() && error_.empty(); ++rank) copy_own(rank);
    if (error_.empty()) run_bundles();
    if (error_.empty()) compare();
    return {error_.empty(), error_, elements_};
  }

 private:
  struct Wanted {
    Local local;  // what should be there
    std::vector<std::int64_t> got;
    std::vector<std::uint8_t> times;
  };

  void fail(const std::string& text) {
    if (error_.empty()) error_ = text;
  }
  std::string name(std::uint32_t tensor) const { return "tensor " + request_.tensors[tensor].name; }

  void count(const Local& local) {
    total_ += static_cast<std::int64_t>(local.values.size());
    if (total_ > kMostCheckedElements) refuse();
  }

  void fill() {
    refuse_large(request_);
    for (const bool src : {true, false}) {
      const Mesh& mesh = src ? request_.src : request_.dst;
      for (std::size_t position = 0; position < mesh.ranks.size(); ++position) {
        const auto rank = static_cast<std::size_t>(mesh.ranks[position]);
        for (const Tensor& tensor : request_.tensors) {
          Local local = make_local(mesh, src ? tensor.src : tensor.dst, position, tensor.shape);
          count(local);
          if (src) {
            src_[rank].push_back(std::move(local));
            continue;
          }
          const std::size_t n = local.values.size();
          elements_ += static_cast<std::int64_t>(n);
          dst_[rank].push_back({std::move(local), std::vector<std::int64_t>(n, kNothing),
                                std::vector<std::uint8_t>(n, 0)});
        }
      }
    }
  }

  void put(Wanted* wanted, std::size_t place, std::int64_t value) {
    wanted->got[place] = value;
    if (wanted->times[place] < 2) ++wanted->times[place];
  }

  void copy_own(std::size_t rank) {
    for (const CopyBox& copy : plans_[rank].copies) {
      if (copy.tensor >= src_[rank].size() || copy.tensor >= dst_[rank].size()) {
        return fail("rank " + std::to_string(rank) + " copies what it does not hold or want");
      }
      std::vector<std::int64_t> values;
      const Local& from = src_[rank][copy.tensor];
      bool inside = for_places(from, copy.box.src_start, copy.box.size,
                               [&](std::size_t place) { values.push_back(from.values[place]); });
      Wanted& to = dst_[rank][copy.tensor];
      std::size_t i = 0;
      inside = inside && for_places(to.local, copy.box.dst_start, copy.box.size,
                                    [&](std::size_t place) { put(&to, place, values[i++]); });
      if (!inside) return fail(outside(rank, copy.tensor));
    }
  }
  std::string outside(std::size_t rank, std::uint32_t tensor) const {
    return "rank " + std::to_string(rank) + " reaches beyond its part of " + name(tensor);
  }

  void run_bundles() {
    std::map<std::uint32_t, std::map<std::int32_t, const Step*>> bundles;
    for (std::size_t rank = 0; rank < plans_.size(); ++rank) {
      for (const Step& step : plans_[rank].steps) {
        if (!bundles[step.bundle].emplace(static_cast<std::int32_t>(rank), &step).second) {
          return fail("rank " + std::to_string(rank) + " has bundle " +
                      std::to_string(step.bundle) + " twice");
        }
      }
    }
    for (const auto& [number, steps] : bundles) {
      run_bundle(number, steps);
      if (!error_.empty()) return;
    }
  }

  void run_bundle(std::uint32_t number, const std::map<std::int32_t, const Step*>& steps) {
    const std::string bundle = "bundle " + std::to_string(number);
    std::vector<std::int32_t> reached;
    Message message;
    for (const auto& [rank, step] : steps) {
      if (step->parent >= 0) continue;
      if (!reached.empty()) return fail(bundle + " begins at two ranks");
      reached.push_back(rank);
      pack(static_cast<std::size_t>(rank), *step, &message);
      if (!error_.empty()) return;
    }
    std::set<std::int32_t> seen(reached.begin(), reached.end());
    for (std::size_t i = 0; i < reached.size(); ++i) {
      const auto sender = reached[i];
      for (const std::int32_t child : steps.at(sender)->children) {
        const auto at = steps.find(child);
        if (at == steps.end() || at->second->parent != sender) {
          return fail("rank " + std::to_string(sender) + " sends " + bundle + " to rank " +
                      std::to_string(child) + ", which does not await it from there");
        }
        if (!seen.insert(child).second) {
          return fail("rank " + std::to_string(child) + " gets " + bundle + " twice");
        }
        reached.push_back(child);
        unpack(static_cast<std::size_t>(child), *at->second, message);
        if (!error_.empty()) return;
      }
    }
    for (const auto& [rank, step] : steps) {
      if (seen.contains(rank)) continue;
      return fail("rank " + std::to_string(rank) + " awaits " + bundle + " from rank " +
                  std::to_string(step->parent) + ", which does not get it or does not send it");
    }
  }

  void pack(std::size_t rank, const Step& step, Message* message) {
    const std::int64_t most = request_.options.max_bytes / request_.options.window;
    std::int64_t end = 0;
    for (const Segment& segment : step.pack) {
      if (segment.tensor >= src_[rank].size()) {
        return fail("rank " + std::to_string(rank) + " sends what it does not hold");
      }
      const std::int64_t each = wire_bytes(request_.tensors[segment.tensor]);
      const Local& local = src_[rank][segment.tensor];
      std::int64_t at = segment.at;
      if (at < end) {
        return fail("rank " + std::to_string(rank) + " packs two things at one place");
      }
      if (at % each != 0) return fail(name(segment.tensor) + " is not aligned in a bundle");
      if (!for_places(local, segment.start, segment.size, [&](std::size_t place) {
            message->push_back({at, segment.tensor, local.values[place]});
            at += each;
          })) {
        return fail(outside(rank, segment.tensor));
      }
      end = at;
    }
    if (end > most) {
      fail("bundle " + std::to_string(step.bundle) + " has " + std::to_string(end) +
           " bytes: its part of max_bytes is " + std::to_string(most));
    }
  }

  void unpack(std::size_t rank, const Step& step, const Message& message) {
    for (const Segment& segment : step.unpack) {
      if (segment.tensor >= dst_[rank].size()) {
        return fail("rank " + std::to_string(rank) + " gets what it does not want");
      }
      Wanted& to = dst_[rank][segment.tensor];
      const std::int64_t each = wire_bytes(request_.tensors[segment.tensor]);
      std::int64_t at = segment.at;
      bool there = true;
      auto next = std::lower_bound(message.begin(), message.end(), at,
                                   [](const Element& e, std::int64_t byte) { return e.at < byte; });
      const bool inside = for_places(to.local, segment.start, segment.size, [&](std::size_t place) {
        if (next == message.end() || next->at != at || next->tensor != segment.tensor) {
          there = false;
        } else {
          put(&to, place, next++->value);
        }
        at += each;
      });
      if (!inside) return fail(outside(rank, segment.tensor));
      if (!there) {
        return fail("rank " + std::to_string(rank) + " takes " + name(segment.tensor) +
                    " from where bundle " + std::to_string(step.bundle) + " does not have it");
      }
    }
  }

  void compare() {
    for (std::size_t rank = 0; rank < dst_.size(); ++rank) {
      for (std::uint32_t t = 0; t < dst_[rank].size(); ++t) {
        const Wanted& wanted = dst_[rank][t];
        for (std::size_t i = 0; i < wanted.got.size(); ++i) {
          const bool right = wanted.got[i] == wanted.local.values[i];
          if (wanted.times[i] != 1 || !right) return fail(fault_of(rank, t, i));
        }
      }
    }
  }
  std::string fault_of(std::size_t rank, std::uint32_t tensor, std::size_t place) const {
    const Wanted& wanted = dst_[rank][tensor];
    const auto element = [](std::int64_t number) { return "element " + std::to_string(number); };
    std::string text = "rank " + std::to_string(rank);
    text += wanted.times[place] == 0 ? " never gets " : " gets ";
    if (wanted.times[place] > 0 && wanted.got[place] != wanted.local.values[place]) {
      text += element(wanted.got[place]);
      text += " in place of ";
    }
    text += element(wanted.local.values[place]);
    text += " of ";
    text += name(tensor);
    if (wanted.times[place] > 1) text += ", twice";
    return text;
  }

  const Request& request_;
  const std::vector<RankPlan>& plans_;
  std::vector<std::vector<Local>> src_;
  std::vector<std::vector<Wanted>> dst_;
  std::int64_t total_ = 0, elements_ = 0;
  std::string error_;
};

}  // namespace

CheckReport check(const Request& request, const std::vector<RankPlan>& plans) {
  std::int32_t highest = -1;
  for (const Mesh* mesh : {&request.src, &request.dst}) {
    for (const std::int32_t rank : mesh->ranks) highest = std::max(highest, rank);
  }
  if (static_cast<std::int64_t>(plans.size()) <= highest) {
    return {false, "there is no plan of rank " + std::to_string(highest), 0};
  }
  return Checker(request, plans).run();
}

CheckReport check(const Plan& plan) {
  refuse_large(plan.request);
  return check(plan.request, rank_plans(plan));
}

}  // namespace unjam::reshard
