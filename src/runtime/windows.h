// A rank's windows: memory of its user's that peers may store results into (unjamMemRegister()).
//
// What is registered is known here, on the host; how peers find it: window_maps.h. Has a lock of
// its own, under which nothing waits, as the heap's.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "runtime/result.h"
#include "transport/windows.h"

namespace unjam {

class Windows {
 public:
  // `last_serial`: after which no more windows can be registered.
  explicit Windows(std::uint64_t last_serial = kLastWindowSerial) : last_serial_(last_serial) {}

  // *serial: the new window's number. Peers may be invited from now on.
  Result add(const void* pointer, std::uint64_t bytes, std::uint64_t& serial);
  // Whether what was registered begins there; `bytes`, `serial`, and why a call into it has failed.
  Result find(const void* pointer, std::uint64_t& bytes, std::uint64_t& serial,
              Result& retired) const;
  // Nobody is invited any more.
  void remove(std::uint64_t serial);
  struct Registered {
    std::uint64_t serial = 0;
    bool retired = false;
  };
  std::vector<Registered> all() const;
  // A call whose output is there has failed: peers may still store into it.
  void retire(std::uint64_t place, const Result& why);

  // Invocation::output_place of an output there; 0: it is in no window as a whole, or does not
  // begin on a unit.
  std::uint64_t place(const void* output, std::uint64_t bytes) const;

  struct Usage {
    std::uint64_t windows = 0;
    std::uint64_t bytes = 0;
    std::uint64_t retired = 0;  // of the windows
    std::uint64_t left = 0;     // retired ones that were removed since
  };
  Usage usage() const;

 private:
  struct Window {
    std::uint64_t bytes = 0;
    std::uint64_t serial = 0;
    Result retired;  // why, if it is
  };
  using Map = std::map<std::uintptr_t, Window>;  // by address; no two overlap
  // The last that begins there or before.
  Map::const_iterator at_or_before(std::uintptr_t address) const;

  const std::uint64_t last_serial_;
  mutable std::mutex mutex_;
  Map windows_;
  std::atomic<std::size_t> count_{0};         // of windows_, for who asks in vain
  std::uint64_t generations_[kWindows] = {};  // by a serial number's low bits: its other bits
  std::uint64_t left_ = 0;
};

}  // namespace unjam
