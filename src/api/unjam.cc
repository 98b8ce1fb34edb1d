// The C API: checks handles, catches exceptions, keeps the thread's last message.
#include "unjam/unjam.h"

#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <system_error>
#include <vector>

#include "api/last_error.h"
#include "base/hash.h"
#include "base/limits.h"
#include "plan/check/checker.h"
#include "plan/describe.h"
#include "plan/host_table.h"
#include "plan/registry.h"
#include "runtime/context.h"
#include "runtime/ending.h"
#include "runtime/environment.h"
#include "runtime/heap_owners.h"
#include "runtime/job_id.h"
#include "runtime/job_memory.h"
#include "runtime/settings.h"
#include "runtime/world.h"

struct unjamContext {
  std::shared_ptr<unjam::Context> impl;
};

namespace {

using unjam::Call;
using unjam::Context;
using unjam::Kind;
using unjam::Result;
using unjam::Settings;
using unjam::World;

static_assert(static_cast<int>(unjam::DType::kFloat8E5M2) == UNJAM_FLOAT8_E5M2);
static_assert(static_cast<int>(unjam::Op::kAvg) == UNJAM_AVG);
static_assert(static_cast<int>(unjam::Kind::kBroadcast) == UNJAM_BROADCAST);
static_assert(static_cast<int>(unjam::Kind::kSendRecv) == UNJAM_SEND_RECV);
static_assert(static_cast<int>(unjam::Holders::kOthers) == UNJAM_HOLDERS_OTHERS);
static_assert(static_cast<int>(unjam::TraceType::kRestart) == UNJAM_TRACE_RESTART);
static_assert(static_cast<int>(unjam::StickinessPolicy::kHold) == UNJAM_POLICY_HOLD);

thread_local std::string last_error;
thread_local bool last_error_transient = false;

unjamResult_t fail(unjamResult_t code, std::string message) {
  last_error = std::move(message);
  last_error_transient = false;
  return code;
}

unjamResult_t finish(const Result& r) {
  if (r.ok()) return UNJAM_SUCCESS;
  const unjamResult_t code = fail(r.code, r.message);
  last_error_transient = r.transient;
  return code;
}

unjamResult_t null_argument(const char* name) {
  return fail(UNJAM_ERROR_INVALID_ARGUMENT, std::string(name) + " is NULL");
}

// No exception crosses the C boundary.
template <class F>
unjamResult_t guarded(F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return fail(UNJAM_ERROR_SYSTEM, "out of memory");
  } catch (const std::system_error& e) {  // no thread, mostly
    return fail(UNJAM_ERROR_SYSTEM, e.what() + unjam::limit_text(e.code().value()));
  } catch (const std::exception& e) {
    return fail(UNJAM_ERROR_SYSTEM, e.what());
  }
}

// What a child of fork() has inherited is refused before anything of it is touched: it may be
// locked by threads that do not exist here, and its arenas are not mapped.
unjamResult_t check_process(const Context& context) {
  if (!context.inherited()) return UNJAM_SUCCESS;
  return fail(UNJAM_ERROR_INVALID_USAGE,
              "this process was forked after unjam was initialised, and its contexts stay with the "
              "parent process: initialise unjam in the child, or start children with spawn "
              "instead of fork");
}

unjamResult_t check_context(unjamContext_t context) {
  if (context == nullptr) return null_argument("context");
  return check_process(*context->impl);
}

unjamResult_t check_group(unjamGroup_t group) {
  if (group == nullptr) return null_argument("group");
  if (group->destroyed) {
    return fail(UNJAM_ERROR_INVALID_USAGE,
                "the group was destroyed: create it again, on all of its ranks");
  }
  return check_process(*group->context);
}

unjamResult_t check_collective(unjamCollective_t collective) {
  if (collective == nullptr) return null_argument("collective");
  return check_group(collective->group);
}

unjamResult_t check_request(unjamRequest_t request) {
  if (request == nullptr) return null_argument("request");
  return check_process(*request->context);
}

unjamResult_t copy_text(const std::string& text, char* buffer, size_t bytes, size_t* needed) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (bytes == 0) return UNJAM_SUCCESS;
  if (buffer == nullptr) return null_argument("buffer");
  const size_t n = text.size() < bytes ? text.size() : bytes - 1;
  std::memcpy(buffer, text.data(), n);
  buffer[n] = '\0';
  if (n == text.size()) return UNJAM_SUCCESS;
  return fail(UNJAM_ERROR_RESOURCES, "the text has " + std::to_string(text.size() + 1) +
                                         " bytes, the buffer " + std::to_string(bytes) +
                                         ": call with a size of 0 to learn the size needed");
}

