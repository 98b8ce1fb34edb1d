#include "runtime/signature.h"

#include <cstring>

#include "base/hash.h"
#include "plan/registry.h"

namespace unjam {

std::uint64_t Signature::hash() const {
  std::uint64_t h = mix64(static_cast<std::uint64_t>(kind));
  h = hash_combine(h, static_cast<std::uint64_t>(dtype));
  h = hash_combine(h, static_cast<std::uint64_t>(op));
  h = hash_combine(h, static_cast<std::uint64_t>(root));
  h = hash_combine(h, static_cast<std::uint64_t>(peer));
  h = hash_combine(h, count);
  h = hash_combine(h, static_cast<std::uint64_t>(algorithm));
  for (std::size_t i = 0; i < match_text.size() && match_text[i] != 0; i += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, match_text.data() + i, sizeof(word));
    h = hash_combine(h, word);
  }
  return h;
}

bool Signature::set_match_text(const char* text) {
  const std::size_t bytes = strnlen(text, match_text.size());
  if (bytes == match_text.size()) return false;
  std::memcpy(match_text.data(), text, bytes);
  return true;
}

std::string Signature::algorithm_text(const char* before) const {
  if (algorithm < 0) return "";
  return std::string(before) + "algorithm=" + to_string(static_cast<Algorithm>(algorithm));
}

std::string Signature::text(bool with_count) const {
  const std::string as = match_text[0] == 0 ? "" : " as '" + std::string(match_text.data()) + "'";
  // A barrier's count and type are not its caller's.
  if (kind == Kind::kBarrier) return "barrier(" + algorithm_text() + ")" + as;
  std::string t = std::string(to_string(kind)) + "(";
  if (with_count) t += "count=" + std::to_string(count) + ", ";
  t += to_string(dtype);
  if (reduces(kind)) t += std::string(", ") + to_string(op);
  if (kind == Kind::kSendRecv) {
    t += ", source=" + std::to_string(root) + ", destination=" + std::to_string(peer);
  } else if (has_root(kind)) {
    t += ", root=" + std::to_string(root);
  }
  return t + algorithm_text(", ") + ")" + as;
}

}  // namespace unjam
