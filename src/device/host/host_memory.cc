#include "device/host/host_memory.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace unjam {

SharedMemory SharedMemory::create(std::size_t bytes, std::string& error) {
  SharedMemory m;
  m.fd_ = memfd_create("unjam", MFD_CLOEXEC);
  if (m.fd_ < 0 || ftruncate(m.fd_, static_cast<off_t>(bytes)) != 0) {
    error = std::string("cannot create ") + std::to_string(bytes) +
            " bytes of shared memory: " + std::strerror(errno);
    return {};
  }
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, m.fd_, 0);
  if (p == MAP_FAILED) {
    error = std::string("cannot map ") + std::to_string(bytes) +
            " bytes of shared memory: " + std::strerror(errno);
    return {};
  }
  m.data_ = static_cast<unsigned char*>(p);
  m.size_ = bytes;
  return m;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
  if (fd_ >= 0) close(fd_);
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept { *this = std::move(other); }

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(fd_, other.fd_);
  return *this;
}

std::size_t SharedMemory::committed() const {
  struct stat st{};
  if (fd_ < 0 || fstat(fd_, &st) != 0) return 0;
  return static_cast<std::size_t>(st.st_blocks) * 512;
}

}  // namespace unjam
