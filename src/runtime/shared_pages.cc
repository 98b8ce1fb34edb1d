#include "runtime/shared_pages.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

namespace unjam {

void UnmapPages::operator()(void* memory) const { munmap(memory, bytes); }

std::uint64_t whole_pages(std::uint64_t bytes) {
  constexpr std::uint64_t kPage = 4096;
  return (bytes + kPage - 1) / kPage * kPage;
}

void* map_shared_pages(std::uint64_t bytes, std::string& error) {
  void* const memory =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory != MAP_FAILED) return memory;
  error = "cannot allocate " + std::to_string(bytes) + " bytes: " + std::strerror(errno);
  return nullptr;
}

}  // namespace unjam
