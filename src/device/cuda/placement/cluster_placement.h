// Whether the next call's blocks had better not come before this call's have all left: where a
// block of something else has brought this call's clusters to lie on the halves of TPCs, which the
// next call's would do as well (docs/internals/neighbouring-calls.md). If the GPU is not only ours
// nothing is gained, and a call begins later; so some calls lie between two that keep the next
// one's blocks, and where that did not help twice as many, up to hundreds.
//
// Relaxed: nothing else goes with these words. A call's blocks have all begun long before any of
// them asks; where one has not, or another call has come meanwhile, a call comes later than it
// could, or lies as it did.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

struct ClusterPlacement {
  static constexpr std::uint32_t kSms = 256;  // more than any GPU has
  // Calls of the rank, of any kind, between two that keep the next one's blocks: at first, at most.
  static constexpr std::uint32_t kFewBetween = 8, kMostBetween = 512;

  std::uint32_t latest[kSms] = {};  // by SM: the call whose block was there last, by serial
  std::uint64_t kept_word = 0;      // Kept

  // By one thread of each block of a call, as it begins.
  UNJAM_HD void note(std::uint32_t sm, std::uint32_t call) {
    if (sm < kSms) store_relaxed_local(latest[sm], call);
  }
  // Whether this block is to keep the next call's, by one thread, towards the call's end.
  UNJAM_HD bool keep(std::uint32_t sm, std::uint32_t call) {
    const std::uint32_t other = sm ^ 1;  // SMs of a TPC are numbered behind each other
    if (other >= kSms || load_relaxed_local(latest[other]) == call) return false;
    Kept last = Kept::from(load_relaxed_local(kept_word));
    if (last.between != 0) {  // there is one
      const std::uint32_t since = call - last.call;
      if (since == 0) return true;  // another block of this call's has said so
      if (since == 1 && !last.in_vain) {
        // (Blocks that find it so at the same time all store the same.)
        last.in_vain = true;
        last.between = last.between < kMostBetween / 2 ? 2 * last.between : kMostBetween;
        store_relaxed_local(kept_word, last.word());
      }
      if (since <= last.between) return false;
    }
    const Kept now{call, last.in_vain ? last.between : kFewBetween, false};
    store_relaxed_local(kept_word, now.word());
    return true;
  }

 private:
  // The latest call that kept the next one's blocks; how many calls from there on none does; and
  // whether the one behind it lay on halves all the same.
  struct Kept {
    std::uint32_t call, between;
    bool in_vain;
    UNJAM_HD static Kept from(std::uint64_t word) {
      const auto low = static_cast<std::uint32_t>(word);
      return {static_cast<std::uint32_t>(word >> 32), low >> 1, (low & 1) != 0};
    }
    UNJAM_HD std::uint64_t word() const {
      return std::uint64_t{call} << 32 | between << 1 | (in_vain ? 1u : 0u);
    }
  };
};

}  // namespace unjam
