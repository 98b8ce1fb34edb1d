// What ranks must agree on for one invocation of a key.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "base/kinds.h"
#include "base/types.h"
#include "unjam/unjam.h"

namespace unjam {

struct Signature {
  Kind kind = Kind::kAllReduce;
  DType dtype = DType::kFloat32;
  Op op = Op::kSum;
  int root = 0;  // of a send/recv: the sender's rank in the user's group
  std::uint64_t count = 0;
  int peer = 0;  // of a send/recv: the receiver's
  // What else the callers agree on (unjamCallOptions_t.match_text), NUL-terminated and filled with
  // NULs.
  std::array<char, UNJAM_MATCH_TEXT_BYTES> match_text{};

  std::int8_t algorithm = -1;  // its number (plan/registry.h); -1: the settings decide

  // `before` and "algorithm=…"; "" where the settings decide.
  std::string algorithm_text(const char* before = "") const;
  bool set_match_text(const char* text);  // false: it is too long
  std::uint64_t hash() const;
  std::string text(bool with_count = true) const;
  bool operator==(const Signature&) const = default;
};

}  // namespace unjam
