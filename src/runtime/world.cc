#include "runtime/world.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "control/hosts_meeting.h"
#include "runtime/context.h"
#include "runtime/ending.h"
#include "runtime/explain_signal.h"
#include "runtime/log.h"
#include "runtime/network.h"
#include "transport/announcement.h"

namespace unjam {
namespace {

// What was said last must reach the others before the connections close.
constexpr std::int64_t kFarewellMs = 1000;

// Whether memory behind arenas' blocks comes as ranks meet. (Where all connectors come with the
// first use, all memory comes at once.)
bool comes_by_rooms(const Settings& settings) {
  return settings.device == UNJAM_DEVICE_CUDA || settings.first_connectors != 0;
}

}  // namespace

std::string call_text(const std::string& key, const std::string& group, std::uint64_t n) {
  return "key '" + key + "' of group '" + group + "', use " + std::to_string(n + 1);
}

std::string rank_list(std::vector<int> ranks) {
  std::sort(ranks.begin(), ranks.end());
  std::string t = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i == 16) return t + ", … (" + std::to_string(ranks.size()) + " in all)";
    t += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  }
  return t;
}

World::World(int ranks, const Settings& first_settings, std::optional<JobSecret> secret)
    : ranks_(ranks),
      first_settings_(first_settings),
      secret_(secret),
      arenas_(ranks, first_settings, !secret, comes_by_rooms(first_settings)),
      windows_(ranks, [this](int owner, std::uint64_t serial) { say_let_go(owner, serial); }),
      rooms_(comes_by_rooms(first_settings)
                 ? std::make_unique<Rooms>(ranks, shape(), static_cast<Rooms::Memory&>(*this))
                 : nullptr),
      joined_(static_cast<std::size_t>(ranks), false),
      // Alone: all are of this process. Else not known before the start.
      process_of_(static_cast<std::size_t>(ranks), secret ? -1 : 0),
      contexts_(static_cast<std::size_t>(ranks), nullptr) {
  open_hosts(first_settings);
  Log::process().set_level(static_cast<LogLevel>(first_settings.log));
  explain_on_signal(static_cast<int>(first_settings.explain_signal));
  end_with_process(this);
  try {
    control_ = std::thread([this] { control(); });
  } catch (...) {
    ended_before_process(this);  // there will be no destructor to do it
    throw;
  }
}

World::~World() {
  flush_network();  // the control thread hears of its end
  ended_before_process(this);
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  mesh_.wake();
  control_.join();
  // In front of the memory; which stays where a network may still be at it.
  if (network_ != nullptr && !network_->close()) arenas_.keep();
  network_.reset();
  windows_.stop();
  if (rooms_ != nullptr) rooms_->stop();
  mesh_.drain(kFarewellMs);
  arenas_.leave_devices();
}

std::uint64_t* World::announcements(const std::vector<int>& members, std::uint64_t tag) const {
  const int home = members[tag % members.size()];
  return reinterpret_cast<std::uint64_t*>(arenas_.host_part(home) + shape().announcements());
}

int World::ranks_a_core() const {
  const auto crowd = [](int ranks, const CpuSet& cpus) {
    const int cores = count_cpus(cpus);
    return cores == 0 ? 1 : (ranks + cores - 1) / cores;
  };
  if (host_cpus_.empty()) return crowd(ranks_, cpus_);
  int most = 1;
  for (std::size_t h = 0; h < host_cpus_.size(); ++h) {
    const auto ranks = std::count(host_of_.begin(), host_of_.end(), static_cast<int>(h));
    most = std::max(most, crowd(static_cast<int>(ranks), host_cpus_[h]));
  }
  return most;
}

std::optional<HostTable> World::host_table(const std::vector<int>& members) const {
  if (hosts_.size() < 2) return std::nullopt;
  std::vector<int> names;
  for (const int rank : members) names.push_back(host_of_[static_cast<std::size_t>(rank)]);
  HostTable table(names);
  if (table.hosts() == 1) return std::nullopt;
  return table;
}

int World::log_rank() const {
  const auto own = std::find(process_of_.begin(), process_of_.end(), me_);
  return own == process_of_.end() ? 0 : static_cast<int>(own - process_of_.begin());
}

// ---- the control thread ----

std::int64_t World::look_ms() const {
  std::int64_t ms = first_settings_.stall_ms;
  for (const std::int64_t limit : {first_settings_.report_ms, first_settings_.timeout_ms}) {
    if (limit != 0) ms = std::min(ms, limit);
  }
  return ms;
}

std::int64_t World::watch_ms() const { return std::clamp<std::int64_t>(look_ms() / 2, 5, 250); }

