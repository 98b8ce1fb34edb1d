#include "control/agent.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/random_bytes.h"
#include "control/join_text.h"

namespace unjam {
namespace {

constexpr std::uint64_t kMs = 1'000'000;
constexpr std::uint64_t kStrangerNs = 5'000 * kMs;  // for a caller to prove itself and say its wish
constexpr std::uint64_t kCrowdedNs = 1'000 * kMs;   // if others wait
constexpr std::uint64_t kPauseNs = 20 * kMs;        // before a full door looks again
constexpr std::uint64_t kFirstRetryNs = 5 * kMs, kLastRetryNs = 200 * kMs;
constexpr std::uint64_t kVerdictNs = 2'000 * kMs;  // for the root to tell why the meeting fails
constexpr std::size_t kMostAtDoor = 128;
constexpr int kAcceptsAtOnce = 64;
// A peer that takes less is given up; questions and answers are dropped much earlier.
constexpr std::size_t kMostUnsent = 4 * kLongestAgentFrame;
constexpr std::size_t kMostUnsentQuestions = 4 << 20;
constexpr std::size_t kMostOpenQuestions = 1024;
constexpr std::uint32_t kStandIns = 3;  // agents that are called beside one's ancestors

std::string between(const std::string& host, const NumberList& ranks) {
  return "host " + (host.empty() ? "(without a name)" : host) + " (" + ranks_in_words(ranks) + ")";
}

NumberList numbers_of(const std::vector<RankCard>& cards) {
  NumberList list;
  for (const RankCard& c : cards) list.push_back(c.rank);
  std::sort(list.begin(), list.end());
  return list;
}

NumberList set_bits(const std::vector<bool>& bits) {
  NumberList list;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) list.push_back(static_cast<std::uint32_t>(i));
  }
  return list;
}

bool begins_with(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

std::uint64_t ns_of(std::int64_t ms) { return static_cast<std::uint64_t>(ms) * kMs; }

}  // namespace

Agent::Agent(Poller& poller, AgentConfig config, AgentEvents events)
    : poller_(poller), config_(std::move(config)), events_(std::move(events)) {
  std::sort(config_.ranks.begin(), config_.ranks.end(),
            [](const RankCard& a, const RankCard& b) { return a.rank < b.rank; });
  fill_random(&id_, sizeof(id_));
}

Agent::~Agent() {
  for (const auto& [token, link] : links_) poller_.forget(token);
  if (door_token_ != 0) poller_.forget(door_token_);
  poller_.leave(this);
}

bool Agent::start(std::string& error) {
  const NumberList mine = numbers_of(config_.ranks);
  if (config_.ranks.empty() || config_.job_ranks == 0 || config_.job_ranks > kMostAgentRanks ||
      mine.back() >= config_.job_ranks) {
    error = "an agent needs ranks below the job's number of ranks, " +
            std::to_string(config_.job_ranks) + ", which is at most " +
            std::to_string(kMostAgentRanks);
    return false;
  }
  if (std::adjacent_find(mine.begin(), mine.end()) != mine.end()) {
    error = "a rank stands twice in the list of " + between(config_.host, mine) +
            ": give every rank a number of its own";
    return false;
  }
  if (config_.host.size() > kLongestAgentHost || config_.settings.size() > kLongestAgentSettings) {
    error = "the name of the host, or the text of the settings, is too long";
    return false;
  }
  if (!door_.open(config_.root ? config_.root_address : config_.door, error)) return false;
  door_token_ = poller_.watch(this, door_.fd(), true, false);
  if (door_token_ == 0) {
    error = std::string("epoll: ") + std::strerror(errno);
    return false;
  }
  start_deadline_ns_ = monotonic_ns() + ns_of(config_.start_ms);
  AgentJoin own{0, config_.host, config_.ranks};
  if (config_.root) {
    number_ = 0;
    state_ = State::kJoined;
    doors_.push_back({{}, door_.address().port});
    std::string unused;
    add_join(std::move(own), unused);
    if (joined_.size() == config_.job_ranks) {
      gather_ns_ = monotonic_ns();  // start() returns first
    }
  } else {
    state_ = State::kSeating;
    retry_ns_ = monotonic_ns();
  }
  schedule();
  return true;
}

std::uint32_t Agent::parent() const {
  const auto at = links_.find(upwards_);
  return at != links_.end() && at->second->attached ? at->second->agent : kNoAgent;
}

