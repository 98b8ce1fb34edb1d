// Windows (unjamMemRegister): numbers and places, a rank's own list, the tables by which peers find
// them, and results that peers have stored there.
#include "runtime/windows.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "device/host/host_memory.h"
#include "runtime/context.h"
#include "runtime/cuda_library.h"
#include "runtime/window_maps.h"
#include "tests/support/job.h"
#include "tests/support/json.h"
#include "tests/support/processes.h"
#include "tests/support/scripted_device.h"
#include "tests/support/stages.h"

namespace unjam_test {
namespace {

using unjam::kLastWindowSerial;
using unjam::kPlaceUnit;
using unjam::kWindows;
using unjam::WindowEntry;
using unjam::WindowMaps;
using unjam::Windows;

#define EXPECT_REFUSED(result, expected, words)                                   \
  do {                                                                            \
    const unjam::Result r = (result);                                             \
    EXPECT_EQ(r.code, expected) << r.message;                                     \
    EXPECT_NE(r.message.find(words), std::string::npos) << "says: " << r.message; \
  } while (false)

// Never dereferenced.
unsigned char* const kBase = reinterpret_cast<unsigned char*>(std::uintptr_t{1} << 40);

// ---- places ----

TEST(WindowPlace, TellsWindowAndOffset) {
  for (const std::uint64_t serial : {std::uint64_t{1}, std::uint64_t{64}, kLastWindowSerial}) {
    for (const std::uint64_t offset : {std::uint64_t{0}, kPlaceUnit, std::uint64_t{4096},
                                       unjam::kMostWindowBytes - kPlaceUnit}) {
      const std::uint64_t place = unjam::place_in_window(serial, offset);
      EXPECT_TRUE(unjam::in_window(place));
      EXPECT_EQ(unjam::window_of(place), serial);
      EXPECT_EQ(unjam::offset_in_window(place), offset);
    }
  }
  EXPECT_FALSE(unjam::in_window(std::uint64_t{1} << 50)) << "an offset in an arena";
}

TEST(WindowTable, HasWhatWasSetAndNothingElse) {
  std::vector<WindowEntry> table(3 * kWindows);
  const auto find = [&](std::uint32_t peer, std::uint64_t serial, std::uint64_t offset = 0) {
    return unjam::find_in_window(table.data(), nullptr, peer,
                                 unjam::place_in_window(serial, offset));
  };
  EXPECT_EQ(unjam::find_in_window(nullptr, nullptr, 1, unjam::place_in_window(64, 0)), nullptr);
  EXPECT_EQ(find(1, 64), nullptr);
  table[kWindows].set(64, kBase);
  EXPECT_EQ(find(1, 64), kBase);
  EXPECT_EQ(find(1, 64, 160), kBase + 160);
  EXPECT_EQ(find(2, 64), nullptr) << "another peer's";
  EXPECT_EQ(find(1, 65), nullptr);
  // The place is the next window's: who still has the former's number must not find that.
  table[kWindows].set(64 + kWindows, kBase + 4096);
  EXPECT_EQ(find(1, 64), nullptr);
  EXPECT_EQ(find(1, 64 + kWindows), kBase + 4096);
  table[kWindows].clear();
  EXPECT_EQ(find(1, 64 + kWindows), nullptr);
}

// Whoever finds a window finds its own base, whatever is written there meanwhile; and if some note
// what they find, who do not see that others do.
void read_while_written(WindowEntry* noted) {
  std::vector<WindowEntry> table(kWindows);
  constexpr std::uint64_t kFirst = kWindows, kLast = kSanitized ? 3000 : 20000;
  const auto base_of = [](std::uint64_t serial) { return kBase + serial * 4096; };
  std::atomic<std::uint64_t> newest{kFirst};
  std::atomic<std::uint64_t> found{0}, wrong{0};
  std::atomic<bool> over{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 4; ++i) {
    readers.emplace_back([&, i] {
      std::mt19937_64 random(mix(base_seed(), static_cast<std::uint64_t>(i)));
      while (!over.load()) {
        const std::uint64_t now = newest.load();
        // (Who is late looks for a former one, and may note it.)
        const std::uint64_t serial = now - std::min(random() % 3 * kWindows, now - kFirst);
        unsigned char* const at =
            unjam::find_in_window(table.data(), noted, 0, unjam::place_in_window(serial, 32));
        if (at == nullptr) continue;
        ++found;
        if (at != base_of(serial) + 32) ++wrong;
      }
    });
  }
  for (std::uint64_t n = 1; n <= kLast; ++n) {
    const std::uint64_t serial = n * kWindows;  // all in one place
    if (n % 3 == 0) table[0].clear();
    table[0].set(serial, base_of(serial));
    newest.store(serial);
    if (n % 16 == 0) std::this_thread::yield();
  }
  // On a busy machine the readers may come late.
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (found.load() == 0 && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  over.store(true);
  for (std::thread& t : readers) t.join();
  EXPECT_EQ(wrong.load(), 0u);
  EXPECT_NE(found.load(), 0u);
}
TEST(WindowTable, IsReadWhileItIsWritten) { read_while_written(nullptr); }
TEST(WindowTable, IsReadWhileSeveralNote) {
  std::vector<WindowEntry> noted(kWindows);
  read_while_written(noted.data());
  EXPECT_NE(noted[0].serial, 0u);
}

TEST(WindowTable, WhatIsNotedIsFoundAfterwardsAndOnlyReplacedByLaterOnes) {
  std::vector<WindowEntry> table(kWindows), noted(kWindows);
  const auto find = [&](std::uint64_t serial) {
    return unjam::find_in_window(table.data(), noted.data(), 0, unjam::place_in_window(serial, 0));
  };
  EXPECT_EQ(find(64), nullptr);
  EXPECT_EQ(noted[0].serial, 0u) << "nothing was found";
  table[0].set(64, kBase);
  EXPECT_EQ(find(64), kBase);
  EXPECT_EQ(noted[0].serial, 64u);
  table[0].clear();
  EXPECT_EQ(find(64), kBase) << "without a look at the table";
  table[0].set(64 + kWindows, kBase + 4096);
  EXPECT_EQ(find(64 + kWindows), kBase + 4096);
  EXPECT_EQ(noted[0].serial, 64u + kWindows);
  noted[0].note(64, kBase);  // by one that was late
  EXPECT_EQ(noted[0].serial, 64u + kWindows);
  EXPECT_EQ(find(64), nullptr);
  // While somebody writes it, it is as if nothing were there.
  noted[0].serial = WindowEntry::kBeingWritten;
  EXPECT_EQ(find(64 + kWindows), kBase + 4096);
  EXPECT_EQ(noted[0].serial, WindowEntry::kBeingWritten);
}

// ---- a rank's list ----

std::uint64_t add(Windows& windows, const void* at, std::uint64_t bytes) {
  std::uint64_t serial = 0;
  const unjam::Result r = windows.add(at, bytes, serial);
  EXPECT_TRUE(r.ok()) << r.message;
  return serial;
}

TEST(Windows, GivesEachNumberOnce) {
  Windows windows;
  std::set<std::uint64_t> given;
  std::vector<std::pair<unsigned char*, std::uint64_t>> live;
  std::mt19937_64 random(base_seed());
  for (int i = 0; i < 5000; ++i) {
    if (live.size() == kWindows || (random() % 2 == 0 && !live.empty())) {
      const std::size_t k = random() % live.size();
      windows.remove(live[k].second);
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(k));
      continue;
    }
    unsigned char* const at = kBase + static_cast<std::uint64_t>(i) * 4096;
    const std::uint64_t serial = add(windows, at, 4096);
    ASSERT_NE(serial, 0u);
    ASSERT_LE(serial, kLastWindowSerial);
    ASSERT_TRUE(given.insert(serial).second) << serial << " was given before";
    for (const auto& [other, number] : live) ASSERT_NE(number % kWindows, serial % kWindows);
    live.emplace_back(at, serial);
    ASSERT_EQ(unjam::window_of(windows.place(at, 4096)), serial);
  }
}

TEST(Windows, SaysWhatIsWrong) {
  Windows windows;
  std::uint64_t serial = 0, bytes = 0;
  unjam::Result retired;
  EXPECT_REFUSED(windows.add(nullptr, 1, serial), UNJAM_ERROR_INVALID_ARGUMENT, "is NULL");
  EXPECT_REFUSED(windows.add(kBase, 0, serial), UNJAM_ERROR_INVALID_ARGUMENT, "0 bytes");
  EXPECT_REFUSED(windows.add(kBase, UINT64_MAX, serial), UNJAM_ERROR_INVALID_ARGUMENT, "more than");
  EXPECT_REFUSED(windows.add(kBase, std::uint64_t{1} << 41, serial), UNJAM_ERROR_INVALID_ARGUMENT,
                 "more than");
  const std::uint64_t first = add(windows, kBase + 1000, 1000);
  for (const auto& [begin, size] :
       {std::pair{0, 1001}, {1000, 1000}, {1500, 10}, {1999, 1}, {0, 5000}, {1999, 5000}}) {
    EXPECT_REFUSED(windows.add(kBase + begin, static_cast<std::uint64_t>(size), serial),
                   UNJAM_ERROR_INVALID_USAGE, "registered already");
  }
  const std::uint64_t before = add(windows, kBase, 1000), behind = add(windows, kBase + 2000, 1);
  EXPECT_EQ((std::set{first, before, behind}.size()), 3u);
  EXPECT_REFUSED(windows.find(kBase + 1001, bytes, serial, retired), UNJAM_ERROR_INVALID_ARGUMENT,
                 "1 bytes behind the beginning of a window of 1000");
  EXPECT_REFUSED(windows.find(kBase + 2001, bytes, serial, retired), UNJAM_ERROR_INVALID_USAGE,
                 "nothing is registered");
  EXPECT_REFUSED(windows.find(nullptr, bytes, serial, retired), UNJAM_ERROR_INVALID_USAGE,
                 "nothing is registered");
  ASSERT_TRUE(windows.find(kBase + 1000, bytes, serial, retired).ok());
  EXPECT_EQ(bytes, 1000u);
  EXPECT_EQ(serial, first);
  windows.remove(first);
  EXPECT_FALSE(windows.find(kBase + 1000, bytes, serial, retired).ok());
}

TEST(Windows, AreLimitedInNumber) {
  Windows windows;
  std::uint64_t serial = 0;
  for (std::uint32_t i = 0; i < kWindows; ++i) add(windows, kBase + i * 16, 16);
  EXPECT_REFUSED(windows.add(kBase + 4096, 16, serial), UNJAM_ERROR_RESOURCES,
                 "64 windows of this rank are registered");
  EXPECT_EQ(windows.usage().windows, kWindows);
  EXPECT_EQ(windows.usage().bytes, kWindows * 16);
  // Each of the numbers' places twice.
  Windows few(3 * kWindows - 1);
  for (std::uint32_t i = 0; i < 2 * kWindows; ++i) few.remove(add(few, kBase, 16));
  EXPECT_REFUSED(few.add(kBase, 16, serial), UNJAM_ERROR_RESOURCES, "as often as it can");
}

TEST(Windows, PlacesOfOutputs) {
  Windows windows;
  EXPECT_EQ(windows.place(kBase, 16), 0u);
  const std::uint64_t serial = add(windows, kBase + 24, 1000);  // rounded down: 16
  EXPECT_EQ(windows.place(kBase + 32, 16), unjam::place_in_window(serial, 16));
  EXPECT_EQ(windows.place(kBase + 32, 992), unjam::place_in_window(serial, 16));
  EXPECT_EQ(windows.place(kBase + 32, 993), 0u) << "it ends behind the window";
  EXPECT_EQ(windows.place(kBase + 32, UINT64_MAX), 0u);
  EXPECT_EQ(windows.place(kBase + 24, 16), 0u) << "it does not begin on a unit";
  EXPECT_EQ(windows.place(kBase + 16, 16), 0u) << "it begins before the window";
  EXPECT_EQ(windows.place(kBase + 1024, 1), 0u);
  EXPECT_EQ(windows.place(nullptr, 1), 0u);
  // What begins on a multiple of a unit in another window.
  const std::uint64_t other = add(windows, kBase + 4096, 4096);
  EXPECT_EQ(windows.place(kBase + 4096 + 160, 100), unjam::place_in_window(other, 160));
  EXPECT_EQ(windows.place(kBase + 1008, 4096), 0u) << "across two";
  windows.remove(serial);
  EXPECT_EQ(windows.place(kBase + 32, 16), 0u);
}

TEST(Windows, WhatIsRetiredIsCounted) {
  Windows windows;
  const std::uint64_t first = add(windows, kBase, 64), second = add(windows, kBase + 64, 64);
  windows.retire(windows.place(kBase + 16, 16), {UNJAM_ERROR_PEER, "rank 1 is gone"});
  windows.retire(windows.place(kBase, 16), {UNJAM_ERROR_ABORTED, "later"});
  std::uint64_t bytes = 0, serial = 0;
  unjam::Result retired;
  ASSERT_TRUE(windows.find(kBase, bytes, serial, retired).ok());
  EXPECT_EQ(retired.code, UNJAM_ERROR_PEER) << "the first reason";
  ASSERT_TRUE(windows.find(kBase + 64, bytes, serial, retired).ok());
  EXPECT_TRUE(retired.ok());
  EXPECT_EQ(windows.usage().retired, 1u);
  windows.remove(first);
  windows.remove(second);
  EXPECT_EQ(windows.usage().retired, 0u);
  EXPECT_EQ(windows.usage().left, 1u);
}

// ---- tables of a process's ranks ----

// Maps windows of other processes at addresses that tell which, as slowly as it is told to.
class MappingDevice : public ScriptedDevice {
 public:
  MappingDevice() : ScriptedDevice(4) {}

