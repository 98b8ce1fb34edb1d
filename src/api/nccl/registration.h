// Memory that a program has registered with a communicator (ncclCommRegister).
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>

#include "api/nccl/job.h"
#include "api/nccl/status.h"

namespace unjam::nccl {

// A window of the communicator's job until it is ended: by the program, or with the communicator.
class Registration {
 public:
  Registration(const std::shared_ptr<Job>& job, void* memory, std::size_t bytes);
  void end();
  bool ended() const { return ended_.load(); }

 private:
  const std::weak_ptr<Job> job_;
  void* const memory_;
  const std::size_t bytes_;
  std::atomic<bool> ended_{false};
};

// The handles of programs. One is good until the program gives it back, although its communicator
// may be gone: so a program may do that in any order.
void* hand_out(std::shared_ptr<Registration> registration);
// Null: it is none, or is none any more.
std::shared_ptr<Registration> take_back_registration(const void* handle);

}  // namespace unjam::nccl
