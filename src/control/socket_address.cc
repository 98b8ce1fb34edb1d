#include "control/socket_address.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>

#include <charconv>
#include <cstring>

namespace unjam {
namespace {

constexpr unsigned char kV4Prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

}  // namespace

bool SocketAddress::v4() const { return std::memcmp(host.data(), kV4Prefix, 12) == 0; }

bool SocketAddress::unspecified() const {
  return any() || (v4() && (host[12] | host[13] | host[14] | host[15]) == 0);
}

bool SocketAddress::loopback() const {
  if (v4()) return host[12] == 127;
  std::array<unsigned char, 16> one = {};
  one[15] = 1;
  return host == one;
}

std::string SocketAddress::text() const {
  char buffer[INET6_ADDRSTRLEN] = {};
  if (v4()) {
    inet_ntop(AF_INET, host.data() + 12, buffer, sizeof(buffer));
    return std::string(buffer) + ":" + std::to_string(port);
  }
  inet_ntop(AF_INET6, host.data(), buffer, sizeof(buffer));
  return "[" + std::string(buffer) + "]:" + std::to_string(port);
}

socklen_t SocketAddress::to(sockaddr_storage& storage) const {
  storage = {};
  if (v4()) {
    auto& a = reinterpret_cast<sockaddr_in&>(storage);
    a.sin_family = AF_INET;
    a.sin_port = htons(port);
    std::memcpy(&a.sin_addr, host.data() + 12, 4);
    return sizeof(a);
  }
  auto& a = reinterpret_cast<sockaddr_in6&>(storage);
  a.sin6_family = AF_INET6;
  a.sin6_port = htons(port);
  std::memcpy(&a.sin6_addr, host.data(), 16);
  return sizeof(a);
}

SocketAddress SocketAddress::from(const sockaddr_storage& storage) {
  SocketAddress result;
  if (storage.ss_family == AF_INET) {
    const auto& a = reinterpret_cast<const sockaddr_in&>(storage);
    std::memcpy(result.host.data(), kV4Prefix, 12);
    std::memcpy(result.host.data() + 12, &a.sin_addr, 4);
    result.port = ntohs(a.sin_port);
  } else if (storage.ss_family == AF_INET6) {
    const auto& a = reinterpret_cast<const sockaddr_in6&>(storage);
    std::memcpy(result.host.data(), &a.sin6_addr, 16);
    result.port = ntohs(a.sin6_port);
  }
  return result;
}

bool resolve_address(std::string_view text, SocketAddress& address, std::string& error) {
  const auto colon = text.rfind(':');
  unsigned port = 0;
  bool good = colon != std::string_view::npos && colon + 1 < text.size();
  if (good) {
    const char* end = text.data() + text.size();
    const auto [rest, fault] = std::from_chars(text.data() + colon + 1, end, port);
    good = fault == std::errc() && rest == end && port <= 65535;
  }
  std::string host(text.substr(0, good ? colon : 0));
  if (good && host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  } else if (host.find(':') != std::string::npos) {
    good = false;  // which colon is the port's, nobody can tell
  }
  if (!good || host.empty()) {
    error = "\"" + std::string(text) + "\" is no address: write HOST:PORT, or [V6]:PORT";
    return false;
  }
  addrinfo hints{}, *found = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  const int result = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (result != 0 || found == nullptr) {
    error = "cannot find the host " + host + ": " + gai_strerror(result);
    return false;
  }
  sockaddr_storage storage{};
  std::memcpy(&storage, found->ai_addr, found->ai_addrlen);
  freeaddrinfo(found);
  address = SocketAddress::from(storage);
  address.port = static_cast<std::uint16_t>(port);
  return true;
}

SocketAddress local_address(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return {};
  return SocketAddress::from(storage);
}

SocketAddress peer_address(int socket) {
  sockaddr_storage storage{};
  socklen_t size = sizeof(storage);
  if (getpeername(socket, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return {};
  return SocketAddress::from(storage);
}

}  // namespace unjam
