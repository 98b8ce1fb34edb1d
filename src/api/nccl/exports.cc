// NCCL's functions that unjam serves. The comment in front of each is its row in docs/nccl.md.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "api/nccl/communicator.h"
#include "api/nccl/exporting.h"
#include "api/nccl/group_calls.h"
#include "api/nccl/machine.h"
#include "api/nccl/operation.h"
#include "api/nccl/status.h"
#include "api/nccl/types.h"

namespace unjam::nccl {
namespace {

Status null_argument(const char* name) { return invalid_argument(std::string(name) + " is NULL"); }

Status no_communicator() {
  return invalid_argument("this is no communicator, or it was destroyed or aborted");
}

// Once a process: who reads its output is to know whose library this is.
void announce(int rank) {
  static const bool told = [rank] {
    if (rank != 0) return false;
    Dl_info info{};
    const bool known =
        dladdr(reinterpret_cast<void*>(&no_communicator), &info) != 0 && info.dli_fname != nullptr;
    std::fprintf(stderr, "unjam %d.%d.%d answers this program's NCCL calls: %s\n",
                 UNJAM_VERSION_MAJOR, UNJAM_VERSION_MINOR, UNJAM_VERSION_PATCH,
                 known ? info.dli_fname : "libnccl.so.2");
    return true;
  }();
  (void)told;
}

// Of all that a configuration may ask for only `blocking` changes what a call does; the rest tunes
// NCCL's own ways, and tells unjam nothing.
Status read_config(const Config* config, bool inherited, bool& blocking) {
  blocking = inherited;
  if (config == nullptr) return {};
  if (config->magic != kConfigMagic ||
      config->size < offsetof(Config, blocking) + sizeof(config->blocking)) {
    return invalid_argument("ncclConfig_t was not initialised with NCCL_CONFIG_INITIALIZER");
  }
  if (config->blocking == kUndefined) return {};
  if (config->blocking != 0 && config->blocking != 1) {
    return invalid_argument("ncclConfig_t: blocking is " + std::to_string(config->blocking) +
                            ": give 0 or 1");
  }
  blocking = config->blocking == 1;
  return {};
}

Status make(Making making) {
  if (making.child != nullptr) give(making.handle, hand_out(making.child));
  return noted(enqueue(std::move(making)));
}

Status init_rank(ncclComm_t* comm, int ranks, const UniqueId& id, int rank, const Config* config) {
  if (comm == nullptr) return null_argument("comm");
  give(comm, nullptr);
  if (ranks < 1 || rank < 0 || rank >= ranks) {
    return invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(ranks) +
                            " ranks: they go from 0 to nranks - 1");
  }
  bool blocking = true;
  if (Status s = read_config(config, true, blocking); !s.ok()) return s;
  int device = 0;
  if (Status s = Machine::get().current_device(device); !s.ok()) return s;
  announce(rank);
  auto child = std::make_shared<Communicator>(device, blocking);
  Making making;
  making.run = [child, id, rank, ranks] { return initialise(child, id, rank, ranks); };
  making.child = child;
  making.handle = comm;
  making.blocking = blocking;
  return make(std::move(making));
}

// ---- operations ----

bool type_of(int given, unjamDataType_t& dtype) {
  switch (static_cast<DataType>(given)) {
    case DataType::kInt8:
      dtype = UNJAM_INT8;
      return true;
    case DataType::kUint8:
      dtype = UNJAM_UINT8;
      return true;
    case DataType::kInt32:
      dtype = UNJAM_INT32;
      return true;
    case DataType::kUint32:
      dtype = UNJAM_UINT32;
      return true;
    case DataType::kInt64:
      dtype = UNJAM_INT64;
      return true;
    case DataType::kUint64:
      dtype = UNJAM_UINT64;
      return true;
    case DataType::kFloat16:
      dtype = UNJAM_FLOAT16;
      return true;
    case DataType::kFloat32:
      dtype = UNJAM_FLOAT32;
      return true;
    case DataType::kFloat64:
      dtype = UNJAM_FLOAT64;
      return true;
    case DataType::kBfloat16:
      dtype = UNJAM_BFLOAT16;
      return true;
    case DataType::kFloat8E4M3:
      dtype = UNJAM_FLOAT8_E4M3;
      return true;
    case DataType::kFloat8E5M2:
      dtype = UNJAM_FLOAT8_E5M2;
      return true;
  }
  return false;
}

Status take_op(int given, Operation& o) {
  switch (static_cast<Op>(given)) {
    case Op::kSum:
      o.op = UNJAM_SUM;
      return {};
    case Op::kProd:
      o.op = UNJAM_PROD;
      return {};
    case Op::kMax:
      o.op = UNJAM_MAX;
      return {};
    case Op::kMin:
      o.op = UNJAM_MIN;
      return {};
    case Op::kAvg:
      o.op = UNJAM_AVG;
      return {};
    default:
      break;
  }
  o.scale = o.comm->scale_of(given);
  if (o.scale == nullptr) {
    return invalid_argument("unknown operator " + std::to_string(given) +
                            ": use one of ncclRedOp_t, or one that was made for this communicator");
  }
  if (o.scale->dtype != o.dtype) {
    return invalid_argument("the operator was made for another data type");
  }
  o.op = UNJAM_SUM;
  return {};
}

struct Arguments {
  const void* send = nullptr;
  void* recv = nullptr;
  std::size_t count = 0;
  int dtype = 0;
  int op = 0;
  int peer = 0;
};

bool reduces(What what) {
  return what == What::kAllReduce || what == What::kReduce || what == What::kReduceScatter;
}

bool reads(What what, bool is_root) {
  switch (what) {
    case What::kRecv:
      return false;
    case What::kBroadcast:
    case What::kScatter:
      return is_root;
    default:
      return true;
  }
}

bool writes(What what, bool is_root) {
  switch (what) {
    case What::kSend:
      return false;
    case What::kReduce:
    case What::kGather:
      return is_root;
    default:
      return true;
  }
}

Status operate(What what, const Arguments& a, ncclComm_t handle, void* stream) {
  Operation o;
  o.what = what;
  o.comm = find(handle);
  if (o.comm == nullptr) return no_communicator();
  if (Status s = o.comm->check_ready(); !s.ok()) return s;
  if (!type_of(a.dtype, o.dtype)) {
    return invalid_argument("unknown data type " + std::to_string(a.dtype) +
                            ": give a value of ncclDataType_t");
  }
  if (reduces(what)) {
    if (Status s = take_op(a.op, o); !s.ok()) return s;
  }
  if (a.peer < 0 || a.peer >= o.comm->size()) {
    return invalid_argument("rank " + std::to_string(a.peer) +
                            ": the communicator has ranks 0 to " +
                            std::to_string(o.comm->size() - 1));
  }
  if (a.count == 0) return {};
  const bool is_root = a.peer == o.comm->rank();
  if (reads(what, is_root) && a.send == nullptr) return null_argument("sendbuff");
  if (writes(what, is_root) && a.recv == nullptr) return null_argument("recvbuff");
  o.send = a.send;
  o.recv = a.recv;
  o.count = a.count;
  o.peer = a.peer;
  o.stream = stream;
  return enqueue(std::move(o));
}

Code operation(What what, const Arguments& a, ncclComm_t comm, void* stream) {
  return guarded([&] { return noted(operate(what, a, comm, stream)); });
}

}  // namespace

