#include "runtime/log.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string_view>

#include "base/fork_guard.h"

namespace unjam {
namespace {

constexpr std::array<std::string_view, 3> kNames = {"warn", "info", "debug"};

// The pattern with %p as the process's number, %r as the rank's, %h as the host's name.
std::string file_name(const std::string& pattern, int rank) {
  std::string name;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    const char what = pattern[i] == '%' && i + 1 < pattern.size() ? pattern[i + 1] : '\0';
    if (what == 'p') {
      name += std::to_string(getpid());
    } else if (what == 'r') {
      name += std::to_string(rank);
    } else if (what == 'h') {
      std::array<char, 256> host{};
      gethostname(host.data(), host.size() - 1);
      name += host.data();
    } else if (what == '%') {
      name += '%';
    } else {
      name += pattern[i];
      continue;
    }
    ++i;
  }
  return name;
}

// To the millisecond, for whoever puts the files of several ranks side by side.
std::string time_text() {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  tm local{};
  localtime_r(&now.tv_sec, &local);
  std::array<char, 32> text{};
  const std::size_t n = std::strftime(text.data(), text.size(), "%H:%M:%S", &local);
  const std::string milliseconds = std::to_string(1000 + now.tv_nsec / 1000000);
  return std::string(text.data(), n) + "." + milliseconds.substr(1);
}

void write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return;  // a log that cannot be written is no reason to end
    text.remove_prefix(static_cast<std::size_t>(n));
  }
}

}  // namespace

Log& Log::process() {
  struct OfProcess {
    static const char* pattern() {
      const char* text = std::getenv("UNJAM_LOG_FILE");
      return text == nullptr ? "" : text;
    }
    Log log{pattern()};
  };
  return per_process<OfProcess>().log;
}

int Log::descriptor(int rank) {
  if (pattern_.empty()) return STDERR_FILENO;
  const std::string name = file_name(pattern_, rank);
  const auto [place, is_new] = files_.try_emplace(name);
  if (is_new) {
    // Appended to, since several processes may have one file.
    place->second = Fd(open(name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644));
    if (!place->second) {
      const std::string why = std::strerror(errno);
      write_all(STDERR_FILENO, "unjam: UNJAM_LOG_FILE: cannot open '" + name + "' (" + why +
                                   "): its lines go to stderr\n");
    }
  }
  return place->second ? place->second.get() : STDERR_FILENO;
}

void Log::write(LogLevel level, int rank, const std::string& text) {
  const std::string head =
      "unjam: " + time_text() + " " + std::string(kNames[static_cast<std::size_t>(level)]) + ": ";
  std::string lines;
  std::string_view rest = text;
  for (bool more = true; more;) {
    const std::size_t end = rest.find('\n');
    more = end != std::string_view::npos;
    lines.append(head).append(rest.substr(0, end)).append("\n");
    if (more) rest.remove_prefix(end + 1);
  }
  const std::lock_guard lock(mutex_);
  write_all(descriptor(rank), lines);
}

}  // namespace unjam
