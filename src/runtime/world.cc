#include "runtime/world.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/fork_guard.h"
#include "base/limits.h"
#include "control/join_text.h"
#include "runtime/allowed_cpus.h"
#include "runtime/context.h"
#include "runtime/cuda_library.h"
#include "runtime/ending.h"
#include "runtime/engine_memory.h"
#include "runtime/explain_signal.h"
#include "runtime/host_id.h"
#include "runtime/job_id.h"
#include "runtime/log.h"
#include "transport/announcement.h"

namespace unjam {
namespace {

// What was said last must reach the others before the connections close.
constexpr std::int64_t kFarewellMs = 1000;
// For who keeps the rendezvous to say who has joined.
constexpr std::int64_t kAnswerMs = 1000;
// From the closing of a dying process's sockets to its end, which a busy machine puts off. Its
// death is to be known within a second, also where a GPU is in use, whose driver takes its time.
constexpr int kLastBreathMs = 400;

// Worlds by id: those that ranks are joining.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<World>> worlds;
};
Registry& registry() { return per_process<Registry>(); }  // a child of fork() has none of these

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

std::shared_ptr<World> World::by_id(const unjamUniqueId_t& id, int ranks, const Settings& settings,
                                    unjamResult_t& code, std::string& error) {
  JobSecret secret;
  if (!secret_of(id, secret, error)) {
    code = UNJAM_ERROR_INVALID_ARGUMENT;
    return nullptr;
  }
  Registry& r = registry();
  std::lock_guard lock(r.mutex);
  std::erase_if(r.worlds, [](const auto& w) { return w.second.expired(); });
  std::weak_ptr<World>& place = r.worlds[std::string(id.internal, sizeof(id.internal))];
  std::shared_ptr<World> world = place.lock();
  if (world == nullptr) {
    world = std::make_shared<World>(ranks, settings, secret);
    place = world;
  }
  if (world->ranks() != ranks) {
    code = UNJAM_ERROR_MISMATCH;
    error = ranks_differ_text(static_cast<std::uint64_t>(ranks),
                              static_cast<std::uint64_t>(world->ranks()));
    std::lock_guard meeting(world->mutex_);
    if (!world->started_) {
      world->fail_meeting("one rank says that the job has " + std::to_string(world->ranks()) +
                          " ranks, another one " + std::to_string(ranks) +
                          ": give the same number everywhere");
    }
    return nullptr;
  }
  return world;
}

World::World(int ranks, const Settings& first_settings, std::optional<JobSecret> secret)
    : ranks_(ranks),
      first_settings_(first_settings),
      shape_(arena_shape(first_settings, ranks)),
      secret_(secret),
      arenas_(static_cast<std::size_t>(ranks)),
      device_arenas_(static_cast<std::size_t>(ranks)),
      devices_(static_cast<std::size_t>(ranks), -1),
      bases_(static_cast<std::size_t>(ranks), nullptr),
      windows_(ranks, [this](int owner, std::uint64_t serial) { say_let_go(owner, serial); }),
      // (A single one has no peers; and where all connectors come with the first, all come at
      // once.)
      rooms_(first_settings.device == UNJAM_DEVICE_CUDA || first_settings.first_connectors != 0
                 ? std::make_unique<Rooms>(ranks, shape_, static_cast<Rooms::Memory&>(*this))
                 : nullptr),
      joined_(static_cast<std::size_t>(ranks), false),
      // Alone: all are of this process. Else not known before the start.
      process_of_(static_cast<std::size_t>(ranks), secret ? -1 : 0),
      contexts_(static_cast<std::size_t>(ranks), nullptr) {
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
  ended_before_process(this);
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  mesh_.wake();
  control_.join();
  windows_.stop();
  if (rooms_ != nullptr) rooms_->stop();
  mesh_.drain(kFarewellMs);
  for (void* const table : registered_) cuda_->unregister_host(table);
  if (!links_registered_) return;
  for (int r = 0; r < ranks_; ++r) cuda_->unregister_host(link(r));
}

std::uint64_t World::bytes_before_ledger() const {
  return first_settings_.device == UNJAM_DEVICE_CUDA ? kLinkOffset + kLinkBytes
                                                     : shape_.total_bytes();
}

std::uint64_t World::host_bytes() const { return bytes_with_ledger(bytes_before_ledger()); }

LedgerMemory& World::ledger(int rank) const {
  return *reinterpret_cast<LedgerMemory*>(arenas_[static_cast<std::size_t>(rank)].data() +
                                          ledger_offset(bytes_before_ledger()));
}

unsigned char* World::link(int rank) const {
  return arenas_[static_cast<std::size_t>(rank)].data() + kLinkOffset;
}

std::uint64_t World::arena_committed(int rank) const {
  if (cuda_ != nullptr) return device_arenas_[static_cast<std::size_t>(rank)]->bytes();
  return arenas_[static_cast<std::size_t>(rank)].committed();
}

std::uint64_t* World::announcements(const std::vector<int>& members, std::uint64_t tag) const {
  const auto home = static_cast<std::size_t>(members[tag % members.size()]);
  return reinterpret_cast<std::uint64_t*>(arenas_[home].data() + shape_.announcements());
}

int World::ranks_a_core() const {
  const int cores = count_cpus(cpus_);
  return cores == 0 ? 1 : (ranks_ + cores - 1) / cores;
}

std::optional<HostTable> World::host_table(const std::vector<int>& members) const {
  if (hosts_.size() < 2) return std::nullopt;
  std::vector<int> names;
  for (const int rank : members) names.push_back(host_of_[static_cast<std::size_t>(rank)]);
  HostTable table(names);
  if (table.hosts() == 1) return std::nullopt;
  return table;
}

// ---- the meeting ----

unjamResult_t World::join(int rank, const Settings& settings, std::string& error) {
  const auto r = static_cast<std::size_t>(rank);
  const std::string agreed = agreed_settings_text(settings);
  std::string host;
  const bool host_is_valid = host_id(host, error);
  const CpuSet cpus = allowed_cpus();
  std::unique_lock lock(mutex_);
  if (!alone() && !connected_) {
    if (!connecting_) {
      connecting_ = true;
      lock.unlock();
      std::string why;
      const bool met = client_.connect(*secret_, settings.init_timeout_ms, why);
      lock.lock();
      connected_ = met;
      if (!met) failure_ = why;
      changed_.notify_all();
      if (!met) {
        error = why;
        return UNJAM_ERROR_SYSTEM;
      }
    } else {
      changed_.wait(lock, [this] { return connected_ || !failure_.empty(); });
    }
  }
  // After that, which lets go of the lock.
  if (joined_[r]) {
    error = "rank " + std::to_string(rank) +
            " has joined this job already: give every rank a number of its own";
    return UNJAM_ERROR_INVALID_USAGE;
  }
  if (!failure_.empty()) {
    error = "another rank could not join: " + failure_;
    return UNJAM_ERROR_PEER;
  }
  if (started_) {  // its memory is mapped here, and in use
    error = "rank " + std::to_string(rank) + " has joined this job already (in process " +
            std::to_string(pids_[static_cast<std::size_t>(process_of_[r])]) +
            "), which has started: give every rank a number of its own, and every job an id of "
            "its own";
    return UNJAM_ERROR_INVALID_USAGE;
  }
  if (!host_is_valid) {
    fail_meeting("rank " + std::to_string(rank) + ": " + error);
    return UNJAM_ERROR_INVALID_ARGUMENT;
  }
  if (first_rank_ < 0) {
    first_rank_ = rank;
    first_agreed_ = agreed;
  } else if (agreed != first_agreed_) {
    error = settings_differ_text(first_rank_, first_agreed_, rank, agreed);
    fail_meeting(error);
    return UNJAM_ERROR_MISMATCH;
  }
  std::vector<Fd> shared;
  if (!make_memory(rank, settings, shared, error)) {
    fail_meeting("rank " + std::to_string(rank) + ": " + error);
    return UNJAM_ERROR_SYSTEM;
  }
  joined_[r] = true;
  ++num_joined_;
  if (alone()) {
    add_cpus(cpus, &cpus_);
    started_ = num_joined_ == ranks_;
  } else {
    JoinMessage m;
    m.rank = static_cast<std::uint32_t>(rank);
    m.ranks = static_cast<std::uint32_t>(ranks_);
    m.arena_bytes = shape_.total_bytes();
    m.settings = agreed;
    m.host = host;
    m.cpus = cpus;
    m.files = files_left();
    client_.join(m, std::move(shared));
  }
  changed_.notify_all();
  mesh_.wake();
  if (alone()) return UNJAM_SUCCESS;
  // While the others come: this thread only waits for them.
  const auto others = static_cast<std::size_t>(ranks_ - 1);
  const std::size_t files = (client_.keeps_rendezvous() ? 6 : 3) * others;
  lock.unlock();
  make_room_for_files(files);
  return UNJAM_SUCCESS;
}

void World::share_devices(int ranks, Settings& settings) {
  if (settings.device == UNJAM_DEVICE_HOST) return;
  std::string unused;  // joining says it
  CudaDriver* cuda = cuda_driver(unused);
  if (cuda == nullptr) return;
  const bool one = settings.device_index >= 0;
  const int devices = one ? 1 : cuda->devices(unused);
  if (devices <= 0) return;
  // As make_memory() deals them out.
  for (int d = 0; d < std::min(devices, ranks); ++d) {
    const int sharers = (ranks - d + devices - 1) / devices;
    const int sms = cuda->sms(one ? static_cast<int>(settings.device_index) : d);
    settings.lanes = lanes_of_sharers(sms, sharers, settings.lanes);
  }
}

void World::decide_lines(Settings& settings) {
  if (settings.device == UNJAM_DEVICE_HOST) return;
  std::string unused;  // joining says it
  if (settings.whole_lines < 0) {
    CudaDriver* cuda = settings.lines == 0 ? nullptr : cuda_driver(unused);
    settings.whole_lines = cuda != nullptr && cuda->lines_come_whole() ? 1 : 0;
  }
  if (settings.lines < 0) settings.lines = settings.whole_lines;
}

bool World::make_memory(int rank, const Settings& settings, std::vector<Fd>& shared,
                        std::string& error) {
  const auto r = static_cast<std::size_t>(rank);
  const auto share = [&](Fd fd) {
    if (fd) {
      shared.push_back(std::move(fd));
      return true;
    }
    if (error.empty()) error = std::strerror(errno) + limit_text(errno);
    error = "cannot share memory with the other ranks: " + error;
    return false;
  };
  const auto no_memory = [&] {
    if (shape_.heap_bytes != 0) {
      error += " (" + std::to_string(shape_.heap_bytes) +
               " of these bytes are UNJAM_HEAP's, or heap_bytes': it may be too large)";
    }
    return false;
  };
  arenas_[r] = SharedMemory::create(host_bytes(), error);
  if (arenas_[r].data() == nullptr) return no_memory();
  if (!alone() && !share(arenas_[r].share())) return false;
  bases_[r] = arenas_[r].data();
  if (settings.device == UNJAM_DEVICE_HOST) return close_blocks(rank, error);
  if (cuda_ == nullptr && (cuda_ = cuda_driver(error)) == nullptr) return false;
  // Alone means made by one call: then every rank has a device of its own, if there are as many.
  std::string unused;
  const int count = cuda_->devices(unused);
  int device = static_cast<int>(settings.device_index);
  if (device < 0) device = alone() ? rank % count : cuda_->current();
  if (device >= count) {
    error = "device_index (UNJAM_DEVICE_INDEX) is " + std::to_string(device) + ": there are " +
            std::to_string(count) + " CUDA devices, counted from 0";
    return false;
  }
  devices_[r] = device;
  device_arenas_[r] = cuda_->create_arena(device, shape_.total_bytes(), shape_.base_bytes(), error);
  if (device_arenas_[r] == nullptr) return no_memory();
  bases_[r] = device_arenas_[r]->data();
  return alone() || share(Fd(device_arenas_[r]->share(0, error)));
}

bool World::enter_device(int rank, std::string& error) {
  std::lock_guard lock(mutex_);
  if (!links_registered_) {
    for (int r = 0; r < ranks_; ++r) {
      if (!cuda_->register_host(link(r), kLinkBytes, error)) {
        while (r-- > 0) cuda_->unregister_host(link(r));
        return false;
      }
    }
    links_registered_ = true;
  }
  const auto is_registered = [&](void* table, std::uint64_t bytes) {
    if (table == nullptr || !cuda_->register_host(table, bytes, error)) return false;
    registered_.push_back(table);
    return true;
  };
  if (!is_registered(windows_.table(rank, error), windows_.table_bytes()) ||
      !is_registered(rooms_->table(rank, error), rooms_->table_bytes())) {
    return false;
  }
  for (int r = 0; r < ranks_; ++r) {
    // (The rest as ranks meet.)
    if (device_arenas_[static_cast<std::size_t>(r)]->map_for(device_of(rank), 0, error)) continue;
    const std::string why = error;
    error = "rank " + std::to_string(rank) + " (device " + std::to_string(device_of(rank)) +
            ") cannot reach the memory of rank " + std::to_string(r) + ": " + why +
            ". The CUDA device needs peer access between all ranks' GPUs (`unjam doctor`, in a "
            "process that sees them all, tells which have it)";
    return false;
  }
  return true;
}

std::vector<int> World::missing() const {
  std::vector<int> ranks;
  for (int r = 0; r < ranks_; ++r) {
    const bool here = joined_[static_cast<std::size_t>(r)];
    if (!here && !(client_.present && client_.present->has(r))) ranks.push_back(r);
  }
  return ranks;
}

unjamResult_t World::wait_joined(int rank, std::int64_t timeout_ms, std::string& error) {
  std::unique_lock lock(mutex_);
  const auto decided = [&] {
    return started_ || !failure_.empty() || client_.refused.count(rank) != 0;
  };
  bool in_time = changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), decided);
  const bool known = in_time || know_who(lock);
  in_time = decided();
  if (const auto refused = client_.refused.find(rank); refused != client_.refused.end()) {
    error = refused->second.text;
    return static_cast<unjamResult_t>(refused->second.code);
  }
  if (start_failed_) {
    error = failure_;
    return UNJAM_ERROR_SYSTEM;
  }
  if (!failure_.empty()) {
    error = "another rank could not join: " + failure_;
    return UNJAM_ERROR_PEER;
  }
  if (!in_time) {
    const std::string too_late =
        " did not join within " + std::to_string(timeout_ms) + " ms (UNJAM_INIT_TIMEOUT_MS)";
    if (!known) {
      error = std::to_string(ranks_ - num_joined_) +
              " ranks, or some of them (who keeps the rendezvous does not say which),";
    } else {
      error = rank_list(missing());
    }
    error += too_late;
    if (!alone()) error += "; all ranks must run on this machine, as the same user";
    fail_meeting(error);
    return UNJAM_ERROR_TIMEOUT;
  }
  return UNJAM_SUCCESS;
}

