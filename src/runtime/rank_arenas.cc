#include "runtime/rank_arenas.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/limits.h"
#include "runtime/cuda_library.h"
#include "runtime/engine_memory.h"

namespace unjam {

RankArenas::RankArenas(int ranks, const Settings& settings, bool alone, bool by_rooms)
    : ranks_(ranks),
      on_cuda_(settings.device == UNJAM_DEVICE_CUDA),
      alone_(alone),
      by_rooms_(by_rooms),
      shape_(arena_shape(settings, ranks)),
      arenas_(static_cast<std::size_t>(ranks)),
      device_arenas_(static_cast<std::size_t>(ranks)),
      devices_(static_cast<std::size_t>(ranks), -1),
      bases_(static_cast<std::size_t>(ranks), nullptr) {}

std::uint64_t RankArenas::bytes_before_ledger() const {
  return on_cuda_ ? kLinkOffset + kLinkBytes : shape_.total_bytes();
}

std::uint64_t RankArenas::host_bytes() const { return bytes_with_ledger(bytes_before_ledger()); }

LedgerMemory& RankArenas::ledger(int rank) const {
  return *reinterpret_cast<LedgerMemory*>(host_part(rank) + ledger_offset(bytes_before_ledger()));
}

unsigned char* RankArenas::link(int rank) const { return host_part(rank) + kLinkOffset; }

std::uint64_t RankArenas::committed(int rank) const {
  if (cuda_ != nullptr) return device_arenas_[static_cast<std::size_t>(rank)]->bytes();
  return arenas_[static_cast<std::size_t>(rank)].committed();
}

bool RankArenas::close_blocks(int rank, std::string& error) {
  if (!by_rooms_ || ranks_ == 1) return true;
  const std::uint64_t base = shape_.base_bytes();
  return arenas_[static_cast<std::size_t>(rank)].set_access(base, shape_.total_bytes() - base,
                                                            false, error);
}

std::string RankArenas::heap_hint() const {
  if (shape_.heap_bytes == 0) return "";
  return " (" + std::to_string(shape_.heap_bytes) +
         " of these bytes are UNJAM_HEAP's, or heap_bytes': it may be too large)";
}

bool RankArenas::make(int rank, const Settings& settings, std::vector<Fd>& shared,
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
  arenas_[r] = SharedMemory::create(host_bytes(), error);
  if (arenas_[r].data() == nullptr) {
    error += heap_hint();
    return false;
  }
  if (!alone_ && !share(arenas_[r].share())) return false;
  bases_[r] = arenas_[r].data();
  if (settings.device == UNJAM_DEVICE_HOST) return close_blocks(rank, error);
  if (!make_on_device(rank, settings, error)) return false;
  return alone_ || share(Fd(device_arenas_[r]->share(0, error)));
}

bool RankArenas::make_on_device(int rank, const Settings& settings, std::string& error) {
  const auto r = static_cast<std::size_t>(rank);
  if (cuda_ == nullptr && (cuda_ = cuda_driver(error)) == nullptr) return false;
  // Alone means made by one call: then every rank has a device of its own, if there are as many.
  std::string unused;
  const int count = cuda_->devices(unused);
  int device = static_cast<int>(settings.device_index);
  if (device < 0) device = alone_ ? rank % count : cuda_->current();
  if (device >= count) {
    error = "device_index (UNJAM_DEVICE_INDEX) is " + std::to_string(device) + ": there are " +
            std::to_string(count) + " CUDA devices, counted from 0";
    return false;
  }
  devices_[r] = device;
  device_arenas_[r] = cuda_->create_arena(device, shape_.total_bytes(), shape_.base_bytes(), error);
  if (device_arenas_[r] == nullptr) {
    error += heap_hint();
    return false;
  }
  bases_[r] = device_arenas_[r]->data();
  return true;
}

bool RankArenas::mirror(int rank, std::string& error) {
  const auto i = static_cast<std::size_t>(rank);
  arenas_[i] = SharedMemory::create(host_bytes(), error);
  bases_[i] = arenas_[i].data();
  return bases_[i] != nullptr;
}

bool RankArenas::adopt(int rank, std::vector<Fd> shared, std::string& error) {
  const auto i = static_cast<std::size_t>(rank);
  arenas_[i] = SharedMemory::adopt(std::move(shared[0]), host_bytes(), error);
  if (arenas_[i].data() == nullptr) return false;
  bases_[i] = arenas_[i].data();
  if (cuda_ == nullptr) return close_blocks(rank, error);
  if (shared.size() == 2) {
    // A device that a rank of this process uses anyway: another one would get a context of ours.
    const int own = *std::max_element(devices_.begin(), devices_.end());
    device_arenas_[i] = cuda_->adopt_arena(own, shared[1].release(), shape_.total_bytes(),
                                           shape_.base_bytes(), error);
  }
  if (device_arenas_[i] == nullptr) {
    error = "cannot use the device memory of rank " + std::to_string(rank) + ": " + error;
    return false;
  }
  bases_[i] = device_arenas_[i]->data();
  return true;
}

bool RankArenas::enter_device(int rank, const std::vector<HostTable>& tables, std::string& error) {
  if (!links_registered_) {
    for (int r = 0; r < ranks_; ++r) {
      if (!cuda_->register_host(link(r), kLinkBytes, error)) {
        while (r-- > 0) cuda_->unregister_host(link(r));
        return false;
      }
    }
    links_registered_ = true;
  }
  for (const HostTable& table : tables) {
    if (!cuda_->register_host(table.data, table.bytes, error)) return false;
    registered_.push_back(table.data);
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

void RankArenas::leave_devices() {
  for (void* const table : registered_) cuda_->unregister_host(table);
  registered_.clear();
  if (!links_registered_) return;
  for (int r = 0; r < ranks_; ++r) cuda_->unregister_host(link(r));
  links_registered_ = false;
}

void RankArenas::keep() { new std::vector<SharedMemory>(std::move(arenas_)); }

bool RankArenas::add(int owner, std::uint64_t offset, std::uint64_t bytes, std::string& error) {
  const auto i = static_cast<std::size_t>(owner);
  if (cuda_ != nullptr) return device_arenas_[i]->add(offset, bytes, error);
  return arenas_[i].set_access(offset, bytes, true, error);
}

bool RankArenas::share(int owner, std::uint64_t offset, Fd& fd, std::string& error) {
  if (cuda_ == nullptr) return true;  // the whole arena was shared
  fd = Fd(device_arenas_[static_cast<std::size_t>(owner)]->share(offset, error));
  return static_cast<bool>(fd);
}

bool RankArenas::let_reach(int owner, std::uint64_t offset, int viewer, std::string& error) {
  if (cuda_ == nullptr) return true;
  return device_arenas_[static_cast<std::size_t>(owner)]->map_for(device_of(viewer), offset, error);
}

bool RankArenas::adopt_part(int owner, std::uint64_t offset, std::uint64_t bytes, Fd fd, int viewer,
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

}  // namespace unjam