// ---- versions and errors ----

// 22809, as NCCL 2.28.9
UNJAM_NCCL_EXPORT(Code, ncclGetVersion, (int* version)) {
  return guarded([&]() -> Status {
    if (version == nullptr) return null_argument("version");
    *version = kVersion;
    return {};
  });
}

// names of codes
UNJAM_NCCL_EXPORT(const char*, ncclGetErrorString, (Code code)) {
  switch (code) {
    case Code::kSuccess:
      return "no error";
    case Code::kUnhandledCudaError:
      return "CUDA failed (ncclGetLastError says how)";
    case Code::kSystemError:
      return "the system or a limit refused it (ncclGetLastError says what)";
    case Code::kInternalError:
      return "a fault of unjam (ncclGetLastError says which)";
    case Code::kInvalidArgument:
      return "invalid argument (ncclGetLastError says which)";
    case Code::kInvalidUsage:
      return "invalid usage (ncclGetLastError says why)";
    case Code::kRemoteError:
      return "another rank failed or is gone (ncclGetLastError says which)";
    case Code::kInProgress:
      return "in progress";
  }
  return "unknown result";
}

// the communicator's failure, else the thread's last one, else the process's
UNJAM_NCCL_EXPORT(const char*, ncclGetLastError, (ncclComm_t comm)) {
  thread_local std::string text;
  try {
    if (const auto found = comm == nullptr ? nullptr : find(comm); found != nullptr) {
      const Status state = found->state();
      if (!state.ok() && state.code != Code::kInProgress) {
        text = state.text;
        return text.c_str();
      }
    }
  } catch (const std::exception&) {
    return last_error();
  }
  return last_error();
}

