// What a rank does for its rooms (runtime/rooms.h): it meets the neighbours that its plans name,
// and has its engine clear the memory that comes.
#include <algorithm>

#include "base/atomics.h"
#include "runtime/context.h"

namespace unjam {

// Of the key's plan. Waits for nobody: until a neighbour is ready its slices lack room.
Result Context::meet_neighbours(Key& key) {
  Rooms* const rooms = world_->rooms();
  if (rooms == nullptr || key.met) return {};
  const unjamGroup& group = *key.group;
  for (const std::uint16_t neighbour : key.plan->neighbours) {
    const int peer = group.members[neighbour];
    if (met_[static_cast<std::size_t>(peer)]) continue;
    std::string error;
    to_clear_.emplace_back();  // what fails for want of memory comes first
    const bool there = rooms->meet(rank_, peer, to_clear_.back(), error);
    if (to_clear_.back().to == 0) to_clear_.pop_back();
    if (!there) {
      clear_rooms();  // of those in front
      return {UNJAM_ERROR_RESOURCES, error, /*transient=*/true};
    }
    met_[static_cast<std::size_t>(peer)] = true;
  }
  key.met = true;
  clear_rooms();
  return {};
}

// As many as there are slots for; more as those are done.
void Context::clear_rooms() {
  bool any = false;
  while (!to_clear_.empty() && !free_room_slots_.empty()) {
    const std::uint16_t slot = free_room_slots_.back();
    free_room_slots_.pop_back();
    const ClearRoom room = to_clear_.front();
    to_clear_.pop_front();
    // An engine that holds its lane does nothing else meanwhile; and the host's pages come clear.
    if (!cuda() && settings_.policy == UNJAM_POLICY_HOLD) {
      free_room_slots_.push_back(slot);
      world_->rooms()->cleared(rank_, room);
      continue;
    }
    being_cleared_[slot - slots_.size()] = room;
    Invocation command;
    set_room(room, &command);
    command.geometry.first_lane = 0;
    command.geometry.lanes = 1;
    command.slot = slot;
    command.serial = ++serials_;
    store_release<std::uint32_t>(memory_->rank().cancelled[slot], 0);
    daemon_->completes(slot, nullptr, 0);
    daemon_->submit(command, nullptr);
    any = true;
  }
  if (any) daemon_->ring(0);
}

void Context::room_is_cleared(std::uint16_t slot) {
  free_room_slots_.push_back(slot);
  world_->rooms()->cleared(rank_, being_cleared_[slot - slots_.size()]);
  clear_rooms();
}

bool Context::clear_room(const ClearRoom& room) {
  const std::lock_guard lock(mutex_);
  if (closed_ || daemon_ == nullptr) return false;
  to_clear_.push_back(room);
  clear_rooms();
  return true;
}

// Marks for peers in the midst of meeting this rank would be lost (LaneTransport::mark_void()), and
// what these have sent meanwhile would never be let go of.
bool Context::hears_marks(const unjamGroup& group) const {
  const Rooms* const rooms = world_->rooms();
  return rooms == nullptr ||
         std::all_of(group.members.begin(), group.members.end(), [&](int member) {
           const auto i = static_cast<std::size_t>(member);
           return member == rank_ || !met_[i] || gone_[i] || rooms->connectors(rank_, member) != 0;
         });
}

void Context::look_at_wishes(const Room* rooms) {
  if (Rooms::any_wanted(rooms, world_->shape().ranks)) world_->rooms()->look(rank_);
}

void Context::take_in_cleared() {
  const std::lock_guard lock(mutex_);
  take_completions();
}

void Context::room_came() { daemon_->ring_all(); }

}  // namespace unjam
