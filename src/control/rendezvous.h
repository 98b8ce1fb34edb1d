// How the processes of a job find each other: over a Unix socket in the abstract namespace, whose
// name is derived from the job's secret. Whoever comes first serves; the socket is in no file
// system, so nothing is left behind after any kind of death.
//
// Who may join: processes of the same user (the kernel says who is at the other end), that prove by
// a keyed hash over both ends' nonces that they know the secret; the server proves it likewise, so
// nobody can lure ranks into a job of his own. The secret itself is never sent.
//
//   server: Hello{nonce}        client: Proof{nonce, tag}      server: Proof{tag}
//   client: Join{rank, …} + arena, for each of its ranks, at any time
//   client: Failed{why}, if it gives up: the others learn the reason, not only that it left
//   server: Refused{rank, why}; Failed{why}
//   client: Who{}, if it waits for others in vain; server: Present{who}
//   server, when all are there: Start{who is where} + a socket; by that, in bulk: Memory +
//   descriptors, of the ranks of other processes; Peers + {connected socket, pidfd} each, of the
//   other processes.
// Then the listening socket is gone: there is no door left at which a stranger could knock.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "control/channel.h"
#include "control/messages.h"
#include "control/proof.h"

namespace unjam {

// The socket's address.
socklen_t rendezvous_address(const JobSecret& secret, sockaddr_un& address);

class RendezvousServer {
 public:
  // Serves on a listening socket, in a thread of its own, until all ranks have joined or the first
  // failure. Throws where the system denies it a thread or a descriptor.
  RendezvousServer(Fd listener, const JobSecret& secret);
  ~RendezvousServer();
  RendezvousServer(const RendezvousServer&) = delete;
  RendezvousServer& operator=(const RendezvousServer&) = delete;

 private:
  struct Connection {
    Channel channel;
    bool proven = false;
    bool closing = false;  // was refused: gone as soon as that is sent
    std::uint64_t deadline_ns = 0;
    std::uint64_t nonce[2] = {};
    std::int64_t pid = 0;
    std::uint64_t files = 0;  // JoinMessage::files
    Fd handed;                // by which it gets its descriptors at the start
    std::vector<std::uint32_t> ranks;
  };
  struct Joined {
    Connection* connection = nullptr;
    std::vector<Fd> memory;
    std::string host;
  };

  void serve();
  void accept_one();
  void make_room(bool proven, std::size_t most);
  void take(Connection& c, Frame& frame);
  void prove(Connection& c, const Frame& frame);
  void join(Connection& c, Frame& frame);
  void tell_who(Connection& c);
  void refuse(Connection& c, std::int32_t rank, std::int32_t code, const std::string& text);
  void fail_all(const std::string& text, const Connection* but);
  void drop(std::size_t index);
  bool has_files_for_newcomer(int newest) const;
  void doom(const std::string& text);
  void start();
  bool enough_files(const std::vector<Connection*>& processes);
  bool hand(Connection& c, MessageType type, const std::vector<std::uint32_t>& of,
            const std::vector<std::vector<int>>& fds);
  void hand_memory(const std::vector<Connection*>& processes, std::size_t to);
  bool hand_peers(const std::vector<Connection*>& processes, const std::vector<std::size_t>& some,
                  const std::vector<std::size_t>& others, const std::vector<Fd>& pidfds);

  Fd listener_;
  const JobSecret secret_;
  Fd stop_;
  std::vector<std::unique_ptr<Connection>> connections_;
  std::map<std::uint32_t, Joined> joined_;
  std::uint32_t ranks_ = 0;  // of the job; 0: nobody has joined
  std::uint32_t here_ = 0;   // of these, so many meet here
  std::uint32_t first_rank_ = 0;
  std::uint64_t arena_bytes_ = 0;
  std::string settings_, first_host_;
  CpuSet cpus_;  // of all that have joined
  bool over_ = false;
  // Why the job cannot come to be, told to newcomers as well until that time.
  std::string doom_;
  std::uint64_t doomed_until_ns_ = 0, doomed_at_last_ns_ = 0;
  std::thread thread_;
};

// A process's side, until the job has started.
class RendezvousClient {
 public:
  struct Peer {
    Fd socket;
    Fd pidfd;
  };

  // Connects to the server, or becomes it. False: `error` says why.
  bool connect(const JobSecret& secret, std::int64_t timeout_ms, std::string& error);
  // `memory`: of the rank: its arena on the host, and, if there is one, that on its device.
  void join(const JoinMessage& message, std::vector<Fd> memory);
  // Takes in what has arrived. False: the connection is lost.
  bool receive(std::string& error);
  // Sends what can be sent. That the server has gone is for receive() to tell, after the server's
  // last words.
  void flush();
  bool pending() const { return channel_.pending(); }
  bool keeps_rendezvous() const { return server_ != nullptr; }
  int fd() const { return handed_ ? handed_.get() : channel_.fd(); }
  // Asks who has joined by now; receive() takes the answer.
  void ask_who();
  // Tells the others why this process gives up; before leave().
  void fail(const std::string& why);
  // Leaves: the server, if it is here, ends as well.
  void leave();

  // What is known by now.
  std::optional<PresentMessage> present;  // the answer to the latest ask_who()
  std::string failed;
  std::map<int, RefusedMessage> refused;  // by rank
  bool started = false;                   // all of the following is there
  StartMessage start;
  std::map<int, std::vector<Fd>> memory;  // of ranks of other processes
  std::map<int, Peer> peers;              // by process

 private:
  enum class Attempt { kDone, kAgain, kFailed };
  Attempt find(const JobSecret& secret, Fd& socket, std::string& error);
  Attempt greet(const JobSecret& secret, Fd socket, std::string& error);

  bool take(Frame& frame, std::string& error);
  bool take_handed_over(Frame& frame);
  bool complete() const;

  std::unique_ptr<RendezvousServer> server_;
  Channel channel_;
  Fd handed_;  // from kStart on, until it is complete
  bool start_known_ = false;
};

}  // namespace unjam
