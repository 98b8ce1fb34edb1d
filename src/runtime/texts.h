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

inline std::string name_text(const Key& key) {
  const unjamGroup& group = *key.group;
  const std::string text = name_text(key.name, group.name);
  if (group.parent == nullptr) return text;
  const std::string to = group.is_own() ? "itself" : "rank " + std::to_string(group.destination);
  return "sends from rank " + std::to_string(group.source) + " to " + to + " under " + text;
}

// The use of a key that a call is.
inline std::string use_text(const Signature& s, const std::string& key, const std::string& group,
                            std::uint64_t n) {
  const std::string text = call_text(key, group, n);
  if (s.kind != Kind::kSendRecv) return text;
  const std::string to = s.root == s.peer ? "itself" : "rank " + std::to_string(s.peer);
  return "the send from rank " + std::to_string(s.root) + " to " + to + " under " + text;
}

// A call that is not what a rank that is gone (`why`) had called.
inline Result differs_result(const Signature& s, const std::string& key, const std::string& group,
                             std::uint64_t n, const Result& why) {
  return {UNJAM_ERROR_MISMATCH, "ranks disagree on " + use_text(s, key, group, n) +
                                    ": this rank called " + s.text() +
                                    ", another one something else, and " + why.message +
                                    ". Make the same call on all ranks of the group."};
}

}  // namespace unjam
