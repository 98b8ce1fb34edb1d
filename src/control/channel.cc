#include "control/channel.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "control/fd_message.h"

namespace unjam {
namespace {

struct FrameHeader {
  std::uint32_t bytes;  // of the payload
  std::uint16_t type;
  std::uint8_t fds;
  std::uint8_t zero;
};
static_assert(sizeof(FrameHeader) == 8);

constexpr std::size_t kReadBytes = 65536;
// What one receive() reads at most: whoever sends without end must not keep the others waiting, nor
// fill the memory with frames.
constexpr std::size_t kMostAtOnce = 1 << 20;

bool wait_for(int fd, short events, std::uint64_t deadline_ns) {
  const std::uint64_t now = monotonic_ns();
  if (now >= deadline_ns) return false;
  pollfd p{fd, events, 0};
  poll(&p, 1, static_cast<int>((deadline_ns - now) / 1000000 + 1));
  return true;
}

}  // namespace

Channel::Channel(Fd socket, std::size_t longest) : socket_(std::move(socket)), longest_(longest) {}

void Channel::fault(const char* what) {
  broken_ = true;
  fault_ = what;
}

bool Channel::receive(std::string& error) {
  more_ = false;
  std::size_t read = 0;
  while (!broken_ && socket_) {
    char buffer[kReadBytes];
    iovec part{buffer, sizeof(buffer)};
    FdSpace<64> space;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    message.msg_control = space.bytes;
    message.msg_controllen = sizeof(space.bytes);
    const ssize_t n = recvmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (n < 0) {
      if (errno == EINTR) continue;
      if (errno == EAGAIN || errno == EWOULDBLOCK) return true;
      fault(std::strerror(errno));
      break;
    }
    const std::size_t held = in_fds_.size();
    take_fds(message, [this](Fd fd) { in_fds_.push_back(std::move(fd)); });
    if (n == 0) {
      fault("closed by the other end");
      break;
    }
    // One message's worth arrived; so many belong to no frame of ours.
    if (in_fds_.size() - held > kMaxFrameFds || held > kMaxFrameFds ||
        (message.msg_flags & MSG_CTRUNC) != 0) {
      fault("too many file descriptors");
      break;
    }
    in_.append(buffer, static_cast<std::size_t>(n));
    read += static_cast<std::size_t>(n);
    // Frames with descriptors are popped one by one: any number of them may be under way (a rank is
    // sent the arenas of all others), and those that pile up here must be told from a stranger's.
    if (in_fds_.size() > held || read >= kMostAtOnce ||
        in_.size() - popped_ >= longest_ + kReadBytes) {
      more_ = true;
      return true;
    }
  }
  error = fault_;
  return false;
}

bool Channel::pop(Frame& frame) {
  FrameHeader h{};
  const std::size_t here = in_.size() - popped_;
  bool whole = here >= sizeof(h);
  if (whole) {
    std::memcpy(&h, in_.data() + popped_, sizeof(h));
    if (h.bytes > longest_ || h.zero != 0 || h.fds > kMaxFrameFds) {
      fault("a frame that is none of ours");
      in_.clear();
      popped_ = 0;
      return false;
    }
    whole = here - sizeof(h) >= h.bytes;
  }
  if (!whole) {
    // What was popped goes at the end only: else many small frames would be moved again and again.
    in_.erase(0, popped_);
    popped_ = 0;
    if (in_.empty() && in_.capacity() > kReadBytes) in_.shrink_to_fit();  // of something long
    if (in_.empty() && !in_fds_.empty()) fault("file descriptors without a frame");
    return false;
  }
  // They arrive with the frame's first byte.
  if (in_fds_.size() < h.fds) {
    fault("a frame without its file descriptors");
    in_.clear();
    popped_ = 0;
    return false;
  }
  frame.type = h.type;
  frame.payload.assign(in_, popped_ + sizeof(h), h.bytes);
  frame.fds.clear();
  for (std::uint8_t i = 0; i < h.fds; ++i) {
    frame.fds.push_back(std::move(in_fds_.front()));
    in_fds_.pop_front();
  }
  popped_ += sizeof(h) + h.bytes;
  return true;
}

void Channel::post(std::uint16_t type, std::string_view payload, std::vector<Fd> fds) {
  if (fds.size() > kMaxFrameFds) throw std::logic_error("a frame with too many descriptors");
  FrameHeader h{static_cast<std::uint32_t>(payload.size()), type,
                static_cast<std::uint8_t>(fds.size()), 0};
  Outgoing o;
  o.bytes.resize(sizeof(h) + payload.size());
  std::memcpy(o.bytes.data(), &h, sizeof(h));
  std::memcpy(o.bytes.data() + sizeof(h), payload.data(), payload.size());
  o.fds = std::move(fds);
  out_bytes_ += o.bytes.size();
  out_.push_back(std::move(o));
}

bool Channel::flush(std::string& error) {
  while (!out_.empty()) {
    Outgoing& o = out_.front();
    iovec part{o.bytes.data() + o.sent, o.bytes.size() - o.sent};
    FdSpace<kMaxFrameFds> space;
    msghdr message{};
    message.msg_iov = &part;
    message.msg_iovlen = 1;
    std::vector<int> fds;
    for (const Fd& fd : o.fds) fds.push_back(fd.get());
    attach_fds(fds, space, message);
    const ssize_t n = socket_ ? sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : (errno = EPIPE, -1);
    if (n < 0) {
      if (errno == EINTR) continue;
      // Too many descriptors under way (ETOOMANYREFS): the receivers are about to take them.
      if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS || errno == ENOBUFS) {
        return true;
      }
      error = std::strerror(errno);
      return false;
    }
    o.fds.clear();  // went with the first byte
    o.sent += static_cast<std::size_t>(n);
    out_bytes_ -= static_cast<std::size_t>(n);
    if (o.sent == o.bytes.size()) out_.pop_front();
  }
  return true;
}

bool Channel::flush_all(std::int64_t timeout_ms, std::string& error) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  for (;;) {
    if (!flush(error)) return false;
    if (out_.empty()) return true;
    if (!wait_for(fd(), POLLOUT, deadline)) break;
    if (errno == ETOOMANYREFS) usleep(1000);  // writable, yet refused
  }
  error = "not taken within " + std::to_string(timeout_ms) + " ms";
  return false;
}

bool Channel::await(Frame& frame, std::int64_t timeout_ms, std::string& error) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  for (;;) {
    if (pop(frame)) return true;
    bool live = receive(error);
    if (pop(frame)) return true;
    if (live && broken_) live = receive(error);
    if (!live) return false;
    if (!wait_for(fd(), POLLIN, deadline)) break;
  }
  error = "no answer within " + std::to_string(timeout_ms) + " ms";
  return false;
}

}  // namespace unjam
