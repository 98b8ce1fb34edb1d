#include "runtime/log.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
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

// Nothing of a user's name may look like a line of ours, or reach a terminal as a command.
void append_printable(std::string_view text, std::string& line) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte >= 0x20 && byte != 0x7f) {
      line += c;
    } else {
      line.append("\\x").append(1, kDigits[byte >> 4]).append(1, kDigits[byte & 15]);
    }
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

int Log::file(int rank) {
  if (pattern_.empty()) return -1;
  const std::string name = file_name(pattern_, rank);
  const auto [place, is_new] = files_.try_emplace(name);
  if (is_new) {
    // Appended to, since several processes may have one file. Without a wait: for a reader of a
    // FIFO, and, later, for room in it.
    constexpr int kFlags = O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    place->second = Fd(::open(name.c_str(), kFlags, 0644));
    if (!place->second) {
      const std::string why = std::strerror(errno);
      std::string line = "unjam: UNJAM_LOG_FILE: cannot open '";
      append_printable(name, line);
      line += "' (" + why + "): its lines go to stderr\n";
      if (!put(standard_error(), line)) lost_.fetch_add(1, std::memory_order_relaxed);
    }
  }
  return place->second ? place->second.get() : -1;
}

// A pipe or a terminal is opened a second time: only so are its writes without a wait, and those of
// the program as before. Regular files do not wait; the program's own descriptor knows the place.
int Log::standard_error() {
  struct stat now{};
  if (fstat(STDERR_FILENO, &now) != 0) return -1;
  if (!S_ISFIFO(now.st_mode) && !S_ISCHR(now.st_mode)) return STDERR_FILENO;
  // (Programs replace their stderr.)
  if (!own_stderr_ || now.st_dev != of_stderr_.st_dev || now.st_ino != of_stderr_.st_ino) {
    own_stderr_ = Fd(::open("/proc/self/fd/2", O_WRONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    of_stderr_ = now;
  }
  return own_stderr_ ? own_stderr_.get() : STDERR_FILENO;
}

bool Log::put(int fd, std::string_view line) {
  if (fd < 0) return false;
  // Where it could not be opened a second time, and for sockets: there is room, as far as is known.
  pollfd polled{fd, POLLOUT, 0};
  if (poll(&polled, 1, 0) != 1 || (polled.revents & POLLOUT) == 0) return false;
  ssize_t n = 0;
  do {
    n = ::write(fd, line.data(), line.size());
  } while (n < 0 && errno == EINTR);
  if (n > 0) torn_ = static_cast<std::size_t>(n) < line.size();
  return n == static_cast<ssize_t>(line.size());
}

void Log::write(LogLevel level, int rank, std::string_view text) {
  const std::string head =
      "unjam: " + time_text() + " " + std::string(kNames[static_cast<std::size_t>(level)]) + ": ";
  std::string line = head;
  append_printable(text, line);
  line += "\n";
  const std::lock_guard lock(mutex_);
  int fd = file(rank);
  if (fd < 0) fd = standard_error();
  if (torn_) line.insert(0, "\n");
  if (const std::uint64_t lost = lost_.load(std::memory_order_relaxed); lost != 0) {
    line += head + std::to_string(lost) + " line(s) before this one are lost: there was no room\n";
    if (put(fd, line)) {
      lost_.fetch_sub(lost, std::memory_order_relaxed);
      return;
    }
  } else if (put(fd, line)) {
    return;
  }
  lost_.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace unjam
