// How the ranks of a job on several hosts meet, as one process sees it: an agent for each of its
// ranks (agent.h) finds the others over TCP, and the table of agents says who is where. Then
// processes of different hosts are connected, each pair (pair_meeting.h). When all have said that
// they have what they need, agents part, and nothing listens any more.
//
// A process is told from others by the address of its door, a host by a number that all processes
// there have alike. So the table needs nothing but what agents carry anyway.
//
// One thread runs it; what others may call says so.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "control/agent.h"
#include "control/pair_meeting.h"
#include "control/poller.h"
#include "control/proof.h"

namespace unjam {

// Who is where, the same at all ranks: processes and hosts are numbered in the order of their first
// ranks.
struct HostPlaces {
  struct Process {
    std::uint32_t host = 0;
    SocketAddress door;
    std::string name;  // of its host
  };
  std::vector<Process> processes;
  std::vector<std::uint32_t> process_of;  // by rank
  std::vector<std::string> hosts;         // names
  std::uint32_t host_of(std::uint32_t rank) const { return processes[process_of[rank]].host; }
};

// What an agent says of its process: "NAME at ADDRESS". The name is cut to what has room.
std::string place_text(const std::string& name, const SocketAddress& door);
// False: it is no such text.
bool read_place(std::string_view text, std::string& name, SocketAddress& door);
// False: `error` says what is wrong with the table.
bool places_of(const AgentTable& table, HostPlaces& places, std::string& error);

struct HostsConfig {
  JobSecret secret = {};
  std::string root;  // "address:port"
  std::uint32_t ranks = 0;
  std::int64_t start_ms = 60'000;
  std::string name;        // of this host
  std::uint64_t host = 0;  // the same for all processes of a host, and for no others
};

class HostsMeeting {
 public:
  explicit HostsMeeting(HostsConfig config);
  ~HostsMeeting();
  HostsMeeting(const HostsMeeting&) = delete;
  HostsMeeting& operator=(const HostsMeeting&) = delete;

  // Looks up the root, which may take its time, and opens the door. Before all else. False: `error`
  // says why. `settings`: what all ranks must have alike, "NAME=1, NAME=2".
  bool open(const std::string& settings, std::string& error);
  // Any thread: a rank of this process has come. (Rank 0 is the root.)
  void join(std::uint32_t rank);
  // Any thread: run_once() returns.
  void wake();

  void run_once(std::int64_t timeout_ms);
  // Why there will be no job; "": nothing is known against it.
  const std::string& failure() const { return failure_; }
  // This process gives up: those that are there are told.
  void fail(const std::string& why);

  // All ranks have joined.
  bool known() const { return known_; }
  const HostPlaces& places() const { return places_; }
  std::uint32_t self() const { return self_; }  // this process

  // Behind known(): meets the processes of other hosts.
  void meet(std::function<GreetingMessage(std::uint32_t)> greeting);
  bool met() const { return pairs_.done(); }
  // Who has not been met, and why; for a report.
  std::string missing() const;
  std::map<std::uint32_t, PairMeeting::Met> take() { return pairs_.take(); }
  // This process has all that it needs of the others.
  void finish();
  // So have all.
  bool finished() const { return rounds_behind_ >= kRoundsBehind; }
  // Nothing listens any more, and nobody is told anything.
  void close();

 private:
  // Turns of the poller in which an agent's last words leave.
  static constexpr int kRoundsBehind = 3;

  void add_agent(std::uint32_t rank);
  void started(const Agent& agent);

  const HostsConfig config_;
  std::string settings_;
  SocketAddress root_;
  Poller poller_;
  PairMeeting pairs_;
  std::vector<std::unique_ptr<Agent>> agents_;
  std::string failure_;
  HostPlaces places_;
  std::uint32_t self_ = 0;
  std::size_t started_ = 0, finished_ = 0;
  bool known_ = false, finishing_ = false;
  bool parted_ = false;  // somebody went while all were about to
  int rounds_behind_ = 0;
};

}  // namespace unjam
