#include "runtime/host_id.h"

#include <cstdlib>
#include <string_view>

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

}  // namespace unjam