  bool reach(int, int other, std::string& error) override {
    pass();
    if (other != unreachable_) return true;
    error = "no peer access";
    return false;
  }
  unsigned char* open_window(int device, const unjam::WindowName& name,
                             std::string& error) override {
    pass();
    const std::lock_guard lock(mutex_);
    if (name.allocation[0] == 0xff) {
      error = "cannot be opened";
      return nullptr;
    }
    ++open_[{device, name.allocation[0]}];
    return at(device, name);
  }
  void close_window(int device, const unjam::WindowName& name) override {
    pass();
    const std::lock_guard lock(mutex_);
    if (--open_[{device, name.allocation[0]}] < 0) ADD_FAILURE() << "closed twice";
  }

  static unsigned char* at(int device, const unjam::WindowName& name) {
    return kBase + (static_cast<std::uint64_t>(device) << 32) +
           (std::uint64_t{name.allocation[0]} << 24) + name.offset;
  }
  int open(int device, unsigned char allocation) {
    const std::lock_guard lock(mutex_);
    return open_[{device, allocation}];
  }
  // Nothing is mapped or closed until it is let.
  void hold(bool held) {
    {
      const std::lock_guard lock(gate_mutex_);
      held_ = held;
    }
    gate_.notify_all();
  }
  // So many calls are held.
  bool holds(int calls) {
    return eventually([&] {
      const std::lock_guard lock(gate_mutex_);
      return waiting_ == calls;
    });
  }
  int unreachable_ = -1;

