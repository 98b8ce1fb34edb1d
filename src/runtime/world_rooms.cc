// What stands behind the arenas of a world's ranks, for Rooms; and what processes say of it.
#include <utility>

#include "runtime/log.h"
#include "runtime/world.h"

namespace unjam {

bool World::add_memory(int owner, std::uint64_t offset, std::uint64_t bytes, std::string& error) {
  return arenas_.add(owner, offset, bytes, error);
}

bool World::share_memory(int owner, std::uint64_t offset, Fd& fd, std::string& error) {
  return arenas_.share(owner, offset, fd, error);
}

bool World::let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) {
  return arenas_.let_reach(owner, offset, viewer, error);
}

bool World::adopt_memory(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd, int viewer,
                         std::string& error) {
  return arenas_.adopt_part(owner, offset, bytes, std::move(fd), viewer, error);
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