// Asks who has joined. False: nobody answers.
bool World::know_who(std::unique_lock<std::mutex>& lock) {
  if (alone()) return true;
  client_.ask_who();
  mesh_.wake();
  const auto ends = [this] { return client_.present.has_value() || !failure_.empty(); };
  changed_.wait_for(lock, std::chrono::milliseconds(kAnswerMs), ends);
  return client_.present.has_value();
}

void World::fail_meeting(const std::string& why) {
  if (failure_.empty()) failure_ = why;
  changed_.notify_all();
  mesh_.wake();
}

void World::meet(std::unique_lock<std::mutex>& lock) {
  changed_.wait(lock, [this] { return connected_ || stopping_ || !failure_.empty(); });
  while (!stopping_ && failure_.empty() && !client_.started) {
    std::string error;
    client_.flush();
    const short out = client_.pending() ? POLLOUT : 0;
    pollfd polled[2] = {{client_.fd(), static_cast<short>(POLLIN | out), 0},
                        {mesh_.wake_fd(), POLLIN, 0}};
    lock.unlock();
    poll(polled, 2, -1);
    if (polled[1].revents != 0) mesh_.clear_wake();
    lock.lock();
    const bool live = client_.receive(error);
    changed_.notify_all();
    if (!client_.failed.empty()) {
      fail_meeting(client_.failed);
    } else if (!live) {
      fail_meeting("the process that kept the rendezvous left before all ranks had joined (" +
                   error + ")");
    }
  }
  if (client_.started && failure_.empty()) begin();
  changed_.notify_all();
  const std::string gives_up = connected_ && client_.failed.empty() ? failure_ : "";
  // Not with the lock: both wait until the others have what is theirs.
  lock.unlock();
  if (!gives_up.empty()) client_.fail(gives_up);
  client_.leave();
  lock.lock();
}

