// A network plugin for NCCL, of the version UNJAM_NET_ABI, over loopback sockets: each connection
// is a socket, each message its length and its bytes. Tests plant faults into it (faults.h). It is
// strict where plugins may be: what it is not obliged to bear is an error, and counted.
//
// NCCL itself can use it, too, between processes of one machine.
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <vector>

#include "base/hash.h"
#include "tests/net/faults.h"
#include "transport/network/net_plugin_abi.h"

#define UNJAM_EXPORTED extern "C" __attribute__((visibility("default")))

UNJAM_EXPORTED NetFaults unjam_net_faults;
NetFaults unjam_net_faults;

namespace {

namespace abi = unjam::net_plugin_abi;
using abi::Log, abi::Profile, abi::Result;

constexpr Result kOk = 0, kSystemError = 2, kInternalError = 3, kInvalidArgument = 4,
                 kInvalidUsage = 5;
constexpr std::uint32_t kRequests = UNJAM_NET_ABI == 6 ? 8 : 32;

NetFaults& faults() { return unjam_net_faults; }
Log logger = nullptr;

Result misuse(const char* what) {
  ++faults().misused;
  if (logger != nullptr) logger(abi::kLogWarn, ~0ul, __FILE__, __LINE__, "misused: %s", what);
  return kInvalidArgument;
}
// Whether this call of it is to fail.
bool fails(NetFaults::Call call) {
  NetFaults& f = faults();
  const bool planted = f.fails == call && f.after-- <= 0;
  if (logger != nullptr && planted != (f.grumbles != 0)) {
    logger(abi::kLogWarn, ~0ul, __FILE__, __LINE__, "a planted %s", planted ? "fault" : "grumble");
  }
  return planted;
}

struct Handle {
  std::uint32_t port;
  std::uint32_t tries;  // of connect(): plugins keep things here
};

struct Listener {
  int fd;
};

struct Connection;
struct Memory {
  Connection* of;
  unsigned char* begin;
  std::uint64_t bytes;
};

struct Request {
  Connection* of = nullptr;
  bool used = false, sends = false, done = false;
  unsigned char* data = nullptr;
  std::uint64_t room = 0;   // bytes to be sent, or that may come
  std::uint64_t bytes = 0;  // that come
  std::uint64_t moved = 0;  // of the length and the bytes
  unsigned char length[8] = {};
  std::uint32_t delay = 0;
};

struct Connection {
  int fd = -1;
  bool sends = false;
  Request requests[kRequests];
  std::vector<Request*> queue;  // that are not done
  std::int64_t memories = 0;
  std::uint64_t drawn = 0;
};

bool move_some(Connection& c, unsigned char* at, std::uint64_t bytes, std::uint64_t* moved,
               Result* result) {
  const std::uint32_t piece = faults().piece;
  if (piece != 0) bytes = std::min<std::uint64_t>(bytes, piece);
  const ssize_t n = c.sends ? ::send(c.fd, at, bytes, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : ::recv(c.fd, at, bytes, MSG_DONTWAIT);
  *result = kOk;
  if (n > 0) *moved += static_cast<std::uint64_t>(n);
  if (n == 0 && !c.sends) *result = 6;
  if (n < 0 && errno != EAGAIN && errno != EINTR) *result = kSystemError;
  return n > 0;
}

Result progress(Connection& c) {
  constexpr std::uint64_t kLength = sizeof(Request::length);
  while (!c.queue.empty()) {
    Request& r = *c.queue.front();
    Result result = kOk;
    bool moved = true;
    while (moved && result == kOk && r.moved < kLength) {
      moved = move_some(c, r.length + r.moved, kLength - r.moved, &r.moved, &result);
    }
    if (result != kOk) return result;
    if (r.moved < kLength) return kOk;
    if (!c.sends) std::memcpy(&r.bytes, r.length, kLength);
    if (r.bytes > r.room) {
      if (logger != nullptr) {
        logger(abi::kLogWarn, ~0ul, __FILE__, __LINE__, "%llu bytes come where %llu are expected",
               static_cast<unsigned long long>(r.bytes), static_cast<unsigned long long>(r.room));
      }
      return kInvalidUsage;
    }
    while (moved && result == kOk && r.moved < kLength + r.bytes) {
      moved =
          move_some(c, r.data + r.moved - kLength, kLength + r.bytes - r.moved, &r.moved, &result);
      if (faults().piece != 0) break;
    }
    if (result != kOk) return result;
    if (r.moved < kLength + r.bytes) return kOk;
    r.done = true;
    c.queue.erase(c.queue.begin());
    if (!c.sends) {
      ++faults().messages;
      if (faults().received != nullptr) {
        faults().received(faults().context, r.data, &r.bytes);
      }
    }
  }
  return kOk;
}

Result begin(Log log) {
  logger = log;
  return fails(NetFaults::kInit) ? faults().result.load() : kOk;
}

Result devices(int* count) {
  if (fails(NetFaults::kDevices)) return faults().result;
  *count = faults().no_devices != 0 ? 0 : 1;
  return kOk;
}

Result open_listener(int device, void* handle, void** listener) {
  if (fails(NetFaults::kListen)) return faults().result;
  if (device != 0 || handle == nullptr || listener == nullptr) return misuse("listen");
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  if (fd < 0) return kSystemError;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (::bind(fd, generic, length) != 0 || ::listen(fd, 8) != 0 ||
      ::getsockname(fd, generic, &length) != 0) {
    ::close(fd);
    return kSystemError;
  }
  std::memset(handle, 0, abi::kHandleBytes);
  static_cast<Handle*>(handle)->port = ntohs(address.sin_port);
  *listener = new Listener{fd};
  ++faults().open;
  return kOk;
}

void* connection(int fd, bool sends) {
  const int one = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  auto* const c = new Connection;
  c->fd = fd;
  c->sends = sends;
  for (Request& r : c->requests) r.of = c;
  ++faults().open;
  return c;
}

Result open_connection(int device, void* handle, void** comm) {
  if (fails(NetFaults::kConnect)) return faults().result;
  if (device != 0 || handle == nullptr || comm == nullptr) return misuse("connect");
  auto& to = *static_cast<Handle*>(handle);
  *comm = nullptr;
  if (to.tries++ < faults().not_yet) return kOk;
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return kSystemError;
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(to.port));
  if (::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0) {
    ::close(fd);
    return kSystemError;
  }
  *comm = connection(fd, true);
  return kOk;
}

Result take_connection(void* listener, void** comm) {
  if (fails(NetFaults::kAccept)) return faults().result;
  if (listener == nullptr || comm == nullptr) return misuse("accept");
  *comm = nullptr;
  const int fd = ::accept4(static_cast<Listener*>(listener)->fd, nullptr, nullptr, SOCK_CLOEXEC);
  if (fd < 0) return errno == EAGAIN || errno == EINTR ? kOk : kSystemError;
  *comm = connection(fd, false);
  return kOk;
}

Result register_memory(void* comm, void* data, std::uint64_t bytes, int type, void** memory) {
  if (fails(NetFaults::kRegister)) return faults().result;
  if (comm == nullptr || data == nullptr || type != abi::kHostMemory) return misuse("regMr");
  auto* const c = static_cast<Connection*>(comm);
  ++c->memories;
  ++faults().registered;
  *memory = new Memory{c, static_cast<unsigned char*>(data), bytes};
  return kOk;
}

Result forget_memory(void* comm, void* memory) {
  auto* const m = static_cast<Memory*>(memory);
  if (comm == nullptr || m == nullptr || m->of != comm) return misuse("deregMr");
  --m->of->memories;
  --faults().registered;
  delete m;
  return faults().stays_registered != 0 ? kSystemError : kOk;
}

Result begin_request(void* comm, void* data, std::uint64_t bytes, void* memory, void** request,
                     bool sends) {
  if (fails(sends ? NetFaults::kSend : NetFaults::kReceive)) return faults().result;
  auto* const c = static_cast<Connection*>(comm);
  const auto* const m = static_cast<Memory*>(memory);
  *request = nullptr;
  if (c == nullptr || c->sends != sends) return misuse("a connection of another direction");
  if (m == nullptr || m->of != c) return misuse("memory that was not registered");
  const auto* const at = static_cast<unsigned char*>(data);
  if (at < m->begin || at + bytes > m->begin + m->bytes) return misuse("memory of others");
  const std::uint32_t no_room = faults().no_room;
  if (no_room != 0 && unjam::mix64(++c->drawn) % 100 < no_room) return kOk;
  const auto used = static_cast<std::int64_t>(
      std::count_if(c->requests, c->requests + kRequests, [](const Request& r) { return r.used; }));
  if (used == kRequests) return misuse("more requests than a connection has");
  if (used + 1 > faults().most) faults().most = used + 1;
  Request& r =
      *std::find_if(c->requests, c->requests + kRequests, [](const Request& x) { return !x.used; });
  r = {};
  r.of = c;
  r.used = true;
  r.sends = sends;
  r.data = static_cast<unsigned char*>(data);
  r.room = bytes;
  r.delay = faults().delay;
  if (sends) {
    r.bytes = bytes;
    std::memcpy(r.length, &bytes, sizeof(r.length));
  }
  c->queue.push_back(&r);
  *request = &r;
  // (What fails here is told by test().)
  progress(*c);
  return kOk;
}

Result test_request(void* request, int* done, int* bytes) {
  if (fails(NetFaults::kTest)) return faults().result;
  auto* const r = static_cast<Request*>(request);
  *done = 0;
  if (r == nullptr || !r->used) return misuse("a request that was done");
  if (!r->done) {
    const Result result = progress(*r->of);
    if (result != kOk) return result;
  }
  if (!r->done) return kOk;
  if (r->delay != 0) {
    --r->delay;
    return kOk;
  }
  *done = 1;
  if (bytes != nullptr) *bytes = static_cast<int>(r->bytes);
  r->used = false;
  return kOk;
}

Result close_connection(void* comm, bool sends) {
  auto* const c = static_cast<Connection*>(comm);
  if (c == nullptr || c->sends != sends || c->memories != 0) misuse("close");
  ::close(c->fd);
  delete c;
  --faults().open;
  return faults().stays_open != 0 ? kSystemError : kOk;
}

Result close_listener(void* listener) {
  ::close(static_cast<Listener*>(listener)->fd);
  delete static_cast<Listener*>(listener);
  --faults().open;
  return kOk;
}

Result no_flush(void*, int, void**, int*, void**, void** request) {
  *request = nullptr;
  return kInternalError;
}

// ---- what differs ----

#define UNJAM_JOIN_(a, b) a##b
#define UNJAM_JOIN(a, b) UNJAM_JOIN_(a, b)

using Table = abi::UNJAM_JOIN(TableV, UNJAM_NET_ABI);

Result properties(int device, Table::Properties* p) {
  if (fails(NetFaults::kProperties)) return faults().result;
  if (device != 0) return misuse("getProperties");
  static char name[] = "loopback";
  *p = {};
  p->name = name;
  p->memory = faults().no_host_memory != 0 ? 2 : abi::kHostMemory;
  p->speed = 10000;
  p->port = 1;
  p->most_comms = 1024;
  p->most_receives = 1;
#if UNJAM_NET_ABI >= 9
  p->fused.count = 1;
  p->most_bytes = p->most_collective_bytes = std::size_t{1} << 30;
#endif
#if UNJAM_NET_ABI >= 11
  p->most_requests_in_one = 1;
#endif
#if UNJAM_NET_ABI >= 12
  p->rail = p->plane = -1;
#endif
  return kOk;
}

#if UNJAM_NET_ABI <= 9
Result init(Log log) { return begin(log); }
#elif UNJAM_NET_ABI == 10
Result init(Log log, Profile profile) { return profile == nullptr ? misuse("init") : begin(log); }
#else
int the_context;
Result init(void** context, std::uint64_t, abi::CommConfig* config, Log log, Profile profile) {
  if (context == nullptr || config == nullptr || profile == nullptr) return misuse("init");
  *context = &the_context;
  return begin(log);
}
Result finalize(void* context) { return context == &the_context ? kOk : misuse("finalize"); }
#endif

#if UNJAM_NET_ABI <= 10
Result listen(int device, void* handle, void** listener) {
  return open_listener(device, handle, listener);
}
#else
Result listen(void* context, int device, void* handle, void** listener) {
  if (context != &the_context) return misuse("listen");
  return open_listener(device, handle, listener);
}
#endif

#if UNJAM_NET_ABI == 6
Result connect(int device, void* handle, void** comm) {
  return open_connection(device, handle, comm);
}
Result accept(void* listener, void** comm) { return take_connection(listener, comm); }
#else
Result accept(void* listener, void** comm, abi::DeviceHandle**) {
  return take_connection(listener, comm);
}
#if UNJAM_NET_ABI <= 9
Result connect(int device, void* handle, void** comm, abi::DeviceHandle**) {
  return open_connection(device, handle, comm);
}
#elif UNJAM_NET_ABI == 10
Result connect(int device, abi::CommConfig* config, void* handle, void** comm,
               abi::DeviceHandle**) {
  return config == nullptr ? misuse("connect") : open_connection(device, handle, comm);
}
#else
Result connect(void* context, int device, void* handle, void** comm, abi::DeviceHandle**) {
  return context != &the_context ? misuse("connect") : open_connection(device, handle, comm);
}
#endif
#endif

#if UNJAM_NET_ABI <= 7
using Registered = int;
#else
using Registered = std::size_t;
#endif
Result reg_mr(void* comm, void* data, Registered bytes, int type, void** memory) {
  return register_memory(comm, data, static_cast<std::uint64_t>(bytes), type, memory);
}

#if UNJAM_NET_ABI <= 8
using Bytes = int;
#else
using Bytes = std::size_t;
#endif
#if UNJAM_NET_ABI <= 9
Result isend(void* comm, void* data, Bytes bytes, int, void* memory, void** request) {
  return begin_request(comm, data, static_cast<std::uint64_t>(bytes), memory, request, true);
}
Result irecv(void* comm, int count, void** data, Bytes* bytes, int*, void** memories,
             void** request) {
  if (count != 1) return misuse("irecv");
#else
Result isend(void* comm, void* data, Bytes bytes, int, void* memory, void*, void** request) {
  return begin_request(comm, data, bytes, memory, request, true);
}
Result irecv(void* comm, int count, void** data, Bytes* bytes, int*, void** memories, void**,
             void** request) {
  if (count != 1) return misuse("irecv");
#endif
  return begin_request(comm, data[0], static_cast<std::uint64_t>(bytes[0]), memories[0], request,
                       false);
}

Table table() {
  Table t = {};
  t.name = "unjam-test";
  t.init = init;
  t.devices = devices;
  t.properties = properties;
  t.listen = listen;
  t.connect = connect;
  t.accept = accept;
  t.reg_mr = reg_mr;
  t.dereg_mr = forget_memory;
  t.isend = isend;
  t.irecv = irecv;
#if defined(UNJAM_NET_INCOMPLETE)
  t.irecv = nullptr;
#endif
  t.iflush = no_flush;
  t.test = test_request;
  t.close_send = [](void* comm) { return close_connection(comm, true); };
  t.close_recv = [](void* comm) { return close_connection(comm, false); };
  t.close_listen = close_listener;
#if UNJAM_NET_ABI >= 11
  t.finalize = finalize;
#endif
  return t;
}

}  // namespace

#define UNJAM_SYMBOL UNJAM_JOIN(ncclNetPlugin_v, UNJAM_NET_ABI)
UNJAM_EXPORTED Table UNJAM_SYMBOL;
Table UNJAM_SYMBOL = table();
