// The connections between the processes of a running job: one each, over which they say what is in
// messages.h. Whoever dies is noticed at once: by its pidfd, which also sees through children that
// were forked and hold copies of its sockets, and by its socket.
//
// A process on another host has a tagged connection over TCP, and no pidfd. There silence tells,
// too: each end sends a beat when it has said nothing else for a while. Time in which this process
// itself did not run does not count. Frames to it carry no descriptors.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "control/channel.h"
#include "control/messages.h"
#include "control/tagged_channel.h"

namespace unjam {

class Mesh {
 public:
  // Called by poll(), in its thread, without a lock of the mesh.
  struct Events {
    std::function<void(int process, Frame& frame)> message;
    // Once a process; no message from it comes later. died: the process is gone, not only its end
    // of the connection.
    std::function<void(int process, bool died, const std::string& why)> lost;
  };

  // On connections to other hosts.
  struct Beats {
    std::int64_t beat_ms = 1'000;
    std::int64_t silence_ms = 10'000;  // until a process counts as lost
  };

  Mesh();
  void add(int process, Fd socket, Fd pidfd);
  // On another host; its end is proven. What it has said already is heard with the next poll().
  void add_remote(int process, TaggedChannel channel, const Beats& beats);

  // Any thread; never blocks. To a process that is lost: nothing happens. What is longer than a
  // frame may be is not sent: it would end the connection. At most kMaxFrameFds descriptors.
  void send(int process, MessageType type, std::string_view payload, std::vector<Fd> fds = {});
  void send_all(MessageType type, std::string_view payload);
  // Makes poll() return.
  void wake();
  // For who polls elsewhere meanwhile.
  int wake_fd() const { return wake_.get(); }
  void clear_wake();

  // Waits for events for at most that time (< 0: no limit), and handles them. One thread.
  void poll(std::int64_t timeout_ms, const Events& events);
  // Closes the connection: nothing more is heard of the process, and lost() is not called. The
  // thread of poll().
  void hang_up(int process);
  // Before the end: what was sent leaves, or that time passes. Not beside poll().
  void drain(std::int64_t timeout_ms);

  std::vector<int> live() const;
  // Of a process that was lost: whether it is gone, or is so within that time. The sockets of the
  // dying close before they count as dead.
  bool ended(int process, int timeout_ms) const;

 private:
  // A connection, of either kind.
  class Line {
   public:
    Line() = default;
    explicit Line(Channel here) : here_(std::move(here)) {}
    explicit Line(TaggedChannel remote) : remote_(new TaggedChannel(std::move(remote))) {}

    bool is_remote() const { return remote_ != nullptr; }
    int fd() const { return is_remote() ? remote_->fd() : here_.fd(); }
    void close() { is_remote() ? remote_->close() : here_.close(); }
    bool receive(std::string& error) {
      return is_remote() ? remote_->receive(error) : here_.receive(error);
    }
    bool more() const { return is_remote() ? remote_->more() : here_.more(); }
    bool pop(Frame& frame) { return is_remote() ? remote_->pop(frame) : here_.pop(frame); }
    bool broken() const { return is_remote() ? remote_->broken() : here_.broken(); }
    void post(std::uint16_t type, std::string_view payload, std::vector<Fd> fds) {
      is_remote() ? remote_->post(type, payload) : here_.post(type, payload, std::move(fds));
    }
    bool flush(std::string& error) {
      return is_remote() ? remote_->flush(error) : here_.flush(error);
    }
    bool pending() const { return is_remote() ? remote_->pending() : here_.pending(); }
    std::size_t pending_bytes() const {
      return is_remote() ? remote_->pending_bytes() : here_.pending_bytes();
    }

   private:
    Channel here_;
    std::unique_ptr<TaggedChannel> remote_;
  };
  struct Peer {
    int process = 0;
    Line line;
    Fd pidfd;
    bool lost = false;
    bool deaf = false;    // more was to be sent than it takes: about to be lost
    bool unread = false;  // of another host, just added: it may have spoken already
    std::uint64_t heard_ns = 0, sent_ns = 0;
  };
  // With the lock.
  void post(Peer& peer, MessageType type, std::string_view payload, std::vector<Fd> fds = {});
  void handle(Peer& peer, bool readable, bool died, const Events& events);
  void lose(Peer& peer, bool died, const std::string& why, const Events& events);
  std::int64_t until_next_beat() const;
  void beat(const Events& events);

  mutable std::mutex mutex_;  // peers_' lines' outgoing side, and `lost`
  std::map<int, Peer> peers_;
  Fd wake_;
  Beats beats_;
  std::uint64_t last_beat_ns_ = 0;  // when beat() looked last; 0: there is no other host
};

}  // namespace unjam
