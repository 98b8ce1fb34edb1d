// What agents say to each other (agent.h), encoded as wire.h says. decode() is false for anything
// that is not exactly one message. Before these, each connection begins with Hello and Proof
// (tagged_channel.h).
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "control/agent_tree.h"
#include "control/socket_address.h"

namespace unjam {

inline constexpr std::uint32_t kAgentProtocolVersion = 1;
inline constexpr std::uint32_t kMostAgents = 65536;
inline constexpr std::uint32_t kMostAgentRanks = 65536;
inline constexpr std::size_t kLongestAgentHost = 64;
inline constexpr std::size_t kLongestAgentSettings = 4096;
inline constexpr std::size_t kLongestAgentReason = 4096;
inline constexpr std::size_t kLongestAgentPayload = 1 << 16;  // of a question or an answer
// The longest is the table of the largest job.
inline constexpr std::size_t kLongestAgentFrame = 8 << 20;

// Numbers of their own, apart from MessageType's.
enum class AgentMessageType : std::uint16_t {
  kEnter = 128,  // caller to the root: where is my place?
  kSeat,         // the root's answer
  kAttach,       // to the parent: I am your child
  kAttached,     // the answer to a child that comes after the start, from a parent that is gone
  kJoins,        // upwards, before the start
  kFailed,       // both ways, before the start: the job will not come to be
  kTable,        // downwards: all are there
  kGone,         // to all: ranks, or a whole host, are gone
  kBeat,
  kQuestion,
  kAnswer,
  kDone,      // upwards: this whole subtree needs the others no more
  kFarewell,  // downwards: nobody does
  kTurnedAway,
};

// Ascending numbers, kept as ranges where they are many.
using NumberList = std::vector<std::uint32_t>;

struct EnterMessage {
  std::uint64_t id = 0;  // of the agent; it asks again if the answer is lost
  SocketAddress door;    // the host may be none: the one from which it speaks
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct SeatMessage {
  std::uint32_t agent = 0;
  SocketAddress parent;  // no host: that of the root, as the agent knows it
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct AttachMessage {
  std::uint32_t agent = 0;
  // Before the start: what all must agree on, and who says so.
  std::uint32_t job_ranks = 0, first_rank = 0;
  std::string settings, host;
  // After it: whom the agent has lost, and what it knows of those that are gone.
  bool again = false;
  NumberList gone_agents, gone_ranks;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct AttachedMessage {
  NumberList gone_agents, gone_ranks;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// A rank and what its owner wants all to know of it. 12 bytes.
struct RankCard {
  std::uint32_t rank = 0;
  std::uint64_t card = 0;
  bool operator==(const RankCard&) const = default;
};

struct AgentJoin {
  std::uint32_t agent = 0;
  std::string host;
  std::vector<RankCard> ranks;
};
struct JoinsMessage {
  std::vector<AgentJoin> joins;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct AgentFailedMessage {
  std::string text;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// Who is where. Agents without a rank came and went before the start.
class AgentTable {
 public:
  AgentTable() = default;
  // `joins` by agent, `doors` of the first agents: of all that have children, and of the root's.
  AgentTable(std::uint32_t ranks, const std::vector<AgentJoin>& joins,
             std::vector<SocketAddress> doors);

  std::uint32_t agents() const { return static_cast<std::uint32_t>(host_end_.size()); }
  std::uint32_t ranks() const { return static_cast<std::uint32_t>(agent_of_.size()); }
  std::uint32_t agent_of(std::uint32_t rank) const { return agent_of_[rank]; }
  std::uint64_t card(std::uint32_t rank) const { return cards_[rank]; }
  std::string_view host(std::uint32_t agent) const;
  // Ascending.
  NumberList ranks_of(std::uint32_t agent) const;
  bool has_ranks(std::uint32_t agent) const;
  // How many agents have one.
  std::uint32_t doors() const { return static_cast<std::uint32_t>(doors_.size()); }
  const SocketAddress& door(std::uint32_t agent) const { return doors_[agent]; }

  std::string encode() const;
  bool decode(std::string_view bytes);

 private:
  void index();

  std::vector<std::uint32_t> agent_of_;  // by rank
  std::vector<std::uint64_t> cards_;
  std::string hosts_;  // one behind the other
  std::vector<std::uint32_t> host_end_;
  std::vector<std::uint32_t> first_rank_;  // by agent: where its ranks begin in by_agent_
  std::vector<std::uint32_t> by_agent_;
  std::vector<SocketAddress> doors_;
};
// How many doors a table of so many agents has.
constexpr std::uint32_t agent_doors(std::uint32_t agents) {
  const std::uint32_t interior = interior_agents(agents), first = kAgentFanOut + 1;
  const std::uint32_t some = interior < first ? first : interior;
  return agents < some ? agents : some;
}

struct AgentGoneMessage {
  std::uint32_t agent = kNoAgent;  // the whole host: all its ranks
  NumberList ranks;                // else these
  std::string why;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct AgentQuestionMessage {
  std::uint32_t from = 0;
  std::uint64_t number = 0;  // of those of the asker
  NumberList to;             // agents that this message has yet to reach
  std::string payload;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

struct AgentAnswerMessage {
  std::uint32_t from = 0, to = 0;
  std::uint64_t number = 0;  // of the question
  std::string payload;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// To who wants to attach after the start.
struct TurnedAwayMessage {
  bool gone = false;  // for good: the agent counts as gone. Else: not now.
  std::string text;
  std::string encode() const;
  bool decode(std::string_view bytes);
};

// "rank 3", "ranks 0-3, 7": at most `most` ranges, then how many more ranks.
std::string ranks_in_words(const NumberList& ranks, std::size_t most = 16);

}  // namespace unjam
