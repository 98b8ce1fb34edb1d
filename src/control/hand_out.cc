#include "control/hand_out.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"
#include "control/fd_message.h"

namespace unjam {
namespace {

constexpr std::size_t kLongestHanded = 4096;

}  // namespace

bool hand_out_pair(Fd& mine, Fd& theirs) {
  int pair[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) != 0) {
    return false;
  }
  mine = Fd(pair[0]);
  theirs = Fd(pair[1]);
  return true;
}

bool hand_out(const Fd& socket, MessageType type, std::string_view payload,
              const std::vector<int>& fds, std::int64_t timeout_ms, std::string& error) {
  if (fds.size() > kMostHandedFds || payload.size() > kLongestHanded) {
    throw std::logic_error("too much for one message");
  }
  std::uint16_t number = static_cast<std::uint16_t>(type);
  iovec parts[2] = {{&number, sizeof(number)}, {const_cast<char*>(payload.data()), payload.size()}};
  FdSpace<kMostHandedFds> space;
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  attach_fds(fds, space, message);
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  while (sendmsg(socket.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    const int why = errno;
    if (why == EINTR) continue;
    // Too many descriptors under way (ETOOMANYREFS): the receivers are about to take them.
    const bool crowded = why == ETOOMANYREFS || why == ENOBUFS;
    if (!crowded && why != EAGAIN && why != EWOULDBLOCK) {
      error = std::strerror(why) + limit_text(why);
      return false;
    }
    const std::uint64_t now = monotonic_ns();
    if (now >= deadline) {
      error = "not taken within " + std::to_string(timeout_ms) + " ms";
      return false;
    }
    pollfd p{socket.get(), POLLOUT, 0};
    if (crowded) {
      usleep(1000);  // writable, yet refused
    } else {
      poll(&p, 1, static_cast<int>((deadline - now) / 1000000 + 1));
    }
  }
  return true;
}

Handed take_handed(const Fd& socket, Frame& frame, std::string& error) {
  char buffer[kLongestHanded + sizeof(std::uint16_t)];
  iovec part{buffer, sizeof(buffer)};
  FdSpace<kMostHandedFds> space;
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = space.bytes;
  message.msg_controllen = sizeof(space.bytes);
  ssize_t n = 0;
  do {
    n = recvmsg(socket.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (n < 0 && errno == EINTR);
  if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Handed::kNothing;
  frame.fds.clear();
  if (n < 0) {
    error = std::strerror(errno);
    return Handed::kOver;
  }
  take_fds(message, [&](Fd fd) { frame.fds.push_back(std::move(fd)); });
  if (n == 0) {
    error = "closed by the other end";
    return Handed::kOver;
  }
  if ((message.msg_flags & MSG_CTRUNC) != 0) {
    error = "descriptors were lost: " + std::string(std::strerror(EMFILE)) + limit_text(EMFILE);
    return Handed::kOver;
  }
  std::uint16_t number = 0;
  if ((message.msg_flags & MSG_TRUNC) != 0 || static_cast<std::size_t>(n) < sizeof(number)) {
    error = "a message that is none of ours";
    return Handed::kOver;
  }
  std::memcpy(&number, buffer, sizeof(number));
  frame.type = number;
  frame.payload.assign(buffer + sizeof(number), static_cast<std::size_t>(n) - sizeof(number));
  return Handed::kFrame;
}

}  // namespace unjam
