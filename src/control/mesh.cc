#include "control/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.h"

namespace unjam {
namespace {

// A process that takes nothing for so long that this much piles up is as good as dead.
constexpr std::size_t kMostUnsent = 64 << 20;

}  // namespace

Mesh::Mesh() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno));
}

void Mesh::add(int process, Fd socket, Fd pidfd) {
  std::lock_guard lock(mutex_);
  Peer& p = peers_[process];
  p.process = process;
  p.channel = Channel(std::move(socket), kLongestFrame);
  p.pidfd = std::move(pidfd);
}

void Mesh::send(int process, MessageType type, std::string_view payload) {
  {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(process);
    if (found == peers_.end() || found->second.lost) return;
    found->second.channel.post(static_cast<std::uint16_t>(type), payload);
  }
  wake();
}

void Mesh::send_all(MessageType type, std::string_view payload) {
  {
    std::lock_guard lock(mutex_);
    for (auto& [process, p] : peers_) {
      if (!p.lost) p.channel.post(static_cast<std::uint16_t>(type), payload);
    }
  }
  wake();
}

void Mesh::wake() {
  const std::uint64_t one = 1;
  // Fails only if it is readable already.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof(one));
}

void Mesh::poll(std::int64_t timeout_ms, const Events& events) {
  std::vector<pollfd> polled = {{wake_.get(), POLLIN, 0}};
  std::vector<Peer*> who;
  {
    std::lock_guard lock(mutex_);
    for (auto& [process, p] : peers_) {
      if (p.lost) continue;
      const short out = p.channel.pending() ? POLLOUT : 0;
      polled.push_back({p.channel.fd(), static_cast<short>(POLLIN | out), 0});
      polled.push_back({p.pidfd.get(), POLLIN, 0});  // -1: ignored by poll
      who.push_back(&p);
    }
  }
  if (::poll(polled.data(), polled.size(), static_cast<int>(timeout_ms)) < 0) return;
  std::uint64_t value = 0;
  if (polled[0].revents != 0 && read(wake_.get(), &value, sizeof(value)) < 0) value = 0;
  for (std::size_t i = 0; i < who.size(); ++i) {
    const bool readable = (polled[1 + 2 * i].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
    handle(*who[i], readable, polled[2 + 2 * i].revents != 0, events);
  }
}

void Mesh::handle(Peer& peer, bool readable, bool died, const Events& events) {
  std::string error;
  bool live = true;
  std::vector<Frame> frames;
  {
    std::lock_guard lock(mutex_);
    // Of the dead, all that they said is heard first.
    if (readable || died) {
      live = peer.channel.receive(error);
      Frame frame;
      while (peer.channel.pop(frame)) frames.push_back(std::move(frame));
      if (live && peer.channel.broken()) live = peer.channel.receive(error);
    }
    if (live && !died) live = peer.channel.flush(error);
    if (live && peer.channel.pending_bytes() > kMostUnsent) {
      live = false;
      error = "it takes no messages any more";
    }
  }
  for (const Frame& f : frames) events.message(peer.process, f);
  if (live && !died) return;
  {
    std::lock_guard lock(mutex_);
    peer.lost = true;
    peer.channel.close();
  }
  events.lost(peer.process, died, died ? "its process ended" : error);
}

void Mesh::drain(std::int64_t timeout_ms) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  std::lock_guard lock(mutex_);
  for (auto& [process, p] : peers_) {
    const std::uint64_t now = monotonic_ns();
    std::string error;
    if (!p.lost && p.channel.pending() && now < deadline) {
      p.channel.flush_all(static_cast<std::int64_t>((deadline - now) / 1000000 + 1), error);
    }
  }
}

std::vector<int> Mesh::live() const {
  std::lock_guard lock(mutex_);
  std::vector<int> processes;
  for (const auto& [process, p] : peers_) {
    if (!p.lost) processes.push_back(process);
  }
  return processes;
}

}  // namespace unjam
