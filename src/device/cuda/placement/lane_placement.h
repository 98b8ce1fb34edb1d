// Which block of a daemon drives which lane, where that goes by the SM that the block is on: blocks
// of equal parts fill a link only where they are in pairs, two in each GPC
// (docs/internals/instances.md#where-a-daemons-blocks-lie). So a daemon has more blocks than lanes,
// and each chooses as it begins. The first takes the first lane, unless that has just been taken;
// who is on a lane's SM takes that lane; the others end at once. Who begins some time after the
// first, and of the last ones as many as there are lanes, take any lane that is left. So every lane
// gets a block, whatever SMs are free.
//
// Two words, of this daemon and of the next one, whose blocks begin when all of this one's have
// ended; its first block clears the other's. Relaxed: nothing else goes with them (what a lane's
// driver acquires is its lease).
#pragma once

#include <cstdint>

#include "base/atomics.h"
#include "base/portability.h"

namespace unjam {

inline constexpr std::uint32_t kNoLane = 0xffffffff;
// So many that on an empty GPU of compute capability 9.0 each of the SMs below gets one. (With one
// for each SM calls gain nothing, and on a full GPU more would have to begin before the last ones.)
inline constexpr std::uint32_t kChoosingBlocks = 64;

// Whether there is something to choose, with so many lanes.
UNJAM_HD inline bool lanes_have_sms(std::uint32_t lanes) {
  return lanes >= 4 && lanes <= 32 && lanes % 4 == 0;
}

// The lane that is to be on this SM: two pairs in a GPC, so of 32 lanes in each. GPUs of compute
// capability 9.0 number the SMs of a TPC behind each other, and TPCs by one of each of their GPCs
// in turn. (On a GPU that has fewer than eight of these the lanes are spread a little less evenly.)
UNJAM_HD inline std::uint32_t lane_of_sm(std::uint32_t sm, std::uint32_t lanes) {
  constexpr std::uint32_t kGpcs = 8, kPairs = 2;
  const std::uint32_t tpc = sm / 2, gpc = tpc % kGpcs, pair = tpc / kGpcs, used = lanes / 4;
  if (gpc >= used || pair >= kPairs) return kNoLane;
  return 2 * (pair * used + gpc) + sm % 2;
}

struct LanePlacement {
  static constexpr std::uint64_t kTogetherNs = 8000;  // on an empty GPU all begin within less

  // Low half: lanes that are taken, as bits; high half: how many blocks have begun.
  std::uint64_t words[2] = {};
  std::uint64_t begun_ns[2] = {};  // when the first has; 0: it has not said so yet

  // The lane of a block that begins now, or kNoLane: it is not needed. By one thread of each block,
  // once. `which`: of the words, changes from daemon to daemon. pause(): lets the blocks that begin
  // at about the same time take their lanes.
  template <class Pause>
  UNJAM_HD std::uint32_t choose(std::uint32_t which, std::uint32_t sm, std::uint32_t lanes,
                                std::uint32_t blocks, std::uint64_t now_ns, Pause pause) {
    const LocalAtomicRef<std::uint64_t> word(words[which]);
    // (Not by compare and exchange, with which of all that begin together one at a time gets on.)
    const auto take = [&](std::uint32_t lane) {
      return (word.fetch_or(std::uint64_t{1} << lane, kRelaxed) >> lane & 1) == 0;
    };
    const auto begun =
        static_cast<std::uint32_t>(word.fetch_add(std::uint64_t{1} << 32, kRelaxed) >> 32);
    if (begun == 0) {
      store_relaxed_local(begun_ns[which], now_ns);
      store_relaxed_local(words[1 - which], std::uint64_t{0});
      store_relaxed_local(begun_ns[1 - which], std::uint64_t{0});
    }
    const std::uint32_t own = begun == 0 ? 0 : lane_of_sm(sm, lanes);
    if (own != kNoLane && take(own)) return own;
    const std::uint64_t first_ns = load_relaxed_local(begun_ns[which]);
    // (Signed: the clocks of two SMs may differ a little.)
    const bool late = first_ns != 0 && static_cast<std::int64_t>(now_ns - first_ns) >
                                           static_cast<std::int64_t>(kTogetherNs);
    if (!late && blocks - begun > lanes) return kNoLane;
    if (!late) pause();
    for (std::uint32_t lane = 0; lane < lanes; ++lane) {
      if ((word.load(kRelaxed) >> lane & 1) == 0 && take(lane)) return lane;
    }
    return kNoLane;  // (No lane is given back, so one pass tells.)
  }
};

}  // namespace unjam
