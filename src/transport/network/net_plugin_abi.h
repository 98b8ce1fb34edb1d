// What a network plugin for NCCL exports: a table of functions under the name ncclNetPlugin_vN, of
// which each version N has another layout. Declared here by ourselves, one table a version, for v6
// to v12; the order and the types of what stands in a table are the plugin's ABI, the names are
// ours.
//
// What holds for all versions: functions return 0 or an error of NCCL's. connect() and accept()
// succeed without a connection while there is none yet, and are called again. connect() may keep
// its own state in the handle. isend() and irecv() succeed without a request while there is no room
// for one. A connection is used in one direction, and its messages arrive in the order in which
// they were sent. A receive may be longer than what is sent, never shorter.
#pragma once

#include <cstddef>
#include <cstdint>

namespace unjam::net_plugin_abi {

using Result = int;

inline constexpr std::uint32_t kHandleBytes = 128;
inline constexpr int kHostMemory = 1;  // a bit of `memory` below, and a type for reg_mr
inline constexpr int kNoTrafficClass = -1;

using Log = void (*)(int level, unsigned long flags, const char* file, int line, const char* format,
                     ...);
inline constexpr int kLogWarn = 2;

using Profile = Result (*)(void** event, int type, void* of, std::int64_t plugin, void* data);

// How a GPU itself uses a connection. We never ask for that.
struct DeviceHandle;

struct CommConfig {
  int traffic_class = kNoTrafficClass;
};

// Which physical devices a virtual one has.
template <int kMost>
struct Fused {
  int count;
  int devices[kMost];
};

struct PropertiesV6 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;  // kinds that can be registered
  int speed;   // Mbit/s
  int port;
  float latency;  // us
  int most_comms;
  int most_receives;  // of a grouped one
};

struct PropertiesV7 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;
  int speed;
  int port;
  float latency;
  int most_comms;
  int most_receives;
  int device_type;
  int device_version;
};

struct PropertiesV8 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;
  int registration_is_global;
  int speed;
  int port;
  float latency;
  int most_comms;
  int most_receives;
  int device_type;
  int device_version;
};

struct PropertiesV9 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int most_comms;
  int most_receives;
  int device_type;
  int device_version;
  Fused<4> fused;
  std::size_t most_bytes;  // of a message
  std::size_t most_collective_bytes;
};

using PropertiesV10 = PropertiesV9;

struct PropertiesV11 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int most_comms;
  int most_receives;
  int device_type;
  int device_version;
  Fused<4> fused;
  std::size_t most_bytes;
  std::size_t most_collective_bytes;
  int most_requests_in_one;
};

struct PropertiesV12 {
  char* name;
  char* pci_path;
  std::uint64_t guid;
  int memory;
  int registration_is_global;
  int force_flush;
  int speed;
  int port;
  float latency;
  int most_comms;
  int most_receives;
  int device_type;
  int device_version;
  Fused<8> fused;
  std::size_t most_bytes;
  std::size_t most_collective_bytes;
  int most_requests_in_one;
  std::int16_t rail;
  std::int16_t plane;
};

struct TableV6 {
  static constexpr int kVersion = 6;
  using Properties = PropertiesV6;

  const char* name;
  Result (*init)(Log);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm);
  Result (*accept)(void* listener, void** comm);
  Result (*reg_mr)(void* comm, void* data, int bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, int bytes, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int count, void** data, int* bytes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
};

struct TableV7 {
  static constexpr int kVersion = 7;
  using Properties = PropertiesV7;

  const char* name;
  Result (*init)(Log);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm, DeviceHandle** on_device);
  Result (*accept)(void* listener, void** comm, DeviceHandle** on_device);
  Result (*reg_mr)(void* comm, void* data, int bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, int bytes, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int count, void** data, int* bytes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_mr)(void* comm, void* mr, void** on_device);
  Result (*consumed)(void* comm, int count, void* request);
};

struct TableV8 {
  static constexpr int kVersion = 8;
  using Properties = PropertiesV8;

