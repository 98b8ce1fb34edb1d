// What an agent makes of the messages that arrive.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "control/agent.h"
#include "control/agent_limits.h"

namespace unjam {

bool Agent::take(Link& link, const Frame& frame, std::string& error) {
  const bool from_child = link.purpose == Purpose::kChild;
  const bool from_parent = link.purpose == Purpose::kParent;
  const bool meeting = state_ == State::kJoined;
  const bool running = state_ == State::kRunning && link.attached;
  switch (static_cast<AgentMessageType>(frame.type)) {
    case AgentMessageType::kEnter:
      if (link.purpose == Purpose::kStranger) return take_enter(link, frame, error);
      break;
    case AgentMessageType::kSeat:
      if (link.purpose == Purpose::kSeat) return take_seat(link, frame, error);
      break;
    case AgentMessageType::kAttach:
      if (link.purpose == Purpose::kStranger) return take_attach(link, frame, error);
      break;
    case AgentMessageType::kAttached:
      if (from_parent && !link.attached && take_attached(link, frame)) return true;
      break;
    case AgentMessageType::kJoins:
      if (from_child && (meeting || state_ == State::kAttaching)) {
        return take_joins(link, frame, error);
      }
      if (from_child && state_ == State::kFailed) return true;
      break;
    case AgentMessageType::kFailed:
      if (take_failed(link, frame)) return true;
      break;
    case AgentMessageType::kTable:
      if (from_parent && meeting) return take_table(link, frame, error);
      break;
    case AgentMessageType::kGone:
      if (running) return take_gone(link, frame, error);
      break;
    case AgentMessageType::kBeat:
      if (running && frame.payload.empty()) return true;
      break;
    case AgentMessageType::kQuestion:
      if (running) return take_question(link, frame, error);
      break;
    case AgentMessageType::kAnswer:
      if (running) return take_answer(link, frame, error);
      break;
    case AgentMessageType::kDone:
      if (from_child && running && frame.payload.empty()) {
        link.done = true;
        check_done();
        return true;
      }
      break;
    case AgentMessageType::kFarewell:
      if (from_parent && running && frame.payload.empty()) {
        farewell();
        return true;
      }
      break;
    case AgentMessageType::kTurnedAway:
      if (from_parent && !link.attached && take_turned_away(link, frame)) return true;
      break;
  }
  error = "a message of type " + std::to_string(frame.type) + " that has no place here";
  return false;
}

bool Agent::take_attached(Link& link, const Frame& frame) {
  AttachedMessage m;
  if (!m.decode(frame.payload) || !fits(m.gone_agents, m.gone_ranks)) return false;
  link.attached = true;
  lost_parent_ = kNoAgent;
  rejoin_deadline_ns_ = 0;
  retry_wait_ns_ = 0;
  tell_missed(link, m);
  merge(m.gone_agents, m.gone_ranks, &link);
  check_done();
  return true;
}

bool Agent::take_failed(const Link& link, const Frame& frame) {
  AgentFailedMessage m;
  if (!m.decode(frame.payload)) return false;
  const bool from_parent = link.purpose == Purpose::kParent;
  if (link.purpose == Purpose::kChild) {
    fail_all(m.text);
  } else if (link.purpose == Purpose::kSeat || (from_parent && state_ != State::kRunning)) {
    fail(m.text);
  }
  return true;
}

bool Agent::take_turned_away(Link& link, const Frame& frame) {
  TurnedAwayMessage m;
  if (!m.decode(frame.payload)) return false;
  if (m.gone && state_ == State::kRunning) {
    cut_off(m.text);
  } else {
    lose(link, m.text);
  }
  return true;
}

bool Agent::take_enter(Link& link, const Frame& frame, std::string& error) {
  EnterMessage m;
  if (!m.decode(frame.payload) || !config_.root) {
    error = config_.root ? "a malformed message" : "only the root gives seats";
    return false;
  }
  if (state_ != State::kJoined) {
    AgentFailedMessage f;
    f.text = state_ == State::kFailed ? failure_ : "the job has started already, without this host";
    post(link, AgentMessageType::kFailed, f.encode());
    close_soon(link);
    return true;
  }
  const auto known = seats_.find(m.id);
  std::uint32_t agent = static_cast<std::uint32_t>(doors_.size());
  if (known != seats_.end()) {
    agent = known->second;
  } else {
    if (agent >= kMostAgents) {
      error = "more hosts than " + std::to_string(kMostAgents);
      return false;
    }
    // Where others reach it: as it says, else from where it calls. Who shares the root's machine is
    // reached as the root is, whose address all know by some way that leads there.
    SocketAddress door = m.door;
    if (door.any()) door.host = peer_address(link.channel.fd()).host;
    if (door.loopback() || door.host == local_address(link.channel.fd()).host) door.host = {};
    seats_[m.id] = agent;
    doors_.push_back(door);
  }
  SeatMessage seat;
  seat.agent = agent;
  seat.parent = doors_[agent_parent(agent)];
  post(link, AgentMessageType::kSeat, seat.encode());
  // The caller hangs up: so the end of many short connections is at their callers' ports.
  return true;
}

bool Agent::take_seat(Link& link, const Frame& frame, std::string& error) {
  SeatMessage m;
  if (!m.decode(frame.payload) || state_ != State::kSeating) {
    error = "a malformed seat";
    return false;
  }
  number_ = m.agent;
  parent_door_ = m.parent;
  if (parent_door_.any()) parent_door_.host = config_.root_address.host;
  state_ = State::kAttaching;
  add_join({number_, config_.host, config_.ranks}, error);
  retry_wait_ns_ = 0;
  retry_ns_ = monotonic_ns();
  drop(link.token);
  return true;
}

bool Agent::take_attach(Link& link, const Frame& frame, std::string& error) {
  AttachMessage m;
  if (!m.decode(frame.payload)) {
    error = "a malformed message";
    return false;
  }
  if (m.again) return take_attach_again(link, m, error);
  if (state_ == State::kFailed || state_ == State::kRunning) {
    AgentFailedMessage f;
    f.text = state_ == State::kFailed ? failure_ : "the job has started already, without this host";
    post(link, AgentMessageType::kFailed, f.encode());
    close_soon(link);
    return true;
  }
  if (number_ == kNoAgent || agent_parent(m.agent) != number_ || children_.count(m.agent) != 0 ||
      !may_be(m.agent)) {
    error = "agent " + std::to_string(m.agent) + " has no place here";
    return false;
  }
  link.purpose = Purpose::kChild;
  link.agent = m.agent;
  link.attached = true;
  children_[m.agent] = link.token;
  const auto mine = static_cast<int>(config_.ranks.front().rank);
  const auto its = static_cast<int>(m.first_rank);
  if (m.job_ranks != config_.job_ranks) {
    fail_all("rank " + std::to_string(its) + " (host " + m.host + ") says that the job has " +
             std::to_string(m.job_ranks) + " ranks, rank " + std::to_string(mine) + " (host " +
             config_.host + ") says " + std::to_string(config_.job_ranks) +
             ": give the same number everywhere");
  } else if (m.settings != config_.settings) {
    fail_all(settings_differ_text(mine, config_.settings, its, m.settings));
  }
  return true;
}

// The root knows which seats it has given.
bool Agent::may_be(std::uint32_t agent) const { return !config_.root || agent < doors_.size(); }

bool Agent::fits(const NumberList& agents, const NumberList& ranks) const {
  return (agents.empty() || agents.back() < table_.agents()) &&
         (ranks.empty() || ranks.back() < table_.ranks());
}

bool Agent::take_attach_again(Link& link, const AttachMessage& m, std::string& error) {
  if (state_ != State::kRunning) {
    turn_away(link, "this agent is no part of a running job", false);
    return true;
  }
  if (m.agent >= table_.agents() || m.agent == number_ || !fits(m.gone_agents, m.gone_ranks) ||
      std::binary_search(m.gone_agents.begin(), m.gone_agents.end(), number_)) {
    error = "an agent that cannot be";
    return false;
  }
  if (gone_agents_[m.agent]) {
    turn_away(link, "the others count " + name_of(m.agent) + " as gone", true);
    return true;
  }
  // All between it and this agent must be gone. One that is awaited, yet has lost its child, is.
  NumberList lost;
  bool mine = children_.count(m.agent) == 0;
  std::uint32_t p = agent_parent(m.agent);
  for (; mine && p != kNoAgent && p != number_; p = agent_parent(p)) {
    if (gone_agents_[p]) continue;
    mine = awaited_.count(p) != 0;
    lost.push_back(p);
  }
  if (mine && p == kNoAgent) {
    mine = number_ == standing_root(table_.agents(), [&](std::uint32_t a) {
             return gone_agents_[a] || std::find(lost.begin(), lost.end(), a) != lost.end();
           });
  }
  if (!mine) {
    turn_away(link, "its parent is another", false);
    return true;
  }
  for (const auto a : lost) {
    AgentGoneMessage gone;
    gone.agent = a;
    gone.why = name_of(a) + " is gone: " + name_of(m.agent) + " has lost it";
    mark_gone(gone, nullptr);
  }
  merge(m.gone_agents, m.gone_ranks, nullptr);
  if (state_ != State::kRunning || link.closing) return true;
  awaited_.erase(m.agent);
  link.purpose = Purpose::kChild;
  link.agent = m.agent;
  link.attached = true;
  children_[m.agent] = link.token;
  AttachedMessage answer;
  answer.gone_agents = set_bits(gone_agents_);
  answer.gone_ranks = set_bits(gone_ranks_);
  post(link, AgentMessageType::kAttached, answer.encode());
  tend_door();
  return true;
}

bool Agent::take_joins(Link& link, const Frame& frame, std::string& error) {
  JoinsMessage m;
  if (!m.decode(frame.payload)) {
    error = "a malformed message";
    return false;
  }
  for (AgentJoin& join : m.joins) {
    const bool below =
        join.agent == link.agent || agent_child_towards(link.agent, join.agent) != kNoAgent;
    if (!below || !may_be(join.agent)) {
      error = "a join of agent " + std::to_string(join.agent) + ", which is elsewhere";
      return false;
    }
    for (const RankCard& c : join.ranks) {
      if (c.rank < config_.job_ranks) continue;
      error = "rank " + std::to_string(c.rank) + " of " + std::to_string(config_.job_ranks);
      return false;
    }
    if (joins_.count(join.agent) != 0) {
      error = "agent " + std::to_string(join.agent) + " joins twice";
      return false;
    }
    std::string why;
    if (!add_join(std::move(join), why)) {
      fail_all(why);
      return true;
    }
  }
  if (failing_) return true;
  if (config_.root) {
    if (joined_.size() == config_.job_ranks) begin_job();
  } else if (gather_ns_ == 0) {
    gather_ns_ = monotonic_ns() + ns_of(config_.gather_ms);
  }
  return true;
}

bool Agent::take_table(Link&, const Frame& frame, std::string& error) {
  AgentTable table;
  if (!table.decode(frame.payload) || table.ranks() != config_.job_ranks ||
      number_ >= table.agents() || table.ranks_of(number_) != numbers_of(config_.ranks)) {
    error = "a table that does not fit this host";
    return false;
  }
  table_ = std::move(table);
  run_table(frame.payload);
  return true;
}

bool Agent::take_gone(Link& link, const Frame& frame, std::string& error) {
  AgentGoneMessage m;
  if (!m.decode(frame.payload) || !fits({}, m.ranks) ||
      (m.agent != kNoAgent && m.agent >= table_.agents())) {
    error = "news of a death that makes no sense";
    return false;
  }
  mark_gone(m, &link);
  return true;
}

bool Agent::take_question(Link& link, const Frame& frame, std::string& error) {
  AgentQuestionMessage m;
  if (!m.decode(frame.payload) || !fits(m.to, {}) || m.from >= table_.agents()) {
    error = "a malformed question";
    return false;
  }
  route(std::move(m), &link);
  return true;
}

bool Agent::take_answer(Link& link, const Frame& frame, std::string& error) {
  AgentAnswerMessage m;
  if (!m.decode(frame.payload) || m.from >= table_.agents() || m.to >= table_.agents()) {
    error = "a malformed answer";
    return false;
  }
  route(m, &link);
  return true;
}

}  // namespace unjam
