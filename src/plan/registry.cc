#include "plan/registry.h"

namespace unjam {

const char* algorithm_choices() {
  static const std::string kChoices = [] {
    std::string names = "auto";
    for (const AlgorithmRow& row : kAlgorithms) names.append("|").append(row.name);
    return names;
  }();
  return kChoices.c_str();
}

std::optional<int> algorithm_named(std::string_view name) {
  if (name == "auto") return -1;
  for (int i = 0; i < kNumAlgorithms; ++i) {
    if (name == kAlgorithms[i].name) return i;
  }
  return std::nullopt;
}

std::string algorithms_for(Kind kind) {
  std::string names;
  for (const AlgorithmRow& row : kAlgorithms) {
    if (row.serves(kind)) names.append(names.empty() ? "" : "|").append(row.name);
  }
  return names;
}

}  // namespace unjam
