#include "runtime/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <string_view>

#include "base/fork_guard.h"
#include "base/json_writer.h"
#include "plan/registry.h"
#include "runtime/log.h"
#include "runtime/settings.h"

namespace unjam {
namespace {

constexpr std::string_view kPrefix = "UNJAM_";
constexpr std::string_view kOfUcx = "UNJAM_UCX_";

// How many letters must be changed, inserted or left out to make one of the other (Levenshtein).
std::size_t distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

std::vector<std::string_view> known_names() {
  std::vector<std::string_view> names;
  for (const Variable& v : variables()) names.emplace_back(v.name);
  for (const TextVariable& v : text_variables()) names.emplace_back(v.name);
  for (const char* name : names_of_others()) names.emplace_back(name);
  return names;
}

// The name that was meant, by all likelihood; empty if none is near.
std::string_view nearest(std::string_view name, const std::vector<std::string_view>& names) {
  const std::string_view own = name.substr(kPrefix.size());
  std::size_t least = std::max<std::size_t>(2, own.size() / 3) + 1;
  std::string_view found;
  for (const std::string_view candidate : names) {
    const std::size_t d = distance(own, candidate.substr(kPrefix.size()));
    // A name of which nothing is left is no mistyped one.
    if (d >= least || d >= own.size()) continue;
    least = d;
    found = candidate;
  }
  return found;
}

// Says what an algorithm is called now; "": it has no other name.
std::string former_algorithm(std::string_view name) {
  const std::string_view now = name_today(name);
  if (now == name) return "";
  return std::string(name) + " is now called " + std::string(now) +
         ": use that name, for the former one goes with the next release";
}

}  // namespace

std::vector<UnknownVariable> unknown_variables(const char* const* environment) {
  const std::vector<std::string_view> names = known_names();
  std::vector<UnknownVariable> unknown;
  for (; environment != nullptr && *environment != nullptr; ++environment) {
    const std::string_view entry = *environment;
    const std::string_view name = entry.substr(0, entry.find('='));
    if (name.substr(0, kPrefix.size()) != kPrefix) continue;
    if (name.substr(0, kOfUcx.size()) == kOfUcx) continue;  // UCX says what it does not know
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    const auto& renamed = former_names();
    if (std::any_of(renamed.begin(), renamed.end(),
                    [&](const FormerName& f) { return f.former == name; })) {
      continue;
    }
    const std::string_view meant = nearest(name, names);
    std::string text(name);
    text += " is set, but unjam has no such variable";
    if (!meant.empty()) text.append(": did you mean ").append(meant).append("?");
    unknown.push_back({std::string(name), text + " (`unjam env` lists all)"});
  }
  return unknown;
}

std::vector<std::string> former_names_in_use() {
  std::vector<std::string> texts;
  for (const FormerName& f : former_names()) {
    const auto is_set = [](const char* name) {
      const char* const text = std::getenv(name);
      return text != nullptr && *text != '\0';
    };
    if (!is_set(f.former)) continue;
    const bool both = is_set(f.name);
    texts.push_back(std::string(f.former) + " is now called " + f.name +
                    (both ? ", which is set, too, and counts: leave out the former name"
                          : ": use that name, for the former one goes with the next release"));
  }
  if (const char* const name = std::getenv("UNJAM_ALGORITHM"); name != nullptr) {
    const std::string text = former_algorithm(name);
    if (!text.empty()) texts.push_back("UNJAM_ALGORITHM: " + text);
  }
  return texts;
}

std::string environment_json() {
  const Settings defaults;
  JsonWriter w;
  w.begin_array();
  for (const Variable& v : variables()) {
    const char* text = environment_text(v.name);
    w.begin_object()
        .field("name", v.name)
        .field("read_by", "library")
        .field("type", v.choices != nullptr ? v.choices
                       : v.is_size          ? "bytes"
                                            : "integer")
        .field("min", v.min)
        .field("max", v.max);
    w.key("default");
    if (v.choices != nullptr) {
      w.value(value_text(v, defaults.*v.field));
    } else {
      w.value(defaults.*v.field);
    }
    w.field("doc", v.doc).field("agreed", v.agreed);
    w.key("value");
    if (text != nullptr) {
      w.value(text);
    } else {
      w.null();
    }
    w.end_object();
  }
  for (const TextVariable& v : text_variables()) {
    const char* text = std::getenv(v.name);
    w.begin_object().field("name", v.name).field("read_by", "library").field("type", v.type);
    w.field("default", "");
    w.field("doc", v.doc).field("agreed", false).key("value");
    if (text == nullptr) {
      w.null();
    } else {
      w.value(v.secret && *text != '\0' ? "(set)" : text);
    }
    w.end_object();
  }
  for (const char* name : names_of_others()) {
    w.begin_object().field("name", name).field("read_by", "others").end_object();
  }
  for (const FormerName& f : former_names()) {
    if (std::getenv(f.former) == nullptr) continue;
    w.begin_object().field("name", f.former).field("read_by", "nobody");
    w.field("doc", std::string(f.former) + " is now called " + f.name).end_object();
  }
  for (const UnknownVariable& v : unknown_variables(environ)) {
    w.begin_object().field("name", v.name).field("read_by", "nobody").field("doc", v.text);
    w.end_object();
  }
  w.end_array();
  return w.text();
}

void warn_of_former_algorithm(std::string_view name, int rank) {
  const std::string text = former_algorithm(name);
  if (text.empty()) return;
  struct Once {
    std::once_flag flag;
  };
  std::call_once(per_process<Once>().flag,
                 [&] { Log::process().say(LogLevel::kWarn, rank, [&] { return text; }); });
}

void warn_of_variables(int rank) {
  struct Once {
    std::once_flag flag;
  };
  std::call_once(per_process<Once>().flag, [rank] {
    for (const UnknownVariable& variable : unknown_variables(environ)) {
      Log::process().say(LogLevel::kWarn, rank, [&] { return variable.text; });
    }
    for (const std::string& text : former_names_in_use()) {
      Log::process().say(LogLevel::kWarn, rank, [&] { return text; });
    }
  });
}

}  // namespace unjam
