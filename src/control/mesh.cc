#include "control/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/clock.h"
#include "base/limits.h"

namespace unjam {
namespace {

// A process that takes nothing for so long that this much piles up is as good as dead.
constexpr std::size_t kMostUnsentToPeer = 64 << 20;
// The last words of the dead fit into a socket's buffer; a child that still holds the socket could
// go on forever.
constexpr int kMostLastReads = 256;

}  // namespace

Mesh::Mesh() : wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!wake_) {
    throw std::runtime_error(std::string("eventfd: ") + std::strerror(errno) + limit_text(errno));
  }
}

void Mesh::add(int process, Fd socket, Fd pidfd) {
  std::lock_guard lock(mutex_);
  Peer& p = peers_[process];
  p.process = process;
  p.channel = Channel(std::move(socket), kLongestFrame);
  p.pidfd = std::move(pidfd);
}

void Mesh::post(Peer& peer, MessageType type, std::string_view payload, std::vector<Fd> fds) {
  if (peer.lost || peer.deaf || payload.size() > kLongestFrame) return;
  // Judged here, not when poll() comes to it: until then any amount could be asked for.
  if (peer.channel.pending_bytes() != 0 &&
      peer.channel.pending_bytes() + payload.size() > kMostUnsentToPeer) {
    peer.deaf = true;
    return;
  }
  peer.channel.post(static_cast<std::uint16_t>(type), payload, std::move(fds));
  // At once: this may be the last that the process says before it ends. poll() sees what goes
  // wrong.
  std::string unused;
  peer.channel.flush(unused);
}

void Mesh::send(int process, MessageType type, std::string_view payload, std::vector<Fd> fds) {
  {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(process);
    if (found == peers_.end()) return;
    post(found->second, type, payload, std::move(fds));
  }
  wake();
}

void Mesh::send_all(MessageType type, std::string_view payload) {
  {
    std::lock_guard lock(mutex_);
    for (auto& [process, p] : peers_) post(p, type, payload);
  }
  wake();
}

void Mesh::wake() {
  const std::uint64_t one = 1;
  // Fails only if it is readable already.
  [[maybe_unused]] const ssize_t n = write(wake_.get(), &one, sizeof(one));
}

void Mesh::clear_wake() {
  std::uint64_t value = 0;
  // Fails only if nobody has woken it.
  [[maybe_unused]] const ssize_t n = read(wake_.get(), &value, sizeof(value));
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
  if (polled[0].revents != 0) clear_wake();
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
    const auto hear = [&](bool all) {
      Frame frame;
      int reads = 0;
      do {
        live = peer.channel.receive(error);
        while (peer.channel.pop(frame)) frames.push_back(std::move(frame));
        if (live && peer.channel.broken()) live = peer.channel.receive(error);
      } while (all && live && peer.channel.more() && ++reads < kMostLastReads);
    };
    // Of the dead, all that they said is heard first.
    if (readable || died) hear(died);
    if (live && !died && !peer.channel.flush(error)) {
      // It has closed its end just now. What it said before, that it leaves in good order, say, may
      // have come after the look for what is readable.
      std::string unused;
      std::swap(error, unused);
      hear(true);
      error = std::move(unused);
      live = false;
    }
    if (live && peer.deaf) {
      live = false;
      error = "it takes no messages any more";
    }
  }
  for (Frame& f : frames) events.message(peer.process, f);
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
  // All at once: one that takes nothing must not cost the others their share.
  for (;;) {
    std::vector<pollfd> waiting;
    for (auto& [process, p] : peers_) {
      std::string error;
      if (p.lost || !p.channel.pending()) continue;
      p.lost = !p.channel.flush(error);
      if (!p.lost && p.channel.pending()) waiting.push_back({p.channel.fd(), POLLOUT, 0});
    }
    const std::uint64_t now = monotonic_ns();
    if (waiting.empty() || now >= deadline) return;
    ::poll(waiting.data(), waiting.size(), static_cast<int>((deadline - now) / 1000000 + 1));
  }
}

bool Mesh::ended(int process, int timeout_ms) const {
  pollfd polled{-1, POLLIN, 0};
  {
    std::lock_guard lock(mutex_);
    const auto found = peers_.find(process);
    if (found == peers_.end() || !found->second.pidfd) return false;
    polled.fd = found->second.pidfd.get();  // stays open as long as the mesh
  }
  return ::poll(&polled, 1, timeout_ms) > 0;
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
