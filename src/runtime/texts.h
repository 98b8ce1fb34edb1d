// How messages name things.
#pragma once

#include <string>

#include "runtime/context.h"

namespace unjam {

inline Result gone_result(int rank, const std::string& why) {
  return {UNJAM_ERROR_PEER, "rank " + std::to_string(rank) + " is gone: " + why};
}

inline std::string name_text(const std::string& key, const std::string& group) {
  return "key '" + key + "' of group '" + group + "'";
}

}  // namespace unjam