// All are there: their memory is mapped, and from now on they are reached through the mesh.
void World::begin() {
  const StartMessage& start = client_.start;
  if (start.process_of.size() != static_cast<std::size_t>(ranks_)) {
    fail_meeting("the rendezvous speaks of another number of ranks");
    return;
  }
  me_ = static_cast<int>(start.me);
  pids_ = start.pids;
  hosts_ = start.hosts;
  cpus_ = start.cpus;
  host_of_.assign(start.host_of.begin(), start.host_of.end());
  for (int r = 0; r < ranks_; ++r) {
    const auto i = static_cast<std::size_t>(r);
    process_of_[i] = static_cast<int>(start.process_of[i]);
    // One that was refused is another process's.
    if (is_local(r) == (joined_[i] && client_.refused.count(r) == 0)) continue;
    fail_meeting("the rendezvous confuses the ranks of this process");
    return;
  }
  // A device that a rank of this process uses anyway: another one would get a context of ours.
  const int own = *std::max_element(devices_.begin(), devices_.end());
  for (auto& [rank, fds] : client_.memory) {
    const auto i = static_cast<std::size_t>(rank);
    std::string error;
    arenas_[i] = SharedMemory::adopt(std::move(fds[0]), host_bytes(), error);
    if (arenas_[i].data() == nullptr) {
      fail_start(error);
      return;
    }
    bases_[i] = arenas_[i].data();
    if (cuda_ == nullptr && !close_blocks(rank, error)) {
      fail_start(error);
      return;
    }
    if (cuda_ == nullptr) continue;
    if (fds.size() == 2) {
      device_arenas_[i] = cuda_->adopt_arena(own, fds[1].release(), shape_.total_bytes(),
                                             shape_.base_bytes(), error);
    }
    if (device_arenas_[i] == nullptr) {
      fail_start("cannot use the device memory of rank " + std::to_string(rank) + ": " + error);
      return;
    }
    bases_[i] = device_arenas_[i]->data();
  }
  for (auto& [process, peer] : client_.peers) {
    mesh_.add(process, std::move(peer.socket), std::move(peer.pidfd));
  }
  started_ = true;
  runs_.store(true, std::memory_order_release);
}

