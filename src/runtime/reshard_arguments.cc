#include "runtime/reshard_arguments.h"

#include <algorithm>
#include <cstddef>

#include "reshard/rank_plan.h"
#include "runtime/reshard_texts.h"

namespace unjam {
namespace {

constexpr const char* kDestination = "destination";

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "(";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  }
  return text + ")";
}

struct Extent {
  const std::uint8_t* begin = nullptr;
  const std::uint8_t* end = nullptr;
  const std::string* name = nullptr;
};

Extent extent_of(const LocalTensor& tensor) {
  Extent extent{tensor.place.data, tensor.place.data, &tensor.name};
  for (std::size_t d = 0; d < tensor.shape.size(); ++d) {
    const std::int64_t reach = (tensor.shape[d] - 1) * tensor.place.strides[d];
    (reach < 0 ? extent.begin : extent.end) += reach;
  }
  extent.end += dtype_bytes(tensor.place.dtype);
  return extent;
}

bool is_empty(const std::vector<std::int64_t>& shape) {
  return std::find(shape.begin(), shape.end(), 0) != shape.end();
}

// Looks at what a rank gives for a run.
class Parts {
 public:
  Parts(const reshard::Plan& plan, const unjamGroup& group)
      : plan_(plan), rank_(group.rank), boxes_(group.context->boxes()) {}

  Result take(const std::vector<LocalTensor>& given, bool is_src, Places* places) {
    const auto& tensors = plan_.request.tensors;
    const char* side = is_src ? "source" : kDestination;
    Found& found = is_src ? src_ : dst_;
    found.resize(tensors.size(), nullptr);
    for (const LocalTensor& local : given) {
      const auto at = std::lower_bound(
          tensors.begin(), tensors.end(), local.name,
          [](const reshard::Tensor& a, const std::string& name) { return a.name < name; });
      if (at == tensors.end() || at->name != local.name) {
        return bad(local.name, side, "is not in the plan: leave it out, or plan with it");
      }
      const LocalTensor*& place = found[static_cast<std::size_t>(at - tensors.begin())];
      if (place != nullptr) return bad(local.name, side, "is given twice: give it once");
      place = &local;
    }
    places->resize(tensors.size());
    for (std::uint32_t t = 0; t < tensors.size(); ++t) {
      const reshard::LocalShapes shapes = reshard::local_shapes(plan_, t, rank_);
      const bool wanted = is_src ? shapes.in_src : shapes.in_dst;
      if (Result r = look(tensors[t], found[t], wanted, is_src ? shapes.src : shapes.dst, side,
                          is_src ? tensors[t].src_dtype : tensors[t].dst_dtype);
          !r.ok()) {
        return r;
      }
      if (found[t] != nullptr) (*places)[t] = found[t]->place;
    }
    return {};
  }