// does nothing: `UNJAM_LOG` is read once
UNJAM_NCCL_EXPORT(void, ncclResetDebugInit, ()) {}

// exported by NCCL for its plugins; does nothing
extern "C" [[gnu::visibility("default")]] void ncclResetDebugInitInternal() {}

// ---- communicators ----

// the id carries unjam's secret of a meeting
UNJAM_NCCL_EXPORT(Code, ncclGetUniqueId, (UniqueId * id)) {
  return guarded([&]() -> Status {
    if (id == nullptr) return null_argument("uniqueId");
    unjamUniqueId_t made;
    if (const unjamResult_t r = unjamGetUniqueId(&made); r != UNJAM_SUCCESS) return from_unjam(r);
    std::memcpy(id, &made, sizeof(*id));
    return {};
  });
}

// waits for all ranks, as `UNJAM_INIT_TIMEOUT_MS` says
UNJAM_NCCL_EXPORT(Code, ncclCommInitRank, (ncclComm_t * comm, int ranks, UniqueId id, int rank)) {
  return guarded([&] { return noted(init_rank(comm, ranks, id, rank, nullptr)); });
}

// of the configuration `blocking` counts
UNJAM_NCCL_EXPORT(Code, ncclCommInitRankConfig,
                  (ncclComm_t * comm, int ranks, UniqueId id, int rank, Config* config)) {
  return guarded([&] { return noted(init_rank(comm, ranks, id, rank, config)); });
}

// the first id is used
UNJAM_NCCL_EXPORT(Code, ncclCommInitRankScalable,
                  (ncclComm_t * comm, int ranks, int rank, int ids, UniqueId* id, Config* config)) {
  return guarded([&] {
    if (id == nullptr) return noted(null_argument("commIds"));
    if (ids < 1)
      return noted(invalid_argument("nId is " + std::to_string(ids) + ": give 1 or more"));
    return noted(init_rank(comm, ranks, *id, rank, config));
  });
}

// all ranks in this process
UNJAM_NCCL_EXPORT(Code, ncclCommInitAll, (ncclComm_t * comms, int devices, const int* device)) {
  return guarded([&]() -> Status {
    if (comms == nullptr) return null_argument("comm");
    if (devices < 1) return invalid_argument("ndev is " + std::to_string(devices));
    unjamUniqueId_t made;
    if (const unjamResult_t r = unjamGetUniqueId(&made); r != UNJAM_SUCCESS) return from_unjam(r);
    UniqueId id;
    std::memcpy(&id, &made, sizeof(id));
    std::set<int> distinct;
    for (int r = 0; r < devices; ++r) distinct.insert(device == nullptr ? r : device[r]);
    if (static_cast<int>(distinct.size()) != devices) {
      return invalid_usage("a device is named twice: give each rank a device of its own");
    }
    announce(0);
    start_group();
    for (int r = 0; r < devices; ++r) {
      auto child = std::make_shared<Communicator>(device == nullptr ? r : device[r], true);
      Making making;
      making.run = [child, id, r, devices] { return initialise(child, id, r, devices); };
      making.child = child;
      making.handle = &comms[r];
      make(std::move(making));
    }
    return noted(end_group());
  });
}

