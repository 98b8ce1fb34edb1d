#include "device/host/host_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "base/limits.h"

namespace unjam {

SharedMemory SharedMemory::create(std::size_t bytes, std::string& error) {
  SharedMemory m;
  m.fd_ = Fd(memfd_create("unjam", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!m.fd_ || ftruncate(m.fd_.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(m.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    error = std::string("cannot create ") + std::to_string(bytes) +
            " bytes of shared memory: " + std::strerror(errno) + limit_text(errno);
    return {};
  }
  if (!m.map(bytes, error)) return {};
  return m;
}

SharedMemory SharedMemory::adopt(Fd fd, std::size_t bytes, std::string& error) {
  SharedMemory m;
  m.fd_ = std::move(fd);
  struct stat st{};
  const int seals = fcntl(m.fd_.get(), F_GET_SEALS);
  if (fstat(m.fd_.get(), &st) != 0 || static_cast<std::size_t>(st.st_size) != bytes || seals < 0 ||
      (seals & F_SEAL_SHRINK) == 0) {
    error = "another rank's shared memory is not what was expected (" + std::to_string(bytes) +
            " bytes, sealed)";
    return {};
  }
  if (!m.map(bytes, error)) return {};
  m.fd_.reset();  // the mapping stays, and a job has many
  return m;
}

bool SharedMemory::map(std::size_t bytes, std::string& error) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd_.get(), 0);
  if (p == MAP_FAILED) {
    error = std::string("cannot map ") + std::to_string(bytes) +
            " bytes of shared memory: " + std::strerror(errno) + limit_text(errno);
    return false;
  }
  // A child of fork() must neither write into its parent's job nor keep its memory.
  madvise(p, bytes, MADV_DONTFORK);
  data_ = static_cast<unsigned char*>(p);
  size_ = bytes;
  return true;
}

bool SharedMemory::set_access(std::size_t offset, std::size_t bytes, bool access,
                              std::string& error) {
  if (mprotect(data_ + offset, bytes, access ? PROT_READ | PROT_WRITE : PROT_NONE) == 0)
    return true;
  error = std::string("cannot change the access to ") + std::to_string(bytes) +
          " bytes of shared memory: " + std::strerror(errno);
  return false;
}

Fd SharedMemory::share() const { return Fd(fd_ ? fcntl(fd_.get(), F_DUPFD_CLOEXEC, 3) : -1); }

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
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
  if (!fd_ || fstat(fd_.get(), &st) != 0) return 0;
  return static_cast<std::size_t>(st.st_blocks) * 512;
}

}  // namespace unjam
