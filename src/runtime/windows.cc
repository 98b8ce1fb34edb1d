#include "runtime/windows.h"

#include <iterator>
#include <string>

namespace unjam {

Windows::Map::const_iterator Windows::at_or_before(std::uintptr_t address) const {
  const auto next = windows_.upper_bound(address);
  return next == windows_.begin() ? windows_.end() : std::prev(next);
}

Result Windows::add(const void* pointer, std::uint64_t bytes, std::uint64_t& serial) {
  if (pointer == nullptr || bytes == 0) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            std::string("there is nothing to register: ") +
                (pointer == nullptr ? "the pointer is NULL" : "it has 0 bytes") +
                "; give the address and the size of memory that calls have their outputs in"};
  }
  const auto begin = reinterpret_cast<std::uintptr_t>(pointer);
  if (bytes > kMostWindowBytes - kPlaceUnit || begin + bytes < begin) {
    return {UNJAM_ERROR_INVALID_ARGUMENT,
            std::to_string(bytes) + " bytes are more than can be registered at once (" +
                std::to_string(kMostWindowBytes - kPlaceUnit) +
                ", within the address space): give the size in bytes"};
  }
  const std::lock_guard lock(mutex_);
  const auto last = at_or_before(begin + bytes - 1);
  if (last != windows_.end() && last->first + last->second.bytes > begin) {
    return {UNJAM_ERROR_INVALID_USAGE,
            "of these " + std::to_string(bytes) + " bytes " +
                (begin == last->first && bytes == last->second.bytes ? "all" : "some") +
                " are registered already (in a window of " + std::to_string(last->second.bytes) +
                " bytes): register memory once, and deregister it (unjamMemDeregister) before "
                "other bounds"};
  }
  if (windows_.size() == kWindows) {
    return {UNJAM_ERROR_RESOURCES,
            std::to_string(kWindows) +
                " windows of this rank are registered, as many as there can be at a time: "
                "deregister some (unjamMemDeregister), or register larger pieces"};
  }
  bool used[kWindows] = {};
  for (const auto& [address, window] : windows_) used[window.serial % kWindows] = true;
  // The place that was given least often, so that none comes to its end before the others.
  std::uint32_t place = kWindows;
  for (std::uint32_t i = 0; i < kWindows; ++i) {
    if (used[i]) continue;
    if (place == kWindows || generations_[i] < generations_[place]) place = i;
  }
  serial = (generations_[place] + 1) * kWindows + place;
  if (serial > last_serial_) {
    return {UNJAM_ERROR_RESOURCES,
            "this rank has registered memory as often as it can (a number is never used again): "
            "register memory once and keep it so, in a new job"};
  }
  windows_.emplace(begin, Window{bytes, serial, {}});
  ++generations_[place];
  count_.store(windows_.size(), std::memory_order_relaxed);
  return {};
}

Result Windows::find(const void* pointer, std::uint64_t& bytes, std::uint64_t& serial,
                     Result& retired) const {
  const auto address = reinterpret_cast<std::uintptr_t>(pointer);
  const std::lock_guard lock(mutex_);
  const auto at = at_or_before(address);
  if (at == windows_.end() || address - at->first >= at->second.bytes) {
    return {UNJAM_ERROR_INVALID_USAGE,
            "nothing is registered where the pointer points: deregister memory once, by the "
            "context that it was registered with"};
  }
  if (address != at->first) {
    return {UNJAM_ERROR_INVALID_ARGUMENT, "the pointer is " + std::to_string(address - at->first) +
                                              " bytes behind the beginning of a window of " +
                                              std::to_string(at->second.bytes) +
                                              ": deregister the pointer that was registered"};
  }
  bytes = at->second.bytes;
  serial = at->second.serial;
  retired = at->second.retired;
  return {};
}

void Windows::remove(std::uint64_t serial) {
  const std::lock_guard lock(mutex_);
  for (auto at = windows_.begin(); at != windows_.end(); ++at) {
    if (at->second.serial != serial) continue;
    if (!at->second.retired.ok()) ++left_;
    windows_.erase(at);
    break;
  }
  count_.store(windows_.size(), std::memory_order_relaxed);
}

std::vector<Windows::Registered> Windows::all() const {
  const std::lock_guard lock(mutex_);
  std::vector<Registered> windows;
  for (const auto& [address, window] : windows_) {
    windows.push_back({window.serial, !window.retired.ok()});
  }
  return windows;
}

void Windows::retire(std::uint64_t place, const Result& why) {
  const std::lock_guard lock(mutex_);
  for (auto& [address, window] : windows_) {
    if (window.serial == window_of(place) && window.retired.ok()) window.retired = why;
  }
}

std::uint64_t Windows::place(const void* output, std::uint64_t bytes) const {
  const auto address = reinterpret_cast<std::uintptr_t>(output);
  // Relaxed: whoever has registered memory and calls with it afterwards finds it under the lock.
  if (count_.load(std::memory_order_relaxed) == 0 || address % kPlaceUnit != 0) return 0;
  const std::lock_guard lock(mutex_);
  const auto at = at_or_before(address);
  if (at == windows_.end()) return 0;
  const std::uint64_t before = address - at->first;
  if (before >= at->second.bytes || bytes > at->second.bytes - before) return 0;
  return place_in_window(at->second.serial, address - at->first / kPlaceUnit * kPlaceUnit);
}

Windows::Usage Windows::usage() const {
  const std::lock_guard lock(mutex_);
  Usage u;
  u.windows = windows_.size();
  for (const auto& [address, window] : windows_) {
    u.bytes += window.bytes;
    if (!window.retired.ok()) ++u.retired;
  }
  u.left = left_;
  return u;
}

}  // namespace unjam
