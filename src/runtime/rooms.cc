#include "runtime/rooms.h"

#include <fcntl.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <iterator>
#include <system_error>

#include "base/atomics.h"

namespace unjam {
namespace {

// An engine that is there clears a portion within milliseconds, and somebody waits for it; one that
// has to be launched takes longer.
constexpr std::chrono::microseconds kLookAgain{50}, kLookLater{500};
constexpr int kSoon = 100;
constexpr std::chrono::milliseconds kTryAgain{200};

}  // namespace

Rooms::Rooms(int ranks, const ArenaShape& shape, Memory& memory)
    : ranks_(ranks), shape_(shape), memory_(memory) {}

Rooms::~Rooms() { stop(); }

std::uint64_t Rooms::table_bytes() const {
  return whole_pages(static_cast<std::uint64_t>(ranks_) * sizeof(Room));
}

Room* Rooms::table(int rank, std::string& error) {
  const std::lock_guard lock(mutex_);
  if (const auto found = tables_.find(rank); found != tables_.end()) return found->second.get();
  SharedPages<Room> table = make_shared_pages<Room>(static_cast<std::uint64_t>(ranks_), error);
  if (table == nullptr) return nullptr;
  if (!thread_.joinable() && !stopping_) {
    try {
      thread_ = std::thread([this] { work(); });
    } catch (const std::system_error& e) {
      error = std::string("cannot start a thread: ") + e.what();
      return nullptr;
    }
  }
  return tables_.emplace(rank, std::move(table)).first->second.get();
}

void Rooms::attach(int rank, User* user) {
  const std::lock_guard lock(mutex_);
  users_[rank] = user;
  // What came before its engine did.
  try_again();
}

void Rooms::detach(int rank, const User* user) {
  const std::lock_guard none(using_);
  const std::lock_guard lock(mutex_);
  const auto found = users_.find(rank);
  if (found == users_.end() || found->second != user) return;
  users_.erase(found);
  uncleared_.erase(rank);
  left_.insert(rank);
}

bool Rooms::with_user(int rank, const std::function<void(User&)>& call) {
  const std::lock_guard stays(using_);
  User* user = nullptr;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = users_.find(rank); found != users_.end()) user = found->second;
  }
  if (user != nullptr) call(*user);
  return user != nullptr;
}

void Rooms::uncount(int rank) {
  if (const auto left = uncleared_.find(rank); left != uncleared_.end() && --left->second == 0) {
    uncleared_.erase(left);
  }
}

std::uint64_t Rooms::offset_of(int owner, int peer, std::uint32_t from) const {
  return shape_.block(static_cast<std::uint32_t>(owner), static_cast<std::uint32_t>(peer)) +
         (from == 0 ? 0 : shape_.room_bytes(from));
}
std::uint64_t Rooms::bytes_of(std::uint32_t from, std::uint32_t to) const {
  return shape_.room_bytes(to) - (from == 0 ? 0 : shape_.room_bytes(from));
}

void Rooms::try_again() {
  jobs_.insert(jobs_.end(), std::make_move_iterator(postponed_.begin()),
               std::make_move_iterator(postponed_.end()));
  postponed_.clear();
  changed_.notify_one();
}

void Rooms::queue(Job job) {
  if (stopping_) return;
  jobs_.push_back(std::move(job));
  changed_.notify_one();
}

void Rooms::publish(const Pair& who) {
  const State& s = states_[who];
  const auto table = tables_.find(who.first);
  if (s.offered == 0 || s.theirs == 0 || table == tables_.end()) return;
  // Release: the memory is mapped at both ends, or the peer was told to, and it is clear.
  store_release(table->second.get()[who.second].usable, s.theirs);
  came_.push_back(who.first);
  changed_.notify_one();
}

bool Rooms::add_next(const Pair& who, ClearRoom& room, std::string& error) {
  std::uint32_t from = 0;
  {
    const std::lock_guard lock(mutex_);
    from = states_[who].added;
  }
  const std::uint32_t to = shape_.next_connectors(from);
  const std::uint64_t bytes = bytes_of(from, to);
  std::string why;
  const bool added =
      memory_.add_memory(who.first, offset_of(who.first, who.second, from), bytes, why);
  const std::lock_guard lock(mutex_);
  State& s = states_[who];
  if (!added) {
    error = "there is no memory for what rank " + std::to_string(who.second) + " sends to rank " +
            std::to_string(who.first) + " (" + std::to_string(bytes >> 20) + " MiB): " + why +
            ". Leave more of it free and call again, or lower UNJAM_FIRST_CONNECTORS, "
            "UNJAM_POOL_SLOTS or UNJAM_GUARANTEED_SLOT_BYTES on all ranks";
    return false;
  }
  s.added = to;
  if (left_.count(who.first) == 0) ++uncleared_[who.first];
  room = {static_cast<std::uint32_t>(who.second), from, to};
  changed_.notify_one();
  return true;
}

