// The C API of cross-mesh resharding.
#include "unjam/reshard.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "api/last_error.h"
#include "base/json_writer.h"
#include "reshard/check.h"
#include "reshard/info.h"
#include "reshard/nine.h"
#include "reshard/plan.h"
#include "reshard/subset.h"
#include "runtime/context.h"
#include "runtime/reshard_run.h"

struct unjamReshardPlanImpl {
  // Shared with runs, which may outlive the handle.
  std::shared_ptr<const unjam::ReshardPlan> shared;

  explicit unjamReshardPlanImpl(unjam::reshard::Plan plan)
      : shared(std::make_shared<unjam::ReshardPlan>(std::move(plan))) {}
  const unjam::reshard::Plan& impl() const { return shared->plan(); }
};

namespace {

using unjam::api::copy_text;
using unjam::api::fail;
namespace reshard = unjam::reshard;

static_assert(static_cast<int>(reshard::PlacementKind::kReplicate) == UNJAM_REPLICATE);
static_assert(static_cast<int>(reshard::PlacementKind::kShard) == UNJAM_SHARD);
static_assert(static_cast<int>(reshard::PlacementKind::kStridedShard) == UNJAM_STRIDED_SHARD);

constexpr int kMostDims = 64;  // of a mesh or a tensor
constexpr std::uint64_t kMostNodes = 1'000'000'000;
constexpr int kMostTries = 1'000'000;

template <class F>
unjamResult_t guarded(F&& f) {
  try {
    return f();
  } catch (const reshard::BadRequest& e) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT, e.what());
  } catch (const std::bad_alloc&) {
    return fail(UNJAM_ERROR_SYSTEM, "out of memory");
  } catch (const std::exception& e) {
    return fail(UNJAM_ERROR_SYSTEM, e.what());
  }
}

unjamResult_t invalid(const char* message) { return fail(UNJAM_ERROR_INVALID_ARGUMENT, message); }

[[noreturn]] void refuse(const std::string& message) { throw reshard::BadRequest(message); }

template <class T>
void check_struct(const T* given, const char* name, const char* type) {
  if (given == nullptr) refuse(std::string(name) + " is NULL");
  if (given->size != sizeof(T)) {
    refuse(std::string(name) + " has an unknown size: set .size = sizeof(" + type + ")");
  }
}

void check_dims(const char* name, std::int32_t ndims) {
  if (ndims < 0 || ndims > kMostDims) {
    refuse(std::string(name) + " has " + std::to_string(ndims) + " dimensions: give 0 to " +
           std::to_string(kMostDims));
  }
}

reshard::Mesh mesh_of(const unjamMesh_t* given, const char* name) {
  check_struct(given, name, "unjamMesh_t");
  check_dims(name, given->ndims);
  if (given->ranks == nullptr || (given->dims == nullptr && given->ndims > 0)) {
    refuse(std::string(name) + ": dims or ranks is NULL");
  }
  reshard::Mesh mesh;
  mesh.dims.assign(given->dims, given->dims + given->ndims);
  std::int64_t size = 1;
  for (const std::int64_t dim : mesh.dims) {
    // Before the ranks are read: so many must be there.
    if (dim < 1 || dim > reshard::kMostPlaces / size) {
      refuse(std::string(name) + ": a dimension of " + std::to_string(dim) + ": give 1 or more, " +
             std::to_string(reshard::kMostPlaces) + " ranks in all");
    }
    size *= dim;
  }
  mesh.ranks.assign(given->ranks, given->ranks + size);
  return mesh;
}

std::vector<reshard::Placement> placements_of(const unjamPlacement_t* given, std::size_t n,
                                              const std::string& name) {
  if (given == nullptr && n > 0) refuse(name + ": placements are NULL");
  std::vector<reshard::Placement> list;
  for (std::size_t i = 0; i < n; ++i) {
    if (given[i].kind < UNJAM_REPLICATE || given[i].kind > UNJAM_STRIDED_SHARD) {
      refuse(name + ": placement kind " + std::to_string(given[i].kind) +
             " is unknown: give UNJAM_REPLICATE, UNJAM_SHARD or UNJAM_STRIDED_SHARD");
    }
    list.push_back(
        {static_cast<reshard::PlacementKind>(given[i].kind), given[i].dim, given[i].split});
  }
  return list;
}

unjam::DType dtype_of(std::int32_t value, const std::string& name) {
  if (value < 0 || value >= unjam::kNumDTypes) {
    refuse(name + ": data type " + std::to_string(value) + " is unknown");
  }
  return static_cast<unjam::DType>(value);
}

// For errors. Of a tensor, or a part of one: that it has a name and a shape.
template <class Given>
std::string checked_name(const Given& given, const char* what) {
  if (given.name == nullptr) refuse(std::string(what) + "'s name is NULL");
  std::string name = std::string("tensor ") + given.name;
  check_dims(name.c_str(), given.ndims);
  if (given.shape == nullptr && given.ndims > 0) refuse(name + ": shape is NULL");
  return name;
}

