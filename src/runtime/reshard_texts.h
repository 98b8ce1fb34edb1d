// Lists in what runs of resharding say.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace unjam {

inline constexpr std::size_t kMostNames = 8;  // of tensors or ranks in a message

inline std::string quoted(const std::string& name) { return '"' + name + '"'; }

template <class T, class F>
std::string list_text(const std::vector<T>& all, const F& text) {
  std::string list;
  for (std::size_t i = 0; i < all.size() && i < kMostNames; ++i) {
    list += (i == 0 ? "" : ", ") + text(all[i]);
  }
  if (all.size() > kMostNames) list += ", … (" + std::to_string(all.size()) + " in all)";
  return list;
}

}  // namespace unjam
