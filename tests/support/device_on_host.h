// A CUDA device as the runtime sees it (CudaDriver, StreamDaemon, BoxMover), whose memory is the
// host's and whose engines are HostDaemon's: what the runtime does of tensors on GPUs can be tested
// on the host, with data.
//
// Streams are lazy: copies of boxes happen when something is queued behind them that makes them
// known, which is a mark or a word. So what does not stand behind them finds that they have not
// happened.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/atomics.h"
#include "base/clock.h"
#include "device/host/boxes.h"
#include "device/host/host_daemon.h"
#include "engine/cuda_driver.h"
#include "tests/support/job.h"
#include "tests/support/mapped_arena.h"

namespace unjam_test {

// Makes one copy of a box, unit by unit.
inline void make_copy(const unjam::BoxCopy& box) {
  for (std::uint64_t r = 0; r < box.rows; ++r) {
    const std::uint8_t* from = box.from;
    std::uint8_t* to = box.to;
    std::uint64_t rest = r;
    for (int d = box.dims; d-- > 0;) {
      const auto index = static_cast<std::int64_t>(rest % box.size[d]);
      rest /= box.size[d];
      from += index * box.from_stride[d];
      to += index * box.to_stride[d];
    }
    for (std::uint64_t i = 0; i < box.row; ++i) {
      const auto step = static_cast<std::int64_t>(i);
      std::uint8_t* const source = const_cast<std::uint8_t*>(from) + step * box.from_step;
      std::uint8_t* const target = to + step * box.to_step;
      if (box.unit != 0) {
        if ((reinterpret_cast<std::uintptr_t>(source) | reinterpret_cast<std::uintptr_t>(target)) %
                box.unit !=
            0) {
          fail("a unit is not aligned");
        }
        std::memcpy(target, source, box.unit);
      } else {
        unjam::copy_box({source, box.from_dtype, {}}, {target, box.to_dtype, {}}, {});
      }
    }
  }
}

class DeviceOnHost : public unjam::CudaDriver {
 public:
  // A stream of the user's: past what it has, or not.
  struct Stream {
    std::atomic<bool> past{false};
    std::atomic<int> waits{0};  // that were queued
    std::mutex mutex;
    const std::uint64_t* word = nullptr;
    std::uint64_t value = 0;
    // Whether what was queued behind the latest wait could go on.
    bool goes_on() {
      const std::lock_guard lock(mutex);
      return word == nullptr || unjam::load_acquire(*word) >= value;
    }
  };
  // Memory that no kernel reaches.
  void unreachable(const void* memory) { unreachable_ = memory; }
  std::uint64_t added() const { return added_; }
  std::uint64_t copied() const { return copied_; }

  int devices(std::string&) override { return 1; }
  int current() override { return 0; }
  std::string name(int) override { return "a host"; }
  int sms(int) override { return 0; }
  bool lines_come_whole() override { return false; }
  std::unique_ptr<unjam::DeviceArena> create_arena(int, std::uint64_t bytes, std::uint64_t,
                                                   std::string&) override {
    return std::make_unique<MappedArena>(bytes, kOneProcess);
  }
  std::unique_ptr<unjam::DeviceArena> adopt_arena(int, int fd, std::uint64_t, std::uint64_t,
                                                  std::string& error) override {
    close(fd);
    error = kOneProcess;
    return nullptr;
  }
  bool register_host(void*, std::uint64_t, std::string&) override { return true; }
  void unregister_host(void*) override {}
  std::uint64_t engine_bytes(const unjam::CudaRankOptions&) override { return 0; }
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
                                             unjam::RankState& copy, std::string&) override {
    return std::make_unique<Engine>(*this, options, copy);
  }

 private:
  static constexpr const char* kOneProcess = "a device on the host is one process's";

  class Boxes : public unjam::BoxMover {
   public:
    explicit Boxes(DeviceOnHost& device) : device_(device), pinned_(kPinnedBytes + kAlign) {}
    void* stream() override { return this; }
    bool copy(const std::vector<unjam::BoxCopy>& boxes, std::string&) override {
      const std::lock_guard lock(mutex_);
      queue_.emplace_back([this, boxes] {
        for (const unjam::BoxCopy& box : boxes) make_copy(box);
        device_.copied_ += boxes.size();
      });
      return true;
    }
    bool clear(void* memory, std::uint64_t bytes, std::string&) override {
      const std::lock_guard lock(mutex_);
      queue_.emplace_back([memory, bytes] { std::memset(memory, 0, bytes); });
      return true;
    }
    bool tell(std::uint64_t* word, std::uint64_t value, std::string&) override {
      drain();
      unjam::store_release(*word, value);
      return true;
    }
    bool wait_in(void* stream, const std::uint64_t* word, std::uint64_t value,
                 std::string&) override {
      auto* const s = static_cast<Stream*>(stream);
      const std::lock_guard lock(s->mutex);
      s->word = word;
      s->value = value;
      ++s->waits;
      return true;
    }
    std::shared_ptr<void> note(void* stream, std::string&) override {
      return std::make_shared<Stream*>(static_cast<Stream*>(stream));
    }
    bool is_past(void* noted, bool& past, std::string&) override {
      past = (*static_cast<Stream**>(noted))->past;
      return true;
    }
    unsigned char* pinned() override {
      const auto at = reinterpret_cast<std::uintptr_t>(pinned_.data()) % kAlign;
      return pinned_.data() + (at == 0 ? 0 : kAlign - at);
    }
    unsigned char* add(std::uint64_t bytes, std::string&) override {
      const std::lock_guard lock(mutex_);
      device_.added_ += bytes;
      added_.push_back(std::make_unique<MappedArena>(bytes, kOneProcess));
      return added_.back()->data();
    }
    bool reaches(const void* memory, std::string& error) override {
      if (memory != device_.unreachable_.load()) return true;
      error = "is in host memory";
      return false;
    }
    void drain() {
      std::vector<std::function<void()>> now;
      const std::lock_guard lock(mutex_);  // (what is behind comes later)
      std::swap(now, queue_);
      for (const auto& what : now) what();
    }

