// A connection between two processes of one machine: frames, with file descriptors, over a Unix
// stream socket. Never blocks: what cannot be sent now is queued.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"

namespace unjam {

inline constexpr std::size_t kMaxFrameFds = 2;

struct Frame {
  std::uint16_t type = 0;
  std::string payload;
  std::vector<Fd> fds;
};

class Channel {
 public:
  Channel() = default;
  // Takes a connected socket. Frames with larger payloads than `longest` break the channel.
  Channel(Fd socket, std::size_t longest);

  int fd() const { return socket_.get(); }
  bool open() const { return static_cast<bool>(socket_); }
  void close() { socket_.reset(); }
  void set_longest(std::size_t longest) { longest_ = longest; }

  // Reads what has arrived, a bounded amount at a time: frames must be popped in between, and what
  // is left keeps the socket readable. False: closed by the other end, or broken (`error` says
  // which); frames that were complete before can still be popped.
  bool receive(std::string& error);
  // Whether the last receive() stopped at its bound.
  bool more() const { return more_; }
  bool pop(Frame& frame);
  // What arrived was not ours; receive() will say so.
  bool broken() const { return broken_; }

  // Queues a frame, of at most kMaxFrameFds descriptors, which it takes over until they are sent.
  void post(std::uint16_t type, std::string_view payload, std::vector<Fd> fds = {});
  // Sends what can be sent now. False: the channel is broken.
  bool flush(std::string& error);
  bool pending() const { return !out_.empty(); }
  std::size_t pending_bytes() const { return out_bytes_; }

  // Sends all, or fails after that time.
  bool flush_all(std::int64_t timeout_ms, std::string& error);
  // The next frame, or false after that time, or if the channel breaks.
  bool await(Frame& frame, std::int64_t timeout_ms, std::string& error);

 private:
  struct Outgoing {
    std::string bytes;
    std::size_t sent = 0;
    std::vector<Fd> fds;
  };
  void fault(const char* what);

  Fd socket_;
  std::size_t longest_ = 0;
  std::string in_;  // bytes not yet popped, behind those that were
  std::size_t popped_ = 0;
  bool more_ = false;
  std::deque<Fd> in_fds_;  // descriptors not yet popped
  bool broken_ = false;
  std::string fault_;
  std::deque<Outgoing> out_;
  std::size_t out_bytes_ = 0;
};

}  // namespace unjam
