// Where something listens: an IPv4 or IPv6 address and a port.
#pragma once

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

namespace unjam {

struct SocketAddress {
  std::array<unsigned char, 16> host = {};  // IPv4 as ::ffff:a.b.c.d; all zero: none, or any
  std::uint16_t port = 0;

  bool any() const { return host == std::array<unsigned char, 16>{}; }
  bool unspecified() const;  // any(), or 0.0.0.0
  bool loopback() const;
  bool v4() const;
  std::string text() const;  // 1.2.3.4:5 or [::1]:5
  socklen_t to(sockaddr_storage& storage) const;
  static SocketAddress from(const sockaddr_storage& storage);
  bool operator==(const SocketAddress&) const = default;
};

// "host:port", "[v6]:port"; the host may be a name, which is looked up and may take its time.
// False: `error` says why.
bool resolve_address(std::string_view text, SocketAddress& address, std::string& error);

// The ends of a connected socket.
SocketAddress local_address(int socket);
SocketAddress peer_address(int socket);

}  // namespace unjam
