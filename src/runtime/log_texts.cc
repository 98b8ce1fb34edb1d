// What the log says of a job, of its ranks and of their calls.
#include <unistd.h>

#include <cstdlib>
#include <set>
#include <string>

#include "base/clock.h"
#include "plan/registry.h"
#include "runtime/context.h"
#include "runtime/log.h"
#include "runtime/texts.h"

namespace unjam {
namespace {

std::string version_text() {
  return std::to_string(UNJAM_VERSION_MAJOR) + "." + std::to_string(UNJAM_VERSION_MINOR) + "." +
         std::to_string(UNJAM_VERSION_PATCH);
}

std::string limit_text(const char* name, std::int64_t ms) {
  return std::string(name) + (ms == 0 ? " none" : " " + std::to_string(ms) + " ms");
}

// What a log's reader must know to do the same again. (A secret's value is not shown.)
std::string set_variables() {
  std::string text;
  const auto add = [&](const char* name, bool secret) {
    const char* value = std::getenv(name);
    if (value == nullptr || *value == '\0') return;
    text +=
        (text.empty() ? "; set: " : " ") + std::string(name) + "=" + (secret ? "(secret)" : value);
  };
  for (const Variable& v : variables()) add(v.name, false);
  for (const TextVariable& v : text_variables()) add(v.name, v.secret);
  return text;
}

}  // namespace

std::string World::banner(const Settings& s) const {
  std::string text = "unjam " + version_text() + ": a job of " + std::to_string(ranks_) +
                     (ranks_ == 1 ? " rank in " : " ranks in ") + std::to_string(processes()) +
                     (processes() == 1 ? " process; device " : " processes; device ");
  if (cuda() != nullptr) {
    std::set<std::string> names;
    for (const int device : arenas_.devices()) {
      if (device >= 0) names.insert(cuda()->name(device));
    }
    text += "cuda (";
    for (const std::string& name : names) text += (name == *names.begin() ? "" : ", ") + name;
    text += std::string("), peers by stores into their memory, ") +
            (s.lines > 0 ? "long packets as lines" : "long packets as words");
  } else {
    text += "host, peers by shared memory";
    if (!carrier().empty()) text += ", those on other hosts by " + carrier();
  }
  text += "; " + std::to_string(s.lanes) + (s.lanes == 1 ? " lane, " : " lanes, ") +
          std::to_string(s.guaranteed_slots) + " slots of " +
          std::to_string(s.guaranteed_slot_bytes) + " bytes a connector, at most " +
          std::to_string(s.max_active_keys) + " keys under way, heap " +
          std::to_string(s.heap_bytes) + " bytes; " + limit_text("timeout", s.timeout_ms) + ", " +
          limit_text("report after", s.report_ms);
  return text + set_variables();
}

void Context::log_start() const {
  Log& log = Log::process();
  // Once a job: by the process of its first rank.
  if (rank_ == 0) log.say(LogLevel::kInfo, 0, [&] { return world_->banner(settings_); });
  log.say(LogLevel::kInfo, rank_, [&] {
    std::string text = "rank " + std::to_string(rank_) + " of " + std::to_string(world_->ranks()) +
                       ": process " + std::to_string(getpid());
    if (cuda()) {
      const int device = world_->device_of(rank_);
      text += ", device " + std::to_string(device) + " (" + world_->cuda()->name(device) + ")";
    }
    return text;
  });
}

void Context::log_end() const {
  Log::process().say(LogLevel::kInfo, rank_, [this] {
    return "rank " + std::to_string(rank_) + " leaves the job after " + std::to_string(completed_) +
           " call(s)";
  });
}

void Context::log_group(const unjamGroup& group) const {
  Log::process().say(LogLevel::kDebug, rank_, [&] {
    return "rank " + std::to_string(rank_) + ": group '" + group.name + "' of " +
           rank_list(group.members);
  });
}

std::string Context::log_text(const Submitted& s) const {
  const Key& key = *s.key;
  return "rank " + std::to_string(rank_) + ": " + s.call.signature.text() + ", " +
         use_text(s.call.signature, key.name, key.group->name, s.n);
}

void Context::log_called(const Submitted& s) const {
  Log::process().say(LogLevel::kDebug, rank_, [&] {
    std::string text = log_text(s) + ": called";
    if (s.plan != nullptr) text += std::string(", plan ") + to_string(s.plan->algorithm);
    return text;
  });
}

void Context::log_ended(const Submitted& s, const Result& result) const {
  Log::process().say(result.ok() ? LogLevel::kDebug : LogLevel::kInfo, rank_, [&] {
    const std::uint64_t us = (monotonic_ns() - s.since_ns) / 1000;
    return log_text(s) + ": " + (result.ok() ? "complete" : "failed") + " after " +
           std::to_string(us) + " us" + (result.ok() ? "" : ": " + result.message);
  });
}

}  // namespace unjam