  const char* name;
  Result (*init)(Log);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm, DeviceHandle** on_device);
  Result (*accept)(void* listener, void** comm, DeviceHandle** on_device);
  Result (*reg_mr)(void* comm, void* data, std::size_t bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, int bytes, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int count, void** data, int* bytes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_mr)(void* comm, void* mr, void** on_device);
  Result (*consumed)(void* comm, int count, void* request);
};

struct TableV9 {
  static constexpr int kVersion = 9;
  using Properties = PropertiesV9;

  const char* name;
  Result (*init)(Log);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, void* handle, void** comm, DeviceHandle** on_device);
  Result (*accept)(void* listener, void** comm, DeviceHandle** on_device);
  Result (*reg_mr)(void* comm, void* data, std::size_t bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, std::size_t bytes, int tag, void* mr, void** request);
  Result (*irecv)(void* comm, int count, void** data, std::size_t* bytes, int* tags, void** mrs,
                  void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_mr)(void* comm, void* mr, void** on_device);
  Result (*consumed)(void* comm, int count, void* request);
  Result (*fuse)(int* device, Fused<4>*);
};

struct TableV10 {
  static constexpr int kVersion = 10;
  using Properties = PropertiesV10;

  const char* name;
  Result (*init)(Log, Profile);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(int device, void* handle, void** listener);
  Result (*connect)(int device, CommConfig*, void* handle, void** comm, DeviceHandle** on_device);
  Result (*accept)(void* listener, void** comm, DeviceHandle** on_device);
  Result (*reg_mr)(void* comm, void* data, std::size_t bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, std::size_t bytes, int tag, void* mr, void* profiled,
                  void** request);
  Result (*irecv)(void* comm, int count, void** data, std::size_t* bytes, int* tags, void** mrs,
                  void** profiled, void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_mr)(void* comm, void* mr, void** on_device);
  Result (*consumed)(void* comm, int count, void* request);
  Result (*fuse)(int* device, Fused<4>*);
};

// v11 and v12 differ in what they say of a device.
template <int kTheVersion, class TheProperties, int kMostFused>
struct TableWithContext {
  static constexpr int kVersion = kTheVersion;
  using Properties = TheProperties;

  const char* name;
  Result (*init)(void** context, std::uint64_t job, CommConfig*, Log, Profile);
  Result (*devices)(int* count);
  Result (*properties)(int device, Properties*);
  Result (*listen)(void* context, int device, void* handle, void** listener);
  Result (*connect)(void* context, int device, void* handle, void** comm, DeviceHandle** on_device);
  Result (*accept)(void* listener, void** comm, DeviceHandle** on_device);
  Result (*reg_mr)(void* comm, void* data, std::size_t bytes, int type, void** mr);
  Result (*reg_mr_dma_buf)(void* comm, void* data, std::size_t bytes, int type,
                           std::uint64_t offset, int fd, void** mr);
  Result (*dereg_mr)(void* comm, void* mr);
  Result (*isend)(void* comm, void* data, std::size_t bytes, int tag, void* mr, void* profiled,
                  void** request);
  Result (*irecv)(void* comm, int count, void** data, std::size_t* bytes, int* tags, void** mrs,
                  void** profiled, void** request);
  Result (*iflush)(void* comm, int count, void** data, int* bytes, void** mrs, void** request);
  Result (*test)(void* request, int* done, int* bytes);
  Result (*close_send)(void* comm);
  Result (*close_recv)(void* comm);
  Result (*close_listen)(void* listener);
  Result (*device_mr)(void* comm, void* mr, void** on_device);
  Result (*consumed)(void* comm, int count, void* request);
  Result (*fuse)(int* device, Fused<kMostFused>*);
  Result (*finalize)(void* context);
  Result (*set_attributes)(void* context, void* attributes);
};
using TableV11 = TableWithContext<11, PropertiesV11, 4>;
using TableV12 = TableWithContext<12, PropertiesV12, 8>;

}  // namespace unjam::net_plugin_abi
