#include "control/hosts_meeting.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/fd.h"

namespace unjam {
namespace {

constexpr std::string_view kAt = " at ";

// Of this machine, the address from which the other one is reached. Nothing is sent.
bool address_towards(const SocketAddress& to, SocketAddress& from, std::string& error) {
  sockaddr_storage storage;
  const socklen_t size = to.to(storage);
  const Fd s(socket(to.v4() ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!s || connect(s.get(), reinterpret_cast<sockaddr*>(&storage), size) != 0) {
    error = "no way to " + to.text() + ": " + std::strerror(errno);
    return false;
  }
  from = local_address(s.get());
  from.port = 0;
  return true;
}

}  // namespace

std::string place_text(const std::string& name, const SocketAddress& door) {
  const std::string behind = std::string(kAt) + door.text();
  return name.substr(0, kLongestAgentHost - behind.size()) + behind;
}

bool read_place(std::string_view text, std::string& name, SocketAddress& door) {
  const auto at = text.rfind(kAt);
  if (at == std::string_view::npos) return false;
  const std::string_view address = text.substr(at + kAt.size());
  // Digits and signs alone: what is looked up here is no name.
  if (address.find_first_not_of("0123456789abcdef:.[]") != std::string_view::npos) return false;
  std::string unused;
  name = text.substr(0, at);
  return resolve_address(address, door, unused) && door.port != 0;
}

bool places_of(const AgentTable& table, HostPlaces& places, std::string& error) {
  places = {};
  std::map<std::string, std::uint32_t, std::less<>> processes;  // by what agents say of them
  std::map<std::uint64_t, std::uint32_t> hosts;                 // by their numbers
  for (std::uint32_t r = 0; r < table.ranks(); ++r) {
    const std::string_view text = table.host(table.agent_of(r));
    const auto [host, new_host] =
        hosts.emplace(table.card(r), static_cast<std::uint32_t>(hosts.size()));
    const auto known = processes.find(text);
    if (known != processes.end()) {
      if (places.processes[known->second].host != host->second) {
        error = "two hosts say that they are " + std::string(text);
        return false;
      }
      places.process_of.push_back(known->second);
      continue;
    }
    HostPlaces::Process p;
    p.host = host->second;
    if (!read_place(text, p.name, p.door)) {
      error =
          "rank " + std::to_string(r) + " says a place that makes no sense: " + std::string(text);
      return false;
    }
    if (new_host) places.hosts.push_back(p.name);
    const auto number = static_cast<std::uint32_t>(processes.size());
    processes.emplace(text, number);
    places.processes.push_back(std::move(p));
    places.process_of.push_back(number);
  }
  return true;
}

HostsMeeting::HostsMeeting(HostsConfig config)
    : config_(std::move(config)), pairs_(poller_, config_.secret) {}

HostsMeeting::~HostsMeeting() { close(); }

void HostsMeeting::close() {
  agents_.clear();
  pairs_.take();
}

bool HostsMeeting::open(const std::string& settings, std::string& error) {
  settings_ = settings;
  SocketAddress own;
  if (!resolve_address(config_.root, root_, error)) {
    error = "UNJAM_ROOT: " + error;
    return false;
  }
  if (root_.port == 0 || root_.unspecified()) {
    error = "UNJAM_ROOT=" + config_.root +
            ": give an address of rank 0's host that all hosts can reach, and a free port there";
    return false;
  }
  if (!address_towards(root_, own, error) || !pairs_.open(own, error)) {
    error = "UNJAM_ROOT=" + config_.root + ": " + error;
    return false;
  }
  return true;
}

void HostsMeeting::join(std::uint32_t rank) {
  poller_.post([this, rank] { add_agent(rank); });
}

void HostsMeeting::wake() {
  poller_.post([] {});
}

void HostsMeeting::add_agent(std::uint32_t rank) {
  AgentConfig c;
  c.secret = config_.secret;
  c.root = rank == 0;
  c.root_address = root_;
  c.door = pairs_.address();
  c.door.port = 0;
  c.host = place_text(config_.name, pairs_.address());
  c.ranks = {{rank, config_.host}};
  c.job_ranks = config_.ranks;
  c.settings = settings_;
  c.start_ms = config_.start_ms;
  AgentEvents events;
  const std::size_t number = agents_.size();
  events.started = [this, number] { started(*agents_[number]); };
  events.failed = [this](const std::string& why) {
    if (failure_.empty()) failure_ = why;
  };
  // Who is through with the meeting himself need not hear that others part: of a real death the
  // connections of processes tell.
  const auto lost = [this](const std::string& why) {
    parted_ = parted_ || finishing_;
    if (!finishing_ && failure_.empty()) failure_ = why;
  };
  events.gone = [lost](const AgentNews& news) { lost(news.text); };
  events.cut_off = lost;
  events.finished = [this] { ++finished_; };
  agents_.push_back(std::make_unique<Agent>(poller_, std::move(c), std::move(events)));
  std::string error;
  if (!agents_.back()->start(error) && failure_.empty()) {
    failure_ =
        (rank == 0 ? "rank 0 cannot be the root (UNJAM_ROOT=" + config_.root + "): " : "") + error;
  }
}

// (Each of this process's agents has the same table.)
void HostsMeeting::started(const Agent& agent) {
  if (++started_ != 1) return;
  std::string error;
  if (!places_of(agent.table(), places_, error)) {
    if (failure_.empty()) failure_ = error;
    return;
  }
  for (std::uint32_t p = 0; p < places_.processes.size(); ++p) {
    if (places_.processes[p].door == pairs_.address()) self_ = p;
  }
}

void HostsMeeting::run_once(std::int64_t timeout_ms) {
  poller_.run_once(timeout_ms);
  // (Each of this process's agents has the same table.)
  if (finishing_ && (parted_ || finished_ == agents_.size())) ++rounds_behind_;
  known_ = started_ != 0 && started_ == agents_.size() && failure_.empty();
}

void HostsMeeting::fail(const std::string& why) {
  if (failure_.empty()) failure_ = why;
  for (const auto& agent : agents_) {
    if (agent->state() != Agent::State::kRunning) continue;
    agent->report_gone(
        places_.processes.empty() ? NumberList{} : agent->table().ranks_of(agent->number()), why);
  }
}

void HostsMeeting::meet(std::function<GreetingMessage(std::uint32_t)> greeting) {
  std::map<std::uint32_t, SocketAddress> others;
  for (std::uint32_t p = 0; p < places_.processes.size(); ++p) {
    if (places_.processes[p].host == places_.processes[self_].host) continue;
    others[p] = places_.processes[p].door;
  }
  pairs_.meet(self_, others, std::move(greeting));
}

std::string HostsMeeting::missing() const {
  std::string text;
  std::size_t named = 0;
  for (const auto& [process, why] : pairs_.missing()) {
    if (++named == 5) return text + ", …";
    const HostPlaces::Process& p = places_.processes[process];
    text +=
        (text.empty() ? "" : ", ") + p.name + std::string(kAt) + p.door.text() + " (" + why + ")";
  }
  return text;
}

void HostsMeeting::finish() {
  finishing_ = true;
  rounds_behind_ = 0;
  for (const auto& agent : agents_) agent->finish();
}

}  // namespace unjam
