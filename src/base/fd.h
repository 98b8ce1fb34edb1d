// A file descriptor that closes itself, and in children of fork() at once.
#pragma once

#include <unistd.h>

#include <utility>

#include "base/fork_guard.h"

namespace unjam {

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {
    if (fd_ >= 0) close_in_children(fd_);
  }
  ~Fd() { reset(); }
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  Fd(const Fd&) = delete;
  Fd& operator=(const Fd&) = delete;

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  // The caller closes it.
  int release() {
    if (fd_ >= 0) forget_descriptor(fd_);
    return std::exchange(fd_, -1);
  }
  void reset() {
    if (fd_ < 0) return;
    forget_descriptor(fd_);
    close(fd_);
    fd_ = -1;
  }

 private:
  int fd_ = -1;
};

}  // namespace unjam
