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

std::string_view name_today(std::string_view name) {
  if (name == "direct") return "one_shot";
  if (name == "mesh") return "rsag";
  return name;
}

std::optional<int> algorithm_named(std::string_view name) {
  name = name_today(name);
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