// The others have begun: their calls with ranks of this process fail, and say why.
void World::fail_start(const std::string& why) {
  for (auto& [process, peer] : client_.peers) {
    mesh_.add(process, std::move(peer.socket), std::move(peer.pidfd));
  }
  for (int r = 0; r < ranks_; ++r) {
    if (!is_local(r)) continue;
    GoneMessage m;
    m.rank = static_cast<std::uint32_t>(r);
    m.why = "it could not start: " + why;
    mesh_.send_all(MessageType::kGone, m.encode());
  }
  start_failed_ = true;
  fail_meeting(why);
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
      const bool timeout = m.code == UNJAM_ERROR_TIMEOUT;
      fail_here(m.tag, m.n, timeout ? UNJAM_ERROR_TIMEOUT : UNJAM_ERROR_MISMATCH, m.text, process);
      break;
    }
    case MessageType::kSnapshotRequest: {
      SnapshotRequestMessage m;
      if (!m.decode(frame.payload)) break;
      SnapshotMessage reply;
      reply.number = m.number;
      reply.ranks = local_snapshots();
      mesh_.send(process, MessageType::kSnapshot, reply.encode());
      break;
    }
    case MessageType::kSnapshot: {
      SnapshotMessage m;
      if (!m.decode(frame.payload)) break;
      const auto found = gatherings_.find(m.number);
      if (found == gatherings_.end() || found->second.waits_for.erase(process) == 0) break;
      for (RankSnapshot& s : m.ranks) {
        if (is_rank_of(static_cast<std::uint32_t>(s.rank), process)) {
          found->second.add(std::move(s));
        }
      }
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
    default:
      break;
  }
}

