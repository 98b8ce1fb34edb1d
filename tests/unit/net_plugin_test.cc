// Network plugins of each version, loaded and used through one interface; and what is said of those
// that cannot be.
#include "transport/network/net_plugin.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "tests/net/plugins.h"
#include "tests/support/job.h"

namespace unjam {
namespace {

using testing::Test;
using unjam_test::kPatienceUs;
using unjam_test::net_faults;
using unjam_test::net_plugin_file;
using unjam_test::reset;

bool contains(const std::string& text, const std::string& what) {
  return text.find(what) != std::string::npos;
}
// Until it is true, for so long as a test's patience lasts.
bool until(const std::function<bool()>& reached) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(kPatienceUs);
  while (!reached()) {
    if (std::chrono::steady_clock::now() > end) return false;
  }
  return true;
}

class OfVersion : public testing::TestWithParam<int> {
 public:
  ~OfVersion() override { reset(faults_); }

 protected:
  OfVersion() : file_(net_plugin_file(GetParam())), faults_(net_faults(file_)) { reset(faults_); }
  std::unique_ptr<NetPlugin> load(std::string* error = nullptr) {
    std::string text;
    auto plugin = NetPlugin::load(file_, text);
    if (error != nullptr) *error = text;
    if (plugin == nullptr && error == nullptr) ADD_FAILURE() << text;
    return plugin;
  }
  const std::string file_;
  NetFaults& faults_;
};

// A connection from here to here.
struct Connection {
  explicit Connection(NetPlugin& with) : plugin(with) {
    EXPECT_TRUE(plugin.listen(0, handle, &listener));
    EXPECT_TRUE(until([&] {
      EXPECT_TRUE(out != nullptr || plugin.connect(0, handle, &out));
      EXPECT_TRUE(in != nullptr || plugin.accept(listener, &in));
      return (out != nullptr && in != nullptr) || Test::HasFailure();
    }));
  }
  ~Connection() {
    EXPECT_TRUE(plugin.close_send(out) && plugin.close_receive(in) &&
                plugin.close_listen(listener));
  }
  NetPlugin& plugin;
  alignas(16) unsigned char handle[NetPlugin::kHandleBytes] = {};
  void* listener = nullptr;
  void* out = nullptr;
  void* in = nullptr;
};

TEST_P(OfVersion, IsWhatItSays) {
  const auto plugin = load();
  ASSERT_NE(plugin, nullptr);
  EXPECT_EQ(plugin->version(), GetParam());
  EXPECT_EQ(plugin->name(), "unjam-test");
  EXPECT_EQ(plugin->file(), file_);
  EXPECT_EQ(plugin->requests(), GetParam() == 6 ? 8u : 32u);
  ASSERT_EQ(plugin->devices().size(), 1u);
  EXPECT_EQ(plugin->devices()[0].name, "loopback");
  EXPECT_EQ(plugin->devices()[0].most_bytes, std::uint64_t{1} << 30);
}

TEST_P(OfVersion, MessagesArriveInOrder) {
  faults_.not_yet = 3;  // the handle keeps what connect() has put there
  faults_.piece = 1000;
  const auto plugin = load();
  ASSERT_NE(plugin, nullptr);
  {
    Connection c(*plugin);
    std::vector<unsigned char> from(20000), to(20000);
    for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<unsigned char>(i * 7);
    void* from_memory = nullptr;
    void* to_memory = nullptr;
    ASSERT_TRUE(plugin->enroll(c.out, from.data(), from.size(), &from_memory));
    ASSERT_TRUE(plugin->enroll(c.in, to.data(), to.size(), &to_memory));
    // One of 5,000 bytes where 9,000 have room, one of 10,000, and an empty one.
    const std::size_t begins[] = {0, 9000, 19000}, sent[] = {5000, 10000, 0},
                      room[] = {9000, 10000, 1000};
    void* sends[3] = {};
    void* receives[3] = {};
    for (int i = 0; i < 3; ++i) {
      ASSERT_TRUE(plugin->send(c.out, from.data() + begins[i], sent[i], from_memory, &sends[i]));
      ASSERT_TRUE(plugin->receive(c.in, to.data() + begins[i], room[i], to_memory, &receives[i]));
      ASSERT_TRUE(sends[i] != nullptr && receives[i] != nullptr);
    }
    for (int i = 0; i < 3; ++i) {
      bool done = false;
      std::size_t bytes = 0;
      ASSERT_TRUE(until([&] {
        bool sent_it = false;
        std::size_t n = 0;
        if (sends[i] != nullptr) {
          EXPECT_TRUE(plugin->test(sends[i], &sent_it, &n));
          if (sent_it) sends[i] = nullptr;
        }
        EXPECT_TRUE(done || plugin->test(receives[i], &done, &bytes));
        return (done && sends[i] == nullptr) || HasFailure();
      }));
      EXPECT_EQ(bytes, sent[i]);
      EXPECT_EQ(std::memcmp(to.data() + begins[i], from.data() + begins[i], sent[i]), 0);
    }
    EXPECT_TRUE(plugin->dismiss(c.out, from_memory) && plugin->dismiss(c.in, to_memory));
  }
  EXPECT_EQ(faults_.misused, 0);
  EXPECT_EQ(faults_.open, 0);
  EXPECT_EQ(faults_.registered, 0);
}

TEST_P(OfVersion, WhatFailsIsSaidWithItsCure) {
  const struct {
    int fails;
    const char* says;
  } cases[] = {{NetFaults::kInit,
                "does not start: init() gives 6 (remote error); it says: a planted "
                "fault"},
               {NetFaults::kDevices, "devices() gives 6"},
               {NetFaults::kProperties, "getProperties() gives 6"}};
  const std::string title = "unjam-test (" + file_ + ", v" + std::to_string(GetParam()) + ")";
  for (const auto& c : cases) {
    reset(faults_);
    faults_.fails = c.fails;
    std::string error;
    EXPECT_EQ(load(&error), nullptr);
    EXPECT_TRUE(contains(error, c.says) && contains(error, title)) << error;
  }
  reset(faults_);
  faults_.no_devices = 1;
  std::string error;
  EXPECT_EQ(load(&error), nullptr);
  EXPECT_TRUE(contains(error, "finds no network device") && contains(error, title)) << error;
  reset(faults_);
  faults_.no_host_memory = 1;
  EXPECT_EQ(load(&error), nullptr);
  EXPECT_TRUE(contains(error, "cannot send from host memory") && contains(error, title)) << error;
  reset(faults_);
  faults_.fails = NetFaults::kListen;
  const auto plugin = load();
  ASSERT_NE(plugin, nullptr);
  alignas(16) unsigned char handle[NetPlugin::kHandleBytes];
  void* listener = nullptr;
  EXPECT_FALSE(plugin->listen(0, handle, &listener));
  EXPECT_EQ(plugin->problem(), "listen() gives 6 (remote error); it says: a planted fault");
}

// What a plugin has warned of before, of another connection, is not said of a failure that it says
// nothing of.
TEST_P(OfVersion, AFailureIsToldWithItsOwnWords) {
  const auto plugin = load();
  ASSERT_NE(plugin, nullptr);
  alignas(16) unsigned char handle[NetPlugin::kHandleBytes];
  void* listener = nullptr;
  faults_.fails = NetFaults::kListen;
  EXPECT_FALSE(plugin->listen(0, handle, &listener));
  faults_.grumbles = 1;  // and the last failure is another one's
  EXPECT_FALSE(plugin->listen(0, handle, &listener));
  EXPECT_EQ(plugin->problem(), "listen() gives 6 (remote error)");
  faults_.fails = NetFaults::kConnect;
  ASSERT_TRUE(plugin->listen(0, handle, &listener));
  void* comm = nullptr;
  EXPECT_FALSE(plugin->connect(0, handle, &comm));
  EXPECT_EQ(plugin->problem(), "connect() gives 6 (remote error)");
  EXPECT_TRUE(plugin->close_listen(listener));
}

INSTANTIATE_TEST_SUITE_P(Abi, OfVersion,
                         testing::Range(NetPlugin::kOldest, NetPlugin::kNewest + 1));

std::string error_of(const std::string& name) {
  std::string error;
  EXPECT_EQ(NetPlugin::load(name, error), nullptr);
  return error;
}

TEST(NetPlugin, WhatIsNoneIsSaidWithItsCure) {
  const std::string nowhere = error_of("/nowhere/libnccl-net.so");
  EXPECT_TRUE(contains(nowhere, "/nowhere/libnccl-net.so cannot be loaded")) << nowhere;
  EXPECT_TRUE(contains(nowhere, "Give the path")) << nowhere;
  EXPECT_TRUE(contains(error_of("nobodys"), "libnccl-net-nobodys.so"));
  EXPECT_TRUE(contains(error_of("libnccl-nobodys.so"), "plugin libnccl-nobodys.so cannot"));
  EXPECT_TRUE(contains(error_of("/proc/self/maps"), "cannot be loaded"));

  const std::string old = error_of(net_plugin_file("old")),
                    young = error_of(net_plugin_file("new"));
  EXPECT_TRUE(contains(old, "is a network plugin of v5, and unjam knows v6 to v12")) << old;
  EXPECT_TRUE(contains(young, "is a network plugin of v13, and unjam knows v6 to v12")) << young;
  const std::string none = error_of(net_plugin_file("none"));
  EXPECT_TRUE(contains(none, "is no network plugin") && contains(none, net_plugin_file("none")))
      << none;
  const std::string incomplete = error_of(net_plugin_file("incomplete"));
  EXPECT_TRUE(contains(incomplete, "(v8) has no irecv in its table")) << incomplete;
}

}  // namespace
}  // namespace unjam
