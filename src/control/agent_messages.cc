#include "control/agent_messages.h"

#include <algorithm>
#include <cstring>

#include "control/wire.h"

namespace unjam {
namespace {

constexpr std::uint32_t kLastAgent = kMostAgents - 1;
constexpr std::uint32_t kLastAgentRank = kMostAgentRanks - 1;

std::string shortened(const std::string& text, std::size_t longest) {
  return text.size() <= longest ? text : text.substr(0, longest - 4) + " ...";
}

void put(WireWriter& w, const SocketAddress& a) {
  for (const unsigned char byte : a.host) w.number(byte);
  w.number(a.port);
}

void get(WireReader& r, SocketAddress& a) {
  for (unsigned char& byte : a.host) byte = r.number<unsigned char>();
  a.port = r.number<std::uint16_t>();
}

// As ranges: first, count.
void put(WireWriter& w, const NumberList& list) {
  std::vector<std::pair<std::uint32_t, std::uint32_t>> ranges;
  for (const auto n : list) {
    if (!ranges.empty() && ranges.back().first + ranges.back().second == n) {
      ++ranges.back().second;
    } else {
      ranges.emplace_back(n, 1);
    }
  }
  w.list(ranges.size());
  for (const auto& [first, count] : ranges) {
    w.number(first);
    w.number(count);
  }
}

// Strictly ascending, up to `last`: so it is no longer than last + 1 whatever the ranges say.
bool get(WireReader& r, NumberList& list, std::uint32_t last) {
  list.clear();
  const std::size_t ranges = r.list(std::size_t{last} + 1, 8);
  std::uint64_t next = 0;
  bool good = true;
  for (std::size_t i = 0; i < ranges && good; ++i) {
    const std::uint64_t first = r.number<std::uint32_t>(), count = r.number<std::uint32_t>();
    // Ranges that touch would be one.
    good =
        r.ok() && count > 0 && first + count <= std::uint64_t{last} + 1 && (i == 0 || first > next);
    if (!good) break;
    for (std::uint64_t n = first; n < first + count; ++n) {
      list.push_back(static_cast<std::uint32_t>(n));
    }
    next = first + count;
  }
  if (!good) list.clear();
  return good;
}

void put(WireWriter& w, const std::vector<RankCard>& cards) {
  w.list(cards.size());
  for (const RankCard& c : cards) {
    w.number(c.rank);
    w.number(c.card);
  }
}

void get(WireReader& r, std::vector<RankCard>& cards) {
  cards.resize(r.list(kMostAgentRanks, 12));
  for (RankCard& c : cards) {
    c.rank = r.up_to(kLastAgentRank);
    c.card = r.number<std::uint64_t>();
  }
}

}  // namespace

std::string EnterMessage::encode() const {
  WireWriter w;
  w.number(id);
  put(w, door);
  return w.take();
}
bool EnterMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  id = r.number<std::uint64_t>();
  get(r, door);
  return r.complete() && door.port != 0;
}

std::string SeatMessage::encode() const {
  WireWriter w;
  w.number(agent);
  put(w, parent);
  return w.take();
}
bool SeatMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  agent = r.up_to(kLastAgent);
  get(r, parent);
  return r.complete() && agent != 0 && parent.port != 0;
}

std::string AttachMessage::encode() const {
  WireWriter w;
  w.number(agent);
  w.number(job_ranks);
  w.number(first_rank);
  w.text(shortened(settings, kLongestAgentSettings));
  w.text(shortened(host, kLongestAgentHost));
  w.number<std::uint8_t>(again);
  put(w, gone_agents);
  put(w, gone_ranks);
  return w.take();
}
bool AttachMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  agent = r.up_to(kLastAgent);
  job_ranks = r.up_to(kMostAgentRanks);
  first_rank = r.up_to(kLastAgentRank);
  settings = r.text(kLongestAgentSettings);
  host = r.text(kLongestAgentHost);
  again = r.up_to<std::uint8_t>(1) != 0;
  const bool good = get(r, gone_agents, kLastAgent) && get(r, gone_ranks, kLastAgentRank);
  return good && r.complete() && agent != 0 && first_rank < job_ranks;
}

