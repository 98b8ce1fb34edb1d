// Zeroed memory, in whole pages, that this process's devices read and its threads write.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace unjam {

struct UnmapPages {
  std::uint64_t bytes = 0;
  void operator()(void* memory) const;
};
template <class T>
using SharedPages = std::unique_ptr<T, UnmapPages>;  // of as many T as fit

// So many bytes, rounded up to pages.
std::uint64_t whole_pages(std::uint64_t bytes);
// Null: `error`. Shared with children, which have no business with it: so that when the process
// forks it stays where devices have it, and is not copied away from there.
void* map_shared_pages(std::uint64_t bytes, std::string& error);

template <class T>
SharedPages<T> make_shared_pages(std::uint64_t count, std::string& error) {
  const std::uint64_t bytes = whole_pages(count * sizeof(T));
  return {static_cast<T*>(map_shared_pages(bytes, error)), UnmapPages{bytes}};
}

}  // namespace unjam
