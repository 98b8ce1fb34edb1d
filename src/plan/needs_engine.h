// Why a call of a CUDA device runs by the engine's slices, and not by a kernel that does it
// without: counted by reason in `unjam info`, for it is a slower way.
#pragma once

#include <cstdint>

namespace unjam {

enum class NeedsEngine : std::uint8_t {
  kNo,
  kNewKey,
  kSwitchedOff,
  kNoData,
  kOneRank,
  kManyRanks,
  kOtherProgram,
  kManyLoops,
  kManyReduced,
  kSplitLines,
  kFewThreads,
  kOtherLanes,
  kUnevenLanes,
  kLongChunks,
  kUnevenSteps,
};
inline constexpr int kNumNeedsEngine = static_cast<int>(NeedsEngine::kUnevenSteps) + 1;

constexpr const char* to_string(NeedsEngine why) {
  constexpr const char* kTexts[kNumNeedsEngine] = {"none",
                                                   "the key's first call",
                                                   "UNJAM_IN_STREAM is off",
                                                   "no data",
                                                   "a group of one",
                                                   "more than 7 peers",
                                                   "a program that no kernel knows",
                                                   "packets of more than one loop, or 4 GiB",
                                                   "more to reduce than threads keep",
                                                   "lines that may come in halves",
                                                   "blocks of few threads",
                                                   "one lane, or not the first ones",
                                                   "lanes with unequal chunks",
                                                   "chunks longer than a slot",
                                                   "steps that not all lanes have"};
  return kTexts[static_cast<int>(why)];
}

}  // namespace unjam
