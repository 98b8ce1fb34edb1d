// What a courier wants of a carrier: reliable frames between this process and its peers.
//
// A carrier need not keep frames in order, neither within a channel nor among several: whatever has
// to be ordered, couriers order themselves. It never waits. Each frame comes once, whole and
// unchanged, or the connection is broken. It need not notice a silent peer.
//
// One thread at a time calls it: whoever drives the courier. That holds for close() and arm(), and
// for what carriers have of their own, invite(), meet() and met(), as well. Who is not the driver
// and wants to sleep calls Courier::arm().
//
// How two processes meet is each carrier's own matter: each has an address for its peer, a few
// bytes that somebody else brings there. Until then there is no room for any frame.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/network/frame.h"

namespace unjam {

// Frames of short payloads are not to stand behind long ones.
enum class FrameChannel : std::uint8_t { kShort, kBulk };
inline constexpr std::uint32_t kChannels = 2;

// Memory in which payloads lie and land. Carriers may have to tell a network of it beforehand.
struct FabricMemory {
  unsigned char* begin = nullptr;
  std::size_t bytes = 0;
};

// Where a frame's payload goes.
struct Landing {
  bool refused = false;         // the connection is over: the sink has seen to that
  std::uint64_t cookie = 0;     // for arrived()
  unsigned char* at = nullptr;  // nullptr: nowhere, the bytes are not wanted
  std::uint32_t bytes = 0;      // of the payload; a carrier that knows another length is broken
};

// Called by Fabric::poll().
class FabricSink {
 public:
  virtual ~FabricSink() = default;

  // The head of a frame has come. Whoever is not refused calls arrived() when the payload is there,
  // if it ever is; other frames may begin and end meanwhile.
  virtual Landing land(std::uint32_t peer, const FrameBytes& head) = 0;
  virtual void arrived(std::uint32_t peer, const FrameBytes& head, std::uint64_t cookie) = 0;
  // The payload that was sent with this cookie is not read any more.
  virtual void sent(std::uint32_t peer, std::uint64_t cookie) = 0;
  // The connection is over, and nothing more comes from there. The text stays as long as the
  // fabric.
  virtual void broken(std::uint32_t peer, const char* why) = 0;
};

class Fabric {
 public:
  virtual ~Fabric() = default;

  // Copies the head. Reads the payload until sent(cookie), of which there is one for each frame
  // with a payload, from a later poll(). False: no room now, nothing has changed. What is wrong
  // with a connection is told by poll().
  virtual bool send(std::uint32_t peer, FrameChannel channel, const FrameBytes& head,
                    const unsigned char* payload, std::uint32_t bytes, std::uint64_t cookie) = 0;
  // Moves what can be moved now. Whether it has moved anything.
  virtual bool poll(FabricSink& sink) = 0;
  // By force: the sink hears of this connection no more. A network may still be at the memory of
  // its payloads: that may be reused or freed when drained() says so, which may take calls of
  // poll().
  virtual void close(std::uint32_t peer) = 0;
  // After close(): no payload of this connection is read or written any more.
  virtual bool drained(std::uint32_t) const { return true; }

  // What becomes readable when poll() may have something to move; -1: nothing does, so who sleeps
  // sleeps for a while only.
  virtual int descriptor() const { return -1; }
  // To be called before one sleeps, by Courier::arm(). False: poll() has something to move now.
  virtual bool arm() { return true; }
};

}  // namespace unjam
