// How the processes of several hosts are connected with each other, each pair by a tagged channel
// over TCP (tagged_channel.h), once all know who is where: the one with the lower number calls the
// other's door. Both ends prove that they know the job's secret, then each says one greeting.
// Afterwards the doors are gone.
//
// A Poller drives it, in whose thread everything happens.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "control/door.h"
#include "control/messages.h"
#include "control/poller.h"
#include "control/proof.h"
#include "control/tagged_channel.h"

namespace unjam {

class PairMeeting final : private Watcher {
 public:
  struct Met {
    TaggedChannel channel;
    GreetingMessage greeting;  // the other's
  };

  PairMeeting(Poller& poller, const JobSecret& secret);
  ~PairMeeting() override;
  PairMeeting(const PairMeeting&) = delete;
  PairMeeting& operator=(const PairMeeting&) = delete;

  // Opens the door; port 0: any. False: `error` says why.
  bool open(const SocketAddress& at, std::string& error);
  const SocketAddress& address() const { return door_.address(); }

  // Meets the processes that have these addresses. `greeting`: for each of them, by its number.
  void meet(std::uint32_t self, const std::map<std::uint32_t, SocketAddress>& others,
            std::function<GreetingMessage(std::uint32_t)> greeting);
  // After meet(): all are met.
  bool done() const { return begun_ && waits_for_.empty(); }
  // Who is yet to be met, and what the last try to call him has said.
  const std::map<std::uint32_t, std::string>& missing() const { return waits_for_; }
  // What was met. Closes the door.
  std::map<std::uint32_t, Met> take();

 private:
  struct Link {
    TaggedChannel channel;
    std::uint32_t process = 0;  // that was called
    bool called = false;        // by this one
    bool connecting = false;
    bool greeted = false;  // has been sent our greeting
    std::uint64_t since_ns = 0;
  };

  void on_ready(std::uint64_t token, bool readable, bool writable) override;
  void on_time() override;
  void on_round_end() override {}

  void accept_some();
  void call(std::uint32_t process);
  void add(Fd socket, bool called, bool connecting, std::uint32_t process);
  void drop(std::uint64_t token, const std::string& why);
  void greet(Link& link, std::uint32_t process);
  bool take_greeting(std::uint64_t token, Link& link, const Frame& frame);
  void settle(std::uint64_t token, Link& link);
  void schedule();

  Poller& poller_;
  const JobSecret secret_;
  Door door_;
  std::uint64_t door_token_ = 0;
  bool door_rests_ = false;  // no descriptors, or too many strangers
  std::map<std::uint64_t, Link> links_;
  std::uint32_t self_ = 0;
  std::map<std::uint32_t, SocketAddress> others_;
  std::function<GreetingMessage(std::uint32_t)> greeting_;
  bool begun_ = false;
  std::map<std::uint32_t, std::string> waits_for_;
  std::map<std::uint32_t, Met> met_;
};

}  // namespace unjam
