// The memory that a rank's engine works in, allocated and wired up: everything that would be device
// memory (or pinned memory, for the queues) on a GPU.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "engine/state.h"
#include "runtime/settings.h"
#include "transport/arena.h"

namespace unjam {

// Zero-initialised storage whose untouched pages cost nothing.
template <class T>
class ZeroedArray {
  static_assert(std::is_trivially_destructible_v<T>);

 public:
  explicit ZeroedArray(std::size_t n)
      : data_(static_cast<T*>(std::calloc(n == 0 ? 1 : n, sizeof(T)))) {
    if (data_ == nullptr) throw std::bad_alloc();
  }
  T* get() const { return data_.get(); }

 private:
  struct Free {
    void operator()(T* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
};

ArenaShape arena_shape(const Settings& settings, int ranks);
std::uint32_t invocation_slots(const Settings& settings);  // that calls may have
inline constexpr std::uint32_t kRoomSlots = 2;             // behind those, for commands about rooms
std::uint32_t engine_slots(const Settings& settings);      // all of these
std::uint32_t device_keys(const Settings& settings);       // that a GPU keeps the state of

class EngineMemory {
 public:
  // `bases`: where every rank's arena is mapped, by world rank; `windows`: the rank's table of its
  // peers' windows, if there is one; `rooms`: that of their rooms, unless all memory is there. All
  // must outlive this.
  EngineMemory(const Settings& settings, const ArenaShape& shape, unsigned char* const* bases,
               int rank, WindowEntry* windows = nullptr, Room* rooms = nullptr);

  RankState& rank() { return rank_; }
  // LaneTransport::groups of each lane.
  void set_groups(std::uint32_t lane, std::uint64_t* const* groups) {
    lanes_[lane].transport.groups = groups;
  }
  LaneState& lane(std::uint32_t l) { return lanes_[l]; }
  // Bytes of device memory, and of what would be pinned host memory, that this rank reserves.
  std::uint64_t bytes() const { return bytes_; }

 private:
  template <class T>
  T* take(std::size_t n);

  RankState rank_;
  std::unique_ptr<LaneState[]> lanes_;
  std::unique_ptr<Mailbox[]> mailboxes_;
  std::vector<std::shared_ptr<void>> storage_;
  std::uint64_t bytes_ = 0;
};

}  // namespace unjam
