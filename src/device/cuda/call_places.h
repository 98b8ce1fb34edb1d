// Whether the next call's blocks had better not come before this call's have all left.
//
// Where a call's blocks lie is up to the GPU, and calls that come early find the SMs of the one in
// front taken. Clusters of four lie on two TPCs each, and share GPCs evenly, where a call finds the
// GPU empty, and where all that it finds is a call that lies so. But where a block of something
// else is there as a call comes, one of its clusters lies on the halves of three or four TPCs; then
// so does one of the next call's, which finds that; and so on for as long as calls follow each
// other. A chain's lanes have all the same to move, and its slowest lanes bind. (Four H200s, a
// process a rank, reductions of 1 GiB behind a call of one number: 3,015 us each where all lie on
// 16 TPCs, on 17 and 18 3,020 and 3,170 by turns, or 3,170; by clocks and SMs that the kernel
// noted, a probe that is not in the tree.)
//
// So a block whose TPC has another SM that is none of its call's keeps the next call's blocks from
// coming early: these find the GPU empty, if it is only ours. If it is not (a product's blocks are
// everywhere) nothing is gained, and a call begins some 10 us later; so one in so many does.
//
// Relaxed: nothing else goes with these words. Blocks of a call have all begun long before any of
// them asks; where one has not, or two calls are told apart wrongly, a call comes later than it
// could, or lies as it did.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

struct CallPlaces {
  static constexpr std::uint32_t kSms = 256;  // more than any GPU has
  static constexpr std::uint32_t kApart = 8;  // calls from one that kept the next to another

  std::uint32_t latest[kSms] = {};  // by SM: the call whose block was there last, by serial
  std::uint32_t kept = 0;           // the latest call that kept the next one's blocks

  // By one thread of each block of a call, as it begins.
  UNJAM_HD void note(std::uint32_t sm, std::uint32_t call) {
    if (sm < kSms) store_relaxed_local(latest[sm], call);
  }
  // Whether this block is to keep the next call's, by one thread, when it has moved all.
  UNJAM_HD bool keeps_next(std::uint32_t sm, std::uint32_t call) {
    const std::uint32_t other = sm ^ 1;  // SMs of a TPC are numbered behind each other
    if (other >= kSms || load_relaxed_local(latest[other]) == call) return false;
    const std::uint32_t before = load_relaxed_local(kept);
    // (Another block of this call's may have said so.)
    if (before != 0 && before != call && call - before <= kApart) return false;
    store_relaxed_local(kept, call);
    return true;
  }
};

}  // namespace unjam
