// What the system lets a process have, and the cure where that is too little.
#pragma once

#include <cstddef>
#include <string>

namespace unjam {

// How many more files it may open.
std::size_t files_left();

// Of an error of the system, in text behind what failed: which limit it is, and how to raise it;
// "": none that is known.
std::string limit_text(int error);

}  // namespace unjam
