// How a world's ranks meet those of other hosts (control/hosts_meeting.h), and what it hears of
// processes there.
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "base/clock.h"
#include "base/siphash.h"
#include "control/hosts_meeting.h"
#include "runtime/context.h"
#include "runtime/host_id.h"
#include "runtime/log.h"
#include "runtime/network.h"
#include "runtime/world.h"

namespace unjam {
namespace {

// A turn of the meeting, after which this process's own failures are seen.
constexpr std::int64_t kTurnMs = 50;
// For those that are there to hear why there will be no job.
constexpr std::uint64_t kLastWordsNs = 500'000'000;

// Processes of one host meet as ever, at a rendezvous of their own.
JobSecret secret_of_host(const JobSecret& secret, std::uint64_t host) {
  JobSecret own;
  const std::string_view bytes(reinterpret_cast<const char*>(secret.data()), secret.size());
  for (std::uint64_t i = 0; i < own.size() / 8; ++i) {
    const std::uint64_t word = siphash({host, i}, bytes);
    std::memcpy(own.data() + i * 8, &word, 8);
  }
  return own;
}

}  // namespace

void World::open_hosts(const Settings& settings) {
  const char* const root = std::getenv("UNJAM_ROOT");
  if (!secret_ || ranks_ == 1 || root == nullptr || *root == '\0') return;
  const HostIdentity host = this_host();
  HostsConfig c;
  c.secret = *secret_;
  c.root = root;
  c.ranks = static_cast<std::uint32_t>(ranks_);
  c.start_ms = settings.init_timeout_ms;
  c.name = host.name;
  c.host = host.number;
  hosts_meeting_ = std::make_unique<HostsMeeting>(std::move(c));
}

// Of all ranks: with the carrier, which each host has to have.
std::string World::hosts_settings(const std::string& agreed, const Settings& settings) {
  carrier_ = NetCarrier::find(settings, no_carrier_);
  return agreed + ", carrier=" + (carrier_ == nullptr ? "none" : carrier_->kind());
}

void World::meet_hosts(std::unique_lock<std::mutex>& lock) {
  HostsMeeting& hosts = *hosts_meeting_;
  hosts_deadline_ns_ = ~std::uint64_t{0};  // until all have joined the agents have one
  const bool all = run_hosts(lock, [&] { return hosts.known(); }) && take_places() &&
                   meet_here(lock) && open_network() && meet_pairs(lock);
  if (all) {
    started_ = true;
    runs_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
  const bool failed = !all && !failure_.empty();
  if (failed) hosts.fail(failure_);
  const bool at_rendezvous = client_.fd() >= 0;
  if (at_rendezvous) leave_rendezvous(lock);
  lock.unlock();
  for (const std::uint64_t end = monotonic_ns() + kLastWordsNs; failed && monotonic_ns() < end;) {
    hosts.run_once(kTurnMs);
  }
  hosts.close();
  lock.lock();
}

// False: the meeting has failed, or the world ends.
bool World::run_hosts(std::unique_lock<std::mutex>& lock, const std::function<bool()>& until) {
  HostsMeeting& hosts = *hosts_meeting_;
  while (!stopping_ && failure_.empty()) {
    if (until()) return true;
    lock.unlock();
    hosts.run_once(kTurnMs);
    lock.lock();
    if (!hosts.failure().empty()) fail_meeting(hosts.failure());
    if (failure_.empty() && monotonic_ns() > hosts_deadline_ns_) {
      const std::string missing = hosts.missing();
      fail_meeting(missing.empty() ? "some process did not come to the end of the meeting in time"
                                   : "this process could not meet those at " + missing);
    }
  }
  return false;
}

// All ranks have joined, and it is known where they are.
bool World::take_places() {
  hosts_deadline_ns_ =
      monotonic_ns() + static_cast<std::uint64_t>(first_settings_.init_timeout_ms) * 1'000'000;
  const HostPlaces& places = hosts_meeting_->places();
  me_ = static_cast<int>(hosts_meeting_->self());
  const std::uint32_t own_host = places.processes[hosts_meeting_->self()].host;
  for (int r = 0; r < ranks_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    process_of_[i] = static_cast<int>(places.process_of[i]);
    if (is_local(r) == joined_[i]) continue;
    fail_meeting("the table of agents confuses the ranks of this process");
    return false;
  }
  pids_.assign(places.processes.size(), 0);
  pids_[static_cast<std::size_t>(me_)] = getpid();
  for (const HostPlaces::Process& p : places.processes) {
    remote_.push_back(p.host != own_host);
    host_places_.push_back({static_cast<int>(p.host), p.name, p.door.text()});
  }
  for (const Joining& j : joining_) add_cpus(j.message.cpus, &cpus_);
  if (places.hosts.size() == 1) return true;
  hosts_ = places.hosts;
  for (int r = 0; r < ranks_; ++r) {
    host_of_.push_back(static_cast<int>(places.host_of(static_cast<std::uint32_t>(r))));
  }
  host_cpus_.resize(hosts_.size());
  std::string why;
  if (first_settings_.device == UNJAM_DEVICE_CUDA) {
    why =
        "ranks on CUDA devices are to be on one host in this version (UNJAM_DEVICE=host crosses "
        "hosts)";
  } else if (rooms_ != nullptr) {
    why = "UNJAM_FIRST_CONNECTORS must be 0 between hosts";
  } else if (carrier_ == nullptr) {
    why = "nothing carries data between hosts: " + no_carrier_;
  }
  if (!why.empty()) fail_meeting(why);
  return why.empty();
}

// The other processes of this host.
bool World::meet_here(std::unique_lock<std::mutex>& lock) {
  const auto here = [this](int process) { return !remote_[static_cast<std::size_t>(process)]; };
  const auto processes = std::count(remote_.begin(), remote_.end(), false);
  const auto ranks = std::count_if(process_of_.begin(), process_of_.end(), here);
  std::vector<Joining> joining = std::exchange(joining_, {});
  if (processes == 1) return true;
  const JobSecret secret = secret_of_host(*secret_, this_host().number);
  lock.unlock();
  std::string error;
  const bool found = client_.connect(secret, first_settings_.init_timeout_ms, error);
  lock.lock();
  if (!found) {
    fail_meeting(error);
    return false;
  }
  for (Joining& j : joining) {
    j.message.here = static_cast<std::uint32_t>(ranks);
    j.message.host.clear();
    client_.join(j.message, std::move(j.shared));
  }
  await_start(lock);
  const StartMessage& start = client_.start;
  if (!client_.started || !failure_.empty()) return false;
  // Numbers of the rendezvous, and of the job.
  std::vector<int> number(start.pids.size(), -1);
  for (std::size_t r = 0; r < start.process_of.size() && r < process_of_.size(); ++r) {
    if (start.process_of[r] != StartMessage::kElsewhere) {
      number[start.process_of[r]] = process_of_[r];
    }
  }
  const bool right = number[start.me] == me_ && start.process_of.size() == process_of_.size() &&
                     std::count(number.begin(), number.end(), -1) == 0;
  if (!right) {
    fail_meeting("the rendezvous of this host confuses its processes");
    return false;
  }
  cpus_ = start.cpus;
  if (!adopt_memory()) return false;
  for (auto& [process, peer] : client_.peers) {
    const int p = number[static_cast<std::size_t>(process)];
    pids_[static_cast<std::size_t>(p)] = start.pids[static_cast<std::size_t>(process)];
    mesh_.add(p, std::move(peer.socket), std::move(peer.pidfd));
  }
  client_.peers.clear();
  return true;
}

// Mirrors of the ranks of other hosts, and what takes slices there.
bool World::open_network() {
  if (hosts_.empty()) return true;
  std::string error;
  Network::Places p;
  for (int r = 0; r < ranks_; ++r) {
    const int process = process_of_[static_cast<std::size_t>(r)];
    const bool beside = process != me_ && !remote_[static_cast<std::size_t>(process)];
    p.process_of.push_back(beside ? kBeside : static_cast<std::uint16_t>(process));
    if (!remote_[static_cast<std::size_t>(process)] || arenas_.mirror(r, error)) continue;
    fail_meeting("no memory for what ranks of other hosts are sent: " + error);
    return false;
  }
  p.shape = shape();
  p.self = static_cast<std::uint32_t>(me_);
  p.processes = static_cast<std::uint32_t>(remote_.size());
  p.is_remote = remote_;
  p.bases = arenas_.bases();
  p.window = static_cast<std::uint64_t>(first_settings_.net_window);
  network_ = std::make_unique<Network>(std::move(carrier_), [this] { mesh_.wake(); });
  if (!network_->open(p, error)) {
    fail_meeting("the carrier does not begin: " + error);
    network_.reset();
  }
  return network_ != nullptr;
}

// The processes of other hosts; then agents are not needed any more, and nobody listens.
bool World::meet_pairs(std::unique_lock<std::mutex>& lock) {
  HostsMeeting& hosts = *hosts_meeting_;
  std::map<std::uint32_t, PairMeeting::Met> met;
  if (network_ != nullptr) {
    std::map<std::uint32_t, GreetingMessage> greetings;
    for (std::uint32_t p = 0; p < remote_.size(); ++p) {
      if (!remote_[p]) continue;
      GreetingMessage& g = greetings[p];
      g.from = static_cast<std::uint32_t>(me_);
      g.to = p;
      g.pid = getpid();
      g.cpus = cpus_;
      std::string error;
      if (network_->invite(p, g.carrier, error) && g.carrier.size() <= kLongestCarrierAddress) {
        continue;
      }
      fail_meeting("the carrier makes no address: " + error);
      return false;
    }
    // (A copy: connections are still greeted while a meeting that has failed says its last words.)
    hosts.meet([greetings](std::uint32_t process) { return greetings.at(process); });
    if (!run_hosts(lock, [&] { return hosts.met(); })) return false;
    met = hosts.take();
    host_cpus_[host_index(me_)] = cpus_;
    for (auto& [p, m] : met) {
      pids_[p] = m.greeting.pid;
      add_cpus(m.greeting.cpus, &host_cpus_[host_index(static_cast<int>(p))]);
      std::string error;
      if (network_->meet(p, m.greeting.carrier, error)) continue;
      fail_meeting("the carrier refuses the address of the process at " + host_places_[p].door +
                   ": " + error);
      return false;
    }
    try {
      network_->start();
    } catch (const std::exception& e) {
      fail_meeting(std::string("the network's thread cannot begin: ") + e.what());
      return false;
    }
  }
  hosts.finish();
  if (!run_hosts(lock, [&] { return hosts.finished(); })) return false;
  Mesh::Beats beats;
  beats.silence_ms = first_settings_.peer_timeout_ms;
  beats.beat_ms = std::min<std::int64_t>(beats.beat_ms, beats.silence_ms / 4);
  for (auto& [p, m] : met) {
    mesh_.add_remote(static_cast<int>(p), std::move(m.channel), beats);
  }
  if (network_ != nullptr) {
    Log::process().say(LogLevel::kInfo, log_rank(), [&] {
      return "job on " + std::to_string(hosts_.size()) + " hosts, this is " +
             hosts_[host_index(me_)] + "; carrier: " + network_->title();
    });
  }
  return true;
}

// ---- the job ----

CourierDriver* World::network() const { return network_ == nullptr ? nullptr : network_->driver(); }

std::string World::carrier() const { return network_ == nullptr ? "" : network_->title(); }

std::string World::host_name(int rank) const {
  if (network_ == nullptr) return "";
  return host_places_[static_cast<std::size_t>(process_of_[static_cast<std::size_t>(rank)])].name;
}

std::size_t World::host_index(int process) const {
  return static_cast<std::size_t>(host_places_[static_cast<std::size_t>(process)].host);
}

void World::announced(const std::vector<int>& members, std::uint64_t tag) {
  if (network_ == nullptr) return;
  const int home = members[tag % members.size()];
  if (is_remote(process_of_[static_cast<std::size_t>(home)])) network_->driver()->announced();
}

void World::flush_network() {
  {
    const std::lock_guard lock(mutex_);
    if (!started_ || network_ == nullptr) return;
  }
  network_->say_farewell(first_settings_.peer_timeout_ms);
}

// "123", or "123 on host b, 10.0.0.1:4567".
std::string World::process_text(int process) const {
  const auto p = static_cast<std::size_t>(process);
  std::string text = std::to_string(pids_[p]);
  if (is_remote(process)) {
    text += " on host " + host_places_[p].name + ", " + host_places_[p].door;
  }
  return text;
}

// With the lock, as the following.
void World::take_network_news() {
  if (network_ == nullptr) return;
  for (const Network::News& news : network_->take_news()) {
    if (news.what == Network::News::kLeft) {
      // (Before the answer: that lets it close its connection.)
      said_good_bye_.insert(news.process);
      mesh_.send(news.process, MessageType::kAllHere, "");
    } else if (lost_.count(news.process) == 0) {
      mesh_.hang_up(news.process);
      on_lost({news.process, false, "by its carrier: " + news.why});
    }
  }
}

void World::tell_lost(int process, const std::string& why) {
  LostMessage m;
  m.process = static_cast<std::uint32_t>(process);
  m.why = why;
  mesh_.send_all(MessageType::kLost, m.encode());
}

// All are to see the same: who is lost to one is lost to all, and learns it as they hang up.
void World::on_said_lost(int by, const LostMessage& m) {
  const int process = static_cast<int>(m.process);
  if (m.process >= remote_.size() || process == me_ || lost_.count(process) != 0) return;
  mesh_.hang_up(process);
  on_lost({process, false, m.why + " (says process " + process_text(by) + ")"});
}

}  // namespace unjam
