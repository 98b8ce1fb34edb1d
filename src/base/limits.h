// What the system lets a process have, and the cure where that is too little.
#pragma once

#include <cstddef>
#include <string>

namespace unjam {

// How many more files it may open.
std::size_t files_left();

// Makes the table of open files large enough for so many more. In a process of several threads that
// takes the kernel some 10 ms, which are better spent before the files are needed.
void make_room_for_files(std::size_t more);

// Of an error of the system, in text behind what failed: which limit it is, and how to raise it;
// "": none that is known.
std::string limit_text(int error);

}  // namespace unjam