Agent::Counts Agent::counts() const {
  Counts c = counts_;
  c.connections = children_.size() + (parent() == kNoAgent ? 0 : 1);
  for (const auto& [token, link] : links_) {
    c.frames += link->channel.sent_frames();
    c.bytes += link->channel.sent_bytes();
  }
  return c;
}

// ---- connections ----

Agent::Link* Agent::find(std::uint64_t token) {
  const auto at = links_.find(token);
  return at == links_.end() ? nullptr : at->second.get();
}

Agent::Link* Agent::add_link(Fd socket, TaggedChannel::Role role, Purpose purpose,
                             bool connecting) {
  auto link = std::make_unique<Link>();
  link->token = poller_.watch(this, socket.get(), !connecting, connecting);
  if (link->token == 0) return nullptr;
  link->channel = TaggedChannel(std::move(socket), role, config_.secret, kAgentProtocolVersion,
                                kLongestAgentFrame);
  link->purpose = purpose;
  link->connecting = connecting;
  link->since_ns = link->heard_ns = link->sent_ns = monotonic_ns();
  Link* result = link.get();
  links_[result->token] = std::move(link);
  if (role == TaggedChannel::Role::kDoor) settle(*result);
  return result;
}

void Agent::accept_some() {
  for (int i = 0; i < kAcceptsAtOnce && door_.is_open(); ++i) {
    make_room();
    if (crowded_until_ns_ != 0) return;
    bool crowded = false;
    Fd socket = door_.accept(crowded);
    if (crowded) {  // no descriptors: the newcomer waits, and must not keep this thread busy
      crowded_until_ns_ = monotonic_ns() + kPauseNs;
      poller_.change(door_token_, false, false);
    }
    if (!socket) return;
    add_link(std::move(socket), TaggedChannel::Role::kDoor, Purpose::kStranger, false);
  }
}

// Those that say nothing must not keep others out, nor take all descriptors: the door waits for a
// moment, and then the oldest goes.
void Agent::make_room() {
  std::size_t count = 0;
  const Link* oldest = nullptr;
  for (const auto& [token, link] : links_) {
    if (link->purpose != Purpose::kStranger) continue;
    ++count;
    if (oldest == nullptr || link->since_ns < oldest->since_ns) oldest = link.get();
  }
  if (count < kMostAtDoor) return;
  const std::uint64_t now = monotonic_ns();
  if (now - oldest->since_ns >= kCrowdedNs) {
    ++counts_.refused;
    drop(oldest->token);
    return;
  }
  crowded_until_ns_ = now + kPauseNs;
  poller_.change(door_token_, false, false);
}

void Agent::drop(std::uint64_t token) {
  const auto at = links_.find(token);
  if (at == links_.end()) return;
  std::unique_ptr<Link> link = std::move(at->second);
  links_.erase(at);
  poller_.forget(token);
  counts_.frames += link->channel.sent_frames();
  counts_.bytes += link->channel.sent_bytes();
  if (upwards_ == token) upwards_ = 0;
  if (link->agent != kNoAgent) {
    const auto child = children_.find(link->agent);
    if (child != children_.end() && child->second == token) children_.erase(child);
  }
  link->channel.close();
  link->closing = true;
  // Who handles what it has said may hold it yet.
  dropped_.push_back(std::move(link));
  if (!std::exchange(at_round_end_, true)) poller_.at_round_end(this);
}

void Agent::post(Link& link, AgentMessageType type, std::string_view payload) {
  if (link.closing || !link.channel.proven()) return;
  link.channel.post(static_cast<std::uint16_t>(type), payload);
  link.sent_ns = monotonic_ns();
  settle(link);
}

// What is to be sent leaves at the end of the round, all at once.
void Agent::settle(Link& link) {
  if (std::exchange(link.dirty, true)) return;
  dirty_.push_back(link.token);
  if (!std::exchange(at_round_end_, true)) poller_.at_round_end(this);
}

void Agent::close_soon(Link& link) {
  if (link.connecting) {
    drop(link.token);
    return;
  }
  link.closing = true;
  link.since_ns = monotonic_ns();
  if (upwards_ == link.token) upwards_ = 0;
  const auto child = children_.find(link.agent);
  if (child != children_.end() && child->second == link.token) children_.erase(child);
  link.purpose = Purpose::kStranger;
  link.attached = false;
  settle(link);
}

