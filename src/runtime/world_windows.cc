// Windows (transport/windows.h) between processes: who hears of them, and when they are let go of.
#include <algorithm>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "runtime/world.h"

namespace unjam {
namespace {

// Who deregisters memory waits so long for other processes to have it no longer mapped. They do
// that at once, unless something on their devices keeps them, which may be a stream that waits for
// the very thread that deregisters.
constexpr std::int64_t kLetGoMs = 50;

}  // namespace

std::vector<WindowMaps::Viewer> World::viewers_of(int owner) const {
  std::vector<WindowMaps::Viewer> viewers;
  for (int r = 0; r < ranks_; ++r) {
    if (r != owner && is_local(r)) viewers.push_back({r, device_of(r)});
  }
  return viewers;
}

void World::open_window(int rank, std::uint64_t serial, unsigned char* base, std::string& unnamed) {
  // (Who belongs to which process is settled when the job begins.)
  const bool others = std::any_of(process_of_.begin(), process_of_.end(),
                                  [this](int process) { return process != me_; });
  WindowName name;
  bool named = false;
  if (others && cuda() == nullptr) {
    unnamed = "memory of the host device is this process's alone";
  } else if (others) {
    named = cuda()->name_window(device_of(rank), base, name, unnamed);
  }
  windows_.add(cuda(), {rank, serial, base, device_of(rank), {}}, viewers_of(rank));
  if (!named) return;
  WindowMessage m;
  m.rank = static_cast<std::uint32_t>(rank);
  m.serial = serial;
  m.allocation.assign(name.allocation.begin(), name.allocation.end());
  m.offset = name.offset;
  const std::lock_guard lock(mutex_);
  open_.insert({rank, serial});
  mesh_.send_all(MessageType::kWindow, m.encode());
}

void World::close_windows(int rank, const std::vector<ClosedWindow>& windows) {
  for (const ClosedWindow& w : windows) windows_.remove(rank, w.serial, w.stored_into);
  std::unique_lock lock(mutex_);
  std::vector<std::pair<int, std::uint64_t>> awaited;
  const std::vector<int> live = mesh_.live();
  for (const ClosedWindow& w : windows) {
    if (open_.erase({rank, w.serial}) == 0) continue;
    WindowGoneMessage m;
    m.rank = static_cast<std::uint32_t>(rank);
    m.serial = w.serial;
    m.stored_into = w.stored_into;
    if (!w.stored_into && !live.empty()) {
      awaited.emplace_back(rank, w.serial);
      leaving_[awaited.back()] = {live.begin(), live.end()};
    }
    mesh_.send_all(MessageType::kWindowGone, m.encode());
  }
  changed_.wait_for(lock, std::chrono::milliseconds(kLetGoMs), [&] {
    return std::none_of(awaited.begin(), awaited.end(),
                        [this](const auto& id) { return leaving_.count(id) != 0; });
  });
}

std::uint64_t World::windows_left(int rank) const {
  const std::lock_guard lock(mutex_);
  return static_cast<std::uint64_t>(
      std::count_if(leaving_.begin(), leaving_.end(),
                    [rank](const auto& window) { return window.first.first == rank; }));
}

void World::say_let_go(int owner, std::uint64_t serial) {
  WindowLetGoMessage m;
  m.rank = static_cast<std::uint32_t>(owner);
  m.serial = serial;
  mesh_.send(process_of_[static_cast<std::size_t>(owner)], MessageType::kWindowLetGo, m.encode());
}

// With the lock, as the next one.
void World::on_window(int process, const Frame& frame) {
  if (static_cast<MessageType>(frame.type) == MessageType::kWindow) {
    WindowMessage m;
    WindowName name;
    if (!m.decode(frame.payload) || !is_rank_of(m.rank, process) || cuda() == nullptr ||
        m.allocation.size() != name.allocation.size() ||
        gone_.count(static_cast<int>(m.rank)) != 0) {
      return;
    }
    std::copy(m.allocation.begin(), m.allocation.end(), name.allocation.begin());
    name.offset = m.offset;
    const int owner = static_cast<int>(m.rank);
    windows_.add(cuda(), {owner, m.serial, nullptr, -1, name}, viewers_of(owner));
  } else if (static_cast<MessageType>(frame.type) == MessageType::kWindowGone) {
    WindowGoneMessage m;
    if (!m.decode(frame.payload) || !is_rank_of(m.rank, process)) return;
    const int owner = static_cast<int>(m.rank);
    if (windows_.remove(owner, m.serial, m.stored_into)) return;  // it says when it has let go
    // (Of a rank that was aborted all mappings stay, which is no answer.)
    if (!m.stored_into && gone_.count(owner) == 0) say_let_go(owner, m.serial);
  } else {
    WindowLetGoMessage m;
    if (!m.decode(frame.payload)) return;
    const auto found = leaving_.find({static_cast<int>(m.rank), m.serial});
    if (found == leaving_.end()) return;
    found->second.erase(process);
    if (found->second.empty()) leaving_.erase(found);
  }
}

// What a process that has ended had mapped.
void World::windows_let_go(int process) {
  for (auto at = leaving_.begin(); at != leaving_.end();) {
    at->second.erase(process);
    at = at->second.empty() ? leaving_.erase(at) : std::next(at);
  }
}

}  // namespace unjam
