// A CUDA device as the runtime sees it (CudaDriver, StreamDaemon), without CUDA: what the runtime
// does about streams can be tested on the host.
//
// Its streams hold so much; who queues something in a full one waits for room, as in CUDA. Its
// engines move no data: an invocation is complete when all members' have begun. A call in a stream
// begins when it is first there, one beside streams when its mark has come, both when the uses of
// the key in front are complete. Which stream is looked at next is drawn from a seed.
//
// It watches what the runtime owes an engine: that uses of a key are queued in their order, the
// first with the key's state, and the later ones without.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/unlocked.h"
#include "engine/cuda_driver.h"
#include "tests/support/job.h"
#include "tests/support/mapped_arena.h"

namespace unjam_test {

class ScriptedDevice : public unjam::CudaDriver {
 public:
  // `room`: what a stream holds.
  explicit ScriptedDevice(std::size_t room, std::uint64_t seed = base_seed())
      : room_(room), random_(seed), thread_([this] { run(); }) {}
  ~ScriptedDevice() override {
    {
      const std::lock_guard lock(mutex_);
      over_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  ScriptedDevice(const ScriptedDevice&) = delete;
  ScriptedDevice& operator=(const ScriptedDevice&) = delete;

  // A handle for unjamCallOptions_t.
  void* create_stream() {
    const std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<Stream>());
    return streams_.back().get();
  }
  // Threads that wait for room in it.
  int held_up(void* stream) {
    const std::lock_guard lock(mutex_);
    return static_cast<Stream*>(stream)->held_up;
  }
  // The next so many requests to queue something in it are refused, or there is no memory for them.
  void refuse(void* stream, int times, bool no_memory = false) {
    const std::lock_guard lock(mutex_);
    static_cast<Stream*>(stream)->refusals = times;
    static_cast<Stream*>(stream)->no_memory = no_memory;
  }

  // How many devices there are, one unless said; and two of them of which neither reaches the
  // other's memory.
  void devices_are(int count) { devices_ = count; }
  void keep_apart(int device, int other) { apart_ = {device, other}; }
  // Engines fail to start, after they have made what the host looks at, and let go of it again.
  void refuse_to_start(bool refuse) { refuses_ = refuse; }
  // How long whoever tells an engine that a peer is gone is held up, while the engine acts on it.
  void hold_up_who_tells(unsigned us) { slow_us_ = us; }
  // What lines_come_whole() is to answer; and with which options ranks have started.
  void links_are(bool whole_lines) { whole_lines_ = whole_lines; }
  std::vector<unjam::CudaRankOptions> started() {
    const std::lock_guard lock(mutex_);
    return started_;
  }

  // ---- CudaDriver ----

  int devices(std::string&) override { return devices_; }
  int current() override { return 0; }
  std::string name(int) override { return "scripted"; }
  int sms(int) override { return 0; }
  bool lines_come_whole() override { return whole_lines_; }
  std::unique_ptr<unjam::DeviceArena> create_arena(int device, std::uint64_t bytes, std::uint64_t,
                                                   std::string&) override {
    return std::make_unique<Memory>(*this, device, bytes);
  }
  std::unique_ptr<unjam::DeviceArena> adopt_arena(int, int fd, std::uint64_t, std::uint64_t,
                                                  std::string& error) override {
    close(fd);
    error = kOneProcess;
    return nullptr;
  }
  bool register_host(void*, std::uint64_t, std::string&) override { return true; }
  void unregister_host(void*) override {}
  std::uint64_t engine_bytes(const unjam::CudaRankOptions& options) override {
    return options.shape.ranks;
  }
  bool check_window(int, const void*, std::uint64_t, std::string&) override { return true; }
  bool name_window(int, const void*, unjam::WindowName&, std::string& error) override {
    error = kOneProcess;
    return false;
  }
  bool reach(int, int, std::string&) override { return true; }
  unsigned char* open_window(int, const unjam::WindowName&, std::string& error) override {
    error = kOneProcess;
    return nullptr;
  }
  void close_window(int, const unjam::WindowName&) override {}
  std::unique_ptr<unjam::StreamDaemon> start(const unjam::CudaRankOptions& options,
                                             unjam::RankState& copy, std::string& error) override {
    if (refuses_) {
      const std::vector<std::uint64_t> words(8, ~std::uint64_t{0});
      copy.cq.words = const_cast<std::uint64_t*>(words.data());
      copy.cq.capacity = static_cast<std::uint32_t>(words.size());
      error = "loading kernels: none for this device";
      return nullptr;
    }
    {
      const std::lock_guard lock(mutex_);
      started_.push_back(options);
    }
    return std::make_unique<Engine>(*this, options, copy);
  }

 private:
  static constexpr const char* kOneProcess = "a scripted device is one process's";
  class Engine;

  struct Call {
    std::uint64_t n = 0, ticket = 0, serial = 0;
    unjam::KeyState* key = nullptr;  // nullptr: a command
    std::optional<unjam::KeyState> fresh;
    std::vector<std::uint16_t> members;
    std::uint16_t slot = 0;
    // Of a group of one: what is copied.
    const void* from = nullptr;
    void* to = nullptr;
    std::uint64_t bytes = 0;
    std::shared_ptr<bool> after;  // is to be true before
  };

  struct Stream {
    struct Item {
      enum What : std::uint8_t { kCall, kCopy, kMark, kWait, kEvent } what = kCall;
      Engine* engine = nullptr;
      Call call;  // of others than calls: slot, and ticket or serial; of an event what becomes true
    };
    std::deque<Item> items;
    int held_up = 0;
    int refusals = 0;
    bool no_memory = false;
  };

  class Memory : public MappedArena {
   public:
    Memory(const ScriptedDevice& machine, int device, std::uint64_t bytes)
        : MappedArena(bytes, kOneProcess), machine_(machine), device_(device) {}
    bool map_for(int device, std::uint64_t, std::string& error) override {
      const auto [one, other] = machine_.apart_;
      if (std::minmax(device, device_) != std::minmax(one, other)) return true;
      error =
          "no way from device " + std::to_string(device) + " to device " + std::to_string(device_);
      return false;
    }

   private:
    const ScriptedDevice& machine_;
    const int device_;
  };

  class Engine : public unjam::StreamDaemon {
   public:
    Engine(ScriptedDevice& device, const unjam::CudaRankOptions& options, unjam::RankState& copy)
        : device_(device),
          rank_(static_cast<std::uint16_t>(options.rank)),
          lanes_(options.shape.lanes),
          copy_(copy),
          marks_(options.slots),
          completed_(options.slots) {
      const std::lock_guard lock(device_.mutex_);
      device_.engines_.push_back(this);
    }
    ~Engine() override { stop(); }
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    void stop() override {
      const std::lock_guard lock(device_.mutex_);
      std::erase(device_.engines_, this);
      for (const auto& stream : device_.streams_) {
        std::erase_if(stream->items, [this](const Stream::Item& i) { return i.engine == this; });
      }
      device_.room_came_.notify_all();
    }

    void submit(const unjam::Invocation& inv, const unjam::KeyState* fresh) override {
      const std::lock_guard lock(device_.mutex_);
      const Call call = call_of(inv, fresh);
      come(call);
      beside_.push_back(call);
      device_.changed_.notify_all();
    }
    void cancel(std::uint16_t slot) override {
      unjam::store_release<std::uint32_t>(copy_.cancelled[slot], 1);
      ring_all();
    }
    void peer_gone(int rank) override {
      {
        const std::lock_guard lock(device_.mutex_);
        gone_.insert(static_cast<std::uint16_t>(rank));
        device_.changed_.notify_all();
      }
      usleep(device_.slow_us_);
    }
    void ring(std::uint32_t) override { ring_all(); }
    void ring_all() override {
      const std::lock_guard lock(device_.mutex_);
      device_.changed_.notify_all();
    }
    void wait(unjam::EventCount& completions, std::uint32_t epoch,
              std::int64_t timeout_us) override {
      const std::uint64_t begun = unjam::monotonic_ns();
      const std::uint64_t h = unjam::load_relaxed(copy_.cq.head);
      const auto due = [&] {
        return unjam::load_acquire(copy_.cq.words[h % copy_.cq.capacity]) >> 24 == h + 1;
      };
      while (!due() && completions.epoch() == epoch &&
             (timeout_us < 0 ||
              unjam::monotonic_ns() - begun < static_cast<std::uint64_t>(timeout_us) * 1000)) {
        usleep(100);
      }
    }
    bool synchronize(std::int64_t) override { return true; }

    unjam::KeyState* take_key(unjam::LaneKey*& lanes) override {
      keys_.push_back(std::make_unique<DeviceKey>());
      keys_.back()->lanes.resize(lanes_);
      lanes = keys_.back()->lanes.data();
      return &keys_.back()->state;
    }
    // Never given out again: what still knows it shows.
    void return_key(unjam::KeyState*) override {}

    bool queue_mark(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                    std::uint64_t ticket, bool& queued, std::string& error) override {
      const unjam::Unlocked unlocked(lock);
      Stream& s = *static_cast<Stream*>(stream);
      {
        const std::lock_guard device(device_.mutex_);
        queued = !s.items.empty();
      }
      Call call;
      call.slot = slot;
      call.ticket = ticket;
      // (Empty, it may still refuse.)
      if (!queued) return !device_.refuses(s, error);
      return device_.queue(s, {Stream::Item::kMark, this, call}, error);
    }
    unjam::LowerLimits lower_limits() const override { return {512, 32, true, 20, 1 << 16}; }
    bool queue_call(std::unique_lock<std::mutex>& lock, void* stream, const unjam::Invocation& inv,
                    const unjam::KeyState* fresh, std::string& error) override {
      const Call call = call_of(inv, fresh);
      const unjam::Unlocked unlocked(lock);
      return device_.queue(*static_cast<Stream*>(stream), {Stream::Item::kCall, this, call}, error);
    }
    bool queue_copy(std::unique_lock<std::mutex>& lock, void* stream, bool in_stream,
                    const unjam::Invocation& inv, std::uint64_t bytes, void* after,
                    std::string& error) override {
      Call call = call_of(inv, nullptr);
      call.from = inv.input;
      call.to = inv.output;
      call.bytes = bytes;
      if (after != nullptr) call.after = *static_cast<std::shared_ptr<bool>*>(after);
      const unjam::Unlocked unlocked(lock);
      if (!in_stream) {
        const std::lock_guard device(device_.mutex_);
        copies_.push_back(call);
        device_.changed_.notify_all();
        return true;
      }
      return device_.queue(*static_cast<Stream*>(stream), {Stream::Item::kCopy, this, call}, error);
    }
    std::shared_ptr<void> note(std::unique_lock<std::mutex>& lock, void* stream,
                               std::string& error) override {
      const unjam::Unlocked unlocked(lock);
      auto reached = std::make_shared<bool>(false);
      Call call;
      call.after = reached;
      if (!device_.queue(*static_cast<Stream*>(stream), {Stream::Item::kEvent, this, call},
                         error)) {
        return nullptr;
      }
      return std::make_shared<std::shared_ptr<bool>>(std::move(reached));
    }
    bool queue_wait(std::unique_lock<std::mutex>& lock, void* stream, std::uint16_t slot,
                    std::uint64_t serial, std::string& error) override {
      const unjam::Unlocked unlocked(lock);
      Call call;
      call.slot = slot;
      call.serial = serial;
      return device_.queue(*static_cast<Stream*>(stream), {Stream::Item::kWait, this, call}, error);
    }
    void refresh(unjam::RankState&) override {}
    std::string footprint() const override { return "{}"; }

    // With the device's lock. Whether it is over, or something is that is beside streams.
    bool ends(const Stream::Item& item) {
      if (item.what == Stream::Item::kCall) return ends(item.call);
      if (item.what == Stream::Item::kCopy) return copies(item.call);
      if (item.what == Stream::Item::kWait) return completed_[item.call.slot] >= item.call.serial;
      if (item.what == Stream::Item::kEvent) return *item.call.after = true;
      std::uint64_t& mark = marks_[item.call.slot];
      mark = std::max(mark, item.call.ticket);
      return true;
    }
    // Whether it is the next use of its key: with the device's lock, as it comes there.
    void come(const Call& call) {
      if (call.key == nullptr) return;
      if (call.members.size() == 1) device_.say("the engine has got a call of a group of one");
      if (call.fresh) {
        if (known_.count(call.key) != 0) device_.say("a key was set up twice");
        known_[call.key] = {call.fresh->tag, call.fresh->done, call.fresh->done};
      }
      const auto key = known_.find(call.key);
      const std::string use = "use " + std::to_string(call.n) + " of a key ";
      if (key == known_.end()) return device_.say(use + "that was not set up");
      if (call.n != key->second.queued) {
        device_.say(use + "has come where " + std::to_string(key->second.queued) + " is next");
      }
      ++key->second.queued;
    }
    bool ends_beside() {
      if (!copies_.empty() && copies(copies_.front())) {
        copies_.pop_front();
        return true;
      }
      for (auto it = beside_.begin(); it != beside_.end(); ++it) {
        if (!ends(*it)) continue;
        beside_.erase(it);
        return true;
      }
      return false;
    }

   private:
    struct DeviceKey {
      unjam::KeyState state;
      std::vector<unjam::LaneKey> lanes;
    };
    struct Known {
      std::uint64_t tag = 0, queued = 0, done = 0;
    };

    static Call call_of(const unjam::Invocation& inv, const unjam::KeyState* fresh) {
      Call c;
      c.slot = inv.slot;
      c.serial = inv.serial;
      c.key = inv.key;
      if (inv.key == nullptr) return c;
      c.n = inv.n;
      c.ticket = inv.ticket;
      c.members.assign(inv.members, inv.members + inv.group_size);
      if (fresh != nullptr) c.fresh = *fresh;
      return c;
    }
    // With the device's lock.
    bool ends(const Call& call) {
      if (call.key == nullptr) return finish(call, unjam::Outcome::kDone);
      Known& key = known_[call.key];
      const bool cancelled = unjam::load_acquire(copy_.cancelled[call.slot]) != 0 ||
                             std::any_of(call.members.begin(), call.members.end(),
                                         [this](auto m) { return gone_.count(m) != 0; });
      if (call.n != key.done) return false;
      if (cancelled) return finish(call, unjam::Outcome::kCancelled);
      if (call.ticket != 0 && marks_[call.slot] != call.ticket) return false;
      std::set<std::uint16_t>& begun = device_.begun_[{key.tag, call.n}];
      begun.insert(rank_);
      return begun.size() == call.members.size() && finish(call, unjam::Outcome::kDone);
    }
    bool copies(const Call& call) {
      if (call.after != nullptr && !*call.after) return false;
      if (call.members.size() != 1) device_.say("a call of several ranks was made a copy");
      if (call.bytes != 0) std::memcpy(call.to, call.from, call.bytes);
      completed_[call.slot] = call.serial;
      copy_.cq.push({call.slot, unjam::Outcome::kDone});
      return true;
    }
    bool finish(const Call& call, unjam::Outcome outcome) {
      if (call.key != nullptr) known_[call.key].done = call.n + 1;
      completed_[call.slot] = call.serial;
      copy_.cq.push({call.slot, outcome});
      return true;
    }

    ScriptedDevice& device_;
    const std::uint16_t rank_;
    const std::uint32_t lanes_;
    unjam::RankState& copy_;
    std::vector<std::uint64_t> marks_, completed_;  // by slot
    std::vector<std::unique_ptr<DeviceKey>> keys_;  // guarded by the runtime's lock
    std::map<const unjam::KeyState*, Known> known_;
    std::deque<Call> beside_, copies_;
    std::set<std::uint16_t> gone_;
  };

  // At once, since who waits for what went wrong may wait for long.
  void say(const std::string& what) {
    if (!std::exchange(wrong_, true)) ADD_FAILURE() << what;
  }

  bool refuses(Stream& stream, std::string& error) {
    const std::lock_guard lock(mutex_);
    if (stream.refusals == 0) return false;
    --stream.refusals;
    if (stream.no_memory) throw std::bad_alloc();
    error = "the stream takes nothing";
    return true;
  }
  bool queue(Stream& stream, Stream::Item item, std::string& error) {
    if (refuses(stream, error)) return false;
    std::unique_lock lock(mutex_);
    ++stream.held_up;
    room_came_.wait(lock, [&] { return stream.items.size() < room_; });
    --stream.held_up;
    if (item.what == Stream::Item::kCall) item.engine->come(item.call);
    stream.items.push_back(std::move(item));
    changed_.notify_all();
    return true;
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (!over_) {
      if (step()) {
        const unjam::Unlocked unlocked(lock);  // others want it, too
      } else {
        changed_.wait_for(lock, std::chrono::milliseconds(1));  // also: what has begun
      }
    }
  }
  // Of streams and engines, the first behind one drawn of which something ends.
  bool step() {
    const std::size_t places = streams_.size() + engines_.size();
    if (places == 0) return false;
    random_ = mix(random_);
    for (std::size_t i = 0; i < places; ++i) {
      const std::size_t at = (random_ + i) % places;
      if (at >= streams_.size()) {
        if (engines_[at - streams_.size()]->ends_beside()) return true;
        continue;
      }
      std::deque<Stream::Item>& items = streams_[at]->items;
      if (items.empty() || !items.front().engine->ends(items.front())) continue;
      items.pop_front();
      room_came_.notify_all();
      return true;
    }
    return false;
  }

  const std::size_t room_;
  std::mutex mutex_;
  std::condition_variable changed_, room_came_;
  std::vector<std::unique_ptr<Stream>> streams_;
  std::vector<Engine*> engines_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::set<std::uint16_t>> begun_;
  std::uint64_t random_;
  bool wrong_ = false;
  bool over_ = false;
  int devices_ = 1;
  std::pair<int, int> apart_{-1, -1};
  std::atomic<bool> refuses_{false};
  std::atomic<unsigned> slow_us_{0};
  std::atomic<bool> whole_lines_{false};
  std::vector<unjam::CudaRankOptions> started_;
  std::thread thread_;
};

}  // namespace unjam_test
