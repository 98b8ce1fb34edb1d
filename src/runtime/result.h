// What a call came to, and why.
#pragma once

#include <string>

#include "unjam/unjam.h"

namespace unjam {

// A result code with its message; code UNJAM_SUCCESS: no message.
struct Result {
  unjamResult_t code = UNJAM_SUCCESS;
  std::string message;
  // Refused for want of room that calls under way give back as they end.
  bool transient = false;
  bool ok() const { return code == UNJAM_SUCCESS; }
};

}  // namespace unjam