unjamResult_t apply_options(const unjamCallOptions_t* options, int rank, Call& call) {
  if (options == nullptr) return UNJAM_SUCCESS;
  // Version 0.1.0's ended before `stream`, later ones before `match_text` and `algorithm`.
  if (options->size != sizeof(unjamCallOptions_t) &&
      options->size != offsetof(unjamCallOptions_t, algorithm) &&
      options->size != offsetof(unjamCallOptions_t, match_text) &&
      options->size != offsetof(unjamCallOptions_t, stream)) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT,
                "unjamCallOptions_t has an unknown size: initialise it with "
                "UNJAM_CALL_OPTIONS_INITIALIZER");
  }
  unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
  std::memcpy(&o, options, options->size);
  if (o.stream_order < UNJAM_STREAM_NONE || o.stream_order > UNJAM_STREAM_SYNC) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT, "stream_order is " + std::to_string(o.stream_order) +
                                                  ": give a value of unjamStreamOrder_t");
  }
  if (o.match_text != nullptr && !call.signature.set_match_text(o.match_text)) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT, "match_text has more than " +
                                                  std::to_string(UNJAM_MATCH_TEXT_BYTES - 1) +
                                                  " bytes: give a shorter text, or a hash of it");
  }
  if (o.algorithm != nullptr) {
    const std::optional<int> number = unjam::algorithm_named(o.algorithm);
    if (!number.has_value()) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT, std::string("unknown algorithm '") + o.algorithm +
                                                    "': use one of " + unjam::algorithm_choices());
    }
    unjam::warn_of_former_algorithm(o.algorithm, rank);
    call.signature.algorithm = static_cast<std::int8_t>(*number);
  }
  call.priority = o.priority;
  call.callback = o.callback;
  call.user = o.user;
  call.stream = o.stream;
  call.stream_order = static_cast<unjamStreamOrder_t>(o.stream_order);
  return UNJAM_SUCCESS;
}

unjamResult_t submit(unjamGroup_t group, const char* key, Call call,
                     const unjamCallOptions_t* options, unjamRequest_t* request) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    const int rank = group->context->rank();
    if (unjamResult_t r = apply_options(options, rank, call); r != UNJAM_SUCCESS) return r;
    return finish(group->context->submit(*group, key, call, request));
  });
}

// C may pass any int. What does not fit the enum becomes a value that Context refuses, not another
// valid one.
template <class Enum, class CEnum>
Enum from_c(CEnum value) {
  const int v = static_cast<int>(value);
  return static_cast<Enum>(v < 0 || v > 0xff ? 0xff : v);
}

Call make_call(Kind kind, const void* send, void* recv, size_t count, unjamDataType_t dtype,
               unjamOp_t op, int root) {
  Call c;
  c.signature.kind = kind;
  c.signature.dtype = from_c<unjam::DType>(dtype);
  c.signature.op = from_c<unjam::Op>(op);
  c.signature.root = root;
  c.signature.count = count;
  // What the kind does not use is not part of the call: ranks need not agree on it.
  // (Of a kind that there is not, Context says so.)
  const bool known = static_cast<int>(kind) < unjam::kNumKinds;
  if (known && !unjam::reduces(kind)) c.signature.op = unjam::Op::kSum;
  if (known && !unjam::has_root(kind)) c.signature.root = 0;
  c.send = send;
  c.recv = recv;
  return c;
}

unjamResult_t transfer(unjamGroup_t group, const char* key, const void* send, void* recv,
                       size_t count, unjamDataType_t dtype, int peer, bool sends,
                       const unjamCallOptions_t* options, unjamRequest_t* request) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    Call call = make_call(Kind::kSendRecv, send, recv, count, dtype, UNJAM_SUM, 0);
    const int rank = group->context->rank();
    if (unjamResult_t r = apply_options(options, rank, call); r != UNJAM_SUCCESS) return r;
    return finish(group->context->transfer(*group, key, call, peer, sends, request));
  });
}

unjamResult_t register_kind(unjamGroup_t group, const char* key, Kind kind, unjamDataType_t dtype,
                            unjamOp_t op, int root, int priority, unjamCollective_t* collective) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    if (collective == nullptr) return null_argument("collective");
    const Call c = make_call(kind, nullptr, nullptr, 0, dtype, op, root);
    return finish(
        group->context->register_collective(group, key, c.signature, priority, collective));
  });
}

