// Where the network plugins of the tests are, and what tests ask of them.
#pragma once

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <limits.h>
#include <unistd.h>

#include <memory>
#include <string>

#include "tests/net/faults.h"
#include "transport/network/net_plugin.h"

namespace unjam_test {

// Beside the test: see cmake/UnjamTests.cmake.
inline std::string net_plugin_file(const std::string& name) {
  char self[PATH_MAX] = {};
  const ssize_t n = readlink("/proc/self/exe", self, sizeof(self) - 1);
  const std::string path(self, n < 0 ? 0 : static_cast<std::size_t>(n));
  return path.substr(0, path.rfind('/') + 1) + "net/" + name + ".so";
}
inline std::string net_plugin_file(int version) {
  return net_plugin_file("v" + std::to_string(version));
}

inline NetFaults& net_faults(const std::string& file) {
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) ADD_FAILURE() << dlerror();
  return *static_cast<NetFaults*>(dlsym(library, "unjam_net_faults"));
}
// As if nothing had been asked or counted.
inline void reset(NetFaults& f) {
  f.~NetFaults();
  new (&f) NetFaults;
}

}  // namespace unjam_test