 private:
  void pass() {
    std::unique_lock lock(gate_mutex_);
    ++waiting_;
    gate_.wait(lock, [this] { return !held_; });
    --waiting_;
  }
  std::mutex mutex_, gate_mutex_;
  std::condition_variable gate_;
  bool held_ = false;
  int waiting_ = 0;
  std::map<std::pair<int, unsigned char>, int> open_;
};

class Maps : public testing::Test {
 protected:
  static constexpr int kRanks = 4;  // of them 0 and 1 of this process
  using Id = std::pair<int, std::uint64_t>;

  unsigned char* find(int rank, int owner, std::uint64_t serial) {
    std::string error;
    return unjam::find_in_window(maps_.table(rank, error), nullptr,
                                 static_cast<std::uint32_t>(owner),
                                 unjam::place_in_window(serial, 0));
  }
  static unjam::WindowName name(unsigned char allocation, std::uint64_t offset = 0) {
    unjam::WindowName n;
    n.allocation[0] = allocation;
    n.offset = offset;
    return n;
  }
  void add_remote(int owner, std::uint64_t serial, const unjam::WindowName& n) {
    maps_.add(&device_, {owner, serial, nullptr, -1, n}, {{0, 10}, {1, 11}});
  }
  bool settled() {
    return eventually([&] { return maps_.usage(0).awaited == 0 && maps_.usage(1).awaited == 0; });
  }
  bool was_let_go(int owner, std::uint64_t serial) {
    return eventually([&] {
      const std::lock_guard lock(mutex_);
      return let_go_.count({owner, serial}) != 0;
    });
  }