unjamResult_t check_ranks(int nranks) {
  if (nranks < 1 || nranks > static_cast<int>(unjam::kMaxRanks)) {
    return fail(UNJAM_ERROR_INVALID_ARGUMENT, "a job of " + std::to_string(nranks) +
                                                  " ranks: give 1 to " +
                                                  std::to_string(unjam::kMaxRanks));
  }
  return UNJAM_SUCCESS;
}

unjamResult_t check_device(int nranks, const Settings& settings) {
  if (settings.device != UNJAM_DEVICE_CUDA || nranks <= static_cast<int>(unjam::kMaxCudaRanks)) {
    return UNJAM_SUCCESS;
  }
  return fail(UNJAM_ERROR_INVALID_ARGUMENT,
              "a job of " + std::to_string(nranks) + " ranks on CUDA devices, which serve up to " +
                  std::to_string(unjam::kMaxCudaRanks) +
                  ": use fewer ranks, or the host device (UNJAM_DEVICE=host)");
}

}  // namespace

namespace unjam::api {

unjamResult_t fail(unjamResult_t code, std::string message) {
  return ::fail(code, std::move(message));
}

unjamResult_t finish(const Result& result) { return ::finish(result); }
unjamResult_t check_group(unjamGroup_t group) { return ::check_group(group); }
unjamResult_t check_request(unjamRequest_t request) { return ::check_request(request); }

unjamResult_t copy_text(const std::string& text, char* buffer, std::size_t bytes,
                        std::size_t* needed) {
  return ::copy_text(text, buffer, bytes, needed);
}

}  // namespace unjam::api

extern "C" {

unjamResult_t unjamGetVersion(int* version) {
  if (version == nullptr) return null_argument("version");
  *version = UNJAM_VERSION;
  return UNJAM_SUCCESS;
}

const char* unjamGetErrorString(unjamResult_t result) {
  switch (result) {
    case UNJAM_SUCCESS:
      return "success";
    case UNJAM_ERROR_INVALID_ARGUMENT:
      return "invalid argument";
    case UNJAM_ERROR_INVALID_USAGE:
      return "invalid usage";
    case UNJAM_ERROR_MISMATCH:
      return "ranks disagree";
    case UNJAM_ERROR_TIMEOUT:
      return "timeout";
    case UNJAM_ERROR_ABORTED:
      return "aborted";
    case UNJAM_ERROR_PEER:
      return "a peer is gone";
    case UNJAM_ERROR_RESOURCES:
      return "a limit is reached";
    case UNJAM_ERROR_SYSTEM:
      return "system error";
    case UNJAM_ERROR_INTERNAL:
      return "internal error";
  }
  return "unknown result";
}

const char* unjamGetLastError(void) { return last_error.c_str(); }

int unjamLastErrorIsTransient(void) { return last_error_transient ? 1 : 0; }

unjamResult_t unjamGetUniqueId(unjamUniqueId_t* id) {
  if (id == nullptr) return null_argument("id");
  *id = unjam::make_unique_id();
  return UNJAM_SUCCESS;
}

unjamResult_t unjamInit(unjamContext_t* context, int nranks, unjamUniqueId_t id, int rank,
                        const unjamConfig_t* config) {
  return guarded([&] {
    if (context == nullptr) return null_argument("context");
    if (unjamResult_t r = check_ranks(nranks); r != UNJAM_SUCCESS) return r;
    if (rank < 0 || rank >= nranks) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT,
                  "rank " + std::to_string(rank) + " of a job of " + std::to_string(nranks) +
                      " ranks: they go from 0 to " + std::to_string(nranks - 1));
    }
    Settings settings;
    std::string error;
    if (!unjam::resolve_settings(config, nranks, settings, error)) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT, error);
    }
    if (unjamResult_t r = check_device(nranks, settings); r != UNJAM_SUCCESS) return r;
    unjam::warn_of_variables(rank);
    World::decide_lines(settings);
    unjam::resolve_spins(settings, nranks * settings.lanes);
    unjamResult_t code = UNJAM_SUCCESS;
    std::shared_ptr<World> world = World::by_id(id, nranks, settings, code, error);
    if (world == nullptr) return fail(code, error);
    code = world->join(rank, settings, error);
    if (code == UNJAM_SUCCESS) code = world->wait_joined(rank, settings.init_timeout_ms, error);
    if (code != UNJAM_SUCCESS) return fail(code, error);
    auto c = std::make_unique<unjamContext>();
    c->impl = std::make_shared<Context>(world, rank, settings);
    try {
      c->impl->start();
    } catch (const std::exception& e) {
      world->tell_peers_gone(rank, std::string("it could not start: ") + e.what());
      throw;
    }
    *context = c.release();
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamInitFromEnvironment(unjamContext_t* context, const unjamConfig_t* config) {
  return guarded([&] {
    unjam::LaunchedRank launched;
    std::string error;
    if (!unjam::rank_from_environment(launched, error)) {
      return fail(UNJAM_ERROR_INVALID_USAGE, error);
    }
    return unjamInit(context, launched.ranks, launched.id, launched.rank, config);
  });
}