std::string AttachedMessage::encode() const {
  WireWriter w;
  put(w, gone_agents);
  put(w, gone_ranks);
  return w.take();
}
bool AttachedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  const bool good = get(r, gone_agents, kLastAgent) && get(r, gone_ranks, kLastAgentRank);
  return good && r.complete();
}

std::string JoinsMessage::encode() const {
  WireWriter w;
  w.list(joins.size());
  for (const AgentJoin& j : joins) {
    w.number(j.agent);
    w.text(shortened(j.host, kLongestAgentHost));
    put(w, j.ranks);
  }
  return w.take();
}
bool JoinsMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  joins.resize(r.list(kMostAgents, 12));
  for (AgentJoin& j : joins) {
    j.agent = r.up_to(kLastAgent);
    j.host = r.text(kLongestAgentHost);
    get(r, j.ranks);
    if (j.ranks.empty()) return false;
  }
  return r.complete();
}

std::string AgentFailedMessage::encode() const {
  WireWriter w;
  w.text(shortened(text, kLongestAgentReason));
  return w.take();
}
bool AgentFailedMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  text = r.text(kLongestAgentReason);
  return r.complete();
}

AgentTable::AgentTable(std::uint32_t ranks, const std::vector<AgentJoin>& joins,
                       std::vector<SocketAddress> doors)
    : agent_of_(ranks), cards_(ranks), doors_(std::move(doors)) {
  for (std::uint32_t a = 0; a < joins.size(); ++a) {
    for (const RankCard& c : joins[a].ranks) {
      agent_of_[c.rank] = a;
      cards_[c.rank] = c.card;
    }
    hosts_ += joins[a].host;
    host_end_.push_back(static_cast<std::uint32_t>(hosts_.size()));
  }
  index();
}

void AgentTable::index() {
  first_rank_.assign(agents() + 1, 0);
  for (const auto a : agent_of_) ++first_rank_[a + 1];
  for (std::size_t a = 0; a < agents(); ++a) first_rank_[a + 1] += first_rank_[a];
  by_agent_.resize(agent_of_.size());
  std::vector<std::uint32_t> at(first_rank_.begin(), first_rank_.end() - 1);
  for (std::uint32_t r = 0; r < ranks(); ++r) by_agent_[at[agent_of_[r]]++] = r;
}

std::string_view AgentTable::host(std::uint32_t agent) const {
  const std::uint32_t begin = agent == 0 ? 0 : host_end_[agent - 1];
  return std::string_view(hosts_).substr(begin, host_end_[agent] - begin);
}

NumberList AgentTable::ranks_of(std::uint32_t agent) const {
  return {by_agent_.begin() + first_rank_[agent], by_agent_.begin() + first_rank_[agent + 1]};
}

bool AgentTable::has_ranks(std::uint32_t agent) const {
  return first_rank_[agent] != first_rank_[agent + 1];
}

// Hosts' names are much alike: each says how much of the former it begins with.
std::string AgentTable::encode() const {
  WireWriter w;
  w.list(agents());
  std::string_view before;
  for (std::uint32_t a = 0; a < agents(); ++a) {
    const std::string_view name = host(a);
    std::size_t same = 0;
    while (same < std::min(name.size(), before.size()) && name[same] == before[same]) ++same;
    w.number(static_cast<std::uint8_t>(same));
    w.number(static_cast<std::uint8_t>(name.size() - same));
    for (const char c : name.substr(same)) w.number(c);
    before = name;
  }
  w.list(ranks());
  for (std::uint32_t r = 0; r < ranks(); ++r) {
    w.number(agent_of_[r]);
    w.number(cards_[r]);
  }
  w.list(doors_.size());
  for (const SocketAddress& d : doors_) put(w, d);
  return w.take();
}

