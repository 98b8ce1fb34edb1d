// Memory of cudaMalloc() that other devices and processes store into (unjamMemRegister()): what it
// is, and mapping it, by CUDA's legacy handles for other processes, the only ones that such memory
// has.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "engine/cuda_driver.h"

namespace unjam {

// As CudaDriver says. Any thread; one at a time is inside of a call that maps.
class CudaWindows {
 public:
  static bool check(int device, const void* memory, std::uint64_t bytes, std::string& error);
  static bool name(int device, const void* memory, WindowName& name, std::string& error);
  static bool reach(int device, int other, std::string& error);
  unsigned char* open(int device, const WindowName& name, std::string& error);
  void close(int device, const WindowName& name);

 private:
  // An allocation is mapped once for a device, however many windows there are in it: a process may
  // not open a handle that it has open.
  struct Mapping {
    void* base = nullptr;
    std::uint64_t uses = 0;
  };
  using Place = std::pair<int, decltype(WindowName::allocation)>;  // device, allocation

  std::mutex mutex_;
  std::map<Place, Mapping> mappings_;
};

}  // namespace unjam
