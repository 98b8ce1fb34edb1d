// What unjam.h promises beside right numbers: refusals with messages, disagreement between ranks,
// ranks that leave, limits, callbacks, priorities, and what it tells about itself.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/types.h"
#include "plan/registry.h"
#include "runtime/environment.h"
#include "runtime/settings.h"
#include "tests/support/exchange.h"
#include "tests/support/job.h"
#include "tests/support/json.h"

namespace unjam_test {
namespace {

#define EXPECT_OK(call) EXPECT_EQ((call), UNJAM_SUCCESS) << unjamGetLastError()
#define ASSERT_OK(call) ASSERT_EQ((call), UNJAM_SUCCESS) << unjamGetLastError()

// The call must be refused with this code, and with a message that holds `words`.
#define EXPECT_REFUSED(call, code, words)                                      \
  do {                                                                         \
    EXPECT_EQ((call), code) << #call;                                          \
    EXPECT_NE(std::string(unjamGetLastError()).find(words), std::string::npos) \
        << #call << " says: " << unjamGetLastError();                          \
  } while (false)

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

unjamConfig_t quick_diagnosis() {
  unjamConfig_t c = default_config();
  c.stall_ms = 50;
  return c;
}

// ---- versions, codes, settings ----

TEST(Api, VersionAndErrorNames) {
  int version = 0;
  ASSERT_OK(unjamGetVersion(&version));
  EXPECT_EQ(version, UNJAM_VERSION);
  EXPECT_EQ(unjamGetVersion(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  std::map<std::string, int> names;
  for (int code = 0; code <= UNJAM_ERROR_INTERNAL; ++code) {
    const char* name = unjamGetErrorString(static_cast<unjamResult_t>(code));
    ASSERT_NE(name, nullptr);
    EXPECT_NE(*name, '\0');
    EXPECT_EQ(++names[name], 1) << "two codes are called " << name;
  }
  EXPECT_NE(unjamGetErrorString(static_cast<unjamResult_t>(99)), nullptr);
}

TEST(Api, LastErrorBelongsToTheThread) {
  EXPECT_EQ(unjamGetVersion(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_STRNE(unjamGetLastError(), "");
  std::thread([] { EXPECT_STREQ(unjamGetLastError(), ""); }).join();
}

TEST(Api, ConfigurationIsChecked) {
  unjamContext_t c = nullptr;
  const auto refused = [&](void (*change)(unjamConfig_t&), const char* words) {
    unjamConfig_t config = default_config();
    change(config);
    EXPECT_REFUSED(unjamInitAll(&c, 1, &config), UNJAM_ERROR_INVALID_ARGUMENT, words);
    EXPECT_EQ(c, nullptr);
  };
  refused([](unjamConfig_t& x) { x.size = 0; }, "size");
  refused([](unjamConfig_t& x) { x.size = 7; }, "size");
  refused([](unjamConfig_t& x) { x.size += 8; }, "size");
  refused([](unjamConfig_t& x) { x.policy = 3; }, "POLICY");
  refused([](unjamConfig_t& x) { x.order = -7; }, "ORDER");
  refused([](unjamConfig_t& x) { x.lanes = 33; }, "LANES");
  refused([](unjamConfig_t& x) { x.block_threads = 1025; }, "BLOCK_THREADS");
  refused([](unjamConfig_t& x) { x.block_threads = 17; }, "host device takes at most 16");
  refused([](unjamConfig_t& x) { x.device = 2; }, "DEVICE");
  refused([](unjamConfig_t& x) { x.device = -2; }, "DEVICE");
  refused([](unjamConfig_t& x) { x.device_index = 1024; }, "DEVICE_INDEX");
  refused([](unjamConfig_t& x) { x.device_index = -2; }, "DEVICE_INDEX");
  // What a device takes is looked at before whether it is there.
  for (const std::uint32_t threads : {64u, 100u, 160u, 544u, 1024u}) {
    unjamConfig_t config = default_config();
    config.device = UNJAM_DEVICE_CUDA;
    config.block_threads = threads;
    EXPECT_REFUSED(unjamInitAll(&c, 1, &config), UNJAM_ERROR_INVALID_ARGUMENT, "multiple of 64");
  }
  refused([](unjamConfig_t& x) { x.guaranteed_slots = 1; }, "GUARANTEED_SLOTS");
  refused([](unjamConfig_t& x) { x.guaranteed_slot_bytes = 1000; }, "64");
  refused([](unjamConfig_t& x) { x.algorithm = 9; }, "ALGORITHM");
  refused([](unjamConfig_t& x) { x.max_active_keys = 1u << 30; }, "MAX_ACTIVE_KEYS");
  EXPECT_EQ(unjamInitAll(nullptr, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInitAll(&c, 0, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInitAll(&c, 65'536, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInitAll(&c, -1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  // An older, shorter configuration is taken: the fields it has not are the defaults.
  unjamConfig_t shorter = default_config();
  shorter.size = offsetof(unjamConfig_t, algorithm);
  shorter.algorithm = 9;
  ASSERT_OK(unjamInitAll(&c, 1, &shorter));
  EXPECT_OK(unjamDestroy(c));
  // Version 0.1.0's had no devices.
  shorter = default_config();
  shorter.size = offsetof(unjamConfig_t, device);
  shorter.device = 99;
  shorter.device_index = 99999;
  ASSERT_OK(unjamInitAll(&c, 1, &shorter));
  EXPECT_EQ(JsonReader::parse(info(c))["device"].string, "host");
  EXPECT_OK(unjamDestroy(c));
  // The most lanes there are.
  unjamConfig_t wide = default_config();
  wide.lanes = 32;
  ASSERT_OK(unjamInitAll(&c, 1, &wide));
  EXPECT_EQ(stats_of(c).lanes, 32u);
  EXPECT_OK(unjamDestroy(c));
}

TEST(Api, EnvironmentIsCheckedAndOverridden) {
  ASSERT_EQ(setenv("UNJAM_LANES", "many", 1), 0);
  unjamContext_t c = nullptr;
  EXPECT_REFUSED(unjamInitAll(&c, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT, "UNJAM_LANES=many");
  ASSERT_EQ(setenv("UNJAM_LANES", "2", 1), 0);
  ASSERT_OK(unjamInitAll(&c, 1, nullptr));
  EXPECT_EQ(stats_of(c).lanes, 2u);
  EXPECT_OK(unjamDestroy(c));
  unjamConfig_t config = default_config();
  config.lanes = 3;
  ASSERT_OK(unjamInitAll(&c, 1, &config));
  EXPECT_EQ(stats_of(c).lanes, 3u);
  EXPECT_OK(unjamDestroy(c));
  unsetenv("UNJAM_LANES");
}

TEST(Api, DeviceFromTheEnvironment) {
  unjamContext_t c = nullptr;
  const auto refused = [&](const char* name, const char* value, const char* words) {
    ASSERT_EQ(setenv(name, value, 1), 0);
    EXPECT_REFUSED(unjamInitAll(&c, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT, words);
    EXPECT_EQ(c, nullptr);
    unsetenv(name);
  };
  refused("UNJAM_DEVICE", "gpu", "one of host|cuda");
  refused("UNJAM_DEVICE_INDEX", "first", "UNJAM_DEVICE_INDEX=first");
  refused("UNJAM_DEVICE_INDEX", "-2", "-1 to 1023");
  refused("UNJAM_POOL_SLOT_BYTES", "1000", "multiple of 64");
  // Smaller slices than guaranteed slots have would be more of them in a chunk than a ring holds.
  refused("UNJAM_POOL_SLOT_BYTES", "8128", "UNJAM_GUARANTEED_SLOT_BYTES, 8192");
  refused("UNJAM_POOL_SLOT_BYTES", "16777280", "UNJAM_POOL_SLOT_BYTES=16777280");
  // The configuration goes before the environment, and each device has its own defaults.
  unjamConfig_t host = default_config();
  host.device = UNJAM_DEVICE_HOST;
  ASSERT_EQ(setenv("UNJAM_DEVICE", "cuda", 1), 0);
  ASSERT_OK(unjamInitAll(&c, 1, &host));
  const Json said = JsonReader::parse(info(c));
  EXPECT_EQ(said["device"].string, "host");
  EXPECT_EQ(said["settings"]["UNJAM_LANES"].number, 1);
  EXPECT_EQ(said["settings"]["UNJAM_DEVICE"].string, "host");
  EXPECT_OK(unjamDestroy(c));
  unsetenv("UNJAM_DEVICE");
}

TEST(Api, CopyEnginesFromTheEnvironment) {
  for (const auto& [entry, words] : {std::pair{"UNJAM_DMA=maybe", "one of off|on|stuck"},
                                     {"UNJAM_DMA=3", "one of off|on|stuck"},
                                     {"UNJAM_DMA_LANES=1", "from 2 to 32"},
                                     {"UNJAM_DMA_LANES=33", "from 2 to 32"},
                                     {"UNJAM_DMA_FROM=-1", "from 0 to"},
                                     {"UNJAM_DMA_FLIGHT=1K", "from 65536 to"}}) {
    const std::string_view text = entry;
    const std::string name(text.substr(0, text.find('=')));
    ASSERT_EQ(setenv(name.c_str(), entry + name.size() + 1, 1), 0);
    unjamContext_t c = nullptr;
    EXPECT_REFUSED(unjamInitAll(&c, 1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT,
                   std::string(entry) + " is not valid");
    EXPECT_TRUE(contains(unjamGetLastError(), words)) << unjamGetLastError();
    EXPECT_EQ(c, nullptr);
    unsetenv(name.c_str());
  }
}

// What a report says of a setting is what the variable takes.
TEST(Api, SettingsReadBackAsTheyArePrinted) {
  const auto again = [](const unjam::Variable& v, std::int64_t value) {
    const std::string text = unjam::value_text(v, value);
    EXPECT_EQ(setenv(v.name, text.c_str(), 1), 0);
    unjam::Settings s;
    std::string error;
    EXPECT_TRUE(unjam::resolve_settings(nullptr, 2, s, error)) << text << ": " << error;
    unsetenv(v.name);
    return s.*v.field;
  };
  int choices = 0;
  for (const unjam::Variable& v : unjam::variables()) {
    if (v.choices == nullptr) continue;
    ++choices;
    std::set<std::string> texts;
    for (std::int64_t value = v.min; value <= v.max; ++value) {
      EXPECT_EQ(again(v, value), value) << v.name;
      texts.insert(unjam::value_text(v, value));
      // And by its number, as before there were names.
      ASSERT_EQ(setenv(v.name, std::to_string(value).c_str(), 1), 0);
      unjam::Settings s;
      std::string error;
      EXPECT_TRUE(unjam::resolve_settings(nullptr, 2, s, error)) << error;
      EXPECT_EQ(s.*v.field, value) << v.name;
      unsetenv(v.name);
    }
    EXPECT_EQ(std::ssize(texts), v.max - v.min + 1) << v.name << ": " << v.choices;
    EXPECT_EQ(texts.count(std::to_string(v.min)), 0u) << v.name << ": a name lacks";
  }
  EXPECT_GE(choices, 4);
  // In bytes and in plain numbers as well.
  for (const unjam::Variable& v : unjam::variables()) {
    if (v.field == &unjam::Settings::heap_bytes) {
      EXPECT_EQ(again(v, 1 << 20), 1 << 20);
    }
    if (v.field == &unjam::Settings::lines) {
      EXPECT_EQ(again(v, -1), -1);
    }
  }
}

TEST(Api, UnknownVariablesAreNamedWithTheNearest) {
  const auto unknown = [](std::vector<const char*> entries) {
    entries.push_back(nullptr);
    return unjam::unknown_variables(entries.data());
  };
  // All that there are, whoever reads them, and what is not ours.
  std::vector<std::string> known = {"PATH=/bin", "UNJAM=1", "XUNJAM_LANE=4", "unjam_lane=1", ""};
  for (const unjam::Variable& v : unjam::variables()) known.push_back(std::string(v.name) + "=1");
  for (const unjam::TextVariable& v : unjam::text_variables()) known.emplace_back(v.name);
  for (const char* name : unjam::names_of_others()) known.push_back(std::string(name) + "=x=y");
  std::vector<const char*> entries;
  for (const std::string& entry : known) entries.push_back(entry.c_str());
  EXPECT_TRUE(unknown(entries).empty());
  EXPECT_TRUE(unjam::unknown_variables(nullptr).empty());
  // One letter of any name too many, too few, another, or two in the wrong order.
  for (const unjam::Variable& v : unjam::variables()) {
    const std::string name = v.name;
    std::string swapped = name;
    std::swap(swapped[name.size() - 2], swapped[name.size() - 1]);
    for (const std::string& typed : {name + "X", name.substr(0, name.size() - 1), swapped}) {
      if (std::any_of(known.begin(), known.end(),
                      [&](const std::string& k) { return k.substr(0, k.find('=')) == typed; })) {
        continue;
      }
      const auto said = unknown({(typed + "=4").c_str()});
      ASSERT_EQ(said.size(), 1u) << typed;
      EXPECT_EQ(said[0].name, typed);
      EXPECT_EQ(said[0].text.find(typed + " is set"), 0u) << said[0].text;
      EXPECT_NE(said[0].text.find("did you mean UNJAM_"), std::string::npos) << said[0].text;
    }
  }
  for (const auto& [entry, meant] : {std::pair{"UNJAM_LANE=4", "did you mean UNJAM_LANES?"},
                                     {"UNJAM_TORCH_DEFALT=", "UNJAM_TORCH_DEFAULT?"}}) {
    EXPECT_NE(unknown({entry})[0].text.find(meant), std::string::npos) << entry;
  }
  // What is near to nothing is named all the same; its value is not.
  for (const char* entry : {"UNJAM_=1", "UNJAM_X=1", "UNJAM_NCCL_DEBUG_FILE=secret"}) {
    const auto said = unknown({entry, "UNJAM_LANES=2"});
    ASSERT_EQ(said.size(), 1u);
    EXPECT_EQ(said[0].text.find("did you mean"), std::string::npos) << said[0].text;
    EXPECT_EQ(said[0].text.find("secret"), std::string::npos) << said[0].text;
  }
}

// Blocks that wait leave room for those that they wait for.
TEST(Api, LanesOfRanksThatShareADevice) {
  EXPECT_EQ(unjam::lanes_of_sharers(132, 1, 32), 32);
  EXPECT_EQ(unjam::lanes_of_sharers(0, 4, 32), 32);  // of a device that does not say
  EXPECT_EQ(unjam::lanes_of_sharers(132, 2, 4), 4);
  EXPECT_EQ(unjam::lanes_of_sharers(132, 2, 32), 29);
  EXPECT_EQ(unjam::lanes_of_sharers(132, 4, 32), 12);
  for (const int sms : {14, 66, 108, 132}) {
    for (const int ranks : {2, 3, 4, 8, 16, 64}) {
      const std::int64_t lanes = unjam::lanes_of_sharers(sms, ranks, 32);
      EXPECT_GE(lanes, 1);
      if (lanes > 1) {
        EXPECT_LE(ranks * (2 * lanes + 8), sms) << sms << " SMs, " << ranks << " ranks";
      }
    }
  }
}

// Or a ring's slices, cut where a larger slot ends, may need more slots than are guaranteed.
TEST(Api, BorrowedSlotsHoldWholeGuaranteedOnes) {
  const auto resolved = [](int ranks) {
    unjam::Settings s;
    std::string error;
    EXPECT_TRUE(unjam::resolve_settings(nullptr, ranks, s, error)) << error;
    return s;
  };
  for (const char* device : {"host", "cuda"}) {
    for (const char* slot : {"", "8192", "8256", "65536", "131072"}) {
      ASSERT_EQ(setenv("UNJAM_DEVICE", device, 1), 0);
      if (*slot != 0) {
        ASSERT_EQ(setenv("UNJAM_GUARANTEED_SLOT_BYTES", slot, 1), 0);
      }
      for (const int ranks : {1, 2, 3, 8}) {
        const unjam::Settings s = resolved(ranks);
        EXPECT_EQ(s.pool_slot_bytes % s.guaranteed_slot_bytes, 0)
            << device << " " << slot << ", " << ranks << " ranks: " << s.pool_slot_bytes;
      }
      unsetenv("UNJAM_GUARANTEED_SLOT_BYTES");
    }
  }
  unsetenv("UNJAM_DEVICE");
}

// So that they have longer slices.
TEST(Api, FewLanesOfCudaHaveLargerSlots) {
  const auto resolved = [](int ranks, std::uint32_t lanes, std::uint32_t slot_bytes = 0) {
    unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
    config.device = UNJAM_DEVICE_CUDA;
    config.lanes = lanes;
    config.guaranteed_slot_bytes = slot_bytes;
    unjam::Settings s;
    std::string error;
    EXPECT_TRUE(unjam::resolve_settings(&config, ranks, s, error)) << error;
    return s;
  };
  for (const auto& [lanes, width] :
       {std::pair{32u, 1}, {17u, 1}, {16u, 2}, {9u, 2}, {8u, 4}, {1u, 4}}) {
    // A lane's part of 4 MiB, or 2, as lines, of which one word in eight is a flag.
    const unjam::Settings pair = resolved(2, lanes), four = resolved(4, lanes);
    EXPECT_GE(pair.guaranteed_slot_bytes * 7 / 8, width * 131072) << lanes;
    EXPECT_LT(pair.guaranteed_slot_bytes * 7 / 8, width * 131072 + 64) << lanes;
    EXPECT_EQ(pair.pool_slot_bytes, 2 * pair.guaranteed_slot_bytes) << lanes;
    EXPECT_GE(four.guaranteed_slot_bytes * 7 / 8, width * 65536) << lanes;
    EXPECT_LT(four.guaranteed_slot_bytes * 7 / 8, width * 65536 + 64) << lanes;
    EXPECT_EQ(four.pool_slot_bytes, 4 * four.guaranteed_slot_bytes) << lanes;
    EXPECT_EQ(four.guaranteed_slot_bytes, width == 1   ? 74944
                                          : width == 2 ? 149824
                                                       : 299648)
        << lanes;
  }
  // What somebody has said stands, and larger slots are at least as large.
  EXPECT_EQ(resolved(4, 8, 4096).guaranteed_slot_bytes, 4096);
  EXPECT_EQ(resolved(4, 8, 4096).pool_slot_bytes, 1196032);  // 292 of these
  EXPECT_EQ(resolved(4, 32, 1 << 20).pool_slot_bytes, 1 << 20);
  // Plans of packets are as with 32 lanes, where nobody has said how large slots are.
  for (const int ranks : {2, 4}) {
    const std::uint32_t usual = unjam::packet_slot_bytes(resolved(ranks, 32), ranks);
    EXPECT_EQ(usual, resolved(ranks, 32).guaranteed_slot_bytes);
    EXPECT_EQ(unjam::packet_slot_bytes(resolved(ranks, 8), ranks), usual);
    EXPECT_EQ(unjam::packet_slot_bytes(resolved(ranks, 8, 524288), ranks), 524288u);
  }
  // Who has said how large the larger ones are has no other size refused than with 32 lanes.
  ASSERT_EQ(setenv("UNJAM_POOL_SLOT_BYTES", "262144", 1), 0);
  for (const std::uint32_t lanes : {32u, 16u, 8u}) {
    EXPECT_EQ(resolved(4, lanes).guaranteed_slot_bytes, lanes == 16 ? 149824 : 74944) << lanes;
    EXPECT_EQ(resolved(2, lanes).guaranteed_slot_bytes, 149824) << lanes;
    EXPECT_GE(resolved(2, lanes).pool_slot_bytes, resolved(2, lanes).guaranteed_slot_bytes)
        << lanes;
  }
  ASSERT_EQ(setenv("UNJAM_POOL_SLOT_BYTES", "65536", 1), 0);
  EXPECT_EQ(resolved(4, 32).guaranteed_slot_bytes, 65536);
  unsetenv("UNJAM_POOL_SLOT_BYTES");
}

TEST(Api, SizeOfBorrowedSlots) {
  // Those without a multiple of a guaranteed slot's bytes, and none at all, move the same data.
  for (const char* bytes : {"0", "8192", "8256", "131072"}) {
    SCOPED_TRACE(bytes);
    ASSERT_EQ(setenv("UNJAM_POOL_SLOT_BYTES", bytes, 1), 0);
    Job job(2);
    unsetenv("UNJAM_POOL_SLOT_BYTES");
    job.run([](Rank& me) {
      std::vector<std::int32_t> x(100'000);
      for (std::size_t i = 0; i < x.size(); ++i) {
        x[i] = static_cast<std::int32_t>(i % 1000) * (me.rank + 1);
      }
      unjamRequest_t request = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, "x", x.data(), x.data(), x.size(), UNJAM_INT32, UNJAM_SUM,
                                 nullptr, &request));
      me.wait(request, "all-reduce");
      for (std::size_t i = 0; i < x.size(); ++i) {
        if (x[i] != static_cast<std::int32_t>(i % 1000) * 3) fail("wrong at " + std::to_string(i));
      }
    });
  }
}

// ---- joining ----

TEST(Init, RanksAsThreads) {
  constexpr int kRanks = 4;
  unjamUniqueId_t id;
  ASSERT_OK(unjamGetUniqueId(&id));
  std::vector<unjamContext_t> contexts(kRanks);
  std::vector<std::thread> threads;
  for (int r = 0; r < kRanks; ++r) {
    threads.emplace_back([&, r] {
      ASSERT_OK(unjamInit(&contexts[static_cast<std::size_t>(r)], kRanks, id, r, nullptr));
      unjamContext_t c = contexts[static_cast<std::size_t>(r)];
      int rank = -1, size = -1;
      EXPECT_OK(unjamContextRank(c, &rank));
      EXPECT_OK(unjamContextSize(c, &size));
      EXPECT_EQ(rank, r);
      EXPECT_EQ(size, kRanks);
      unjamGroup_t g = nullptr;
      ASSERT_OK(unjamGroupCreate(c, nullptr, 0, nullptr, &g));
      std::int32_t x = 1 << r;
      unjamRequest_t q = nullptr;
      ASSERT_OK(unjamAllReduce(g, nullptr, &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
      EXPECT_OK(unjamWait(q, kPatienceUs));
      EXPECT_OK(unjamRequestFree(q));
      EXPECT_EQ(x, 15);
    });
  }
  for (std::thread& t : threads) t.join();
  for (const unjamContext_t c : contexts) EXPECT_OK(unjamDestroy(c));
}

// How long unjamInit waits, in this scope.
struct InitTimeout {
  explicit InitTimeout(std::int64_t ms) {
    setenv("UNJAM_INIT_TIMEOUT_MS", std::to_string(ms).c_str(), 1);
  }
  ~InitTimeout() { unsetenv("UNJAM_INIT_TIMEOUT_MS"); }
};

// One rank's unjamInit, and, where that succeeds, unjamDestroy.
struct Joining {
  unjamResult_t code = UNJAM_SUCCESS;
  std::string said;
  std::atomic<bool> over{false};

  void run(const unjamUniqueId_t& id, int ranks, int rank, const unjamConfig_t& config) {
    unjamContext_t c = nullptr;
    code = unjamInit(&c, ranks, id, rank, &config);
    if (code != UNJAM_SUCCESS) said = unjamGetLastError();
    EXPECT_EQ(c != nullptr, code == UNJAM_SUCCESS) << said;
    if (c != nullptr) {
      EXPECT_OK(unjamDestroy(c));
    }
    over = true;
  }
};

// Runs `then` once rank `rank` has a place in the job and waits for the others, or has failed.
void join_first(const unjamUniqueId_t& id, int ranks, int rank, const unjamConfig_t& config,
                Joining& first, const std::function<void()>& then) {
  const std::set<std::string> before = mapped_memory();
  std::thread thread;
  {
    const InitTimeout long_enough(kPatienceUs / 1000);
    thread = std::thread([&] { first.run(id, ranks, rank, config); });
    // It has compared settings before it makes its memory.
    EXPECT_TRUE(eventually([&] {
      for (const std::string& inode : mapped_memory()) {
        if (before.count(inode) == 0) return true;
      }
      return first.over.load();
    }));
  }
  then();
  thread.join();
}

TEST(Init, TimeoutNamesTheMissingRanks) {
  unjamUniqueId_t id;
  ASSERT_OK(unjamGetUniqueId(&id));
  // Of two, so that the one that is short of time finds a rendezvous: having to make it first is
  // another error where it takes too long.
  Joining patient, hasty;
  join_first(id, 4, 2, default_config(), patient, [&] {
    const InitTimeout timeout(100);
    hasty.run(id, 4, 1, default_config());
  });
  EXPECT_EQ(hasty.code, UNJAM_ERROR_TIMEOUT);
  EXPECT_EQ(patient.code, UNJAM_ERROR_PEER);
  for (const std::string& message : {hasty.said, patient.said}) {
    EXPECT_TRUE(contains(message, "ranks 0, 3 did not join within 100 ms (UNJAM_INIT_TIMEOUT_MS)"))
        << message;
  }
}

TEST(Init, BadArguments) {
  unjamUniqueId_t id;
  ASSERT_OK(unjamGetUniqueId(&id));
  unjamContext_t c = nullptr;
  EXPECT_EQ(unjamGetUniqueId(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInit(nullptr, 1, id, 0, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInit(&c, 2, id, 2, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamInit(&c, 2, id, -1, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  unjamUniqueId_t zero{};
  EXPECT_REFUSED(unjamInit(&c, 1, zero, 0, nullptr), UNJAM_ERROR_INVALID_ARGUMENT, "unique id");
}

// Two threads join one job in a way that does not fit, the second one when the first waits for it
// or has failed; the codes of both.
std::pair<unjamResult_t, unjamResult_t> join_two(int ranks0, int rank0, const unjamConfig_t& c0,
                                                 int ranks1, int rank1, const unjamConfig_t& c1,
                                                 std::string& messages) {
  unjamUniqueId_t id;
  EXPECT_OK(unjamGetUniqueId(&id));
  Joining first, second;
  join_first(id, ranks0, rank0, c0, first, [&] {
    const InitTimeout long_enough(kPatienceUs / 1000);
    second.run(id, ranks1, rank1, c1);
  });
  messages = first.said + "\n" + second.said;
  return {first.code, second.code};
}

TEST(Init, SettingsThatDifferAreReported) {
  unjamConfig_t a = default_config(), b = default_config();
  a.lanes = 2;
  b.lanes = 3;
  std::string said;
  const auto [first, second] = join_two(2, 0, a, 2, 1, b, said);
  EXPECT_TRUE(first == UNJAM_ERROR_MISMATCH || second == UNJAM_ERROR_MISMATCH) << said;
  EXPECT_NE(first, UNJAM_SUCCESS) << said;
  EXPECT_NE(second, UNJAM_SUCCESS) << said;
  EXPECT_TRUE(contains(said, "UNJAM_LANES=2") && contains(said, "UNJAM_LANES=3") &&
              contains(said, "rank 0") && contains(said, "rank 1"))
      << said;
}

// Plans depend on these, so they would differ as well.
TEST(Init, CopyEnginesThatDifferAreReported) {
  for (const auto& [name, mine, theirs] : {std::tuple{"UNJAM_DMA", "off", "on"},
                                           {"UNJAM_DMA_FROM", "67108864", "1048576"},
                                           {"UNJAM_DMA_LANES", "32", "4"},
                                           {"UNJAM_DMA_FLIGHT", "", "65536"}}) {
    unjamUniqueId_t id;
    ASSERT_OK(unjamGetUniqueId(&id));
    Joining first, second;
    join_first(id, 2, 0, default_config(), first, [&, name = name, theirs = theirs] {
      const InitTimeout long_enough(kPatienceUs / 1000);
      ASSERT_EQ(setenv(name, theirs, 1), 0);
      second.run(id, 2, 1, default_config());
      unsetenv(name);
    });
    const std::string said = first.said + "\n" + second.said, variable = name;
    if (variable == "UNJAM_DMA_FLIGHT") {  // of each rank for itself
      EXPECT_EQ(first.code, UNJAM_SUCCESS) << said;
      EXPECT_EQ(second.code, UNJAM_SUCCESS) << said;
      continue;
    }
    EXPECT_TRUE(first.code == UNJAM_ERROR_MISMATCH || second.code == UNJAM_ERROR_MISMATCH) << said;
    EXPECT_NE(first.code, UNJAM_SUCCESS) << said;
    EXPECT_NE(second.code, UNJAM_SUCCESS) << said;
    EXPECT_TRUE(contains(
        said, "rank 0 has " + variable + "=" + mine + "; rank 1 has " + variable + "=" + theirs))
        << said;
  }
}

TEST(Init, SizesThatDifferAreReported) {
  std::string said;
  const auto [first, second] = join_two(2, 0, default_config(), 3, 1, default_config(), said);
  EXPECT_TRUE(first == UNJAM_ERROR_MISMATCH || second == UNJAM_ERROR_MISMATCH) << said;
  EXPECT_NE(first, UNJAM_SUCCESS);
}

// Beside the test programs lies no libunjam_cuda.so. (tests/python/test_no_cuda.py has the other
// things that can be missing.)
TEST(Init, WithoutTheCudaPart) {
  unjamConfig_t cuda = default_config();
  cuda.device = UNJAM_DEVICE_CUDA;
  unjamContext_t contexts[2] = {};
  for (int repeated = 0; repeated < 2; ++repeated) {
    EXPECT_REFUSED(unjamInitAll(contexts, 2, &cuda), UNJAM_ERROR_SYSTEM, "libunjam_cuda.so");
    EXPECT_REFUSED(unjamInitAll(contexts, 2, &cuda), UNJAM_ERROR_SYSTEM, "Build unjam");
    EXPECT_EQ(contexts[0], nullptr);
  }
  // Of ranks that join one by one, the others learn it at once, or find it out themselves.
  std::string said;
  const auto [first, second] = join_two(2, 0, cuda, 2, 1, cuda, said);
  EXPECT_EQ(first, UNJAM_ERROR_SYSTEM) << said;
  EXPECT_NE(second, UNJAM_SUCCESS) << said;
  EXPECT_TRUE(contains(said, "libunjam_cuda.so")) << said;
  // The settings are compared first.
  const auto [host, other] = join_two(2, 0, default_config(), 2, 1, cuda, said);
  EXPECT_EQ(other, UNJAM_ERROR_MISMATCH) << said;
  EXPECT_NE(host, UNJAM_SUCCESS) << said;
  EXPECT_TRUE(contains(said, "UNJAM_DEVICE=host") && contains(said, "UNJAM_DEVICE=cuda")) << said;
}

TEST(Init, ARankThatJoinsTwiceIsRefused) {
  unjamUniqueId_t id;
  ASSERT_OK(unjamGetUniqueId(&id));
  Joining first, again, other;
  join_first(id, 2, 0, default_config(), first, [&] {
    const InitTimeout long_enough(kPatienceUs / 1000);
    again.run(id, 2, 0, default_config());
    other.run(id, 2, 1, default_config());
  });
  EXPECT_EQ(again.code, UNJAM_ERROR_INVALID_USAGE) << again.said;
  EXPECT_TRUE(contains(again.said, "rank 0 has joined this job already")) << again.said;
  // It costs the others nothing.
  EXPECT_EQ(first.code, UNJAM_SUCCESS) << first.said;
  EXPECT_EQ(other.code, UNJAM_SUCCESS) << other.said;
}

// ---- misuse of calls ----

TEST(Misuse, NullHandles) {
  EXPECT_EQ(unjamDestroy(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamAbort(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamContextRank(nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamDeviceSynchronize(nullptr, 0), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamGroupCreate(nullptr, nullptr, 0, nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamGroupDestroy(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamGroupRank(nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamWait(nullptr, 0), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamTest(nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamRequestFree(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(unjamRequestError(nullptr), "");
  EXPECT_EQ(unjamRun(nullptr, nullptr, nullptr, 0, nullptr, nullptr, nullptr),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamDeregister(nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamGetStats(nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  float x = 0;
  EXPECT_EQ(unjamAllReduce(nullptr, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
            UNJAM_ERROR_INVALID_ARGUMENT);
}

TEST(Misuse, BadValues) {
  Job job(2);
  unjamGroup_t g = job.all(0);
  std::vector<float> b(64);
  float* p = b.data();
  constexpr auto kArg = UNJAM_ERROR_INVALID_ARGUMENT;
  EXPECT_REFUSED(unjamAllReduce(g, "k", p, p, 1, static_cast<unjamDataType_t>(12), UNJAM_SUM,
                                nullptr, nullptr),
                 kArg, "type");
  EXPECT_REFUSED(unjamAllReduce(g, "k", p, p, 1, static_cast<unjamDataType_t>(-1), UNJAM_SUM,
                                nullptr, nullptr),
                 kArg, "type");
  EXPECT_REFUSED(
      unjamAllReduce(g, "k", p, p, 1, UNJAM_FLOAT32, static_cast<unjamOp_t>(5), nullptr, nullptr),
      kArg, "operator");
  EXPECT_REFUSED(unjamReduce(g, "k", p, p, 1, UNJAM_FLOAT32, UNJAM_SUM, 2, nullptr, nullptr), kArg,
                 "root");
  EXPECT_REFUSED(unjamBroadcast(g, "k", p, p, 1, UNJAM_FLOAT32, -1, nullptr, nullptr), kArg,
                 "root");
  EXPECT_REFUSED(
      unjamAllReduce(g, "k", p, p, SIZE_MAX / 2, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr), kArg,
      "count");
  // Fits for one rank, not for all together.
  EXPECT_REFUSED(unjamAllGather(g, "k", p, p, (SIZE_MAX >> 1) / 6, UNJAM_FLOAT32, nullptr, nullptr),
                 kArg, "count");
  EXPECT_REFUSED(unjamAllReduce(g, "k", nullptr, p, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
                 kArg, "NULL");
  EXPECT_REFUSED(unjamAllReduce(g, "k", p, nullptr, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
                 kArg, "NULL");
  EXPECT_REFUSED(unjamBroadcast(g, "k", nullptr, p, 1, UNJAM_FLOAT32, 0, nullptr, nullptr), kArg,
                 "NULL");
  EXPECT_REFUSED(unjamReduce(g, "k", p, nullptr, 1, UNJAM_FLOAT32, UNJAM_SUM, 0, nullptr, nullptr),
                 kArg, "NULL");
  EXPECT_REFUSED(unjamAllReduce(g, "k", reinterpret_cast<char*>(p) + 2, p + 32, 1, UNJAM_FLOAT32,
                                UNJAM_SUM, nullptr, nullptr),
                 kArg, "aligned");
  EXPECT_REFUSED(unjamAllReduce(g, "k", p, p + 4, 8, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
                 kArg, "overlap");
  // In place means what it means in NCCL: the whole input in the place of the output is overlap.
  EXPECT_REFUSED(unjamAllGather(job.all(1), "k", p, p, 8, UNJAM_FLOAT32, nullptr, nullptr), kArg,
                 "overlap");
  EXPECT_REFUSED(
      unjamReduceScatter(job.all(1), "k", p, p, 8, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
      kArg, "overlap");
  unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
  o.size = 3;
  EXPECT_REFUSED(unjamAllReduce(g, "k", p, p, 1, UNJAM_FLOAT32, UNJAM_SUM, &o, nullptr), kArg,
                 "size");
  unjamStats_t s{};
  EXPECT_REFUSED(unjamGetStats(job.context(0), &s), kArg, "size");
  unjamCollective_t c = nullptr;
  EXPECT_REFUSED(
      unjamRegister(g, "k", static_cast<unjamKind_t>(10), UNJAM_FLOAT32, UNJAM_SUM, 0, 0, &c), kArg,
      "kind");
  EXPECT_REFUSED(unjamRegisterBroadcast(g, "k", UNJAM_FLOAT32, 2, 0, &c), kArg, "root");
  EXPECT_EQ(unjamRegisterAllGather(g, "k", UNJAM_FLOAT32, 0, nullptr), kArg);
  // Refused calls have submitted nothing: "k" is unused on both ranks and works.
  EXPECT_EQ(stats_of(job.context(0)).submitted, 0u);
  job.run([](Rank& me) {
    float x = 1;
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
    me.wait(q, "k");
    if (x != 2) fail("a wrong sum");
  });
}

TEST(Misuse, OptionsOfCalls) {
  Job job(2);
  int queue = 0;
  void* const stream = &queue;  // is not looked at
  unjamCollective_t registered[2];
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK(unjamRegisterAllReduce(job.all(r), "registered", UNJAM_INT32, UNJAM_SUM, 0,
                                     &registered[r]));
  }
  std::int32_t x = 1;
  unjamRequest_t q = nullptr;
  for (const unjamStreamOrder_t order : {UNJAM_STREAM_ASYNC, UNJAM_STREAM_SYNC}) {
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.stream = stream;
    o.stream_order = order;
    EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &o, &q),
                   UNJAM_ERROR_INVALID_USAGE, "host device has no streams");
    EXPECT_REFUSED(unjamRunWithOptions(registered[0], &x, &x, 1, &o, &q), UNJAM_ERROR_INVALID_USAGE,
                   "UNJAM_STREAM_NONE");
    EXPECT_EQ(q, nullptr);
  }
  for (const int order : {-1, 3}) {
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.stream_order = order;
    EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &o, &q),
                   UNJAM_ERROR_INVALID_ARGUMENT, "unjamStreamOrder_t");
  }
  // `match_text` is what it has room for, and not more.
  const std::string longest(UNJAM_MATCH_TEXT_BYTES - 1, 'x'), too_long(UNJAM_MATCH_TEXT_BYTES, 'x');
  unjamCallOptions_t wordy = UNJAM_CALL_OPTIONS_INITIALIZER;
  wordy.match_text = too_long.c_str();
  EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &wordy, &q),
                 UNJAM_ERROR_INVALID_ARGUMENT, "47 bytes");
  // Options before `match_text` had none: what lies behind them is not read.
  unjamCallOptions_t before = wordy;
  before.size = offsetof(unjamCallOptions_t, match_text);
  unjamRequest_t ws[2] = {}, vs[2] = {};
  std::int32_t v[2] = {1, 2}, w[2] = {3, 4};
  wordy.match_text = longest.c_str();
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK(
        unjamAllReduce(job.all(r), "w", &w[r], &w[r], 1, UNJAM_INT32, UNJAM_SUM, &wordy, &ws[r]));
    ASSERT_OK(unjamAllReduce(job.all(r), "v", &v[r], &v[r], 1, UNJAM_INT32, UNJAM_SUM,
                             r == 0 ? &before : nullptr, &vs[r]));
  }
  for (int r = 0; r < 2; ++r) {
    wait_ok(job.context(r), ws[r], "w");
    wait_ok(job.context(r), vs[r], "v");
    EXPECT_EQ(w[r], 7);
    EXPECT_EQ(v[r], 3);
  }
  // Options of version 0.1.0 had no streams: what lies behind them is not read.
  unjamCallOptions_t shorter = UNJAM_CALL_OPTIONS_INITIALIZER;
  shorter.size = offsetof(unjamCallOptions_t, stream);
  shorter.stream_order = UNJAM_STREAM_SYNC;
  unjamCallOptions_t odd = shorter;
  for (const std::size_t size : {std::size_t{0}, shorter.size - 8, sizeof(odd) + 8}) {
    odd.size = size;
    EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &odd, &q),
                   UNJAM_ERROR_INVALID_ARGUMENT, "unknown size");
  }
  // None of that was a use of the key; and a stream that is not used does no harm.
  unjamCallOptions_t none = UNJAM_CALL_OPTIONS_INITIALIZER;
  none.stream = stream;
  std::int32_t y[2] = {1, 2}, z[2] = {10, 20};
  unjamRequest_t qs[2] = {}, rs[2] = {};
  ASSERT_OK(
      unjamAllReduce(job.all(0), "k", &y[0], &y[0], 1, UNJAM_INT32, UNJAM_SUM, &shorter, &qs[0]));
  EXPECT_REFUSED(unjamStreamWait(qs[0], stream), UNJAM_ERROR_INVALID_USAGE, "unjamWait");
  EXPECT_EQ(unjamStreamWait(nullptr, stream), UNJAM_ERROR_INVALID_ARGUMENT);
  ASSERT_OK(
      unjamAllReduce(job.all(1), "k", &y[1], &y[1], 1, UNJAM_INT32, UNJAM_SUM, &none, &qs[1]));
  ASSERT_OK(unjamRunWithOptions(registered[0], &z[0], &z[0], 1, nullptr, &rs[0]));
  ASSERT_OK(unjamRunWithOptions(registered[1], &z[1], &z[1], 1, &shorter, &rs[1]));
  for (int r = 0; r < 2; ++r) {
    wait_ok(job.context(r), qs[r], "k");
    wait_ok(job.context(r), rs[r], "registered");
    EXPECT_EQ(y[r], 3);
    EXPECT_EQ(z[r], 30);
  }
}

TEST(Misuse, Groups) {
  Job job(4);
  unjamContext_t c = job.context(1);
  unjamGroup_t g = nullptr;
  constexpr auto kArg = UNJAM_ERROR_INVALID_ARGUMENT;
  const int twice[] = {1, 2, 1}, without[] = {0, 2}, outside[] = {1, 4}, negative[] = {1, -1};
  const int fine[] = {2, 1};
  EXPECT_REFUSED(unjamGroupCreate(c, twice, 3, "", &g), kArg, "rank 1 stands twice");
  EXPECT_REFUSED(unjamGroupCreate(c, without, 2, "", &g), kArg, "not in");
  EXPECT_REFUSED(unjamGroupCreate(c, outside, 2, "", &g), kArg, "rank 4");
  EXPECT_REFUSED(unjamGroupCreate(c, negative, 2, "", &g), kArg, "rank -1");
  EXPECT_EQ(unjamGroupCreate(c, fine, 0, "", &g), kArg);
  EXPECT_EQ(unjamGroupCreate(c, fine, 5, "", &g), kArg);
  EXPECT_EQ(unjamGroupCreate(c, fine, 2, "", nullptr), kArg);
  EXPECT_EQ(g, nullptr);
  ASSERT_OK(unjamGroupCreate(c, fine, 2, "", &g));
  ASSERT_OK(unjamGroupDestroy(g));
  // A destroyed group's handle stays good for refusals until its context goes.
  int rank = 0;
  float x = 0;
  EXPECT_EQ(unjamGroupRank(g, &rank), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_EQ(unjamGroupDestroy(g), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_REFUSED(unjamAllReduce(g, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr),
                 UNJAM_ERROR_INVALID_USAGE, "destroyed");
}

// Equal members are told apart by the name, and then by the number of earlier creations.
TEST(Groups, EqualMembersAreDifferentGroups) {
  Job job(2);
  job.run([](Rank& me) {
    unjamGroup_t g[4];
    const int ranks[] = {1, 0};
    // Rank 1 makes them in another order; equal ones keep theirs.
    const int order[2][4] = {{0, 1, 2, 3}, {2, 0, 3, 1}};
    for (const int i : order[me.rank]) {
      UNJAM_CHECK(unjamGroupCreate(me.context, ranks, 2, i < 2 ? "first" : "second", &g[i]));
    }
    std::int32_t x[4] = {1, 10, 100, 1000};
    unjamRequest_t q[4];
    for (int k = 0; k < 4; ++k) {
      const int i = me.rank == 0 ? k : 3 - k;
      UNJAM_CHECK(
          unjamAllReduce(g[i], "k", &x[i], &x[i], 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q[i]));
    }
    for (int i = 0; i < 4; ++i) me.wait(q[i], "k");
    if (x[0] != 2 || x[1] != 20 || x[2] != 200 || x[3] != 2000) fail("groups were mixed up");
    for (unjamGroup_t group : g) UNJAM_CHECK(unjamGroupDestroy(group));
    std::uint64_t h0 = 0, h1 = 0;
    UNJAM_CHECK(unjamKeyHash(me.all, "k", &h0));
    UNJAM_CHECK(unjamKeyHash(me.all, "l", &h1));
    if (h0 == h1) fail("equal hashes");
  });
}

TEST(Misuse, Registration) {
  Job job(2);
  job.run([](Rank& me) {
    unjamCollective_t a = nullptr, b = nullptr;
    UNJAM_CHECK(unjamRegisterAllReduce(me.all, "k", UNJAM_FLOAT32, UNJAM_SUM, 0, &a));
    if (unjamRegisterAllReduce(me.all, "k", UNJAM_FLOAT32, UNJAM_SUM, 0, &b) !=
        UNJAM_ERROR_INVALID_USAGE) {
      fail("a double registration was accepted");
    }
    if (!contains(unjamGetLastError(), "'k'")) fail(unjamGetLastError());
    float x = 1;
    if (unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, nullptr) !=
        UNJAM_ERROR_INVALID_USAGE) {
      fail("a plain call under a registered key was accepted");
    }
    // Counts may differ from run to run.
    std::vector<float> y(100, 1.0f);
    for (std::size_t n = 0; n <= 100; n += 25) {
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(unjamRun(a, y.data(), y.data(), n, nullptr, nullptr, &q));
      me.wait(q, "run");
    }
    if (y[0] != 16 || y[99] != 2) fail("a wrong sum");
    UNJAM_CHECK(unjamDeregister(a));
    // The key is free again: for another registration, and for plain calls.
    UNJAM_CHECK(unjamRegisterBroadcast(me.all, "k", UNJAM_INT32, 1, 0, &b));
    std::int32_t z = me.rank;
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamRun(b, &z, &z, 1, nullptr, nullptr, &q));
    me.wait(q, "broadcast");
    if (z != 1) fail("a wrong broadcast");
    UNJAM_CHECK(unjamDeregister(b));
    UNJAM_CHECK(unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
    me.wait(q, "plain");
    if (x != 2) fail("a wrong sum");
  });
}

// While a peer has not called: what needs completion is refused, and what is local works.
TEST(Misuse, WithInvocationsPending) {
  Job job(2);
  unjamCollective_t c = nullptr;
  float x = 1, y = 2;
  unjamRequest_t q = nullptr;
  ASSERT_OK(unjamRegisterAllReduce(job.all(0), "late", UNJAM_FLOAT32, UNJAM_SUM, 0, &c));
  ASSERT_OK(unjamRun(c, &x, &x, 1, nullptr, nullptr, &q));
  int done = 1;
  EXPECT_OK(unjamTest(q, &done));
  EXPECT_EQ(done, 0);
  EXPECT_STREQ(unjamRequestError(q), "");
  EXPECT_EQ(unjamWait(q, 0), UNJAM_ERROR_TIMEOUT);
  EXPECT_EQ(unjamWait(q, 20000), UNJAM_ERROR_TIMEOUT);
  EXPECT_REFUSED(unjamDeregister(c), UNJAM_ERROR_INVALID_USAGE, "late");
  EXPECT_REFUSED(unjamGroupDestroy(job.all(0)), UNJAM_ERROR_INVALID_USAGE, "late");
  EXPECT_REFUSED(unjamDestroy(job.context(0)), UNJAM_ERROR_INVALID_USAGE, "late");
  EXPECT_EQ(stats_of(job.context(0)).pending, 1u);
  // None of the refusals has changed anything.
  unjamRequest_t other = nullptr;
  ASSERT_OK(
      unjamAllReduce(job.all(1), "late", &y, &y, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &other));
  EXPECT_OK(unjamWait(q, kPatienceUs));
  EXPECT_OK(unjamWait(other, kPatienceUs));
  EXPECT_OK(unjamWait(q, 0)) << "may be called again";
  EXPECT_EQ(x, 3);
  EXPECT_EQ(y, 3);
  EXPECT_OK(unjamRequestFree(q));
  EXPECT_OK(unjamRequestFree(other));
  EXPECT_OK(unjamDeregister(c));
}

// ---- requests ----

TEST(Requests, TestPollsToCompletion) {
  Job job(3);
  job.run([](Rank& me) {
    std::vector<std::int64_t> x(5000, me.rank);
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(unjamAllReduce(me.all, "t", x.data(), x.data(), x.size(), UNJAM_INT64, UNJAM_MAX,
                               nullptr, &q));
    if (!eventually([&] {
          int done = 0;
          UNJAM_CHECK(unjamTest(q, &done));
          return done != 0;
        })) {
      fail("unjamTest never says done: " + explain(me.context));
    }
    UNJAM_CHECK(unjamRequestFree(q));
    for (const auto v : x) {
      if (v != 2) fail("a wrong maximum");
    }
  });
}

TEST(Requests, FreedBeforeCompletionAndNone) {
  Job job(2);
  job.run([](Rank& me) {
    std::vector<std::int32_t> x(20, 1), y(20, 1), z(20, 1);
    unjamRequest_t freed = nullptr, last = nullptr;
    UNJAM_CHECK(unjamAllReduce(me.all, "f", x.data(), x.data(), x.size(), UNJAM_INT32, UNJAM_SUM,
                               nullptr, &freed));
    UNJAM_CHECK(unjamRequestFree(freed));
    UNJAM_CHECK(unjamAllReduce(me.all, "f", y.data(), y.data(), y.size(), UNJAM_INT32, UNJAM_SUM,
                               nullptr, nullptr));
    UNJAM_CHECK(unjamAllReduce(me.all, "f", z.data(), z.data(), z.size(), UNJAM_INT32, UNJAM_SUM,
                               nullptr, &last));
    me.wait(last, "the last of the key");
    // The key's order says that the earlier ones are complete too.
    if (x[19] != 2 || y[19] != 2 || z[19] != 2) fail("a wrong sum");
  });
}

TEST(Requests, SeveralThreadsWaitForOne) {
  Job job(2);
  float x = 1, y = 1;
  unjamRequest_t q = nullptr, other = nullptr;
  ASSERT_OK(unjamAllReduce(job.all(0), "w", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
  std::vector<std::thread> threads;
  std::atomic<int> good{0};
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] { good += unjamWait(q, kPatienceUs) == UNJAM_SUCCESS; });
  }
  sleep_ms(10);
  ASSERT_OK(unjamAllReduce(job.all(1), "w", &y, &y, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &other));
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(good, 4);
  EXPECT_OK(unjamWait(other, kPatienceUs));
  EXPECT_OK(unjamRequestFree(q));
  EXPECT_OK(unjamRequestFree(other));
}

TEST(Requests, OutliveTheContext) {
  unjamContext_t c = nullptr;
  ASSERT_OK(unjamInitAll(&c, 1, nullptr));
  unjamGroup_t g = nullptr;
  ASSERT_OK(unjamGroupCreate(c, nullptr, 0, "", &g));
  float x = 4;
  unjamRequest_t q = nullptr;
  ASSERT_OK(unjamAllReduce(g, "", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
  ASSERT_OK(unjamWait(q, kPatienceUs));
  ASSERT_OK(unjamRequestFree(q));
  EXPECT_OK(unjamDestroy(c));
}

// ---- queues and limits ----

TEST(Limits, TenThousandUsesOfOneKey) {
  constexpr std::size_t kUses = kSanitized ? 1000 : 10000;
  Job job(3);
  job.run([&](Rank& me) {
    std::vector<std::int32_t> x(kUses * 3);
    unjamRequest_t last = nullptr;
    for (std::size_t i = 0; i < kUses; ++i) {
      for (std::size_t k = 0; k < 3; ++k) x[3 * i + k] = static_cast<int>(i) + me.rank;
      UNJAM_CHECK(unjamAllReduce(me.all, "one", &x[3 * i], &x[3 * i], 3, UNJAM_INT32, UNJAM_SUM,
                                 nullptr, i + 1 == kUses ? &last : nullptr));
    }
    me.wait(last, "the last of the key");
    for (std::size_t i = 0; i < x.size(); ++i) {
      if (x[i] != 3 * static_cast<int>(i / 3) + 3)
        fail("a wrong sum at use " + std::to_string(i / 3));
    }
  });
}

// A use of one key depends on the one before, with buffers chained.
TEST(Limits, UsesOfAKeyKeepTheirOrder) {
  Job job(2);
  job.run([](Rank& me) {
    std::int64_t x = 1;
    unjamRequest_t last = nullptr;
    for (int i = 0; i < 40; ++i) {
      if (last != nullptr) UNJAM_CHECK(unjamRequestFree(last));
      UNJAM_CHECK(
          unjamAllReduce(me.all, "chain", &x, &x, 1, UNJAM_INT64, UNJAM_SUM, nullptr, &last));
    }
    me.wait(last, "the end of the chain");
    if (x != std::int64_t{1} << 40) fail("the order was broken: " + std::to_string(x));
  });
}

TEST(Limits, MoreKeysThanAllowedAreRefusedAndNothingIsLost) {
  constexpr std::size_t kAllowed = 16;
  unjamConfig_t config = default_config();
  config.max_active_keys = kAllowed;
  Job job(2, config);
  std::vector<std::int32_t> x(kAllowed + 1, 1), y(kAllowed + 1, 2);
  std::vector<unjamRequest_t> qx(kAllowed + 1), qy(kAllowed + 1);
  const auto call = [&](int r, std::size_t k) {
    std::int32_t* b = r == 0 ? &x[k] : &y[k];
    return unjamAllReduce(job.all(r), ("k" + std::to_string(k)).c_str(), b, b, 1, UNJAM_INT32,
                          UNJAM_SUM, nullptr, r == 0 ? &qx[k] : &qy[k]);
  };
  for (int again = 0; again < 3; ++again) {
    std::fill(x.begin(), x.end(), 1);
    std::fill(y.begin(), y.end(), 2);
    for (std::size_t k = 0; k < kAllowed; ++k) ASSERT_OK(call(0, k));
    EXPECT_REFUSED(call(0, kAllowed), UNJAM_ERROR_RESOURCES, "UNJAM_MAX_ACTIVE_KEYS");
    EXPECT_EQ(unjamLastErrorIsTransient(), 1);
    EXPECT_REFUSED(unjamGroupDestroy(nullptr), UNJAM_ERROR_INVALID_ARGUMENT, "NULL");
    EXPECT_EQ(unjamLastErrorIsTransient(), 0);
    // A further use of an active key is no further key.
    std::int32_t extra = 5, other = 6;
    unjamRequest_t q = nullptr, p = nullptr;
    ASSERT_OK(
        unjamAllReduce(job.all(0), "k3", &extra, &extra, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
    for (std::size_t k = kAllowed; k-- > 0;) ASSERT_OK(call(1, k));
    ASSERT_OK(
        unjamAllReduce(job.all(1), "k3", &other, &other, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &p));
    for (std::size_t k = 0; k < kAllowed; ++k) {
      wait_ok(job.context(0), qx[k], "rank 0");
      wait_ok(job.context(1), qy[k], "rank 1");
      EXPECT_EQ(x[k], 3);
      EXPECT_EQ(y[k], 3);
    }
    wait_ok(job.context(0), q, "extra");
    wait_ok(job.context(1), p, "extra");
    EXPECT_EQ(extra, 11);
    // Room again: the refused one, by its first use.
    ASSERT_OK(call(0, kAllowed));
    ASSERT_OK(call(1, kAllowed));
    wait_ok(job.context(0), qx[kAllowed], "rank 0");
    wait_ok(job.context(1), qy[kAllowed], "rank 1");
    EXPECT_EQ(x[kAllowed], 3);
  }
}

// What fails at once needs no room: where it is too much, and wrong too, that it is wrong counts.
TEST(Limits, WhatDisagreesIsNotRefusedForWantOfRoom) {
  unjamConfig_t config = default_config();
  config.max_active_keys = 2;
  Job job(2, config);
  std::vector<std::int32_t> x(16, 1), y(16, 2);
  const auto call = [&](int r, const std::string& key, std::size_t count, unjamRequest_t* q) {
    std::int32_t* b = (r == 0 ? x : y).data() + (key == "wrong" ? 0 : key == "a" ? 8 : 12);
    return unjamAllReduce(job.all(r), key.c_str(), b, b, count, UNJAM_INT32, UNJAM_SUM, nullptr, q);
  };
  unjamRequest_t wrong[2] = {}, a[2] = {}, b[2] = {};
  ASSERT_OK(call(1, "wrong", 4, &wrong[1]));
  ASSERT_OK(call(0, "a", 4, &a[0]));
  ASSERT_OK(call(0, "b", 4, &b[0]));
  ASSERT_OK(call(0, "wrong", 8, &wrong[0]));
  for (int r = 0; r < 2; ++r) {
    EXPECT_EQ(unjamWait(wrong[r], kPatienceUs), UNJAM_ERROR_MISMATCH);
    unjamRequestFree(wrong[r]);
  }
  ASSERT_OK(call(1, "a", 4, &a[1]));
  ASSERT_OK(call(1, "b", 4, &b[1]));
  for (int r = 0; r < 2; ++r) {
    wait_ok(job.context(r), a[r], "a");
    wait_ok(job.context(r), b[r], "b");
  }
}

// More keys over time than may be active at once: idle ones give their connectors back.
TEST(Limits, ManyKeysOneAfterTheOther) {
  unjamConfig_t config = default_config();
  config.max_active_keys = 4;
  Job job(3, config);
  job.run([](Rank& me) {
    std::vector<unjamRequest_t> open;
    std::vector<std::int32_t> x(600, 1);
    for (std::size_t k = 0; k < x.size(); ++k) {
      if (open.size() == 4) {
        me.wait(open.front(), "an older one");
        open.erase(open.begin());
      }
      open.emplace_back();
      UNJAM_CHECK(unjamAllReduce(me.all, ("k" + std::to_string(k)).c_str(), &x[k], &x[k], 1,
                                 UNJAM_INT32, UNJAM_SUM, nullptr, &open.back()));
    }
    for (const unjamRequest_t q : open) me.wait(q, "the last ones");
    if (std::count(x.begin(), x.end(), 3) != 600) fail("a wrong sum");
  });
}

TEST(Limits, ZeroCounts) {
  Job job(3);
  job.run([](Rank& me) {
    for (int kind = 0; kind < kNumKinds; ++kind) {
      Spec s;
      s.kind = static_cast<unjamKind_t>(kind);
      s.count = 0;
      unjamRequest_t q = nullptr;
      Exchange e(s, me.ranks);  // NULL buffers for even seeds
      UNJAM_CHECK(e.submit(me.rank, me.all, "zero", nullptr, &q));
      me.wait(q, "zero");
    }
  });
}

// What is complete is not late, though nobody has asked for it.
TEST(Limits, NoTimeoutOfWhatIsComplete) {
  unjamConfig_t config = default_config();
  config.timeout_ms = 4000;
  config.stall_ms = 50;
  float x[2] = {1, 1}, unmet = 1;
  unjamRequest_t q[2] = {};
  std::atomic<unjamResult_t> late{UNJAM_SUCCESS};
  Job job(2, config);
  const auto call = [&](std::size_t r) {
    return unjamAllReduce(job.all(static_cast<int>(r)), "k", &x[r], &x[r], 1, UNJAM_FLOAT32,
                          UNJAM_SUM, nullptr, &q[r]);
  };
  ASSERT_OK(call(0));
  ASSERT_OK(call(1));
  // A later call, which rank 1 never makes. When that is late, the one above would be.
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  options.callback = [](unjamResult_t result, void* user) {
    *static_cast<std::atomic<unjamResult_t>*>(user) = result;
  };
  options.user = &late;
  ASSERT_OK(unjamAllReduce(job.all(0), "unmet", &unmet, &unmet, 1, UNJAM_FLOAT32, UNJAM_SUM,
                           &options, nullptr));
  // By the callback: waiting for a request looks at what else is complete.
  EXPECT_TRUE(eventually([&] { return late != UNJAM_SUCCESS; })) << explain(job.context(0));
  EXPECT_EQ(late, UNJAM_ERROR_TIMEOUT);
  explain(job.context(0));  // returns when the watch has been through all calls
  for (int r = 0; r < 2; ++r) {
    char text[1000] = "";
    unjamResult_t error = UNJAM_SUCCESS;
    ASSERT_OK(unjamGetAsyncError(job.context(r), &error, text, sizeof(text)));
    if (error != UNJAM_SUCCESS) {
      EXPECT_TRUE(contains(text, "key 'unmet'")) << "a complete call was ended: " << text;
    }
    wait_ok(job.context(r), q[r], "k");
  }
  // The key of a call that was ended takes no other one.
  ASSERT_OK(call(0));
  ASSERT_OK(call(1));
  for (int r = 0; r < 2; ++r) wait_ok(job.context(r), q[r], "k again");
}

// ---- callbacks ----

struct Chain {
  unjamGroup_t group = nullptr;
  std::int64_t value = 1;
  int left = 0;
  std::atomic<int> calls{0};
  std::atomic<unjamResult_t> first_error{UNJAM_SUCCESS};
  std::atomic<bool> finished{false};

  unjamResult_t submit() {
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.callback = &Chain::done;
    o.user = this;
    return unjamAllReduce(group, ("link " + std::to_string(left % 7)).c_str(), &value, &value, 1,
                          UNJAM_INT64, UNJAM_MAX, &o, nullptr);
  }
  static void done(unjamResult_t result, void* user) {
    auto* c = static_cast<Chain*>(user);
    ++c->calls;
    c->value += 1;  // the results are ours to read and write
    if (result == UNJAM_SUCCESS && --c->left > 0) result = c->submit();
    unjamResult_t none = UNJAM_SUCCESS;
    if (result != UNJAM_SUCCESS) c->first_error.compare_exchange_strong(none, result);
    if (result != UNJAM_SUCCESS || c->left == 0) c->finished = true;
  }
};

TEST(Callbacks, MaySubmit) {
  Job job(4);
  job.run([](Rank& me) {
    Chain c;
    c.group = me.all;
    c.left = 100;
    UNJAM_CHECK(c.submit());
    if (!eventually([&] { return c.finished.load(); })) fail("stuck: " + explain(me.context));
    if (c.first_error != UNJAM_SUCCESS) fail("an error in the chain: " + code_text(c.first_error));
    if (c.calls != 100 || c.value != 101) fail("a wrong end: " + std::to_string(c.value));
  });
}

TEST(Callbacks, ComeOnceForEveryCallWithItsResult) {
  Job job(2);
  constexpr std::size_t kCalls = 300;
  std::vector<std::atomic<int>> calls(2 * kCalls);
  job.run([&](Rank& me) {
    struct User {
      std::atomic<int>* calls;
      const std::int32_t* value;
    };
    std::vector<std::int32_t> x(kCalls, me.rank + 1);
    std::vector<User> users(kCalls);
    std::vector<unjamRequest_t> requests(kCalls);
    for (std::size_t i = 0; i < kCalls; ++i) {
      const std::size_t k = me.rank == 0 ? i : kCalls - 1 - i;
      users[k] = {&calls[static_cast<std::size_t>(me.rank) * kCalls + k], &x[k]};
      unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
      o.user = &users[k];
      o.callback = [](unjamResult_t result, void* user) {
        auto* u = static_cast<User*>(user);
        *u->calls += result == UNJAM_SUCCESS && *u->value == 3 ? 1 : 1000;
      };
      UNJAM_CHECK(unjamAllReduce(me.all, ("k" + std::to_string(k)).c_str(), &x[k], &x[k], 1,
                                 UNJAM_INT32, UNJAM_SUM, &o, &requests[k]));
    }
    for (const unjamRequest_t q : requests) me.wait(q, "with a callback");
    if (!eventually([&] {
          return std::all_of(users.begin(), users.end(),
                             [](const User& u) { return *u.calls != 0; });
        })) {
      fail("callbacks are missing");
    }
  });
  for (const auto& c : calls) EXPECT_EQ(c, 1);
}

TEST(Callbacks, OfAnAbortedCall) {
  Job job(2);
  std::int32_t x = 1;
  std::atomic<int> result{-1};
  unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
  o.user = &result;
  o.callback = [](unjamResult_t r, void* user) { *static_cast<std::atomic<int>*>(user) = r; };
  ASSERT_OK(unjamAllReduce(job.all(0), "never", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &o, nullptr));
  ASSERT_OK(unjamAbort(job.context(0)));
  EXPECT_TRUE(eventually([&] { return result != -1; }));
  EXPECT_EQ(result, UNJAM_ERROR_ABORTED);
}

// unjamOnComplete: for a pending request, for a complete one, and only once.
TEST(Callbacks, GivenLater) {
  Job job(2);
  std::int32_t x[2] = {1, 2};
  std::atomic<int> result[2] = {-1, -1};
  unjamRequest_t q[2] = {};
  const unjamCallback_t note = [](unjamResult_t r, void* user) {
    *static_cast<std::atomic<int>*>(user) = r;
  };
  const auto call = [&](int rank) {
    return unjamAllReduce(job.all(rank), "k", &x[rank], &x[rank], 1, UNJAM_INT32, UNJAM_SUM,
                          nullptr, &q[rank]);
  };
  ASSERT_OK(call(0));
  EXPECT_OK(unjamOnComplete(q[0], note, &result[0]));
  EXPECT_EQ(unjamOnComplete(q[0], note, &result[0]), UNJAM_ERROR_INVALID_USAGE) << "it has one";
  EXPECT_EQ(unjamOnComplete(q[0], nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamOnComplete(nullptr, note, &result[0]), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_OK(unjamRequestFree(q[0]));  // the callback comes all the same
  ASSERT_OK(call(1));
  ASSERT_OK(unjamWait(q[1], kPatienceUs));
  EXPECT_TRUE(eventually([&] { return result[0] != -1; }));
  EXPECT_OK(unjamOnComplete(q[1], note, &result[1]));
  EXPECT_EQ(result[1], UNJAM_SUCCESS) << "at once";
  EXPECT_EQ(result[0], UNJAM_SUCCESS);
  EXPECT_EQ(x[0], 3);
  EXPECT_OK(unjamRequestFree(q[1]));
}

// Former names work. (A compiler warns of them.)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"
TEST(FormerNames, AreTheSameFieldsAndFunctions) {
  unjamConfig_t config = UNJAM_CONFIG_INITIALIZER;
  EXPECT_EQ(config.guaranteed_slots + config.guaranteed_slot_bytes + config.pool_slots, 0u);
  config.escape_slots = 3;
  config.escape_slot_bytes = 4096;
  config.borrow_slots = 7;
  EXPECT_EQ(config.guaranteed_slots, 3u);
  EXPECT_EQ(config.guaranteed_slot_bytes, 4096u);
  EXPECT_EQ(config.pool_slots, 7u);
  unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
  EXPECT_EQ(options.match_text, nullptr);
  options.alike = "bool";
  EXPECT_STREQ(options.match_text, "bool");
  EXPECT_EQ(options.algorithm, nullptr);
  EXPECT_EQ(unjamOnDone(nullptr, nullptr, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
}
#pragma GCC diagnostic pop

TEST(Callbacks, CannotDestroyTheirContext) {
  unjamContext_t c = nullptr;
  ASSERT_OK(unjamInitAll(&c, 1, nullptr));
  unjamGroup_t g = nullptr;
  ASSERT_OK(unjamGroupCreate(c, nullptr, 0, "", &g));
  struct User {
    unjamContext_t context;
    std::atomic<int> result;
  } user = {c, {-1}};
  unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
  o.user = &user;
  o.callback = [](unjamResult_t, void* u) {
    auto* me = static_cast<User*>(u);
    me->result = unjamDestroy(me->context);
  };
  float x = 0;
  ASSERT_OK(unjamAllReduce(g, "", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, &o, nullptr));
  EXPECT_TRUE(eventually([&] { return user.result != -1; }));
  EXPECT_EQ(user.result, UNJAM_ERROR_INVALID_USAGE);
  EXPECT_OK(unjamDestroy(c));
}

// ---- priorities ----

// Many large collectives, then a small urgent one: how many were complete before that, on the rank
// with the fewest.
constexpr std::size_t kLarge = 24;
std::size_t before_the_urgent_one() {
  unjamConfig_t config = default_config();
  config.order = UNJAM_ORDER_PRIORITY;
  Job job(2, config);
  constexpr std::size_t kFloats = kSanitized ? 100000 : 1000000;
  std::vector<std::size_t> after(2, 0);
  job.run([&](Rank& me) {
    struct User {
      std::atomic<std::size_t> large{0}, at_urgent{SIZE_MAX};
    } user;
    std::vector<std::vector<float>> x(kLarge, std::vector<float>(kFloats, 1.0f));
    std::vector<unjamRequest_t> requests(kLarge + 1);
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.user = &user;
    o.callback = [](unjamResult_t, void* u) { ++static_cast<User*>(u)->large; };
    for (std::size_t k = 0; k < kLarge; ++k) {
      UNJAM_CHECK(unjamAllReduce(me.all, ("large " + std::to_string(k)).c_str(), x[k].data(),
                                 x[k].data(), kFloats, UNJAM_FLOAT32, UNJAM_SUM, &o, &requests[k]));
    }
    o.priority = 10;
    o.callback = [](unjamResult_t, void* u) {
      auto* me = static_cast<User*>(u);
      me->at_urgent = me->large.load();
    };
    float y = 1;
    UNJAM_CHECK(unjamAllReduce(me.all, "urgent", &y, &y, 1, UNJAM_FLOAT32, UNJAM_SUM, &o,
                               &requests[kLarge]));
    for (const unjamRequest_t q : requests) me.wait(q, "large or urgent");
    if (!eventually([&] { return user.large == kLarge && user.at_urgent != SIZE_MAX; })) {
      fail("callbacks are missing");
    }
    after[static_cast<std::size_t>(me.rank)] = user.at_urgent;
    if (y != 2 || x[kLarge - 1][kFloats - 1] != 2) fail("a wrong sum");
  });
  std::printf("  %zu and %zu of %zu large ones were complete before the urgent one\n", after[0],
              after[1], kLarge);
  return std::min(after[0], after[1]);
}

TEST(Priority, ASmallUrgentOneOvertakes) {
  std::size_t before = before_the_urgent_one();
  if (kSanitized) return;
  // Ranks that were kept from their cores while they submitted may have had all done before.
  for (int i = 1; i < 3 && before == kLarge && !HasFailure(); ++i) before = before_the_urgent_one();
  EXPECT_LT(before, kLarge);
}

// ---- ranks that disagree, leave, abort ----

struct OneCall {
  unjamKind_t kind = UNJAM_ALL_REDUCE;
  std::size_t count = 10;
  unjamDataType_t dtype = UNJAM_INT32;
  unjamOp_t op = UNJAM_SUM;
  int root = 0;
  const char* match_text = nullptr;
  const char* algorithm = nullptr;
};

// Ranks 0 and 1 call `a`, rank 2 calls `b`: MISMATCH, naming both and who called what. Where a
// rank's part needs nothing from the rank that differs (one_sided: it only sends, or receives from
// a root that agrees) its invocation may have succeeded before anybody could know; then it learns
// of the disagreement by its asynchronous error and by the key.
void disagreement(const OneCall& a, const OneCall& b, const std::string& in_a,
                  const std::string& in_b, bool one_sided = false) {
  std::atomic<int> mismatches{0};
  SCOPED_TRACE(in_a + " against " + in_b);
  Job job(3, quick_diagnosis());
  job.run([&](Rank& me) {
    const OneCall& mine = me.rank == 2 ? b : a;
    std::vector<std::uint64_t> in(100), out(100);
    Spec s;
    unjamRequest_t q = nullptr;
    const auto* from = in.data();
    auto* to = out.data();
    unjamCallOptions_t options = UNJAM_CALL_OPTIONS_INITIALIZER;
    options.match_text = mine.match_text;
    options.algorithm = mine.algorithm;
    unjamResult_t code = UNJAM_ERROR_INTERNAL;
    switch (mine.kind) {
      case UNJAM_ALL_REDUCE:
        code =
            unjamAllReduce(me.all, "odd", from, to, mine.count, mine.dtype, mine.op, &options, &q);
        break;
      case UNJAM_REDUCE:
        code = unjamReduce(me.all, "odd", from, to, mine.count, mine.dtype, mine.op, mine.root,
                           &options, &q);
        break;
      case UNJAM_BROADCAST:
        code = unjamBroadcast(me.all, "odd", from, to, mine.count, mine.dtype, mine.root, &options,
                              &q);
        break;
      default:
        code = unjamAllGather(me.all, "odd", from, to, mine.count, mine.dtype, &options, &q);
        break;
    }
    check(code, "the call");
    std::string m;
    const unjamResult_t result = one_sided ? unjamWait(q, kPatienceUs) : UNJAM_ERROR_MISMATCH;
    if (result == UNJAM_SUCCESS) {
      UNJAM_CHECK(unjamRequestFree(q));
    } else {
      m = wait_error(me.context, q, UNJAM_ERROR_MISMATCH, "a disagreement");
      ++mismatches;
    }
    unjamResult_t async = UNJAM_SUCCESS;
    char text[2000];
    if (!eventually([&] {
          UNJAM_CHECK(unjamGetAsyncError(me.context, &async, text, sizeof(text)));
          return async != UNJAM_SUCCESS;
        })) {
      fail("no asynchronous error");
    }
    if (m.empty()) m = text;
    if (async != UNJAM_ERROR_MISMATCH || m != text) fail("a wrong asynchronous error");
    // Who called what: of those who had called by then, so of rank 2 and of one of the others.
    const auto said = [&](const std::string& who, const std::string& what) {
      const std::size_t at = m.find(who + " called ");
      return at != m.npos && contains(m.substr(at, m.find_first_of(";.", at) - at), what);
    };
    if (!said("rank 2", in_b) ||
        (!said("ranks 0, 1", in_a) && !said("rank 0", in_a) && !said("rank 1", in_a)) ||
        !contains(m, "'odd'")) {
      fail("the message does not say who called what: " + m);
    }
    // The key is out of use; others are not.
    std::int32_t x = 1;
    if (unjamAllReduce(me.all, "odd", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, nullptr) !=
        UNJAM_ERROR_MISMATCH) {
      fail("a key whose ranks disagree was accepted again");
    }
    UNJAM_CHECK(unjamAllReduce(me.all, "even", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
    me.wait(q, "another key");
    if (x != 3) fail("a wrong sum");
  });
  EXPECT_GE(mismatches, one_sided ? 1 : 3);
}

TEST(Mismatch, EverythingThatRanksMustAgreeOn) {
  OneCall a, b;
  b.count = 11;
  disagreement(a, b, "count=10", "count=11");
  b = a;
  b.dtype = UNJAM_FLOAT32;
  disagreement(a, b, "int32", "float32");
  b = a;
  b.op = UNJAM_MAX;
  disagreement(a, b, "sum", "max");
  b = a;
  b.match_text = "bool";
  disagreement(a, b, "all_reduce(count=10, int32, sum)",
               "all_reduce(count=10, int32, sum) as 'bool'");
  // The texts' first eight bytes are alike, and so are the last.
  a.match_text = "the same, 1, the same";
  b.match_text = "the same, 2, the same";
  disagreement(a, b, "as 'the same, 1, the same'", "as 'the same, 2, the same'");
  a.match_text = b.match_text = nullptr;
  b = a;
  b.algorithm = "ring";
  disagreement(a, b, "all_reduce(count=10, int32, sum)",
               "all_reduce(count=10, int32, sum, algorithm=ring)");
  b = a;
  b.kind = UNJAM_BROADCAST;
  disagreement(a, b, "all_reduce", "broadcast", true);
  a.kind = b.kind = UNJAM_REDUCE;
  a.root = 1;
  b.root = 2;
  disagreement(a, b, "root=1", "root=2", true);
  a.kind = UNJAM_BROADCAST;
  b.kind = UNJAM_ALL_GATHER;
  disagreement(a, b, "broadcast", "all_gather", true);
}

// Two ranks have disagreed, and know it, when the third calls as one of them did: it must hear of
// it too, also where its own part (sending to a root) needs nobody's answer.
TEST(Mismatch, ARankThatCallsAfterTheOthersHaveFailed) {
  Job job(3, quick_diagnosis());
  std::vector<std::int32_t> x(30, 1), y(30);
  std::vector<unjamRequest_t> q(3);
  const auto call = [&](int r, int root) {
    const std::size_t at = 10 * static_cast<std::size_t>(r);
    return unjamReduce(job.all(r), "odd", &x[at], &y[at], 10, UNJAM_INT32, UNJAM_SUM, root, nullptr,
                       &q[static_cast<std::size_t>(r)]);
  };
  ASSERT_OK(call(1, 1));
  ASSERT_OK(call(2, 2));
  wait_error(job.context(1), q[1], UNJAM_ERROR_MISMATCH, "rank 1");
  wait_error(job.context(2), q[2], UNJAM_ERROR_MISMATCH, "rank 2");
  if (call(0, 1) == UNJAM_SUCCESS) {
    const unjamResult_t code = unjamWait(q[0], kPatienceUs);
    EXPECT_TRUE(code == UNJAM_SUCCESS || code == UNJAM_ERROR_MISMATCH) << code_text(code);
    unjamRequestFree(q[0]);
  }
  unjamResult_t async = UNJAM_SUCCESS;
  eventually([&] {
    EXPECT_OK(unjamGetAsyncError(job.context(0), &async, nullptr, 0));
    return async != UNJAM_SUCCESS;
  });
  EXPECT_EQ(async, UNJAM_ERROR_MISMATCH) << "rank 0 is never told that ranks 1 and 2 disagree";
}

// The same text on all ranks: ranks ascend in it, whatever the group's order and whoever found out.
TEST(Mismatch, RanksAreNamedInAscendingOrder) {
  Job job(4, quick_diagnosis());
  const int backwards[] = {3, 2, 1, 0};
  std::vector<unjamGroup_t> groups(4);
  std::vector<std::vector<std::int32_t>> x(4, std::vector<std::int32_t>(11, 1));
  std::vector<unjamRequest_t> q(4);
  for (const int r : {2, 0, 3, 1}) {  // the last finds out
    const auto at = static_cast<std::size_t>(r);
    ASSERT_OK(unjamGroupCreate(job.context(r), backwards, 4, "g", &groups[at]));
    ASSERT_OK(unjamAllReduce(groups[at], "odd", x[at].data(), x[at].data(), r == 1 ? 11 : 10,
                             UNJAM_INT32, UNJAM_SUM, nullptr, &q[at]));
  }
  for (int r = 0; r < 4; ++r) {
    const auto at = static_cast<std::size_t>(r);
    const std::string m = wait_error(job.context(r), q[at], UNJAM_ERROR_MISMATCH, "counts differ");
    EXPECT_TRUE(contains(m, "ranks 0, 2, 3 called ")) << m;
    EXPECT_OK(unjamGroupDestroy(groups[at]));
  }
}

// Large ones, where data flow before anybody looks.
TEST(Mismatch, LargeCountsAreNeverReadAsData) {
  Job job(3, quick_diagnosis());
  job.run([&](Rank& me) {
    const std::size_t n = me.rank == 1 ? 200000 : 200001;
    std::vector<float> x(n, 1.0f);
    unjamRequest_t q = nullptr;
    UNJAM_CHECK(
        unjamAllReduce(me.all, "l", x.data(), x.data(), n, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
    const std::string m = wait_error(me.context, q, UNJAM_ERROR_MISMATCH, "counts differ");
    if (!contains(m, "200001") || !contains(m, "200000")) fail(m);
  });
}

// The second use of a key differs, the first was right.
TEST(Mismatch, InALaterUse) {
  Job job(2, quick_diagnosis());
  job.run([&](Rank& me) {
    std::vector<std::int32_t> x(12, 1);
    unjamRequest_t q[3] = {};
    for (std::size_t i = 0; i < 3; ++i) {
      const std::size_t n = i == 1 && me.rank == 1 ? 4 : 2;
      const unjamResult_t code = unjamAllReduce(me.all, "k", &x[4 * i], &x[4 * i], n, UNJAM_INT32,
                                                UNJAM_SUM, nullptr, &q[i]);
      // The disagreement may be known before the third call.
      if (i < 2 || code != UNJAM_ERROR_MISMATCH) check(code, "the call");
    }
    me.wait(q[0], "the first use");
    const std::string m = wait_error(me.context, q[1], UNJAM_ERROR_MISMATCH, "the second use");
    if (!contains(m, "use 2")) fail(m);
    if (q[2] != nullptr) {
      wait_error(me.context, q[2], UNJAM_ERROR_MISMATCH, "the third use, which cannot start");
    }
    if (x[0] != 2 || x[1] != 2) fail("the first use went wrong");
  });
}

// Its part was over, and it is gone: what it left behind tells what it had called.
TEST(Mismatch, WithARankThatHasLeft) {
  Job job(2, quick_diagnosis());
  std::int32_t x[2] = {1, 2};
  float y[2] = {};
  unjamRequest_t q = nullptr;
  ASSERT_OK(unjamBroadcast(job.all(0), "k", x, x, 2, UNJAM_INT32, 0, nullptr, &q));
  wait_ok(job.context(0), q, "the root's part");
  ASSERT_OK(job.destroy(0));
  ASSERT_OK(unjamBroadcast(job.all(1), "k", y, y, 2, UNJAM_FLOAT32, 0, nullptr, &q));
  const std::string m = wait_error(job.context(1), q, UNJAM_ERROR_MISMATCH, "the other rank");
  EXPECT_TRUE(contains(m, "rank 0 called broadcast(count=2, int32, root=0)")) << m;
  EXPECT_TRUE(contains(m, "rank 1 called broadcast(count=2, float32, root=0)")) << m;
}

// Calls that never meet: the message says what the other side has called instead.
TEST(Peers, ASendUnderAnotherKeyThanTheReceive) {
  unjamConfig_t config = quick_diagnosis();
  config.timeout_ms = 3000;
  Job job(2, config);
  std::int32_t x[3] = {1, 2, 3}, y[3] = {};
  unjamRequest_t sent = nullptr, q = nullptr;
  ASSERT_OK(unjamSend(job.all(0), "tag 1", x, 3, UNJAM_INT32, 1, nullptr, &sent));
  wait_ok(job.context(0), sent, "a small send waits for nobody");
  ASSERT_OK(unjamRecv(job.all(1), "tag 2", y, 3, UNJAM_INT32, 0, nullptr, &q));
  const std::string instead =
      "rank 0 has called send_recv(count=3, int32, source=0, destination=1), key 'tag 1'";
  EXPECT_TRUE(contains(explain(job.context(1)), instead)) << explain(job.context(1));
  const std::string m = wait_error(job.context(1), q, UNJAM_ERROR_TIMEOUT, "the receive");
  EXPECT_TRUE(contains(m, "rank 0 has not called it; rank 1 has called it; " + instead)) << m;
  EXPECT_TRUE(contains(m, "which rank 1 has not")) << m;
  // It is there to be taken.
  ASSERT_OK(unjamRecv(job.all(1), "tag 1", y, 3, UNJAM_INT32, 0, nullptr, &q));
  wait_ok(job.context(1), q, "under the right key");
  EXPECT_EQ(y[2], 3);
}

TEST(Peers, ARankThatLeavesWithoutCalling) {
  Job job(3, quick_diagnosis());
  const int pair[] = {0, 2};
  unjamGroup_t g0 = nullptr, g2 = nullptr;
  ASSERT_OK(unjamGroupCreate(job.context(0), pair, 2, "pair", &g0));
  ASSERT_OK(unjamGroupCreate(job.context(2), pair, 2, "pair", &g2));
  std::int32_t x = 1, y = 1, z = 1;
  unjamRequest_t qx = nullptr, qy = nullptr;
  ASSERT_OK(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &qx));
  ASSERT_OK(unjamAllReduce(job.all(2), "k", &y, &y, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &qy));
  ASSERT_OK(job.destroy(1));
  EXPECT_TRUE(contains(wait_error(job.context(0), qx, UNJAM_ERROR_PEER, "rank 0"), "rank 1"));
  EXPECT_TRUE(contains(wait_error(job.context(2), qy, UNJAM_ERROR_PEER, "rank 2"), "rank 1"));
  // Groups without it go on.
  ASSERT_OK(unjamAllReduce(g0, "k", &x, &x, 1, UNJAM_INT32, UNJAM_MAX, nullptr, &qx));
  ASSERT_OK(unjamAllReduce(g2, "k", &z, &z, 1, UNJAM_INT32, UNJAM_MAX, nullptr, &qy));
  wait_ok(job.context(0), qx, "pair");
  wait_ok(job.context(2), qy, "pair");
}

// A rank that has done its part may leave before the others are through.
TEST(Peers, ARankThatLeavesAfterItsPart) {
  for (int i = 0; i < 20; ++i) {
    Job job(3, quick_diagnosis());
    job.run([&](Rank& me) {
      std::vector<float> x(50000, 1.0f);
      if (me.rank == 2) sleep_ms(i % 3);
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(
          unjamBroadcast(me.all, "b", x.data(), x.data(), x.size(), UNJAM_FLOAT32, 0, nullptr, &q));
      me.wait(q, "broadcast");
      if (me.rank == 0 && me.job->destroy(0) != UNJAM_SUCCESS) fail(unjamGetLastError());
    });
    if (HasFailure()) return;
  }
}

TEST(Peers, AbortFromAnotherThreadEndsAWait) {
  Job job(3);
  std::vector<std::int32_t> x(3, 1);
  unjamRequest_t q0 = nullptr, q1 = nullptr;
  ASSERT_OK(unjamAllReduce(job.all(0), "k", &x[0], &x[0], 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q0));
  ASSERT_OK(unjamAllReduce(job.all(1), "k", &x[1], &x[1], 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q1));
  std::thread waiter([&] {
    EXPECT_EQ(unjamWait(q0, kPatienceUs), UNJAM_ERROR_ABORTED);
    EXPECT_STRNE(unjamRequestError(q0), "");
  });
  sleep_ms(20);
  ASSERT_OK(unjamAbort(job.context(0)));
  waiter.join();
  EXPECT_TRUE(contains(wait_error(job.context(1), q1, UNJAM_ERROR_PEER, "rank 1"), "rank 0"));
  EXPECT_OK(unjamAbort(job.context(0))) << "twice is once";
  // Refused from now on, with the cause.
  EXPECT_EQ(
      unjamAllReduce(job.all(0), "l", &x[0], &x[0], 1, UNJAM_INT32, UNJAM_SUM, nullptr, nullptr),
      UNJAM_ERROR_ABORTED);
  EXPECT_REFUSED(
      unjamAllReduce(job.all(2), "l", &x[2], &x[2], 1, UNJAM_INT32, UNJAM_SUM, nullptr, nullptr),
      UNJAM_ERROR_PEER, "rank 0");
  unjamResult_t async = UNJAM_SUCCESS;
  EXPECT_OK(unjamGetAsyncError(job.context(0), &async, nullptr, 0));
  EXPECT_EQ(async, UNJAM_ERROR_ABORTED);
  // Groups without the aborted rank go on.
  const int pair[] = {1, 2};
  unjamGroup_t g1 = nullptr, g2 = nullptr;
  ASSERT_OK(unjamGroupCreate(job.context(1), pair, 2, "", &g1));
  ASSERT_OK(unjamGroupCreate(job.context(2), pair, 2, "", &g2));
  unjamRequest_t q2 = nullptr;
  ASSERT_OK(unjamAllReduce(g1, "k", &x[1], &x[1], 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q1));
  ASSERT_OK(unjamAllReduce(g2, "k", &x[2], &x[2], 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q2));
  wait_ok(job.context(1), q1, "pair");
  wait_ok(job.context(2), q2, "pair");
  EXPECT_OK(unjamRequestFree(q0));
}

// A group that is made after a member has gone cannot work, and says so instead of waiting.
TEST(Peers, AGroupMadeWithARankThatAborted) {
  Job job(2, quick_diagnosis());
  ASSERT_OK(unjamAbort(job.context(1)));
  unjamGroup_t g = nullptr;
  std::int32_t x = 1;
  unjamRequest_t q = nullptr;
  const unjamResult_t made = unjamGroupCreate(job.context(0), nullptr, 0, "late", &g);
  if (made == UNJAM_ERROR_PEER) return;
  ASSERT_OK(made);
  const unjamResult_t called =
      unjamAllReduce(g, "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q);
  if (called == UNJAM_ERROR_PEER) return;
  ASSERT_OK(called);
  EXPECT_EQ(unjamWait(q, 5 * kPatienceUs / 60), UNJAM_ERROR_PEER)
      << "the peer was aborted before the group was made";
  unjamRequestFree(q);
  unjamAbort(job.context(0));
}

// Abort in the midst of traffic, at many moments.
TEST(Peers, AbortAtAnyMoment) {
  for (int i = 0; i < (kSanitized ? 5 : 40); ++i) {
    Job job(4);
    std::atomic<bool> go{false};
    std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
    for (int r = 0; r < 4; ++r) {
      bodies.emplace_back(r, [&](Rank& me) {
        std::vector<float> x(30000, 1.0f);
        std::vector<unjamRequest_t> q;
        go = true;
        for (int k = 0; k < 30; ++k) {
          q.emplace_back();
          const unjamResult_t code =
              unjamAllReduce(me.all, ("k" + std::to_string(k)).c_str(), x.data(), x.data(),
                             x.size(), UNJAM_FLOAT32, UNJAM_MAX, nullptr, &q.back());
          if (code != UNJAM_SUCCESS) {
            q.pop_back();
            if (code != UNJAM_ERROR_ABORTED && code != UNJAM_ERROR_PEER) fail(code_text(code));
          }
          // One after the other: the buffer is shared.
          if (!q.empty() && code == UNJAM_SUCCESS) {
            const unjamResult_t w = unjamWait(q.back(), kPatienceUs);
            if (w != UNJAM_SUCCESS && w != UNJAM_ERROR_ABORTED && w != UNJAM_ERROR_PEER) {
              fail(code_text(w) + explain(me.context));
            }
          }
        }
        for (const unjamRequest_t request : q) unjamRequestFree(request);
      });
    }
    bodies.emplace_back(i % 4, [&](Rank& me) {
      while (!go) std::this_thread::yield();
      std::this_thread::sleep_for(std::chrono::microseconds(i * 100));
      UNJAM_CHECK(unjamAbort(me.context));
    });
    job.run_threads(bodies);
    if (HasFailure()) return;
  }
}

// ---- what it tells ----

TEST(Texts, AreJson) {
  unjamConfig_t config = default_config();
  config.trace_events = 1000;
  Job job(2, config);
  std::int32_t x = 1, y = 1;
  unjamRequest_t q = nullptr, p = nullptr;
  const char* const name = "a \"quoted\" \\ key\n\t\x01 ü";
  ASSERT_OK(unjamAllReduce(job.all(0), name, &x, &x, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &q));
  const Json e = JsonReader::parse(explain(job.context(1)));
  ASSERT_EQ(e["ranks"].size(), 2u);
  EXPECT_EQ(e["cycles"].size(), 0u);
  const Json& rank0 = e["ranks"][0];
  EXPECT_EQ(rank0["rank"].integer(), 0);
  ASSERT_EQ(rank0["pending"].size(), 1u);
  ASSERT_EQ(rank0["waits_for"].size(), 1u);
  EXPECT_EQ(rank0["waits_for"][0].integer(), 1);
  ASSERT_OK(unjamAllReduce(job.all(1), name, &y, &y, 1, UNJAM_INT32, UNJAM_SUM, nullptr, &p));
  wait_ok(job.context(0), q, "named oddly");
  wait_ok(job.context(1), p, "named oddly");

  const Json i = JsonReader::parse(info(job.context(0)));
  EXPECT_GT(i["memory"]["guaranteed_bytes_per_key_peer_lane"].number, 0);
  EXPECT_EQ(i["keys"].size(), 1u);
  EXPECT_EQ(i["peers"].size(), 1u);

  std::size_t needed = 0;
  ASSERT_OK(unjamEnvironment(nullptr, 0, &needed));
  std::string text(needed, 'x');
  ASSERT_OK(unjamEnvironment(text.data(), needed, nullptr));
  EXPECT_EQ(text.back(), '\0');
  text.pop_back();
  const Json v = JsonReader::parse(text);
  EXPECT_GT(v.size(), 10u);
  for (const Json& variable : v.array) {
    EXPECT_EQ(variable["name"].string.rfind("UNJAM_", 0), 0u);
    const bool ours = variable["read_by"].string == "library";
    for (const char* field : {"type", "default", "doc", "value"}) {
      EXPECT_EQ(variable.has(field), ours) << variable["name"].string << " " << field;
    }
  }
  // Too small a buffer: cut, with a NUL, and said so; the size is told.
  char small[10];
  std::memset(small, 'x', sizeof(small));
  std::size_t wanted = 0;
  EXPECT_EQ(unjamEnvironment(small, 5, &wanted), UNJAM_ERROR_RESOURCES);
  EXPECT_EQ(wanted, needed);
  EXPECT_EQ(small[4], '\0');
  EXPECT_EQ(small[5], 'x');
}

TEST(Texts, StatisticsAddUp) {
  Job job(3);
  job.run([](Rank& me) {
    std::vector<float> x(100000, 1.0f);
    for (int i = 0; i < 5; ++i) {
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, "s", x.data(), x.data(), x.size(), UNJAM_FLOAT32,
                                 UNJAM_MAX, nullptr, &q));
      me.wait(q, "s");
    }
    const unjamStats_t s = stats_of(me.context);
    if (s.submitted != 5 || s.completed != 5 || s.pending != 0) fail("wrong counts");
    if (s.lanes != 1 || s.slices == 0 || s.starts == 0 || s.starts < s.quits) fail("wrong lanes");
    // A ring all-reduce sends 2(n-1)/n of the data.
    const double sent = static_cast<double>(s.bytes_sent), due = 5 * 400000.0 * 4 / 3;
    if (sent < due * 0.99 || sent > due * 1.01) fail("sent " + std::to_string(sent));
  });
}

// (Threads that help are called away as soon as what they wait for is complete.)
TEST(Texts, StatisticsSayWhyEnginesQuit) {
  ASSERT_EQ(setenv("UNJAM_HELP", "0", 1), 0);
  Job job(2);
  unsetenv("UNJAM_HELP");
  std::atomic<bool> stuck{false};
  job.run([&](Rank& me) {
    float x = 1;
    unjamRequest_t q = nullptr;
    const auto grows = [&](std::uint64_t unjamStats_t::* reason, std::uint64_t from) {
      return eventually([&] { return stats_of(me.context).*reason > from; });
    };
    if (me.rank == 1 && !eventually([&] { return stuck.load(); })) fail("the other is not stuck");
    std::uint64_t idle = stats_of(me.context).idle_quits;
    UNJAM_CHECK(unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
    if (me.rank == 0) {
      if (!grows(&unjamStats_t::stuck_quits, 0)) fail("it does not leave, stuck");
      idle = stats_of(me.context).idle_quits;  // (it may have left before the call)
      stuck.store(true);
    }
    me.wait(q, "k");
    if (!grows(&unjamStats_t::idle_quits, idle)) fail("it does not leave, idle");
  });
}

// As programs compiled against earlier headers have it.
TEST(Texts, StatisticsOfAnEarlierSize) {
  Job job(1);
  unjamStats_t s{};
  s.size = offsetof(unjamStats_t, idle_quits);
  s.idle_quits = 77;
  ASSERT_EQ(unjamGetStats(job.context(0), &s), UNJAM_SUCCESS);
  EXPECT_EQ(s.size, offsetof(unjamStats_t, idle_quits));
  EXPECT_EQ(s.lanes, 1u);
  EXPECT_EQ(s.idle_quits, 77u) << "more was stored than there is";
}

// Whoever looks while ranks are at it sees counters grow, and no part larger than its whole.
TEST(Texts, StatisticsNeverFall) {
  unjamConfig_t config = default_config();
  config.lanes = 2;
  Job job(2, config);
  std::atomic<bool> over{false};
  const auto looks = [&](Rank& me) {
    unjamStats_t before{};
    for (bool last = false; !last;) {
      last = over.load() || job.failed();
      const unjamStats_t s = stats_of(me.context);
      const std::uint64_t then[] = {before.submitted,     before.completed,    before.slices,
                                    before.spins,         before.preemptions,  before.bytes_sent,
                                    before.starts,        before.quits,        before.borrowed,
                                    before.context_loads, before.context_saves};
      const std::uint64_t now[] = {s.submitted,   s.completed,     s.slices,       s.spins,
                                   s.preemptions, s.bytes_sent,    s.starts,       s.quits,
                                   s.borrowed,    s.context_loads, s.context_saves};
      for (std::size_t i = 0; i < std::size(now); ++i) {
        if (now[i] < then[i]) fail("counter " + std::to_string(i) + " fell");
      }
      if (s.completed > s.submitted || s.pending != s.submitted - s.completed) fail("wrong counts");
      const std::uint64_t reasons = s.idle_quits + s.stuck_quits + s.residency_quits;
      if (s.quits > s.starts || reasons > s.quits) fail("more quits than starts");
      before = s;
    }
  };
  std::atomic<int> running{2};
  const auto calls = [&](Rank& me) {
    std::vector<float> x(1000, 1.0f);
    for (int i = 0; i < 300; ++i) {
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, i % 2 == 0 ? "a" : "b", x.data(), x.data(), x.size(),
                                 UNJAM_FLOAT32, UNJAM_MAX, nullptr, &q));
      me.wait(q, "call");
    }
    if (--running == 0) over = true;
  };
  ASSERT_TRUE(job.run_threads({{0, calls}, {1, calls}, {0, looks}, {1, looks}}));
}

TEST(Texts, Trace) {
  unjamConfig_t config = default_config();
  config.trace_events = 4096;
  config.lanes = 2;
  Job job(2, config);
  job.run([](Rank& me) {
    std::vector<float> x(70000, 1.0f);
    for (int i = 0; i < 3; ++i) {
      unjamRequest_t q = nullptr;
      UNJAM_CHECK(unjamAllReduce(me.all, "traced", x.data(), x.data(), x.size(), UNJAM_FLOAT32,
                                 UNJAM_MAX, nullptr, &q));
      me.wait(q, "traced");
    }
    std::uint64_t hash = 0;
    UNJAM_CHECK(unjamKeyHash(me.all, "traced", &hash));
    std::vector<unjamTraceEvent_t> events(10000);
    std::size_t count = 0;
    UNJAM_CHECK(unjamGetTrace(me.context, events.data(), events.size(), &count));
    if (count == 0 || count > events.size()) fail("no events");
    events.resize(count);
    std::vector<bool> finished(3, false);
    for (std::size_t i = 0; i < count; ++i) {
      const unjamTraceEvent_t& e = events[i];
      if (e.type > UNJAM_TRACE_RESTART || e.lane > 1) fail("an event that is none");
      if (i > 0 && e.lane < events[i - 1].lane) fail("lanes are mixed");
      if (i > 0 && e.lane == events[i - 1].lane && e.time_ns < events[i - 1].time_ns) {
        fail("time runs backwards");
      }
      const bool of_engine = e.type == UNJAM_TRACE_QUIT || e.type == UNJAM_TRACE_RESTART;
      if (!of_engine && (e.key_hash != hash || e.n > 2)) fail("an unknown invocation");
      if (e.type == UNJAM_TRACE_FINISH) finished[e.n] = true;
    }
    if (!finished[0] || !finished[1] || !finished[2]) fail("an end is missing");
    UNJAM_CHECK(unjamGetTrace(me.context, events.data(), 2, &count));
    if (count > 2) fail("more events than there is room for");
    UNJAM_CHECK(unjamGetTrace(me.context, nullptr, 0, &count));
    if (count != 0) fail("events without room");
  });
}

TEST(Texts, StepsAreTimedWhileTracesAreKept) {
  for (const bool traces : {true, false}) {
    unjamConfig_t config = default_config();
    if (traces) config.trace_events = 64;
    Job job(2, config);
    constexpr int kCalls = 5;
    job.run([&](Rank& me) {
      float x = 1;
      for (int i = 0; i < kCalls; ++i) {
        unjamRequest_t q = nullptr;
        UNJAM_CHECK(unjamAllReduce(me.all, "k", &x, &x, 1, UNJAM_FLOAT32, UNJAM_SUM, nullptr, &q));
        me.wait(q, "k");
      }
      const auto read = [&] { return JsonReader::parse(info(me.context))["lanes"][0]["steps"]; };
      // (What it takes to tell of an end is counted behind that.)
      if (traces && !eventually([&] { return read()["write_cqe"]["count"].integer() == kCalls; })) {
        fail("write_cqe is counted " + std::to_string(read()["write_cqe"]["count"].integer()));
      }
      const Json steps = read();
      for (const char* step : {"read_sqe", "prepare", "load_context", "write_cqe"}) {
        const std::string text = std::string(step) + (traces ? " with traces" : " without");
        const int count = steps[step]["count"].integer(), ns = steps[step]["ns"].integer();
        // (Contexts are loaded again by an engine that has left meanwhile.)
        const bool loads = std::string(step) == "load_context";
        if (traces ? count < kCalls || (count > kCalls && !loads) : count != 0) fail(text);
        if (traces ? ns == 0 : ns != 0) fail(text + ", its time");
      }
    });
  }
}

// Asked all the time, from several threads, while collectives run.
TEST(Texts, WhileBusy) {
  unjamConfig_t config = default_config();
  config.trace_events = 64;
  Job job(4, config);
  std::atomic<int> running{4};
  std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
  for (int r = 0; r < 4; ++r) {
    bodies.emplace_back(r, [&](Rank& me) {
      std::vector<float> x(3000, 1.0f);
      for (int i = 0; i < (kSanitized ? 50 : 500); ++i) {
        unjamRequest_t q = nullptr;
        UNJAM_CHECK(unjamAllReduce(me.all, ("k" + std::to_string(i % 20)).c_str(), x.data(),
                                   x.data(), x.size(), UNJAM_FLOAT32, UNJAM_MAX, nullptr, &q));
        me.wait(q, "busy");
      }
      --running;
    });
    bodies.emplace_back(r, [&](Rank& me) {
      std::vector<unjamTraceEvent_t> events(100);
      while (running > 0) {
        JsonReader::parse(explain(me.context));
        JsonReader::parse(info(me.context));
        const unjamStats_t s = stats_of(me.context);
        if (s.completed > s.submitted || s.pending != s.submitted - s.completed) fail("counts");
        std::size_t count = 0;
        UNJAM_CHECK(unjamGetTrace(me.context, events.data(), events.size(), &count));
        for (std::size_t i = 0; i < count; ++i) {
          if (events[i].type > UNJAM_TRACE_RESTART || events[i].lane != 0) fail("a torn event");
          if (i > 0 && events[i].time_ns < events[i - 1].time_ns) fail("a torn trace");
        }
        sleep_ms(1);
      }
    });
  }
  // A rank that fails must not leave its watchers behind.
  for (auto& b : bodies) {
    b.second = [f = b.second, &running](Rank& me) {
      try {
        f(me);
      } catch (...) {
        running = 0;
        throw;
      }
    };
  }
  job.run_threads(bodies);
}

TEST(Texts, PlanCheck) {
  const auto plan = [](unjamKind_t kind, std::size_t count, int ranks, int root, int algorithm,
                       int list) {
    std::size_t needed = 0;
    EXPECT_OK(unjamPlanCheck(kind, UNJAM_FLOAT32, UNJAM_SUM, count, ranks, root, algorithm, 1, 5,
                             list, nullptr, 0, &needed));
    std::string text(needed, '\0');
    EXPECT_OK(unjamPlanCheck(kind, UNJAM_FLOAT32, UNJAM_SUM, count, ranks, root, algorithm, 1, 5,
                             list, text.data(), needed, nullptr));
    text.resize(needed - 1);
    return JsonReader::parse(text);
  };
  for (int kind = 0; kind < kNumKinds; ++kind) {
    for (const int ranks : {1, 2, 5, 8}) {
      for (const int algorithm : {-1, 0, 1, 2, 3}) {
        const Json p = plan(static_cast<unjamKind_t>(kind), 1000, ranks, ranks - 1, algorithm, 0);
        EXPECT_TRUE(p["ok"].boolean) << p["error"].string;
        for (const char* field : {"algorithm", "protocol", "bytes_sent_max", "bytes_sent_total",
                                  "steps", "slots_needed"}) {
          EXPECT_TRUE(p.has(field)) << field;
        }
      }
    }
  }
  EXPECT_TRUE(plan(UNJAM_SEND_RECV, 1000, 2, 1, -1, 1)["ok"].boolean);
  EXPECT_EQ(plan(UNJAM_SEND_RECV, 1000, 3, 1, -1, 1)["error"].string,
            "a send_recv is between 2 ranks, not 3");
  EXPECT_GT(plan(UNJAM_ALL_REDUCE, 1000, 4, 0, 0, 1).size(),
            plan(UNJAM_ALL_REDUCE, 1000, 4, 0, 0, 0).size());
}

TEST(Texts, PlanCheckOnHosts) {
  const auto plan = [](const std::vector<int>& host_of, int algorithm) {
    std::string text(1 << 16, '\0');
    EXPECT_OK(unjamPlanCheckOnHosts(UNJAM_ALL_REDUCE, UNJAM_FLOAT32, UNJAM_SUM, 1000,
                                    static_cast<int>(host_of.size()), host_of.data(), 0, algorithm,
                                    1, 5, 0, text.data(), text.size(), nullptr));
    return JsonReader::parse(text.c_str());
  };
  const int hierarchical = *unjam::algorithm_named("hierarchical");
  // Hosts are told apart by any numbers.
  const Json p = plan({-7, 9, 9, -7, 2, 2}, hierarchical);
  EXPECT_TRUE(p["ok"].boolean) << p["error"].string;
  EXPECT_EQ(p["hosts"].number, 3);
  EXPECT_EQ(p["parts"].number, 2);
  EXPECT_EQ(plan({0, 0, 1}, hierarchical)["error"].string,
            "hierarchical plans need as many ranks on each host: rank 0's host has 2 of them, rank "
            "2's has 1: use ring");
  EXPECT_TRUE(plan({0, 0, 1}, -1)["ok"].boolean);
}

TEST(Texts, PlanCheckNamesTheArgumentAndItsRange) {
  struct Values {
    int kind = UNJAM_ALL_REDUCE, dtype = UNJAM_FLOAT32, op = UNJAM_SUM;
    int nranks = 2, algorithm = -1, lanes = 1, slots = 5;
  };
  const auto check = [](const Values& v) {
    return unjamPlanCheck(static_cast<unjamKind_t>(v.kind), static_cast<unjamDataType_t>(v.dtype),
                          static_cast<unjamOp_t>(v.op), 1, v.nranks, 0, v.algorithm, v.lanes,
                          v.slots, 0, nullptr, 0, nullptr);
  };
  constexpr struct {
    const char* name;
    int Values::* field;
    int least, most;
  } kRanges[] = {{"kind", &Values::kind, 0, unjam::kNumKinds - 1},
                 {"dtype", &Values::dtype, 0, unjam::kNumDTypes - 1},
                 {"op", &Values::op, 0, unjam::kNumOps - 1},
                 {"nranks", &Values::nranks, 1, 65000},
                 {"algorithm", &Values::algorithm, -1, unjam::kNumAlgorithms - 1},
                 {"lanes", &Values::lanes, 1, 32},
                 {"slots", &Values::slots, 1, 1024}};
  for (const auto& range : kRanges) {
    for (const int value : {range.least, range.most}) {
      Values v;
      v.*range.field = value;
      EXPECT_OK(check(v)) << range.name << " " << value;
    }
    for (const int value : {range.least - 1, range.most + 1, INT_MAX}) {
      Values v;
      v.*range.field = value;
      if (value < 0 && range.least == 0) continue;  // not a value that these enumerations can have
      EXPECT_EQ(check(v), UNJAM_ERROR_INVALID_ARGUMENT) << range.name << " " << value;
      EXPECT_EQ(std::string(unjamGetLastError()),
                std::string(range.name) + " " + std::to_string(value) + " is out of range: give " +
                    std::to_string(range.least) + " to " + std::to_string(range.most));
    }
  }
}

std::string algorithm_of(unjamContext_t context, const std::string& key) {
  const Json all = JsonReader::parse(info(context));
  for (const Json& k : all["keys"].array) {
    if (k["key"].string == key) return k["algorithm"].string;
  }
  return "no such key";
}

TEST(CallAlgorithm, IsTakenByName) {
  Job job(3);
  std::vector<unjamCollective_t> registered(3);
  std::vector<std::string> names = {"auto"};
  for (const unjam::AlgorithmRow& row : unjam::kAlgorithms) {
    if (row.serves(unjam::Kind::kAllReduce)) names.push_back(row.name);
  }
  ASSERT_GT(names.size(), 2u);
  const auto usual = [&] {
    unjamRequest_t q[3] = {};
    std::int32_t x[3] = {1, 2, 3};
    for (int r = 0; r < 3; ++r) {
      EXPECT_OK(unjamAllReduce(job.all(r), "usual", &x[r], &x[r], 1, UNJAM_INT32, UNJAM_SUM,
                               nullptr, &q[r]));
    }
    for (int r = 0; r < 3; ++r) wait_ok(job.context(r), q[r], "usual");
    return algorithm_of(job.context(0), "usual");
  }();
  for (int r = 0; r < 3; ++r) {
    ASSERT_OK(unjamRegisterAllReduce(job.all(r), "registered", UNJAM_INT32, UNJAM_SUM, 0,
                                     &registered[r]));
  }
  for (const std::string& name : names) {
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.algorithm = name.c_str();
    unjamRequest_t q[2][3] = {};
    std::int32_t x[2][3] = {{1, 2, 3}, {4, 5, 6}};
    for (int r = 0; r < 3; ++r) {
      ASSERT_OK(unjamAllReduce(job.all(r), "called", &x[0][r], &x[0][r], 1, UNJAM_INT32, UNJAM_SUM,
                               &o, &q[0][r]));
      ASSERT_OK(unjamRunWithOptions(registered[r], &x[1][r], &x[1][r], 1, &o, &q[1][r]));
    }
    for (int r = 0; r < 3; ++r) {
      wait_ok(job.context(r), q[0][r], "called");
      wait_ok(job.context(r), q[1][r], "registered");
      EXPECT_EQ(x[0][r], 6);
      EXPECT_EQ(x[1][r], 15);
      const std::string expected = name == "auto" ? usual : name;
      EXPECT_EQ(algorithm_of(job.context(r), "called"), expected);
      EXPECT_EQ(algorithm_of(job.context(r), "registered"), expected);
    }
  }
  for (unjamCollective_t c : registered) ASSERT_OK(unjamDeregister(c));
}

TEST(CallAlgorithm, RefusesWhatItDoesNotKnowOrThatDoesNotServe) {
  Job job(2);
  std::int32_t x = 1;
  unjamRequest_t q = nullptr;
  unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
  for (const char* name : {"", "rings", "RING", "0", "ring|one_shot"}) {
    o.algorithm = name;
    EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &o, &q),
                   UNJAM_ERROR_INVALID_ARGUMENT, "use one of auto|ring|");
  }
  o.algorithm = "pairwise";
  EXPECT_REFUSED(unjamAllReduce(job.all(0), "k", &x, &x, 1, UNJAM_INT32, UNJAM_SUM, &o, &q),
                 UNJAM_ERROR_INVALID_ARGUMENT,
                 "algorithm pairwise does not serve all_reduce: use one of ring|one_shot|");
  EXPECT_EQ(q, nullptr);
  // Options before `algorithm` had none: what lies behind them is not read.
  o.size = offsetof(unjamCallOptions_t, algorithm);
  unjamRequest_t qs[2] = {};
  std::int32_t y[2] = {1, 2};
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK(unjamAllReduce(job.all(r), "k", &y[r], &y[r], 1, UNJAM_INT32, UNJAM_SUM,
                             r == 0 ? &o : nullptr, &qs[r]));
  }
  for (int r = 0; r < 2; ++r) {
    wait_ok(job.context(r), qs[r], "k");
    EXPECT_EQ(y[r], 3);
  }
}

// The options of a registered collective's run are a part of the call, as those of other calls.
TEST(Registered, RunsAgreeOnTheirOptions) {
  Job job(2, quick_diagnosis());
  unjamCollective_t registered[2] = {};
  unjamRequest_t q[2] = {};
  std::int32_t x[2] = {1, 2};
  for (int r = 0; r < 2; ++r) {
    ASSERT_OK(unjamRegisterAllReduce(job.all(r), "k", UNJAM_INT32, UNJAM_SUM, 0, &registered[r]));
  }
  const char* const texts[2] = {"bool", nullptr};
  unjamResult_t codes[2] = {};
  for (int r = 0; r < 2; ++r) {
    unjamCallOptions_t o = UNJAM_CALL_OPTIONS_INITIALIZER;
    o.match_text = texts[r];
    codes[r] = unjamRunWithOptions(registered[r], &x[r], &x[r], 1, &o, &q[r]);
  }
  for (int r = 0; r < 2; ++r) {
    if (codes[r] == UNJAM_SUCCESS) codes[r] = unjamWait(q[r], kPatienceUs);
    EXPECT_EQ(codes[r], UNJAM_ERROR_MISMATCH);
    EXPECT_OK(unjamRequestFree(q[r]));
  }
}

unjamKindInfo_t kind_info(int kind) {
  unjamKindInfo_t info{};
  info.size = sizeof info;
  EXPECT_OK(unjamGetKindInfo(static_cast<unjamKind_t>(kind), &info));
  return info;
}

TEST(KindInfo, SaysWhatTheCallsDo) {
  for (int number = 0; number < kNumKinds; ++number) {
    const auto kind = static_cast<unjamKind_t>(number);
    const unjamKindInfo_t info = kind_info(kind);
    EXPECT_STREQ(info.name, name_of(kind));
    const bool barrier = kind == UNJAM_BARRIER;
    EXPECT_EQ(info.has_buffers, barrier ? 0 : 1) << info.name;
    EXPECT_EQ(info.reduces, reduces(kind) || barrier ? 1 : 0) << info.name;
    EXPECT_EQ(info.has_root, has_root(kind) ? 1 : 0) << info.name;
    const bool blocks = sends_blocks(kind) || receives_blocks(kind);
    EXPECT_EQ(info.blocks, blocks ? 1 : 0) << info.name;
    EXPECT_EQ(info.reads, from_root(kind)                 ? UNJAM_HOLDERS_ROOT
                          : blocks && !sends_blocks(kind) ? UNJAM_HOLDERS_OWNER
                                                          : UNJAM_HOLDERS_ALL)
        << info.name;
    EXPECT_EQ(info.writes, to_root(kind)                      ? UNJAM_HOLDERS_ROOT
                           : blocks && !receives_blocks(kind) ? UNJAM_HOLDERS_OWNER
                                                              : UNJAM_HOLDERS_ALL)
        << info.name;
    EXPECT_EQ(info.in_place, may_be_in_place(kind) ? 1 : 0) << info.name;
  }
  // Of which tests have no exchange of all ranks.
  ASSERT_EQ(unjam::kNumKinds, kNumKinds + 1);
  const unjamKindInfo_t info = kind_info(UNJAM_SEND_RECV);
  EXPECT_STREQ(info.name, "send_recv");
  EXPECT_EQ(info.reads, UNJAM_HOLDERS_ROOT);
  EXPECT_EQ(info.writes, UNJAM_HOLDERS_OTHERS);
  EXPECT_EQ(info.reduces | info.blocks, 0);
  EXPECT_EQ(info.has_root & info.in_place & info.has_buffers, 1);
}

TEST(KindInfo, RefusesOtherSizesAndKinds) {
  EXPECT_EQ(unjamGetKindInfo(UNJAM_REDUCE, nullptr), UNJAM_ERROR_INVALID_ARGUMENT);
  for (const std::size_t size :
       {std::size_t{0}, sizeof(unjamKindInfo_t) - 4, sizeof(unjamKindInfo_t) + 8}) {
    unjamKindInfo_t info{};
    info.size = size;
    EXPECT_EQ(unjamGetKindInfo(UNJAM_REDUCE, &info), UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(info.name, nullptr);
  }
  for (const int kind : {-1, UNJAM_SEND_RECV + 1, INT_MAX, INT_MIN}) {
    unjamKindInfo_t info{};
    info.size = sizeof info;
    EXPECT_EQ(unjamGetKindInfo(static_cast<unjamKind_t>(kind), &info),
              UNJAM_ERROR_INVALID_ARGUMENT);
    EXPECT_STREQ(unjamGetLastError(), "unknown kind: give a value of unjamKind_t");
  }
}

}  // namespace
}  // namespace unjam_test
