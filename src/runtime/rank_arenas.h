// The memory of a job's ranks, as this process has it: an arena a rank. On the host all of it is
// shared memory. With CUDA the arena is on the rank's device, and shared memory in front of it has
// what the host and devices tell each other (a link) and the ledger.
//
// Made and changed with the world's lock; once all ranks have joined, only what rooms add changes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fd.h"
#include "device/host/host_memory.h"
#include "engine/cuda_driver.h"
#include "runtime/settings.h"
#include "transport/arena.h"
#include "transport/ledger.h"

namespace unjam {

class RankArenas {
 public:
  // alone: all ranks are of this process. by_rooms: memory behind the blocks comes as ranks meet.
  RankArenas(int ranks, const Settings& settings, bool alone, bool by_rooms);

  const ArenaShape& shape() const { return shape_; }
  CudaDriver* cuda() const { return cuda_; }
  // Where the ranks' arenas are: on the host, or on CUDA devices (then null until enter_device()).
  unsigned char* const* bases() const { return bases_.data(); }
  // CUDA: the device of a rank of this process, -1 of another; and the host memory that its device
  // and its peers' share (kLinkBytes).
  int device_of(int rank) const { return devices_[static_cast<std::size_t>(rank)]; }
  const std::vector<int>& devices() const { return devices_; }
  unsigned char* link(int rank) const;
  LedgerMemory& ledger(int rank) const;
  unsigned char* host_part(int rank) const {
    return arenas_[static_cast<std::size_t>(rank)].data();
  }
  std::uint64_t committed(int rank) const;

  // A rank of this process. shared: what other processes need of it; none if all are here.
  bool make(int rank, const Settings& settings, std::vector<Fd>& shared, std::string& error);
  // One on another host: what ranks here write for it (transport/network/mirror.h).
  bool mirror(int rank, std::string& error);
  // Another process's.
  bool adopt(int rank, std::vector<Fd> shared, std::string& error);
  // CUDA: maps all ranks' arenas for a rank's device, and host tables that it reads.
  struct HostTable {
    void* data = nullptr;
    std::uint64_t bytes = 0;
  };
  bool enter_device(int rank, const std::vector<HostTable>& tables, std::string& error);
  // Host memory stays mapped for good: somebody who cannot be stopped may be at it.
  void keep();
  // Devices look at nothing of the host any more: before tables go.
  void leave_devices();

  // ---- memory that comes as ranks meet (Rooms::Memory has the meanings) ----
  bool add(int owner, std::uint64_t offset, std::uint64_t bytes, std::string& error);
  bool share(int owner, std::uint64_t offset, Fd& fd, std::string& error);
  bool let_reach(int owner, std::uint64_t offset, int viewer, std::string& error);
  bool adopt_part(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd, int viewer,
                  std::string& error);

 private:
  std::uint64_t host_bytes() const;
  std::uint64_t bytes_before_ledger() const;
  // On the host: what has yet to come is not to be touched.
  bool close_blocks(int rank, std::string& error);
  bool make_on_device(int rank, const Settings& settings, std::string& error);
  std::string heap_hint() const;

  const int ranks_;
  const bool on_cuda_;
  const bool alone_;
  const bool by_rooms_;
  const ArenaShape shape_;
  std::vector<SharedMemory> arenas_;  // on the host: all of it, or what stands before device arenas
  CudaDriver* cuda_ = nullptr;
  std::vector<std::unique_ptr<DeviceArena>> device_arenas_;
  std::vector<int> devices_;  // by rank; -1: not of this process
  bool links_registered_ = false;
  std::vector<unsigned char*> bases_;
  std::vector<void*> registered_;  // of ranks' tables
};

}  // namespace unjam
