// What unjamExplain() tells of one call, read out of its JSON text.
#pragma once

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <vector>

namespace unjam_torch {

struct ExplainedCall {
  std::string what;                // such as "all_reduce(count=3, float32, sum)"
  std::vector<int> not_called_by;  // ranks of the job
  std::string instead;
};

// The text that stands in `json` behind the next `name` from `at` on; unjam's own escapes only.
inline std::string json_text(const std::string& json, const std::string& name, std::size_t at) {
  at = json.find(name, at);
  if (at == std::string::npos) return "";
  std::string text;
  for (at += name.size(); at < json.size() && json[at] != '"'; ++at) {
    if (json[at] == '\\' && at + 1 < json.size()) ++at;
    text += json[at];
  }
  return text;
}

// The oldest pending call of `rank` under that group and key. Names that JSON writes in another way
// are not found.
inline std::optional<ExplainedCall> explained_call(const std::string& json, int rank,
                                                   const std::string& group,
                                                   const std::string& key) {
  const std::string begin = "{\"rank\":" + std::to_string(rank) + ",\"holds\":";
  std::size_t at = json.find(begin);
  if (at == std::string::npos) return std::nullopt;
  at += begin.size();
  const std::size_t end = std::min(json.find(",\"holds\":", at), json.size());  // the next rank's
  at = json.find("\"group\":\"" + group + "\",\"key\":\"" + key + "\",", at);
  if (at >= end) return std::nullopt;
  ExplainedCall call{json_text(json, "\"what\":\"", at), {}, json_text(json, "\"instead\":\"", at)};
  static const std::string kList = "\"not_called_by\":[";
  at = json.find(kList, at);
  if (at == std::string::npos) return std::nullopt;
  const char* p = json.data() + at + kList.size();
  const char* const last = json.data() + json.size();
  for (int member = 0;; ++p) {
    const auto [next, error] = std::from_chars(p, last, member);
    if (error != std::errc()) return call;
    call.not_called_by.push_back(member);
    p = next;
    if (p == last || *p != ',') return call;
  }
}

}  // namespace unjam_torch
