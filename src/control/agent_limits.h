// Times and sizes of agents, and words that several of their parts use.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "control/agent.h"
#include "control/join_text.h"

namespace unjam {

inline constexpr std::uint64_t kMs = 1'000'000;
inline constexpr std::uint64_t kStrangerNs =
    5'000 * kMs;  // for a caller to prove itself and say its wish
inline constexpr std::uint64_t kCrowdedNs = 1'000 * kMs;  // if others wait
inline constexpr std::uint64_t kPauseNs = 20 * kMs;       // before a full door looks again
inline constexpr std::uint64_t kFirstRetryNs = 5 * kMs, kLastRetryNs = 200 * kMs;
inline constexpr std::uint64_t kVerdictNs =
    2'000 * kMs;  // for the root to tell why the meeting fails
inline constexpr std::size_t kMostAtDoor = 128;
inline constexpr int kAcceptsAtOnce = 64;
// A peer that takes less is given up; questions and answers are dropped much earlier.
inline constexpr std::size_t kMostUnsent = 4 * kLongestAgentFrame;
inline constexpr std::size_t kMostUnsentQuestions = 4 << 20;
inline constexpr std::size_t kMostOpenQuestions = 1024;
inline constexpr std::uint32_t kStandIns = 3;  // agents that are called beside one's ancestors

inline std::string between(const std::string& host, const NumberList& ranks) {
  return "host " + (host.empty() ? "(without a name)" : host) + " (" + ranks_in_words(ranks) + ")";
}

inline NumberList numbers_of(const std::vector<RankCard>& cards) {
  NumberList list;
  for (const RankCard& c : cards) list.push_back(c.rank);
  std::sort(list.begin(), list.end());
  return list;
}

inline NumberList set_bits(const std::vector<bool>& bits) {
  NumberList list;
  for (std::size_t i = 0; i < bits.size(); ++i) {
    if (bits[i]) list.push_back(static_cast<std::uint32_t>(i));
  }
  return list;
}

inline bool begins_with(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

inline std::uint64_t ns_of(std::int64_t ms) { return static_cast<std::uint64_t>(ms) * kMs; }

}  // namespace unjam