// a group of the same job: no new engine
UNJAM_NCCL_EXPORT(Code, ncclCommSplit,
                  (ncclComm_t comm, int color, int key, ncclComm_t* child, Config* config)) {
  return guarded([&]() -> Status {
    if (child == nullptr) return noted(null_argument("newcomm"));
    *child = nullptr;
    const auto parent = find(comm);
    if (parent == nullptr) return noted(no_communicator());
    if (Status s = parent->check_made(); !s.ok()) return noted(s);
    if (color < 0 && color != kNoColor) {
      return noted(invalid_argument("color is " + std::to_string(color) +
                                    ": give 0 or more, or NCCL_SPLIT_NOCOLOR"));
    }
    Making making;
    if (Status s = read_config(config, parent->blocking(), making.blocking); !s.ok()) {
      return noted(s);
    }
    if (color != kNoColor) {
      making.child = std::make_shared<Communicator>(parent->device(), making.blocking);
    }
    making.run = [parent, turn = parent->next_split(), color, key, made = making.child] {
      return split(*parent, turn, color, key, made);
    };
    making.handle = child;
    return make(std::move(making));
  });
}

// local: those that are left make it without the others
UNJAM_NCCL_EXPORT(Code, ncclCommShrink,
                  (ncclComm_t comm, int* excluded, int count, ncclComm_t* child, Config* config,
                   int flags)) {
  return guarded([&]() -> Status {
    if (child == nullptr) return noted(null_argument("newcomm"));
    *child = nullptr;
    const auto parent = find(comm);
    if (parent == nullptr) return noted(no_communicator());
    if (Status s = parent->check_made(); !s.ok()) return noted(s);
    if (excluded == nullptr || count < 1) {
      return noted(invalid_argument("excludeRanksList names no rank"));
    }
    if (flags != 0 && flags != kShrinkAbort) {
      return noted(invalid_argument("unknown shrinkFlags " + std::to_string(flags)));
    }
    const std::vector<int> out(excluded, excluded + count);
    for (const int rank : out) {
      if (rank < 0 || rank >= parent->size() || rank == parent->rank()) {
        return noted(invalid_argument("excludeRanksList names rank " + std::to_string(rank) +
                                      ": give ranks of the communicator, but not the caller"));
      }
    }
    Making making;
    if (Status s = read_config(config, parent->blocking(), making.blocking); !s.ok()) {
      return noted(s);
    }
    making.child = std::make_shared<Communicator>(parent->device(), making.blocking);
    making.run = [parent, turn = parent->next_shrink(out), out, flags, made = making.child] {
      if (flags == kShrinkAbort) parent->revoke();
      return shrink(*parent, turn, out, made);
    };
    making.handle = child;
    return make(std::move(making));
  });
}

// waits for what this rank has called
UNJAM_NCCL_EXPORT(Code, ncclCommFinalize, (ncclComm_t comm)) {
  return guarded([&]() -> Status {
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (Status s = found->check_made(); !s.ok()) return s;
    if (found->revoked()) return invalid_usage("a revoked communicator is not finalized");
    return found->finalize();
  });
}

// finalizes first, if that was not done
UNJAM_NCCL_EXPORT(Code, ncclCommDestroy, (ncclComm_t comm)) {
  return guarded([&]() -> Status {
    if (comm == nullptr) return {};
    const auto found = take_back(comm);
    if (found == nullptr) return no_communicator();
    if (!found->revoked()) found->finalize();
    found->close();
    return {};
  });
}

// ends what is pending, here and on the other ranks
UNJAM_NCCL_EXPORT(Code, ncclCommAbort, (ncclComm_t comm)) {
  return guarded([&]() -> Status {
    if (comm == nullptr) return {};
    const auto found = take_back(comm);
    if (found == nullptr) return no_communicator();
    found->abort();
    found->close();
    return {};
  });
}

