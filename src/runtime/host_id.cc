#include "runtime/host_id.h"

#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string_view>

#include "base/siphash.h"
#include "control/messages.h"

namespace unjam {
namespace {

// Of such an id nothing needs quotes, in a list or in a shell.
constexpr std::string_view kCharacters =
    "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_.:";

}  // namespace

bool host_id(std::string& id, std::string& error) {
  const char* text = std::getenv("UNJAM_HOST_ID");
  id = text == nullptr ? "" : text;
  if (id.size() <= kLongestHostId && id.find_first_not_of(kCharacters) == id.npos) return true;
  error = "UNJAM_HOST_ID=" + id.substr(0, 2 * kLongestHostId) + " is not valid: give 1 to " +
          std::to_string(kLongestHostId) + " letters, digits, and any of -_.:";
  return false;
}

HostIdentity this_host() {
  HostIdentity host;
  std::string told, unused;
  if (host_id(told, unused) && !told.empty()) {
    host.name = told;
  } else {
    char name[256] = {};
    host.name = gethostname(name, sizeof(name) - 1) == 0 && *name != '\0' ? name : "unnamed";
    std::string boot;
    std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
    // Processes of one host meet over a socket that their network alone has.
    struct stat network = {};
    if (stat("/proc/self/ns/net", &network) == 0) boot += " " + std::to_string(network.st_ino);
    told = host.name + " " + boot + " " + std::to_string(geteuid());
  }
  host.number = siphash({0x756e6a616d2d686full, 0x73742d6964000000ull}, told);
  return host;
}

}  // namespace unjam
