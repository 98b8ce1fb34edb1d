// How the ranks of a job meet: a world joins, waits for all, and begins.
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/fork_guard.h"
#include "base/limits.h"
#include "control/hosts_meeting.h"
#include "control/join_text.h"
#include "runtime/allowed_cpus.h"
#include "runtime/cuda_library.h"
#include "runtime/engine_memory.h"
#include "runtime/host_id.h"
#include "runtime/job_id.h"
#include "runtime/network.h"
#include "runtime/world.h"

namespace unjam {
namespace {

// For who keeps the rendezvous to say who has joined.
constexpr std::int64_t kAnswerMs = 1000;
// For the root of several hosts to say which ranks have not come.
constexpr std::int64_t kVerdictMs = 3000;

// Worlds by id: those that ranks are joining.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<World>> worlds;
};
Registry& registry() { return per_process<Registry>(); }  // a child of fork() has none of these

}  // namespace

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

// Why a rank cannot join; where that is the meeting's end, the others hear it.
unjamResult_t World::check_join(int rank, const std::string& agreed, bool host_is_valid,
                                std::string& error) {
  const auto r = static_cast<std::size_t>(rank);
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
  return UNJAM_SUCCESS;
}

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
      const bool met = hosts_meeting_ != nullptr
                           ? hosts_meeting_->open(hosts_settings(agreed, settings), why)
                           : client_.connect(*secret_, settings.init_timeout_ms, why);
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
  if (const unjamResult_t refused = check_join(rank, agreed, host_is_valid, error);
      refused != UNJAM_SUCCESS) {
    return refused;
  }
  std::vector<Fd> shared;
  if (!arenas_.make(rank, settings, shared, error)) {
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
    m.arena_bytes = shape().total_bytes();
    m.settings = agreed;
    m.host = host;
    m.cpus = cpus;
    m.files = files_left();
    if (hosts_meeting_ == nullptr) {
      client_.join(m, std::move(shared));
    } else {
      joining_.push_back({std::move(m), std::move(shared)});
      hosts_meeting_->join(static_cast<std::uint32_t>(rank));
    }
  }
  changed_.notify_all();
  mesh_.wake();
  if (alone()) return UNJAM_SUCCESS;
  // While the others come: this thread only waits for them.
  const auto others = static_cast<std::size_t>(ranks_ - 1);
  const std::size_t files =
      (hosts_meeting_ != nullptr || client_.keeps_rendezvous() ? 6 : 3) * others;
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
  // As RankArenas::make() deals them out.
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

bool World::enter_device(int rank, std::string& error) {
  std::lock_guard lock(mutex_);
  void* const windows = windows_.table(rank, error);
  void* const rooms = windows == nullptr ? nullptr : rooms_->table(rank, error);
  if (rooms == nullptr) return false;
  return arenas_.enter_device(
      rank, {{windows, windows_.table_bytes()}, {rooms, rooms_->table_bytes()}}, error);
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
  // Between hosts the root says who is late, and needs some time for that.
  const std::int64_t verdict_ms = hosts_meeting_ == nullptr ? 0 : kVerdictMs;
  bool in_time =
      changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms + verdict_ms), decided);
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
    if (hosts_meeting_ != nullptr) {
      error += "; UNJAM_ROOT and UNJAM_ID must be the same on all hosts";
    } else if (!alone()) {
      error += "; all ranks must run on this machine, as the same user, or UNJAM_ROOT be set";
    }
    fail_meeting(error);
    return UNJAM_ERROR_TIMEOUT;
  }
  return UNJAM_SUCCESS;
}

// Asks who has joined. False: nobody answers.
bool World::know_who(std::unique_lock<std::mutex>& lock) {
  if (alone()) return true;
  if (hosts_meeting_ != nullptr) return false;
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
  if (hosts_meeting_ != nullptr) {
    meet_hosts(lock);
    changed_.notify_all();
    return;
  }
  await_start(lock);
  if (client_.started && failure_.empty()) begin();
  changed_.notify_all();
  leave_rendezvous(lock);
}

// Until all have joined at the rendezvous, or the meeting has failed.
void World::await_start(std::unique_lock<std::mutex>& lock) {
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
}

void World::leave_rendezvous(std::unique_lock<std::mutex>& lock) {
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
    if (start.process_of[i] != StartMessage::kElsewhere &&
        is_local(r) == (joined_[i] && client_.refused.count(r) == 0)) {
      continue;
    }
    fail_meeting("the rendezvous confuses the ranks of this process");
    return;
  }
  if (!adopt_memory()) return;
  for (auto& [process, peer] : client_.peers) {
    mesh_.add(process, std::move(peer.socket), std::move(peer.pidfd));
  }
  started_ = true;
  runs_.store(true, std::memory_order_release);
}

bool World::adopt_memory() {
  for (auto& [rank, fds] : client_.memory) {
    std::string error;
    if (!arenas_.adopt(rank, std::move(fds), error)) {
      fail_start(error);
      return false;
    }
  }
  return true;
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

}  // namespace unjam