void Agent::hang_up() {
  std::vector<Link*> all;
  for (const auto& [token, link] : links_) all.push_back(link.get());
  for (Link* link : all) close_soon(*link);
}

void Agent::on_round_end() {
  at_round_end_ = false;
  std::vector<std::pair<std::uint64_t, std::string>> to_self;
  to_self.swap(self_asked_);
  for (const auto& [number, payload] : to_self) {
    if (state_ == State::kRunning && events_.asked) events_.asked(number_, number, payload);
  }
  std::vector<std::uint64_t> dirty;
  dirty.swap(dirty_);
  for (const std::uint64_t token : dirty) {
    Link* link = find(token);
    if (link == nullptr) continue;
    link->dirty = false;
    if (link->connecting) continue;
    std::string error;
    bool live = link->channel.flush(error);
    if (live && link->channel.pending_bytes() > kMostUnsent) {
      error = "it takes nothing of what it is sent";
      live = false;
    }
    if (!live) {
      if (link->closing) {
        drop(token);
      } else {
        lose(*link, error);
      }
      continue;
    }
    // A socket that is closed while something unread lies in it may take back what it has sent. So
    // the other end is to close first.
    if (link->closing && !link->channel.pending() && !std::exchange(link->shut, true)) {
      shutdown(link->channel.fd(), SHUT_WR);
    }
    poller_.change(token, !link->closing || link->shut, link->channel.pending());
  }
  dropped_.clear();
  schedule();
}

void Agent::on_ready(std::uint64_t token, bool readable, bool writable) {
  if (token == door_token_) {
    accept_some();
    schedule();
    return;
  }
  Link* link = find(token);
  if (link == nullptr) return;
  std::string error;
  if (link->connecting) {
    link->connecting = false;
    if (!end_connect(link->channel.fd(), error)) {
      lose(*link, error);
      schedule();
      return;
    }
    poller_.change(token, true, false);
    return;
  }
  if (link->closing) {
    if (!link->shut) {
      if (readable) drop(token);  // only an end is reported
      if (!readable) settle(*link);
      return;
    }
    char unheard[16384];
    const ssize_t n = recv(link->channel.fd(), unheard, sizeof(unheard), MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) drop(token);
    return;
  }
  if (readable) {
    const bool was_proven = link->channel.proven();
    bool live = link->channel.receive(error);
    if (link->channel.proven() && !was_proven) connected(*link);
    if (!link->channel.proven()) settle(*link);  // the proof
    Frame frame;
    while (!link->closing && link->channel.pop(frame)) {
      link->heard_ns = monotonic_ns();
      if (std::exchange(link->suspect, false) && events_.suspect) {
        events_.suspect(link->agent, false);
      }
      std::string why;
      if (take(*link, frame, why)) continue;
      ++counts_.refused;
      lose(*link, "it sent what makes no sense: " + why);
    }
    if (!link->closing && link->channel.broken()) {
      if (live) {
        error = link->channel.fault();
        if (error.empty()) link->channel.receive(error);
      }
      live = false;
    }
    if (!link->closing && !live) {
      if (!link->channel.fault().empty()) ++counts_.refused;
      lose(*link, error);
    }
  }
  if (writable && find(token) != nullptr) settle(*link);
  schedule();
}

// The other end has proven itself.
void Agent::connected(Link& link) {
  settle(link);
  if (link.purpose == Purpose::kSeat) {
    EnterMessage m;
    m.id = id_;
    m.door.port = door_.address().port;
    const SocketAddress& at = config_.door;
    if (!at.unspecified() && !at.loopback()) m.door.host = at.host;
    post(link, AgentMessageType::kEnter, m.encode());
  } else if (link.purpose == Purpose::kParent) {
    AttachMessage m;
    m.agent = number_;
    m.job_ranks = config_.job_ranks;
    m.first_rank = config_.ranks.front().rank;
    m.host = config_.host;
    if (state_ != State::kAttaching && state_ != State::kRunning) {
      close_soon(link);
    } else if (state_ == State::kAttaching) {
      m.settings = config_.settings;
      post(link, AgentMessageType::kAttach, m.encode());
      link.attached = true;
      state_ = State::kJoined;
      send_joins();
    } else {
      m.again = true;
      m.gone_agents = set_bits(gone_agents_);
      m.gone_ranks = set_bits(gone_ranks_);
      post(link, AgentMessageType::kAttach, m.encode());
    }
  }
}

