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

}  // namespace unjam
