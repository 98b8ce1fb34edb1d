// File descriptors that a message over a Unix socket carries along.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstring>
#include <vector>

#include "base/fd.h"

namespace unjam {

// Memory for as many: of a message that is sent, in zeroes, which the message must not outlive.
template <std::size_t kMost>
struct FdSpace {
  alignas(cmsghdr) char bytes[CMSG_SPACE(kMost * sizeof(int))] = {};
};

template <std::size_t kMost>
void attach_fds(const std::vector<int>& fds, FdSpace<kMost>& space, msghdr& message) {
  if (fds.empty()) return;
  message.msg_control = space.bytes;
  message.msg_controllen = CMSG_SPACE(fds.size() * sizeof(int));
  cmsghdr* const c = CMSG_FIRSTHDR(&message);
  c->cmsg_level = SOL_SOCKET;
  c->cmsg_type = SCM_RIGHTS;
  c->cmsg_len = CMSG_LEN(fds.size() * sizeof(int));
  std::memcpy(CMSG_DATA(c), fds.data(), fds.size() * sizeof(int));
}

// Of a message that was received: calls take(Fd) with each.
template <class Take>
void take_fds(msghdr& message, Take take) {
  for (cmsghdr* c = CMSG_FIRSTHDR(&message); c != nullptr; c = CMSG_NXTHDR(&message, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (std::size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(int));
      take(Fd(fd));
    }
  }
}

}  // namespace unjam
