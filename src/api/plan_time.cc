// The C API of the clock.
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include "api/last_error.h"
#include "plan/clock/timing.h"
#include "unjam/unjam.h"

namespace {

using unjam::api::fail;

unjamResult_t invalid(const std::string& message) {
  return fail(UNJAM_ERROR_INVALID_ARGUMENT, message);
}

// In the caller's own types: what does not fit must not become another valid value.
std::string range_error(const char* name, std::int64_t value, std::int64_t least,
                        std::int64_t most) {
  if (value >= least && value <= most) return "";
  return std::string(name) + " " + std::to_string(value) + " is out of range: give " +
         std::to_string(least) + " to " + std::to_string(most);
}

unjam::Machine machine_of(const unjamMachine_t& m) {
  unjam::Machine machine;
  machine.gpus_per_node = m.gpus_per_node;
  machine.nics_per_node = m.nics_per_node;
  machine.nics_by_lane = m.nics_by_lane != 0;
  machine.nodes_per_leaf = m.nodes_per_leaf;
  machine.cores = m.cores;
  machine.link_us = m.link_us;
  machine.link_gb_per_s = m.link_gb_per_s;
  machine.network_us = m.network_us;
  machine.nic_gb_per_s = m.nic_gb_per_s;
  machine.leaf_us = m.leaf_us;
  machine.oversubscription = m.oversubscription;
  machine.slice_us = m.slice_us;
  machine.wait_us = m.wait_us;
  machine.peer_us = m.peer_us;
  machine.engine_gb_per_s = m.engine_gb_per_s;
  machine.base_us = m.base_us;
  machine.device = static_cast<unjam::Device>(m.device);
  machine.lanes = static_cast<std::uint16_t>(m.lanes);
  machine.slots = m.slots;
  machine.slot_bytes = m.slot_bytes;
  return machine;
}

unjamResult_t time_plan(const unjamPlanTiming_t& t, char* buffer, size_t bytes, size_t* needed) {
  const unjamMachine_t& m = *t.machine;
  for (const std::string& text :
       {range_error("kind", t.kind, 0, unjam::kNumKinds - 1),
        range_error("dtype", t.dtype, 0, unjam::kNumDTypes - 1),
        range_error("op", t.op, 0, unjam::kNumOps - 1),
        range_error("nranks", t.nranks, 1, unjam::kMostClockRanks),
        range_error("late_count", t.late_count, 0, t.nranks),
        range_error("device", m.device, UNJAM_DEVICE_HOST, UNJAM_DEVICE_CUDA),
        range_error("lanes", m.lanes, 1, unjam::kMostMachineLanes)}) {
    if (!text.empty()) return invalid(text);
  }
  if (t.late_count > 0 && (t.late_ranks == nullptr || t.late_us == nullptr)) {
    return invalid("late_ranks or late_us is NULL");
  }
  unjam::ClockRequest request;
  request.request.kind = static_cast<unjam::Kind>(t.kind);
  request.request.dtype = static_cast<unjam::DType>(t.dtype);
  request.request.op = static_cast<unjam::Op>(t.op);
  request.request.count = t.count;
  request.request.ranks = static_cast<int>(t.nranks);
  request.request.root = t.root;
  if (t.algorithm != nullptr) request.algorithm = t.algorithm;
  const unjam::Machine machine = machine_of(m);
  unjam::TimeOptions options;
  options.keep_path = t.path != 0;
  for (std::int32_t i = 0; i < t.late_count; ++i) {
    options.late.push_back({t.late_ranks[i], t.late_us[i]});
  }
  std::string error;
  const auto timing = unjam::time_plan(request, machine, options, &error);
  if (!timing) return invalid(error);
  return unjam::api::copy_text(unjam::timing_json(request, machine, *timing, options.keep_path),
                               buffer, bytes, needed);
}

}  // namespace

static_assert(static_cast<int>(unjam::Device::kCuda) == UNJAM_DEVICE_CUDA);

extern "C" {

unjamResult_t unjamPlanTime(const unjamPlanTiming_t* timing, char* buffer, size_t bytes,
                            size_t* needed) {
  try {
    if (timing == nullptr) return invalid("timing is NULL");
    if (timing->size != sizeof(unjamPlanTiming_t)) {
      return invalid(
          "unjamPlanTiming_t has an unknown size: set .size = sizeof(unjamPlanTiming_t)");
    }
    if (timing->machine == nullptr) return invalid("machine is NULL");
    if (timing->machine->size != sizeof(unjamMachine_t)) {
      return invalid("unjamMachine_t has an unknown size: set .size = sizeof(unjamMachine_t)");
    }
    return time_plan(*timing, buffer, bytes, needed);
  } catch (const std::bad_alloc&) {
    return fail(UNJAM_ERROR_SYSTEM, "out of memory");
  } catch (const std::exception& e) {
    return fail(UNJAM_ERROR_SYSTEM, e.what());
  }
}

}  // extern "C"
