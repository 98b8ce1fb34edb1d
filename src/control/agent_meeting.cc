// The meeting of a job: joins go up the tree of agents, the table comes down.
#include <algorithm>
#include <utility>

#include "base/clock.h"
#include "control/agent.h"
#include "control/agent_limits.h"

namespace unjam {

// False: `why` says which rank is here twice.
bool Agent::add_join(AgentJoin join, std::string& why) {
  for (const RankCard& c : join.ranks) {
    const auto [at, fresh] = joined_.emplace(c.rank, join.agent);
    if (fresh) continue;
    const auto other = joins_.find(at->second);
    why = "rank " + std::to_string(c.rank) + " has joined twice, from host " +
          (other == joins_.end() ? join.host : other->second.host) + " and from host " + join.host +
          ": give every rank a number of its own";
    return false;
  }
  const std::uint32_t agent = join.agent;
  if (!config_.root) unsent_joins_.push_back(agent);
  joins_[agent] = std::move(join);
  return true;
}

void Agent::send_joins() {
  gather_ns_ = 0;
  Link* up = find(upwards_);
  if (up == nullptr || !up->attached || unsent_joins_.empty()) return;
  JoinsMessage m;
  for (const auto a : unsent_joins_) m.joins.push_back(joins_[a]);
  unsent_joins_.clear();
  post(*up, AgentMessageType::kJoins, m.encode());
}

// The root has all ranks.
void Agent::begin_job() {
  std::vector<AgentJoin> joins(doors_.size());
  for (auto& [agent, join] : joins_) joins[agent] = std::move(join);
  doors_.resize(agent_doors(static_cast<std::uint32_t>(joins.size())));
  table_ = AgentTable(config_.job_ranks, joins, std::move(doors_));
  run_table(table_.encode());
}

void Agent::run_table(const std::string& bytes) {
  for (const auto& [agent, token] : children_) {
    post(*find(token), AgentMessageType::kTable, bytes);
  }
  state_ = State::kRunning;
  gone_ranks_.assign(table_.ranks(), false);
  gone_agents_.assign(table_.agents(), false);
  for (std::uint32_t a = 0; a < table_.agents(); ++a) gone_agents_[a] = !table_.has_ranks(a);
  joins_.clear();
  joined_.clear();
  seats_.clear();
  doors_.clear();
  retry_ns_ = gather_ns_ = start_deadline_ns_ = 0;
  // No door is left at which a stranger could knock; some will be opened again.
  std::vector<Link*> strangers;
  for (const auto& [token, link] : links_) {
    if (link->purpose == Purpose::kStranger && !link->closing) strangers.push_back(link.get());
  }
  for (Link* link : strangers) close_soon(*link);
  tend_door();
  if (number_ >= table_.doors()) door_.release();
  const std::uint64_t now = monotonic_ns();
  for (const auto& [token, link] : links_) link->heard_ns = now;
  last_tick_ns_ = now;
  next_tick_ns_ = now + ns_of(config_.beat_ms) / 2;
  if (events_.started) events_.started();
}

// This agent, and so who is below it, learns that the job will not come to be.
void Agent::fail(const std::string& why) {
  if (state_ != State::kSeating && state_ != State::kAttaching && state_ != State::kJoined) return;
  state_ = State::kFailed;
  failure_ = why;
  AgentFailedMessage m;
  m.text = why;
  const std::string bytes = m.encode();
  for (const auto& [agent, token] : children_) {
    post(*find(token), AgentMessageType::kFailed, bytes);
  }
  retry_ns_ = gather_ns_ = start_deadline_ns_ = 0;
  // The door stays open: who comes late is told.
  if (events_.failed) events_.failed(why);
}

// All are to learn it: the root tells them, and names the ranks that are missing.
void Agent::fail_all(const std::string& why) {
  const bool meeting =
      state_ == State::kSeating || state_ == State::kAttaching || state_ == State::kJoined;
  if (!meeting || failing_) return;
  if (config_.root) {
    fail(why + missing_text());
    return;
  }
  Link* up = find(upwards_);
  if (up == nullptr || !up->attached) {
    fail(why);
    return;
  }
  failing_ = true;
  failure_ = why;
  AgentFailedMessage m;
  m.text = why;
  post(*up, AgentMessageType::kFailed, m.encode());
  start_deadline_ns_ = monotonic_ns() + kVerdictNs;
}

std::string Agent::missing_text() const {
  NumberList missing;
  for (std::uint32_t r = 0; r < config_.job_ranks; ++r) {
    if (joined_.count(r) == 0) missing.push_back(r);
  }
  if (missing.empty()) return {};
  return "; of " + std::to_string(config_.job_ranks) + " ranks " + std::to_string(missing.size()) +
         " had not joined: " + ranks_in_words(missing);
}

std::string Agent::name_of(std::uint32_t agent) const {
  if (table_.agents() > agent) {
    return between(std::string(table_.host(agent)), table_.ranks_of(agent));
  }
  const auto at = joins_.find(agent);
  if (at == joins_.end()) return "agent " + std::to_string(agent);
  return between(at->second.host, numbers_of(at->second.ranks));
}

}  // namespace unjam