unjamResult_t unjamInitAll(unjamContext_t* contexts, int nranks, const unjamConfig_t* config) {
  return guarded([&] {
    if (contexts == nullptr) return null_argument("contexts");
    if (unjamResult_t r = check_ranks(nranks); r != UNJAM_SUCCESS) return r;
    Settings settings;
    std::string error;
    if (!unjam::resolve_settings(config, nranks, settings, error)) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT, error);
    }
    if (unjamResult_t r = check_device(nranks, settings); r != UNJAM_SUCCESS) return r;
    unjam::warn_of_variables(0);
    World::share_devices(nranks, settings);
    World::decide_lines(settings);
    unjam::resolve_spins(settings, nranks * settings.lanes);
    auto world = std::make_shared<World>(nranks, settings);
    for (int r = 0; r < nranks; ++r) {
      const unjamResult_t code = world->join(r, settings, error);
      if (code != UNJAM_SUCCESS) return fail(code, error);
    }
    std::vector<std::unique_ptr<unjamContext>> made;
    for (int r = 0; r < nranks; ++r) {
      made.push_back(std::make_unique<unjamContext>());
      made.back()->impl = std::make_shared<Context>(world, r, settings);
    }
    try {
      for (auto& c : made) c->impl->start();
    } catch (...) {
      for (auto& c : made) c->impl->shutdown();
      throw;
    }
    for (int r = 0; r < nranks; ++r) contexts[r] = made[static_cast<size_t>(r)].release();
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamDestroy(unjamContext_t context) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    const Result r = context->impl->shutdown();
    if (!r.ok()) return finish(r);
    delete context;
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamAbort(unjamContext_t context) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    context->impl->abort(UNJAM_ERROR_ABORTED, "the context was aborted (unjamAbort)");
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamFinalize(int64_t patience_us) {
  return guarded([&] {
    const std::string aborted = unjam::end_contexts(patience_us);
    return aborted.empty() ? UNJAM_SUCCESS : fail(UNJAM_ERROR_INVALID_USAGE, aborted);
  });
}

unjamResult_t unjamContextRank(unjamContext_t context, int* rank) {
  if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
  if (rank == nullptr) return null_argument("rank");
  *rank = context->impl->rank();
  return UNJAM_SUCCESS;
}

unjamResult_t unjamContextSize(unjamContext_t context, int* nranks) {
  if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
  if (nranks == nullptr) return null_argument("nranks");
  *nranks = context->impl->size();
  return UNJAM_SUCCESS;
}

unjamResult_t unjamContextAbsent(unjamContext_t context, int* ranks, int capacity, int* count) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (count == nullptr) return null_argument("count");
    if (ranks == nullptr && capacity > 0) return null_argument("ranks");
    const std::vector<int> absent = context->impl->absent();
    *count = static_cast<int>(absent.size());
    for (int i = 0; i < *count && i < capacity; ++i) ranks[i] = absent[static_cast<size_t>(i)];
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamGetAsyncError(unjamContext_t context, unjamResult_t* error, char* message,
                                 size_t bytes) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (error == nullptr) return null_argument("error");
    const Result r = context->impl->async_error();
    *error = r.code;
    if (message != nullptr && bytes != 0) {
      const size_t n = r.message.size() < bytes ? r.message.size() : bytes - 1;
      std::memcpy(message, r.message.data(), n);
      message[n] = '\0';
    }
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamDeviceSynchronize(unjamContext_t context, int64_t timeout_us) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (context->impl->synchronize(timeout_us)) return UNJAM_SUCCESS;
    return fail(UNJAM_ERROR_TIMEOUT, "an engine of this rank was still running after " +
                                         std::to_string(timeout_us) +
                                         " us (see unjamExplain for what it runs)");
  });
}

