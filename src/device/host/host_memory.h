// Memory that can be shared with other processes through a file descriptor and has no name
// anywhere, so nothing is left behind after any kind of death.
#pragma once

#include <cstddef>
#include <string>

#include "base/fd.h"

namespace unjam {

class SharedMemory {
 public:
  SharedMemory() = default;
  ~SharedMemory();
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Zeroed, page-aligned; pages are committed on first touch. On failure the object stays empty and
  // `error` says why.
  static SharedMemory create(std::size_t bytes, std::string& error);
  // Maps what another process has created and sent. It can neither shrink nor grow (it is sealed),
  // so that no access faults; anything else is refused.
  static SharedMemory adopt(Fd fd, std::size_t bytes, std::string& error);

  unsigned char* data() const { return data_; }
  std::size_t size() const { return size_; }
  // Whether a part of it, of whole pages, may be touched here; at first all may.
  bool set_access(std::size_t offset, std::size_t bytes, bool access, std::string& error);
  // Of what was created: a new descriptor of the memory, to be sent; none on failure.
  Fd share() const;
  // Bytes that are committed now; of what was adopted, 0.
  std::size_t committed() const;

 private:
  bool map(std::size_t bytes, std::string& error);

  unsigned char* data_ = nullptr;
  std::size_t size_ = 0;
  Fd fd_;
};

}  // namespace unjam
