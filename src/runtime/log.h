// What a job says of itself on stderr, or into a file for each rank: UNJAM_LOG and UNJAM_LOG_FILE.
//
// A line is written whole, by one write(): lines of several ranks do not mix. A line that is not
// wanted costs a comparison; its text is not made.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "base/fd.h"

namespace unjam {

enum class LogLevel : std::uint8_t { kWarn, kInfo, kDebug };  // the order of UNJAM_LOG's choices

class Log {
 public:
  // pattern: of the files' names, as UNJAM_LOG_FILE's doc says; empty: stderr.
  explicit Log(std::string pattern) : pattern_(std::move(pattern)) {}

  // This process's: its file is UNJAM_LOG_FILE, its level what the last job's settings say.
  static Log& process();

  // Lines above it are not written. (Relaxed: a thread that sees the old level for a moment writes,
  // or does not write, a line more.)
  void set_level(LogLevel level) { level_.store(level, std::memory_order_relaxed); }
  bool wants(LogLevel level) const { return level <= level_.load(std::memory_order_relaxed); }
  // Any thread. rank: whose file takes it. text(): one line or several, without the last newline;
  // it is called only if it is wanted.
  template <class Text>
  void say(LogLevel level, int rank, Text&& text) {
    if (wants(level)) write(level, rank, text());
  }

 private:
  void write(LogLevel level, int rank, const std::string& text);
  int descriptor(int rank);  // with the lock

  const std::string pattern_;
  std::atomic<LogLevel> level_{LogLevel::kWarn};
  std::mutex mutex_;
  std::map<std::string, Fd> files_;  // by name; without a descriptor: it could not be opened
};

}  // namespace unjam