// Whether a rank of the process is not known to be gone and has not left in good order. (Who waits
// for a call that a rank has left without learns it from watch().)
bool World::misses(int process) const {
  std::lock_guard lock(mutex_);
  for (int r = 0; r < ranks_; ++r) {
    if (!is_rank_of(static_cast<std::uint32_t>(r), process)) continue;
    if (departed_.count(r) == 0 && gone_.count(r) == 0) return true;
  }
  return false;
}

void World::on_lost(Loss loss) {
  if (start_failed_) return;
  loss.until_ns = monotonic_ns() + kLastBreathMs * std::uint64_t{1000000};
  losses_.push_back(std::move(loss));
  take_losses();
}

// Connections have no order among each other: that a rank has ended because of another one may be
// seen before that one's end, and calls would be told the wrong name.
bool World::follows_another(int process) const {
  return std::any_of(given_up_.begin(), given_up_.end(), [&](const auto& entry) {
    return is_rank_of(static_cast<std::uint32_t>(entry.first), process) &&
           std::any_of(entry.second.begin(), entry.second.end(), [&](int of) {
             return gone_.count(of) == 0 && departed_.count(of) == 0 &&
                    !is_rank_of(static_cast<std::uint32_t>(of), process);
           });
  });
}

void World::take_losses() {
  // Each that is taken may be what others wait for.
  for (bool again = true; again;) {
    again = false;
    for (auto loss = losses_.begin(); loss != losses_.end(); ++loss) {
      if (monotonic_ns() < loss->until_ns && follows_another(loss->process)) continue;
      const Loss taken = std::move(*loss);
      losses_.erase(loss);
      lose(taken);
      changed_.notify_all();
      again = true;
      break;
    }
  }
}

