// What a rank's device offers for tensors that are packed and unpacked there: kernels that copy
// boxes, in a stream of their own, and memory.
//
// The stream has nothing in it that waits: no call of the user's, no peer. So whoever waits for it
// waits for what the device runs, and no more.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/box.h"

namespace unjam {

// Any thread. False, or nullptr: `error` says what was refused, and nothing was queued.
class BoxMover {
 public:
  virtual ~BoxMover() = default;

  virtual void* stream() = 0;
  // The calling thread is one of unjam's own, and works on this device from now on.
  virtual void enter() {}
  // Queues copies: none reads or writes what another one of them writes.
  virtual bool copy(const std::vector<BoxCopy>& boxes, std::string& error) = 0;
  // Queues zeros.
  virtual bool clear(void* memory, std::uint64_t bytes, std::string& error) = 0;
  // Queues: the word, of pinned(), becomes `value` behind all that was queued so far.
  virtual bool tell(std::uint64_t* word, std::uint64_t value, std::string& error) = 0;

  // What is queued in a stream of the user's from now on comes when the word, of pinned(), is
  // `value` or more.
  virtual bool wait_in(void* stream, const std::uint64_t* word, std::uint64_t value,
                       std::string& error) = 0;
  // How far a stream of the user's is now; and whether it is past that.
  virtual std::shared_ptr<void> note(void* stream, std::string& error) = 0;
  virtual bool is_past(void* noted, bool& past, std::string& error) = 0;

  // Zeroed memory of the host that the device reaches, kPinnedBytes.
  static constexpr std::uint64_t kPinnedBytes = std::uint64_t{1} << 20;
  virtual unsigned char* pinned() = 0;
  // More memory of the device's, which is never given back. Waits for nothing that it does.
  virtual unsigned char* add(std::uint64_t bytes, std::string& error) = 0;
  // Whether kernels of the device may read and write what lies there.
  virtual bool reaches(const void* memory, std::string& error) = 0;
};

}  // namespace unjam
