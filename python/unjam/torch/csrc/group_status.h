// How a process group stands on this rank.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace unjam_torch {

// Its calls have it, too, and may outlive the group.
class GroupStatus {
 public:
  // key_prefix: of a keyed group.
  explicit GroupStatus(std::string name, const std::string& key_prefix = "")
      : name_(std::move(name)), channel_(key_prefix.empty() ? name_ : name_ + " " + key_prefix) {}

  void abort() { aborted_.store(true); }
  bool aborted() const { return aborted_.load(); }
  // The group was destroyed: what its calls come to is nobody's concern any more.
  void end() { ended_.store(true); }
  bool over() const { return aborted() || ended_.load(); }

  // Out of use from now on. why: "is …, since …". True: it was not before.
  bool break_off(std::string why) {
    const std::lock_guard lock(mutex_);
    if (!broken_.empty()) return false;
    broken_ = std::move(why);
    return true;
  }
  bool broken() const {
    const std::lock_guard lock(mutex_);
    return !broken_.empty();
  }
  // Throws if it is. more: at the end of the message.
  void check(const std::string& more = {}) const {
    const std::lock_guard lock(mutex_);
    TORCH_CHECK_WITH(DistBackendError, broken_.empty(), "unjam: process group ", name_, " ",
                     broken_, ": destroy it on all ranks, and make another", more);
  }
  const std::string& name() const { return name_; }
  // The group, and which keyed group of it.
  const std::string& channel() const { return channel_; }

 private:
  const std::string name_;
  const std::string channel_;
  std::atomic<bool> aborted_{false};
  std::atomic<bool> ended_{false};
  mutable std::mutex mutex_;
  std::string broken_;
};

}  // namespace unjam_torch