  // What one call reads must not be what it writes. Where a tensor stays as and where it is, it is
  // both, and nothing is done to it.
  Result apart() const {
    std::vector<Extent> sources;
    for (std::size_t t = 0; t < src_.size(); ++t) {
      if (is_there(src_[t]) && !stays(t)) sources.push_back(extent_of(*src_[t]));
    }
    std::sort(sources.begin(), sources.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    // The highest end of those up to each.
    std::vector<std::size_t> furthest(sources.size());
    for (std::size_t i = 0; i < sources.size(); ++i) {
      const std::size_t before = i == 0 ? 0 : furthest[i - 1];
      furthest[i] = sources[before].end > sources[i].end ? before : i;
    }
    for (std::size_t t = 0; t < dst_.size(); ++t) {
      if (!is_there(dst_[t]) || stays(t)) continue;
      const Extent wanted = extent_of(*dst_[t]);
      const auto behind =
          std::lower_bound(sources.begin(), sources.end(), wanted.end,
                           [](const Extent& a, const std::uint8_t* end) { return a.begin < end; });
      if (behind == sources.begin()) continue;
      const Extent& other =
          sources[furthest[static_cast<std::size_t>(behind - sources.begin()) - 1]];
      if (other.end > wanted.begin) {
        return bad(dst_[t]->name, kDestination,
                   "overlaps the memory of the source tensor " + quoted(*other.name) +
                       ": give one of them memory of its own (a clone)");
      }
    }
    return {};
  }

 private:
  Result bad(const std::string& name, const char* side, const std::string& what) const {
    return {UNJAM_ERROR_INVALID_ARGUMENT, "tensor " + quoted(name) + " of the " + side +
                                              " on rank " + std::to_string(rank_) + " " + what};
  }

  Result look(const reshard::Tensor& tensor, const LocalTensor* given, bool wanted,
              const std::vector<std::int64_t>& shape, const char* side, DType dtype) const {
    if (!wanted) {
      if (given == nullptr) return {};
      return bad(tensor.name, side,
                 std::string("is given, and the rank is not in the ") + side +
                     "'s mesh: leave it out, or plan with another mesh");
    }
    if (given == nullptr) {
      if (is_empty(shape)) return {};
      return bad(tensor.name, side,
                 "is missing: give the rank's own part, of shape " + shape_text(shape));
    }
    if (given->shape != shape) {
      return bad(tensor.name, side,
                 "has shape " + shape_text(given->shape) + ", and the rank's own part has " +
                     shape_text(shape) + ": give that part, not the whole tensor");
    }
    if (given->place.dtype != dtype) {
      return bad(tensor.name, side,
                 std::string("has type ") + to_string(given->place.dtype) + ", and the plan says " +
                     to_string(dtype) + ": plan with the types that tensors have");
    }
    if (given->place.data == nullptr && !is_empty(shape)) {
      return bad(tensor.name, side, "has no data (NULL)");
    }
    std::string error;
    if (boxes_ != nullptr && !is_empty(shape) &&
        !boxes_->mover().reaches(given->place.data, error)) {
      return bad(tensor.name, side, error);
    }
    const bool written = side == kDestination && !is_empty(shape);
    for (std::size_t d = 0; written && d < shape.size(); ++d) {
      if (shape[d] > 1 && given->place.strides[d] == 0) {
        return bad(tensor.name, side,
                   "has one element for all indices of dimension " + std::to_string(d) +
                       " (an expanded view): give memory for each");
      }
    }
    return {};
  }

  static bool is_there(const LocalTensor* part) {
    return part != nullptr && !is_empty(part->shape);
  }

  bool stays(std::size_t t) const {
    const reshard::Request& request = plan_.request;
    if (!is_there(src_[t]) || !is_there(dst_[t])) return false;
    const BoxPlace &from = src_[t]->place, &to = dst_[t]->place;
    return from.data == to.data && from.dtype == to.dtype && from.strides == to.strides &&
           request.tensors[t].src == request.tensors[t].dst && request.src == request.dst;
  }

  // By the tensors' numbers in the plan.
  using Found = std::vector<const LocalTensor*>;
  Found src_, dst_;
  const reshard::Plan& plan_;
  const std::int32_t rank_;
  BoxMemory* const boxes_;  // of a GPU
};

}  // namespace

Result take_parts(const reshard::Plan& plan, const unjamGroup& group,
                  const std::vector<LocalTensor>& src, const std::vector<LocalTensor>& dst,
                  Places* src_places, Places* dst_places) {
  const int size = static_cast<int>(group.members.size());
  for (const reshard::Mesh* mesh : {&plan.request.src, &plan.request.dst}) {
    for (const std::int32_t rank : mesh->ranks) {
      if (rank < size) continue;
      return {UNJAM_ERROR_INVALID_ARGUMENT,
              std::string("the plan's ") + (mesh == &plan.request.src ? "source" : "destination") +
                  " mesh has rank " + std::to_string(rank) + ", and the group has " +
                  std::to_string(size) +
                  " ranks: a plan's ranks are numbers in the group, so plan with those, or give a "
                  "group of all of them"};
    }
  }
  Parts parts(plan, group);
  if (Result r = parts.take(src, true, src_places); !r.ok()) return r;
  if (Result r = parts.take(dst, false, dst_places); !r.ok()) return r;
  return parts.apart();
}

}  // namespace unjam
