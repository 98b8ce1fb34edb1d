// Host memory that stands for a device's, of ranks of one process.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "engine/cuda_driver.h"
#include "tests/support/job.h"

namespace unjam_test {

class MappedArena : public unjam::DeviceArena {
 public:
  // `alone`: what is said to other processes.
  MappedArena(std::uint64_t bytes, const char* alone)
      : bytes_(bytes),
        alone_(alone),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {
    if (data_ == MAP_FAILED) fail("no memory for an arena");
  }
  ~MappedArena() override { munmap(data_, bytes_); }
  MappedArena(const MappedArena&) = delete;
  MappedArena& operator=(const MappedArena&) = delete;

  unsigned char* data() const override { return static_cast<unsigned char*>(data_); }
  bool add(std::uint64_t, std::uint64_t, std::string&) override { return true; }
  bool adopt(std::uint64_t, std::uint64_t, int fd, std::string& error) override {
    close(fd);
    error = alone_;
    return false;
  }
  std::uint64_t bytes() const override { return bytes_; }
  int share(std::uint64_t, std::string& error) override {
    error = alone_;
    return -1;
  }
  bool map_for(int, std::uint64_t, std::string&) override { return true; }

 private:
  const std::uint64_t bytes_;
  const char* const alone_;
  void* const data_;
};

}  // namespace unjam_test
