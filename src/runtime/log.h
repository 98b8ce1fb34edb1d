// What a job says of itself on stderr, or into a file for each rank: UNJAM_LOG and UNJAM_LOG_FILE.
//
// Lines are written under locks that calls need, so no write waits for a reader: what a full pipe
// does not take is lost, and the next line that is taken says how many were. A line goes in one
// write(), so lines of several ranks do not mix (in a pipe: those of at most PIPE_BUF bytes). A
// line that is not wanted costs a comparison; its text is not made.
#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
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
  // Any thread. rank: whose file takes it. text(): one line without its end, in which control
  // characters of users' names are shown as \xNN; it is called only if the line is wanted. A line
  // for which there is no memory is lost.
  template <class Text>
  void say(LogLevel level, int rank, Text&& text) noexcept {
    if (!wants(level)) return;
    try {
      write(level, rank, text());
    } catch (...) {
      lost_.fetch_add(1, std::memory_order_relaxed);
    }
  }

 private:
  void write(LogLevel level, int rank, std::string_view text);
  int file(int rank);  // with the lock, as the next; -1: stderr
  int standard_error();
  bool put(int fd, std::string_view line);

  const std::string pattern_;
  std::atomic<LogLevel> level_{LogLevel::kWarn};
  std::atomic<std::uint64_t> lost_{0};  // lines; relaxed: a count, which orders nothing
  std::mutex mutex_;
  std::map<std::string, Fd> files_;  // by name; without a descriptor: it could not be opened
  // stderr once more, of which writes do not wait, and what stderr was then.
  Fd own_stderr_;
  struct stat of_stderr_{};
  bool torn_ = false;  // the last line was taken in part
};

}  // namespace unjam
