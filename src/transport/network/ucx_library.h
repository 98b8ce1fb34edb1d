// UCX's UCP, found when it is wanted: a copy that the process has already (two of them in one
// process get into each other's way), else a file that is named, else the system's.
//
// Left alone, UCX patches the C library's memory functions, takes signals and starts a thread as it
// is loaded. Four settings of its own prevent that; they stand in the environment while it is
// loaded, where the user has not set them.
#pragma once

#include <string>

#include "transport/network/ucx_abi.h"

namespace unjam {

class UcxLibrary {
 public:
  static constexpr unsigned kMajor = 1, kOldestMinor = 13;

  // `file`: a libucp.so.0, or nothing. Null: `error` says what is missing, and the cure. Other
  // threads should not read the environment meanwhile. Never unloaded.
  static const UcxLibrary* load(const std::string& file, std::string& error);

  const ucx_abi::Functions& functions() const { return functions_; }
  // What was loaded: another one than was asked for, where the process had a copy.
  const std::string& file() const { return file_; }
  // "UCX 1.22.0 (FILE)".
  const std::string& title() const { return title_; }
  // Somebody else had loaded it: its settings are theirs.
  bool was_there() const { return was_there_; }

 private:
  ucx_abi::Functions functions_ = {};
  std::string file_, title_;
  bool was_there_ = false;
};

}  // namespace unjam
