#include "transport/network/ucx_library.h"

#include <dlfcn.h>
#include <link.h>
#include <stdlib.h>

#include <memory>
#include <utility>

namespace unjam {
namespace {

constexpr const char* kUcp = "libucp.so.0";

// Settings that hold while UCX is loaded.
class TameUcx {
 public:
  TameUcx() {
    for (Setting& s : settings_) s.is_ours = getenv(s.name) == nullptr;
    for (const Setting& s : settings_) {
      if (s.is_ours) setenv(s.name, s.value, 1);
    }
  }
  ~TameUcx() {
    for (const Setting& s : settings_) {
      if (s.is_ours) unsetenv(s.name);
    }
  }
  TameUcx(const TameUcx&) = delete;
  TameUcx& operator=(const TameUcx&) = delete;

 private:
  struct Setting {
    const char* name;
    const char* value;
    bool is_ours;
  };
  Setting settings_[4] = {{"UCX_DEBUG_SIGNO", "0", false},
                          {"UCX_ERROR_SIGNALS", "", false},
                          {"UCX_MEM_EVENTS", "n", false},
                          {"UCX_MEMTYPE_CACHE", "n", false}};
};

// Where it was loaded from, which need not be what was asked for. (dladdr() says the same of a
// function, but a library that is none of UCX's has none that we know.)
std::string file_of(void* library, const std::string& asked) {
  const link_map* map = nullptr;
  const bool known = dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
  return known && map->l_name != nullptr && *map->l_name != 0 ? map->l_name : asked;
}

}  // namespace

const UcxLibrary* UcxLibrary::load(const std::string& file, std::string& error) {
  auto made = std::make_unique<UcxLibrary>();
  UcxLibrary& u = *made;
  u.file_ = file.empty() ? kUcp : file;
  void* library = dlopen(kUcp, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  u.was_there_ = library != nullptr;
  if (library == nullptr) {
    const TameUcx tame;
    library = dlopen(u.file_.c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    const char* const why = dlerror();
    error = "UCX cannot be loaded: " + std::string(why == nullptr ? "?" : why) +
            ". Install it (Debian, Ubuntu: libucx0; pip: libucx-cu13), or name its libucp.so.0";
    return nullptr;
  }
  u.file_ = file_of(library, u.file_);
  const char* missing = nullptr;
  const auto find = [&]<class F>(const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  ucx_abi::Functions& f = u.functions_;
  find("ucp_get_version", f.get_version);
  find("ucp_config_read", f.config_read);
  find("ucp_config_modify", f.config_modify);
  find("ucp_config_release", f.config_release);
  find("ucp_init_version", f.init_version);
  find("ucp_cleanup", f.cleanup);
  find("ucp_worker_create", f.worker_create);
  find("ucp_worker_destroy", f.worker_destroy);
  find("ucp_worker_get_address", f.worker_get_address);
  find("ucp_worker_release_address", f.worker_release_address);
  find("ucp_worker_progress", f.worker_progress);
  find("ucp_worker_get_efd", f.worker_get_efd);
  find("ucp_worker_arm", f.worker_arm);
  find("ucp_worker_set_am_recv_handler", f.worker_set_am_recv_handler);
  find("ucp_ep_create", f.ep_create);
  find("ucp_ep_close_nbx", f.ep_close_nbx);
  find("ucp_am_send_nbx", f.am_send_nbx);
  find("ucp_request_free", f.request_free);
  find("ucs_status_string", f.status_string);
  const std::string need = std::to_string(kMajor) + "." + std::to_string(kOldestMinor);
  if (missing != nullptr) {
    error = u.file_ + " has no " + missing + ": it is no UCX, or one before " + need +
            ". Install a newer one";
    return nullptr;
  }
  unsigned major = 0, minor = 0, release = 0;
  f.get_version(&major, &minor, &release);
  u.title_ = "UCX " + std::to_string(major) + "." + std::to_string(minor) + "." +
             std::to_string(release) + " (" + u.file_ + ")";
  if (major != kMajor || minor < kOldestMinor) {
    error = u.title_ + " is of another ABI than unjam knows: it takes UCX " + need +
            " or newer, of " + std::to_string(kMajor) + ".x";
    return nullptr;
  }
  return made.release();
}

}  // namespace unjam