unjamResult_t unjamMemAlloc(unjamContext_t context, size_t bytes, void** pointer) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (pointer == nullptr) return null_argument("pointer");
    return finish(context->impl->heap().allocate(bytes, *pointer));
  });
}

unjamResult_t unjamMemFree(unjamContext_t context, void* pointer) {
  return guarded([&] {
    if (context == nullptr) return finish(unjam::free_anywhere(pointer));
    if (unjamResult_t r = check_process(*context->impl); r != UNJAM_SUCCESS) return r;
    return finish(context->impl->heap().free(pointer));
  });
}

unjamResult_t unjamMemRegister(unjamContext_t context, void* pointer, size_t bytes) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    return finish(context->impl->register_memory(pointer, bytes));
  });
}

unjamResult_t unjamMemDeregister(unjamContext_t context, void* pointer) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    return finish(context->impl->deregister_memory(pointer));
  });
}

unjamResult_t unjamGroupCreate(unjamContext_t context, const int* ranks, int size, const char* name,
                               unjamGroup_t* group) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (group == nullptr) return null_argument("group");
    return finish(context->impl->create_group(ranks, size, name, group));
  });
}

unjamResult_t unjamGroupDestroy(unjamGroup_t group) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    return finish(group->context->destroy_group(group));
  });
}

unjamResult_t unjamGroupAbort(unjamGroup_t group) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    return finish(group->context->abort_group(
        *group, "group '" + group->name + "' was aborted (unjamGroupAbort)"));
  });
}

unjamResult_t unjamGroupShrink(unjamGroup_t group, const char* name, unjamGroup_t* survivors) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    if (survivors == nullptr) return null_argument("survivors");
    return finish(group->context->shrink_group(*group, name, survivors));
  });
}

unjamResult_t unjamGroupRank(unjamGroup_t group, int* rank) {
  if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
  if (rank == nullptr) return null_argument("rank");
  *rank = group->rank;
  return UNJAM_SUCCESS;
}

unjamResult_t unjamGroupSize(unjamGroup_t group, int* size) {
  if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
  if (size == nullptr) return null_argument("size");
  *size = static_cast<int>(group->members.size());
  return UNJAM_SUCCESS;
}

unjamResult_t unjamAllReduce(unjamGroup_t group, const char* key, const void* send, void* recv,
                             size_t count, unjamDataType_t dtype, unjamOp_t op,
                             const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kAllReduce, send, recv, count, dtype, op, 0), options,
                request);
}

unjamResult_t unjamAllGather(unjamGroup_t group, const char* key, const void* send, void* recv,
                             size_t count, unjamDataType_t dtype, const unjamCallOptions_t* options,
                             unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kAllGather, send, recv, count, dtype, UNJAM_SUM, 0),
                options, request);
}

unjamResult_t unjamReduceScatter(unjamGroup_t group, const char* key, const void* send, void* recv,
                                 size_t count, unjamDataType_t dtype, unjamOp_t op,
                                 const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kReduceScatter, send, recv, count, dtype, op, 0),
                options, request);
}

unjamResult_t unjamReduce(unjamGroup_t group, const char* key, const void* send, void* recv,
                          size_t count, unjamDataType_t dtype, unjamOp_t op, int root,
                          const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kReduce, send, recv, count, dtype, op, root), options,
                request);
}

unjamResult_t unjamBroadcast(unjamGroup_t group, const char* key, const void* send, void* recv,
                             size_t count, unjamDataType_t dtype, int root,
                             const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kBroadcast, send, recv, count, dtype, UNJAM_SUM, root),
                options, request);
}

unjamResult_t unjamAllToAll(unjamGroup_t group, const char* key, const void* send, void* recv,
                            size_t count, unjamDataType_t dtype, const unjamCallOptions_t* options,
                            unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kAllToAll, send, recv, count, dtype, UNJAM_SUM, 0),
                options, request);
}

unjamResult_t unjamGather(unjamGroup_t group, const char* key, const void* send, void* recv,
                          size_t count, unjamDataType_t dtype, int root,
                          const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kGather, send, recv, count, dtype, UNJAM_SUM, root),
                options, request);
}

unjamResult_t unjamScatter(unjamGroup_t group, const char* key, const void* send, void* recv,
                           size_t count, unjamDataType_t dtype, int root,
                           const unjamCallOptions_t* options, unjamRequest_t* request) {
  return submit(group, key, make_call(Kind::kScatter, send, recv, count, dtype, UNJAM_SUM, root),
                options, request);
}