  MappingDevice device_;
  std::mutex mutex_;
  std::set<Id> let_go_;
  WindowMaps maps_{kRanks, [this](int owner, std::uint64_t serial) {
                     const std::lock_guard lock(mutex_);
                     let_go_.insert({owner, serial});
                   }};
};

TEST_F(Maps, OfTheHostAreThereAtOnce) {
  maps_.add(nullptr, {0, 64, kBase, -1, {}}, {{1, -1}});
  EXPECT_EQ(find(1, 0, 64), kBase);
  EXPECT_EQ(find(0, 0, 64), nullptr);
  EXPECT_EQ(maps_.usage(1).mapped, 1u);
  EXPECT_TRUE(maps_.remove(0, 64, false));
  EXPECT_FALSE(maps_.remove(0, 64, false));
  EXPECT_EQ(find(1, 0, 64), nullptr);
  EXPECT_EQ(maps_.usage(1).mapped, 0u);
}

TEST_F(Maps, NobodyWaitsForTheDevice) {
  device_.hold(true);
  maps_.add(&device_, {0, 64, kBase, 10, {}}, {{1, 11}});
  add_remote(2, 64, name(7, 256));
  ASSERT_TRUE(device_.holds(1));
  EXPECT_EQ(find(1, 0, 64), nullptr);
  EXPECT_EQ(maps_.usage(1).awaited, 2u);
  device_.hold(false);
  ASSERT_TRUE(settled());
  EXPECT_EQ(find(1, 0, 64), kBase);
  for (const int r : {0, 1}) EXPECT_EQ(find(r, 2, 64), device_.at(10 + r, name(7, 256)));
  EXPECT_EQ(maps_.usage(1).mapped, 2u);
  device_.hold(true);
  EXPECT_TRUE(maps_.remove(2, 64, false));
  EXPECT_EQ(find(1, 2, 64), nullptr) << "before the mapping goes";
  device_.hold(false);
  EXPECT_TRUE(was_let_go(2, 64));
  EXPECT_EQ(device_.open(10, 7) + device_.open(11, 7), 0);
}

TEST_F(Maps, WhatCannotBeMappedIsTold) {
  device_.unreachable_ = 10;
  maps_.add(&device_, {0, 64, kBase, 10, {}}, {{1, 11}});
  add_remote(3, 65, name(0xff));
  ASSERT_TRUE(settled());
  EXPECT_EQ(find(1, 0, 64), nullptr);
  EXPECT_EQ(find(1, 3, 65), nullptr);
  EXPECT_EQ(maps_.usage(1).unreachable, 2u);
  EXPECT_EQ(maps_.usage(0).unreachable, 1u);
  EXPECT_NE(maps_.usage(0).why.find("rank 3's: cannot be opened"), std::string::npos);
  EXPECT_TRUE(maps_.remove(3, 65, false));
  EXPECT_TRUE(was_let_go(3, 65));
  EXPECT_EQ(maps_.usage(1).unreachable, 1u);
}

TEST_F(Maps, AWindowThatGoesWhileItIsMapped) {
  device_.hold(true);
  add_remote(2, 64, name(7));
  ASSERT_TRUE(device_.holds(1));
  EXPECT_TRUE(maps_.remove(2, 64, false));
  device_.hold(false);
  EXPECT_TRUE(was_let_go(2, 64));
  EXPECT_EQ(device_.open(10, 7) + device_.open(11, 7), 0);
  EXPECT_EQ(find(0, 2, 64), nullptr);
}

TEST_F(Maps, MappingsStayWhereSomebodyMayStore) {
  add_remote(2, 64, name(7));
  add_remote(2, 65, name(8));
  add_remote(3, 64, name(9));
  ASSERT_TRUE(settled());
  EXPECT_TRUE(maps_.remove(2, 64, true));
  EXPECT_EQ(find(0, 2, 64), nullptr);
  maps_.forget(3, true);  // it has died
  EXPECT_EQ(find(0, 3, 64), nullptr);
  maps_.forget(2, false);  // it has left
  EXPECT_TRUE(was_let_go(2, 65));
  EXPECT_EQ(device_.open(10, 7), 1);
  EXPECT_EQ(device_.open(10, 8), 0);
  EXPECT_EQ(device_.open(11, 9), 1);
  maps_.stop();
  EXPECT_EQ(device_.open(10, 7) + device_.open(11, 9), 0) << "to the end";
}

// Two windows of a place: the former is gone, though that was never said.
TEST_F(Maps, APlaceIsTheLatestWindows) {
  add_remote(2, 64, name(7));
  add_remote(2, 64 + kWindows, name(8));
  ASSERT_TRUE(settled());
  EXPECT_EQ(find(0, 2, 64), nullptr);
  EXPECT_EQ(find(0, 2, 64 + kWindows), device_.at(10, name(8)));
}

// ---- between processes ----

// As MappingDevice, with arenas that processes can share. Names count up.
class SharingDevice : public MappingDevice {
 public:
  std::unique_ptr<unjam::DeviceArena> create_arena(int, std::uint64_t bytes, std::uint64_t,
                                                   std::string& error) override {
    return std::make_unique<Arena>(unjam::SharedMemory::create(bytes, error));
  }
  std::unique_ptr<unjam::DeviceArena> adopt_arena(int, int fd, std::uint64_t bytes, std::uint64_t,
                                                  std::string& error) override {
    return std::make_unique<Arena>(unjam::SharedMemory::adopt(unjam::Fd(fd), bytes, error));
  }
  bool name_window(int, const void*, unjam::WindowName& name, std::string& error) override {
    if (nameless_) error = "it has no name";
    name.allocation[0] = ++names_;
    return !nameless_;
  }
  bool nameless_ = false;

