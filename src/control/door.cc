#include "control/door.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace unjam {
namespace {

Fd tcp_socket(bool v4) {
  Fd s(socket(v4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int one = 1;
  if (s) setsockopt(s.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  return s;
}

Fd bound(SocketAddress at) {
  Fd s = tcp_socket(at.v4());
  if (!s && at.any() && errno == EAFNOSUPPORT) {  // no IPv6 here: any IPv4 address
    at.host[10] = at.host[11] = 0xff;
    s = tcp_socket(true);
  }
  if (!s) return s;
  const int one = 1;
  setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
  sockaddr_storage storage;
  const socklen_t size = at.to(storage);
  if (bind(s.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) return Fd();
  return s;
}

constexpr int kBacklog = 4096;

}  // namespace

bool Door::open(const SocketAddress& at, std::string& error) {
  // A port that the kernel has chosen is lost when a listening socket is shut, one that was asked
  // for is kept. So the kernel's choice is asked for in turn; somebody else may be faster.
  for (int attempt = 0; attempt < 16; ++attempt) {
    SocketAddress wanted = at;
    if (at.port == 0) {
      const Fd first = bound(at);
      if (first) wanted.port = local_address(first.get()).port;
    }
    socket_ = wanted.port != 0 ? bound(wanted) : Fd();
    if (socket_ && listen(socket_.get(), kBacklog) == 0) {
      address_ = local_address(socket_.get());
      open_ = true;
      return true;
    }
    if (at.port != 0 || errno != EADDRINUSE) break;
  }
  error = "cannot listen at " + at.text() + ": " + std::strerror(errno);
  socket_.reset();
  return false;
}

void Door::shut() {
  if (open_) shutdown(socket_.get(), SHUT_RDWR);
  open_ = false;
}

bool Door::reopen(std::string& error) {
  if (open_) return true;
  if (!socket_ || listen(socket_.get(), kBacklog) != 0) {
    error = "cannot listen again at " + address_.text() + ": " +
            (socket_ ? std::strerror(errno) : "the port was given back");
    return false;
  }
  return open_ = true;
}

void Door::release() {
  open_ = false;
  socket_.reset();
}

Fd Door::accept(bool& crowded) {
  crowded = false;
  if (!open_) return Fd();
  Fd s(accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  const int one = 1;
  if (s) {
    setsockopt(s.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
  } else {
    crowded = errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM;
  }
  return s;
}

Fd begin_connect(const SocketAddress& to, std::string& error) {
  Fd s = tcp_socket(to.v4());
  sockaddr_storage storage;
  const socklen_t size = to.to(storage);
  if (s && (connect(s.get(), reinterpret_cast<sockaddr*>(&storage), size) == 0 ||
            errno == EINPROGRESS)) {
    return s;
  }
  error = std::strerror(errno);
  return Fd();
}

bool end_connect(int socket, std::string& error) {
  int fault = 0;
  socklen_t size = sizeof(fault);
  if (getsockopt(socket, SOL_SOCKET, SO_ERROR, &fault, &size) != 0) fault = errno;
  if (fault != 0) {
    error = std::strerror(fault);
    return false;
  }
  // A port of the range from which the kernel takes those of callers may call itself.
  if (local_address(socket) == peer_address(socket)) {
    error = "nobody listens there";
    return false;
  }
  return true;
}

}  // namespace unjam