reshard::Tensor tensor_of(const unjamReshardTensor_t& given, const reshard::Request& request) {
  check_struct(&given, "a tensor", "unjamReshardTensor_t");
  const std::string name = checked_name(given, "a tensor");
  reshard::Tensor tensor;
  tensor.name = given.name;
  tensor.shape.assign(given.shape, given.shape + given.ndims);
  tensor.src_dtype = dtype_of(given.src_dtype, name);
  tensor.dst_dtype = dtype_of(given.dst_dtype, name);
  tensor.src = placements_of(given.src, request.src.dims.size(), name);
  tensor.dst = placements_of(given.dst, request.dst.dims.size(), name);
  return tensor;
}

reshard::Topology topology_of(const unjamTopology_t* given, const reshard::Request& request) {
  if (given == nullptr) {
    std::int32_t highest = -1;
    for (const reshard::Mesh* mesh : {&request.src, &request.dst}) {
      for (const std::int32_t rank : mesh->ranks) highest = std::max(highest, rank);
    }
    // More would be memory for hosts that are not there.
    if (highest > 1 << 24) refuse("rank " + std::to_string(highest) + " is above 2^24");
    return reshard::ranks_alone(std::int64_t{highest} + 1);
  }
  check_struct(given, "topology", "unjamTopology_t");
  if (given->nranks < 0) refuse("topology: nranks is negative");
  if (given->nranks > 0 && (given->host == nullptr || given->nic == nullptr)) {
    refuse("topology: host or nic is NULL");
  }
  reshard::Topology topology;
  topology.host.assign(given->host, given->host + given->nranks);
  topology.nic.assign(given->nic, given->nic + given->nranks);
  return topology;
}

void set_options(const unjamReshardOptions_t* given, reshard::Options* options) {
  if (given == nullptr) return;
  check_struct(given, "options", "unjamReshardOptions_t");
  if (given->max_bytes > INT64_MAX) refuse("max_bytes is above 2^63 - 1");
  if (given->max_bytes != 0) options->max_bytes = static_cast<std::int64_t>(given->max_bytes);
  if (given->window != 0) options->window = given->window;
  if (given->stripes != 0) options->stripes = given->stripes;
}

unjam::LocalTensor part_of(const unjamReshardPart_t& given) {
  check_struct(&given, "a part", "unjamReshardPart_t");
  const std::string name = checked_name(given, "a part");
  unjam::LocalTensor part;
  part.name = given.name;
  part.shape.assign(given.shape, given.shape + given.ndims);
  for (const std::int64_t size : part.shape) {
    if (size < 0) refuse(name + ": a dimension of " + std::to_string(size));
  }
  part.place.data = static_cast<std::uint8_t*>(given.data);
  part.place.dtype = dtype_of(given.dtype, name);
  if (given.strides == nullptr) {
    part.place.strides = unjam::row_major(part.shape, part.place.dtype);
  } else {
    part.place.strides.assign(given.strides, given.strides + given.ndims);
  }
  return part;
}

std::vector<unjam::LocalTensor> parts_of(const unjamReshardPart_t* given, std::size_t n,
                                         const char* name) {
  if (given == nullptr && n > 0) refuse(std::string(name) + " is NULL");
  std::vector<unjam::LocalTensor> parts;
  for (std::size_t i = 0; i < n; ++i) parts.push_back(part_of(given[i]));
  return parts;
}

void take_options(const unjamCallOptions_t* options, bool on_host, unjam::ReshardCall* call) {
  if (options == nullptr) return;
  check_struct(options, "options", "unjamCallOptions_t");
  if (options->stream_order == UNJAM_STREAM_ASYNC && !on_host) {
    call->stream_order = UNJAM_STREAM_ASYNC;
    call->stream = options->stream;
  } else if (options->stream_order != UNJAM_STREAM_NONE) {
    refuse(on_host ? "options: the host device has no streams: give UNJAM_STREAM_NONE"
                   : "options: a run goes on beside streams: give UNJAM_STREAM_ASYNC, and let the "
                     "stream wait by unjamStreamWait");
  }
  if (options->algorithm != nullptr && options->algorithm[0] != '\0') {
    refuse("options: a run has no algorithm: the plan says who sends what");
  }
  if (options->match_text != nullptr) call->match_text = options->match_text;
  if (call->match_text.size() >= UNJAM_MATCH_TEXT_BYTES) {
    refuse("options: match_text is longer than " + std::to_string(UNJAM_MATCH_TEXT_BYTES - 1) +
           " bytes");
  }
  call->priority = options->priority;
  call->callback = options->callback;
  call->user = options->user;
}

}  // namespace

