#include "control/agent.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/random_bytes.h"
#include "control/agent_limits.h"

namespace unjam {
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