// ends what is pending, without waiting; then split, shrink or destroy it
UNJAM_NCCL_EXPORT(Code, ncclCommRevoke, (ncclComm_t comm, int flags)) {
  return guarded([&]() -> Status {
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (flags != 0) return invalid_argument("revokeFlags must be NCCL_REVOKE_DEFAULT");
    if (Status s = found->check_made(); !s.ok()) return s;
    found->revoke();
    return {};
  });
}

// errors of this communicator's operations alone
UNJAM_NCCL_EXPORT(Code, ncclCommGetAsyncError, (ncclComm_t comm, Code* error)) {
  return guarded([&]() -> Status {
    if (error == nullptr) return null_argument("asyncError");
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    *error = found->state().code;
    return {};
  });
}

// ranks
UNJAM_NCCL_EXPORT(Code, ncclCommCount, (ncclComm_t comm, int* count)) {
  return guarded([&]() -> Status {
    if (count == nullptr) return null_argument("count");
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (Status s = found->check_made(); !s.ok()) return s;
    *count = found->size();
    return {};
  });
}

// the device that was current when it was made
UNJAM_NCCL_EXPORT(Code, ncclCommCuDevice, (ncclComm_t comm, int* device)) {
  return guarded([&]() -> Status {
    if (device == nullptr) return null_argument("device");
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    *device = found->device();
    return {};
  });
}

// this rank
UNJAM_NCCL_EXPORT(Code, ncclCommUserRank, (ncclComm_t comm, int* rank)) {
  return guarded([&]() -> Status {
    if (rank == nullptr) return null_argument("rank");
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (Status s = found->check_made(); !s.ok()) return s;
    *rank = found->rank();
    return {};
  });
}

// ---- memory ----

// memory of the current device, by `cudaMalloc`
UNJAM_NCCL_EXPORT(Code, ncclMemAlloc, (void** memory, std::size_t bytes)) {
  return guarded([&]() -> Status {
    if (memory == nullptr) return null_argument("ptr");
    *memory = nullptr;
    if (bytes == 0) return {};
    return Machine::get().allocate(bytes, memory);
  });
}

// such memory alone
UNJAM_NCCL_EXPORT(Code, ncclMemFree, (void* memory)) {
  return guarded([&]() -> Status {
    if (memory == nullptr) return {};
    return Machine::get().release(memory);
  });
}

// a window, if there is room for one: a hint
UNJAM_NCCL_EXPORT(Code, ncclCommRegister,
                  (ncclComm_t comm, void* memory, std::size_t bytes, void** handle)) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return null_argument("handle");
    *handle = nullptr;
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (Status s = found->check_ready(); !s.ok()) return s;
    if (memory == nullptr || bytes == 0) return invalid_argument("no memory to register");
    *handle = hand_out(found->add_registration(memory, bytes));
    return {};
  });
}

// a window goes when no operation writes there
UNJAM_NCCL_EXPORT(Code, ncclCommDeregister, (ncclComm_t, void* handle)) {
  return guarded([&]() -> Status {
    if (handle == nullptr) return {};
    const auto registration = take_back_registration(handle);
    if (registration == nullptr) return invalid_argument("this is no handle of ncclCommRegister");
    registration->end();
    return {};
  });
}

// ---- operators ----

// inputs are multiplied by a kernel in the stream
UNJAM_NCCL_EXPORT(Code, ncclRedOpCreatePreMulSum,
                  (int* op, void* scalar, int dtype, Residence residence, ncclComm_t comm)) {
  return guarded([&]() -> Status {
    if (op == nullptr) return null_argument("op");
    if (scalar == nullptr) return null_argument("scalar");
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (Status s = found->check_ready(); !s.ok()) return s;
    Scale scale;
    if (!type_of(dtype, scale.dtype)) return invalid_argument("unknown data type");
    switch (residence) {
      case Residence::kDevice:
        scale.place = scalar;
        break;
      case Residence::kHostImmediate:
        std::memcpy(scale.value.data(), scalar, bytes_of(scale.dtype));
        break;
      default:
        return invalid_argument("unknown ncclScalarResidence_t");
    }
    *op = found->add_scale(scale);
    return {};
  });
}

