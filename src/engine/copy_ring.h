// Copies that lanes ask somebody else to carry out, by a GPU's copy engines
// (device/cuda/host/copy_thread.h): a ring for each peer, of all lanes, and a word that says how
// many of its copies are done, in order. A copy is free, posted, claimed and done; or posted and
// taken back by its lane, which then moves the slice itself. Why nothing is wrong with a copy that
// comes late: docs/internals/copy-engines.md. Each word of a post carries the low bits of its
// number, so that a post needs no order among its words. A ring cannot overflow: a lane has no more
// slices under way to a peer than a connector has headers, and posts nothing while an earlier
// call's copies are not done.
//
// Source: M. Hwang et al., "ARK: GPU-driven Code Execution for Distributed Deep Learning" (NSDI
// 2023), the software engine; that copies can be taken back is ours.
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"
#include "transport/arena.h"

namespace unjam {

struct CopyPost {
  std::uint64_t source = 0, target = 0;  // addresses in the poster's process
  std::uint64_t bytes = 0;
};

// Of a lane, and of a ring.
inline constexpr std::uint32_t kCopyPostsOfLane = kSlotHeaders;
inline constexpr std::uint32_t kCopyPosts = kMaxLanes * kCopyPostsOfLane;

struct alignas(kFalseSharingBytes) CopyRing {
  static constexpr std::uint32_t kWords = 3;
  struct Place {
    std::uint64_t words[kWords];
    std::uint64_t taken_back;  // the number + 1 of a post that need not be carried out any more
  };
  Place places[kCopyPosts];
};

// Whether addresses and length fit a post, whose words have 16 bits for its number.
UNJAM_HD constexpr bool fits_post(const CopyPost& post) {
  return ((post.source | post.target | post.bytes) >> 48) == 0;
}
// Never 0, which is in a ring at first; of posts that use a place one behind the other not alike.
UNJAM_HD constexpr std::uint64_t post_mark(std::uint64_t number) { return number % 0xffff + 1; }
static_assert(0xffff % kCopyPosts != 0);

// By a lane: the post whose number it has drawn. What it reads was stored before: by this device,
// whose copy engines see that; or (on the host) by this thread, hence release.
UNJAM_HD inline void post_copy(CopyRing& ring, std::uint64_t number, const CopyPost& post) {
  std::uint64_t* const words = ring.places[number % kCopyPosts].words;
  const std::uint64_t mark = post_mark(number);
  store_relaxed(words[0], post.source << 16 | mark);
  store_relaxed(words[1], post.target << 16 | mark);
#if defined(__CUDA_ARCH__)
  store_relaxed(words[2], post.bytes << 16 | mark);
#else
  store_release(words[2], post.bytes << 16 | mark);
#endif
}
// By the same lane. (A hint: who does not see it carries the copy out.)
UNJAM_HD inline void take_back_copy(CopyRing& ring, std::uint64_t number) {
  store_relaxed(ring.places[number % kCopyPosts].taken_back, number + 1);
}

// By who carries out copies: whether post `number` is there.
inline bool find_post(CopyRing& ring, std::uint64_t number, CopyPost& post) {
  std::uint64_t* const words = ring.places[number % kCopyPosts].words;
  const std::uint64_t mark = post_mark(number);
  std::uint64_t found[CopyRing::kWords];
  for (std::uint32_t i = CopyRing::kWords; i-- > 0;) {
    found[i] = load_acquire(words[i]);
    if ((found[i] & 0xffff) != mark) return false;
  }
  post = {found[0] >> 16, found[1] >> 16, found[2] >> 16};
  return true;
}
inline bool is_taken_back(CopyRing& ring, std::uint64_t number) {
  return load_relaxed(ring.places[number % kCopyPosts].taken_back) == number + 1;
}

}  // namespace unjam