unjamResult_t unjamBarrier(unjamGroup_t group, const char* key, const unjamCallOptions_t* options,
                           unjamRequest_t* request) {
  return submit(group, key,
                make_call(Kind::kBarrier, nullptr, nullptr, 1, UNJAM_UINT8, UNJAM_SUM, 0), options,
                request);
}

unjamResult_t unjamSend(unjamGroup_t group, const char* key, const void* buffer, size_t count,
                        unjamDataType_t dtype, int peer, const unjamCallOptions_t* options,
                        unjamRequest_t* request) {
  return transfer(group, key, buffer, nullptr, count, dtype, peer, true, options, request);
}

unjamResult_t unjamRecv(unjamGroup_t group, const char* key, void* buffer, size_t count,
                        unjamDataType_t dtype, int peer, const unjamCallOptions_t* options,
                        unjamRequest_t* request) {
  return transfer(group, key, nullptr, buffer, count, dtype, peer, false, options, request);
}

unjamResult_t unjamProbe(unjamGroup_t group, const char* key, int peer, int* ready) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    if (ready == nullptr) return null_argument("ready");
    bool has_called = false;
    const Result r = group->context->probe(*group, key, peer, has_called);
    *ready = has_called ? 1 : 0;
    return finish(r);
  });
}

unjamResult_t unjamRegister(unjamGroup_t group, const char* key, unjamKind_t kind,
                            unjamDataType_t dtype, unjamOp_t op, int root, int priority,
                            unjamCollective_t* collective) {
  return register_kind(group, key, from_c<Kind>(kind), dtype, op, root, priority, collective);
}

unjamResult_t unjamRegisterAllReduce(unjamGroup_t group, const char* key, unjamDataType_t dtype,
                                     unjamOp_t op, int priority, unjamCollective_t* collective) {
  return register_kind(group, key, Kind::kAllReduce, dtype, op, 0, priority, collective);
}

unjamResult_t unjamRegisterAllGather(unjamGroup_t group, const char* key, unjamDataType_t dtype,
                                     int priority, unjamCollective_t* collective) {
  return register_kind(group, key, Kind::kAllGather, dtype, UNJAM_SUM, 0, priority, collective);
}

unjamResult_t unjamRegisterReduceScatter(unjamGroup_t group, const char* key, unjamDataType_t dtype,
                                         unjamOp_t op, int priority,
                                         unjamCollective_t* collective) {
  return register_kind(group, key, Kind::kReduceScatter, dtype, op, 0, priority, collective);
}

unjamResult_t unjamRegisterReduce(unjamGroup_t group, const char* key, unjamDataType_t dtype,
                                  unjamOp_t op, int root, int priority,
                                  unjamCollective_t* collective) {
  return register_kind(group, key, Kind::kReduce, dtype, op, root, priority, collective);
}

unjamResult_t unjamRegisterBroadcast(unjamGroup_t group, const char* key, unjamDataType_t dtype,
                                     int root, int priority, unjamCollective_t* collective) {
  return register_kind(group, key, Kind::kBroadcast, dtype, UNJAM_SUM, root, priority, collective);
}

unjamResult_t unjamRun(unjamCollective_t collective, const void* send, void* recv, size_t count,
                       unjamCallback_t callback, void* user, unjamRequest_t* request) {
  return guarded([&] {
    if (unjamResult_t r = check_collective(collective); r != UNJAM_SUCCESS) return r;
    Call call;
    call.signature = collective->signature;
    call.signature.count = count;
    call.send = send;
    call.recv = recv;
    call.priority = collective->priority;
    call.callback = callback;
    call.user = user;
    return finish(collective->group->context->submit(*collective, call, request));
  });
}

unjamResult_t unjamRunWithOptions(unjamCollective_t collective, const void* send, void* recv,
                                  size_t count, const unjamCallOptions_t* options,
                                  unjamRequest_t* request) {
  return guarded([&] {
    if (unjamResult_t r = check_collective(collective); r != UNJAM_SUCCESS) return r;
    Call call;
    call.signature = collective->signature;
    call.signature.count = count;
    const int rank = collective->group->context->rank();
    if (unjamResult_t r = apply_options(options, rank, call); r != UNJAM_SUCCESS) return r;
    call.send = send;
    call.recv = recv;
    call.priority = collective->priority;
    return finish(collective->group->context->submit(*collective, call, request));
  });
}