void World::lose(const Loss& loss) {
  const auto& [process, died, why, until] = loss;
  const std::string pid = std::to_string(pids_[static_cast<std::size_t>(process)]);
  for (int r = 0; r < ranks_; ++r) {
    if (!is_rank_of(static_cast<std::uint32_t>(r), process) || departed_.count(r) != 0) continue;
    const bool exits = died && load_acquire(ledger(r).exits) != 0;
    std::string text = "its process (" + pid + ") ";
    text += exits ? kEndedText : died ? "died" : "closed its connection: ";
    if (!died) text += why;
    mark_gone(r, text, legacy_of(r));
  }
  windows_let_go(process);
  for (auto& [number, g] : gatherings_) g.waits_for.erase(process);
  for (auto& [call, inquiry] : inquiries_) {
    if (inquiry.waits_for.erase(process) != 0 && inquiry.waits_for.empty()) {
      evaluate(call, inquiry);
    }
  }
}

// ---- ranks that come and go ----

void World::attach(Context* context) {
  {
    std::lock_guard lock(mutex_);
    contexts_[static_cast<std::size_t>(context->rank())] = context;
  }
  if (rooms_ != nullptr) rooms_->attach(context->rank(), context);
  changed_.notify_all();
  mesh_.wake();
}

void World::detach(Context* context, std::map<std::uint64_t, std::uint64_t> calls,
                   std::vector<PendingCall> untaken) {
  if (rooms_ != nullptr) rooms_->detach(context->rank(), context);
  std::lock_guard lock(mutex_);
  Context*& place = contexts_[static_cast<std::size_t>(context->rank())];
  if (place != context) return;
  tell_given_up();  // who still waits for this rank is to hear why it does not come
  place = nullptr;
  DepartedMessage m;
  m.rank = static_cast<std::uint32_t>(context->rank());
  m.calls.assign(calls.begin(), calls.end());
  m.untaken = untaken;
  departed_[context->rank()] = {std::move(calls), std::move(untaken)};
  windows_.forget(context->rank(), false);
  for (Context* c : contexts_) {
    if (c != nullptr) c->peer_left(context->rank());
  }
  mesh_.send_all(MessageType::kDeparted, m.encode());
}

