// Questions to sets of agents, through the tree, and their answers.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "control/agent.h"
#include "control/agent_limits.h"

namespace unjam {

// The neighbour through whom an agent is reached; nullptr: there is none now, or it would be where
// the message came from. What came from above goes no way but down, so no message goes in circles.
Agent::Link* Agent::way_to(std::uint32_t agent, const Link* from) {
  if (gone_agents_[agent]) return nullptr;
  for (std::uint32_t p = agent; p != kNoAgent && p != number_; p = agent_parent(p)) {
    const auto child = children_.find(p);
    if (child == children_.end()) continue;
    Link* link = find(child->second);
    return link == from ? nullptr : link;
  }
  if (agent_child_towards(number_, agent) != kNoAgent) return nullptr;  // below, and not there
  Link* up = find(upwards_);
  return up == nullptr || up == from || !up->attached ? nullptr : up;
}

std::uint64_t Agent::ask(const NumberList& agents, const std::string& payload,
                         std::int64_t timeout_ms) {
  if (state_ != State::kRunning || questions_.size() >= kMostOpenQuestions ||
      payload.size() > kLongestAgentPayload) {
    return 0;
  }
  const std::uint64_t number = ++last_question_;
  Question q;
  q.deadline_ns = monotonic_ns() + ns_of(std::max<std::int64_t>(timeout_ms, 0));
  AgentQuestionMessage m;
  for (const auto a : std::vector<std::uint32_t>(agents)) {
    if (a < table_.agents() && !gone_agents_[a]) {
      m.to.push_back(a);
    } else {
      q.missing.push_back(a);
    }
  }
  std::sort(m.to.begin(), m.to.end());
  m.to.erase(std::unique(m.to.begin(), m.to.end()), m.to.end());
  q.open = m.to;
  if (q.open.empty()) q.deadline_ns = 1;
  questions_[number] = std::move(q);
  m.from = number_;
  m.number = number;
  m.payload = payload;
  if (!m.to.empty()) route(std::move(m), nullptr);
  schedule();
  return number;
}

void Agent::route(AgentQuestionMessage m, const Link* from) {
  std::map<Link*, NumberList> by_way;
  bool own = false;
  for (const auto a : m.to) {
    if (a == number_) {
      own = true;
    } else {
      by_way[way_to(a, from)].push_back(a);
    }
  }
  for (auto& [link, to] : by_way) {
    if (link == nullptr || link->channel.pending_bytes() > kMostUnsentQuestions) {
      counts_.dropped += to.size();
      continue;
    }
    m.to = std::move(to);
    post(*link, AgentMessageType::kQuestion, m.encode());
  }
  if (!own) return;
  if (from != nullptr) {
    if (events_.asked) events_.asked(m.from, m.number, m.payload);
    return;
  }
  // From itself: ask() returns first.
  self_asked_.emplace_back(m.number, m.payload);
  if (!std::exchange(at_round_end_, true)) poller_.at_round_end(this);
}

void Agent::answer(std::uint32_t from, std::uint64_t number, const std::string& payload) {
  if (state_ != State::kRunning || from >= table_.agents()) return;
  if (payload.size() > kLongestAgentPayload) {
    ++counts_.dropped;
    return;
  }
  AgentAnswerMessage m;
  m.from = number_;
  m.to = from;
  m.number = number;
  m.payload = payload;
  route(m, nullptr);
}

void Agent::route(const AgentAnswerMessage& m, const Link* from) {
  if (m.to == number_) {
    take_answer(m);
    return;
  }
  Link* link = way_to(m.to, from);
  if (link == nullptr || link->channel.pending_bytes() > kMostUnsentQuestions) {
    ++counts_.dropped;
    return;
  }
  post(*link, AgentMessageType::kAnswer, m.encode());
}

// For this agent. One that was not asked, or not by this question, is not heard.
void Agent::take_answer(const AgentAnswerMessage& m) {
  const auto at = questions_.find(m.number);
  if (at == questions_.end()) return;
  NumberList& open = at->second.open;
  const auto who = std::lower_bound(open.begin(), open.end(), m.from);
  if (who == open.end() || *who != m.from) return;
  open.erase(who);
  if (events_.answer) events_.answer(m.number, m.from, m.payload);
  settle_question(m.number, false);
}

void Agent::settle_question(std::uint64_t number, bool late) {
  const auto at = questions_.find(number);
  if (at == questions_.end() || (!late && !at->second.open.empty())) return;
  NumberList missing = std::move(at->second.missing);
  missing.insert(missing.end(), at->second.open.begin(), at->second.open.end());
  std::sort(missing.begin(), missing.end());
  questions_.erase(at);
  if (events_.settled) events_.settled(number, missing);
}

void Agent::settle_gone_questions(std::uint32_t agent) {
  std::vector<std::uint64_t> numbers;
  for (auto& [number, q] : questions_) {
    const auto who = std::lower_bound(q.open.begin(), q.open.end(), agent);
    if (who == q.open.end() || *who != agent) continue;
    q.open.erase(who);
    q.missing.push_back(agent);
    numbers.push_back(number);
  }
  for (const auto number : numbers) settle_question(number, false);
}

}  // namespace unjam
