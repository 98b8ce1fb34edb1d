// When a rank's launcher looks again after a poke. Calls without the engine poke before what they
// have sent is certain to be there (exec/packets/tell.cuh), which takes a few microseconds; a
// daemon that comes of the poke stays longer than that. In case of a delay out of the ordinary
// there are a few more looks, at growing distances.
#pragma once

#include <cstdint>

namespace unjam {

class Recall {
 public:
  static constexpr std::uint64_t kFirstNs = 1'000'000, kLastNs = 1'000'000'000;

  // There was a poke.
  void begin(std::uint64_t now_ns) {
    since_ns_ = now_ns;
    next_ns_ = kFirstNs;
  }
  // True: a look is due, and the next one later. One only, if nobody has asked for long.
  bool is_due(std::uint64_t now_ns) {
    const std::uint64_t passed = now_ns - since_ns_;
    if (next_ns_ == 0 || passed < next_ns_) return false;
    while (next_ns_ != 0 && passed >= next_ns_) next_ns_ = next_ns_ == kLastNs ? 0 : next_ns_ * 10;
    return true;
  }

 private:
  std::uint64_t since_ns_ = 0;
  std::uint64_t next_ns_ = 0;  // behind `since_ns_`; 0: not again
};

}  // namespace unjam