   private:
    static constexpr std::uintptr_t kAlign = 4096;
    DeviceOnHost& device_;
    std::vector<unsigned char> pinned_;
    std::mutex mutex_;
    std::vector<std::function<void()>> queue_;
    std::vector<std::unique_ptr<MappedArena>> added_;
  };

  class Engine : public unjam::StreamDaemon {
   public:
    Engine(DeviceOnHost& device, const unjam::CudaRankOptions& options, unjam::RankState& copy)
        : lanes_(options.shape.lanes), copy_(copy), boxes_(device) {
      unjam::HostDaemonOptions host;
      host.look_at_wishes = options.look_at_wishes;
      host_ = std::make_unique<unjam::HostDaemon>(copy, completions_, host);
    }

    void stop() override { host_->stop(); }
    void submit(const unjam::Invocation& inv, const unjam::KeyState* fresh) override {
      if (fresh != nullptr) {
        unjam::LaneKey* const lanes = inv.key->lanes;
        std::copy_n(fresh->lanes, lanes_, lanes);
        *inv.key = *fresh;
        inv.key->lanes = lanes;
      }
      host_->submit(inv, nullptr);
    }
    void cancel(std::uint16_t slot) override { host_->cancel(slot); }
    void ring(std::uint32_t lane) override { host_->ring(lane); }
    void ring_all() override { host_->ring_all(); }
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
    bool synchronize(std::int64_t timeout_us) override { return host_->synchronize(timeout_us); }

    unjam::KeyState* take_key(unjam::LaneKey*& lanes) override {
      keys_.push_back(std::make_unique<DeviceKey>());
      keys_.back()->lanes.resize(lanes_);
      keys_.back()->state.lanes = lanes = keys_.back()->lanes.data();
      return &keys_.back()->state;
    }
    void return_key(unjam::KeyState*) override {}
    bool queue_mark(std::unique_lock<std::mutex>&, void* stream, std::uint16_t, std::uint64_t,
                    bool& queued, std::string&) override {
      if (stream == boxes_.stream()) boxes_.drain();
      queued = false;
      return true;
    }
    unjam::LowerLimits lower_limits() const override { return {512, 32, true, 20, 1 << 16}; }
    bool queue_call(std::unique_lock<std::mutex>&, void*, const unjam::Invocation&,
                    const unjam::KeyState*, std::string& error) override {
      error = "a device on the host has no kernels";
      return false;
    }
    bool queue_copy(std::unique_lock<std::mutex>&, void*, bool, const unjam::Invocation& inv,
                    std::uint64_t bytes, void*, std::string&) override {
      if (bytes != 0) std::memcpy(inv.output, inv.input, bytes);
      copy_.cq.push({inv.slot, unjam::Outcome::kDone});
      return true;
    }
    std::shared_ptr<void> note(std::unique_lock<std::mutex>&, void*, std::string&) override {
      return std::make_shared<int>(0);
    }
    bool queue_wait(std::unique_lock<std::mutex>&, void*, std::uint16_t, std::uint64_t,
                    std::string&) override {
      return true;
    }
    unjam::BoxMover* boxes(std::string&) override { return &boxes_; }
    void refresh(unjam::RankState&) override {}
    std::string footprint() const override { return "{}"; }

   private:
    struct DeviceKey {
      unjam::KeyState state;
      std::vector<unjam::LaneKey> lanes;
    };
    const std::uint32_t lanes_;
    unjam::RankState& copy_;
    unjam::EventCount completions_;
    Boxes boxes_;
    std::vector<std::unique_ptr<DeviceKey>> keys_;  // guarded by the runtime's lock
    std::unique_ptr<unjam::HostDaemon> host_;
  };

  std::atomic<const void*> unreachable_{nullptr};
  std::atomic<std::uint64_t> added_{0}, copied_{0};
};

}  // namespace unjam_test