extern "C" {

unjamResult_t unjamReshardPlan(const unjamMesh_t* src, const unjamMesh_t* dst,
                               const unjamReshardTensor_t* tensors, size_t ntensors,
                               const unjamTopology_t* topology,
                               const unjamReshardOptions_t* options, unjamReshardPlan_t* plan) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (tensors == nullptr && ntensors > 0) return invalid("tensors is NULL");
    reshard::Request request;
    request.src = mesh_of(src, "src");
    request.dst = mesh_of(dst, "dst");
    for (size_t i = 0; i < ntensors; ++i) {
      request.tensors.push_back(tensor_of(tensors[i], request));
    }
    request.topology = topology_of(topology, request);
    set_options(options, &request.options);
    *plan = new unjamReshardPlanImpl(reshard::make_plan(std::move(request)));
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamReshardDestroy(unjamReshardPlan_t plan) {
  if (plan == nullptr) return invalid("plan is NULL");
  delete plan;
  return UNJAM_SUCCESS;
}

unjamResult_t unjamReshardWithout(unjamReshardPlan_t plan, const int32_t* ranks, size_t nranks,
                                  const char* const* tensors, size_t ntensors, int renumber,
                                  unjamReshardPlan_t* left) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (left == nullptr) return invalid("left is NULL");
    if (ranks == nullptr && nranks > 0) return invalid("ranks is NULL");
    if (tensors == nullptr && ntensors > 0) return invalid("tensors is NULL");
    std::vector<std::string> names;
    for (size_t i = 0; i < ntensors; ++i) {
      if (tensors[i] == nullptr) return invalid("a tensor's name is NULL");
      names.emplace_back(tensors[i]);
    }
    *left = new unjamReshardPlanImpl(reshard::make_plan(
        reshard::without(plan->impl().request, {ranks, ranks + nranks}, names, renumber != 0)));
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamReshardInfo(unjamReshardPlan_t plan, int list, char* buffer, size_t bytes,
                               size_t* needed) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    return copy_text(reshard::plan_json(plan->impl(), list != 0), buffer, bytes, needed);
  });
}

unjamResult_t unjamReshardRank(unjamReshardPlan_t plan, int rank, char* buffer, size_t bytes,
                               size_t* needed) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (rank < 0 || static_cast<std::size_t>(rank) >= plan->impl().ports.port_of.size()) {
      return invalid("rank: the topology does not know it");
    }
    return copy_text(reshard::rank_json(plan->impl(), rank), buffer, bytes, needed);
  });
}

unjamResult_t unjamReshardCheck(unjamReshardPlan_t plan, char* buffer, size_t bytes,
                                size_t* needed) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    const reshard::Plan& p = plan->impl();
    return copy_text(reshard::check_json(reshard::check(p)), buffer, bytes, needed);
  });
}

unjamResult_t unjamReshardRun(unjamReshardPlan_t plan, unjamGroup_t group, const char* key,
                              const unjamReshardPart_t* src, size_t nsrc,
                              const unjamReshardPart_t* dst, size_t ndst,
                              const unjamCallOptions_t* options, unjamRequest_t* request) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (unjamResult_t r = unjam::api::check_group(group); r != UNJAM_SUCCESS) return r;
    unjam::ReshardCall call;
    call.src = parts_of(src, nsrc, "src");
    call.dst = parts_of(dst, ndst, "dst");
    call.key = key == nullptr ? "" : key;
    take_options(options, group->context->on_host(), &call);
    return unjam::api::finish(unjam::run_reshard(plan->shared, *group, std::move(call), request));
  });
}

unjamResult_t unjamReshardIncomplete(unjamRequest_t request, char* buffer, size_t bytes,
                                     size_t* needed) {
  return guarded([&] {
    if (unjamResult_t r = unjam::api::check_request(request); r != UNJAM_SUCCESS) return r;
    if (!request->several) return fail(UNJAM_ERROR_INVALID_USAGE, "the request is of no run");
    if (!request->done.load(std::memory_order_acquire)) {
      return fail(UNJAM_ERROR_INVALID_USAGE, "the run is pending: wait for it first");
    }
    unjam::JsonWriter json;
    json.begin_array();
    for (const std::string& name : request->incomplete) json.value(name);
    json.end_array();
    return copy_text(json.text(), buffer, bytes, needed);
  });
}

unjamResult_t unjamReshardNine(int number, unjamReshardPlan_t* plan) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (number < 1 || number > reshard::kNumNineCases) return invalid("number: give 1 to 9");
    *plan = new unjamReshardPlanImpl(reshard::make_plan(reshard::nine_case(number)));
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamReshardCompare(unjamReshardPlan_t plan, uint64_t nodes, int tries, uint64_t seed,
                                  char* buffer, size_t bytes, size_t* needed) {
  return guarded([&] {
    if (plan == nullptr) return invalid("plan is NULL");
    if (nodes > kMostNodes) return invalid("nodes: give 0 to 1000000000");
    if (tries < 1 || tries > kMostTries) return invalid("tries: give 1 to 1000000");
    return copy_text(reshard::comparison_json(plan->impl(), {nodes, tries, seed}), buffer, bytes,
                     needed);
  });
}

}  // extern "C"