unjamResult_t unjamDeregister(unjamCollective_t collective) {
  return guarded([&] {
    if (unjamResult_t r = check_collective(collective); r != UNJAM_SUCCESS) return r;
    return finish(collective->group->context->deregister(collective));
  });
}

unjamResult_t unjamWait(unjamRequest_t request, int64_t timeout_us) {
  return guarded([&] {
    if (unjamResult_t r = check_request(request); r != UNJAM_SUCCESS) return r;
    if (timeout_us != 0 && Context::in_callback() &&
        !request->done.load(std::memory_order_acquire)) {
      return fail(UNJAM_ERROR_INVALID_USAGE,
                  "a callback waits for a pending collective, and completions wait for the "
                  "callback to return: wait in another thread, or go on in that collective's "
                  "callback");
    }
    if (!request->context->wait(*request, timeout_us)) {
      return fail(UNJAM_ERROR_TIMEOUT, "not complete within " + std::to_string(timeout_us) +
                                           " us; it goes on (unjamExplain tells whom it waits "
                                           "for)");
    }
    return finish({request->result, request->message});
  });
}

unjamResult_t unjamTest(unjamRequest_t request, int* done) {
  return guarded([&] {
    if (unjamResult_t r = check_request(request); r != UNJAM_SUCCESS) return r;
    if (done == nullptr) return null_argument("done");
    if (!request->done.load(std::memory_order_acquire)) request->context->reap();
    *done = request->done.load(std::memory_order_acquire) ? 1 : 0;
    return *done ? finish({request->result, request->message}) : UNJAM_SUCCESS;
  });
}

unjamResult_t unjamOnComplete(unjamRequest_t request, unjamCallback_t callback, void* user) {
  return guarded([&] {
    if (unjamResult_t r = check_request(request); r != UNJAM_SUCCESS) return r;
    if (callback == nullptr) return null_argument("callback");
    return finish(request->context->on_complete(*request, callback, user));
  });
}

unjamResult_t unjamOnDone(unjamRequest_t request, unjamCallback_t callback, void* user) {
  return unjamOnComplete(request, callback, user);
}

unjamResult_t unjamStreamWait(unjamRequest_t request, void* stream) {
  return guarded([&] {
    if (unjamResult_t r = check_request(request); r != UNJAM_SUCCESS) return r;
    return finish(request->context->stream_wait(*request, stream));
  });
}

const char* unjamRequestError(unjamRequest_t request) {
  if (request == nullptr || request->context->inherited()) return "";
  if (!request->done.load(std::memory_order_acquire)) return "";
  return request->message.c_str();
}

unjamResult_t unjamRequestFree(unjamRequest_t request) {
  if (unjamResult_t r = check_request(request); r != UNJAM_SUCCESS) return r;
  request->release();
  return UNJAM_SUCCESS;
}

unjamResult_t unjamGetKindInfo(unjamKind_t kind, unjamKindInfo_t* info) {
  return guarded([&] {
    if (info == nullptr) return null_argument("info");
    if (info->size != sizeof(unjamKindInfo_t)) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT,
                  "unjamKindInfo_t has an unknown size: set .size = sizeof(unjamKindInfo_t)");
    }
    const int number = static_cast<int>(kind);
    if (number < 0 || number >= unjam::kNumKinds) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT, "unknown kind: give a value of unjamKind_t");
    }
    const unjam::KindRow& row = unjam::kKinds[number];
    *info = {sizeof(*info),
             row.name,
             row.reduces,
             row.has_root,
             row.blocks,
             static_cast<std::int32_t>(row.reads),
             static_cast<std::int32_t>(row.writes),
             row.in_place,
             row.buffers};
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamGetStats(unjamContext_t context, unjamStats_t* stats) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (stats == nullptr) return null_argument("stats");
    // Earlier ones ended before `idle_quits`.
    const size_t size = stats->size;
    if (size != sizeof(unjamStats_t) && size != offsetof(unjamStats_t, idle_quits)) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT,
                  "unjamStats_t has an unknown size: set .size = sizeof(unjamStats_t)");
    }
    unjamStats_t all{};
    all.size = size;
    context->impl->stats(all);
    std::memcpy(stats, &all, size);
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamInfo(unjamContext_t context, char* buffer, size_t bytes, size_t* needed) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    return copy_text(context->impl->info_json(), buffer, bytes, needed);
  });
}

