#include "control/mesh.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <algorithm>
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

constexpr std::uint64_t ns_of_ms(std::int64_t ms) {
  return static_cast<std::uint64_t>(ms) * 1'000'000;
}

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
  p.line = Line(Channel(std::move(socket), kLongestFrame));
  p.pidfd = std::move(pidfd);
}

void Mesh::add_remote(int process, TaggedChannel channel, const Beats& beats) {
  std::lock_guard lock(mutex_);
  Peer& p = peers_[process];
  p.process = process;
  p.line = Line(std::move(channel));
  p.unread = true;
  beats_ = beats;
  p.heard_ns = p.sent_ns = last_beat_ns_ = monotonic_ns();
}

void Mesh::post(Peer& peer, MessageType type, std::string_view payload, std::vector<Fd> fds) {
  if (peer.lost || peer.deaf || payload.size() > kLongestFrame) return;
  // Judged here, not when poll() comes to it: until then any amount could be asked for.
  if (peer.line.pending_bytes() != 0 &&
      peer.line.pending_bytes() + payload.size() > kMostUnsentToPeer) {
    peer.deaf = true;
    return;
  }
  peer.line.post(static_cast<std::uint16_t>(type), payload, std::move(fds));
  if (peer.line.is_remote()) peer.sent_ns = monotonic_ns();
  // At once: this may be the last that the process says before it ends. poll() sees what goes
  // wrong.
  std::string unused;
  peer.line.flush(unused);
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
    const std::int64_t until = until_next_beat();
    if (until >= 0) timeout_ms = timeout_ms < 0 ? until : std::min(timeout_ms, until);
    for (auto& [process, p] : peers_) {
      if (p.lost) continue;
      if (p.unread) timeout_ms = 0;
      const short out = p.line.pending() ? POLLOUT : 0;
      polled.push_back({p.line.fd(), static_cast<short>(POLLIN | out), 0});
      polled.push_back({p.pidfd.get(), POLLIN, 0});  // -1: ignored by poll
      who.push_back(&p);
    }
  }
  if (::poll(polled.data(), polled.size(), static_cast<int>(timeout_ms)) < 0) return;
  if (polled[0].revents != 0) clear_wake();
  for (std::size_t i = 0; i < who.size(); ++i) {
    const bool readable = (polled[1 + 2 * i].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
    handle(*who[i], readable || who[i]->unread, polled[2 + 2 * i].revents != 0, events);
    who[i]->unread = false;
  }
  beat(events);
}

// In milliseconds; < 0: there is no other host. With the lock.
std::int64_t Mesh::until_next_beat() const {
  if (last_beat_ns_ == 0) return -1;
  const std::uint64_t next = last_beat_ns_ + ns_of_ms(beats_.beat_ms) / 2, now = monotonic_ns();
  return next <= now ? 0 : static_cast<std::int64_t>((next - now) / 1000000) + 1;
}

void Mesh::beat(const Events& events) {
  std::vector<Peer*> silent;
  {
    std::lock_guard lock(mutex_);
    if (until_next_beat() != 0) return;
    const std::uint64_t now = monotonic_ns(), gap = now - last_beat_ns_;
    // Longer than it should be: this process did not run, and has not listened.
    const std::uint64_t missed = gap > ns_of_ms(2 * beats_.beat_ms) ? gap : 0;
    last_beat_ns_ = now;
    for (auto& [process, p] : peers_) {
      if (p.lost || !p.line.is_remote()) continue;
      // (Not beyond now: what was heard in this very round would excuse a silence to come.)
      p.heard_ns = std::min(now, p.heard_ns + missed);
      if (p.heard_ns < now && now - p.heard_ns >= ns_of_ms(beats_.silence_ms)) silent.push_back(&p);
      if (now - p.sent_ns >= ns_of_ms(beats_.beat_ms) * 3 / 4) post(p, MessageType::kBeat, "");
    }
  }
  for (Peer* const p : silent) {
    lose(*p, false,
         "nothing was heard of it for " + std::to_string(beats_.silence_ms) +
             " ms (UNJAM_PEER_TIMEOUT_MS)",
         events);
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
        live = peer.line.receive(error);
        while (peer.line.pop(frame)) frames.push_back(std::move(frame));
        if (live && peer.line.broken()) live = peer.line.receive(error);
      } while (all && live && peer.line.more() && ++reads < kMostLastReads);
    };
    // Of the dead, all that they said is heard first.
    if (readable || died) hear(died);
    if (!frames.empty()) peer.heard_ns = monotonic_ns();
    if (live && !died && !peer.line.flush(error)) {
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
  for (Frame& f : frames) {
    if (f.type != static_cast<std::uint16_t>(MessageType::kBeat)) events.message(peer.process, f);
  }
  if (live && !died) return;
  lose(peer, died, died ? "its process ended" : error, events);
}

void Mesh::lose(Peer& peer, bool died, const std::string& why, const Events& events) {
  {
    std::lock_guard lock(mutex_);
    peer.lost = true;
    peer.line.close();
  }
  events.lost(peer.process, died, why);
}

void Mesh::hang_up(int process) {
  std::lock_guard lock(mutex_);
  const auto found = peers_.find(process);
  if (found == peers_.end()) return;
  found->second.lost = true;
  found->second.line.close();
}

void Mesh::drain(std::int64_t timeout_ms) {
  const std::uint64_t deadline = monotonic_ns() + static_cast<std::uint64_t>(timeout_ms) * 1000000;
  std::lock_guard lock(mutex_);
  // All at once: one that takes nothing must not cost the others their share.
  for (;;) {
    std::vector<pollfd> waiting;
    for (auto& [process, p] : peers_) {
      std::string error;
      if (p.lost || !p.line.pending()) continue;
      p.lost = !p.line.flush(error);
      if (!p.lost && p.line.pending()) waiting.push_back({p.line.fd(), POLLOUT, 0});
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