void Agent::call_root() {
  std::string error;
  Fd socket = begin_connect(config_.root_address, error);
  if (socket &&
      add_link(std::move(socket), TaggedChannel::Role::kCaller, Purpose::kSeat, true) != nullptr) {
    return;
  }
  last_error_ = error;
  retry_wait_ns_ = std::min(kLastRetryNs, std::max(kFirstRetryNs, 2 * retry_wait_ns_));
  retry_ns_ = monotonic_ns() + retry_wait_ns_;
}

void Agent::call_parent() {
  SocketAddress to = parent_door_;
  std::uint32_t agent = agent_parent(number_);
  if (state_ == State::kRunning) {
    // By turns those that may be the parent now: the dead are known to few.
    const auto gone = [&](std::uint32_t a) { return gone_agents_[a] || a == lost_parent_; };
    NumberList candidates;
    for (std::uint32_t p = living_agent_ancestor(number_, gone); p != kNoAgent;
         p = living_agent_ancestor(p, gone)) {
      candidates.push_back(p);
    }
    for (std::uint32_t a = 0, some = 0; a < std::min(number_, table_.doors()) && some < kStandIns;
         ++a) {
      if (gone(a)) continue;
      ++some;
      if (std::find(candidates.begin(), candidates.end(), a) == candidates.end()) {
        candidates.push_back(a);
      }
    }
    if (candidates.empty()) {
      // Those that are left may be too far from the root to have kept a door.
      if (standing_root(number_, gone) == kNoAgent) stand_in();
      return;
    }
    agent = candidates[rejoin_attempt_++ % candidates.size()];
    to = table_.door(agent);
  }
  if (to.any()) to.host = config_.root_address.host;
  std::string error;
  Fd socket = begin_connect(to, error);
  Link* link =
      socket ? add_link(std::move(socket), TaggedChannel::Role::kCaller, Purpose::kParent, true)
             : nullptr;
  if (link != nullptr) {
    link->agent = agent;
    upwards_ = link->token;
    return;
  }
  last_error_ = error;
  retry_wait_ns_ = std::min(kLastRetryNs, std::max(kFirstRetryNs, 2 * retry_wait_ns_));
  retry_ns_ = monotonic_ns() + retry_wait_ns_;
}

// A connection is over that should not be.
void Agent::lose(Link& link, const std::string& why) {
  const Purpose purpose = link.purpose;
  const bool attached = link.attached;
  const std::uint32_t agent = link.agent;
  const std::uint64_t token = link.token;
  drop(token);
  const bool meeting =
      state_ == State::kSeating || state_ == State::kAttaching || state_ == State::kJoined;
  if (purpose == Purpose::kSeat || (purpose == Purpose::kParent && !attached)) {
    // It is tried again.
    if (!meeting && state_ != State::kRunning) return;
    last_error_ = why;
    if (meeting && begins_with(why, "refused: ")) {
      fail("the agent of " + between(config_.host, numbers_of(config_.ranks)) + " was " + why);
      return;
    }
    retry_wait_ns_ = std::min(kLastRetryNs, std::max(kFirstRetryNs, 2 * retry_wait_ns_));
    retry_ns_ = monotonic_ns() + retry_wait_ns_;
    return;
  }
  if (purpose == Purpose::kStranger || !attached) return;
  if (meeting) {
    if (purpose == Purpose::kParent) {
      fail(failing_
               ? failure_
               : "the agent at " + parent_door_.text() +
                     ", through which this one joined, left before all ranks had joined: " + why);
    } else {
      fail_all(name_of(agent) + " left before all ranks had joined: " + why);
    }
    return;
  }
  if (state_ != State::kRunning) return;
  if (purpose == Purpose::kParent) {
    lost_parent_ = agent;
    lost_why_ = why;
    look_for_parent();
  } else {
    AgentGoneMessage m;
    m.agent = agent;
    m.why = name_of(agent) + " is gone: " + why;
    mark_gone(m, nullptr);
  }
}

// A caller that is told why it is not wanted.
void Agent::turn_away(Link& link, const std::string& why, bool gone) {
  TurnedAwayMessage m;
  m.gone = gone;
  m.text = why;
  post(link, AgentMessageType::kTurnedAway, m.encode());
  close_soon(link);
}

