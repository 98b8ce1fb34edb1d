#include "api/nccl/registration.h"

#include <mutex>
#include <unordered_map>
#include <utility>

namespace unjam::nccl {
namespace {

struct Handles {
  std::mutex mutex;
  std::unordered_map<const void*, std::shared_ptr<Registration>> all;
};
Handles& handles() {
  static Handles* const all = new Handles;  // outlives what runs at the end of the process
  return *all;
}

}  // namespace

Registration::Registration(const std::shared_ptr<Job>& job, void* memory, std::size_t bytes)
    : job_(job), memory_(memory), bytes_(bytes) {
  job->register_memory(memory, bytes);
}

void Registration::end() {
  if (ended_.exchange(true)) return;
  if (const auto job = job_.lock(); job != nullptr) job->deregister_memory(memory_, bytes_);
}

void* hand_out(std::shared_ptr<Registration> registration) {
  void* const handle = registration.get();
  const std::lock_guard lock(handles().mutex);
  handles().all[handle] = std::move(registration);
  return handle;
}

std::shared_ptr<Registration> take_back_registration(const void* handle) {
  const std::lock_guard lock(handles().mutex);
  const auto found = handles().all.find(handle);
  if (found == handles().all.end()) return nullptr;
  std::shared_ptr<Registration> registration = std::move(found->second);
  handles().all.erase(found);
  return registration;
}

}  // namespace unjam::nccl