// what is called already keeps it
UNJAM_NCCL_EXPORT(Code, ncclRedOpDestroy, (int op, ncclComm_t comm)) {
  return guarded([&]() -> Status {
    const auto found = find(comm);
    if (found == nullptr) return no_communicator();
    if (found->remove_scale(op)) return {};
    return invalid_argument("this operator was not made for this communicator");
  });
}

// ---- collectives ----

// all types and operators
UNJAM_NCCL_EXPORT(Code, ncclAllReduce,
                  (const void* send, void* recv, std::size_t count, int dtype, int op,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kAllReduce, {send, recv, count, dtype, op, 0}, comm, stream);
}

// in place or not
UNJAM_NCCL_EXPORT(Code, ncclBroadcast,
                  (const void* send, void* recv, std::size_t count, int dtype, int root,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kBroadcast, {send, recv, count, dtype, 0, root}, comm, stream);
}

// in place
UNJAM_NCCL_EXPORT(Code, ncclBcast,
                  (void* buffer, std::size_t count, int dtype, int root, ncclComm_t comm,
                   void* stream)) {
  return operation(What::kBroadcast, {buffer, buffer, count, dtype, 0, root}, comm, stream);
}

// all types and operators
UNJAM_NCCL_EXPORT(Code, ncclReduce,
                  (const void* send, void* recv, std::size_t count, int dtype, int op, int root,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kReduce, {send, recv, count, dtype, op, root}, comm, stream);
}

// in place or not
UNJAM_NCCL_EXPORT(Code, ncclAllGather,
                  (const void* send, void* recv, std::size_t count, int dtype, ncclComm_t comm,
                   void* stream)) {
  return operation(What::kAllGather, {send, recv, count, dtype, 0, 0}, comm, stream);
}

// all types and operators
UNJAM_NCCL_EXPORT(Code, ncclReduceScatter,
                  (const void* send, void* recv, std::size_t count, int dtype, int op,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kReduceScatter, {send, recv, count, dtype, op, 0}, comm, stream);
}

// not in place
UNJAM_NCCL_EXPORT(Code, ncclAlltoAll,
                  (const void* send, void* recv, std::size_t count, int dtype, ncclComm_t comm,
                   void* stream)) {
  return operation(What::kAllToAll, {send, recv, count, dtype, 0, 0}, comm, stream);
}

// in place or not
UNJAM_NCCL_EXPORT(Code, ncclGather,
                  (const void* send, void* recv, std::size_t count, int dtype, int root,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kGather, {send, recv, count, dtype, 0, root}, comm, stream);
}

// in place or not
UNJAM_NCCL_EXPORT(Code, ncclScatter,
                  (const void* send, void* recv, std::size_t count, int dtype, int root,
                   ncclComm_t comm, void* stream)) {
  return operation(What::kScatter, {send, recv, count, dtype, 0, root}, comm, stream);
}

// matched by pair and direction, in order
UNJAM_NCCL_EXPORT(Code, ncclSend,
                  (const void* send, std::size_t count, int dtype, int peer, ncclComm_t comm,
                   void* stream)) {
  return operation(What::kSend, {send, nullptr, count, dtype, 0, peer}, comm, stream);
}

// matched by pair and direction, in order
UNJAM_NCCL_EXPORT(Code, ncclRecv,
                  (void* recv, std::size_t count, int dtype, int peer, ncclComm_t comm,
                   void* stream)) {
  return operation(What::kRecv, {nullptr, recv, count, dtype, 0, peer}, comm, stream);
}

// ---- groups ----

// may be nested
UNJAM_NCCL_EXPORT(Code, ncclGroupStart, ()) {
  start_group();
  return Code::kSuccess;
}

// sends and receives in any order, several communicators, several ranks
UNJAM_NCCL_EXPORT(Code, ncclGroupEnd, ()) {
  return guarded([] { return end_group(); });
}

}  // namespace unjam::nccl
