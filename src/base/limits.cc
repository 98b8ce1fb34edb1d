#include "base/limits.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <cerrno>
#include <climits>
#include <memory>

#include "base/fd.h"

namespace unjam {
namespace {

struct CloseFolder {
  void operator()(DIR* folder) const { closedir(folder); }
};

rlim_t soft_limit(__rlimit_resource resource) {
  rlimit limit{};
  return getrlimit(resource, &limit) == 0 ? limit.rlim_cur : RLIM_INFINITY;
}

std::string number_of(rlim_t limit) {
  return limit == RLIM_INFINITY ? "any number of" : std::to_string(limit);
}

// How many are open; 0: it cannot be told.
std::size_t files_open() {
  std::size_t open = 0;
  const std::unique_ptr<DIR, CloseFolder> folder(opendir("/proc/self/fd"));
  if (folder == nullptr) return 0;
  while (readdir(folder.get()) != nullptr) ++open;
  return open - 3;  // ".", ".." and the folder itself
}

}  // namespace

std::size_t files_left() {
  const rlim_t limit = soft_limit(RLIMIT_NOFILE);
  errno = 0;
  const std::size_t open = files_open();
  if (open == 0 && errno == EMFILE) return 0;
  return limit > open ? limit - open : 0;
}

void make_room_for_files(std::size_t more) {
  const Fd any(eventfd(0, EFD_CLOEXEC));
  const std::size_t last = files_open() + more;
  if (!any || last > INT_MAX) return;
  // (Not where it is too much: what is short is told as it is needed.)
  const Fd far(fcntl(any.get(), F_DUPFD_CLOEXEC, static_cast<int>(last)));
}

std::string limit_text(int error) {
  switch (error) {
    case EMFILE:
      return " (a process here may have " + number_of(soft_limit(RLIMIT_NOFILE)) +
             " files open, RLIMIT_NOFILE: raise it with `ulimit -n`)";
    case ENFILE:
      return " (the machine has as many files open as it may: raise fs.file-max)";
    case ENOSPC:
      return " (the machine, or the control group, has no memory left: use fewer ranks or lanes)";
    case ENOMEM: {
      const rlim_t addresses = soft_limit(RLIMIT_AS);
      if (addresses != RLIM_INFINITY) {
        return " (a process here may have " + std::to_string(addresses) +
               " bytes of addresses, RLIMIT_AS: raise it with `ulimit -v unlimited`)";
      }
      return " (the machine, or the control group, has no memory left, or a process may not have "
             "more mappings, vm.max_map_count: raise it, or use fewer ranks or lanes)";
    }
    case EAGAIN:
      return " (no more threads: a user here may have " + number_of(soft_limit(RLIMIT_NPROC)) +
             " of them, RLIMIT_NPROC: raise it with `ulimit -u`; or the control group may not, "
             "pids.max; or there are no addresses left for a stack, RLIMIT_AS: `ulimit -v "
             "unlimited`)";
    default:
      return "";
  }
}

}  // namespace unjam
