#include "reshard/request.h"

#include <algorithm>
#include <set>

#include "base/hash.h"

namespace unjam::reshard {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 46;  // of all tensors together
static_assert(kMostBytes <= INT64_MAX / kMostPlaces);
constexpr std::int64_t kLeastPiece = 4096;
constexpr std::int32_t kMostStripes = 1024, kMostWindow = 4096;

std::string tensor_error(const Request& request, const Tensor& tensor, std::int64_t* left) {
  std::int64_t bytes = std::max(dtype_bytes(tensor.src_dtype), dtype_bytes(tensor.dst_dtype));
  bool empty = false;
  for (const std::int64_t dim : tensor.shape) {
    if (dim < 0) return "a dimension of " + std::to_string(dim) + ": give 0 or more";
    if (dim == 0) {
      empty = true;
    } else if (dim > *left / bytes) {
      return "the tensors have more than 2^46 bytes: plan fewer at once";
    } else {
      bytes *= dim;
    }
  }
  if (!empty) *left -= bytes;
  for (const bool src : {true, false}) {
    const std::string error = placements_error(src ? request.src : request.dst,
                                               src ? tensor.src : tensor.dst, tensor.shape);
    if (!error.empty()) return (src ? "source: " : "destination: ") + error;
  }
  return "";
}

std::uint64_t mix(std::uint64_t hash, std::int64_t value) {
  return hash_combine(hash, static_cast<std::uint64_t>(value));
}

template <class T>
std::uint64_t mix_all(std::uint64_t hash, const std::vector<T>& values) {
  hash = mix(hash, static_cast<std::int64_t>(values.size()));
  for (const T value : values) hash = mix(hash, value);
  return hash;
}

std::uint64_t mix_placements(std::uint64_t hash, const std::vector<Placement>& placements) {
  for (const Placement& p : placements) {
    hash = mix(mix(mix(hash, static_cast<std::int64_t>(p.kind)), p.dim), p.split);
  }
  return hash;
}

}  // namespace

std::string request_error(const Request& request) {
  if (const std::string error = mesh_error(request.src); !error.empty()) return "source: " + error;
  if (const std::string error = mesh_error(request.dst); !error.empty()) {
    return "destination: " + error;
  }
  std::int32_t highest = -1;
  for (const Mesh* mesh : {&request.src, &request.dst}) {
    for (const std::int32_t rank : mesh->ranks) highest = std::max(highest, rank);
  }
  if (const std::string error = topology_error(request.topology, highest); !error.empty()) {
    return error;
  }
  const Options& o = request.options;
  if (o.window < 1 || o.window > kMostWindow) {
    return "window " + std::to_string(o.window) + ": give 1 to " + std::to_string(kMostWindow);
  }
  if (o.stripes < 1 || o.stripes > kMostStripes) {
    return "stripes " + std::to_string(o.stripes) + ": give 1 to " + std::to_string(kMostStripes);
  }
  if (o.max_bytes / o.window < kLeastPiece) {
    return "max_bytes " + std::to_string(o.max_bytes) + " for a window of " +
           std::to_string(o.window) + ": give at least " + std::to_string(kLeastPiece) +
           " bytes for each";
  }
  std::int64_t left = kMostBytes;
  std::set<std::string> names;
  for (const Tensor& tensor : request.tensors) {
    std::string error = tensor_error(request, tensor, &left);
    if (error.empty() && !names.insert(tensor.name).second) {
      error = "the name is there twice: names tell tensors apart";
    }
    if (!error.empty()) return "tensor " + tensor.name + ": " + error;
  }
  return "";
}

void sort_tensors(Request* request) {
  std::sort(request->tensors.begin(), request->tensors.end(),
            [](const Tensor& a, const Tensor& b) { return a.name < b.name; });
}

std::uint64_t request_hash(const Request& request) {
  std::uint64_t hash = 1;
  for (const Mesh* mesh : {&request.src, &request.dst}) {
    hash = mix_all(mix_all(hash, mesh->dims), mesh->ranks);
  }
  hash = mix_all(mix_all(hash, request.topology.host), request.topology.nic);
  const Options& o = request.options;
  hash = mix(mix(mix(hash, o.max_bytes), o.window), o.stripes);
  for (const Tensor& tensor : request.tensors) {
    hash = mix_all(hash_bytes(tensor.name, hash), tensor.shape);
    hash = mix(mix(hash, static_cast<std::int64_t>(tensor.src_dtype)),
               static_cast<std::int64_t>(tensor.dst_dtype));
    hash = mix_placements(mix_placements(hash, tensor.src), tensor.dst);
  }
  return hash;
}

}  // namespace unjam::reshard
