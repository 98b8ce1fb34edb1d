// The connections between the processes of a running job: one each, over which they say what is in
// messages.h. Whoever dies is noticed at once: by its pidfd, which also sees through children that
// were forked and hold copies of its sockets, and by its socket.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "control/channel.h"
#include "control/messages.h"

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

  Mesh();
  void add(int process, Fd socket, Fd pidfd);

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
  // Before the end: what was sent leaves, or that time passes. Not beside poll().
  void drain(std::int64_t timeout_ms);

  std::vector<int> live() const;
  // Of a process that was lost: whether it is gone, or is so within that time. The sockets of the
  // dying close before they count as dead.
  bool ended(int process, int timeout_ms) const;

 private:
  struct Peer {
    int process = 0;
    Channel channel;
    Fd pidfd;
    bool lost = false;
    bool deaf = false;  // more was to be sent than it takes: about to be lost
  };
  // With the lock.
  void post(Peer& peer, MessageType type, std::string_view payload, std::vector<Fd> fds = {});
  void handle(Peer& peer, bool readable, bool died, const Events& events);

  mutable std::mutex mutex_;  // peers_' channels' outgoing side, and `lost`
  std::map<int, Peer> peers_;
  Fd wake_;
};

}  // namespace unjam
