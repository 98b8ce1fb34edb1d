// How messages say that ranks do not fit together, at the rendezvous and within a process.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace unjam {

// What stands in only one of two lists "NAME=1, NAME=2, …" of the same names, as a sentence.
inline std::string settings_differ_text(int rank_a, std::string_view a, int rank_b,
                                        std::string_view b) {
  std::string only_a, only_b;
  while (!a.empty() && !b.empty()) {
    const std::string_view item_a = a.substr(0, a.find(", ")), item_b = b.substr(0, b.find(", "));
    if (item_a != item_b) {
      only_a += (only_a.empty() ? "" : ", ") + std::string(item_a);
      only_b += (only_b.empty() ? "" : ", ") + std::string(item_b);
    }
    a.remove_prefix(item_a.size() == a.size() ? a.size() : item_a.size() + 2);
    b.remove_prefix(item_b.size() == b.size() ? b.size() : item_b.size() + 2);
  }
  // One that nobody may have set.
  const bool decided = only_a.find("UNJAM_LINES=") != std::string::npos;
  return "settings differ: rank " + std::to_string(rank_a) + " has " + only_a + "; rank " +
         std::to_string(rank_b) + " has " + only_b +
         (decided ? "; unless it is set, UNJAM_LINES is what NVML tells a rank of the GPUs' links"
                  : "") +
         "; give the same on all ranks";
}

// Of a rank that says as which host it counts, and one that does not.
inline std::string host_missing_text(int rank, std::string_view host, int without) {
  return "rank " + std::to_string(rank) + " has UNJAM_HOST_ID=" + std::string(host) + ", rank " +
         std::to_string(without) + " has none: set it on all ranks, or on none";
}

// Told to the rank that comes second.
inline std::string ranks_differ_text(std::uint64_t its, std::uint64_t earlier) {
  return "this rank says that the job has " + std::to_string(its) + " ranks, an earlier one " +
         std::to_string(earlier) + ": give the same number everywhere";
}

}  // namespace unjam