bool AgentTable::decode(std::string_view bytes) {
  WireReader r(bytes);
  *this = {};
  const std::size_t agents_said = r.list(kMostAgents, 2);
  host_end_.reserve(agents_said);
  std::string before;
  for (std::size_t i = 0; i < agents_said && r.ok(); ++i) {
    const std::size_t same = r.number<std::uint8_t>(), more = r.number<std::uint8_t>();
    // Only the shortest form is taken.
    if (same > before.size() || same + more > kLongestAgentHost) return false;
    const std::string former = std::exchange(before, before.substr(0, same));
    for (std::size_t c = 0; c < more; ++c) before += r.number<char>();
    if (more > 0 && same < former.size() && former[same] == before[same]) return false;
    hosts_ += before;
    host_end_.push_back(static_cast<std::uint32_t>(hosts_.size()));
  }
  agent_of_.resize(r.list(kMostAgentRanks, 12));
  cards_.resize(agent_of_.size());
  for (std::uint32_t k = 0; k < ranks(); ++k) {
    agent_of_[k] = r.number<std::uint32_t>();
    cards_[k] = r.number<std::uint64_t>();
    if (agent_of_[k] >= agents()) return false;
  }
  doors_.resize(r.list(kMostAgents, 18));
  for (SocketAddress& d : doors_) get(r, d);
  if (!r.complete() || agents() == 0 || ranks() == 0 || doors_.size() != agent_doors(agents())) {
    return false;
  }
  index();
  return has_ranks(0);
}

std::string AgentGoneMessage::encode() const {
  WireWriter w;
  w.number(agent);
  put(w, ranks);
  w.text(shortened(why, kLongestAgentReason));
  return w.take();
}
bool AgentGoneMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  agent = r.number<std::uint32_t>();
  const bool good = get(r, ranks, kLastAgentRank);
  why = r.text(kLongestAgentReason);
  return good && r.complete() &&
         (agent == kNoAgent ? !ranks.empty() : agent <= kLastAgent && ranks.empty());
}

std::string AgentQuestionMessage::encode() const {
  WireWriter w;
  w.number(from);
  w.number(number);
  put(w, to);
  w.text(payload);
  return w.take();
}
bool AgentQuestionMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  from = r.up_to(kLastAgent);
  number = r.number<std::uint64_t>();
  const bool good = get(r, to, kLastAgent);
  payload = r.text(kLongestAgentPayload);
  return good && r.complete() && !to.empty();
}

std::string AgentAnswerMessage::encode() const {
  WireWriter w;
  w.number(from);
  w.number(to);
  w.number(number);
  w.text(payload);
  return w.take();
}
bool AgentAnswerMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  from = r.up_to(kLastAgent);
  to = r.up_to(kLastAgent);
  number = r.number<std::uint64_t>();
  payload = r.text(kLongestAgentPayload);
  return r.complete();
}

std::string TurnedAwayMessage::encode() const {
  WireWriter w;
  w.number<std::uint8_t>(gone);
  w.text(shortened(text, kLongestAgentReason));
  return w.take();
}
bool TurnedAwayMessage::decode(std::string_view bytes) {
  WireReader r(bytes);
  gone = r.up_to<std::uint8_t>(1) != 0;
  text = r.text(kLongestAgentReason);
  return r.complete();
}

std::string ranks_in_words(const NumberList& ranks, std::size_t most) {
  std::string text = ranks.size() == 1 ? "rank" : "ranks";
  std::size_t named = 0, ranges = 0;
  for (std::size_t i = 0; i < ranks.size() && ranges < most; ++ranges) {
    std::size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    text += (ranges == 0 ? " " : ", ") + std::to_string(ranks[i]);
    if (last > i) text += (last == i + 1 ? ", " : "-") + std::to_string(ranks[last]);
    named += last - i + 1;
    i = last + 1;
  }
  if (named < ranks.size()) text += " and " + std::to_string(ranks.size() - named) + " more";
  return text;
}

}  // namespace unjam
