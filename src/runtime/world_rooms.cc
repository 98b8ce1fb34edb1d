// What stands behind the arenas of a world's ranks, for Rooms; and what processes say of it.
#include <utility>

#include "runtime/log.h"
#include "runtime/world.h"

namespace unjam {

bool World::close_blocks(int rank, std::string& error) {
  if (rooms_ == nullptr || ranks_ == 1) return true;
  const std::uint64_t base = shape_.base_bytes();
  return arenas_[static_cast<std::size_t>(rank)].set_access(base, shape_.total_bytes() - base,
                                                            false, error);
}

bool World::add_memory(int owner, std::uint64_t offset, std::uint64_t bytes, std::string& error) {
  const auto i = static_cast<std::size_t>(owner);
  if (cuda_ != nullptr) return device_arenas_[i]->add(offset, bytes, error);
  return arenas_[i].set_access(offset, bytes, true, error);
}

bool World::share_memory(int owner, std::uint64_t offset, Fd& fd, std::string& error) {
  if (cuda_ == nullptr) return true;  // the whole arena was shared
  fd = Fd(device_arenas_[static_cast<std::size_t>(owner)]->share(offset, error));
  return static_cast<bool>(fd);
}

bool World::let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) {
  if (cuda_ == nullptr) return true;
  return device_arenas_[static_cast<std::size_t>(owner)]->map_for(device_of(viewer), offset, error);
}

bool World::adopt_memory(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd, int viewer,
                         std::string& error) {
  const auto i = static_cast<std::size_t>(owner);
  if (cuda_ == nullptr) return arenas_[i].set_access(offset, bytes, true, error);
  if (!fd) {
    error = "its descriptor is missing";
    return false;
  }
  return device_arenas_[i]->adopt(offset, bytes, fd.release(), error) &&
         device_arenas_[i]->map_for(device_of(viewer), offset, error);
}

void World::tell_of_room(int rank, const RoomMessage& message, Fd fd) {
  std::vector<Fd> fds;
  if (fd) fds.push_back(std::move(fd));
  mesh_.send(process_of_[static_cast<std::size_t>(rank)], MessageType::kRoom, message.encode(),
             std::move(fds));
}

void World::warn(const std::string& text) {
  Log::process().say(LogLevel::kWarn, log_rank(), [&] { return text; });
}

void World::on_room(int process, Frame& frame) {
  RoomMessage m;
  if (rooms_ == nullptr || !m.decode(frame.payload)) return;
  if (!is_rank_of(m.offers ? m.owner : m.peer, process)) return;
  rooms_->hear(m, frame.fds.empty() ? Fd() : std::move(frame.fds.front()));
}

}  // namespace unjam