unjamResult_t unjamJobMemory(int nranks, const unjamConfig_t* config, char* buffer, size_t bytes,
                             size_t* needed) {
  return guarded([&] {
    if (unjamResult_t r = check_ranks(nranks); r != UNJAM_SUCCESS) return r;
    unjam::Settings settings;
    std::string error;
    if (!unjam::resolve_settings(config, nranks, settings, error)) {
      return fail(UNJAM_ERROR_INVALID_ARGUMENT, error);
    }
    return copy_text(unjam::job_memory_json(nranks, settings), buffer, bytes, needed);
  });
}

unjamResult_t unjamExplain(unjamContext_t context, char* buffer, size_t bytes, size_t* needed) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    return copy_text(context->impl->explain(), buffer, bytes, needed);
  });
}

unjamResult_t unjamGetTrace(unjamContext_t context, unjamTraceEvent_t* events, size_t capacity,
                            size_t* count) {
  return guarded([&] {
    if (unjamResult_t r = check_context(context); r != UNJAM_SUCCESS) return r;
    if (count == nullptr) return null_argument("count");
    if (events == nullptr && capacity != 0) return null_argument("events");
    *count = context->impl->trace(events, capacity);
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamKeyHash(unjamGroup_t group, const char* key, uint64_t* hash) {
  return guarded([&] {
    if (unjamResult_t r = check_group(group); r != UNJAM_SUCCESS) return r;
    if (hash == nullptr) return null_argument("hash");
    *hash = unjam::key_tag(*group, key == nullptr ? "" : key);
    return UNJAM_SUCCESS;
  });
}

unjamResult_t unjamEnvironment(char* buffer, size_t bytes, size_t* needed) {
  return guarded([&] { return copy_text(unjam::environment_json(), buffer, bytes, needed); });
}

unjamResult_t unjamPlanCheck(unjamKind_t kind, unjamDataType_t dtype, unjamOp_t op, size_t count,
                             int nranks, int root, int algorithm, int lanes, int slots, int list,
                             char* buffer, size_t bytes, size_t* needed) {
  return unjamPlanCheckOnHosts(kind, dtype, op, count, nranks, nullptr, root, algorithm, lanes,
                               slots, list, buffer, bytes, needed);
}

unjamResult_t unjamPlanCheckOnHosts(unjamKind_t kind, unjamDataType_t dtype, unjamOp_t op,
                                    size_t count, int nranks, const int* host_of, int root,
                                    int algorithm, int lanes, int slots, int list, char* buffer,
                                    size_t bytes, size_t* needed) {
  return guarded([&] {
    // In the caller's own types: what does not fit must not become another valid value below.
    const struct {
      const char* name;
      std::int64_t value, least, most;
    } arguments[] = {{"kind", kind, 0, unjam::kNumKinds - 1},
                     {"dtype", dtype, 0, unjam::kNumDTypes - 1},
                     {"op", op, 0, unjam::kNumOps - 1},
                     {"nranks", nranks, 1, unjam::kMaxGroupRanks},
                     {"algorithm", algorithm, -1, unjam::kNumAlgorithms - 1},
                     {"lanes", lanes, 1, unjam::kMaxLanes},
                     {"slots", slots, 1, unjam::kMaxCheckedSlots}};
    for (const auto& a : arguments) {
      if (a.value < a.least || a.value > a.most) {
        return fail(UNJAM_ERROR_INVALID_ARGUMENT,
                    std::string(a.name) + " " + std::to_string(a.value) +
                        " is out of range: give " + std::to_string(a.least) + " to " +
                        std::to_string(a.most));
      }
    }
    unjam::PlanRequest r;
    r.kind = static_cast<Kind>(kind);
    r.dtype = static_cast<unjam::DType>(dtype);
    r.op = static_cast<unjam::Op>(op);
    r.count = count;
    r.ranks = nranks;
    r.root = root;
    std::optional<unjam::HostTable> hosts;
    if (host_of != nullptr) hosts.emplace(std::vector<int>(host_of, host_of + nranks));
    r.hosts = hosts ? &*hosts : nullptr;
    unjam::PlanLimits limits;
    limits.lanes = static_cast<std::uint16_t>(lanes);
    limits.guaranteed_slots = static_cast<std::uint32_t>(slots);
    std::optional<unjam::Algorithm> a;
    if (algorithm >= 0) a = static_cast<unjam::Algorithm>(algorithm);
    bool ok = false;
    return copy_text(unjam::plan_check_json(r, limits, a, slots, list != 0, &ok), buffer, bytes,
                     needed);
  });
}

}  // extern "C"