// ---- what arrives ----

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
      if (from_parent && !link.attached) {
        AttachedMessage m;
        if (!m.decode(frame.payload) || !fits(m.gone_agents, m.gone_ranks)) break;
        link.attached = true;
        lost_parent_ = kNoAgent;
        rejoin_deadline_ns_ = 0;
        retry_wait_ns_ = 0;
        tell_missed(link, m);
        merge(m.gone_agents, m.gone_ranks, &link);
        check_done();
        return true;
      }
      break;
    case AgentMessageType::kJoins:
      if (from_child && (meeting || state_ == State::kAttaching)) {
        return take_joins(link, frame, error);
      }
      if (from_child && state_ == State::kFailed) return true;
      break;
    case AgentMessageType::kFailed: {
      AgentFailedMessage m;
      if (!m.decode(frame.payload)) break;
      if (from_child) {
        fail_all(m.text);
      } else if (link.purpose == Purpose::kSeat || (from_parent && state_ != State::kRunning)) {
        fail(m.text);
      }
      return true;
    }
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
    case AgentMessageType::kTurnedAway: {
      TurnedAwayMessage m;
      if (!from_parent || link.attached || !m.decode(frame.payload)) break;
      if (m.gone && state_ == State::kRunning) {
        cut_off(m.text);
      } else {
        lose(link, m.text);
      }
      return true;
    }
  }
  error = "a message of type " + std::to_string(frame.type) + " that has no place here";
  return false;
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

// ---- the meeting ----

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

// ---- deaths ----

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

// ---- questions ----

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

// ---- the end ----

void Agent::finish() {
  done_ = true;
  check_done();
}

void Agent::check_done() {
  if (!done_ || state_ != State::kRunning || !awaited_.empty() || lost_parent_ != kNoAgent) return;
  for (const auto& [agent, token] : children_) {
    if (!find(token)->done) return;
  }
  Link* up = find(upwards_);
  if (up == nullptr) {
    farewell();
  } else if (up->attached && !std::exchange(done_sent_, true)) {
    post(*up, AgentMessageType::kDone, {});
  }
}

void Agent::farewell() {
  for (const auto& [agent, token] : children_) {
    post(*find(token), AgentMessageType::kFarewell, {});
  }
  state_ = State::kFinished;
  hang_up();
  if (door_token_ != 0) poller_.forget(std::exchange(door_token_, 0));
  door_.release();
  questions_.clear();
  if (events_.finished) events_.finished();
}

// ---- time ----

void Agent::on_time() {
  const std::uint64_t now = monotonic_ns();
  if (crowded_until_ns_ != 0 && now >= crowded_until_ns_) {
    crowded_until_ns_ = 0;
    if (door_token_ != 0) poller_.change(door_token_, true, false);
  }
  if (gather_ns_ != 0 && now >= gather_ns_) {
    if (config_.root) {
      gather_ns_ = 0;
      if (state_ == State::kJoined && joined_.size() == config_.job_ranks) begin_job();
    } else {
      send_joins();
    }
  }
  const bool meeting =
      state_ == State::kSeating || state_ == State::kAttaching || state_ == State::kJoined;
  if (meeting && start_deadline_ns_ != 0 && now >= start_deadline_ns_) {
    start_deadline_ns_ = 0;
    give_up();
  }
  if (retry_ns_ != 0 && now >= retry_ns_) {
    retry_ns_ = 0;
    if (state_ == State::kSeating) {
      call_root();
    } else if (state_ == State::kAttaching ||
               (state_ == State::kRunning && lost_parent_ != kNoAgent)) {
      call_parent();
    }
  }
  if (rejoin_deadline_ns_ != 0 && lost_parent_ != kNoAgent && now >= rejoin_deadline_ns_) {
    cut_off("this host has lost " + name_of(lost_parent_) + " (" + lost_why_ +
            ") and found no way to the others within " + std::to_string(config_.rejoin_ms) +
            " ms (" + last_error_ +
            "): all ranks elsewhere count as gone; look at this host's "
            "network");
  }
  std::vector<std::uint64_t> late;  // what settled() does may end all of them
  for (const auto& [number, q] : questions_) {
    if (now >= q.deadline_ns) late.push_back(number);
  }
  for (const auto number : late) settle_question(number, true);
  if (next_tick_ns_ != 0 && now >= next_tick_ns_) tick(now);
  schedule();
}