void World::control() {
  pthread_setname_np(pthread_self(), "unjam control");
  std::unique_lock lock(mutex_);
  if (!alone()) meet(lock);
  const Mesh::Events events{[this](int process, Frame& frame) {
                              std::lock_guard inner(mutex_);
                              on_message(process, frame);
                              changed_.notify_all();
                            },
                            [this](int process, bool died, const std::string& why) {
                              // Not with the lock: calls that others make need it.
                              if (!died && misses(process)) {
                                died = mesh_.ended(process, kLastBreathMs);
                              }
                              std::lock_guard inner(mutex_);
                              // A carrier that has failed says more than who hangs up then.
                              take_network_news();
                              on_lost({process, died, why});
                              changed_.notify_all();
                            }};
  std::uint32_t signals = explain_signals();
  while (!stopping_) {
    // Sleeps for good while nothing can be late.
    const bool anybody = std::any_of(contexts_.begin(), contexts_.end(),
                                     [](const Context* c) { return c != nullptr; });
    const bool printing = std::any_of(gatherings_.begin(), gatherings_.end(),
                                      [](const auto& g) { return g.second.print; });
    lock.unlock();
    mesh_.poll(printing || !losses_.empty() ? 5 : anybody ? watch_ms() : -1, events);
    lock.lock();
    if (stopping_) break;
    take_network_news();
    take_losses();
    tell_given_up();
    watch();
    if (const std::uint32_t now = explain_signals(); now != signals) {
      signals = now;
      gather(true);
    }
    print_gathered();
  }
}

bool World::is_rank_of(std::uint32_t rank, int process) const {
  return rank < process_of_.size() && process_of_[rank] == process;
}

std::set<int> World::processes_of(const std::vector<int>& members) const {
  std::set<int> processes;
  for (const int m : members) {
    if (!is_local(m)) processes.insert(process_of_[static_cast<std::size_t>(m)]);
  }
  return processes;
}

void World::on_snapshot_request(int process, const SnapshotRequestMessage& m) {
  SnapshotMessage reply;
  reply.number = m.number;
  reply.ranks = local_snapshots();
  mesh_.send(process, MessageType::kSnapshot, reply.encode());
}

void World::on_snapshot(int process, SnapshotMessage& m) {
  const auto found = gatherings_.find(m.number);
  if (found == gatherings_.end() || found->second.waits_for.erase(process) == 0) return;
  for (RankSnapshot& s : m.ranks) {
    if (is_rank_of(static_cast<std::uint32_t>(s.rank), process)) found->second.add(std::move(s));
  }
}

// What makes no sense is passed over: its sender proved that it is of our job, so it is a fault of
// ours, and must not make things worse here.
void World::on_message(int process, Frame& frame) {
  if (start_failed_) return;  // not all memory is there
  switch (static_cast<MessageType>(frame.type)) {
    case MessageType::kGone: {
      GoneMessage m;
      if (m.decode(frame.payload) && is_rank_of(m.rank, process)) {
        const int rank = static_cast<int>(m.rank);
        mark_gone(rank, m.why, m.ended ? legacy_of(rank) : nullptr);
      }
      break;
    }
    case MessageType::kGaveUp: {
      GaveUpMessage m;
      if (m.decode(frame.payload) && is_rank_of(m.rank, process)) {
        on_gave_up(static_cast<int>(m.rank), {m.of.begin(), m.of.end()});
      }
      break;
    }
    case MessageType::kDeparted: {
      DepartedMessage m;
      if (!m.decode(frame.payload) || !is_rank_of(m.rank, process)) break;
      // A rank leaves once. (What it has called is a map, so that repeating it adds nothing.)
      departed_.try_emplace(static_cast<int>(m.rank),
                            Departed{{m.calls.begin(), m.calls.end()}, std::move(m.untaken)});
      for (Context* c : contexts_) {
        if (c != nullptr) c->peer_left(static_cast<int>(m.rank));
      }
      windows_.forget(static_cast<int>(m.rank), false);
      break;
    }
    case MessageType::kQuery: {
      QueryMessage m;
      if (m.decode(frame.payload)) on_query(process, m);
      break;
    }
    case MessageType::kAnswer: {
      AnswerMessage m;
      if (m.decode(frame.payload)) on_answer(process, m);
      break;
    }
    case MessageType::kFail: {
      FailMessage m;
      if (!m.decode(frame.payload)) break;
      const bool known = m.code == UNJAM_ERROR_TIMEOUT || m.code == UNJAM_ERROR_PEER;
      const auto code = known ? static_cast<unjamResult_t>(m.code) : UNJAM_ERROR_MISMATCH;
      fail_here(m.tag, m.n, code, m.text, process);
      break;
    }
    case MessageType::kSnapshotRequest: {
      SnapshotRequestMessage m;
      if (m.decode(frame.payload)) on_snapshot_request(process, m);
      break;
    }
    case MessageType::kSnapshot: {
      SnapshotMessage m;
      if (m.decode(frame.payload)) on_snapshot(process, m);
      break;
    }
    case MessageType::kWindow:
    case MessageType::kWindowGone:
    case MessageType::kWindowLetGo:
      on_window(process, frame);
      break;
    case MessageType::kRoom:
      on_room(process, frame);
      break;
    case MessageType::kLost: {
      LostMessage m;
      if (m.decode(frame.payload)) on_said_lost(process, m);
      break;
    }
    case MessageType::kAllHere:
      if (network_ != nullptr) network_->all_is_there(process);
      break;
    default:
      break;
  }
}

}  // namespace unjam
