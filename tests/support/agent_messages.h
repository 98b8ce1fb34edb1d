// What tests and fuzzers of agents share: an example of every message, and decoding by type.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "control/agent_messages.h"
#include "tests/support/control.h"

namespace unjam_test {

using unjam::AgentMessageType;

// Those that have a payload.
inline constexpr AgentMessageType kAllAgentMessageTypes[] = {
    AgentMessageType::kEnter,    AgentMessageType::kSeat,       AgentMessageType::kAttach,
    AgentMessageType::kAttached, AgentMessageType::kJoins,      AgentMessageType::kFailed,
    AgentMessageType::kTable,    AgentMessageType::kGone,       AgentMessageType::kQuestion,
    AgentMessageType::kAnswer,   AgentMessageType::kTurnedAway,
};

inline std::uint16_t number_of(AgentMessageType t) { return static_cast<std::uint16_t>(t); }

// Whether the bytes are a message of that type; `again`: it, encoded again.
inline bool decode_any(AgentMessageType type, std::string_view bytes, std::string& again) {
  switch (type) {
    case AgentMessageType::kEnter:
      return decode_as<unjam::EnterMessage>(bytes, again);
    case AgentMessageType::kSeat:
      return decode_as<unjam::SeatMessage>(bytes, again);
    case AgentMessageType::kAttach:
      return decode_as<unjam::AttachMessage>(bytes, again);
    case AgentMessageType::kAttached:
      return decode_as<unjam::AttachedMessage>(bytes, again);
    case AgentMessageType::kJoins:
      return decode_as<unjam::JoinsMessage>(bytes, again);
    case AgentMessageType::kFailed:
      return decode_as<unjam::AgentFailedMessage>(bytes, again);
    case AgentMessageType::kTable:
      return decode_as<unjam::AgentTable>(bytes, again);
    case AgentMessageType::kGone:
      return decode_as<unjam::AgentGoneMessage>(bytes, again);
    case AgentMessageType::kQuestion:
      return decode_as<unjam::AgentQuestionMessage>(bytes, again);
    case AgentMessageType::kAnswer:
      return decode_as<unjam::AgentAnswerMessage>(bytes, again);
    case AgentMessageType::kTurnedAway:
      return decode_as<unjam::TurnedAwayMessage>(bytes, again);
    case AgentMessageType::kBeat:
    case AgentMessageType::kDone:
    case AgentMessageType::kFarewell:
      break;
  }
  return false;
}

struct SampleAgentMessage {
  AgentMessageType type;
  std::string bytes;
};

// Each type with its lists empty, if they may be, and filled.
inline std::vector<SampleAgentMessage> sample_agent_messages() {
  using namespace unjam;
  std::vector<SampleAgentMessage> all;
  const auto add = [&](AgentMessageType type, const auto& m) { all.push_back({type, m.encode()}); };
  SocketAddress door;
  door.port = 4711;
  EnterMessage enter;
  enter.id = 77, enter.door = door;
  add(AgentMessageType::kEnter, enter);
  door.host[15] = 1;
  SeatMessage seat;
  seat.agent = 33, seat.parent = door;
  add(AgentMessageType::kSeat, seat);
  AttachMessage attach;
  attach.agent = 33, attach.job_ranks = 8, attach.first_rank = 7;
  add(AgentMessageType::kAttach, attach);
  attach.settings = "UNJAM_LANES=2", attach.host = "node7", attach.again = true;
  attach.gone_agents = {1, 2, 3, 9}, attach.gone_ranks = {0, 65535};
  add(AgentMessageType::kAttach, attach);
  AttachedMessage attached;
  add(AgentMessageType::kAttached, attached);
  attached.gone_agents = {1}, attached.gone_ranks = {4, 5, 6};
  add(AgentMessageType::kAttached, attached);
  JoinsMessage joins;
  add(AgentMessageType::kJoins, joins);
  joins.joins = {{33, "node7", {{7, 1}, {2, ~0ull}}}, {34, "", {{3, 0}}}};
  add(AgentMessageType::kJoins, joins);
  AgentFailedMessage failed;
  failed.text = "rank 3 left";
  add(AgentMessageType::kFailed, failed);
  const std::vector<AgentJoin> by_agent = {
      {0, "node-a", {{0, 10}, {2, 12}}}, {1, "", {}}, {2, "node-b", {{1, 11}}}};
  add(AgentMessageType::kTable, AgentTable(3, by_agent, std::vector<SocketAddress>(3, door)));
  AgentGoneMessage gone;
  gone.agent = 5, gone.why = "host node5 (rank 5) is gone";
  add(AgentMessageType::kGone, gone);
  gone.agent = kNoAgent, gone.ranks = {1, 2, 3, 7};
  add(AgentMessageType::kGone, gone);
  AgentQuestionMessage question;
  question.from = 1, question.number = 9, question.to = {0, 2, 3, 70}, question.payload = "?";
  add(AgentMessageType::kQuestion, question);
  AgentAnswerMessage answer;
  answer.from = 1, answer.to = 2, answer.number = 9, answer.payload = "!";
  add(AgentMessageType::kAnswer, answer);
  TurnedAwayMessage away;
  away.gone = true, away.text = "not you";
  add(AgentMessageType::kTurnedAway, away);
  return all;
}

}  // namespace unjam_test