 private:
  struct Arena : unjam::DeviceArena {
    explicit Arena(unjam::SharedMemory m) : memory(std::move(m)) {}
    unsigned char* data() const override { return memory.data(); }
    // (All of it is there from the beginning.)
    bool add(std::uint64_t, std::uint64_t, std::string&) override { return true; }
    bool adopt(std::uint64_t, std::uint64_t, int fd, std::string&) override {
      const unjam::Fd closed(fd);
      return true;
    }
    int share(std::uint64_t, std::string&) override { return memory.share().release(); }
    bool map_for(int, std::uint64_t, std::string&) override { return true; }
    std::uint64_t bytes() const override { return memory.size(); }
    unjam::SharedMemory memory;
  };
  unsigned char names_ = 0;
};

Json windows(unjamContext_t context) { return JsonReader::parse(info(context))["windows"]; }
bool comes_to(unjamContext_t context, const char* what, int value) {
  return eventually([&] { return windows(context)[what].integer() == value; });
}

// Run with a process each; `body` says what it finds wrong by failing.
void run_two(const std::function<void(unjamContext_t, SharingDevice&)>& first,
             const std::function<void(unjamContext_t, SharingDevice&)>& second, bool first_dies) {
  unjamUniqueId_t id;
  UNJAM_CHECK(unjamGetUniqueId(&id));
  Processes all(2, "", [&](Child& me) {
    SharingDevice device;
    unjam::replace_cuda_driver(&device);
    {
      unjamConfig_t config = default_config();
      config.device = UNJAM_DEVICE_CUDA;
      Job job(id, 2, {me.index()}, config, base_seed());
      job.run([&](Rank& rank) { (rank.rank == 0 ? first : second)(rank.context, device); });
    }
    unjam::replace_cuda_driver(nullptr);
  });
  if (first_dies) all.expect_killed(0);
  all.finish();
}
void expect(bool is_so, const char* what) {
  if (!is_so) fail(what);
}

TEST(WindowsOfProcesses, AreMappedAndLetGoOf) {
  const Stages stages;
  std::vector<unsigned char> x(4096), y(4096);
  run_two(
      [&](unjamContext_t c, SharingDevice& device) {
        UNJAM_CHECK(unjamMemRegister(c, x.data(), x.size()));
        stages.await(1);  // it has it
        UNJAM_CHECK(unjamMemDeregister(c, x.data()));
        expect(comes_to(c, "left", 0), "the other has not let go");
        stages.reach(2);
        stages.await(3);  // the other maps and unmaps nothing
        UNJAM_CHECK(unjamMemRegister(c, x.data(), x.size()));
        UNJAM_CHECK(unjamMemRegister(c, y.data(), y.size()));
        const auto begin = std::chrono::steady_clock::now();
        UNJAM_CHECK(unjamMemDeregister(c, x.data()));
        const auto took = std::chrono::steady_clock::now() - begin;
        expect(took < std::chrono::seconds(20), "it waits for the other's device");
        expect(took >= std::chrono::milliseconds(50), "it does not wait at all");
        expect(windows(c)["left"].integer() == 1, "it is said to be let go of");
        stages.reach(4);
        expect(comes_to(c, "left", 0), "the other does not let go");
        device.nameless_ = true;
        UNJAM_CHECK(unjamMemRegister(c, x.data(), x.size()));
        expect(windows(c)["not_shared"].integer() == 1, "it was shared without a name");
        expect(windows(c)["not_shared_because"].string == "it has no name", "the reason");
        stages.reach(5);
        stages.await(6);
      },
      [&](unjamContext_t c, SharingDevice& device) {
        expect(comes_to(c, "peers_mapped", 1), "it is not mapped");
        expect(device.open(0, 1) == 1, "it was not opened");
        stages.reach(1);
        stages.await(2);
        expect(windows(c)["peers_mapped"].integer() == 0, "it is still there");
        expect(device.open(0, 1) == 0, "it was not closed");
        device.hold(true);
        stages.reach(3);
        stages.await(4);
        expect(comes_to(c, "peers_awaited", 1), "one of two is there");
        device.hold(false);
        expect(comes_to(c, "peers_mapped", 1), "the other one is not mapped");
        stages.await(5);
        expect(windows(c)["peers_mapped"].integer() == 1, "it has come without a name");
        stages.reach(6);
        // The rank leaves with windows.
        expect(comes_to(c, "peers_mapped", 0), "a rank's windows outlast it");
        expect(eventually([&] { return device.open(0, 3) == 0; }), "and its mappings");
      },
      false);
}

TEST(WindowsOfProcesses, OfADeadProcessAreNotFoundAndStayMapped) {
  const Stages stages;
  std::vector<unsigned char> x(4096);
  run_two(
      [&](unjamContext_t c, SharingDevice&) {
        UNJAM_CHECK(unjamMemRegister(c, x.data(), x.size()));
        stages.await(1);
        raise(SIGKILL);
      },
      [&](unjamContext_t c, SharingDevice& device) {
        expect(comes_to(c, "peers_mapped", 1), "it is not mapped");
        // Its own, which the other must be let go of at once.
        UNJAM_CHECK(unjamMemRegister(c, x.data(), x.size()));
        stages.reach(1);
        expect(comes_to(c, "peers_mapped", 0), "it is still found");
        expect(device.open(0, 1) == 1, "an engine may be storing there");
        UNJAM_CHECK(unjamMemDeregister(c, x.data()));
        expect(comes_to(c, "left", 0), "the dead do not let go");
      },
      true);
}

// ---- the API ----

std::uint64_t into_outputs(unjamContext_t context) {
  std::uint64_t sum = 0;
  const Json all = JsonReader::parse(info(context));
  for (const Json& lane : all["lanes"].array) {
    sum += static_cast<std::uint64_t>(lane["into_outputs"].number);
  }
  return sum;
}
struct Layout1 {
  int algorithm;
  bool delays;
};

class Straight : public testing::TestWithParam<Layout1> {};

// All kinds whose plans may store into outputs, in windows that come and go, some not aligned.
TEST_P(Straight, IntoWindowsThatComeAndGo) {
  constexpr int kRanks = 3;
  const std::size_t count = kSanitized ? 20'000 : 200'000;
  unjamConfig_t config = default_config();
  config.algorithm = GetParam().algorithm;
  config.lanes = 2;
  if (GetParam().delays) config.delay_seed = base_seed();
  Job job(kRanks, config);
  std::atomic<std::uint64_t> straight{0};
  job.run([&](Rank& me) {
    std::mt19937_64 random(mix(base_seed(), static_cast<std::uint64_t>(me.rank)));
    std::vector<float> input(count), memory(kRanks * count + 64);
    for (int round = 0; round < 6; ++round) {
      for (std::size_t i = 0; i < count; ++i) {
        input[i] = static_cast<float>((i + static_cast<std::size_t>(round)) % 1000) +
                   static_cast<float>(me.rank);
      }
      // (16 bytes are four elements. The last ranks' do not begin on a unit.)
      const std::size_t shift = me.rank == kRanks - 1 && round % 2 == 1 ? 1 : 4 * (random() % 8);
      float* const out = memory.data() + shift;
      const bool registered = me.rank != 1 || round != 2;
      if (registered) UNJAM_CHECK(unjamMemRegister(me.context, out, 4 * kRanks * count));
      const auto value = [&](std::size_t i, int rank) {
        return static_cast<float>((i + static_cast<std::size_t>(round)) % 1000) +
               static_cast<float>(rank);
      };
      const auto sum = [&](std::size_t i) {
        float s = 0;
        for (int r = 0; r < kRanks; ++r) s += value(i, r);
        return s;
      };
      const auto expect = [&](const char* what, std::size_t n, auto&& wanted) {
        for (std::size_t i = 0; i < n; ++i) {
          if (out[i] != wanted(i)) {
            fail(std::string(what) + ": element " + std::to_string(i) + " is " +
                 std::to_string(out[i]) + " instead of " + std::to_string(wanted(i)));
          }
        }
        if (out[n] != -1) fail(std::string(what) + " has written past the output's end");
      };
      const auto fresh = [&] { std::fill(memory.begin(), memory.end(), -1.0f); };
      unjamRequest_t request = nullptr;

      fresh();
      UNJAM_CHECK(unjamAllReduce(me.all, "reduce", input.data(), out, count, UNJAM_FLOAT32,
                                 UNJAM_SUM, nullptr, &request));
      me.wait(request, "all-reduce");
      expect("all-reduce", count, sum);

      fresh();
      UNJAM_CHECK(unjamAllGather(me.all, "gather", input.data(), out, count / kRanks, UNJAM_FLOAT32,
                                 nullptr, &request));
      me.wait(request, "all-gather");
      const std::size_t block = count / kRanks;
      expect("all-gather", kRanks * block,
             [&](std::size_t i) { return value(i % block, static_cast<int>(i / block)); });

      const int root = round % kRanks;
      fresh();
      UNJAM_CHECK(unjamBroadcast(me.all, "broadcast", input.data(), out, count, UNJAM_FLOAT32, root,
                                 nullptr, &request));
      me.wait(request, "broadcast");
      expect("broadcast", count, [&](std::size_t i) { return value(i, root); });

      fresh();
      UNJAM_CHECK(unjamReduceScatter(me.all, "scatter", input.data(), out, block, UNJAM_FLOAT32,
                                     UNJAM_SUM, nullptr, &request));
      me.wait(request, "reduce-scatter");
      expect("reduce-scatter", block,
             [&](std::size_t i) { return sum(static_cast<std::size_t>(me.rank) * block + i); });

      fresh();
      UNJAM_CHECK(unjamReduce(me.all, "to the root", input.data(), out, count, UNJAM_FLOAT32,
                              UNJAM_SUM, root, nullptr, &request));
      me.wait(request, "reduce");
      if (me.rank == root) expect("reduce", count, sum);

      if (registered) UNJAM_CHECK(unjamMemDeregister(me.context, out));
    }
    straight += into_outputs(me.context);
    if (windows(me.context)["registered"].number != 0) fail("windows are left");
  });
  EXPECT_NE(straight.load(), 0u) << "nothing went straight";
}

INSTANTIATE_TEST_SUITE_P(Windows, Straight,
                         testing::Values(Layout1{0, false}, Layout1{2, false}, Layout1{0, true},
                                         Layout1{2, true}),
                         [](const auto& test) {
                           return std::string(test.param.algorithm == 0 ? "ring" : "rsag") +
                                  (test.param.delays ? "WithDelays" : "");
                         });

TEST(MemRegister, WithoutItNothingGoesStraight) {
  Job job(2);
  std::atomic<std::uint64_t> straight{0};
  job.run([&](Rank& me) {
    std::vector<float> x(100'000, 1.0f);
    unjamRequest_t request = nullptr;
    UNJAM_CHECK(unjamAllReduce(me.all, "k", x.data(), x.data(), x.size(), UNJAM_FLOAT32, UNJAM_SUM,
                               nullptr, &request));
    me.wait(request, "all-reduce");
    straight += into_outputs(me.context);
  });
  EXPECT_EQ(straight.load(), 0u);
}

TEST(MemRegister, ChecksItsArguments) {
  unjamConfig_t config = default_config();
  config.heap_bytes = 8192;
  unjamContext_t c[2];
  UNJAM_CHECK(unjamInitAll(c, 2, &config));
  std::vector<unsigned char> x(4096);
  EXPECT_EQ(unjamMemRegister(nullptr, x.data(), 1), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemDeregister(nullptr, x.data()), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemRegister(c[0], nullptr, 1), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemRegister(c[0], nullptr, SIZE_MAX), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemRegister(c[0], x.data(), 0), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemRegister(c[0], x.data(), SIZE_MAX), UNJAM_ERROR_INVALID_ARGUMENT);
  void* heap = nullptr;
  UNJAM_CHECK(unjamMemAlloc(c[0], 4096, &heap));
  EXPECT_EQ(unjamMemRegister(c[0], static_cast<unsigned char*>(heap) + 100, 100),
            UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(unjamGetLastError()).find("in this rank's heap"), std::string::npos);
  UNJAM_CHECK(unjamMemFree(c[0], heap));
  UNJAM_CHECK(unjamMemRegister(c[0], x.data(), x.size()));
  EXPECT_EQ(unjamMemRegister(c[0], x.data() + 10, 10), UNJAM_ERROR_INVALID_USAGE);
  UNJAM_CHECK(unjamMemRegister(c[1], x.data(), x.size()));  // each rank has its own
  EXPECT_EQ(windows(c[0])["registered"].number, 1);
  EXPECT_EQ(windows(c[0])["bytes"].number, 4096);
  EXPECT_EQ(windows(c[0])["peers_mapped"].number, 1);
  EXPECT_EQ(unjamMemDeregister(c[0], x.data() + 10), UNJAM_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(unjamMemDeregister(c[0], x.data()), UNJAM_SUCCESS);
  EXPECT_EQ(unjamMemDeregister(c[0], x.data()), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_EQ(windows(c[1])["peers_mapped"].number, 0);
  EXPECT_EQ(unjamDestroy(c[1]), UNJAM_SUCCESS) << "with a window that is left";
  EXPECT_EQ(windows(c[0])["peers_mapped"].number, 0);
  UNJAM_CHECK(unjamAbort(c[0]));
  EXPECT_EQ(unjamMemRegister(c[0], x.data(), 1), UNJAM_ERROR_ABORTED);
  EXPECT_EQ(unjamDestroy(c[0]), UNJAM_SUCCESS);
}

// As many as there can be, and once more: places are given again, with numbers of their own.
TEST(MemRegister, PlacesAreGivenAgain) {
  Job job(2);
  std::vector<unsigned char> x(2 * kWindows * 64);
  for (int round = 0; round < 3; ++round) {
    for (std::uint32_t i = 0; i < kWindows; ++i) {
      UNJAM_CHECK(unjamMemRegister(job.context(0), x.data() + i * 64, 64));
    }
    EXPECT_EQ(unjamMemRegister(job.context(0), x.data() + kWindows * 64, 64),
              UNJAM_ERROR_RESOURCES);
    EXPECT_NE(std::string(unjamGetLastError()).find("unjamMemDeregister"), std::string::npos);
    EXPECT_EQ(windows(job.context(1))["peers_mapped"].number, kWindows);
    for (std::uint32_t i = 0; i < kWindows; ++i) {
      UNJAM_CHECK(unjamMemDeregister(job.context(0), x.data() + i * 64));
    }
  }
}

TEST(MemRegister, NotWhileACallIsPending) {
  Job job(2);
  std::vector<float> x(50'000, 1.0f), y(x.size(), 2.0f), z(x.size(), 3.0f);
  const auto call = [&](int rank, const char* key, std::vector<float>& data) {
    unjamRequest_t request = nullptr;
    UNJAM_CHECK(unjamAllReduce(job.all(rank), key, data.data(), data.data() + 40'000, 10'000,
                               UNJAM_FLOAT32, UNJAM_SUM, nullptr, &request));
    return request;
  };
  for (std::vector<float>* data : {&x, &y}) {
    UNJAM_CHECK(unjamMemRegister(job.context(0), data->data(), 4 * data->size()));
  }
  // Of a later use the output waits on the host.
  unjamRequest_t of_0[] = {call(0, "k", x), call(0, "k", x)};
  EXPECT_EQ(unjamMemDeregister(job.context(0), x.data()), UNJAM_ERROR_INVALID_USAGE);
  const std::string said = unjamGetLastError();
  EXPECT_NE(said.find("memory was to be deregistered with 2 invocation(s) pending, among them "
                      "key 'k'"),
            std::string::npos)
      << said;
  EXPECT_EQ(windows(job.context(0))["registered"].number, 2) << "nothing has changed";
  UNJAM_CHECK(unjamMemDeregister(job.context(0), y.data()));
  wait_ok(job.context(1), call(1, "k", z), "rank 1");
  wait_ok(job.context(0), of_0[0], "rank 0");
  EXPECT_EQ(unjamMemDeregister(job.context(0), x.data()), UNJAM_ERROR_INVALID_USAGE);
  wait_ok(job.context(1), call(1, "k", z), "rank 1");
  wait_ok(job.context(0), of_0[1], "rank 0");
  EXPECT_EQ(unjamMemDeregister(job.context(0), x.data()), UNJAM_SUCCESS) << unjamGetLastError();
  EXPECT_EQ(x[40'000], 4.0f);
}

TEST(MemRegister, SaysThatPeersMayStillStore) {
  Job job(2);
  std::vector<float> x(50'000, 1.0f), y(x.size(), 1.0f);
  for (int r = 0; r < 2; ++r) {
    UNJAM_CHECK(unjamMemRegister(job.context(r), r == 0 ? x.data() : y.data(), 4 * x.size()));
  }
  const auto call = [&](int rank, std::size_t count) {
    unjamRequest_t request = nullptr;
    float* const data = rank == 0 ? x.data() : y.data();
    UNJAM_CHECK(unjamAllReduce(job.all(rank), "k", data, data, count, UNJAM_FLOAT32, UNJAM_SUM,
                               nullptr, &request));
    return request;
  };
  unjamRequest_t of_0 = call(0, 50'000), of_1 = call(1, 49'999);
  wait_error(job.context(0), of_0, UNJAM_ERROR_MISMATCH, "rank 0");
  wait_error(job.context(1), of_1, UNJAM_ERROR_MISMATCH, "rank 1");
  EXPECT_EQ(windows(job.context(0))["retired"].number, 1);
  EXPECT_EQ(unjamMemDeregister(job.context(0), x.data()), UNJAM_ERROR_MISMATCH);
  const std::string said = unjamGetLastError();
  EXPECT_NE(said.find("no longer registered"), std::string::npos) << said;
  EXPECT_NE(said.find("may still store there"), std::string::npos) << said;
  EXPECT_NE(said.find("ranks disagree"), std::string::npos) << said;
  EXPECT_EQ(unjamMemDeregister(job.context(0), x.data()), UNJAM_ERROR_INVALID_USAGE);
  EXPECT_EQ(windows(job.context(0))["registered"].number, 0);
  EXPECT_EQ(windows(job.context(0))["retired"].number, 1);
  // The other rank's call was refused before its engine had it: nobody was invited.
  EXPECT_EQ(unjamMemDeregister(job.context(1), y.data()), UNJAM_SUCCESS) << unjamGetLastError();
}

// Registering beside calls, by threads of their own.
TEST(MemRegister, BesideCalls) {
  constexpr int kRanks = 2, kRounds = kSanitized ? 20 : 100;
  Job job(kRanks);
  std::atomic<int> running{kRanks};
  std::vector<std::pair<int, std::function<void(Rank&)>>> bodies;
  std::vector<std::vector<float>> buffers(kRanks, std::vector<float>(60'000));
  for (int r = 0; r < kRanks; ++r) {
    bodies.emplace_back(r, [&](Rank& me) {
      std::vector<float>& x = buffers[static_cast<std::size_t>(me.rank)];
      for (int i = 0; i < kRounds; ++i) {
        std::fill(x.begin(), x.end(), 1.0f);
        unjamRequest_t request = nullptr;
        UNJAM_CHECK(unjamAllReduce(me.all, "k", x.data(), x.data(), x.size(), UNJAM_FLOAT32,
                                   UNJAM_SUM, nullptr, &request));
        me.wait(request, "all-reduce");
        if (std::count(x.begin(), x.end(), 2.0f) != static_cast<std::ptrdiff_t>(x.size())) {
          fail("wrong sums");
        }
      }
      --running;
    });
    bodies.emplace_back(r, [&](Rank& me) {
      std::vector<float>& x = buffers[static_cast<std::size_t>(me.rank)];
      while (running.load() != 0) {
        UNJAM_CHECK(unjamMemRegister(me.context, x.data(), 4 * x.size()));
        while (unjamMemDeregister(me.context, x.data()) != UNJAM_SUCCESS) {
          std::this_thread::yield();  // a call is pending
        }
      }
    });
  }
  job.run_threads(bodies);
}

}  // namespace
}  // namespace unjam_test