bool Rooms::meet(int rank, int peer, ClearRoom& room, std::string& error) {
  room = {};
  const Pair who{rank, peer};
  const std::lock_guard adding(adding_);
  {
    const std::lock_guard lock(mutex_);
    if (states_[who].added != 0) return true;
  }
  return add_next(who, room, error);
}

void Rooms::cleared(int rank, const ClearRoom& room) {
  const Pair who{rank, static_cast<int>(room.peer)};
  const std::lock_guard lock(mutex_);
  uncount(rank);
  queue({Job::kOffer, who, room.to, nullptr});
}

bool Rooms::any_wanted(const Room* table, std::uint32_t ranks) {
  for (std::uint32_t peer = 0; peer < ranks; ++peer) {
    if (load_relaxed(table[peer].wanted) > load_relaxed(table[peer].usable)) return true;
  }
  return false;
}

void Rooms::look(int rank) {
  std::vector<RoomMessage> wishes;
  {
    const std::lock_guard lock(mutex_);
    const auto table = tables_.find(rank);
    if (table == tables_.end()) return;
    for (int peer = 0; peer < ranks_; ++peer) {
      const std::uint32_t wanted = load_relaxed(table->second.get()[peer].wanted);
      if (wanted == 0) continue;
      State& s = states_[{rank, peer}];
      if (wanted <= s.asked || wanted <= s.theirs) continue;
      s.asked = wanted;
      if (memory_.is_local(peer)) {
        queue({Job::kAdd, {peer, rank}, wanted, nullptr});
        continue;
      }
      RoomMessage m;
      m.owner = static_cast<std::uint32_t>(peer);
      m.peer = static_cast<std::uint32_t>(rank);
      m.connectors = wanted;
      wishes.push_back(m);
    }
  }
  for (const RoomMessage& m : wishes) memory_.tell_of_room(static_cast<int>(m.owner), m, {});
}

void Rooms::hear(const RoomMessage& m, Fd fd) {
  const int owner = static_cast<int>(m.owner), peer = static_cast<int>(m.peer);
  if (m.owner >= shape_.ranks || m.peer >= shape_.ranks) return;
  if (m.connectors == 0 || m.connectors > shape_.connectors || owner == peer) return;
  const std::lock_guard lock(mutex_);
  if (m.offers) {
    if (!memory_.is_local(peer)) return;
    queue({Job::kAdopt, {peer, owner}, m.connectors, std::make_shared<Fd>(std::move(fd))});
  } else if (memory_.is_local(owner)) {
    queue({Job::kAdd, {owner, peer}, m.connectors, nullptr});
  }
}

void Rooms::work() {
  pthread_setname_np(pthread_self(), "unjam rooms");
  std::unique_lock lock(mutex_);
  auto tried = std::chrono::steady_clock::now();
  for (int looks = 0;;) {
    const auto news = [this] { return stopping_ || !jobs_.empty() || !came_.empty(); };
    if (!uncleared_.empty()) {
      changed_.wait_for(lock, looks < kSoon ? kLookAgain : kLookLater, news);
    } else if (!postponed_.empty()) {
      changed_.wait_for(lock, kTryAgain, news);
    } else {
      changed_.wait(lock, [&] { return news() || !uncleared_.empty() || !postponed_.empty(); });
    }
    if (stopping_) return;
    if (const auto now = std::chrono::steady_clock::now(); now - tried >= kTryAgain) {
      tried = now;
      try_again();
    }
    looks = uncleared_.empty() || !jobs_.empty() ? 0 : looks + 1;
    std::deque<Job> jobs = std::move(jobs_);
    jobs_.clear();
    // A pair's portions in their order, whichever of them had to wait.
    std::stable_sort(jobs.begin(), jobs.end(),
                     [](const Job& a, const Job& b) { return a.to < b.to; });
    std::vector<int> came = std::move(came_), clearing;
    came_.clear();
    for (const auto& [rank, count] : uncleared_) clearing.push_back(rank);
    lock.unlock();
    std::sort(came.begin(), came.end());
    came.erase(std::unique(came.begin(), came.end()), came.end());
    for (const int rank : came) with_user(rank, [](User& user) { user.room_came(); });
    for (const Job& job : jobs) {
      if (job.what == Job::kAdd) {
        add(job);
      } else if (job.what == Job::kOffer) {
        offer(job);
      } else {
        adopt(job);
      }
    }
    for (const int rank : clearing) with_user(rank, [](User& user) { user.take_in_cleared(); });
    lock.lock();
  }
}

// Said when it is new, not at each try.
void Rooms::tried(const Job& job, const std::string& error) {
  bool is_new = false;
  {
    const std::lock_guard lock(mutex_);
    State& s = states_[job.pair];
    is_new = !error.empty() && error != s.lacks;
    s.lacks = error;
    if (!error.empty()) postponed_.push_back(job);
  }
  if (is_new) memory_.warn(error + ". Calls that have use for it wait until it works");
}

