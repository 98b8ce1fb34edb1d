// The few functions and structures of UCX's UCP that ucx_fabric.cc uses, declared by ourselves, so
// that nothing of UCX is needed to build unjam. What stands where is UCX's ABI, which keeps to
// itself since 1.13: structures only grow at their ends, and a mask says which fields are meant.
// The names are ours.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unjam::ucx_abi {

// One byte in UCX, whose registers' upper bytes mean nothing.
using Status = signed char;
inline constexpr Status kOk = 0, kBusy = -15;
// What functions that begin something give: nullptr (it is done), an error, or a request.
using StatusOrRequest = void*;
inline bool is_error(StatusOrRequest s) {
  return reinterpret_cast<std::uintptr_t>(s) >= static_cast<std::uintptr_t>(-100);
}

using Config = struct ConfigOfUcx*;
using Context = struct ContextOfUcx*;
using Worker = struct WorkerOfUcx*;
using Endpoint = struct EndpointOfUcx*;

struct Params {
  static constexpr std::uint64_t kFeatures = 1 << 0, kSharedWorkers = 1 << 5;
  static constexpr std::uint64_t kWakeUp = 1 << 4, kActiveMessages = 1 << 6;  // features

  std::uint64_t mask = 0;
  std::uint64_t features = 0;
  std::size_t request_size = 0;
  void (*request_init)(void*) = nullptr;
  void (*request_cleanup)(void*) = nullptr;
  std::uint64_t tag_sender_mask = 0;
  int shared_workers = 0;
  std::size_t endpoints = 0, endpoints_per_node = 0;
  const char* name = nullptr;
  std::size_t node_local_id = 0;
};

struct WorkerParams {
  static constexpr std::uint64_t kThreadMode = 1 << 0;
  static constexpr int kSerialized = 1;  // by one thread at a time

  std::uint64_t mask = 0;
  int thread_mode = 0;
  unsigned long cpus[16] = {};
  unsigned events = 0;
  void* user_data = nullptr;
  int event_fd = -1;
  std::uint64_t flags = 0;
  const char* name = nullptr;
  std::size_t am_alignment = 0;
  std::uint64_t client_id = 0;
};

struct SocketAddress {
  const void* address = nullptr;
  std::uint32_t bytes = 0;
};

struct EndpointParams {
  static constexpr std::uint64_t kAddress = 1 << 0, kErrorMode = 1 << 1, kErrorHandler = 1 << 2;
  static constexpr int kPeerErrors = 1;  // requests end, and the handler is called

  std::uint64_t mask = 0;
  const void* address = nullptr;
  int error_mode = 0;
  void (*on_error)(void* argument, Endpoint, Status) = nullptr;
  void* argument = nullptr;
  void* user_data = nullptr;
  unsigned flags = 0;
  SocketAddress to;
  void* connection_request = nullptr;
  const char* name = nullptr;
  SocketAddress from;
};

struct Arrival {
  static constexpr std::uint64_t kRendezvous = 1 << 17;

  std::uint64_t attributes;
  Endpoint reply_to;
};
using OnArrival = Status (*)(void* argument, const void* header, std::size_t header_bytes,
                             void* data, std::size_t bytes, const Arrival*);

struct HandlerParams {
  static constexpr std::uint64_t kId = 1 << 0, kFlags = 1 << 1, kCallback = 1 << 2,
                                 kArgument = 1 << 3;
  static constexpr std::uint32_t kWholeMessages = 1 << 0;

  std::uint64_t mask = 0;
  unsigned id = 0;
  std::uint32_t flags = 0;
  OnArrival callback = nullptr;
  void* argument = nullptr;
};

using OnSent = void (*)(void* request, Status, void* user_data);

struct RequestParams {
  static constexpr std::uint32_t kCallback = 1 << 1, kUserData = 1 << 2, kFlags = 1 << 4;
  static constexpr std::uint32_t kEager = 1 << 1;  // of sends
  static constexpr std::uint32_t kForce = 1 << 0;  // of closing

  std::uint32_t mask = 0;
  std::uint32_t flags = 0;
  void* request = nullptr;
  OnSent sent = nullptr;
  std::uint64_t datatype = 0;
  void* user_data = nullptr;
  void* reply_buffer = nullptr;
  int memory_type = 0;
  void* receive_info = nullptr;
  void* memory = nullptr;
  std::uint64_t remote_datatype = 0;
  const void* remote = nullptr;
  std::size_t remote_count = 0;
};

struct Functions {
  void (*get_version)(unsigned* major, unsigned* minor, unsigned* release);
  Status (*config_read)(const char* prefix, const char* file, Config*);
  Status (*config_modify)(Config, const char* name, const char* value);
  void (*config_release)(Config);
  Status (*init_version)(unsigned major, unsigned minor, const Params*, Config, Context*);
  void (*cleanup)(Context);
  Status (*worker_create)(Context, const WorkerParams*, Worker*);
  void (*worker_destroy)(Worker);
  Status (*worker_get_address)(Worker, void** address, std::size_t* bytes);
  void (*worker_release_address)(Worker, void* address);
  unsigned (*worker_progress)(Worker);
  Status (*worker_get_efd)(Worker, int* fd);
  Status (*worker_arm)(Worker);
  Status (*worker_set_am_recv_handler)(Worker, const HandlerParams*);
  Status (*ep_create)(Worker, const EndpointParams*, Endpoint*);
  StatusOrRequest (*ep_close_nbx)(Endpoint, const RequestParams*);
  StatusOrRequest (*am_send_nbx)(Endpoint, unsigned id, const void* header, std::size_t bytes,
                                 const void* data, std::size_t data_bytes, const RequestParams*);
  void (*request_free)(void* request);
  const char* (*status_string)(Status);
};

}  // namespace unjam::ucx_abi
