// The UNJAM_ variables of this process's environment: what each is set to, and which of them nobody
// reads, most often because the name was mistyped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace unjam {

struct UnknownVariable {
  std::string name;
  std::string text;  // that nobody reads it, and the nearest name that there is
};

// environment: "NAME=value" strings, ended by a null pointer, as ::environ.
std::vector<UnknownVariable> unknown_variables(const char* const* environment);

// What unjamEnvironment() gives.
std::string environment_json();

// That variables are set under names which they had before, and what they are called now.
std::vector<std::string> former_names_in_use();

// Says both in the log of `rank`, once in a process.
void warn_of_variables(int rank);
// The same, where a call's algorithm has a former name.
void warn_of_former_algorithm(std::string_view name, int rank);

}  // namespace unjam
