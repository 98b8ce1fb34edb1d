// Agents and ranks that are gone: who tells whom, and how the tree is mended.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "control/agent.h"
#include "control/agent_limits.h"

namespace unjam {

void Agent::report_gone(const NumberList& ranks, const std::string& why) {
  if (state_ != State::kRunning) return;
  AgentGoneMessage m;
  m.ranks = ranks;
  std::sort(m.ranks.begin(), m.ranks.end());
  m.ranks.erase(std::unique(m.ranks.begin(), m.ranks.end()), m.ranks.end());
  if (m.ranks.empty() || !fits({}, m.ranks)) return;
  m.why = why.substr(0, kLongestAgentReason);
  mark_gone(m, nullptr);
}

// Whoever hears of it for the first time passes it on, so the news ends by itself.
void Agent::mark_gone(const AgentGoneMessage& m, const Link* from) {
  if (state_ != State::kRunning) return;
  if (m.agent == number_) {
    cut_off("the others count this host as gone: " + m.why);
    return;
  }
  AgentNews news;
  news.agent = m.agent;
  news.text = m.why;
  if (m.agent != kNoAgent && gone_agents_[m.agent]) return;
  for (const auto r : m.agent == kNoAgent ? m.ranks : table_.ranks_of(m.agent)) {
    if (!gone_ranks_[r]) news.ranks.push_back(r);
    gone_ranks_[r] = true;
  }
  if (m.agent == kNoAgent && news.ranks.empty()) return;
  const std::string bytes = m.encode();
  const auto pass_on = [&](std::uint64_t token) {
    Link* link = find(token);
    if (link != nullptr && link != from && link->attached) {
      post(*link, AgentMessageType::kGone, bytes);
    }
  };
  pass_on(upwards_);
  // The accused too, if it is here.
  for (const auto& [agent, token] : children_) pass_on(token);
  if (m.agent != kNoAgent) {
    gone_agents_[m.agent] = true;
    awaited_.erase(m.agent);
    if (const auto child = children_.find(m.agent); child != children_.end()) {
      close_soon(*find(child->second));
    }
    const auto gone = [&](std::uint32_t a) -> bool { return gone_agents_[a]; };
    const std::uint32_t ancestor = living_agent_ancestor(m.agent, gone);
    if (ancestor == number_) {
      adopt_children_of(m.agent);
    } else if (ancestor == kNoAgent && standing_root(table_.agents(), gone) == number_) {
      adopt_children_of(0);
    }
    if (parent() == m.agent) {
      Link* up = find(upwards_);
      drop(up->token);
      lost_parent_ = m.agent;
      lost_why_ = m.why;
      look_for_parent();
    }
  }
  if (events_.gone) events_.gone(news);
  if (m.agent != kNoAgent) settle_gone_questions(m.agent);
  tend_door();
  check_done();
}

// What has come from below since this agent told its new parent what it knew.
void Agent::tell_missed(Link& link, const AttachedMessage& told) {
  for (const auto a : set_bits(gone_agents_)) {
    if (std::binary_search(told.gone_agents.begin(), told.gone_agents.end(), a)) continue;
    AgentGoneMessage m;
    m.agent = a;
    m.why = name_of(a) + " is gone";
    post(link, AgentMessageType::kGone, m.encode());
  }
  AgentGoneMessage m;
  for (const auto r : set_bits(gone_ranks_)) {
    if (!std::binary_search(told.gone_ranks.begin(), told.gone_ranks.end(), r)) {
      m.ranks.push_back(r);
    }
  }
  if (m.ranks.empty()) return;
  m.why = ranks_in_words(m.ranks) + " ended while the tree of agents was mended";
  post(link, AgentMessageType::kGone, m.encode());
}

// What an agent knew that has come from elsewhere in the tree.
void Agent::merge(const NumberList& agents, const NumberList& ranks, const Link* from) {
  for (const auto a : agents) {
    if (state_ != State::kRunning || gone_agents_[a]) continue;
    AgentGoneMessage m;
    m.agent = a;
    m.why =
        name_of(a) + " is gone" + (a == lost_before_ && !lost_why_.empty() ? ": " + lost_why_ : "");
    mark_gone(m, from);
  }
  AgentGoneMessage m;
  for (const auto r : ranks) {
    if (!gone_ranks_[r]) m.ranks.push_back(r);
  }
  if (m.ranks.empty()) return;
  m.why = ranks_in_words(m.ranks) + " ended while the tree of agents was mended";
  mark_gone(m, from);
}

void Agent::adopt_children_of(std::uint32_t agent) {
  const std::uint64_t first = first_agent_child(agent);
  for (std::uint32_t i = 0; i < agent_children(agent, table_.agents()); ++i) {
    const auto child = static_cast<std::uint32_t>(first + i);
    if (gone_agents_[child]) {
      adopt_children_of(child);
    } else if (child != number_ && children_.count(child) == 0) {
      awaited_.emplace(child,
                       monotonic_ns() + 2 * ns_of(config_.rejoin_ms) + 2 * ns_of(config_.beat_ms));
    }
  }
}

// Open while children are to come.
void Agent::tend_door() {
  if (state_ != State::kRunning || !door_.kept()) return;
  if (awaited_.empty() == !door_.is_open()) return;
  std::string error;
  if (awaited_.empty()) {
    if (door_token_ != 0) poller_.forget(std::exchange(door_token_, 0));
    door_.shut();
    crowded_until_ns_ = 0;
  } else if (door_.reopen(error)) {
    door_token_ = poller_.watch(this, door_.fd(), true, false);
  } else {
    last_error_ = error;  // those awaited will not come, and are declared gone
  }
}

void Agent::look_for_parent() {
  done_sent_ = false;
  lost_before_ = lost_parent_;
  rejoin_attempt_ = 0;
  retry_wait_ns_ = 0;
  retry_ns_ = monotonic_ns();
  rejoin_deadline_ns_ = retry_ns_ + ns_of(config_.rejoin_ms);
}

// No agent with a lower number is left: this one stands in for the root.
void Agent::stand_in() {
  const std::uint32_t lost = std::exchange(lost_parent_, kNoAgent);
  rejoin_deadline_ns_ = 0;
  AgentGoneMessage m;
  m.agent = lost;
  m.why = name_of(lost) + " is gone: " + lost_why_;
  mark_gone(m, nullptr);
  check_done();
}

void Agent::cut_off(const std::string& why) {
  if (state_ != State::kRunning) return;
  state_ = State::kCutOff;
  failure_ = why;
  hang_up();
  if (door_token_ != 0) poller_.forget(std::exchange(door_token_, 0));
  door_.release();
  questions_.clear();
  if (events_.cut_off) events_.cut_off(why);
}

}  // namespace unjam