// Its process has ended, or all that the rank had under way has: the ledger stays as it is. (Of one
// that has merely closed its connection it says what was complete by now, which stays true.)
// Of GPUs nothing: the host hears late of what is complete there, and what the device is told of a
// rank that is gone ends all calls with it.
std::shared_ptr<const Legacy> World::legacy_of(int rank) const {
  if (cuda_ != nullptr) return nullptr;
  const auto left = departed_.find(rank);
  return std::make_shared<Legacy>(ledger(rank),
                                  left == departed_.end() ? nullptr : &left->second.calls);
}

int World::log_rank() const {
  const auto own = std::find(process_of_.begin(), process_of_.end(), me_);
  return own == process_of_.end() ? 0 : static_cast<int>(own - process_of_.begin());
}

void World::mark_gone(int rank, const std::string& why,
                      const std::shared_ptr<const Legacy>& legacy) {
  if (!gone_.emplace(rank, Gone{why, legacy, {}}).second) return;
  Log::process().say(LogLevel::kInfo, log_rank(),
                     [&] { return "rank " + std::to_string(rank) + " is gone: " + why; });
  // Some engine may be at it still: what is mapped stays so.
  windows_.forget(rank, true);
  for (Context* c : contexts_) {
    if (c != nullptr && c->rank() != rank) c->peer_gone(rank, why, legacy);
  }
  // Others may have met it before it was known here.
  for (const auto& [r, of] : given_up_) {
    if (of.count(rank) != 0) meet_end(r, rank);
  }
}

void World::on_gave_up(int rank, const std::vector<int>& of) {
  for (const int peer : of) {
    if (given_up_[rank].insert(peer).second) meet_end(rank, peer);
  }
}

// Whoever knows that `peer` is gone hears that `rank` has met that.
void World::meet_end(int rank, int peer) {
  const auto gone = gone_.find(peer);
  if (gone == gone_.end()) return;
  gone->second.given_up.push_back(rank);
  for (Context* c : contexts_) {
    if (c != nullptr && c->rank() != rank) c->peer_gave_up(rank, peer, gone->second.why);
  }
}

void World::gave_up(int rank, int of) {
  GaveUpMessage m;
  m.rank = static_cast<std::uint32_t>(rank);
  m.of = {static_cast<std::uint32_t>(of)};
  mesh_.send_all(MessageType::kGaveUp, m.encode());  // and wakes this process's thread
}

void World::tell_given_up() {
  for (Context* c : contexts_) {
    if (c == nullptr) continue;
    const auto known = given_up_.find(c->rank());
    on_gave_up(c->rank(), c->given_up(known == given_up_.end() ? 0 : known->second.size()));
  }
}

void World::tell_peers_gone(int rank, const std::string& why, bool ended) {
  std::lock_guard lock(mutex_);
  GoneMessage m;
  m.rank = static_cast<std::uint32_t>(rank);
  m.ended = ended;
  m.why = why;
  // First, as the ranks of this process may be busy with calls of their own, see peer_gone().
  mesh_.send_all(MessageType::kGone, m.encode());
  mark_gone(rank, why, ended ? legacy_of(rank) : nullptr);
  changed_.notify_all();
}

std::vector<std::pair<int, World::Gone>> World::gone(const std::vector<int>& members) const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<int, Gone>> ranks;
  for (const int member : members) {
    const auto found = gone_.find(member);
    if (found != gone_.end()) ranks.emplace_back(member, found->second);
  }
  return ranks;
}

void World::say_exit() {
  // Acquire: who is of this process, and where its memory is.
  if (!runs_.load(std::memory_order_acquire)) return;
  for (int r = 0; r < ranks_; ++r) {
    if (is_local(r)) store_release<std::uint64_t>(ledger(r).exits, 1);
  }
}

std::vector<int> World::absent() const {
  std::lock_guard lock(mutex_);
  std::vector<int> ranks;
  for (int r = 0; r < ranks_; ++r) {
    if (gone_.count(r) != 0 || departed_.count(r) != 0) ranks.push_back(r);
  }
  return ranks;
}

}  // namespace unjam