bool Rooms::is_next(const Job& job, std::uint32_t now) {
  if (job.to == shape_.next_connectors(now)) return true;
  const auto is_before = [&](const Job& other) {
    return other.what == job.what && other.pair == job.pair && other.to < job.to;
  };
  // (Others may have moved it from the one to the other while this was under way.)
  if (job.to > now && (std::any_of(postponed_.begin(), postponed_.end(), is_before) ||
                       std::any_of(jobs_.begin(), jobs_.end(), is_before))) {
    postponed_.push_back(job);
  }
  return false;
}

// Of the job's rank's block for its peer, as many portions as that takes.
void Rooms::add(const Job& job) {
  for (;;) {
    ClearRoom room;
    std::string error;
    {
      const std::lock_guard adding(adding_);
      {
        const std::lock_guard lock(mutex_);
        if (states_[job.pair].added >= job.to || left_.count(job.pair.first) != 0) return;
        if (users_.count(job.pair.first) == 0) {  // nobody would clear it
          postponed_.push_back(job);
          return;
        }
      }
      add_next(job.pair, room, error);
    }
    tried(job, error);
    if (!error.empty()) return;
    bool is_taken = false;
    with_user(job.pair.first, [&](User& user) { is_taken = user.clear_room(room); });
    if (is_taken) continue;
    const std::lock_guard lock(mutex_);
    uncount(job.pair.first);
    return;
  }
}

void Rooms::offer(const Job& job) {
  const auto [owner, peer] = job.pair;
  std::uint32_t from = 0;
  {
    const std::lock_guard lock(mutex_);
    from = states_[job.pair].offered;
    if (!is_next(job, from)) return;
  }
  const std::uint64_t offset = offset_of(owner, peer, from);
  std::string error;
  const bool is_local = memory_.is_local(peer);
  bool done = false;
  if (is_local) {
    done = memory_.let_reach(owner, offset, peer, error);
  } else {
    RoomMessage m;
    m.owner = static_cast<std::uint32_t>(owner);
    m.peer = static_cast<std::uint32_t>(peer);
    m.connectors = job.to;
    m.offers = true;
    Fd fd;
    done = memory_.share_memory(owner, offset, fd, error);
    if (done) memory_.tell_of_room(peer, m, std::move(fd));
  }
  if (!done) {
    return tried(job, "rank " + std::to_string(peer) + " cannot reach the memory that rank " +
                          std::to_string(owner) + " has for it: " + error);
  }
  tried(job, "");
  const std::lock_guard lock(mutex_);
  states_[job.pair].offered = job.to;
  if (is_local) {
    State& s = states_[{peer, owner}];
    s.theirs = job.to;
    publish({peer, owner});
    if (s.added == 0) queue({Job::kAdd, {peer, owner}, 1, nullptr});
  }
  publish(job.pair);
}

void Rooms::adopt(const Job& job) {
  const auto [rank, owner] = job.pair;
  std::uint32_t from = 0;
  {
    const std::lock_guard lock(mutex_);
    from = states_[job.pair].theirs;
    if (!is_next(job, from)) return;
  }
  std::string error;
  // A copy, for another try.
  Fd fd(*job.fd ? fcntl(job.fd->get(), F_DUPFD_CLOEXEC, 3) : -1);
  bool done = static_cast<bool>(fd) == static_cast<bool>(*job.fd);
  if (!done) error = std::strerror(errno);
  done = done && memory_.adopt_memory(owner, offset_of(owner, rank, from), bytes_of(from, job.to),
                                      std::move(fd), rank, error);
  tried(job, done ? ""
                  : "rank " + std::to_string(rank) + " cannot reach the memory that rank " +
                        std::to_string(owner) + " has for it: " + error);
  if (!done) return;
  const std::lock_guard lock(mutex_);
  State& s = states_[job.pair];
  s.theirs = job.to;
  publish(job.pair);
  if (s.added == 0) queue({Job::kAdd, job.pair, 1, nullptr});
}

void Rooms::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_one();
  if (thread_.joinable()) thread_.join();
}

Rooms::Usage Rooms::usage(int rank) const {
  const std::lock_guard lock(mutex_);
  Usage u;
  for (auto at = states_.lower_bound({rank, 0}); at != states_.end() && at->first.first == rank;
       ++at) {
    const State& s = at->second;
    if (s.added != 0) u.bytes += shape_.room_bytes(s.added);
    if (!s.lacks.empty()) u.lacks = s.lacks;
    if (s.offered == 0 || s.theirs == 0) continue;
    ++u.met;
    u.connectors += s.theirs;
  }
  return u;
}

std::uint32_t Rooms::connectors(int rank, int peer) const {
  const std::lock_guard lock(mutex_);
  const auto found = states_.find({rank, peer});
  if (found == states_.end() || found->second.offered == 0) return 0;
  return found->second.theirs;
}

}  // namespace unjam