// The meeting takes too long.
void Agent::give_up() {
  const std::string me = between(config_.host, numbers_of(config_.ranks));
  const std::string after = std::to_string(config_.start_ms) + " ms";
  if (failing_) {
    fail(failure_);
  } else if (config_.root) {
    fail("not all ranks had joined after " + after + missing_text() +
         "; see what became of them, or allow more time");
  } else if (state_ == State::kJoined) {
    fail_all(me + " gave up: not all ranks had joined after " + after);
  } else {
    fail(me + " cannot reach " +
         (state_ == State::kSeating ? "the root at " + config_.root_address.text()
                                    : "its parent at " + parent_door_.text()) +
         " after " + after + (last_error_.empty() ? "" : " (" + last_error_ + ")") +
         "; see that rank 0's host runs, and that hosts reach each other by TCP");
  }
}

void Agent::tick(std::uint64_t now) {
  const std::uint64_t period = ns_of(config_.beat_ms) / 2;
  // An agent that was kept from running has not listened either, so others were not silent.
  const std::uint64_t slept = now - last_tick_ns_;
  const std::uint64_t lateness = slept > 2 * period + period / 2 ? slept - period : 0;
  last_tick_ns_ = now;
  next_tick_ns_ = now + period;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> silent;  // token, ms
  std::vector<std::uint64_t> late_strangers;
  NumberList suspects;
  for (const auto& [token, link] : links_) {
    if (link->purpose == Purpose::kStranger) {
      if (now - link->since_ns >= kStrangerNs) late_strangers.push_back(token);
      continue;
    }
    if (!link->attached || state_ != State::kRunning) continue;
    link->heard_ns = std::min(now, link->heard_ns + lateness);
    const std::uint64_t quiet = now - link->heard_ns;
    if (quiet >= ns_of(config_.silence_ms)) {
      silent.emplace_back(token, quiet / kMs);
    } else if (quiet >= ns_of(config_.suspect_ms) && !link->suspect) {
      link->suspect = true;
      suspects.push_back(link->agent);
    }
    if (now - link->sent_ns + period / 2 >= ns_of(config_.beat_ms)) {
      post(*link, AgentMessageType::kBeat, {});
    }
  }
  for (const auto token : late_strangers) {
    ++counts_.refused;
    drop(token);
  }
  for (const auto a : suspects) {
    if (events_.suspect) events_.suspect(a, true);
  }
  for (const auto& [token, ms] : silent) {
    Link* link = find(token);
    if (link == nullptr || link->closing) continue;
    const std::string why = "it has said nothing for " + std::to_string(ms) + " ms";
    if (link->purpose == Purpose::kChild) {
      // It is told, if it ever listens again.
      AgentGoneMessage m;
      m.agent = link->agent;
      m.why = name_of(link->agent) + " is gone: " + why;
      mark_gone(m, nullptr);
    } else {
      lose(*link, why);
    }
  }
  NumberList late;
  for (auto& [agent, deadline] : awaited_) {
    deadline += lateness;
    if (now >= deadline) late.push_back(agent);
  }
  for (const auto a : late) {
    AgentGoneMessage m;
    m.agent = a;
    m.why = name_of(a) + " is gone: its parent died, and it has called nobody since";
    mark_gone(m, nullptr);
  }
}

void Agent::schedule() {
  std::uint64_t next = 0;
  const auto also = [&](std::uint64_t t) {
    if (t != 0 && (next == 0 || t < next)) next = t;
  };
  also(crowded_until_ns_);
  also(gather_ns_);
  also(retry_ns_);
  if (state_ == State::kRunning) {
    also(rejoin_deadline_ns_);
    for (const auto& [number, q] : questions_) also(q.deadline_ns);
  } else {
    also(start_deadline_ns_);
  }
  if (links_.size() > children_.size() + (upwards_ != 0 ? 1 : 0) && next_tick_ns_ == 0) {
    last_tick_ns_ = monotonic_ns();  // strangers have their time
    next_tick_ns_ = last_tick_ns_ + ns_of(config_.beat_ms) / 2;
  }
  const bool over = state_ == State::kCutOff || state_ == State::kFinished;
  if (over && links_.empty()) next_tick_ns_ = 0;
  also(next_tick_ns_);
  poller_.at(this, next);
}

}  // namespace unjam
